"""The arithmetic of the benchmarks: attribution of kernels, ratios, thresholds. Nothing here needs a GPU."""

import json
import math
import weakref
from contextlib import nullcontext
from functools import partial
from unittest.mock import MagicMock

import pytest
import torch

from benchmarks import calls, choice, host, mqa, mqa_cases, operands, quantize, report, timing, training
from benchmarks.mqa_cases import Batch
from benchmarks.shapes import MODELS, Model
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


def timed(us, kernels=("kernel",)):
    return timing.Timing((us,), kernels)


def test_quantize_bytes_and_thresholds():
    assert quantize.bytes_moved("quantize_1x128", 4096, 7168) == 3 * 4096 * 7168 + 4 * 4096 * 56
    assert quantize.bytes_moved("quantize_128x128", 4096, 7168) == 3 * 4096 * 7168 + 4 * 32 * 56
    at_copy = {m: quantize.bytes_moved("quantize_1x128", m, 7168) / 4.21e6 for m in (4096, 65536)}
    rows = [quantize.make_row("quantize_1x128", m, 7168, us / 0.7) for m, us in at_copy.items()]
    rows += [quantize.make_row("quantize_1x128", m, 7168, us) for m, us in ((1, 1.5), (64, 3.5))]
    middle, large, small = quantize.thresholds(rows)
    assert middle.value == large.value == pytest.approx(0.7)
    assert (middle.passed, large.passed) == (True, False)
    assert (small.value, small.passed) == (3.5, False)


def test_host_thresholds_take_the_worst_shape():
    rows = [
        {"what": "gemm", "us": 17.0},
        {"what": "gemm", "us": 26.0},
        {"what": "FP8Linear", "us": 30.0},
        {"what": "GroupedExperts", "us": 181.0},
        {"what": "deep_gemm", "us": 30.0, "extra_us": 9.0},
        {"what": "deep_gemm", "us": 30.0, "extra_us": 11.0},
        {"what": "first call, empty cache", "ms": 400.0},
        {"what": "first call, from the disk cache", "ms": 60.0},
        {"what": "memory", "extra_bytes": 0, "kept_bytes": 0},
        {"what": "memory", "extra_bytes": 4096, "kept_bytes": 0},
    ]
    assert [one.passed for one in host.thresholds(rows)] == [False, True, False, False, True, False, False, True]


def test_cpu_time_is_measured_of_every_kind_of_call(monkeypatch):
    measured = []
    monkeypatch.setattr(host.timing, "host_times", lambda call, *_, calls: [measured.append(call()), 5.0, 7.0, 6.0][1:])
    monkeypatch.setattr(host, "DENSE_SHAPES", [(576, 7168)])
    monkeypatch.setattr(host.calls, "Operands", partial(calls.Operands, "cpu"))
    rows = host.cpu_rows()
    assert [(row["what"], row["us"]) for row in rows] == [
        *(("gemm", 6.0), ("FP8Linear", 6.0), ("grouped_gemm", 6.0), ("GroupedExperts", 6.0)),
    ]
    assert [tuple(result.shape) for result in measured] == [(1, 576), (1, 576), (16, 1024), (1, 1024)]


def test_cpu_time_of_the_drop_in_is_measured_on_calls_of_one_result(monkeypatch):
    for native, drop_in in host.drop_in_calls("cpu").values():
        expected, found = native(), drop_in()
        assert found is None or torch.equal(found, expected)
    times = iter(range(100))
    monkeypatch.setattr(host, "BATCHES", 3)
    monkeypatch.setattr(host, "drop_in_calls", lambda: {"one": (None, None), "other": (None, None)})
    monkeypatch.setattr(host, "host_us", lambda call, batches: float(next(times) ** 2))
    assert [(row["us"], row["native_us"], row["extra_us"]) for row in host.drop_in_rows()] == [(9, 4, 5), (81, 64, 17)]


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


def test_routing_has_distinct_experts():
    for model in MODELS.values():
        index = operands.route(model, 9)
        assert torch.equal(index, operands.route(model, 9)) and index.max() < model.experts
        assert all(len(set(row)) == model.top_k for row in index.tolist())


