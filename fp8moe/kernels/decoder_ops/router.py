"""The router of a mixture-of-experts layer: ``router_logits`` computes its logits, ``route`` chooses the experts."""

import ctypes
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from fp8moe.kernels.decoder_ops.rms_norm import VECTOR_BYTES, check_number, row_threads
from fp8moe.kernels.experts.reference import sort_by_expert
from fp8moe.kernels.experts.routing import KernelShape
from fp8moe.quant.formats import align, ceil_div
from fp8moe.quant.quantize import INPUT_TYPES, input_defines
from fp8moe.runtime import autograd, config
from fp8moe.runtime.checks import FLOATING, check_device, check_dtype, check_int, check_like, check_tensor
from fp8moe.runtime.fixed_rows import by_fixed_rows
from fp8moe.runtime.jit import KernelSpec, load
from fp8moe.runtime.launch import PointerLauncher, num_sms, planned
from fp8moe.runtime.operator import Signature, operator
from fp8moe.runtime.sm90 import WARP

MAX_EXPERTS = 1024
MAX_TOP_K = 32
MAX_GROUPS = 32
SCORES = ("softmax", "sigmoid")
MAX_TOKENS = 64  # tokens per thread block of router_logits.cu
_MAX_BYTES = 256 << 10  # bytes of the largest x for router_logits.cu, whose thread blocks each read all of x
_MAX_ROW_BYTES = 32 << 10  # bytes of the largest row for router_logits.cu: 256 threads with 8 vectors of 16 bytes each
_MAX_EXPERTS_AT_ONCE = 8  # most experts per thread block: more would cost registers and hide no latency
_MAX_SUMS = WARP  # most accumulators per thread, which has one for each (expert, token) pair of its thread block
_ROUTE_WARPS = 4  # warps of a thread block of route.cu
MAX_SORTED_TOKENS = 16  # most tokens for route_sorted.cu, a single thread block: for more, two kernels are faster
MAX_SORTED_EXPERTS = 512  # most experts for route_sorted.cu, which keeps the scores of all experts in registers


class ChosenExperts(NamedTuple):
    """The experts of each token, best first, and optionally the assignments sorted by expert.

    index: int64 (T, top_k). weights: (T, top_k). groups: int32 (E + 1,), rows: int32 (T, top_k): the result of
    `sort_by_expert` for index; both None if not sorted.
    """

    index: Tensor
    weights: Tensor
    groups: Tensor | None = None
    rows: Tensor | None = None


def router_logits(x: Tensor, weight: Tensor, *, bias: Tensor | None = None, dtype: torch.dtype) -> Tensor:
    """Return ``x @ weight.T + bias``, summed in float32 and rounded once to `dtype`.

    x: (T, H) bfloat16, float16 or float32, any strides. weight: (E, H), bias: (E,) or None, in the dtype of x.
    dtype: dtype of the result (T, E): bfloat16, float16 or float32.
    Equal inputs give equal bits. There is no backward: calling it raises RuntimeError.

    A kernel computes the logits of up to 64 tokens, of at most 256 KB together and 32 KB each. Its thread blocks split
    the weight, and each block reads all of x. For more tokens, torch.mm with a float32 result is faster; F.linear may
    round partial sums to bfloat16. torch.mm follows PyTorch's TF32 setting for float32 operands. If results are batch
    invariant (`fp8moe.batch_invariant`), the kernel runs for any number of tokens of at most 32 KB each.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape or device.
    """
    check_tensor("x", x)
    check_tensor("weight", weight)
    if bias is not None:
        check_tensor("bias", bias)
    return autograd.run(_logits_op, "fp8moe.kernels.decoder_ops.router_logits", x, weight, bias, dtype)


class RoutingRule(NamedTuple):
    """The rule by which `route` chooses experts and computes their weights.

    top_k: number of experts per token, up to 32 and up to the number of experts in top_groups groups.
    score: "softmax" or "sigmoid", the function that turns logits into scores.
    normalize: divide the weights of a token by their sum.
    num_groups, top_groups: consecutive experts form num_groups equal groups, 1 to 32. Experts are chosen only from the
        top_groups groups with the largest sum of their two best (biased) scores: DeepSeek-V3, arXiv:2412.19437,
        section 2.1.2.
    scale: a factor by which the weights are multiplied last.
    """

    top_k: Annotated[int, "int"]
    score: str
    normalize: bool
    num_groups: Annotated[int, "int"] = 1
    top_groups: Annotated[int, "int"] = 1
    scale: float = 1.0


