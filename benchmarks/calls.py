"""Benchmark calls by op and sizes: `benchmarks.compare` times them, and `tools.digest` records them.

A case is plain data, the name of an op and its sizes, so that it can be sent to another process. `CALLS` maps each op
to the function that makes its operands and returns the call. This file uses only public names of fp8moe and its
operators `torch.ops.fp8moe.*`, so that older revisions can run the cases too.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn

import fp8moe
from benchmarks import shapes
from fp8moe import FP8Tensor

FP8_MAX = 448.0
STD = 100.0  # standard deviation of E4M3 values that result from quantizing normal data
AT_ONCE = 1 << 28  # elements drawn at a time, to bound temporary memory
CACHE_BLOCK = 64  # tokens per block of the paged cache


class Case(NamedTuple):
    """A call to build: the name of an op in `CALLS`, and the op's sizes (numbers, names of dtypes, flags)."""

    op: str
    sizes: dict[str, object]

    @property
    def name(self) -> str:
        return " ".join([self.op, *(f"{name}={value}" for name, value in self.sizes.items())])


class Operands:
    """Random operands on one device. Objects with the same seed draw the same values."""

    def __init__(self, device: str = "cuda", seed: int = 0):
        self.device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16, std: float = 1.0) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device).normal_(std=std, generator=self._generator)

    def uniform(self, *shape: int, mean: float) -> Tensor:
        """Draw float32 scales, uniform between 0.5 and 1.5 times `mean`."""
        low, high = mean / 2, 3 * mean / 2
        return torch.empty(shape, device=self.device).uniform_(low, high, generator=self._generator)

    def codes(self, *shape: int) -> Tensor:
        """Draw E4M3 values distributed like quantized normal data."""
        data = torch.empty(shape, dtype=torch.float8_e4m3fn, device=self.device)
        for part in data.view(-1).split(AT_ONCE):
            part.copy_(self.normal(part.numel(), std=STD).clamp_(-FP8_MAX, FP8_MAX))
        return data

    def zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def kv_cache(self, blocks: int, head_dim: int) -> Tensor:
        """Draw a paged cache of FP8 keys: each block holds the E4M3 values of its keys, then their float32 scales."""
        cache = self.zeros(blocks, CACHE_BLOCK, 1, head_dim + 4, dtype=torch.uint8)
        flat, size = cache.view(blocks, -1), CACHE_BLOCK * head_dim
        flat[:, :size] = self.codes(blocks, size).view(torch.uint8)
        flat[:, size:] = self.uniform(blocks, CACHE_BLOCK, mean=1 / STD).view(torch.uint8)
        return cache

    def integers(self, values: Tensor | Sequence[int], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.as_tensor(values, dtype=dtype).to(self.device)

    def rows(self, m: int, k: int) -> FP8Tensor:
        """Draw activations (m, k) with 1x128 scales, MN-major: the scales of one column block are contiguous."""
        scale = self.uniform(ceil_div(k, 128), 4 * ceil_div(m, 4), mean=1 / STD)
        return FP8Tensor(self.codes(m, k), scale.t()[:m])

    def weights(self, *shape: int) -> FP8Tensor:
        """Draw weights (..., n, k) with 128x128 scales. Their magnitude preserves the variance of activations."""
        *lead, n, k = shape
        scale = self.uniform(*lead, ceil_div(n, 128), ceil_div(k, 128), mean=k**-0.5 / STD)
        return FP8Tensor(self.codes(*shape), scale)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def flatten(value: object) -> list[Tensor]:
    """Return all tensors in `value`, which is a tensor or nested sequences of tensors."""
    return [value] if isinstance(value, Tensor) else [tensor for part in value for tensor in flatten(part)]


def group_sizes(groups: int, mean_rows: int) -> list[int]:
    """Draw the number of rows of each group: 0.7 to 1.3 times `mean_rows`, at least 1. The seed is always the same."""
    generator = random.Random(0)
    return [max(1, round(mean_rows * generator.uniform(0.7, 1.3))) for _ in range(groups)]


def group_offsets(groups: int, mean_rows: int) -> list[int]:
    return [0, *accumulate(group_sizes(groups, mean_rows))]


def gemm(
    make: Operands,
    m: int,
    n: int,
    k: int,
    bias: str | None = None,
    out_dtype: str = "bfloat16",
    pitch: int | None = None,
    c: str | None = None,
    new_out: bool = False,
) -> Callable:
    """Build a call of `gemm`.

    bias: its dtype; None: no bias. pitch: elements from one row of the result to the next; None: n. c: the matrix to
    add: "out" for the result itself, "apart" for another matrix; None: nothing is added. new_out: each call allocates
    its result.
    """
    dtype = getattr(torch, out_dtype)
    options = {"bias": None if bias is None else make.normal(n, dtype=getattr(torch, bias)), "out_dtype": dtype}
    out = make.zeros(m, pitch or n, dtype=dtype)[:, :n]
    if c is not None:
        options["c"] = out if c == "out" else make.normal(m, n, dtype=dtype)
    out = None if new_out else out
    return partial(fp8moe.gemm, make.rows(m, k), make.weights(n, k), out=out, **options)


def cublas(make: Operands, m: int, n: int, k: int) -> Callable:
    """Build a cuBLAS GEMM with one scale per operand: a control, since no revision of fp8moe affects its time."""
    one = torch.ones((), device=make.device)
    options = {"scale_a": one, "scale_b": one / STD, "out_dtype": torch.bfloat16, "use_fast_accum": True}
    return partial(torch._scaled_mm, make.codes(m, k), make.codes(n, k).t(), **options)


def grouped_gemm(make: Operands, groups: int, mean_rows: int, n: int, k: int, new_out: bool = False) -> Callable:
    """Build a call of `grouped_gemm`. new_out: each call allocates its result."""
    offsets = group_offsets(groups, mean_rows)
    out = make.zeros(offsets[-1], n, dtype=torch.bfloat16)
    operands = make.rows(offsets[-1], k), make.weights(groups, n, k), make.integers(offsets)
    return partial(fp8moe.grouped_gemm, *operands, out=None if new_out else out)


def grouped_gemm_masked(
    make: Operands, groups: int, mean_rows: int, max_m: int, n: int, k: int, expected_m: int | None = None
) -> Callable:
    """Build a call of `grouped_gemm_masked`. expected_m: the caller's estimate of rows per group; None: mean_rows."""
    a = FP8Tensor(*(part.unflatten(0, (groups, max_m)) for part in make.rows(groups * max_m, k)))
    out = make.zeros(groups, max_m, n, dtype=torch.bfloat16)
    sizes = make.integers(group_sizes(groups, mean_rows))
    expected_m = mean_rows if expected_m is None else expected_m
    return partial(fp8moe.grouped_gemm_masked, a, make.weights(groups, n, k), sizes, expected_m=expected_m, out=out)


def grouped_gemm_k(make: Operands, groups: int, m: int, n: int, total_k: int, add: bool = False) -> Callable:
    ends = list(accumulate(group_sizes(groups, total_k)))
    offsets = make.integers([0, *(128 * round(total_k / 128 * end / ends[-1]) for end in ends)])
    out = make.zeros(groups, m, n, dtype=torch.float32)
    operands = make.rows(m, total_k), make.rows(n, total_k), offsets
    return partial(fp8moe.grouped_gemm_k, *operands, out=out, accumulate=add)


def _quantize(name: str, make: Operands, m: int, k: int, dtype: str = "bfloat16", **options) -> Callable:
    return partial(getattr(fp8moe, name), make.normal(m, k, dtype=getattr(torch, dtype)), **options)


def mqa_logits(
    make: Operands, queries: int, tokens: int, heads: int = 64, head_dim: int = 128, fill_masked: bool = True
) -> Callable:
    """Build a call of `mqa_logits` for the last `queries` tokens; each query sees its own and all earlier keys."""
    kv = FP8Tensor(make.codes(tokens, head_dim), make.uniform(tokens, mean=1 / STD))
    q, weights = make.codes(queries, heads, head_dim), make.normal(queries, heads, dtype=torch.float32)
    starts, ends = torch.zeros(queries), torch.arange(tokens - queries, tokens) + 1
    return partial(
        fp8moe.mqa_logits, q, kv, weights, make.integers(starts), make.integers(ends), fill_masked=fill_masked
    )


def paged_mqa_logits(
    make: Operands,
    batch: int,
    context: int | Sequence[int],
    next_n: int,
    heads: int = 64,
    head_dim: int = 128,
    max_context_len: int | None = None,
    fill_masked: bool = True,
) -> Callable:
    """Build a call of `paged_mqa_logits`, as in a decode step; the cache blocks are in random order.

    context: the number of tokens of a sequence: one number for all sequences, or one number for each.
    """
    contexts = [context] * batch if isinstance(context, int) else context
    counts = [ceil_div(length, CACHE_BLOCK) for length in contexts]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0))
    table = nn.utils.rnn.pad_sequence(order.split(counts), batch_first=True)
    q = make.codes(batch, next_n, heads, head_dim)
    weights = make.normal(batch * next_n, heads, dtype=torch.float32)
    operands = make.kv_cache(sum(counts), head_dim), weights, make.integers(contexts)
    options = {"max_context_len": max_context_len or max(contexts), "fill_masked": fill_masked}
    return partial(fp8moe.paged_mqa_logits, q, *operands, make.integers(table), **options)


