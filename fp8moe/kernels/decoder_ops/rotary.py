"""Heads of new tokens, from the projections to the attention: ``rotary`` and its operator ``fp8moe::rotary``."""

import torch
from torch import Tensor

from fp8moe.kernels.decoder_ops import rotary_plan, rotary_reference
from fp8moe.runtime import autograd
from fp8moe.runtime.backend import use_cuda
from fp8moe.runtime.checks import FLOATING, check_device, check_dtype, check_int, check_like, check_tensor
from fp8moe.runtime.operator import define

MAX_HEAD = 256
MULTIPLE = 16  # of rotated values: a lane has 8 of one half


def rotary(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    columns: Tensor | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
    copies: int = 1,
) -> Tensor:
    """RMSNorm of the heads of q and k, if they have weights, and rotary embedding; k and v then go to a cache.

    q: (B, T, heads, D) bfloat16, float16 or float32. k, v: (B, T, key heads, D) of its dtype. Last dimension
        contiguous, heads one after the other: views of a projection's result.
    cos, sin: (1 or B, T, R) of its dtype, R <= D: the first R values of a head are rotated, half against half.
    keys, values: (B, key heads, L, D) of its dtype, contiguous: written in place.
    columns: (B,) int64, the place in L of each sequence's first token; None: 0. A place outside of [0, L) is not
        written.
    q_weight, k_weight: (D,) of its dtype, both or neither. eps: added to the mean of the squares.
    copies: of the queries that share a key head, one after the other: as many as there are parts of the keys that they
        are to attend to.
    Returns the queries (B, T, copies * heads, D), contiguous. Each operation rounds to the dtype, as PyTorch does
        between them.

    Rotary embedding: RoFormer, arXiv:2104.09864, in the form of GPT-NeoX. Norms of heads: arXiv:2302.05442, section 2.
    There is no backward: calling it raises RuntimeError.

    Raises TypeError for a wrong dtype, ValueError for a wrong shape or device, and for sizes that `serves` refuses.
    """
    given = {"q": q, "k": k, "v": v, "cos": cos, "sin": sin, "keys": keys, "values": values}
    for name, value in given.items():
        check_tensor(name, value)
    check_int("copies", copies)
    return autograd.run(
        _rotary_op,
        "fp8moe.kernels.decoder_ops.rotary",
        *given.values(),
        columns,
        q_weight,
        k_weight,
        float(eps),
        copies,
    )


def serves(size: int, rotated: int) -> bool:
    """Whether there is a kernel for heads of `size` values of which `rotated` are rotated."""
    return not size % 8 and size <= MAX_HEAD and 0 < rotated <= size and not rotated % MULTIPLE


def _check(q, k, v, cos, sin, keys, values, columns, q_weight, k_weight, copies) -> None:
    check_dtype("q", q, *FLOATING)
    if q.dim() != 4 or k.dim() != 4:
        raise ValueError(f"q: expected shape (B, T, heads, D), got {tuple(q.shape)} with k {tuple(k.shape)}")
    batch, tokens, heads, size = q.shape
    key_heads = k.shape[2]
    if not key_heads or heads % key_heads:
        raise ValueError(f"q: expected a multiple of the {key_heads} key heads, got {heads} heads")
    if copies < 1:
        raise ValueError(f"copies: expected at least 1, got {copies}")
    like = (q.dtype,)
    for name, value in (("k", k), ("v", v)):
        check_like(name, value, like, (batch, tokens, key_heads, size), q.device, "q")
    rotated = cos.shape[-1] if cos.dim() == 3 else 0
    for name, value in (("cos", cos), ("sin", sin)):
        check_dtype(name, value, *like)
        if value.dim() != 3 or value.shape[0] not in (1, batch) or value.shape[1:] != (tokens, rotated):
            raise ValueError(f"{name}: expected shape (1 or {batch}, {tokens}, R), got {tuple(value.shape)}")
        check_device(name, value, q.device, "q")
    if cos.shape != sin.shape:
        raise ValueError(f"sin: expected shape {tuple(cos.shape)} like cos, got {tuple(sin.shape)}")
    if not serves(size, rotated):
        raise ValueError(
            f"q: expected heads of a multiple of 8 up to {MAX_HEAD} values, of which a multiple of {MULTIPLE} are "
            f"rotated, got {size} and {rotated}"
        )
    length = keys.shape[2] if keys.dim() == 4 else 0
    for name, value in (("keys", keys), ("values", values)):
        check_like(name, value, like, (batch, key_heads, length, size), q.device, "q")
        if not value.is_contiguous():
            raise ValueError(f"{name}: expected a contiguous tensor, got strides {value.stride()}")
    if columns is not None:
        check_like("columns", columns, (torch.int64,), (batch,), q.device, "q")
    if (q_weight is None) != (k_weight is None):
        raise ValueError("q_weight: expected it with k_weight, or neither")
    if q_weight is not None:
        check_like("q_weight", q_weight, like, (size,), q.device, "q")
        check_like("k_weight", k_weight, like, (size,), q.device, "q")


def _rotary(*arguments) -> Tensor:
    *operands, eps, copies = arguments
    _check(*operands, copies)
    backend = rotary_plan if use_cuda(operands[0]) else rotary_reference
    return backend.rotary(*operands, eps, copies)


def _rotary_fake(*arguments) -> Tensor:
    *operands, _, copies = arguments
    _check(*operands, copies)
    batch, tokens, heads, size = operands[0].shape
    return operands[0].new_empty((batch, tokens, copies * heads, size))


_rotary_op = define(
    "rotary(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor(a!) keys, Tensor(b!) values, Tensor? columns, "
    "Tensor? q_weight, Tensor? k_weight, float eps, int copies) -> Tensor",
    _rotary,
    _rotary_fake,
    forward_only=True,
)
