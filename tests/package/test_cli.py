"""The command `fp8moe`: it starts without PyTorch, Ctrl-C ends it in a line, JSON, and progress on terminals."""

import json
import os
import pty
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

import fp8moe
from fp8moe import __version__
from fp8moe.cli import main
from fp8moe.commands import warmup
from fp8moe.runtime import config, progress
from tests.processes import forkserver
from tests.small_checkpoints import unquantized, write

ROOT = Path(fp8moe.__file__).parent.parent
# As the script that pip installs; Ctrl-C ends it even where these tests run in the background of a shell.
COMMAND = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.argv[0] = "/usr/bin/fp8moe"
from fp8moe.cli import main
"""


def start(code, *arguments, path=(), **options):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (*path, ROOT)))}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", code, *arguments], env=environment, **pipes, **options)


@pytest.fixture
def without_torch(tmp_path):
    """A folder with a torch whose import says so, and does not end."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("import time; print('importing', flush=True); time.sleep(60)")
    return tmp_path


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["quantize", "--help"], ["warmup", "--help"]])
def test_help_does_not_import_torch(arguments, without_torch):
    process = start(COMMAND + "main()", *arguments, path=[without_torch])
    output, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (0, "")
    assert output.startswith(("usage: fp8moe", f"fp8moe {__version__}\n"))


def test_run_as_a_module(without_torch):
    environment = os.environ | {"PYTHONPATH": f"{without_torch}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "fp8moe", "--version"]
    assert subprocess.check_output(command, env=environment, text=True) == f"fp8moe {__version__}\n"


def test_ctrl_c_while_torch_is_imported(without_torch):
    process = start(COMMAND + "sys.exit(main())", "info", path=[without_torch])
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30)[1] == "fp8moe info: interrupted\n"
    assert process.returncode == 130


def test_ctrl_c_that_an_import_forgets(tmp_path):
    (tmp_path / "torch").mkdir()
    forgets = "import os, signal\ntry: os.kill(os.getpid(), signal.SIGINT)\nexcept: pass\nraise ImportError('no torch')"
    (tmp_path / "torch/__init__.py").write_text(forgets)
    process = start(COMMAND + "sys.exit(main())", "info", path=[tmp_path])
    assert process.communicate(timeout=30) == ("", "fp8moe info: interrupted\n")
    assert process.returncode == 130


def test_ctrl_c_reaches_no_process_of_warmup(tmp_path):
    """From a terminal it reaches all of them. Those that compile say nothing of it, wherever they are."""
    arguments = ["warmup", "--model-type", "mixtral", "--jobs", "1", "--output", str(tmp_path)]
    process = start(COMMAND + "if __name__ == '__main__': sys.exit(main())", *arguments, start_new_session=True)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while len(children.read_text().split()) < 2:  # one that tracks resources, one that compiles
        assert process.poll() is None
        time.sleep(0.01)
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate(timeout=60)[1] == "fp8moe warmup: interrupted\n"
    assert process.returncode == 130


def test_names_of_the_package_in_a_command():
    """They are imported when first used; elsewhere, with `import fp8moe`, so that operators are registered."""
    code = """
import sys
sys.argv[0] = "fp8moe"
import fp8moe
assert "torch" not in sys.modules and set(fp8moe.__all__) <= set(dir(fp8moe))
from fp8moe import *
assert gemm is fp8moe.gemm is sys.modules["fp8moe.kernels.gemm"].gemm
fp8moe.no_such_name
"""
    _, errors = start(code).communicate(timeout=60)
    assert errors.splitlines()[-1] == "AttributeError: module 'fp8moe' has no attribute 'no_such_name'"


def run(capsys, *arguments):
    status = main([*map(str, arguments)])
    return status, json.loads(capsys.readouterr().out)


def test_info_in_json(capsys, monkeypatch):
    monkeypatch.setenv("FP8MOE_NUM_SMS", "64")
    status, report = run(capsys, "info", "--json")
    assert status == 0 and report["versions"]["fp8moe"] == __version__ and report["devices"]["cpu"] == "reference"
    assert report["settings"]["FP8MOE_NUM_SMS"] == 64 and report["settings"]["FP8MOE_DUMP_DIR"] is None
    assert main(["info"]) == 0
    names = re.findall(r"^(\S.*?)  ", capsys.readouterr().out, flags=re.MULTILINE)
    assert names == [*report["versions"], *report["settings"], *report["devices"], "compiling for sm_90a"]
    monkeypatch.undo()
    config.reload()


def test_inspect_in_json(tmp_path, capsys):
    checkpoint = write(tmp_path / "checkpoint", unquantized(), config={})
    status, report = run(capsys, "inspect", checkpoint, "--json")
    assert (status, report["directory"], report["problems"]) == (0, str(checkpoint), [])
    assert report["fp8_nbytes"] == 0 and sum(report["dtypes"].values()) == report["nbytes"]
    (checkpoint / "config.json").write_text("{")
    status, report = run(capsys, "inspect", checkpoint, "--json")
    assert status == 1 and "config.json" in report["problems"][0]


def test_missing_kernels_in_json(tmp_path, capsys, monkeypatch):
    from tests.package.test_warmup import SPECS

    monkeypatch.setattr(warmup, "_kernels", lambda *_: SPECS)
    monkeypatch.setattr(warmup, "get_context", lambda _: forkserver)
    command = ["warmup", "--model-type", "mixtral", "--jobs", "1", "--output", tmp_path]
    status, report = run(capsys, *command, "--check", "--json")
    assert status == 1 and (report["directory"], report["kernels"]) == (str(tmp_path), 2)
    assert [line.partition(" ")[0] for line in report["missing"]] == ["permute_quantize", "quantize_1x128"]
    assert main([*map(str, command), "--check", "--quiet"]) == 1
    assert capsys.readouterr() == ("", "")
    with pytest.raises(SystemExit, match="^fp8moe warmup: --json: .* --check"):
        run(capsys, *command, "--json")