def _module(module: nn.Module, state: dict[str, Tensor]) -> nn.Module:
    module.load_state_dict(state, assign=True)
    return module


def _forward(module: nn.Module, *inputs: Tensor) -> Callable:
    return torch.no_grad()(partial(module, *inputs))


def _training(module: nn.Module, inputs: Sequence[Tensor], gradient: Tensor) -> Callable:
    """Build a call that runs forward and backward of a module; the call returns the result and all gradients.

    Each call marks the weights as changed, so that the module quantizes them again, as after an optimizer step.
    """
    leaves = [value for value in (*inputs, *module.parameters()) if value.requires_grad]

    def step() -> tuple[Tensor, ...]:
        for parameter in module.parameters():
            torch.autograd.graph.increment_version(parameter)
        out = module(*inputs)
        return out.detach(), *torch.autograd.grad(out, leaves, gradient)

    return step


def _linear(make: Operands, n: int, k: int, dtype: str, bias: bool, master_dtype: str | None) -> nn.Module:
    options, kind = {"device": "meta", "dtype": getattr(torch, dtype)}, getattr(torch, dtype)
    if master_dtype is None:
        weight, scale = make.weights(n, k)
        state = {"weight": weight, "weight_scale_inv": scale}
    else:
        options["master_dtype"] = getattr(torch, master_dtype)
        state = {"weight": make.normal(n, k, dtype=options["master_dtype"], std=k**-0.5)}
    if bias:
        state["bias"] = make.normal(n, dtype=kind)
    return _module(fp8moe.FP8Linear(k, n, bias, **options), state)


