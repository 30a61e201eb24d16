"""The experts of a mixture-of-experts layer as one operator: `experts`, and forms of it for a part of their work."""

from collections.abc import Callable

import torch
from torch import Tensor

from fp8moe.kernels.activation import Activation
from fp8moe.kernels.decoder_ops.rms_norm import Normed, rms_norm
from fp8moe.kernels.experts import checks, workspace
from fp8moe.kernels.experts.backward import train_rows
from fp8moe.kernels.experts.combine import Dtypes, combine, joins_norm
from fp8moe.kernels.experts.operands import (
    Biases,
    Layer,
    Masters,
    Norm,
    Operands,
    RowOperands,
    Shard,
    grouping_of,
    pad_columns,
    without_padding,
)
from fp8moe.kernels.experts.permute import permute_fp8, permute_quantize
from fp8moe.kernels.experts.reference import assignments_of
from fp8moe.kernels.experts.routing import sort_by_expert
from fp8moe.kernels.gemm.api import grouped_gemm_swiglu, grouped_rows, multiply_groups, multiply_groups_to
from fp8moe.kernels.gemm.epilogue import PeerStore
from fp8moe.kernels.gemm.tiles import Grouping
from fp8moe.quant.checks import fp8_operand
from fp8moe.quant.formats import BLOCK, FP8Tensor
from fp8moe.quant.quantize import quantize_1x128
from fp8moe.runtime import autograd
from fp8moe.runtime.autograd import recorded
from fp8moe.runtime.checks import check_tensor
from fp8moe.runtime.operator import Signature, operator
from fp8moe.runtime.peer_table import Targets


def experts(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    up_proj: Tensor,
    up_proj_scale_inv: Tensor,
    down_proj: Tensor,
    down_proj_scale_inv: Tensor,
    *,
    activation: Activation,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    capacity: int | None = None,
    residual: Tensor | None = None,
    groups: Tensor | None = None,
    rows: Tensor | None = None,
    norm: Norm | None = None,
) -> Tensor | tuple[Tensor, Normed | None]:
    """``sum over k of top_k_weights[t, k] * down_e(activation(up_e(hidden_states[t])))`` with e = top_k_index[t, k].

    hidden_states: (T, H) bfloat16, float16 or float32; any H.
    top_k_index: (T, K) int32 or int64. An index outside [0, E) adds nothing.
    top_k_weights: (T, K) float32, bfloat16 or float16.
    up_proj: float8_e4m3fn (E, 2I, H), gate rows then up rows, or (E, I, H) where the activation has no gate; any I.
    up_proj_scale_inv: float32 (E, 2 * ceil(I/128), ceil(H/128)), the blocks of gate, then those of up, or without a
        gate (E, ceil(I/128), ceil(H/128)).
    down_proj: float8_e4m3fn (E, H, I); down_proj_scale_inv: float32 (E, ceil(H/128), ceil(I/128)).
    activation: a SwiGLU runs inside GEMM 1 and its quantization; another as PyTorch operations between the two.
    up_bias: (E, 2I), gate then up, or (E, I), added to the sums of GEMM 1 in float32, before the activation; bfloat16,
        float16 or float32. None for none.
    down_bias: (E, H) of such a dtype, added to those of GEMM 2 before they are rounded and weighted. It needs an I
        above 0.
    capacity: rows kept free for each expert (the masked layout), instead of rows one group after the other. An
        assignment beyond them adds nothing, so with distinct experts a token it is to be at least T.
    residual: (T, H) of the dtype of hidden_states, to which the rounded result is added, or None.
    groups, rows: what `sort_by_expert` returns of top_k_index and E without a capacity, int32 (E + 1,) and (T, K),
        where it has been sorted; both None where it has not.
    norm: of the result, wanted beside it if that takes no kernel more: for up to 64 tokens of up to 32 KB, of bfloat16
        or float32, with a SwiGLU and sizes that are multiples of 16. Then two things are returned, the second of which
        is a Normed, with the bits of `rms_norm`, or otherwise None. None: the result alone is wanted.
    Returns (T, H) in the dtype of hidden_states. Products are summed in float32, results of GEMM 2 rounded to bfloat16
    where hidden_states is bfloat16, and the weighted sum taken in float32 in the order of k.

    Where H or I is not a multiple of 16, the call pads copies of the operands with zeros. There is no backward: calling
    it raises RuntimeError.

    Raises TypeError for a wrong dtype, ValueError for a wrong shape, device or capacity, for one of groups and rows
    without the other, and for both with a capacity.
    """
    up, down = FP8Tensor(up_proj, up_proj_scale_inv), FP8Tensor(down_proj, down_proj_scale_inv)
    layer = Layer(up, down, activation, Biases(up_bias, down_bias))
    routed = hidden_states, top_k_index, top_k_weights
    operands = Operands(*routed, layer, capacity, residual, groups=groups, rows=rows)
    name = "fp8moe.GroupedExperts"
    if up_bias is not None or down_bias is not None:
        name += " with biases"
    if norm is None or not _joins_norm(operands):
        out = autograd.run(_experts, name, *_WHOLE.pack(operands))
        return out if norm is None else (out, None)
    results = autograd.run(_experts_norm, name, *_WITH_NORM.pack(operands._replace(norm=norm)))
    out, values, data, scale = results
    fp8 = FP8Tensor(data, scale) if norm.norm_quantized else None
    return out, Normed(None, None if norm.norm_quantized else values, fp8)


