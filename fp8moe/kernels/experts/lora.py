"""Products of rows with each expert's LoRA factors. K and N are numbers of features, r is the LoRA rank.

``lora_shrink``: (R, K) -> (R, r). ``lora_gradient``: the gradient of a factor. ``adapter_product``: any grouped product
in bfloat16, such as (R, r) -> (R, N) if that product is not added within an FP8 GEMM.
"""

import ctypes
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8moe.quant.formats import ceil_div
from fp8moe.runtime.backend import use_cuda
from fp8moe.runtime.checks import aligned, check_dtype, check_like
from fp8moe.runtime.jit import KernelSpec, load
from fp8moe.runtime.launch import PointerLauncher, planned
from fp8moe.runtime.operator import define, operator
from fp8moe.runtime.sm90 import WARP

_RANKS = 16  # columns of the (R, r) matrix that a thread block of lora_shrink.cu or lora_gradient.cu processes
_GRADIENT_COLUMNS, _GRADIENT_WARPS = 256, 4  # columns and warps of a thread block of cuda/ops/lora_gradient.cu


class _ShrinkBlock(NamedTuple):
    """A thread block of lora_shrink.cu: rows, warps (which split K), and per_sm, the blocks that fit on an SM."""

    rows: int
    warps: int
    per_sm: int


_MANY, _FEW = _ShrinkBlock(32, 4, 6), _ShrinkBlock(16, 16, 2)
# With fewer rows per group on average, use _FEW, in which more warps split K, because the loop over K dominates.
_FEW_ROWS = 16


def lora_shrink(x: Tensor, factors: Tensor, group_offsets: Tensor, tokens: Tensor | None = None) -> Tensor:
    """Return ``x[rows of e] @ factors[e].T`` for the rows of every expert e: the first product of LoRA.

    x: (R, K) bfloat16; or, if `tokens` is given, (T, K): row i of the R rows is ``x[tokens[i]]``. K a multiple of 8.
    factors: (E, r, K) bfloat16, r a multiple of 16.
    group_offsets: (E + 1,) int32, ascending and within [0, R]: expert e has rows group_offsets[e]:group_offsets[e + 1].
    tokens: (R,) int32 or None.
    Returns (R, r) bfloat16, summed in float32; rows of no group are uninitialized. Equal inputs give equal bits.

    Method: LoRA, arXiv:2106.09685; one product per group as in Punica, arXiv:2310.18547, section 4. The FP8 GEMMs add
    the second product of LoRA, from (R, r) to outputs: see `kernels.gemm.api.grouped_rows`.

    Raises ValueError for a wrong shape or device, TypeError for a wrong dtype.
    """
    return _lora_shrink(x, factors, group_offsets, tokens)


def lora_gradient(ranks: Tensor, x: Tensor, group_offsets: Tensor, tokens: Tensor | None = None) -> Tensor:
    """Return ``ranks[rows of e].T @ x[rows of e]`` for every expert e: the gradient of a LoRA factor.

    ranks: (R, r) bfloat16, r a multiple of 16. x: (R, N) bfloat16, or (T, N) if `tokens` is given; N a multiple of 8.
    Returns (E, r, N) bfloat16, summed in float32; zeros for a group without rows. Equal inputs give equal bits.
    group_offsets, tokens and errors: as for `lora_shrink`.
    """
    return _lora_gradient(ranks, x, group_offsets, tokens)


def adapter_product(a: Tensor, b: Tensor, groups: Tensor) -> Tensor:
    """Return ``a[rows of e] @ b[e]`` for every expert e: a (R, K), b (E, K, N), groups (E + 1,) -> (R, N).

    Tensors are bfloat16, sums float32; K and N are multiples of 8. Rows of no group have arbitrary values. On a GPU the
    call is one torch grouped_mm, and the host does not wait for the GPU; elsewhere a loop over the groups defines the
    result.
    """
    return torch.ops.fp8moe.adapter_product(a, b, groups)


class _ShrinkSizes(ctypes.Structure):  # struct Sizes of lora_shrink.cu
    _fields_ = tuple((name, ctypes.c_int) for name in ("k", "rows", "num_groups"))


