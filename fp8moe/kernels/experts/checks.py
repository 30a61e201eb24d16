"""Checks of the arguments of an experts layer and of its steps, in the manner of `runtime.checks`."""

import torch
from torch import Tensor

from fp8moe.kernels.experts.operands import Layer, Masters, Operands, RowOperands, Shard
from fp8moe.kernels.gemm.checks import part
from fp8moe.quant.checks import check_groups, check_no_channels, check_scale, check_vector, check_weight_scale, fp8_data
from fp8moe.quant.formats import BLOCK, ceil_div
from fp8moe.runtime.checks import FLOATING, check_device, check_dtype, check_like

MAX_EXPERTS = 1024
_INDEX_DTYPES = (torch.int32, torch.int64)


def experts(operands: Operands) -> None:
    """Dtypes, shapes and devices of the operands of `experts`."""
    hidden_states, residual, capacity = operands.hidden_states, operands.residual, operands.capacity
    check_dtype("hidden_states", hidden_states, *FLOATING)
    _layer("hidden_states", operands)
    if residual is not None:
        device = hidden_states.device
        check_like("residual", residual, (hidden_states.dtype,), hidden_states.shape, device, "hidden_states")
    if capacity is not None and capacity < 1:
        raise ValueError(f"capacity: expected at least one row an expert, got {capacity}")
    _sorted(operands)


def with_norm(operands: Operands) -> None:
    """Checks the operands of `experts` with a norm."""
    experts(operands)
    x = operands.hidden_states
    check_like("norm_weight", operands.norm.norm_weight, (x.dtype,), (x.shape[1],), x.device, "hidden_states")


def _sorted(operands: Operands) -> None:
    """Groups and rows of assignments that are sorted already."""
    shapes = {"groups": (len(operands.layer.up.data) + 1,), "rows": operands.top_k_index.shape}
    given = {name: value for name in shapes if (value := getattr(operands, name)) is not None}
    for name, value in given.items():
        check_like(name, value, (torch.int32,), shapes[name], operands.hidden_states.device, "hidden_states")
    for name in shapes.keys() - given.keys() if given else ():
        raise ValueError(f"{name}: expected a tensor beside {' and '.join(given)}, got None")
    if given and operands.capacity is not None:
        raise ValueError(f"capacity: expected None with groups and rows, got {operands.capacity}")


def partial(operands: Operands) -> None:
    """Checks the operands of `experts_partial`, whose `partial` is the residual."""
    x, shard, total = operands.hidden_states, operands.shard, operands.residual
    _floating_or_fp8("x", x, operands.hidden_scale)
    _layer("x", operands)
    if total is not None:
        check_like("partial", total, (shard.out_dtype,), x.shape, x.device, "x")
    for name, known in (("partial_known", operands.residual_known), ("known", operands.known)):
        if known is not None:
            check_like(name, known, (torch.bool,), x.shape[:1], x.device, "x")
    if operands.known is not None and not operands.known.stride(0) and x.shape[0] > 1:
        raise ValueError("known: expected memory for each token, to be written, got a tensor expanded from one element")
    row_dtype(shard.row_dtype)
    of_sums(shard.out_dtype)
    of_rank(shard, len(operands.layer.up.data))


def training(operands: Operands, given: Masters) -> None:
    """Checks the operands of `experts_training`."""
    experts(operands)
    of_rank(operands.shard, len(operands.layer.down.data))
    of_sums(operands.shard.dtypes(operands.hidden_states.dtype)[1])
    masters(operands.layer, given)


def of_rank(shard: Shard, count: int) -> None:
    """That the `count` experts which are here are among all of them, and the window of rows."""
    first, total = shard.first_expert, shard.num_experts
    if first < 0 or (total is not None and first + count > total):
        raise ValueError(
            f"first_expert: expected that the {count} experts here are among {total} from 0 on, got {first}"
        )
    window(shard.first_row, shard.num_rows)


