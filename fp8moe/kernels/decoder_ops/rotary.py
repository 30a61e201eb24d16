"""``rotary``: RMSNorm and rotary embedding of query and key heads; then keys and values are written to a KV cache."""

import ctypes
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from fp8moe.kernels.decoder_ops import fp8_cache
from fp8moe.kernels.decoder_ops.rms_norm import normalized
from fp8moe.quant.formats import FP8Tensor, ceil_div
from fp8moe.quant.quantize import quantizer_defines
from fp8moe.runtime import autograd
from fp8moe.runtime.checks import (
    FLOATING,
    aligned,
    check_address,
    check_device,
    check_dtype,
    check_like,
    check_tensor,
)
from fp8moe.runtime.jit import KernelSpec, load
from fp8moe.runtime.launch import PointerLauncher, planned
from fp8moe.runtime.operator import Written, operator
from fp8moe.runtime.sm90 import WARP

MAX_HEAD = 256
MULTIPLE = 16  # must divide the number of rotated values: a lane holds 8 values of the first or of the second half
_WARPS = 4  # warps of a thread block
_VECTOR_BYTES = 16
_MANY_ROWS = 256
# The number of heads that each group of HEAD_LANES lanes handles, by whether there are at least _MANY_ROWS rows. With
# fewer rows, one head for each group spreads the work over more warps.
_AT_ONCE = {False: 1, True: 4}


class NewTokens(NamedTuple):
    """Keys and values of new tokens, not yet in the cache, and the operands of their norms and rotation.

    k, v: (B, T, key heads, D), the heads of a token contiguous in memory, such as views of a projection's result.
    cos, sin: (1 or B, T, R), R <= D: the first R values of a head are rotated, pairing the first half with the second.
    q_weight, k_weight: (D,), weights of the RMSNorm of heads, both or neither; eps: added to the mean of the squares.
    """

    k: Tensor
    v: Tensor
    cos: Tensor
    sin: Tensor
    q_weight: Tensor | None = None
    k_weight: Tensor | None = None
    eps: float = 0.0


def rotary(
    q: Tensor,
    new: NewTokens,
    keys: Tensor | FP8Tensor,
    values: Tensor | FP8Tensor,
    *,
    columns: Tensor | None = None,
) -> Tensor:
    """Apply RMSNorm, if `new` has weights for it, and rotary embedding to each head of q and k; write k, v to a cache.

    q: (B, T, heads, D) bfloat16, float16 or float32, laid out like k. new: tensors in the dtype of q.
    keys, values: the cache, (B, key heads, L, D) in the dtype of q, contiguous; written in place. Or FP8Tensors of
        float8_e4m3fn data and float32 scale (B, key heads, L, 1): then heads are quantized as they are written, each
        with one scale. This needs q in 16 bits, and D a multiple of 16.
    columns: (B,) int64, the position in L of each sequence's first token. None: all positions start at 0. Tokens whose
        position is outside of [0, L) are not written.
    Returns the queries (B, T, heads, D), contiguous. Each step rounds to the dtype, as separate PyTorch operations do.

    Rotary embedding: RoFormer, arXiv:2104.09864, in the form of GPT-NeoX. Norms of heads: arXiv:2302.05442, section 2.
    There is no backward: calling it raises RuntimeError.

    Raises TypeError for a wrong dtype, ValueError for a wrong shape or device, and for sizes where `serves` is False.
    """
    k, v, cos, sin, q_weight, k_weight, eps = new
    given = {"q": q, "k": k, "v": v, "cos": cos, "sin": sin}
    for name, value in given.items():
        check_tensor(name, value)
    fp8_cache.check_tensors(keys, values)
    (keys, key_scales), (values, value_scales) = map(fp8_cache.parts, (keys, values))
    options = columns, q_weight, k_weight, float(eps), key_scales, value_scales
    return autograd.run(_op, "fp8moe.kernels.decoder_ops.rotary", *given.values(), keys, values, *options)


def serves(size: int, rotated: int) -> bool:
    """Return whether there is a kernel for heads of `size` values, the first `rotated` of which are rotated."""
    return not size % 8 and size <= MAX_HEAD and 0 < rotated <= size and not rotated % MULTIPLE


class RotaryOperands(NamedTuple):
    """Arguments of the operator `rotary`."""

    q: Tensor
    k: Tensor
    v: Tensor
    cos: Tensor
    sin: Tensor
    keys: Written
    values: Annotated[Tensor, "Tensor(b!)"]
    columns: Tensor | None
    q_weight: Tensor | None
    k_weight: Tensor | None
    eps: float
    key_scales: Annotated[Tensor | None, "Tensor(c!)?"] = None
    value_scales: Annotated[Tensor | None, "Tensor(d!)?"] = None


