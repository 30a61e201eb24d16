"""`dispatch`: quantize the tokens of one GPU, and store each token in the memory of the GPUs that hold its experts."""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fp8moe.kernels.experts import checks, reference
from fp8moe.kernels.experts.routing import INDEX_TYPES
from fp8moe.quant.formats import BLOCK, ceil_div
from fp8moe.quant.quantize import quantizer_defines
from fp8moe.runtime.backend import use_cuda
from fp8moe.runtime.checks import FLOATING, check_dtype, check_int, check_tensor, row_major
from fp8moe.runtime.jit import KernelSpec, load
from fp8moe.runtime.launch import PointerLauncher, current_stream, device_guard, planned, resident_blocks
from fp8moe.runtime.peer_table import MAX_PEERS, no_meeting, peer_defines
from fp8moe.runtime.sm90 import WARP

_WARPS, _WARP_COLUMNS = 4, 512  # warps of a thread block; columns that a warp processes at a time
_BLOCKS_PER_SM = 16  # thread blocks that an SM runs at once


class Received(NamedTuple):
    """A rank's buffers for tokens from all W ranks: T slots per sender; rank r writes slots r * T to (r + 1) * T - 1.

    data (W * T, H) float8_e4m3fn; scale (W * T, ceil(H/128)) float32; index (W * T, K) int32. All contiguous.
    """

    data: Tensor
    scale: Tensor
    index: Tensor


_RECEIVED_DTYPES = (torch.float8_e4m3fn, torch.float32, torch.int32)


def dispatch(x: Tensor, top_k_index: Tensor, buffers: Sequence[Received], rank: int, num_experts: int) -> None:
    """Quantize tokens 1x128; write tokens and expert indices to the slots of rank `rank` in the buffers of all ranks.

    x: (N, H) bfloat16, float16 or float32, any strides; H a multiple of 16, N from 0 to T.
    top_k_index: (N, K) int32 or int64; an index that does not fit int32 becomes -1.
    buffers: the buffers of ranks 0 to W - 1, W from 1 to 8, in memory that the device of x can write.
    rank: the rank that sends the tokens, 0 to W - 1.
    num_experts: experts on all ranks together, a multiple of W: rank r holds the r-th of W equal parts.

    Data and scale of a token go to the ranks that hold one of its experts; its indices go to all ranks. Indices of
    slots without a token become -1. Other data and scales stay unchanged. Tokens are quantized bitwise as by
    `quantize_1x128`. There is no derivative.

    Raises TypeError for a wrong dtype, ValueError for a wrong rank, size, number, layout or device.
    """
    _check(x, top_k_index, buffers, rank, num_experts)
    (_launch if use_cuda(x) else reference.dispatch)(x, top_k_index, buffers, rank, num_experts)


def _check(x: Tensor, index: Tensor, buffers: Sequence[Received], rank: int, num_experts: int) -> None:
    for name, value in (("x", x), ("top_k_index", index)):
        check_tensor(name, value)
    check_dtype("x", x, *FLOATING)
    if x.dim() != 2 or x.shape[1] % 16:
        raise ValueError(f"x: expected shape (N, H) with H a multiple of 16, got {tuple(x.shape)}")
    checks.routed_index(index, x.shape[0], x.device, "x")
    ranks = len(buffers)
    if not 1 <= ranks <= MAX_PEERS:
        raise ValueError(f"buffers: expected those of 1 to {MAX_PEERS} ranks, got {ranks}")
    check_int("rank", rank)
    if not 0 <= rank < ranks:
        raise ValueError(f"rank: expected 0 to {ranks - 1}, the buffers there are, got {rank}")
    check_int("num_experts", num_experts)
    if not 0 <= num_experts <= ranks * checks.MAX_EXPERTS or num_experts % ranks:
        most = f"{checks.MAX_EXPERTS} for each"
        raise ValueError(f"num_experts: expected a multiple of {ranks}, the ranks, up to {most}, got {num_experts}")
    room = buffers[0][0].shape[0] if buffers[0][0].dim() else 0
    if room % ranks or room < x.shape[0] * ranks:
        raise ValueError(
            f"buffers: expected {ranks} * T slots with T at least {x.shape[0]}, the tokens of x, got {room}"
        )
    columns = x.shape[1], ceil_div(x.shape[1], BLOCK), index.shape[1]
    for i, buffer in enumerate(buffers):
        for name, part, dtype, width in zip(Received._fields, buffer, _RECEIVED_DTYPES, columns, strict=True):
            _check_target(f"buffers[{i}].{name}", part, dtype, (room, width))


