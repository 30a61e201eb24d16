"""Cases of the mixture-of-experts kernels for compute-sanitizer, in the manner of `sanitize_cases.py`, which runs them.

Every kernel and way of launching it: one block and a cluster, packed rows and a capacity, tokens without a row, rows
out of range, more tokens than warps; groups of few rows and of many, uneven, empty, with offsets and masks that mean
nothing. Results are checked on the CPU. Those of routing are to have the bits of the reference: their functions return
the number of values that differ, the others a relative error, which is infinite if a row outside the groups was
written.
"""

import copy
from itertools import accumulate

import torch

import fp8moe
from benchmarks.operands import exact, relative_error, rounded_error
from fp8moe.kernels.activation import Activation
from fp8moe.kernels.decoder_ops.rms_norm import rms_norm
from fp8moe.kernels.experts import experts_of_rows, experts_partial, reference
from fp8moe.kernels.experts.combine import Dtypes, combine, norm_launcher
from fp8moe.kernels.experts.combine import launcher as combine_launcher
from fp8moe.kernels.experts.dispatch import Received, dispatch
from fp8moe.kernels.experts.operands import Layer, Norm, Shard
from fp8moe.kernels.experts.operator import send_rows
from fp8moe.kernels.experts.permute import permute_fp8, permute_quantize
from fp8moe.kernels.experts.routing import sort_by_expert
from fp8moe.kernels.experts.workspace import empty_normed
from fp8moe.kernels.gemm.api import grouped_gemm_swiglu
from fp8moe.kernels.gemm.launch import GemmOperands, multiply_with
from fp8moe.kernels.gemm.reference import group_rows, grouped_gemm_swiglu_reference
from fp8moe.kernels.gemm.sm90 import TileConfig, with_stages
from fp8moe.kernels.gemm.tiles import Grouping
from fp8moe.quant.reference import quantize_1x128 as quantize_reference
from fp8moe.runtime.peer_table import SIGNALS_BYTES, Targets, meeting, no_meeting

