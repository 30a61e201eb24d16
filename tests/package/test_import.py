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
import fp8moe.weights, fp8moe.decode, fp8moe.hf
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
    ("older", "newer"), [("transformers", "hf"), ("decode", "decode"), ("checkpoints", "weights"), ("peft", "peft")]
)
def test_module_names_of_the_version_before_warn_and_hand_on(older, newer):
    old, new = import_module(f"fp8moe.integrations.{older}"), import_module(f"fp8moe.{newer}")
    for name in new.__all__:
        with pytest.warns(DeprecationWarning, match=f"fp8moe.integrations.{older} is fp8moe.{newer} now"):
            assert getattr(old, name) is getattr(new, name)
    with pytest.raises(ImportError, match="none_such"):
        exec(f"from fp8moe.integrations.{older} import none_such")


def test_an_unknown_command_ends_with_the_known_ones(capsys):
    from fp8moe.cli import main

    with pytest.raises(SystemExit) as stopped:
        main(["demo"])
    assert stopped.value.code == 2
    assert re.search(r"invalid choice: 'demo' .*quantize.*inspect.*info", capsys.readouterr().err)
