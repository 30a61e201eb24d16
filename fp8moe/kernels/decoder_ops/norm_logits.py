"""``norm_logits``: the RMSNorm before a router and the router logits, in one kernel."""

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from fp8moe.kernels.decoder_ops.rms_norm import MAX_HIDDEN, VECTOR_BYTES, Normed, check_number, rms_norm
from fp8moe.kernels.decoder_ops.router import check_logits, logits_block, logits_threads, router_logits
from fp8moe.quant.formats import FP8Tensor, ceil_div, empty_quantized
from fp8moe.quant.quantize import INPUT_TYPES, quantizer_defines
from fp8moe.runtime import autograd, config
from fp8moe.runtime.checks import aligned, check_like, check_tensor
from fp8moe.runtime.jit import KernelSpec, load
from fp8moe.runtime.launch import PointerLauncher, num_sms, planned
from fp8moe.runtime.operator import operator

# Most tokens and bytes of x for which one kernel computes norm and logits, as each of its blocks normalizes all of x.
_MAX_TOKENS, _MAX_BYTES = 2, 16 << 10


class NormLogitsOperands(NamedTuple):
    x: Tensor
    norm_weight: Tensor
    residual: Tensor
    weight: Tensor
    eps: float
    bias: Tensor | None
    quantized: bool
    dtype: torch.dtype


def norm_logits(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    *,
    residual: Tensor,
    bias: Tensor | None = None,
    quantized: bool = False,
    dtype: torch.dtype,
) -> tuple[Normed, Tensor]:
    """Compute `rms_norm` of x + residual, and `router_logits` of the normalized values.

    x, residual: (T, H) bfloat16, float16 or float32, any strides; H up to 32768. norm_weight: (H,), weight: (E, H),
    bias: (E,) or None, all in the dtype of x. quantized: return the norm in FP8 too. dtype: dtype of the logits (T, E):
    bfloat16, float16 or float32.
    Returns Normed, which always has sum and values, and the logits. The results have the bits that `rms_norm` and
    `router_logits` would give. One kernel computes both for up to 2 tokens of at most 16 KB together, unless results
    are batch invariant (`fp8moe.batch_invariant`). Equal inputs give equal bits. There is no backward: calling it
    raises RuntimeError.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape, size or device.
    """
    for name, value in (("x", x), ("norm_weight", norm_weight), ("weight", weight), ("residual", residual)):
        check_tensor(name, value)
    if bias is not None:
        check_tensor("bias", bias)
    check_number("eps", eps)
    operands = NormLogitsOperands(x, norm_weight, residual, weight, eps, bias, quantized, dtype)
    total, values, data, scale, logits = autograd.run(_op, "fp8moe.kernels.decoder_ops.norm_logits", *operands)
    return Normed(total, values, FP8Tensor(data, scale) if quantized else None), logits


def by_one_kernel(tokens: int, experts: int, row_bytes: int) -> bool:
    """Return whether one kernel computes norm and logits: it is faster for small x, as every block repeats the norm."""
    few = 0 < tokens <= _MAX_TOKENS and 0 < tokens * row_bytes <= _MAX_BYTES
    return few and experts > 0 and not config.settings.batch_invariant


def kernel_spec(
    block: tuple[int, int], experts: int, hidden: int, dtype: torch.dtype, out_dtype: torch.dtype
) -> KernelSpec:
    """Return the kernel for a weight (experts, hidden) in `dtype`, logits in `out_dtype`; block: see `logits_block`."""
    block_experts, block_tokens = block
    vector = hidden * dtype.itemsize % VECTOR_BYTES == 0
    types = (*quantizer_defines(dtype, vector=vector), ("OUTPUT", INPUT_TYPES[out_dtype]))
    rows = ("HIDDEN", hidden), ("ROW_THREADS", logits_threads(hidden, dtype))
    sizes = ("NUM_EXPERTS", experts), ("EXPERTS", block_experts), ("TOKENS", block_tokens)
    return KernelSpec("norm_logits.cu", "norm_logits", (*types, *rows, *sizes))


@planned
def launcher(
    device_index: int, tokens: int, experts: int, hidden: int, eps: float, dtypes: tuple[torch.dtype, torch.dtype]
) -> PointerLauncher:
    """Return the launcher, called with (x, residual, norm_weight, weight, bias, sum, values, data, scale, logits).

    dtypes: dtypes of x and of the logits. bias, data and scale may be None. The scale is MN-major, and all other
    tensors are contiguous. All tensors start at multiples of 16 bytes. `by_one_kernel` must be True for the sizes.
    """
    block_experts, _ = block = logits_block(tokens, experts, num_sms(device_index))
    return PointerLauncher(
        load(kernel_spec(block, experts, hidden, *dtypes)),
        grid=ceil_div(experts, block_experts),
        block=logits_threads(hidden, dtypes[0]),
        pdl=True,
        args=((ctypes.c_int64 * 5)(), (ctypes.c_int64 * 5)(), ctypes.c_int32(tokens), ctypes.c_float(eps)),
    )


def _check(operands: NormLogitsOperands) -> None:
    x = operands.x
    check_logits(x, operands.weight, operands.bias, operands.dtype)
    if x.shape[1] > MAX_HIDDEN:
        raise ValueError(f"x: expected shape (T, H) with H up to {MAX_HIDDEN}, got {tuple(x.shape)}")
    check_like("norm_weight", operands.norm_weight, (x.dtype,), (x.shape[1],), x.device, "x")
    check_like("residual", operands.residual, (x.dtype,), x.shape, x.device, "x")


def _launch(operands: NormLogitsOperands) -> tuple[Tensor, ...]:
    x, norm_weight, residual, weight, eps, bias, quantized, dtype = operands
    (tokens, hidden), experts, device_index = x.shape, len(weight), x.get_device()
    if not by_one_kernel(tokens, experts, hidden * x.itemsize):
        return _by_two(operands)
    results = total, values, data, scale, logits = _empty(operands)
    launch = launcher(device_index, tokens, experts, hidden, eps, (x.dtype, dtype))
    given = map(aligned, (x, residual, norm_weight, weight))
    launch(
        *given,
        None if bias is None else aligned(bias),
        total,
        values,
        *((data, scale) if quantized else (None, None)),
        logits,
    )
    return results


def _by_two(operands: NormLogitsOperands) -> tuple[Tensor, ...]:
    x, norm_weight, residual, weight, eps, bias, quantized, dtype = operands
    total, values, fp8 = rms_norm(x, norm_weight, eps, residual=residual, quantized=quantized)
    logits = router_logits(values, weight, bias=bias, dtype=dtype)
    return total, values, *(fp8 or (x.new_empty(0), x.new_empty(0))), logits


def _empty(operands: NormLogitsOperands) -> tuple[Tensor, ...]:
    """Return uninitialized sum, values, data, scale and logits; data and scale have no elements unless quantized."""
    x, weight, quantized, dtype = operands.x, operands.weight, operands.quantized, operands.dtype
    fp8 = empty_quantized(x, *x.shape) if quantized else (x.new_empty(0), x.new_empty(0))
    return x.new_empty(x.shape), x.new_empty(x.shape), *fp8, x.new_empty((x.shape[0], len(weight)), dtype=dtype)


_op = operator(
    "norm_logits -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    check=_check,
    cuda=_launch,
    reference=_by_two,
    fake=_empty,
    forward_only=True,
)
