"""Products of adapters: operands rounded to bfloat16, sums in float32, results rounded to bfloat16.

Groups are the experts' rows, one after the other: on a GPU by PyTorch's grouped matrix product, which nothing waits
for; elsewhere in a loop that defines the result.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8moe.runtime.backend import use_cuda
from fp8moe.runtime.operators import define

RANK_MULTIPLE = 16  # of a tensor core's product in bfloat16


def product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` of matrices."""
    a, b = a.bfloat16(), b.bfloat16()
    return a @ b if use_cuda(a) else (a.float() @ b.float()).bfloat16()


def grouped(a: Tensor, b: Tensor, groups: Tensor) -> Tensor:
    """``a[rows of e] @ b[e]``: a (R, K), b (E, K, N), groups (E + 1,) -> (R, N). Rows of no group are any values."""
    return torch.ops.fp8moe.adapter_product(a, b, groups)


def grouped_outer(a: Tensor, b: Tensor, groups: Tensor) -> Tensor:
    """``a[rows of e].T @ b[rows of e]``: a (R, M), b (R, N) -> (E, M, N), zeros for a group without rows."""
    return torch.ops.fp8moe.adapter_outer_product(a, b, groups)


def _grouped(a: Tensor, b: Tensor, groups: Tensor) -> Tensor:
    if _by_kernel(a):
        return F.grouped_mm(a, b, offs=groups[1:])
    out = a.new_zeros((a.shape[0], b.shape[2]))
    for (start, end), matrix in zip(_ranges(groups), b, strict=True):
        out[start:end] = product(a[start:end], matrix)
    return out


def _grouped_outer(a: Tensor, b: Tensor, groups: Tensor) -> Tensor:
    if _by_kernel(a):
        empty = groups[1:] == groups[:-1]
        return F.grouped_mm(a.T, b, offs=groups[1:]).masked_fill_(empty[:, None, None], 0)
    return torch.stack([product(a[start:end].T, b[start:end]) for start, end in _ranges(groups)])


def _by_kernel(a: Tensor) -> bool:
    return bool(len(a)) and use_cuda(a)


def _ranges(groups: Tensor) -> list[tuple[int, int]]:
    offsets = groups.tolist()
    return list(zip(offsets, offsets[1:], strict=False))


define(
    "adapter_product(Tensor a, Tensor b, Tensor groups) -> Tensor",
    _grouped,
    lambda a, b, groups: a.new_empty((a.shape[0], b.shape[2])),
)
define(
    "adapter_outer_product(Tensor a, Tensor b, Tensor groups) -> Tensor",
    _grouped_outer,
    lambda a, b, groups: a.new_empty((groups.shape[0] - 1, a.shape[1], b.shape[1])),
)
