"""What benchmarks make of times: rows, bars and stored files. Calls run on the CPU and take what a test says."""

import json
import math
from functools import partial

import pytest
import torch

import fp8moe
from benchmarks import calls, distributed, host, report, roofline, tables, timing, training
from benchmarks.__main__ import BENCHMARKS, main
from benchmarks.calls import Case
from benchmarks.report import Bar, Benchmark, Option, Threshold, judge
from benchmarks.routines import kernels, serving, tiles, warmup
from benchmarks.shapes import Model
from benchmarks.timing import KernelEvent
from fp8moe import GroupedExperts
from fp8moe.runtime.record import Recorder, in_own_process

TINY = {"hidden": 256, "experts": 4, "top_k": 2, "tokens": 40}
SWIGLU = {"groups": 4, "mean_rows": 30, "intermediate": 128}


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    def measure(calls, *, rests=None):
        assert rests is None or len(calls) == len(rests)
        for call in calls:
            call()
        return [timing.Timing((2.0, 4.0), ("gemm",)) for _ in calls]

    monkeypatch.setattr(timing, "measure", measure)
    monkeypatch.setattr(kernels, "DEVICE", "cpu")
    monkeypatch.setattr(report, "start", lambda: "a GPU")
    monkeypatch.setattr(report, "digest", lambda root: "d")


def test_thresholds_pass_on_their_side_of_the_limit():
    assert Threshold("time", 24.9, 25).passed and not Threshold("time", 25.1, 25).passed
    assert Threshold("ratio", 1.0, 1.0, at_least=True).passed
    assert not Threshold("ratio", 0.99, 1.0, at_least=True).passed
    assert not Threshold("time", math.nan, 25).passed
    assert not Threshold("ratio", math.nan, 1.0, at_least=True).passed


def test_bars_are_of_the_rows_that_they_name():
    rows = [{"op": op, "m": m, "us": us} for op, m, us in (("a", 1, 2.0), ("a", 64, 3.0), ("b", 1, 9.0))]
    rows.append({"op": "a"})
    each = Bar("{op} ({m})", "us", 2.5, where={"op": "a"})
    assert [(one.name, one.value, one.passed) for one in each.judge(rows)] == [
        ("a (1)", 2.0, True),
        ("a (64)", 3.0, False),
    ]
    most = Bar("{count} rows", lambda row: row.get("us"), 9, where={"m": lambda m: m < 64}, over=max)
    assert [(one.name, one.value) for one in most.judge(rows)] == [("2 rows", 9.0)]
    assert judge(rows, [Bar("none", "us", 1, where={"m": (2, 3)}, over=max)]) == []
    assert report.geomean([1, 4]) == pytest.approx(2)
    for values in ([], [1, 0], [-1]):
        with pytest.raises(ValueError, match="positive"):
            report.geomean(values)


def test_a_benchmark_stores_its_rows_and_prints_them(tmp_path, capsys):
    def measure(only=("a", "b"), fast=False):
        yield from ({"what": name, "us": 1.0 + fast} for name in only)

    options = {"only": Option(("a", "b"), ("a", "b")), "fast": Option(False)}
    one = Benchmark("one", measure, {"a": ("us",)}, [Bar("{what}", "us", 1.5)], options)
    assert [row["us"] for row in one.run()["rows"]] == [1.0, 1.0]
    assert one.main(["--only", "a", "--fast", "--out", str(tmp_path)]) == 0
    stored = json.loads((tmp_path / "one.json").read_text())
    assert stored["digest"] == "d" and stored["gpu"] == "a GPU" and stored["rows"] == [{"what": "a", "us": 2.0}]
    assert [threshold["passed"] for threshold in stored["thresholds"]] == [False] and "MISS" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["one"])
    with pytest.raises(SystemExit, match="0"):
        main(["mqa", "--help"])
    assert {"batch_invariance", "choice", "warmup", "serve_gpu"} < BENCHMARKS.keys()  # files of validation/


