"""Cases of the mixture-of-experts kernels for compute-sanitizer, in the manner of `sanitizing.py`.

Every kernel and way of launching it: one block and a cluster, packed rows and a capacity, tokens without a row, rows
out of range, more tokens than warps. A relative error is infinite if a row outside the groups was written.
"""

import copy

import torch
from torch import Tensor

import fp8moe
from benchmarks.operands import relative_error
from fp8moe.kernels.decoder_ops.rms_norm import rms_norm
from fp8moe.kernels.experts import experts_of_rows, experts_partial, reference
from fp8moe.kernels.experts.combine import Dtypes, combine, norm_launcher
from fp8moe.kernels.experts.combine import launcher as combine_launcher
from fp8moe.kernels.experts.dispatch import Received, dispatch
from fp8moe.kernels.experts.lora import lora_gradient, lora_shrink
from fp8moe.kernels.experts.operands import Layer, Norm, Shard
from fp8moe.kernels.experts.operator import send_rows
from fp8moe.kernels.experts.permute import permute_fp8, permute_quantize
from fp8moe.kernels.experts.routing import assigned_rows, sort_by_expert
from fp8moe.kernels.experts.workspace import empty_normed
from fp8moe.quant.reference import quantize_1x128 as quantize_reference
from fp8moe.runtime.peer_table import SIGNALS_BYTES, Targets, meeting, no_meeting
from tests import lora_cases
from tests.experts_cases import layer_of
from tests.gpu.sanitizing import INF, NAN, both, differing, on_gpu

BF16, FP16, FP32, INT32, INT64 = torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64

# tokens, top_k, experts, capacity, index type, the first expert, first row and rows of a window
SORTS = (
    *((1, 8, 256, None, INT64, 0, 0, None), (0, 8, 7, 3, INT32, 0, 0, None), (100, 8, 60, 9, INT32, 5, 0, None)),
    *((100, 8, 60, None, INT64, 20, 100, 150), (400, 9, 256, None, INT64, 0, 0, None)),
    *((1301, 8, 200, None, INT64, 90, 5000, 6000), (5001, 8, 1024, 50, INT32, 0, 0, None)),
)
# tokens, hidden, top_k, experts, input type
PERMUTATIONS = ((1, 7168, 8, 16, BF16), (33, 272, 40, 7, FP16), (600, 1040, 6, 3, FP32), (700, 7168, 2, 3, BF16))
# tokens, hidden, top_k, experts, types of y, weights and result
COMBINATIONS = (
    *((1, 7168, 8, 16, BF16, FP32, BF16), (33, 264, 40, 7, FP32, BF16, FP16), (300, 1048, 6, 3, BF16, FP16, FP32)),
    (200, 7168, 6, 3, BF16, FP32, BF16),
)
# tokens, hidden, top_k, type, whether the norm is in FP8
NORMED = ((1, 2048, 8, BF16, True), (7, 7168, 8, BF16, False), (33, 272, 40, FP32, True))
# tokens, slots, hidden, top_k, ranks, types of x and of the index
DISPATCHES = (
    *((1, 1, 7168, 8, 1, BF16, INT64), (30, 33, 272, 40, 2, FP16, INT32), (0, 3, 1040, 6, 8, FP32, INT64)),
    (700, 702, 7168, 2, 2, BF16, INT64),
)
# tokens, hidden, top_k, experts, types of y, of the index and of the result
PLACED = ((1, 7168, 8, 8, BF16, INT64, BF16), (33, 264, 40, 7, FP32, INT32, FP16), (200, 7168, 6, 3, BF16, INT64, FP32))
# tokens, hidden, I, experts, top_k, type of the input, ranks, to all
SENT = (
    *((8, 1040, 2048, 8, 3, BF16, 8, False), (200, 272, 200, 5, 3, FP32, 2, True)),
    (400, 1040, 208, 8, 2, BF16, 2, False),
)
# tokens, hidden, I, experts, top_k, type, options of the layer
EXPERTS = (
    *((1, 272, 208, 16, 4, BF16, {}), (200, 256, 144, 5, 3, FP32, {})),
    (12, 272, 208, 7, 4, BF16, {"decode_capacity": 16}),
    (1, 272, 208, 5, 4, BF16, {"bias": True, "weight_scales": "channel"}),
    (400, 272, 208, 5, 3, BF16, {"bias": True}),
    (400, 272, 208, 5, 3, FP32, {"bias": True, "weight_scales": "channel", "dtype": FP32}),
)
# tokens, hidden, I, experts, top_k, options of the layer
GATHERED = (
    (1, 272, 208, 16, 4, {}),
    (4, 2048, 768, 32, 8, {"bias": True}),
    (3, 256, 384, 16, 4, {"weight_format": "mxfp4"}),
)
# sizes of groups, K, ranks, tokens from which rows are gathered
LORA = (
    ((3, 0, 7, 40), 136, 16, None),
    ((100, 0, 33), 768, 48, 37),
    ((1,) * 40, 2048, 16, 5),
    ((700, 1), 264, 16, None),
)
LAYER_ERROR = 1e-2
BFLOAT16_ERROR = 2e-3  # of which rounding takes 1.7e-3


