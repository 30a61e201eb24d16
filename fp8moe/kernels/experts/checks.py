"""Checks of the arguments of an experts layer and of its steps; they raise TypeError or ValueError."""

import torch
from torch import Tensor

from fp8moe.kernels.experts.operands import Layer, Masters, RowOperands, Shard, TokenOperands
from fp8moe.kernels.gemm.checks import part
from fp8moe.quant.checks import (
    check_block_scales,
    check_groups,
    check_scale,
    check_vector,
    check_weight_scale,
    fp8_data,
    weight_data,
)
from fp8moe.quant.formats import BLOCK, ceil_div, is_packed
from fp8moe.runtime.checks import FLOATING, check_device, check_dtype, check_like

MAX_EXPERTS = 1024
_INDEX_DTYPES = (torch.int32, torch.int64)


def tokens(operands: TokenOperands) -> None:
    """Check dtypes, shapes and devices of the operands of `experts`."""
    x, index, weights, layer, capacity, residual = operands[:6]
    shard, device, (name, residual_name) = operands.shard, x.device, operands.names
    _floating_or_fp8(name, x, operands.hidden_scale)
    count = layer_of(name, x.shape, device, layer)
    routed_index(index, x.shape[0], device, name)
    _weights("top_k_weights", weights, index, "top_k_index", name)
    rows, sums = shard.dtypes(x.dtype)
    row_dtype(rows)
    of_sums(sums)
    of_rank(shard, count)
    if residual is not None:
        check_like(residual_name, residual, (sums,), x.shape, device, name)
    if operands.residual_known is not None:
        check_like(f"{residual_name}_known", operands.residual_known, (torch.bool,), x.shape[:1], device, name)
    if operands.norm is not None:
        check_like("norm_weight", operands.norm.norm_weight, (sums,), x.shape[1:], device, name)
    if capacity is not None and capacity < 1:
        raise ValueError(f"capacity: expected at least one row an expert, got {capacity}")
    order = {"groups": (operands.groups, (count + 1,)), "rows": (operands.rows, index.shape)}
    given = [each for each, (value, _) in order.items() if value is not None]
    for each, (value, shape) in order.items() if given else ():
        if value is None:
            raise ValueError(f"{each}: expected a tensor beside {given[0]}, got None")
        check_like(each, value, (torch.int32,), shape, device, name)
    if given and capacity is not None:
        raise ValueError(f"capacity: expected None with groups and rows, got {capacity}")


def of_rank(shard: Shard, count: int) -> None:
    """Check that the `count` experts of this rank are among all experts, and that the window of rows is valid."""
    first, total = shard.first_expert, shard.num_experts
    if first < 0 or (total is not None and first + count > total):
        raise ValueError(
            f"first_expert: expected that the {count} experts here are among {total} from 0 on, got {first}"
        )
    window(shard.first_row, shard.num_rows)


def rows(operands: RowOperands) -> None:
    """Check the operands of `experts_rows`: rows sorted by expert or in the masked layout."""
    x, scale, groups, layer, dtype, whole, expected_m = operands
    (name, scale_name, groups_name), device = operands.names, x.device
    if expected_m is not None:
        experts, max_m, hidden = shape = fp8_data(name, x, "(E, max_m, H)")
        if hidden % 16:
            raise ValueError(f"{name}: expected an H that is a multiple of 16, got {tuple(shape)}")
        if scale is None:
            raise ValueError(f"{scale_name}: expected a tensor beside expected_m, got None")
        check_scale(scale_name, scale, (experts, max_m, ceil_div(hidden, BLOCK)), device)
        if layer_of(name, torch.Size((experts * max_m, hidden)), device, layer) != experts:
            raise ValueError(f"{name}: expected the rows of {len(layer.up.data)} experts, got {tuple(shape)}")
        check_vector(groups_name, groups, torch.int32, experts, device)
    else:
        _floating_or_fp8(name, x, scale)
        count = layer_of(name, x.shape, device, layer)
        check_vector(groups_name, groups, torch.int32, None, device)
        if groups.shape[0] != count + 1:
            expected = f"({count + 1},), for {count} experts"
            raise ValueError(f"{groups_name}: expected shape {expected}, got {tuple(groups.shape)}")
        check_groups(groups, x.shape[0], device)
        part(whole, x.shape[0], count)
    row_dtype(dtype)


def row_dtype(dtype: torch.dtype) -> None:
    if dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"row_dtype: expected bfloat16 or float32, got {dtype}")


