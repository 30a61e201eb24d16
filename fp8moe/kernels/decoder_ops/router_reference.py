"""Logits, choice and weights of a router in plain PyTorch, on any device. Arguments are checked by the callers."""

import torch
from torch import Tensor

from fp8moe.kernels.decoder_ops.router_plan import Form
from fp8moe.runtime.fixed_rows import by_fixed_rows


def router_logits(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """x (T, H), weight (E, H) -> (T, E)."""
    return by_fixed_rows(lambda rows: (rows.float() @ weight.float().t()).to(dtype), x)


def route(logits: Tensor, bias: Tensor | None, form: Form, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """logits (T, E) -> index and weights (T, top_k), the first choice first."""
    logits = logits.float().contiguous()  # PyTorch computes other bits in other layouts
    scores = logits.sigmoid() if form.sigmoid else logits.softmax(-1)
    # Scores grow with logits, so the logits themselves can be chosen by: they do not become equal by rounding.
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
        # The least divisor is of DeepSeek-V3's modules: scores of softmax are not all 0.
        weights = weights / (weights.sum(-1, keepdim=True) + (1e-20 if form.sigmoid else 0.0))
    return index, (weights * scale).to(dtype)


def _largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest of each row and their places; NaN above all others, of equal ones the first. topk is not stable."""
    positive = torch.where(values.isnan(), torch.nan, values)  # on a GPU NaN is sorted by its sign
    ordered, places = positive.sort(dim=-1, descending=True, stable=True)
    return ordered[..., :count], places[..., :count].contiguous()