def test_quantizers_are_checked_and_timed(monkeypatch):
    for name, value in (("K", 256), ("SMALL_M", (1,)), ("LARGE_M", (300,))):
        monkeypatch.setattr(kernels, name, value)
    rows = list(kernels.quantize())
    assert [row["gbps"] for row in rows] == pytest.approx([bytes / 3e3 for bytes in (776, 232800, 230424)])
    cases = {
        "one group": (Case("quantize_with_transpose", {"m": 200, "k": 256}), 2),
        "gather": (Case("gather_with_transpose", TINY), 2),
        "swiglu backward": (Case("swiglu_backward_quantize", SWIGLU), 3),
    }
    monkeypatch.setattr(kernels, "TRANSPOSED", cases)
    one, gathered, swiglu = kernels.transpose()
    assert (gathered["rows"], gathered["columns"], swiglu["k"]) == (80, 512, 256)
    assert one["of_copy"] == one["of_copy_once"]
    written = (80 + 512) * 256 + 4 * (80 * 2 + 4 * 256)
    assert gathered["of_copy_once"] / gathered["of_copy"] == pytest.approx((written + 80 * 256) / (written + 160 * 256))


def test_attention_over_both_caches(monkeypatch):
    monkeypatch.setattr(kernels, "CACHED", ((2, 40),))
    monkeypatch.setattr(kernels, "HEADS", {"heads": 4, "key_heads": 2, "head_dim": 32})
    bf16, fp8 = kernels.attention()
    assert [row["gbps"] for row in (bf16, fp8)] == pytest.approx([2 * 2 * 2 * 40 * each / 3e3 for each in (64, 36)])
    assert bf16["of_bf16"] == fp8["of_bf16"] == 1


def test_attention_over_latents(monkeypatch):
    cases = [{"heads": 2, "batch": 2, "tokens": 40}, {"heads": 2, "batch": 1, "tokens": 40, "queries": 3, "chosen": 8}]
    monkeypatch.setattr(kernels, "LATENT_CASES", cases)
    monkeypatch.setattr(kernels, "FP8_LATENT_CASES", cases[:1])
    dense, coded, chosen = kernels.latent()
    assert dense["gbps"] == pytest.approx(2 * 80 * 576 / 3e3) and dense["over_pytorch"] == 1
    assert dense["tflops"] == pytest.approx(2 * 2 * 80 * (576 + 512) / 3e6)
    assert coded["gbps"] == pytest.approx(80 * 656 / 3e3) and coded["of_bf16"] == 1
    assert chosen["gbps"] == pytest.approx(2 * 24 * 576 / 3e3) and chosen["over_pytorch"] is None


def test_products_are_latent_attention():
    make = calls.Operands("cpu")
    q, latents = make.normal(2, 1, 4, 576), make.normal(2, 30, 576)
    expected = fp8moe.latent_attention(q, latents, make.integers([30, 30]), value_size=512, scale=0.05)
    torch.testing.assert_close(kernels._by_products(q[:, 0], latents, 0.05), expected[:, 0], rtol=0.02, atol=0.02)


def test_what_differs_from_the_reference_is_not_timed(monkeypatch):
    torch.manual_seed(0)
    sizes = {"batch": 2, "context": [70, 3], "next_n": 1, "heads": 32, "head_dim": 32, "max_context_len": 90}
    call = calls.build(Case("paged_mqa_logits", sizes), calls.Operands("cpu"))
    right = kernels.by_reference(call)
    kernels.check("scores", lambda: right, 0)
    monkeypatch.setattr(kernels, "by_reference", lambda _: right)
    cases = (0, 1, 0.0, "relative error"), (1, 2, math.inf, "relative error"), (1, 5, 0.0, "finite")
    for row, column, value, match in cases:
        wrong = right.clone()
        wrong[row, column] = value
        with pytest.raises(RuntimeError, match=match):
            kernels.check("scores", lambda wrong=wrong: wrong, 1e-3)
    monkeypatch.setattr(kernels, "by_reference", lambda _: torch.tensor([1, 2]))
    with pytest.raises(RuntimeError, match="1 values are not the reference's"):
        kernels.check("bytes", lambda: torch.tensor([1, 3]))


