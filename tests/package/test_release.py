"""The release: what sdist and wheel hold, their metadata, the changelog, and README's blocks from the wheel."""

import ast
import os
import re
import runpy
import subprocess
import sys
import tarfile
import textwrap
import tomllib
import venv
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import fp8moe
from tests.processes import start_processes
from tools import matrix, release

ROOT = Path(__file__).parents[2]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
IMPORTED_AS = {
    "cuda": "cuda-python",
    "prometheus_client": "prometheus-client",
}  # others have the name of their distribution


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    return matrix.copy_tree(tmp_path_factory.mktemp("release") / "tree")


@pytest.fixture(scope="module")
def dist(tree):
    """The sdist, and the wheel that is built from it; nothing is downloaded."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", tree.parent / "dist", tree]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return tree.parent / "dist"


@pytest.fixture(scope="module")
def wheel(dist):
    (path,) = dist.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def wheel_files(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def package_files():
    """What users need of the package: modules, kernels, the mark of annotations."""
    suffixes = (".py", ".cu", ".cuh", ".typed")
    paths = (path for path in (ROOT / "fp8moe").rglob("*") if path.suffix in suffixes)
    return {path.relative_to(ROOT).as_posix() for path in paths}


def test_twine_finds_nothing(dist):
    command = [sys.executable, "-m", "twine", "--no-color", "check", "--strict", *dist.iterdir()]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED") == 2


def test_the_wheel_holds_the_package_and_nothing_else(wheel_files):
    info = f"fp8moe-{fp8moe.__version__}.dist-info"
    files = {name for name in wheel_files if not name.startswith(info)}
    assert files == package_files()
    assert {"fp8moe/py.typed", "fp8moe/cuda/ops/combine.cu", "fp8moe/cuda/sm90/ptx.cuh"} <= files
    assert wheel_files[f"{info}/licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()
    assert b"fp8moe = fp8moe.cli:main" in wheel_files[f"{info}/entry_points.txt"]
    assert b"Tag: py3-none-any" in wheel_files[f"{info}/WHEEL"]


def test_the_sdist_holds_what_the_wheel_is_built_from(dist):
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    generated = {"PKG-INFO", "setup.cfg", *(name for name in names if name.startswith("fp8moe.egg-info/"))}
    beside = {"CHANGELOG.md", "LICENSE", "MANIFEST.in", "README.md", "SECURITY.md", "pyproject.toml", "setup.py"}
    assert names - generated == package_files() | beside


def test_the_metadata(wheel_files):
    metadata = message_from_string(wheel_files[f"fp8moe-{fp8moe.__version__}.dist-info/METADATA"].decode())
    assert metadata["Version"] == fp8moe.__version__
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    classifiers = metadata.get_all("Classifier")
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in range(11, 15)} <= set(classifiers)
    assert "Typing :: Typed" in classifiers
    extras = set(metadata.get_all("Provides-Extra"))
    assert {"transformers", "peft"} <= extras


def test_tests_compile_with_the_oldest_nvrtc():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    everywhere, tests = (
        next(str(found.specifier) for found in map(Requirement, every) if found.name == "nvidia-cuda-nvrtc")
        for every in (project["dependencies"], project["optional-dependencies"]["test"])
    )
    assert tests == everywhere.replace("*", "0.*")


def test_the_version_is_in_one_place():
    version = re.escape(fp8moe.__version__)
    sources = [*ROOT.glob("*.toml"), *(ROOT / "fp8moe").rglob("*.py"), *(ROOT / "tools").glob("*.py")]
    found = [path for path in sources if re.search(rf"(?<![\d.]){version}(?![\d.])", path.read_text(encoding="utf-8"))]
    assert found == [ROOT / "fp8moe" / "__init__.py"]


def test_the_changelog_is_of_this_version():
    headings = re.findall(r"^## (.*)$", CHANGELOG, re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    releases = [re.fullmatch(r"\[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d)", heading).groups() for heading in headings[1:]]
    assert releases[0][0] == fp8moe.__version__
    dates = [date for _, date in releases]
    assert dates == sorted(dates, reverse=True)
    kinds = set(re.findall(r"^### (.*)$", CHANGELOG, re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def imported(path):
    """Top-level names of what a file imports, also inside of functions."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module.partition(".")[0]


@pytest.mark.parametrize("url", ["", "https://example.com/owner/fp8moe"])
def test_links_lead_to_where_the_repository_is(url, monkeypatch):
    made = {}
    monkeypatch.setattr("setuptools.setup", lambda **given: made.update(given))
    monkeypatch.setenv("FP8MOE_URL", f"{url}/" if url else "")
    runpy.run_path(str(ROOT / "setup.py"))
    text, tag = made["long_description"], f"v{fp8moe.__version__}"
    if url:
        assert set(made["project_urls"]) == {"Source", "Documentation", "Changelog", "Security"}
        assert made["project_urls"]["Changelog"] == f"{url}/blob/{tag}/CHANGELOG.md"
        assert (
            f"({url}/blob/{tag}/docs/benchmarks.md)" in text and f"({url}/raw/{tag}/docs/images/overview.png)" in text
        )
        assert re.findall(r"\]\((?!http|#)[^)]*\)", text) == []
    else:
        assert made["project_urls"] == {} and text == (ROOT / "README.md").read_text(encoding="utf-8")


def test_a_place_that_is_no_address_is_refused(monkeypatch):
    monkeypatch.setenv("FP8MOE_URL", "fp8moe")
    with pytest.raises(SystemExit, match="FP8MOE_URL: expected the http address of the repository, got 'fp8moe'"):
        runpy.run_path(str(ROOT / "setup.py"))


