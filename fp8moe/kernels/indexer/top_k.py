"""``mqa_top_k``: the keys that have the highest index scores of each query."""

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from fp8moe.kernels.indexer import checks, reference
from fp8moe.kernels.indexer.checks import Chosen
from fp8moe.runtime import autograd
from fp8moe.runtime.checks import check_int, check_tensor
from fp8moe.runtime.jit import KernelSpec, load
from fp8moe.runtime.launch import PointerLauncher, planned
from fp8moe.runtime.operator import operator

MOST = 2048
"""The largest top_k of the kernel."""

_THREADS, _CAPACITY = 512, 8192
_SHARED_BYTES = 8 * _CAPACITY + 16 * _THREADS + 512


def mqa_top_k(logits: Tensor, *, top_k: int, starts: Tensor | None = None, ends: Tensor | None = None) -> Tensor:
    """Return the columns of the largest index scores of each query, the largest first.

    logits: (S, T) float32, T < 2**30, as of `mqa_logits` and `paged_mqa_logits`; rows at any distance.
    top_k: an int, 1 or more.
    starts, ends: (S,) int32, on the device of the logits: query s chooses from columns ``starts[s]`` to
        ``ends[s] - 1``, and no others are read; both are clamped to [0, T]. None: from the first, to the last.
    Returns (S, top_k) int32: columns counted from ``starts``; -1 past the last, if a range has fewer. Of equal scores
    the lowest columns come first; NaN is the largest score.

    On the CUDA backend the host does not read the ranges, so a call can be captured in a CUDA graph. For a top_k above
    2048, PyTorch sorts whole rows. The columns have no gradients. Method: the choice of tokens of DeepSeek-V3.2,
    arXiv:2512.02556, section 2.1, by radix selection.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape, size or device.
    """
    check_tensor("logits", logits)
    for name, value in (("starts", starts), ("ends", ends)):
        if value is not None:
            check_tensor(name, value)
    check_int("top_k", top_k, at_least=1)
    return _mqa_top_k(*Chosen(autograd.detached(logits), top_k, starts, ends))


def kernel_spec() -> KernelSpec:
    constants = (("THREADS", _THREADS), ("CAPACITY", _CAPACITY), ("MOST", MOST), ("SHARED_BYTES", _SHARED_BYTES))
    return KernelSpec("top_k.cu", "top_k", constants)


@planned
def launcher(device_index: int, operands: Chosen) -> PointerLauncher:
    """Return the launcher of top_k.cu, to be called with (logits, starts, ends, out)."""
    logits = operands.logits
    rows, columns = logits.shape
    return PointerLauncher(
        load(kernel_spec()),
        grid=rows,
        block=_THREADS,
        smem=_SHARED_BYTES,
        pointers=4,
        args=(ctypes.c_int64(logits.stride(0)), ctypes.c_int(columns), ctypes.c_int(operands.top_k)),
    )


def _launch(operands: Chosen) -> Tensor:
    if operands.top_k > MOST:
        return reference.mqa_top_k(operands)
    logits, top_k, starts, ends = operands
    out = _empty(operands)
    if not out.numel():
        return out
    if not logits.shape[1]:
        return out.fill_(-1)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    starts, ends = (value if value is None else value.contiguous() for value in (starts, ends))
    launcher(logits.get_device(), Chosen(logits, top_k, starts, ends))(logits, starts, ends, out)
    return out


def _ready(operands: Chosen) -> Callable[[Chosen], Tensor] | None:
    """Return a function that launches without checks; None if operands in these layouts were not checked before."""
    launch = launcher.find(operands.logits.get_device(), operands)
    if launch is None:
        return None

    def run(operands: Chosen) -> Tensor:
        out = _empty(operands)
        launch(operands.logits, operands.starts, operands.ends, out)
        return out

    return run


def _empty(operands: Chosen) -> Tensor:
    return operands.logits.new_empty((operands.logits.shape[0], operands.top_k), dtype=torch.int32)


_mqa_top_k = operator(
    "mqa_top_k -> Tensor",
    check=checks.chosen,
    quick=_ready,
    cuda=_launch,
    reference=reference.mqa_top_k,
    fake=_empty,
)