def experts_partial(
    x: Tensor | FP8Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    up_proj: FP8Tensor,
    down_proj: FP8Tensor,
    *,
    activation: Activation,
    biases: Biases = Biases(),  # noqa: B008 (immutable)
    first_expert: int,
    num_experts: int,
    row_dtype: torch.dtype,
    num_rows: int | None = None,
    first_row: int = 0,
    partial: Tensor | None = None,
    partial_known: Tensor | None = None,
    known: Tensor | None = None,
) -> Tensor:
    """The weighted sums of `experts` over the experts that are here, not rounded.

    x: (T, H) bfloat16, float16 or float32, or an FP8Tensor: data (T, H), scale (T, ceil(H/128)) of any strides.
    top_k_index: (T, K) int32 or int64, counted over all experts. One whose expert is not here adds nothing.
    top_k_weights: (T, K) float32, bfloat16 or float16.
    up_proj, down_proj, biases: as for `experts`, of the E_local experts that are here.
    first_expert: the index of the first of them. num_experts: E, of all ranks; tiles are chosen for T * K / E rows an
        expert.
    row_dtype: bfloat16 or float32, to which the results of GEMM 2 are rounded.
    first_row, num_rows: only the assignments whose row, sorted by expert among those that are here, is in
        [first_row, first_row + num_rows) are computed, and only for so many is there memory; None: T * K.
    partial: (T, H) float32, to which the sums are added, so that passes over several such ranges add up; None for none.
    partial_known: bool (T,): of which tokens `partial` has sums, whose values it does not read otherwise; None: of all.
    known: bool (T,), written: for which tokens the result has sums: those with a row in the range, those of
        partial_known, and perhaps others; the rest of it is undefined, and costs nothing. None: for all.
    Returns (T, H) float32, summed in the order of k; zeros, or `partial`, for a token without an expert here. Equal
    inputs give equal bits. There is no backward: calling it raises RuntimeError.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape, device or range.
    """
    data, scale = (x, None) if isinstance(x, Tensor) else fp8_operand("x", x)
    operands = Operands(
        data,
        top_k_index,
        top_k_weights,
        Layer(FP8Tensor(*up_proj), FP8Tensor(*down_proj), activation, biases),
        hidden_scale=scale,
        residual=partial,
        shard=Shard(first_expert, num_experts, first_row, num_rows, row_dtype, torch.float32),
        residual_known=partial_known,
        known=known,
    )
    return autograd.run(_partial, "fp8moe.kernels.experts.experts_partial", *_SHARD.pack(operands))


