"""The arithmetic of the benchmarks: attribution of kernels, ratios, bars, tables. Nothing here needs a GPU."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import (
    command,
    experts,
    gemm,
    grouped_gemm,
    host,
    mqa,
    mqa_cases,
    operands,
    peers,
    plots,
    quantize,
    report,
    timing,
    training,
)
from benchmarks.grouped_gemm import Case
from benchmarks.mqa_cases import Batch, Prefill
from benchmarks.peers import Model
from benchmarks.timing import KernelEvent
from fp8moe import FP8Tensor
from tools.validate import write_json

FILL = "fill"


def session(calls, repeats):
    """Events of `repeats` times (fill, kernels) for each list of (name, duration) in `calls`, in launch order."""
    events, clock = [], 0
    for kernels in calls:
        for _ in range(repeats):
            for name, duration in [(FILL, 60_000), *kernels]:
                events.append(KernelEvent(name, clock, duration))
                clock += duration + 10
    return events


def test_kernels_are_attributed_between_fills_whatever_the_order_of_the_records():
    events = session([[("gemm", 5_000)], [("quantize", 1_000), ("gemm", 7_000)]], repeats=3)
    one, two = timing.attribute(reversed(events), FILL, calls=2, repeats=3)
    assert (one.median_us, one.kernels) == (5.0, ("gemm",))
    assert (two.samples_us, two.kernels) == ((8.0,) * 3, ("quantize", "gemm"))


def test_median_and_mean_are_over_the_repeats():
    timed = timing.Timing((1.0, 2.0, 9.0), ("gemm",))
    assert (timed.median_us, timed.mean_us) == (2.0, 4.0)


def test_steps_count_overlapping_kernels_once():
    starts = ((FILL, 0, 50_000), ("a", 60_000, 4_000), ("b", 62_000, 7_000), ("c", 71_000, 1_000))
    (timed,) = timing.attribute([KernelEvent(*event) for event in starts], FILL, calls=1, repeats=1)
    assert timed.steps_us == (4.0, 5.0, 3.0)  # a; b from the end of a; c with the gap before it
    assert timed.median_us == 12.0


def test_steps_are_medians_over_the_repeats():
    events = [KernelEvent(*event) for r in range(3) for event in ((FILL, 100 * r, 9), ("a", 100 * r + 10, 10 + r))]
    assert timing.attribute(events, FILL, calls=1, repeats=3)[0].steps_us == (0.011,)


def drop(events, index):
    return events[:index] + events[index + 1 :]


@pytest.mark.parametrize("index", [0, 2, 1, 3])
def test_lost_records_are_an_error(index):
    with pytest.raises(RuntimeError, match="recorded"):
        timing.attribute(drop(session([[("gemm", 1)]], repeats=2), index), FILL, calls=1, repeats=2)


def test_repeats_that_differ_are_an_error():
    events = session([[("gemm", 1)]], repeats=2)
    events[-1] = events[-1]._replace(name="other")
    with pytest.raises(RuntimeError, match="same kernels"):
        timing.attribute(events, FILL, calls=1, repeats=2)


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=9), st.floats(0.1, 10))
def test_geomean_scales_and_lies_between(values, factor):
    mean = report.geomean(values)
    assert min(values) * (1 - 1e-9) <= mean <= max(values) * (1 + 1e-9)
    assert report.geomean([factor * value for value in values]) == pytest.approx(factor * mean)


def test_geomean_of_known_numbers():
    assert report.geomean([1, 4]) == pytest.approx(2)
    for values in ([], [1, 0], [-1]):
        with pytest.raises(ValueError, match="positive"):
            report.geomean(values)


def test_bars_pass_on_their_side_of_the_limit():
    assert report.Bar("time", 24.9, 25).passed
    assert not report.Bar("time", 25.1, 25).passed
    assert report.Bar("ratio", 1.0, 1.0, at_least=True).passed
    assert not report.Bar("ratio", 0.99, 1.0, at_least=True).passed
    assert not report.Bar("time", math.nan, 25).passed
    assert not report.Bar("ratio", math.nan, 1.0, at_least=True).passed


def test_tables_align_and_mark_what_is_absent():
    rows = [{"op": "gemm", "us": 12.345, "error": 1.04e-3}, {"op": "q", "us": 2048.0, "error": None}]
    lines = report.format_table(rows, ("op", "us", "error")).split("\n")
    assert lines == ["op       us    error", "gemm  12.35  1.0e-03", "q      2048        -"]


def test_a_table_of_bars_says_pass_or_miss():
    bars = [report.Bar("fast", 2.0, 1.5, 1.8, at_least=True), report.Bar("time", 30.0, 25, unit="us")]
    _, first, second = report.format_bars([bar.as_dict() for bar in bars]).split("\n")
    assert first.split() == ["fast", "2.00", ">=", "1.5", "1.8", "pass"]
    assert second.split() == ["time", "30.00", "<=", "25", "us", "-", "MISS"]


def test_without_a_gpu_benchmarks_say_what_they_need(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs a Hopper GPU"):
        command.start()


def test_stored_peers_cover_every_shape_that_a_bar_needs():
    deep_gemm, cublas = peers.dense("deep_gemm"), peers.dense("cublas_block")
    for n, k in peers.DENSE_SHAPES:
        assert all(deep_gemm[m, n, k] > 0 for m in peers.DENSE_M)
        assert cublas[128, n, k] > 0
        assert peers.stream_floor()[n, k] > 0
        assert peers.dense("deep_gemm", "host_us")[1, n, k] > 0
    assert len(deep_gemm) == len(peers.DENSE_M) * len(peers.DENSE_SHAPES)
    assert deep_gemm[1, 2112, 7168] == 14.05
    assert peers.copy_tbps() == 4.21


def gemm_rows(speedup):
    """Rows in which every shape takes DeepGEMM's time divided by `speedup(m, n, k)`."""
    times = peers.dense("deep_gemm")
    return [
        gemm.make_row(m, n, k, times[m, n, k] / speedup(m, n, k), 0.0, 1e-4, 1)
        for m in peers.DENSE_M
        for n, k in peers.DENSE_SHAPES
    ]


