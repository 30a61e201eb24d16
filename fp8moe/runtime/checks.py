"""Checks of arguments. Each error names the argument, the expected value and the value received."""

import operator

import torch
from torch import Tensor

FLOATING = (torch.bfloat16, torch.float16, torch.float32)


def check_tensor(name: str, value: Tensor) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {describe(value)}")


def check_int(name: str, value: int, at_least: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
        raise TypeError(f"{name}: expected an int, got {describe(value)}")
    if at_least is not None and value < at_least:
        raise ValueError(f"{name}: expected at least {at_least}, got {value}")


def check_floating(dtype: torch.dtype) -> None:
    """Raise TypeError unless `dtype`, the argument of a module, is bfloat16, float16 or float32."""
    if dtype not in FLOATING:
        raise TypeError(f"dtype: expected torch.bfloat16, torch.float16 or torch.float32, got {dtype}")


def check_dtype(name: str, value: Tensor, *dtypes: torch.dtype) -> None:
    if value.dtype not in dtypes:
        *first, last = (str(dtype).removeprefix("torch.") for dtype in dtypes)
        expected = f"{', '.join(first)} or {last}" if first else last
        raise TypeError(f"{name}: expected {expected}, got {value.dtype}")


def check_device(name: str, value: Tensor, device: torch.device, like: str) -> None:
    """Raise ValueError unless `value` is on `device`, the device of the argument named `like`."""
    if value.device != device:
        raise ValueError(f"{name}: expected on {device} like {like}, got {value.device}")


def check_like(
    name: str, value: Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...], device: torch.device, like: str
) -> None:
    """Check dtype, shape and device of `value`. like: the name of an argument that is on `device`, for the error."""
    check_dtype(name, value, *dtypes)
    if value.shape != shape:
        raise ValueError(f"{name}: expected shape {tuple(shape)}, got {tuple(value.shape)}")
    check_device(name, value, device, like)


def check_contiguous(name: str, value: Tensor) -> None:
    if not value.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got strides {value.stride()}")


def check_address(name: str, value: Tensor) -> None:
    """Raise ValueError unless `value` starts at a multiple of 16 bytes. Not for fake tensors, which have no address."""
    if (address := value.data_ptr()) % 16:
        raise ValueError(f"{name}: expected to start at a multiple of 16 bytes, got address {address:#x}")


def check_out(
    out: Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...], device: torch.device, like: str
) -> None:
    """Raise TypeError or ValueError unless `out` is contiguous and has one of `dtypes`, this shape and this device.

    like: the name of an argument that is on `device`, for the error.
    """
    check_like("out", out, dtypes, shape, device, like)
    check_contiguous("out", out)


def check_own_memory(out: Tensor, operands: dict[str, Tensor | None]) -> None:
    """Raise ValueError unless `out` starts at a multiple of 16 bytes and shares no memory with an operand."""
    check_address("out", out)
    begin, end = _span(out)
    for name, value in operands.items():
        if value is not None:
            first, last = _span(value)
            if begin < last and first < end:
                raise ValueError(f"out: expected memory of its own, got a tensor that overlaps {name}")


def overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether the memory ranges of two tensors, from first to last byte, overlap."""
    begin, end = _span(one)
    other_begin, other_end = _span(other)
    return begin < other_end and other_begin < end


def row_major(data: Tensor) -> Tensor:
    """Return ``data`` (R, K) in the layout that kernels load: contiguous rows that start at multiples of 16 bytes.

    If ``data`` has another layout, the result is a copy.
    """
    row, column = data.stride()
    if column == 1 and row >= data.shape[1] and not row * data.itemsize % 16 and not data.data_ptr() % 16:
        return data
    return torch.empty(data.shape, dtype=data.dtype, device=data.device).copy_(data)


def aligned(x: Tensor) -> Tensor:
    """Return ``x``, or a copy if it is not contiguous or does not start at a multiple of 16 bytes."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def describe(value: object) -> str:
    """Describe a value in one line, for an error message."""
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)} on {value.device}"
    return f"{type(value).__name__} {' '.join(repr(value).split()):.60}"


def _span(value: Tensor) -> tuple[int, int]:
    """Return the address of the first byte of a tensor, and the address past its last byte."""
    begin = value.data_ptr()
    if value.is_contiguous():
        return begin, begin + value.nbytes
    strides = value.stride()
    last = sum(map(operator.mul, value.shape, strides)) - sum(strides)
    return begin, begin + (last + 1) * value.itemsize
