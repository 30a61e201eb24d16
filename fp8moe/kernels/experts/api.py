"""Public functions of experts with FP8 weights: for routed tokens, for rows sorted by expert, for the masked layout."""

import torch
from torch import Tensor

from fp8moe.kernels.activation import Activation
from fp8moe.kernels.experts import operator
from fp8moe.kernels.experts.operands import Layer, RowOperands, Shard, TokenOperands, row_dtype
from fp8moe.kernels.gemm.checks import expected_rows
from fp8moe.quant.checks import check_vector, fp8_operand, weight_operand
from fp8moe.quant.formats import FP8Tensor, PackedTensor
from fp8moe.runtime import autograd
from fp8moe.runtime.checks import FLOATING, check_dtype, check_int, check_tensor


def experts(
    x: Tensor | FP8Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    up: FP8Tensor | PackedTensor,
    down: FP8Tensor | PackedTensor,
    *,
    activation: Activation = Activation(),  # noqa: B008 (immutable)
    out: Tensor | None = None,
    first_expert: int | None = None,
    num_experts: int | None = None,
    expert_map: Tensor | None = None,
) -> Tensor:
    """Return ``sum over k of top_k_weights[t, k] * down_e(activation(up_e(x[t])))`` with e = top_k_index[t, k].

    x: (T, H) bfloat16, float16 or float32, or an FP8Tensor: data (T, H), scale (T, ceil(H/128)) of any strides.
    top_k_index: (T, K) int32 or int64, counted over all experts. Experts that are not held here, and -1, add nothing.
    top_k_weights: (T, K) float32, bfloat16 or float16.
    up, down: each an FP8Tensor or (data, scale) of the E experts held here, data float8_e4m3fn and scale float32.
        up: data (E, 2I, H), gate rows then up rows; scale (E, 2 * ceil(I/128), ceil(H/128)), gate blocks then up
        blocks. With an activation that has no gate: data (E, I, H), scale (E, ceil(I/128), ceil(H/128)).
        down: data (E, H, I), scale (E, ceil(H/128), ceil(I/128)).
        Any H and I; sizes that are not multiples of 16 cost copies. Instead, each can be a PackedTensor of the same
        shape; H and I are then multiples of 32 and of the format's group. NVFP4 is arranged in each call: a
        `GroupedExperts` does so once.
    activation: applied between the two projections; see `GroupedExperts`.
    out: (T, H), contiguous, at a multiple of 16 bytes, in memory that no operand uses: bfloat16, float16 or float32.
    first_expert: the index of the first of the E consecutive experts held here; None: 0. expert_map: (all experts,)
        int32: maps each expert to its position in up and down, -1 if it is elsewhere; costs a few small kernels more.
    num_experts: the number of experts on all ranks; GEMM tiles are chosen as if assignments were spread evenly over
        them. None: the length of expert_map, or the number of experts up to the last one held here.
    Returns ``out``; without ``out``, a new (T, H) tensor, in bfloat16 if x is an FP8Tensor, otherwise in the dtype of
    x. The sum over k is taken in float32 in the order of k; for a bfloat16 result, the results of down_e are rounded to
    bfloat16 first. Equal inputs give equal bits.

    There is no backward: calling it raises RuntimeError; so does passing ``out`` if an operand requires a gradient.
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
        top_k_index, everywhere = _mapped(top_k_index, expert_map, len(layer.up.data)), expert_map.shape[0]
    else:
        everywhere = first_expert + len(layer.up.data) if first_expert else None
    if out is not None:
        check_tensor("out", out)
        check_dtype("out", out, *FLOATING)
    dtype = out.dtype if out is not None else data.dtype if scale is None else torch.bfloat16
    count = everywhere if num_experts is None else num_experts
    shard = Shard(first_expert or 0, count, row_dtype=row_dtype(dtype), out_dtype=dtype)
    operands = TokenOperands(data, top_k_index, top_k_weights, layer, hidden_scale=scale, shard=shard)
    if out is None:
        return operator.run_shard(operands, "fp8moe.experts")
    given = {"x": data, "top_k_weights": top_k_weights, "up": layer.up.data, "down": layer.down.data, "out": out}
    autograd.check_out("fp8moe.experts", tuple(given), tuple(given.values()))
    operator.write_tokens(operands, out)
    return out


def _layer(up: FP8Tensor | PackedTensor, down: FP8Tensor | PackedTensor, activation: Activation) -> Layer:
    projections = 2 if activation.gated else 1
    operands = weight_operand("up", up, projections), weight_operand("down", down)
    return Layer(*(FP8Tensor(*operand) for operand in operands), activation)


def _mapped(index: Tensor, expert_map: Tensor, count: int) -> Tensor:
    """Map global expert indices to positions among the `count` local experts; -1 for any other index."""
    check_tensor("expert_map", expert_map)
    check_vector("expert_map", expert_map, torch.int32, None, index.device)
    if expert_map.shape[0] < max(count, 1):
        entries = "none" if not expert_map.shape[0] else f"{expert_map.shape[0]} for {count} experts here"
        raise ValueError(f"expert_map: expected an entry for each of all experts, got {entries}")
    inside = (index >= 0) & (index < expert_map.shape[0])
    return torch.where(inside, expert_map[index.clamp(0, expert_map.shape[0] - 1)], -1)


def experts_rows(
    rows: Tensor | FP8Tensor,
    group_offsets: Tensor,
    up: FP8Tensor | PackedTensor,
    down: FP8Tensor | PackedTensor,
    *,
    activation: Activation = Activation(),  # noqa: B008 (immutable)
    out: Tensor | None = None,
) -> Tensor:
    """Return ``down_e(activation(up_e(rows[r])))`` for the rows r of every expert e; rows are sorted by expert.

    rows: (R, H) bfloat16, float16 or float32, or an FP8Tensor: data (R, H), scale (R, ceil(H/128)) of any strides.
    group_offsets: (E+1,) int32 on the device of rows: expert e has rows ``group_offsets[e]`` up to
        ``group_offsets[e+1]``; see `grouped_gemm`.
    up, down, activation: as for `experts`.
    out: (R, H) bfloat16 or float32, contiguous, at a multiple of 16 bytes, in memory that no operand uses; H must then
        be a multiple of 16. Rows of no expert stay unchanged.
    Returns ``out``, or a new (R, H) bfloat16 tensor, in which rows of no expert are zeros. Equal inputs give equal
    bits.

    There is no backward: calling it raises RuntimeError; so does passing ``out`` if an operand requires a gradient.
    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape or device, or an ``out`` that does not fit
    or overlaps an operand.
    """
    data, scale = (rows, None) if isinstance(rows, Tensor) else fp8_operand("rows", rows)
    check_tensor("group_offsets", group_offsets)
    layer = _layer(up, down, activation)
    operands = RowOperands(data, scale, group_offsets, layer, torch.bfloat16)
    given = {"rows": data, "up": layer.up.data, "down": layer.down.data, "out": out}
    return _results("fp8moe.experts_rows", operands, out, given)


def _results(name: str, operands: RowOperands, out: Tensor | None, given: dict[str, Tensor | None]) -> Tensor:
    """Run the experts on rows and return the result: `out`, if it is not None, otherwise a new tensor.

    name: the public function, for error messages. given: tensors that must not require gradients if `out` is given.
    """
    if out is None:
        return operator.run_rows(operands, name)
    check_tensor("out", out)
    check_dtype("out", out, torch.bfloat16, torch.float32)
    autograd.check_out(name, tuple(given), tuple(given.values()))
    operator.write_rows(operands._replace(row_dtype=out.dtype), out)
    return out


def experts_masked(
    x: FP8Tensor,
    masked_m: Tensor,
    up: FP8Tensor | PackedTensor,
    down: FP8Tensor | PackedTensor,
    *,
    activation: Activation = Activation(),  # noqa: B008 (immutable)
    expected_m: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return ``down_e(activation(up_e(x[e, :masked_m[e]])))`` for every expert e; each has room for max_m rows.

    DeepEP's low-latency kernels deliver tokens in this layout. With a SwiGLU the call takes two kernel launches.

    x: FP8Tensor or (data, scale): data (E, max_m, H) float8_e4m3fn, H a multiple of 16; scale (E, max_m, ceil(H/128))
        float32 of any strides; a scale that is not MN-major over all E * max_m rows is copied.
    masked_m: (E,) int32 on the device of x: the number of rows in use of each expert, clamped to [0, max_m].
    up, down, activation: as for `experts`.
    expected_m: about how many rows an expert has in use; affects only the speed. None: max_m.
    out: (E, max_m, H) bfloat16 or float32, contiguous, at a multiple of 16 bytes, in memory that no operand uses.
    Returns ``out``, or a new (E, max_m, H) bfloat16 tensor. Rows not in use have arbitrary values. Equal inputs give
    equal bits.

    There is no backward: calling it raises RuntimeError; so does passing ``out`` if an operand requires a gradient.
    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape or device, a negative ``expected_m``, or an
    ``out`` that does not fit or overlaps an operand.
    """
    data, scale = fp8_operand("x", x)
    layer = _layer(up, down, activation)
    check_tensor("masked_m", masked_m)
    expected_rows(expected_m)
    if expected_m is None:
        expected_m = data.shape[1] if data.dim() == 3 else 0  # data that is not 3-D is rejected by checks, later
    operands = RowOperands(data, scale, masked_m, layer, torch.bfloat16, expected_m=expected_m)
    return _results("fp8moe.experts_masked", operands, out, {"out": out})
