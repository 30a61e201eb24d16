"""integrations/ for engines, as far as nothing of an engine is needed: entry points, commands, what was recorded."""

import ast
import json
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from tools import environments, sglang_serving, vllm_serving

ROOT = Path(__file__).parents[2]


def names_of_fp8moe(tree):
    """Qualified names that a module takes from fp8moe, by an import or as an attribute of it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("fp8moe."))
        elif isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] == "fp8moe":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "fp8moe":
            yield f"fp8moe.{node.attr}"


def test_engines_take_public_names_alone():
    """Those in the __all__ of a folder of fp8moe; deep_gemm and kernels, which are no engines, import its modules."""
    found = {}
    for path in (ROOT / "integrations").glob("*/fp8moe_*/*.py"):
        found.setdefault(path.parent.name, set()).update(names_of_fp8moe(ast.parse(path.read_text())))
    assert len(found) >= 3 and all(found.values())
    for names in found.values():
        for folder, _, name in (name.rpartition(".") for name in names):
            assert name in getattr(import_module(folder), "__all__", ()), f"{folder}.{name} is not public"


@pytest.mark.parametrize(("engine", "group"), [("vllm", "vllm.general_plugins"), ("sglang", "sglang.srt.plugins")])
def test_entry_points_import_nothing_heavy(engine, group):
    """Every process of an engine loads them; where SGLang is not installed, its entry point only logs a warning."""
    distribution = ROOT / "integrations" / engine
    content = tomllib.loads((distribution / "pyproject.toml").read_text())
    assert content["project"]["version"] == "0.1.0" and content["project"]["dependencies"] == ["fp8moe>=0.2"]
    module, name = content["project"]["entry-points"][group]["fp8moe"].split(":")
    call = f"{module}.{name}()" if engine == "sglang" else f"callable({module}.{name}) or 1 / 0"
    code = f"import sys, {module}; {call}; print({{'torch', 'fp8moe', 'vllm', 'sglang'}} & set(sys.modules))"
    command = [sys.executable, "-S", "-c", code]
    done = subprocess.run(command, cwd=distribution, env={}, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_what_vllm_served():
    """Every way of serving is within the bar, which a model without experts misses."""
    recorded = json.loads(vllm_serving.FILE.read_text())
    assert [(row["checkpoint"], row["options"]) for row in recorded["served"]] == [*vllm_serving.SERVED]
    for without in recorded["model_without_experts"].values():
        assert without["median"] > 2 * vllm_serving.MAX_MEDIAN_DIFFERENCE
    for row in recorded["served"]:
        assert row["median"] <= vllm_serving.MAX_MEDIAN_DIFFERENCE, row
        assert row["continued"]["median"] <= vllm_serving.MAX_CONTINUED, row
        assert row["counted"] or row["options"] not in vllm_serving.COUNTED, row
        layers = 3 if row["checkpoint"] in ("blocks", "channels") else 1  # of others only the experts are quantized
        assert len(row["log"]) == layers and all(line.endswith("on fp8moe") for line in row["log"])


def test_what_sglang_was_tried_with():
    tests = json.loads(sglang_serving.FILE.read_text())["tests"]
    assert list(tests) == [*sglang_serving.VERSIONS] and all(set(counts) == {"passed"} for counts in tests.values())


@pytest.mark.parametrize(
    ("tool", "engine", "last"),
    [
        (vllm_serving, "vllm", ["vllm", "serve", "MODEL", "--quantization", "fp8moe"]),
        (sglang_serving, "sglang", ["sglang", "serve", "--model-path", "MODEL", "--quantization", "fp8moe"]),
    ],
)
def test_the_readmes_have_the_commands_that_ran(tool, engine, last):
    install = ["pip", "install", ".", f"./integrations/{engine}"]
    assert environments.commands_of(tool.README) == (install, last)
