"""The part of an experts layer that one rank's experts compute: shares that add up to the layer, windows of rows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8moe.kernels.activation import Activation
from fp8moe.kernels.experts import sort_by_expert
from fp8moe.kernels.experts.operands import Layer, Norm, Shard, TokenOperands
from fp8moe.quant.formats import FP8Tensor
from fp8moe.quant.quantize import quantize_1x128
from tests.experts_cases import VARIANTS, in_order, inputs, make, part

SIZES = {"plain": (144, 96), "odd": (131, 77)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_shares_add_up_to_the_layer(variant, sizes, dtype):
    hidden, size = SIZES[sizes]
    layer = make(6, hidden, size, **VARIANTS[variant])
    x, index, weights, _ = inputs(40, 6, 3, hidden, dtype)
    row_dtype = torch.bfloat16 if dtype is torch.bfloat16 else torch.float32
    parts = [part(layer, x, index, weights, start, start + 2, row_dtype=row_dtype) for start in (0, 2, 4)]
    assert all(value.dtype == torch.float32 and value.shape == x.shape and value.is_contiguous() for value in parts)
    expected = layer(x, index, weights)
    # The order of float32 sums differs: few values round to the next one.
    total = in_order(parts).to(dtype)
    torch.testing.assert_close(total, expected, rtol=torch.finfo(dtype).eps, atol=1e-7)
    if dtype is not torch.float32:
        assert (total == expected).double().mean() >= 0.995
    # One rank with all experts sums as the layer does.
    whole = part(layer, x, index, weights, 0, 6, row_dtype=row_dtype)
    assert torch.equal(whole.to(dtype), expected)


@pytest.mark.parametrize("hidden", [144, 131])
@pytest.mark.parametrize("variant", ["plain", "gelu"])
def test_tokens_that_are_quantized_already(variant, hidden):
    layer = make(4, hidden, 96, **VARIANTS[variant])
    x, index, weights, _ = inputs(hidden=hidden)
    quantized = quantize_1x128(x)
    expected = part(layer, x, index, weights, 1, 3)
    for scale in (quantized.scale, quantized.scale.contiguous()):
        assert torch.equal(part(layer, (quantized.data, scale), index, weights, 1, 3), expected)


def test_token_without_an_expert_here_is_zero():
    layer = make()
    x, index, weights, _ = inputs()
    out = part(layer, x, index, weights, 2, 4)
    none = ((index < 2) | (index > 3)).all(1)
    assert none.any() and not out[none].any() and out[~none].any(1).all()
    x[none] = float("nan")
    assert torch.equal(part(layer, x, index, weights, 2, 4), out)


@settings(max_examples=15)
@given(
    tokens=st.integers(0, 15),
    top_k=st.integers(0, 4),
    num_rows=st.integers(1, 30),
    first_expert=st.integers(0, 3),
    count=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_passes_over_windows_of_rows_add_up(tokens, top_k, num_rows, first_expert, count, seed):
    layer = make(6, 144, 96)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, 144, generator=generator).bfloat16()
    index = torch.randint(-1, 8, (tokens, top_k), generator=generator)
    weights = torch.rand(tokens, top_k, generator=generator)
    arguments = (layer, x, index, weights, first_expert, first_expert + count)
    total = None
    for first_row in range(0, max(tokens * top_k, 1), num_rows):
        total = part(*arguments, first_row=first_row, num_rows=num_rows, partial=total)
    torch.testing.assert_close(total, part(*arguments), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("variant", ["plain", "gelu"])
@pytest.mark.parametrize("hidden", [144, 131])
def test_passes_of_which_some_tokens_have_sums(hidden, variant):
    layer = make(6, hidden, 96, **VARIANTS[variant])
    x, index, weights, _ = inputs(hidden=hidden)
    arguments = (layer, x, index, weights, 1, 4)
    total = known = None
    for first_row in (60, 30, 15):
        now = torch.zeros(40, dtype=torch.bool)
        options = {"first_row": first_row, "num_rows": 15 if first_row == 15 else 30}
        total = part(*arguments, **options, partial=total, partial_known=known, known=now)
        total[~now] = float("nan")
        known = now
    total = part(*arguments, num_rows=15, partial=total, partial_known=known)
    torch.testing.assert_close(total, part(*arguments), rtol=1e-5, atol=1e-6)


def test_wrong_known():
    layer = make()
    x, index, weights, _ = inputs()
    for wrong in (torch.ones(39, dtype=torch.bool), torch.ones(40)):
        with pytest.raises((TypeError, ValueError), match="^partial_known: "):
            part(layer, x, index, weights, 0, 2, partial=x.float(), partial_known=wrong)


@pytest.mark.parametrize("hidden", [144, 131])
def test_window_leaves_out_what_is_outside(hidden):
    layer = make(4, hidden, 96)
    x, index, weights, _ = inputs(hidden=hidden)
    rows = sort_by_expert(index, 3, first_expert=1).rows
    inside = (rows >= 10) & (rows < 25)
    before = torch.randn(40, hidden)
    got = part(layer, x, index, weights, 1, 4, first_row=10, num_rows=15, partial=before)
    expected = part(layer, x, torch.where(inside, index, -1), weights, 1, 4)
    assert torch.equal(got, before + expected) and not torch.equal(got, before)
    # Behind the last row there is nothing.
    assert torch.equal(part(layer, x, index, weights, 1, 4, first_row=80, num_rows=9, partial=before), before)


@pytest.mark.parametrize("shape", [(0, 2), (0, 0), (9, 0)])
def test_nothing_to_do(shape):
    layer = make()
    x, index, weights = torch.randn(shape[0], 144), torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
    before = torch.randn(shape[0], 144)
    assert not part(layer, x, index, weights, 0, 2).any()
    assert torch.equal(part(layer, x, index, weights, 0, 2, partial=before), before)


def test_memory_is_for_the_window(monkeypatch):
    """GEMM 2 writes no more rows than there is room for, and in row_dtype."""
    from fp8moe.kernels.experts import operator as steps

    found = []
    multiply = steps.multiply_groups
    monkeypatch.setattr(steps, "multiply_groups", lambda *a, **more: found.append(a[3]) or multiply(*a, **more))
    layer = make()
    x, index, weights, _ = inputs()
    for row_dtype in (torch.bfloat16, torch.float32):
        part(layer, x, index, weights, 0, 2, num_rows=50, row_dtype=row_dtype)
        part(layer, x, index, weights, 0, 2, num_rows=1000, row_dtype=row_dtype)
        assert [(y.shape[0], y.dtype) for y in found] == [(50, row_dtype), (80, row_dtype)]
        found.clear()


def test_tiles_are_chosen_for_the_rows_of_a_share(monkeypatch):
    """An expert is expected to have T * K / E rows, E on all ranks, and K is summed as with all of them."""
    from fp8moe.kernels.experts import operator as steps

    found = []
    swiglu = steps.grouped_gemm_swiglu
    monkeypatch.setattr(
        steps, "grouped_gemm_swiglu", lambda *a, **options: found.append(options["whole"]) or swiglu(*a, **options)
    )
    layer = make()
    x, index, weights, _ = inputs(40, top_k=2)
    part(layer, x, index, weights, 0, 2)
    part(layer, x, index, weights, 0, 2, num_experts=16)
    assert found == [(80, 4), (80, 16)]


def test_launches_are_found_by_every_operand():
    tensors = (torch.empty(size) for size in range(14))
    x, index, weights, residual, scale, known, groups, rows, norm_weight, other, *parts = tensors
    layer = Layer(FP8Tensor(*parts[:2]), FP8Tensor(*parts[2:]), Activation())
    norm = Norm(norm_weight, 1.0)
    operands = TokenOperands(x, index, weights, layer, 5, residual, groups, rows, scale, Shard(), known, False, norm)
    layers = [layer._replace(**{name: (part, other)}) for name, (part, _) in zip(("up", "down"), layer, strict=False)]
    layers += [layer._replace(**{name: (other, part)}) for name, (_, part) in zip(("up", "down"), layer, strict=False)]
    changes = {name: [other] for name in TokenOperands._fields} | {"capacity": [None], "shard": [Shard(1)]}
    changes |= {
        "wants_known": [True],
        "norm": [None, Norm(other, 1.0), Norm(norm_weight), norm._replace(norm_quantized=True)],
    }
    changes["layer"] = [*layers, layer._replace(activation=Activation(7.0))]
    for name, values in changes.items():
        assert all(operands._replace(**{name: value}).layouts() != operands.layouts() for value in values), name


def test_errors():
    layer = make()
    x, index, weights, _ = inputs()
    quantized = quantize_1x128(x)

    def check(exception, message, **changed):
        arguments = {"x": x, "index": index, "weights": weights, "start": 2, "end": 4} | changed
        with pytest.raises(exception, match=message):
            part(layer, **arguments)

    check(TypeError, "^x: expected bfloat16, float16 or float32, got torch.float64", x=x.double())
    check(TypeError, r"^x: expected an FP8Tensor or a \(data, scale\) pair, got", x=[1.0])
    check(TypeError, "^x.data: expected float8_e4m3fn, got torch.bfloat16", x=(x, quantized.scale))
    check(ValueError, r"^x.scale: expected shape \(40, 2\)", x=(quantized.data, quantized.scale[:, :1]))
    check(ValueError, r"^x: expected shape \(T, 144\) to match gate_up_proj", x=x[:, :128])
    check(ValueError, r"^top_k_index: expected shape \(40, top_k\), got \(39, 2\)", index=index[1:])
    check(ValueError, r"^top_k_weights: expected shape \(40, 2\) like top_k_index", weights=weights[:, :1])
    check(TypeError, "^row_dtype: expected bfloat16 or float32, got torch.float16", row_dtype=torch.float16)
    check(ValueError, "^first_expert: expected that the 2 experts here are among 3 from 0 on, got 2", num_experts=3)
    check(ValueError, "^first_row: expected 0 to", first_row=-1)
    check(ValueError, "^num_rows: expected 0 to", num_rows=-1)
    check(TypeError, "^partial: expected float32, got torch.bfloat16", partial=x)
    check(ValueError, r"^partial: expected shape \(40, 144\)", partial=torch.zeros(39, 144))


def test_there_is_no_backward():
    layer = make()
    x, index, weights, _ = inputs()
    out = part(layer, x.requires_grad_(), index, weights, 0, 2)
    with pytest.raises(RuntimeError, match="experts_partial has no backward"):
        out.sum().backward()
