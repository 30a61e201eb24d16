"""`import fp8moe` is quick and works anywhere: it loads PyTorch and nothing else from outside the standard library."""

import pkgutil
import re
import subprocess
import sys
from importlib import import_module

import pytest

SCRIPT = """
import sys, torch
before = set(sys.modules)
import fp8moe
new = {name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)
print(*sorted(new))
import fp8moe.integrations.checkpoints, fp8moe.integrations.decode, fp8moe.integrations.transformers
print("transformers" in sys.modules)
"""


def test_import_loads_only_torch():
    """And transformers is loaded where it is used only."""
    output = subprocess.run([sys.executable, "-c", SCRIPT], check=True, capture_output=True, text=True).stdout
    packages, transformers = output.splitlines()
    # PyTorch may load its own parts late, but no other package.
    assert set(packages.split()) - {"torch"} == {"fp8moe"}
    assert transformers == "False"


def test_public_names_exist():
    import fp8moe

    assert fp8moe.__version__.count(".") == 2
    folders = [info.name for info in pkgutil.walk_packages(fp8moe.__path__, "fp8moe.") if info.ispkg]
    assert "fp8moe.kernels.gemm" in folders
    for folder in map(import_module, ["fp8moe", *folders]):
        modules = {info.name for info in pkgutil.iter_modules(folder.__path__)}
        for name in getattr(folder, "__all__", ()):
            assert getattr(folder, name) is not None
            assert name not in modules, f"{folder.__name__}.{name} would hide the module"


@pytest.mark.parametrize(
    ("older", "newer", "names"),
    [
        ("integrations.checkpoints", "checkpoints", {"load_fp8_checkpoint": "load_fp8_checkpoint"}),
    ],
)
def test_older_paths_that_the_docs_named_stay_valid(older, newer, names):
    older, newer = (import_module(f"fp8moe.{name}") for name in (older, newer))
    for name, now in names.items():
        assert getattr(older, name) is getattr(newer, now)


def test_an_unknown_command_ends_with_the_known_ones(capsys):
    from fp8moe.cli import main

    with pytest.raises(SystemExit) as stopped:
        main(["demo"])
    assert stopped.value.code == 2
    assert re.search(r"invalid choice: 'demo' .*quantize.*inspect.*info", capsys.readouterr().err)
