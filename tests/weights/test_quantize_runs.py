"""Runs of fp8moe quantize: resumed, refused where other things are, two at once, interrupted; what the command says."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from fp8moe import __version__
from fp8moe.cli import main
from fp8moe.runtime import progress as progress_lines
from fp8moe.weights import CheckpointError, inspect_checkpoint, quantize, quantize_checkpoint
from fp8moe.weights.source import INDEX, SINGLE
from fp8moe.weights.write import ShardWriter, _locked
from tests.small_checkpoints import Interrupted, Q, expected_fp8, interrupt, read, same, truncate, unquantized, write

pytestmark = pytest.mark.usefixtures("one_thread")

SECOND = "model-00002-of-00002.safetensors"
FOREIGN = "is there already, and not a file to be written"
OTHER_CONTENT = "is there already, with other content"
OTHER_SOURCE = "is there already, of another source, or made with other options"


@pytest.fixture
def src(tmp_path):
    """A source in two shards with a small file."""
    src = write(tmp_path / "src", unquantized(), shards=2, config={})
    (src / "README.md").write_text("theirs")
    return src


@pytest.fixture
def dst(tmp_path):
    return tmp_path / "dst"


def contents(directory):
    return {path.name: path.is_file() and path.read_bytes() for path in directory.iterdir()}


def refused(src, dst, **options):
    """The problems for which the destination is refused, having made sure that it stays as it is."""
    before = contents(dst)
    with pytest.raises(CheckpointError, match=r"^cannot write to .*or force=True \(--force\) to overwrite") as error:
        quantize_checkpoint(src, dst, **options)
    assert contents(dst) == before
    return error.value.problems


# Resuming.


def test_resume(tmp_path, dst, monkeypatch):
    src = write(tmp_path / "src", unquantized(), shards=4, config={})
    with monkeypatch.context() as patch:
        interrupt(patch, 30)
        with pytest.raises(Interrupted):
            quantize_checkpoint(src, dst)
    done = sorted(path.name for path in dst.glob("*.safetensors"))
    assert 0 < len(done) < 4 and not (dst / INDEX).exists() and not list(dst.glob(".*"))
    (dst / f".{done[0]}.999999.partial").write_bytes(b"half")  # as a killed run leaves it
    before = {name: (dst / name).stat().st_mtime_ns for name in done}
    quantize_checkpoint(src, dst)
    assert {name: (dst / name).stat().st_mtime_ns for name in done} == before
    assert not list(dst.glob(".*"))
    same(dict(sorted(read(dst).items())), dict(sorted(expected_fp8(unquantized(), "float32").items())))
    assert not inspect_checkpoint(dst).problems


def test_a_finished_run_does_nothing_again(src, dst, monkeypatch):
    quantize_checkpoint(src, dst)
    before = {path: path.stat().st_mtime_ns for path in dst.iterdir()}
    interrupt(monkeypatch, 0)
    quantize_checkpoint(src, dst)
    assert {path: path.stat().st_mtime_ns for path in dst.iterdir()} == before


def test_a_source_that_changes_after_it_was_read(tmp_path, dst, monkeypatch):
    src = write(tmp_path / "src", unquantized())
    put = ShardWriter.put

    def change_and_put(self, name, tensor):
        if name == Q:  # the first tensor has been read
            os.utime(src / SINGLE)
        put(self, name, tensor)

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "put", change_and_put)
        quantize_checkpoint(src, dst)
    assert refused(src, dst) == [f"{SINGLE}: {OTHER_SOURCE}"]


# What is in the destination already.


@pytest.mark.parametrize(
    ("change", "options", "name", "problem"),
    [
        (lambda src, dst: truncate(dst / SECOND), {}, SECOND, OTHER_SOURCE),
        (lambda src, dst: truncate(dst / SECOND, 20), {}, SECOND, OTHER_SOURCE),
        (lambda src, dst: write(src, unquantized(5), shards=2), {}, SECOND, OTHER_SOURCE),
        (lambda src, dst: os.utime(src / SECOND), {}, SECOND, OTHER_SOURCE),
        (lambda src, dst: None, {"scale_format": "ue8m0"}, SECOND, OTHER_SOURCE),
        (lambda src, dst: None, {"skip": ("q_proj",)}, SECOND, OTHER_SOURCE),
        (lambda src, dst: write(dst, unquantized(), shards=2), {}, SECOND, OTHER_SOURCE),
        (lambda src, dst: (dst / "config.json").write_text("{}"), {}, "config.json", OTHER_CONTENT),
        (lambda src, dst: (dst / "README.md").write_text("mine"), {}, "README.md", OTHER_CONTENT),
        (lambda src, dst: (dst / INDEX).write_text("{}"), {}, INDEX, OTHER_CONTENT),
    ],
)
def test_files_that_differ_are_overwritten_only_by_force(tmp_path, src, dst, change, options, name, problem):
    quantize_checkpoint(src, dst)
    change(src, dst)
    assert f"{name}: {problem}" in refused(src, dst, **options)
    quantize_checkpoint(src, dst, force=True, **options)
    quantize_checkpoint(src, tmp_path / "new", **options)
    assert contents(dst) == contents(tmp_path / "new")


@pytest.mark.parametrize("name", ["train.py", "x.safetensors", "download.partial", ".x.safetensors.1.partial", "runs/"])
def test_other_files_are_refused_and_stay(src, dst, name):
    dst.mkdir()
    (dst / name).mkdir() if name.endswith("/") else (dst / name).write_text("mine")
    before = contents(dst)
    assert refused(src, dst) == [f"{name.rstrip('/')}: {FOREIGN}"]
    quantize_checkpoint(src, dst, force=True)
    assert contents(dst).items() > before.items()
    assert not inspect_checkpoint(dst).problems


@pytest.mark.parametrize(("shards", "name"), [(1, INDEX), (2, SINGLE)])
def test_what_would_be_read_in_place_of_the_result_is_deleted_by_force(tmp_path, dst, shards, name):
    src = write(tmp_path / "src", unquantized(), shards)
    dst.mkdir()
    (dst / name).write_text("{}")
    assert refused(src, dst) == [f"{name}: {FOREIGN}"]
    quantize_checkpoint(src, dst, force=True)
    assert not (dst / name).exists() and not inspect_checkpoint(dst).problems


def test_an_old_index_goes_before_its_shards(src, dst, monkeypatch):
    quantize_checkpoint(src, dst)
    index = (dst / INDEX).read_bytes()
    write(src, unquantized(5), shards=2)
    with monkeypatch.context() as patch:
        interrupt(patch, 20)
        with pytest.raises(Interrupted):
            quantize_checkpoint(src, dst, force=True)
    assert not (dst / INDEX).exists()
    quantize_checkpoint(src, dst, force=True)
    assert (dst / INDEX).read_bytes() == index


def test_two_runs_at_once(src, dst):
    dst.mkdir()
    with _locked(dst):
        with pytest.raises(ValueError, match=r"^dst_dir: another run of fp8moe writes to .*; wait for it to end$"):
            quantize_checkpoint(src, dst)
        assert os.listdir(dst) == []
    quantize_checkpoint(src, dst)


def test_a_crash_before_a_shard_has_its_name(src, dst, monkeypatch):
    rename = os.replace

    def crash(temporary, path):
        if path.name == SECOND:
            raise Interrupted
        rename(temporary, path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", crash)
        with pytest.raises(Interrupted):
            quantize_checkpoint(src, dst)
    quantize_checkpoint(src, dst)
    same(dict(sorted(read(dst).items())), dict(sorted(expected_fp8(unquantized(), "float32").items())))


def start(*arguments):
    """`fp8moe` in a process of its own, which Ctrl-C ends even where these tests run in the background of a shell."""
    script = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    script += "import fp8moe.cli; sys.exit(fp8moe.cli.main())"
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_a_run_that_is_ended_can_be_resumed(tmp_path, dst, number, status):
    layers = {f"layers.{i}.q_proj.weight": torch.randn(512, 512).bfloat16() for i in range(150)}
    src = write(tmp_path / "src", layers, shards=75)
    process = start("quantize", src, dst, "--device", "cpu")
    while not list(dst.glob("*.safetensors")):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == status, errors
    assert not (dst / INDEX).exists()
    if number == signal.SIGINT:
        assert not list(dst.glob("*.partial"))
        assert errors.splitlines()[-1] == (
            "fp8moe quantize: interrupted; the same command goes on behind the last finished shard"
        )
        assert "Traceback" not in errors
    done = {path: path.stat().st_mtime_ns for path in dst.glob("*.safetensors")}
    quantize_checkpoint(src, dst)
    assert 0 < len(done) < 75 and {path: path.stat().st_mtime_ns for path in done} == done
    assert not inspect_checkpoint(dst).problems and not list(dst.glob(".*"))


def test_an_interrupt_that_pytorch_takes_for_a_wrong_argument_is_one(src, dst, monkeypatch, capsys):
    class Sequence:
        def __len__(self):
            return 1

        def __getitem__(self, index):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("fp8moe.commands.checkpoints.quantize_checkpoint", lambda *_, **__: torch.tensor(Sequence()))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(ValueError, match="could not determine the shape"):
            torch.tensor(Sequence())
        assert main(["quantize", str(src), str(dst), "--device", "cpu"]) == 130
        assert "interrupted; the same command" in capsys.readouterr().err
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_interrupt_when_a_shard_is_begun_leaves_no_temporary_file(src, dst, monkeypatch):
    begin = ShardWriter.__enter__

    def interrupted(writer):
        begin(writer)
        assert list(dst.glob(".*.partial"))
        raise KeyboardInterrupt

    monkeypatch.setattr(ShardWriter, "__enter__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(src, dst)
    assert not list(dst.glob(".*.partial"))
    monkeypatch.undo()
    quantize_checkpoint(src, dst)
    assert not inspect_checkpoint(dst).problems


# The command.


def test_quantize_needs_the_gpu_that_it_is_told_to_use(src, dst, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="no GPU"):
        main(["quantize", str(src), str(dst), "--device", "cuda"])
    assert not dst.exists()


def test_command_line(tmp_path, capsys):
    src = str(write(tmp_path / "src", unquantized(fused=True), shards=2, config={}))
    assert main(["inspect", src]) == 0
    assert "FP8 share    0.0%" in capsys.readouterr().out
    dst = str(tmp_path / "dst")
    assert main(["quantize", src, dst, "--scale-format", "ue8m0", "--skip", "q_proj", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "ue8m0" in out and "3 in each of 2 layers, fused" in out
    assert read(tmp_path / "dst")[Q].dtype == torch.bfloat16
    with pytest.raises(SystemExit, match=r"(?s)^fp8moe quantize: cannot quantize .*quantized already"):
        main(["quantize", dst, str(tmp_path / "again")])
    with pytest.raises(SystemExit, match=r"^fp8moe inspect: .* is not a checkpoint"):
        main(["inspect", str(tmp_path)])


def test_options_of_the_command(src, dst):
    assert main(["quantize", str(src), str(dst)]) == 0
    truncate(dst / SECOND)
    with pytest.raises(SystemExit, match=rf"(?s)^fp8moe quantize: cannot write to .*{SECOND}: {OTHER_SOURCE}"):
        main(["quantize", str(src), str(dst)])
    assert main(["quantize", str(src), str(dst), "--force"]) == 0
    write(src, unquantized() | {Q: torch.full((200, 144), torch.nan)}, shards=2)
    with pytest.raises(SystemExit, match=rf"(?s)^fp8moe quantize: .*{Q}: 28800 values are NaN or infinite"):
        main(["quantize", str(src), str(dst), "--force"])
    assert main(["quantize", str(src), str(dst), "--force", "--allow-nonfinite"]) == 1  # as inspect has it


def test_version(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0 and capsys.readouterr().out == f"fp8moe {__version__}\n"


@pytest.mark.parametrize("error", [RuntimeError("CUDA out of memory"), OSError(28, "No space left on device")])
def test_errors_are_one_line(src, dst, monkeypatch, error):
    def fail(*arguments):
        raise error

    monkeypatch.setattr(ShardWriter, "put", fail)
    with pytest.raises(SystemExit) as stopped:
        main(["quantize", str(src), str(dst)])
    assert stopped.value.code == f"fp8moe quantize: {error}"


def test_ctrl_c_is_one_line(src, capsys, monkeypatch):
    def stop(directory):
        raise KeyboardInterrupt

    monkeypatch.setattr("fp8moe.commands.checkpoints.inspect_checkpoint", stop)
    assert main(["inspect", str(src)]) == 130
    assert capsys.readouterr().err == "fp8moe inspect: interrupted\n"


def test_output_that_nobody_reads():
    process = start("info")
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait(60) == 1


def test_warnings_are_one_line(src, dst, capsys):
    (src / "notes.txt").symlink_to("/etc/hostname")
    assert main(["quantize", str(src), str(dst), "--skip", "experts"]) == 0
    prefix = "fp8moe quantize: warning: "
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith(prefix)]
    assert f"{prefix}not copied from {src}: notes.txt (a link to outside of the checkpoint)" in lines
    assert lines[-1].startswith(
        f"{prefix}FP8 weights have only 22.2% of the parameters in matrices; what stayed as it is:"
    )


def test_progress_without_a_terminal(src, dst, capsys, monkeypatch):
    monkeypatch.setattr(progress_lines, "SECONDS_BETWEEN_LINES", 0)
    assert main(["quantize", str(src), str(dst)]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("writing: ")]
    assert len(lines) > 20
    assert lines[0].startswith("writing: 0% 0.00/") and lines[-1].startswith("writing: 100% ")
    monkeypatch.setattr(progress_lines, "SECONDS_BETWEEN_LINES", 1000)
    assert main(["quantize", str(src), str(dst)]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "warning" not in line]
    assert [line.partition("%")[0] for line in lines] == ["writing: 0", "writing: 100"]


def test_what_cannot_be_counted_says_that_it_runs(src, dst, capsys, monkeypatch):
    fit = quantize._fit

    def slow(*arguments):
        time.sleep(0.3)
        return fit(*arguments)

    monkeypatch.setattr(progress_lines, "SECONDS_BETWEEN_LINES", 0.05)
    monkeypatch.setattr(quantize, "_fit", slow)
    assert main(["quantize", str(src), str(dst)]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines.count("checking what transformers can load: 0 s") >= 2
    time.sleep(0.1)
    assert not capsys.readouterr().err
