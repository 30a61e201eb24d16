"""The fused feed-forward half of a decoder layer: SwiGLU modules in FP8, and mixture-of-experts blocks.

Gate and up are one GEMM, whose epilogue applies SwiGLU and quantizes. In a mixture-of-experts block the router runs in
fp8moe's kernels, shared experts run like SwiGLU modules, and the routed experts module is called unchanged.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn

from fp8moe.hf.experts import NAME, chosen_implementation
from fp8moe.hf.fused import known_forwards, linears, norms
from fp8moe.hf.fused.known_forwards import form_of, is_cast, runs_as_written
from fp8moe.kernels.activation import Activation
from fp8moe.kernels.decoder_ops.norm_route import norm_route
from fp8moe.kernels.decoder_ops.rms_norm import Normed, rms_norm
from fp8moe.kernels.decoder_ops.router import ChosenExperts, RoutingRule, route, router_logits, sorts
from fp8moe.kernels.experts.operands import Norm
from fp8moe.kernels.gemm.api import grouped_gemm_swiglu
from fp8moe.layers.experts import GroupedExperts
from fp8moe.quant.formats import FP8Tensor


def prepare(module: nn.Module, dtype: torch.dtype) -> list[str]:
    """Make gate and up weights adjacent in memory; return the names of the parts that run fused afterwards.

    module: a feed-forward module or mixture-of-experts block. dtype: the input's dtype.
    """
    if not _serves_block(module, dtype):
        return ["feed-forward"] if _prepare_mlp(module) else []
    shared = _shared(module)
    return ["router", "shared experts"] if shared is not None and _prepare_mlp(shared) else ["router"]


def forward(
    module: nn.Module, norm: nn.Module, attended: Tensor, residual: Tensor, following: Norm | None
) -> tuple[Tensor, Normed | None]:
    """Compute the second half of a decoder layer: norm(attended + residual), the module, and the residual add.

    module: the feed-forward module. attended: the attention's result, without residual. following: the norm that the
    next layer begins with. Returns the layer's result and the result normalized by `following`, or None in its place
    if `following` is None or the normalization would take another kernel.
    """
    if _serves_block(module, residual.dtype):
        router, shared = _router(module), _shared(module)
        few = sorts(residual.numel() // residual.shape[-1], len(router.weight))
        quantized = (few and _takes_order(module.experts)) or (shared is not None and _serves_mlp(shared))
        normed, routing = _norm_and_route(norm, router, attended, residual, quantized=quantized)
        result, following_normed = _mix(module, normed, routing, following)
        return result.view(residual.shape), following_normed
    if _serves_mlp(module):
        normed = norms.norm(norm, attended, residual, values=False, quantized=True)
        out = _run_mlp(module, normed.quantized, residual.dtype)
    else:
        normed = norms.norm(norm, attended, residual, values=True, quantized=False)
        out = module(normed.values.view(residual.shape))
        out = (out[0] if isinstance(out, tuple) else out).view(normed.sum.shape)  # GPT-OSS's also returns weights
    result, following_normed = _add(normed.sum, out, following)
    return result.view(residual.shape), following_normed


def _add(residual: Tensor, out: Tensor, following: Norm | None) -> tuple[Tensor, Normed | None]:
    """Return residual + out (M, H), and the same rows normalized by `following`, or None."""
    if following is None or out.dtype is not residual.dtype:
        return residual + out, None
    weight, eps, quantized = following
    normed = rms_norm(out, weight, eps, residual=residual, values=not quantized, quantized=quantized)
    return normed.sum, normed._replace(sum=None)


# Feed-forward modules.


def _is_known_mlp(module: nn.Module) -> bool:
    from transformers.activations import SiLUActivation

    if form_of(module, known_forwards.MLP) is None or not runs_as_written(module):
        return False
    return type(module.act_fn) in (SiLUActivation, nn.SiLU)


def _prepare_mlp(module: nn.Module) -> bool:
    """Make the weights of gate and up adjacent in memory; return whether `_run_mlp` can then run the module."""
    if not _is_known_mlp(module):
        return False
    parts = module.gate_proj, module.up_proj
    return linears.are_fp8(parts) and linears.pack(parts, blocks=False) and _serves_mlp(module)


def _serves_mlp(module: nn.Module) -> bool:
    """Return whether `_run_mlp` computes the same as the module's own forward."""
    if not _is_known_mlp(module):
        return False
    gate, up, down = (linears.weights(part) for part in (module.gate_proj, module.up_proj, module.down_proj))
    if gate is None or up is None or down is None or gate.bias is not None or len(gate.data) % 16:
        return False
    return linears.joined([gate, up], blocks=False) is not None