# tokens, top_k, experts, capacity, index type, the first expert, first row and rows of a window
SORTS = (
    (1, 8, 256, None, torch.int64, 0, 0, None),
    (0, 8, 7, 3, torch.int32, 0, 0, None),
    (100, 8, 60, 9, torch.int32, 5, 0, None),
    (100, 8, 60, None, torch.int64, 20, 100, 150),
    (400, 9, 256, None, torch.int64, 0, 0, None),
    (1301, 8, 200, None, torch.int64, 90, 5000, 6000),
    (5001, 8, 1024, 50, torch.int32, 0, 0, None),
)
# tokens, hidden, top_k, experts, input type
PERMUTATIONS = (
    (1, 7168, 8, 16, torch.bfloat16),
    (33, 272, 40, 7, torch.float16),
    (600, 1040, 6, 3, torch.float32),
    (700, 7168, 2, 3, torch.bfloat16),
)
# tokens, hidden, top_k, experts, types of y, weights and result
COMBINATIONS = (
    (1, 7168, 8, 16, torch.bfloat16, torch.float32, torch.bfloat16),
    (33, 264, 40, 7, torch.float32, torch.bfloat16, torch.float16),
    (300, 1048, 6, 3, torch.bfloat16, torch.float16, torch.float32),
    (200, 7168, 6, 3, torch.bfloat16, torch.float32, torch.bfloat16),
)
# tokens, hidden, top_k, type, whether the norm is in FP8
NORMED = (
    (1, 2048, 8, torch.bfloat16, True),
    (7, 7168, 8, torch.bfloat16, False),
    (33, 272, 40, torch.float32, True),
)
# tokens, slots, hidden, top_k, ranks, types of x and of the index
DISPATCHES = (
    (1, 1, 7168, 8, 1, torch.bfloat16, torch.int64),
    (30, 33, 272, 40, 2, torch.float16, torch.int32),
    (0, 3, 1040, 6, 8, torch.float32, torch.int64),
    (700, 702, 7168, 2, 2, torch.bfloat16, torch.int64),
)
# tokens, hidden, top_k, experts, types of y, of the index and of the result
PLACED = (
    (1, 7168, 8, 8, torch.bfloat16, torch.int64, torch.bfloat16),
    (33, 264, 40, 7, torch.float32, torch.int32, torch.float16),
    (200, 7168, 6, 3, torch.bfloat16, torch.int64, torch.float32),
)
# tokens, hidden, I, experts, top_k, type of the input, ranks, to all
SENT = (
    (8, 1040, 2048, 8, 3, torch.bfloat16, 8, False),
    (200, 272, 200, 5, 3, torch.float32, 2, True),
    (400, 1040, 208, 8, 2, torch.bfloat16, 2, False),
)
# group offsets, rows, n, k, output type
GROUPED = (
    ((0, 1, 2, 2, 7, 9, 12), 14, 136, 144, torch.bfloat16),
    ((0, 3, 5), 5, 264, 2048, torch.float32),
    ((7, 40, 40, 41, 130, 190), 200, 392, 272, torch.bfloat16),
    ((0, 700, 700, 1003), 1003, 1040, 272, torch.bfloat16),
    ((-5, 30, 80), 100, 24, 144, torch.float32),
    ((0, 40, 9999), 100, 24, 144, torch.bfloat16),
    ((50, 20, 40), 100, 24, 144, torch.bfloat16),
)
# group sizes, n, k, whether TMA writes the result: in tiles of 128x256, some of them halved, some upright
WIDE = (
    ((192, 0, 130, 320, 64), 2184, 272, False),
    ((129,) * 17, 1032, 1152, True),
)
# rows in use, max_m, n, k, output type
MASKED = (
    ((1, 0, 3, -7, 9, 2**31 - 1), 8, 136, 1040, torch.bfloat16),
    ((200, 0, 7, 150), 160, 264, 272, torch.float32),
)
# group offsets or rows in use, rows, max_m, I, k, activation
SWIGLUS = (
    ((0, 1, 1, 4, 9), 12, None, 208, 272, Activation()),
    ((-9, 150, 120, 120), 300, None, 144, 272, Activation(limit=1.0)),
    ((40, 30, 700), 300, None, 144, 272, Activation(limit=1.0)),
    ((3, 0, 99, -1), 32, 8, 128, 144, Activation(limit=1.0, alpha=1.702)),
)
# tokens, hidden, I, experts, top_k, type, options of the layer
EXPERTS = (
    (1, 272, 208, 16, 4, torch.bfloat16, {}),
    (200, 256, 144, 5, 3, torch.float32, {}),
    (12, 272, 208, 7, 4, torch.bfloat16, {"decode_capacity": 16}),
    (1, 272, 208, 5, 4, torch.bfloat16, {"bias": True, "weight_scales": "channel"}),
    (400, 272, 208, 5, 3, torch.bfloat16, {"bias": True}),
    (400, 272, 208, 5, 3, torch.float32, {"bias": True, "weight_scales": "channel", "dtype": torch.float32}),
)
GEMM_ERROR = 3e-4  # against float64 over the quantized operands, beyond the rounding of the result
CODES_ERROR = 1.5e-2  # a value next to a tie may round to the other side
LAYER_ERROR = 1e-2


def on_cpu(tensor: fp8moe.FP8Tensor) -> fp8moe.FP8Tensor:
    return fp8moe.FP8Tensor(tensor.data.cpu(), tensor.scale.cpu())


def to_gpu(tensor: fp8moe.FP8Tensor) -> fp8moe.FP8Tensor:
    return fp8moe.FP8Tensor(tensor.data.cuda(), tensor.scale.cuda())


