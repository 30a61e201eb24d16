"""What `make validate` makes of the tools it runs, and when a stored file vouches for what the GPU runs."""

import copy
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import conftest
from tests.gpu import sanitize_cases
from tools import validate, variants
from tools.validate import KERNELS, LATENT, MODELS

CLEAN = {
    "digest": "d",
    "tests": {"passed": 3, "failed": 0, "skipped": 0, "failures": [], "skips": [], "exit_code": 0},
    "sanitizer": {tool: {"errors": 0, "exit_code": 0, "tail": []} for tool in validate.SANITIZERS},
    "benchmarks": {name: {"rows": [], "thresholds": []} for name in KERNELS.benchmarks["benchmarks"]},
}


def changed(*path, value):
    content = copy.deepcopy(CLEAN)
    inner = content
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return content


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (changed("digest", value="e"), "digest"),
        (changed("tests", "failures", value=["test_gemm::test_odd"]), "test_odd"),
        (changed("tests", "exit_code", value=2), "exit code 2"),
        (changed("tests", "passed", value=0), "0 GPU tests"),
        (changed("sanitizer", "racecheck", "errors", value=1), "racecheck"),
        (changed("sanitizer", "memcheck", "errors", value=None), "memcheck"),
        (changed("sanitizer", "synccheck", "exit_code", value=1), "synccheck"),
        (changed("benchmarks", "host", value={"error": "wrong result"}), "wrong result"),
        (changed("benchmarks", value={"quantize": {"rows": []}}), "benchmark host: missing"),
        ({"digest": "d", "tests": CLEAN["tests"], "sanitizer": CLEAN["sanitizer"]}, "benchmarks"),
        ({}, "digest"),
    ],
)
def test_problems_are_named(content, word):
    assert validate.problems(CLEAN, "d", KERNELS) == []
    assert any(word in problem for problem in validate.problems(content, "d", KERNELS))


def test_parts_are_merged_only_for_the_same_digest():
    stored = validate.merge({}, "d", "benchmarks", {"gemm": 1})
    both = validate.merge(stored, "d", "tests", {"passed": 1})
    assert list(both) == ["digest", "tests", "benchmarks"]
    assert validate.merge(both, "e", "tests", {"passed": 2}) == {"digest": "e", "tests": {"passed": 2}}


@pytest.mark.parametrize(
    ("output", "errors"),
    [
        ("========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n", 0),
        ("========= ERROR SUMMARY: 1 error\n", 1),
        ("========= RACECHECK SUMMARY: 3 hazards displayed (1 error, 2 warnings)\n", 3),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings) \n", 0),
        ("Segmentation fault\n", None),
    ],
)
def test_sanitizer_summaries(output, errors):
    assert validate.parse_sanitizer(output) == errors


def test_junit_counts(tmp_path):
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="a" name="good"/><testcase classname="b" name="good"/>'
        '<testcase classname="a" name="bad"><failure/></testcase>'
        '<testcase classname="a" name="broken"><error/></testcase>'
        '<testcase classname="a" name="left"><skipped/></testcase></testsuite></testsuites>'
    )
    result = validate.parse_junit(report)
    assert (result["passed"], result["failed"], result["skipped"]) == (2, 2, 1)
    assert result["failures"] == ["a::bad", "a::broken"]
    assert result["skips"] == ["a::left"]