def sorted_rows(operands: RowOperands) -> None:
    """Checks the operands of `experts_rows`."""
    rows, group_offsets = operands.rows, operands.group_offsets
    _floating_or_fp8("rows", rows, operands.rows_scale)
    count = projections("rows", rows, operands.layer)
    check_vector("group_offsets", group_offsets, torch.int32, None, rows.device)
    if group_offsets.shape[0] != count + 1:
        expected = f"({count + 1},), for {count} experts"
        raise ValueError(f"group_offsets: expected shape {expected}, got {tuple(group_offsets.shape)}")
    check_groups(group_offsets, rows.shape[0], rows.device)
    part(operands.whole, rows.shape[0], count)
    row_dtype(operands.row_dtype)


def row_dtype(dtype: torch.dtype) -> None:
    if dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"row_dtype: expected bfloat16 or float32, got {dtype}")


def of_sums(out_dtype: torch.dtype) -> None:
    if out_dtype not in FLOATING:
        raise TypeError(f"out_dtype: expected bfloat16, float16 or float32, got {out_dtype}")


def _floating_or_fp8(name: str, x: Tensor, scale: Tensor | None) -> None:
    """Dtype of a matrix, and the scale of one that is quantized 1x128."""
    if scale is None:
        check_dtype(name, x, *FLOATING)
    elif len(fp8_data(f"{name}.data", x, "(M, H)")) == 2:
        check_scale(f"{name}.scale", scale, (x.shape[0], ceil_div(x.shape[1], BLOCK)), x.device)


def _layer(name: str, operands: Operands) -> None:
    """Routing and weights of the input, which the caller calls `name`."""
    projections(name, operands.hidden_states, operands.layer)
    routed(operands.top_k_index, operands.top_k_weights, operands.hidden_states, name)


def masters(layer: Layer, given: Masters) -> None:
    check_no_channels("up_proj_scale_inv", layer.up)
    check_no_channels("down_proj_scale_inv", layer.down)
    if any(bias is not None for bias in layer.biases):
        raise ValueError("biases: expected None for gradients, which there are for experts without biases only")
    count, hidden, size = layer.down.data.shape
    half = (count, size, hidden)  # of gate or up where they are apart
    shapes = {"up_master": (tuple(layer.up.data.shape), half), "down_master": ((count, hidden, size),)}
    if layer.activation.gated:
        shapes["gate_master"] = (half,)
    for name, master in given._asdict().items():
        if master is not None and tuple(master.shape) not in shapes.get(name, ()):
            expected = f"{' or '.join(map(str, shapes[name]))} like the FP8 weight" if name in shapes else "no gate"
            raise ValueError(f"{name}: expected shape {expected}, got {tuple(master.shape)}")


def projections(name: str, x: Tensor, layer: Layer) -> int:
    """Weights that fit together and to x (M, H), which the caller calls `name`. Returns E."""
    up, down, gated = layer.up.data, layer.down.data, layer.activation.gated
    projections = 2 if gated else 1
    up_name = "gate_up_proj" if gated else "up_proj"
    count, rows, hidden = fp8_data(up_name, up, "(E, 2I, H)" if gated else "(E, I, H)")
    if rows % projections:
        raise ValueError(f"{up_name}: expected shape (E, 2I, H), gate rows then up rows, got {tuple(up.shape)}")
    size = rows // projections
    if x.dim() != 2 or x.shape[1] != hidden:
        expected = f"({'R' if name == 'rows' else 'T'}, {hidden}) to match {up_name} {tuple(up.shape)}"
        raise ValueError(f"{name}: expected shape {expected}, got {tuple(x.shape)}")
    if fp8_data("down_proj", down, "(E, H, I)") != (count, hidden, size):
        raise ValueError(
            f"down_proj: expected shape {(count, hidden, size)} to match {up_name} {tuple(up.shape)}, "
            f"got {tuple(down.shape)}"
        )
    for weight_name, value in ((up_name, up), ("down_proj", down)):
        check_device(weight_name, value, x.device, name)
    check_weight_scale(f"{up_name}_scale_inv", layer.up, x.device, projections)
    check_weight_scale("down_proj_scale_inv", layer.down, x.device)
    widths = {f"{up_name}_bias": rows, "down_proj_bias": hidden}
    for (bias_name, columns), bias in zip(widths.items(), layer.biases, strict=True):
        if bias is not None:
            check_like(bias_name, bias, FLOATING, (count, columns), x.device, name)
            if not size:
                raise ValueError(f"{bias_name}: expected None for experts with I = 0, whose results are zeros")
    return count