def of_sums(out_dtype: torch.dtype) -> None:
    if out_dtype not in FLOATING:
        raise TypeError(f"out_dtype: expected bfloat16, float16 or float32, got {out_dtype}")


def _floating_or_fp8(name: str, x: Tensor, scale: Tensor | None) -> None:
    """Check the dtype of x. If a scale is given, check that x (M, H) and scale are a matrix quantized 1x128."""
    if scale is None:
        check_dtype(name, x, *FLOATING)
    elif len(fp8_data(f"{name}.data", x, "(M, H)")) == 2:
        check_scale(f"{name}.scale", scale, (x.shape[0], ceil_div(x.shape[1], BLOCK)), x.device)


def masters(layer: Layer, given: Masters) -> None:
    """Check the master weights of a layer, and that the layer can be trained: it has block scales and no biases."""
    if given.down_master is not None or not is_packed(layer.down.data):
        check_block_scales("up_proj_scale_inv", layer.up)
        check_block_scales("down_proj_scale_inv", layer.down)
    if any(bias is not None for bias in layer.biases):
        raise ValueError("biases: expected None for gradients, which there are for experts without biases only")
    count, hidden, size = layer.sizes
    half = (count, size, hidden)  # shape of gate or up alone, if they are separate parameters
    shapes = {"up_master": (tuple(layer.up.data.shape), half), "down_master": ((count, hidden, size),)}
    if layer.activation.gated:
        shapes["gate_master"] = (half,)
    for name, master in given._asdict().items():
        if master is not None and tuple(master.shape) not in shapes.get(name, ()):
            expected = f"{' or '.join(map(str, shapes[name]))} like the FP8 weight" if name in shapes else "no gate"
            raise ValueError(f"{name}: expected shape {expected}, got {tuple(master.shape)}")