def _run_mlp(module: nn.Module, x: FP8Tensor, dtype: torch.dtype) -> Tensor:
    """Run a SwiGLU module on quantized rows x (M, H); return (M, H) in `dtype`."""
    gate_up = linears.joined([linears.weights(part) for part in (module.gate_proj, module.up_proj)], blocks=False)
    rows = len(x.data)
    hidden = grouped_gemm_swiglu(
        x,
        FP8Tensor(gate_up.data[None], gate_up.scale[None]),
        torch.arange(0, 2 * rows, max(rows, 1), dtype=torch.int32, device=x.data.device),
        activation=Activation(),
    )
    return linears.project(hidden, [module.down_proj], dtype)[0]


# Mixture-of-experts blocks.


def _serves_block(module: nn.Module, dtype: torch.dtype) -> bool:
    """Return whether `_mix` computes the same as the block's own forward for an input of this dtype."""
    if form_of(module, known_forwards.BLOCK) is None or not runs_as_written(module):
        return False
    return _serves_router(_router(module), dtype)


def _router(module: nn.Module) -> nn.Module:
    return getattr(module, form_of(module, known_forwards.BLOCK).router)


def _shared(module: nn.Module) -> nn.Module | None:
    """Return the block's shared experts, None if it has none."""
    name = form_of(module, known_forwards.BLOCK).shared
    return None if name is None else getattr(module, name)


def _mix(
    module: nn.Module, normed: Normed, routing: ChosenExperts, following: Norm | None
) -> tuple[Tensor, Normed | None]:
    """Run a mixture-of-experts block; return its result plus residual (M, H), and this sum normalized, or None.

    normed: the block's input after the norm, as values and, if experts read it in FP8, also quantized; its `sum` is the
    residual. routing: the experts that the router has chosen.
    """
    form = form_of(module, known_forwards.BLOCK)
    x = normed.values
    ours = _are_ours(module.experts)
    order = {}
    if routing.rows is not None and _takes_order(module.experts):
        order = {"groups": routing.groups, "rows": routing.rows, "quantized": normed.quantized}
    if form.shared is None and ours:
        inputs = x, routing.index, routing.weights
        if following is None:
            return module.experts(*inputs, residual=normed.sum, **order), None
        # transformers' experts modules run `experts_forward`, which accepts `norm`; GroupedExperts.forward does not.
        run = module.experts.forward_with_norm if type(module.experts) is GroupedExperts else module.experts
        return run(*inputs, norm=following, residual=normed.sum, **order)
    beside = SecondStream(x.device) if form.shared and x.is_cuda and _waits_for_ranks(module.experts) else None
    out = module.experts(x, routing.index, routing.weights, **order)
    if form.shared is None:
        return _add(normed.sum, out, following)

    def run_shared() -> Tensor:
        shared = _shared(module)
        in_fp8 = normed.quantized is not None and _serves_mlp(shared)
        out = _run_mlp(shared, normed.quantized, x.dtype) if in_fp8 else shared(x)
        return torch.sigmoid(module.shared_expert_gate(x)) * out if form.gated else out

    return _add(normed.sum, out + (run_shared() if beside is None else beside.run(run_shared)), following)


def _waits_for_ranks(experts: nn.Module) -> bool:
    """Return whether the experts are spread over several ranks. Then the GPU waits for other ranks in the forward."""
    return any(getattr(experts, name, None) is not None for name in ("parallel", "_fp8moe_parallel"))


def _takes_order(experts: nn.Module) -> bool:
    """Return whether the experts take what the router has sorted, and tokens that are quantized already."""
    alone = not _waits_for_ranks(experts) and getattr(experts, "decode_capacity", None) is None
    return alone and _are_ours(experts)


def _are_ours(experts: nn.Module) -> bool:
    """Return whether the experts run on fp8moe, and so accept a residual, sorted assignments and a norm."""
    ours = type(experts) is GroupedExperts or chosen_implementation(experts) == NAME
    return ours and runs_as_written(experts)


# Routers.


