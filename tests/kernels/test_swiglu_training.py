"""SwiGLU and its backward with quantization: reference backend, errors, operators, and the compiled kernels."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8moe.kernels.activation import Activation
from fp8moe.kernels.experts import swiglu
from fp8moe.kernels.experts.swiglu import Beside, swiglu_backward_quantize, swiglu_quantize
from fp8moe.quant.quantize import dequantize, quantize_1x128
from fp8moe.quant.transpose import quantize_with_transpose
from tests.errors import relative_error
from tests.experts_cases import swiglu_operands as operands
from tests.ptxas import compile_report

ACTIVATIONS = (Activation(), Activation(limit=1.0), Activation(limit=1.0, alpha=1.702), Activation(name="swish"))
E4M3_ERROR = 4e-2


def exact_gradients(gate_up, grad, row_weights, activation) -> tuple[torch.Tensor, torch.Tensor]:
    """Of gate_up and row_weights, by autograd in float64."""
    gate_up, row_weights = gate_up.double().requires_grad_(), row_weights.double().requires_grad_()
    (row_weights[:, None] * activation(gate_up)).backward(grad.double())
    return gate_up.grad, row_weights.grad


def offsets_of(*offsets: int) -> torch.Tensor:
    return torch.tensor(offsets, dtype=torch.int32)


def assert_same(got, expected) -> None:
    """Bits of two FP8Tensor."""
    assert torch.equal(got.data.view(torch.uint8), expected.data.view(torch.uint8))
    assert got.scale.stride() == expected.scale.stride() and torch.equal(got.scale, expected.scale)


# ---- numbers ----


@given(
    rows=st.integers(1, 150), blocks=st.integers(1, 2), activation=st.sampled_from(ACTIVATIONS), seed=st.integers(0, 99)
)
def test_gradients_are_those_of_autograd(rows, blocks, activation, seed):
    gate_up, grad, row_weights = operands(rows, 128 * blocks, seed)
    offsets = offsets_of(0, rows // 2, rows)
    t = swiglu_backward_quantize(gate_up, grad, row_weights, offsets, activation=activation, beside=Beside.COLUMNS)
    d_gate_up, d_row_weights = exact_gradients(gate_up, grad, row_weights, activation)
    assert relative_error(dequantize(t.rows), d_gate_up) < E4M3_ERROR
    assert (t.dots - d_row_weights).norm() <= 1e-6 * (activation(gate_up.double()) * grad).norm() * math.sqrt(
        128 * blocks
    )
    rounded = quantize_with_transpose(d_gate_up.bfloat16(), offsets)
    assert relative_error(dequantize(t.columns), dequantize(rounded.columns)) < 1e-2


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_forward_is_the_quantized_activation(activation):
    gate_up, *_ = operands(300, 256)
    h = activation(gate_up.float()).bfloat16()
    assert_same(swiglu_quantize(gate_up, offsets_of(0, 300), activation=activation).rows, quantize_1x128(h))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_backward_quantizes_the_weighted_activation_by_columns(activation):
    """Whatever the gradient is. Where weights are powers of two, it has the digits of the forward's activation."""
    gate_up, grad, row_weights = operands(300, 256)
    offsets, options = offsets_of(0, 10, 10, 290), {"activation": activation}
    values = swiglu_quantize(gate_up, offsets, **options, beside=Beside.VALUES).values
    powers = 2.0 ** torch.randint(-5, 5, (300,))
    for change in (1.0, math.nan):
        for weights in (powers, row_weights):
            t = swiglu_backward_quantize(gate_up, grad * change, weights, offsets, **options, beside=Beside.COLUMNS)
            weighted = weights[:, None] * (values if weights is powers else activation(gate_up.float()))
            expected = quantize_with_transpose(weighted.bfloat16(), offsets, blocks=True)
            assert_same(t.h_columns, expected.columns)
            assert torch.equal(t.offsets, expected.offsets)