def routed(index: Tensor, weights: Tensor, x: Tensor, name: str) -> None:
    """That there are an expert and a weight for each of top_k assignments of the tokens x, the argument `name`."""
    routed_index(index, x, name)
    _weights("top_k_weights", weights, index, "top_k_index", name)


def routed_index(index: Tensor, x: Tensor, name: str) -> None:
    """That there is an expert for each."""
    check_dtype("top_k_index", index, *_INDEX_DTYPES)
    if index.dim() != 2 or index.shape[0] != x.shape[0]:
        raise ValueError(f"top_k_index: expected shape ({x.shape[0]}, top_k), got {tuple(index.shape)}")
    check_device("top_k_index", index, x.device, name)


def routing(
    top_k_index: Tensor,
    num_experts: int,
    capacity: int | None,
    first_expert: int = 0,
    first_row: int = 0,
    num_rows: int | None = None,
) -> None:
    """Dtype and sizes of the arguments of `sort_by_expert`."""
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
    """That it is a range of rows."""
    if not 0 <= first_row < 1 << 31:
        raise ValueError(f"first_row: expected 0 to 2**31 - 1, got {first_row}")
    if num_rows is not None:
        _num_rows(num_rows)


def permute(x: Tensor, rows: Tensor, num_rows: int) -> None:
    """Dtypes, sizes and devices of the arguments of `permute_quantize`."""
    check_dtype("x", x, *FLOATING)
    _permuted("x", x, rows, num_rows)


def permute_fp8(data: Tensor, scale: Tensor, rows: Tensor, num_rows: int) -> None:
    """Checks the operands of `permute_fp8`."""
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
    """Dtypes, sizes and devices of the arguments of `combine`."""
    check_dtype("y", y, torch.bfloat16, torch.float32)
    if y.dim() != 2 or y.shape[1] % 8 or y.shape[0] >= 1 << 31:
        raise ValueError(f"y: expected shape (R, H) with R < 2**31 and H a multiple of 8, got {tuple(y.shape)}")
    _rows(rows, None, y.device, "y")
    _weights("weights", weights, rows, "rows", "y")
    of_sums(out_dtype)
    if residual is not None:
        check_like("residual", residual, (out_dtype,), (rows.shape[0], y.shape[1]), y.device, "y")


def _weights(name: str, weights: Tensor, like: Tensor, like_name: str, beside: str) -> None:
    """That there is a weight for each assignment of `like`, which is on the device of the argument `beside`."""
    check_dtype(name, weights, *FLOATING)
    if weights.shape != like.shape:
        raise ValueError(f"{name}: expected shape {tuple(like.shape)} like {like_name}, got {tuple(weights.shape)}")
    check_device(name, weights, like.device, beside)


def _rows(rows: Tensor, tokens: int | None, device: torch.device, beside: str) -> None:
    """Dtype, shape and device of the rows of assignments; tokens: how many, None for any number."""
    check_dtype("rows", rows, torch.int32)
    if rows.dim() != 2 or (tokens is not None and rows.shape[0] != tokens):
        expected = "(T, K)" if tokens is None else f"({tokens}, K)"
        raise ValueError(f"rows: expected shape {expected}, got {tuple(rows.shape)}")
    check_device("rows", rows, device, beside)
