"""Latent attention: tiny models of DeepSeek-V3, a step of one attention module in two ways, and float64."""

import copy

import torch
from torch import Tensor, nn

from fp8moe import dequantize, replace_linears
from fp8moe.hf.fused import latent_attention, linears, norms
from fp8moe.weights import DEFAULT_SKIP
from tests.transformers_models import BASE, MLA, modules_named, random_model

SHAPE = BASE | MLA | {"hidden_size": 128, "max_position_embeddings": 64, "initializer_range": 0.2, "v_head_dim": 32}


def make_model(dtype=torch.float32, attention="sdpa", **options):
    model = random_model("deepseek_v3", SHAPE | options, dtype=dtype, attn_implementation=attention)
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "norm.weight")):
            nn.init.normal_(parameter, float(name.endswith("weight")), 0.2)
    return model


def in_fp8(dtype=torch.float32, **options):
    """q_a_proj is of whole blocks, so that it lies next to kv_a_proj_with_mqa."""
    model = make_model(dtype, **{"q_lora_rank": 128, "kv_lora_rank": 64} | options)
    replace_linears(model, skip=DEFAULT_SKIP)
    return model


def distance(got, expected):
    return (got.double() - expected.double()).norm() / expected.double().norm()


def inputs(module, length):
    """A norm, its input (2, 1, H), position embeddings, and a cache with `length` tokens."""
    import transformers

    config, weight = module.config, module.kv_a_layernorm.weight
    generator = torch.Generator().manual_seed(0)

    def values(*shape):
        return torch.randn(shape, generator=generator).to(weight)

    cache = transformers.DynamicCache(config=config)
    for layer in range(module.layer_idx + 1):
        cache.update(values(2, 1, length, config.kv_lora_rank), values(2, 1, length, config.qk_rope_head_dim), layer)
    angles = values(2, 1, config.qk_rope_head_dim)
    norm = type(module.kv_a_layernorm)(config.hidden_size).to(weight)
    return norm, values(2, 1, config.hidden_size), (angles.cos(), angles.sin()), cache


@torch.no_grad()
def step_of(module, attention_mask=None, length=9, **options):
    """The module's own."""
    norm, hidden, embeddings, cache = inputs(module, length)
    how = {"position_embeddings": embeddings, "past_key_values": cache, "attention_mask": attention_mask}
    return module(hidden_states=norm(hidden), **how, **options)[0]


@torch.no_grad()
def fused_step_of(module, attention_mask=None, length=9, **options):
    norm, hidden, embeddings, cache = inputs(module, length)
    assert latent_attention.serves(module, hidden.dtype, embeddings)
    quantized = linears.are_fp8(latent_attention.inputs(module))
    normed = norms.norm(norm, hidden, values=not quantized, quantized=quantized)
    how = {"past_key_values": cache, "attention_mask": attention_mask}
    return latent_attention.attend(module, normed, hidden.shape[:2], embeddings, **how, **options)


def attention_of(model):
    return modules_named(model, "self_attn")[0]


def with_exact_latents(attention, dtype=torch.float32):
    """The same module, with the weight of kv_b_proj in this dtype: so it does not quantize the latents."""
    exact = copy.deepcopy(attention)
    up = exact.kv_b_proj
    exact.kv_b_proj = nn.Linear(up.in_features, up.out_features, bias=False)
    exact.kv_b_proj.weight.data = dequantize((up.weight, up.weight_scale_inv), dtype=dtype)
    return exact


def in_float64(q_pass, q_rot, latent, k_rot, weight, visible, scale) -> Tensor:
    """What `latent_attention._absorbed` computes, over keys and values; visible: (B, 1, L) bool or None."""
    heads, size = q_pass.shape[1:]
    up = torch.einsum("blr,hnr->bhln", latent.double(), weight.double().view(heads, -1, weight.shape[1]))
    keys, values = up.tensor_split([size], dim=-1)
    scores = torch.einsum("bhn,bhln->bhl", q_pass.double(), keys)
    scores = scale * (scores + torch.einsum("bhp,blp->bhl", q_rot.double(), k_rot.double()))
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    return torch.einsum("bhl,bhlv->bhv", scores.softmax(-1), values)
