"""Experts over FP8 weights for callers that hold them: of routed tokens, of rows by expert, in the masked layout."""

from collections.abc import Callable
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from fp8moe.kernels.activation import Activation
from fp8moe.kernels.experts import checks, operator, workspace
from fp8moe.kernels.experts.operands import Layer, Operands, RowOperands, Shard, row_dtype
from fp8moe.kernels.gemm.api import multiply_groups
from fp8moe.kernels.gemm.checks import activations, expected_rows
from fp8moe.kernels.gemm.tiles import Grouping
from fp8moe.quant.checks import check_scale, check_vector, fp8_data, fp8_operand
from fp8moe.quant.formats import BLOCK, FP8Tensor, ceil_div
from fp8moe.quant.quantize import quantize_1x128
from fp8moe.runtime import autograd
from fp8moe.runtime.checks import FLOATING, check_dtype, check_int, check_out, check_own_memory, check_tensor
from fp8moe.runtime.operator import Signature, Written, define
from fp8moe.runtime.operator import operator as declare


def experts(
    x: Tensor | FP8Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    up: FP8Tensor,
    down: FP8Tensor,
    *,
    activation: Activation = Activation(),  # noqa: B008 (immutable)
    out: Tensor | None = None,
    first_expert: int | None = None,
    num_experts: int | None = None,
    expert_map: Tensor | None = None,
) -> Tensor:
    """``sum over k of top_k_weights[t, k] * down_e(activation(up_e(x[t])))``, e the expert top_k_index[t, k].

    x: (T, H) bfloat16, float16 or float32, or an FP8Tensor: data (T, H), scale (T, ceil(H/128)) of any strides.
    top_k_index: (T, K) int32 or int64, counted over all experts. One that is not here, -1 among them, adds nothing.
    top_k_weights: (T, K) float32, bfloat16 or float16.
    up, down: FP8Tensor or (data, scale) of the E experts that are here: data (E, 2I, H), gate rows then up rows, and
        (E, H, I) float8_e4m3fn; scale float32 (E, 2 * ceil(I/128), ceil(H/128)), the blocks of gate, then those of up,
        and (E, ceil(H/128), ceil(I/128)). With an activation that has no gate, up is (E, I, H). Any H and I; those that
        are no multiples of 16 cost copies.
    activation: between the two projections; see `GroupedExperts`.
    out: (T, H), contiguous, at a multiple of 16 bytes, in memory that no operand uses: bfloat16, float16 or float32.
    first_expert: the index of the first expert here, the others following it; None: 0. expert_map: (all experts,)
        int32, for each which of those here it is, -1 for one that is elsewhere; it takes a few small kernels more.
    num_experts: how many there are on all ranks; tiles are chosen for as even a share of the assignments. None: as many
        as in expert_map, or as here.
    Returns ``out``, or a new (T, H) tensor of the dtype of x, of an FP8Tensor bfloat16. Sums are float32 in the order
    of k, of results that are rounded to bfloat16 first where that is the dtype. Equal inputs give equal bits.

    There is no backward: calling it raises RuntimeError, as does out beside an operand that requires a gradient.
    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape or device, for first_expert and expert_map
    together, and for an ``out`` that does not fit or overlaps an operand.
    """
    data, scale = (x, None) if isinstance(x, Tensor) else fp8_operand("x", x)
    layer = _layer(up, down, activation)
    for name, value in (("top_k_index", top_k_index), ("top_k_weights", top_k_weights)):
        check_tensor(name, value)
    for name, number in (("first_expert", first_expert), ("num_experts", num_experts)):
        if number is not None:
            check_int(name, number)
    if expert_map is not None:
        if first_expert is not None:
            raise ValueError(f"first_expert: expected None beside expert_map, got {first_expert}")
        top_k_index, everywhere = _mapped(top_k_index, expert_map), expert_map.shape[0]
    else:
        everywhere = (first_expert or 0) + len(layer.up.data)
    if out is not None:
        check_tensor("out", out)
        check_dtype("out", out, *FLOATING)
    dtype = out.dtype if out is not None else data.dtype if scale is None else torch.bfloat16
    count = everywhere if num_experts is None else num_experts
    shard = Shard(first_expert or 0, count, row_dtype=row_dtype(dtype), out_dtype=dtype)
    operands = Operands(data, top_k_index, top_k_weights, layer, hidden_scale=scale, shard=shard)
    if out is None:
        return autograd.run(_experts, "fp8moe.experts", *_HELD.pack(operands))
    given = {"x": data, "top_k_weights": top_k_weights, "up": layer.up.data, "down": layer.down.data, "out": out}
    autograd.check_out("fp8moe.experts", tuple(given), tuple(given.values()))
    _experts_out(*_OUT.pack(_Out(operands, out)))
    return out


def _layer(up: FP8Tensor, down: FP8Tensor, activation: Activation) -> Layer:
    return Layer(FP8Tensor(*fp8_operand("up", up)), FP8Tensor(*fp8_operand("down", down)), activation)


