"""``norm_route``: from attention's result to the experts of each token: RMSNorm, router logits, choice and sort."""

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from fp8moe.kernels.decoder_ops.rms_norm import MAX_HIDDEN, VECTOR_BYTES, Normed, check_number, rms_norm
from fp8moe.kernels.decoder_ops.router import (
    MAX_EXPERTS,
    ChosenExperts,
    Form,
    RouteOperands,
    RoutingRule,
    check_operands,
    check_result,
    check_rule,
    check_rule_types,
    empty_chosen,
    logits_threads,
    power_of_two_from,
    route,
    route_defines,
    router_logits,
    sorted_shape,
    sorts,
)
from fp8moe.kernels.experts.routing import KernelShape
from fp8moe.quant.formats import FP8Tensor, align, ceil_div, empty_quantized
from fp8moe.quant.quantize import INPUT_TYPES, quantizer_defines
from fp8moe.runtime import autograd
from fp8moe.runtime.checks import aligned, check_like, check_tensor
from fp8moe.runtime.jit import KernelSpec, load
from fp8moe.runtime.launch import PointerLauncher, planned
from fp8moe.runtime.operator import Signature, operator
from fp8moe.runtime.sm90 import MAX_BLOCKS_PER_PORTABLE_CLUSTER, WARP

BLOCKS = MAX_BLOCKS_PER_PORTABLE_CLUSTER  # thread blocks of the cluster
# Limits of norm_route.cu. Its few SMs read all of the router's weight, and keep all normalized tokens in shared memory.
MAX_TOKENS = 4  # for more, the kernels of all SMs are as fast
_MAX_WEIGHT_BYTES, _MAX_ROW_BYTES = 2 << 20, 32 << 10
_THREADS = 512  # of a thread block, about
_MAX_SUMS, _MAX_AT_ONCE = WARP, 8  # sums of a thread; rows of the weight, or tokens, that it multiplies at a time
_WEIGHT_VECTORS = 8  # vectors of the weight that a thread keeps in registers


class NormRouteOperands(NamedTuple):
    """Arguments of the operator `norm_route`."""

    x: Tensor
    norm_weight: Tensor
    residual: Tensor
    weight: Tensor
    eps: float
    bias: Tensor | None
    quantized: bool
    logits_dtype: torch.dtype
    rule: RoutingRule
    choice_bias: Tensor | None
    dtype: torch.dtype

    def routed(self, logits: Tensor) -> RouteOperands:
        return RouteOperands(logits, self.rule, self.choice_bias, self.dtype)


def norm_route(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    rule: RoutingRule,
    *,
    residual: Tensor,
    bias: Tensor | None = None,
    choice_bias: Tensor | None = None,
    quantized: bool = False,
    logits_dtype: torch.dtype,
    dtype: torch.dtype,
) -> tuple[Normed, ChosenExperts]:
    """Compute `rms_norm` of x + residual, `router_logits` of the normalized values, and `route` of the logits.

    x, residual: (T, H) bfloat16, float16 or float32, any strides; H up to 32768. norm_weight: (H,), weight: (E, H),
    bias: (E,) or None, all in the dtype of x; E up to 1024. quantized: return the norm in FP8 too. logits_dtype: the
    dtype that logits are rounded to, dtype: that of the experts' weights: bfloat16, float16 or float32. rule: see
    `RoutingRule`. choice_bias: float32 (E,), the bias of `route`, or None.
    Returns Normed, which always has sum and values, and ChosenExperts, sorted for up to 16 tokens and 512 experts. The
    results have the bits that `rms_norm`, `router_logits` and `route` would give. One kernel computes them for up to 4
    tokens, if the weight has at most 2 MB. Equal inputs give equal bits. There is no backward: calling it raises
    RuntimeError.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape, size or device, or an unknown
    `rule.score`.
    """
    for name, value in (("x", x), ("norm_weight", norm_weight), ("weight", weight), ("residual", residual)):
        check_tensor(name, value)
    for name, value in (("bias", bias), ("choice_bias", choice_bias)):
        if value is not None:
            check_tensor(name, value)
    check_number("eps", eps)
    check_rule_types(rule)
    operands = NormRouteOperands(
        x, norm_weight, residual, weight, eps, bias, quantized, logits_dtype, rule, choice_bias, dtype
    )
    name = "fp8moe.kernels.decoder_ops.norm_route"
    total, values, data, scale, index, weights, *order = autograd.run(_op, name, *_SIGNATURE.pack(operands))
    normed = Normed(total, values, FP8Tensor(data, scale) if quantized else None)
    return normed, ChosenExperts(index, weights, *order if sorts(x.shape[0], weight.shape[0]) else ())


