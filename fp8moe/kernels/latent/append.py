"""``append_latents``: the norm and rotary embedding of new latents, their store to a cache, and rotated queries."""

import ctypes
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from fp8moe.kernels.decoder_ops.rms_norm import normalized
from fp8moe.kernels.decoder_ops.rotary import check_tables, rotated, write
from fp8moe.kernels.latent.checks import coded_bytes
from fp8moe.kernels.latent.fp8_latents import quantize_latents
from fp8moe.kernels.latent.sm90 import VALUE, WIDTH
from fp8moe.quant.formats import ceil_div
from fp8moe.quant.quantize import quantizer_defines
from fp8moe.runtime import autograd
from fp8moe.runtime.checks import FLOATING, aligned, check_address, check_contiguous, check_dtype, check_like
from fp8moe.runtime.jit import KernelSpec, load
from fp8moe.runtime.launch import PointerLauncher, planned
from fp8moe.runtime.operator import Written, operator
from fp8moe.runtime.sm90 import WARP

REST = WIDTH - VALUE
_WARPS = 4  # warps of a thread block
_PARTS = 4  # rotary parts that a warp rotates


class AppendOperands(NamedTuple):
    """Operands of `append_latents`."""

    q: Tensor
    latents: Tensor
    weight: Tensor
    cos: Tensor
    sin: Tensor
    out: Written
    cache: Annotated[Tensor, "Tensor(b!)"]
    columns: Tensor | None
    eps: float
    interleaved: bool

    @property
    def coded(self) -> bool:
        """Whether the cache is in FP8."""
        return self.cache.dtype is torch.uint8


def append_latents(
    q: Tensor,
    latents: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    out: Tensor,
    cache: Tensor,
    *,
    columns: Tensor | None = None,
    eps: float,
    interleaved: bool,
) -> None:
    """Normalize and rotate the latents of new tokens, write them to a cache, and rotate the tokens' queries.

    q: (B, T, heads, P) bfloat16, the rotary parts of queries; P values of a head in a row.
    latents: (B, T, R + P), values and their rotary parts, as they are projected; weight: (R,), of the values' RMSNorm,
        with eps added to the mean of squares. cos, sin: (1 or B, T, P), each angle twice. All in the dtype of q.
    out: (B, T, heads, P), may be q itself: receives the rotated queries.
    cache: (B, L, R + P) in the dtype of q or, in FP8, (B, L, bytes) uint8 as by `quantize_latents`; contiguous.
    columns: (B,) int64, the position in L of each sequence's first token. None: all positions start at 0. Tokens whose
        position is outside of [0, L) are not written.
    interleaved: rotary pairs are values 2 * i and 2 * i + 1, of which the result has all first ones, then all second
        ones; otherwise i and i + P / 2.

    Each step rounds to the dtype, as separate PyTorch operations do. The kernel takes R = 512, P = 64 and bfloat16.
    Method: DeepSeek-V2, arXiv:2405.04434, section 2.1; RoFormer, arXiv:2104.09864. There is no backward: calling it
    raises RuntimeError.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape or device, and both for what the kernel
    does not take.
    """
    autograd.run(_op, "append_latents", *(q, latents, weight, cos, sin, out, cache, columns, float(eps), interleaved))


def serves(q: Tensor, width: int, value_size: int) -> bool:
    """Return whether the backend of q has `append_latents` for latents of these sizes."""
    return not q.is_cuda or ((width, value_size) == (WIDTH, VALUE) and q.dtype is torch.bfloat16)


class _Arguments(ctypes.Structure):
    _pointers_ = 8
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("q", "latents", "weight", "cos", "sin", "out", "cache", "columns")),
        *((name, ctypes.c_int64) for name in ("q_row", "q_head", "latents_row", "out_row", "out_head", "length")),
        *((name, ctypes.c_uint32) for name in ("rows", "tokens", "heads", "one_table")),
        ("eps", ctypes.c_float),
    )


def kernel_spec(codes: bool, interleaved: bool) -> KernelSpec:
    defines = ("WARPS", _WARPS), ("CODES", int(codes)), ("INTERLEAVED", int(interleaved))
    sizes = (("ARGUMENTS_BYTES", ctypes.sizeof(_Arguments)),)
    return KernelSpec("append_latents.cu", "append_latents", (*quantizer_defines(torch.bfloat16), *defines, *sizes))