def experts_rows(
    rows: Tensor | FP8Tensor,
    group_offsets: Tensor,
    up_proj: FP8Tensor,
    down_proj: FP8Tensor,
    *,
    activation: Activation,
    biases: Biases = Biases(),  # noqa: B008 (immutable)
    row_dtype: torch.dtype = torch.bfloat16,
    whole: tuple[int, int] | None = None,
    up_master: Tensor | None = None,
    down_master: Tensor | None = None,
    gate_master: Tensor | None = None,
    training: bool = False,
) -> Tensor:
    """``down_e(activation(up_e(rows[r])))`` for the rows r of every expert e, which lie one group after the other.

    rows: (R, H) bfloat16, float16 or float32, or an FP8Tensor: data (R, H), scale (R, ceil(H/128)) of any strides; any
        H.
    group_offsets: (E+1,) int32 on the device of rows: expert e has rows ``group_offsets[e]`` up to
        ``group_offsets[e+1]``; see `grouped_gemm`.
    up_proj, down_proj, biases: as for `experts`; any I. There is no training with biases: ValueError.
    row_dtype: bfloat16 or float32, of the result.
    whole: rows and experts of a layer of which these are a part, on other ranks as well: each row has the bits that it
        would have there. None: this is all of it.
    up_master, down_master: as for `experts_training`. gate_master: (E, I, H); up_master is then of the same shape.
    training: compute as with gradients, also where none are recorded: the result of GEMM 1 is rounded to bfloat16.
    Returns (R, H) in row_dtype; rows of no expert are zeros. Equal inputs give equal bits.

    Gradients are those of rows, if these are a tensor, and of the masters, as `experts_training` describes them, which
    also says what is kept for the backward. Rows of no expert get zeros.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape or device.
    """
    data, scale = (rows, None) if isinstance(rows, Tensor) else fp8_operand("rows", rows)
    check_tensor("group_offsets", group_offsets)
    masters = Masters.recorded(up_master, down_master, gate_master)
    layer = Layer(FP8Tensor(*up_proj), FP8Tensor(*down_proj), activation, biases)
    operands = RowOperands(data, scale, group_offsets, layer, row_dtype, whole)
    if training or recorded(data, *masters):
        return train_rows(operands, masters)
    return run_rows(operands, "fp8moe.GroupedExperts.forward_rows")


def run_rows(operands: RowOperands, name: str) -> Tensor:
    """`experts_rows` of operands without gradients; name: of what has no backward."""
    return autograd.run(_rows, name, *_ROWS.pack(operands))


def send_rows(
    targets: Targets,
    x: Tensor | FP8Tensor,
    top_k_index: Tensor,
    up_proj: FP8Tensor,
    down_proj: FP8Tensor,
    *,
    activation: Activation,
    biases: Biases = Biases(),  # noqa: B008 (immutable)
    first_expert: int,
    num_experts: int,
    row_dtype: torch.dtype,
    num_rows: int,
    first_row: int,
) -> None:
    """Write the results of GEMM 2 for the assignments that `experts_partial` computes of the same arguments.

    That of assignment t * K + k goes to its row on the peer whose token t is. Rows of other assignments stay as they
    are. GPUs only. The callers have checked the arguments; there is at least one token, and H is a multiple of 16.
    """
    data, scale = (x, None) if isinstance(x, Tensor) else x
    layer = Layer(FP8Tensor(*up_proj), FP8Tensor(*down_proj), activation, biases).padded(16)
    shard = Shard(first_expert, num_experts, first_row, num_rows, row_dtype)
    operands = Operands(data, top_k_index, None, layer, hidden_scale=scale, shard=shard)
    if activation.is_swiglu:
        launch = workspace.find(operands, targets) or workspace.run
        launch(operands, targets)
        return
    h, groups, rows, num_rows, grouping = _hidden(operands)
    assignments = assignments_of(rows, num_rows).clamp_(min=0)  # kept until the launch
    pointers, epilogue = targets.pointers(assignments.data_ptr()), PeerStore(row_dtype, *targets.form)
    multiply_groups_to(h, layer.down, groups, pointers, epilogue, grouping, layer.biases.down_bias)


# ---- tokens: the weighted sums ----