class Shape(NamedTuple):
    """How the kernel divides its work.

    max_tokens: the tokens that it is compiled for. experts, tokens: rows of the weight, and tokens, that a team
    multiplies at a time. These are powers of two. teams: of a thread block. threads: of a team.
    """

    max_tokens: int
    experts: int
    tokens: int
    teams: int
    threads: int

    @classmethod
    def of(cls, tokens: int, experts: int, hidden: int, dtype: torch.dtype) -> "Shape":
        """Return the shape for `tokens` tokens (T, hidden) in `dtype`, and `experts` experts."""
        threads = logits_threads(hidden, dtype)
        vectors = _vectors(hidden, dtype, threads)
        max_tokens = power_of_two_from(tokens)
        teams = max(_THREADS // threads, ceil_div(sorted_shape(max_tokens, experts).warps * WARP, threads))
        each = power_of_two_from(ceil_div(experts, BLOCKS * teams))
        kept = _WEIGHT_VECTORS if teams * threads <= _THREADS else _WEIGHT_VECTORS // 2
        at_once = min(each, _MAX_AT_ONCE, kept // power_of_two_from(vectors))
        return cls(max_tokens, at_once, min(max_tokens, _MAX_AT_ONCE, _MAX_SUMS // at_once), teams, threads)

    def shared_bytes(self, experts: int, vectors: int, sort: KernelShape) -> int:
        """Return the bytes of ``struct Block`` of cuda/ops/norm_route.cu."""
        parts = ceil_div(ceil_div(experts, self.experts), BLOCKS * self.teams)
        sums = parts * self.max_tokens * self.teams * (self.threads // WARP) * self.experts
        values = self.max_tokens * vectors * self.threads * VECTOR_BYTES
        return align(values + sort.shared_bytes + (sums + self.max_tokens * experts) * 4, VECTOR_BYTES)


def _vectors(hidden: int, dtype: torch.dtype, threads: int) -> int:
    return ceil_div(hidden * dtype.itemsize, threads * VECTOR_BYTES)


def by_one_kernel(tokens: int, experts: int, row_bytes: int) -> bool:
    """Return whether one kernel computes norm, logits and choice. row_bytes: of a token, and of a row of the weight."""
    few = 0 < tokens <= MAX_TOKENS and 0 < row_bytes <= _MAX_ROW_BYTES
    return few and experts > 0 and sorts(tokens, experts) and experts * row_bytes <= _MAX_WEIGHT_BYTES


def kernel_spec(
    tokens: int,
    experts: int,
    hidden: int,
    form: Form,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
) -> KernelSpec:
    """Return the kernel for `tokens` tokens and a weight (experts, hidden).

    dtypes: those of x, of the logits and of the weights of experts.
    """
    dtype, logits_dtype, out_dtype = dtypes
    shape, sort = Shape.of(tokens, experts, hidden, dtype), sorted_shape(power_of_two_from(tokens), experts)
    vector = hidden * dtype.itemsize % VECTOR_BYTES == 0
    types = (*quantizer_defines(dtype, vector=vector), ("LOGITS", INPUT_TYPES[logits_dtype]))
    rows = ("HIDDEN", hidden), ("ROW_THREADS", shape.threads), ("BLOCKS", BLOCKS), ("TEAMS", shape.teams)
    sizes = ("MAX_TOKENS", shape.max_tokens), ("TOKENS", shape.tokens), ("EXPERTS", shape.experts)
    block_bytes = shape.shared_bytes(experts, _vectors(hidden, dtype, shape.threads), sort)
    choice = (*route_defines(experts, form, out_dtype), *sort.defines(False), ("BLOCK_BYTES", block_bytes))
    return KernelSpec("norm_route.cu", "norm_route", (*types, *rows, *sizes, *choice))


@planned
def launcher(
    device_index: int,
    tokens: int,
    experts: int,
    hidden: int,
    form: Form,
    factors: tuple[float, float],
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
) -> PointerLauncher:
    """Return the launcher.

    It is called with (x, residual, norm_weight, weight, bias, choice_bias, sum, values, data, scale, index, weights,
    groups, rows). bias, choice_bias, data and scale may be None. The scale is MN-major, and all other tensors are
    contiguous. All tensors start at multiples of 16 bytes. factors: eps, and the rule's scale. dtypes: see
    `kernel_spec`. `by_one_kernel` must be True for the sizes.
    """
    shape, sort = Shape.of(tokens, experts, hidden, dtypes[0]), sorted_shape(power_of_two_from(tokens), experts)
    eps, scale = factors
    return PointerLauncher(
        load(kernel_spec(tokens, experts, hidden, form, dtypes)),
        grid=BLOCKS,
        block=shape.teams * shape.threads,
        cluster=BLOCKS,
        smem=shape.shared_bytes(experts, _vectors(hidden, dtypes[0], shape.threads), sort),
        pdl=True,
        args=(
            *((ctypes.c_int64 * 6)(), (ctypes.c_int64 * 8)()),
            *(ctypes.c_int32(tokens), ctypes.c_float(eps), ctypes.c_float(scale)),
        ),
    )


def _check(operands: NormRouteOperands) -> None:
    x, weight, choice_bias = operands.x, operands.weight, operands.choice_bias
    check_operands(x, weight, operands.bias)
    if x.shape[1] > MAX_HIDDEN:
        raise ValueError(f"x: expected shape (T, H) with H up to {MAX_HIDDEN}, got {tuple(x.shape)}")
    check_like("norm_weight", operands.norm_weight, (x.dtype,), (x.shape[1],), x.device, "x")
    check_like("residual", operands.residual, (x.dtype,), x.shape, x.device, "x")
    if not 1 <= len(weight) <= MAX_EXPERTS:
        raise ValueError(f"weight: expected shape (E, H) with E from 1 to {MAX_EXPERTS}, got {tuple(weight.shape)}")
    if choice_bias is not None:
        check_like("choice_bias", choice_bias, (torch.float32,), (len(weight),), x.device, "x")
    check_rule(operands.rule, len(weight))
    check_result(operands.logits_dtype, "logits_dtype")
    check_result(operands.dtype)


def _launch(operands: NormRouteOperands) -> tuple[Tensor, ...]:
    x, norm_weight, residual, weight, eps, bias, quantized, logits_dtype, rule, choice_bias, dtype = operands
    (tokens, hidden), experts = x.shape, len(weight)
    if not by_one_kernel(tokens, experts, hidden * x.itemsize):
        return _by_three(operands)
    results = total, values, data, scale, *chosen = _empty(operands)
    form, dtypes = operands.routed(x).form(), (x.dtype, logits_dtype, dtype)
    launch = launcher(x.get_device(), tokens, experts, hidden, form, (eps, rule.scale), dtypes)
    given = (x, residual, norm_weight, weight, bias, choice_bias)
    launch(
        *(None if value is None else aligned(value) for value in given),
        *(total, values, *((data, scale) if quantized else (None, None)), *chosen),
    )
    return results


def _by_three(operands: NormRouteOperands) -> tuple[Tensor, ...]:
    x, norm_weight, residual, weight, eps, bias, quantized, logits_dtype, rule, choice_bias, dtype = operands
    total, values, fp8 = rms_norm(x, norm_weight, eps, residual=residual, quantized=quantized)
    logits = router_logits(values, weight, bias=bias, dtype=logits_dtype)
    index, weights, groups, rows = route(logits, rule, bias=choice_bias, dtype=dtype, sort=True)
    nothing = x.new_empty(0, dtype=torch.int32)
    order = (nothing, nothing.clone()) if groups is None or rows is None else (groups, rows)
    return total, values, *(fp8 or (x.new_empty(0), x.new_empty(0))), index, weights, *order


def _empty(operands: NormRouteOperands) -> tuple[Tensor, ...]:
    """Return uninitialized results. Those that are not requested, or not sorted, have no elements."""
    x, experts = operands.x, len(operands.weight)
    fp8 = empty_quantized(x, *x.shape) if operands.quantized else (x.new_empty(0), x.new_empty(0))
    chosen = empty_chosen(x, x.shape[0], experts, operands.rule.top_k, operands.dtype)
    return x.new_empty(x.shape), x.new_empty(x.shape), *fp8, *chosen


_SIGNATURE = Signature(NormRouteOperands)
_op = operator(
    "norm_route -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    signature=_SIGNATURE,
    check=_check,
    cuda=_launch,
    reference=_by_three,
    fake=_empty,
    forward_only=True,
)