def test_gemm_rows_hold_rates_and_ratios():
    row = gemm.make_row(128, 24576, 1536, 10.0, 11.0, 1e-4, 1)
    assert row["vs_deep_gemm"] == pytest.approx(18.71 / 10)
    assert row["vs_best"] == pytest.approx(17.93 / 10)
    assert row["over_floor"] is None
    assert row["tflops"] == pytest.approx(2 * 128 * 24576 * 1536 / 10e-6 / 1e12)
    assert row["gbps"] == pytest.approx(
        (128 * 1536 + 24576 * 1536 + 4 * 12 * (128 + 192) + 2 * 128 * 24576) / 10e-6 / 1e9
    )
    assert gemm.make_row(16, 24576, 1536, 26.0, 26.0, 1e-4, 1)["over_floor"] == pytest.approx(2.0)
    unknown = gemm.make_row(7, 256, 256, 1.0, 1.0, 1e-4, 1)
    assert unknown["vs_deep_gemm"] is unknown["vs_best"] is unknown["over_floor"] is None


def test_gemm_bars_on_all_shapes():
    bars = {bar.name: bar for bar in gemm.bars(gemm_rows(lambda m, n, k: 1.4))}
    assert bars["m=4096, geomean of DeepGEMM / ours"].value == pytest.approx(1.4)
    assert bars["m=512, geomean of DeepGEMM / ours"].passed
    assert bars["m=1, 16, 64, least"].value == pytest.approx(1.4)
    floor = bars["m=1, 16, 64, geomean of ours / reading the weight"]
    deep_gemm, floors = peers.dense("deep_gemm"), peers.stream_floor()
    expected = [deep_gemm[m, n, k] / 1.4 / floors[n, k] for m in (1, 16, 64) for n, k in peers.DENSE_SHAPES]
    assert floor.value == pytest.approx(math.prod(expected) ** (1 / 21))
    best = bars["m=128, geomean of the faster of DeepGEMM and cuBLAS / ours"]
    assert best.value < 1.4  # cuBLAS is faster at some of the shapes


def test_one_slow_shape_misses_its_bar():
    rows = gemm_rows(lambda m, n, k: 0.94 if (m, n) == (4096, 576) else 2.0)
    missed = {bar.name for bar in gemm.bars(rows) if not bar.passed}
    assert missed == {"m=4096, least"}


def test_gemm_bars_need_every_shape():
    rows = [row for row in gemm_rows(lambda m, n, k: 2.0) if (row["m"], row["n"]) != (512, 576)]
    names = [bar.name for bar in gemm.bars(rows)]
    assert not any(name.startswith("m=512") for name in names)
    assert any(name.startswith("m=4096") for name in names)
    assert gemm.bars([]) == []


def test_gemm_summary_has_a_line_for_each_m():
    lines = report.summarize(gemm_rows(lambda m, n, k: 1.5), ("m",), gemm.RATIOS)
    assert [line["m"] for line in lines] == list(peers.DENSE_M)
    assert all(line["vs_deep_gemm"] == pytest.approx(1.5) for line in lines)
    assert lines[-1]["over_floor"] is None


def test_shapes_are_parsed():
    assert gemm.parse_shape("7168x2048") == (7168, 2048)


def test_quantize_bytes_and_bars():
    assert quantize.bytes_moved("quantize_1x128", 4096, 7168) == 3 * 4096 * 7168 + 4 * 4096 * 56
    assert quantize.bytes_moved("quantize_128x128", 4096, 7168) == 3 * 4096 * 7168 + 4 * 32 * 56
    at_copy = {m: quantize.bytes_moved("quantize_1x128", m, 7168) / 4.21e6 for m in (4096, 65536)}
    rows = [quantize.make_row("quantize_1x128", m, 7168, us / 0.7, 0.0) for m, us in at_copy.items()]
    rows += [quantize.make_row("quantize_1x128", m, 7168, us, 0.0) for m, us in ((1, 1.5), (64, 3.5))]
    middle, large, small = quantize.bars(rows)
    assert middle.value == large.value == pytest.approx(0.7)
    assert (middle.passed, large.passed) == (True, False)
    assert (small.value, small.passed) == (3.5, False)


def test_host_bars_take_the_worst_shape():
    rows = [
        {"what": "gemm", "us": 17.0},
        {"what": "gemm", "us": 26.0},
        {"what": "FP8Linear", "us": 30.0},
        {"what": "first call, empty cache", "ms": 400.0},
        {"what": "first call, from the disk cache", "ms": 60.0},
        {"what": "memory", "extra_bytes": 0, "kept_bytes": 0},
        {"what": "memory", "extra_bytes": 4096, "kept_bytes": 0},
    ]
    assert [bar.passed for bar in host.bars(rows)] == [False, True, True, False, False, True]


def test_exact_values_and_error_of_quantized_operands():
    torch.manual_seed(0)
    for make, rows in ((operands.activation, 5), (operands.weight, 300)):
        tensor = make(rows, 272, device="cpu")
        values = operands.exact(tensor)
        assert values.shape == (rows, 272)
        block = slice(256, 272)
        last = tensor.data[-1, block].double() * tensor.scale[-1, -1].double()
        assert torch.equal(values[-1, block], last)
    assert operands.relative_error(torch.tensor([3.0, 0.0]), torch.tensor([3.0, 4.0]).double()) == pytest.approx(0.8)


def test_rounding_alone_is_no_error():
    expected = torch.tensor([1.0, 1 + 2**-12], dtype=torch.float64)
    assert operands.relative_error(expected.bfloat16(), expected) > 1e-4
    assert operands.rounded_error(expected.bfloat16(), expected) == 0
    assert operands.rounded_error(torch.tensor([1.0, 1 + 2**-7]).bfloat16(), expected) > 1e-3


def test_stored_grouped_peers():
    contiguous, masked = peers.grouped("grouped_contiguous"), peers.grouped("grouped_masked")
    assert (len(contiguous), len(masked)) == (15, 27)
    assert contiguous[256, 64, 4096, 7168] == (2401.83, 400.97)  # over valid, not over padded rows
    assert masked[6, 20, 7168, 2048] == (32.77, 113.77)
    assert all(us > 0 and tflops > 0 for us, tflops in (*contiguous.values(), *masked.values()))


