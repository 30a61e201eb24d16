"""The table of operators: of each one operands of small odd sizes, and what tests/contracts.py must know about it.

A new operator enters every contract with a row in CASES. A row's name is the operator's, and what is special about the
form, if there are several.
"""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import fp8moe.kernels
import fp8moe.layers
import fp8moe.peft
import fp8moe.quant
from fp8moe.kernels.activation import Activation
from fp8moe.kernels.decoder_ops import fp8_cache
from fp8moe.kernels.decoder_ops.sampling import SamplingState, Sequences
from fp8moe.kernels.experts.backward import RowOrder
from fp8moe.kernels.experts.operands import Biases, Layer, Norm, Shard, TokenOperands
from fp8moe.kernels.experts.routing import sort_by_expert
from fp8moe.kernels.experts.swiglu import Beside
from fp8moe.kernels.indexer.mqa_cache import new_kv_cache
from fp8moe.quant.formats import FP8Tensor, align
from fp8moe.quant.packed import quantize_int4, quantize_mxfp4, quantize_nvfp4
from fp8moe.quant.quantize import quantize_1x128, quantize_128x1, quantize_128x128
from fp8moe.runtime.operator import Signature
from tests import experts_cases, latent_cases, mqa_cases, sampling_cases
from tests.gemm_cases import int32
from tests.random_values import some_slots

EXPERTS, TOP_K, HEADS = 3, 2, 32
BAD_ROW = 1  # of the operands, where a contract puts a value that is not finite
SWIGLU, LIMITED = "silu", "silu limit=1.0"
OPS = torch.ops.fp8moe

for package in (fp8moe.quant, fp8moe.kernels, fp8moe.layers, fp8moe.peft):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)

INTERNAL = "its callers have checked the operands"
INTEGERS = "there is none among integers"
ASSIGNED = {
    "bad values": "test_routing.py: a weight goes to its row, whatever it is",
    "nothing to do": "test_routing.py: rows are asked for apart from assignments",
}
SAVED = {"wrong operands": INTERNAL, "ranks are refused": INTERNAL}


class Draw:
    """Random operands: equal ones for equal seeds, on the CPU.

    rows: of what the operator works on, row by row. large: with columns for many steps of a kernel's loops.
    """

    def __init__(self, rows: int, seed: int, large: bool):
        self.rows, self.seed, self.large = rows, seed, large
        self.hidden, self.size, self.columns = (1168, 512, 576) if large else (144, 48, 24)
        self.experts = 256 if large else 9  # of routers; layers have fewer
        self.packed_hidden, self.packed_size = (1184, 512) if large else (160, 64)
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(dtype)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator, dtype=dtype)

    def activations(self, *shape: int) -> FP8Tensor:
        return quantize_1x128(self.normal(*shape, dtype=torch.float32) * self.uniform(*shape[:-1], 1).mul(4).exp())

    def weights(self, *shape: int) -> FP8Tensor:
        return quantize_128x128(self.normal(*shape, dtype=torch.float32))

    def mxfp4(self, *shape: int) -> FP8Tensor:
        return FP8Tensor(*quantize_mxfp4(self.normal(*shape))[:2])

    def int4(self, *shape: int) -> FP8Tensor:
        return FP8Tensor(*quantize_int4(self.normal(*shape), group=32)[:2])

    def gate_up(self) -> FP8Tensor:
        data, scale = self.weights(2 * EXPERTS, self.size, self.hidden)
        return FP8Tensor(data.view(EXPERTS, 2 * self.size, self.hidden), scale.reshape(EXPERTS, -1, scale.shape[-1]))

    def offsets(self, rows: int | None = None, unit: int = 1) -> Tensor:
        """Of groups that have all rows."""
        units = (self.rows if rows is None else rows) // unit
        cuts = self.integers(0, units + 1, EXPERTS - 1).sort().values
        return torch.cat([torch.zeros(1), cuts, torch.tensor([units])]).int() * unit

    def permutation(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self.generator).int()

    def row_map(self) -> Tensor:
        """Rows of the assignments of each token, of which the last has none."""
        rows = self.permutation(TOP_K * self.rows).view(self.rows, TOP_K)
        rows[self.rows - 1 :, 0] = -1
        return rows

    def routing(self) -> tuple[Tensor, Tensor]:
        """Of each token; one of them has fewer experts than the others."""
        weights, index = self.uniform(self.rows, EXPERTS).topk(TOP_K, dim=-1)
        index[BAD_ROW + 1 : BAD_ROW + 2, 0] = EXPERTS
        return index, weights


Touched = list[Any]
"""Of each result, and behind these of each argument that is written, an index of what may differ; None: nothing."""


