"""Operands of the GEMMs and what they give in float64, for tests on the CPU and on a GPU."""

from itertools import accumulate

import torch

from benchmarks.operands import rounded_error
from fp8moe.quant.formats import FP8Tensor
from fp8moe.quant.quantize import dequantize, quantize_1x128, quantize_128x128

GROUPS_ERROR = 3e-4  # beyond what rounding the exact result costs


def uneven(*shape, like, spread, device, generator):
    """Normal values times others of shape `like`, of very different magnitudes: a scale of the wrong block shows."""
    x = torch.randn(shape, device=device, generator=generator)
    return x.mul_(torch.rand(like, device=device, generator=generator).mul(spread).exp())


def operands(m, n, k, seed=0, scale_format="float32", *, spread=6, device="cpu"):
    draw = dict(device=device, generator=torch.Generator(device).manual_seed(seed))
    a = uneven(m, k, like=(m, 1), spread=spread, **draw)
    b = uneven(n, k, like=(1, k), spread=3, **draw)
    return quantize_1x128(a, scale_format=scale_format), quantize_128x128(b, scale_format=scale_format)


def activations(*shape, seed=0, spread=6, device="cpu"):
    generator = torch.Generator(device).manual_seed(seed)
    return quantize_1x128(uneven(*shape, like=(*shape[:-1], 1), spread=spread, device=device, generator=generator))


def weights(experts, n, k, seed=1, *, device="cpu"):
    generator = torch.Generator(device).manual_seed(seed)
    return quantize_128x128(uneven(experts, n, k, like=(experts, 1, k), spread=3, device=device, generator=generator))


def gate_up_weights(experts, size, k, seed=2, *, device="cpu"):
    """Gate and up with blocks of their own."""
    data, scale = weights(2 * experts, size, k, seed, device=device)
    return FP8Tensor(data.view(experts, 2 * size, k), scale.view(experts, -1, scale.shape[-1]))


def random_bytes(*shape, device="cpu"):
    """Finite E4M3 values of every magnitude."""
    data = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
    return data.masked_fill_((data & 0x7F) == 0x7F, 0).view(torch.float8_e4m3fn)


def int32(values, device="cpu"):
    return torch.tensor(values, dtype=torch.int32, device=device)


def offsets(sizes, start=0, *, unit=1, device="cpu"):
    """Of groups of these sizes, in units, one behind the other."""
    return int32([unit * end for end in accumulate(sizes, initial=start)], device)


def exact(a, b, bias=None):
    product = dequantize(a, dtype=torch.float64) @ dequantize(b, dtype=torch.float64).T
    return product if bias is None else product + bias.double()


def exact_along_k(a, b, group_offsets):
    """The product of each group of columns."""
    a, b = dequantize(a, dtype=torch.float64), dequantize(b, dtype=torch.float64)
    ends = group_offsets.tolist()
    return torch.stack([a[:, i:j] @ b[:, i:j].T for i, j in zip(ends, ends[1:], strict=False)])


def check_groups(out, a, b, groups):
    """``out`` (M, N) holds products in the rows of ``groups``, one slice an expert, and NaN in all others."""
    outside = torch.ones(len(out), dtype=torch.bool, device=out.device)
    for expert, rows in enumerate(groups):
        if rows.start < rows.stop:
            outside[rows] = False
            x, w = FP8Tensor(a[0][rows], a[1][rows]), FP8Tensor(b[0][expert], b[1][expert])
            error = rounded_error(out[rows], exact(x, w))
            assert error <= GROUPS_ERROR, (expert, rows, error)
    assert out[outside].isnan().all()
