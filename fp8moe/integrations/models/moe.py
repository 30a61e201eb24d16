"""Mixture-of-experts blocks: router in our kernels, experts as they are, shared experts as `mlp` has them."""

import torch
from torch import Tensor, nn

from fp8moe.integrations.models import forms, mlp
from fp8moe.integrations.models.hooks import is_cast, runs_as_written
from fp8moe.integrations.models.second_stream import SecondStream
from fp8moe.integrations.names import NAME
from fp8moe.kernels.decoder_ops.rms_norm import Normed
from fp8moe.kernels.decoder_ops.router import Routing, route, router_logits
from fp8moe.layers.experts import GroupedExperts


def serves(module: nn.Module, dtype: torch.dtype) -> bool:
    """Whether `mix` computes what the block does for an input of this dtype."""
    if forms.form_of(module, forms.BLOCK) is None or not runs_as_written(module):
        return False
    return serves_router(module.gate, dtype)


def serves_router(module: nn.Module, dtype: torch.dtype) -> bool:
    """Whether our kernels route as the module does for an input of this dtype."""
    form = forms.form_of(module, forms.ROUTER)
    if form is None or not runs_as_written(module) or is_cast(module.weight):
        return False
    return module.weight.dtype is dtype or (form.in_float32 and module.weight.dtype is torch.float32)


def prepare(module: nn.Module) -> bool:
    """Move the weights of its shared experts together; returns whether these run in FP8 then."""
    shared = _shared(module)
    return shared is not None and mlp.prepare(shared)


def wants_quantized(module: nn.Module) -> bool:
    """Whether `mix` reads its input in FP8 too; it always reads the values."""
    shared = _shared(module)
    return shared is not None and mlp.serves(shared)


def mix(module: nn.Module, normed: Normed) -> Tensor:
    """The block's result (M, H), added to normed.sum.

    normed: of its input's rows, with values and the sum before them, quantized if that is wanted.
    """
    form = forms.form_of(module, forms.BLOCK)
    x = normed.values
    _, routing = _route(module.gate, x)
    if form.shared is None and _adds(module.experts):
        return module.experts(x, routing.index, routing.weights, residual=normed.sum)
    beside = SecondStream(x.device) if form.shared and x.is_cuda and _sends(module.experts) else None
    out = module.experts(x, routing.index, routing.weights)
    if form.shared is None:
        return normed.sum + out

    def shared() -> Tensor:
        return _run_shared(module, form, normed)

    return normed.sum + (out + (shared() if beside is None else beside.run(shared)))


def _run_shared(module: nn.Module, form: forms.Block, normed: Normed) -> Tensor:
    shared, x = _shared(module), normed.values
    out = shared(x) if normed.quantized is None else mlp.feed_forward(shared, normed.quantized, x.dtype)
    return torch.sigmoid(module.shared_expert_gate(x)) * out if form.gated else out


def _sends(experts: nn.Module) -> bool:
    """Whether the experts are spread over several ranks, whose tokens and sums they wait for."""
    return any(getattr(experts, name, None) is not None for name in ("parallel", "_fp8moe_parallel"))


def _adds(experts: nn.Module) -> bool:
    """Whether the experts take a residual."""
    chosen = getattr(getattr(experts, "config", None), "_experts_implementation", None)
    return runs_as_written(experts) and (type(experts) is GroupedExperts or chosen == NAME)


def _shared(module: nn.Module) -> nn.Module | None:
    name = forms.form_of(module, forms.BLOCK).shared
    return None if name is None else getattr(module, name)


def forward_router(module: nn.Module, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The forward of a router by itself: logits (M, E), weights and indices (M, K).

    Its own where gradients are on and where our kernels do not serve it.
    """
    if torch.is_grad_enabled() or module.training or not serves_router(module, hidden_states.dtype):
        return type(module).forward(module, hidden_states)
    logits, routing = _route(module, hidden_states.reshape(-1, hidden_states.shape[-1]))
    return logits, routing.weights, routing.index


def _route(router: nn.Module, x: Tensor) -> tuple[Tensor, Routing]:
    """x (M, H); the logits (M, E) and what follows from them."""
    form = forms.form_of(router, forms.ROUTER)
    operand = x.to(router.weight.dtype)  # transformers keeps some routers in float32, in models of any dtype
    logits = router_logits(operand, router.weight, dtype=torch.float32 if form.in_float32 else x.dtype)
    groups = {}
    if form.bias:
        groups = {
            "bias": router.e_score_correction_bias.float(),
            "num_groups": router.num_group,
            "top_groups": router.topk_group,
            "scale": router.routed_scaling_factor,
        }
    return logits, route(
        logits,
        router.top_k,
        score=form.score,
        normalize=form.normalize == "always" or bool(router.norm_topk_prob),
        dtype=logits.dtype if form.cast else torch.float32,
        **groups,
    )