def test_what_fails_beside_others_runs_again_alone(tmp_path):
    directory = tmp_path / "tests/gpu"
    directory.mkdir(parents=True)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    head = "import pathlib, pytest\npytestmark = pytest.mark.gpu\n"
    once = "def test_once(x):\n    seen = pathlib.Path(__file__).with_name('seen')\n    seen.open('a').write('x')\n"
    mark = "@pytest.mark.parametrize('x', [1.5])\n"
    (directory / "test_once.py").write_text(f"{head}{mark}{once}    assert len(seen.read_text()) > 1\n")
    (directory / "test_bad.py").write_text(f"{head}def test_good(): pass\ndef test_it(): assert False\n")
    result = validate.run_tests(tmp_path, KERNELS.tests)
    assert result["failures"] == ["tests.gpu.test_bad::test_it"]
    assert result["passed_alone"] == ["tests.gpu.test_once::test_once[1.5]"]
    assert (result["passed"], result["failed"], result["exit_code"]) == (2, 1, 1)
    content = {"digest": "d", "tests": result, "sanitizer": {}}
    assert validate.run_failures(tmp_path, content, "d") == content
    (directory / "test_bad.py").write_text(f"{head}def test_good(): assert False\ndef test_it(): pass\n")
    mended = validate.run_failures(tmp_path, content, "d")["tests"]
    assert (mended["passed"], mended["failed"], mended["exit_code"], mended["failures"]) == (3, 0, 0, [])
    assert mended["passed_alone"] == ["tests.gpu.test_bad::test_it", "tests.gpu.test_once::test_once[1.5]"]
    for stale in (content | {"digest": "other"}, {"digest": "d"}):
        with pytest.raises(SystemExit, match="--again needs tests"):
            validate.run_failures(tmp_path, stale, "d")
    (directory / "test_bad.py").write_text("import no_such_module\n")
    result = validate.run_tests(tmp_path, KERNELS.tests)
    assert result["failed"] == 1 and result["exit_code"]
    (directory / "test_bad.py").unlink()
    (directory / "seen").unlink()
    result = validate.run_tests(tmp_path, KERNELS.tests)
    assert (result["passed"], result["failed"], result["exit_code"], result["failures"]) == (1, 0, 0, [])


