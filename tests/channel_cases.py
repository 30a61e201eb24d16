"""GEMMs, layers and their operands with a weight scale for each output channel, on any device."""

import torch

from fp8moe import (
    FP8Linear,
    FP8Tensor,
    GroupedExperts,
    dequantize,
    gemm,
    grouped_gemm,
    grouped_gemm_masked,
    quantize_1x128,
)
from fp8moe.kernels.activation import Activation
from fp8moe.kernels.gemm.api import grouped_gemm_swiglu
from fp8moe.quant.quantize import quantize_channels

LARGEST_ERROR = 3e-4  # relative, Frobenius, beyond what rounding the exact result costs, as with blocks


def weight(device, *shape, seed=0):
    """Random weights whose channels differ by orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator) * (8 * torch.rand((*shape[:-1], 1), generator=generator)).exp2()
    return FP8Tensor(*(part.to(device) for part in quantize_channels(values)))


def rows(device, m, k, seed=1):
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(seed))
    return quantize_1x128(x.to(device))


def error(result, expected):
    return float((result.double() - expected).norm() / expected.norm().clamp(min=1e-300))


def is_close(result, expected):
    limit = LARGEST_ERROR if expected.numel() >= 64 else 3 * LARGEST_ERROR  # of few values one may have most of it
    return error(result, expected) <= limit + error(expected.to(result.dtype), expected)


def exact(a, b):
    return dequantize(a).double() @ dequantize(b).double().mT


def check_dense(device, m, n, k):
    a, b = rows(device, m, k), weight(device, n, k)
    bias = torch.randn(n, device=device)
    for dtype in (torch.float32, torch.bfloat16):
        c = torch.randn(m, n, device=device).to(dtype)
        assert is_close(gemm(a, b, out_dtype=dtype), exact(a, b))
        assert is_close(gemm(a, b, out_dtype=dtype, bias=bias, c=c), exact(a, b) + bias + c)
    first = gemm(a, b)
    assert all(torch.equal(gemm(a, b), first) for _ in range(5))


def check_grouped(device, sizes, n, k):
    offsets = torch.tensor([0, *sizes], dtype=torch.int32).cumsum(0).int().to(device)
    m, groups = int(offsets[-1]), len(sizes)
    a, b = rows(device, m + 3, k), weight(device, groups, n, k)
    out = torch.full((m + 3, n), 7.0, dtype=torch.bfloat16, device=device)
    grouped_gemm(a, b, offsets, out=out)
    assert (out[m:] == 7).all()
    parts = [FP8Tensor(*(part[start:end] for part in a)) for start, end in zip(offsets[:-1], offsets[1:], strict=True)]
    expected = torch.cat([exact(part, FP8Tensor(b.data[e], b.scale[e])) for e, part in enumerate(parts)])
    assert is_close(out[:m], expected)
    most = max(sizes)
    x = torch.zeros(groups, most, k, device=device)
    for e, part in enumerate(parts):
        x[e, : sizes[e]] = dequantize(part)
    masked = quantize_1x128(x)
    result = grouped_gemm_masked(masked, b, torch.tensor(sizes, dtype=torch.int32, device=device))
    for e, size in enumerate(sizes):
        if size:
            one = FP8Tensor(masked.data[e, :size], masked.scale[e, :size])
            wanted = exact(one, FP8Tensor(b.data[e], b.scale[e]))
            assert is_close(result[e, :size], wanted)


def check_swiglu(device, sizes, size, hidden):
    offsets = torch.tensor([0, *sizes], dtype=torch.int32).cumsum(0).int().to(device)
    m = int(offsets[-1])
    a, b = rows(device, m, hidden), weight(device, len(sizes), 2 * size, hidden)
    for activation in (Activation(), Activation(limit=2.0, alpha=1.7)):
        result = grouped_gemm_swiglu(a, b, offsets, activation=activation)
        for e, (start, end) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
            if start < end:
                sums = exact(FP8Tensor(*(part[start:end] for part in a)), FP8Tensor(b.data[e], b.scale[e]))
                wanted = activation(sums.float()).double()
                got = dequantize(FP8Tensor(result.data[start:end], result.scale[start:end]))
                assert error(got, wanted) <= 0.04  # of E4M3


def check_layers(device, tokens, experts, hidden, size):
    """Layers with channel scales against those with the dequantized weights in float32."""
    torch.manual_seed(0)
    linear = FP8Linear(hidden, 3 * size, weight_scales="channel", device=device)
    x = torch.randn(tokens, hidden, device=device)
    plain = x @ dequantize((linear.weight, linear.weight_scale_inv)).T + linear.bias.float()
    assert error(linear(x), plain.double()) <= 0.05
    layer = GroupedExperts(
        num_experts=experts, hidden_size=hidden, intermediate_size=size, weight_scales="channel", device=device
    )
    index = torch.stack([torch.randperm(experts, device=device)[:2] for _ in range(tokens)])
    routing = torch.rand(tokens, 2, device=device)
    up = dequantize((layer.gate_up_proj, layer.gate_up_proj_scale_inv))
    down = dequantize((layer.down_proj, layer.down_proj_scale_inv))
    expected = torch.zeros(tokens, hidden, device=device)
    for k in range(2):
        both = torch.einsum("th,tnh->tn", x, up[index[:, k]])
        h = torch.nn.functional.silu(both[:, :size]) * both[:, size:]
        expected += routing[:, k, None] * torch.einsum("ti,thi->th", h, down[index[:, k]])
    assert error(layer(x, index, routing), expected.double()) <= 0.06
    return layer, x, index, routing
