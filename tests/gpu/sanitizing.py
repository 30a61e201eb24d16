"""What cases for compute-sanitizer have in common: operands that are drawn on the CPU, calls on both devices, errors.

The only kernels that run on the GPU are those of this package. A case is a function, its arguments, and the largest
result that is correct; functions called `errors` return the number of values that have not the bits of the reference.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import fp8moe
from benchmarks.operands import exact, rounded_error
from fp8moe.kernels.gemm.reference import group_rows

GEMM_ERROR = 3e-4  # against float64 over the quantized operands, beyond the rounding of the result
E4M3_ERROR = 4e-2
NAN, INF = float("nan"), float("inf")


def on_gpu(values: Any) -> Any:
    return tree_map(lambda value: value.cuda() if isinstance(value, Tensor) else value, values)


def on_cpu(values: Any) -> Any:
    return tree_map(lambda value: value.cpu() if isinstance(value, Tensor) else value, values)


def random_rows(*shape: int) -> fp8moe.FP8Tensor:
    return fp8moe.quantize_1x128(torch.randn(shape, dtype=torch.bfloat16).cuda())


def random_experts(*shape: int, std: float = 1.0) -> fp8moe.FP8Tensor:
    return fp8moe.quantize_128x128((std * torch.randn(shape)).bfloat16().cuda())


def both(call: Callable, *operands: Any) -> list[tuple[Tensor, Tensor]]:
    """The tensors that the call gives for operands on the GPU, each with that for them here."""
    results = [on_cpu(call(*on_gpu(operands))), call(*operands)]
    got, expected = ([leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)] for result in results)
    return list(zip(got, expected, strict=True))


def differing(pairs: list[tuple[Tensor, Tensor]]) -> int:
    """Values that are not equal, codes by their bits."""
    raw = ((value.view(torch.uint8) if value.itemsize == 1 else value for value in pair) for pair in pairs)
    return sum(int((got != expected).sum()) for got, expected in raw)


def product(a: fp8moe.FP8Tensor, b: fp8moe.FP8Tensor | fp8moe.PackedTensor) -> Tensor:
    """In float64, on the CPU."""
    b = on_cpu(b)
    weights = fp8moe.dequantize(b, dtype=torch.float64) if isinstance(b, fp8moe.PackedTensor) else exact(b)
    return exact(on_cpu(a)) @ weights.T


def groups_error(
    a: fp8moe.FP8Tensor,
    b: fp8moe.FP8Tensor | fp8moe.PackedTensor,
    groups: Tensor,
    write: Callable[[Tensor], Any],
    dtype: torch.dtype = torch.bfloat16,
    max_m: int | None = None,
    added: Callable[[int, slice], Tensor | int] = lambda group, rows: 0,
) -> float:
    """Of what is written to a result (rows, N) full of NaN; infinite unless rows of no group stay as they are.

    added: to the product of a group, for these rows.
    """
    out = torch.full((len(a.data), b.data.shape[1]), NAN, dtype=dtype).cuda()
    write(out)
    out, expected = out.cpu(), torch.full(out.shape, NAN, dtype=torch.float64)
    for group, rows in group_rows(groups, len(out), max_m):
        x, w = (t._replace(data=t.data[i], scale=t.scale[i]) for t, i in ((a, rows), (b, group)))
        expected[rows] = product(x, w) + added(group, rows)
    inside = ~expected.isnan()
    return rounded_error(out[inside], expected[inside]) if out[~inside].isnan().all() else INF