def test_processes_begin_with_different_gpus_and_see_all(monkeypatch, tmp_path):
    assert [conftest.own_gpu_first("0,1,2", f"gw{n}") for n in range(4)] == ["0,1,2", "1,2,0", "2,0,1", "0,1,2"]
    assert conftest.own_gpu_first("GPU-a", "gw3") == "GPU-a"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(validate.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(validate.os, "cpu_count", lambda: 4)
    directory = tmp_path / "tests/gpu"
    directory.mkdir(parents=True)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    (directory / "conftest.py").write_text("from tests.conftest import pytest_configure\n")
    monkeypatch.setenv("PYTHONPATH", str(validate.ROOT))
    one = "@pytest.mark.gpu\ndef test_{0}():\n    pathlib.Path('seen{0}').write_text({1})\n    time.sleep(1)\n"
    seen = "os.environ['PYTEST_XDIST_WORKER'] + os.environ['CUDA_VISIBLE_DEVICES']"
    lines = "".join(one.format(number, seen) for number in range(2))
    (directory / "test_seen.py").write_text(f"import os, pathlib, time, pytest\n{lines}")
    assert validate.run_tests(tmp_path, KERNELS.tests)["passed"] == 2
    assert {file.read_text() for file in tmp_path.glob("seen*")} == {"gw00,1", "gw11,0"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert validate.listed_gpus() == {}


def test_benchmarks_that_are_done_do_not_run_again(monkeypatch):
    ran, names = [], KERNELS.benchmarks["benchmarks"][:3]
    first, second, third = names

    def benchmark(name):
        return SimpleNamespace(run=lambda: ran.append(name) or {"rows": [name]})

    for name in names:
        monkeypatch.setitem(validate.BY_NAME, name, benchmark(name))
    done = {"date": "then", first: {"rows": ["then"]}, second: {"error": "it raised"}}
    results = validate.run_benchmarks(names, done=done)
    assert ran == [second, third]
    assert results == {first: {"rows": ["then"]}, second: {"rows": [second]}, third: {"rows": [third]}}
    assert validate.run_benchmarks(names) == {name: {"rows": [name]} for name in names}


@pytest.mark.parametrize("again", [True, False])
def test_benchmarks_of_other_versions_run_again(monkeypatch, tmp_path, again):
    given, path = [], tmp_path / "file.json"
    monkeypatch.setattr(validate, "require_gpu", lambda: None)
    monkeypatch.setattr(validate.torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(validate, "digest", lambda root, group: "d")
    monkeypatch.setitem(
        validate.PARTS, "benchmarks", lambda file, root, save, done: given.append(done) or CLEAN["benchmarks"]
    )
    arguments = [*(["--again"] if again else []), "--only", "benchmarks", "--out", str(path)]
    path.write_text(json.dumps(CLEAN))
    for driver in ("1", "1", "2"):
        monkeypatch.setattr(validate, "versions", lambda driver=driver: {"driver": driver})
        assert validate.main(arguments) == 0
        assert json.loads(path.read_text())["benchmarks"]["versions"] == {"driver": driver}
    assert [bool(done) for done in given] == [False, again, False]


def test_missed_thresholds_are_listed_with_their_limit():
    missed = {"name": "time", "value": 30.0, "limit": 25, "unit": "us", "passed": False}
    content = changed("benchmarks", "host", value={"rows": [], "thresholds": [missed, missed | {"passed": True}]})
    assert validate.missed_thresholds(content, KERNELS) == ["time: 30, limit 25 us"]


def test_every_recorded_benchmark_is_there_to_run():
    for name in (name for file in validate.FILES for names in file.benchmarks.values() for name in names):
        assert validate.BY_NAME[name].name == name


@pytest.mark.parametrize(
    ("group", "parts", "message"),
    [
        ("kernels", "tests,everything", "no part everything"),
        ("kernels", "tests,models", "models have a file of their own"),
        ("latent", "models", "no part models in group latent"),
        ("other", "tests", "invalid choice: 'other'"),
    ],
)
def test_parts_that_cannot_be_run_are_refused(group, parts, message, capsys):
    with pytest.raises(SystemExit):
        validate.main(["--group", group, "--only", parts])
    assert message in capsys.readouterr().err


def test_whole_models_have_a_file_of_their_own(monkeypatch, tmp_path):
    monkeypatch.setattr(validate, "ROOT", tmp_path)
    monkeypatch.setattr(validate, "require_gpu", lambda: None)
    monkeypatch.setattr(validate.torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(validate, "digest", lambda root, group: "d")
    monkeypatch.setattr(validate, "versions", dict)
    missed = {"name": "a step", "value": 3.0, "limit": 2, "unit": "ms", "passed": False}
    ran = []

    def benchmark(name):
        return SimpleNamespace(run=lambda: ran.append(name) or {"rows": [{}], "thresholds": [missed]})

    for name in MODELS.benchmarks["models"]:
        monkeypatch.setitem(validate.BY_NAME, name, benchmark(name))
    for again, count in (([], 2), (["--again"], 2), ([], 4)):
        assert validate.main([*again, "--only", "models"]) == 0
        assert len(ran) == count
    content = json.loads((tmp_path / "validation/models.json").read_text())
    assert content["digest"] == "d" and set(content["models"]) == {"date", "versions", "decode", "requests"}
    assert not (tmp_path / "validation/kernels.json").exists()
    del content["models"]["requests"]
    assert validate.problems(content, "d", MODELS) == ["benchmark requests: missing"]


def test_each_group_has_a_file_of_its_own(monkeypatch, tmp_path):
    assert {file.group for file in validate.FILES} == variants.GROUPS.keys() == sanitize_cases.CASES.keys()
    monkeypatch.setattr(validate, "ROOT", tmp_path)
    monkeypatch.setattr(validate, "require_gpu", lambda: None)
    monkeypatch.setattr(validate, "find_sanitizer", lambda: "")
    monkeypatch.setattr(validate, "digest", lambda root, group: f"of {group}")
    monkeypatch.setattr(validate, "versions", dict)
    ran = []
    failed = CLEAN["tests"] | {"failed": 1, "failures": ["test_x::test_y"], "exit_code": 1}
    monkeypatch.setattr(validate, "run_tests", lambda root, tests: ran.append(tests) or failed)
    monkeypatch.setattr(validate, "run_alone", lambda root, found: ran.append(found["failures"]) or CLEAN["tests"])
    monkeypatch.setattr(validate, "run_sanitizer", lambda root, group: ran.append(group) or CLEAN["sanitizer"])
    benchmark = SimpleNamespace(run=lambda: ran.append("benchmark") or {"rows": [{}]})
    names = LATENT.benchmarks["benchmarks"]
    for name in names:
        monkeypatch.setitem(validate.BY_NAME, name, benchmark)
    arguments = ["--group", "latent"]
    assert validate.main(arguments) == 1
    assert ran == [("tests/gpu/latent",), "latent", *["benchmark"] * len(names)]
    ran.clear()
    assert validate.main([*arguments, "--again"]) == 0
    assert validate.main([*arguments, "--again", "--only", "benchmarks"]) == 0
    assert ran == [["test_x::test_y"], []]
    (path,) = (tmp_path / "validation").iterdir()
    content = json.loads(path.read_text())
    assert path.name == "latent.json" and list(content) == ["digest", "tests", "sanitizer", "benchmarks"]
    assert validate.problems(content, "of latent", LATENT) == []
    assert validate.main([*arguments, "--only", "sanitizer", "--out", str(tmp_path / "other.json")]) == 0
    assert list(json.loads((tmp_path / "other.json").read_text())) == ["digest", "sanitizer"]


def test_each_test_is_of_one_group(monkeypatch, tmp_path):
    monkeypatch.setattr(validate.os, "cpu_count", lambda: 1)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    for path, count in (("tests/gpu/test_a.py", 1), ("tests/gpu/latent/test_b.py", 2)):
        assert (validate.ROOT / path).parent.is_dir()
        (tmp_path / path).parent.mkdir(parents=True)
        lines = "".join(f"@pytest.mark.gpu\ndef test_{number}(): pass\n" for number in range(count))
        (tmp_path / path).write_text(f"import pytest\n{lines}")
    assert [validate.run_tests(tmp_path, file.tests)["passed"] for file in (KERNELS, LATENT)] == [1, 2]


def test_the_stored_file_of_whole_models_is_complete_and_current():
    kernels, models = (
        json.loads((validate.ROOT / "validation" / name).read_text()) for name in ("kernels.json", "models.json")
    )
    found = validate.problems(models, kernels["digest"], MODELS)
    assert not found, "run `python -m tools.validate --only models` and commit validation/models.json"


def test_without_a_gpu_it_says_what_it_needs(monkeypatch):
    monkeypatch.setattr(validate.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="Hopper"):
        validate.main([])


def test_gpu_tests_are_counted_as_deselected(monkeypatch):
    """By pytest itself, and by the process that counts where others collect."""

    def config(**more):
        counted = []
        hook = SimpleNamespace(pytest_deselected=lambda items: counted.append(len(items)))
        return SimpleNamespace(hook=hook, stash=pytest.Stash(), counted=counted, **more)

    def item(marked):
        return SimpleNamespace(path=Path("tests/gpu/test_x.py"), get_closest_marker=lambda name: marked)

    monkeypatch.setattr(conftest, "why_no_hopper", lambda: "no GPU")
    items, worker, counting = [item(True), item(False), item(True)], config(workeroutput={}), config()
    conftest.pytest_collection_modifyitems(worker, items)
    assert len(items) == 1 and worker.counted == [2]
    for _ in range(2):  # of two processes, each has collected all
        conftest.pytest_testnodedown(SimpleNamespace(config=counting, workeroutput=worker.workeroutput), None)
    assert counting.counted == [2]
    written = []
    conftest.pytest_terminal_summary(SimpleNamespace(write_line=written.append), counting)
    assert written == ["2 GPU tests deselected: no GPU"]
