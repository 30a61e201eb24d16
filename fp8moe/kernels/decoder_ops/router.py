"""Router of a mixture-of-experts layer: ``router_logits`` and ``route``, and the operators behind them."""

from typing import NamedTuple

import torch
from torch import Tensor

from fp8moe.kernels.decoder_ops import checks, router_plan, router_reference
from fp8moe.kernels.decoder_ops.router_plan import Form
from fp8moe.runtime import autograd
from fp8moe.runtime.backend import use_cuda
from fp8moe.runtime.checks import check_tensor
from fp8moe.runtime.operator import define


class Routing(NamedTuple):
    """The experts of each token, the first choice first. index: int64 (T, top_k). weights: (T, top_k)."""

    index: Tensor
    weights: Tensor


def router_logits(x: Tensor, weight: Tensor, *, dtype: torch.dtype) -> Tensor:
    """``x @ weight.T``, summed in float32 and rounded once to the result.

    x: (T, H) bfloat16, float16 or float32, any strides. weight: (E, H) of its dtype.
    dtype: bfloat16, float16 or float32, of the result (T, E).
    Equal inputs give equal bits. There is no backward: calling it raises RuntimeError.

    A kernel of its own computes up to 64 tokens, if x has no more than 256 KB and 32 KB a row: its thread blocks share
    out the weight, and each of them reads all of x. Beyond that a GEMM is faster: torch.mm with a float32 result, since
    F.linear may round partial sums to bfloat16. Of float32 operands torch.mm follows PyTorch's setting for TF32. Where
    results are to be batch invariant (`fp8moe.batch_invariant`), the kernel computes any number of tokens.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape or device.
    """
    check_tensor("x", x)
    check_tensor("weight", weight)
    return autograd.run(_router_logits_op, "fp8moe.kernels.decoder_ops.router_logits", x, weight, dtype)


def route(
    logits: Tensor,
    top_k: int,
    *,
    score: str,
    bias: Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    normalize: bool,
    scale: float = 1.0,
    dtype: torch.dtype,
) -> Routing:
    """Choose the top_k experts of each token by their scores, and weigh them by these, in float32.

    logits: (T, E) bfloat16, float16 or float32, any strides; E up to 1024.
    top_k: up to 32, and not more than there are experts in top_groups groups.
    score: "softmax" or "sigmoid" of the logits.
    bias: float32 (E,), added to the scores for the choice alone: arXiv:2408.15664. None for none.
    num_groups, top_groups: of num_groups groups of neighbouring experts, 1 to 32, only the top_groups are chosen from
        whose two largest (biased) scores have the largest sum: DeepSeek-V3, arXiv:2412.19437, section 2.1.2.
    normalize: divide the weights by their sum. They are then multiplied by scale and rounded to dtype: bfloat16,
        float16 or float32.
    Returns Routing(index, weights). Of equal experts or groups the first is chosen. NaN comes before all numbers, so
    that it is among the weights. Equal inputs give equal bits. There is no backward: calling it raises RuntimeError.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong size, score or device.
    """
    check_tensor("logits", logits)
    if bias is not None:
        check_tensor("bias", bias)
    checks.form(top_k, score, num_groups, top_groups)
    checks.number("scale", scale)
    arguments = (logits, top_k, score, bias, num_groups, top_groups, normalize, scale, dtype)
    return Routing(*autograd.run(_route_op, "fp8moe.kernels.decoder_ops.route", *arguments))


def _router_logits(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    checks.router_logits(x, weight, dtype)
    backend = router_plan if use_cuda(x) else router_reference
    return backend.router_logits(x, weight, dtype)


def _router_logits_fake(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    checks.router_logits(x, weight, dtype)
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=dtype)


def _route(
    logits: Tensor,
    top_k: int,
    score: str,
    bias: Tensor | None,
    num_groups: int,
    top_groups: int,
    normalize: bool,
    scale: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    checks.route(logits, top_k, bias, num_groups, top_groups, dtype)
    backend = router_plan if use_cuda(logits) else router_reference
    form = Form(top_k, score == "sigmoid", bias is not None, num_groups, top_groups, normalize)
    return backend.route(logits, bias, form, scale, dtype)


def _route_fake(
    logits: Tensor,
    top_k: int,
    score: str,
    bias: Tensor | None,
    num_groups: int,
    top_groups: int,
    normalize: bool,
    scale: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    checks.route(logits, top_k, bias, num_groups, top_groups, dtype)
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=torch.int64), logits.new_empty(shape, dtype=dtype)


_router_logits_op = define(
    "router_logits(Tensor x, Tensor weight, ScalarType dtype) -> Tensor",
    _router_logits,
    _router_logits_fake,
    forward_only=True,
)
_route_op = define(
    "route(Tensor logits, int top_k, str score, Tensor? bias, int num_groups, int top_groups, bool normalize, "
    "float scale, ScalarType dtype) -> (Tensor, Tensor)",
    _route,
    _route_fake,
    forward_only=True,
)
