"""The product of adapters that no kernel of ours has, from ranks to rows before dropout's mask.

Operands are bfloat16, sums float32, results rounded to bfloat16. Groups are the experts' rows, one after the other: on
a GPU by PyTorch's grouped matrix product, which nothing waits for; elsewhere in a loop that defines the result.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8moe.runtime.backend import use_cuda
from fp8moe.runtime.operator import define


def grouped(a: Tensor, b: Tensor, groups: Tensor) -> Tensor:
    """``a[rows of e] @ b[e]``: a (R, K), b (E, K, N), groups (E + 1,) -> (R, N). Rows of no group are any values.

    bfloat16, K and N multiples of 8.
    """
    return torch.ops.fp8moe.adapter_product(a, b, groups)


def _grouped(a: Tensor, b: Tensor, groups: Tensor) -> Tensor:
    if len(a) and use_cuda(a):
        return F.grouped_mm(a, b, offs=groups[1:])
    out = a.new_zeros((a.shape[0], b.shape[2]))
    offsets = groups.tolist()
    with torch.autocast(a.device.type, enabled=False):
        for start, end, matrix in zip(offsets, offsets[1:], b, strict=False):
            out[start:end] = (a[start:end].float() @ matrix.float()).bfloat16()
    return out


define(
    "adapter_product(Tensor a, Tensor b, Tensor groups) -> Tensor",
    _grouped,
    lambda a, b, groups: a.new_empty((a.shape[0], b.shape[2])),
)
