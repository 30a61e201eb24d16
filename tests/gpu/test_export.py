"""Exported and compiled programs on the GPU: the results of eager calls there, for other numbers of tokens."""

import importlib.util
import shutil

import pytest
from torch.utils.cpp_extension import CUDA_HOME

from tests.graph_cases import CASES
from tools.compile_matrix import MARK, PAGE, kinds, read_page, rows

pytestmark = pytest.mark.gpu

CAN_COMPILE = shutil.which("g++") and importlib.util.find_spec("triton") and CUDA_HOME
SAMPLE = ("gemm, c and out", "grouped_gemm_masked", "paged_mqa_logits", "FP8Linear", "GroupedExperts")


@pytest.fixture(scope="module")
def table():
    return read_page(PAGE.read_text().partition(MARK)[2])


@pytest.mark.parametrize("name", CASES)
def test_export(name, table):
    (_, row), *_ = rows([name], "cuda", columns=("export",))
    assert kinds(row)["export"] == kinds(table[name])["export"]


@pytest.mark.skipif(not CAN_COMPILE, reason="AOTInductor needs a C++ compiler, Triton and the CUDA toolkit")
@pytest.mark.parametrize("name", SAMPLE)
def test_compile_and_package(name, table):
    columns = ("compile", "AOTInductor")
    (_, row), *_ = rows([name], "cuda", columns=columns)
    assert kinds(row) == {column: kinds(table[name])[column] for column in columns}