class RotaryHeads(NamedTuple):
    """Numbers of query heads, key heads, values per head and rotated values per head.

    norm: whether to normalize. fp8: whether the cache is in FP8.
    """

    queries: int
    keys: int
    size: int
    rotated: int
    norm: bool
    fp8: bool = False

    def lanes(self, dtype: torch.dtype) -> tuple[int, int]:
        """Return the number of lanes that share a head, a power of two, and the number of 16-byte vectors per lane."""
        nbytes = self.size * dtype.itemsize
        vectors = ceil_div(nbytes, _VECTOR_BYTES * WARP)
        lanes = ceil_div(nbytes, _VECTOR_BYTES * vectors)
        return 1 << (lanes - 1).bit_length(), vectors


class _RotaryArguments(ctypes.Structure):
    _pointers_ = 13
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("q", "k", "v", "cos", "sin", "q_weight", "k_weight")),
        *((name, ctypes.c_int64) for name in ("query", "keys", "values", "columns", "key_scales", "value_scales")),
        *((name, ctypes.c_int64) for name in ("q_stride", "k_stride", "v_stride", "length")),
        *((name, ctypes.c_uint32) for name in ("batch", "tokens", "one_table")),
        ("eps", ctypes.c_float),
    )


def kernel_spec(dtype: torch.dtype, heads: RotaryHeads, many: bool) -> KernelSpec:
    """Return the kernel for heads of `dtype`; many: there are at least _MANY_ROWS rows (tokens of all sequences)."""
    lanes, vectors = heads.lanes(dtype)
    sizes = ("HEADS", heads.queries), ("KEY_HEADS", heads.keys), ("SIZE", heads.size), ("ROTATED", heads.rotated)
    work = ("NORM", int(heads.norm)), ("WARPS", _WARPS), ("AT_ONCE", _AT_ONCE[many]), ("HEAD_LANES", lanes)
    bytes_of = ("VECTORS", vectors), ("ARGUMENTS_BYTES", ctypes.sizeof(_RotaryArguments))
    defines = (*quantizer_defines(dtype), ("FP8_CACHE", int(heads.fp8)), *sizes, *work, *bytes_of)
    return KernelSpec("rotary.cu", "rotary", defines)


@planned
def launcher(device_index: int, operands: RotaryOperands) -> PointerLauncher:
    """Return the launcher, to be called with the tensors that the first 13 fields of `_RotaryArguments` name.

    query: the result, rotated q.
    """
    q, k, v, cos, _, keys, *_ = operands
    batch, tokens, queries, size = q.shape
    key_heads, length = keys.shape[1:3]
    row = 1 if tokens > 1 else 0  # dimension of q, k and v whose stride is the distance between consecutive tokens
    arguments = _RotaryArguments(
        q_stride=q.stride(row),
        k_stride=k.stride(row),
        v_stride=v.stride(row),
        length=length,
        batch=batch,
        tokens=tokens,
        one_table=cos.shape[0] == 1,
        eps=operands.eps,
    )
    fp8 = operands.key_scales is not None
    heads = RotaryHeads(queries, key_heads, size, cos.shape[2], operands.q_weight is not None, fp8)
    many = batch * tokens >= _MANY_ROWS
    heads_of_warp = _AT_ONCE[many] * WARP // heads.lanes(q.dtype)[0]
    warps = batch * tokens * ceil_div(queries + 2 * key_heads, heads_of_warp)
    spec, grid = kernel_spec(q.dtype, heads, many), ceil_div(warps, _WARPS)
    return PointerLauncher(load(spec), grid=grid, block=_WARPS * WARP, pdl=True, args=(arguments,))


def _check(operands: RotaryOperands) -> None:
    q, k, v, cos, sin, keys, values, columns, q_weight, k_weight, _, *scales = operands
    check_dtype("q", q, *FLOATING)
    if q.dim() != 4 or k.dim() != 4:
        raise ValueError(f"q: expected shape (B, T, heads, D), got {tuple(q.shape)} with k {tuple(k.shape)}")
    batch, tokens, heads, size = q.shape
    key_heads = k.shape[2]
    if not key_heads or heads % key_heads:
        raise ValueError(f"q: expected a multiple of the {key_heads} key heads, got {heads} heads")
    like = (q.dtype,)
    for name, value in (("k", k), ("v", v)):
        check_like(name, value, like, (batch, tokens, key_heads, size), q.device, "q")
    rotated = check_tables(cos, sin, q, tokens)
    if not serves(size, rotated):
        raise ValueError(
            f"q: expected heads of a multiple of 8 up to {MAX_HEAD} values, of which a multiple of {MULTIPLE} are "
            f"rotated, got {size} and {rotated}"
        )
    length = keys.shape[2] if keys.dim() == 4 else 0
    fp8_cache.check_cache(keys, values, *scales, q, (batch, key_heads, length, size))
    if columns is not None:
        check_like("columns", columns, (torch.int64,), (batch,), q.device, "q")
    check_head_norms(q_weight, k_weight, q)