def layer_of(name: str, shape: torch.Size, device: torch.device, layer: Layer) -> int:
    """Check weights and biases of a layer against each other and against an input of `shape` (M, H). Returns E.

    name: the input's name, for error messages. device: device of the input.
    """
    up, down, gated = layer.up.data, layer.down.data, layer.activation.gated
    projections = 2 if gated else 1
    up_name = "gate_up_proj" if gated else "up_proj"
    count, rows, hidden = weight_data(up_name, up, "(E, 2I, H)" if gated else "(E, I, H)")
    if rows % projections:
        raise ValueError(f"{up_name}: expected shape (E, 2I, H), gate rows then up rows, got {tuple(up.shape)}")
    size = rows // projections
    if len(shape) != 2 or shape[1] != hidden:
        expected = f"({'R' if name == 'rows' else 'T'}, {hidden}) to match {up_name} {tuple(up.shape)}"
        raise ValueError(f"{name}: expected shape {expected}, got {tuple(shape)}")
    if weight_data("down_proj", down, "(E, H, I)") != (count, hidden, size):
        expected = (count, hidden, size // 2 if is_packed(down) else size)
        raise ValueError(
            f"down_proj: expected shape {expected} to match {up_name} {tuple(up.shape)}, got {tuple(down.shape)}"
        )
    for weight_name, weight, matrices in ((up_name, layer.up, projections), ("down_proj", layer.down, 1)):
        check_device(weight_name, weight.data, device, name)
        scale = "scale" if is_packed(weight.data) else "scale_inv"
        check_weight_scale(f"{weight_name}_{scale}", weight, device, matrices)
    widths = {f"{up_name}_bias": rows, "down_proj_bias": hidden}
    for (bias_name, columns), bias in zip(widths.items(), layer.biases, strict=True):
        if bias is not None:
            check_like(bias_name, bias, FLOATING, (count, columns), device, name)
            if not size:
                raise ValueError(f"{bias_name}: expected None for experts with I = 0, whose results are zeros")
    return count


def routed_index(index: Tensor, tokens: int, device: torch.device, like: str) -> None:
    """Check dtype, shape (T, K) and device of top_k_index.

    like: the name of an argument on `device`, for error messages.
    """
    check_dtype("top_k_index", index, *_INDEX_DTYPES)
    if index.dim() != 2 or index.shape[0] != tokens:
        raise ValueError(f"top_k_index: expected shape ({tokens}, top_k), got {tuple(index.shape)}")
    check_device("top_k_index", index, device, like)


def routing(
    top_k_index: Tensor,
    num_experts: int,
    capacity: int | None,
    first_expert: int = 0,
    first_row: int = 0,
    num_rows: int | None = None,
) -> None:
    """Check dtype and sizes of the arguments of `sort_by_expert`."""
    check_dtype("top_k_index", top_k_index, *_INDEX_DTYPES)
    if top_k_index.dim() != 2 or top_k_index.shape[0] * top_k_index.shape[1] >= 1 << 31:
        raise ValueError(f"top_k_index: expected shape (T, K) with T * K < 2**31, got {tuple(top_k_index.shape)}")
    if not 1 <= num_experts <= MAX_EXPERTS:
        raise ValueError(f"num_experts: expected 1 to {MAX_EXPERTS}, got {num_experts}")
    if capacity is not None and not 0 <= num_experts * capacity < 1 << 31:
        raise ValueError(f"capacity: expected 0 <= {num_experts} * capacity < 2**31, got {capacity}")
    if not 0 <= first_expert < (1 << 31) - num_experts:
        raise ValueError(f"first_expert: expected 0 <= first_expert < 2**31 - {num_experts}, got {first_expert}")
    window(first_row, num_rows)
    if capacity is not None and (first_row != 0 or num_rows is not None):
        got = f"first_row {first_row} and num_rows {num_rows}"
        raise ValueError(f"capacity: expected None with a window of rows, got {capacity} with {got}")


def window(first_row: int, num_rows: int | None) -> None:
    """Check the ranges of first_row and num_rows, which describe a window of rows."""
    if not 0 <= first_row < 1 << 31:
        raise ValueError(f"first_row: expected 0 to 2**31 - 1, got {first_row}")
    if num_rows is not None:
        _num_rows(num_rows)


def permute(x: Tensor, rows: Tensor, num_rows: int) -> None:
    """Check dtypes, sizes and devices of the arguments of `permute_quantize`."""
    check_dtype("x", x, *FLOATING)
    _permuted("x", x, rows, num_rows)


def permute_fp8(data: Tensor, scale: Tensor, rows: Tensor, num_rows: int) -> None:
    """Check dtypes, sizes and devices of the arguments of `permute_fp8`."""
    check_dtype("x.data", data, torch.float8_e4m3fn)
    _permuted("x.data", data, rows, num_rows)
    check_scale("x.scale", scale, (data.shape[0], ceil_div(data.shape[1], BLOCK)), data.device)


def _permuted(name: str, x: Tensor, rows: Tensor, num_rows: int) -> None:
    if x.dim() != 2 or x.shape[1] % 16:
        raise ValueError(f"{name}: expected shape (T, H) with H a multiple of 16, got {tuple(x.shape)}")
    _rows(rows, x.shape[0], x.device, name)
    _num_rows(num_rows)


def _num_rows(num_rows: int) -> None:
    if not 0 <= num_rows < 1 << 31:
        raise ValueError(f"num_rows: expected 0 to 2**31 - 1, got {num_rows}")


def combine(y: Tensor, rows: Tensor, weights: Tensor, out_dtype: torch.dtype, residual: Tensor | None = None) -> None:
    """Check dtypes, sizes and devices of the arguments of `combine`."""
    check_dtype("y", y, torch.bfloat16, torch.float32)
    if y.dim() != 2 or y.shape[1] % 8 or y.shape[0] >= 1 << 31:
        raise ValueError(f"y: expected shape (R, H) with R < 2**31 and H a multiple of 8, got {tuple(y.shape)}")
    _rows(rows, None, y.device, "y")
    _weights("weights", weights, rows, "rows", "y")
    of_sums(out_dtype)
    if residual is not None:
        check_like("residual", residual, (out_dtype,), (rows.shape[0], y.shape[1]), y.device, "y")


def _weights(name: str, weights: Tensor, like: Tensor, like_name: str, beside: str) -> None:
    """Check the dtype of weights, and that `like`, the argument called like_name, has the same shape and device."""
    check_dtype(name, weights, *FLOATING)
    if weights.shape != like.shape:
        raise ValueError(f"{name}: expected shape {tuple(like.shape)} like {like_name}, got {tuple(weights.shape)}")
    check_device(name, weights, like.device, beside)


def _rows(rows: Tensor, tokens: int | None, device: torch.device, beside: str) -> None:
    """Check dtype, shape and device of rows (T, K). tokens: the expected T, None for any."""
    check_dtype("rows", rows, torch.int32)
    if rows.dim() != 2 or (tokens is not None and rows.shape[0] != tokens):
        expected = "(T, K)" if tokens is None else f"({tokens}, K)"
        raise ValueError(f"rows: expected shape {expected}, got {tuple(rows.shape)}")
    check_device("rows", rows, device, beside)
