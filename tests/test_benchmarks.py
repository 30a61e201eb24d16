"""The arithmetic of the benchmarks: attribution of kernels, ratios, thresholds, tables. Nothing here needs a GPU."""

import json
import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from benchmarks import (
    baselines,
    calls,
    choice,
    command,
    experts,
    gemm,
    grouped_gemm,
    host,
    mqa,
    mqa_cases,
    operands,
    plots,
    quantize,
    report,
    timing,
    training,
)
from benchmarks.baselines import MODELS, Model
from benchmarks.grouped_gemm import Case
from benchmarks.mqa_cases import Batch, Prefill
from benchmarks.report import write_json
from benchmarks.timing import KernelEvent
from fp8moe import FP8Tensor

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


@pytest.mark.parametrize("index", [0, 2, 1, 3])
def test_lost_records_are_an_error(index):
    events = session([[("gemm", 1)]], repeats=2)
    del events[index]
    with pytest.raises(RuntimeError, match="recorded"):
        timing.attribute(events, FILL, calls=1, repeats=2)


def test_what_comes_ahead_of_the_repeats_does_not_count():
    heated = [(FILL, 60), *[("gemm", 9_000)] * 50]
    events, clock = [], 0
    for name, duration in 2 * [*heated, (FILL, 60), ("gemm", 5_000), (FILL, 60), ("gemm", 7_000)]:
        events.append(KernelEvent(name, clock, duration))
        clock += duration + 10
    timed = timing.attribute(events, FILL, calls=2, repeats=2, ahead=1)
    assert [one.samples_us for one in timed] == [(5.0, 7.0)] * 2
    with pytest.raises(RuntimeError, match="6 fills for 2 calls of 2 repeats"):
        timing.attribute(events, FILL, calls=2, repeats=2)


