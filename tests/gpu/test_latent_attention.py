"""Latent attention on the GPU at DeepSeek-V3's widths: results, memory, and steps in CUDA graphs."""

import pytest
import torch

from fp8moe.decode import GraphDecoder
from fp8moe.hf import optimize
from fp8moe.hf.fused import latent_attention
from tests.latent_attention_cases import (
    attention_of,
    distance,
    fused_step_of,
    in_float64,
    in_fp8,
    make_model,
    step_of,
    with_exact_latents,
)
from tests.transformers_models import left_padded, prompts

pytest.importorskip("transformers")
from tests.gpu.checks import memory_of

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("registered")]

DEVICE = "cuda"
WIDTHS = {
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "hidden_size": 1024,
    "num_hidden_layers": 1,
    "initializer_range": 0.02,
}


def operands(batch, length, dtype, heads=128):
    """Of `_absorbed`, but mask and scale: the latents are a slice of a static cache."""

    def values(*shape):
        return torch.randn(shape, device=DEVICE).to(dtype)

    q = values(heads, batch, 192).transpose(0, 1)
    latent, k_rot = (values(batch, 1, length + 100, size)[:, 0, :length] for size in (512, 64))
    return q[..., :128], q[..., 128:], latent, k_rot, values(heads * 256, 512) / 23


@pytest.mark.parametrize("dtype, limit", [(torch.bfloat16, 6e-3), (torch.float16, 1e-3), (torch.float32, 1e-5)])
@pytest.mark.parametrize("batch, length", [(1, 1), (1, 513), (5, 300), (64, 17)])
@pytest.mark.parametrize("masked", [False, True])
def test_against_float64(masked, batch, length, dtype, limit):
    given = operands(batch, length, dtype)
    visible = None
    if masked:
        visible = torch.rand(batch, 1, length, device=DEVICE) < 0.6
        visible[:, :, -1] = True
    got = latent_attention._absorbed(*given, visible, 192**-0.5)
    assert got.dtype is dtype
    assert distance(got, in_float64(*given, visible, 192**-0.5)) <= limit
    assert torch.equal(latent_attention._absorbed(*given, visible, 192**-0.5), got)


def test_a_step_expands_no_token():
    """Of 8 sequences with 4096 tokens the keys and values would take 8 * 4096 * 128 * 320 * 2 bytes, 2.7 GB."""
    given = operands(8, 4096, torch.bfloat16)
    visible = torch.ones(8, 1, 4096, dtype=torch.bool, device=DEVICE)
    assert memory_of(lambda: latent_attention._absorbed(*given, visible, 0.07), warm=False)[1] < 200e6


def test_fp8_step_takes_the_latents_as_they_are():
    attention = attention_of(in_fp8(torch.bfloat16, **WIDTHS).to(DEVICE))
    expected = step_of(with_exact_latents(attention, torch.bfloat16), length=200)
    assert (
        distance(fused_step_of(attention, length=200), expected)
        <= 2e-2
        < distance(step_of(attention, length=200), expected)
    )


def test_a_graph_reads_weights_that_changed():
    attention = attention_of(in_fp8(torch.bfloat16).to(DEVICE))
    up = attention.kv_b_proj

    def expand():
        return latent_attention.up_weight(up, torch.bfloat16).clone()

    first, graph = expand(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = expand()
    with torch.no_grad():
        up.weight_scale_inv.mul_(2)
    changed = expand()
    graph.replay()
    assert torch.equal(captured, changed) and torch.equal(changed, 2 * first)


def test_nothing_is_kept_of_a_capture():
    """Its values are there only once the graph has run."""
    up = attention_of(in_fp8(torch.bfloat16).to(DEVICE)).kv_b_proj
    expected = latent_attention.up_weight(up, torch.bfloat16).clone()
    del latent_attention._weight_cache[up]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = latent_attention.up_weight(up, torch.bfloat16)
    assert up not in latent_attention._weight_cache
    graph.replay()
    assert torch.equal(captured, expected)


@pytest.mark.parametrize("fp8", [False, True])
def test_captured_steps_give_the_tokens_of_eager_ones(fp8):
    model = (in_fp8 if fp8 else make_model)(torch.bfloat16, moe_intermediate_size=128).to(DEVICE)
    model.set_experts_implementation("fp8moe")
    optimize(model)
    ids = prompts(3, device=DEVICE)
    how = {"attention_mask": left_padded(ids, 0, 5, 2), "max_new_tokens": 20, "eos_token_id": ()}
    eager = GraphDecoder(model, batch_sizes=(3,), max_length=64, capture=False)
    captured = GraphDecoder(model, batch_sizes=(3,), max_length=64)
    assert captured.captured and captured.capabilities == eager.capabilities
    assert torch.equal(captured.generate(ids, **how), eager.generate(ids, **how))
    # Other lengths in the same graph.
    assert torch.equal(
        captured.generate(ids[:, :4], max_new_tokens=8, eos_token_id=()),
        eager.generate(ids[:, :4], max_new_tokens=8, eos_token_id=()),
    )