def _check_target(name: str, value: Tensor, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Check dtype, shape, layout and address of a tensor that the kernel writes. It may be on any device."""
    check_dtype(name, value, dtype)
    if value.shape != shape:
        raise ValueError(f"{name}: expected shape {shape}, got {tuple(value.shape)}")
    if not value.is_contiguous() or value.data_ptr() % 16:
        raise ValueError(f"{name}: expected contiguous and at a multiple of 16 bytes, got strides {value.stride()}")


class _DispatchSizes(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("tokens", "slots", "top_k", "experts")),
        ("row_stride", ctypes.c_int64),
    )


def kernel_spec(hidden: int, dtype: torch.dtype, index_dtype: torch.dtype, peers: int) -> KernelSpec:
    """Return the kernel for tokens of `hidden` columns and these dtypes; peers: number of GPUs, including this one."""
    own = ("INDEX", INDEX_TYPES[index_dtype]), ("WARPS", _WARPS), ("WARP_COLUMNS", _WARP_COLUMNS), ("HIDDEN", hidden)
    sizes = ("SIZES_BYTES", ctypes.sizeof(_DispatchSizes))
    return KernelSpec("dispatch.cu", "dispatch", (*quantizer_defines(dtype), *own, *peer_defines(peers), sizes))


@planned
def launcher(device_index: int, x: Tensor, index: Tensor, slots: int, peers: int, experts: int) -> PointerLauncher:
    """Return the launcher of dispatch.cu.

    The launcher takes the addresses of x and index; of data, scale and index in each peer's `Received`; and those of
    `peer_table.meeting`. An address in a peer's `Received` is that of the first slot that this GPU writes.

    x: (tokens, H), rows at multiples of 16 bytes. index: (tokens, K), contiguous. The number `tokens` may be 0; H and K
        are not 0.
    slots: the number of slots that this GPU writes in each peer's `Received`, not 0.
    experts: the number of experts on each peer.
    """
    (tokens, hidden), top_k = x.shape, index.shape[1]
    blocks = ceil_div(slots * ceil_div(hidden, _WARP_COLUMNS), _WARPS)
    addresses = len(Received._fields) * peers + peers + 1
    return PointerLauncher(
        load(kernel_spec(hidden, x.dtype, index.dtype, peers)),
        grid=min(blocks, resident_blocks(_BLOCKS_PER_SM, device_index)),
        block=_WARPS * WARP,
        pointers=2,
        args=((ctypes.c_int64 * addresses)(), _DispatchSizes(tokens, slots, top_k, experts, x.stride(0))),
    )


def _launch(x: Tensor, index: Tensor, buffers: Sequence[Received], rank: int, num_experts: int) -> None:
    peers = len(buffers)
    slots = buffers[0][0].shape[0] // peers
    if not slots * x.shape[1] * index.shape[1]:
        return
    x, index, device_index = row_major(x), index.contiguous(), x.get_device()
    own = (part[rank * slots :].data_ptr() for buffer in buffers for part in buffer)
    launch = launcher(device_index, x, index, slots, peers, num_experts // peers).launch
    with device_guard(device_index):
        launch(current_stream(device_index), x.data_ptr(), index.data_ptr(), *own, *no_meeting(peers))