def shrink_spec(rank: int, gathered: bool, few: bool) -> KernelSpec:
    rows, warps, per_sm = _FEW if few else _MANY
    block = (("RANKS", _RANKS), ("ROWS", rows), ("WARPS", warps), ("BLOCKS_PER_SM", per_sm))
    return KernelSpec("lora_shrink.cu", "lora_shrink", (("RANK", rank), ("GATHERED", int(gathered)), *block))


def gradient_spec(rank: int, gathered: bool) -> KernelSpec:
    block = (("RANKS", _RANKS), ("COLUMNS", _GRADIENT_COLUMNS), ("WARPS", _GRADIENT_WARPS))
    return KernelSpec("lora_gradient.cu", "lora_gradient", (("RANK", rank), ("GATHERED", int(gathered)), *block))


@planned
def shrink_launcher(
    device_index: int, rows: int, rank: int, groups: int, width: int, gathered: bool
) -> PointerLauncher:
    """Return the launcher of `lora_shrink`, to be called with (x, factors, group_offsets, tokens, out (R, rank)).

    gathered: x is (T, K), and row i is ``x[tokens[i]]``; otherwise x is (R, K), and tokens is None.
    rows, groups, width: R, E, K.
    """
    few = rows < _FEW_ROWS * groups
    block = _FEW if few else _MANY
    # Number of thread blocks that share a tile of rows: the number of groups in a tile if all groups are equally large.
    sharing = min(block.rows, ceil_div(block.rows * groups, max(rows, 1)))
    return PointerLauncher(
        load(shrink_spec(rank, gathered, few)),
        grid=(ceil_div(rows, block.rows), rank // _RANKS, sharing),
        block=WARP * block.warps,
        args=((ctypes.c_int64 * 5)(), _ShrinkSizes(width, rows, groups)),
    )


@planned
def gradient_launcher(device_index: int, rank: int, groups: int, width: int, gathered: bool) -> PointerLauncher:
    """Return the launcher of `lora_gradient`, to be called with (x, ranks, group_offsets, tokens, out (E, rank, N)).

    gathered: x is (T, N), and row i is ``x[tokens[i]]``; otherwise x is (R, N), and tokens is None.
    groups, width: E, N.
    """
    return PointerLauncher(
        load(gradient_spec(rank, gathered)),
        grid=(ceil_div(width, _GRADIENT_COLUMNS), groups, rank // _RANKS),
        block=WARP * _GRADIENT_WARPS,
        args=((ctypes.c_int64 * 5)(), ctypes.c_int64(width)),
    )


def launch_shrink(x: Tensor, factors: Tensor, group_offsets: Tensor, tokens: Tensor | None, out: Tensor) -> Tensor:
    """Compute `lora_shrink` into `out`, and return `out`."""
    (rows, rank), groups = out.shape, factors.shape[0]
    if rows and groups:
        launcher = shrink_launcher(out.get_device(), rows, rank, groups, x.shape[1], tokens is not None)
        launcher(*_vectors(x, factors, group_offsets, tokens), out)
    return out


def launch_gradient(ranks: Tensor, x: Tensor, group_offsets: Tensor, tokens: Tensor | None, out: Tensor) -> Tensor:
    """Compute `lora_gradient` into `out`, and return `out`."""
    groups, rank, width = out.shape
    if groups and width:
        launcher = gradient_launcher(out.get_device(), rank, groups, width, tokens is not None)
        launcher(*_vectors(x, ranks, group_offsets, tokens), out)
    return out


def _vectors(*operands: Tensor | None) -> list[Tensor | None]:
    """Return the operands, with copies of operands that the kernels could not read as 16-byte vectors."""
    return [None if value is None else aligned(value) for value in operands]


def _groups(group_offsets: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield (expert, slice of its rows) for every expert that has rows."""
    offsets = group_offsets.tolist()
    for group, (start, end) in enumerate(zip(offsets, offsets[1:], strict=False)):
        if start < end:
            yield group, slice(start, end)


def _source(x: Tensor, tokens: Tensor | None, rows: slice) -> Tensor:
    return (x[rows] if tokens is None else x[tokens[rows]]).float()


def _shrink_reference(x: Tensor, factors: Tensor, group_offsets: Tensor, tokens: Tensor | None) -> Tensor:
    out = _empty_shrink(x, factors, group_offsets, tokens)
    with torch.autocast(x.device.type, enabled=False):
        for group, rows in _groups(group_offsets):
            out[rows] = (_source(x, tokens, rows) @ factors[group].float().T).bfloat16()
    return out


def _gradient_reference(ranks: Tensor, x: Tensor, group_offsets: Tensor, tokens: Tensor | None) -> Tensor:
    out = _empty_gradient(ranks, x, group_offsets, tokens).zero_()
    with torch.autocast(x.device.type, enabled=False):
        for group, rows in _groups(group_offsets):
            out[group] = (ranks[rows].float().T @ _source(x, tokens, rows)).bfloat16()
    return out


def _product(a: Tensor, b: Tensor, groups: Tensor) -> Tensor:
    with torch.autocast(a.device.type, enabled=False):
        if len(a) and use_cuda(a):
            return F.grouped_mm(aligned(a), aligned(b), offs=groups[1:].contiguous())
        out = a.new_zeros((a.shape[0], b.shape[2]))
        for group, rows in _groups(groups):
            out[rows] = (a[rows].float() @ b[group].float()).bfloat16()
    return out


def _check(x: Tensor, rank: int, group_offsets: Tensor, experts: int, tokens: Tensor | None) -> None:
    """Check the arguments common to `lora_shrink` and `lora_gradient`."""
    check_dtype("x", x, torch.bfloat16)
    if rank % 16 or not rank:
        raise ValueError(f"expected a multiple of 16 ranks (pad with zeros), got {rank}")
    if x.shape[1] % 8:
        raise ValueError(f"x: expected a multiple of 8 columns (pad with zeros), got {x.shape[1]}")
    check_like("group_offsets", group_offsets, (torch.int32,), (experts + 1,), x.device, "x")
    if tokens is not None:
        check_like("tokens", tokens, (torch.int32,), tuple(tokens.shape[:1]), x.device, "x")


def _check_shrink(x: Tensor, factors: Tensor, group_offsets: Tensor, tokens: Tensor | None) -> None:
    experts, rank = factors.shape[:2]
    check_like("factors", factors, (torch.bfloat16,), (experts, rank, x.shape[1]), x.device, "x")
    _check(x, rank, group_offsets, experts, tokens)


def _check_gradient(ranks: Tensor, x: Tensor, group_offsets: Tensor, tokens: Tensor | None) -> None:
    rank = ranks.shape[1]
    _check(x, rank, group_offsets, group_offsets.shape[0] - 1, tokens)
    check_like("ranks", ranks, (torch.bfloat16,), (_num_rows(x, tokens), rank), x.device, "x")


def _num_rows(x: Tensor, tokens: Tensor | None) -> int:
    return x.shape[0] if tokens is None else tokens.shape[0]


def _empty_shrink(x: Tensor, factors: Tensor, group_offsets: Tensor, tokens: Tensor | None) -> Tensor:
    return x.new_empty((_num_rows(x, tokens), factors.shape[1]))


def _empty_gradient(ranks: Tensor, x: Tensor, group_offsets: Tensor, tokens: Tensor | None) -> Tensor:
    return x.new_empty((group_offsets.shape[0] - 1, ranks.shape[1], x.shape[1]))


_lora_shrink = operator(
    "lora_shrink -> Tensor",
    check=_check_shrink,
    cuda=lambda *operands: launch_shrink(*operands, _empty_shrink(*operands)),
    reference=_shrink_reference,
    fake=_empty_shrink,
)
_lora_gradient = operator(
    "lora_gradient -> Tensor",
    check=_check_gradient,
    cuda=lambda *operands: launch_gradient(*operands, _empty_gradient(*operands)),
    reference=_gradient_reference,
    fake=_empty_gradient,
)
define(
    "adapter_product(Tensor a, Tensor b, Tensor groups) -> Tensor",
    _product,
    lambda a, b, groups: a.new_empty((a.shape[0], b.shape[2])),
)