def test_stored_experts_cover_every_model_and_number_of_tokens():
    models = peers.models()
    assert models["dsv3"] == Model(hidden=7168, intermediate=2048, experts=256, top_k=8)
    keys = [(name, tokens) for name in models for tokens in peers.EXPERTS_TOKENS]
    for impl in experts.PEERS.values():
        assert list(peers.experts(impl)) == keys
    layer = peers.experts("transformers+deepgemm")
    assert (layer["dsv3", 1]["graph_us"], layer["dsv3", 1]["two_gemms_us"]) == (315.25, 117.55)
    assert all(0 < row["two_gemms_us"] < row["graph_us"] for row in layer.values())


def test_random_operands_are_normal_and_have_the_layouts_of_the_quantizers():
    torch.manual_seed(0)
    a = operands.random_rows(301, 400, std=2.0, device="cpu")
    assert (a.scale.shape, a.scale.stride()) == ((301, 4), (1, 304))
    assert operands.exact(a).std().item() == pytest.approx(2, rel=0.1)
    b = operands.random_experts(3, 200, 272, std=0.1, device="cpu")
    assert (b.data.shape, b.scale.shape) == ((3, 200, 272), (3, 2, 3))
    values = operands.exact(FP8Tensor(b.data[1], b.scale[1]))
    assert values.std().item() == pytest.approx(0.1, rel=0.1)
    assert (values == 0).float().mean() < 1e-2 and values.isfinite().all()


@pytest.mark.parametrize("case", sorted({(case.groups, case.mean_m) for case in grouped_gemm.stored_cases()}))
def test_group_sizes_are_around_the_mean(case):
    groups, mean_m = case
    sizes = grouped_gemm.group_sizes(groups, mean_m)
    assert sizes == grouped_gemm.group_sizes(groups, mean_m)
    assert len(sizes) == groups
    assert all(max(1, 0.7 * mean_m - 0.5) <= size <= 1.3 * mean_m + 0.5 for size in sizes)
    assert max(sizes) <= grouped_gemm.places(mean_m) or mean_m > 1024
    if groups >= 32:
        assert sum(sizes) / groups == pytest.approx(mean_m, rel=0.1)
    assert mean_m <= 2 or len(set(sizes)) > 1


def test_grouped_rows_compare_speed_over_valid_rows_and_small_masked_groups_by_time():
    row = grouped_gemm.make_row(Case("grouped_gemm", 32, 256, 7168, 2048), 8000, 200.0, 201.0, 1e-5, 1)
    assert row["tflops"] == pytest.approx(2 * 8000 * 7168 * 2048 / 200e-6 / 1e12)
    assert row["vs_deep_gemm"] == pytest.approx(row["tflops"] / 976.38)
    moved = 8000 * 2048 + 32 * 7168 * 2048 + 4 * 16 * (8000 + 32 * 56) + 2 * 8000 * 7168
    assert row["gbps"] == pytest.approx(moved / 200e-6 / 1e9)
    large = grouped_gemm.make_row(Case("grouped_gemm_masked", 32, 192, 7168, 2048), 6000, 200.0, 201.0, 1e-5, 1)
    assert large["vs_deep_gemm"] == pytest.approx(large["tflops"] / 858.04)
    few = grouped_gemm.make_row(Case("grouped_gemm_masked", 6, 20, 7168, 2048), 120, 30.0, 31.0, 1e-5, 1)
    assert few["vs_deep_gemm"] == pytest.approx(32.77 / 30)
    assert grouped_gemm.make_row(Case("grouped_gemm", 3, 5, 8, 16), 15, 1.0, 1.0, 0.0, 1)["vs_deep_gemm"] is None


def grouped_rows(ratio):
    """Rows in which every stored case has the ratio that `ratio(case)` says."""
    found = []
    for case in grouped_gemm.stored_cases():
        rows = sum(grouped_gemm.group_sizes(case.groups, case.mean_m))
        unit = grouped_gemm.make_row(case, rows, 1.0, 1.0, 1e-5, 1)["vs_deep_gemm"]
        us = unit / ratio(case)
        found.append(grouped_gemm.make_row(case, rows, us, us, 1e-5, 1))
    return found


def test_grouped_bars():
    rows = grouped_rows(lambda case: 1.2 if case.op == "grouped_gemm" else 1.1)
    bars = grouped_gemm.bars(rows)
    assert [bar.value for bar in bars] == pytest.approx([1.2, 1.2, 1.2, 1.1, 1.1, 1e-5])
    assert all(bar.passed for bar in bars)
    slow = Case("grouped_gemm_masked", 256, 2, 7168, 2048)
    rows = grouped_rows(lambda case: 0.9 if case == slow else 1.2)
    assert [bar.name for bar in grouped_gemm.bars(rows) if not bar.passed] == ["grouped_gemm_masked, least"]


def test_grouped_bars_need_every_case():
    rows = [row for row in grouped_rows(lambda case: 1.5) if (row["groups"], row["n"]) != (8, 6144)]
    names = [bar.name for bar in grouped_gemm.bars(rows)]
    assert not any(name.startswith("grouped_gemm, 4 and 8") for name in names)
    assert any(name.startswith("grouped_gemm, 32") for name in names)
    assert grouped_gemm.bars([]) == []


def test_grouped_summary_has_a_line_for_each_kind_of_groups():
    lines = report.summarize(grouped_rows(lambda case: 1.25), ("op", "groups", "mean_m"), ("vs_deep_gemm",))
    assert len(lines) == 4 + 7
    assert lines[0] == {"op": "grouped_gemm", "groups": 4, "mean_m": 8192, "vs_deep_gemm": pytest.approx(1.25)}
    assert all(line["vs_deep_gemm"] == pytest.approx(1.25) for line in lines)


def fake_timings(calls, *, rests=None):
    assert rests is None or len(calls) == len(rests)
    for call in calls:
        call()
    return [timing.Timing((2.0, 4.0), ("gemm",)) for _ in calls]


@pytest.fixture
def small_rooms(monkeypatch):
    monkeypatch.setattr(command, "start", lambda: "no GPU")
    monkeypatch.setattr(grouped_gemm, "places", lambda mean_m: 12)
    monkeypatch.setattr(timing, "measure", fake_timings)


