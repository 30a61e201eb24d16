"""warm: compiles the kernels of linears and experts before a call needs them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from torch import nn

from fp8moe.kernels.activation import Activation
from fp8moe.kernels.experts.operands import Shard, TokenOperands
from fp8moe.kernels.experts.operator import run_shard
from fp8moe.kernels.gemm.warmup import RequiredKernels, lengths, required_by
from fp8moe.layers.experts import GroupedExperts
from fp8moe.layers.linear import FP8Linear
from fp8moe.quant import arranged
from fp8moe.quant.quantize import quantize_1x128
from fp8moe.runtime import config, jit
from fp8moe.runtime.backend import use_cuda
from fp8moe.runtime.checks import check_int
from fp8moe.runtime.launch import num_sms
from fp8moe.runtime.record import in_own_process, reserve_memory, reserved
from fp8moe.runtime.sm90 import USUAL_SMS

_SHARD = Shard(row_dtype=torch.bfloat16, out_dtype=torch.bfloat16)  # of `experts` for quantized tokens


class _Options(NamedTuple):
    """The arguments of `warm` that apply to every shape."""

    activation: Activation
    bias: bool
    weight_scales: str
    weight_format: str
    dtype: torch.dtype


def warm(
    shapes: Iterable[Sequence[int]],
    token_counts: Iterable[int],
    *,
    activation: Activation = Activation(),  # noqa: B008 (immutable)
    bias: bool = False,
    weight_scales: str = "block",
    weight_format: str = "fp8",
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Compile the inference kernels of `FP8Linear`, `GroupedExperts` and `experts` for these shapes.

    Otherwise the first call that needs a kernel compiles it, which takes about half a second. On a server, a request
    would have to wait. `fp8moe warmup` compiles the kernels of a whole model ahead of time.

    shapes: (N, K) of a linear with N output and K input features; (E, I, H, top_k) of E experts with intermediate size
        I and hidden size H, of which each token is routed to top_k.
    token_counts: numbers of tokens per call. Kernels are compiled for every number up to the largest.
    activation, bias, weight_scales: as in `GroupedExperts` and `FP8Linear`. weight_format: as in `GroupedExperts`, of
        experts only.
    dtype: bfloat16, float16 or float32, of inputs, results and biases.

    For layers without biases, the kernels for tokens that are already quantized are compiled too. Kernels of training,
    of experts that are spread over several GPUs, and of the masked layout, which depend on decode_capacity, are not
    compiled.

    Compiled kernels are kept in the cache directory (FP8MOE_CACHE_DIR); those already there are not compiled again. If
    the current device can run the kernels, they are chosen for its number of SMs and also loaded into the process,
    ready to be captured in a CUDA graph; otherwise they are chosen for the SMs of an H100. Within `batch_invariant`,
    the kernels of that mode are compiled. Finding out which kernels are needed takes some seconds, mostly in a
    subprocess.

    Raises ValueError for a shape of another length, for no shapes or counts, for a size or count below one, and for
    arguments that the classes refuse; TypeError for a size or count that is not an int; RuntimeError if the compiler is
    missing.
    """
    sizes = [tuple(shape) for shape in shapes]
    for shape in sizes:
        if len(shape) not in (2, 4):
            raise ValueError(f"shapes: expected (N, K) or (E, I, H, top_k), got {shape}")
        _checked("shapes", shape)
    counts = _checked("token_counts", token_counts)
    for argument, given in (("shapes", sizes), ("token_counts", counts)):
        if not given:
            raise ValueError(f"{argument}: expected at least one")
    tokens = max(counts)
    on_gpu = torch.cuda.is_available() and use_cuda(torch.empty(0, dtype=torch.float32, device="cuda"))
    sms = num_sms(torch.cuda.current_device()) if on_gpu else min(USUAL_SMS, config.settings.num_sms or USUAL_SMS)
    options = _Options(activation, bias, weight_scales, weight_format, dtype)
    kernels, found = in_own_process(_record, sizes, tokens, options, sms)
    for family, rows in found.items():
        kernels |= family.all_variants(rows, rows * tokens, sms)
    if weight_format in arranged.ARRANGED:
        kernels |= set(arranged.kernel_specs())
    if on_gpu:
        jit.load_all(kernels)
    else:
        jit.compile_all(kernels)


def _checked(argument: str, values: Iterable[int]) -> tuple[int, ...]:
    values = tuple(values)
    for value in values:
        check_int(argument, value, at_least=1)
    return values


def _record(shapes: Iterable[tuple[int, ...]], tokens: int, options: _Options, sms: int) -> RequiredKernels:
    return required_by(_calls(shapes, lengths(tokens), options), sms)


def _calls(
    shapes: Iterable[tuple[int, ...]], counts: Iterable[int], options: _Options
) -> Iterator[Callable[[], object]]:
    """Yield, for each pair of a shape and a token count, a function that calls a module of this shape once."""
    for shape in shapes:
        module = _module(shape, options)
        yield from (partial(_call, module, shape, count, options) for count in counts)


def _module(shape: tuple[int, ...], options: _Options) -> nn.Module:
    """Make the linear or experts of a given shape, with weights in reserved memory (`reserve_memory`)."""
    activation, bias, weight_scales, weight_format, dtype = options
    own = {"bias": bias, "weight_scales": weight_scales, "dtype": dtype, "device": "meta"}
    if len(shape) == 2:
        module: nn.Module = FP8Linear(shape[1], shape[0], **own)
    else:
        num_experts, intermediate_size, hidden_size, _ = shape
        module = GroupedExperts(
            num_experts=num_experts,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            activation=activation.name,
            gated=activation.gated,
            swiglu_limit=activation.limit,
            swiglu_alpha=activation.alpha,
            weight_format=weight_format,
            **own,
        )
    reserve_memory(module)
    return module


def _call(module: nn.Module, shape: tuple[int, ...], tokens: int, options: _Options) -> None:
    """Call a linear once; call experts with each dtype of the routing, and also with quantized tokens."""
    if len(shape) == 2:
        module(reserved((tokens, shape[1]), options.dtype))
        return
    *_, hidden_size, top_k = shape
    x, layer = reserved((tokens, hidden_size), options.dtype), module.local_weights().layer
    for index_dtype, weight_dtype in product((torch.int64, torch.int32), {torch.float32, options.dtype}):
        index = torch.zeros(tokens, top_k, dtype=index_dtype, device="cpu")
        weights = torch.zeros(tokens, top_k, dtype=weight_dtype, device="cpu")
        module(x, index, weights)
        if not options.bias:  # as `experts` does, but weights in four bits are arranged already
            data, scale = quantize_1x128(x)
            operands = TokenOperands(data, index, weights, layer, hidden_scale=scale, shard=_SHARD)
            run_shard(operands, "fp8moe.experts")
