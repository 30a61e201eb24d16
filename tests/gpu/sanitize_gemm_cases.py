"""Cases of the GEMMs and quantizers for compute-sanitizer, in the manner of `sanitizing.py`.

Dense ones with few rows and K split over a cluster, ragged sizes, persistent tiles over several waves, both output
types, bias; groups of few rows and of many, uneven, empty, with offsets and masks that mean nothing, in DeepGEMM's
layouts, along K; every quantizer, with and without vectors of 16 bytes, weights and tokens.
"""

import copy
from dataclasses import replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

import fp8moe
from benchmarks.operands import exact, relative_error, rounded_error
from fp8moe import FP8Tensor, grouped_gemm_k, quantize_128x1, quantize_128x128, quantize_int4, quantize_mxfp4
from fp8moe.kernels.activation import Activation, activation_backward
from fp8moe.kernels.experts.swiglu import (
    Beside,
    swiglu_backward_quantize,
    swiglu_quantize,
)
from fp8moe.kernels.gemm.api import grouped_gemm_swiglu, grouped_gemm_swiglu_keeping
from fp8moe.kernels.gemm.checks import weights as weights_as_loaded
from fp8moe.kernels.gemm.launch import GemmOperands, multiply_with
from fp8moe.kernels.gemm.layouts import grouped_gemm_by_layout, grouped_gemm_k_by_sizes
from fp8moe.kernels.gemm.reference import group_ranges, group_rows
from fp8moe.kernels.gemm.sm90 import TileConfig, with_stages
from fp8moe.kernels.gemm.tiles import Grouping
from fp8moe.quant import reference
from fp8moe.quant.arranged import arrange
from fp8moe.quant.checks import weight_operand
from fp8moe.quant.formats import has_block_scales
from fp8moe.quant.packed import blocks_of_nvfp4, quantize_nvfp4
from fp8moe.quant.transpose import (
    backward_operand,
    quantize_both_ways,
    quantize_columns,
    quantize_with_transpose,
    transpose_fp8,
    transposed_weight,
)
from tests.deep_gemm_cases import by_ends, by_group, by_rows, flat_groups
from tests.gemm_cases import int32
from tests.gpu.sanitizing import (
    E4M3_ERROR,
    GEMM_ERROR,
    NAN,
    both,
    differing,
    groups_error,
    on_cpu,
    on_gpu,
    product,
    random_experts,
    random_rows,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# m, n, k, output type, bias
GEMMS = (
    *((1, 256, 4096, BF16, False), (5, 136, 272, BF16, True), (16, 2112, 1024, FP32, False)),
    *((24, 576, 2048, BF16, False), (64, 512, 2048, FP32, True), (100, 392, 528, BF16, False)),
    *((128, 1024, 1024, BF16, False), (300, 1040, 384, BF16, True), (1032, 2056, 256, FP32, False)),
    (1500, 4104, 272, BF16, False),
)
# m, n, k, output type, the tile. Of parts of K that a block sums: in registers, with two products under way or one; the
# rest in shared memory, with one product across a tile or two; the last has more tiles than SMs. Of halved ones, which
# TMA writes or not, the 21 of a second wave.
TILES = (
    (200, 200, 1024, FP32, TileConfig(128, 64, k_parts=4)),
    (200, 200, 1152, FP32, TileConfig(128, 128, k_parts=2)),
    (300, 392, 1280, FP32, TileConfig(128, 160, k_parts=3)),
    (1500, 2120, 256, FP32, TileConfig(128, 192, k_parts=2)),
    *((1032, 4104, 272, BF16, TileConfig(128, 256, half_tiles=True, tma_store=staged)) for staged in (False, True)),
)
# op, rows, columns, input type, scale format
QUANTIZATIONS = (
    *(("quantize_1x128", 1, 7168, BF16, "float32"), ("quantize_1x128", 37, 272, FP16, "ue8m0")),
    *(("quantize_1x128", 515, 1040, FP32, "float32"), ("quantize_128x128", 200, 300, BF16, "float32")),
    *(("quantize_128x128", 384, 1024, FP32, "ue8m0"), ("quantize_128x1", 256, 72, BF16)),
    ("quantize_128x1", 300, 136, FP32),
)
LINEARS = ((3, 576, 1000, True), (130, 1000, 576, False))  # tokens, in, out, bias
# group offsets, rows, n, k, output type
GROUPED = (
    *(((0, 1, 2, 2, 7, 9, 12), 14, 136, 144, BF16), ((0, 3, 5), 5, 264, 2048, FP32)),
    *(((7, 40, 40, 41, 130, 190), 200, 392, 272, BF16), ((0, 700, 700, 1003), 1003, 1040, 272, BF16)),
    *(((-5, 30, 80), 100, 24, 144, FP32), ((0, 40, 9999), 100, 24, 144, BF16), ((50, 20, 40), 100, 24, 144, BF16)),
)
# the same of those to which products of low rank are added, and the rank
LOW_RANK = ((*GROUPED[0], 16), (*GROUPED[2][:4], FP32, 48), (*GROUPED[3], 16))
# group sizes, n, k, whether TMA writes the result: in tiles of 128x256, some of them halved, some upright
WIDE = (((192, 0, 130, 320, 64), 2184, 272, False), ((129,) * 17, 1032, 1152, True))
# format, group, group sizes, n, k, the tile, or the one chosen: all layouts of scales, ends of K within a stage, one
# block per SM and two, tiles of many tokens
PACKED = (
    ("mxfp4", 32, (1, 0, 9, 40), 136, 288, None),
    ("mxfp4", 32, (9, 0, 8), 264, 2880, TileConfig(8, 256, weights_as_rows=True, blocks_per_sm=2)),
    ("mxfp4", 32, (70,), 576, 1024, TileConfig(64, 256, weights_as_rows=True)),
    ("int4", 128, (1, 0, 9, 40), 264, 384, TileConfig(16, 128, weights_as_rows=True)),
    ("int4", 32, (33, 1), 136, 288, TileConfig(32, 64, weights_as_rows=True, warpgroups=1, blocks_per_sm=2)),
    *(("mxfp4", 32, (130, 0, 300, 1), 392, 672, TileConfig(*block)) for block in ((128, 256), (256, 128), (128, 128))),
    ("mxfp4", 32, (129,) * 17, 1032, 1024, TileConfig(128, 256)),
    ("nvfp4", 16, (9, 0, 8), 264, 288, TileConfig(8, 256, weights_as_rows=True, blocks_per_sm=2)),
    *(("nvfp4", 16, (130, 0, 300, 1), 392, 672, TileConfig(*block)) for block in ((128, 256), (256, 128))),
)
# rows in use, max_m, n, k, output type
MASKED = (((1, 0, 3, -7, 9, 2**31 - 1), 8, 136, 1040, BF16), ((200, 0, 7, 150), 160, 264, 272, FP32))
# sizes of the groups, their order, alignment of a layout of ends; n, k
LAYOUTS = (
    *(((3, 0, 7, 8), (2, 0, 3, 1), None, 136, 272), ((200, 0, 131, 1), (3, 2, 1, 0), None, 264, 144)),
    *(((5, 0, 300), None, 128, 136, 272), ((1,), None, 8, 24, 48)),
)
# group offsets or rows in use, rows, max_m, I, k, activation
GEMM_SWIGLUS = (
    ((0, 1, 1, 4, 9), 12, None, 208, 272, Activation()),
    ((-9, 150, 120, 120), 300, None, 144, 272, Activation(limit=1.0)),
    ((40, 30, 700), 300, None, 144, 272, Activation(limit=1.0)),
    ((3, 0, 99, -1), 32, 8, 128, 144, Activation(limit=1.0, alpha=1.702)),
)
# group offsets, rows, features, tokens, weighted, input type
TRANSPOSES = (
    *((None, 300, 272, None, BF16), ((0, 1), 1, 7, None, FP32)),
    *(((0, 5, 5, 140, 290), 300, 136, None, BF16), ((0, 5, 5, 140, 290), 300, 200, 40, FP16)),
    *(((0, 128, 256), 256, 257, 40, BF16), ((3, 130, 260), 260, 136, None, FP32)),
    *(((-5, 300, 0, 9999), 300, 136, 40, BF16), (tuple(range(0, 900, 3)), 900, 136, None, BF16)),
)
# group offsets, rows, I, activation
SWIGLUS = (
    ((0, 1), 1, 128, Activation()),
    ((0, 5, 5, 140, 290), 300, 256, Activation(limit=1.0)),
    ((40, 30, 9999), 200, 128, Activation(limit=1.0, alpha=1.702)),
)
WEIGHTS = ((3, 136, 272), (1, 131, 261), (2, 256, 400))  # experts, N, K
# group offsets, M, N, whether it adds to the result, type of the result
GROUPED_K = (
    *(((0, 128, 128, 512), 136, 104, False, FP32), ((128, 384), 300, 72, True, FP32)),
    *(((0, 256, 640), 63, 200, False, BF16), ((-128, 128, 9999 * 128), 257, 24, False, BF16)),
)
FLAT = (((128, 0, 256), 72, 40), ((384,), 5, 8), ((128,) * 5, 130, 136))  # sizes of the groups; m, n


def matrices(m: int, n: int, k: int) -> tuple[FP8Tensor, FP8Tensor]:
    return random_rows(m, k), quantize_128x128(torch.randn(n, k, dtype=BF16).cuda())


def gemm_error(m: int, n: int, k: int, out_dtype: torch.dtype, with_bias: bool) -> float:
    a, b = matrices(m, n, k)
    bias = torch.randn(n, dtype=BF16) if with_bias else torch.zeros(n)
    out = torch.full((m, n), NAN, dtype=out_dtype).cuda()
    fp8moe.gemm(a, b, bias=bias.cuda() if with_bias else None, out=out, out_dtype=out_dtype)
    return rounded_error(out.cpu(), product(a, b) + bias.double())


def accumulation_error(m: int, n: int, k: int, out_dtype: torch.dtype) -> float:
    (a, b), total = matrices(m, n, k), torch.randn(m, n, dtype=out_dtype)
    expected, total = product(a, b) + total.double(), total.cuda()
    return rounded_error(fp8moe.gemm(a, b, c=total, out=total).cpu(), expected)


def tile_error(m: int, n: int, k: int, out_dtype: torch.dtype, tile: TileConfig) -> float:
    a, b = matrices(m, n, k)
    out = torch.full((m, n), NAN, dtype=out_dtype).cuda()
    multiply_with(with_stages(tile, k), GemmOperands(*a, *b), out)
    return rounded_error(out.cpu(), product(a, b))


def quantization_errors(op: str, rows: int, columns: int, dtype: torch.dtype, *scale_format: str) -> int:
    options = dict(zip(("scale_format",), scale_format, strict=False))
    return differing(both(lambda x: getattr(fp8moe, op)(x, **options), torch.randn(rows, columns).to(dtype)))


def linear_error(tokens: int, in_features: int, out_features: int, with_bias: bool) -> float:
    source = torch.nn.Linear(in_features, out_features, with_bias, dtype=BF16)
    x = torch.randn(tokens, in_features, dtype=BF16)
    layer = fp8moe.FP8Linear.from_linear(copy.deepcopy(source))  # which shares the bias
    return relative_error(layer.cuda()(x.cuda()).cpu(), source.double()(x.double()))


def grouped_error(offsets: tuple[int, ...], m: int, n: int, k: int, dtype: torch.dtype) -> float:
    a, b, groups = random_rows(m, k), random_experts(len(offsets) - 1, n, k), int32(offsets)
    return groups_error(a, b, groups, lambda out: fp8moe.grouped_gemm(a, b, groups.cuda(), out=out), dtype)


def low_rank_error(offsets: tuple[int, ...], m: int, n: int, k: int, dtype: torch.dtype, rank: int) -> float:
    a, b, groups = random_rows(m, k), random_experts(len(offsets) - 1, n, k), int32(offsets)
    ranks, factors = torch.randn(m, rank).bfloat16(), torch.randn(len(offsets) - 1, n, rank).bfloat16()

    def write(out: Tensor) -> None:
        operands = (*a, *b, groups.cuda(), out, None, ranks.cuda(), factors.cuda(), None)
        torch.ops.fp8moe.grouped_gemm_out(*operands)

    added = lambda group, rows: ranks[rows].double() @ factors[group].double().T  # noqa: E731
    return groups_error(a, b, groups, write, dtype, added=added)


def wide_error(sizes: tuple[int, ...], n: int, k: int, staged: bool) -> float:
    a, b, groups = random_rows(sum(sizes), k), random_experts(len(sizes), n, k), int32((0, *accumulate(sizes)))
    tile = with_stages(TileConfig(128, 256, groups=len(sizes), half_tiles=True, tma_store=staged), k)
    operands = GemmOperands(*a, *b, groups=groups.cuda())
    return groups_error(a, b, groups, lambda out: multiply_with(tile, operands, out, Grouping()))


def packed_error(form: str, group: int, sizes: tuple[int, ...], n: int, k: int, tile: TileConfig | None) -> float:
    """Call GEMMs with weights in four bits, whose codes become E4M3 in registers or in shared memory."""
    weights, a = torch.randn(len(sizes), n, k), random_rows(sum(sizes), k)
    quantizers = {"mxfp4": quantize_mxfp4, "nvfp4": quantize_nvfp4, "int4": partial(quantize_int4, group=group)}
    b = quantizers[form](weights)
    loaded, exact = weight_operand("b", on_gpu(b)), on_gpu(blocks_of_nvfp4(*arrange(b)[:2]) if form == "nvfp4" else b)
    groups = int32((0, *accumulate(sizes)))

    def write(out: Tensor) -> None:
        if tile is None:
            fp8moe.grouped_gemm(a, on_gpu(b), groups.cuda(), out=out)
        else:
            operands = GemmOperands(*a, *weights_as_loaded(*loaded), groups=groups.cuda())
            multiply_with(with_stages(replace(tile, groups=len(sizes), packed=form), k), operands, out, Grouping())

    return groups_error(a, exact, groups, write)


def masked_error(masked_m: tuple[int, ...], max_m: int, n: int, k: int, dtype: torch.dtype) -> float:
    experts, groups = len(masked_m), int32(masked_m)
    a, b = random_rows(experts, max_m, k), random_experts(experts, n, k)

    def write(out: Tensor) -> None:
        fp8moe.grouped_gemm_masked(a, b, groups.cuda(), out=out.view(experts, max_m, n))

    rows = FP8Tensor(*(part.flatten(0, 1) for part in on_cpu(a)))
    return groups_error(rows, b, groups, write, dtype, max_m)


def layout_error(sizes: tuple[int, ...], order: tuple[int, ...] | None, alignment: int | None, n: int, k: int) -> float:
    layout = by_ends(sizes, alignment=alignment)[0] if alignment else by_rows(sizes, order, alignment=8, behind=9)[0]
    m, expected_m = int(layout[-1]) + 5 if alignment else len(layout), max(1, sum(sizes) // len(sizes))
    a, b = random_rows(m, k), random_experts(len(sizes), n, k)

    def write(out: Tensor) -> None:
        grouped_gemm_by_layout(a, b, layout.cuda(), out, alignment=alignment, expected_m=expected_m)

    return groups_error(a, b, group_ranges(layout, len(sizes), alignment), write)


def gemm_swiglu_error(
    groups: tuple[int, ...], m: int, max_m: int | None, size: int, k: int, activation: Activation
) -> float:
    experts, groups = len(groups) - (max_m is None), int32(groups)
    # Small enough that the limits do not clamp everything.
    a, (data, scale) = random_rows(m, k), random_experts(2 * experts, size, k, std=0.05)
    gate_up = FP8Tensor(data.view(experts, 2 * size, k), scale.view(experts, -1, scale.shape[-1]))
    rows = torch.cat([torch.arange(m)[rows] for _, rows in group_rows(groups, m, max_m)])
    call = lambda *operands: grouped_gemm_swiglu(*operands, activation=activation, max_m=max_m)  # noqa: E731
    keeping = lambda *operands: grouped_gemm_swiglu_keeping(*operands, activation=activation)  # noqa: E731
    errors = []
    for compute in (call, keeping)[: 1 + (max_m is None)]:
        (data, expected_data), (scale, expected_scale), *kept = both(compute, *on_cpu((a, gate_up)), groups)
        pairs = [(exact(FP8Tensor(data, scale)), exact(FP8Tensor(expected_data, expected_scale))), *kept]
        errors += [relative_error(got[rows], wanted[rows]) for got, wanted in pairs]
    return max(errors)


def used_rows(groups: Tensor | None, rows: int) -> Tensor:
    """Rows whose tiles fit into the columns."""
    starts, ends, offsets = (value.tolist() for value in reference.pad_groups(groups, rows, torch.device("cpu")))
    sizes = (end - start for start, end in zip(offsets, offsets[1:], strict=False))
    return torch.cat([torch.arange(s, min(e, s + n)) for s, e, n in zip(starts, ends, sizes, strict=True)]).unique()


def transpose_errors(
    offsets: tuple[int, ...] | None,
    rows: int,
    features: int,
    num_tokens: int | None,
    dtype: torch.dtype,
) -> int:
    x, groups = torch.randn(num_tokens or rows, features).to(dtype), None if offsets is None else int32(offsets)
    tokens = torch.randint(-3, num_tokens + 3, (rows,), dtype=torch.int32) if num_tokens else None
    used = used_rows(groups, rows)

    def call(x: Tensor, groups: Tensor, tokens: Tensor) -> tuple:
        t, blocks = (quantize_with_transpose(x, groups, tokens=tokens, blocks=blocks) for blocks in (False, True))
        alone = quantize_columns(x, groups, tokens=tokens)[0]
        return t.rows, t.columns, blocks.rows, blocks.columns, alone, t.offsets

    *parts, offsets = both(call, x, groups, tokens)
    end = int(offsets[1][-1])
    columns = [(slice(None), slice(end)), (slice(None), slice(end // 128))]
    places = [used, used, *columns, used, used, *columns, *columns]
    raw = ([value.view(torch.uint8) if value.itemsize == 1 else value for value in pair] for pair in parts)
    pairs = [(got[i], want[i]) for (got, want), i in zip(raw, places, strict=True)]
    return differing([*pairs, offsets])


def swiglu_error(offsets: tuple[int, ...], rows: int, size: int, activation: Activation) -> float:
    """The largest error of the activation, its gradients, both ways, the dots, and the same by rows alone."""
    gate_up, grad = torch.randn(rows, 2 * size).bfloat16(), torch.randn(rows, size).bfloat16()
    weights, groups = torch.rand(rows) + 0.1, int32(offsets)
    operands = on_gpu((gate_up, grad, weights, groups))
    h = swiglu_quantize(operands[0], operands[3], activation=activation)
    d = swiglu_backward_quantize(*operands, activation=activation, beside=Beside.COLUMNS)
    rows_alone = {"activation": activation, "beside": Beside.VALUES}
    h_rows, h_values = swiglu_quantize(operands[0], operands[3], **rows_alone)
    d_rows, dots_again, *_, d_values, _ = swiglu_backward_quantize(*operands, **rows_alone)
    gradient, value = activation_backward(gate_up.double(), weights[:, None] * grad.double(), activation)
    used = used_rows(groups, rows)
    pairs = (
        *((part, (value * grad).sum(-1)) for part in (d.dots, dots_again)),
        *((h_values, value), (exact(h.rows), value), (exact(h_rows), value), (d_values, gradient)),
        *((exact(part), gradient) for part in (d.rows, d_rows)),
    )
    return max(
        columns_error(d.h_columns, weights[:, None] * value, groups),
        columns_error(d.columns, gradient, groups),
        *(relative_error(got.cpu()[used], expected[used]) for got, expected in pairs),
    )


def columns_error(columns: FP8Tensor, expected: Tensor, groups: Tensor) -> float:
    # The reference's quantization of the exact values has its own errors, twice.
    data, scale, offsets = reference.by_columns(expected, groups, has_block_scales(*columns))
    end = int(offsets[-1])
    got, wanted = (exact(FP8Tensor(*pair)) for pair in (on_cpu(columns), (data, scale)))
    return relative_error(got[:, :end], wanted[:, :end])


def transpose_fp8_errors(*shape: int) -> int:
    return differing(both(transpose_fp8, quantize_128x128(torch.randn(shape))))


def both_ways_errors(*shape: int) -> int:
    w, below = torch.randn(shape), torch.randn(shape)

    def quantized(w: Tensor, below: Tensor) -> tuple[Tensor, ...]:
        found = quantize_both_ways(w, below)
        return *found, *transposed_weight(backward_operand(found))

    return differing(both(quantized, w, below))


def grouped_k_error(offsets: tuple[int, ...], m: int, n: int, accumulate: bool, dtype: torch.dtype) -> float:
    k = 640
    a, x = quantize_128x1(torch.randn(k, m)), torch.randn(k, n)
    before = torch.randn(len(offsets) - 1, m, n).to(dtype)
    ends, errors = int32(offsets).clamp(0, k).tolist(), []
    for b in (quantize_128x1(x), quantize_128x128(x.t())):
        there, out = on_gpu((a, b, int32(offsets))), before.cuda()
        grouped_gemm_k(*there, out=out, accumulate=accumulate)
        products = [exact(a)[:, i:j] @ exact(b)[:, i:j].T for i, j in zip(ends, ends[1:], strict=False)]
        errors.append(rounded_error(out.cpu(), torch.stack(products) + (before.double() if accumulate else 0)))
    return max(errors)


def flat_error(sizes: tuple[int, ...], m: int, n: int) -> float:
    (a, a_values), (b, b_values) = flat_groups(m, sizes), flat_groups(n, sizes, seed=1)
    before = torch.randn(len(sizes), m, n)
    out, there = before.cuda(), on_gpu((FP8Tensor(*a), FP8Tensor(*b), int32(sizes)))
    grouped_gemm_k_by_sizes(*there, out, accumulate=True)
    return rounded_error(out.cpu(), before.double() + by_group(a_values, b_values, sizes))


CASES = [
    *((gemm_error, case, GEMM_ERROR) for case in GEMMS),
    *((accumulation_error, case[:4], GEMM_ERROR) for case in GEMMS),
    *((tile_error, case, GEMM_ERROR) for case in TILES),
    *((quantization_errors, case, 0) for case in QUANTIZATIONS),
    # Two rounded operands: their errors add in squares.
    *((linear_error, case, 1.5 * E4M3_ERROR) for case in LINEARS),
    *((grouped_error, case, GEMM_ERROR) for case in GROUPED),
    *((low_rank_error, case, GEMM_ERROR) for case in LOW_RANK),
    *((wide_error, case, GEMM_ERROR) for case in WIDE),
    *((packed_error, case, GEMM_ERROR) for case in PACKED),
    *((masked_error, case, GEMM_ERROR) for case in MASKED),
    *((layout_error, case, GEMM_ERROR) for case in LAYOUTS),
    *((gemm_swiglu_error, case, 1.5e-2) for case in GEMM_SWIGLUS),  # a value next to a tie may round to the other side
    *((transpose_errors, case, 0) for case in TRANSPOSES),
    *((swiglu_error, case, E4M3_ERROR) for case in SWIGLUS),
    *((check, case, 0) for check in (transpose_fp8_errors, both_ways_errors) for case in WEIGHTS),
    *((grouped_k_error, case, GEMM_ERROR) for case in GROUPED_K),
    *((flat_error, case, GEMM_ERROR) for case in FLAT),
]