def test_grouped_benchmark_checks_and_times_its_cases(small_rooms):
    cases = [Case("grouped_gemm", 3, 20, 136, 272), Case("grouped_gemm_masked", 5, 4, 136, 272)]
    result = grouped_gemm.run(cases, device="cpu")
    assert [row["us"] for row in result["rows"]] == [3.0, 3.0]
    assert [row["rows"] for row in result["rows"]] == [
        sum(grouped_gemm.group_sizes(3, 20)),
        sum(grouped_gemm.group_sizes(5, 4)),
    ]
    assert all(row["error"] <= 3e-4 for row in result["rows"])
    assert [bar["passed"] for bar in result["bars"]] == [True]


@pytest.mark.parametrize("op", grouped_gemm.PEER_OPS)
def test_wrong_grouped_results_are_not_timed(small_rooms, monkeypatch, op):
    case, real = Case(op, 5, 4, 136, 272), getattr(grouped_gemm, op)

    def prepare(spoil):
        def wrong(*args, out, **options):
            real(*args, out=out, **options)
            spoil(out.view(-1, 136))

        monkeypatch.setattr(grouped_gemm, op, wrong)
        grouped_gemm.prepare(case, operands.random_experts(5, 136, 272, device="cpu"), device="cpu")

    prepare(lambda out: None)
    with pytest.raises(RuntimeError, match="relative error"):
        prepare(lambda out: out[0].mul_(1.5))
    with pytest.raises(RuntimeError, match="left out"):
        prepare(lambda out: out[1, 7].fill_(math.nan))
    if op == "grouped_gemm_masked":
        with pytest.raises(RuntimeError, match="other rows"):
            prepare(lambda out: out[11, 7].zero_())


def test_sampled_rows_reach_the_ends_of_the_largest_and_the_smallest_group():
    chosen = grouped_gemm.sampled_rows([50, 400, 1, 60, 70])
    assert sorted(chosen) == [0, 1, 2, 4]
    assert (chosen[1][0], chosen[1][-1], len(chosen[1])) == (0, 399, 16)
    assert chosen[2] == [0]


TINY = Model(hidden=256, intermediate=128, experts=8, top_k=2)


def measurement(graph_us, host_us=100.0, extra_bytes=1):
    return experts.Measurement(
        graph_us,
        (0.1 * graph_us,) * 2 + (0.4 * graph_us, 0.3 * graph_us, 0.1 * graph_us),
        host_us,
        extra_bytes,
        8,
        2e-3,
    )


def experts_rows(speedup, skew=1.0):
    """Rows in which our layer takes the time of DeepGEMM's two GEMMs divided by `speedup(model, tokens)`."""
    rows = []
    for (name, tokens), peer in peers.experts("transformers+deepgemm").items():
        us = peer["two_gemms_us"] / speedup(name, tokens)
        model = peers.models()[name]
        host_us = 100.0 + tokens / 128 if tokens <= 128 else None
        measured = measurement(us, host_us, experts.documented_bytes(model, tokens))
        rows.append(experts.make_row(name, model, tokens, "random", measured))
        if (name, tokens) == experts.BALANCE:
            rows.append(experts.make_row(name, model, tokens, "even", measurement(us, None)))
            rows.append(experts.make_row(name, model, tokens, "skewed", measurement(skew * us, None)))
    return rows


ERRORS = {"cuda": 2.3e-3, "cuda, own activations": 1.7e-3, "reference, own activations": 1.7e-3}


def test_experts_rows_hold_ratios_and_stages():
    row = experts.make_row("dsv3", peers.models()["dsv3"], 1, "random", measurement(100.0))
    assert row["vs_two_gemms"] == pytest.approx(1.1755)
    assert row["vs_deep_gemm"] == pytest.approx(3.1525)
    assert row["vs_bf16"] == pytest.approx(4.1599)
    assert sum(row[f"{stage}_us"] for stage in experts.STAGES) == pytest.approx(100)
    assert row["tflops"] == pytest.approx(6 * 8 * 7168 * 2048 / 100e-6 / 1e12)
    for other in (("dsv3", 1, "even"), ("dsv3", 3, "random"), ("tiny", 1, "random")):
        name, tokens, routing = other
        unknown = experts.make_row(name, TINY, tokens, routing, measurement(1.0))
        assert unknown["vs_two_gemms"] is unknown["vs_deep_gemm"] is unknown["vs_bf16"] is None


def test_experts_bars():
    bars = experts.bars(experts_rows(lambda name, tokens: 1.2, skew=1.1), ERRORS)
    values = [bar.value for bar in bars]
    assert values[0] == pytest.approx(1.2)
    assert values[1] > 1.2
    assert values[2:] == pytest.approx([101.0, 117.55 / 1.2, 1.1, 1.0, 2.3e-3, 1.0])
    assert all(bar.passed for bar in bars)
    rows = experts_rows(lambda name, tokens: 0.99, skew=1.2)
    rows[0]["host_us"], rows[-1]["extra_bytes"] = 181.0, 2 * rows[-1]["documented_bytes"]
    missed = [bar.passed for bar in experts.bars(rows, ERRORS | {"cuda, own activations": 1.9e-3})]
    assert missed == [False, True, False, False, False, False, True, False]


def test_experts_bars_need_every_case():
    rows = [row for row in experts_rows(lambda *_: 1.5, skew=1.0) if row["tokens"] not in (1, 2048, 8192)]
    assert [bar.name for bar in experts.bars(rows, ERRORS)] == [
        "experts, CPU time of an eager call, 1 to 128 tokens, slowest",
        "experts, layer error against float64",
        "experts, layer error over its own quantized activations / the reference backend's",
    ]
    assert [bar.passed for bar in experts.bars([], dict.fromkeys(ERRORS, math.nan))] == [False, False]


def test_routing_has_distinct_experts_and_as_many_in_use_as_the_peers():
    for name, tokens in (("qwen3_30b", 8), ("dsv3", 8), ("dsv3_ep8", 1)):
        model = peers.models()[name]
        (index,) = experts.routings(name, model, tokens).values()
        assert torch.equal(index, experts.routings(name, model, tokens)["random"])
        assert index.shape == (tokens, 8) and index.max() < model.experts
        assert all(len(set(row)) == 8 for row in index.tolist())
        assert len(index.unique()) == peers.experts("transformers+deepgemm")[name, tokens]["active_experts"]
    with pytest.raises(RuntimeError, match="9 experts in use"):
        experts.route(TINY, 4, 9)


