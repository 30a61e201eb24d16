"""Reference quantizers in plain PyTorch, on any device: they define what the CUDA kernels must return, bit for bit.

Per block: ``scale = max(amax, 1e-12) / 448`` and ``data = e4m3(x / scale)``, both quotients correctly rounded float32,
the cast saturating and to nearest even. NaN and infinity reach the scale of their block and no other block: a NaN makes
the whole block NaN, an infinity makes the scale infinite, so that ``data * scale`` is NaN throughout.
"""

import torch
import torch.nn.functional as F

from fp8moe.quant.formats import BLOCK, FP8_MAX, SCALE_FLOOR, ceil_div, empty_mn_major


def quantize_1x128(x: torch.Tensor, ue8m0: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """x (M, K) -> data (M, K), MN-major scale (M, ceil(K/128))."""
    rows, k = x.shape
    k_blocks = ceil_div(k, BLOCK)
    blocks = _pad(x.float(), rows, k_blocks * BLOCK).view(rows, k_blocks, BLOCK)
    scale = block_scale(blocks.abs().amax(-1), ue8m0)
    data = _cast(blocks / scale[..., None]).view(rows, k_blocks * BLOCK)[:, :k].contiguous()
    return data, empty_mn_major(rows, k_blocks, device=x.device).copy_(scale)


def quantize_128x128(w: torch.Tensor, ue8m0: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """w (E, N, K) -> data (E, N, K), contiguous scale (E, ceil(N/128), ceil(K/128))."""
    experts, n, k = w.shape
    n_blocks, k_blocks = ceil_div(n, BLOCK), ceil_div(k, BLOCK)
    padded = _pad(w.float(), n_blocks * BLOCK, k_blocks * BLOCK)
    blocks = padded.view(experts, n_blocks, BLOCK, k_blocks, BLOCK)
    scale = block_scale(blocks.abs().amax((-3, -1)), ue8m0)
    data = _cast(blocks / scale[:, :, None, :, None]).view_as(padded)[:, :n, :k].contiguous()
    return data, scale


def block_scale(amax: torch.Tensor, ue8m0: bool) -> torch.Tensor:
    """Scale of blocks whose largest magnitudes are ``amax`` (float32). Every NaN comes out as 0x7fc00000."""
    # By a tensor: PyTorch divides by a number as a multiplication with its reciprocal on a GPU.
    scale = amax.clamp(min=SCALE_FLOOR) / amax.new_tensor(FP8_MAX)
    if ue8m0:
        scale = up_to_power_of_two(scale)
    return torch.where(amax.isnan(), torch.nan, scale)


def up_to_power_of_two(scale: torch.Tensor) -> torch.Tensor:
    """Positive float32 values rounded up to powers of two."""
    # Adding the full mantissa carries into the exponent unless the mantissa was zero.
    return ((scale.view(torch.int32) + 0x7FFFFF) & ~0x7FFFFF).view(torch.float32)


def _pad(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Zeros after the last row and column; contiguous."""
    return F.pad(x, (0, columns - x.shape[-1], 0, rows - x.shape[-2])).contiguous()


def _cast(quotient: torch.Tensor) -> torch.Tensor:
    """Saturating cast to E4M3. Every NaN becomes the positive one (0x7f), as it does in the GPU's instruction."""
    saturated = quotient.clamp(-FP8_MAX, FP8_MAX)
    return torch.where(saturated.isnan(), torch.nan, saturated).to(torch.float8_e4m3fn)
