"""The tile configurations of the grouped GEMMs: what the cost model may choose, and that all of it compiles well."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8moe.kernels.activation import Activation
from fp8moe.kernels.gemm.cost import group_sizes, grouped_time, resident_clusters
from fp8moe.kernels.gemm.epilogue import AddLowRank, Columns, Packing, PeerStore, PlainStore, SwigluQuantize
from fp8moe.kernels.gemm.launch import gathers
from fp8moe.kernels.gemm.sm90 import (
    BUSY_PRODUCER_REGISTERS,
    PRODUCER_REGISTERS,
    TileConfig,
    fits,
    gathering,
    with_stages,
    without_tma_store,
)
from fp8moe.kernels.gemm.source import kernel_spec
from fp8moe.kernels.gemm.tiles import (
    GroupedProblem,
    choose_grouped,
    describe_grouped,
    grouped_candidates,
    row_tiles_bound,
)
from fp8moe.runtime.sm90 import REGISTERS_PER_SM, SHARED_LIMIT, SHARED_PER_SM
from tests.gemm_variants import counts_shared_memory_alike, faults, largest, one_of_each

SMS = 132
BENCHMARK_WEIGHTS = ((4096, 7168), (7168, 2048), (1536, 2048), (2048, 768))

problems = st.fixed_dictionaries(
    {
        "rows": st.integers(1, 100_000),
        "groups": st.integers(1, 1024),
        "n": st.integers(1, 1000).map(lambda i: 32 * i),
        "k": st.integers(1, 1000).map(lambda i: 16 * i),
        "num_sms": st.sampled_from((1, 78, 132)),
        "max_m": st.none() | st.integers(1, 5000),
        "swiglu": st.booleans(),
    }
)


@settings(max_examples=150, deadline=None)
@given(problems, st.none() | st.floats(0, 5000))
def test_candidates_are_possible(problem, expected_m):
    rows, groups = problem["rows"], problem["groups"]
    if problem["max_m"] is not None:
        rows = groups * problem["max_m"]
    expected = rows / groups if expected_m is None else expected_m
    found = grouped_candidates(GroupedProblem(**problem | {"rows": rows, "expected_m": expected}))
    assert found and len(set(found)) == len(found)
    for config in found:
        assert config.groups == groups
        assert config.shared_bytes <= SHARED_LIMIT
        assert (config.shared_bytes + 1024) * config.blocks_per_sm <= SHARED_PER_SM
        at_launch = REGISTERS_PER_SM // config.threads // 8 * 8 * config.threads  # which setmaxnreg shares out anew
        assert 128 * (config.warpgroups * config.math_registers + PRODUCER_REGISTERS) <= at_launch
        assert 128 * (config.warpgroups * (config.math_registers - 8) + BUSY_PRODUCER_REGISTERS) <= at_launch
        assert not problem["swiglu"] or (config.block_n == 256 and not config.tma_store)
        if config.split_k > 1:
            tiles = row_tiles_bound(config.block_m, rows, groups, problem["max_m"]) * math.ceil(
                problem["n"] / config.block_n
            )
            assert tiles <= resident_clusters(config, problem["num_sms"]), "a split tile is its blocks' only one"
        cost = grouped_time(config, groups, expected, problem["n"], problem["k"], problem["num_sms"])
        assert 0 < cost < math.inf


@given(st.lists(st.integers(0, 300), min_size=1, max_size=50), st.sampled_from((8, 16, 128, 256)), st.integers(0, 50))
def test_bound_holds_for_any_sizes(sizes, block_m, slack):
    tiles = sum(math.ceil(size / block_m) for size in sizes)
    assert tiles <= row_tiles_bound(block_m, sum(sizes) + slack, len(sizes), None)
    assert tiles <= row_tiles_bound(block_m, 0, len(sizes), max(sizes))


@pytest.mark.parametrize("expected_m", [0.03, 0.5, 2, 8, 20, 64, 1000, 8192])
@pytest.mark.parametrize("skewed", [False, True])
def test_group_sizes_have_the_expected_mean(expected_m, skewed):
    sizes = group_sizes(expected_m, skewed)
    assert sum(rows * probability for rows, probability in sizes) == pytest.approx(expected_m, rel=0.02)
    assert sum(probability for _, probability in sizes) <= 1 + 1e-9


# E, (n, k), swiglu, expected rows -> block_m, block_n, swap, by the cost model alone. A change that moves one of these
# is to be measured.
CHOICES = [
    (32, (4096, 7168), True, 0.25, (8, 256, True)),
    (32, (4096, 7168), True, 8, (16, 256, True)),
    (32, (4096, 7168), True, 512, (128, 256, False)),
    (32, (7168, 2048), False, 0.25, (16, 128, True)),
    (32, (7168, 2048), False, 2048, (128, 256, False)),
    (256, (4096, 7168), True, 16, (32, 256, True)),
    (32, (4096, 7168), False, 192, (128, 256, False)),
]


@pytest.mark.parametrize(("groups", "weight", "swiglu", "expected_m", "tile"), CHOICES)
def test_choices_on_an_h200(groups, weight, swiglu, expected_m, tile):
    rows, problem = round(groups * expected_m), (groups, expected_m, *weight, SMS)
    found = grouped_candidates(GroupedProblem(rows, *problem, swiglu=swiglu))
    chosen = min(found, key=lambda config: grouped_time(config, *problem))
    assert (chosen.block_m, chosen.block_n, chosen.weights_as_rows) == tile


@pytest.mark.parametrize("swiglu", [False, True])
def test_a_part_sums_k_as_the_whole_does(swiglu):
    """For every part of some experts, with few rows or many."""
    splits = set()
    for rows, experts, (n, k) in itertools.product((1, 3, 16, 100, 5000), (2, 8, 64), ((208, 1040), (4096, 7168))):
        problem = GroupedProblem(rows, experts, rows / experts, n, k, SMS, swiglu=swiglu)
        whole = choose_grouped(problem)
        splits.add(whole.split_k)
        for ranks in (2, experts):
            for rows_here in {1, max(rows // ranks, 1), rows}:
                here = problem._replace(rows=rows_here, groups=experts // ranks)
                part = choose_grouped(here, whole=(rows, experts))
                assert part.split_k == whole.split_k and part.groups == experts // ranks
    assert len(splits) > 1


@pytest.mark.parametrize("swiglu", [False, True])
def test_describe_prints_the_candidates_in_order(swiglu):
    lines = describe_grouped(256, 32, 8.0, 4096, 7168, swiglu=swiglu).splitlines()
    costs = [float(line.split(" us ")[0]) for line in lines]
    assert costs == sorted(costs)
    assert lines[0].endswith(str(choose_grouped(GroupedProblem(256, 32, 8.0, 4096, 7168, SMS, swiglu=swiglu))))


def variants(swiglu: bool, packed: str | None = None) -> list[tuple[TileConfig, int, int]]:
    return one_of_each(
        (config, n, k)
        for groups in (1, 8, 256, 1024)
        for n, k in BENCHMARK_WEIGHTS
        for expected_m in (1 / groups, 1, 8, 16, 24, 64, 1000)
        for config in grouped_candidates(
            GroupedProblem(math.ceil(groups * expected_m), groups, expected_m, n, k, SMS, swiglu=swiglu, packed=packed)
        )
    )


STORE, SWIGLU = PlainStore(torch.bfloat16), SwigluQuantize(Activation())
LOW_RANK, CLAMPED = AddLowRank(torch.bfloat16, rank=64), SwigluQuantize(Activation(limit=7.0, alpha=1.7))
KEEPING = SwigluQuantize(Activation(limit=7.0, alpha=1.7), keeps=True)
PEER_STORES = [PeerStore(torch.bfloat16, 8, 100, True), PeerStore(torch.float32, 2, 100, False)]


@pytest.mark.parametrize("epilogue", [LOW_RANK, CLAMPED], ids=str)
def test_every_variant_keeps_to_its_registers(epilogue):
    """With what needs the most registers of all that is done with the sums."""
    assert not faults(variants(epilogue.gated), epilogue)


def test_every_variant_that_keeps_gate_and_up_keeps_to_its_registers():
    for config, (memory, complaints, static, registers) in faults(variants(True), KEEPING).items():
        # Two values that only the ends of a tile need, of three blocks that share an SM.
        assert config.blocks_per_sm == 3 and max(memory) <= 8, (config, memory)
        assert not complaints and not static and registers == 56, (config, complaints, static, registers)


@pytest.mark.parametrize(
    "epilogue", [STORE, SWIGLU, SwigluQuantize(Activation(), True), SwigluQuantize(Activation(limit=7.0))], ids=str
)
def test_the_largest_tiles_keep_to_their_registers(epilogue):
    assert not faults(largest(variants(epilogue.gated)), epilogue)


PACKINGS = {
    "mxfp4": Packing("mxfp4", 32, torch.uint8),
    "int4": Packing("int4", 128, torch.bfloat16),
    "int4-32": Packing("int4", 32, torch.float32),
    "nvfp4": Packing("nvfp4", 16, torch.float8_e4m3fn),
}


@pytest.mark.parametrize("packing", PACKINGS.values(), ids=PACKINGS)
@pytest.mark.parametrize("epilogue", [STORE, CLAMPED], ids=["store", "swiglu"])
def test_weights_in_four_bits_keep_to_their_registers(epilogue, packing):
    found = variants(epilogue.gated, packing.format)
    assert any(config.unpacks for config, _, _ in found) == (packing.format != "int4")
    for config, (memory, complaints, static, registers) in faults(found, epilogue, torch.bfloat16, packing).items():
        # Values that only the ends of a tile need.
        assert config.name in ("8x256*2", "16x256*2") and max(memory) <= 40, (config, memory)
        assert not complaints and not static and registers == 80, (config, complaints, static, registers)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 6), st.integers(1, 40), st.integers(1, 1024), st.sampled_from((None, "mxfp4", "int4", "nvfp4")))
def test_tokens_are_gathered_where_weights_are_the_rows(tokens, top_k, experts, packed):
    """Every tile that may be chosen then has them as such, and room for the tokens of the rows."""
    if not gathers(tokens, top_k, experts):
        assert tokens > 4 or top_k > 32 or tokens * top_k >= 6 * experts
        return
    rows = tokens * top_k
    for n, k in BENCHMARK_WEIGHTS:
        problem = GroupedProblem(rows, experts, rows / experts, n, k, SMS, swiglu=True, packed=packed)
        for config in grouped_candidates(problem):
            assert config.weights_as_rows
        tile = gathering(choose_grouped(problem), k)
        assert fits(tile, k) and tile.scale_box == 4


@pytest.mark.parametrize("packing", [None, *PACKINGS.values()], ids=["fp8", *PACKINGS])
def test_gathered_tokens_keep_to_their_registers(packing):
    found = [
        (gathering(config, k), n, k)
        for config, n, k in variants(True, packing and packing.format)
        if config.weights_as_rows and config.block_m <= 16
    ]
    assert {config.block_m for config, _, _ in found} == {8, 16}
    wrong = faults(found, CLAMPED, None if packing is None else torch.bfloat16, packing)
    for config, (memory, complaints, static, registers) in wrong.items():
        # As without: values that only the ends of a tile need.
        assert packing is not None and config.name in ("8x256*2", "16x256*2") and max(memory) <= 40, (config, memory)
        assert not complaints and not static and registers == 80, (config, complaints, static, registers)
    for config, n, k in found:
        spec = kernel_spec(config, n, k, CLAMPED, Columns(packing=packing))
        assert counts_shared_memory_alike(spec, config.shared_bytes)


@pytest.mark.parametrize("epilogue", PEER_STORES, ids=str)
def test_rows_for_other_gpus(epilogue):
    """The same of what stores to their memory: no shared memory beside that which the tiles may fill."""
    found = one_of_each((without_tma_store(config, k), n, k) for config, n, k in variants(swiglu=False))
    assert {(config.weights_as_rows, config.split_k > 1) for config, _, _ in found} == {
        (False, False),
        (True, False),
        (True, True),
    }
    n, k = 7168, 2048  # the producer of tiles that may be halved needs more registers than with N = 4096
    wide = without_tma_store(TileConfig(128, 256, groups=8, half_tiles=True), k)
    assert not faults([*largest(found), (wide, n, k)], epilogue)


@pytest.mark.parametrize("epilogue", [STORE, SWIGLU], ids=str)
@pytest.mark.parametrize("config", [TileConfig(128, 256), TileConfig(8, 256, weights_as_rows=True, split_k=2)], ids=str)
@pytest.mark.parametrize("groups", [1, 33, 1024])
def test_shared_memory_is_what_the_kernel_lays_out(config, groups, epilogue):
    config = with_stages(TileConfig(**vars(config) | {"groups": groups}), 7168)
    assert counts_shared_memory_alike(kernel_spec(config, 4096, 7168, epilogue), config.shared_bytes)


@pytest.mark.parametrize("config", [TileConfig(128, 256), TileConfig(256, 128), TileConfig(8, 256, True)], ids=str)
@pytest.mark.parametrize("groups", [1, 33])
@pytest.mark.parametrize("form", PACKINGS)
def test_shared_memory_of_weights_in_four_bits(form, config, groups):
    packing = PACKINGS[form]
    if packing.format == "int4" and not config.weights_as_rows:
        config = TileConfig(16, 256, True)
    config = with_stages(replace(config, groups=groups, packed=packing.format), 7168)
    columns = Columns(packing=packing)
    assert counts_shared_memory_alike(kernel_spec(config, 4096, 7168, STORE, columns), config.shared_bytes)
