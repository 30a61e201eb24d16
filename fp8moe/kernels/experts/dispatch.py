"""Tokens of one GPU to all that hold experts: `dispatch`, over memory that the GPU can store to."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from fp8moe.kernels.experts import dispatch_plan, peer_checks, reference
from fp8moe.runtime.backend import use_cuda


class Received(NamedTuple):
    """Tokens of W ranks on one of them: T slots for each, rank r's from r * T on.

    data (W * T, H) float8_e4m3fn; scale (W * T, ceil(H/128)) float32; index (W * T, K) int32. All contiguous.
    """

    data: Tensor
    scale: Tensor
    index: Tensor


def dispatch(x: Tensor, top_k_index: Tensor, buffers: Sequence[Received], rank: int, num_experts: int) -> None:
    """Quantize the tokens of `rank` 1x128 and write them, with their experts, to its slots in the buffers.

    x: (N, H) bfloat16, float16 or float32, any strides; H a multiple of 16, N at most T, also 0.
    top_k_index: (N, K) int32 or int64; an index that is no int32 becomes -1.
    buffers: of 1 to 8 ranks, in memory that the device of x can write.
    rank: whose tokens these are, 0 to W - 1.
    num_experts: of all ranks, a multiple of W: each has as many, in the order of ranks.

    A token goes to the ranks that have an expert of it, its index to all; slots without a token get -1. Other data and
    scales stay as they are. Data and scales have the bits of `quantize_1x128`. There is no derivative.

    Raises TypeError for a wrong dtype, ValueError for a wrong rank, size, number, layout or device.
    """
    peer_checks.dispatch(x, top_k_index, buffers, rank, num_experts)
    backend = dispatch_plan if use_cuda(x) else reference
    backend.dispatch(x, top_k_index, buffers, rank, num_experts)
