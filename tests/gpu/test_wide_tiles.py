"""128x256 tiles that are halved in the last wave of all blocks, or upright at the end of a group (``TileShape`` of
cuda/sm90/gemm_schedule.cuh): results have the bits of 128x128 tiles, which are neither."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from benchmarks.operands import rounded_error
from fp8moe.kernels.gemm import launch
from fp8moe.kernels.gemm.epilogue import AddLowRank, PlainStore
from fp8moe.kernels.gemm.launch import GemmOperands, multiply_with
from fp8moe.kernels.gemm.sm90 import TileConfig, with_stages
from fp8moe.kernels.gemm.tiles import Grouping
from fp8moe.quant.formats import FP8Tensor, empty_mn_major
from tests import gemm_cases
from tests.gemm_cases import exact
from tests.gpu.checks import captured, same_bits, same_every_time

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
NAN = float("nan")
TOLERANCE = 3e-4  # beyond what rounding the exact result costs
# Rows of each group. On 132 SMs the last wave has some tiles of each shape, or none, with one of the WEIGHTS.
GROUPS = {
    "upright": [192] * 20,
    "a row more": [129] * 40,
    "edges": [1, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 300, 320, 321, 0, 448, 449, 512, 5],
    "one": [700],
    "few tiles": [0, 150, 0],
    "skewed": [1000, 300, 0, 77, 129, 190, 2, 64, 1500],
    "none": [0, 0],
}
# The last columns of tiles are 8, 128, 136 and 256 wide; K takes one step, as many as are unrolled, and more.
WEIGHTS = ((264, 272), (384, 1152), (2184, 144), (4104, 1408), (6144, 512))
WIDE = {"rows": TileConfig(128, 256, half_tiles=True), "staged": TileConfig(128, 256, half_tiles=True, tma_store=True)}
PLAIN = TileConfig(128, 128)
activations = partial(gemm_cases.activations, spread=4, device=DEVICE)
weights = partial(gemm_cases.weights, device=DEVICE)
offsets = partial(gemm_cases.offsets, device=DEVICE)


def poisoned(m, n, dtype):
    return torch.full((m, n), NAN, dtype=dtype, device=DEVICE)


def grouped(tile, a, b, groups, dtype=torch.bfloat16, low_rank=None, **options):
    out = poisoned(len(a.data), b.data.shape[1], dtype)
    config = with_stages(replace(tile, groups=len(b.data)), a.data.shape[1])
    operands, epilogue, more = GemmOperands(*a, *b, groups=groups), PlainStore(dtype), ()
    if low_rank:
        ranks, factors = low_rank
        epilogue, more = AddLowRank(dtype, rank=ranks.shape[1]), (ranks.data_ptr(), factors.data_ptr())
    found = launch.grouped(a.data.get_device(), operands, epilogue, Grouping(**options), tile=config)
    launch.run(found, operands, out, *more)
    return out


@pytest.mark.parametrize("tile", WIDE)
@pytest.mark.parametrize("sizes", GROUPS)
@pytest.mark.parametrize(("n", "k"), WEIGHTS)
def test_groups_have_the_bits_of_plain_tiles(n, k, sizes, tile):
    sizes = GROUPS[sizes]
    a, b = activations(3 + sum(sizes) + 5, k), weights(len(sizes), n, k)
    groups = offsets(sizes, start=3)
    for dtype in (torch.bfloat16, torch.float32):
        out = grouped(WIDE[tile], a, b, groups, dtype)
        assert same_bits(out, grouped(PLAIN, a, b, groups, dtype))
        assert out[:3].isnan().all() and out[3 + sum(sizes) :].isnan().all()
    for expert, (first, size) in enumerate(zip(groups.tolist(), sizes, strict=False)):
        rows = slice(first, first + size)
        if size:
            expected = exact(FP8Tensor(a.data[rows], a.scale[rows]), FP8Tensor(b.data[expert], b.scale[expert]))
            assert rounded_error(out[rows], expected) <= TOLERANCE


@pytest.mark.parametrize("tile", WIDE)
def test_masked_groups_and_ranges(tile):
    sizes, max_m, n, k = [129, 0, 320, 192, 64, 257, 130, 1], 384, 2184, 1152
    a, b = activations(len(sizes) * max_m, k), weights(len(sizes), n, k)
    used = torch.tensor(sizes, dtype=torch.int32, device=DEVICE)
    options = dict(max_m=max_m, expected_m=192)
    assert same_bits(grouped(WIDE[tile], a, b, used, **options), grouped(PLAIN, a, b, used, **options))
    first = torch.arange(len(sizes), device=DEVICE) * max_m
    ranges = torch.stack([first, first + used], 1).int().flip(0).contiguous()
    assert same_bits(grouped(WIDE[tile], a, b, ranges), grouped(PLAIN, a, b, ranges))


@pytest.mark.parametrize("tile", WIDE)
def test_low_rank_products(tile):
    sizes, n, k = GROUPS["edges"], 2184, 1152
    a, b = activations(sum(sizes), k), weights(len(sizes), n, k)
    ranks, factors = (torch.randn(*shape, 16, device=DEVICE).bfloat16() for shape in ((sum(sizes),), (len(sizes), n)))
    outs = (grouped(one, a, b, offsets(sizes), low_rank=(ranks, factors)) for one in (WIDE[tile], PLAIN))
    assert same_bits(*outs)


@pytest.mark.parametrize("bad", [NAN, float("inf")])
def test_bad_values_stay_in_their_rows_and_columns(bad):
    sizes, n, k = [192, 129, 300], 520, 1152
    a, b = activations(sum(sizes), k), weights(3, n, k)
    clean = grouped(WIDE["staged"], a, b, offsets(sizes))
    assert clean.isfinite().all()
    rows = [150, 192 + 128, 192 + 129 + 299]  # in the third slab of upright tiles
    scale = empty_mn_major(a.scale.shape, device=DEVICE).copy_(a.scale)
    scale[rows, 4] = bad
    out = grouped(WIDE["staged"], FP8Tensor(a.data, scale), b, offsets(sizes))
    assert not out[rows].isfinite().any()
    out[rows] = clean[rows]
    assert same_bits(out, clean)


@pytest.mark.parametrize("tile", WIDE)
def test_equal_inputs_give_equal_bits(tile):
    sizes, n, k = GROUPS["skewed"], 4104, 1152
    a, b = activations(sum(sizes), k), weights(len(sizes), n, k)
    same_every_time(lambda: grouped(WIDE[tile], a, b, offsets(sizes)))


def test_sizes_that_change_between_replays_of_a_graph():
    n, k = 2184, 1152
    cases = [GROUPS["skewed"], [192] * 9, [129, 0, 257, 192, 64, 1, 320, 500, 130], [0] * 9]
    a, b = activations(max(map(sum, cases)), k), weights(9, n, k)
    groups, out = offsets(cases[0]), poisoned(len(a.data), n, torch.bfloat16)
    config = with_stages(replace(WIDE["staged"], groups=9), k)

    def run():
        multiply_with(config, GemmOperands(*a, *b, groups=groups), out, Grouping())

    graph, _ = captured(run)
    for sizes in cases:
        groups.copy_(offsets(sizes))
        out.fill_(NAN)
        graph.replay()
        assert same_bits(out, grouped(PLAIN, a, b, groups))


@pytest.mark.parametrize("tile", WIDE)
@pytest.mark.parametrize(("n", "k"), WEIGHTS)
@pytest.mark.parametrize("m", [129, 1000, 1032, 4096])
def test_one_matrix(m, n, k, tile):
    a, b = gemm_cases.operands(m, n, k, spread=4, device=DEVICE)
    outs = [poisoned(m, n, torch.bfloat16) for _ in range(2)]
    for config, out in zip((WIDE[tile], PLAIN), outs, strict=True):
        multiply_with(with_stages(config, k), GemmOperands(*a, *b), out)
    assert same_bits(*outs)
    assert rounded_error(outs[0], exact(a, b)) <= TOLERANCE