def linear(make: Operands, m: int, n: int, k: int, dtype: str = "bfloat16", bias: bool = False) -> Callable:
    module = _linear(make, n, k, dtype, bias, None)
    return _forward(module, make.normal(m, k, dtype=getattr(torch, dtype)))


def linear_training(
    make: Operands,
    m: int,
    n: int,
    k: int,
    master_dtype: str | None = "bfloat16",
    dtype: str = "bfloat16",
    bias: bool = False,
) -> Callable:
    """Build a call that runs forward and backward of FP8Linear.

    master_dtype None: the weights are FP8 and frozen, and only the input gets a gradient.
    """
    module = _linear(make, n, k, dtype, bias, master_dtype)
    x, gradient = (make.normal(m, width, dtype=getattr(torch, dtype)) for width in (k, n))
    return _training(module, [x.requires_grad_()], gradient)


def _experts(
    make: Operands, hidden: int, intermediate: int, experts: int, gated: bool, master_dtype: str | None, **options
) -> fp8moe.GroupedExperts:
    up, projections = ("gate_up_proj", 2) if gated else ("up_proj", 1)
    state = {}
    for name, parts, n, k in ((up, projections, intermediate, hidden), ("down_proj", 1, hidden, intermediate)):
        if master_dtype is None:
            # Gate and up are drawn separately, so that no 128-row block spans both.
            data, scale = make.weights(experts, parts, n, k)
            state |= {name: data.flatten(1, 2), f"{name}_scale_inv": scale.flatten(1, 2)}
        else:
            state[name] = make.normal(experts, parts * n, k, dtype=getattr(torch, master_dtype), std=k**-0.5)
    if master_dtype is not None:
        options["master_dtype"] = getattr(torch, master_dtype)
    sizes = {"num_experts": experts, "hidden_size": hidden, "intermediate_size": intermediate}
    return _module(fp8moe.GroupedExperts(**sizes, gated=gated, device="meta", **options), state)


