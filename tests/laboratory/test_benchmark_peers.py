"""How peers are called and compared: on the CPU, with the drop-in for DeepGEMM and fakes of what needs a GPU."""

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import deep_gemm as drop_in
from benchmarks import adapters, peers, plots, shapes, tables, timing, vllm_engine, whole_models
from benchmarks.operands import relative_error
from benchmarks.peers import Call, Case
from benchmarks.report import geomean, select
from benchmarks.shapes import MODELS, QWEN, Model
from fp8moe import FP8Tensor, PackedTensor, dequantize, experts


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """Calls run once and take 1, 2, ... microseconds; graphs are the calls themselves."""

    def in_turn(calls, *, repeats, rest):
        for call in calls:
            call()
        names = ("sort_by_expert", "gemm", "gemm", "combine")
        places = ((0.0, 2.0), (1.0, 5.0), (4.0, 9.0), (9.0, 10.0))
        return [timing.Timing((float(i),), names, places) for i in range(1, len(calls) + 1)]

    monkeypatch.setattr(peers.timing, "measure_in_turn", in_turn)
    monkeypatch.setattr(
        peers.timing, "elapsed_in_turn", lambda calls, **_: [float(i) for i in range(1, len(calls) + 1)]
    )
    monkeypatch.setattr(peers.timing, "host_times", lambda call, batches: [3.0, 2.0])
    monkeypatch.setattr(peers.timing, "capture", lambda call: call)
    monkeypatch.setattr(adapters, "deep_gemms", lambda: (drop_in,))
    monkeypatch.setattr(adapters.F, "scaled_mm", scaled_mm)
    fake_vllm(monkeypatch)