def test_even_and_skewed_routing():
    name, tokens = experts.BALANCE
    found = experts.routings(name, peers.models()[name], tokens)
    assert set(found) == {"random", "even", "skewed"}
    even, skewed = (found[kind].flatten().bincount(minlength=32) for kind in ("even", "skewed"))
    assert (even == 512).all()
    assert skewed[0] == round(0.6 * 16384) and skewed.sum() == 16384
    assert skewed[1:].max() - skewed[1:].min() < 10
    assert (found["skewed"][:100] == 0).float().mean() == pytest.approx(0.6, abs=0.1)  # in any order


def test_exact_layer_agrees_with_the_reference_backend_and_sees_a_wrong_one():
    torch.manual_seed(0)
    layer = experts.make_layer(TINY, device="cpu")
    inputs = experts.random_inputs(TINY, experts.route(TINY, 9), device="cpu")
    assert 0 < experts.check(layer, inputs) <= experts.MAX_ERROR
    out = layer(*inputs)
    assert 0.02 < out.float().std() < 2
    layer.forward = lambda *inputs: 1.02 * out
    with pytest.raises(RuntimeError, match="relative error"):
        experts.check(layer, inputs)


def test_stages_are_those_of_the_layers_kernels():
    steps = (1.0, 2.0, 3.0, 4.0, 5.0)
    assert experts.stages_us(timing.Timing((15.0,), experts.KERNELS, steps)) == steps
    for kernels in (experts.KERNELS[:4], (*experts.KERNELS[:4], "fill")):
        with pytest.raises(RuntimeError, match="expected the kernels sort_by_expert"):
            experts.stages_us(timing.Timing((15.0,), kernels, steps[: len(kernels)]))


def test_documented_memory_is_that_of_the_layers_docstring():
    rows, blocks = 10 * 2, 2 + 1
    assert experts.documented_bytes(TINY, 10) == rows * (3 * 256 + 128) + 4 * rows * blocks + 8 * (rows + 8)


def test_experts_benchmark_measures_every_case(monkeypatch):
    def measure(calls, *, rests):
        return [timing.Timing((5.0,), experts.KERNELS, (1.0,) * 5) for _ in fake_timings(calls, rests=rests)]

    monkeypatch.setattr(command, "start", lambda: "no GPU")
    monkeypatch.setattr(experts, "ERROR_CASE", TINY)
    monkeypatch.setattr(experts, "BALANCE", ("tiny", 8))
    monkeypatch.setattr(experts, "capture", lambda call: call)
    monkeypatch.setattr(host, "memory", lambda call: {"extra_bytes": 7, "kept_bytes": 0})
    monkeypatch.setattr(host, "host_us", lambda call, **_: 90.0)
    monkeypatch.setattr(timing, "measure", measure)
    monkeypatch.setattr(timing, "elapsed", lambda calls, *, rests: [6.0] * len(calls))
    result = experts.run({"tiny": TINY}, (1, 8, 130), device="cpu")
    cases = [(row["tokens"], row["routing"], row["host_us"]) for row in result["rows"]]
    assert cases == [(1, "random", 90), (8, "random", 90), (8, "even", 90), (8, "skewed", 90), (130, "random", None)]
    assert all((row["graph_us"], row["gemm1_us"], row["extra_bytes"]) == (6.0, 1.0, 7) for row in result["rows"])
    assert result["errors"]["cuda"] <= experts.MAX_ERROR
    assert result["errors"]["cuda, own activations"] == result["errors"]["reference, own activations"]
    names = {bar["name"]: bar["passed"] for bar in result["bars"]}
    assert names["experts, dsv3_ep8, 2048 tokens, 60% of the rows to one expert / even routing"]


def test_stored_weight_gradients():
    stored = peers.grouped_k()
    assert len(stored) == 4
    assert stored[16, 7168, 2048, 37376] == (1189.61, 922.46)


@pytest.mark.parametrize("case", training.stored_cases())
def test_groups_of_weight_gradients_have_the_peers_sum(case):
    offsets = training.group_offsets(case)
    sizes = [end - start for start, end in zip(offsets, offsets[1:], strict=False)]
    assert (len(sizes), offsets[0], offsets[-1]) == (case.groups, 0, case.total_k)
    assert all(size % 128 == 0 for size in sizes)
    mean = case.total_k / case.groups
    assert 0.5 * mean < min(sizes) < max(sizes) < 1.5 * mean


def passes(speedup, kept_ratio):
    """Measurements of bfloat16, which takes 10 ms and keeps 1000 bytes, and of ours, with bfloat16 masters slower."""
    bf16 = training.Measurement(4000.0, 10_000.0, training.Memory(1000, 3000, 0), None)
    memory = training.Memory(round(1000 * kept_ratio), 2400, 500)
    ours = training.Measurement(1500.0, 10_000.0 / speedup, memory, 0.07)
    return {"bf16": bf16, "float32": ours, "bfloat16": ours._replace(us=1.1 * ours.us)}


def training_rows(speedup=1.3, kept_ratio=0.4):
    rows = [
        training.make_gemm_row(case, (us := peer.us / speedup), us, 1.1 * us, 1e-5)
        for case, peer in zip(training.stored_cases(), peers.grouped_k().values(), strict=True)
    ]
    size = {"model": training.MODEL, **peers.models()[training.MODEL]._asdict(), "tokens": training.TOKENS}
    rows += training.make_pass_rows("experts", size, passes(2 * speedup, kept_ratio))
    size = dict(zip(("rows", "out_features", "in_features"), training.LINEAR, strict=True))
    return rows + training.make_pass_rows("linear", size, passes(1.2 * speedup, kept_ratio))