def _padded(operands: Operands, compute: Callable[[Operands], Tensor]) -> Tensor:
    """``compute(operands)`` with H and I padded to multiples of 16, and what comes out if there is nothing to do."""
    x, layer = operands.hidden_states, operands.layer
    hidden = x.shape[1]
    rows = operands.shard.rows(operands.top_k_index.numel())
    if not (rows and layer.up.data.numel() and layer.down.data.numel()):
        residual = _for_all_tokens(operands).residual
        out = empty(operands).zero_()
        return out if residual is None else residual + out
    operands = operands._replace(layer=layer.padded(16))
    columns = operands.layer.up.data.shape[2]
    if columns == hidden:
        return compute(operands)
    operands = _for_all_tokens(operands)
    if operands.residual is not None:
        return operands.residual + _padded(operands._replace(residual=None), compute)
    return without_padding(compute(operands._replace(hidden_states=pad_columns(x, columns))), hidden)


def _for_all_tokens(operands: Operands) -> Operands:
    """With zeros where the residual is not known, and a result for all tokens."""
    if operands.known is not None:
        operands.known.fill_(True)
    residual = operands.residual
    if operands.residual_known is not None:
        residual = torch.where(operands.residual_known[:, None], residual, 0)
    return operands._replace(residual=residual, residual_known=None, known=None)


def _composed(operands: Operands) -> Tensor:
    """The layer as five operators in place of the kernels of a `Workspace`, for any backend."""
    operands = _for_all_tokens(operands)
    down = operands.layer.down
    h, groups, rows, num_rows, grouping = _hidden(operands)
    row_dtype, out_dtype = operands.shard.dtypes(operands.hidden_states.dtype)
    y = torch.empty((num_rows, down.data.shape[1]), dtype=row_dtype, device=down.data.device)
    multiply_groups(h, down, groups, y, grouping, bias=operands.layer.biases.down_bias)
    return combine(y, rows, operands.top_k_weights, out_dtype, residual=operands.residual)


def _hidden(operands: Operands) -> tuple[FP8Tensor, Tensor, Tensor, int, Grouping]:
    """The input of GEMM 2; groups and rows of `sort_by_expert`; how many rows there are; and their grouping."""
    x, x_scale, index = operands.hidden_states, operands.hidden_scale, operands.top_k_index
    capacity, shard, layer = operands.capacity, operands.shard, operands.layer
    count, assignments = len(layer.up.data), index.numel()
    num_rows = shard.rows(assignments) if capacity is None else count * capacity
    groups, rows = operands.groups, operands.rows
    if groups is None or rows is None:
        window = {} if capacity is not None else {"first_row": shard.first_row, "num_rows": num_rows}
        groups, rows = sort_by_expert(index, count, capacity=capacity, first_expert=shard.first_expert, **window)
    x = pad_columns(x, layer.up.data.shape[2])
    a = permute_quantize(x, rows, num_rows) if x_scale is None else permute_fp8(FP8Tensor(x, x_scale), rows, num_rows)
    grouping = grouping_of(assignments, shard.total(count), capacity)
    return activated(a, layer, groups, grouping), groups, rows, num_rows, grouping


def activated(a: FP8Tensor, layer: Layer, groups: Tensor, grouping: Grouping) -> FP8Tensor:
    """GEMM 1, the activation and its quantization: a (R, H) -> (R, I), both multiples of 16."""
    bias = layer.biases.up_bias
    if layer.activation.is_swiglu:
        options = {"max_m": grouping.max_m, "expected_m": grouping.expected_m, "whole": grouping.whole}
        return grouped_gemm_swiglu(a, layer.up, groups, activation=layer.activation, bias=bias, **options)
    width, count = layer.up.data.shape[1], 1
    if layer.activation.gated and width // 2 % BLOCK:
        count = 2  # A block of 128 rows would hold rows of both projections, which have scales of their own.
    projected = torch.empty((a.data.shape[0], width), dtype=torch.float32, device=a.data.device)
    parts = [projected, *layer.up, bias]
    chunks = [[None] * count if part is None else part.chunk(count, dim=1) for part in parts]
    for out, data, scale, added in zip(*chunks, strict=True):
        multiply_groups(a, FP8Tensor(data, scale), groups, out, grouping, bias=added)
    return quantize_1x128(layer.activation(projected))


def empty(operands: Operands) -> Tensor:
    x = operands.hidden_states
    _, dtype = operands.shard.dtypes(x.dtype)
    return x.new_empty(x.shape, dtype=dtype)