@pytest.fixture
def repository(tmp_path):
    """A small repository with what a release changes."""
    (tmp_path / "fp8moe").mkdir()
    (tmp_path / "fp8moe" / "__init__.py").write_text('__version__ = "0.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(
        "# Changes\n\n## [Unreleased]\n\n### Added\n\n- A.\n\n## [0.2.0] - 2026-11-26\n"
    )
    release.git(tmp_path, "init", "--quiet")
    for name, value in {"user.name": "a", "user.email": "a@b", "commit.gpgsign": "false"}.items():
        release.git(tmp_path, "config", name, value)
    release.git(tmp_path, "add", ".")
    release.git(tmp_path, "commit", "--quiet", "--message", "a")
    return tmp_path


def test_a_release_is_one_commit_with_a_tag(repository):
    assert release.release("0.3.0", repository) == "v0.3.0"
    assert release.git(repository, "describe").strip() == "v0.3.0"
    assert release.git(repository, "status", "--porcelain") == ""
    assert (repository / "fp8moe" / "__init__.py").read_text() == '__version__ = "0.3.0"\n'
    headings = re.findall(r"^## (.*)$", (repository / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "[Unreleased]" and headings[1].startswith("[0.3.0] - 2") and len(headings) == 3
    with pytest.raises(ValueError, match="expected entries under .Unreleased."):
        release.release("0.3.1", repository)


def test_what_a_release_refuses(repository):
    for version, why in {"1.0": "three numbers", "0.2.0": "above 0.2.0, got 0.2.0", "0.1.9": "above 0.2.0"}.items():
        with pytest.raises(ValueError, match=why):
            release.release(version, repository)
    release.git(repository, "tag", "v0.3.0")
    with pytest.raises(ValueError, match="the tag v0.3.0 is there already"):
        release.release("0.3.0", repository)
    (repository / "new").touch()
    with pytest.raises(ValueError, match="without changes, but git status has '.. new'"):
        release.release("0.4.0", repository)
    assert release.git(repository, "log", "--oneline").count("\n") == 1


def test_every_import_is_a_dependency(wheel_files):
    metadata = message_from_string(wheel_files[f"fp8moe-{fp8moe.__version__}.dist-info/METADATA"].decode())
    requirements = map(Requirement, metadata.get_all("Requires-Dist"))
    declared = {
        requirement.name
        for requirement in requirements
        if requirement.marker is None
        or any(requirement.marker.evaluate({"extra": extra}) for extra in ("transformers", "serve", "peft"))
    }
    names = {name for path in (ROOT / "fp8moe").rglob("*.py") for name in imported(path)}
    names -= set(sys.stdlib_module_names) | {"fp8moe"}
    assert "torch" in names and "transformers" in names
    assert {IMPORTED_AS.get(name, name) for name in names} - declared == set()


def make_model(rank, work):
    """As the matrix does it, in a process that has imported transformers."""
    sys.argv = ["-c", str(work)]
    exec(matrix.MAKE_MODEL, {})


def test_readmes_blocks_run_from_the_wheel(wheel, tmp_path):
    """In an environment that has the dependencies of this one and, of fp8moe, nothing but the wheel."""
    pytest.importorskip("transformers")
    environment = tmp_path / "environment"
    venv.create(environment, symlinks=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    # As lines of a .pth file these folders' own .pth files, that of an editable fp8moe among them, are not read.
    lent = [path for path in sys.path if path.endswith("-packages")]
    (packages / "lent.pth").write_text("\n".join(lent))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)  # pure Python: as pip lays it out
    work = tmp_path / "work"
    work.mkdir()
    start_processes(make_model, (work,), 1)
    matrix.run_blocks(str(environment / "bin" / "python"), work)


def test_a_kernel_compiles_from_the_wheel(wheel, tmp_path):
    """One that includes files of every folder of cuda/."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = """
        import torch
        from fp8moe.kernels.experts.permute import kernel_spec
        from fp8moe.runtime import jit
        spec = kernel_spec(4096, torch.bfloat16)
        assert jit.compile_spec(spec)
        folders, text = jit.SOURCE_DIRS["sm90"], jit.full_source(spec)
        print(jit.__file__, {folder.name for folder in folders for path in folder.iterdir() if path.name in text})
    """
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    place, folders = done.stdout.split(maxsplit=1)
    assert Path(place).is_relative_to(tmp_path)
    assert ast.literal_eval(folders) == {"common", "ops", "sm90"}


def test_the_matrix_tries_both_ends():
    assert matrix.ends("torch") == ["torch==2.11.*", "torch"]
    assert matrix.ends("transformers") == ["transformers==5.17.*", "transformers"]
    assert matrix.interpreters([sys.executable, "python3.no"]) == [sys.executable]
    assert matrix.readme_blocks().startswith("import torch\n") and "register()" in matrix.readme_blocks()
    assert len(matrix.tests_of(ROOT)) == len(matrix.TESTS)


def test_a_failing_command_fails_the_matrix(tmp_path):
    with pytest.raises(matrix.Failed, match="(?s)ended with 3.*what it said"):
        matrix.run([sys.executable, "-c", "print('what it said'); raise SystemExit(3)"], cwd=tmp_path)


def test_the_matrix_needs_nothing_installed():
    script = "import sys; sys.path.insert(0, sys.argv[1]); import matrix; print(matrix.ends('torch'))"
    command = [sys.executable, "-I", "-S", "-c", script, ROOT / "tools"]
    output = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ).stdout
    assert "torch" in output