def random_index(tokens: int, top_k: int, num_experts: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.randint(-num_experts // 4 - 1, num_experts + 2, (tokens, top_k), dtype=dtype)


def differing(got: torch.Tensor, expected: torch.Tensor) -> int:
    return int((got.cpu() != expected).sum())


def sort_errors(
    tokens: int, top_k: int, num_experts: int, capacity: int | None, dtype: torch.dtype, *window: int | None
) -> int:
    index = random_index(tokens, top_k, num_experts, dtype)
    options = dict(zip(("first_expert", "first_row", "num_rows"), window, strict=True))
    got = sort_by_expert(index.cuda(), num_experts, capacity=capacity, **options)
    expected = reference.sort_by_expert(index, num_experts, capacity, **options)
    return sum(map(differing, got, expected))


def permute_errors(tokens: int, hidden: int, top_k: int, num_experts: int, dtype: torch.dtype) -> int:
    x = torch.randn(tokens, hidden).to(dtype)
    groups, rows = reference.sort_by_expert(random_index(tokens, top_k, num_experts), num_experts, None)
    num_rows = int(groups[-1]) * 3 // 4 + 1  # some rows are past the end
    used = torch.zeros(num_rows, dtype=torch.bool)
    used[rows[(rows >= 0) & (rows < num_rows)].long()] = True
    expected_data, expected_scale = reference.permute_quantize(x, rows, num_rows)
    quantized = fp8moe.FP8Tensor(*(part.cuda() for part in quantize_reference(x, False)))
    errors = 0
    for data, scale in (
        permute_quantize(x.cuda(), rows.cuda(), num_rows),
        permute_fp8((quantized.data, quantized.scale.contiguous()), rows.cuda(), num_rows),
    ):
        errors += differing(data.cpu().view(torch.uint8)[used], expected_data.view(torch.uint8)[used])
        errors += differing(scale.cpu()[used], expected_scale[used])
    return errors


def combine_errors(
    tokens: int,
    hidden: int,
    top_k: int,
    num_experts: int,
    y_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> int:
    groups, rows = reference.sort_by_expert(random_index(tokens, top_k, num_experts), num_experts, None)
    y = torch.randn(int(groups[-1]) * 3 // 4 + 1, hidden).to(y_dtype)
    weights = torch.rand(tokens, top_k).to(weight_dtype)
    got = combine(y.cuda(), rows.cuda(), weights.cuda(), out_dtype)
    return differing(got, reference.combine(y, rows, weights, out_dtype))


def combine_norm_errors(tokens: int, hidden: int, top_k: int, dtype: torch.dtype, quantized: bool) -> int:
    """Of the sums; and of their norm over the kernel that computes it by itself."""
    groups, rows = reference.sort_by_expert(random_index(tokens, top_k, 16), 16, None)
    y, residual = torch.randn(int(groups[-1]) + 1, hidden).to(dtype), torch.randn(tokens, hidden).to(dtype)
    weights, norm_weight = torch.rand(tokens, top_k), torch.randn(hidden).to(dtype).cuda()
    out = torch.full((tokens, hidden), float("nan"), dtype=dtype).cuda()
    normed = empty_normed(out, Norm(norm_weight, 1e-6, quantized))
    wanted = (None, *normed) if quantized else (*normed, None, None)
    dtypes = Dtypes(dtype, weights.dtype, dtype)
    launch = norm_launcher(torch.cuda.current_device(), tokens, hidden, top_k, len(y), dtypes, 1e-6)
    launch(*(value.cuda() for value in (y, rows, weights, residual)), norm_weight, out, *wanted)
    other = rms_norm(out, norm_weight, 1e-6, values=not quantized, quantized=quantized)
    pairs = zip(normed, other.quantized if quantized else [other.values], strict=True)
    errors = sum(differing(one.cpu().float(), two.cpu().float()) for one, two in pairs)
    return errors + differing(out, reference.combine(y, rows, weights, dtype, residual))


def dispatch_errors(
    tokens: int, slots: int, hidden: int, top_k: int, ranks: int, dtype: torch.dtype, index_dtype: torch.dtype
) -> int:
    x, index = torch.randn(tokens, hidden).to(dtype), random_index(tokens, top_k, 200, index_dtype)
    received = []
    for device in ("cpu", "cuda"):
        sizes = {"data": (hidden, torch.uint8), "scale": (-(-hidden // 128), torch.float32)}
        sizes |= {"index": (top_k, torch.int32)}
        parts = [
            [torch.zeros(ranks * slots, columns, dtype=kind, device=device) for columns, kind in sizes.values()]
            for _ in range(ranks)
        ]
        buffers = [Received(data.view(torch.float8_e4m3fn), *others) for data, *others in parts]
        dispatch(x.to(device), index.to(device), buffers, ranks - 1, 200)
        received.append([part for buffer in parts for part in buffer])
    return sum(map(differing, received[1], received[0]))


def placed_errors(
    tokens: int,
    hidden: int,
    top_k: int,
    num_experts: int,
    y_dtype: torch.dtype,
    index_dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> int:
    """Of rows in the order of assignments, with NaN wherever nothing is to be read."""
    index = random_index(tokens, top_k, num_experts, index_dtype)
    some = (index >= 0) & (index < num_experts)
    rows = torch.where(some, torch.arange(index.numel()).view(index.shape), -1).int()
    y = torch.full((index.numel(), hidden), float("nan"), dtype=y_dtype)
    y[some.flatten()] = torch.randn(int(some.sum()), hidden).to(y_dtype)
    weights, residual = torch.rand(tokens, top_k), torch.randn(tokens, hidden).to(out_dtype)
    dtypes = Dtypes(y_dtype, weights.dtype, out_dtype, index_dtype)
    launch = combine_launcher(torch.cuda.current_device(), tokens, hidden, top_k, num_experts, dtypes, pdl=True)
    there = [value.cuda() for value in (y, index, weights, residual)]
    out = torch.empty_like(there[-1])
    launch(*there, None, None, out)
    return differing(out, reference.combine(y, rows, weights, out_dtype, residual))


def random_rows(*shape: int) -> fp8moe.FP8Tensor:
    return fp8moe.quantize_1x128(torch.randn(shape, dtype=torch.bfloat16).cuda())


def random_experts(*shape: int, std: float = 1.0) -> fp8moe.FP8Tensor:
    return fp8moe.quantize_128x128((std * torch.randn(shape)).bfloat16().cuda())


def groups_error(
    a: fp8moe.FP8Tensor, b: fp8moe.FP8Tensor, groups: torch.Tensor, out: torch.Tensor, max_m: int | None
) -> float:
    """a (rows, K), b (E, N, K) and out (rows, N), which was NaN, on the CPU."""
    expected = torch.full(out.shape, float("nan"), dtype=torch.float64)
    for group, rows in group_rows(groups, len(out), max_m):
        w = exact(fp8moe.FP8Tensor(b.data[group], b.scale[group]))
        expected[rows] = exact(fp8moe.FP8Tensor(a.data[rows], a.scale[rows])) @ w.T
    outside = expected.isnan()
    if not out[outside].isnan().all():
        return float("inf")
    return rounded_error(out[~outside], expected[~outside])


def grouped_error(offsets: tuple[int, ...], m: int, n: int, k: int, out_dtype: torch.dtype) -> float:
    a, b = random_rows(m, k), random_experts(len(offsets) - 1, n, k)
    groups = torch.tensor(offsets, dtype=torch.int32)
    out = torch.full((m, n), float("nan"), dtype=out_dtype).cuda()
    fp8moe.grouped_gemm(a, b, groups.cuda(), out=out)
    return groups_error(on_cpu(a), on_cpu(b), groups, out.cpu(), None)


def wide_error(sizes: tuple[int, ...], n: int, k: int, staged: bool) -> float:
    groups = torch.tensor((0, *accumulate(sizes)), dtype=torch.int32)
    a, b = random_rows(sum(sizes), k), random_experts(len(sizes), n, k)
    out = torch.full((sum(sizes), n), float("nan"), dtype=torch.bfloat16).cuda()
    tile = with_stages(TileConfig(128, 256, groups=len(sizes), half_tiles=True, tma_store=staged), k)
    multiply_with(tile, GemmOperands(*a, *b, groups=groups.cuda()), out, Grouping())
    return groups_error(on_cpu(a), on_cpu(b), groups, out.cpu(), None)


def masked_error(masked_m: tuple[int, ...], max_m: int, n: int, k: int, out_dtype: torch.dtype) -> float:
    experts = len(masked_m)
    a, b = random_rows(experts, max_m, k), random_experts(experts, n, k)
    groups = torch.tensor(masked_m, dtype=torch.int32)
    out = torch.full((experts, max_m, n), float("nan"), dtype=out_dtype).cuda()
    fp8moe.grouped_gemm_masked(a, b, groups.cuda(), out=out)
    rows = fp8moe.FP8Tensor(*(part.flatten(0, 1) for part in on_cpu(a)))
    return groups_error(rows, on_cpu(b), groups, out.cpu().flatten(0, 1), max_m)


def swiglu_error(
    groups: tuple[int, ...], m: int, max_m: int | None, size: int, k: int, activation: Activation
) -> float:
    experts = len(groups) - (max_m is None)
    # Small enough that the limits do not clamp everything.
    a, (data, scale) = random_rows(m, k), random_experts(2 * experts, size, k, std=0.05)
    gate_up = fp8moe.FP8Tensor(data.view(experts, 2 * size, k), scale.view(experts, -1, scale.shape[-1]))
    groups = torch.tensor(groups, dtype=torch.int32)
    got = on_cpu(grouped_gemm_swiglu(a, gate_up, groups.cuda(), activation=activation, max_m=max_m))
    expected = fp8moe.FP8Tensor(torch.empty_like(got.data), torch.empty_like(got.scale))
    grouped_gemm_swiglu_reference(on_cpu(a), on_cpu(gate_up), groups, activation, expected, max_m=max_m)
    rows = torch.cat([torch.arange(m)[rows] for _, rows in group_rows(groups, m, max_m)])
    return relative_error(exact(got)[rows], exact(expected)[rows])


def experts_error(
    tokens: int, hidden: int, size: int, num_experts: int, top_k: int, dtype: torch.dtype, options: dict
) -> float:
    sizes = {"num_experts": num_experts, "hidden_size": hidden, "intermediate_size": size}
    layer = fp8moe.GroupedExperts(**sizes, **options)
    x, weights = torch.randn(tokens, hidden, dtype=dtype), torch.rand(tokens, top_k)
    # Different experts, one of them with no tokens, some indices of other ranks.
    index = torch.stack([torch.randperm(num_experts + 2)[:top_k] for _ in range(tokens)])
    index[index == 0] = -1
    got = copy.deepcopy(layer).cuda()(x.cuda(), index.cuda(), weights.cuda())
    return relative_error(got.cpu(), layer(x, index, weights).double())


def partial_error(tokens: int, hidden: int, size: int, num_experts: int, top_k: int, dtype: torch.dtype) -> float:
    """Of one rank's experts, in two passes, and of rows that are in their order."""
    layer = fp8moe.GroupedExperts(num_experts=num_experts, hidden_size=hidden, intermediate_size=size)
    x, weights = torch.randn(tokens, hidden, dtype=dtype), torch.rand(tokens, top_k)
    index = random_index(tokens, top_k, num_experts + 4)
    num_rows = tokens * top_k // 2 + 1

    def run(layer: fp8moe.GroupedExperts, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        up, up_scale, down, down_scale = (getattr(layer, name) for name in layer.weight_names)
        given = Layer(fp8moe.FP8Tensor(up, up_scale), fp8moe.FP8Tensor(down, down_scale), layer.activation)
        shard = Shard(2, num_experts + 4, num_rows=num_rows, row_dtype=torch.float32)
        total, known = experts_partial(*inputs, given, shard._replace(first_row=num_rows), wants_known=True)
        total, _ = experts_partial(*inputs, given, shard, partial=total, partial_known=known)
        starts = torch.linspace(-5, tokens + 5, num_experts + 1).int().to(up.device)
        return total, experts_of_rows(inputs[0], starts, given, row_dtype=torch.float32)

    got = run(copy.deepcopy(layer).cuda(), x.cuda(), index.cuda(), weights.cuda())
    return max(relative_error(a.cpu(), b.double()) for a, b in zip(got, run(layer, x, index, weights), strict=True))


def sent_error(
    tokens: int,
    hidden: int,
    size: int,
    num_experts: int,
    top_k: int,
    dtype: torch.dtype,
    ranks: int,
    to_all: bool,
) -> float:
    """Rows of one rank's experts in the buffers of all ranks: two passes, and a meeting that this rank ends."""
    sizes = {"num_experts": num_experts, "hidden_size": hidden, "intermediate_size": size}
    layer = fp8moe.GroupedExperts(**sizes)
    up, up_scale, down, down_scale = (getattr(layer, name) for name in layer.weight_names)
    weights = fp8moe.FP8Tensor(up, up_scale), fp8moe.FP8Tensor(down, down_scale)
    x, index = torch.randn(tokens, hidden, dtype=dtype), random_index(tokens, top_k, num_experts + 4)
    row_dtype = torch.bfloat16 if dtype is torch.bfloat16 else torch.float32
    groups, rows = reference.sort_by_expert(index, num_experts, None, 2)
    permuted = permute_quantize(x, rows, index.numel())
    form = {"row_dtype": row_dtype, "whole": (index.numel(), num_experts + 4)}
    results = experts_of_rows(permuted, groups, Layer(*weights, layer.activation), **form)
    expected = torch.full((index.numel(), hidden), float("nan"), dtype=results.dtype)
    some = rows.flatten() >= 0
    expected[some] = results[rows.flatten()[some].long()]

    each = index.numel() if to_all else index.numel() // ranks
    buffers = [torch.full((each, hidden), float("nan"), dtype=results.dtype).cuda() for _ in range(ranks)]
    signals = torch.zeros(ranks, SIGNALS_BYTES // 4, dtype=torch.int32)
    signals[0, 1:ranks] = 1
    signals = signals.cuda()
    there = x.cuda(), index.cuda(), Layer(*map(to_gpu, weights), layer.activation)
    num_rows = index.numel() // 2 + 1
    shard = Shard(2, num_experts + 4, num_rows=num_rows, row_dtype=row_dtype)
    words = meeting([row.data_ptr() for row in signals], 0)
    for first_row, last in ((num_rows, no_meeting(ranks)), (0, words)):
        targets = Targets(ranks, each, to_all, (*(buffer.data_ptr() for buffer in buffers), *last))
        send_rows(targets, *there, shard._replace(first_row=first_row))
    parts = [buffer.cpu() for buffer in buffers]
    got = parts if to_all else [torch.cat(parts)]
    if any(not torch.equal(values.isnan(), expected.isnan()) for values in got):
        return float("inf")
    return max(relative_error(values[some], expected[some].double()) for values in got)


# function, its arguments, the largest result that is correct
CASES = [
    *((sort_errors, case, 0) for case in SORTS),
    *((permute_errors, case, 0) for case in PERMUTATIONS),
    *((combine_errors, case, 0) for case in COMBINATIONS),
    *((combine_norm_errors, case, 0) for case in NORMED),
    *((dispatch_errors, case, 0) for case in DISPATCHES),
    *((placed_errors, case, 0) for case in PLACED),
    *((grouped_error, case, GEMM_ERROR) for case in GROUPED),
    *((wide_error, case, GEMM_ERROR) for case in WIDE),
    *((masked_error, case, GEMM_ERROR) for case in MASKED),
    *((swiglu_error, case, CODES_ERROR) for case in SWIGLUS),
    *((experts_error, case, LAYER_ERROR) for case in EXPERTS),
    *((partial_error, case[:6], LAYER_ERROR) for case in EXPERTS[:2]),
    *((sent_error, case, LAYER_ERROR) for case in SENT),
]
