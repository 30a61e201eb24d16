"""Batch invariance: K is summed in one order for any number of tokens; kernels of its own; what keeps the mode."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

import fp8moe
from fp8moe.kernels.gemm.epilogue import PlainStore
from fp8moe.kernels.gemm.sm90 import TileConfig
from fp8moe.kernels.gemm.source import kernel_spec
from fp8moe.kernels.gemm.tiles import (
    DenseProblem,
    GroupedProblem,
    choose,
    choose_dense,
    dense_candidates,
    invariant_parts,
)
from fp8moe.kernels.gemm.warmup import Family
from fp8moe.runtime import config, launch
from fp8moe.runtime.fixed_rows import ROWS, linears_by_fixed_rows
from fp8moe.runtime.launch import planned
from tests.experts_cases import make, route
from tests.gemm_cases import operands
from tests.gemm_variants import faults, largest, one_of_each

SMS = 132
WEIGHTS = ((576, 7168), (2112, 7168), (4096, 7168), (24576, 1536), (32768, 512), (7168, 2048), (5120, 2048), (136, 144))
TOKENS = (1, 2, 8, 17, 33, 64, 65, 128, 129, 300, 512, 1000, 4096, 20000)


@pytest.fixture
def invariant():
    with fp8moe.batch_invariant():
        yield


def order(tile: TileConfig) -> int:
    """In how many parts a tile sums K."""
    return tile.split_k * tile.k_parts


def chosen_for(m: int, n: int, k: int, sms: int = SMS) -> TileConfig:
    """The tile under the settings that hold."""
    return choose(DenseProblem(m, n, k, sms), PlainStore(torch.bfloat16))


# ---- the choice ----


@pytest.mark.parametrize(("n", "k"), WEIGHTS)
def test_k_is_summed_alike_for_any_number_of_tokens(n, k, invariant):
    parts = invariant_parts(n, k)
    for sms in (132, 114, 20):
        found = {order(chosen_for(m, n, k, sms)) for m in TOKENS}
        assert found == {parts}
        assert all({order(tile) for tile in dense_candidates(m, n, k, sms, parts)} == {parts} for m in TOKENS)
    variants = Family(n, k, 0, PlainStore(torch.bfloat16)).all_variants(1, 200, SMS)
    assert variants == {kernel_spec(chosen_for(m, n, k), n, k, PlainStore(torch.bfloat16)) for m in range(1, 201)}


def test_narrow_weights_are_split_and_wide_ones_are_not():
    assert [invariant_parts(n, 7168) > 1 for n in (256, 576, 2112, 24576)] == [True, True, True, False]


@pytest.mark.parametrize(("groups", "n", "k"), [(2, 512, 7168), (8, 4096, 7168), (256, 2048, 768)])
def test_groups_are_never_split(groups, n, k, invariant):
    for rows in TOKENS:
        problem = GroupedProblem(rows, groups, rows / groups, n, k, SMS)
        assert choose(problem, PlainStore(torch.bfloat16)).split_k == 1


def test_without_the_mode_nothing_changes():
    for n, k in WEIGHTS:
        for m in TOKENS:
            chosen = chosen_for(m, n, k)
            assert chosen == choose_dense(m, n, k, SMS) and chosen.k_parts == 1


@pytest.mark.parametrize(
    ("k", "parts", "dtype"), [(7168, 2, torch.bfloat16), (7168, 3, torch.float32), (16384, 2, torch.float32)]
)
def test_variants_that_sum_parts_compile_without_spills(k, parts, dtype):
    """Of equal length, and not; more than 32 blocks long."""
    tiles = [(tile, 576, k) for m in (60, 500) for tile in dense_candidates(m, 576, k, SMS, parts) if tile.k_parts > 1]
    tiles = one_of_each(tiles)
    assert {tile.keeps_parts for tile, _, _ in tiles} == {True, False}
    assert {(256, 64), (128, 96), (128, 128), (128, 160)} <= {(tile.block_m, tile.block_n) for tile, _, _ in tiles}
    assert not faults(tiles if parts == 3 else largest(tiles), PlainStore(dtype))


def test_memory_for_the_sums_of_parts():
    wide, narrow, usual = TileConfig(128, 160, k_parts=2), TileConfig(128, 64, k_parts=2), TileConfig(128, 160)
    assert not wide.keeps_parts and wide.part_registers == 56
    assert wide.part_sum_bytes == 128 * 160 * 4 - 256 * 56 * 4  # of 80 values in each of 256 threads
    assert narrow.keeps_parts and narrow.part_registers == 32 and narrow.part_sum_bytes == 0
    assert usual.part_registers == usual.part_sum_bytes == 0


# ---- the mode ----


def test_the_mode_ends_with_its_block(monkeypatch):
    assert not config.settings.batch_invariant
    with fp8moe.batch_invariant():
        assert config.settings.batch_invariant
        with fp8moe.batch_invariant(False):
            assert not config.settings.batch_invariant
        assert config.settings.batch_invariant
    with pytest.raises(KeyError), fp8moe.batch_invariant():
        raise KeyError
    with pytest.raises(TypeError, match="enabled: expected a bool, got str"), fp8moe.batch_invariant("yes"):
        pass
    assert not config.settings.batch_invariant
    monkeypatch.setenv("FP8MOE_BATCH_INVARIANT", "1")
    try:
        assert config.reload().batch_invariant
        with fp8moe.batch_invariant(False):
            assert not config.settings.batch_invariant
    finally:
        monkeypatch.delenv("FP8MOE_BATCH_INVARIANT")
        config.reload()


def test_blocks_of_several_threads():
    """They need not end in the order in which they began: none ends another's mode, and nothing is left of any."""
    one, other = fp8moe.batch_invariant(), fp8moe.batch_invariant()
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert config.settings.batch_invariant
    with fp8moe.batch_invariant(False):
        other.__exit__(None, None, None)
        assert not config.settings.batch_invariant
    assert not config.settings.batch_invariant


