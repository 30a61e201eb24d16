"""Exported and compiled programs on the GPU: the results of eager calls there, for other numbers of tokens."""

import importlib.util

import pytest

from tests.aot_inductor import can_package
from tests.graph_cases import CASES
from tools.compile_matrix import MARK, PAGE, kinds, read_page, rows

pytestmark = pytest.mark.gpu

SAMPLE = ("gemm, c and out", "grouped_gemm_masked", "paged_mqa_logits", "FP8Linear", "GroupedExperts")


@pytest.fixture(scope="module")
def table():
    return read_page(PAGE.read_text().partition(MARK)[2])


@pytest.mark.parametrize("name", CASES)
def test_export(name, table):
    (_, row), *_ = rows([name], "cuda", columns=("export",))
    assert kinds(row)["export"] == kinds(table[name])["export"]


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="torch.compile needs Triton")
@pytest.mark.parametrize("name", SAMPLE)
def test_compile(name, table):
    (_, row), *_ = rows([name], "cuda", columns=("compile",))
    assert kinds(row)["compile"] == kinds(table[name])["compile"]


@pytest.mark.skipif(not can_package(on_gpu=True), reason="AOTInductor cannot make and load a package here")
@pytest.mark.parametrize("name", SAMPLE)
def test_package(name, table):
    (_, row), *_ = rows([name], "cuda", columns=("AOTInductor",))
    assert kinds(row)["AOTInductor"] == kinds(table[name])["AOTInductor"]
