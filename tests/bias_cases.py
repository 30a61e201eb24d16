"""Grouped GEMMs and layers with biases against float64 over the same quantized operands, on any device."""

import torch
from torch import Tensor

from fp8moe import FP8Tensor, dequantize, quantize_1x128
from fp8moe.kernels.activation import Activation
from fp8moe.kernels.gemm.api import grouped_gemm_swiglu, grouped_rows
from tests import channel_cases, experts_cases
from tests.channel_cases import error, is_close
from tests.gemm_cases import activations, gate_up_weights, offsets, weights

KINDS = ("block", "channel")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FORMS = {"gpt-oss": dict(swiglu_limit=7.0, swiglu_alpha=1.702)} | experts_cases.VARIANTS


def bias_like(sums: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """As large as these sums of all groups, different in each column and group."""
    generator = torch.Generator(sums.device).manual_seed(7)
    values = torch.randn(groups, sums.shape[1], device=sums.device, generator=generator)
    return (values * sums.std().clamp(1e-3, 1e3).float()).to(dtype)


def sums_of_groups(a: FP8Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """(M, N) float64, zeros in rows of no group; b: (E, N, K) dequantized."""
    a = dequantize(a, dtype=torch.float64)
    sums = a.new_zeros(len(a), b.shape[1])
    for e, (start, end) in enumerate(zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)):
        sums[start:end] = a[start:end] @ b[e].double().T
    return sums


def bias_of_rows(bias: Tensor, ends: Tensor, rows: int) -> Tensor:
    """(M, N) float64."""
    counts = torch.cat([ends.diff(), (rows - ends[-1]).view(1)]).long()
    return torch.cat([bias, torch.zeros_like(bias[:1])]).double().repeat_interleave(counts, 0)


def check_groups(device: str, sizes: list[int], n: int, k: int, kind: str, dtype: torch.dtype) -> None:
    ends = offsets(sizes, device=device)
    rows = int(ends[-1]) + 3  # the last ones of no group
    a = activations(rows, k, device=device)
    b = weights(len(sizes), n, k, device=device) if kind == "block" else channel_cases.weight(device, len(sizes), n, k)
    sums = sums_of_groups(a, dequantize(b), ends)
    bias = bias_like(sums, len(sizes), dtype)
    expected = sums + bias_of_rows(bias, ends, rows)
    for out_dtype in (torch.float32, torch.bfloat16):
        out = grouped_rows(a, b, ends, out_dtype, others_zero=True, bias=bias)
        assert is_close(out, expected)
        assert not out[ends[-1] :].any()
    memory = torch.zeros(bias.numel() + 1, dtype=dtype, device=device)  # not aligned
    moved = memory[1:].view(bias.shape).copy_(bias)
    assert torch.equal(grouped_rows(a, b, ends, out_dtype, others_zero=True, bias=moved), out)


def check_swiglu(device: str, sizes: list[int], size: int, hidden: int, kind: str, dtype: torch.dtype) -> None:
    ends, count = offsets(sizes, device=device), len(sizes)
    a = activations(int(ends[-1]), hidden, spread=1, device=device)
    if kind == "block":
        b = gate_up_weights(count, size, hidden, device=device)
        apart = FP8Tensor(b.data.view(2 * count, size, -1), b.scale.view(2 * count, -1, b.scale.shape[-1]))
        values = dequantize(apart).view(count, 2 * size, hidden)
    else:
        b = channel_cases.weight(device, count, 2 * size, hidden)
        values = dequantize(b)
    values, b = values / 64, FP8Tensor(b.data, b.scale / 64)
    sums = sums_of_groups(a, values, ends)
    bias = bias_like(sums, count, dtype)
    for activation in (Activation(), Activation(limit=2.0, alpha=1.7)):
        got = grouped_gemm_swiglu(a, b, ends, activation=activation, bias=bias)
        expected = activation(sums + bias_of_rows(bias, ends, len(sums)))
        assert error(dequantize(FP8Tensor(*got)), expected) <= 0.04  # of E4M3


def make_layer(device: str, experts: int, hidden: int, size: int, **options):
    """A layer with biases as large as what they are added to, and what it is called with."""
    layer = experts_cases.make(experts, hidden, size, bias=True, device=device, **options)
    for name in layer.bias_names:
        getattr(layer, name).normal_(std=0.5)
    return layer


def dequantized(layer, name: str, matrices: int) -> Tensor:
    """A weight (E, N, K); matrices: that it holds, each with blocks of its own."""
    data, scale = getattr(layer, name), getattr(layer, f"{name}_scale_inv")
    count, rows, columns = data.shape
    apart = FP8Tensor(
        data.view(count * matrices, rows // matrices, columns), scale.view(count * matrices, -1, scale.shape[-1])
    )
    return dequantize(apart).view(data.shape).double()


def exact_layer(layer, x: Tensor, index: Tensor, routing: Tensor) -> Tensor:
    """(T, H) float64: what the layer computes, with its quantizations and nothing rounded besides."""
    up = dequantized(layer, layer.up_name, 2 if layer.activation.gated else 1)
    down = dequantized(layer, "down_proj", 1)
    up_bias, down_bias = (getattr(layer, name).double() for name in layer.bias_names)
    tokens = dequantize(quantize_1x128(x)).double()
    total = torch.zeros_like(tokens)
    for k in range(index.shape[1]):
        expert = index[:, k]
        for e in expert.unique().tolist():
            rows = (expert == e).nonzero().squeeze(1)
            projected = tokens[rows] @ up[e].T + up_bias[e]
            h = dequantize(quantize_1x128(layer.activation(projected).float())).double()
            total[rows] += routing[rows, k, None].double() * (h @ down[e].T + down_bias[e])
    return total


def check_layer(device: str, tokens: int, hidden: int, size: int, form: str, **options) -> None:
    layer = make_layer(device, 4, hidden, size, **FORMS[form], **options)
    for dtype in (torch.float32, torch.bfloat16):
        x, index, routing, _ = experts_cases.inputs(tokens, hidden=hidden, dtype=dtype, device=device)
        out = layer(x, index, routing)
        # Rounding h to E4M3 takes another value where a sum differs in its last bits.
        limit = 1e-2 if tokens * size > 10_000 or device == "cpu" else 3e-2
        assert error(out, exact_layer(layer, x, index, routing)) <= limit
        layer.decode_capacity = tokens
        assert error(layer(x, index, routing), out.double()) <= limit
        layer.decode_capacity = None