class InTheMode(torch.nn.Module):
    def forward(self, x):
        with fp8moe.batch_invariant():
            return fp8moe.quantize_1x128(x).scale, config.settings.batch_invariant


def test_graphs_cannot_hold_the_mode(fresh_compiler):
    x = torch.randn(4, 128)
    with pytest.raises(RuntimeError, match="batch_invariant: an exported program cannot hold the mode; enter it where"):
        torch.export.export(InTheMode(), (x,), strict=False)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="batch_invariant: a graph cannot hold the mode; enter it"):
        torch.compile(InTheMode(), backend="eager", fullgraph=True)(x)
    assert torch.compile(InTheMode(), backend="eager")(x)[1]
    assert not config.settings.batch_invariant


def test_plans_are_kept_by_mode(monkeypatch):
    monkeypatch.setattr(launch, "device_guard", lambda index: nullcontext())
    plan = planned(lambda index: object())
    usual = plan(0)
    with fp8moe.batch_invariant():
        assert plan.find(0) is None and plan(0) is plan.find(0) is not usual
    assert plan(0) is plan.find(0) is usual


# ---- results of the reference backend ----


@pytest.mark.parametrize(("n", "k"), [(136, 144), (576, 1536)])
def test_gemm(n, k, invariant):
    a, b = operands(200, n, k)
    whole = fp8moe.gemm(a, b)
    for rows in (slice(0, 1), slice(7, 9), slice(60, 130), slice(199, 200)):
        assert torch.equal(fp8moe.gemm(fp8moe.FP8Tensor(a.data[rows], a.scale[rows]), b), whole[rows])


def test_experts(invariant):
    layer = make(8, 272, 208, 0)
    x = torch.randn(150, 272, dtype=torch.bfloat16)
    index, weights = route(150, 8, 3)
    whole = layer(x, index, weights)
    for rows in (slice(0, 1), slice(60, 70), slice(149, 150)):
        assert torch.equal(layer(x[rows], index[rows], weights[rows]), whole[rows])


def test_linears_that_are_not_in_fp8():
    weight, bias = torch.randn(48, 80), torch.randn(48)
    x = torch.randn(3, ROWS, 80)
    usual = F.linear(x, weight, bias)
    with linears_by_fixed_rows():
        assert torch.equal(F.linear(x, weight, bias), usual)
    with fp8moe.batch_invariant(), linears_by_fixed_rows():
        whole = F.linear(x, weight, bias)
        assert whole.shape == usual.shape and torch.allclose(whole, usual, atol=1e-4)
        assert torch.equal(F.linear(x[1, 5:6], weight, bias), whole[1, 5:6])
        assert torch.equal(F.linear(x[1, 5], weight=weight, bias=bias), whole[1, 5])
        assert F.linear(x[:0], weight).shape == (0, ROWS, 48)


def test_decoders():
    pytest.importorskip("transformers")
    from fp8moe.decode import GraphDecoder
    from tests.decode_models import tiny_mixtral

    model = tiny_mixtral()
    decoder = GraphDecoder(model, max_length=32)
    with fp8moe.batch_invariant():
        with pytest.raises(RuntimeError, match="made outside of fp8moe.batch_invariant"):
            decoder.generate(torch.tensor([[2, 3, 5]]), max_new_tokens=1)
        with pytest.raises(ValueError, match="MixtralForCausalLM cannot be batch invariant.*sdpa: .*torch.float32"):
            GraphDecoder(model, max_length=32)