@dataclass(frozen=True)
class Case:
    """A row. In what follows `a` has the arguments by name.

    make: the arguments, in the schema's order.
    defined: the results, and behind them the arguments that are written, without what is uninitialized.
    bad: arguments, each with the index at which it gets a value that is not finite, and what that may touch.
    fixed: arguments that are refused in another layout. unchecked: those whose dtype its callers have checked.
    names: patterns of what messages call arguments, where these are not the schema's names.
    sums: results that the reference sums in the order of the operands' layout.
    exempt: contracts that do not apply, and why; those with ", cuda" behind their names do on the reference backend.
    rows: on a GPU, for repeats and graphs.
    """

    make: Callable[[Draw], tuple]
    defined: Callable[[SimpleNamespace, list[Tensor]], list[Tensor]] = lambda a, results: results
    bad: Mapping[str, tuple[tuple, Callable[[SimpleNamespace], Touched]]] = field(default_factory=dict)
    fixed: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()
    sums: tuple[int, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    exempt: Mapping[str, str] = field(default_factory=dict)
    rows: tuple[int, ...] = (300,)


def first_columns(group_offsets: Tensor, row: int) -> slice:
    """The 128 columns of the padded groups in which a row is."""
    bounds, start = group_offsets.tolist(), 0
    for begin, end in zip(bounds, bounds[1:], strict=False):
        if begin <= row < end:
            start += (row - begin) // 128 * 128
            return slice(start, start + 128)
        start += align(end - begin, 128)
    raise ValueError(row)


def group_of(group_offsets: Tensor, row: int) -> int:
    return int((group_offsets <= row).sum()) - 1


def transposed(rows: Any, features: Any, group_offsets: Tensor | None = None, row: int = BAD_ROW) -> Touched:
    """Of rows, scales of rows, columns, scales of columns and offsets; features: those of the columns."""
    columns = slice(0, 128) if group_offsets is None else first_columns(group_offsets, row)
    return [*rows, (features, columns), (features, columns.start // 128), None]


def in_blocks(features: slice, group_offsets: Tensor, row: int = BAD_ROW) -> Touched:
    """Of columns, scales of blocks and offsets: what is not finite leaves its block another scale."""
    columns = first_columns(group_offsets, row)
    blocks = slice(features.start // 128, features.stop // 128)
    return [(features, columns), (blocks, columns.start // 128), None]


def both_ways_of_block(block: int, first: int, rows: int) -> Touched:
    """Return what a value in column 130 of expert 1 may touch of weights, either way in memory, in a block of rows."""
    values, columns = slice(first, first + rows), slice(128, 256)
    return [(1, values, columns), (1, block, 1)] * 2


def both_ways(results: list[Tensor], end: Tensor) -> list[Tensor]:
    """Columns and their scales up to the end of the last group; `end` of what pads the groups."""
    columns = int(end)
    return [results[0][:, :columns], results[1][:, : columns // 128]]


def _transposed_defined(a: SimpleNamespace, results: list[Tensor]) -> list[Tensor]:
    return [*results[:2], *both_ways(results[2:4], results[4][-1]), *results[4:]]


def _tokens_kept_defined(a: SimpleNamespace, results: list[Tensor]) -> list[Tensor]:
    """Of assignments that have an expert, the rows that a forward keeps."""
    out, rows, *others = results
    return [out, rows[: a.groups[-1]], *others]


def _used_rows(a: SimpleNamespace, results: list[Tensor]) -> list[Tensor]:
    used = a.rows[a.rows >= 0].long().sort().values
    return [result.view(torch.uint8)[used] if result.itemsize == 1 else result[used] for result in results]


def _mapped(a: SimpleNamespace) -> Tensor:
    return a.rows[BAD_ROW].long()


# ---- quantizers ----


def _with_transpose(draw: Draw) -> tuple:
    tokens = draw.integers(0, max(draw.rows, 1), draw.rows)
    return draw.normal(draw.rows, draw.hidden), draw.offsets(), tokens, False


def _swiglu(draw: Draw, beside: Beside = Beside.NOTHING, activation: str = SWIGLU) -> tuple:
    return draw.normal(draw.rows, 256), draw.offsets(), activation, int(beside)


def _swiglu_backward(draw: Draw, *options: Any) -> tuple:
    gate_up, *form = _swiglu(draw, *options)
    return gate_up, draw.normal(draw.rows, 128), draw.uniform(draw.rows), *form


QUANTIZERS = {
    "quantize_1x128": Case(
        lambda draw: (draw.normal(draw.rows, draw.hidden), "float32"),
        bad={"x": ((BAD_ROW, 130), lambda a: [(BAD_ROW, slice(128, 256)), (BAD_ROW, 1)])},
    ),
    "quantize_1x128, leading dimensions": Case(
        lambda draw: (draw.normal(3, draw.rows, draw.hidden, dtype=torch.float32), "ue8m0"),
        bad={"x": ((2, BAD_ROW, 130), lambda a: [(2, BAD_ROW, slice(128, 256)), (2, BAD_ROW, 1)])},
    ),
    "quantize_128x128": Case(
        lambda draw: (draw.normal(2, draw.rows, draw.hidden), "float32"),
        bad={"w": ((1, BAD_ROW, 130), lambda a: [(1, slice(128), slice(128, 256)), (1, 0, 1)])},
    ),
    "quantize_128x128_out": Case(
        lambda draw: (draw.normal(2, draw.rows, draw.hidden), "ue8m0", *draw.weights(2, draw.rows, draw.hidden)),
        bad={"w": ((1, BAD_ROW, 130), lambda a: [(1, slice(128), slice(128, 256)), (1, 0, 1)])},
        names={"data": r"out\.data", "scale": r"out\.scale"},
    ),
    "quantize_128x1": Case(
        lambda draw: (draw.normal(draw.rows, draw.hidden, dtype=torch.float16),),
        bad={"x": ((BAD_ROW, 130), lambda a: [(130, slice(128)), (130, 0)])},
    ),
    "quantize_mxfp4": Case(
        lambda draw: (draw.normal(2, draw.rows, 160),),
        exempt={"bad values": "test_packed.py: the scale is a byte"},
    ),
    "quantize_int4": Case(
        lambda draw: (draw.normal(2, draw.rows, 160, dtype=torch.float32), 32),
        bad={"w": ((1, BAD_ROW, 130), lambda a: [(1, BAD_ROW, slice(64, 80)), (1, BAD_ROW, 4)])},
    ),
    "arrange_nvfp4": Case(
        lambda draw: (*quantize_nvfp4(draw.normal(2, 2 * draw.rows, 160))[:2], draw.uniform(2), 2),
        exempt={
            "bad values": "test_arranged.py: the scale is a byte",
            "nothing to do": "tensor scales stay",
            "wrong operands": INTERNAL,
            "ranks are refused": INTERNAL,
        },
    ),
    "packed_in_blocks": Case(
        lambda draw: (*draw.mxfp4(2, 2 * draw.rows, 160), 2),
        exempt={
            "bad values": "test_packed.py: the scale is a byte",
            "wrong operands": INTERNAL,
            "ranks are refused": INTERNAL,
        },
    ),
    "packed_in_blocks, int4": Case(
        lambda draw: (*draw.int4(2, draw.rows, 160), 1),
        bad={"scale": ((1, BAD_ROW, 1), lambda a: [(1, slice(128), slice(128)), (1, 0, 0)])},
        exempt={"wrong operands": INTERNAL, "ranks are refused": INTERNAL},
    ),
    "quantize_with_transpose": Case(
        lambda draw: (draw.normal(draw.rows, draw.hidden), draw.offsets(), None, False),
        _transposed_defined,
        bad={
            "x": (
                (BAD_ROW, 130),
                lambda a: transposed([(BAD_ROW, slice(128, 256)), (BAD_ROW, 1)], 130, a.group_offsets),
            )
        },
    ),
    "quantize_with_transpose, tokens": Case(_with_transpose, _transposed_defined),
    "quantize_with_transpose, one group": Case(
        lambda draw: (draw.normal(draw.rows, draw.hidden, dtype=torch.float32), None, None, True), _transposed_defined
    ),
    "quantize_columns": Case(
        lambda draw: _with_transpose(draw)[:3],
        lambda a, results: [*both_ways(results, results[2][-1]), results[2]],
    ),
    "quantize_columns, rows": Case(
        lambda draw: (draw.normal(draw.rows, draw.hidden), draw.offsets(), None),
        lambda a, results: [*both_ways(results, results[2][-1]), results[2]],
        bad={"x": ((BAD_ROW, 130), lambda a: in_blocks(slice(128, 256), a.group_offsets))},
    ),
    "quantize_both_ways": Case(
        lambda draw: (draw.normal(2, draw.rows, draw.hidden), draw.normal(2, draw.rows, draw.hidden)),
        bad={
            "w": ((1, BAD_ROW, 130), lambda a: both_ways_of_block(0, 0, min(a.w.shape[-2], 128))),
            "below": (
                (1, BAD_ROW, 130),
                lambda a: both_ways_of_block(-(-a.w.shape[-2] // 128), a.w.shape[-2], min(a.w.shape[-2], 128)),
            ),
        },
    ),
    "transpose_fp8": Case(
        lambda draw: tuple(draw.weights(2, draw.rows, draw.hidden)),
        bad={
            "data": ((1, BAD_ROW, 130), lambda a: [(1, 130, BAD_ROW), None]),
            "scale": ((1, 0, 1), lambda a: [None, (1, 1, 0)]),
        },
        names={"data": "w.data", "scale": "w.scale"},
    ),
    "quantized_master": Case(
        lambda draw: (draw.normal(2, draw.rows, draw.hidden),),
        bad={"weight": ((1, BAD_ROW, 130), lambda a: [(1, slice(128), slice(128, 256)), (1, 0, 1)])},
        names={"weight": "w"},
    ),
    "quantized_gate_up": Case(
        lambda draw: (draw.normal(2, draw.rows, draw.hidden), draw.normal(2, draw.rows, draw.hidden)),
        bad={
            "gate": ((1, BAD_ROW, 130), lambda a: [(1, slice(min(128, a.gate.shape[1])), slice(128, 256)), (1, 0, 1)])
        },
        exempt={"wrong operands": INTERNAL, "ranks are refused": INTERNAL},
    ),
    "swiglu_quantize": Case(
        lambda draw: _swiglu(draw, activation=LIMITED), bad={"gate_up": ((BAD_ROW, 5), lambda a: [BAD_ROW] * 2)}
    ),
    "swiglu_quantize, rows and values": Case(
        lambda draw: _swiglu(draw, Beside.VALUES), bad={"gate_up": ((BAD_ROW, 5), lambda a: [BAD_ROW] * 3)}
    ),
    "swiglu_backward_quantize": Case(lambda draw: _swiglu_backward(draw, Beside.NOTHING, LIMITED), sums=(2,)),
    "swiglu_backward_quantize, both ways": Case(
        lambda draw: _swiglu_backward(draw, Beside.COLUMNS),
        lambda a, results: [*_transposed_defined(a, results[:6]), *both_ways(results[6:], results[4][-1])],
        bad={
            "gate_up": (
                (BAD_ROW, 5),
                lambda a: [
                    *transposed([BAD_ROW, BAD_ROW], [5, 133], a.group_offsets),
                    *(BAD_ROW, *in_blocks(slice(0, 128), a.group_offsets)[:2]),
                ],
            ),
            "grad": (
                (BAD_ROW, 5),
                lambda a: [*transposed([BAD_ROW, BAD_ROW], [5, 133], a.group_offsets), BAD_ROW, None, None],
            ),
            "row_weights": (
                (BAD_ROW,),
                lambda a: [
                    *transposed([BAD_ROW, BAD_ROW], slice(None), a.group_offsets),
                    *(None, *in_blocks(slice(0, 256), a.group_offsets)[:2]),
                ],
            ),
        },
        sums=(5,),
    ),
    "swiglu_backward_quantize, rows and values": Case(
        lambda draw: _swiglu_backward(draw, Beside.VALUES),
        bad={
            "gate_up": ((BAD_ROW, 5), lambda a: [BAD_ROW] * 5),
            "grad": ((BAD_ROW, 5), lambda a: [BAD_ROW] * 4 + [None]),
        },
        sums=(2,),
    ),
}


# ---- rows of experts ----


def _low_rank(draw: Draw, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, factors, ranks and tokens."""
    tokens = draw.integers(0, max(draw.rows, 1), rows)
    return draw.normal(draw.rows, draw.hidden), draw.normal(EXPERTS, 16, draw.hidden), draw.normal(rows, 16), tokens


def _shrink(draw: Draw) -> tuple:
    x, factors, _, tokens = _low_rank(draw, draw.rows)
    return x, factors, draw.offsets(), tokens


def _gradient(draw: Draw) -> tuple:
    x, _, ranks, tokens = _low_rank(draw, draw.rows)
    return ranks, x, draw.offsets(), tokens


def _assigned(draw: Draw, num_rows: int) -> tuple:
    index = draw.integers(-1, 6, draw.rows, 3)
    sorted = sort_by_expert(index, 5, first_row=2, num_rows=num_rows)
    return *sorted, draw.normal(draw.rows, 3), num_rows


ROWS = {
    "permute_quantize": Case(
        lambda draw: (draw.normal(draw.rows, draw.hidden), draw.row_map(), TOP_K * draw.rows),
        _used_rows,
        bad={"x": ((BAD_ROW, 130), lambda a: [(_mapped(a), slice(128, 256)), (_mapped(a), 1)])},
    ),
    "permute_fp8": Case(
        lambda draw: (*draw.activations(draw.rows, draw.hidden), draw.row_map(), TOP_K * draw.rows),
        _used_rows,
        bad={
            "data": ((BAD_ROW, 130), lambda a: [(_mapped(a), 130), None]),
            "scale": ((BAD_ROW, 1), lambda a: [None, (_mapped(a), 1)]),
        },
        names={"data": "x.data", "scale": "x.scale"},
    ),
    "combine": Case(
        lambda draw: (
            *(draw.normal(TOP_K * draw.rows, draw.hidden), draw.row_map(), draw.uniform(draw.rows, TOP_K)),
            *(torch.bfloat16, None),
        ),
        bad={"weights": ((BAD_ROW, 0), lambda a: [BAD_ROW])},
    ),
    "combine, residual": Case(
        lambda draw: (
            *(draw.normal(TOP_K * draw.rows, draw.hidden), draw.row_map(), draw.uniform(draw.rows, TOP_K)),
            *(torch.float32, draw.normal(draw.rows, draw.hidden, dtype=torch.float32)),
        ),
        bad={"residual": ((BAD_ROW, 5), lambda a: [(BAD_ROW, 5)])},
    ),
    "sort_by_expert": Case(
        lambda draw: (draw.integers(-1, draw.experts + 1, draw.rows, 3, dtype=torch.int64), draw.experts, None),
        exempt={"bad values": INTEGERS},
        rows=(500, 20_000),
    ),
    "sort_by_expert, capacity": Case(
        lambda draw: (draw.integers(-1, draw.experts + 1, draw.rows, 3, dtype=torch.int64), draw.experts, 3),
        rows=(500, 20_000),
    ),
    "sort_by_expert, window": Case(lambda draw: (draw.integers(-1, 6, draw.rows, 3), 5, None, 3, 2, 7)),
    "assigned_rows": Case(lambda draw: _assigned(draw, 70), exempt=ASSIGNED, rows=(500, 20_000)),
    "assigned_rows, window": Case(lambda draw: _assigned(draw, 7), exempt=ASSIGNED),
    "lora_shrink": Case(
        lambda draw: (*_shrink(draw)[:3], None),
        bad={
            "x": ((BAD_ROW, 5), lambda a: [BAD_ROW]),
            "factors": ((0, 3, 5), lambda a: [(slice(0, int(a.group_offsets[1])), 3)]),
        },
        exempt={"ranks are refused": INTERNAL},
    ),
    "lora_shrink, tokens": Case(_shrink, exempt={"ranks are refused": INTERNAL}),
    "lora_gradient": Case(
        lambda draw: (*_gradient(draw)[:3], None),
        bad={
            "x": ((BAD_ROW, 5), lambda a: [(group_of(a.group_offsets, BAD_ROW), slice(None), 5)]),
            "ranks": ((BAD_ROW, 3), lambda a: [(group_of(a.group_offsets, BAD_ROW), 3)]),
        },
        exempt={"ranks are refused": INTERNAL},
    ),
    "lora_gradient, tokens": Case(_gradient, exempt={"ranks are refused": INTERNAL}),
}


# ---- a decoder's operations ----


def _norm(draw: Draw) -> tuple:
    return draw.normal(draw.rows, 2, draw.hidden), draw.normal(draw.hidden)


def _norm_and_router(draw: Draw) -> tuple:
    """x, norm_weight, residual and weight."""
    x, residual = draw.normal(2, draw.rows, draw.hidden)
    return x, draw.normal(draw.hidden), residual, draw.normal(draw.experts, draw.hidden)


def _heads(draw: Draw) -> tuple:
    heads, key_heads, size, tokens, room = (32, 4, 128, 3, 5) if draw.large else (4, 2, 16, 3, 5)
    q, k, v = (draw.normal(draw.rows, tokens, count, size) for count in (heads, key_heads, key_heads))
    cos, sin = (draw.normal(draw.rows, tokens, size) for _ in range(2))
    keys, values = (draw.normal(draw.rows, key_heads, tokens + room, size) for _ in range(2))
    return q, k, v, cos, sin, keys, values, draw.integers(0, room + 1, draw.rows, dtype=torch.int64)


def _new_token(draw: Draw, *, appends: bool, norm: bool) -> tuple:
    heads, key_heads, size, length = (32, 4, 128, 700) if draw.large else (4, 2, 16, 9)
    q, k, v = (draw.normal(draw.rows, count, size) for count in (heads, key_heads, key_heads))
    keys, values = (draw.normal(draw.rows, key_heads, length, size) for _ in range(2))
    columns = draw.integers(0, length, draw.rows, dtype=torch.int64)
    cos, sin, *weights = (draw.normal(count, size) for count in (draw.rows, draw.rows, 1, 1))
    new = (k, v, cos, sin) if appends else (None,) * 4
    norms = (*(weight[0] for weight in weights), 1e-6) if norm else (None, None, 0.0)
    return q, keys, values, columns // 2, columns, *new, *norms


def _in_fp8(operands: tuple, keys: int, *, defaults: tuple) -> tuple:
    """Operands whose keys, at this place, and values are in FP8; `defaults` fill up to the scales, which are last."""
    caches = [fp8_cache.quantized(cache) for cache in operands[keys : keys + 2]]
    data, scales = zip(*caches, strict=True)
    return *operands[:keys], *data, *operands[keys + 2 :], *defaults, *scales


def _sinks(draw: Draw) -> Tensor:
    return draw.normal(32 if draw.large else 4)


def _second_head(arguments) -> slice:
    """Its columns of the result of decode_attention."""
    size = arguments.q.shape[2]
    return slice(size, 2 * size)


def _prompts(draw: Draw) -> tuple:
    """Of a first sequence of three tokens, and of others; where there are few rows, of three tokens too."""
    heads, key_heads, size = (32, 4, 128) if draw.large else (4, 2, 16)
    q, keys, values = (draw.normal(draw.rows, count, size) for count in (heads, key_heads, key_heads))
    ends = torch.tensor([0, 3, draw.rows] if draw.large else [*range(0, draw.rows, 3), draw.rows])
    sequences = torch.stack([ends, ends, ends.diff(append=ends[-1:])]).int()
    return q, keys, values, sequences, draw.rows, draw.rows, None, 0.25


def _first_group(arguments) -> slice:
    """The query heads of the first key head."""
    return slice(arguments.q.shape[1] // arguments.keys.shape[1])


def _prompt_gradients(draw: Draw) -> tuple:
    operands = _prompts(draw)
    return draw.normal(*operands[0].shape), *operands, *OPS.prompt_attention(*operands)


def _sampling(draw: Draw) -> tuple:
    vocab = 40_000 if draw.large else 33
    logits = sampling_cases.random_logits(draw.rows, vocab, torch.bfloat16, seed=draw.seed)
    return logits, *sampling_cases.random_state(draw.rows, vocab, seed=draw.seed)


def _sequences(draw: Draw) -> tuple:
    """Some have ended, some end with their next token, by its limit or by its kind."""
    logits, *state = _sampling(draw)
    rows, vocab = logits.shape
    count = draw.integers(0, 4, rows).long()
    finished = draw.integers(0, 4, rows) == 0
    ends = draw.integers(0, 2, rows, vocab).bool()
    generated, logprobs = draw.integers(0, vocab, rows, 5).long(), draw.normal(rows, 5, dtype=torch.float32)
    noted = count.new_zeros(rows), generated, logprobs, count, finished, finished & (count == 1)
    return logits, *state, *noted, count + draw.integers(1, 3, rows).long(), ends, count.new_tensor([7])


SCALES = {"key_scales": "keys.scale|keys", "value_scales": "values.scale|values"}
DECODER = {
    "rms_norm": Case(lambda draw: (*_norm(draw), None, 1e-6, True, False)),
    "rms_norm, residual and quantized": Case(
        lambda draw: (*_norm(draw), draw.normal(draw.rows, 2, draw.hidden), 1e-6, True, True),
        bad={
            "x": ((BAD_ROW, 1, 5), lambda a: [(BAD_ROW, 1)] * 4),
            "residual": ((BAD_ROW, 1, 5), lambda a: [(BAD_ROW, 1)] * 4),
            "weight": ((5,), lambda a: [None, (..., 5), (..., slice(128)), (..., 0)]),
        },
    ),
    "rms_norm, quantized alone": Case(
        lambda draw: (*_norm(draw), draw.normal(draw.rows, 2, draw.hidden), 1e-6, False, True)
    ),
    "rotary": Case(
        lambda draw: (*_heads(draw), None, None, 0.0, None, None),
        bad={"q": ((BAD_ROW, 2, 1, 3), lambda a: [(BAD_ROW, 2, 1), None, None])},
        fixed=("keys", "values"),
        names={"k": "k|q"},
    ),
    "rotary, norm": Case(
        lambda draw: (*(heads := _heads(draw)), *draw.normal(2, heads[0].shape[-1]), 1e-6, None, None),
        bad={"k": ((BAD_ROW, 2, 1, 3), lambda a: [None, (BAD_ROW, 1, int(a.columns[BAD_ROW]) + 2), None])},
        fixed=("keys", "values"),
        names={"k": "k|q"},
    ),
    "decode_attention": Case(
        lambda draw: (*_new_token(draw, appends=False, norm=False), _sinks(draw), 4, 0.25, *(False, False, None, None)),
        bad={
            "q": ((BAD_ROW, 1, 3), lambda a: [(BAD_ROW, _second_head(a)), None, None, None, None]),
            "sinks": ((1,), lambda a: [(slice(None), _second_head(a)), None, None, None, None]),
        },
        fixed=("keys", "values"),
        names={"k": "k|q"},
    ),
    "decode_attention, new tokens": Case(
        lambda draw: (
            *_new_token(draw, appends=True, norm=True),
            _sinks(draw).float(),
            None,
            0.25,
            *(True, False, None, None),
        ),
        bad={"q": ((BAD_ROW, 1, 3), lambda a: [None, BAD_ROW, BAD_ROW, None, None])},
        fixed=("keys", "values"),
    ),
    "rotary, FP8": Case(
        lambda draw: _in_fp8(_heads(draw), 5, defaults=(None, None, 0.0)),
        bad={"q": ((BAD_ROW, 2, 1, 3), lambda a: [(BAD_ROW, 2, 1), None, None, None, None])},
        fixed=("keys", "values", "key_scales", "value_scales"),
        names={"k": "k|q", **SCALES},
    ),
    "decode_attention, FP8": Case(
        lambda draw: _in_fp8(
            _new_token(draw, appends=True, norm=True), 1, defaults=(_sinks(draw), None, 0.25, False, False)
        ),
        bad={"q": ((BAD_ROW, 1, 3), lambda a: [(BAD_ROW, _second_head(a)), *[None] * 6])},
        fixed=("keys", "values", "key_scales", "value_scales"),
        names=SCALES,
    ),
    "prompt_attention": Case(
        _prompts,
        bad={
            "q": ((BAD_ROW, 1, 3), lambda a: [(BAD_ROW, 1), (1, BAD_ROW)]),
            "keys": ((BAD_ROW, 0, 3), lambda a: [(slice(1, 3), _first_group(a)), (_first_group(a), slice(1, 3))]),
            "values": ((BAD_ROW, 0, 3), lambda a: [(slice(1, 3), _first_group(a), 3), None]),
        },
    ),
    "prompt_attention_backward": Case(
        _prompt_gradients,
        bad={"grad": ((BAD_ROW, 1, 3), lambda a: [(slice(3), 1), (slice(3), 0), (slice(3), 0)])},
        exempt=SAVED,
    ),
    "router_logits": Case(
        lambda draw: (
            *(draw.normal(draw.rows, draw.hidden), draw.normal(draw.experts, draw.hidden), draw.normal(draw.experts)),
            torch.float32,
        ),
        bad={"x": ((BAD_ROW, 5), lambda a: [BAD_ROW]), "weight": ((3, 5), lambda a: [(slice(None), 3)])},
        sums=(0,),
        exempt={"layouts, cuda": "rows that are not aligned take another kernel, which sums in another order"},
        rows=(1, 64, 300),
    ),
    "norm_route": Case(
        lambda draw: (
            *(*_norm_and_router(draw), 1e-6, draw.normal(draw.experts), False, torch.float32),
            *(3, "softmax", True, 1, 1, 1.0, None, torch.bfloat16),
        ),
        bad={"x": ((BAD_ROW, 5), lambda a: [BAD_ROW, BAD_ROW, None, None, BAD_ROW, BAD_ROW, ..., ...])},
        sums=(5,),
        rows=(1, 8, 16, 300),
    ),
    "norm_route, quantized": Case(
        lambda draw: (
            *(*_norm_and_router(draw), 1e-6, None, True, torch.bfloat16),
            *(3, "sigmoid", True, 1, 1, 2.5, draw.normal(draw.experts, dtype=torch.float32), torch.float32),
        ),
        bad={
            "residual": ((BAD_ROW, 5), lambda a: [*[BAD_ROW] * 6, ..., ...]),
            "weight": ((3, 5), lambda a: [None, None, None, None, ..., ..., ..., ...]),
        },
        sums=(5,),
        rows=(1, 2, 13, 64),
    ),
    "rotary_tables": Case(
        lambda draw: (
            (draw.integers(0, 5000, draw.rows, dtype=torch.int64), draw.normal(24, dtype=torch.float32), 0.5)
            + (torch.bfloat16,)
        ),
        bad={"frequencies": ((3,), lambda a: [(..., [3, 27]), (..., [3, 27])])},
        rows=(1, 300),
    ),
    "route": Case(
        lambda draw: (
            *(draw.normal(draw.rows, 8, dtype=torch.float32), 3, "sigmoid", True, 4, 2, 2.5),
            *(draw.normal(8, dtype=torch.float32), torch.bfloat16),
        ),
        bad={"logits": ((BAD_ROW, 5), lambda a: [BAD_ROW, BAD_ROW])},
    ),
    "route, softmax": Case(
        lambda draw: (draw.normal(draw.rows, draw.experts), 3, "softmax", False, 1, 1, 1.0, None, torch.float32),
        bad={"logits": ((BAD_ROW, 5), lambda a: [BAD_ROW, BAD_ROW])},
    ),
    "route_sorted": Case(
        lambda draw: (
            *(draw.normal(draw.rows, 8, dtype=torch.float32), 3, "sigmoid", True, 4, 2, 2.5),
            *(draw.normal(8, dtype=torch.float32), torch.bfloat16),
        ),
        bad={"logits": ((BAD_ROW, 5), lambda a: [BAD_ROW, BAD_ROW, ..., ...])},
        rows=(1, 16),
    ),
    "route_sorted, softmax": Case(
        lambda draw: (draw.normal(draw.rows, draw.experts), 3, "softmax", False, 1, 1, 1.0, None, torch.float32),
        bad={"logits": ((BAD_ROW, 5), lambda a: [BAD_ROW, BAD_ROW, ..., ...])},
        rows=(8, 13),
    ),
    "sample": Case(
        _sampling,
        bad={"logits": ((BAD_ROW, 5), lambda a: [BAD_ROW, BAD_ROW, BAD_ROW, BAD_ROW])},
        names={name: f"state.{name}" for name in SamplingState._fields},
        fixed=SamplingState._fields,
        rows=(1, 64),
    ),
    "sample_next": Case(
        _sequences,
        names={
            **{name: f"state.{name}" for name in SamplingState._fields},
            **{name: f"sequences.{name}" for name in Sequences._fields},
        },
        fixed=(*SamplingState._fields, *Sequences._fields[:-1]),
        exempt={"bad values": "test_decode_requests.py: a NaN ends its own sequence"},
        rows=(1, 64),
    ),
}


# ---- GEMMs ----


def _dense(draw: Draw) -> tuple:
    return *draw.activations(draw.rows, draw.hidden), *draw.weights(draw.columns, draw.hidden)


def _grouped(draw: Draw) -> tuple:
    return *draw.activations(draw.rows, draw.hidden), *draw.weights(EXPERTS, draw.columns, draw.hidden)


def _masked(draw: Draw) -> tuple:
    a = draw.activations(EXPERTS, draw.rows, draw.hidden)
    masked_m = draw.integers(0, draw.rows + 1, EXPERTS)
    masked_m[0] = draw.rows
    return *a, *draw.weights(EXPERTS, draw.columns, draw.hidden), masked_m


def _along_k(draw: Draw) -> tuple:
    columns = 128 * (12 if draw.large else min(draw.rows, 4))
    a, b = (quantize_128x1(draw.normal(columns, size)) for size in (draw.rows if draw.large else 8, draw.columns))
    return *a, *b, draw.offsets(columns, 128)


def _flat(draw: Draw) -> tuple:
    a, a_scale, b, b_scale, group_offsets = _along_k(draw)
    out = draw.normal(EXPERTS, len(a), draw.columns, dtype=torch.float32)
    return a.view(-1), a_scale, b.view(-1), b_scale, group_offsets.diff(), out, False


def _by_columns(draw: Draw) -> tuple:
    *operands, group_offsets = _along_k(draw)
    out = draw.normal(EXPERTS, len(operands[0]), draw.columns, dtype=torch.float32)
    return *(part.t() for part in operands), group_offsets.diff(), out, True


def _by_layout(draw: Draw) -> tuple:
    """The expert of each row, in groups at multiples of 128 rows."""
    blocks = 2 * EXPERTS
    rows = 128 * blocks if draw.rows else 0
    layout = torch.arange(EXPERTS, dtype=torch.int32).repeat_interleave(rows // EXPERTS)
    a, b = draw.activations(rows, draw.hidden), draw.weights(EXPERTS, draw.columns, draw.hidden)
    return *a, *b, layout, None, 256, torch.zeros(rows, draw.columns, dtype=torch.bfloat16)


def _by_ends(draw: Draw) -> tuple:
    """The end of each group, all of which begin at multiples of 128 rows."""
    *operands, _, _, expected_m, out = _by_layout(draw)
    ends = draw.integers(0, 129, EXPERTS) + 256 * torch.arange(EXPERTS, dtype=torch.int32)
    return *operands, ends if draw.rows else 0 * ends, 128, expected_m, out


def _masked_defined(a: SimpleNamespace, results: list[Tensor]) -> list[Tensor]:
    return [rows[:count] for rows, count in zip(results[0], a.masked_m.tolist(), strict=True)]


ROW_OF_A = {"a": ((BAD_ROW, 5), lambda a: [BAD_ROW]), "a_scale": ((BAD_ROW, 1), lambda a: [BAD_ROW])}


def _masked_row(a: SimpleNamespace) -> Touched:
    return [(0, BAD_ROW)]


GEMMS = {
    "gemm": Case(
        lambda draw: (*_dense(draw), None, None, False),
        bad=ROW_OF_A | {"b": ((3, 5), lambda a: [(slice(None), 3)]), "b_scale": ((0, 1), lambda a: [...])},
        rows=(1, 64, 300),
    ),
    "gemm, mxfp4": Case(
        lambda draw: (
            *(*draw.activations(draw.rows, draw.packed_hidden), *draw.mxfp4(draw.columns, draw.packed_hidden)),
            *(draw.normal(draw.columns), None, False),
        ),
        bad=ROW_OF_A,
        rows=(1, 64, 300),
    ),
    "gemm, bias and c": Case(
        lambda draw: (
            *(
                *_dense(draw),
                draw.normal(draw.columns, dtype=torch.float32),
                draw.normal(draw.rows, draw.columns, dtype=torch.float32),
            ),
            True,
        ),
        bad=ROW_OF_A | {"bias": ((3,), lambda a: [(slice(None), 3)]), "c": ((BAD_ROW, 3), lambda a: [(BAD_ROW, 3)])},
        rows=(64, 300),
    ),
    "gemm_out": Case(
        lambda draw: (*_dense(draw), None, None, draw.normal(draw.rows, draw.columns)), bad=ROW_OF_A, fixed=("out",)
    ),
    "gemm_out, bias and c": Case(
        lambda draw: (
            *(*_dense(draw), draw.normal(draw.columns), draw.normal(draw.rows, draw.columns, dtype=torch.float32)),
            draw.normal(draw.rows, draw.columns, dtype=torch.float32),
        ),
        bad=ROW_OF_A,
        fixed=("out",),
        names={"out": "out|c"},
        unchecked=("out",),
    ),
    "projection": Case(lambda draw: (*_dense(draw), draw.normal(draw.columns), False), bad=ROW_OF_A, rows=(1, 64)),
    "grouped_gemm": Case(
        lambda draw: (*_grouped(draw), draw.offsets()),
        bad=ROW_OF_A | {"b": ((0, 3, 5), lambda a: [(slice(0, int(a.group_offsets[1])), 3)])},
        rows=(24, 300),
    ),
    "grouped_gemm, int4": Case(
        lambda draw: (
            *draw.activations(draw.rows, draw.packed_hidden),
            *(*draw.int4(EXPERTS, draw.columns, draw.packed_hidden), draw.offsets()),
        ),
        bad=ROW_OF_A | {"b_scale": ((0, 3, 1), lambda a: [(slice(0, int(a.group_offsets[1])), 3)])},
        rows=(24, 300),
    ),
    "grouped_gemm_out": Case(
        lambda draw: (*_grouped(draw), draw.offsets(), draw.normal(draw.rows, draw.columns), None, None, None, None),
        bad=ROW_OF_A,
        fixed=("out",),
    ),
    "grouped_gemm_out, bias": Case(
        lambda draw: (
            *(*_grouped(draw), draw.offsets(), draw.normal(draw.rows, draw.columns), None, None, None),
            draw.normal(EXPERTS, draw.columns),
        ),
        bad=ROW_OF_A | {"bias": ((0, 3), lambda a: [(slice(0, int(a.group_offsets[1])), 3)])},
        fixed=("out",),
    ),
    "grouped_gemm_out, low rank": Case(
        lambda draw: (
            *(
                *_grouped(draw),
                draw.offsets(),
                draw.normal(draw.rows, draw.columns, dtype=torch.float32),
                (2 * draw.rows, 6),
            ),
            *(draw.normal(draw.rows, 16), draw.normal(EXPERTS, draw.columns, 16), None),
        ),
        exempt={"ranks are refused": INTERNAL},
        bad=ROW_OF_A
        | {
            "ranks": ((BAD_ROW, 5), lambda a: [BAD_ROW]),
            "factors": ((0, 3, 5), lambda a: [(slice(0, int(a.group_offsets[1])), 3)]),
        },
        fixed=("out",),
    ),
    "grouped_gemm_masked": Case(
        lambda draw: (*_masked(draw), None), _masked_defined, bad={"a": ((0, BAD_ROW, 5), _masked_row)}
    ),
    "grouped_gemm_masked_out": Case(
        lambda draw: (*_masked(draw), 3, draw.normal(EXPERTS, draw.rows, draw.columns, dtype=torch.float32)),
        bad={"a": ((0, BAD_ROW, 5), _masked_row)},
        fixed=("out",),
    ),
    "grouped_gemm_swiglu": Case(
        lambda draw: (
            *(*draw.activations(draw.rows, draw.hidden), *draw.gate_up(), draw.offsets()),
            *(7.0, 1.702, draw.normal(EXPERTS, 2 * draw.size), None, None, (2 * draw.rows, 6)),
        ),
        bad={"a": ((BAD_ROW, 5), lambda a: [BAD_ROW, BAD_ROW])},
        names={"b": r"gate_up(\.data)?", "b_scale": r"gate_up\.scale"},
        rows=(24, 300),
    ),
    "grouped_gemm_swiglu_keeping": Case(
        lambda draw: (
            *(*draw.activations(draw.rows, draw.hidden), *draw.gate_up(), draw.offsets()),
            *(7.0, 1.702, None, None, None, (2 * draw.rows, 6)),
        ),
        bad={"a": ((BAD_ROW, 5), lambda a: [BAD_ROW] * 3)},
        names={"b": r"gate_up(\.data)?", "b_scale": r"gate_up\.scale"},
        rows=(24, 300),
    ),
    "grouped_gemm_swiglu, masked": Case(
        lambda draw: (
            *(*draw.activations(EXPERTS * draw.rows, draw.hidden), *draw.gate_up()),
            *(int32([draw.rows] * EXPERTS), 7.0, None, None, draw.rows, 2, None),
        ),
        bad={"a": ((BAD_ROW, 5), lambda a: [BAD_ROW, BAD_ROW])},
        names={"b": r"gate_up(\.data)?", "b_scale": r"gate_up\.scale"},
    ),
    "grouped_gemm_by_layout": Case(
        _by_layout, bad={"a": ((BAD_ROW, 5), lambda a: [BAD_ROW])}, fixed=("out",), names={"groups": "layout"}
    ),
    "grouped_gemm_by_layout, ends of groups": Case(_by_ends, fixed=("out",), names={"groups": "layout"}),
    "grouped_gemm_k": Case(_along_k, bad={"a": ((BAD_ROW, 5), lambda a: [(group_of(a.group_offsets, 5), BAD_ROW)])}),
    "grouped_gemm_k_by_sizes": Case(
        _flat,
        bad={"a": ((5,), lambda a: [(int(a.groups.nonzero()[0]), 0)])},
        fixed=("out",),
        names={"a_scale": r"a\.(scale|data)", "groups": "sizes"},
    ),
    "grouped_gemm_k_by_sizes, one matrix": Case(_by_columns, fixed=("out",), names={"groups": "sizes"}),
    "grouped_gemm_k_out": Case(
        lambda draw: (
            *(along := _along_k(draw)),
            draw.normal(EXPERTS, len(along[0]), draw.columns, dtype=torch.float32),
            True,
        ),
        bad={"a": ((BAD_ROW, 5), lambda a: [(group_of(a.group_offsets, 5), BAD_ROW)])},
        fixed=("out",),
    ),
}


# ---- the indexer ----


def _scores(draw: Draw) -> tuple:
    q, kv, *rest = mqa_cases.prefill(draw.rows, 4 * draw.rows + 2, heads=HEADS, head_dim=32, seed=draw.seed)
    return q, *kv, *rest


def _paged(draw: Draw) -> tuple:
    lens = [70 + 10 * b % 50 for b in range(draw.rows)]
    return mqa_cases.paged(lens, next_n=2, heads=HEADS, head_dim=32, max_blocks=2, seed=draw.seed)


INDEXER = {
    "mqa_logits": Case(
        lambda draw: (*_scores(draw), None, False, True),
        bad={
            "q": ((BAD_ROW, 5, 3), lambda a: [BAD_ROW]),
            "weights": ((BAD_ROW, 9), lambda a: [BAD_ROW]),
            "kv_scale": ((0,), lambda a: [(slice(None), 0)]),
        },
    ),
    "mqa_logits, rows of ranges": Case(
        lambda draw: (*_scores(draw), 7, True, True), bad={"q": ((BAD_ROW, 5, 3), lambda a: [BAD_ROW])}
    ),
    "paged_mqa_logits": Case(
        lambda draw: (*_paged(draw), 120, True),
        bad={"q": ((BAD_ROW, 1, 5, 3), lambda a: [2 * BAD_ROW + 1]), "weights": ((BAD_ROW, 9), lambda a: [BAD_ROW])},
        fixed=("kv_cache",),
        rows=(8,),
    ),
    "paged_mqa_logits, lengths of queries": Case(
        lambda draw: (*(paged := _paged(draw))[:3], paged[3][:, None] - int32([3, 1]), paged[4], 120, True),
        fixed=("kv_cache",),
        rows=(8,),
    ),
    "mqa_top_k": Case(
        lambda draw: (
            *(draw.normal(draw.rows, 300, dtype=torch.float32), 40),
            *(draw.integers(-5, 100, draw.rows), draw.integers(0, 320, draw.rows)),
        ),
        exempt={"bad values": "test_mqa_top_k.py: a NaN is chosen first"},
    ),
    "append_kv": Case(
        lambda draw: (
            *(new_kv_cache(5, 32, device="cpu").fill_(0xAB), draw.normal(draw.rows, 32)),
            *(some_slots(draw.rows, 320, seed=draw.seed), "ue8m0"),
        ),
        fixed=("kv_cache",),
        exempt={"bad values": "test_mqa_cache.py: the cache has bytes"},
    ),
}


# ---- latent attention ----


def _latents(draw: Draw, **how) -> tuple:
    lengths = [50 + 30 * b % 70 for b in range(draw.rows)]
    q, latents, count, table = latent_cases.operands(lengths, queries=2, heads=3, seed=draw.seed, **how)
    return q, latents.nan_to_num(), count, None, table, None, 512, 0.04


def _appended(draw: Draw, coded: bool = False) -> tuple:
    sizes = draw.rows, 2
    cache = torch.full((draw.rows, 9, 656), 7, dtype=torch.uint8) if coded else draw.normal(draw.rows, 9, 576)
    return (
        *(draw.normal(*sizes, 3, 64), draw.normal(*sizes, 576), draw.normal(512)),
        *(draw.normal(*sizes, 64), draw.normal(*sizes, 64), draw.normal(*sizes, 3, 64), cache),
        *(draw.integers(0, 8, draw.rows, dtype=torch.int64), 1e-6, coded),
    )


LATENT = {
    "append_latents": Case(
        _appended,
        bad={
            "q": ((BAD_ROW, 1, 2, 3), lambda a: [(BAD_ROW, 1, 2), None]),
            "latents": ((BAD_ROW, 1, 3), lambda a: [None, (BAD_ROW, int(a.columns[BAD_ROW]) + 1)]),
        },
        fixed=("cache",),
    ),
    "append_latents, FP8": Case(
        lambda draw: _appended(draw, coded=True),
        bad={"q": ((BAD_ROW, 1, 2, 3), lambda a: [(BAD_ROW, 1, 2), None])},
        fixed=("cache",),
    ),
    "latent_attention": Case(
        _latents, bad={"q": ((BAD_ROW, 1, 2, 3), lambda a: [(BAD_ROW, 1, 2)])}, fixed=("latents",), rows=(8,)
    ),
    "latent_attention, padded": Case(
        lambda draw: (*(found := _latents(draw))[:5], found[2] // 3, *found[6:]), fixed=("latents",), rows=(8,)
    ),
    "latent_attention, FP8": Case(
        lambda draw: (
            *(found := _latents(draw))[:1],
            fp8moe.quantize_latents(found[1], value_size=512),
            *found[2:],
        ),
        fixed=("latents",),
        rows=(8,),
    ),
    "latent_attention, paged": Case(lambda draw: _latents(draw, paged=True), fixed=("latents",), rows=(8,)),
    "latent_attention, chosen": Case(
        lambda draw: (
            *(found := _latents(draw))[:3],
            torch.randperm(60)[:20].int().expand(draw.rows, 2, 20).clone(),
            *found[4:],
        ),
        fixed=("latents",),
        rows=(8,),
    ),
}


# ---- linear layers and experts ----


def _linear(draw: Draw) -> tuple:
    return draw.normal(2, draw.rows, draw.hidden), *draw.weights(draw.columns, draw.hidden), draw.normal(draw.columns)


def _linear_training(draw: Draw) -> tuple:
    master = draw.normal(draw.columns, draw.hidden, dtype=torch.float32)
    x, _, _, bias = _linear(draw)
    return x, *quantize_128x128(master), bias, master


def _linear_backward(draw: Draw) -> tuple:
    x, weight, scale, bias, master = _linear_training(draw)
    _, *columns = OPS.linear_training(x, weight, scale, bias, master)
    return draw.normal(2, draw.rows, draw.columns), weight, scale, *columns, master, True, True


def _layer(draw: Draw, hidden: int, size: int, **options: Any) -> tuple:
    """Weights as operators take them: the data and scales of up and down."""
    layer = experts_cases.make(EXPERTS, hidden, size, seed=draw.seed, **options)
    return tuple(getattr(layer, name).detach() for name in layer.weight_names)


def _packed_layer(draw: Draw, quantize: Callable[..., FP8Tensor]) -> tuple:
    """The same in four bits."""
    hidden, size = draw.packed_hidden, draw.packed_size
    return *quantize(EXPERTS, 2 * size, hidden), *quantize(EXPERTS, hidden, size)


def _biases(draw: Draw) -> tuple[Tensor, Tensor]:
    return draw.normal(EXPERTS, 2 * draw.size), draw.normal(EXPERTS, draw.hidden, dtype=torch.float32)


def _tokens(draw: Draw, **options: Any) -> tuple:
    return draw.normal(draw.rows, draw.hidden), *draw.routing(), *_layer(draw, draw.hidden, draw.size, **options)


def _layer_operands(
    draw: Draw, activation: str = SWIGLU, biases: bool = False, quantized: bool = False, **options: Any
) -> tuple:
    """Of `experts`: tokens and a layer, and behind these the fields of `TokenOperands` that options name."""
    tokens = _odd_tokens(draw) if activation == "gelu" else _tokens(draw)
    if options.pop("sorted_already", False):
        options |= sort_by_expert(tokens[1], EXPERTS)._asdict()
    if "norm" in options:
        options["norm"] = Norm(draw.normal(tokens[0].shape[1]).to(tokens[0].dtype), 1e-6, options["norm"])
    data, index, weights, up, up_scale, down, down_scale = tokens
    added = Biases(*_biases(draw)) if biases else Biases()
    layer = Layer(FP8Tensor(up, up_scale), FP8Tensor(down, down_scale), Activation.from_key(activation), added)
    operands = TokenOperands(data, index, weights, layer, **options)
    return TOKENS.pack(operands.quantized(quantize_1x128(data)) if quantized else operands)


def _residual(draw: Draw) -> Tensor:
    return draw.normal(draw.rows, draw.hidden)


def _odd_tokens(draw: Draw) -> tuple:
    return draw.normal(draw.rows, 131, dtype=torch.float32), *draw.routing(), *_layer(draw, 131, 77, activation="gelu")


def _part(draw: Draw, quantized: bool = False, passes: bool = False, biases: bool = False) -> tuple:
    """Of `experts`: a rank's share of six experts, or with quantized alone, all three of it."""
    x, index, weights, up, up_scale, down, down_scale = _tokens(draw)
    added = Biases(*_biases(draw)) if biases else Biases()
    layer = Layer(FP8Tensor(up, up_scale), FP8Tensor(down, down_scale), Activation(), added)
    shard, more, scale = Shard(1, 6, row_dtype=torch.bfloat16, out_dtype=torch.float32), {}, None
    if quantized:
        x, scale = quantize_1x128(x)
    if passes:
        index, shard = 2 * index, shard._replace(num_rows=TOP_K * draw.rows)
        more = {"residual": draw.normal(draw.rows, draw.hidden, dtype=torch.float32), "wants_known": True}
        more["residual_known"] = torch.ones(draw.rows, dtype=torch.bool)
    return TOKENS.pack(TokenOperands(x, index, weights, layer, hidden_scale=scale, shard=shard, **more))


def _held_out(draw: Draw) -> tuple:
    """Of `experts_out`: what `_part` returns without the fields that it lacks."""
    *tokens, _, _, _, _, scale, first, total, row, rows, row_dtype, out_dtype, _, _, _, _, _ = _part(draw, biases=True)
    out = draw.normal(draw.rows, draw.hidden, dtype=torch.float32)
    return *tokens, scale, first, total, row, rows, row_dtype, out_dtype, out


def _sorted_rows(draw: Draw) -> tuple:
    rows = draw.normal(draw.rows, draw.hidden)
    return rows, None, draw.offsets(), *_layer(draw, draw.hidden, draw.size), "silu", *_biases(draw)


def _masked_layer(draw: Draw) -> tuple:
    x = draw.activations(EXPERTS, draw.rows, draw.hidden)
    used = draw.integers(0, draw.rows + 2, EXPERTS)
    used[0] = draw.rows
    return *x, used, *_layer(draw, draw.hidden, draw.size), LIMITED, *_biases(draw)


def _masters(draw: Draw, hidden: int, size: int) -> tuple:
    """FP8 weights, and behind these their masters."""
    up, down = (draw.normal(EXPERTS, *shape, dtype=torch.float32) for shape in ((2 * size, hidden), (hidden, size)))
    gate_up = quantize_128x128(up.unflatten(1, (2, size)))
    return gate_up.data.flatten(1, 2), gate_up.scale.flatten(1, 2), *quantize_128x128(down), up, down


def _experts_training(draw: Draw) -> tuple:
    *layer, up, down = _masters(draw, draw.hidden, draw.size)
    index, weights = draw.routing()
    order = RowOrder.of_tokens(index, EXPERTS, Shard())
    x = draw.normal(draw.rows, draw.hidden)
    return x, None, *order, weights, *layer, "silu", up, down, None, torch.bfloat16, torch.bfloat16, *NO_LOW_RANK


def _shard_training(draw: Draw) -> tuple:
    x, index, weights, *layer = _tokens(draw, activation="gelu")
    order = RowOrder.of_tokens(2 * index, EXPERTS, Shard(1, 6, num_rows=TOP_K * draw.rows))
    return x, None, *order, weights, *layer, "gelu", None, None, None, torch.bfloat16, torch.float32, *NO_LOW_RANK


def _rows_training(draw: Draw, activation: str = "silu", apart: bool = False) -> tuple:
    *layer, up, down = _masters(draw, draw.hidden, draw.size)
    gate, up = (part.contiguous() for part in up.chunk(2, 1)) if apart else (None, up)
    order = RowOrder(draw.offsets(), whole=(2 * draw.rows, 6))
    x = draw.normal(draw.rows, draw.hidden)
    return x, None, *order, None, *layer, activation, up, down, gate, torch.bfloat16, torch.bfloat16, *NO_LOW_RANK


def _quantized_rows_training(draw: Draw) -> tuple:
    return *draw.activations(draw.rows, draw.hidden), *_rows_training(draw, "gelu")[2:]


def _adapted_training(draw: Draw, activation: str = "silu", dropped: bool = False) -> tuple:
    """With a low rank."""
    x, index, weights, *layer = _tokens(draw, activation=activation)
    order = RowOrder.of_tokens(index, EXPERTS, Shard())
    columns, rank = align(draw.size, 128), 16
    shapes = (rank, draw.hidden), (2 * columns, rank), (rank, columns), (draw.hidden, rank)
    factors = [draw.normal(EXPERTS, *shape) / 8 for shape in shapes]
    dtypes = torch.bfloat16, torch.bfloat16
    given = 2 * x if dropped else None
    return x, None, *order, weights, *layer, activation, None, None, None, *dtypes, *factors, given, 0.0


def _places(x=None, up=None, down=None, gate=None):
    """Places in the results of experts_training_backward."""
    return [x, None, up, down, gate, *5 * [None]]


def _training_backward(draw: Draw, training: Callable[[Draw], tuple], routing_grad: bool) -> tuple:
    x, x_scale, *kept, _, _, up_a, up_b, down_a, down_b, dropped, dropout = arguments = training(draw)
    out, *saved = OPS.experts_training(*arguments)
    low_rank = up_a, up_b, down_a, down_b, dropped, dropout
    up_master, _, gate_master = kept[-3:]
    reads_x = dropped is None if up_a is not None else up_master is not None or gate_master is not None
    input_dtype = x.dtype if x_scale is None else None
    read = (x, x_scale) if reads_x else (None, None)
    return draw.normal(*out.shape), *kept, *saved, input_dtype, routing_grad, *low_rank, *read


def _adapter(draw: Draw) -> tuple:
    return draw.normal(draw.rows, 16), draw.normal(EXPERTS, 16, draw.hidden), draw.offsets()


TOKENS = Signature(TokenOperands)
NO_LOW_RANK = (None,) * 6
LAYER_NAMES = {
    **{"up": "gate_up_proj", "up_scale": "gate_up_proj_scale_inv", "up_bias": "gate_up_proj_bias"},
    **{"down": "down_proj", "down_scale": "down_proj_scale_inv", "down_bias": "down_proj_bias"},
}
PACKED_NAMES = LAYER_NAMES | {"up_scale": "gate_up_proj_scale", "down_scale": "down_proj_scale"}
ROWS_NAMES = LAYER_NAMES | {"groups": "group_offsets"}
MASKED_NAMES = LAYER_NAMES | {"rows": r"x\.data", "rows_scale": r"x\.scale", "groups": "masked_m"}
PARTIAL_NAMES = LAYER_NAMES | {
    **{"hidden_states": r"x(\.data)?", "hidden_scale": "x.scale"},
    **{"residual": "partial", "residual_known": "partial_known"},
}
TOKEN = {"hidden_states": ((BAD_ROW, 5), lambda a: [BAD_ROW]), "top_k_weights": ((BAD_ROW, 0), lambda a: [BAD_ROW])}
NORMED = {name: (index, lambda a: [BAD_ROW, BAD_ROW]) for name, (index, _) in TOKEN.items()}
QUANTIZED = {name: (index, lambda a: [BAD_ROW] * 3) for name, (index, _) in TOKEN.items()}
IN_LAYERS = "test_experts_training.py: where a value goes depends on the routing"

LAYERS = {
    "linear": Case(
        _linear,
        bad={"x": ((0, BAD_ROW, 5), lambda a: [(0, BAD_ROW)]), "bias": ((3,), lambda a: [(..., 3)])},
        rows=(1, 64, 300),
    ),
    "linear, odd sizes": Case(
        lambda draw: (draw.normal(draw.rows, 131, dtype=torch.float32), *draw.weights(21, 131), None),
        bad={"x": ((BAD_ROW, 130), lambda a: [BAD_ROW])},
    ),
    "linear_training": Case(
        _linear_training,
        bad={"x": ((0, BAD_ROW, 5), lambda a: [(0, BAD_ROW), (slice(128), slice(128)), (0, 0)])},
        unchecked=("master",),
    ),
    "linear_training, frozen": Case(lambda draw: (*_linear(draw), None)),
    "linear_training_backward": Case(
        _linear_backward, bad={"grad": ((0, BAD_ROW, 3), lambda a: [(0, BAD_ROW), 3, 3])}, exempt=SAVED
    ),
    **{
        f"experts{form}": Case(lambda draw, make=make: make(draw), bad=bad, names=LAYER_NAMES, rows=rows)
        for form, make, bad, rows in (
            ("", _layer_operands, TOKEN, (16, 300)),
            (
                ", biases",
                lambda draw: _layer_operands(draw, "silu limit=1.0 alpha=1.702", biases=True),
                *(TOKEN, (16, 300)),
            ),
            (
                ", capacity and residual",
                lambda draw: _layer_operands(draw, LIMITED, capacity=max(draw.rows, 1), residual=_residual(draw)),
                *(TOKEN, (16, 64)),
            ),
            (", odd sizes", lambda draw: _layer_operands(draw, "gelu"), TOKEN, (300,)),
            (
                ", sorted already",
                lambda draw: _layer_operands(draw, sorted_already=True, residual=_residual(draw)),
                *(TOKEN, (16, 300)),
            ),
            (
                ", norm",
                lambda draw: _layer_operands(draw, residual=_residual(draw), norm=False),
                NORMED | {"residual": ((BAD_ROW, 5), lambda a: [(BAD_ROW, 5), BAD_ROW])},
                (16, 64, 300),
            ),
            (
                ", quantized norm, sorted already",
                lambda draw: _layer_operands(draw, sorted_already=True, norm=True),
                *(QUANTIZED, (1, 40)),
            ),
            (
                ", norm, odd sizes",
                lambda draw: _layer_operands(draw, "gelu", norm=True),
                {"hidden_states": QUANTIZED["hidden_states"]},
                (300,),
            ),
        )
    },
    "experts, quantized tokens, sorted already": Case(  # 8 rows at most are read by index
        lambda draw: _layer_operands(
            draw, sorted_already=True, quantized=True, residual=_residual(draw), norm=True, biases=True
        ),
        bad=QUANTIZED,
        names=PARTIAL_NAMES,
        rows=(1, 8, 40),
    ),
    "experts, mxfp4": Case(
        lambda draw: (
            *(draw.normal(draw.rows, draw.packed_hidden), *draw.routing()),
            *(*_packed_layer(draw, draw.mxfp4), SWIGLU, None, None),
        ),
        bad=TOKEN,
        names=PACKED_NAMES,
        rows=(16, 300),
    ),
    "experts, share": Case(
        lambda draw: _part(draw, biases=True),
        bad={"hidden_states": ((BAD_ROW, 5), lambda a: [BAD_ROW])},
        names=PARTIAL_NAMES,
    ),
    "experts, quantized share": Case(
        lambda draw: _part(draw, quantized=True),
        bad={"hidden_states": ((BAD_ROW, 5), lambda a: [BAD_ROW])},
        names=PARTIAL_NAMES,
    ),
    "experts, passes": Case(lambda draw: _part(draw, quantized=True, passes=True), names=PARTIAL_NAMES),
    "experts_out": Case(
        _held_out,
        bad={"hidden_states": ((BAD_ROW, 5), lambda a: [BAD_ROW])},
        names=PARTIAL_NAMES,
        fixed=("out",),
    ),
    "experts_rows": Case(
        lambda draw: (*_sorted_rows(draw), torch.float32, None, None),
        bad={"rows": ((BAD_ROW, 5), lambda a: [BAD_ROW])},
        names=ROWS_NAMES,
    ),
    "experts_rows, quantized": Case(
        lambda draw: (
            *(*draw.activations(draw.rows, draw.hidden), *_sorted_rows(draw)[2:]),
            *(torch.bfloat16, (draw.rows + 18, 8), None),
        ),
        names=ROWS_NAMES,
    ),
    "experts_rows, int4": Case(
        lambda draw: (
            *(draw.normal(draw.rows, draw.packed_hidden), None, draw.offsets(), *_packed_layer(draw, draw.int4)),
            *(SWIGLU, None, None, torch.bfloat16, None, None),
        ),
        bad={"rows": ((BAD_ROW, 5), lambda a: [BAD_ROW])},
        names=PACKED_NAMES | {"groups": "group_offsets"},
    ),
    "experts_rows, masked": Case(
        lambda draw: (*_masked_layer(draw), torch.bfloat16, None, 3),
        lambda a, results: [rows[:count] for rows, count in zip(results[0], a.groups.tolist(), strict=True)],
        bad={"rows": ((0, BAD_ROW, 5), _masked_row)},
        names=MASKED_NAMES,
    ),
    "experts_rows_out": Case(
        lambda draw: (
            *(*_sorted_rows(draw), torch.float32, None, None),
            draw.normal(draw.rows, draw.hidden, dtype=torch.float32),
        ),
        bad={"rows": ((BAD_ROW, 5), lambda a: [BAD_ROW])},
        names=ROWS_NAMES,
        fixed=("out",),
    ),
    "experts_rows_out, masked": Case(
        lambda draw: (*_masked_layer(draw), torch.bfloat16, None, 3, draw.normal(EXPERTS, draw.rows, draw.hidden)),
        bad={"rows": ((0, BAD_ROW, 5), _masked_row)},
        names=MASKED_NAMES,
        fixed=("out",),
    ),
    "experts_training": Case(
        _experts_training,
        _tokens_kept_defined,
        exempt=SAVED | {"bad values": IN_LAYERS},
    ),
    "experts_training, shard": Case(
        _shard_training,
        _tokens_kept_defined,
        exempt=SAVED,
    ),
    "experts_training, rows": Case(
        _rows_training,
        bad={"x": ((BAD_ROW, 5), lambda a: [BAD_ROW, BAD_ROW, None, None, None])},
        exempt=SAVED,
    ),
    "experts_training, quantized rows": Case(
        _quantized_rows_training,
        exempt=SAVED,
    ),
    "experts_training, gate and up apart": Case(
        lambda draw: _rows_training(draw, apart=True),
        exempt=SAVED | {"bad values": "those of the rows, whose forward is the same"},
    ),
    "experts_training, low rank": Case(
        _adapted_training, lambda a, results: results[:1], exempt=SAVED | {"bad values": IN_LAYERS}
    ),
    "experts_training_backward, low rank": Case(
        lambda draw: _training_backward(draw, _adapted_training, True),
        sums=(1,),
        exempt=SAVED | {"bad values": IN_LAYERS},
    ),
    "experts_training_backward, low rank of dropped tokens": Case(
        lambda draw: _training_backward(draw, lambda draw: _adapted_training(draw, "gelu", dropped=True), True),
        sums=(1,),
        exempt=SAVED | {"bad values": IN_LAYERS},
    ),
    "experts_training_backward": Case(
        lambda draw: _training_backward(draw, _experts_training, True),
        sums=(1,),
        exempt=SAVED | {"bad values": IN_LAYERS},
    ),
    "experts_training_backward, rows": Case(
        lambda draw: _training_backward(draw, _rows_training, False),
        bad={
            "grad": (
                (BAD_ROW, 5),
                lambda a: _places(x=BAD_ROW, up=(group := group_of(a.groups, BAD_ROW)), down=(group, 5)),
            ),
            "x": ((BAD_ROW, 5), lambda a: _places(up=(group_of(a.groups, BAD_ROW), slice(None), 5))),
        },
        exempt=SAVED,
    ),
    "experts_training_backward, quantized rows": Case(
        lambda draw: _training_backward(draw, _quantized_rows_training, False),
        bad={
            "x_scale": (
                (BAD_ROW, 1),
                lambda a: _places(up=(group_of(a.groups, BAD_ROW), slice(None), slice(128, None))),
            )
        },
        exempt=SAVED,
    ),
    "experts_training_backward, gate and up apart": Case(
        lambda draw: _training_backward(draw, lambda draw: _rows_training(draw, apart=True), False),
        bad={
            "grad": (
                (BAD_ROW, 5),
                lambda a: _places(x=BAD_ROW, up=(group := group_of(a.groups, BAD_ROW)), down=(group, 5), gate=group),
            )
        },
        exempt=SAVED,
    ),
    "adapter_product": Case(
        _adapter,
        bad={"a": ((BAD_ROW, 5), lambda a: [BAD_ROW])},
        exempt={
            **{"wrong operands": INTERNAL, "ranks are refused": INTERNAL},
            "layouts, cuda": "PyTorch's grouped product takes rows at multiples of 16 bytes",
        },
    ),
}

CASES = QUANTIZERS | ROWS | DECODER | GEMMS | INDEXER | LATENT | LAYERS
NOT_OPERATIONS = {"no_backward": "it raises, whatever it is given"}


def on_device(device: str, value: Any) -> Any:
    """In the same memory layout, which `.to` does not promise for scales with padding between their columns."""
    if not isinstance(value, Tensor):
        return value
    moved = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    return moved.copy_(value)


def overload(name: str) -> torch._ops.OpOverload:
    return getattr(OPS, name.partition(",")[0]).default
