"""Hooks: functions that SGLang calls in place of its Triton experts and of its FP8 GEMM.

Both hooks get SGLang's own function, and call it where fp8moe does not support a call. The weights are still in the
format that SGLang's function expects: SGLang rewrites scales only for its own DeepGEMM functions.
"""

import functools
import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

import fp8moe

log = logging.getLogger("sglang.fp8moe")
BLOCK = [128, 128]
_modes = ExitStack()  # never closed: its modes last as long as the process


# ---- experts ----


def get_fused_func(original: Callable, pool: type, dispatcher: str, runner: str) -> Callable | None:
    """Hook: return fp8moe's experts function for the Triton runner without all-to-all, otherwise SGLang's own."""
    theirs = original(pool, dispatcher, runner)
    return functools.partial(experts, theirs) if (dispatcher, runner) == ("none", "triton") else theirs


def experts(theirs: Callable, dispatched: Any, quant_info: Any, config: Any) -> Any:
    """Run the experts of a layer on fp8moe, or by SGLang's own function (`theirs`) if fp8moe does not support them.

    dispatched: tokens with their top-k; expert ids index this rank's experts, and are -1 for experts of other ranks.
    """
    if why := experts_refusal(dispatched, quant_info, config):
        _leave_to_sglang("experts", why)
        return theirs(dispatched, quant_info, config)
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput

    x, routing = dispatched.hidden_states, dispatched.topk_output
    count, hidden, intermediate = quant_info.w2_weight.shape
    _taken("experts", (count, intermediate, hidden, routing.topk_ids.shape[1]), x)
    weights, scaling = routing.topk_weights, config.routed_scaling_factor
    if scaling not in (None, 1.0):
        weights = weights * scaling
    up, down = (quant_info.w13_weight, quant_info.w13_scale), (quant_info.w2_weight, quant_info.w2_scale)
    everywhere = config.num_experts  # number of experts on all ranks; it affects the choice of tile sizes
    return StandardCombineInput(fp8moe.experts(x, routing.topk_ids, weights, up, down, num_experts=everywhere))


def experts_refusal(dispatched: Any, quant_info: Any, config: Any) -> str | None:
    """Return why fp8moe does not run these experts; None if it does. Early versions of SGLang lack some attributes."""
    if why := _not_here(dispatched.hidden_states):
        return why
    if not quant_info.use_fp8_w8a8 or list(quant_info.block_shape or ()) != BLOCK or quant_info.per_channel_quant:
        return f"weights that are not FP8 in blocks of {BLOCK}"
    if any(scale.dtype != torch.float32 for scale in (quant_info.w13_scale, quant_info.w2_scale)):
        return f"scales in {quant_info.w13_scale.dtype}, not float32"
    if quant_info.b13 is not None or quant_info.b2 is not None:
        return "biases"
    if quant_info.a13_scale is not None or quant_info.a2_scale is not None:
        return "static scales of activations"
    if getattr(quant_info, "fuse_swiglu_interleaved", False):
        return "gate and up in turn, row by row"
    if config.activation != "silu" or not config.is_gated:
        return f"activation {config.activation}{'' if config.is_gated else ' without a gate'}"
    if any(limit is not None for limit in (config.gemm1_alpha, config.gemm1_clamp_limit, config.swiglu_limit)):
        return "SwiGLU with a limit or an alpha"
    for option in ("apply_router_weight_on_input", "no_combine"):
        if getattr(config, option):
            return option
    if not hasattr(dispatched.topk_output, "topk_ids"):
        return f"routing as {type(dispatched.topk_output).__name__}"
    return None


# ---- linears ----


def dispatch_auto_backend(original: Callable, *args: Any, **options: Any) -> Callable:
    """Hook: return the function for linears with FP8 blocks. SGLang calls this hook if --fp8-gemm-backend is auto."""
    return functools.partial(linear, original(*args, **options))


