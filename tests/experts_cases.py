"""Experts layers and their inputs, for tests on the CPU and on a GPU."""

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.operands import exact
from fp8moe.kernels.experts import experts_partial, sort_by_expert
from fp8moe.kernels.experts.operands import Biases, Layer, Shard
from fp8moe.kernels.experts.permute import permute_quantize
from fp8moe.kernels.gemm.api import grouped_gemm_swiglu
from fp8moe.layers.experts import PACKED_WEIGHTS, GroupedExperts
from fp8moe.quant.formats import FP8Tensor, PackedTensor
from fp8moe.quant.quantize import dequantize, quantize_128x128

VARIANTS = {
    "plain": {},
    "limit": dict(swiglu_limit=0.4),
    "alpha": dict(swiglu_limit=0.4, swiglu_alpha=1.702),
    "gelu": dict(activation="gelu"),
    "relu2, no gate": dict(activation="relu2", gated=False),
}
BIASED = {
    "biases": dict(bias=True, swiglu_limit=7.0, swiglu_alpha=1.702),
    "biases, gelu": dict(bias=True, activation="gelu", dtype=torch.float32),
    "biases, no gate": dict(bias=True, activation="relu2", gated=False),
}


def make(num_experts=4, hidden_size=144, intermediate_size=96, seed=0, **options):
    torch.manual_seed(seed)
    sizes = dict(num_experts=num_experts, hidden_size=hidden_size, intermediate_size=intermediate_size)
    layer = GroupedExperts(**sizes, **options)
    for name in layer.weight_names[1::2]:
        # So that a scale applied to the wrong block shows.
        scale = getattr(layer, name)
        if scale.dtype in (torch.float32, torch.bfloat16):
            scale.mul_(torch.rand_like(scale) + 0.5)
    return layer


def make_trained(num_experts=4, hidden_size=144, intermediate_size=96, seed=0, master_dtype=torch.float32, **options):
    torch.manual_seed(seed)
    sizes = dict(num_experts=num_experts, hidden_size=hidden_size, intermediate_size=intermediate_size)
    return GroupedExperts(**sizes, dtype=torch.float32, master_dtype=master_dtype, **options)


def weights_of(layer, start=0, end=None):
    """The FP8 weights of frozen experts [start, end)."""
    up, up_scale, down, down_scale = (getattr(layer, name)[start:end] for name in layer.weight_names)
    return FP8Tensor(up, up_scale), FP8Tensor(down, down_scale)