def fake_timings(calls, *, rests=None):
    assert rests is None or len(calls) == len(rests)
    for call in calls:
        call()
    return [timing.Timing((2.0, 4.0), ("gemm",)) for _ in calls]


def passes(speedup, kept_ratio):
    """Measurements of bfloat16, which takes 10 ms and keeps 1000 bytes, and of ours, with bfloat16 masters slower."""
    bf16 = training.Measurement(4000.0, 10_000.0, training.Memory(1000, 3000, 0), None)
    memory = training.Memory(round(1000 * kept_ratio), 2400, 500)
    ours = training.Measurement(1500.0, 10_000.0 / speedup, memory, 0.07)
    return {"bf16": bf16, "float32": ours, "bfloat16": ours._replace(us=1.1 * ours.us)}


def training_rows(speedup=1.3, kept_ratio=0.4):
    size = {"model": training.MODEL, **MODELS[training.MODEL]._asdict(), "tokens": training.TOKENS}
    rows = training.make_pass_rows("experts", size, passes(2 * speedup, kept_ratio))
    size = dict(zip(("rows", "out_features", "in_features"), training.LINEAR, strict=True))
    return rows + training.make_pass_rows("linear", size, passes(1.2 * speedup, kept_ratio))


def test_training_rows_hold_rates_and_ratios():
    bf16, ours, with_bf16_master = training.make_pass_rows("linear", {"rows": 8}, passes(2.2, 0.4))
    assert (bf16["impl"], bf16["master"], bf16["speedup"], bf16["kept_ratio"]) == ("bf16", None, 1.0, 1.0)
    assert (ours["impl"], ours["master"], ours["copy_bytes"], ours["rows"]) == ("fp8", "float32", 500, 8)
    assert [ours[key] for key in ("speedup", "kept_ratio", "peak_ratio")] == pytest.approx([2.2, 0.4, 0.8])
    assert with_bf16_master["speedup"] == pytest.approx(2.0)


def test_training_thresholds():
    thresholds = training.thresholds(training_rows())
    assert [one.value for one in thresholds] == pytest.approx([2.6 / 1.1, 0.4, 1.56 / 1.1])
    assert [one.passed for one in thresholds] == [False, True, True]  # 2.36, where 2.4 is asked for
    assert not any(one.passed for one in training.thresholds(training_rows(speedup=0.9, kept_ratio=0.7)))
    assert training.thresholds([]) == []


TINY = Model(hidden=256, intermediate=128, experts=8, top_k=2)