@pytest.mark.parametrize("rest", [True, False])
def test_a_case_rests_or_is_repeated_before_it_is_timed(monkeypatch, rest):
    clock, calls, idle = [0.0], [], []
    monkeypatch.setattr(timing.torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(timing.time, "sleep", idle.append)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    def call():
        calls.append("gemm")
        clock[0] += timing.HEAT_S / 100

    def profile(work):
        calls.clear()
        work()
        return [KernelEvent(name, 10 * i, 5) for i, name in enumerate(calls)] or [KernelEvent(FILL, 0, 5)]

    monkeypatch.setattr(timing, "profile", profile)
    monkeypatch.setattr(timing, "_warm_up", lambda _: SimpleNamespace(fill_=lambda value: calls.append(FILL)))
    (timed,) = timing.measure([call], rests=[0.25], rest=rest)
    assert len(timed.samples_us) == timing.REPEATS
    assert idle == ([0.25] if rest else [])
    assert calls.count("gemm") == timing.REPEATS + (0 if rest else 100)


def test_repeats_that_differ_are_an_error():
    events = session([[("gemm", 1)]], repeats=2)
    events[-1] = events[-1]._replace(name="other")
    with pytest.raises(RuntimeError, match="same kernels"):
        timing.attribute(events, FILL, calls=1, repeats=2)


def test_geomean_of_known_numbers():
    assert report.geomean([1, 4]) == pytest.approx(2)
    for values in ([], [1, 0], [-1]):
        with pytest.raises(ValueError, match="positive"):
            report.geomean(values)


def test_thresholds_pass_on_their_side_of_the_limit():
    assert report.Threshold("time", 24.9, 25).passed
    assert not report.Threshold("time", 25.1, 25).passed
    assert report.Threshold("ratio", 1.0, 1.0, at_least=True).passed
    assert not report.Threshold("ratio", 0.99, 1.0, at_least=True).passed
    assert not report.Threshold("time", math.nan, 25).passed
    assert not report.Threshold("ratio", math.nan, 1.0, at_least=True).passed


def test_without_a_gpu_benchmarks_say_what_they_need(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs a Hopper GPU"):
        command.start()


def test_baselines_cover_every_shape_that_a_threshold_needs():
    assert len(baselines.cases("gemm")) == len(baselines.DENSE_M) * len(baselines.DENSE_SHAPES)
    for m in baselines.DENSE_M:
        for n, k in baselines.DENSE_SHAPES:
            case = baselines.find("gemm", m, n, k)
            assert case.us("deep_gemm") > 0 and case.us("fp8moe") > 0
            assert case.has_yardstick == (m >= 128)
    for n, k in baselines.DENSE_SHAPES:
        assert baselines.find("gemm", 128, n, k).us("cublas_block") > 0
        assert baselines.deep_gemm_host_us(n, k) > 0
        assert baselines.reading_us(n, k) > n * k / 4.8e6  # the bandwidth of HBM3e in bytes a microsecond
    assert baselines.find("gemm", 1, 2112, 7168).medians == {"deep_gemm": 12.03, "fp8moe": 8.1}
    assert baselines.find("gemm", 1, 2112, 7168, device="H100").us("deep_gemm") == 13.18
    assert baselines.copy_tbps() == 4.21


@pytest.mark.parametrize(
    "ask",
    [
        lambda: baselines.find("gemm", 7, 2112, 7168),
        lambda: baselines.find("gemm", 1, 2112, 7168, device="A100"),
        lambda: baselines.find("experts", "dsv2", 1),
        lambda: baselines.cases("mqa_logits", "H100"),
        lambda: baselines.find("gemm", 1, 2112, 7168).us("cublas_block"),
        lambda: baselines.deep_gemm_host_us(8, 16),
        lambda: baselines.device("NVIDIA H800"),
    ],
)
def test_a_missing_baseline_is_refused(ask):
    with pytest.raises(LookupError):
        ask()


def test_baselines_are_of_a_gpu_and_may_be_missing():
    assert baselines.device("NVIDIA H200") == "H200" and baselines.device("NVIDIA H100 80GB HBM3") == "H100"
    assert baselines.get("gemm", 7, 2112, 7168) is None


def test_a_baseline_is_compared_with_its_own_run_or_with_another_by_the_yardstick():
    case = baselines.find("gemm", 4096, 4096, 7168)
    assert case.ratio() == case.us("deep_gemm") / case.us("fp8moe")
    assert case.over(2 * case.us("deep_gemm")) == 0.5
    slower = 1.03  # a GPU on which everything takes so much longer
    yardstick_us = slower * case.us("cublas_per_tensor")
    assert case.over(slower * case.us("fp8moe"), yardstick_us=yardstick_us) == pytest.approx(case.ratio())


def test_the_ratios_of_the_run_are_those_that_the_issue_states():
    def mean(op, name="deep_gemm", ours="fp8moe", **sizes):
        cases = [case for case in baselines.cases(op) if all(case.sizes[size] in sizes[size] for size in sizes)]
        return round(report.geomean(case.ratio(name, ours) for case in cases), 2)

    assert [mean("gemm", m=m) for m in ((1, 16, 64), (512,), (4096,))] == [1.19, 1.0, 0.97]
    assert [mean("grouped_gemm", groups=groups) for groups in ((4, 8), (32,), (256,))] == [0.95, 0.96, 1.22]
    assert mean("grouped_gemm_masked") == 0.96
    assert mean("grouped_gemm_k", ours="fp8moe_accumulating") == 0.99
    assert [mean("mqa_logits"), mean("paged_mqa_logits")] == [1.11, 1.05]
    layer = ("experts", "deep_gemm_two_gemms", "fp8moe_graph")
    assert [mean(*layer, tokens=tokens) for tokens in ((8192,), (1, 8, 64, 512))] == [0.85, 1.25]


def timed(us, kernels=("kernel",)):
    return timing.Timing((us,), kernels)


def gemm_rows(speedup, device="H200"):
    """Rows in which every shape takes DeepGEMM's time divided by `speedup(m, n, k)`, on a GPU that is 3% slower."""
    rows = []
    for case in baselines.cases("gemm", device):
        slower = 1.03 if case.has_yardstick else 1.0
        yardstick = timed(slower * case.us("cublas_per_tensor")) if case.has_yardstick else None
        us = slower * case.us("deep_gemm") / speedup(*case.sizes.values())
        rows.append(gemm.make_row(**case.sizes, timed=timed(us), error=1e-4, yardstick=yardstick, device=device))
    return rows


def test_gemm_rows_hold_rates_and_ratios():
    row = gemm.make_row(128, 24576, 1536, timing.Timing((9.0, 10.0, 14.0), ("gemm",)), 1e-4)
    assert (row["us"], row["mean_us"], row["kernels"]) == (10.0, 11.0, 1)
    assert row["vs_deep_gemm"] == row["vs_best"] == pytest.approx(17.38 / 10)
    assert row["tflops"] == pytest.approx(2 * 128 * 24576 * 1536 / 10e-6 / 1e12)
    moved = 128 * 1536 + 24576 * 1536 + 4 * 12 * (128 + 192) + 2 * 128 * 24576
    assert row["gbps"] == pytest.approx(moved / 10e-6 / 1e9)
    assert row["of_copy"] == pytest.approx(moved / 10e-6 / 4.21e12)
    row = gemm.make_row(128, 24576, 1536, timed(10.0), 1e-4, timed(2 * 17.09))
    assert (row["vs_deep_gemm"], row["cublas_us"]) == (pytest.approx(2 * 17.38 / 10), 2 * 17.09)
    assert row["over_reading"] is None
    decode = gemm.make_row(16, 24576, 1536, timing.Timing((25.0, 25.0, 28.0), ("gemm",)), 1e-4)
    assert decode["over_reading"] == pytest.approx(2.0)  # a mean over a mean
    unknown = gemm.make_row(16, 256, 256, timed(1.0), 1e-4)
    assert all(unknown[name] is None for name in ("vs_deep_gemm", "vs_best", "over_reading", "cublas_us"))


def test_gemm_thresholds_on_all_shapes():
    thresholds = {one.name: one for one in gemm.thresholds(gemm_rows(lambda m, n, k: 1.4))}
    assert thresholds["m=4096, geomean of DeepGEMM / ours"].value == pytest.approx(1.4)
    assert thresholds["m=512, geomean of DeepGEMM / ours"].passed
    assert thresholds["m=1, 16, 64, least"].value == pytest.approx(1.4)
    reading = thresholds["m=1, 16, 64, geomean of ours / reading the weight"]
    expected = [
        baselines.find("gemm", m, n, k).us("deep_gemm") / 1.4 / baselines.reading_us(n, k)
        for m in (1, 16, 64)
        for n, k in baselines.DENSE_SHAPES
    ]
    assert reading.value == pytest.approx(report.geomean(expected)) and (reading.limit, reading.aim) == (1.25, 1.1)
    best = thresholds["m=128, geomean of the faster of DeepGEMM and cuBLAS / ours"]
    assert best.value == pytest.approx(1.4)  # cuBLAS is faster nowhere


def test_gemm_thresholds_on_an_h100():
    rows = gemm_rows(lambda m, n, k: 0.97 if m == 512 else 1.0, "H100")
    assert rows[0]["vs_deep_gemm"] == pytest.approx(1) and rows[0]["over_reading"] is None
    *means, error = gemm.thresholds(rows, "H100")
    found = [(one.value, one.limit, one.passed) for one in means]
    assert [limit for _, limit, _ in found] == [0.98] * 4 and [passed for *_, passed in found] == [
        True,
        False,
        True,
        True,
    ]
    assert error.passed


def test_one_slow_shape_misses_its_threshold():
    rows = gemm_rows(lambda m, n, k: 0.94 if (m, n) == (4096, 576) else 2.0)
    missed = {one.name for one in gemm.thresholds(rows) if not one.passed}
    assert missed == {"m=4096, least"}


def test_quantize_bytes_and_thresholds():
    assert quantize.bytes_moved("quantize_1x128", 4096, 7168) == 3 * 4096 * 7168 + 4 * 4096 * 56
    assert quantize.bytes_moved("quantize_128x128", 4096, 7168) == 3 * 4096 * 7168 + 4 * 32 * 56
    at_copy = {m: quantize.bytes_moved("quantize_1x128", m, 7168) / 4.21e6 for m in (4096, 65536)}
    rows = [quantize.make_row("quantize_1x128", m, 7168, us / 0.7, 0.0) for m, us in at_copy.items()]
    rows += [quantize.make_row("quantize_1x128", m, 7168, us, 0.0) for m, us in ((1, 1.5), (64, 3.5))]
    middle, large, small = quantize.thresholds(rows)
    assert middle.value == large.value == pytest.approx(0.7)
    assert (middle.passed, large.passed) == (True, False)
    assert (small.value, small.passed) == (3.5, False)


def test_host_thresholds_take_the_worst_shape():
    rows = [
        {"what": "gemm", "us": 17.0},
        {"what": "gemm", "us": 26.0},
        {"what": "FP8Linear", "us": 30.0},
        {"what": "first call, empty cache", "ms": 400.0},
        {"what": "first call, from the disk cache", "ms": 60.0},
        {"what": "memory", "extra_bytes": 0, "kept_bytes": 0},
        {"what": "memory", "extra_bytes": 4096, "kept_bytes": 0},
    ]
    assert [one.passed for one in host.thresholds(rows)] == [False, True, True, False, False, True]


def test_cpu_time_is_measured_of_every_kind_of_call(monkeypatch):
    measured = []
    monkeypatch.setattr(host.timing, "host_times", lambda call, *_, calls: [measured.append(call()), 5.0, 7.0, 6.0][1:])
    monkeypatch.setattr(host.baselines, "DENSE_SHAPES", [(576, 7168)])
    monkeypatch.setattr(host.calls, "Operands", partial(calls.Operands, "cpu"))
    rows = host.cpu_rows()
    assert [(row["what"], row["us"]) for row in rows] == [
        *(("gemm", 6.0), ("FP8Linear", 6.0), ("grouped_gemm", 6.0), ("GroupedExperts", 6.0)),
    ]
    assert [tuple(result.shape) for result in measured] == [(1, 576), (1, 576), (16, 1024), (1, 1024)]
    assert rows[0]["deep_gemm_us"] == baselines.deep_gemm_host_us(576, 7168)


@pytest.mark.parametrize("ratio, status", [(1.25, 0), (0.8, 1)])
def test_cpu_time_against_a_revision(monkeypatch, tmp_path, ratio, status):
    def compare(cases, trees, caches, *, clock, turns, repeats):
        assert clock == "host" and trees[1] == host.compare.ROOT
        rows = [{"case": case.name, "op": case.op, "sizes": case.sizes} for case in cases]
        for row in rows[:2]:
            row |= {"old_us": 20.0 * ratio, "new_us": 20.0, "ratio": ratio, "equal": True, "difference": 0.0}
        for row in rows[2:]:
            row["skipped"] = "AttributeError: no such name"
        return rows

    (tmp_path / "fp8moe").mkdir()
    (tmp_path / "fp8moe/__init__.py").touch()
    monkeypatch.setattr(host.compare, "compare", compare)
    monkeypatch.setattr(host.command, "start", lambda: "a GPU")
    assert host.main(["--against", str(tmp_path), "--out", str(tmp_path / "out")]) == status
    stored = json.loads((tmp_path / "out/host_against.json").read_text())
    assert stored["old"] == str(tmp_path) and stored["gpu"] == "a GPU"
    with pytest.raises(SystemExit, match="neither a directory with fp8moe"):
        host.main(["--against", "no-such-revision", "--out", str(tmp_path)])


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


def test_stored_experts_cover_every_model():
    assert MODELS["dsv3"] == Model(hidden=7168, intermediate=2048, experts=256, top_k=8)
    keys = [(name, tokens) for name in MODELS for tokens in (1, 8, 64, 512, 8192)]
    assert [tuple(case.sizes.values()) for case in baselines.cases("experts")] == keys
    assert all(tokens in experts.ALL_TOKENS for _, tokens in keys)
    layer = baselines.find("experts", "dsv3", 1)
    assert (layer.us("transformers_deep_gemm_graph"), layer.us("deep_gemm_two_gemms")) == (278.82, 121.71)
    for name in MODELS:
        assert list(baselines.bf16_experts(name)) == [1, 8, 32, 128, 512, 2048, 8192]


def test_experts_in_use_are_counted_from_the_weights_that_were_read():
    assert [baselines.active_experts("dsv3", tokens) for tokens in (1, 8, 64, 512)] == [8, 58, 227, 256]
    assert [baselines.active_experts("dsv3", tokens) for tokens in (32, 128, 3)] == [172, 251, None]
    for case in baselines.cases("experts"):
        model = MODELS[case.sizes["model"]]
        active = baselines.active_experts(*case.sizes.values())
        weights = 3 * model.hidden * model.intermediate * active * (1 + 4 / 128**2)
        assert weights / case.us("weight_read_floor") / 1e6 == pytest.approx(4.2, rel=1e-3)
    assert baselines.bf16_experts_us("dsv3", 32, 172) == 4935.82
    assert baselines.bf16_experts_us("dsv3", 8, 58) is None  # it had 56


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


def test_grouped_rows_compare_times_beside_the_yardstick_of_the_same_rows():
    case = Case("grouped_gemm", 32, 256, 7168, 2048)
    row = grouped_gemm.make_row(case, 8000, timed(200.0), 1e-5, timed(1.1 * 170.08))
    assert row["tflops"] == pytest.approx(2 * 8000 * 7168 * 2048 / 200e-6 / 1e12)
    assert (row["vs_deep_gemm"], row["cublas_us"]) == (pytest.approx(1.1 * 254.4 / 200), 1.1 * 170.08)
    moved = 8000 * 2048 + 32 * 7168 * 2048 + 4 * 16 * (8000 + 32 * 56) + 2 * 8000 * 7168
    assert row["gbps"] == pytest.approx(moved / 200e-6 / 1e9)
    masked = grouped_gemm.make_row(Case("grouped_gemm_masked", 6, 20, 7168, 2048, 24), 120, timed(30.0), 1e-5)
    assert masked["vs_deep_gemm"] == pytest.approx(31.81 / 30)
    assert (masked["expected_m"], masked["cublas_us"]) == (24, None)
    assert grouped_gemm.make_row(Case("grouped_gemm", 3, 5, 8, 16), 15, timed(1.0), 0.0)["vs_deep_gemm"] is None


def grouped_rows(ratio):
    """Rows in which every stored case has the ratio that `ratio(case)` says."""
    found = []
    for case in grouped_gemm.stored_cases():
        rows = sum(grouped_gemm.group_sizes(case.groups, case.mean_m))
        yardstick = timed(100.0) if case.baseline.has_yardstick else None
        us = case.baseline.over(1.0, yardstick_us=yardstick and 100.0) / ratio(case)
        found.append(grouped_gemm.make_row(case, rows, timed(us), 1e-5, yardstick))
    return found


def test_grouped_thresholds():
    rows = grouped_rows(lambda case: 1.2 if case.op == "grouped_gemm" else 1.1)
    thresholds = grouped_gemm.thresholds(rows)
    assert [one.value for one in thresholds] == pytest.approx([1.2] * 5 + [1.1, 1.1, 1e-5])
    assert all(one.passed for one in thresholds)
    slow = Case("grouped_gemm_masked", 256, 2, 7168, 2048, 2)
    rows = grouped_rows(lambda case: 0.9 if case == slow else 1.2)
    assert [one.name for one in grouped_gemm.thresholds(rows) if not one.passed] == ["grouped_gemm_masked, least"]


def test_grouped_summary_has_a_line_for_each_kind_of_groups():
    lines = report.summarize(grouped_rows(lambda case: 1.25), ("op", "groups", "mean_m"), ("vs_deep_gemm",))
    assert len(lines) == 4 + 7
    assert lines[0] == {"op": "grouped_gemm", "groups": 4, "mean_m": 8192, "vs_deep_gemm": pytest.approx(1.25)}
    assert all(line["vs_deep_gemm"] == pytest.approx(1.25) for line in lines)


def fake_timings(calls, *, rests=None, rest=True):
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
    assert [one["passed"] for one in result["thresholds"]] == [True]


def test_times_at_the_power_limit_are_not_compared(small_rooms, monkeypatch):
    hot = []
    monkeypatch.setattr(timing, "measure", lambda calls, rest, **options: hot.append(not rest) or fake_timings(calls))
    (row,) = (result := grouped_gemm.run([Case("grouped_gemm", 3, 20, 136, 272)], device="cpu", rest=False))["rows"]
    assert (hot, row["us"], row["vs_deep_gemm"], result["thresholds"]) == ([True], 3.0, None, [])


@pytest.mark.parametrize("op", grouped_gemm.OPS)
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
    for case in baselines.cases("experts"):
        name, tokens = case.sizes.values()
        us = case.us("deep_gemm_two_gemms") / speedup(name, tokens)
        model = MODELS[name]
        host_us = 100.0 + tokens / 64 if tokens <= 128 else None
        measured = measurement(us, host_us, experts.documented_bytes(model, tokens))
        rows.append(experts.make_row(name, model, tokens, "random", measured))
    name, tokens = experts.BALANCE
    for routing, us in (("even", 1400.0), ("skewed", skew * 1400.0)):
        rows.append(experts.make_row(name, MODELS[name], tokens, routing, measurement(us, None)))
    return rows


ERRORS = {"cuda": 2.3e-3, "cuda, own activations": 1.7e-3, "reference, own activations": 1.7e-3}


def test_experts_rows_hold_ratios_and_stages():
    row = experts.make_row("dsv3", MODELS["dsv3"], 1, "random", measurement(100.0))
    assert row["vs_two_gemms"] == pytest.approx(1.2171)
    assert row["vs_deep_gemm"] == pytest.approx(2.7882)
    assert row["vs_bf16"] == pytest.approx(4.1599)
    assert sum(row[f"{stage}_us"] for stage in experts.STAGES) == pytest.approx(100)
    assert row["tflops"] == pytest.approx(6 * 8 * 7168 * 2048 / 100e-6 / 1e12)
    for other in (("dsv3", 1, "even"), ("dsv3", 3, "random"), ("tiny", 1, "random")):
        name, tokens, routing = other
        unknown = experts.make_row(name, TINY, tokens, routing, measurement(1.0))
        assert unknown["vs_two_gemms"] is unknown["vs_deep_gemm"] is unknown["vs_bf16"] is None
    only_bf16 = experts.make_row("dsv3", MODELS["dsv3"], 32, "random", measurement(100.0)._replace(active_experts=172))
    assert (only_bf16["vs_two_gemms"], only_bf16["vs_bf16"]) == (None, pytest.approx(49.3582))


def test_experts_thresholds():
    thresholds = experts.thresholds(experts_rows(lambda name, tokens: 1.2, skew=1.1), ERRORS)
    values = [one.value for one in thresholds]
    assert values[:2] == pytest.approx([1.2, 1.2])
    assert values[2] > 1.2
    assert values[3:] == pytest.approx([101.0, 121.71 / 1.2, 1.1, 1.0, 2.3e-3, 1.0])
    assert all(one.passed for one in thresholds)
    rows = experts_rows(lambda name, tokens: 0.99, skew=1.2)
    rows[0]["host_us"], rows[4]["extra_bytes"] = 181.0, 2 * rows[4]["documented_bytes"]
    missed = [one.passed for one in experts.thresholds(rows, ERRORS | {"cuda, own activations": 1.9e-3})]
    assert missed == [False, True, True, False, False, False, False, True, False]


def test_experts_thresholds_need_every_case():
    rows = [row for row in experts_rows(lambda *_: 1.5, skew=1.0) if row["tokens"] not in (1, 2048, 8192)]
    assert [one.name for one in experts.thresholds(rows, ERRORS)] == [
        "experts, CPU time of an eager call, 1 to 128 tokens, slowest",
        "experts, layer error against float64",
        "experts, layer error over its own quantized activations / the reference backend's",
    ]
    assert [one.passed for one in experts.thresholds([], dict.fromkeys(ERRORS, math.nan))] == [False, False]


def test_routing_has_distinct_experts_and_as_many_in_use_as_in_the_baselines():
    for name, tokens in ((name, tokens) for name in MODELS for tokens in (1, 8, 32, 64, 128)):
        model = MODELS[name]
        (index,) = experts.routings(name, model, tokens).values()
        assert torch.equal(index, experts.routings(name, model, tokens)["random"])
        assert index.shape == (tokens, 8) and index.max() < model.experts
        assert all(len(set(row)) == 8 for row in index.tolist())
        assert len(index.unique()) == baselines.active_experts(name, tokens)
    with pytest.raises(RuntimeError, match="9 experts in use"):
        experts.route(TINY, 4, 9)


def test_even_and_skewed_routing():
    name, tokens = experts.BALANCE
    found = experts.routings(name, MODELS[name], tokens)
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
    names = {one["name"]: one["passed"] for one in result["thresholds"]}
    assert names["experts, dsv3_ep8, 2048 tokens, 60% of the rows to one expert / even routing"]


@pytest.mark.parametrize("case", training.stored_cases())
def test_groups_of_weight_gradients_have_the_baselines_sum(case):
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
        training.make_gemm_row(training.Case(**case.sizes), 0.9 * us, us, us, 1e-5)
        for case in baselines.cases("grouped_gemm_k")
        for us in [case.us("deep_gemm") / speedup]
    ]
    size = {"model": training.MODEL, **MODELS[training.MODEL]._asdict(), "tokens": training.TOKENS}
    rows += training.make_pass_rows("experts", size, passes(2 * speedup, kept_ratio))
    size = dict(zip(("rows", "out_features", "in_features"), training.LINEAR, strict=True))
    return rows + training.make_pass_rows("linear", size, passes(1.2 * speedup, kept_ratio))


def test_training_rows_hold_rates_and_ratios():
    product = training.make_gemm_row(training.Case(8, 4096, 7168, 36864), 1800.0, 0.0, 2224.68 / 1.2, 1e-5)
    assert product["vs_deep_gemm"] == pytest.approx(1.2)  # both add to what is there
    assert product["tflops"] == pytest.approx(2 * 4096 * 7168 * 36864 / 1800e-6 / 1e12)
    assert training.make_gemm_row(training.Case(1, 8, 8, 128), 1.0, 1.0, 1.0, 0.0)["vs_deep_gemm"] is None
    bf16, ours, with_bf16_master = training.make_pass_rows("linear", {"rows": 8}, passes(2.2, 0.4))
    assert (bf16["impl"], bf16["master"], bf16["speedup"], bf16["kept_ratio"]) == ("bf16", None, 1.0, 1.0)
    assert (ours["impl"], ours["master"], ours["copy_bytes"], ours["rows"]) == ("fp8", "float32", 500, 8)
    assert [ours[key] for key in ("speedup", "kept_ratio", "peak_ratio")] == pytest.approx([2.2, 0.4, 0.8])
    assert with_bf16_master["speedup"] == pytest.approx(2.0)


def test_training_thresholds():
    thresholds = training.thresholds(training_rows())
    assert [one.value for one in thresholds] == pytest.approx([1.3, 1e-5, 2.6 / 1.1, 0.4, 1.56 / 1.1])
    assert [one.passed for one in thresholds] == [True, True, False, True, True]  # 2.36, where 2.4 is asked for
    slow = training.thresholds(training_rows(speedup=0.9, kept_ratio=0.7))
    assert [one.passed for one in slow] == [False, True, False, False, False]


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


def test_stored_cases_are_those_of_the_baselines():
    contiguous, masked = (baselines.cases(op) for op in grouped_gemm.OPS)
    assert (len(contiguous), len(masked)) == (15, 27)
    case = baselines.find("grouped_gemm_masked", 32, 192, 4096, 7168)
    assert (case.us("deep_gemm"), case.expected_m) == (366.01, 230)
    assert all(case.has_yardstick for case in contiguous) and not any(case.has_yardstick for case in masked)
    prefills, batches = mqa.stored_prefills(), mqa.stored_batches()
    assert (len(prefills), len(batches)) == (3, 6)
    assert prefills[0] == Prefill(2048, 8192, 64, 128)
    assert batches[1] == Batch((8192,) * 64, 2, 64, 128, 8192)
    assert baselines.find("mqa_logits", 2048, 8192).us("deep_gemm_no_fill") == 223.2


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


def mqa_rows(speedup=1.2, over_bytes=1.1, error=3e-4, overlap=0.97):
    """Rows in which every stored case takes DeepGEMM's time divided by `speedup`."""
    rows = []
    for prefill, case in zip(mqa.stored_prefills(), baselines.cases("mqa_logits"), strict=True):
        for fill, name in ((True, "deep_gemm"), (False, "deep_gemm_no_fill")):
            rows.append(mqa.make_prefill_row(prefill, fill, timed(case.us(name) / speedup), error))
    pairs = zip(mqa.stored_batches(), baselines.cases("paged_mqa_logits"), strict=True)
    us = {batch: case.us("deep_gemm") / speedup for batch, case in pairs}
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
    assert row["vs_deep_gemm"] == pytest.approx(229.62 / 200)
    assert mqa.make_prefill_row(case, False, timed(200.0), 1e-4)["vs_deep_gemm"] == pytest.approx(223.2 / 200)
    assert mqa.make_prefill_row(case._replace(heads=32), True, timed(200.0), 1e-4)["vs_deep_gemm"] is None
    assert row["tflops"] == pytest.approx(flops / 200e-6 / 1e12)
    assert row["floor_us"] == pytest.approx(flops / 1490e12 * 1e6)  # the tensor cores
    assert mqa.make_prefill_row(Prefill(1, 2, 64, 128), True, timed(1.0), 0.0)["vs_deep_gemm"] is None
    row = mqa.make_paged_row(mqa.EVEN, timed(20.0), 1e-4)
    moved = 64 * 8192 * (132 + 4) + 64 * 64 * 128
    assert row["vs_deep_gemm"] == pytest.approx(26.08 / 20)
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


def test_mqa_thresholds():
    thresholds = mqa.thresholds(mqa_rows())
    assert [one.value for one in thresholds] == pytest.approx([1.2, 1.2, 1.1, 1.1, 3e-4, 0.97])
    assert all(one.passed for one in thresholds)
    missed = mqa.thresholds(mqa_rows(speedup=0.99, over_bytes=1.4, error=2e-3, overlap=0.92))
    assert len(missed) == 6 and not any(one.passed for one in missed)


@pytest.mark.parametrize(
    ("benchmark", "rows", "lacks", "absent", "there"),
    [
        (gemm, lambda: gemm_rows(lambda *_: 2.0), {"m": 512, "n": 576}, "m=512", "m=4096"),
        (
            grouped_gemm,
            lambda: grouped_rows(lambda _: 1.5),
            {"groups": 8, "n": 6144},
            "grouped_gemm, 4 and 8",
            "grouped_gemm, 32",
        ),
        (training, training_rows, {"what": "experts"}, "experts, dsv3_ep8", "grouped_gemm_k"),
        (training, training_rows, {"groups": 16}, "grouped_gemm_k, accumulating", "FP8Linear"),
        (mqa, mqa_rows, {"kv_tokens": 65536}, "mqa_logits, 3 shapes", "paged_mqa_logits, 6 shapes"),
        (mqa, mqa_rows, {"next_n": 2}, "paged_mqa_logits, 6 shapes", "mqa_logits, 3 shapes"),
    ],
)
def test_thresholds_need_every_case(benchmark, rows, lacks, absent, there):
    def names(rows):
        return [one.name for one in benchmark.thresholds(rows)]

    whole = rows()
    assert any(name.startswith(absent) for name in names(whole))
    part = names([row for row in whole if any(row.get(key) != value for key, value in lacks.items())])
    assert not any(name.startswith(absent) for name in part) and any(name.startswith(there) for name in part)
    assert names([]) == []


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


def decode_rows():
    rates = {"prompt": 512, "ms": 2.0, "tokens_s": 500.0, "x_floor": 3.0}
    kinds = [("decode", 1), ("decode", 8), ("decode_bf16", 1), ("decode_bf16", 8)]
    return [{"what": what, "batch": batch, **rates} for what, batch in kinds]


def test_pictures_are_drawn_of_the_baselines_and_of_what_there_is(tmp_path):
    benchmarks = {
        "quantize": {"gpu": "NVIDIA H200", "rows": quantize_rows()},
        "experts": {"gpu": "NVIDIA H200", "rows": experts_rows(lambda name, tokens: 1.1)},
        "training": {"gpu": "NVIDIA H200", "rows": training_rows()},
    }
    write_json(tmp_path / "new.json", {"benchmarks": benchmarks})
    models = {"decode": {"gpu": "NVIDIA H100 80GB HBM3", "rows": decode_rows()}}
    write_json(tmp_path / "models.json", {"models": models})
    files = [str(tmp_path / name) for name in ("new.json", "models.json")]
    plots.main(["--results", *files, "--out", str(tmp_path / "new")])
    assert {path.stem for path in (tmp_path / "new").glob("*.png")} == {*plots.OF_BASELINES, *plots.OF_RESULTS}


def test_chosen_parts_are_run(monkeypatch, tmp_path):
    made = {row["what"]: row for row in mqa_rows(overlap=0.5)}
    parts = {"paged_mqa_logits": lambda: [made["uneven"], made["overlap"]], "topk": lambda: [{"what": "topk"}]}
    monkeypatch.setattr(mqa, "PARTS", parts)
    monkeypatch.setattr(command, "start", lambda: "a GPU")
    mqa.main(["--only", "paged_mqa_logits", "--out", str(tmp_path / "new")])
    result = json.loads((tmp_path / "new/mqa.json").read_text())
    assert (result["gpu"], result["rows"]) == ("a GPU", [made["uneven"], made["overlap"]])
    assert [one["passed"] for one in result["thresholds"]] == [True, False]


@pytest.mark.parametrize("benchmark", [gemm, grouped_gemm, experts])
def test_results_are_written(monkeypatch, tmp_path, benchmark):
    name = benchmark.__name__.removeprefix("benchmarks.")
    rows = {"gemm": gemm_rows, "grouped_gemm": grouped_rows, "experts": experts_rows}[name](lambda *_: 1.5)
    result = command.result("a GPU", rows, [], more=1)
    monkeypatch.setattr(benchmark, "run", lambda *_, **options: result)
    benchmark.main(["--out", str(tmp_path)])
    assert json.loads((tmp_path / f"{name}.json").read_text()) == result


def test_choice_has_sixty_problems_with_their_candidates():
    found = choice.problems()
    assert found == choice.problems() and len(found) == len(set(found)) == 60
    assert sum(problem.groups > 0 for problem in found) == 30
    for problem in found:
        configs = choice.candidates(problem, 132)
        assert len(set(configs)) == len(configs) <= choice.MOST
        if problem.groups:
            offsets = choice.group_offsets(problem)
            assert offsets[0] == 0 and offsets[-1] == problem.m and (offsets.diff() >= 0).all()
    assert any((choice.group_offsets(problem).diff() == 0).any() for problem in found if problem.groups)


def test_regret_is_over_the_best_candidate():
    problem = choice.Problem(0, 64, 256, 1024)
    times = dict(zip(choice.candidates(problem, 132), (11.0, 12.0, 10.0), strict=False))
    row = choice.make_row(problem, times)
    assert row["us"] == 11 and row["best_us"] == 10 and row["regret"] == pytest.approx(0.1)
    mean, largest = choice.thresholds([row, row | {"regret": 0.0}])
    assert not mean.passed and mean.value == pytest.approx(0.05) and largest.value == pytest.approx(0.1)


def test_regret_is_by_the_second_times_of_the_chosen_and_the_best():
    problem = choice.Problem(0, 64, 2112, 7168)
    configs = choice.candidates(problem, 132)[:6]
    times = dict(zip(configs, (11.0, 9.0, 12.0, 10.0, 10.5, 13.0), strict=True))
    again = choice.finalists(times)
    assert again == [configs[i] for i in (0, 1, 3, 4)]
    row = choice.make_row(problem, times, dict(zip(again, (10.4, 10.5, 10.0, 10.6), strict=True)))
    assert (row["us"], row["best"], row["best_us"]) == (10.4, configs[3].name, 10.0)
    assert row["regret"] == pytest.approx(0.04) and row["candidates"] == len(row["times"]) == 6


def test_candidates_are_timed_in_turn(monkeypatch):
    problem = choice.Problem(0, 64, 2112, 7168)
    configs, timed = choice.candidates(problem, 132)[:2], []

    def measure(calls, *, rests):
        for call in calls:
            call()
        assert len(rests) == len(calls)
        return [timing.Timing((us,), ()) for us in (3.0, 9.0, 1.0, 8.0, 2.0, 7.0)]

    monkeypatch.setattr(choice, "call_of", lambda problem: timed.append)
    monkeypatch.setattr(timing, "measure", measure)
    assert choice.time_in_turn(problem, configs, 132, rounds=3) == dict(zip(configs, (2.0, 8.0), strict=True))
    assert timed == configs * 3
