"""Checks of quantized operands, and `mn_major`, which brings activation scales into the layout that kernels load."""

import torch
from torch import Tensor

from fp8moe.quant.formats import (
    BLOCK,
    SCALE_FORMATS,
    FP8Tensor,
    align,
    ceil_div,
    empty_mn_major,
    has_channel_scales,
    padded_rows,
)
from fp8moe.runtime.checks import check_device, check_dtype, describe

FLOAT8 = (torch.float8_e4m3fn,)  # the dtypes that quantized data may have
FLOAT32 = torch.float32


def fp8_operand(name: str, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the two tensors of an FP8Tensor or of any other (data, scale) pair. Raises TypeError for anything else."""
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise TypeError(f"{name}: expected an FP8Tensor or a (data, scale) pair, got {describe(pair)}")
    data, scale = pair
    if not (isinstance(data, Tensor) and isinstance(scale, Tensor)):
        raise TypeError(f"{name}: expected a pair of tensors, got {describe(data)} and {describe(scale)}")
    return data, scale


def fp8_data(name: str, data: Tensor, dimensions: str) -> torch.Size:
    """Check that `data` is float8 with as many dimensions as the text `dimensions`, such as "(M, K)", lists.

    Returns the shape of `data`.
    """
    check_dtype(name, data, *FLOAT8)
    shape = data.shape
    if len(shape) != dimensions.count(",") + 1:
        raise ValueError(f"{name}: expected shape {dimensions}, got {tuple(shape)}")
    return shape


def check_scale(name: str, value: Tensor, shape: tuple[int, int], device: torch.device) -> None:
    check_dtype(name, value, FLOAT32)
    if value.shape != shape:
        raise ValueError(f"{name}: expected shape {shape}, one scale per quantization block, got {tuple(value.shape)}")
    check_device(name, value, device, "the data")


def check_weight_scale(name: str, weight: FP8Tensor, device: torch.device, projections: int = 1) -> None:
    """Check the block or channel scales of weights (..., N, K). projections: number of matrices stacked along N."""
    data, scale = weight
    if not has_channel_scales(data, scale):
        *lead, n, k = data.shape
        check_scale(name, scale, (*lead, projections * ceil_div(n // projections, BLOCK), ceil_div(k, BLOCK)), device)
        return
    check_scale(name, scale, (*data.shape[:-1], 1), device)


def check_scale_format(scale_format: str) -> None:
    if scale_format not in SCALE_FORMATS:
        raise ValueError(f"scale_format: expected one of {SCALE_FORMATS}, got {scale_format!r}")


def check_no_channels(name: str, weight: FP8Tensor) -> None:
    """Raise ValueError for channel scales: gradients multiply by the transposed weight, which needs block scales."""
    if has_channel_scales(*weight):
        raise ValueError(f"{name}: expected scales of 128x128 blocks for gradients, got one for each output channel")


def check_vector(name: str, value: Tensor, dtype: torch.dtype, length: int | None, device: torch.device) -> None:
    """Check dtype, shape and device of a 1-D tensor. length: its expected length, None for any."""
    check_dtype(name, value, dtype)
    if value.dim() != 1 or (length is not None and value.shape[0] != length):
        raise ValueError(f"{name}: expected shape ({'R' if length is None else length},), got {tuple(value.shape)}")
    check_device(name, value, device, "the rows")


def check_groups(group_offsets: Tensor, rows: int, device: torch.device) -> int:
    """Check `group_offsets` (E + 1,) and return E. Offsets of groups padded to multiples of 128 must fit in int32."""
    check_vector("group_offsets", group_offsets, torch.int32, None, device)
    if group_offsets.shape[0] < 2:
        raise ValueError(f"group_offsets: expected shape (E + 1,) with E >= 1, got {tuple(group_offsets.shape)}")
    groups = group_offsets.shape[0] - 1
    check_padded(rows, groups)
    return groups


def check_padded(rows: int, groups: int) -> None:
    """Raise ValueError if `rows` rows in `groups` groups, each padded to a multiple of 128, may overflow int32."""
    if padded_rows(rows, groups) >= 1 << 31:
        raise ValueError(f"expected fewer than 2**31 rows with every group padded to a multiple of 128, got {rows}")


def mn_major(activation_scale: Tensor, *, of_more_rows: bool = False) -> Tensor:
    """Return ``activation_scale`` (M, K blocks), or a copy if it is not MN-major and 16-byte aligned.

    of_more_rows: accept a larger stride between columns, as in a slice of a tensor with more rows.
    """
    m = activation_scale.shape[0]
    row, column = activation_scale.stride()
    fits = column == align(m, 4) or (of_more_rows and column > m and not column % 4)
    if (row == 1 or m == 1) and fits and not activation_scale.data_ptr() % 16:
        return activation_scale
    return empty_mn_major(activation_scale.shape, device=activation_scale.device).copy_(activation_scale)