def linear(
    theirs: Callable,
    input: Tensor,
    weight: Tensor,
    block_size: list[int],
    weight_scale: Tensor,
    input_scale: Tensor | None = None,
    bias: Tensor | None = None,
    **more: Any,
) -> Tensor:
    """Return ``input @ weight.T + bias`` in bfloat16, by fp8moe or, if fp8moe does not support the call, by `theirs`.

    input: (..., K) bfloat16, or E4M3 with input_scale (..., K/128).
    """
    if why := linear_refusal(input, weight, block_size, weight_scale, input_scale):
        _leave_to_sglang("linears", why)
        return theirs(input, weight, block_size, weight_scale, input_scale, bias, **more)
    n, k = weight.shape
    _taken("linear", (n, k), input)
    if input_scale is None:
        return fp8moe.linear(input, (weight, weight_scale), bias)
    rows = input.reshape(-1, k)
    a = rows, input_scale.view(rows.shape[0], -1)
    return fp8moe.gemm(a, (weight, weight_scale), bias=bias).view(*input.shape[:-1], n)


def linear_refusal(
    input: Tensor, weight: Tensor, block_size: list[int], weight_scale: Tensor, input_scale: Tensor | None
) -> str | None:
    """Return why fp8moe does not run a linear with these operands; None if it does."""
    if why := _not_here(input):
        return why
    if list(block_size) != BLOCK:
        return f"blocks of {block_size}, not {BLOCK}"
    if input_scale is None and input.dtype != torch.bfloat16:
        return f"activations in {input.dtype}, not bfloat16"
    for scale in (weight_scale, input_scale):
        if scale is not None and scale.dtype != torch.float32:
            return f"scales in {scale.dtype}, not float32"
    if weight.dim() != 2 or weight.shape[0] % 8 or weight.shape[1] % 16:
        return f"a weight {tuple(weight.shape)}: it takes multiples of 8 output and 16 input features"
    return None


# ---- experts and linears ----


def _not_here(x: Tensor) -> str | None:
    if (x.is_cuda and _is_hopper(x.device)) or os.environ.get("FP8MOE_BACKEND") == "reference":
        return None
    return "it needs a Hopper GPU (sm_90); FP8MOE_BACKEND=reference runs anywhere, slowly"


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)


def _leave_to_sglang(layer: str, why: str) -> None:
    """Log once that a layer runs on SGLang's kernels, and why; with FP8MOE_STRICT=1 raise ValueError instead."""
    if os.environ.get("FP8MOE_STRICT") == "1":
        raise ValueError(f"fp8moe: {layer}: {why}; without FP8MOE_STRICT=1 they run on SGLang's kernels")
    if not torch.compiler.is_compiling():
        _say(logging.WARNING, f"fp8moe: {layer}: on SGLang's kernels: {why}")


def _taken(layer: str, shape: tuple[int, ...], x: Tensor) -> None:
    """At the first call with a shape, log that fp8moe runs the layer, and compile kernels for all numbers of tokens.

    The first call is part of the server's own warm-up.
    """
    if torch.compiler.is_compiling():
        return
    _follow_batch_invariance()
    _say(logging.INFO, f"fp8moe: {layer} {shape}: on fp8moe")
    if x.is_cuda and not torch.cuda.is_current_stream_capturing():
        _warm(shape, x.dtype if x.dtype.itemsize == 2 else torch.bfloat16)


@functools.cache
def _follow_batch_invariance() -> None:
    """Make fp8moe batch-invariant for the rest of the process if SGLang runs with --enable-deterministic-inference."""
    from sglang.srt.batch_invariant_ops import is_batch_invariant_mode_enabled

    if is_batch_invariant_mode_enabled():
        _modes.enter_context(fp8moe.batch_invariant())


@functools.cache
def _say(level: int, line: str) -> None:
    log.log(level, line)


@functools.cache
def _warm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    fp8moe.warm([shape], [_max_tokens()], dtype=dtype)


def _max_tokens() -> int:
    """Return the most tokens that a forward pass can have: a prefill chunk or, without chunking, max_prefill_tokens."""
    try:
        from sglang.srt.runtime_context import get_schedule as settings
    except ImportError:  # SGLang before 0.5.23
        from sglang.srt.server_args import get_global_server_args as settings
    chunk = settings().chunked_prefill_size
    return chunk if chunk and chunk > 0 else settings().max_prefill_tokens