def scaled_mm(a, b, scale_a, recipe_a, scale_b, recipe_b, *, output_dtype):
    """torch.nn.functional.scaled_mm of blocks, with what it asks of layouts on a GPU."""
    (m, k), n = a.shape, b.shape[1]
    blocks = -(-k // 128)
    assert b.stride() == (1, k)
    assert scale_a.shape == (m, blocks) and scale_a.stride() == (1, m)
    padded = -(-blocks // 4) * 4
    assert scale_b.shape == (padded, -(-n // 128)) and scale_b.stride() == (1, padded)
    assert recipe_a.name == "BlockWise1x128" and recipe_b.name == "BlockWise128x128"
    x = dequantize(FP8Tensor(a, scale_a))
    return (x @ dequantize(FP8Tensor(b.t(), scale_b.t()[:, :blocks].contiguous())).T).to(output_dtype)


def fake_vllm(monkeypatch):
    def fused_experts(x, up, down, weights, index, *, quant_config):
        assert index.dtype == torch.int32 and weights.dtype == torch.float32
        assert quant_config["block_shape"] == [128, 128]
        out = torch.zeros(x.shape)
        for token, k in torch.cartesian_prod(torch.arange(len(x)), torch.arange(index.shape[1])).tolist():
            expert = index[token, k]
            gate, value = (
                x[token].float() @ dequantize(FP8Tensor(up[expert], quant_config["w1_scale"][expert])).T
            ).chunk(2)
            hidden = torch.nn.functional.silu(gate) * value
            y = hidden @ dequantize(FP8Tensor(down[expert], quant_config["w2_scale"][expert])).T
            out[token] += weights[token, k] * y
        return out

    names = ("vllm", "vllm.model_executor", "vllm.model_executor.layers", "vllm.model_executor.layers.fused_moe")
    for name in (*names, f"{names[-1]}.config"):
        module = ModuleType(name)
        module.fused_experts, module.fp8_w8a8_moe_quant_config = fused_experts, dict
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(adapters, "installed", lambda name: True)


SMALL = [
    ("gemm", {"m": 3, "n": 256, "k": 320}, {"deep_gemm", "cublas_block", "cublas_one_scale"}),
    ("gemm", {"m": 1, "n": 200, "k": 256}, {"deep_gemm", "cublas_block", "cublas_one_scale"}),
    ("contiguous", {"groups": 3, "mean_rows": 40, "n": 256, "k": 256}, {"deep_gemm", "cublas_one_scale"}),
    (
        "masked",
        {"groups": 3, "mean_rows": 5, "n": 256, "k": 256, "expected_m": 6, "max_m": 12},
        {"deep_gemm"},
    ),
    ("along_k", {"groups": 3, "m": 128, "n": 256, "total_k": 1280}, {"deep_gemm", "fp8moe_written"}),
    ("mqa_logits", {"queries": 5, "tokens": 150, "fill": False}, {"deep_gemm"}),
    ("mqa_logits", {"queries": 5, "tokens": 150, "fill": True}, {"deep_gemm"}),
    ("paged_mqa_logits", {"batch": 3, "context": 150, "next_n": 2}, {"deep_gemm"}),
]


@pytest.mark.parametrize(("what", "sizes", "others"), SMALL, ids=[f"{what}-{i}" for i, (what, *_) in enumerate(SMALL)])
def test_peers_compute_what_we_do(what, sizes, others):
    torch.manual_seed(0)
    row = peers.measure_kernels(peers.MAKE[what](**sizes, device="cpu"), peers.MAX_DIFFERENCE)
    assert not row["failed"]
    assert set(row["us"]) == {"fp8moe", *others} and row["us"]["fp8moe"] == 1.0
    assert set(row["difference"]) == others - {"cublas_one_scale"}


def test_a_layer_beside_peers(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setitem(MODELS, "small", Model(256, 128, 6, 2))
    row = peers.measure_layer("small", 5, device="cpu")
    assert not row["failed"]
    assert row["us"] == {
        **{"fp8moe": 1.0, "vllm": 2.0, "transformers_bf16": 3.0},
        **{"fp8moe_two_gemms": 2.0, "deep_gemm_two_gemms": 3.0, "gemms_in_layer": 8.0},
    }
    assert 0 < row["difference"]["vllm"] < 0.1 and row["difference"]["deep_gemm_two_gemms"] < 1e-2
    assert row["kernels"][1] == ["gemm", 1.0, 5.0] and 2 <= row["experts_in_use"] <= 6
    assert peers.measure_host(1, 128, 256, device="cpu")["us"] == {"fp8moe": 2.5, "deep_gemm": 2.5}


def test_a_layer_in_four_bits_beside_fp8(monkeypatch):
    monkeypatch.setitem(peers.FOUR_BITS, "small", Model(256, 128, 16, 2))
    monkeypatch.setattr(adapters, "installed", lambda name: False)
    row = peers.measure_four_bits("small", 5, device="cpu")
    kernels, experts_in_use = row.pop("kernels"), row.pop("experts_in_use")
    assert [name for name, *_ in kernels] == ["sort_by_expert", "gemm", "gemm", "combine"] and experts_in_use == 9
    times = {"fp8moe": 1.0, "mxfp4": 2.0, "nvfp4": 3.0, "gemms_in_mxfp4": 8.0}
    assert row == {"us": times, "difference": {}, "failed": {}}
    inputs = torch.randn(5, 256), torch.arange(10).view(5, 2), torch.ones(5, 2)
    results = []
    for form in ("mxfp4", "nvfp4"):
        up, down, layer = peers.four_bits_of(peers.FOUR_BITS["small"], form, "cpu")
        results.append(layer(*inputs))
        assert torch.equal(results[-1], experts(*inputs, up, down)) and form == up.format
    assert 0 < relative_error(*results) < 0.5  # the same weights before they were quantized
    row |= {"experts_in_use": 50}
    rows = [{"what": "four_bits", "model": model, "tokens": 8, **row} for model in ("qwen3_30b", "gpt_oss_20b")]
    made = tables.four_bits({"rows": rows, "copy_tbps": 4.0})
    least = 50 * 3 * 2048 * 768 * 0.53125 / 4e6  # microseconds for the weights alone
    (shown,) = (float(line.split("|")[2]) for line in made.splitlines() if "Qwen3-30B-A3B: least time" in line)
    assert least / 8 < shown < 1.05 * least / 8
    assert "GPT-OSS-20b: our layer in FP8 | 0.50" in made and "GPT-OSS-20b: ours in NVFP4 | 1.50" in made
    rows[0]["us"] = rows[1]["us"] = {"fp8moe": 1.0, "mxfp4": 2.0}
    assert "NVFP4" not in tables.four_bits({"rows": rows, "copy_tbps": 4.0})


def plain_sonic(self, x, index, weights):
    """The experts of SonicMoE's weights, whose rows of gate and up take turns."""
    out = 0
    for slot, chosen in enumerate(index.T):
        projected = torch.einsum("th,tnh->tn", x, self.gate_up_proj[chosen])
        h = torch.nn.functional.silu(projected[:, ::2]) * projected[:, 1::2]
        y = torch.einsum("ti,thi->th", h, self.down_proj[chosen])
        out = out + weights[:, slot, None].to(y.dtype) * y
    return out


def test_training_beside_sonic(monkeypatch):
    monkeypatch.setitem(peers.training.PROFILED, "tiny", (Model(64, 32, 4, 2), (24,)))
    monkeypatch.setattr(adapters, "installed", lambda name: name == "sonicmoe")
    monkeypatch.setattr(adapters.SonicExperts, "forward", plain_sonic)
    monkeypatch.setattr(peers.training, "measure_memory", lambda of: peers.training.Memory(len(of.leaves), 9, 1))
    row = peers.measure_training("tiny", 24, device="cpu")
    assert not row["failed"] and row["kept_bytes"] == {"fp8moe": 4, "sonic": 4} and row["peak_bytes"]["sonic"] == 9
    assert row["error"]["sonic"] < 0.01 < row["error"]["fp8moe"] < 0.1
    # fp8moe_forward, fp8moe, sonic_forward, sonic, quantizing: 1 to 5
    assert row["us"] == {
        **{"fp8moe_forward": 1, "fp8moe": 2, "sonic_forward": 3, "sonic": 4},
        **{"fp8moe_shared": 2 - 3 / 4 * 5, "fp8moe_shared_forward": 1 - 3 / 4 * 5},
    }
    shown = tables.beside_sonic({"rows": [{"what": "training", "model": "olmoe", "tokens": 24, **row}]})
    assert "OLMoE, 24 tokens" in shown and "| forward: time of SonicMoE / ours | 3.00 |" in shown


def test_a_wrong_or_broken_peer_is_named_and_not_timed(monkeypatch):
    def broken():
        raise TypeError("two\nlines")

    ours = torch.eye(3)
    makers = {
        "fp8moe": lambda: Call(lambda: ours, lambda out: out),
        "deep_gemm": lambda: Call(lambda: ours + 1, lambda out: out),
        "cublas_block": broken,
    }
    row = peers.measure_kernels(makers, 1e-2)
    assert row["us"] == {"fp8moe": 1.0}
    assert "must be <= 0.01" in row["failed"]["deep_gemm"]
    assert row["failed"]["cublas_block"] == "TypeError: two lines"
    monkeypatch.setattr(adapters, "deep_gemms", lambda: ())
    assert "deep_gemm" not in peers.measure_kernels(makers, 1e-2)["failed"]


HEAD = {"digest": "d", "date": "now", "versions": {"gpu": "an H100"}, "clocks": {}}


def test_a_run_can_be_made_in_pieces(tmp_path, monkeypatch):
    path, ran = tmp_path / "peers.json", []

    def kind(m):
        ran.append(m)
        if m == 3:
            raise RuntimeError("records were lost")
        return {"us": {"fp8moe": float(len(ran))}, "difference": {}, "failed": {}}

    monkeypatch.setitem(peers.MEASURE, "gemm", kind)
    cases = [Case("gemm", {"m": m}) for m in (1, 2, 3)]

    def run(head, only=None):
        file = peers.File(path, head)
        chosen = set(peers.wanted([case.name for case in cases], only, file.rows))
        peers.measure([case for case in cases if case.name in chosen], file)
        return json.loads(path.read_text())

    assert [row["m"] for row in run(HEAD, "m=2")["rows"]] == [2]
    content = run(HEAD | {"versions": {"gpu": "an H100", "vllm": "1"}})
    assert ran == [2, 1, 3] and content["versions"] == {"gpu": "an H100", "vllm": "1"}
    assert content["rows"][2]["failed"] == {"case": "RuntimeError: records were lost"}
    run(HEAD)
    assert ran == [2, 1, 3, 3]
    run(HEAD, "m=1")
    assert ran[4:] == [1]
    for name in ("2", "3"):
        found = run(HEAD | {"versions": {"gpu": "an H100", "fp8moe": name}}, "m=2")
        assert len(found["rows"]) == 3 and found["versions"]["fp8moe"] == name
    for other in ({"digest": "e"}, {"versions": {"gpu": "an H200"}}):
        assert len(run(HEAD | other, "m=1")["rows"]) == 1
        path.write_text(json.dumps(content))


def test_whole_models_of_several_processes_share_rows(tmp_path):
    file = peers.File(tmp_path / "peers.json", HEAD)

    def ours():
        steps = [
            {"what": "decode", "batch": b, "prompt": p, "ms": 2.0, "tokens_s": 5.0, "kernels": 700}
            for b, p in peers.STEPS
        ]
        return [*steps, {"what": "prefill", "batch": 1, "prompt": 512, "ms": 9.0, "tokens_s": 1.0}]

    def engine():
        raise RuntimeError("no memory")

    def compiling():
        return [{"what": "decode", "batch": 1, "prompt": 512, "ms": 3.0, "tokens_s": 4.0, "compiled": 2}]

    sources = {"fp8moe": ours, "vllm": engine, "vllm_fp8moe": compiling}
    peers.measure_whole_models(file, {(QWEN, name): source for name, source in sources.items()})
    rows = json.loads(file.path.read_text())["rows"]
    assert [row["model"] for row in rows] == [QWEN] * (len(peers.STEPS) + 1)
    assert rows[0]["ms"] == {"fp8moe": 2.0, "vllm_fp8moe": 3.0} and rows[0]["kernels_a_step"] == {"fp8moe": 700}
    assert rows[0]["failed"] == {
        "vllm": "RuntimeError: no memory",
        "vllm_fp8moe": "2 kernels were compiled while it was measured",
    }
    assert rows[-1]["failed"]["fp8moe"] == "it did not measure this"
    peers.measure_whole_models(file, {("gpt-oss-20b", "mxfp4"): ours})
    rows = json.loads(file.path.read_text())["rows"]
    assert len(rows) == len(peers.WHOLE_MODEL) and "mxfp4" not in rows[0]["ms"]
    assert rows[4]["case"] == "decode model=gpt-oss-20b batch=1 prompt=512" and rows[4]["ms"] == {"mxfp4": 2.0}


def test_the_rows_of_whole_models_have_the_times_of_one_run(tmp_path, capsys):
    def times(ms):
        made = [("decode", *sizes) for sizes in peers.STEPS] + [("prefill", *peers.PREFILL)]
        return [{"what": what, "batch": b, "prompt": p, "ms": ms, "tokens_s": 1.0} for what, b, p in made]

    def run(ms, only=None, installed=True):
        """Another run, after which the file is read."""
        file = peers.File(tmp_path / "peers.json", HEAD)
        names = [(model, name) for model in peers.FORMATS for name in ("mxfp4", *(["vllm"] if installed else []))]
        chosen = {of: lambda: times(ms) for of in peers.wanted_sources(names, only, file.rows)}
        peers.measure_whole_models(file, chosen)
        rows = json.loads((tmp_path / "peers.json").read_text())["rows"]
        found = {model: [row["ms"] for row in rows if row["model"] == model] for model in peers.FORMATS}
        assert all(len(of) in (0, 4) and of[1:] == of[:-1] for of in found.values())
        return {model: of[0] if of else None for model, of in found.items()}

    old, both = {"mxfp4": 1.0}, {"mxfp4": 2.0, "vllm": 2.0}
    assert run(1.0, installed=False) == {QWEN: old, "gpt-oss-20b": old}
    assert run(2.0, "gpt") == {QWEN: old, "gpt-oss-20b": both} and not capsys.readouterr().out.count("dropped")
    assert run(3.0, "gpt-oss-20b vllm") == {QWEN: old, "gpt-oss-20b": {"vllm": 3.0}}
    assert "times of another run are dropped: gpt-oss-20b mxfp4\n" in capsys.readouterr().out
    assert run(2.0) == run(4.0) == {QWEN: both, "gpt-oss-20b": both}
    before = peers.wanted_sources([(QWEN, "mxfp4"), (QWEN, "before")], None, {})
    assert [*before] == [(QWEN, "mxfp4"), (QWEN, "before")]


def test_what_measures_whole_models(monkeypatch):
    ran = []
    monkeypatch.setattr(peers, "_run_in", lambda tree, module, *options: ran.append((tree, module, *options)))
    there = {False: {(QWEN, "fp8moe"), (QWEN, "mxfp4"), ("gpt-oss-20b", "mxfp4")}}
    there[True] = there[False] | {(QWEN, "vllm"), (QWEN, "vllm_fp8moe"), ("gpt-oss-20b", "vllm")}
    for installed, expected in there.items():
        monkeypatch.setattr(adapters, "installed", lambda name, installed=installed: installed)
        assert set(peers.sources(None)) == expected
    found = peers.sources(Path("before"))
    assert set(found) == there[True] | {(QWEN, "before")}
    for source in found.values():
        with pytest.raises(FileNotFoundError):  # nothing was written
            source()
    ours, engines = ([one for one in ran if one[1] == f"benchmarks.{name}"] for name in ("decode", "vllm_engine"))
    assert [one[-4:] for one in ours] == [
        *(("--model", QWEN, "--experts", experts) for experts in ("fp8", "mxfp4")),
        ("--model", "gpt-oss-20b", "--experts", "mxfp4"),
        ours[-1][-4:],
    ]
    assert ours[-1][0] == Path("before") and not {"--model", "--experts"} & {*ours[-1]}
    expected = [("--model", QWEN), ("--model", "gpt-oss-20b"), ("--quantization", "fp8moe")]
    assert [one[-2:] for one in engines] == expected
    assert {*shapes.WHOLE_MODEL_NAMES} == {*peers.FORMATS} == {model for model, _ in there[True]}
    assert {*peers.FORMATS} <= {*vllm_engine.ARCHITECTURES}


def test_the_gemms_of_a_layer_are_found_among_its_kernels():
    kernels = [("sort", 0, 1), ("gemm", 2, 9), ("gemm", 8, 12), ("combine", 12, 13)]
    assert peers.gemms_in_layer(kernels) == 10
    with pytest.raises(RuntimeError, match="two GEMMs"):
        peers.gemms_in_layer(kernels[1:2])


def stored_run():
    """A made-up file with all cases: we take 10 microseconds, DeepGEMM 12, of the first case 9."""
    us = {"fp8moe": 10.0, "deep_gemm": 12.0, "cublas_block": 15.0, "cublas_one_scale": 8.0}
    layer = {"fp8moe": 10.0, "vllm": 20.0, "deep_gemm_two_gemms": 9.0, "fp8moe_two_gemms": 8.0, "gemms_in_layer": 9.0}
    more = {"kernels": [["sort", 0.0, 1.0], ["gemm", 1.0, 5.0], ["gemm", 4.0, 9.0]], "experts_in_use": 8}
    rows = [case.row | {"us": dict(us), "failed": {}} for case in peers.CASES]
    for row in select(rows, "layer"):
        row |= {"us": dict(layer), **more}
    rows[0]["us"]["deep_gemm"] = 9.0
    del rows[1]["us"]["deep_gemm"]
    steps = {"ms": {"fp8moe": 2.0, "vllm": 3.0}, "tokens_s": {"fp8moe": 500.0, "vllm": 333.0}, "failed": {}}
    four = {"ms": {"mxfp4": 1.0, "vllm": 1.5}, "tokens_s": {}, "kernels_a_step": {"mxfp4": 600}, "failed": {}}
    for case in peers.WHOLE_MODEL:
        rows.append(case.row | (steps | {"kernels_a_step": {"fp8moe": 700}} if case.sizes["model"] == QWEN else four))
    versions = {"gpu": "NVIDIA H100 80GB HBM3", "driver": "580.1", "deep_gemm": "0.1.2", "torch": "2.11"}
    return {"digest": "d", "versions": versions, "copy_tbps": 3.0, "rows": rows}


def test_tables_are_of_one_run():
    run = stored_run()
    mean = geomean([0.9, *[1.2] * 19])
    lines = tables.gemms(run).splitlines()
    assert lines[2] == f"| dense GEMM, m = 1, 16, 64 | {mean:.2f} (0.90, 20 of 21 cases) | 1.50 (1.50) | 0.80 (0.80) |"
    assert lines[-1] == "| `paged_mqa_logits` | 1.20 (1.20) | 1.50 (1.50) | 0.80 (0.80) |"
    lines = tables.layer(run).splitlines()
    assert [line.split(" | ")[:2] for line in lines[2:]] == [
        ["| vLLM's Triton experts", "2.00 (2.00)"],
        ["| DeepGEMM's two GEMMs alone", "0.90 (0.90)"],
        ["| our two GEMMs in the layer / alone", "1.12 (1.12)"],
    ]
    expected = tables.whole_model(run, QWEN)
    assert "| a step, batch 8 | 2.0 ms | 3.0 ms | 1.50 | 700 |" in expected
    assert "| a step, batch 8 | 1.0 ms | 1.5 ms | 1.50 | 600 |" in tables.whole_model(run, "gpt-oss-20b")
    prefill = select(run["rows"], "prefill")[0]
    prefill["ms"] |= {"vllm_fp8moe": 2.5, "mxfp4": 1.6}
    line = "| prompts of 4 x 4096 tokens | 2.0 ms | 1.6 ms | 3.0 ms | 2.5 ms | 1.50 | 1.20 | 1.25 | 700 |"
    assert line in tables.whole_model(run, QWEN)
    assert "| GraphDecoder, GPT-OSS-20b's size: generating" in tables.headline({"peers": run})
    assert tables.measured_with(run).endswith(
        "(driver 580.1), both sides of each ratio in one run: DeepGEMM 0.1.2, PyTorch 2.11."
    )
    assert "| dsv3_ep8 | 1 | 0 | 78 |" in tables.roofline({"peers": run})


def test_rows_that_name_no_model_are_of_qwen():
    run = stored_run()
    named = tables.whole_model(run, QWEN), tables.headline({"peers": run})
    run["rows"] = [row for row in run["rows"] if row.get("model") != "gpt-oss-20b"]
    for row in run["rows"]:
        if row["what"] in ("decode", "prefill"):
            del row["model"]
    assert tables.whole_model(run, QWEN) == named[0] and tables.whole_model(run, "gpt-oss-20b") == ""
    lines = named[1].splitlines()
    headline = tables.headline({"peers": run}).replace(f" {tables.not_beside_vllm(run['rows'])}", "")
    assert headline.splitlines() == [line for line in lines if "GPT-OSS" not in line]


def test_a_run_of_other_kernels_is_not_shown(monkeypatch, tmp_path):
    (tmp_path / "kernels.json").write_text(json.dumps({"digest": "d"}))
    monkeypatch.setattr(tables, "VALIDATION", tmp_path / "kernels.json")
    monkeypatch.setattr(tables, "PEERS", tmp_path / "peers.json")
    assert tables.of_these_kernels(tables.PEERS) is None
    for digest, there in (("d", True), ("e", False)):
        tables.PEERS.write_text(json.dumps(stored_run() | {"digest": digest}))
        assert (tables.of_these_kernels(tables.PEERS) is not None) == there
    assert tables.FILES["docs/experts.md"]({"peers": None}) == "Not measured with these kernels yet.\n"


def test_a_name_has_a_colour_of_its_own():
    colours = [plots.OURS, plots.BEHIND, plots.CUBLAS, plots.CUBLAS_ONE_SCALE, plots.MARK, *plots.COLOURS.values()]
    assert len({*colours, *plots.STAGES}) == len(colours) + len(plots.STAGES)
    assert plots.COLOURS["deep_gemm_two_gemms"] == plots.DEEP_GEMM and {*plots.COLOURS} <= {*tables.NAMES}
    assert {*shapes.MODEL_NAMES} == {*shapes.MODELS, *shapes.FOUR_BITS}


def test_pictures_of_peers_are_drawn_of_a_run_or_removed(tmp_path, monkeypatch):
    quantized = [
        {"op": op, "m": m, "k": 7168, "us": 2.0, "gbps": 900.0, "of_copy": 0.3}
        for op, m in (("quantize_1x128", 1), ("quantize_1x128", 4096), ("quantize_128x128", 4096))
    ]
    passed = {"impl": "fp8", "master": "float32", "forward_us": 1.0, "us": 3.0, "speedup": 2.0, "kept_bytes": 5}
    layer = {"what": "experts", "model": "dsv3", "tokens": 8, **passed}
    linear = {"what": "linear", "rows": 8, "in_features": 8, "out_features": 8, **passed}
    benchmarks = {"quantize": {"rows": quantized, "gpu": "a"}, "training": {"rows": [layer, linear], "gpu": "a"}}
    plots.draw(tmp_path, benchmarks | {"peers": stored_run()})
    assert {path.stem for path in tmp_path.iterdir()} == {*plots.OF_PEERS, *plots.OF_KERNELS}
    monkeypatch.setattr(plots.plt.Figure, "savefig", lambda self, path, **_: path.touch())  # drawing takes seconds
    without = stored_run()
    without["rows"] = [row for row in without["rows"] if row["what"] != "layer"]
    plots.draw(tmp_path, benchmarks | {"peers": without})
    assert {path.stem for path in tmp_path.iterdir()} == {*plots.OF_PEERS, *plots.OF_KERNELS} - {"overview", "experts"}
    assert "experts layer" not in tables.headline({"peers": without})
    plots.draw(tmp_path, benchmarks | {"peers": None})
    assert {path.stem for path in tmp_path.iterdir()} == {*plots.OF_KERNELS}


def test_a_stored_run_is_of_what_the_gpu_runs_and_what_it_lacks_is_named():
    if tables.PEERS.exists():
        content = json.loads(tables.PEERS.read_text())
        kernels = json.loads(tables.VALIDATION.read_text())
        assert content["digest"] == kernels["digest"], "run `python -m benchmarks.peers` on a Hopper GPU"
        missing = {case.name for case in peers.CASES} - {row["case"] for row in content["rows"]}
        assert len(missing) < len(peers.CASES) / 10
        page = (tables.ROOT / "docs/benchmarks.md").read_text()
        assert all(f"`{name}`" in page for name in missing)


def test_what_a_run_lacks_is_named():
    run = stored_run()
    assert tables.not_measured(run) == "" and "yet" not in tables.headline({"peers": run})
    run["rows"] = [row for row in run["rows"] if row["what"] != "training"]
    assert tables.not_measured(run).count("`training model=") == len([c for c in peers.CASES if c.what == "training"])
    run["rows"] = [row for row in run["rows"] if row.get("model") != "gpt-oss-20b" or row["what"] == "four_bits"]
    assert "A model of GPT-OSS-20b's size was not timed beside vLLM's" in tables.headline({"peers": run})
    run["rows"] = [row for row in run["rows"] if row["what"] not in ("decode", "prefill")]
    assert "Models of Qwen3-30B-A3B and GPT-OSS-20b's sizes were not" in tables.headline({"peers": run})


@pytest.mark.parametrize("model", vllm_engine.ARCHITECTURES)
def test_the_models_of_vllm_have_a_configuration(tmp_path, model):
    transformers = pytest.importorskip("transformers")
    vllm_engine.write_config(tmp_path, model)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    own = transformers.AutoConfig.for_model(config.model_type, **whole_models.CONFIGS[model][1])
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "rope_parameters", "rms_norm_eps")
    assert all(getattr(config, name) == getattr(own, name) for name in (*names, "num_experts_per_tok"))
    assert [getattr(transformers, name).__name__ for name in config.architectures] == [*config.architectures]
    assert config.quantization_config["quant_method"] == ("fp8" if model == QWEN else "mxfp4")
    if model == QWEN:
        assert (config.num_experts, config.quantization_config["weight_block_size"]) == (128, [128, 128])


def test_the_models_of_vllm_have_random_weights():
    model = torch.nn.Module()
    for name, shape, dtype in (
        ("w13_weight", (3, 256, 128), torch.float8_e4m3fn),
        ("w13_weight_scale_inv", (3, 2, 1), torch.float32),
        ("packed", (3, 256, 64), torch.uint8),
        ("packed_scale", (3, 256, 4), torch.uint8),
        ("norm", (64,), torch.bfloat16),
        ("sinks", (64,), torch.bfloat16),
        ("gate", (64, 64), torch.bfloat16),
    ):
        model.register_parameter(name, torch.nn.Parameter(torch.full(shape, 7.0).to(dtype), requires_grad=False))
    vllm_engine.fill(model)
    assert dequantize(FP8Tensor(model.w13_weight, model.w13_weight_scale_inv)).std().item() == pytest.approx(
        0.0244, rel=0.05
    )
    packed = dequantize(PackedTensor(model.packed, model.packed_scale, "mxfp4"))
    assert packed.std().item() == pytest.approx(0.02, rel=0.05) and not torch.equal(packed[0], packed[1])
    assert (model.norm == 1).all() and (model.sinks == 0).all()
    assert model.gate.float().std().item() == pytest.approx(0.02, rel=0.1)


def test_a_plugin_that_is_not_active_is_named(monkeypatch):
    def quantization_config(name):
        if name not in methods:
            raise ValueError(f"Invalid quantization method: {name}")

    methods, module = {}, ModuleType("vllm.model_executor.layers.quantization")
    module.register_quantization_config = lambda name: lambda kind: methods.setdefault(name, kind)
    module.get_quantization_config = quantization_config
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.syspath_prepend(str(vllm_engine.PLUGIN))
    for name in [name for name in sys.modules if name.startswith("fp8moe_vllm")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(RuntimeError, match="^--quantization fp8moe: this vLLM does not take the plug-in"):
        vllm_engine.register_plugin()  # the fake vLLM lacks what the plug-in imports
    config = ModuleType("fp8moe_vllm.config")
    config.Fp8moeConfig = object
    monkeypatch.setitem(sys.modules, config.__name__, config)
    vllm_engine.register_plugin()
    assert methods == {"fp8moe": object}

    method = type("Method", (), {"__module__": "fp8moe_vllm.linear"})
    model = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Identity())
    assert vllm_engine.plugin_layers(model) == 0
    model[1].quant_method = method()
    assert vllm_engine.plugin_layers(model) == 1


def test_the_plugin_is_refused_for_experts_in_mxfp4(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["vllm_engine", "rows", "--model", "gpt-oss-20b", "--quantization", "fp8moe"])
    with pytest.raises(SystemExit):
        vllm_engine.main()
    assert "gpt-oss-20b has them in MXFP4" in capsys.readouterr().err