def _mapped(index: Tensor, expert_map: Tensor) -> Tensor:
    """Index with the experts here in place of all, -1 for those elsewhere and for what is no expert."""
    check_tensor("expert_map", expert_map)
    check_vector("expert_map", expert_map, torch.int32, None, index.device)
    if not expert_map.shape[0]:
        raise ValueError("expert_map: expected an entry for each of all experts, got none")
    inside = (index >= 0) & (index < expert_map.shape[0])
    return torch.where(inside, expert_map[index.clamp(0, expert_map.shape[0] - 1)], -1)


def experts_rows(
    rows: Tensor | FP8Tensor,
    group_offsets: Tensor,
    up: FP8Tensor,
    down: FP8Tensor,
    *,
    activation: Activation = Activation(),  # noqa: B008 (immutable)
    out: Tensor | None = None,
) -> Tensor:
    """``down_e(activation(up_e(rows[r])))`` for the rows r of every expert e, which lie one group after the other.

    rows: (R, H) bfloat16, float16 or float32, or an FP8Tensor: data (R, H), scale (R, ceil(H/128)) of any strides.
    group_offsets: (E+1,) int32 on the device of rows: expert e has rows ``group_offsets[e]`` up to
        ``group_offsets[e+1]``; see `grouped_gemm`.
    up, down, activation: as for `experts`.
    out: (R, H) bfloat16 or float32, contiguous, at a multiple of 16 bytes, in memory that no operand uses; H is then a
        multiple of 16. Rows of no expert are left as they are.
    Returns ``out``, or a new (R, H) bfloat16 tensor, in which rows of no expert are zeros. Equal inputs give equal
    bits.

    There is no backward: calling it raises RuntimeError, as does out beside an operand that requires a gradient.
    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape or device, or an ``out`` that does not fit
    or overlaps an operand.
    """
    data, scale = (rows, None) if isinstance(rows, Tensor) else fp8_operand("rows", rows)
    check_tensor("group_offsets", group_offsets)
    layer = _layer(up, down, activation)
    if out is None:
        operands = RowOperands(data, scale, group_offsets, layer, torch.bfloat16)
        return operator.run_rows(operands, "fp8moe.experts_rows")
    check_tensor("out", out)
    check_dtype("out", out, torch.bfloat16, torch.float32)
    given = {"rows": data, "up": layer.up.data, "down": layer.down.data, "out": out}
    autograd.check_out("fp8moe.experts_rows", tuple(given), tuple(given.values()))
    operands = RowOperands(data, scale, group_offsets, layer, out.dtype)
    _rows_out(*_ROWS_OUT.pack(_RowsOut(operands, out)))
    return out