def route(
    logits: Tensor, rule: RoutingRule, *, bias: Tensor | None = None, dtype: torch.dtype, sort: bool = False
) -> ChosenExperts:
    """Choose the experts of each token by score, and compute their weights from the scores, in float32.

    logits: (T, E) bfloat16, float16 or float32, any strides; E up to 1024.
    bias: float32 (E,), added to the scores to choose experts, but not to compute weights (arXiv:2408.15664), or None.
    dtype: dtype of the weights: bfloat16, float16 or float32.
    sort: also sort the assignments by expert if one kernel can do both: for up to 16 tokens and 512 experts.
    Returns ChosenExperts(index, weights, groups, rows); groups and rows are None if nothing was sorted. Of experts or
    groups with equal scores the lower index is chosen. NaN counts as the largest score, so that it appears in the
    weights. Equal inputs give equal bits, with and without sorting. There is no backward: calling it raises
    RuntimeError.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong size or device, or an unknown `rule.score`.
    """
    check_tensor("logits", logits)
    if bias is not None:
        check_tensor("bias", bias)
    check_rule_types(rule)
    op = _route_sorted_op if sort and sorts(*logits.shape) else _route_op
    operands = _ROUTE.pack(RouteOperands(logits, rule, bias, dtype))
    return ChosenExperts(*autograd.run(op, "fp8moe.kernels.decoder_ops.route", *operands))


def check_rule_types(rule: RoutingRule) -> None:
    """Check the types of a rule's fields, and its score."""
    for name in ("top_k", "num_groups", "top_groups"):
        check_int(name, getattr(rule, name))
    if rule.score not in SCORES:
        raise ValueError(f"score: expected one of {SCORES}, got {rule.score!r}")
    check_number("scale", rule.scale)


# ---- logits ----


