"""``rotary_tables``: the cosines and sines that a rotary embedding takes, in one kernel."""

import ctypes

import torch
from torch import Tensor

from fp8moe.kernels.decoder_ops.rms_norm import check_number
from fp8moe.quant.formats import ceil_div
from fp8moe.quant.quantize import INPUT_TYPES, input_defines
from fp8moe.runtime import autograd
from fp8moe.runtime.checks import FLOATING, check_device, check_dtype, check_tensor
from fp8moe.runtime.jit import KernelSpec, load
from fp8moe.runtime.launch import PointerLauncher, planned
from fp8moe.runtime.operator import operator

_THREADS = 128  # of a thread block


def rotary_tables(positions: Tensor, frequencies: Tensor, scale: float, *, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of ``positions[..., None] * frequencies``, times `scale`, for `rotary`.

    positions: (..., T) int64, any strides. frequencies: float32 (R/2,). dtype: bfloat16, float16 or float32, that of
    the results (..., T, R), in which each angle's value comes twice, R/2 columns apart. All is computed in float32 and
    rounded once. Equal inputs give equal bits. There is no backward: calling it raises RuntimeError. Source:
    arXiv:2104.09864.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape or device.
    """
    check_tensor("positions", positions)
    check_tensor("frequencies", frequencies)
    check_number("scale", scale)
    name = "fp8moe.kernels.decoder_ops.rotary_tables"
    return autograd.run(_op, name, positions, frequencies, float(scale), dtype)


def kernel_spec(dtype: torch.dtype) -> KernelSpec:
    """Return the kernel for results in `dtype`."""
    types = (*input_defines(torch.float32, vector=False), ("OUTPUT", INPUT_TYPES[dtype]))
    return KernelSpec("rotary_tables.cu", "rotary_tables", (*types, ("THREADS", _THREADS)))


@planned
def launcher(device_index: int, tokens: int, half: int, scale: float, dtype: torch.dtype) -> PointerLauncher:
    """Return the launcher, called with contiguous (positions (tokens,), frequencies (half,), cosines, sines)."""
    return PointerLauncher(
        load(kernel_spec(dtype)),
        grid=ceil_div(tokens * half, _THREADS),
        block=_THREADS,
        pdl=True,
        pointers=4,
        args=(ctypes.c_int64(tokens), ctypes.c_int32(half), ctypes.c_float(scale)),
    )


def _check(positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype) -> None:
    check_dtype("positions", positions, torch.int64)
    if not positions.dim():
        raise ValueError("positions: expected one dimension or more, got a scalar")
    check_dtype("frequencies", frequencies, torch.float32)
    if frequencies.dim() != 1:
        raise ValueError(f"frequencies: expected shape (R/2,), got {tuple(frequencies.shape)}")
    check_device("frequencies", frequencies, positions.device, "positions")
    if dtype not in FLOATING:
        raise TypeError(f"dtype: expected bfloat16, float16 or float32, got {dtype}")


def _launch(positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    cosines, sines = _empty(positions, frequencies, scale, dtype)
    if cosines.numel():
        launch = launcher(positions.get_device(), positions.numel(), frequencies.numel(), scale, dtype)
        launch(positions.contiguous(), frequencies.contiguous(), cosines, sines)
    return cosines, sines


def _reference(positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angles = positions[..., None].float() * frequencies
    angles = torch.cat((angles, angles), -1)
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


def _empty(positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shape = *positions.shape, 2 * frequencies.shape[0]
    return tuple(frequencies.new_empty(shape, dtype=dtype) for _ in range(2))


_op = operator(
    "rotary_tables -> (Tensor, Tensor)",
    check=_check,
    cuda=_launch,
    reference=_reference,
    fake=_empty,
    forward_only=True,
)
