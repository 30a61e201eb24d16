"""The forward of an experts layer: operator `experts` for routed tokens, `experts_rows` for rows sorted by expert.

Operators `experts_out` and `experts_rows_out` compute the same results and write them to a tensor of the caller.
"""

from collections.abc import Callable
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from fp8moe.kernels.decoder_ops.rms_norm import Normed, rms_norm
from fp8moe.kernels.experts import checks, workspace
from fp8moe.kernels.experts.backward import train_rows
from fp8moe.kernels.experts.combine import Dtypes, combine, joins_norm
from fp8moe.kernels.experts.operands import (
    Layer,
    Masters,
    Norm,
    RowOperands,
    Shard,
    TokenOperands,
    grouping_of,
    pad_columns,
    without_padding,
)
from fp8moe.kernels.experts.permute import permute_fp8, permute_quantize
from fp8moe.kernels.experts.reference import assignments_of
from fp8moe.kernels.experts.routing import sort_by_expert
from fp8moe.kernels.gemm.api import grouped_gemm_swiglu, multiply_groups, multiply_groups_to
from fp8moe.kernels.gemm.checks import activations
from fp8moe.kernels.gemm.epilogue import PeerStore
from fp8moe.kernels.gemm.tiles import Grouping
from fp8moe.quant.checks import fp8_operand
from fp8moe.quant.formats import BLOCK, FP8Tensor
from fp8moe.quant.quantize import quantize_1x128
from fp8moe.runtime import autograd
from fp8moe.runtime.autograd import recorded
from fp8moe.runtime.checks import FLOATING, check_out, check_own_memory, check_tensor
from fp8moe.runtime.operator import Signature, Written, operator
from fp8moe.runtime.peer_table import Targets

# ---- routed tokens ----

_TOKENS = Signature(TokenOperands)
# Signatures of the first fields of `TokenOperands`, up to a given field; all later fields keep their defaults.
# `_WHOLE` serves a layer without a norm, `_SHARD` a shard, and `_PARTIAL` partial sums.
_WHOLE, _SHARD, _PARTIAL = (
    Signature(TokenOperands, TokenOperands._fields[: TokenOperands._fields.index(last) + 1])
    for last in ("rows", "shard", "wants_known")
)


def experts_of_tokens(operands: TokenOperands) -> tuple[Tensor, Normed | None]:
    """Return ``sum over k of top_k_weights[t, k] * down_e(activation(up_e(x[t])))``, and perhaps its RMSNorm.

    Here x is hidden_states and e is top_k_index[t, k].

    operands: the shard is the whole layer. hidden_states is not quantized, or by `TokenOperands.quantized`, which the
        caller does where no gradient is recorded.
    Returns (T, H) in the dtype of hidden_states before it was quantized, and the norm or None. The norm is a Normed
    with the bits of `rms_norm`. It is computed if operands.norm asks for it and the last kernel of the layer can
    include it. This kernel can if there are at most 64 tokens of at most 32 KB each, the result is bfloat16 or float32,
    the activation is a SwiGLU, and H and I are multiples of 16.

    Products are summed in float32. Results of down_e are rounded to bfloat16 if hidden_states is bfloat16. The weighted
    sum is taken in float32 in the order of k.

    Where H or I is not a multiple of 16, the call pads copies of the operands with zeros. There is no backward: calling
    it raises RuntimeError.

    Raises TypeError for a wrong dtype, ValueError for a wrong shape, device or capacity, for only one of groups and
    rows, and for groups and rows with a capacity.
    """
    norm = operands.norm
    if norm is not None and not _joins_norm(operands):
        norm, operands = None, operands._replace(norm=None)
    biased = operands.layer.biases.up_bias is not None or operands.layer.biases.down_bias is not None
    name = "fp8moe.GroupedExperts with biases" if biased else "fp8moe.GroupedExperts"
    signature = _TOKENS if norm is not None else _WHOLE if operands.hidden_scale is None else _SHARD
    out, *normed = autograd.run(_experts, name, *signature.pack(operands))
    if norm is None:
        return out, None
    return out, Normed(None, None, FP8Tensor(*normed)) if norm.norm_quantized else Normed(None, *normed, None)


