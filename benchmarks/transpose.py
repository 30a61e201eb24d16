"""The transposing quantizer against the bandwidth of a copy: `python -m benchmarks.transpose [--out DIR]`.

Cases: one group of rows; tokens that are gathered into the rows of experts, eight times each; the same with row
weights, as the backward of an experts layer has them; and SwiGLU and its backward with the quantizer behind them.
`of_copy` counts every row read as often as it is, `of_copy_once` every token once, as if L2 held all repetitions.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks import command, operands, roofline, timing
from benchmarks.report import Threshold, format_table
from fp8moe import FP8Tensor
from fp8moe.kernels.activation import Activation, activation_backward
from fp8moe.kernels.experts.routing import sort_by_expert
from fp8moe.kernels.experts.swiglu import swiglu_backward_quantize, swiglu_quantize
from fp8moe.quant.transpose import Transposed, quantize_with_transpose

TOKENS, TOP_K, EXPERTS, HIDDEN, INTERMEDIATE = 8192, 8, 32, 7168, 2048
ROWS = TOKENS * TOP_K
LIMITED = ("one group", "gather")
LIMIT, AIM = 0.75, 0.85
MAX_ERROR = 4e-2  # as for the other quantizers
CHECKED_ROWS = 1024
COLUMNS = ("case", "rows", "k", "us", "gbps", "of_copy", "of_copy_once")


class Case(NamedTuple):
    """One measurement: a name, a call, and the values of the first rows of the first group, as rows and as columns.

    read: bytes that are read for an element of the result; unique: how many of those bytes are different ones.
    """

    name: str
    call: Callable[[], Transposed]
    rows: Tensor
    columns: Tensor
    read: float = 2.0
    unique: float = 2.0


def bytes_moved(rows: int, k: int, columns: int, read: float = 2.0) -> int:
    """Bytes of one call: `read` for each element of (rows, k), then FP8 data and float32 scales written both ways."""
    data = int(read * rows * k) + rows * k + columns * k
    return data + 4 * (rows * -(-k // 128) + columns // 128 * k)


def make_row(case: str, rows: int, k: int, columns: int, us: float, read: float = 2.0, unique: float = 2.0) -> dict:
    """One measurement with its bandwidth over that of a copy; columns: of the padded groups."""
    gbps, once = (bytes_moved(rows, k, columns, size) / us / 1e3 for size in (read, unique))
    return {
        **{"case": case, "rows": rows, "k": k, "columns": columns, "us": us, "gbps": gbps},
        "of_copy": gbps / 1e3 / roofline.copy_tbps(),
        "of_copy_once": once / 1e3 / roofline.copy_tbps(),
    }


def thresholds(rows: Sequence[dict]) -> list[Threshold]:
    """The thresholds on the given rows."""
    return [
        Threshold(
            f"transposing quantizer, {row['case']}, share of the copy bandwidth", row["of_copy"], LIMIT, AIM, True
        )
        for row in rows
        if row["case"] in LIMITED
    ]


def cases() -> list[Case]:
    """Operands on the GPU, with all assignments on local experts."""
    x = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16)
    index = torch.rand(TOKENS, EXPERTS, device="cuda").topk(TOP_K).indices
    groups, rows = sort_by_expert(index, EXPERTS)
    tokens = torch.empty(ROWS, dtype=torch.int32, device="cuda")
    tokens[rows.flatten().long()] = torch.arange(ROWS, dtype=torch.int32, device="cuda") // TOP_K
    weights = torch.rand(ROWS, device="cuda")
    dense = torch.randn(ROWS, HIDDEN, device="cuda", dtype=torch.bfloat16)
    gate_up = torch.randn(ROWS, 2 * INTERMEDIATE, device="cuda", dtype=torch.bfloat16)
    grad = torch.randn(ROWS, INTERMEDIATE, device="cuda", dtype=torch.bfloat16)

    first = slice(0, min(int(groups[1]), CHECKED_ROWS))
    picked, weight = x[tokens[first].long()].double(), weights[first, None].double()
    weighted = weight * grad[first].double()
    d_gate_up, h = activation_backward(gate_up[first].double(), weighted, activation := Activation())
    gathered = {"unique": 2 / TOP_K}
    return [
        Case("one group", lambda: quantize_with_transpose(dense), dense[first].double(), dense[first].double()),
        Case("gather", lambda: quantize_with_transpose(x, groups, tokens=tokens), picked, picked, **gathered),
        Case(
            "gather, weights",
            lambda: quantize_with_transpose(x, groups, tokens=tokens, row_weights=weights),
            *(picked, picked * weight),
            **gathered,
        ),
        Case("swiglu", lambda: swiglu_quantize(gate_up, groups, activation=activation), h, h, 4, 4),
        Case(
            "swiglu backward",
            lambda: swiglu_backward_quantize(gate_up, grad, weights, groups, activation=activation)[0],
            *(d_gate_up, d_gate_up),
            *(3, 3),
        ),
    ]


def check(case: Case) -> int:
    """Compare the first rows, and return the columns of the padded groups. RuntimeError if a result is wrong."""
    t, count = case.call(), len(case.rows)
    whole = count // 128 * 128
    parts = {
        "rows": (FP8Tensor(t.rows.data[:count], t.rows.scale[:count]), case.rows),
        "columns": (
            FP8Tensor(t.columns.data[:, :whole], t.columns.scale[:, : whole // 128]),
            case.columns[:whole].t(),
        ),
    }
    for name, (got, expected) in parts.items():
        error = operands.relative_error(operands.exact(got), expected)
        if not error <= MAX_ERROR:
            raise RuntimeError(f"{case.name}, {name}: relative error {error:.2e}, must be <= {MAX_ERROR}")
    return int(t.offsets[-1])


def run() -> dict:
    """Checks and times every case; {"gpu", "rows", "thresholds"}. RuntimeError if a result is wrong."""
    gpu = command.start()
    measured = cases()
    columns = [check(case) for case in measured]
    timings = timing.measure([case.call for case in measured])
    rows = [
        make_row(
            *(case.name, ROWS, case.rows.shape[1], used, timed.median_us),
            read=case.read,
            unique=case.unique,
        )
        for case, used, timed in zip(measured, columns, timings, strict=True)
    ]
    return command.result(gpu, rows, thresholds(rows))


def main(argv: Sequence[str] | None = None) -> None:
    args = command.parser("transpose", "the transposing quantizer against a copy").parse_args(argv)
    result = run()
    command.finish(args.out / "transpose.json", result, format_table(result["rows"], COLUMNS))


if __name__ == "__main__":
    main()