@planned
def launcher(device_index: int, operands: AppendOperands) -> PointerLauncher:
    """Return the launcher, to be called with the tensors that the first fields of `_Arguments` name."""
    q, latents, _, cos, _, out, cache, *_ = operands
    batch, tokens, heads, _ = q.shape
    row = 1 if tokens > 1 else 0
    arguments = _Arguments(
        q_row=q.stride(row),
        q_head=q.stride(2),
        latents_row=latents.stride(row),
        out_row=out.stride(row),
        out_head=out.stride(2),
        length=cache.shape[1],
        rows=batch * tokens,
        tokens=tokens,
        heads=heads,
        one_table=cos.shape[0] == 1,
        eps=operands.eps,
    )
    units = batch * tokens * (1 + ceil_div(heads + 1, _PARTS))
    kernel = load(kernel_spec(operands.coded, operands.interleaved))
    return PointerLauncher(kernel, grid=ceil_div(units, _WARPS), block=_WARPS * WARP, pdl=True, args=(arguments,))


def _check(operands: AppendOperands) -> None:
    q, latents, weight, cos, sin, out, cache, columns, *_ = operands
    check_dtype("q", q, *FLOATING)
    if q.dim() != 4:
        raise ValueError(f"q: expected shape (B, T, heads, P), got {tuple(q.shape)}")
    if weight.dim() != 1:
        raise ValueError(f"weight: expected shape (R,), got {tuple(weight.shape)}")
    batch, tokens, _, rest = q.shape
    like, width = (q.dtype,), len(weight) + rest
    check_like("latents", latents, like, (batch, tokens, width), q.device, "q")
    check_like("weight", weight, like, (width - rest,), q.device, "q")
    if check_tables(cos, sin, q, tokens) != rest or rest % 2:
        raise ValueError(f"cos: expected {rest} angles, as many as q has values, got {tuple(cos.shape)}")
    check_like("out", out, like, q.shape, q.device, "q")
    check_dtype("cache", cache, q.dtype, torch.uint8)
    size = coded_bytes(width, len(weight)) if operands.coded else width
    if cache.dim() != 3 or (cache.shape[0], cache.shape[2]) != (batch, size):
        raise ValueError(f"cache: expected shape ({batch}, L, {size}), got {tuple(cache.shape)}")
    check_like("cache", cache, (cache.dtype,), cache.shape, q.device, "q")
    check_contiguous("cache", cache)
    if columns is not None:
        check_like("columns", columns, (torch.int64,), (batch,), q.device, "q")


def _launch(operands: AppendOperands) -> None:
    q, latents, weight, cos, sin, out, cache, columns, *_ = operands
    if q.dtype is not torch.bfloat16:
        raise TypeError(f"q: the kernel takes bfloat16, got {q.dtype}")
    if (latents.shape[2], len(weight)) != (WIDTH, VALUE):
        raise ValueError(
            f"latents: the kernel takes {WIDTH} values, of which {VALUE} are the value, got {latents.shape[2]} and "
            f"{len(weight)}"
        )
    if not latents.numel():
        return
    check_address("cache", cache)
    given = out
    q, out = _rows(q), given if _is_even(given) else given.new_empty(given.shape)
    latents = _rows(latents)
    weight, cos, sin = (aligned(x) for x in (weight, cos, sin))
    columns = columns if columns is None else columns.contiguous()
    operands = operands._replace(q=q, latents=latents, cos=cos, out=out)
    launcher(q.get_device(), operands)(q, latents, weight, cos, sin, out, cache, columns)
    if out is not given:
        given.copy_(out)


def _is_even(x: Tensor) -> bool:
    """Return whether tokens of x (B, T, ...) are evenly spaced, and rows of values begin at multiples of 16 bytes."""
    batch, tokens = x.shape[:2]
    even = batch == 1 or tokens == 1 or x.stride(0) == tokens * x.stride(1)
    vector = 16 // x.itemsize
    return even and x.stride(-1) == 1 and not any(s % vector for s in x.stride()[:-1]) and not x.data_ptr() % 16


def _rows(x: Tensor) -> Tensor:
    return x if _is_even(x) else aligned(x.contiguous())


def _reference(operands: AppendOperands) -> None:
    q, latents, weight, cos, sin, out, cache, columns, eps, interleaved = operands
    value, rest = latents.split([len(weight), latents.shape[2] - len(weight)], dim=-1)

    def turned(x: Tensor) -> Tensor:
        return rotated(torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1) if interleaved else x, cos, sin)

    new = torch.cat([normalized(value, weight, eps), turned(rest[:, :, None])[:, :, 0]], dim=-1)
    if operands.coded:
        new = quantize_latents(new, value_size=len(weight))
    write(cache[:, None], new[:, :, None], columns)
    out.copy_(turned(q))


_op = operator(
    "append_latents -> ()",
    check=_check,
    cuda=_launch,
    reference=_reference,
    fake=lambda operands: None,
    forward_only=True,
)