def experts_layer(make: Operands, model: shapes.Model) -> fp8moe.GroupedExperts:
    """Build the experts of one layer of a model, with frozen FP8 weights."""
    hidden, intermediate, count, _ = model
    return _experts(make, hidden, intermediate, count, True, None)


def layer_inputs(model: shapes.Model, index: Tensor, device: str = "cuda") -> tuple[Tensor, Tensor, Tensor]:
    """Return an experts layer's inputs: random hidden states, `index`, random routing weights.

    The seed differs from the seed of the layer's weights.
    """
    make = Operands(device, seed=1)
    return make.normal(len(index), model.hidden), index.to(device), make.uniform(*index.shape, mean=1 / model.top_k)


def route(model: shapes.Model, tokens: int) -> Tensor:
    """Draw different random experts for each token, (tokens, top_k), on the CPU, always with the same seed."""
    return _top_k_index(Operands("cpu"), model.experts, model.top_k, tokens)


def _top_k_index(make: Operands, experts: int, top_k: int, tokens: int) -> Tensor:
    """Draw top_k different experts for each token, uniformly, always with the same seed."""
    draws = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(0))
    return make.integers(draws.topk(top_k).indices, torch.int64)


def _experts_inputs(
    make: Operands, hidden: int, experts: int, top_k: int, tokens: int, dtype: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw hidden states, expert indices, and routing weights whose mean is 1 / top_k."""
    index = _top_k_index(make, experts, top_k, tokens)
    return make.normal(tokens, hidden, dtype=getattr(torch, dtype)), index, make.uniform(tokens, top_k, mean=1 / top_k)


def experts(
    make: Operands,
    hidden: int,
    intermediate: int,
    experts: int,
    top_k: int,
    tokens: int,
    dtype: str = "bfloat16",
    gated: bool = True,
    **options,
) -> Callable:
    module = _experts(make, hidden, intermediate, experts, gated, None, **options)
    return _forward(module, *_experts_inputs(make, hidden, experts, top_k, tokens, dtype))


def experts_training(
    make: Operands,
    hidden: int,
    intermediate: int,
    experts: int,
    top_k: int,
    tokens: int,
    master_dtype: str | None = "bfloat16",
    dtype: str = "bfloat16",
    gated: bool = True,
    **options,
) -> Callable:
    """Build a call that runs forward and backward of GroupedExperts.

    master_dtype None: the weights are FP8 and frozen, and only the inputs get gradients.
    """
    module = _experts(make, hidden, intermediate, experts, gated, master_dtype, **options)
    x, index, weights = _experts_inputs(make, hidden, experts, top_k, tokens, dtype)
    gradient = make.normal(tokens, hidden, dtype=x.dtype)
    return _training(module, [x.requires_grad_(), index, weights.requires_grad_()], gradient)


def append_kv(make: Operands, tokens: int, per_block: int = CACHE_BLOCK, head_dim: int = 128) -> Callable:
    """Build a call that appends keys to a paged cache: to the first `per_block` slots of blocks in random order."""
    blocks = torch.randperm(ceil_div(tokens, per_block), generator=torch.Generator().manual_seed(0))
    slots = make.integers((CACHE_BLOCK * blocks[:, None] + torch.arange(per_block)).flatten()[:tokens])
    cache, keys = make.kv_cache(len(blocks), head_dim), make.normal(tokens, head_dim)

    def call() -> Tensor:
        torch.ops.fp8moe.append_kv(cache, keys, slots, "float32")
        return cache

    return call


def quantize_both_ways(make: Operands, experts: int, n: int, k: int, dtype: str = "bfloat16") -> Callable:
    return partial(torch.ops.fp8moe.quantize_both_ways, make.normal(experts, n, k, dtype=getattr(torch, dtype)), None)


def transpose_fp8(make: Operands, experts: int, n: int, k: int) -> Callable:
    return partial(torch.ops.fp8moe.transpose_fp8, *make.weights(experts, n, k))


def assigned_rows(make: Operands, experts: int, top_k: int, tokens: int) -> Callable:
    sorted = sort_by_expert(make, experts, top_k, tokens)()
    weights = make.normal(tokens, top_k)
    return partial(torch.ops.fp8moe.assigned_rows, *sorted, weights, tokens * top_k)


def sort_by_expert(make: Operands, experts: int, top_k: int, tokens: int) -> Callable:
    return partial(torch.ops.fp8moe.sort_by_expert, _top_k_index(make, experts, top_k, tokens), experts, None)


def permute_quantize(make: Operands, hidden: int, experts: int, top_k: int, tokens: int) -> Callable:
    _, rows = sort_by_expert(make, experts, top_k, tokens)()
    return partial(torch.ops.fp8moe.permute_quantize, make.normal(tokens, hidden), rows, tokens * top_k)


def combine(make: Operands, hidden: int, experts: int, top_k: int, tokens: int) -> Callable:
    _, rows = sort_by_expert(make, experts, top_k, tokens)()
    y, weights = make.normal(tokens * top_k, hidden), make.uniform(tokens, top_k, mean=1 / top_k)
    return partial(torch.ops.fp8moe.combine, y, rows, weights, torch.bfloat16)


def _transposing(operator: Callable) -> Callable:
    """Wrap a transposing operator so that its results lack the uninitialized padding after the last group's columns."""
    _, _, _, _, offsets, *_ = operator()
    width = int(offsets[-1])

    def call() -> list[Tensor]:
        data, scale, *more = operator()
        ends = (width if part.itemsize == 1 else width // 128 for part in more)  # of columns, or of their scales
        return [
            data,
            scale,
            *(part[:, :end] if part.dim() == 2 else part for part, end in zip(more, ends, strict=True)),
        ]

    return call


def quantize_with_transpose(make: Operands, m: int, k: int) -> Callable:
    return _transposing(partial(torch.ops.fp8moe.quantize_with_transpose, make.normal(m, k), None, None, False))


def gather_with_transpose(make: Operands, hidden: int, experts: int, top_k: int, tokens: int) -> Callable:
    """Build a call that gathers each token into its top_k rows, and quantizes the rows along both dimensions."""
    groups, rows = sort_by_expert(make, experts, top_k, tokens)()
    of_row = make.zeros(tokens * top_k, dtype=torch.int32)
    of_row[rows.flatten().long()] = make.integers(torch.arange(tokens * top_k) // top_k)
    operands = make.normal(tokens, hidden), groups, of_row, False
    return _transposing(partial(torch.ops.fp8moe.quantize_with_transpose, *operands))


def swiglu_quantize(make: Operands, groups: int, mean_rows: int, intermediate: int) -> Callable:
    offsets = group_offsets(groups, mean_rows)
    operands = make.normal(offsets[-1], 2 * intermediate), make.integers(offsets)
    operator = torch.ops.fp8moe.swiglu_quantize
    return partial(operator, *operands, *_plain_swiglu(operator, beside=0))


def swiglu_backward_quantize(make: Operands, groups: int, mean_rows: int, intermediate: int) -> Callable:
    *_, rows = offsets = group_offsets(groups, mean_rows)
    operands = make.normal(rows, 2 * intermediate), make.normal(rows, intermediate), make.uniform(rows, mean=0.1)
    operator = torch.ops.fp8moe.swiglu_backward_quantize
    return _transposing(partial(operator, *operands, make.integers(offsets), *_plain_swiglu(operator, beside=1)))


def _plain_swiglu(operator: Callable, beside: int) -> tuple[str | int | None, ...]:
    """Return values for a SwiGLU operator's last arguments, which choose plain SwiGLU and further results: `Beside`.

    The operators of older revisions of fp8moe have other last arguments.
    """
    names = {argument.name for argument in operator.default._schema.arguments}
    if "beside" in names:
        return "silu", beside
    return ("silu",) if "activation" in names else (None, None)


CUBLAS_M = (128, 4096)
LAYER_TOKENS = (1, 8, 64, 512, 8192)
QUANTIZERS = ("quantize_1x128", "quantize_128x128", "quantize_128x1")
LAYERS = {
    "linear": linear,
    "linear_training": linear_training,
    "experts": experts,
    "experts_training": experts_training,
}
"""Ops that launch several kernels per call: whole layers."""
PARTS = {
    "append_kv": append_kv,
    "quantize_both_ways": quantize_both_ways,
    "transpose_fp8": transpose_fp8,
    "sort_by_expert": sort_by_expert,
    "assigned_rows": assigned_rows,
    "permute_quantize": permute_quantize,
    "combine": combine,
    "quantize_with_transpose": quantize_with_transpose,
    "gather_with_transpose": gather_with_transpose,
    "swiglu_quantize": swiglu_quantize,
    "swiglu_backward_quantize": swiglu_backward_quantize,
}
"""Ops that are steps inside a layer; `fp8moe` does not export them."""

CALLS: dict[str, Callable[..., Callable]] = {
    "gemm": gemm,
    "cublas": cublas,
    "grouped_gemm": grouped_gemm,
    "grouped_gemm_masked": grouped_gemm_masked,
    "grouped_gemm_k": grouped_gemm_k,
    **{name: partial(_quantize, name) for name in QUANTIZERS},
    "mqa_logits": mqa_logits,
    "paged_mqa_logits": paged_mqa_logits,
    **LAYERS,
    **PARTS,
}


def build(case: Case, make: Operands) -> Callable:
    """Build the call of a case, on operands that `make` draws; the call returns its results."""
    return CALLS[case.op](make, **case.sizes)


def _cases(op: str, every: Iterable[dict], **more: object) -> list[Case]:
    return [Case(op, sizes | more) for sizes in every]


def timed() -> list[Case]:
    """List the main cases: GEMMs, quantizers, indexer logits and layers. `benchmarks.compare` times them.

    `tools.digest` records them, too.
    """
    found = []
    for sizes in shapes.GEMM:
        found += _cases("gemm", [sizes]) + _cases("cublas", [sizes] if sizes["m"] in CUBLAS_M else [])
    shape = {"n": 4096, "k": 7168}
    found += _cases("gemm", [{"m": 4096, **shape}], out_dtype="float32")
    found += _cases("gemm", [{"m": 64, **shape}], bias="bfloat16")
    found += _cases("gemm", ({"m": m, **shape} for m in (1, 64, 4096)), c="apart")
    found += _cases("grouped_gemm", shapes.GROUPED)
    for sizes in shapes.MASKED:
        plain = {name: size for name, size in sizes.items() if name != "expected_m"}
        found += _cases("grouped_gemm_masked", [plain], max_m=shapes.room(sizes["mean_rows"]))
    found += [Case("grouped_gemm_k", sizes | more) for sizes in shapes.ALONG_K for more in ({}, {"add": True})]
    found += _cases("mqa_logits", shapes.SCORES) + _cases("paged_mqa_logits", shapes.PAGED_SCORES)
    found += [Case(op, {"m": m, "k": 7168}) for op in QUANTIZERS for m in (64, 4096, 65536)]
    found += _cases("linear", ({"m": m, "n": 7168, "k": 2048} for m in (1, 64, 4096)))
    found += _cases("linear_training", [{"m": 8192, **shape}])
    for model in shapes.MODELS.values():
        found += _cases("experts", (model._asdict() | {"tokens": tokens} for tokens in LAYER_TOKENS))
    for name, tokens in (("qwen3_30b", 4096), ("dsv3_ep8", 8192)):
        found += _cases("experts_training", [shapes.MODELS[name]._asdict()], tokens=tokens)
    return found


def more_timed() -> list[Case]:
    """List further cases to time: the steps inside a layer, other numbers of tokens, float32 master weights."""
    model = shapes.MODELS["dsv3_ep8"]
    hidden, intermediate, experts, top_k = model
    found = _cases("append_kv", ({"tokens": tokens, "per_block": 1} for tokens in (1, 128)))
    found += _cases("append_kv", ({"tokens": tokens} for tokens in (8192, 65536)))
    for op in ("quantize_both_ways", "transpose_fp8"):
        found += _cases(op, [{"experts": 1, "n": 4096}, {"experts": experts, "n": 2 * intermediate}], k=hidden)
    for tokens in (64, 8192):
        routing = {"experts": experts, "top_k": top_k, "tokens": tokens}
        found += [Case(op, routing) for op in ("sort_by_expert", "assigned_rows")]
        found += [Case(op, {"hidden": hidden, **routing}) for op in ("permute_quantize", "combine")]
    found += _cases("quantize_with_transpose", ({"m": m, "k": hidden} for m in (8192, 65536)))
    found.append(Case("gather_with_transpose", {"hidden": hidden, **routing}))
    rows = {"groups": experts, "mean_rows": tokens * top_k // experts, "intermediate": intermediate}
    found += [Case(op, rows) for op in ("swiglu_quantize", "swiglu_backward_quantize")]
    # Without fill_masked the masked entries are uninitialized, so the results of two revisions may differ.
    found += _cases("mqa_logits", shapes.SCORES, fill_masked=False)
    found += _cases("paged_mqa_logits", shapes.PAGED_SCORES, fill_masked=False)
    found.append(Case("paged_mqa_logits", {"batch": 64, "context": 2552, "next_n": 1, "max_context_len": 131072}))
    for other in shapes.MODELS.values():
        found += _cases("experts", (other._asdict() | {"tokens": tokens} for tokens in (32, 128, 2048)))
    found += _cases("linear_training", [{"m": 8192, "n": 4096, "k": 7168}], master_dtype="float32")
    found += _cases("experts_training", [model._asdict()], tokens=8192, master_dtype="float32")
    return found


def eager() -> list[Case]:
    """List the cases whose CPU time is measured: eager calls with few rows."""
    found = []
    for n, k in shapes.DENSE_SHAPES:
        sizes = {"m": 1, "n": n, "k": k}
        found += [Case("gemm", sizes | {"new_out": True}), Case("linear", sizes)]
    found.append(Case("grouped_gemm", {"groups": 16, "mean_rows": 1, "n": 1024, "k": 1024, "new_out": True}))
    experts = {"hidden": 1024, "intermediate": 512, "experts": 16, "top_k": 4, "tokens": 1}
    return [*found, Case("experts", experts)]