def test_training_rows_hold_rates_and_ratios():
    product = training.make_gemm_row(training.Case(8, 4096, 7168, 34176), 1992.02 / 1.2, 0.0, 0.0, 1e-5)
    assert product["vs_deep_gemm"] == pytest.approx(1.2)
    assert product["tflops"] == pytest.approx(1.2 * 1007.43, rel=1e-3)
    assert training.make_gemm_row(training.Case(1, 8, 8, 128), 1.0, 1.0, 1.0, 0.0)["vs_deep_gemm"] is None
    bf16, ours, with_bf16_master = training.make_pass_rows("linear", {"rows": 8}, passes(2.2, 0.4))
    assert (bf16["impl"], bf16["master"], bf16["speedup"], bf16["kept_ratio"]) == ("bf16", None, 1.0, 1.0)
    assert (ours["impl"], ours["master"], ours["copy_bytes"], ours["rows"]) == ("fp8", "float32", 500, 8)
    assert [ours[key] for key in ("speedup", "kept_ratio", "peak_ratio")] == pytest.approx([2.2, 0.4, 0.8])
    assert with_bf16_master["speedup"] == pytest.approx(2.0)


def test_training_bars():
    bars = training.bars(training_rows())
    assert [bar.value for bar in bars] == pytest.approx([1.3, 1e-5, 2.6 / 1.1, 0.4, 1.56 / 1.1])
    assert all(bar.passed for bar in bars)
    slow = training.bars(training_rows(speedup=0.9, kept_ratio=0.7))
    assert [bar.passed for bar in slow] == [False, True, False, False, False]


def test_training_bars_need_their_cases():
    assert training.bars([]) == []
    rows = [row | {"n": 8} if row.get("groups") == 16 else row for row in training_rows()]
    rows = [row | {"tokens": 1} if row["what"] == "experts" else row for row in rows]
    names = [bar.name.split(",")[0] for bar in training.bars(rows)]
    assert [name.split()[0] for name in names] == ["grouped_gemm_k", "FP8Linear"]


def test_weight_gradients_are_checked_and_timed(monkeypatch):
    monkeypatch.setattr(timing, "measure", fake_timings)
    case = training.Case(groups=3, m=200, n=136, total_k=1280)
    (row,) = training.run_products([case], device="cpu")
    assert (row["us"], row["accumulate_us"]) == (3.0, 3.0)
    assert 0 < row["error"] <= 3e-4
    real = training.grouped_gemm_k

    def wrong(*args, out, **options):
        real(*args, out=out, **options)[2, 199] *= 1.5

    monkeypatch.setattr(training, "grouped_gemm_k", wrong)
    with pytest.raises(RuntimeError, match="relative error"):
        training.run_products([case], device="cpu")


