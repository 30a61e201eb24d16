"""The sum over ranks of what each has for a token: `sum_partials`."""

import torch
from torch import Tensor

from fp8moe.kernels.experts import peer_checks, reference, sum_partials_plan
from fp8moe.runtime.backend import use_cuda


def sum_partials(
    partials: Tensor,
    top_k_index: Tensor,
    ranks: int,
    num_experts: int,
    out_dtype: torch.dtype,
    residual: Tensor | None = None,
) -> Tensor:
    """``out[t] = sum over r of partials[r * S + t]`` in float32, r ascending, rounded once to the result.

    partials: (W * S, H) float32, any strides; H a multiple of 8. Rank r's sums are rows r * S on: what `combine_to`
        writes.
    top_k_index: (T, K) int32 or int64, T at most S, counted over all experts. A rank without an expert of a token adds
        nothing to it, and its row is not read.
    ranks: W, 1 to 8. num_experts: of all ranks, a multiple of W: each has as many, in the order of ranks.
    out_dtype: bfloat16, float16 or float32.
    residual: (T, H) of out_dtype, to which the rounded sum is added, or None.
    Returns (T, H). Equal inputs give equal bits. There is no derivative.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong rank, size, number or device.
    """
    peer_checks.sum_partials(partials, top_k_index, ranks, num_experts, out_dtype, residual)
    backend = sum_partials_plan if use_cuda(partials) else reference
    return backend.sum_partials(partials, top_k_index, ranks, num_experts, out_dtype, residual)
