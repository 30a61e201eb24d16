"""Cases of the training kernels for compute-sanitizer, in the manner of `sanitize_cases.py`, which runs them.

Every source of the transposing quantizer, the transpose of FP8 weights, the GEMM along K, LoRA's kernels; with and
without vectors of 16 bytes, weights, tokens, and a limit; groups of few rows and of many, uneven, empty, with offsets
and tokens that mean nothing. Results are checked on the CPU: functions called `errors` return the number of values that
have not the bits of the reference.
"""

import torch

from benchmarks.operands import exact, relative_error, rounded_error
from fp8moe import FP8Tensor, grouped_gemm_k, quantize_1x128, quantize_128x1, quantize_128x128
from fp8moe.kernels.activation import Activation, activation_backward
from fp8moe.kernels.experts.lora import lora_gradient, lora_shrink
from fp8moe.kernels.experts.swiglu import (
    swiglu_backward_quantize,
    swiglu_backward_quantize_rows,
    swiglu_quantize,
    swiglu_quantize_rows,
)
from fp8moe.kernels.gemm.api import grouped_rows
from fp8moe.quant import reference
from fp8moe.quant.transpose import Transposed, quantize_with_transpose, transpose_fp8
from tests import lora_cases

# group offsets, rows, features, tokens, weighted, input type
TRANSPOSES = (
    (None, 300, 272, None, False, torch.bfloat16),
    ((0, 1), 1, 7, None, False, torch.float32),
    ((0, 5, 5, 140, 290), 300, 136, None, True, torch.bfloat16),
    ((0, 5, 5, 140, 290), 300, 200, 40, True, torch.float16),
    ((0, 128, 256), 256, 257, 40, False, torch.bfloat16),
    ((3, 130, 260), 260, 136, None, True, torch.float32),
    ((-5, 300, 0, 9999), 300, 136, 40, False, torch.bfloat16),
    (tuple(range(0, 900, 3)), 900, 136, None, False, torch.bfloat16),
)
# group offsets, rows, I, activation
SWIGLUS = (
    ((0, 1), 1, 128, Activation()),
    ((0, 5, 5, 140, 290), 300, 256, Activation(limit=1.0)),
    ((40, 30, 9999), 200, 128, Activation(limit=1.0, alpha=1.702)),
)
# experts, N, K
WEIGHTS = ((3, 136, 272), (1, 131, 261), (2, 256, 400))
# group offsets, M, N, whether it adds to the result, type of the result
GROUPED_K = (
    ((0, 128, 128, 512), 136, 104, False, torch.float32),
    ((128, 384), 300, 72, True, torch.float32),
    ((0, 256, 640), 63, 200, False, torch.bfloat16),
    ((-128, 128, 9999 * 128), 257, 24, False, torch.bfloat16),
)
# sizes of groups, K, ranks, tokens from which rows are gathered
LORA = (
    ((3, 0, 7, 40), 136, 16, None),
    ((100, 0, 33), 768, 48, 37),
    ((1,) * 40, 2048, 16, 5),
    ((700, 1), 264, 16, None),
)
# group offsets, rows, N, K, ranks, type of the result
LOW_RANK = (
    ((0, 1, 2, 2, 7, 9, 12), 14, 136, 144, 16, torch.bfloat16),
    ((7, 40, 40, 41, 130, 190), 200, 392, 272, 48, torch.float32),
    ((0, 700, 700, 1003), 1003, 1040, 272, 16, torch.bfloat16),
)
E4M3_ERROR = 4e-2
GEMM_ERROR = 3e-4
BFLOAT16_ERROR = 2e-3  # of which rounding takes 1.7e-3


