"""Checks of quantized operands, in the manner of `runtime.checks`, and the layout of scales that the kernels load."""

import torch
from torch import Tensor

from fp8moe.quant.formats import align, empty_mn_major
from fp8moe.runtime.checks import describe

FLOAT8 = torch.float8_e4m3fn
FLOAT32 = torch.float32


def fp8_operand(name: str, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The two tensors of an FP8Tensor or of any other (data, scale) pair."""
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise TypeError(f"{name}: expected an FP8Tensor or a (data, scale) pair, got {describe(pair)}")
    data, scale = pair
    if not (isinstance(data, Tensor) and isinstance(scale, Tensor)):
        raise TypeError(f"{name}: expected a pair of tensors, got {describe(data)} and {describe(scale)}")
    return data, scale


def fp8_matrix(name: str, data: Tensor) -> torch.Size:
    """The shape of a float8_e4m3fn matrix."""
    if data.dtype is not FLOAT8:
        raise TypeError(f"{name}: expected float8_e4m3fn, got {data.dtype}")
    shape = data.shape
    if len(shape) != 2:
        raise ValueError(f"{name}: expected two dimensions, got shape {tuple(shape)}")
    return shape


def fp8_data(name: str, data: Tensor, dimensions: str) -> torch.Size:
    """The shape of a float8_e4m3fn tensor with such dimensions."""
    if data.dtype is not FLOAT8:
        raise TypeError(f"{name}: expected float8_e4m3fn, got {data.dtype}")
    shape = data.shape
    if len(shape) != dimensions.count(",") + 1:
        raise ValueError(f"{name}: expected shape {dimensions}, got {tuple(shape)}")
    return shape


def check_scale(name: str, value: Tensor, shape: tuple[int, int], device: torch.device) -> None:
    if value.dtype is not FLOAT32:
        raise TypeError(f"{name}: expected float32, got {value.dtype}")
    if value.shape != shape:
        raise ValueError(f"{name}: expected shape {shape}, one scale per quantization block, got {tuple(value.shape)}")
    if value.device != device:
        raise ValueError(f"{name}: expected on {device} like the data, got {value.device}")


def mn_major(activation_scale: Tensor) -> Tensor:
    """``activation_scale`` (M, K blocks) MN-major and 16-byte aligned: itself where it lies so, otherwise a copy."""
    m = activation_scale.shape[0]
    row, column = activation_scale.stride()
    if (row == 1 or m == 1) and column == align(m, 4) and not activation_scale.data_ptr() % 16:
        return activation_scale
    return empty_mn_major(*activation_scale.shape, device=activation_scale.device).copy_(activation_scale)
