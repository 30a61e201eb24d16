"""The feed-forward half of a decoder layer: SwiGLU modules in FP8, and mixture-of-experts blocks.

Gate and up are one GEMM, which activates and quantizes its result. In a mixture-of-experts block the router runs in
fp8moe's kernels, shared experts run like SwiGLU modules, and the routed experts as they are.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn

from fp8moe.hf.experts import NAME, chosen_implementation
from fp8moe.hf.fused import known_forwards, linears, norms
from fp8moe.hf.fused.known_forwards import form_of, is_cast, runs_as_written
from fp8moe.kernels.activation import Activation
from fp8moe.kernels.decoder_ops.norm_logits import norm_logits
from fp8moe.kernels.decoder_ops.rms_norm import Normed, rms_norm
from fp8moe.kernels.decoder_ops.router import ChosenExperts, RoutingRule, route, router_logits
from fp8moe.kernels.experts.operands import Norm
from fp8moe.kernels.gemm.api import grouped_gemm_swiglu
from fp8moe.layers.experts import GroupedExperts
from fp8moe.quant.formats import FP8Tensor


def prepare(module: nn.Module, dtype: torch.dtype) -> list[str]:
    """Pack the weights that are applied to the same input into one tensor.

    dtype: the dtype of the input. Returns the names of the parts that then run fused.
    """
    if not _serves_block(module, dtype):
        return ["feed-forward"] if _prepare_mlp(module) else []
    shared = _shared(module)
    return ["router", "shared experts"] if shared is not None and _prepare_mlp(shared) else ["router"]


def forward(
    module: nn.Module, norm: nn.Module, attended: Tensor, residual: Tensor, following: Norm | None
) -> tuple[Tensor, Normed | None]:
    """Compute the layer's result of the attention's result, which has neither residual nor norm yet.

    following: the norm of the next module, computed too where that takes no further kernel.
    """
    if _serves_block(module, residual.dtype):
        shared = _shared(module)
        normed, logits = _norm_and_logits(
            norm, module.gate, attended, residual, quantized=shared is not None and _serves_mlp(shared)
        )
        result, following_normed = _mix(module, normed, logits, following)
        return result.view(residual.shape), following_normed
    if _serves_mlp(module):
        normed = norms.norm(norm, attended, residual, values=False, quantized=True)
        out = _run_mlp(module, normed.quantized, residual.dtype)
    else:
        normed = norms.norm(norm, attended, residual, values=True, quantized=False)
        out = module(normed.values.view(residual.shape)).view(normed.sum.shape)
    result, following_normed = _add(normed.sum, out, following)
    return result.view(residual.shape), following_normed


def _add(residual: Tensor, out: Tensor, following: Norm | None) -> tuple[Tensor, Normed | None]:
    """Return residual + out (M, H), and its norm."""
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
    """Move the weights of gate and up together. Returns whether `_run_mlp` serves the module then."""
    if not _is_known_mlp(module) or not linears.pack([module.gate_proj, module.up_proj], blocks=False):
        return False
    return _serves_mlp(module)


def _serves_mlp(module: nn.Module) -> bool:
    """Return whether `_run_mlp` computes what the module does for an input in FP8."""
    if not _is_known_mlp(module):
        return False
    gate, up, down = (linears.weights(part) for part in (module.gate_proj, module.up_proj, module.down_proj))
    if gate is None or up is None or down is None or gate.bias is not None or len(gate.data) % 16:
        return False
    return linears.joined([gate, up], blocks=False) is not None


def _run_mlp(module: nn.Module, x: FP8Tensor, dtype: torch.dtype) -> Tensor:
    """Compute the module's result (M, H) in `dtype`. x: data (M, H)."""
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
    """Return whether `_mix` computes what the block does for an input of this dtype."""
    if form_of(module, known_forwards.BLOCK) is None or not runs_as_written(module):
        return False
    return _serves_router(module.gate, dtype)


def _shared(module: nn.Module) -> nn.Module | None:
    """Return the block's shared experts."""
    name = form_of(module, known_forwards.BLOCK).shared
    return None if name is None else getattr(module, name)


def _mix(module: nn.Module, normed: Normed, logits: Tensor, following: Norm | None) -> tuple[Tensor, Normed | None]:
    """Return normed.sum plus the block's result (M, H), and the norm `following` as in `forward`.

    normed: the norm of the input's rows, as values, with its sum, and quantized if shared experts run in FP8.
    logits: of the router.
    """
    form = form_of(module, known_forwards.BLOCK)
    x = normed.values
    ours = _are_ours(module.experts)
    routing = _route(module.gate, logits, sort=ours and _sorts_as_router(module.experts))
    order = {} if routing.rows is None else {"groups": routing.groups, "rows": routing.rows}
    if form.shared is None and ours:
        inputs = x, routing.index, routing.weights
        if following is None:
            return module.experts(*inputs, residual=normed.sum, **order), None
        # transformers' modules run what `register` has given them.
        run = module.experts.forward_with_norm if type(module.experts) is GroupedExperts else module.experts
        return run(*inputs, norm=following, residual=normed.sum, **order)
    beside = SecondStream(x.device) if form.shared and x.is_cuda and _waits_for_ranks(module.experts) else None
    out = module.experts(x, routing.index, routing.weights, **order)
    if form.shared is None:
        return _add(normed.sum, out, following)

    def run_shared() -> Tensor:
        shared = _shared(module)
        out = shared(x) if normed.quantized is None else _run_mlp(shared, normed.quantized, x.dtype)
        return torch.sigmoid(module.shared_expert_gate(x)) * out if form.gated else out

    return _add(normed.sum, out + (run_shared() if beside is None else beside.run(run_shared)), following)


