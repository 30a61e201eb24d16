"""Every kernel that the cost model chooses for some number of rows is among the variants of its family."""

import random

import pytest
import torch

from fp8moe.kernels.activation import Activation
from fp8moe.kernels.gemm import launch
from fp8moe.kernels.gemm.epilogue import PeerStore, PlainStore, SwigluQuantize
from fp8moe.kernels.gemm.sm90 import without_tma_store
from fp8moe.kernels.gemm.source import kernel_spec
from fp8moe.kernels.gemm.tiles import GroupedProblem, Grouping, choose_dense, choose_grouped
from fp8moe.kernels.gemm.warmup import Family
from fp8moe.quant.formats import ceil_div, empty_mn_major
from fp8moe.runtime import jit
from tests.gemm_variants import without_gpu

SMS = 132
MOST = 16384


@pytest.mark.parametrize("n, k", [(5120, 2048), (2112, 7168)])
def test_dense(n, k):
    epilogue = PlainStore(torch.bfloat16)
    variants = Family(n, k, 0, epilogue).variants(MOST, SMS)
    draw = random.Random(0)
    missing = [
        m
        for m in [*range(1, 300), *(draw.randint(300, MOST) for _ in range(200))]
        if kernel_spec(choose_dense(m, n, k, SMS), n, k, epilogue) not in variants
    ]
    assert len(missing) <= 5  # where the choice is a near tie between two neighbours of the ladder
    assert 4 < len(variants) < 31


@pytest.mark.parametrize("epilogue", [SwigluQuantize(Activation()), PlainStore(torch.bfloat16)])
def test_grouped(epilogue):
    n, k, groups = 1536, 2048, 128
    variants = Family(n, k, groups, epilogue).variants(8 * MOST, SMS)
    draw = random.Random(0)
    rows = [*range(8, 2048, 24), *(draw.randint(2048, 8 * MOST) for _ in range(100))]
    problems = {m: GroupedProblem(m, groups, m / groups, n, k, SMS, swiglu=epilogue.gated) for m in rows}
    chosen = {m: choose_grouped(problem) for m, problem in problems.items()}
    missing = [m for m, config in chosen.items() if kernel_spec(config, n, k, epilogue) not in variants]
    assert len(missing) <= 3
    assert 4 < len(variants) < 25


def test_rows_for_other_gpus():
    """The tiles that TMA would write are none of them; tests/kernels/test_grouped_tiles.py compiles those without."""
    n, k, groups, epilogue = 2048, 768, 8, PeerStore(torch.bfloat16, 2, 100)
    variants = Family(n, k, groups, epilogue).variants(8 * MOST, SMS)
    for rows in (1, 8, 64, 1000, 8000, 8 * MOST):
        chosen = choose_grouped(GroupedProblem(rows, groups, rows / groups, n, k, SMS))
        if rows in (8 * MOST, 1):
            assert chosen.tma_store == (rows > 1)
        assert kernel_spec(without_tma_store(chosen, k), n, k, epilogue) in variants
    assert 4 < len(variants) < 25


def test_a_part_counts_with_the_rows_of_the_whole(monkeypatch):
    noted, n, k = [], 2112, 1024
    monkeypatch.setattr(launch, "note", lambda family, rows: noted.append((family.groups, rows)))
    without_gpu(monkeypatch, SMS)
    a, b = (torch.empty(*shape, k, dtype=torch.float8_e4m3fn) for shape in ((97,), (4, n)))
    scale, out = empty_mn_major((97, ceil_div(k, 128)), device="cpu"), torch.empty(97, n, dtype=torch.bfloat16)
    for whole in (None, (7 * 24, 8)):
        launch.build(launch.GemmOperands(a, scale, b, scale), PlainStore(torch.bfloat16), Grouping(whole=whole), out)
    assert noted == [(4, 97), (4, 7 * 24)]


def test_load_all_compiles_each_once(monkeypatch):
    compiled, loaded = [], {}
    monkeypatch.setattr(jit, "cubin", lambda spec: compiled.append(spec) or b"")
    monkeypatch.setattr(jit, "_load_cubin", lambda code, name: name)
    monkeypatch.setattr(jit, "_kernels", loaded)
    specs = {jit.KernelSpec("gemm.cu", "gemm", (("A", number),)) for number in range(5)}
    jit.load_all(specs)
    assert set(compiled) == set(loaded) == specs and len(compiled) == 5
    jit.load_all(specs)
    assert len(compiled) == 5
