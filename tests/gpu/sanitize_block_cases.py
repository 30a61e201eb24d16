"""Cases of the kernels around the experts for compute-sanitizer, in the manner of `sanitize_cases.py`, which runs them.

Norms whose rows are of a part of a warp, of a warp, of a thread block, and of no whole vectors; routers with few
experts and many, with groups and a bias; heads that fill a part of a warp, a warp, two vectors of a lane, at places
inside and outside of the cache; attention of one token, by one thread block and by clusters. Results are checked on
the CPU.
"""

import torch

import fp8moe
from benchmarks.operands import exact, relative_error, rounded_error
from fp8moe.kernels.decoder_ops.norm_logits import norm_logits
from fp8moe.kernels.decoder_ops.rms_norm import rms_norm
from fp8moe.kernels.decoder_ops.router import router_logits
from fp8moe.kernels.experts import reference
from tests import decode_attention_cases
from tests.gpu.sanitize_moe_cases import differing, on_cpu
from tests.kernels.test_rotary import operands, run
from tests.router_cases import FORMS, arguments, dense, route

# rows, hidden, type, with a residual
NORMS = (
    (1, 7168, torch.bfloat16, True),
    (5, 2048, torch.float16, False),
    (33, 72, torch.bfloat16, True),
    (7, 131, torch.float32, True),
    (3, 20000, torch.float32, False),
)
# tokens, experts, hidden, type, type of the logits
LOGITS = (
    (1, 128, 2048, torch.bfloat16, torch.bfloat16),
    (11, 300, 520, torch.float32, torch.float32),
    (64, 60, 131, torch.float16, torch.float32),
)
NORM_LOGITS = (
    (1, 128, 2048, torch.bfloat16, torch.bfloat16),
    (2, 300, 520, torch.float32, torch.float32),
    (2, 60, 131, torch.float16, torch.float32),
    (1, 256, 7168, torch.bfloat16, torch.float32),
    (8, 256, 2048, torch.bfloat16, torch.float32),
)
# sequences, tokens, (heads, key heads, size, rotated, norm), type
HEADS = (
    (1, 1, (32, 4, 128, 128, True), torch.bfloat16),
    (3, 5, (6, 2, 80, 48, True), torch.float16),
    (2, 150, (4, 1, 256, 256, False), torch.float32),
)
# a place in decode_attention_cases.SHAPES, type
ONE_TOKEN = ((0, torch.bfloat16), (2, torch.float16), (3, torch.bfloat16), (6, torch.float16))
E4M3_ERROR = 4e-2
NORM_ERROR = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 1e-6}
LOGITS_ERROR = 3e-6  # beyond the rounding of the result


