"""The calls whose launches make up the digests, in groups: `GROUPS`.

These are the calls that the benchmarks time and, for every op, calls with odd sizes, all dtypes and all options, so
that every kernel and each of its variants is included.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch

import fp8moe
from benchmarks import calls
from benchmarks.calls import Case, Operands
from fp8moe import PackedTensor
from fp8moe.kernels.activation import Activation
from fp8moe.kernels.decoder_ops.decode_attention import DTYPES as ATTENTION_DTYPES
from fp8moe.kernels.decoder_ops.decode_attention import StaticCache, decode_attention
from fp8moe.kernels.decoder_ops.norm_route import norm_route
from fp8moe.kernels.decoder_ops.prompt_attention import prompt_attention
from fp8moe.kernels.decoder_ops.rms_norm import rms_norm
from fp8moe.kernels.decoder_ops.rotary import NewTokens, rotary
from fp8moe.kernels.decoder_ops.rotary_tables import rotary_tables
from fp8moe.kernels.decoder_ops.router import RoutingRule, route, router_logits
from fp8moe.kernels.decoder_ops.sampling import SamplingState, Sequences, sample, sample_next
from fp8moe.kernels.experts import combine, experts_of_rows, experts_of_tokens, experts_partial, experts_training
from fp8moe.kernels.experts.dispatch import Received, dispatch
from fp8moe.kernels.experts.lora import lora_gradient, lora_shrink
from fp8moe.kernels.experts.operands import Biases, Layer, Masters, Norm, Shard, TokenOperands
from fp8moe.kernels.experts.operator import send_rows
from fp8moe.kernels.experts.swiglu import Beside
from fp8moe.kernels.gemm.layouts import grouped_gemm_by_layout, grouped_gemm_k_by_sizes
from fp8moe.kernels.latent.append import append_latents
from fp8moe.kernels.linear.forward import projection
from fp8moe.quant.checks import weight_operand
from fp8moe.quant.formats import FP8Tensor, ceil_div
from fp8moe.runtime.operator import Signature
from fp8moe.runtime.peer_table import Targets
from fp8moe.runtime.record import reserved

DTYPES = ("bfloat16", "float16", "float32")
ODD_M = (1, 5, 17, 40, 72, 129, 200, 300, 1000, 8192)
ODD_SHAPES = ((8, 16), (72, 144), (576, 272), (1000, 4096), (2048, 7168))  # (n, k) of GEMMs
HEADS = (  # query heads, key heads, values of a head, of which are rotated, with norms
    *((32, 4, 128, 128, True), (96, 8, 128, 64, True), (8, 2, 256, 256, False), (14, 2, 64, 64, False)),
    (64, 8, 64, 64, False),
)
EXPERTS = {"hidden": 1024, "intermediate": 512, "experts": 16, "top_k": 4}
ODD_EXPERTS = {"hidden": 200, "intermediate": 72, "experts": 5, "top_k": 2}
FORMS = (
    {"swiglu_limit": 7.0},
    {"swiglu_limit": 7.0, "swiglu_alpha": 1.702},
    {"activation": "gelu"},
    {"activation": "relu2", "gated": False},
)


class Untouched(Operands):
    """Operands whose memory is reserved but never written, so that even the operands of large models cost nothing."""

    def __init__(self) -> None:
        super().__init__("cpu")

    def zeros(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return reserved(shape, dtype)

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16, std: float = 1.0) -> torch.Tensor:
        return self.zeros(*shape, dtype=dtype)

    def uniform(self, *shape: int, mean: float) -> torch.Tensor:
        return self.zeros(*shape, dtype=torch.float32)

    def codes(self, *shape: int) -> torch.Tensor:
        return self.zeros(*shape, dtype=torch.float8_e4m3fn)

    def kv_cache(self, blocks: int, head_dim: int) -> torch.Tensor:
        return self.zeros(blocks, 64, 1, head_dim + 4, dtype=torch.uint8)


def cases() -> Iterator[Case]:
    """Yield cases of `benchmarks.calls`: the public functions and layers."""
    yield from (case for case in calls.timed() if case.op != "cublas")
    for m, (n, k) in product(ODD_M, ODD_SHAPES):
        yield Case("gemm", {"m": m, "n": n, "k": k})
    for m, bias, out_dtype in product((3, 64, 600), (None, "bfloat16", "float32"), ("bfloat16", "float32")):
        yield Case("gemm", {"m": m, "n": 1000, "k": 1024, "bias": bias, "out_dtype": out_dtype, "pitch": 1024})
    for m, bias, out_dtype, c in product((3, 64, 600), (None, "float32"), ("bfloat16", "float32"), ("apart", "out")):
        yield Case("gemm", {"m": m, "n": 1000, "k": 1024, "bias": bias, "out_dtype": out_dtype, "c": c})
    for groups, rows, (n, k) in product((1, 3, 64), (1, 30, 500), ODD_SHAPES):
        yield Case("grouped_gemm", {"groups": groups, "mean_rows": rows, "n": n, "k": k})
        sizes = {"groups": groups, "mean_rows": rows, "max_m": 2 * rows, "n": n, "k": k}
        yield Case("grouped_gemm_masked", sizes)
    for groups, m, n, add in product((1, 7), (8, 272), (16, 1000), (False, True)):
        yield Case("grouped_gemm_k", {"groups": groups, "m": m, "n": n, "total_k": 1280, "add": add})
    for op, dtype, (m, k) in product(calls.QUANTIZERS, DTYPES, ((1, 128), (130, 257), (1000, 2048))):
        yield Case(op, {"m": m, "k": k, "dtype": dtype})
    for op, dtype in product(("quantize_1x128", "quantize_128x128"), DTYPES):
        yield Case(op, {"m": 130, "k": 256, "dtype": dtype, "scale_format": "ue8m0"})
    for heads, head_dim, fill_masked in product((32, 64), (32, 64, 128), (False, True)):
        sizes = {"heads": heads, "head_dim": head_dim, "fill_masked": fill_masked}
        yield Case("mqa_logits", {"queries": 37, "tokens": 130, **sizes})
        for next_n in (1, 2, 3, 4):
            yield Case("paged_mqa_logits", {"batch": 5, "context": 200, "next_n": next_n, **sizes})
    for dtype, bias, (n, k) in product(DTYPES, (False, True), ((136, 272), (21, 131))):
        yield Case("linear", {"m": 70, "n": n, "k": k, "dtype": dtype, "bias": bias})
        for master_dtype in (None, "bfloat16", "float32"):
            sizes = {"m": 70, "n": n, "k": k, "dtype": dtype, "bias": bias, "master_dtype": master_dtype}
            yield Case("linear_training", sizes)
    for model, tokens, dtype in product((EXPERTS, ODD_EXPERTS), (1, 70, 2000), DTYPES):
        yield Case("experts", {**model, "tokens": tokens, "dtype": dtype})
    for model, tokens, capacity in product((EXPERTS, ODD_EXPERTS), (1, 16), (16, 64)):
        yield Case("experts", {**model, "tokens": tokens, "decode_capacity": capacity})
    for model, form in product((EXPERTS, ODD_EXPERTS), FORMS):
        yield Case("experts", {**model, "tokens": 70, **form})
    for model, dtype, master_dtype in product((EXPERTS, ODD_EXPERTS), DTYPES, (None, "bfloat16", "float32")):
        yield Case("experts_training", {**model, "tokens": 70, "dtype": dtype, "master_dtype": master_dtype})
    for model, form in product((EXPERTS, ODD_EXPERTS), FORMS):
        yield Case("experts_training", {**model, "tokens": 70, **form})


def latent_calls(make: Operands) -> Iterator[Callable[[], object]]:
    """Yield calls of attention over latents and of what prepares it.

    `fp8moe.latent_attention` of each number of rows together, few sequences and many; `append_latents`;
    `fp8moe.mqa_top_k`.
    """
    ends = make.integers([70] * 9)
    yield partial(fp8moe.mqa_top_k, make.normal(9, 300, dtype=torch.float32), top_k=64, ends=ends)
    rotary, tables = make.normal(2, 3, 20, 64), (make.normal(1, 3, 64), make.normal(1, 3, 64))
    for coded, interleaved in product((False, True), (False, True)):
        cache = make.zeros(2, 200, 656, dtype=torch.uint8) if coded else make.normal(2, 200, 576)
        new = rotary, make.normal(2, 3, 576), make.normal(512), *tables, make.normal(2, 3, 20, 64), cache
        yield partial(append_latents, *new, eps=1e-6, interleaved=interleaved)
    for (queries, heads), batch in product(((1, 16), (1, 20), (2, 16), (3, 20)), (2, 10)):
        for chosen, paged, coded in product((None, 100), (False, True), (False, True)):
            latents = make.normal(*((9, 64) if paged else (batch, 200)), 576)
            if coded:
                latents = make.zeros(*latents.shape[:2], 656, dtype=torch.uint8)
            how = {
                "indices": None if chosen is None else make.zeros(batch, queries, chosen, dtype=torch.int32),
                "block_table": make.zeros(batch, 4, dtype=torch.int32) if paged else None,
                "begin": None if paged or chosen else make.integers([1] * batch),
            }
            q, lengths = make.normal(batch, queries, heads, 576), make.integers([70] * batch)
            yield partial(fp8moe.latent_attention, q, latents, lengths, value_size=512, scale=0.1, **how)


def operator_calls(make: Operands) -> Iterator[Callable[[], object]]:
    """Yield calls of operators with arguments that no public function or layer passes."""
    ops = torch.ops.fp8moe
    rows, experts = make.rows(200, 1024), make.weights(4, 512, 1024)
    offsets, sizes = make.integers([0, 50, 60, 150, 200]), make.integers([50, 10, 40, 20])
    masked = fp8moe.FP8Tensor(*(part.unflatten(0, (4, 50)) for part in rows))
    yield lambda: fp8moe.gemm(rows, make.weights(512, 1024))
    yield lambda: fp8moe.grouped_gemm(rows, experts, offsets)
    yield lambda: fp8moe.grouped_gemm(rows, experts, offsets, out=make.zeros(200, 512, dtype=torch.float32))
    yield lambda: fp8moe.grouped_gemm_masked(masked, experts, sizes)
    yield lambda: fp8moe.grouped_gemm_k(rows, make.rows(72, 1024), make.integers([0, 512, 1024]))
    for dtype in (torch.bfloat16, torch.float32):
        out = make.zeros(200, 512, dtype=dtype)
        low_rank = make.normal(200, 16), make.normal(4, 512, 16)
        yield lambda out=out, more=low_rank: ops.grouped_gemm_out(*rows, *experts, offsets, out, None, *more, None)
    for activation in ("silu", "silu limit=7.0", "silu limit=7.0 alpha=1.702"):
        gate_up, grad, weights = make.normal(200, 512), make.normal(200, 256), make.uniform(200, mean=1.0)
        for beside in (Beside.NOTHING, Beside.VALUES):
            form = offsets, activation, beside
            yield lambda x=gate_up, form=form: ops.swiglu_quantize(x, *form)
            yield lambda x=(gate_up, grad, weights), form=form: ops.swiglu_backward_quantize(*x, *form)
    few = make.integers([0, 5, 6, 15, 20])
    for rank, width, ends, count in ((16, 2048, offsets, 200), (48, 264, offsets, 200), (16, 264, few, 20)):
        x, factors, ranks = make.normal(count, width), make.normal(4, rank, width), make.normal(count, rank)
        for tokens in (None, make.zeros(count, dtype=torch.int32)):
            yield partial(lora_shrink, *(x, factors, ends, tokens))
            yield partial(lora_gradient, *(ranks, x, ends, tokens))
    yield lambda: ops.grouped_gemm_swiglu(*rows, *experts, offsets, None, None, None, None, None, None)
    yield lambda: ops.grouped_gemm_swiglu_keeping(*rows, *experts, offsets, None, None, None, None, None, None)
    for dtype, head_dim, scale_format in product(DTYPES, (32, 64, 128), ("float32", "ue8m0")):
        keys = make.normal(70, head_dim, dtype=getattr(torch, dtype))
        yield lambda keys=keys, scale_format=scale_format: ops.append_kv(
            make.kv_cache(3, keys.shape[1]), keys, make.integers(range(70)), scale_format
        )
    for dtype, width in product(DTYPES, (131, 256)):
        x = make.normal(200, width, dtype=getattr(torch, dtype))
        yield lambda x=x: ops.quantize_with_transpose(x, offsets, None, False)
        yield lambda x=x: ops.quantize_with_transpose(x, offsets, None, True)
        yield lambda x=x: ops.quantize_columns(x, offsets, None)
    for count, experts_count, capacity, dtype in product(
        (1, 100, 5000), (3, 64, 300, 1024), (None, 8), (torch.int32, torch.int64)
    ):
        index = make.zeros(count, 4, dtype=dtype)
        yield lambda index=index, options=(experts_count, capacity): ops.sort_by_expert(index, *options)
    for n, k in ((16, 16), (200, 131)):
        yield lambda shape=(3, n, k): ops.transpose_fp8(*make.weights(*shape))
        for dtype in (torch.bfloat16, torch.float32):
            gate, up = (make.normal(3, n, k, dtype=dtype) for _ in range(2))
            yield lambda gate=gate, up=up: ops.quantize_both_ways(gate, up)
    halves = fp8moe.FP8Tensor(*(part[:, len(part[0]) // 2 :] for part in make.weights(3, 512, 320)))
    yield lambda: fp8moe.quantize_128x128(make.normal(3, 256, 320), out=halves)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        operands = make.normal(200, 64, dtype=torch.float32), make.zeros(40, 4, dtype=torch.int32)
        yield lambda operands=operands, dtype=dtype: ops.combine(*operands, make.uniform(40, 4, mean=1.0), dtype)
    yield from batch_invariant_calls(make)
    yield from layout_calls(make)
    yield from share_calls(make)
    yield from peer_calls(make)
    yield from column_calls(make)
    yield from block_calls(make)
    yield from held_calls(make)
    yield from packed_calls(make)


def batch_invariant_calls(make: Operands) -> Iterator[Callable[[], object]]:
    """Yield calls that launch other kernels in batch-invariant mode than outside of it."""

    for m, (n, k) in product((1, 60, 100, 400, 5000), ((576, 7168), (2112, 7168), (4096, 4096), (7168, 1536))):
        a, b = make.rows(m, k), make.weights(n, k)
        yield lambda a=a, b=b: _invariantly(fp8moe.gemm, a, b)
        yield lambda a=a, b=b: _invariantly(partial(fp8moe.gemm, a, b, out_dtype=torch.float32))
    for tokens, groups, (n, k) in product((8, 3000), (2, 64), ((512, 7168), (4096, 1024))):
        a, b, offsets = make.rows(tokens, k), make.weights(groups, n, k), make.integers([0] * groups + [tokens])
        yield lambda a=a, b=b, offsets=offsets: _invariantly(fp8moe.grouped_gemm, a, b, offsets)
    for tokens, experts in product((1, 500), (60, 256)):
        x, weight = make.normal(tokens, 2048), make.normal(experts, 2048)
        yield lambda x=x, weight=weight: _invariantly(partial(router_logits, x, weight, dtype=torch.float32))


def layout_calls(make: Operands) -> Iterator[Callable[[], object]]:
    """Yield calls of grouped GEMMs whose groups are given in DeepGEMM's layouts."""
    for groups, rows, alignment in product((1, 64), (200, 40000), (None, 128)):
        a, b, out = make.rows(rows, 1024), make.weights(groups, 512, 1024), make.zeros(rows, 512, dtype=torch.bfloat16)
        layout = make.zeros(groups if alignment else rows, dtype=torch.int32)
        options = {"alignment": alignment, "expected_m": max(1, rows // groups - 127)}
        yield partial(grouped_gemm_by_layout, *(a, b, layout, out), **options)
    for groups, m, n, add in product((1, 7), (8, 272), (16, 1000), (False, True)):
        k, sizes = 128 * groups, make.integers([128] * groups)
        a, b = ((make.codes(size * k), make.rows(size, k).scale) for size in (m, n))
        out = make.zeros(groups, m, n, dtype=torch.float32)
        yield lambda call=(a, b, sizes, out), add=add: grouped_gemm_k_by_sizes(*call, accumulate=add)


def share_calls(make: Operands) -> Iterator[Callable[[], object]]:
    """Yield calls that run one rank's share of the experts, as under expert parallelism."""
    for tokens, hidden, top_k in product((1, 70, 1000), (16, 1040, 7168), (8, 40)):
        operands = (*make.rows(tokens, hidden), make.zeros(tokens, top_k, dtype=torch.int32), tokens * top_k)
        yield partial(torch.ops.fp8moe.permute_fp8, *operands)
    for (hidden, size, experts, top_k), tokens, activation in (
        *product(((1024, 512, 16, 4), (200, 72, 5, 2)), (1, 70), ("silu", "gelu")),
        *product(((7168, 2048, 256, 8),), (8, 512, 32768), ("silu",)),
    ):
        here = ceil_div(experts, 2)
        weights = make.weights(here, 2 * size, hidden), make.weights(here, hidden, size)
        layer = Layer(*weights, Activation(name=activation))
        index, routing = make.zeros(tokens, top_k, dtype=torch.int64), make.uniform(tokens, top_k, mean=1.0)
        share = Shard(experts - here, experts, row_dtype=torch.bfloat16)
        window = share._replace(first_row=tokens, num_rows=tokens)
        added = {"partial": make.zeros(tokens, hidden, dtype=torch.float32)}
        some = added | {"partial_known": make.zeros(tokens, dtype=torch.bool), "wants_known": True}
        for x, shard, options in (
            (make.normal(tokens, hidden), share, {}),
            (make.rows(tokens, hidden), window, added),
            (make.rows(tokens, hidden), share._replace(row_dtype=torch.float32), {}),
            (make.normal(tokens, hidden), window, some),
        ):
            operands = x, index, routing, layer, shard
            yield lambda operands=operands, options=options: experts_partial(*operands, **options)
        if hidden > 1024:
            continue
        offsets = make.integers([tokens * group // here for group in range(here + 1)])
        for x, training in product((make.normal(tokens, hidden), make.rows(tokens, hidden)), (False, True)):
            options = {"training": training, "whole": (2 * tokens, experts)}
            yield lambda operands=(x, offsets, layer), options=options: experts_of_rows(*operands, **options)
        up, down = (make.zeros(*weight.data.shape, dtype=torch.bfloat16).requires_grad_() for weight in weights)
        x, grad = make.normal(tokens, hidden), make.zeros(tokens, hidden, dtype=torch.float32)
        trained = {"masters": Masters(up, down)}
        yield _backward(experts_of_rows, (x, offsets, layer), trained | {"row_dtype": torch.float32}, grad)
        shard = Shard(experts - here, experts, num_rows=tokens, out_dtype=torch.float32)
        yield _backward(experts_training, (x, index, routing, layer), trained | {"shard": shard}, grad)
    index = make.zeros(100, 4, dtype=torch.int64)
    yield lambda: torch.ops.fp8moe.sort_by_expert(index, 64, None, 32, 50, 200)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        groups, rows = make.zeros(65, dtype=torch.int32), make.zeros(*index.shape, dtype=torch.int32)
        weights = make.normal(*index.shape, dtype=dtype)
        yield lambda groups=groups, rows=rows, weights=weights: torch.ops.fp8moe.assigned_rows(
            groups, rows, weights, 200
        )


def held_calls(make: Operands) -> Iterator[Callable[[], object]]:
    """Yield calls of `fp8moe.experts` and its variants, which take weights as arguments."""
    layer = make.weights(16, 1024, 1024), make.weights(16, 1024, 512)
    for tokens in (1, 200):
        x, rows = make.normal(tokens, 1024), make.rows(tokens, 1024)
        routing = make.zeros(tokens, 4, dtype=torch.int32), make.uniform(tokens, 4, mean=1.0)
        offsets = make.integers([tokens * group // 16 for group in range(17)])
        masked = fp8moe.FP8Tensor(*(part.unflatten(0, (16, tokens)) for part in make.rows(16 * tokens, 1024)))
        sizes, places = make.zeros(16, dtype=torch.int32), {"expert_map": make.zeros(32, dtype=torch.int32)}
        for of, operands, options in (
            (fp8moe.experts, (x, *routing), {"first_expert": 8, "num_experts": 32}),
            (fp8moe.experts, (rows, *routing), places),
            (fp8moe.experts_rows, (x, offsets), {}),
            (fp8moe.experts_rows, (rows, offsets), {}),
            (fp8moe.experts_masked, (masked, sizes), {"expected_m": 8}),
        ):
            shape = getattr(operands[0], "data", x).shape
            for out in (None, make.zeros(*shape, dtype=torch.bfloat16), make.zeros(*shape, dtype=torch.float32)):
                yield lambda of=of, operands=operands, more={**options, "out": out}: of(*operands, *layer, **more)


def peer_calls(make: Operands) -> Iterator[Callable[[], object]]:
    """Yield calls that write to the memory of other GPUs, and calls that sum up rows received from them."""
    for peers, dtype, index_dtype, tokens in product((1, 2, 8), DTYPES, (torch.int32, torch.int64), (1, 300)):
        for hidden in (272, 7168):
            x = make.normal(tokens, hidden, dtype=getattr(torch, dtype))
            data, scale = make.rows(peers * tokens, hidden)
            index = make.zeros(peers * tokens, 8, dtype=torch.int32)
            buffer = Received(data, make.zeros(*scale.shape, dtype=torch.float32), index)
            operands = (x, make.zeros(tokens, 8, dtype=index_dtype), [buffer] * peers, peers - 1, 64 * peers)
            yield partial(dispatch, *operands)
    for peers, dtype, to_all, tokens in product((2, 8), ("bfloat16", "float32"), (False, True), (2, 400)):
        targets = Targets(peers, 8 * tokens, to_all, (0,) * (2 * peers + 1))
        dtype = getattr(torch, dtype)
        shard = Shard(4, 8, num_rows=4 * tokens, row_dtype=dtype)
        weights = make.weights(4, 416, 1040), make.weights(4, 1040, 208)
        index = make.zeros(tokens, 8, dtype=torch.int32)
        for activation, first_row in product(("silu", "gelu"), (0, 4 * tokens)):
            layer = Layer(*weights, Activation(name=activation))
            operands = targets, make.rows(tokens, 1040), index, layer, shard._replace(first_row=first_row)
            yield lambda operands=operands: send_rows(*operands)
    kinds = tuple(getattr(torch, dtype) for dtype in DTYPES)
    rows, indices = (torch.bfloat16, torch.float32), (torch.int32, torch.int64)
    for *dtypes, index_dtype in product(rows, kinds, kinds, indices):
        dtypes = combine.Dtypes(*dtypes, index_dtype)
        yield lambda dtypes=dtypes: combine.launcher(0, 40, 1040, 8, 64, dtypes, pdl=True).launch(0, *(0,) * 7)


def column_calls(make: Operands) -> Iterator[Callable[[], object]]:
    """Yield calls of GEMMs and experts. Weights have one scale per output channel or per block, and biases or none."""
    for channels, dtype, tokens in product((False, True), (None, torch.bfloat16, torch.float32), (1, 70, 2000)):

        def weights(*shape: int, channels: bool = channels) -> fp8moe.FP8Tensor:
            data, scale = make.weights(*shape)
            return fp8moe.FP8Tensor(data, make.uniform(*shape[:-1], 1, mean=1.0) if channels else scale)

        def bias(*shape: int, dtype: torch.dtype | None = dtype) -> torch.Tensor | None:
            return None if dtype is None else make.zeros(*shape, dtype=dtype)

        operands, added = (make.rows(tokens, 1040), weights(1000, 1040)), bias(1000)
        yield lambda operands=operands, added=added: fp8moe.gemm(*operands, bias=added)
        activation, biases = Activation(limit=7.0, alpha=1.702), Biases(bias(4, 416), bias(4, 1040))
        layer = Layer(weights(4, 416, 1040), weights(4, 1040, 208), activation, biases)
        shard = Shard(4, 8, row_dtype=torch.bfloat16)
        index, routing = make.zeros(tokens, 8, dtype=torch.int32), make.uniform(tokens, 8, mean=1.0)
        operands = make.normal(tokens, 1040), index, routing, layer, shard
        yield lambda operands=operands: experts_partial(*operands)
        if tokens > 1:
            targets = Targets(2, 4 * tokens, False, (0,) * 5)
            operands = targets, make.rows(tokens, 1040), index, layer, shard._replace(num_rows=8 * tokens)
            yield lambda operands=operands: send_rows(*operands)


def _backward(call: Callable, operands: tuple, options: dict, grad: torch.Tensor) -> Callable[[], object]:
    """Return a call that runs forward and backward. The first operand gets a gradient; so do trained weights."""
    x = operands[0].requires_grad_()
    return lambda: call(x, *operands[1:], **options).backward(grad)


def _cache_in_fp8(make: Operands, *shape: int) -> FP8Tensor:
    """Return keys or values (B, key heads, L, D) in FP8."""
    codes, scale = make.zeros(*shape, dtype=torch.float8_e4m3fn), make.zeros(*shape[:-1], 1, dtype=torch.float32)
    return FP8Tensor(codes, scale)


def block_calls(make: Operands) -> Iterator[Callable[[], object]]:
    """Yield calls of the other operations in a decoder layer (norms, attention and so on), and of sampling."""
    for dtype, rows, hidden in product(DTYPES, (1, 200), (64, 131, 2048, 7168)):
        x = make.normal(rows, hidden, dtype=getattr(torch, dtype))
        weight = make.zeros(hidden, dtype=x.dtype)
        for residual, values, quantized in ((None, True, False), (x, False, True), (x, True, True)):
            options = {"residual": residual, "values": values, "quantized": quantized}
            yield lambda x=x, weight=weight, options=options: rms_norm(x, weight, 1e-6, **options)
    for dtype, out_dtype, tokens, (experts, hidden) in product(
        DTYPES, DTYPES, (1, 3, 8), ((128, 2048), (256, 7168), (60, 131))
    ):
        operands = [make.normal(count, hidden, dtype=getattr(torch, dtype)) for count in (tokens, experts)]
        yield lambda operands=operands, dtype=out_dtype: router_logits(*operands, dtype=getattr(torch, dtype))
    for dtype, out_dtype, tokens, (experts, hidden) in product(
        DTYPES, DTYPES, (1, 2, 4), ((128, 2048), (64, 7168), (60, 131))
    ):
        x, norm_weight, weight = (
            make.normal(*shape, dtype=getattr(torch, dtype))
            for shape in ((tokens, hidden), (hidden,), (experts, hidden))
        )
        options = {"residual": x, "quantized": tokens == 1, "logits_dtype": getattr(torch, out_dtype)}
        rule = RoutingRule(8 if hidden > 131 else 4, "softmax", tokens > 1)
        yield partial(norm_route, *(x, norm_weight, 1e-6, weight, rule), **options, dtype=torch.float32)
    for dtype, out_dtype, (experts, groups), score, normalize in product(
        DTYPES, DTYPES, ((128, 1), (256, 8), (1024, 1)), ("softmax", "sigmoid"), (False, True)
    ):
        logits, bias = make.normal(70, experts, dtype=getattr(torch, dtype)), make.uniform(experts, mean=0.0)
        rule = RoutingRule(8, score, normalize, groups, ceil_div(groups, 2))
        for given in (None, bias):
            options = {"bias": given, "dtype": getattr(torch, out_dtype)}
            yield lambda logits=logits, rule=rule, options=options: route(logits, rule, **options)
    rules = (128, RoutingRule(8, "softmax", True)), (256, RoutingRule(8, "sigmoid", True, 8, 4))
    for dtype, out_dtype, tokens, (experts, rule) in product(DTYPES, DTYPES, (1, 16), rules):
        logits, bias = make.normal(tokens, experts, dtype=getattr(torch, dtype)), make.uniform(experts, mean=0.0)
        options = {"bias": bias if rule.num_groups > 1 else None, "dtype": getattr(torch, out_dtype), "sort": True}
        yield lambda logits=logits, rule=rule, options=options: route(logits, rule, **options)
    layer = Layer(make.weights(16, 1024, 1024), make.weights(16, 1024, 512), Activation())
    for tokens in (1, 60):
        index, routing = make.zeros(tokens, 4, dtype=torch.int64), make.uniform(tokens, 4, mean=1.0)
        order = make.integers([0] * 16 + [tokens * 4]), make.zeros(tokens, 4, dtype=torch.int32)
        operands = TokenOperands(make.normal(tokens, 1024), index, routing, layer, groups=order[0], rows=order[1])
        yield lambda operands=operands: experts_of_tokens(operands)
        gathered = operands.quantized(make.rows(tokens, 1024))
        yield lambda operands=gathered: experts_of_tokens(operands)
    for dtype, weights_dtype, tokens, hidden in product(DTYPES, DTYPES, (1, 60), (1024, 1040, 7168)):
        layer = Layer(make.weights(16, 1024, hidden), make.weights(16, hidden, 512), Activation())
        x, index = make.normal(tokens, hidden, dtype=getattr(torch, dtype)), make.zeros(tokens, 4, dtype=torch.int64)
        routing, weight = make.normal(tokens, 4, dtype=getattr(torch, weights_dtype)), make.zeros(hidden, dtype=x.dtype)
        for norm in (Norm(weight, 1e-6, quantized) for quantized in (False, True)):
            operands = TokenOperands(x, index, routing, layer, residual=x, norm=norm)
            yield lambda operands=operands: torch.ops.fp8moe.experts(*Signature(TokenOperands).pack(operands))
    for dtype, tokens, (heads, key_heads, size, rotated, norm) in product(DTYPES, (1, 300), HEADS):
        dtype = getattr(torch, dtype)
        positions, frequencies = make.zeros(1, tokens, dtype=torch.int64), make.zeros(rotated // 2, dtype=torch.float32)
        yield partial(rotary_tables, positions, frequencies, 1.0, dtype=dtype)
        q, k, v = (make.normal(1, tokens, count, size, dtype=dtype) for count in (heads, key_heads, key_heads))
        tables = [make.normal(1, tokens, rotated, dtype=dtype) for _ in range(2)]
        cache = [make.zeros(1, key_heads, tokens, size, dtype=dtype) for _ in range(2)]
        weight = make.normal(size, dtype=dtype) if norm else None
        operands = q, NewTokens(k, v, *tables, weight, weight, 1e-6), *cache
        yield lambda operands=operands: rotary(*operands)
        if dtype in ATTENTION_DTYPES:
            yield partial(rotary, *operands[:2], *(_cache_in_fp8(make, 1, key_heads, tokens, size) for _ in range(2)))
        if tokens > 1 or dtype not in ATTENTION_DTYPES:
            continue
        for batch, new in product((1, 8, 64), (False, True)):
            rows = [x[:, 0].expand(batch, *x.shape[2:]) for x in (q, k, v)]
            tokens_of = NewTokens(*rows[1:], *(table[:, 0] for table in tables), weight, weight, 1e-6) if new else None
            shape = batch, key_heads, 40, size
            caches = [
                [make.zeros(*shape, dtype=dtype) for _ in range(2)],
                [_cache_in_fp8(make, *shape) for _ in range(2)],
            ]
            places = [make.zeros(batch, dtype=torch.int64)] * 2
            of_model, in_float32 = (make.normal(heads, dtype=kind) for kind in (dtype, torch.float32))
            forms = (None, None), (128, of_model), (None, in_float32)
            for cached, quantized, (window, sinks) in product(caches, (False, True), forms):
                options = {"new": tokens_of, "quantized": quantized, "window": window, "sinks": sinks}
                operands = rows[0], StaticCache(*cached, *places)
                yield lambda operands=operands, options=options: decode_attention(*operands, **options)
                if sinks is None:
                    yield partial(_invariantly, partial(decode_attention, *operands, **options))
    for dtype, tokens, (heads, key_heads, size, *_) in product(ATTENTION_DTYPES, (1, 5000), HEADS):
        q, keys, values = (make.normal(tokens, count, size, dtype=dtype) for count in (heads, key_heads, key_heads))
        sequences = make.zeros(3, 2, dtype=torch.int32)
        yield partial(prompt_attention, q, keys, values, sequences, most_queries=tokens)
    for tokens, (columns, hidden) in product((1, 64, 300), ((2112, 7168), (1040, 272))):
        operands = make.rows(tokens, hidden), make.weights(columns, hidden)
        for bias in (None, make.zeros(columns, dtype=torch.bfloat16)):
            for dtype in (torch.bfloat16, torch.float32):
                yield partial(projection, *operands, **{"bias": bias, "out_dtype": dtype})
    for dtype, vocabulary in product(DTYPES, (40_000, 40_001)):
        logits = make.normal(2, vocabulary, dtype=getattr(torch, dtype))
        dtypes = (torch.float32, torch.int32, *(torch.float32,) * 4, *(torch.int64,) * 2)
        state = [make.zeros(2, dtype=field) for field in dtypes]
        state = SamplingState(*state, make.zeros(2, vocabulary, dtype=torch.uint8))
        yield lambda logits=logits, state=state: sample(logits, state)
        integers, booleans = (partial(make.zeros, dtype=dtype) for dtype in (torch.int64, torch.bool))
        sequences = Sequences(
            *(integers(2), integers(2, 9), make.zeros(2, 9, dtype=torch.float32), integers(2), booleans(2)),
            *(booleans(2), integers(2), booleans(2, vocabulary), integers(1)),
        )
        yield lambda logits=logits, state=state, noted=sequences: sample_next(logits, state, noted)


def all_calls(make: Operands) -> Iterator[Callable[[], object]]:
    """Yield all calls of the group "kernels". Each is built only when needed, so that few operands are in memory."""
    for case in cases():
        yield calls.build(case, make)
    yield from operator_calls(make)


GROUPS: dict[str, Callable[[Operands], Iterator[Callable[[], object]]]] = {"kernels": all_calls, "latent": latent_calls}
"""Maps each group to its calls. The kernels of a group are validated together, into a file of their own."""


def packed_calls(make: Operands) -> Iterator[Callable[[], object]]:
    """Yield calls with weights in four bits: each layout of their scales, few tokens and many."""
    for form, group, dtype in (
        ("mxfp4", 32, torch.uint8),
        *(("int4", group, dtype) for group in (32, 128) for dtype in (torch.bfloat16, torch.float32)),
        ("nvfp4", 16, torch.float8_e4m3fn),
    ):

        def weights(*shape: int, form: str = form, group: int = group, dtype: torch.dtype = dtype) -> PackedTensor:
            *lead, n, k = shape
            data = make.zeros(*lead, n, k // 2, dtype=torch.uint8)
            tensor_scale = make.zeros(*lead, dtype=torch.float32) if form == "nvfp4" else None
            return PackedTensor(data, make.zeros(*lead, n, k // group, dtype=dtype), form, tensor_scale)

        for m, (n, k) in product((1, 64, 600), ((1000, 1024), (576, 7168))):
            a, b, bias = make.rows(m, k), weights(n, k), make.normal(n)
            yield partial(fp8moe.gemm, a, b)
            yield partial(fp8moe.gemm, a, b, bias=bias, out_dtype=torch.float32)
            yield partial(_invariantly, fp8moe.gemm, a, b)
        for rows, (n, k) in product((8, 600, 4000), ((1000, 640), (512, 2048))):
            a, b = make.rows(rows, k), weights(8, n, k)
            yield partial(fp8moe.grouped_gemm, a, b, make.integers([0] * 8 + [rows]))
            yield partial(_invariantly, fp8moe.grouped_gemm, a, b, make.integers([0] * 8 + [rows]))
            masked = fp8moe.FP8Tensor(*(part.unflatten(0, (8, rows // 8)) for part in a))
            yield partial(fp8moe.grouped_gemm_masked, masked, b, make.integers([0] * 8))
        for tokens in (1, 64, 4000):
            up, down, index = weights(16, 1024, 1024), weights(16, 1024, 512), make.zeros(tokens, 4, dtype=torch.int64)
            operands = make.normal(tokens, 1024), index, make.uniform(tokens, 4, mean=1.0), up, down
            yield partial(fp8moe.experts, *operands)
            kept = (fp8moe.FP8Tensor(*weight_operand("up", up, 2)), fp8moe.FP8Tensor(*weight_operand("down", down)))
            layer = Layer(*kept, Activation(limit=7.0, alpha=1.702), Biases(*(make.normal(16, 1024) for _ in range(2))))
            shard = Shard(0, 16, row_dtype=torch.bfloat16)
            yield partial(experts_partial, operands[0], index.int(), operands[2], layer, shard)


def _invariantly(call: Callable[..., object], *operands: object) -> object:
    with fp8moe.batch_invariant():
        return call(*operands)