def packed(state, name, form):
    """A weight of a state dict as functions take it: with a tensor scale, if any, for each row."""
    tensor_scale = state.get(f"{name}_tensor_scale")
    if tensor_scale is not None:
        experts, rows, _ = state[name].shape
        tensor_scale = tensor_scale.view(experts, -1)
        tensor_scale = tensor_scale.repeat_interleave(rows // tensor_scale.shape[1], 1)
    return PackedTensor(state[name], state[f"{name}_scale"], PACKED_WEIGHTS[form][0], tensor_scale)


def biases_of(layer, start=0, end=None):
    """Those of frozen experts [start, end), if there are any."""
    biases = (getattr(layer, name) for name in layer.bias_names)
    return Biases(*(bias if bias is None else bias[start:end] for bias in biases))


def quantized_weights(layer):
    """The FP8 copies of masters, gate and up apart."""
    up = quantize_128x128(getattr(layer, layer.up_name).detach().unflatten(1, (-1, layer.intermediate_size)))
    return FP8Tensor(*(part.flatten(1, 2) for part in up)), quantize_128x128(layer.down_proj.detach())


def layer_of(layer, start=0, end=None):
    """What kernels take of frozen experts [start, end)."""
    return Layer(*weights_of(layer, start, end), layer.activation, biases_of(layer, start, end))


def trained_layer(layer):
    """What kernels take of experts with masters."""
    return Layer(*quantized_weights(layer), layer.activation)


def part(layer, x, index, weights, start, end, *, known=None, partial=None, partial_known=None, **window):
    """What experts [start, end) add to the layer's result. known: written, the tokens that have a sum."""
    shard = Shard(**({"first_expert": start, "num_experts": layer.num_experts, "row_dtype": torch.bfloat16} | window))
    given = {"partial": partial, "partial_known": partial_known, "wants_known": known is not None}
    sums, now = experts_partial(x, index, weights, layer_of(layer, start, end), shard, **given)
    if known is not None:
        known.copy_(now)
    return sums


def in_order(parts):
    """Their sum, the first ones first."""
    total = torch.zeros_like(parts[0])
    for value in parts:
        total = total + value
    return total


class MLP(nn.Module):
    """One expert as models have them in an nn.ModuleList."""

    def __init__(self, names=("gate_proj", "up_proj", "down_proj"), hidden=144, size=96, act_fn=F.silu, bias=False):
        super().__init__()
        self.names, self.act_fn = names, act_fn
        for name in names:
            shape = (size, hidden) if name == names[-1] else (hidden, size)
            setattr(self, name, nn.Linear(*shape, bias=bias, dtype=torch.bfloat16))

    def forward(self, x):
        first, *rest, down = (getattr(self, name) for name in self.names)
        return down(self.act_fn(first(x)) * rest[0](x) if rest else self.act_fn(first(x)))


def route(tokens, num_experts, top_k, seed=0, *, device="cpu"):
    """Distinct experts for each token, and weights."""
    generator = torch.Generator(device).manual_seed(seed)
    weights, index = torch.rand(tokens, num_experts, device=device, generator=generator).topk(top_k, dim=-1)
    return index, weights / weights.sum(-1, keepdim=True)


def inputs(tokens=40, num_experts=4, top_k=2, hidden=144, dtype=torch.bfloat16, seed=0, *, device="cpu"):
    """hidden_states, top_k_index, top_k_weights and a gradient of the result."""
    generator = torch.Generator(device).manual_seed(seed)
    x, grad = (torch.randn(tokens, hidden, device=device, generator=generator).to(dtype) for _ in range(2))
    return x, *route(tokens, num_experts, top_k, seed, device=device), grad


def swiglu_operands(rows, size, seed=0, *, device="cpu"):
    """gate_up, grad and row_weights; some of gate and up are on a limit of 1."""
    generator = torch.Generator(device).manual_seed(seed)
    gate_up = torch.randn(rows, 2 * size, generator=generator, device=device).bfloat16()
    gate_up[:, ::7] = gate_up[:, ::7].sign()
    grad = torch.randn(rows, size, generator=generator, device=device).bfloat16()
    return gate_up, grad, torch.rand(rows, generator=generator, device=device) + 0.1


def quantized_intermediate(layer, x, index):
    """What GEMM 1 hands to GEMM 2 on the tensors' backend, in float64: (T, K, I) for x (T, H) and index (T, K)."""
    up, up_scale, *_ = (getattr(layer, name) for name in layer.weight_names)
    groups, rows = sort_by_expert(index, layer.num_experts)
    a = permute_quantize(x, rows, index.numel())
    h = grouped_gemm_swiglu(a, FP8Tensor(up, up_scale), groups, activation=layer.activation)
    return exact(h)[rows.long()]


def from_intermediate(layer, index, weights, intermediate):
    """The rest of the layer in float64 over its own quantized activations of GEMM 2. index and weights (T, K)."""
    *_, down, down_scale = (getattr(layer, name) for name in layer.weight_names)
    out = torch.zeros(len(index), down.shape[1], dtype=torch.float64, device=index.device)
    for expert in index[(index >= 0) & (index < layer.num_experts)].unique().tolist():
        tokens, k = torch.where(index == expert)
        y = intermediate[tokens, k] @ exact(FP8Tensor(down[expert], down_scale[expert])).T
        out.index_add_(0, tokens, y * weights[tokens, k, None].double())
    return out


def dense(up, down, x, weights, ids):
    """SwiGLU experts over FP8 weights in float32, token by token; an id below zero adds nothing."""
    up, down = (dequantize(FP8Tensor(*each)) for each in (up, down))
    out = torch.zeros(x.shape)
    for token, k in (ids >= 0).nonzero().tolist():
        gate, value = (up[ids[token, k]] @ x[token].float()).chunk(2)
        out[token] += weights[token, k] * (down[ids[token, k]] @ (F.silu(gate) * value))
    return out