def normed(rows: int, hidden: int, dtype: torch.dtype, with_residual: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Values of the kernel and those of its codes, over the exact ones: two relative errors."""
    x, weight = torch.randn(rows, hidden).to(dtype), torch.randn(hidden).to(dtype)
    residual = torch.randn(rows, hidden).to(dtype) if with_residual else None
    got = rms_norm(x.cuda(), weight.cuda(), 1e-6, residual=residual.cuda() if with_residual else None, quantized=True)
    total = (x + residual if with_residual else x).double()
    expected = total * (total.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    if with_residual and not torch.equal(got.sum.cpu(), x + residual):
        return float("inf"), float("inf")
    codes = fp8moe.FP8Tensor(*got.quantized)
    return relative_error(got.values.cpu(), expected), relative_error(exact(on_cpu(codes)), expected)


def norm_error(*case) -> float:
    return normed(*case)[0]


def norm_codes_error(*case) -> float:
    return normed(*case)[1]


def logits_error(tokens: int, experts: int, hidden: int, dtype: torch.dtype, out_dtype: torch.dtype) -> float:
    x, weight = torch.randn(tokens, hidden).to(dtype), torch.randn(experts, hidden).to(dtype)
    got = router_logits(x.cuda(), weight.cuda(), dtype=out_dtype)
    return rounded_error(got.cpu(), x.double() @ weight.double().T)


def norm_logits_error(tokens: int, experts: int, hidden: int, dtype: torch.dtype, out_dtype: torch.dtype) -> float:
    shapes = (tokens, hidden), (hidden,), (experts, hidden), (tokens, hidden)
    x, norm_weight, weight, residual = (torch.randn(shape).to(dtype).cuda() for shape in shapes)
    options = {"residual": residual, "quantized": True}
    got, logits = norm_logits(x, norm_weight, 1e-6, weight, **options, dtype=out_dtype)
    expected = rms_norm(x, norm_weight, 1e-6, **options)
    pairs = zip((*got[:2], *got.quantized), (*expected[:2], *expected.quantized), strict=True)
    if any(differing(one.cpu().float(), other.cpu().float()) for one, other in pairs):
        return float("inf")
    return rounded_error(logits.cpu(), got.values.cpu().double() @ weight.cpu().double().T)


def route_errors(experts: int, top_k: int, form: dict, tokens: int = 9, sort: bool = False) -> int:
    """Experts that are chosen by one of the kernel and the reference, weights that are apart, and wrong places."""
    logits, form = torch.randn(tokens, experts), arguments(experts, form) | {"dtype": torch.float32}
    bias = None if form["bias"] is None else form["bias"].cuda()
    routing = route(logits.cuda(), top_k, **form | {"bias": bias}, sort=sort)
    index, weights, *places = (value if value is None else value.cpu() for value in routing)
    expected = dense(route(logits, top_k, **form), experts)
    errors = int(
        (~torch.isclose(dense((index, weights), experts), expected, rtol=1e-5, atol=0.0, equal_nan=True)).sum()
    )
    if sort:
        errors += sum(map(differing, places, reference.sort_by_expert(index, experts, None)))
    return errors


def rotary_error(batch: int, tokens: int, form: tuple, dtype: torch.dtype) -> float:
    """Of queries, keys and values together; the last sequence's tokens fall out of the cache."""
    given, columns, weights = operands(batch, tokens, form, dtype)
    columns[-1] = given[5].shape[2] - tokens // 2
    copied = [value.cuda() for value in given]
    options = {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in weights.items()}
    query = run(*copied, columns=columns.cuda(), **options)
    expected = run(*given, columns=columns, **weights)
    got = torch.cat([value.cpu().flatten() for value in (query, *copied[5:])])
    return relative_error(got, torch.cat([value.flatten() for value in (expected, *given[5:])]).double())


def attention_error(shape: int, dtype: torch.dtype) -> float:
    batch, heads, length, window = decode_attention_cases.SHAPES[shape]
    operands, new = decode_attention_cases.make(batch, heads, min(length, 600), dtype)
    expected, *_ = decode_attention_cases.expected(*operands, new, window)
    *operands, new = (decode_attention_cases.moved(value, "cuda") for value in (*operands, new))
    values = decode_attention_cases.attend(*operands, new=new, window=window, early=True)
    codes = decode_attention_cases.attend(*operands, new=new, window=window, quantized=True)
    if relative_error(exact(on_cpu(codes)), values.cpu().double()) > E4M3_ERROR:
        return float("inf")
    return relative_error(values.cpu(), expected)


# function, its arguments, the largest result that is correct
CASES = [
    *((norm_error, case, NORM_ERROR[case[2]]) for case in NORMS),
    *((norm_codes_error, case, E4M3_ERROR) for case in NORMS),
    *((logits_error, case, LOGITS_ERROR) for case in LOGITS),
    *((norm_logits_error, case, LOGITS_ERROR) for case in NORM_LOGITS),
    *((route_errors, case, 0) for case in FORMS),
    *((route_errors, (*case, tokens, True), 0) for case in FORMS[:6] for tokens in (1, 11, 16)),
    *((rotary_error, case, 2 * NORM_ERROR[case[3]]) for case in HEADS),
    *((attention_error, case, 2 * NORM_ERROR[case[1]]) for case in ONE_TOKEN),
]