def test_quiet(tmp_path, capsys, monkeypatch):
    source = write(tmp_path / "source", unquantized(), config={})
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0)
    assert main(["quantize", str(source), str(tmp_path / "target"), "--quiet"]) == 0
    output, errors = capsys.readouterr()
    assert output == "" and all(line.startswith("fp8moe quantize: warning: ") for line in errors.splitlines())


@pytest.mark.parametrize("columns, bar", [(0, False), (80, True)])
def test_a_terminal_without_columns_gets_lines(columns, bar, monkeypatch):
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        termios.tcsetwinsize(theirs, (24, columns))
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0)
        with progress.progress(total=2, label="counting") as counted:
            counted.update(1)
            written = ""
            while select.select([ours], [], [], 0.2)[0]:  # what was written may come in pieces
                written += os.read(ours, 4096).decode().replace("\r\n", "\n")
    os.close(ours)
    assert written.startswith("\rcounting: " if bar else "counting: 0% 0/2 ") and written.endswith("\n") != bar


def test_a_closed_standard_output(without_torch):
    environment = os.environ | {"PYTHONPATH": f"{without_torch}{os.pathsep}{ROOT}"}
    command = f"{shlex.quote(sys.executable)} -m fp8moe info >&-"
    done = subprocess.run(command, shell=True, stderr=subprocess.PIPE, env=environment, text=True, timeout=30)
    said = "fp8moe info: standard output is closed; for no output, redirect it to /dev/null\n"
    assert (done.returncode, done.stderr) == (1, said)


OWN_CODE = """
from pathlib import Path
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast

Path(__file__).with_name("ran").touch()

class Config(MixtralConfig):
    model_type = "own"

class Model(MixtralForCausalLM):
    config_class = Config

class Tokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    pytest.importorskip("transformers")
    from tests.decode_models import tiny_mixtral
    from tests.tiny_tokenizer import write_tiny_tokenizer

    directory = tmp_path_factory.mktemp("served")
    tiny_mixtral(vocab_size=97, eos_token_id=1).save_pretrained(directory)
    write_tiny_tokenizer(directory)
    return directory


def changed(directory, target, file, **changes):
    """A copy of a checkpoint with code beside it, and changes of one of its JSON files."""
    shutil.copytree(directory, target)
    (target / "own.py").write_text(OWN_CODE)
    (target / file).write_text(json.dumps(json.loads((target / file).read_text()) | changes))
    return str(target)


def test_code_of_a_checkpoint(served, tmp_path, monkeypatch):
    """It is not run, and nobody is asked, unless the owner says so."""
    from fp8moe.commands import serve

    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])  # transformers adds that folder
    classes = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    of_model = changed(served, tmp_path / "model", "config.json", model_type="own", auto_map=classes)
    tokenizer = {"tokenizer_class": "Tokenizer", "auto_map": {"AutoTokenizer": [None, "own.Tokenizer"]}}
    of_tokenizer = changed(served, tmp_path / "tokenizer", "tokenizer_config.json", **tokenizer)
    for directory in (of_model, of_tokenizer):
        with pytest.raises(ValueError, match="custom code .*; --trust-remote-code runs that code"):
            serve.load(directory, "cpu")
    unneeded = changed(served, tmp_path / "unneeded", "config.json", auto_map=classes)
    assert type(serve.load(unneeded, "cpu")[0]).__module__.startswith("transformers.models.mixtral")
    assert not [*tmp_path.rglob("ran")]
    assert type(serve.load(of_tokenizer, "cpu", trust_remote_code=True)[1]).__module__.startswith("transformers_mod")
    with pytest.raises(ValueError, match="for fp8moe:(.|\n)*experts.down_proj: missing"):  # its names are not converted
        serve.load(of_model, "cpu", trust_remote_code=True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--max-length", "1"], "--slots 64, --max-length 1: max_length: expected at least 2, got 1"),
        (
            ["--slots", "99999999"],
            "--slots 99999999, .* the cache of .* sequences of 128 tokens takes .* GB are free",
        ),
        (["--device", "cuda:99"], "--device cuda:99, but PyTorch finds .* GPU that it can use"),
        (["--device", "meta"], "--device meta: expected cpu, cuda or cuda:N"),
    ],
)
def test_what_serve_refuses(served, arguments, said):
    pytest.importorskip("fastapi", reason="serving needs fp8moe[serve]")
    with pytest.raises(SystemExit, match=f"fp8moe serve: {said}"):
        main(["serve", str(served), "--port", "0", "--device", "cpu", "--quiet", *arguments])


def test_what_serve_says_of_a_configuration(served, tmp_path):
    from fp8moe.commands import serve

    for index, (name, value, said) in enumerate(
        (
            ("num_hidden_layers", 10**8, "config.json: num_hidden_layers is 100000000, expected at most"),
            ("architectures", ["AutoTokenizer"], "it has no class 'AutoTokenizer'"),
            ("attn_implementation", "a/b", "attn_implementation is 'a/b', code of another repository"),
        )
    ):
        directory = changed(served, tmp_path / str(index), "config.json", **{name: value})
        with pytest.raises(ValueError, match=said):
            serve.load(directory, "cpu")