def test_index_scores_beside_their_bytes(monkeypatch):
    for name, value in {"LONG": 300, "EVEN": (100,) * 4, "UNEVEN": (300, 20, 20, 20), "AS_MANY": (90,) * 4}.items():
        monkeypatch.setattr(kernels, name, value)
    *rows, filled, bare = kernels.paged()
    moved = [4 * 100 * 132 + 4 * 4 * 100 + 4 * 8192, 360 * 132 + 4 * 4 * 300 + 4 * 8192, 360 * 136 + 4 * 8192]
    assert [row["gbps"] for row in rows[:3]] == pytest.approx([count / 3e3 for count in moved])
    assert all(row["error"] <= 1e-3 for row in rows)
    assert filled["over_bytes"] == pytest.approx(moved[0] / moved[1]) and bare["over_even"] == 1
    assert sum(kernels.paged_case((131072, *[512] * 63)).sizes["context"]) == 64 * 2552  # as many as even ones
    found, wanted = torch.tensor([[[9.0, 1, 8, 0], [0, 0, 5, 6]], [[4.0, 3, 2, 1], [1, 2, 3, 4]]])
    shares = kernels.shared(found, wanted, 2)
    assert shares.tolist() == [0.5, 1.0]
    (row,) = kernels.overlap(tokens=1024, queries=4, heads=64, head_dim=128, top_k=128)
    assert 0.93 <= row["least"] <= row["overlap"] < 1


def test_cpu_time_is_measured_of_every_kind_of_call(monkeypatch):
    measured = []
    for native, drop_in in host.drop_in_calls("cpu").values():
        expected, found = native(), drop_in()
        assert found is None or torch.equal(found, expected)
    monkeypatch.setattr(timing, "host_times", lambda call, *_, calls: [measured.append(call()), 5.0, 7.0, 6.0][1:])
    monkeypatch.setattr(calls.shapes, "DENSE_SHAPES", [(576, 7168)])
    monkeypatch.setattr(host.calls, "Operands", partial(calls.Operands, "cpu"))
    rows = host.cpu_rows()
    kinds = ("gemm", "FP8Linear", "grouped_gemm", "GroupedExperts")
    assert [(row["what"], row["us"]) for row in rows] == [(kind, 6.0) for kind in kinds]
    assert [tuple(result.shape) for result in measured] == [(1, 576), (1, 576), (16, 1024), (1, 1024)]


