"""The arithmetic of the benchmarks: attribution of kernels, ratios, bars, tables. Nothing here needs a GPU."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import gemm, host, operands, peers, quantize, report, timing
from benchmarks.timing import KernelEvent

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


def test_results_are_written_as_json(tmp_path):
    report.write_json(tmp_path / "new/gemm.json", {"rows": [1]})
    assert json.loads((tmp_path / "new/gemm.json").read_text()) == {"rows": [1]}


def test_stored_peers_cover_every_shape_that_a_bar_needs():
    deep_gemm, cublas = peers.dense("deep_gemm"), peers.dense("cublas_block")
    for n, k in peers.DENSE_SHAPES:
        assert all(deep_gemm[m, n, k] > 0 for m in peers.DENSE_M)
        assert cublas[128, n, k] > 0
        assert peers.stream_floor()[n, k] > 0
        assert peers.dense("deep_gemm", "host_us")[1, n, k] > 0
    assert len(deep_gemm) == len(peers.DENSE_M) * len(peers.DENSE_SHAPES)
    assert deep_gemm[1, 2112, 7168] == 14.05
    assert (peers.copy_tbps(), peers.first_call_seconds()) == (4.21, 2.99)


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
    lines = gemm.summarize(gemm_rows(lambda m, n, k: 1.5))
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
