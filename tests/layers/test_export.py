"""docs/compile.md: every public op and layer is in its table, which is what the tool finds; export of all of them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fp8moe
from fp8moe import FP8Linear, FP8MQAIndexer, quantize_1x128
from fp8moe.layers import mqa_indexer
from tests.graph_cases import CASES, missing_names
from tools.compile_matrix import COLUMNS, MARK, PAGE, kinds, page, read_page, rows

pytestmark = pytest.mark.usefixtures("one_thread")
SAMPLE = {
    "gemm, c and out": ("compile",),
    "GroupedExperts": ("compile", "backward"),
    "FP8MQAIndexer, decode": ("AOTInductor",),  # of inductor too; docs/compile.md has a package of experts and linears
}
"""Cells that are compiled anew here: `python -m tools.compile_matrix` does all."""


@pytest.fixture(scope="module")
def written():
    return PAGE.read_text().partition(MARK)[2].lstrip("\n")


def test_every_public_name_has_a_case():
    assert list(missing_names()) == []


def test_the_table_has_every_case(written):
    table = read_page(written)
    assert list(table) == list(CASES)
    assert page(table, written.split()[1].rstrip(".")) == written


def test_only_what_is_known_does_not_work(written):
    refused = {
        (name, column) for name, row in read_page(written).items() for column in COLUMNS if kinds(row)[column] == "no"
    }
    layout = "GroupedExperts, decode_capacity"  # an exported program has one of its two
    assert refused == {(layout, "export"), (layout, "AOTInductor")}


def test_layers_with_a_backward_in_eager_have_one_in_graphs(written):
    table = read_page(written)
    trained = {name for name in CASES if name.startswith(("FP8Linear", "linear", "GroupedExperts"))}
    assert {name for name, row in table.items() if row["backward"] != "-"} == trained


@pytest.mark.parametrize("name", CASES)
def test_export(name, written):
    (_, row), *_ = rows([name], columns=("export",))
    assert kinds(row)["export"] == kinds(read_page(written)[name])["export"]


@pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_of_the_rows(name, written):
    (_, row), *_ = rows([name], columns=SAMPLE[name])
    assert kinds(row).items() <= kinds(read_page(written)[name]).items()


def test_a_wrong_result_is_found(monkeypatch):
    from tools import compile_matrix

    wrong = CASES["FP8Linear"]
    monkeypatch.setitem(compile_matrix.CASES, "wrong", type(wrong)(_drifting(), wrong.make, *wrong.layers))
    (_, row), *_ = rows(["wrong"], columns=("export",))
    assert row["export"].startswith("no: Wrong: tensor 0 of")


def _drifting():
    calls = iter(range(1, 1000))
    return lambda layer, x: layer(x) + next(calls)  # what is traced keeps one number


def test_fp8_tensors_in_saved_programs(tmp_path):
    class Quantize(torch.nn.Module):
        def forward(self, x):
            return quantize_1x128(x)

    x = torch.randn(6, 256, dtype=torch.bfloat16)
    program = torch.export.export(Quantize(), (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    torch.export.save(program, tmp_path / "quantize.pt2")
    x = torch.randn(9, 256, dtype=torch.bfloat16)
    result = torch.export.load(tmp_path / "quantize.pt2").module()(x)
    assert type(result) is type(quantize_1x128(x))
    assert torch.equal(result.scale, quantize_1x128(x).scale)


def test_a_saved_program_runs_in_another_process(tmp_path):
    """With fp8moe alone: it needs no code of what was exported."""
    case = CASES["GroupedExperts"]
    module, arguments = case.module("cpu"), case.arguments(6, "cpu")
    with torch.no_grad():
        program = torch.export.export(module, arguments)
    torch.export.save(program, tmp_path / "experts.pt2")
    torch.save((arguments, module(*arguments)), tmp_path / "expected.pt")
    script = """
import fp8moe, torch
arguments, expected = torch.load("expected.pt")
assert torch.equal(torch.export.load("experts.pt2").module()(*arguments), expected)
"""
    environment = os.environ | {"PYTHONPATH": str(Path(fp8moe.__file__).parent.parent)}
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment, check=True)


def test_a_trainable_layer_is_exported_without_its_backward():
    layer = FP8Linear(128, 64, master_dtype=torch.float32)
    with torch.no_grad():
        program = torch.export.export(layer, (torch.randn(6, 128),))
    called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert {name for name in called if name.startswith("fp8moe")} == {
        "fp8moe.quantized_master.default",
        "fp8moe.linear.default",
    }


def test_many_queries_are_scored_in_parts(monkeypatch):
    sizes = {"num_heads": 32, "head_dim": 32, "rope_head_dim": 16, "top_k": 4}
    indexer = FP8MQAIndexer(hidden_size=256, q_lora_rank=64, **sizes)
    arguments = CASES["FP8MQAIndexer"].arguments(37, "cpu")
    expected = indexer(*arguments)
    monkeypatch.setattr(mqa_indexer, "LOGITS_AT_A_TIME", 5 * 37)
    assert torch.equal(indexer(*arguments), expected)