def test_training_passes_are_compared_with_bfloat16(monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setattr(training, "measure_memory", lambda of: training.Memory(1, 1, 1))
    monkeypatch.setattr(timing, "capture", lambda call: call)
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


def test_work_of_index_scores_counts_what_each_query_sees():
    batch = Batch((7, 100), next_n=2, heads=32, head_dim=64, max_context_len=200)
    assert batch.visible == [6, 7, 99, 100]
    assert mqa_cases.paged_work(batch) == (2 * 32 * 64 * 212, 107 * 68 + 4 * 800 + 4 * 32 * 64)
    assert mqa_cases.paged_work(batch._replace(fill_masked=False))[1] == 107 * 68 + 4 * 212 + 4 * 32 * 64


def test_uneven_batches_have_as_many_tokens_as_even_ones():
    uneven, _, even, _ = mqa.uneven_batches()
    assert sorted(set(uneven.contexts)) == [512, 131072] and uneven.contexts.count(131072) == 1
    assert set(even.contexts) == {2552}
    assert mqa_cases.paged_work(uneven) == mqa_cases.paged_work(even)


def test_paged_rows_hold_rates():
    row = mqa.make_paged_row(mqa.EVEN, timed(20.0), 1e-4)
    moved = 64 * 8192 * (132 + 4) + 64 * 64 * 128
    assert row["gbps"] == pytest.approx(moved / 20e-6 / 1e9)
    assert row["floor_us"] == pytest.approx(moved / 4.21e12 * 1e6)  # the memory
    assert (row["batch"], row["context"], row["tokens"], row["next_n"]) == (64, 8192, 64 * 8192, 1)


def test_uneven_rows_compare_with_the_bandwidth_of_even_contexts_and_with_the_same_bytes():
    uneven, unfilled, even, even_unfilled = mqa.uneven_batches()
    us = {mqa.EVEN: 20.0, uneven: 30.0, unfilled: 12.0, even: 25.0, even_unfilled: 10.0}
    filled, bare = mqa.make_uneven_rows(us)
    tokens, moved = 131072 + 63 * 512, 64 * 8192 * 136 + 64 * 64 * 128
    assert filled["bytes_us"] == pytest.approx(20 / moved * (132 * tokens + 4 * 64 * 131072 + 64 * 64 * 128))
    assert bare["bytes_us"] == pytest.approx(20 / moved * (136 * tokens + 64 * 64 * 128))
    assert (filled["over_bytes"], filled["over_even"]) == pytest.approx((30 / filled["bytes_us"], 1.2))
    assert (bare["over_bytes"], bare["over_even"]) == pytest.approx((12 / bare["bytes_us"], 1.2))


@pytest.mark.parametrize(
    ("over_bytes", "error", "overlap", "passed"), [(1.1, 3e-4, 0.97, True), (1.4, 2e-3, 0.92, False)]
)
def test_mqa_thresholds(over_bytes, error, overlap, passed):
    uneven = [{"what": "uneven", "fill_masked": fill, "over_bytes": over_bytes} for fill in (True, False)]
    others = [{"what": "paged_mqa_logits", "error": error}]
    others.append({"what": "overlap", "tokens": 16384, "top_k": 2048, "overlap": overlap})
    thresholds = mqa.thresholds([*uneven, *others])
    assert [one.value for one in thresholds] == [over_bytes, over_bytes, error, overlap]
    assert [one.passed for one in thresholds] == [passed] * 4


@pytest.fixture
def timed_once(monkeypatch):
    monkeypatch.setattr(timing, "measure", fake_timings)


BATCHES = [
    Batch((70, 3, 128), next_n=2, heads=32, head_dim=64, max_context_len=150),
    Batch((1, 200), next_n=1, heads=64, head_dim=32, max_context_len=200, fill_masked=False),
]


def test_index_scores_are_checked_and_timed(timed_once):
    torch.manual_seed(0)
    rows = mqa.run_paged(BATCHES, device="cpu")
    assert [(row["us"], row["tokens"]) for row in rows] == [(3.0, 201), (3.0, 201)]
    assert all(0 < row["error"] <= 1e-5 for row in rows)


def test_wrong_index_scores_are_not_timed(monkeypatch):
    def prepare(wrong):
        def call(*args, **options):
            out = real(*args, **options)
            wrong(out)
            return out

        with monkeypatch.context() as patch:
            patch.setattr(mqa_cases, "paged_mqa_logits", call)
            mqa_cases.prepare_paged(BATCHES[0], cache)

    torch.manual_seed(0)
    real, cache = mqa_cases.paged_mqa_logits, mqa_cases.filled_cache(5, 64, device="cpu")
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


def test_overlap_of_known_rows():
    expected = torch.tensor([[4.0, 3, 2, 1], [1, 2, 3, 4]])
    assert mqa.overlap(torch.tensor([[9.0, 1, 8, 0], [0, 0, 5, 6]]), expected, 2).tolist() == [0.5, 1.0]


def test_fp8_scores_pick_nearly_the_keys_of_float32():
    torch.manual_seed(0)
    (row,) = mqa.run_overlap(tokens=1024, queries=4, heads=64, head_dim=128, top_k=128, device="cpu")
    assert 0.93 <= row["least"] <= row["overlap"] < 1


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


def test_a_graph_holds_the_call_whose_operands_it_reads(monkeypatch):
    for name in ("Stream", "current_stream", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    for name in ("stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, lambda of: nullcontext())
    call = partial(int)
    held = weakref.ref(call)
    replay = timing.capture(call)
    del call
    assert held() is not None
    replay()
    del replay
    assert held() is None
