"""Operands of random normal data, and float64 arithmetic over the quantized values."""

import torch

from benchmarks.shapes import Model
from fp8moe import FP8Tensor, GroupedExperts, quantize_1x128, quantize_128x128
from fp8moe.quant.formats import BLOCK, FP8_MAX, ceil_div, empty_mn_major

# Standard deviation of the E4M3 values to which normal data is quantized in blocks of 128x128.
E4M3_STD = 100.0
ELEMENTS_AT_ONCE = 1 << 28


def activation(m: int, k: int, *, device: str = "cuda") -> FP8Tensor:
    """Draw a bfloat16 (m, k) activation, quantized in blocks of 1x128."""
    return quantize_1x128(torch.randn(m, k, device=device, dtype=torch.bfloat16))


def weight(n: int, k: int, *, device: str = "cuda") -> FP8Tensor:
    """Draw a bfloat16 (n, k) weight, quantized in blocks of 128x128."""
    return quantize_128x128(torch.randn(n, k, device=device, dtype=torch.bfloat16))


def random_rows(m: int, k: int, *, std: float = 1.0, device: str = "cuda") -> FP8Tensor:
    """Draw FP8 values and scales of an activation (m, k) in blocks of 1x128: for sizes too large to quantize."""
    scale = empty_mn_major((m, ceil_div(k, BLOCK)), device=device)
    return FP8Tensor(_normal_e4m3(m, k, device=device), scale.uniform_(0.5, 1.5).mul_(std / E4M3_STD))


def random_experts(experts: int, n: int, k: int, *, std: float = 1.0, device: str = "cuda") -> FP8Tensor:
    """Draw FP8 values and scales of weights (experts, n, k) in blocks of 128x128."""
    scale = torch.empty(experts, ceil_div(n, BLOCK), ceil_div(k, BLOCK), device=device)
    return FP8Tensor(_normal_e4m3(experts, n, k, device=device), scale.uniform_(0.5, 1.5).mul_(std / E4M3_STD))


def _normal_e4m3(*shape: int, device: str) -> torch.Tensor:
    data = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
    for part in data.view(-1).split(ELEMENTS_AT_ONCE):
        normal = torch.randn(part.numel(), dtype=torch.bfloat16, device=device)
        part.copy_(normal.mul_(E4M3_STD).clamp_(-FP8_MAX, FP8_MAX))
    return data


def exact(tensor: FP8Tensor) -> torch.Tensor:
    """Return the float64 values that a quantized (rows, k) tensor stands for; rows of a block share its scale.

    Results are held to this: it takes no code of the package, and is exact where `fp8moe.dequantize` rounds to float32.
    """
    data, scale = tensor
    rows_per_block = 1 if scale.shape[0] == data.shape[0] else BLOCK
    scale = scale.double().repeat_interleave(rows_per_block, 0)[: data.shape[0]]
    return data.double() * scale.repeat_interleave(BLOCK, 1)[:, : data.shape[1]]


def experts_layer(model: Model, *, device: str = "cuda") -> GroupedExperts:
    """Build experts with normal weights, scaled to keep the variance."""
    hidden, intermediate, experts, _ = model
    sizes = {"num_experts": experts, "hidden_size": hidden, "intermediate_size": intermediate}
    layer = GroupedExperts(**sizes, device="meta")
    up = random_experts(experts, 2 * intermediate, hidden, std=hidden**-0.5, device=device)
    down = random_experts(experts, hidden, intermediate, std=intermediate**-0.5, device=device)
    layer.load_state_dict(dict(zip(layer.weight_names, (*up, *down), strict=True)), assign=True)
    return layer


def route(model: Model, tokens: int) -> torch.Tensor:
    """Draw top_k different experts for each token, uniformly, always the same: (tokens, top_k) on the CPU."""
    scores = torch.rand(tokens, model.experts, generator=torch.Generator().manual_seed(0))
    return scores.topk(model.top_k).indices


def experts_inputs(model: Model, index: torch.Tensor, *, device: str = "cuda") -> tuple[torch.Tensor, ...]:
    """Draw hidden states (T, H) and normalised weights (T, K); between them `index` (T, K) on the device."""
    x = torch.randn(len(index), model.hidden, dtype=torch.bfloat16, device=device)
    weights = torch.rand(index.shape, device=device) + 0.1
    return x, index.to(device), weights / weights.sum(-1, keepdim=True)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the Frobenius norm of the difference over that of `expected`, in float64."""
    return ((actual.double() - expected).norm() / expected.norm()).item()


def rounded_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative Frobenius error of `actual` beyond what rounding the exact result to its dtype costs.

    Rounding normal data to bfloat16 costs 1.66e-3 by itself, which would hide the error of the computation.
    """
    rounding = relative_error(expected.to(actual.dtype), expected)
    error = relative_error(actual, expected) - rounding
    return 0.0 if error < 0 else error  # NaN stays
