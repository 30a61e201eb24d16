"""Checks of quantized operands, and `mn_major`, which brings activation scales into the layout that kernels load."""

import torch
from torch import Tensor

from fp8moe.quant.arranged import ARRANGED, arrange, projections_of
from fp8moe.quant.formats import (
    BLOCK,
    MX_BLOCK,
    PACKED_FORMATS,
    SCALE_FORMATS,
    FP8Tensor,
    PackedTensor,
    align,
    ceil_div,
    empty_mn_major,
    has_channel_scales,
    is_packed,
    packed_format,
    padded_rows,
    weight_k,
)
from fp8moe.runtime.checks import check_device, check_dtype, check_tensor, describe

FLOAT8 = (torch.float8_e4m3fn,)  # the dtypes that quantized data may have
FLOAT32 = torch.float32
_ARRANGED_DTYPES = tuple(dtype for form in ARRANGED for dtype in PACKED_FORMATS[form].scale_dtypes)


def fp8_operand(name: str, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the two tensors of an FP8Tensor or of any other (data, scale) pair. Raises TypeError for anything else."""
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise TypeError(f"{name}: expected an FP8Tensor or a (data, scale) pair, got {describe(pair)}")
    data, scale = pair
    if not (isinstance(data, Tensor) and isinstance(scale, Tensor)):
        raise TypeError(f"{name}: expected a pair of tensors, got {describe(data)} and {describe(scale)}")
    return data, scale


def weight_operand(
    name: str, weight: PackedTensor | tuple[Tensor, Tensor], projections: int = 1
) -> tuple[Tensor, Tensor]:
    """Return data and scale of weights: a PackedTensor, an FP8Tensor or any other pair of FP8 data and scale.

    NVFP4 is arranged, as one tensor then holds all of its scales. projections: number of matrices stacked along N.
    Raises TypeError for anything else, ValueError for a PackedTensor whose tensors do not fit its format.
    """
    if not isinstance(weight, PackedTensor):
        data, scale = fp8_operand(name, weight)
        if is_packed(data):  # perhaps the bytes of FP8 values
            raise TypeError(f"{name}.data: expected float8_e4m3fn, or uint8 of a PackedTensor, got torch.uint8")
        return data, scale
    check_packed(name, weight)
    if weight.format == "nvfp4":
        weight = arrange(weight, projections)
    return weight.data, weight.scale


def check_packed(name: str, weight: PackedTensor) -> None:
    """Check that the tensors of a PackedTensor have dtypes, shapes and device that fit its format and each other."""
    data, scale, form, tensor_scale = weight
    check_tensor(f"{name}.data", data)
    check_tensor(f"{name}.scale", scale)
    if form not in PACKED_FORMATS:
        raise ValueError(f"{name}.format: expected one of {tuple(PACKED_FORMATS)}, got {form!r}")
    check_dtype(f"{name}.data", data, torch.uint8)
    if data.dim() < 2:
        raise ValueError(f"{name}.data: expected shape (..., N, K/2), got {tuple(data.shape)}")
    _check_k(f"{name}.data", data)
    _check_packed_scale(f"{name}.scale", data, scale, form)
    if form != "nvfp4":
        if tensor_scale is not None:
            raise ValueError(f"{name}.tensor_scale: expected None with {form!r}, got {describe(tensor_scale)}")
        return
    if tensor_scale is None:
        raise ValueError(f"{name}.tensor_scale: expected a tensor with {form!r}, got None")
    check_tensor(f"{name}.tensor_scale", tensor_scale)
    check_dtype(f"{name}.tensor_scale", tensor_scale, FLOAT32)
    *lead, n, _ = data.shape
    if tuple(tensor_scale.shape) not in (tuple(lead), (*lead, n)):
        shapes = f"{tuple(lead)} or {(*lead, n)}"
        raise ValueError(f"{name}.tensor_scale: expected shape {shapes}, got {tuple(tensor_scale.shape)}")
    check_device(f"{name}.tensor_scale", tensor_scale, data.device, "the data")


def weight_data(name: str, data: Tensor, dimensions: str) -> tuple[int, ...]:
    """Check that weights are FP8 or packed data with these dimensions, as `fp8_data` does. Returns (..., N, K)."""
    shape = fp8_data(name, data, dimensions, torch.uint8)
    if not is_packed(data):
        return shape
    _check_k(name, data)
    return *shape[:-1], weight_k(data)


def _check_k(name: str, data: Tensor) -> None:
    k = weight_k(data)
    if k % MX_BLOCK:
        raise ValueError(f"{name}: K must be a multiple of {MX_BLOCK} for weights in four bits, got K = {k}")


def _check_packed_scale(name: str, data: Tensor, scale: Tensor, *formats: str) -> None:
    """Check dtype, shape and device of the scale of packed weights, which may have any of `formats`."""
    check_dtype(name, scale, *(dtype for form in formats for dtype in PACKED_FORMATS[form].scale_dtypes))
    k, groups = weight_k(data), PACKED_FORMATS[packed_format(scale)].groups
    shapes = [(*data.shape[:-1], k // group) for group in groups if k % group == 0]
    if tuple(scale.shape) not in shapes:
        expected, got = " or ".join(map(str, shapes)), tuple(scale.shape)
        raise ValueError(f"{name}: expected shape {expected}, one scale per row and group of K, got {got}")
    check_device(name, scale, data.device, "the data")


def fp8_data(name: str, data: Tensor, dimensions: str, *others: torch.dtype) -> torch.Size:
    """Check that `data` is float8 with as many dimensions as the text `dimensions`, such as "(M, K)", lists.

    others: dtypes that `data` may have instead. Returns the shape of `data`.
    """
    check_dtype(name, data, *FLOAT8, *others)
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
    """Check the scales of weights (..., N, K), of any form that GEMMs take, whose data is on `device`.

    projections: number of matrices stacked along N, each of which has blocks of its own. Scales of MXFP4 may be
    arranged (quant/arranged.py), as `GroupedExperts` keeps them; those of NVFP4 must be.
    """
    data, scale = weight
    if is_packed(data):
        if scale.dtype in _ARRANGED_DTYPES and projections_of(data, scale):
            check_device(name, scale, data.device, "the data")
        else:
            _check_packed_scale(name, data, scale, "mxfp4", "int4")
        return
    if not has_channel_scales(data, scale):
        *lead, n, k = data.shape
        check_scale(name, scale, (*lead, projections * ceil_div(n // projections, BLOCK), ceil_div(k, BLOCK)), device)
        return
    check_scale(name, scale, (*data.shape[:-1], 1), device)


def check_scale_format(scale_format: str) -> None:
    if scale_format not in SCALE_FORMATS:
        raise ValueError(f"scale_format: expected one of {SCALE_FORMATS}, got {scale_format!r}")


def check_block_scales(name: str, weight: FP8Tensor) -> None:
    """Raise ValueError unless a weight is FP8 with block scales: gradients multiply by the transposed weight."""
    if is_packed(weight.data):
        raise ValueError(f"{name}: expected FP8 weights with scales of 128x128 blocks for gradients, got four bits")
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