def _waits_for_ranks(experts: nn.Module) -> bool:
    """Return whether the experts are spread over several ranks, and wait for each other."""
    return any(getattr(experts, name, None) is not None for name in ("parallel", "_fp8moe_parallel"))


def _sorts_as_router(experts: nn.Module) -> bool:
    """Return whether our experts need the assignments in the order in which the router can give them."""
    return not _waits_for_ranks(experts) and getattr(experts, "decode_capacity", None) is None


def _are_ours(experts: nn.Module) -> bool:
    """Return whether the experts take a residual, sorted assignments, and a norm of the result."""
    ours = type(experts) is GroupedExperts or chosen_implementation(experts) == NAME
    return ours and runs_as_written(experts)


# Routers.


def forward_router(module: nn.Module, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Run a router that is in no layer: logits (M, E), weights and indices (M, K).

    Its own forward runs where gradients are on and where our kernels do not serve it.
    """
    if torch.is_grad_enabled() or module.training or not _serves_router(module, hidden_states.dtype):
        return type(module).forward(module, hidden_states)
    logits = _logits(module, hidden_states.reshape(-1, hidden_states.shape[-1]))
    routing = _route(module, logits, sort=False)
    return logits, routing.weights, routing.index


def _serves_router(module: nn.Module, dtype: torch.dtype) -> bool:
    """Return whether our kernels route as the module does for an input of this dtype."""
    form = form_of(module, known_forwards.ROUTER)
    if form is None or not runs_as_written(module) or is_cast(module.weight):
        return False
    return module.weight.dtype is dtype or (form.in_float32 and module.weight.dtype is torch.float32)


def _norm_and_logits(
    norm: nn.Module, router: nn.Module, x: Tensor, residual: Tensor, *, quantized: bool
) -> tuple[Normed, Tensor]:
    """Run `norms.norm` with a residual, and the router on its values: logits (M, E)."""
    if router.weight.dtype is not x.dtype:
        normed = norms.norm(norm, x, residual, values=True, quantized=quantized)
        return normed, _logits(router, normed.values)
    rows, added = (part.reshape(-1, part.shape[-1]) for part in (x, residual))
    options = {"residual": added, "quantized": quantized, "dtype": _logits_dtype(router, x)}
    return norm_logits(rows, norm.weight, norm.variance_epsilon, router.weight, **options)


def _logits(router: nn.Module, x: Tensor) -> Tensor:
    """Compute the logits (M, E) of x (M, H)."""
    operand = x.to(router.weight.dtype)  # transformers keeps some routers in float32, in models of any dtype
    return router_logits(operand, router.weight, dtype=_logits_dtype(router, x))


def _logits_dtype(router: nn.Module, x: Tensor) -> torch.dtype:
    return torch.float32 if form_of(router, known_forwards.ROUTER).in_float32 else x.dtype


def _route(router: nn.Module, logits: Tensor, *, sort: bool) -> ChosenExperts:
    """Choose the experts for logits (M, E). sort: see `route`."""
    form, bias, groups = form_of(router, known_forwards.ROUTER), None, ()
    if form.bias:
        bias = router.e_score_correction_bias.float()
        groups = router.num_group, router.topk_group, router.routed_scaling_factor
    normalize = form.normalize == "always" or bool(router.norm_topk_prob)
    rule = RoutingRule(router.top_k, form.score, normalize, *groups)
    return route(logits, rule, bias=bias, dtype=logits.dtype if form.cast else torch.float32, sort=sort)


class SecondStream:
    """A stream beside the current one of a device: it starts where the current one is now, which later waits for it.

    Memory that one of the two streams frees is reused by later work of the same stream, after the two have met again;
    so nothing is written while the other stream reads it. A CUDA graph that is captured meanwhile has both streams.
    """

    def __init__(self, device: torch.device):
        self._stream = _second_stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))

    def run(self, work: Callable[[], Tensor]) -> Tensor:
        """Run work on this stream, and let the current one wait for its result."""
        current = torch.cuda.current_stream(self._stream.device)
        with torch.cuda.stream(self._stream):
            out = work()
        current.wait_stream(self._stream)
        return out


@cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