def run(operands: Operands) -> Tensor:
    return _padded(operands, workspace.run if operands.layer.activation.is_swiglu else _composed)


def needs_no_padding(operands: Operands) -> bool:
    """Whether a `Workspace` takes the operands as they are."""
    x, layer = operands.hidden_states, operands.layer
    if not layer.activation.is_swiglu or layer.down.data.shape[2] % 16 or x.shape[1] % 16:
        return False
    return bool(operands.shard.rows(operands.top_k_index.numel()) and layer.down.data.numel())


def _joins_norm(operands: Operands) -> bool:
    """Whether the kernel that ends the layer can normalize the result too."""
    x = operands.hidden_states
    if not needs_no_padding(operands):
        return False
    row_dtype, out_dtype = operands.shard.dtypes(x.dtype)
    return joins_norm(*x.shape, Dtypes(row_dtype, operands.top_k_weights.dtype, out_dtype))


def _run_norm(operands: Operands) -> tuple[Tensor, ...]:
    return workspace.run(operands) if _joins_norm(operands) else _then_norm(operands, run)


def _then_norm(operands: Operands, compute: Callable[[Operands], Tensor]) -> tuple[Tensor, ...]:
    weight, eps, quantized = operands.norm
    out = compute(operands._replace(norm=Norm()))
    normed = rms_norm(out, weight, eps, values=not quantized, quantized=quantized)
    if quantized:
        return out, out.new_empty(0), *normed.quantized
    return out, normed.values, out.new_empty(0), out.new_empty(0)


def _empty_norm(operands: Operands) -> tuple[Tensor, ...]:
    out = empty(operands)
    return out, *workspace.empty_normed(out, operands.norm.norm_quantized)


def run_reference(operands: Operands) -> Tensor:
    return _padded(operands, _composed)


def _operator(name: str, signature: Signature[Operands], check: Callable[[Operands], None]) -> Callable[..., Tensor]:
    return operator(
        f"{name} -> Tensor",
        signature=signature,
        check=check,
        quick=workspace.find,
        cuda=run,
        reference=run_reference,
        fake=empty,
        forward_only=True,
    )


_OF_SHARDS = {"hidden_scale", "shard", "residual_known", "known"}
_SHARD = Signature(Operands, set(Operands._fields) - {"capacity", "groups", "rows", "norm"})
_WHOLE = Signature(Operands, set(Operands._fields) - _OF_SHARDS - {"norm"})
_WITH_NORM = Signature(Operands, set(Operands._fields) - _OF_SHARDS)
_experts = _operator("experts", _WHOLE, checks.experts)
_experts_norm = operator(
    "experts_norm -> (Tensor, Tensor, Tensor, Tensor)",
    signature=_WITH_NORM,
    check=checks.with_norm,
    quick=workspace.find,
    cuda=_run_norm,
    reference=lambda operands: _then_norm(operands, run_reference),
    fake=_empty_norm,
    forward_only=True,
)
_partial = _operator("experts_partial", _SHARD, checks.partial)


# ---- rows ----


def _run_rows(operands: RowOperands) -> Tensor:
    rows, groups, layer, whole = operands.rows, operands.group_offsets, operands.layer, operands.whole
    if not (rows.numel() and layer.down.data.numel()):
        return _empty_rows(operands).zero_()
    layer = layer.padded(16)
    data = pad_columns(rows, layer.up.data.shape[2])
    a = quantize_1x128(data) if operands.rows_scale is None else FP8Tensor(data, operands.rows_scale)
    h = activated(a, layer, groups, Grouping(whole=whole))
    del a
    options = {"whole": whole, "others_zero": True, "bias": layer.biases.down_bias}
    y = grouped_rows(h, layer.down, groups, operands.row_dtype, **options)
    return without_padding(y, rows.shape[1])


def _empty_rows(operands: RowOperands) -> Tensor:
    return operands.rows.new_empty(operands.rows.shape, dtype=operands.row_dtype)


_ROWS = Signature(RowOperands)
_rows = operator(
    "experts_rows -> Tensor",
    signature=_ROWS,
    check=checks.sorted_rows,
    cuda=_run_rows,
    reference=_run_rows,
    fake=_empty_rows,
    forward_only=True,
)
