"""The FP8MOE_* variables: defaults, parsing, errors that name the variable, and one place that reads them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fp8moe
from fp8moe.runtime import config

NAMES = (
    *("BACKEND", "CACHE_DIR", "NUM_SMS", "PRINT_CONFIGS", "PRINT_COMPILER", "DUMP_DIR", "COMPILER"),
    "BATCH_INVARIANT",
)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(f"FP8MOE_{name}", raising=False)
    yield
    monkeypatch.undo()
    config.reload()
    config.log.setLevel("NOTSET")


def test_defaults(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    assert config.reload() == config.Settings(
        backend="auto",
        cache_dir=Path("/home/someone/.cache/fp8moe"),
        num_sms=None,
        print_configs=False,
        print_compiler=False,
        dump_dir=None,
        compiler="nvrtc",
        batch_invariant=False,
    )


def test_cache_dir_follows_xdg_unless_it_is_relative(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", "/scratch/cache")
    assert config.reload().cache_dir == Path("/scratch/cache/fp8moe")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert config.reload().cache_dir == Path("/home/someone/.cache/fp8moe")


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("BACKEND", "reference", "backend", "reference"),
        ("BACKEND", " CUDA ", "backend", "cuda"),
        ("BACKEND", "", "backend", "auto"),
        ("COMPILER", "nvcc", "compiler", "nvcc"),
        ("BATCH_INVARIANT", "1", "batch_invariant", True),
        ("NUM_SMS", "64", "num_sms", 64),
        ("NUM_SMS", "", "num_sms", None),
        ("PRINT_CONFIGS", "1", "print_configs", True),
        ("PRINT_CONFIGS", "0", "print_configs", False),
        ("PRINT_COMPILER", " 1 ", "print_compiler", True),
        ("DUMP_DIR", "/tmp/dump", "dump_dir", Path("/tmp/dump")),
        ("CACHE_DIR", "~/kernels", "cache_dir", Path.home() / "kernels"),
    ],
)
def test_values(monkeypatch, name, text, field, value):
    monkeypatch.setenv(f"FP8MOE_{name}", text)
    assert getattr(config.reload(), field) == value
    assert getattr(config.settings, field) == value


@pytest.mark.parametrize(
    ("name", "text", "allowed"),
    [
        ("BACKEND", "gpu", "auto, cuda, reference"),
        ("COMPILER", "clang", "nvrtc, nvcc"),
        ("NUM_SMS", "0", ">= 1"),
        ("NUM_SMS", "-3", ">= 1"),
        ("NUM_SMS", "many", ">= 1"),
        ("NUM_SMS", "1.5", ">= 1"),
        ("PRINT_CONFIGS", "maybe", "0, 1"),
        ("PRINT_COMPILER", "true", "0, 1"),
    ],
)
def test_a_bad_value_names_the_variable_and_what_is_allowed(monkeypatch, name, text, allowed):
    before = config.settings
    monkeypatch.setenv(f"FP8MOE_{name}", text)
    with pytest.raises(ValueError, match=f"FP8MOE_{name}") as error:
        config.reload()
    assert allowed in str(error.value)
    assert text in str(error.value)
    assert config.settings is before


def test_the_table_lists_every_variable():
    listed = {line.split("|")[1].strip() for line in config.__doc__.splitlines() if line.startswith("| FP8MOE_")}
    assert listed == {f"FP8MOE_{name}" for name in NAMES}


def test_only_config_reads_the_variables():
    package = Path(fp8moe.__file__).parent
    reads = re.compile(r"""(environ(\.get)?|getenv)[\[(]\s*f?["']FP8MOE_""")
    offending = [path for path in package.rglob("*.py") if reads.search(path.read_text())]
    assert offending == []


def python(code, environment):
    environment = environment | {"PYTHONPATH": str(Path(fp8moe.__file__).parent.parent)}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)


def test_a_bad_value_is_reported_at_the_first_use():
    code = """
from fp8moe.runtime import config
try:
    config.settings
except ValueError as error:
    print(error)
from fp8moe.cli import main
main(["info"])
"""
    done = python(code, {"FP8MOE_BACKEND": "tpu", "PATH": ""})
    assert done.returncode != 0 and done.stdout.startswith("FP8MOE_BACKEND is 'tpu'")
    assert done.stderr.startswith("fp8moe info: FP8MOE_BACKEND is 'tpu'; it must be one of")


def test_what_is_printed_goes_to_standard_error():
    code = """
import os
from fp8moe.runtime import config
for value in "01":
    os.environ["FP8MOE_PRINT_CONFIGS"] = value
    config.reload()
    config.log.info(f"gemm m={value}")
"""
    done = python(code, dict(os.environ))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "fp8moe: gemm m=1\n")


def test_a_program_with_handlers_gets_what_is_printed(monkeypatch, caplog):
    monkeypatch.setenv("FP8MOE_PRINT_CONFIGS", "1")
    config.reload()
    config.log.info("gemm m=1")
    assert caplog.messages == ["gemm m=1"] and not config.log.handlers


def test_a_variable_that_is_no_longer_read_is_refused(monkeypatch):
    monkeypatch.setenv("FP8MOE_JIT", "background")
    with pytest.raises(ValueError, match="^FP8MOE_JIT is no longer read: .*`fp8moe warmup`"):
        config.reload()
    monkeypatch.setenv("FP8MOE_JIT", "")
    config.reload()
