"""Launches ``cuda/dispatch.cu``."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from fp8moe.kernels.experts.routing import INDEX_TYPES
from fp8moe.quant.formats import ceil_div
from fp8moe.quant.quantize_plan import quantizer_defines
from fp8moe.runtime.checks import row_major
from fp8moe.runtime.jit import KernelSpec, load
from fp8moe.runtime.launch import PointerLauncher, current_stream, device_guard, resident_blocks
from fp8moe.runtime.peer_table import no_meeting, peer_defines
from fp8moe.runtime.plans import PlanCache
from fp8moe.runtime.sm90 import WARP

_WARPS, _WARP_COLUMNS = 4, 512  # warps of a thread block, columns that one takes at a time
_BLOCKS_PER_SM = 16  # as many as run at once
_REGIONS = 3  # data, scale, index

_plans: PlanCache[PointerLauncher] = PlanCache()


class _Sizes(ctypes.Structure):
    """``struct Sizes`` of the kernel."""

    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("tokens", "slots", "top_k", "experts")),
        ("row_stride", ctypes.c_int64),
    )


def kernel_spec(hidden: int, dtype: torch.dtype, index_dtype: torch.dtype, peers: int) -> KernelSpec:
    """The kernel for tokens of `hidden` columns, these dtypes and so many peers, this GPU among them."""
    types = (("INDEX", INDEX_TYPES[index_dtype]),)
    sizes = (("WARPS", _WARPS), ("WARP_COLUMNS", _WARP_COLUMNS), ("HIDDEN", hidden))
    defines = (*quantizer_defines(dtype), *types, *sizes, *peer_defines(peers), ("SIZES_BYTES", ctypes.sizeof(_Sizes)))
    return KernelSpec("dispatch.cu", "dispatch", defines)


def plan(
    tokens: int,
    slots: int,
    hidden: int,
    top_k: int,
    row_stride: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    peers: int,
    experts: int,
    device_index: int,
) -> PointerLauncher:
    """The launcher for x and index, then for each peer data, scale and index, then the meeting.

    x (tokens, hidden), rows `row_stride` elements and a multiple of 16 bytes apart; index (tokens, top_k), contiguous;
    tokens may be 0. Each peer's parts are those of this GPU: data (slots, hidden) at a multiple of 16 bytes, scale
    (slots, ceil(hidden / 128)), index (slots, top_k), contiguous; slots, hidden, top_k are not 0. dtypes: of x and
    index. experts: of each peer. The meeting: see `peer_table`. device_index: of the current device.
    """

    def build() -> PointerLauncher:
        blocks = ceil_div(slots * ceil_div(hidden, _WARP_COLUMNS), _WARPS)
        return PointerLauncher(
            load(kernel_spec(hidden, *dtypes, peers)),
            grid=min(blocks, resident_blocks(_BLOCKS_PER_SM, device_index)),
            block=_WARPS * WARP,
            pointers=2,
            args=(
                (ctypes.c_int64 * (_REGIONS * peers + peers + 1))(),
                _Sizes(tokens, slots, top_k, experts, row_stride),
            ),
        )

    return _plans.get((tokens, slots, hidden, top_k, row_stride, dtypes, peers, experts, device_index), build)


def dispatch(x: Tensor, index: Tensor, buffers: Sequence[tuple[Tensor, ...]], rank: int, num_experts: int) -> None:
    """Of operands in any layout, as ``experts.dispatch`` describes it."""
    peers, (tokens, hidden), top_k = len(buffers), x.shape, index.shape[1]
    slots = buffers[0][0].shape[0] // peers
    if not slots * hidden * top_k:
        return
    x, index = row_major(x), index.contiguous()
    parts = (part[rank * slots :].data_ptr() for buffer in buffers for part in buffer)
    device_index = x.get_device()
    dtypes = (x.dtype, index.dtype)
    with device_guard(device_index):
        experts = num_experts // peers
        plan(tokens, slots, hidden, top_k, x.stride(0), dtypes, peers, experts, device_index).launch(
            *(current_stream(device_index), x.data_ptr(), index.data_ptr()),
            *(*parts, *no_meeting(peers)),
        )