def transpose_errors(
    offsets: tuple[int, ...] | None,
    rows: int,
    features: int,
    num_tokens: int | None,
    weighted: bool,
    dtype: torch.dtype,
) -> int:
    x = torch.randn(num_tokens or rows, features).to(dtype)
    groups = None if offsets is None else torch.tensor(offsets, dtype=torch.int32)
    tokens = torch.randint(-3, num_tokens + 3, (rows,), dtype=torch.int32) if num_tokens else None
    weights = torch.rand(rows) if weighted else None
    on_gpu = [value if value is None else value.cuda() for value in (groups, tokens, weights)]
    t = quantize_with_transpose(x.cuda(), on_gpu[0], tokens=on_gpu[1], row_weights=on_gpu[2])
    expected = reference.quantize_with_transpose(x, groups, tokens, weights)
    used, end = used_rows(groups, rows), int(expected[4][-1])
    pairs = (
        (t.rows.data.view(torch.uint8).cpu()[used], expected[0].view(torch.uint8)[used]),
        (t.rows.scale.cpu()[used], expected[1][used]),
        (t.columns.data.view(torch.uint8).cpu()[:, :end], expected[2].view(torch.uint8)[:, :end]),
        (t.columns.scale.cpu()[:, : end // 128], expected[3][:, : end // 128]),
        (t.offsets.cpu(), expected[4]),
    )
    return sum(int((got != want).sum()) for got, want in pairs)


def used_rows(groups: torch.Tensor | None, rows: int) -> torch.Tensor:
    """Rows whose tiles fit into the columns."""
    starts, ends, offsets = reference.pad_groups(groups, rows, torch.device("cpu"))
    sizes = offsets[1:] - offsets[:-1]
    parts = [
        torch.arange(s, min(e, s + n)) for s, e, n in zip(*map(torch.Tensor.tolist, (starts, ends, sizes)), strict=True)
    ]
    return torch.cat(parts).unique()


def swiglu_error(offsets: tuple[int, ...], rows: int, size: int, activation: Activation) -> float:
    """The largest error of the activation, its gradients, both ways, the dots, and the same by rows alone."""
    gate_up, grad = torch.randn(rows, 2 * size).bfloat16(), torch.randn(rows, size).bfloat16()
    weights, groups = torch.rand(rows) + 0.1, torch.tensor(offsets, dtype=torch.int32)
    operands = [value.cuda() for value in (gate_up, grad, weights, groups)]
    h = swiglu_quantize(operands[0], operands[3], activation=activation)
    d, dots = swiglu_backward_quantize(*operands, activation=activation)
    rows_alone = {"activation": activation, "values": True}
    h_rows, h_values = swiglu_quantize_rows(operands[0], operands[3], **rows_alone)
    d_rows, dots_again, d_values, _ = swiglu_backward_quantize_rows(*operands, **rows_alone)
    gradient, value = activation_backward(gate_up.double(), weights[:, None] * grad.double(), activation)
    used = used_rows(groups, rows)
    pairs = (
        *((part, (value * grad).sum(-1)) for part in (dots, dots_again)),
        *((h_values, value), (exact(h_rows), value), (d_values, gradient), (exact(d_rows), gradient)),
    )
    return max(
        both_ways_error(h, value, groups),
        both_ways_error(d, gradient, groups),
        *(relative_error(got.cpu()[used], expected[used]) for got, expected in pairs),
    )


def both_ways_error(t: Transposed, expected: torch.Tensor, groups: torch.Tensor) -> float:
    used = used_rows(groups, len(expected))
    rows = FP8Tensor(t.rows.data.cpu()[used], t.rows.scale.cpu()[used])
    # The reference's quantization of the exact values has its own errors, twice.
    columns = reference.both_ways(expected, expected, groups)
    end = int(columns[4][-1])
    got = exact(FP8Tensor(t.columns.data.cpu()[:, :end], t.columns.scale.cpu()[:, : end // 128]))
    wanted = exact(FP8Tensor(columns[2][:, :end], columns[3][:, : end // 128]))
    return max(relative_error(exact(rows), expected[used]), relative_error(got, wanted))


def transpose_fp8_errors(*shape: int) -> int:
    w = quantize_128x128(torch.randn(shape))
    got, expected = transpose_fp8(FP8Tensor(w.data.cuda(), w.scale.cuda())), transpose_fp8(w)
    differing = (got.data.view(torch.uint8).cpu() != expected.data.view(torch.uint8)).sum()
    return int(differing + (got.scale.cpu() != expected.scale).sum())


def grouped_k_error(offsets: tuple[int, ...], m: int, n: int, accumulate: bool, dtype: torch.dtype) -> float:
    k = 640
    a, b = quantize_128x1(torch.randn(k, m)), quantize_128x1(torch.randn(k, n))
    before = torch.randn(len(offsets) - 1, m, n).to(dtype)
    on_gpu = [FP8Tensor(operand.data.cuda(), operand.scale.cuda()) for operand in (a, b)]
    groups, out = torch.tensor(offsets, dtype=torch.int32), before.cuda()
    grouped_gemm_k(*on_gpu, groups.cuda(), out=out, accumulate=accumulate)
    ends = groups.clamp(0, k).tolist()
    products = [exact(a)[:, i:j] @ exact(b)[:, i:j].T for i, j in zip(ends, ends[1:], strict=False)]
    return rounded_error(out.cpu(), torch.stack(products) + (before.double() if accumulate else 0))


def lora_error(sizes: tuple[int, ...], width: int, rank: int, tokens: int | None) -> float:
    """The larger error of `lora_shrink` and `lora_gradient`."""
    x, factors, ranks, offsets, index = lora_cases.operands(sizes, width, rank, tokens, device="cuda")
    shrunk, gradient = lora_cases.exact(x, factors, ranks, offsets, index)
    used = sum(sizes)
    got = lora_shrink(x, factors, offsets, index)[:used]
    return max(relative_error(got, shrunk[:used]), relative_error(lora_gradient(ranks, x, offsets, index), gradient))


def low_rank_error(offsets: tuple[int, ...], m: int, n: int, k: int, rank: int, dtype: torch.dtype) -> float:
    """Of a grouped GEMM to which ranks are added."""
    experts = len(offsets) - 1
    a, b = quantize_1x128(torch.randn(m, k)), quantize_128x128(torch.randn(experts, n, k))
    ranks, factors = torch.randn(m, rank).bfloat16(), torch.randn(experts, n, rank).bfloat16()
    on_gpu = [FP8Tensor(operand.data.cuda(), operand.scale.cuda()) for operand in (a, b)]
    groups, low_rank = torch.tensor(offsets, dtype=torch.int32), (ranks.cuda(), factors.cuda())
    out = grouped_rows(*on_gpu, groups.cuda(), dtype, others_zero=True, low_rank=low_rank).cpu()
    expected = torch.zeros(m, n, dtype=torch.float64)
    for expert, (start, end) in enumerate(zip(offsets, offsets[1:], strict=False)):
        products = exact(a)[start:end] @ exact(FP8Tensor(b.data[expert], b.scale[expert])).T
        expected[start:end] = products + ranks[start:end].double() @ factors[expert].double().T
    return rounded_error(out, expected)


# function, its arguments, the largest result that is correct
CASES = [
    *((transpose_errors, case, 0) for case in TRANSPOSES),
    *((swiglu_error, case, E4M3_ERROR) for case in SWIGLUS),
    *((transpose_fp8_errors, case, 0) for case in WEIGHTS),
    *((grouped_k_error, case, GEMM_ERROR) for case in GROUPED_K),
    *((lora_error, case, BFLOAT16_ERROR) for case in LORA),
    *((low_rank_error, case, GEMM_ERROR) for case in LOW_RANK),
]
