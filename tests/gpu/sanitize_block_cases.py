"""Cases of the kernels around the experts for compute-sanitizer, in the manner of `sanitizing.py`.

Norms whose rows are of a part of a warp, of a warp, of a thread block, and of no whole vectors; routers with few
experts and many, with groups and a bias; heads that fill a part of a warp, a warp, two vectors of a lane, at places
inside and outside of the cache; attention of one token, by one thread block and by clusters, with sinks of either type
or none and windows; index scores with every number of math warpgroups and every swizzle, ranges, lengths and block ids
that mean nothing, more sequences than threads, more tiles than stages; sampling with every parameter in some row,
lists that hold what is left and lists that do not, ties, rows without a distribution.
"""

import torch
from torch import Tensor

import fp8moe
from benchmarks.operands import exact, relative_error, rounded_error
from fp8moe.kernels.decoder_ops import router
from fp8moe.kernels.decoder_ops.norm_route import norm_route
from fp8moe.kernels.decoder_ops.rms_norm import rms_norm
from fp8moe.kernels.decoder_ops.router import RoutingRule, router_logits
from fp8moe.kernels.decoder_ops.sampling import SamplingState, sample
from fp8moe.kernels.experts import reference
from fp8moe.kernels.indexer.mqa_cache import append_kv, new_kv_cache
from fp8moe.kernels.indexer.mqa_logits import mqa_logits, paged_mqa_logits
from tests import decode_attention_cases, mqa_cases
from tests.gpu.sanitizing import E4M3_ERROR, INF, both, differing, on_cpu, on_gpu
from tests.kernels.test_rotary import operands, run
from tests.router_cases import FORMS, arguments, dense, route
from tests.sampling_cases import random_logits, random_state

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# rows, hidden, type, with a residual
NORMS = (
    *((1, 7168, BF16, True), (5, 2048, FP16, False), (33, 72, BF16, True), (7, 131, FP32, True)),
    (3, 20000, FP32, False),
)
# tokens, experts, hidden, type, type of the logits
LOGITS = ((1, 128, 2048, BF16, BF16), (11, 300, 520, FP32, FP32), (64, 60, 131, FP16, FP32))
NORM_ROUTES = (
    *((1, 128, 2048, BF16, BF16), (2, 300, 520, FP32, FP32), (3, 60, 131, FP16, FP32)),
    *((1, 64, 7168, BF16, FP32), (4, 256, 2048, BF16, FP32), (2, 128, 2880, BF16, FP32)),
)
# sequences, tokens, (heads, key heads, size, rotated, norm), type
HEADS = (
    *((1, 1, (32, 4, 128, 128, True), BF16), (3, 5, (6, 2, 80, 48, True), FP16)),
    (2, 150, (4, 1, 256, 256, False), FP32),
)
# a place in decode_attention_cases.SHAPES, type, type of the sinks
ONE_TOKEN = (
    *((0, BF16, None), (2, FP16, FP16), (3, BF16, FP32), (6, FP16, None)),
    *((9, BF16, BF16), (10, FP16, FP32)),
    *((place, BF16, BF16, True, invariant) for place in (0, 3, 6, 9) for invariant in (False, True)),
)
# queries, keys, heads, head width, ranges
PREFILLS = (
    *((1, 1, 64, 128, "full"), (37, 130, 64, 64, "ragged"), (130, 1500, 64, 128, "causal")),
    *((25, 300, 32, 32, "extremes"), (70, 2100, 32, 128, "packed")),
)
# context lengths, next_n, heads, head width, max_context_len
BATCHES = (
    *(([1], 1, 64, 128, 1), ([0, 1, 130, 9999, -5, 700], 1, 64, 128, 600), ([3, 64, 2000], 2, 64, 128, 2048)),
    *(([65, 1000, 2], 3, 64, 64, 1100), ([[5, 900, 3, 0], [200, 201, 202, 203]], 4, 64, 128, 1024)),
    *(([130, 7, 400], 4, 32, 32, 500), ([10] * 600, 1, 32, 32, 70)),
)
APPENDS = ((1, 1, 128, BF16), (67, 2, 64, FP16), (515, 9, 32, FP32))  # tokens, blocks, D
# rows, tokens, logits type, their standard deviation
SAMPLES = (
    *((1, 1, FP32, 1.0), (7, 77, FP16, 3.0), (20, 4096, BF16, 3.0), (6, 40_001, BF16, 0.5)),
    *((12, 33_000, FP32, 4.0), (6, 20_000, BF16, 0.0)),
)
NORM_ERROR = {BF16: 4e-3, FP16: 5e-4, FP32: 1e-6}
LOGITS_ERROR = 3e-6  # beyond the rounding of the result


