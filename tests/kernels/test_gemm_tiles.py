"""The tile configurations of the GEMM: what the cost model may choose, and that all of it compiles well."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fp8moe.kernels.gemm import launch
from fp8moe.kernels.gemm.cost import dense_time, resident_clusters
from fp8moe.kernels.gemm.epilogue import AddAndStore, PlainStore
from fp8moe.kernels.gemm.sm90 import PRODUCER_REGISTERS, TileConfig, tokens_of_tile, with_stages
from fp8moe.kernels.gemm.source import kernel_spec
from fp8moe.kernels.gemm.tiles import (
    GroupedProblem,
    choose_dense,
    choose_grouped,
    dense_candidates,
    describe_dense,
    raster_group,
)
from fp8moe.runtime import compilers, jit
from fp8moe.runtime.architectures import SM90
from fp8moe.runtime.sm90 import REGISTERS_PER_SM, SHARED_LIMIT, SHARED_PER_SM
from tests.gemm_variants import counts_shared_memory_alike, faults, largest, one_of_each, without_gpu
from tests.ptxas import COMPLAINTS

SMS = 132
BENCHMARK_WEIGHTS = ((576, 7168), (2112, 7168), (4096, 7168), (7168, 2048), (7168, 16384), (24576, 1536), (32768, 512))

problems = st.tuples(
    st.one_of(st.integers(1, 130), st.integers(1, 20000)),
    st.integers(1, 5000).map(lambda i: 8 * i),
    st.integers(1, 2500).map(lambda i: 16 * i),
    st.sampled_from((1, 16, 78, 114, 132)),
)


@settings(max_examples=200)
@given(problems)
@example((1, 8, 16, 1))
@example((20000, 40000, 40000, 132))
def test_candidates_are_possible(problem):
    m, n, k, num_sms = problem
    found = dense_candidates(*problem)
    assert found
    assert len(set(found)) == len(found)
    k_blocks = math.ceil(k / 128)
    for config in found:
        assert 1 <= config.stages <= 16
        assert config.stages >= 2 or k_blocks <= config.split_k, "one stage cannot be loaded while it is multiplied"
        assert 1 <= config.split_k <= min(8, k_blocks)
        assert config.threads * config.blocks_per_sm <= 2048
        assert config.shared_bytes <= SHARED_LIMIT == 227 * 1024
        assert (config.shared_bytes + 1024) * config.blocks_per_sm <= SHARED_PER_SM == 228 * 1024
        math_registers = config.warpgroups * 128 * config.math_registers
        at_launch = REGISTERS_PER_SM // config.threads // 8 * 8 * config.threads  # which setmaxnreg shares out anew
        assert math_registers + 128 * PRODUCER_REGISTERS <= at_launch
        # Splits are for tiles that leave SMs idle.
        tiles = math.ceil(m / config.block_m) * math.ceil(n / config.block_n)
        assert config.split_k == 1 or tiles <= resident_clusters(config, num_sms)


@settings(max_examples=200)
@given(problems)
def test_choice_is_the_cheapest_candidate(problem):
    found = dense_candidates(*problem)
    costs = [dense_time(config, *problem) for config in found]
    assert all(math.isfinite(cost) and cost > 0 for cost in costs)
    chosen = choose_dense(*problem)
    assert chosen in found
    assert dense_time(chosen, *problem) == min(costs)
    choose_dense.cache_clear()
    assert choose_dense(*problem) == chosen


@settings(max_examples=200)
@given(problems)
def test_tiles_share_the_tokens(problem):
    m = problem[0]
    for config in dense_candidates(*problem):
        each, tiles = tokens_of_tile(config, m), math.ceil(m / config.block_m)
        assert each <= config.block_m and each % 8 == 0  # loads of scales begin at multiples of four
        assert math.ceil(m / each) <= tiles
        if not config.tma_store:
            assert each * tiles - m < 8 * tiles, "TMA would load rows behind the last"


def test_tokens_of_tiles():
    narrow = TileConfig(64, 64, warpgroups=1)
    assert [tokens_of_tile(narrow, m) for m in (3, 40, 64, 65, 96, 130, 1000)] == [8, 40, 64, 40, 48, 48, 64]
    assert tokens_of_tile(TileConfig(256, 128, tma_store=True), 300) == 256  # whole slabs for TMA
    assert tokens_of_tile(TileConfig(128, 256, groups=4), 300) == 128


@settings(max_examples=200)
@given(problems)
def test_raster_group_is_some_of_the_rows(problem):
    m, n, k, num_sms = problem
    for config in dense_candidates(*problem):
        rows = math.ceil(m / config.block_m)
        for concurrent in {1, num_sms, rows * math.ceil(n / config.block_n)}:
            assert 1 <= raster_group(config, m, k, concurrent) <= rows


def test_raster_group_is_square_and_even():
    tile = TileConfig(128, 128)
    assert raster_group(tile, 128 * 100, 7168, 100) == 10
    assert raster_group(tile, 128 * 16, 7168, 100) == 8  # not 10 and 6
    assert raster_group(TileConfig(256, 64), 256 * 100, 7168, 100) == 5  # 5 x 20 tiles: 1280 x 1280


@pytest.mark.parametrize("pdl", [False, True])
def test_weights_of_the_whole_ring_come_early_behind_a_kernel_that_is_running(pdl, monkeypatch):
    arguments = without_gpu(monkeypatch, SMS)
    config = with_stages(TileConfig(64, 64, warpgroups=1), 7168)
    a, a_scale = torch.empty(64, 7168, dtype=torch.float8_e4m3fn), torch.empty(56, 64).t()
    b = torch.empty(64, 7168, dtype=torch.float8_e4m3fn)
    launch.build(launch.GemmOperands(a, a_scale, b, a_scale), PlainStore(torch.bfloat16), tile=config, pdl=pdl)
    assert config.stages > config.first_stages == 2
    assert arguments[-1].early_stages == (config.stages if pdl else 2)


def test_raster_group_is_all_rows_where_the_tokens_stay_in_l2():
    assert raster_group(TileConfig(128, 192), 4096, 512, 132) == 32
    assert raster_group(TileConfig(256, 128), 4096, 1536, 132) == 16
    assert raster_group(TileConfig(256, 128), 4096, 2048, 132) < 16


@pytest.mark.parametrize(
    "config", [TileConfig(128, 128), TileConfig(16, 64, weights_as_rows=True, warpgroups=1, split_k=4)], ids=str
)
@pytest.mark.parametrize("k", [16, 128, 640, 7168])
def test_stages_fill_shared_memory_or_cover_k(config, k):
    deep = with_stages(config, k)
    another = deep.shared_bytes + deep.stage_bytes
    held = math.ceil(math.ceil(k / 128) / config.split_k)
    ring = deep.stages * (deep.block_m + deep.block_n) * 128
    assert deep.stages >= 1
    assert another > SHARED_LIMIT or deep.stages == 16 or (config.reduces and deep.stages >= held)
    assert config.split_k == 1 or ring >= deep.partial_bytes, "a partial tile takes the place of the ring"


@given(problems)
def test_describe_lists_the_fastest_first(problem):
    lines = describe_dense(*problem).splitlines()
    costs = [float(line.split(" us ")[0]) for line in lines]
    assert costs == sorted(costs)
    assert sorted(line.split(" us ")[1].strip() for line in lines) == sorted(map(str, dense_candidates(*problem)))
    assert lines[0].endswith(str(choose_dense(*problem)))


def test_few_sms_hold_at_least_one_cluster():
    for split_k in range(1, 9):
        config = TileConfig(8, 64, weights_as_rows=True, warpgroups=1, split_k=split_k)
        held = [resident_clusters(config, num_sms) for num_sms in (1, 16, 78, 114, 132)]
        assert held == sorted(held)
        assert held[0] == 1
        assert held[-1] * split_k <= 132


@pytest.mark.parametrize("k", [1, 8, 77, 130])
def test_any_k_has_choices(k):
    """Also those that a layer pads to a multiple of 16 before it multiplies."""
    assert choose_dense(77, 96, k, SMS) in dense_candidates(77, 96, k, SMS)
    assert choose_grouped(GroupedProblem(77, 8, 77 / 8, 96, k, SMS)).groups == 8


# (n, k), m -> block_m, block_n, swap, splits K, by the cost model alone. A change that moves one is to be measured.
CHOICES = [
    ((7168, 2048), 1, (8, 64, True, True)),
    ((7168, 2048), 64, (64, 64, False, False)),
    ((7168, 2048), 128, (128, 64, False, False)),
    ((7168, 2048), 512, (256, 128, False, False)),
    ((7168, 2048), 4096, (256, 128, False, False)),
    ((2112, 7168), 1, (8, 64, True, True)),
    ((2112, 7168), 64, (64, 64, False, True)),
    ((2112, 7168), 128, (64, 64, False, True)),
    ((2112, 7168), 512, (128, 64, False, False)),
    ((2112, 7168), 4096, (192, 128, False, False)),
    ((4096, 7168), 1, (8, 64, True, True)),
    ((4096, 7168), 64, (64, 64, False, True)),
    ((4096, 7168), 128, (64, 64, False, False)),
    ((4096, 7168), 512, (128, 128, False, False)),
    ((4096, 7168), 4096, (256, 128, False, False)),
]


@pytest.mark.parametrize(("weight", "m", "expected"), CHOICES)
def test_choices_on_an_h200(weight, m, expected):
    chosen = min(dense_candidates(m, *weight, SMS), key=lambda config: dense_time(config, m, *weight, SMS))
    assert (chosen.block_m, chosen.block_n, chosen.weights_as_rows, chosen.split_k > 1) == expected


def variants() -> list[tuple[TileConfig, int, int]]:
    return one_of_each(
        (config, n, k)
        for n, k in (*BENCHMARK_WEIGHTS, (8, 16), (136, 144))
        for m in (8, 16, 32, 64, 128, 256, 512, 4096)
        for num_sms in (16, 78, 132)
        for config in dense_candidates(m, n, k, num_sms)
    )


def test_every_variant_keeps_to_its_registers():
    compiled = variants()
    assert {config.block_m for config, _, _ in compiled} == {8, 16, 32, 64, 128, 192, 256}
    assert not faults(compiled, PlainStore(torch.float32), torch.bfloat16)
    assert not faults(largest(compiled), PlainStore(torch.bfloat16))


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_a_matrix_that_is_added_spills_behind_the_main_loop_of_the_largest_tiles(out_dtype):
    """Those of 128x256; of the others every second is compiled with each dtype."""
    most, others = [], []
    for variant in largest(variants()):
        (most if variant[0].block_m * variant[0].block_n == 128 * 256 else others).append(variant)
    assert most and not faults(others[out_dtype == torch.float32 :: 2], AddAndStore(out_dtype))
    for config, (memory, complaints, static, registers) in faults(most, AddAndStore(out_dtype)).items():
        assert max(memory) <= 60, (config, memory)
        assert not complaints and not static and registers == 168, (config, complaints, static, registers)


def test_few_steps_are_not_unrolled_into_serial_products():
    tiles = (TileConfig(256, 128, tma_store=True), TileConfig(128, 192, tma_store=True))
    assert not faults([(with_stages(tile, 512), 32768, 512) for tile in tiles], PlainStore(torch.bfloat16))


def test_serialized_products_are_reported():
    config = TileConfig(128, 128)
    text = jit.full_source(kernel_spec(config, 256, 1024, PlainStore(torch.bfloat16)))
    changed = text.replace("wgmma_commit();", "wgmma_commit(); partial[0] += 1.f;")
    _, log = compilers.compile_source(changed, "gemm.cu", "nvrtc", SM90.flag)
    assert changed != text and COMPLAINTS.search(log)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "config",
    [
        TileConfig(128, 128),
        TileConfig(128, 112, stages=5),
        TileConfig(128, 176, stages=3, split_k=3),
        TileConfig(64, 96, warpgroups=1, stages=3, split_k=5, blocks_per_sm=2),
        TileConfig(8, 64, weights_as_rows=True, warpgroups=1, stages=3),
        TileConfig(16, 128, weights_as_rows=True, stages=5, split_k=7),
    ],
    ids=str,
)
def test_shared_memory_is_what_the_kernel_lays_out(config, out_dtype):
    spec = kernel_spec(config, 2112, 7168, PlainStore(out_dtype))
    assert counts_shared_memory_alike(spec, config.shared_bytes)
