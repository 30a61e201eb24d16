"""Latents in FP8: E4M3 codes of the value, a float32 scale for each 128 of them, and the rest in bfloat16."""

import torch
from torch import Tensor

from fp8moe.kernels.latent.checks import GROUP, coded_bytes
from fp8moe.quant.formats import ceil_div
from fp8moe.quant.quantize import quantize_1x128
from fp8moe.runtime.checks import FLOATING, check_dtype, check_int, check_tensor


def quantize_latents(latents: Tensor, *, value_size: int) -> Tensor:
    """Quantize latents for `latent_attention`; return their bytes, (..., B) uint8.

    latents: (..., R + P) bfloat16, float16 or float32, of which the first R = value_size are the value.
    Returns of each latent R codes as by `quantize_1x128`, their ceil(R / 128) float32 scales, and P bfloat16 values:
    B = R + 4 * ceil(R / 128) + 2 * P bytes, 656 of DeepSeek's. There is no backward.

    Raises TypeError for a wrong type or dtype, ValueError for a value_size out of range or R that is no multiple of 4.
    """
    check_tensor("latents", latents)
    check_dtype("latents", latents, *FLOATING)
    check_int("value_size", value_size)
    width = latents.shape[-1] if latents.dim() else 0
    if not 0 < value_size <= width:
        raise ValueError(f"value_size: expected 1 to {width}, the values of a latent, got {value_size}")
    if value_size % 4:
        raise ValueError(f"value_size: expected a multiple of 4, got {value_size}")
    flat = latents.detach().reshape(-1, width)
    data, scale = quantize_1x128(flat[:, :value_size].contiguous())
    parts = data, scale, flat[:, value_size:].to(torch.bfloat16)
    coded = torch.cat([part.clone(memory_format=torch.contiguous_format).view(torch.uint8) for part in parts], dim=1)
    return coded.view(*latents.shape[:-1], coded_bytes(width, value_size))


def dequantize_latents(coded: Tensor, *, value_size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return latents (..., R + P) for the result of `quantize_latents`."""
    scales = 4 * ceil_div(value_size, GROUP)
    data, scale, rest = coded.split([value_size, scales, coded.shape[-1] - value_size - scales], dim=-1)
    values = data.contiguous().view(torch.float8_e4m3fn).float()
    values = values * scale.contiguous().view(torch.float32).repeat_interleave(GROUP, -1)[..., :value_size]
    return torch.cat([values.to(dtype), rest.contiguous().view(torch.bfloat16).to(dtype)], dim=-1)