def test_training_passes_are_compared_with_bfloat16(monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setattr(training, "measure_memory", lambda of: training.Memory(1, 1, 1))
    monkeypatch.setattr(timing, "capture", lambda call: call)
    monkeypatch.setattr(timing, "elapsed", lambda calls: [float(len(calls[i]())) for i in range(len(calls))])
    torch.manual_seed(0)
    bf16, ours, other = training.run_experts("tiny", Model(256, 128, 8, 2), 40, device="cpu")
    assert (ours["us"], ours["forward_us"]) == (5, 40)  # output and four gradients; 40 tokens
    assert (bf16["impl"], ours["master"], other["master"]) == ("bf16", "float32", "bfloat16")
    assert all(1e-2 < row["difference"] <= training.MAX_DIFFERENCE for row in (ours, other))
    assert (ours["speedup"], ours["kept_ratio"]) == (bf16["us"] / 5, 1.0)

    class Wrong(training.FP8Linear):
        def forward(self, x):
            return 1.5 * super().forward(x)

    monkeypatch.setattr(training, "FP8Linear", Wrong)
    with pytest.raises(RuntimeError, match="from bfloat16"):
        training.run_linear(33, 136, 272, device="cpu")


PROFILED = Model(256, 128, 8, 2)


def launched_kernels():
    """The names of the kernels of a training step, in order; runs in a process of its own."""
    recorder = Recorder(132)
    sizes = {"num_experts": 8, "hidden_size": 256, "intermediate_size": 128}
    layer = GroupedExperts(**sizes, master_dtype=torch.bfloat16)
    x, index, weights = calls.layer_inputs(PROFILED, calls.route(PROFILED, 40), "cpu")
    one = training.Pass(layer, (x.requires_grad_(), index, weights.requires_grad_()), torch.randn_like(x))
    launches = recorder.record(one.step)
    names = [spec.name for spec in recorder.kernels]
    return [names[launch["kernel"]] for launch in launches]


def test_a_step_launches_the_kernels_whose_work_is_known():
    work = sum(roofline.training_work(PROFILED, 40), [])
    found = in_own_process(launched_kernels)
    assert found == [one.kernel for one in work]
    names = [*found[:3], "at::native::index<float>(int)", *found[3:]]  # a kernel of PyTorch among them
    events = [KernelEvent(f"{name}<1>", i, 1000 * (i + 1)) for i, name in enumerate(training.PROFILES * names)]
    rows = training.kernel_rows(reversed(events), work)
    assert [row["kernel"] for row in rows[2:5]] == ["sort_by_expert", "at::native::index", "permute_quantize"]
    assert rows[0]["us"] == pytest.approx(1 + len(names)) and rows[0]["of"] == "gate_up_proj, both ways"
    assert rows[3]["of"] is None and rows[-1]["x_floor"] == rows[-1]["us"] / work[-1].floor_us
    with pytest.raises(RuntimeError, match="expected the kernels quantize_128x128"):
        training.kernel_rows(events, work[1:])
    with pytest.raises(RuntimeError, match="the same kernels in each of 3 passes"):
        training.kernel_rows(events[1:], work)


def test_work_of_a_training_step_is_that_of_its_operands():
    forward, backward = roofline.training_work(Model(7168, 2048, 32, 8), 8192)
    flops = 2 * 65536 * 7168 * 2048 * 3
    assert (sum(one.flops for one in forward), sum(one.flops for one in backward)) == (flops, 2 * flops)
    gemm = next(one for one in forward if one.kernel == "gemm")
    assert gemm.floor_us == pytest.approx(2 * 65536 * 7168 * 4096 / 1450e6)
    combine = next(one for one in forward if one.kernel == "combine")
    assert combine.floor_us == pytest.approx(2 * 7168 * (65536 + 8192) / 4.21e6)


def test_profiles_have_a_row_for_the_pass_and_for_each_kernel(monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setattr(training, "measure_memory", lambda of: training.Memory(3, 2, 1))
    monkeypatch.setattr(timing, "capture", lambda call: call)
    monkeypatch.setattr(timing, "elapsed", lambda calls: [float(len(call())) for call in calls])
    names = [one.kernel for half in roofline.training_work(PROFILED, 40) for one in half]

    def profile(work):
        assert [len(step) for step in work()] == [5] * training.PROFILES
        return [KernelEvent(name, i, 10) for i, name in enumerate(training.PROFILES * names)]

    monkeypatch.setattr(timing, "profile", profile)
    whole, *kernels = training.profile_experts("tiny", PROFILED, 40, device="cpu")
    assert (whole["forward_us"], whole["us"], whole["kept_bytes"]) == (40, 5, 3)
    assert whole["floor_us"] == pytest.approx(sum(row["floor_us"] for row in kernels))
    assert whole["forward_floor_us"] == pytest.approx(sum(row["floor_us"] for row in kernels[:7]))
    assert [row["kernel"] for row in kernels] == names and {row["what"] for row in kernels} == {"kernel"}


def test_choice_has_sixty_problems_with_their_candidates():
    found = tiles.problems()
    assert found == tiles.problems() and len(found) == len(set(found)) == 60
    assert sum(problem.groups > 0 for problem in found) == 30
    for problem in found:
        configs = tiles.candidates(problem, 132)
        assert len(set(configs)) == len(configs) <= tiles.MOST
        if problem.groups:
            offsets = tiles.group_offsets(problem)
            assert offsets[0] == 0 and offsets[-1] == problem.m and (offsets.diff() >= 0).all()


def test_regret_is_by_the_second_times_of_the_chosen_and_the_best(monkeypatch):
    problem = tiles.Problem(0, 64, 2112, 7168)
    configs = tiles.candidates(problem, 132)[:6]
    times = dict(zip(configs, (11.0, 9.0, 12.0, 10.0, 10.5, 13.0), strict=True))
    again = tiles.finalists(times)
    assert again == [configs[i] for i in (0, 1, 3, 4)]
    row = tiles.make_row(problem, times, dict(zip(again, (10.4, 10.5, 10.0, 10.6), strict=True)))
    assert (row["us"], row["best"], row["best_us"]) == (10.4, configs[3].name, 10.0)
    assert row["regret"] == pytest.approx(0.04) and row["candidates"] == len(row["times"]) == 6
    timed, found = [], iter((3.0, 9.0, 1.0, 8.0, 2.0, 7.0))
    monkeypatch.setattr(tiles, "call_of", lambda problem: timed.append)

    def measure(calls, *, rests):
        return [call() or timing.Timing((next(found),), ()) for call in calls]

    monkeypatch.setattr(timing, "measure", measure)
    assert tiles.time_in_turn(problem, configs[:2], 132, rounds=3) == dict(zip(configs, (2.0, 8.0), strict=False))
    assert timed == configs[:2] * 3


def test_lengths_of_requests_and_prompts():
    drawn = serving.lengths(200)
    assert drawn == serving.lengths(200)
    assert all(16 <= prompt <= 2048 and 16 <= answer <= 512 for prompt, answer in drawn)
    assert warmup.LENGTHS[:39] == [*range(1, 40)] and {4096, 4097, 8192} < set(warmup.LENGTHS)


def test_kernels_of_warm_up_are_counted_and_what_is_missing_misses_the_bar(monkeypatch):
    transformers = pytest.importorskip("transformers")
    made = transformers.AutoConfig.for_model(**warmup.configuration("deepseek-v3"))
    assert (made.num_hidden_layers, made.first_k_dense_replace, made.n_routed_experts) == (61, 3, 256)
    assert made.quantization_config["quant_method"] == "fp8"

    def run_python(program, *arguments, **environment):
        if arguments[0] != "warmup":
            assert "FP8MOE_CACHE_DIR" in environment and arguments == ("qwen3-30b-a3b",)
            return 'a warning\n["gemm", "gemm"]\n'
        cache = warmup.Path(arguments[arguments.index("--output") + 1], "kernels")
        cache.mkdir(parents=True)
        for name, size in {"a": 1_500_000, "b": 500_000, "lock": 0}.items():
            (cache / name).write_bytes(bytes(size))
        return ""

    monkeypatch.setattr(warmup, "run_python", run_python)
    made = warmup.WARMUP.run(model=["qwen3-30b-a3b"])
    (row,), (threshold,) = made["rows"], made["thresholds"]
    assert (row["kernels"], row["mb"], row["compiled"], row["missing"]) == (2, 2.0, 2, ["gemm", "gemm"])
    assert not threshold["passed"]


def stored_results():
    """By name, what validation/ has of benchmarks."""
    kernels, models = (
        json.loads((report.ROOT / "validation" / f"{name}.json").read_text()) for name in ("kernels", "models")
    )
    beside = {name: json.loads(path.read_text()) for name, path in tables.BESIDE.items() if path.exists()}
    every = kernels["benchmarks"] | models["models"] | beside
    return {name: result for name, result in every.items() if "thresholds" in result}


@pytest.mark.parametrize("name", stored_results())
def test_bars_make_the_stored_thresholds_of_the_stored_rows(name):
    result = stored_results()[name]
    if name == "distributed":
        found = distributed.thresholds(result["rows"], result["ranks"])
    else:
        found = judge(result["rows"], BENCHMARKS[name].bars)
    stored = {one["name"]: one for one in result["thresholds"]}
    assert {one.name: one.as_dict() for one in found} == stored and len(found) == len(stored)
