"""Forms of routers: the arguments of `route` with which it does what a model's router does."""

import torch

from fp8moe.kernels.decoder_ops import router

SOFTMAX = {"score": "softmax", "normalize": True}
DEEPSEEK = {"score": "sigmoid", "normalize": True, "scale": 2.5}

# experts, top_k, what else `route` takes; bias: whether there is one
FORMS = (
    (128, 8, SOFTMAX),
    (64, 8, SOFTMAX | {"normalize": False}),
    (8, 2, SOFTMAX),
    (256, 8, DEEPSEEK | {"bias": True, "num_groups": 8, "top_groups": 4}),
    (160, 8, DEEPSEEK | {"bias": True}),
    (160, 6, SOFTMAX | {"normalize": False, "num_groups": 8, "top_groups": 3, "scale": 16.0}),
    (60, 4, SOFTMAX | {"bias": True, "num_groups": 6, "top_groups": 5}),
    (33, 5, DEEPSEEK | {"normalize": False}),
    (72, 32, DEEPSEEK | {"bias": True, "num_groups": 9, "top_groups": 4}),
    (64, 32, DEEPSEEK | {"num_groups": 32, "top_groups": 16}),
    (1024, 32, SOFTMAX | {"bias": True}),
    (1, 1, SOFTMAX),
)


def route(logits, top_k, *, bias=None, dtype, sort=False, **rule) -> router.ChosenExperts:
    """`router.route` by the fields of its rule."""
    return router.route(logits, router.RoutingRule(top_k, **rule), bias=bias, dtype=dtype, sort=sort)


def arguments(experts: int, form: dict, device: str = "cpu") -> dict:
    """What `route` takes, with a bias in which some experts are far ahead."""
    generator = torch.Generator(device).manual_seed(7)
    bias = torch.randn(experts, generator=generator, device=device) * 0.2 if form.get("bias") else None
    return form | {"bias": bias}


def dense(routing: tuple[torch.Tensor, torch.Tensor], experts: int) -> torch.Tensor:
    """Weights (T, E), NaN for experts that are not chosen: without the order of the choice."""
    index, weights, *_ = routing
    out = torch.full((len(index), experts), float("nan"), dtype=weights.dtype, device=index.device)
    return out.scatter_(1, index, weights)


def exact_route(
    logits: torch.Tensor,
    index: torch.Tensor,
    *,
    score: str,
    bias: torch.Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    normalize: bool,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """In float64: the weights (T, K) of these choices, and for each token how far they are from the best ones.

    That is the largest (biased) score that was left out, less the smallest one that was chosen, in the groups of the
    choices; and the same of groups, if it is larger.
    """
    scores = logits.double().sigmoid() if score == "sigmoid" else logits.double().softmax(-1)
    choice = scores if bias is None else scores + bias.double()
    chosen = torch.zeros_like(choice, dtype=torch.bool).scatter_(1, index, True)
    missed = torch.full_like(choice[:, 0], float("-inf"))
    open_experts = torch.ones_like(chosen)
    if num_groups > 1:
        group_scores = choice.unflatten(-1, (num_groups, -1)).topk(2, -1).values.sum(-1)
        last = group_scores.topk(top_groups, -1).values[:, -1:]
        used = chosen.unflatten(-1, (num_groups, -1)).any(-1)
        missed = (last - group_scores).masked_fill(~used, float("-inf")).amax(-1)
        open_experts = ((group_scores > last) | used).repeat_interleave(choice.shape[-1] // num_groups, -1)
    left = choice.masked_fill(chosen | ~open_experts, float("-inf")).amax(-1)
    missed = torch.maximum(missed, left - choice.gather(1, index).amin(-1))
    weights = scores.gather(1, index)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * scale, missed
