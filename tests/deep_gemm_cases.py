"""Operands in DeepGEMM's layouts, for tests of the drop-in on the CPU and on a GPU."""

from itertools import accumulate

import torch

from fp8moe.quant.formats import align, ceil_div
from fp8moe.quant.quantize import dequantize, quantize_128x1


def by_rows(sizes, order=None, *, alignment=128, behind=0, device="cpu"):
    """The group of each row (M,) int32, groups one after the other in this order, each padded with -1 to the alignment.

    behind: rows of no group at the end. Returns it and each group's rows, as a slice.
    """
    rows = []
    slices = [slice(0, 0)] * len(sizes)
    for group in order or range(len(sizes)):
        slices[group] = slice(len(rows), len(rows) + sizes[group])
        rows += [group] * sizes[group] + [-1] * (-sizes[group] % alignment)
    return torch.tensor(rows + [-1] * behind, dtype=torch.int32, device=device), slices


def by_ends(sizes, *, alignment=128, device="cpu"):
    """Where each group ends (E,) int32, each at the next multiple of the alignment; and each group's rows."""
    slices, end = [], 0
    for size in sizes:
        begin = align(end, alignment)
        end = begin + size
        slices.append(slice(begin, end))
    return torch.tensor([rows.stop for rows in slices], dtype=torch.int32, device=device), slices


def flat_groups(rows, sizes, seed=0, *, device="cpu"):
    """Groups along K one behind the other: data (rows * K,), scale (rows, K/128); and the values (rows, K), float64."""
    k = sum(sizes)
    generator = torch.Generator(device).manual_seed(seed)
    scale = torch.rand(1, rows, device=device, generator=generator).mul(4).exp()
    quantized = quantize_128x1(torch.randn(k, rows, device=device, generator=generator) * scale)
    bounds = list(accumulate(sizes, initial=0))
    parts = [quantized.data[:, i:j].reshape(-1) for i, j in zip(bounds, bounds[1:], strict=False)]
    flat = torch.cat([part.view(torch.uint8) for part in parts]).view(torch.float8_e4m3fn)
    return (flat, quantized.scale), dequantize(quantized, dtype=torch.float64)


def along_k(rows, sizes, form, seed=0, *, device="cpu"):
    """Groups of any size along K in the psum layout: an operand of form "nt" or "tn", and each group's values, float64.

    Zeros fill each group up to the next multiple of 128.
    """
    _, slices = by_ends(sizes)
    k = align(slices[-1].stop, 128)
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.zeros(k, rows, device=device)
    for group in slices:
        x[group] = torch.randn(group.stop - group.start, rows, device=device, generator=generator)
    data, scale = quantized = quantize_128x1(x)
    values = dequantize(quantized, dtype=torch.float64)
    parts = [values[:, group] for group in slices]
    if form == "tn":
        return (data.t(), scale.t()), parts
    padded = data.view(torch.uint8).split([align(size, 128) for size in sizes], dim=1)
    flat = torch.cat([part.reshape(-1) for part in padded]).view(torch.float8_e4m3fn)
    return (flat, scale), parts


def by_group(a, b, sizes):
    """The product in float64 of each group of columns of a and b."""
    ends = list(accumulate(sizes, initial=0))
    return torch.stack([a[:, i:j] @ b[:, i:j].T for i, j in zip(ends, ends[1:], strict=False)])


def packed(scale):
    """Scales that are powers of two as DeepGEMM packs them: int32, four exponents each."""
    words = torch.zeros(*scale.shape[:-1], ceil_div(scale.shape[-1], 4), dtype=torch.int64, device=scale.device)
    exponents = (scale.log2() + 127).long()
    for block in range(scale.shape[-1]):
        words[..., block // 4] |= exponents[..., block] << 8 * (block % 4)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()