def random_index(tokens: int, top_k: int, num_experts: int, dtype: torch.dtype = INT64) -> Tensor:
    return torch.randint(-num_experts // 4 - 1, num_experts + 2, (tokens, top_k), dtype=dtype)


def sort_errors(
    tokens: int, top_k: int, num_experts: int, capacity: int | None, dtype: torch.dtype, *window: int | None
) -> int:
    options = dict(zip(("first_expert", "first_row", "num_rows"), window, strict=True), capacity=capacity)
    index = random_index(tokens, top_k, num_experts, dtype)
    return differing(both(lambda index: tuple(sort_by_expert(index, num_experts, **options)), index))


def assigned_errors(tokens: int, top_k: int, num_experts: int, num_rows: int, dtype: torch.dtype) -> int:
    sorted = reference.sort_by_expert(random_index(tokens, top_k, num_experts), num_experts, None, 0, 0, num_rows)
    weights = torch.randn(tokens, top_k).to(dtype)
    pairs = both(lambda groups, rows, weights: assigned_rows((groups, rows), weights, num_rows), *sorted, weights)
    return differing(pairs)


def permute_errors(tokens: int, hidden: int, top_k: int, num_experts: int, dtype: torch.dtype) -> int:
    x = torch.randn(tokens, hidden).to(dtype)
    groups, rows = reference.sort_by_expert(random_index(tokens, top_k, num_experts), num_experts, None)
    num_rows = int(groups[-1]) * 3 // 4 + 1  # some rows are past the end
    used = rows[(rows >= 0) & (rows < num_rows)].long().unique()
    data, scale = quantize_reference(x, False)
    pairs = both(lambda x, rows: permute_quantize(x, rows, num_rows), x, rows)
    pairs += both(lambda data, scale, rows: permute_fp8((data, scale), rows, num_rows), data, scale.contiguous(), rows)
    return differing([tuple(value.float()[used] for value in pair) for pair in pairs])


def combine_errors(tokens: int, hidden: int, top_k: int, num_experts: int, *dtypes: torch.dtype) -> int:
    y_dtype, weight_dtype, out_dtype = dtypes
    groups, rows = reference.sort_by_expert(random_index(tokens, top_k, num_experts), num_experts, None)
    y = torch.randn(int(groups[-1]) * 3 // 4 + 1, hidden).to(y_dtype)
    weights = torch.rand(tokens, top_k).to(weight_dtype)
    return differing(both(lambda *operands: combine(*operands, out_dtype), y, rows, weights))


def combine_norm_errors(tokens: int, hidden: int, top_k: int, dtype: torch.dtype, quantized: bool) -> int:
    """Of the sums; and of their norm over the kernel that computes it by itself."""
    groups, rows = reference.sort_by_expert(random_index(tokens, top_k, 16), 16, None)
    y, residual = torch.randn(int(groups[-1]) + 1, hidden).to(dtype), torch.randn(tokens, hidden).to(dtype)
    weights, norm_weight = torch.rand(tokens, top_k), torch.randn(hidden).to(dtype).cuda()
    out = torch.full((tokens, hidden), NAN, dtype=dtype).cuda()
    normed = empty_normed(out, Norm(norm_weight, 1e-6, quantized))
    wanted = (None, *normed) if quantized else (*normed, None, None)
    dtypes = Dtypes(dtype, weights.dtype, dtype)
    launch = norm_launcher(torch.cuda.current_device(), tokens, hidden, top_k, len(y), dtypes, 1e-6)
    launch(*on_gpu((y, rows, weights, residual)), norm_weight, out, *wanted)
    other = rms_norm(out, norm_weight, 1e-6, values=not quantized, quantized=quantized)
    pairs = zip(normed, other.quantized if quantized else [other.values], strict=True)
    pairs = [(one.cpu(), two.cpu()) for one, two in pairs]
    return differing([*pairs, (out.cpu(), reference.combine(y, rows, weights, dtype, residual))])


def dispatch_errors(
    tokens: int, slots: int, hidden: int, top_k: int, ranks: int, dtype: torch.dtype, index_dtype: torch.dtype
) -> int:
    def call(x: Tensor, index: Tensor, received: list[list[Tensor]]) -> list[list[Tensor]]:
        buffers = [Received(data.view(torch.float8_e4m3fn), *others) for data, *others in received]
        dispatch(x, index, buffers, ranks - 1, 200)
        return received

    sizes = (hidden, torch.uint8), (-(-hidden // 128), FP32), (top_k, INT32)
    received = [[torch.zeros(ranks * slots, columns, dtype=kind) for columns, kind in sizes] for _ in range(ranks)]
    index = random_index(tokens, top_k, 200, index_dtype)
    return differing(both(call, torch.randn(tokens, hidden).to(dtype), index, received))


def placed_errors(tokens: int, hidden: int, top_k: int, num_experts: int, *types: torch.dtype) -> int:
    """Of rows in the order of assignments, with NaN wherever nothing is to be read."""
    y_dtype, index_dtype, out_dtype = types
    index = random_index(tokens, top_k, num_experts, index_dtype)
    some = (index >= 0) & (index < num_experts)
    rows = torch.where(some, torch.arange(index.numel()).view(index.shape), -1).int()
    y = torch.full((index.numel(), hidden), NAN, dtype=y_dtype)
    y[some.flatten()] = torch.randn(int(some.sum()), hidden).to(y_dtype)
    weights, residual = torch.rand(tokens, top_k), torch.randn(tokens, hidden).to(out_dtype)
    dtypes = Dtypes(y_dtype, weights.dtype, out_dtype, index_dtype)
    launch = combine_launcher(torch.cuda.current_device(), tokens, hidden, top_k, num_experts, dtypes, pdl=True)
    there = on_gpu((y, index, weights, residual))
    out = torch.empty_like(there[-1])
    launch(*there, None, None, out)
    return differing([(out.cpu(), reference.combine(y, rows, weights, out_dtype, residual))])


def make_layer(hidden: int, size: int, num_experts: int, **options: object) -> fp8moe.GroupedExperts:
    sizes = {"num_experts": num_experts, "hidden_size": hidden, "intermediate_size": size}
    return fp8moe.GroupedExperts(**sizes, **options)


def experts_error(
    tokens: int, hidden: int, size: int, num_experts: int, top_k: int, dtype: torch.dtype, options: dict
) -> float:
    layer = make_layer(hidden, size, num_experts, **options)
    x, weights = torch.randn(tokens, hidden, dtype=dtype), torch.rand(tokens, top_k)
    # Different experts, one of them with no tokens, some indices of other ranks.
    index = torch.stack([torch.randperm(num_experts + 2)[:top_k] for _ in range(tokens)])
    index[index == 0] = -1
    got = copy.deepcopy(layer).cuda()(x.cuda(), index.cuda(), weights.cuda())
    return relative_error(got.cpu(), layer(x, index, weights).double())


def gathered_errors(tokens: int, hidden: int, size: int, num_experts: int, top_k: int, options: dict) -> int:
    """Values that are not those of permuted tokens, of which some have experts of other ranks."""
    layer = make_layer(hidden, size, num_experts, **options).cuda()
    x, weights = torch.randn(tokens, hidden, dtype=BF16).cuda(), torch.rand(tokens, top_k).cuda()
    index = torch.stack([torch.randperm(num_experts + 2)[:top_k] for _ in range(tokens)]).cuda()
    order = sort_by_expert(index, num_experts)._asdict()
    got = layer(x, index, weights, **order, quantized=fp8moe.quantize_1x128(x))
    return differing([(got.cpu(), layer(x, index, weights).cpu())])


def partial_error(tokens: int, hidden: int, size: int, num_experts: int, top_k: int, dtype: torch.dtype) -> float:
    """Of one rank's experts, in two passes, and of rows that are in their order."""
    layer, num_rows = make_layer(hidden, size, num_experts), tokens * top_k // 2 + 1
    shard = Shard(2, num_experts + 4, num_rows=num_rows, row_dtype=FP32)

    def call(x: Tensor, starts: Tensor, given: Layer, *routing: Tensor) -> tuple[Tensor, Tensor]:
        total, known = experts_partial(x, *routing, given, shard._replace(first_row=num_rows), wants_known=True)
        total, _ = experts_partial(x, *routing, given, shard, partial=total, partial_known=known)
        return total, experts_of_rows(x, starts, given, row_dtype=FP32)

    x, weights = torch.randn(tokens, hidden, dtype=dtype), torch.rand(tokens, top_k)
    index = random_index(tokens, top_k, num_experts + 4)
    starts = torch.linspace(-5, tokens + 5, num_experts + 1).int()
    pairs = both(call, x, starts, layer_of(layer), index, weights)
    return max(relative_error(got, expected.double()) for got, expected in pairs)


def sent_error(
    tokens: int, hidden: int, size: int, num_experts: int, top_k: int, dtype: torch.dtype, ranks: int, to_all: bool
) -> float:
    """Rows of one rank's experts in the buffers of all ranks: two passes, and a meeting that this rank ends."""
    given = layer_of(make_layer(hidden, size, num_experts))
    x, index = torch.randn(tokens, hidden, dtype=dtype), random_index(tokens, top_k, num_experts + 4)
    row_dtype = BF16 if dtype is BF16 else FP32
    groups, rows = reference.sort_by_expert(index, num_experts, None, 2)
    permuted = permute_quantize(x, rows, index.numel())
    form = {"row_dtype": row_dtype, "whole": (index.numel(), num_experts + 4)}
    results = experts_of_rows(permuted, groups, given, **form)
    expected = torch.full((index.numel(), hidden), NAN, dtype=results.dtype)
    some = rows.flatten() >= 0
    expected[some] = results[rows.flatten()[some].long()]

    each = index.numel() if to_all else index.numel() // ranks
    buffers = [torch.full((each, hidden), NAN, dtype=results.dtype).cuda() for _ in range(ranks)]
    signals = torch.zeros(ranks, SIGNALS_BYTES // 4, dtype=INT32)
    signals[0, 1:ranks] = 1
    signals = signals.cuda()
    num_rows = index.numel() // 2 + 1
    shard = Shard(2, num_experts + 4, num_rows=num_rows, row_dtype=row_dtype)
    words = meeting([row.data_ptr() for row in signals], 0)
    there = on_gpu((x, index, given))
    for first_row, last in ((num_rows, no_meeting(ranks)), (0, words)):
        targets = Targets(ranks, each, to_all, (*(buffer.data_ptr() for buffer in buffers), *last))
        send_rows(targets, *there, shard._replace(first_row=first_row))
    parts = [buffer.cpu() for buffer in buffers]
    got = parts if to_all else [torch.cat(parts)]
    if any(not torch.equal(values.isnan(), expected.isnan()) for values in got):
        return INF
    return max(relative_error(values[some], expected[some].double()) for values in got)


def lora_error(sizes: tuple[int, ...], width: int, rank: int, tokens: int | None) -> float:
    """The larger error of `lora_shrink` and `lora_gradient`."""
    x, factors, ranks, offsets, index = lora_cases.operands(sizes, width, rank, tokens, device="cuda")
    shrunk, gradient = lora_cases.exact(x, factors, ranks, offsets, index)
    used = sum(sizes)
    got = lora_shrink(x, factors, offsets, index)[:used]
    return max(relative_error(got, shrunk[:used]), relative_error(lora_gradient(ranks, x, offsets, index), gradient))


CASES = [
    *((sort_errors, case, 0) for case in SORTS),
    *((assigned_errors, (100, 8, 16, rows, torch.bfloat16), 0) for rows in (300, 800, 900)),
    *((permute_errors, case, 0) for case in PERMUTATIONS),
    *((combine_errors, case, 0) for case in COMBINATIONS),
    *((combine_norm_errors, case, 0) for case in NORMED),
    *((dispatch_errors, case, 0) for case in DISPATCHES),
    *((placed_errors, case, 0) for case in PLACED),
    *((experts_error, case, LAYER_ERROR) for case in EXPERTS),
    *((gathered_errors, case, 0) for case in GATHERED),
    *((partial_error, case[:6], LAYER_ERROR) for case in EXPERTS[:2]),
    *((sent_error, case, LAYER_ERROR) for case in SENT),
    *((lora_error, case, BFLOAT16_ERROR) for case in LORA),
]
