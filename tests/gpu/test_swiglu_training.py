"""SwiGLU and its backward with quantization: against the reference, against float64, and nothing else is written."""

import math
from functools import partial

import pytest
import torch

from benchmarks.operands import exact
from fp8moe.kernels.activation import Activation
from fp8moe.kernels.experts import swiglu
from fp8moe.kernels.experts.swiglu import Beside, swiglu_backward_quantize, swiglu_quantize
from fp8moe.quant import reference
from fp8moe.quant.formats import FP8Tensor
from fp8moe.quant.quantize import dequantize
from fp8moe.quant.transpose import quantize_with_transpose
from tests.errors import relative_error
from tests.experts_cases import swiglu_operands
from tests.gpu.test_transpose import GROUPS, NONSENSE, assert_only_written, bits, marked_results, offsets_of, used_parts

pytestmark = pytest.mark.gpu

ACTIVATIONS = (Activation(), Activation(limit=1.0), Activation(limit=1.0, alpha=1.702))
SIZES = (128, 384)
CODES_ERROR = 1e-2  # a value next to a tie may round to the other side
E4M3_ERROR = 4e-2
DOT_ERROR = 1e-5
operands = partial(swiglu_operands, device="cuda")


def run(gate_up, grad, row_weights, groups, activation) -> tuple[list, list, torch.Tensor]:
    """The activation and its gradient quantized both ways, the memory they are in, and the dots.

    The forward quantizes the activation by rows, the backward the weighted activation by columns and the gradient both
    ways.
    """
    rows, size = grad.shape
    h, h_memory = marked_results(rows, size, len(groups) - 1, blocks=True)
    swiglu.launch(swiglu.SwigluOperands(gate_up, groups, activation), reference.Results(*h[:2]))
    d, d_memory = marked_results(rows, 2 * size, len(groups) - 1)
    operands = swiglu.SwigluBackwardOperands(gate_up, grad, row_weights, groups, activation, Beside.COLUMNS)
    dots = swiglu.launch_backward(operands, d, *h[2:4])
    return [h._replace(offsets=d.offsets), d], [h_memory, d_memory], dots


def assert_matches(gate_up, grad, row_weights, groups, activation) -> None:
    """Finite operands: the reference's results up to the last bit of an exponential."""
    rows = len(grad)
    both, memory, dots = run(gate_up, grad, row_weights, groups, activation)
    h = swiglu.swiglu_values(gate_up, activation)
    d_gate_up, _, _ = swiglu.swiglu_gradients(gate_up, grad, row_weights, activation)
    *_, exact_dots = swiglu.swiglu_gradients(gate_up.double(), grad.double(), row_weights.double(), activation)
    weighted = (row_weights[:, None] * activation(gate_up.float())).bfloat16()
    columns = reference.by_columns(weighted, groups, blocks=True)
    forward = reference.Results(*reference.quantize_1x128(h, False), *columns)
    backward = reference.both_ways(d_gate_up, groups)
    for got, want, buffers in zip(both, (forward, backward), memory, strict=True):
        used = used_parts(got, groups, rows)
        assert torch.equal(got[4], want[4])
        for data, scale in ((0, 1), (2, 3)):
            assert_close(got[data], got[scale], want[data], want[scale], used[data], used[scale])
        assert_only_written(got, buffers, used)
    in_group = used_parts(both[0], groups, rows)[0][:, 0]
    if in_group.any():
        error = (dots - exact_dots)[in_group].abs().max() / exact_dots[in_group].abs().max().clamp(min=1.0)
        assert error <= DOT_ERROR * grad.shape[1] ** 0.5


def assert_close(data, scale, expected_data, expected_scale, used_data, used_scale) -> None:
    """Scales to the last bits of bfloat16, and values as close as codes next to a tie allow."""
    got, expected = (values.masked_fill(~used_scale, 1.0) for values in (scale, expected_scale))
    assert torch.allclose(got, expected, rtol=2**-7, atol=0)
    codes, wanted = (bits(values)[used_data] for values in (data, expected_data))
    different = (codes != wanted) & ((codes | wanted) & 0x7F != 0)  # zeros may have either sign
    assert different.float().mean() <= 0.02 if different.numel() else True
    values = dequantize(FP8Tensor(data, got)).masked_fill(~used_data, 0)
    exact = dequantize(FP8Tensor(expected_data, expected)).masked_fill(~used_data, 0)
    assert (values - exact).norm() <= CODES_ERROR * exact.norm()


@pytest.mark.parametrize("offsets,rows", [case for case in GROUPS if case[0] is not None])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_groups_and_sizes(offsets, rows, activation):
    for size in SIZES:
        assert_matches(*operands(rows, size), offsets_of(offsets), activation)