def check_tables(cos: Tensor, sin: Tensor, q: Tensor, *tokens: int) -> int:
    """Check that cos and sin have the shape (1 or B, *tokens, R), and that dtype and device are those of q; return R.

    q: (B, ...).
    """
    batch, rotated = q.shape[0], cos.shape[-1] if cos.dim() == len(tokens) + 2 else 0
    for name, value in (("cos", cos), ("sin", sin)):
        check_dtype(name, value, q.dtype)
        if value.shape[:1] not in ((1,), (batch,)) or value.shape[1:] != (*tokens, rotated):
            expected = ", ".join(map(str, (f"1 or {batch}", *tokens, "R")))
            raise ValueError(f"{name}: expected shape ({expected}), got {tuple(value.shape)}")
        check_device(name, value, q.device, "q")
    if cos.shape != sin.shape:
        raise ValueError(f"sin: expected shape {tuple(cos.shape)} like cos, got {tuple(sin.shape)}")
    return rotated


def check_head_norms(q_weight: Tensor | None, k_weight: Tensor | None, q: Tensor) -> None:
    """Check the weights of the RMSNorm of heads: either both are given or neither."""
    if (q_weight is None) != (k_weight is None):
        raise ValueError("q_weight: expected it with k_weight, or neither")
    if q_weight is not None:
        check_like("q_weight", q_weight, (q.dtype,), q.shape[-1:], q.device, "q")
        check_like("k_weight", k_weight, (q.dtype,), q.shape[-1:], q.device, "q")


def _launch(operands: RotaryOperands) -> Tensor:
    query = _empty(operands)
    q, k, v, cos, sin, keys, values, *others, _, key_scales, value_scales = operands
    if not (q.numel() or k.numel()):
        return query
    check_address("keys", keys)
    check_address("values", values)
    q, k, v, cos, sin = _rows(q), _rows(k), _rows(v), aligned(cos), aligned(sin)
    columns, q_weight, k_weight = (x if x is None else aligned(x) for x in others)
    launch = launcher(q.get_device(), operands._replace(q=q, k=k, v=v, cos=cos, sin=sin))
    launch(q, k, v, cos, sin, q_weight, k_weight, query, keys, values, columns, key_scales, value_scales)
    return query


def _rows(x: Tensor) -> Tensor:
    """Return x (B, T, heads, D) itself if tokens are evenly spaced, contiguous and 16-byte aligned, or else a copy."""
    batch, tokens, heads, size = x.shape
    sequence, token, head, value = x.stride()
    even = batch == 1 or tokens == 1 or sequence == tokens * token
    pitch = token if tokens > 1 else sequence
    whole = (heads == 1 or head == size) and value == 1 and not (pitch * x.itemsize % 16 or x.data_ptr() % 16)
    return x if even and whole else aligned(x.contiguous())


def _empty(operands: RotaryOperands) -> Tensor:
    batch, tokens, heads, size = operands.q.shape
    return operands.q.new_empty((batch, tokens, heads, size))


def reference(operands: RotaryOperands) -> Tensor:
    q, k, v, cos, sin, keys, values, columns, q_weight, k_weight, eps, *scales = operands
    if q_weight is not None:
        q, k = normalized(q, q_weight, eps), normalized(k, k_weight, eps)
    for cache, scale, x in zip((keys, values), scales, (rotated(k, cos, sin), v), strict=True):
        if scale is None:
            write(cache, x, columns)
        else:
            for target, part in zip((cache, scale), fp8_cache.quantized(x), strict=True):
                write(target, part, columns)
    return rotated(q, cos, sin).contiguous()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first R values of each head of x (B, T, heads, D) by cos and sin (1 or B, T, R)."""
    size = cos.shape[-1]
    part, rest = x[..., :size], x[..., size:]
    low, high = part.chunk(2, dim=-1)
    turned = part * cos[:, :, None] + torch.cat([-high, low], dim=-1) * sin[:, :, None]
    return torch.cat([turned, rest], dim=-1)


def write(cache: Tensor, x: Tensor, columns: Tensor | None) -> None:
    """Write x (B, T, heads, D) to the cache (B, heads, L, D): token t of sequence b to position columns[b] + t.

    columns: (B,) int64; None means 0 for every sequence. Positions outside of [0, L) are not written.
    """
    batch, tokens = x.shape[:2]
    first = torch.zeros(batch, dtype=torch.int64, device=x.device) if columns is None else columns
    places = first[:, None] + torch.arange(tokens, device=x.device)
    sequence, token = ((places >= 0) & (places < cache.shape[2])).nonzero(as_tuple=True)
    cache[sequence, :, places[sequence, token]] = x[sequence, token]


_op = operator("rotary -> Tensor", check=_check, cuda=_launch, reference=reference, fake=_empty, forward_only=True)