def test_training_passes_are_compared_with_bfloat16(monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setattr(training, "measure_memory", lambda of: training.Memory(1, 1, 1))
    monkeypatch.setattr(training, "capture", lambda call: call)
    monkeypatch.setattr(timing, "elapsed", lambda calls: [float(len(calls[i]())) for i in range(len(calls))])
    torch.manual_seed(0)
    _, ours, other = training.run_experts("tiny", TINY, 40, device="cpu")
    assert (ours["us"], ours["forward_us"]) == (5, 40)  # output and four gradients; 40 tokens
    assert 1e-2 < ours["difference"] <= training.MAX_DIFFERENCE
    assert 1e-2 < other["difference"] <= training.MAX_DIFFERENCE
    _, ours, _ = training.run_linear(33, 136, 272, device="cpu")
    assert (ours["us"], ours["forward_us"]) == (3, 33)
    assert 1e-2 < ours["difference"] <= training.MAX_DIFFERENCE

    class Wrong(training.FP8Linear):
        def forward(self, x):
            return 1.5 * super().forward(x)

    monkeypatch.setattr(training, "FP8Linear", Wrong)
    with pytest.raises(RuntimeError, match="from bfloat16"):
        training.run_linear(33, 136, 272, device="cpu")


def test_stored_index_scores_are_whole_and_their_work_is_the_peers():
    prefills, batches = mqa.stored_prefills(), mqa.stored_batches()
    assert (len(prefills), len(batches)) == (3, 6)
    assert peers.mqa()[prefills[0]] == 222.58
    for row in peers.load()["rows"]:
        if row["op"] == "mqa_logits":
            case = Prefill(*(row[field] for field in Prefill._fields))
            assert case in prefills
            flops, _ = mqa_cases.prefill_work(case, True)
            assert flops / row["us"] / 1e6 == pytest.approx(row["tflops"], rel=1e-4)
        elif row["op"] == "paged_mqa_logits":
            batch = Batch(
                (row["context"],) * row["batch"], row["next_n"], row["heads"], row["head_dim"], row["context"]
            )
            assert batch in batches
            moved = mqa_cases.paged_work(batch)[1] - row["batch"] * row["next_n"] * row["heads"] * row["head_dim"]
            assert moved / row["us"] / 1e3 == pytest.approx(row["gbps"], rel=1e-3)  # the peer does not count queries


def test_work_of_index_scores_counts_what_each_query_sees():
    assert mqa_cases.prefill_work(Prefill(3, 5, 32, 64), False) == (2 * 32 * 64 * 12, 5 * 68 + 4 * 12 + 3 * 32 * 64)
    assert mqa_cases.prefill_work(Prefill(3, 5, 32, 64), True)[1] == 5 * 68 + 4 * 15 + 3 * 32 * 64
    batch = Batch((7, 100), next_n=2, heads=32, head_dim=64, max_context_len=200)
    assert batch.visible == [6, 7, 99, 100]
    assert mqa_cases.paged_work(batch) == (2 * 32 * 64 * 212, 107 * 68 + 4 * 800 + 4 * 32 * 64)
    assert mqa_cases.paged_work(batch._replace(fill_masked=False))[1] == 107 * 68 + 4 * 212 + 4 * 32 * 64


def test_uneven_batches_have_as_many_tokens_as_even_ones():
    uneven, _, even, _ = mqa.uneven_batches()
    assert sorted(set(uneven.contexts)) == [512, 131072] and uneven.contexts.count(131072) == 1
    assert set(even.contexts) == {2552}
    assert mqa_cases.paged_work(uneven) == mqa_cases.paged_work(even)
    assert mqa.EVEN in mqa.stored_batches()


def timed(us):
    return timing.Timing((us,), ("kernel",))


def mqa_rows(speedup=1.2, over_bytes=1.1, error=3e-4, overlap=0.97):
    """Rows in which every stored case takes DeepGEMM's time divided by `speedup`."""
    rows = []
    for case, us in peers.mqa().items():
        rows += [mqa.make_prefill_row(Prefill(*case), fill, timed(us / speedup), error) for fill in (True, False)]
    us = {batch: us / speedup for batch, us in zip(mqa.stored_batches(), peers.paged_mqa().values(), strict=True)}
    even_us, even_bytes = us[mqa.EVEN], mqa_cases.paged_work(mqa.EVEN)[1]
    for batch in mqa.uneven_batches():
        us[batch] = over_bytes * mqa_cases.paged_work(batch)[1] / even_bytes * even_us
    rows += [mqa.make_paged_row(batch, timed(time), error) for batch, time in us.items()]
    rows += mqa.make_uneven_rows(us)
    return [*rows, {"what": "overlap", "tokens": 16384, "top_k": 2048, "overlap": overlap, "least": overlap}]


def test_mqa_rows_hold_rates_and_ratios():
    case = Prefill(2048, 8192, 64, 128)
    row = mqa.make_prefill_row(case, True, timed(200.0), 1e-4)
    flops = 2 * 64 * 128 * (2048 * 6145 + 2048 * 2047 // 2)
    assert row["vs_deep_gemm"] == pytest.approx(222.58 / 200)
    assert row["tflops"] == pytest.approx(flops / 200e-6 / 1e12)
    assert row["floor_us"] == pytest.approx(flops / 1490e12 * 1e6)  # the tensor cores
    assert mqa.make_prefill_row(Prefill(1, 2, 64, 128), True, timed(1.0), 0.0)["vs_deep_gemm"] is None
    row = mqa.make_paged_row(mqa.EVEN, timed(20.0), 1e-4)
    moved = 64 * 8192 * (132 + 4) + 64 * 64 * 128
    assert row["vs_deep_gemm"] == pytest.approx(26.0 / 20)
    assert row["gbps"] == pytest.approx(moved / 20e-6 / 1e9)
    assert row["floor_us"] == pytest.approx(moved / 4.21e12 * 1e6)  # the memory
    assert (row["batch"], row["context"], row["tokens"], row["next_n"]) == (64, 8192, 64 * 8192, 1)
    assert mqa.make_paged_row(mqa.EVEN._replace(fill_masked=False), timed(1.0), 0.0)["vs_deep_gemm"] is None


def test_uneven_rows_compare_with_the_bandwidth_of_even_contexts_and_with_the_same_bytes():
    uneven, unfilled, even, even_unfilled = mqa.uneven_batches()
    us = {mqa.EVEN: 20.0, uneven: 30.0, unfilled: 12.0, even: 25.0, even_unfilled: 10.0}
    filled, bare = mqa.make_uneven_rows(us)
    tokens, moved = 131072 + 63 * 512, 64 * 8192 * 136 + 64 * 64 * 128
    assert filled["bytes_us"] == pytest.approx(20 / moved * (132 * tokens + 4 * 64 * 131072 + 64 * 64 * 128))
    assert bare["bytes_us"] == pytest.approx(20 / moved * (136 * tokens + 64 * 64 * 128))
    assert (filled["over_bytes"], filled["over_even"]) == pytest.approx((30 / filled["bytes_us"], 1.2))
    assert (bare["over_bytes"], bare["over_even"]) == pytest.approx((12 / bare["bytes_us"], 1.2))


def test_mqa_bars():
    bars = mqa.bars(mqa_rows())
    assert [bar.value for bar in bars] == pytest.approx([1.2, 1.2, 1.1, 1.1, 3e-4, 0.97])
    assert all(bar.passed for bar in bars)
    missed = mqa.bars(mqa_rows(speedup=0.99, over_bytes=1.4, error=2e-3, overlap=0.92))
    assert len(missed) == 6 and not any(bar.passed for bar in missed)


def test_mqa_bars_need_every_case():
    rows = [row for row in mqa_rows() if row.get("kv_tokens") != 65536 and row.get("next_n") != 2]
    names = [bar.name for bar in mqa.bars(rows)]
    assert not any("shapes" in name for name in names)
    assert len(names) == 4
    assert mqa.bars([]) == []


@pytest.fixture
def timed_once(monkeypatch):
    monkeypatch.setattr(timing, "measure", fake_timings)


BATCHES = [
    Batch((70, 3, 128), next_n=2, heads=32, head_dim=64, max_context_len=150),
    Batch((1, 200), next_n=1, heads=64, head_dim=32, max_context_len=200, fill_masked=False),
]


def test_index_scores_are_checked_and_timed(timed_once):
    torch.manual_seed(0)
    rows = mqa.run_prefill([Prefill(20, 50, 32, 64)], device="cpu")
    assert [(row["us"], row["fill_masked"]) for row in rows] == [(3.0, True), (3.0, False)]
    rows += mqa.run_paged(BATCHES, device="cpu")
    assert [row["tokens"] for row in rows[2:]] == [201, 201]
    assert all(0 < row["error"] <= 1e-5 for row in rows)


@pytest.mark.parametrize("op", ["mqa_logits", "paged_mqa_logits"])
def test_wrong_index_scores_are_not_timed(monkeypatch, op):
    def prepare(wrong):
        def call(*args, **options):
            out = real(*args, **options)
            wrong(out)
            return out

        with monkeypatch.context() as patch:
            patch.setattr(mqa_cases, op, call)
            if op == "mqa_logits":
                mqa_cases.prepare_prefill(Prefill(20, 50, 32, 64), device="cpu")
            else:
                mqa_cases.prepare_paged(BATCHES[0], cache)

    torch.manual_seed(0)
    real, cache = getattr(mqa_cases, op), mqa_cases.filled_cache(5, 64, device="cpu")
    prepare(lambda out: None)
    with pytest.raises(RuntimeError, match="relative error"):
        prepare(lambda out: out[0].mul_(1.5))
    with pytest.raises(RuntimeError, match="not finite"):
        prepare(lambda out: out[1, 7].fill_(-math.inf))
    with pytest.raises(RuntimeError, match="not -inf"):
        prepare(lambda out: out[0, -1].fill_(0))


def test_block_tables_hold_different_blocks():
    torch.manual_seed(0)
    table = mqa_cases.block_table(BATCHES[0], 7, device="cpu")
    assert table.shape == (3, 3)
    used = [*table[0, :2].tolist(), *table[1, :1].tolist(), *table[2, :2].tolist()]
    assert len(set(used)) == 5 and max(used) < 7
    assert not table[:2, 2].any() and not table[1, 1]


def test_appended_keys_are_checked_and_timed(timed_once, monkeypatch):
    torch.manual_seed(0)
    rows = mqa.run_append({3: 1, 130: 64}, 64, device="cpu")
    assert [row["tokens"] for row in rows] == [3, 130]
    assert rows[1]["gbps"] == pytest.approx(130 * (3 * 64 + 8) / 3e-6 / 1e9)

    real = mqa_cases.append_kv

    def wrong(cache, keys, slots):
        real(cache, keys, slots.flip(0))

    monkeypatch.setattr(mqa_cases, "append_kv", wrong)
    with pytest.raises(RuntimeError, match="other bits"):
        mqa.run_append({3: 1}, 64, device="cpu")


def test_topk_is_timed_with_sorted_values_and_without(timed_once):
    rows = mqa.run_topk([(3, 50, 8)], device="cpu")
    assert [(row["rows"], row["k"], row["sorted"]) for row in rows] == [(3, 8, True), (3, 8, False)]
    assert rows[0]["gbps"] == pytest.approx(3 * (4 * 50 + 12 * 8) / 3e-6 / 1e9)


def test_overlap_of_known_rows():
    expected = torch.tensor([[4.0, 3, 2, 1], [1, 2, 3, 4]])
    assert mqa.overlap(torch.tensor([[9.0, 1, 8, 0], [0, 0, 5, 6]]), expected, 2).tolist() == [0.5, 1.0]


def test_fp8_scores_pick_nearly_the_keys_of_float32():
    torch.manual_seed(0)
    (row,) = mqa.run_overlap(tokens=1024, queries=4, heads=64, head_dim=128, top_k=128, device="cpu")
    assert 0.93 <= row["least"] <= row["overlap"] < 1


def quantize_rows():
    sizes = [("quantize_1x128", m) for m in (1, 64, 4096)] + [("quantize_128x128", 4096)]
    return [quantize.make_row(op, m, 7168, 2.0 + m / 100, 0.0) for op, m in sizes]


def test_pictures_are_drawn_of_what_there_is(tmp_path):
    benchmarks = {
        "gemm": {"rows": gemm_rows(lambda *_: 1.1)},
        "quantize": {"rows": quantize_rows()},
        "grouped_gemm": {"rows": grouped_rows(lambda case: 1 + case.n / 40960)},
        "experts": {"rows": experts_rows(lambda name, tokens: 1.1)},
        "training": {"rows": training_rows()},
        "mqa": {"rows": mqa_rows()},
    }
    write_json(tmp_path / "new.json", {"benchmarks": benchmarks})
    plots.main(["--results", str(tmp_path / "new.json"), "--out", str(tmp_path / "new")])
    assert {path.stem for path in (tmp_path / "new").glob("*.png")} == set(benchmarks)
    older = {"gemm": {"error": "wrong result"}, "quantize": benchmarks["quantize"]}
    write_json(tmp_path / "old.json", {"benchmarks": older})
    plots.main(["--results", str(tmp_path / "old.json"), "--out", str(tmp_path / "old")])
    assert [path.name for path in (tmp_path / "old").iterdir()] == ["quantize.png"]


def test_results_are_read_from_a_directory(tmp_path):
    write_json(tmp_path / "experts.json", {"rows": [1]})
    assert plots.load(tmp_path, "experts") == [1]
    assert plots.load(tmp_path, "gemm") == []


def test_pictures_of_cases_without_a_peer(tmp_path):
    rows = [experts.make_row("tiny", TINY, tokens, "random", measurement(5.0)) for tokens in (1, 3)]
    plots.draw_experts(rows, tmp_path / "experts.png")
    assert (tmp_path / "experts.png").stat().st_size > 0


def test_chosen_parts_are_run_written_and_shown(monkeypatch, tmp_path, capsys):
    made = {row["what"]: row for row in mqa_rows(overlap=0.5)}
    parts = {"paged_mqa_logits": lambda: [made["uneven"], made["overlap"]], "topk": lambda: [{"what": "topk"}]}
    monkeypatch.setattr(mqa, "PARTS", parts)
    monkeypatch.setattr(command, "start", lambda: "a GPU")
    mqa.main(["--only", "paged_mqa_logits", "--out", str(tmp_path / "new")])
    result = json.loads((tmp_path / "new/mqa.json").read_text())
    assert list(result) == ["gpu", "rows", "bars"]
    assert (result["gpu"], result["rows"]) == ("a GPU", [made["uneven"], made["overlap"]])
    assert [bar["passed"] for bar in result["bars"]] == [True, False]
    blocks = capsys.readouterr().out.split("\n\n")
    assert [block.splitlines()[0] for block in blocks[:2]] == ["uneven", "overlap"] and "MISS" in blocks[2]


@pytest.mark.parametrize("benchmark", [gemm, grouped_gemm, experts])
def test_rows_means_and_bars_are_shown(monkeypatch, tmp_path, capsys, benchmark):
    name = benchmark.__name__.removeprefix("benchmarks.")
    rows = {"gemm": gemm_rows, "grouped_gemm": grouped_rows, "experts": experts_rows}[name](lambda *_: 1.5)
    monkeypatch.setattr(benchmark, "run", lambda *_: command.result("a GPU", rows, [], more=1))
    benchmark.main(["--out", str(tmp_path)])
    assert json.loads((tmp_path / f"{name}.json").read_text()) == {"gpu": "a GPU", "rows": rows, "more": 1, "bars": []}
    table, means, bars = capsys.readouterr().out.split("\n\n")
    assert len(table.splitlines()) == 1 + len(rows) and len(means.splitlines()) < len(rows)
    assert bars == "no bar applies to these rows\n"