def by_kernel(tokens: int, row_bytes: int) -> bool:
    """Return whether router_logits.cu, rather than a GEMM, computes the logits of `tokens` tokens.

    Each of its thread blocks reads all tokens. So above a limit on their size a GEMM reads less memory; in
    batch-invariant mode there is no such limit.
    """
    if not 0 < row_bytes <= _MAX_ROW_BYTES:
        return False
    return config.settings.batch_invariant or tokens <= min(MAX_TOKENS, _MAX_BYTES // row_bytes)


def logits_block(tokens: int, experts: int, sms: int) -> tuple[int, int]:
    """Return the number of experts per thread block, and the number of tokens that a block processes at a time.

    The first gives about one thread block per SM. Both numbers are powers of two and compile-time constants of the
    kernel, whose order of sums they do not change.
    """
    block_experts = min(power_of_two_from(ceil_div(experts, sms)), _MAX_EXPERTS_AT_ONCE)
    return block_experts, min(power_of_two_from(tokens), _MAX_SUMS // block_experts)


def power_of_two_from(n: int) -> int:
    return 1 << (n - 1).bit_length()


def logits_threads(hidden: int, dtype: torch.dtype) -> int:
    """Return the number of threads of a thread block of router_logits.cu, all of which work on the same row."""
    return align(row_threads(hidden * dtype.itemsize), WARP)


def logits_spec(
    block: tuple[int, int], experts: int, hidden: int, dtype: torch.dtype, out_dtype: torch.dtype, vector: bool
) -> KernelSpec:
    """Return the kernel for a weight (experts, hidden) in `dtype` and logits in `out_dtype`; block: see `logits_block`.

    vector: x and the weight start at multiples of 16 bytes, and their rows are multiples of 16 bytes long.
    """
    block_experts, block_tokens = block
    rounds = 1 if block_tokens > (8 if dtype is torch.float16 else 16) else 2  # number of rounds of loads in flight
    sizes = (
        *(("HIDDEN", hidden), ("NUM_EXPERTS", experts), ("EXPERTS", block_experts), ("TOKENS", block_tokens)),
        *(("MAX_TOKENS", MAX_TOKENS), ("ROW_THREADS", logits_threads(hidden, dtype)), ("ROUNDS", rounds)),
    )
    types = (*input_defines(dtype, vector=vector), ("OUTPUT", INPUT_TYPES[out_dtype]))
    return KernelSpec("router_logits.cu", "router_logits", (*types, *sizes))


@planned
def logits_launcher(
    device_index: int, tokens: int, experts: int, hidden: int, dtypes: tuple[torch.dtype, torch.dtype], vector: bool
) -> PointerLauncher:
    """Return the launcher, called with (x, weight, bias, logits).

    x: (tokens, hidden), weight: (experts, hidden), bias: (experts,) or None, logits: (tokens, experts). dtypes: dtypes
    of x and of the logits. No size is 0, all tensors are contiguous; vector: see `logits_spec`.
    """
    block_experts, _ = block = logits_block(tokens, experts, num_sms(device_index))
    return PointerLauncher(
        load(logits_spec(block, experts, hidden, *dtypes, vector)),
        grid=(ceil_div(experts, block_experts), ceil_div(tokens, MAX_TOKENS)),
        block=logits_threads(hidden, dtypes[0]),
        pdl=True,
        pointers=4,
        args=(ctypes.c_int32(tokens),),
    )


def check_operands(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Check dtypes, shapes and devices of the operands of `router_logits`."""
    check_dtype("x", x, *FLOATING)
    if x.dim() != 2:
        raise ValueError(f"x: expected shape (T, H), got {tuple(x.shape)}")
    check_dtype("weight", weight, x.dtype)
    if weight.dim() != 2 or weight.shape[1] != x.shape[1]:
        raise ValueError(f"weight: expected shape (E, {x.shape[1]}), got {tuple(weight.shape)}")
    check_device("weight", weight, x.device, "x")
    if bias is not None:
        check_like("bias", bias, (x.dtype,), (len(weight),), x.device, "x")


def _check_logits(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
    check_operands(x, weight, bias)
    check_result(dtype)


def check_result(dtype: torch.dtype, name: str = "dtype") -> None:
    if dtype not in FLOATING:
        raise TypeError(f"{name}: expected bfloat16, float16 or float32, got {dtype}")


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    (tokens, hidden), experts = x.shape, weight.shape[0]
    if not by_kernel(tokens, hidden * x.itemsize) or not (tokens and experts):
        if x.dtype is torch.float32 or not x.is_cuda:  # x is on a CPU if kernels are only recorded
            return _logits_reference(x, weight, bias, dtype)
        sums = by_fixed_rows(lambda rows: torch.mm(rows, weight.t(), out_dtype=torch.float32), x)
        return _rounded(sums, bias, dtype)
    logits = _empty_logits(x, weight, bias, dtype)
    x, weight, bias = x.contiguous(), weight.contiguous(), None if bias is None else bias.contiguous()
    vector = not (x.data_ptr() | weight.data_ptr() | hidden * x.itemsize) % VECTOR_BYTES
    launch = logits_launcher(x.get_device(), tokens, experts, hidden, (x.dtype, dtype), vector)
    launch(x, weight, bias, logits)
    return logits


def _rounded(sums: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    if bias is None:
        return sums.to(dtype)
    return torch.add(sums, bias, out=torch.empty_like(sums, dtype=dtype))


def _logits_reference(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return _rounded(by_fixed_rows(lambda rows: rows.float() @ weight.float().t(), x), bias, dtype)


def _empty_logits(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=dtype)


_logits_op = operator(
    "router_logits -> Tensor",
    check=_check_logits,
    cuda=_logits,
    reference=_logits_reference,
    fake=_empty_logits,
    forward_only=True,
)


# ---- choosing experts ----


class Form(NamedTuple):
    """The parts of a `RoutingRule` that are compile-time constants. sigmoid: the score is sigmoid, not softmax."""

    top_k: int
    sigmoid: bool
    bias: bool
    num_groups: int
    top_groups: int
    normalize: bool


class RouteOperands(NamedTuple):
    """Arguments of the operators `route` and `route_sorted`."""

    logits: Tensor
    rule: RoutingRule
    bias: Tensor | None
    dtype: torch.dtype

    def form(self) -> Form:
        top_k, score, normalize, num_groups, top_groups, _ = self.rule
        return Form(top_k, score == "sigmoid", self.bias is not None, num_groups, top_groups, normalize)


def route_defines(experts: int, form: Form, out_dtype: torch.dtype) -> tuple:
    """Return the macros that cuda/ops/route.cuh requires, except for those of its logits."""
    names = ("TOP_K", "SIGMOID", "BIAS", "GROUPS", "TOP_GROUPS", "NORMALIZE")
    types = ("OUTPUT", INPUT_TYPES[out_dtype]), ("NUM_EXPERTS", experts)
    return (*types, *zip(names, map(int, form), strict=True))


def route_spec(experts: int, form: Form, dtype: torch.dtype, out_dtype: torch.dtype) -> KernelSpec:
    """Return the kernel for logits of `experts` experts in `dtype`, and weights in `out_dtype`."""
    defines = *input_defines(dtype, vector=False), *route_defines(experts, form, out_dtype)
    return KernelSpec("route.cu", "route", (*defines, ("WARPS", _ROUTE_WARPS)))


@planned
def route_launcher(
    device_index: int, tokens: int, experts: int, form: Form, scale: float, dtypes: tuple[torch.dtype, torch.dtype]
) -> PointerLauncher:
    """Return the launcher, called with (logits (tokens, experts), bias (experts,), index, weights (tokens, top_k)).

    dtypes: dtypes of logits and weights. tokens is not 0, all tensors are contiguous.
    """
    return PointerLauncher(
        load(route_spec(experts, form, *dtypes)),
        grid=ceil_div(tokens, _ROUTE_WARPS),
        block=_ROUTE_WARPS * WARP,
        pdl=True,
        pointers=4,
        args=(ctypes.c_int64(tokens), ctypes.c_float(scale)),
    )


def sorts(tokens: int, experts: int) -> bool:
    """Return whether one thread block can route `tokens` tokens and sort their assignments."""
    return tokens <= MAX_SORTED_TOKENS and experts <= MAX_SORTED_EXPERTS


def sorted_shape(tokens: int, experts: int) -> KernelShape:
    """Return the shape of the sort of `tokens` tokens by one thread block, which has a warp for each token."""
    counters, warps, _ = KernelShape.of(1, experts)
    return KernelShape(counters, max(warps, power_of_two_from(max(tokens, 1))), 1)


def sorted_spec(tokens: int, experts: int, form: Form, dtype: torch.dtype, out_dtype: torch.dtype) -> KernelSpec:
    """Return the kernel that routes and sorts `tokens` tokens; other arguments: see `route_spec`."""
    defines = *input_defines(dtype, vector=False), *route_defines(experts, form, out_dtype)
    return KernelSpec("route_sorted.cu", "route_sorted", (*defines, *sorted_shape(tokens, experts).defines(False)))


@planned
def sorted_launcher(
    device_index: int, tokens: int, experts: int, form: Form, scale: float, dtypes: tuple[torch.dtype, torch.dtype]
) -> PointerLauncher:
    """Return the launcher of route_sorted.cu.

    It is called with the tensors of `route_launcher`, then groups (experts + 1,) and rows (tokens, top_k). tokens may
    be 0.
    """
    shape = sorted_shape(tokens, experts)
    return PointerLauncher(
        load(sorted_spec(tokens, experts, form, *dtypes)),
        grid=1,
        block=shape.warps * WARP,
        smem=shape.shared_bytes,
        pdl=True,
        pointers=2,
        args=((ctypes.c_int64 * 4)(), ctypes.c_int32(tokens), ctypes.c_float(scale)),
    )


def _check_route(operands: RouteOperands) -> None:
    logits, rule, bias, dtype = operands
    check_dtype("logits", logits, *FLOATING)
    if logits.dim() != 2 or not 1 <= logits.shape[1] <= MAX_EXPERTS:
        raise ValueError(f"logits: expected shape (T, E) with E from 1 to {MAX_EXPERTS}, got {tuple(logits.shape)}")
    if bias is not None:
        check_like("bias", bias, (torch.float32,), (logits.shape[1],), logits.device, "logits")
    check_rule(rule, logits.shape[1])
    check_result(dtype)


def check_rule(rule: RoutingRule, experts: int) -> None:
    """Check the numbers of a rule for `experts` experts."""
    top_k, _, _, num_groups, top_groups, _ = rule
    if not 1 <= num_groups <= MAX_GROUPS or experts % num_groups or (num_groups > 1 and experts == num_groups):
        raise ValueError(
            f"num_groups: expected 1, or up to {MAX_GROUPS} groups of equal size, 2 or more of {experts} experts in "
            f"each, got {num_groups}"
        )
    if not 1 <= top_groups <= num_groups:
        raise ValueError(f"top_groups: expected 1 to {num_groups}, got {top_groups}")
    limit = min(MAX_TOP_K, experts // num_groups * top_groups)
    if not 1 <= top_k <= limit:
        raise ValueError(f"top_k: expected 1 to {limit} of {experts} experts, got {top_k}")


def _launch(launcher: planned[..., PointerLauncher], operands: RouteOperands, results: tuple[Tensor, ...]) -> None:
    logits, bias, dtypes = operands.logits, operands.bias, (operands.logits.dtype, operands.dtype)
    launch = launcher(logits.get_device(), *logits.shape, operands.form(), operands.rule.scale, dtypes)
    launch(logits.contiguous(), None if bias is None else bias.contiguous(), *results)


def _route(operands: RouteOperands) -> tuple[Tensor, Tensor]:
    results = _empty_route(operands)
    if operands.logits.shape[0]:
        _launch(route_launcher, operands, results)
    return results


def _check_sorted(operands: RouteOperands) -> None:
    _check_route(operands)
    tokens, experts = operands.logits.shape
    if not sorts(tokens, experts):
        limits = f"up to {MAX_SORTED_TOKENS} tokens and {MAX_SORTED_EXPERTS} experts"
        raise ValueError(f"logits: expected {limits} to sort by expert, got {tuple(operands.logits.shape)}")


def _route_sorted(operands: RouteOperands) -> tuple[Tensor, ...]:
    results = _empty_sorted(operands)
    _launch(sorted_launcher, operands, results)
    return results


def _reference_route_sorted(operands: RouteOperands) -> tuple[Tensor, ...]:
    index, weights = _reference_route(operands)
    return index, weights, *sort_by_expert(index, operands.logits.shape[1], None)


def _empty_sorted(operands: RouteOperands) -> tuple[Tensor, ...]:
    return empty_chosen(operands.logits, *operands.logits.shape, operands.rule.top_k, operands.dtype)


def empty_chosen(like: Tensor, tokens: int, experts: int, top_k: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return uninitialized index, weights, groups and rows; the last two have no elements if `sorts` is False."""
    index, ordered = like.new_empty((tokens, top_k), dtype=torch.int64), sorts(tokens, experts)
    groups = like.new_empty((experts + 1 if ordered else 0,), dtype=torch.int32)
    rows = like.new_empty(index.shape if ordered else (0,), dtype=torch.int32)
    return index, like.new_empty(index.shape, dtype=dtype), groups, rows


def _reference_route(operands: RouteOperands) -> tuple[Tensor, Tensor]:
    form, bias = operands.form(), operands.bias
    logits = operands.logits.float().contiguous()  # the bits of PyTorch's softmax depend on its input's memory layout
    scores = logits.sigmoid() if form.sigmoid else logits.softmax(-1)
    # Without bias and groups, compare logits instead of scores: different logits may round to equal scores.
    choice = logits if bias is None and form.num_groups == 1 else scores
    if bias is not None:
        choice = choice + bias
    if form.num_groups > 1:
        groups = choice.unflatten(-1, (form.num_groups, -1))
        _, best = _largest(groups.topk(2, dim=-1).values.sum(-1), form.top_groups)
        out = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter_(-1, best, False)
        choice = groups.masked_fill(out[..., None], float("-inf")).flatten(-2)
    _, index = _largest(choice, form.top_k)
    weights = scores.gather(-1, index)
    if form.normalize:
        # Add 1e-20 to the sum as DeepSeek-V3's modules do. For softmax add 0: its largest scores are not all 0.
        weights = weights / (weights.sum(-1, keepdim=True) + (1e-20 if form.sigmoid else 0.0))
    return index, (weights * operands.rule.scale).to(operands.dtype)


def _largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` largest values of each row and their indices; NaN counts as largest.

    Of equal values the lowest indices come first, which torch.topk does not guarantee.
    """
    positive = torch.where(values.isnan(), torch.nan, values)  # a GPU would sort NaNs by their sign: clear it
    ordered, places = positive.sort(dim=-1, descending=True, stable=True)
    return ordered[..., :count], places[..., :count].contiguous()


def _empty_route(operands: RouteOperands) -> tuple[Tensor, Tensor]:
    logits, shape = operands.logits, (operands.logits.shape[0], operands.rule.top_k)
    return logits.new_empty(shape, dtype=torch.int64), logits.new_empty(shape, dtype=operands.dtype)


_ROUTE = Signature(RouteOperands)
_route_op = operator(
    "route -> (Tensor, Tensor)",
    check=_check_route,
    cuda=_route,
    reference=_reference_route,
    fake=_empty_route,
    forward_only=True,
)
_route_sorted_op = operator(
    "route_sorted -> (Tensor, Tensor, Tensor, Tensor)",
    check=_check_sorted,
    cuda=_route_sorted,
    reference=_reference_route_sorted,
    fake=_empty_sorted,
    forward_only=True,
)