def experts_masked(
    x: FP8Tensor,
    masked_m: Tensor,
    up: FP8Tensor,
    down: FP8Tensor,
    *,
    activation: Activation = Activation(),  # noqa: B008 (immutable)
    expected_m: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``down_e(activation(up_e(x[e, :masked_m[e]])))`` for every expert e: a fixed place for max_m rows each.

    This is the layout in which DeepEP's low-latency kernels hand over tokens. A SwiGLU takes two launches.

    x: FP8Tensor or (data, scale): data (E, max_m, H) float8_e4m3fn, H a multiple of 16; scale (E, max_m, ceil(H/128))
        float32 of any strides; one that is not MN-major over all E * max_m rows is copied.
    masked_m: (E,) int32 on the device of x: the rows in use of each expert, clamped to [0, max_m].
    up, down, activation: as for `experts`.
    expected_m: about how many rows an expert has in use; only the speed depends on it. None: max_m.
    out: (E, max_m, H) bfloat16 or float32, contiguous, at a multiple of 16 bytes, in memory that no operand uses.
    Returns ``out``, or a new (E, max_m, H) bfloat16 tensor. Rows not in use may be anything. Equal inputs give equal
    bits.

    There is no backward: calling it raises RuntimeError, as does out beside an operand that requires a gradient.
    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape or device, a negative ``expected_m``, or an
    ``out`` that does not fit or overlaps an operand.
    """
    operands = MaskedOperands(FP8Tensor(*fp8_operand("x", x)), masked_m, _layer(up, down, activation), expected_m)
    check_tensor("masked_m", masked_m)
    expected_rows(expected_m)
    if out is None:
        return autograd.run(_masked_op, "fp8moe.experts_masked", *_MASKED.pack(operands))
    check_tensor("out", out)
    autograd.check_out("fp8moe.experts_masked", ("out",), (out,))
    _masked_out_op(*_MASKED.pack(operands), out)
    return out


# ---- routed tokens ----


_FIELDS = ("hidden_states", "top_k_index", "top_k_weights", "layer", "hidden_scale", "shard")


class _Out(NamedTuple):
    """Arguments of `experts_out`."""

    operands: Annotated[Operands, _FIELDS]
    out: Written


def _check_out(call: _Out) -> None:
    operands, out = call
    checks.partial(operands)
    x = operands.hidden_states
    check_out(out, FLOATING, x.shape, x.device, "x")


def _write(call: _Out, compute: Callable[[Operands], Tensor], in_place: bool) -> None:
    operands, out = call
    tensors = {"x": operands.hidden_states, "top_k_index": operands.top_k_index, "x.scale": operands.hidden_scale}
    weights = {"top_k_weights": operands.top_k_weights, "up": operands.layer.up.data, "down": operands.layer.down.data}
    check_own_memory(out, tensors | weights)
    if in_place and operator.needs_no_padding(operands):
        workspace.run(operands, out=out)
    else:
        out.copy_(compute(operands))


_HELD = Signature(Operands, _FIELDS)
_experts = declare(
    "experts_held -> Tensor",
    signature=_HELD,
    check=checks.partial,
    quick=workspace.find,
    cuda=operator.run,
    reference=operator.run_reference,
    fake=operator.empty,
    forward_only=True,
)
_OUT = Signature(_Out)
_experts_out = declare(
    "experts_out -> ()",
    signature=_OUT,
    check=_check_out,
    cuda=lambda call: _write(call, operator.run, in_place=True),
    reference=lambda call: _write(call, operator.run_reference, in_place=False),
    fake=lambda call: None,
    forward_only=True,
)


# ---- rows by expert ----


class _RowsOut(NamedTuple):
    """Arguments of `experts_rows_out`."""

    operands: RowOperands
    out: Written


def _check_rows_out(call: _RowsOut) -> None:
    (rows, *_), out = call
    checks.sorted_rows(call.operands)
    if rows.shape[1] % 16:
        raise ValueError(f"rows: expected an H that is a multiple of 16 beside out, got {rows.shape[1]}")
    check_out(out, (call.operands.row_dtype,), rows.shape, rows.device, "rows")


def _write_rows(call: _RowsOut) -> None:
    (rows, scale, groups, layer, _, whole), out = call
    named = {"rows": rows, "rows.scale": scale, "group_offsets": groups}
    check_own_memory(out, named | {"up": layer.up.data, "down": layer.down.data})
    if not rows.numel():
        return
    layer = layer.padded(16)
    a = quantize_1x128(rows) if scale is None else FP8Tensor(rows, scale)
    grouping = Grouping(whole=whole)
    h = operator.activated(a, layer, groups, grouping)
    multiply_groups(h, layer.down, groups, out, grouping, bias=layer.biases.down_bias)


_ROWS_OUT = Signature(_RowsOut)
_rows_out = declare(
    "experts_rows_out -> ()",
    signature=_ROWS_OUT,
    check=_check_rows_out,
    cuda=_write_rows,
    reference=_write_rows,
    fake=lambda call: None,
    forward_only=True,
)


# ---- the masked layout ----


class MaskedOperands(NamedTuple):
    """Arguments of `experts_masked`."""

    x: FP8Tensor
    masked_m: Tensor
    layer: Layer
    expected_m: int | None


class _MaskedOut(NamedTuple):
    operands: MaskedOperands
    out: Written


def _check_masked(operands: MaskedOperands) -> torch.Size:
    """The shape of the result."""
    (data, scale), masked_m, layer, _ = operands
    experts, max_m, hidden = shape = fp8_data("x.data", data, "(E, max_m, H)")
    if hidden % 16:
        raise ValueError(f"x.data: expected an H that is a multiple of 16, got {tuple(shape)}")
    check_scale("x.scale", scale, (experts, max_m, ceil_div(hidden, BLOCK)), data.device)
    if checks.projections("x.data", data.flatten(0, 1), layer) != experts:
        raise ValueError(f"x.data: expected the rows of {len(layer.up.data)} experts, got {tuple(shape)}")
    check_vector("masked_m", masked_m, torch.int32, experts, data.device)
    return shape


def _masked(operands: MaskedOperands) -> Tensor:
    out = _empty_masked(operands)
    _multiply_masked(operands, out)
    return out


def _empty_masked(operands: MaskedOperands) -> Tensor:
    return operands.x.data.new_empty(_check_masked(operands), dtype=torch.bfloat16)


def _masked_out(call: _MaskedOut) -> None:
    _check_masked_out(call)
    (data, scale), masked_m, layer, _ = call.operands
    named = {"x.data": data, "x.scale": scale, "masked_m": masked_m}
    check_own_memory(call.out, named | {"up": layer.up.data, "down": layer.down.data})
    _multiply_masked(call.operands, call.out)


def _check_masked_out(call: _MaskedOut) -> None:
    x = call.operands.x.data
    check_out(call.out, (torch.bfloat16, torch.float32), _check_masked(call.operands), x.device, "x.data")


def _multiply_masked(operands: MaskedOperands, out: Tensor) -> None:
    x, masked_m, layer, expected_m = operands
    if not out.numel():
        return
    layer, grouping = layer.padded(16), Grouping(expected_m, max_m=out.shape[1])
    h = operator.activated(activations(*x), layer, masked_m, grouping)
    multiply_groups(h, layer.down, masked_m, out.view(-1, out.shape[-1]), grouping)


_MASKED = Signature(MaskedOperands)
_masked_op = define("experts_masked -> Tensor", _masked, _empty_masked, forward_only=True, signature=_MASKED)
_masked_out_op = define(
    "experts_masked_out -> ()", _masked_out, _check_masked_out, forward_only=True, signature=Signature(_MaskedOut)
)