@pytest.mark.parametrize("offsets", NONSENSE)
def test_offsets_that_mean_nothing(offsets):
    assert_matches(*operands(300, 128), offsets_of(offsets), ACTIVATIONS[1])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_are_those_of_autograd(activation):
    gate_up, grad, row_weights = operands(500, 256)
    options = {"activation": activation, "beside": Beside.COLUMNS}
    t = swiglu_backward_quantize(gate_up, grad, row_weights, offsets_of((0, 500)), **options)
    gate_up, row_weights = gate_up.double().requires_grad_(), row_weights.double().requires_grad_()
    (row_weights[:, None] * activation(gate_up)).backward(grad.double())
    assert relative_error(exact(t.rows), gate_up.grad) <= E4M3_ERROR
    columns = FP8Tensor(t.columns.data[:, :384], t.columns.scale[:, :3])
    assert relative_error(exact(columns), gate_up.grad[:384].t()) <= E4M3_ERROR
    assert relative_error(t.dots, row_weights.grad) <= 1e-5


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_backward_quantizes_the_bits_of_the_forward_by_columns(activation):
    """GEMM 2 and its weight gradient read the same activation, where rows have the weight 1."""
    gate_up, grad, row_weights = operands(700, 384)
    row_weights.fill_(1)
    groups, options = offsets_of((0, 10, 10, 690)), {"activation": activation}
    values = swiglu_quantize(gate_up, groups, **options, beside=Beside.VALUES).values
    t = swiglu_backward_quantize(gate_up, grad, row_weights, groups, **options, beside=Beside.COLUMNS)
    expected = quantize_with_transpose(values, groups, blocks=True)
    end = int(expected.offsets[-1])
    for got, want, columns in zip(t.h_columns, expected.columns, (end, end // 128), strict=True):
        assert torch.equal(bits(got[:, :columns]), bits(want[:, :columns]))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_large_gates(activation):
    # Where the exponential overflows and underflows.
    gate_up, grad, row_weights = operands(130, 128)
    gate_up[:, :128] *= 100
    assert_matches(gate_up, grad, row_weights, offsets_of((0, 130)), activation)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["gate", "up", "grad", "row_weights"])
def test_nan_and_infinity_stay_in_their_row_and_column(activation, value, where):
    gate_up, grad, row_weights = operands(200, 128)
    groups = offsets_of((0, 200))
    (clean_h, clean), _, clean_dots = run(gate_up, grad, row_weights, groups, activation)
    if where == "row_weights":
        row_weights[140] = value
    else:
        {"gate": gate_up, "up": gate_up[:, 128:], "grad": grad}[where][140, 5] = value
    (h, d), _, dots = run(gate_up, grad, row_weights, groups, activation)
    clamped = activation.limit is not None and where in ("gate", "up") and value == math.inf
    others = torch.arange(200, device="cuda") != 140
    for got, want in ((h, clean_h), (d, clean)):
        assert torch.equal(bits(got[0])[others], bits(want[0])[others])
        assert torch.equal(bits(got[1])[others], bits(want[1])[others])
        assert torch.equal(bits(got[2][:, :128]), bits(want[2][:, :128]))  # of the first 128 rows
    assert torch.equal(dots[others], clean_dots[others])
    if where == "grad":
        assert torch.equal(bits(h[2]), bits(clean_h[2])) and torch.equal(bits(h[3]), bits(clean_h[3]))
    rows, columns = dequantize(FP8Tensor(*d[:2])), dequantize(FP8Tensor(*d[2:4]))
    assert rows[140].isfinite().all() == clamped and columns[:, 128:].isfinite().all() == clamped
    if where != "row_weights":
        assert dots[140].isfinite() == clamped
        assert dequantize(FP8Tensor(*h[:2]))[140].isfinite().all() == (clamped or where == "grad")
        untouched = [c for c in range(256) if c % 128 != 5]
        assert torch.equal(bits(d[2])[untouched], bits(clean[2])[untouched])


def test_rows_outside_the_groups_are_not_read():
    gate_up, grad, row_weights = operands(300, 128)
    groups = offsets_of((10, 150, 290))
    (h, d), _, dots = run(gate_up, grad, row_weights, groups, Activation())
    for rows in (slice(0, 10), slice(290, 300)):
        gate_up[rows], grad[rows], row_weights[rows] = math.nan, math.nan, math.nan
    (other_h, other_d), _, other_dots = run(gate_up, grad, row_weights, groups, Activation())
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip((*h, *d), (*other_h, *other_d), strict=True))
    assert torch.equal(dots[10:290], other_dots[10:290])