def experts_partial(
    x: Tensor | FP8Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    layer: Layer,
    shard: Shard,
    *,
    partial: Tensor | None = None,
    partial_known: Tensor | None = None,
    wants_known: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute the weighted sums of `experts_of_tokens` over the experts of this rank only, in float32, not rounded.

    x: (T, H) bfloat16, float16 or float32, or an FP8Tensor: data (T, H), scale (T, ceil(H/128)) of any strides.
    top_k_index: (T, K) int32 or int64, counted over all experts. Experts of other ranks add nothing.
    layer: the experts of this rank.
    shard: the place of these experts among all experts, a window of rows, and row_dtype. Its out_dtype is ignored: the
        results are float32.
    partial: (T, H) float32, partial sums to which this call adds its sums, or None. In this way several calls, each for
        one window of rows, compute one total. partial_known: bool (T,), the tokens that have a partial sum; None:
        all tokens.
    wants_known: also return which tokens have a sum, and leave the sums of other tokens undefined.
    Returns (T, H) float32, summed in the order of k; and bool (T,), the tokens that have a sum, or None without
    wants_known. Without wants_known, a token with no expert here gets its `partial`, or zeros. Equal inputs give equal
    bits. There is no backward: calling it raises RuntimeError.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape, device or range.
    """
    data, scale = (x, None) if isinstance(x, Tensor) else fp8_operand("x", x)
    operands = TokenOperands(
        *(data, top_k_index, top_k_weights, layer),
        residual=partial,
        hidden_scale=scale,
        shard=shard._replace(out_dtype=torch.float32),
        residual_known=partial_known,
        wants_known=wants_known,
    )
    name = "fp8moe.kernels.experts.experts_partial"
    out, *known = autograd.run(_experts, name, *_PARTIAL.pack(operands))
    return out, known[0] if known else None


def run_shard(operands: TokenOperands, name: str) -> Tensor:
    """Compute the weighted sums of a shard, without a residual. name: caller's name, for the error of the backward."""
    (out,) = autograd.run(_experts, name, *_SHARD.pack(operands))
    return out


def write_tokens(operands: TokenOperands, out: Tensor) -> None:
    """Write the weighted sums to `out`, in the shard's out_dtype. Only operands that `TokensOut` lists are used."""
    _experts_out(*_TOKENS_OUT.pack(TokensOut(operands, out)))


def send_rows(targets: Targets, x: Tensor | FP8Tensor, top_k_index: Tensor, layer: Layer, shard: Shard) -> None:
    """Run the experts of this rank, and write the rows of the down projection, not yet summed, to the peers' memory.

    Computes the assignments that `experts_partial` would sum for these arguments. The result of assignment t * K + k
    goes to the row of this assignment on the peer that has token t. If targets.to_all is set, the result goes to this
    row on every peer. Other rows are not written. Runs on GPUs only. The caller has checked the arguments; there is at
    least one token, and H is a multiple of 16.
    """
    data, scale = (x, None) if isinstance(x, Tensor) else x
    operands = TokenOperands(data, top_k_index, None, layer.padded(16), hidden_scale=scale, shard=shard)
    if layer.activation.is_swiglu:
        launch = workspace.find(operands, targets) or workspace.run
        launch(operands, targets)
        return
    h, groups, rows, num_rows, grouping = _hidden(operands)
    assignments = assignments_of(rows, num_rows).clamp_(min=0)  # this variable keeps the memory alive until the launch
    row_dtype, _ = shard.dtypes(data.dtype)
    pointers, epilogue = targets.pointers(assignments.data_ptr()), PeerStore(row_dtype, *targets.form)
    layer = operands.layer
    multiply_groups_to(h, layer.down, groups, pointers, epilogue, grouping, layer.biases.down_bias)


def _padded(operands: TokenOperands, compute: Callable[[TokenOperands], list[Tensor]]) -> list[Tensor]:
    """Call ``compute`` on operands with H and I padded to multiples of 16, and remove the padding from the result.

    If there are no assignments or weights, return the residual or zeros.
    """
    x, layer = operands.hidden_states, operands.layer
    hidden = x.shape[1]
    if not _has_work(operands):
        out = _empty_sums(operands).zero_()
    else:
        operands = operands._replace(layer=layer.padded(16))
        _, columns, _ = operands.layer.sizes
        if columns == hidden:
            return compute(operands)
        plain = {"residual": None, "residual_known": None, "wants_known": False}
        out, *_ = compute(operands._replace(hidden_states=pad_columns(x, columns), **plain))
        out = without_padding(out, hidden)
    residual = _whole_residual(operands)
    return [out if residual is None else residual + out, *_all_known(operands)]


def _has_work(operands: TokenOperands) -> bool:
    layer = operands.layer
    rows = operands.shard.rows(operands.top_k_index.numel())
    return bool(rows and layer.up.data.numel() and layer.down.data.numel())


def _whole_residual(operands: TokenOperands) -> Tensor | None:
    """Return the residual, with zeros for tokens whose `residual_known` is False."""
    if operands.residual_known is None:
        return operands.residual
    return torch.where(operands.residual_known[:, None], operands.residual, 0)


def _all_known(operands: TokenOperands) -> list[Tensor]:
    """Return [bool (T,), all True] if `wants_known` is set, because every token has a sum; otherwise []."""
    x = operands.hidden_states
    return [x.new_ones(x.shape[0], dtype=torch.bool)] if operands.wants_known else []


def _composed(operands: TokenOperands) -> list[Tensor]:
    """Compute the layer with five separate operators, on any backend, instead of with a `Workspace`."""
    down = operands.layer.down
    h, groups, rows, num_rows, grouping = _hidden(operands)
    row_dtype, out_dtype = operands.shard.dtypes(operands.hidden_states.dtype)
    y = torch.empty((num_rows, down.data.shape[1]), dtype=row_dtype, device=down.data.device)
    multiply_groups(h, down, groups, y, grouping, bias=operands.layer.biases.down_bias)
    out = combine(y, rows, operands.top_k_weights, out_dtype, residual=_whole_residual(operands))
    return [out, *_all_known(operands)]


def _hidden(operands: TokenOperands) -> tuple[FP8Tensor, Tensor, Tensor, int, Grouping]:
    """Return the input of the down projection, groups and rows of `sort_by_expert`, number of rows and `Grouping`."""
    x, x_scale, index = operands.hidden_states, operands.hidden_scale, operands.top_k_index
    capacity, shard, layer = operands.capacity, operands.shard, operands.layer
    (count, hidden, _), assignments = layer.sizes, index.numel()
    num_rows = shard.rows(assignments) if capacity is None else count * capacity
    groups, rows = operands.groups, operands.rows
    if groups is None or rows is None:
        window = {} if capacity is not None else {"first_row": shard.first_row, "num_rows": num_rows}
        groups, rows = sort_by_expert(index, count, capacity=capacity, first_expert=shard.first_expert, **window)
    x = pad_columns(x, hidden)
    a = permute_quantize(x, rows, num_rows) if x_scale is None else permute_fp8(FP8Tensor(x, x_scale), rows, num_rows)
    grouping = grouping_of(assignments, shard.total(count), capacity)
    return _activated(a, layer, groups, grouping), groups, rows, num_rows, grouping


def _activated(a: FP8Tensor, layer: Layer, groups: Tensor, grouping: Grouping) -> FP8Tensor:
    """Run up projection, activation and quantization: `a` (R, H) -> (R, I). H and I are multiples of 16."""
    bias = layer.biases.up_bias
    if layer.activation.is_swiglu:
        options = {"max_m": grouping.max_m, "expected_m": grouping.expected_m, "whole": grouping.whole}
        return grouped_gemm_swiglu(a, layer.up, groups, activation=layer.activation, bias=bias, **options)
    width, count = layer.up.data.shape[1], 1
    if layer.activation.gated and width // 2 % BLOCK:
        # Multiply gate and up in two GEMMs: in one GEMM, a block of 128 weight rows would contain rows of gate and rows
        # of up, which have different scales.
        count = 2
    projected = torch.empty((a.data.shape[0], width), dtype=torch.float32, device=a.data.device)
    parts = [projected, *layer.up, bias]
    chunks = [[None] * count if part is None else part.chunk(count, dim=1) for part in parts]
    for out, data, scale, added in zip(*chunks, strict=True):
        multiply_groups(a, FP8Tensor(data, scale), groups, out, grouping, bias=added)
    return quantize_1x128(layer.activation(projected))


def _needs_no_padding(operands: TokenOperands) -> bool:
    """Return whether a `Workspace` can run the operands without padding H or I."""
    x, layer = operands.hidden_states, operands.layer
    if not layer.activation.is_swiglu or layer.sizes[2] % 16 or x.shape[1] % 16:
        return False
    return _has_work(operands)


def _joins_norm(operands: TokenOperands) -> bool:
    """Return whether the layer's last kernel can also compute the norm of the result."""
    x = operands.hidden_states
    if not _needs_no_padding(operands):
        return False
    row_dtype, out_dtype = operands.shard.dtypes(x.dtype)
    return joins_norm(*x.shape, Dtypes(row_dtype, operands.top_k_weights.dtype, out_dtype))


def _run(operands: TokenOperands) -> list[Tensor]:
    if operands.norm is not None and not _joins_norm(operands):
        return _then_norm(operands, operands.norm, _run)
    return _padded(operands, workspace.run if operands.layer.activation.is_swiglu else _composed)


def _run_reference(operands: TokenOperands) -> list[Tensor]:
    if operands.norm is not None:
        return _then_norm(operands, operands.norm, _run_reference)
    return _padded(operands, _composed)


def _then_norm(operands: TokenOperands, norm: Norm, compute: Callable[[TokenOperands], list[Tensor]]) -> list[Tensor]:
    (out,) = compute(operands._replace(norm=None))
    weight, eps, quantized = norm
    normed = rms_norm(out, weight, eps, values=not quantized, quantized=quantized)
    return [out, *(normed.quantized if quantized else (normed.values,))]


def _empty_sums(operands: TokenOperands) -> Tensor:
    x = operands.hidden_states
    _, dtype = operands.shard.dtypes(x.dtype)
    return x.new_empty(x.shape, dtype=dtype)


def _fake(operands: TokenOperands) -> list[Tensor]:
    out = _empty_sums(operands)
    return [out, *_all_known(operands), *workspace.empty_normed(out, operands.norm)]


class TokensOut(NamedTuple):
    """Arguments of the operator `experts_out`."""

    operands: Annotated[
        TokenOperands, ("hidden_states", "top_k_index", "top_k_weights", "layer", "hidden_scale", "shard")
    ]
    out: Written


def _check_tokens_out(call: TokensOut) -> None:
    checks.tokens(call.operands)
    x = call.operands.hidden_states
    check_out(call.out, FLOATING, x.shape, x.device, "x")


def _write_tokens(call: TokensOut, on_gpu: bool) -> None:
    operands, out = call
    tensors = {"x": operands.hidden_states, "top_k_index": operands.top_k_index, "x.scale": operands.hidden_scale}
    weights = {"top_k_weights": operands.top_k_weights, "up": operands.layer.up.data, "down": operands.layer.down.data}
    check_own_memory(out, tensors | weights)
    if on_gpu and _needs_no_padding(operands):
        workspace.run(operands, out=out)
    else:
        out.copy_((_run if on_gpu else _run_reference)(operands)[0])


_TOKENS_OUT = Signature(TokensOut)
_experts = operator(
    "experts -> Tensor[]",
    signature=_TOKENS,
    check=checks.tokens,
    quick=workspace.find,
    cuda=_run,
    reference=_run_reference,
    fake=_fake,
    forward_only=True,
)


def _mapped(info, in_dims: tuple, *arguments) -> tuple[list[Tensor], list[int]]:
    """Run `experts` under torch.vmap, once per batch element: vmap has no rule for operators that return lists."""
    calls = (
        [x if dim is None else x.select(dim, index) for x, dim in zip(arguments, in_dims, strict=True)]
        for index in range(info.batch_size)
    )
    results = [torch.stack(parts) for parts in zip(*(_experts(*call) for call in calls), strict=True)]
    return results, [0] * len(results)


torch.library.register_vmap("fp8moe::experts", _mapped)
_experts_out = operator(
    "experts_out -> ()",
    signature=_TOKENS_OUT,
    check=_check_tokens_out,
    cuda=lambda call: _write_tokens(call, on_gpu=True),
    reference=lambda call: _write_tokens(call, on_gpu=False),
    fake=lambda call: None,
    forward_only=True,
)


# ---- rows by expert ----


def experts_of_rows(
    rows: Tensor | FP8Tensor,
    group_offsets: Tensor,
    layer: Layer,
    *,
    row_dtype: torch.dtype = torch.bfloat16,
    whole: tuple[int, int] | None = None,
    masters: Masters = Masters(),  # noqa: B008 (immutable)
    training: bool = False,
) -> Tensor:
    """Return ``down_e(activation(up_e(rows[r])))`` for the rows r of every expert e; rows are sorted by expert.

    rows: (R, H) bfloat16, float16 or float32, or an FP8Tensor: data (R, H), scale (R, ceil(H/128)) of any strides; any
        H.
    group_offsets: (E+1,) int32 on the device of rows: expert e has rows ``group_offsets[e]`` up to
        ``group_offsets[e+1]``; see `grouped_gemm`.
    layer: weights and activation; training a layer with biases raises ValueError.
    row_dtype, whole: as in `RowOperands`. masters: the master weights of the layer.
    training: round the up projection to bfloat16, as the forward with gradients does, even if autograd is off.
    Returns (R, H) in row_dtype; rows of no expert are zeros. Equal inputs give equal bits.

    The masters, and rows if it is a Tensor, get gradients; `experts_training` describes them, and the memory kept for
    the backward. The gradient of rows of no expert is zero.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape or device.
    """
    data, scale = (rows, None) if isinstance(rows, Tensor) else fp8_operand("rows", rows)
    check_tensor("group_offsets", group_offsets)
    masters = masters.recorded()
    operands = RowOperands(data, scale, group_offsets, layer, row_dtype, whole)
    # FP8 weights that require gradients would get none from `train_rows`: the backward of `run_rows` raises an error.
    if training or (recorded(data, *masters) and not recorded(*layer.up, *layer.down)):
        return train_rows(operands, masters)
    return run_rows(operands, "fp8moe.GroupedExperts.forward_rows")


def run_rows(operands: RowOperands, name: str) -> Tensor:
    """Run the experts on rows, without gradients. name: the caller's name, for the error of the backward."""
    return autograd.run(_experts_rows, name, *_ROWS.pack(operands))


def write_rows(operands: RowOperands, out: Tensor) -> None:
    """Run the experts on rows, and write the result to `out` in operands.row_dtype, except for rows of no expert."""
    _experts_rows_out(*_ROWS_OUT.pack(RowsOut(operands, out)))


class RowsOut(NamedTuple):
    """Arguments of the operator `experts_rows_out`."""

    operands: RowOperands
    out: Written


def _new_rows(operands: RowOperands) -> Tensor:
    rows, layer = operands.rows, operands.layer
    if not (rows.numel() and layer.down.data.numel()):
        return _empty_rows(operands).zero_()
    layer = layer.padded(16)
    shape = *rows.shape[:-1], layer.down.data.shape[1]
    new = torch.zeros if operands.expected_m is None else torch.empty
    out = new(shape, dtype=operands.row_dtype, device=rows.device)
    _multiply_rows(operands._replace(layer=layer), out)
    return without_padding(out, rows.shape[-1]) if operands.expected_m is None else out


def _multiply_rows(operands: RowOperands, out: Tensor) -> None:
    """Run both GEMMs and write to `out`. Weights and `out` must have been padded; this function pads the rows."""
    rows, scale, groups, layer, _, whole, expected_m = operands
    if expected_m is None:
        grouping, data = Grouping(whole=whole), pad_columns(rows, layer.sizes[1])
        a = quantize_1x128(data) if scale is None else FP8Tensor(data, scale)
    else:
        grouping, a = Grouping(expected_m, max_m=rows.shape[1]), activations(rows, scale)
    h = _activated(a, layer, groups, grouping)
    del a
    out = out.view(-1, out.shape[-1])
    multiply_groups(h, layer.down, groups, out, grouping, bias=layer.biases.down_bias)


def _empty_rows(operands: RowOperands) -> Tensor:
    return operands.rows.new_empty(operands.rows.shape, dtype=operands.row_dtype)


def _check_rows_out(call: RowsOut) -> None:
    operands, out = call
    checks.rows(operands)
    name, rows = operands.names[0], operands.rows
    if rows.shape[-1] % 16:
        raise ValueError(f"{name}: expected an H that is a multiple of 16 beside out, got {rows.shape[-1]}")
    check_out(out, (operands.row_dtype,), rows.shape, rows.device, name)


def _write_rows(call: RowsOut) -> None:
    operands, out = call
    rows, layer = operands.rows, operands.layer
    named = dict(zip(operands.names, operands[:3], strict=True))
    check_own_memory(out, named | {"up": layer.up.data, "down": layer.down.data})
    if rows.numel():
        _multiply_rows(operands._replace(layer=layer.padded(16)), out)


_ROWS, _ROWS_OUT = Signature(RowOperands), Signature(RowsOut)
_experts_rows = operator(
    "experts_rows -> Tensor",
    signature=_ROWS,
    check=checks.rows,
    cuda=_new_rows,
    reference=_new_rows,
    fake=_empty_rows,
    forward_only=True,
)
_experts_rows_out = operator(
    "experts_rows_out -> ()",
    signature=_ROWS_OUT,
    check=_check_rows_out,
    cuda=_write_rows,
    reference=_write_rows,
    fake=lambda call: None,
    forward_only=True,
)