def forward_router(module: nn.Module, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Run a router outside of a fused block; return logits (M, E), weights (M, K) and indices (M, K).

    The router's own forward runs if gradients are enabled, if the router is in training mode, or if the kernels do not
    support the router.
    """
    if torch.is_grad_enabled() or module.training or not _serves_router(module, hidden_states.dtype):
        return type(module).forward(module, hidden_states)
    logits = _logits(module, hidden_states.reshape(-1, hidden_states.shape[-1]))
    routing = _route(module, logits)
    return logits, routing.weights, routing.index


def _serves_router(module: nn.Module, dtype: torch.dtype) -> bool:
    """Return whether fp8moe's kernels compute the same as the router's own forward for an input of this dtype."""
    form = form_of(module, known_forwards.ROUTER)
    if form is None or not runs_as_written(module) or is_cast(module.weight):
        return False
    return module.weight.dtype is dtype or (form.in_float32 and module.weight.dtype is torch.float32)


def _norm_and_route(
    norm: nn.Module, router: nn.Module, x: Tensor, residual: Tensor, *, quantized: bool
) -> tuple[Normed, ChosenExperts]:
    """Return the RMSNorm of x + residual and the experts chosen for its rows, by one kernel if possible."""
    if router.weight.dtype is not x.dtype:
        normed = norms.norm(norm, x, residual, values=True, quantized=quantized)
        return normed, _route(router, _logits(router, normed.values), sort=True)
    rows, added = (part.reshape(-1, part.shape[-1]) for part in (x, residual))
    logits_dtype = _logits_dtype(router, x)
    rule, choice_bias, dtype = _rule(router, logits_dtype)
    dtypes = {"logits_dtype": logits_dtype, "dtype": dtype}
    options = {"residual": added, "quantized": quantized, "bias": _bias(router), "choice_bias": choice_bias}
    operands = rows, norm.weight, norm.variance_epsilon, router.weight, rule
    normed, chosen = norm_route(*operands, **options, **dtypes)
    return normed, _noted(router, chosen)


def _logits(router: nn.Module, x: Tensor) -> Tensor:
    """Compute the router logits (M, E) of x (M, H)."""
    operand = x.to(router.weight.dtype)  # transformers keeps some routers in float32, in models of any dtype
    return router_logits(operand, router.weight, bias=_bias(router), dtype=_logits_dtype(router, x))


def _logits_dtype(router: nn.Module, x: Tensor) -> torch.dtype:
    return torch.float32 if form_of(router, known_forwards.ROUTER).in_float32 else x.dtype


def _bias(router: nn.Module) -> Tensor | None:
    """Return the bias of the router's logits."""
    return router.bias if form_of(router, known_forwards.ROUTER).logits_bias else None


def _rule(router: nn.Module, logits_dtype: torch.dtype) -> tuple[RoutingRule, Tensor | None, torch.dtype]:
    """Return a router's rule, the bias by which it chooses, and the dtype of its weights."""
    form, bias, groups = form_of(router, known_forwards.ROUTER), None, ()
    if form.bias:
        bias = router.e_score_correction_bias.float()
        groups = router.num_group, router.topk_group, router.routed_scaling_factor
    normalize = form.normalize == "always" or bool(router.norm_topk_prob)
    rule = RoutingRule(router.top_k, form.score, normalize, *groups)
    return rule, bias, logits_dtype if form.cast else torch.float32


def _route(router: nn.Module, logits: Tensor, *, sort: bool = False) -> ChosenExperts:
    """Choose the experts for router logits (M, E) by the router's own rule. sort: see `kernels.decoder_ops.router`."""
    rule, bias, dtype = _rule(router, logits.dtype)
    return _noted(router, route(logits, rule, bias=bias, dtype=dtype, sort=sort))


def _noted(router: nn.Module, chosen: ChosenExperts) -> ChosenExperts:
    """Hand the choice to a recorder of the router, if there is one, and return it."""
    if (note := known_forwards.recorders.get().get(router)) is not None:
        note(chosen.index)
    return chosen


class SecondStream:
    """A second CUDA stream, whose work runs beside that of the current stream.

    The second stream forks from the current stream when the object is made, and joins it at the end of `run`. Memory
    that a stream frees is only reused by later work of the same stream, which runs after the join. So neither stream
    overwrites what the other reads. A graph capture on the current stream captures the second stream too.
    """

    def __init__(self, device: torch.device):
        self._stream = _second_stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))

    def run(self, work: Callable[[], Tensor]) -> Tensor:
        """Run work on the second stream, and make the current stream wait for its result."""
        current = torch.cuda.current_stream(self._stream.device)
        with torch.cuda.stream(self._stream):
            out = work()
        current.wait_stream(self._stream)
        return out


@cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
