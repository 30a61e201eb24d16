"""benchmarks.decode and the models that it builds: everything but the timing."""

import pytest
import torch

from benchmarks import decode, whole_models
from benchmarks.timing import KernelEvent
from fp8moe import FP8Linear, GroupedExperts, dequantize

transformers = pytest.importorskip("transformers")

TINY = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setitem(whole_models.CONFIGS, "tiny", ("qwen3_moe", TINY))


@pytest.mark.parametrize("fp8", [True, False])
def test_models_have_their_sizes_and_finite_logits(fp8):
    model = whole_models.build("tiny", fp8=fp8, device="cpu")
    kinds = {type(module) for module in model.modules()}
    assert (GroupedExperts in kinds and FP8Linear in kinds) == fp8
    assert not model.training and not any(p.is_meta for p in [*model.parameters(), *model.buffers()])
    tokens = torch.arange(10)[None]
    logits = model(tokens).logits
    assert logits.shape == (1, 10, TINY["vocab_size"]) and logits.isfinite().all() and logits.std() > 0
    # Positions count: the same tokens in another order end otherwise.
    assert not torch.equal(model(tokens.flip(1).roll(-1)).logits[0, -1], logits[0, -1])


def test_weights_of_both_kinds_are_spread_alike():
    fp8, bf16 = (whole_models.build("tiny", fp8=fp8, device="cpu") for fp8 in (True, False))
    experts = fp8.model.layers[0].mlp.experts
    values = dequantize((experts.gate_up_proj, experts.gate_up_proj_scale_inv))
    plain = bf16.model.layers[0].mlp.experts.gate_up_proj.detach().float()
    assert values.std().item() == pytest.approx(whole_models.STD, rel=0.05)
    assert plain.std().item() == pytest.approx(whole_models.STD, rel=0.05)


def test_floor_counts_the_experts_that_were_hit():
    model = whole_models.build("tiny", device="cpu")
    prompts = torch.arange(6)[None]
    hit = decode.experts_hit(model, prompts)
    assert [type(module) for module in hit] == [GroupedExperts] * 2 and set(hit.values()) == {2}
    experts = sum(p.nbytes for module in hit for p in module.parameters())
    others = sum(p.nbytes for p in model.parameters()) - experts - model.get_input_embeddings().weight.nbytes
    keys_and_values = 100 * 2 * 2 * 1 * 64 * 2  # tokens, layers, keys and values, heads, values, bytes
    assert decode.step_bytes(model, prompts, 100) == others + experts // 2 + keys_and_values


def test_kinds_of_kernels(monkeypatch):
    names = ("gemm", "quantize_1x128", "flash_fwd_kernel", "nvjet_tst", "elementwise", "sort_by_expert")

    def profile(work):
        work()
        return [KernelEvent(name, 0, 10) for _ in range(made.pop()) for name in names] + [KernelEvent("prefill", 0, 99)]

    made = []
    monkeypatch.setattr(decode.timing, "profile", profile)
    kernels, kinds = decode.shares(made.append)
    assert kernels == len(names)
    assert kinds == {kind: pytest.approx(1 / 6) for kind in (*decode.KINDS, "other")}


def test_thresholds_are_of_their_rows():
    rows = [
        {"what": what, "batch": batch, "prompt": prompt, column: 0.0} for what, batch, prompt, column in decode.LIMITS
    ]
    assert len(decode.thresholds(rows)) == len(decode.LIMITS)
    passed = {threshold.name: threshold.passed for threshold in decode.thresholds(rows)}
    assert [name for name, good in passed.items() if not good] == ["prefill, batch 4, prompt 4096, tokens_s"]
    assert decode.thresholds([{"what": "decode", "batch": 2, "prompt": 512, "ms": 1.0}]) == []