@pytest.mark.parametrize("rows", [1, 130])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_rows_alone_and_values(activation, rows):
    gate_up, grad, row_weights = operands(rows, 256)
    offsets = offsets_of(0, rows // 2, rows)
    options = {"activation": activation}
    h, values = swiglu_quantize(gate_up, offsets, **options, beside=Beside.VALUES)
    assert_same(h, swiglu_quantize(gate_up, offsets, **options).rows)
    assert torch.equal(values, activation(gate_up.float()).bfloat16())
    both = swiglu_backward_quantize(gate_up, grad, row_weights, offsets, **options, beside=Beside.COLUMNS)
    d, dots, _, _, _, d_gate_up, values_again = swiglu_backward_quantize(
        gate_up, grad, row_weights, offsets, **options, beside=Beside.VALUES
    )
    assert_same(d, both.rows)
    assert torch.equal(dots, both.dots) and relative_error(values_again, values) <= 1e-4
    assert d_gate_up.dtype == values.dtype == values_again.dtype == torch.bfloat16
    assert relative_error(d_gate_up, exact_gradients(gate_up, grad, row_weights, activation)[0]) <= 4e-3
    assert relative_error(values, activation(gate_up.double())) <= 4e-3


@pytest.mark.parametrize("rows", [0, 20])
def test_no_values_that_nothing_asks_for(rows):
    gate_up, grad, row_weights = operands(rows, 128)
    options = {"activation": Activation()}
    h, *nothing = swiglu_quantize(gate_up, offsets_of(0, rows), **options)
    d, dots, *others = swiglu_backward_quantize(gate_up, grad, row_weights, offsets_of(0, rows), **options)
    assert h.data.shape == (rows, 128) and d.data.shape == (rows, 256) and dots.shape == (rows,)
    assert nothing == [None] and others == [None] * 5


@pytest.mark.parametrize("activation", ACTIVATIONS[1:3])
def test_no_gradient_beyond_a_limit(activation):
    gate_up = torch.tensor([2.0, -2.0, 1.0, 0.5]).repeat_interleave(64).repeat(3, 1).bfloat16()  # gate 2, -2; up 1, 0.5
    gate_up[1, 128:192], gate_up[2, 128:192] = 3.0, -3.0
    grad, ones = torch.ones(3, 128).bfloat16(), torch.ones(3)
    t = swiglu_backward_quantize(gate_up, grad, ones, offsets_of(0, 3), activation=activation)
    d_gate, d_up = dequantize(t.rows).chunk(2, dim=-1)
    assert not d_gate[:, :64].any() and d_gate[:, 64:].all()
    assert d_up[0].all() and not d_up[1:, :64].any() and d_up[1:, 64:].all()


def test_results_are_detached():
    gate_up, grad, row_weights = (value.requires_grad_() for value in operands(4, 128))
    options = {"activation": Activation(), "beside": Beside.COLUMNS}
    t = swiglu_backward_quantize(gate_up, grad, row_weights, offsets_of(0, 4), **options)
    h = swiglu_quantize(gate_up, offsets_of(0, 4), activation=Activation(), beside=Beside.VALUES)
    values = *t.rows, *t.columns, *t.h_columns, t.dots, *h.rows, h.values
    assert not any(value.requires_grad for value in values)


# ---- errors ----


def test_errors():
    gate_up, grad, row_weights = operands(4, 128)
    offsets, silu = offsets_of(0, 4), Activation()
    for activation in (Activation(name="gelu"), Activation(gated=False)):
        with pytest.raises(ValueError, match="^activation: expected a gated silu, got"):
            swiglu_quantize(gate_up, offsets, activation=activation)
        with pytest.raises(ValueError, match="^activation: expected a gated silu, got"):
            swiglu_backward_quantize(gate_up, grad, row_weights, offsets, activation=activation)
    with pytest.raises(ValueError, match="^beside: expected NOTHING or VALUES, got COLUMNS"):
        swiglu_quantize(gate_up, offsets, activation=silu, beside=Beside.COLUMNS)
    with pytest.raises(TypeError, match="^group_offsets: expected a torch.Tensor, got NoneType"):
        swiglu_quantize(gate_up, None, activation=silu)
    with pytest.raises(TypeError, match="^gate_up: expected a torch.Tensor, got NoneType"):
        swiglu_quantize(None, offsets, activation=silu)
    with pytest.raises(TypeError, match="^grad: expected a torch.Tensor, got NoneType"):
        swiglu_backward_quantize(gate_up, None, row_weights, offsets, activation=silu)
    for wrong in (gate_up[:, :128], gate_up[None]):
        with pytest.raises(ValueError, match=r"^gate_up: expected shape \(R, 2 \* I\) with I a multiple of 128, got"):
            swiglu_quantize(wrong, offsets, activation=silu)
    with pytest.raises(ValueError, match=r"^grad: expected shape \(4, 128\), got \(3, 128\)"):
        swiglu_backward_quantize(gate_up, grad[:3], row_weights, offsets, activation=silu)
    with pytest.raises(ValueError, match=r"^row_weights: expected shape \(4,\), got \(5,\)"):
        swiglu_backward_quantize(gate_up, grad, torch.ones(5), offsets, activation=silu)


# ---- kernels ----


@pytest.mark.parametrize("activation", ACTIVATIONS[:3])
@pytest.mark.parametrize(
    ("backward", "beside"),
    [(backward, beside) for backward in (False, True) for beside in Beside if backward or beside is not Beside.COLUMNS],
)
def test_every_variant_compiles_without_spills(activation, backward, beside):
    spec = swiglu.kernel_spec(activation, backward, beside)
    report = compile_report(spec)
    assert report.spill_stores == report.spill_loads == report.stack == 0
    blocks = 2 if backward else 3
    assert report.registers <= (128 if backward else 80)
    # An SM has 227 KB for its blocks, each of which takes 1 KB more than it asks for.
    dynamic = dict(spec.defines)["SHARED_BYTES"]
    assert blocks * (report.static_smem + dynamic + 1024) <= 227 << 10