def normed(rows: int, hidden: int, dtype: torch.dtype, with_residual: bool) -> tuple[float, float]:
    """Values of the kernel and those of its codes, over the exact ones: two relative errors."""
    x, weight = torch.randn(rows, hidden).to(dtype), torch.randn(hidden).to(dtype)
    residual = torch.randn(rows, hidden).to(dtype) if with_residual else None
    got = rms_norm(*on_gpu((x, weight)), 1e-6, residual=on_gpu(residual), quantized=True)
    total = x + residual if with_residual else x
    if with_residual and not torch.equal(got.sum.cpu(), total):
        return INF, INF
    total = total.double()
    expected = total * (total.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    codes = exact(fp8moe.FP8Tensor(*on_cpu(got.quantized)))
    return relative_error(got.values.cpu(), expected), relative_error(codes, expected)


def norm_error(*case) -> float:
    return normed(*case)[0]


def norm_codes_error(*case) -> float:
    return normed(*case)[1]


def logits_error(tokens: int, experts: int, hidden: int, dtype: torch.dtype, out_dtype: torch.dtype) -> float:
    x, weight = torch.randn(tokens, hidden).to(dtype), torch.randn(experts, hidden).to(dtype)
    got = router_logits(x.cuda(), weight.cuda(), dtype=out_dtype)
    return rounded_error(got.cpu(), x.double() @ weight.double().T)


def norm_route_errors(tokens: int, experts: int, hidden: int, dtype: torch.dtype, out_dtype: torch.dtype) -> int:
    """Values that are not those of the three kernels."""
    shapes = (tokens, hidden), (hidden,), (experts, hidden), (tokens, hidden)
    x, norm_weight, weight, residual = (torch.randn(shape).to(dtype).cuda() for shape in shapes)
    options, rule = {"residual": residual, "quantized": True}, RoutingRule(4, "softmax", True)
    got, chosen = norm_route(x, norm_weight, 1e-6, weight, rule, **options, logits_dtype=out_dtype, dtype=FP32)
    expected = rms_norm(x, norm_weight, 1e-6, **options)
    logits = router_logits(expected.values, weight, dtype=out_dtype)
    other = router.route(logits, rule, dtype=FP32, sort=True)
    pairs = zip((*got[:2], *got.quantized, *chosen), (*expected[:2], *expected.quantized, *other), strict=True)
    return differing([(one.cpu(), other.cpu()) for one, other in pairs])


def route_errors(experts: int, top_k: int, form: dict, tokens: int = 9, sort: bool = False) -> int:
    """Experts that are chosen by one of the kernel and the reference, weights that are apart, and wrong places."""
    logits, form = torch.randn(tokens, experts), arguments(experts, form) | {"dtype": FP32}
    index, weights, *places = on_cpu(route(logits.cuda(), top_k, **on_gpu(form), sort=sort))
    expected = dense(route(logits, top_k, **form), experts)
    same = torch.isclose(dense((index, weights), experts), expected, rtol=1e-5, atol=0.0, equal_nan=True)
    sorted_index = reference.sort_by_expert(index, experts, None) if sort else ()
    return int((~same).sum()) + differing(list(zip(places if sort else (), sorted_index, strict=True)))


def rotary_error(batch: int, tokens: int, form: tuple, dtype: torch.dtype) -> float:
    """Of queries, keys and values together; the last sequence's tokens fall out of the cache."""
    given, columns, weights = operands(batch, tokens, form, dtype)
    columns[-1] = given[5].shape[2] - tokens // 2

    def call(given: tuple, columns: Tensor, weights: dict) -> tuple:
        return run(*given, columns=columns, **weights), *given[5:]

    got, expected = (
        torch.cat([x.flatten() for x in part]) for part in zip(*both(call, given, columns, weights), strict=True)
    )
    return relative_error(got, expected.double())


def attention_error(
    shape: int, dtype: torch.dtype, sinks_dtype: torch.dtype | None, fp8: bool = False, invariant: bool = False
) -> float:
    batch, heads, length, window = decode_attention_cases.SHAPES[shape]
    operands, new = decode_attention_cases.make(batch, heads, min(length, 600), dtype, window=window)
    operands = decode_attention_cases.in_fp8(*operands) if fp8 else operands
    sinks = decode_attention_cases.make_sinks(heads, sinks_dtype)
    expected, *_ = decode_attention_cases.expected(*operands, new, window, sinks)
    *operands, new, sinks = (decode_attention_cases.moved(value, "cuda") for value in (*operands, new, sinks))
    how = {"new": new, "window": window, "sinks": sinks}
    with fp8moe.batch_invariant(invariant):
        values = decode_attention_cases.attend(*operands, **how, early=True)
        codes = decode_attention_cases.attend(*operands, **how, quantized=True)
    if relative_error(exact(on_cpu(codes)), values.cpu().double()) > E4M3_ERROR:
        return INF
    return relative_error(values.cpu(), expected)


def mqa_error(tokens: int, keys: int, heads: int, head_dim: int, kind: str) -> float:
    case = mqa_cases.prefill(tokens, keys, heads=heads, head_dim=head_dim, kind=kind)
    return scores_error(mqa_logits(*on_gpu(case)).cpu(), mqa_cases.exact_prefill(case))


def paged_mqa_error(lens: list, next_n: int, heads: int, head_dim: int, max_context_len: int) -> float:
    blocks = -(-max_context_len // 64)
    case = mqa_cases.paged(lens, next_n=next_n, heads=heads, head_dim=head_dim, max_blocks=blocks)
    logits = paged_mqa_logits(*on_gpu(case), max_context_len=max_context_len).cpu()
    return scores_error(logits, mqa_cases.exact_paged(case, max_context_len))


def scores_error(logits: Tensor, expected: mqa_cases.Exact) -> float:
    """The largest error of a logit, over the same sum of absolute products; infinite if -inf is elsewhere."""
    seen = expected.logits != -torch.inf
    if not torch.equal(logits != -torch.inf, seen):
        return INF
    errors = (logits.double() - expected.logits).abs() / expected.magnitude.clamp(min=1e-30)
    return torch.where(seen, errors, 0).max().item()


def append_errors(tokens: int, num_blocks: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of the cache that are not those of the reference."""
    slots = (torch.randperm(64 * num_blocks + 40)[:tokens] - 20).int()  # some are not there
    cache, keys = new_kv_cache(num_blocks, head_dim, device="cpu"), torch.randn(tokens, head_dim).to(dtype)
    return differing(both(lambda cache, *new: append_kv(cache, *new) or cache, cache, keys, slots))


def sampling_errors(rows: int, vocab: int, dtype: torch.dtype, std: float) -> int:
    logits, state = random_logits(rows, vocab, dtype, std=std), random_state(rows, vocab)
    logits[rows // 2 :: 7, vocab // 2] = float("nan")
    return differing(both(lambda logits, *state: (sample(logits, SamplingState(*state)).tokens, state), logits, *state))


CASES = [
    *((norm_error, case, NORM_ERROR[case[2]]) for case in NORMS),
    *((norm_codes_error, case, E4M3_ERROR) for case in NORMS),
    *((logits_error, case, LOGITS_ERROR) for case in LOGITS),
    *((norm_route_errors, case, 0) for case in NORM_ROUTES),
    *((route_errors, case, 0) for case in FORMS),
    *((route_errors, (*case, tokens, True), 0) for case in FORMS[:6] for tokens in (1, 11, 16)),
    *((rotary_error, case, 2 * NORM_ERROR[case[3]]) for case in HEADS),
    *((attention_error, case, 2 * NORM_ERROR[case[1]]) for case in ONE_TOKEN),
    *((mqa_error, case, mqa_cases.TOLERANCE) for case in PREFILLS),
    *((paged_mqa_error, case, mqa_cases.TOLERANCE) for case in BATCHES),
    *((append_errors, case, 0) for case in APPENDS),
    *((sampling_errors, case, 0) for case in SAMPLES),
]
