"""SwiGLU and its backward by rows alone: the bits of both ways, values as exact as bfloat16, nothing else written."""

import math
from functools import partial

import pytest
import torch

from fp8moe.kernels.activation import Activation
from fp8moe.kernels.experts import swiglu
from fp8moe.kernels.experts.swiglu import Beside
from fp8moe.quant.reference import Results
from tests.errors import relative_error
from tests.experts_cases import swiglu_operands
from tests.gpu.test_swiglu_training import ACTIVATIONS, SIZES
from tests.gpu.test_swiglu_training import run as both_ways
from tests.gpu.test_transpose import GROUPS, GUARD, MARK, NONSENSE, bits, marked_results, offsets_of, used_parts

pytestmark = pytest.mark.gpu

BFLOAT16_ERROR = 4e-3
operands = partial(swiglu_operands, device="cuda")


def marked_values(rows, width) -> tuple[torch.Tensor, torch.Tensor]:
    """An uninitialized (rows, width) bfloat16 in memory full of marks, and that memory with a guard behind it."""
    buffer = torch.full((2 * rows * width + GUARD,), MARK, dtype=torch.uint8, device="cuda")
    return buffer[:-GUARD].view(torch.bfloat16).view(rows, width), buffer


def run(gate_up, grad, row_weights, groups, activation, values=True):
    """Rows of the forward and of the backward, the values of both, the dots; and the memory of all but the dots."""
    rows, size = grad.shape
    results, memory, beside = [], [], []
    for width in (size, 2 * size):
        marked, buffers = marked_results(rows, width, len(groups) - 1)
        results.append(Results(marked.rows, marked.row_scale))
        memory += zip(marked[:2], buffers[:2], strict=True)
    for width in (size, 2 * size, size):
        beside.append(marked_values(rows, width))
    h, d_gate_up, again = (value for value, _ in beside)
    forward, backward = ((h,), (d_gate_up, again)) if values else ((), ())
    form = activation, Beside.VALUES if values else Beside.NOTHING
    swiglu.launch(swiglu.SwigluOperands(gate_up, groups, *form), results[0], *forward)
    operands = swiglu.SwigluBackwardOperands(gate_up, grad, row_weights, groups, *form)
    dots = swiglu.launch_backward(operands, results[1], *backward)
    return results, (h, d_gate_up, again), dots, memory + beside


def rows_in_groups(both, groups, rows) -> torch.Tensor:
    return used_parts(both, groups, rows)[0][:, 0]


def assert_matches(gate_up, grad, row_weights, groups, activation) -> None:
    rows = len(grad)
    (forward, backward), _, expected_dots = both_ways(gate_up, grad, row_weights, groups, activation)
    used = rows_in_groups(forward, groups, rows)
    for values in (False, True):
        results, beside, dots, memory = run(gate_up, grad, row_weights, groups, activation, values)
        for got, want in zip(results, (forward, backward), strict=True):
            assert torch.equal(bits(got[0])[used], bits(want[0])[used])
            assert torch.equal(bits(got[1])[used], bits(want[1])[used])
        assert torch.equal(dots[used], expected_dots[used])
        for part, buffer in memory:
            written = torch.zeros(buffer.numel() - GUARD, dtype=torch.bool, device="cuda")
            of_rows = used[:, None] if values or part.dtype != torch.bfloat16 else torch.zeros_like(used)[:, None]
            elements = torch.zeros(len(written) // part.itemsize, dtype=torch.bool, device="cuda")
            elements.as_strided(part.shape, part.stride()).copy_(of_rows.expand(part.shape))
            written = elements.repeat_interleave(part.itemsize)
            assert (buffer[:-GUARD][~written] == MARK).all() and (buffer[-GUARD:] == MARK).all()
    h, d_gate_up, again = (value[used] for value in beside)
    assert torch.equal(h, again)
    d_exact, h_exact, _ = swiglu.swiglu_gradients(gate_up.double()[used], grad[used], row_weights[used], activation)
    if used.any():
        assert relative_error(h, h_exact) <= BFLOAT16_ERROR and relative_error(d_gate_up, d_exact) <= BFLOAT16_ERROR


@pytest.mark.parametrize("offsets,rows", [case for case in GROUPS if case[0] is not None])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_groups_and_sizes(offsets, rows, activation):
    for size in SIZES:
        assert_matches(*operands(rows, size), offsets_of(offsets), activation)


@pytest.mark.parametrize("offsets", NONSENSE)
def test_offsets_that_mean_nothing(offsets):
    assert_matches(*operands(300, 128), offsets_of(offsets), ACTIVATIONS[1])


def test_rows_outside_the_groups_are_not_read():
    gate_up, grad, row_weights = operands(300, 128)
    groups = offsets_of((10, 150, 290))
    results, values, _, _ = run(gate_up, grad, row_weights, groups, Activation())
    for rows in (slice(0, 10), slice(290, 300)):
        gate_up[rows], grad[rows], row_weights[rows] = math.nan, math.nan, math.nan
    again, values_again, _, _ = run(gate_up, grad, row_weights, groups, Activation())
    for got, want in zip((*again[0][:2], *again[1][:2]), (*results[0][:2], *results[1][:2]), strict=True):
        assert torch.equal(bits(got), bits(want))
    assert all(
        torch.equal(got.view(torch.int16), want.view(torch.int16))
        for got, want in zip(values_again, values, strict=True)
    )
