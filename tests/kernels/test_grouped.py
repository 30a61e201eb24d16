"""The grouped GEMMs on the reference backend: semantics, groups, layouts, operators. Bad input: test_grouped_checks."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from fp8moe.kernels.activation import FUNCTIONS, Activation
from fp8moe.kernels.gemm import api, launch
from fp8moe.kernels.gemm import checks as grouped_checks
from fp8moe.kernels.gemm.api import (
    gemm,
    grouped_gemm,
    grouped_gemm_masked,
    grouped_gemm_swiglu,
    grouped_gemm_swiglu_keeping,
    grouped_rows,
)
from fp8moe.kernels.gemm.epilogue import PlainStore, SwigluQuantize
from fp8moe.kernels.gemm.tiles import Grouping
from fp8moe.quant.formats import FP8Tensor, empty_mn_major
from fp8moe.quant.quantize import dequantize, quantize_1x128
from fp8moe.runtime import operator
from fp8moe.runtime.checks import aligned
from tests.errors import error_in_its_dtype, relative_error
from tests.gemm_cases import activations, check_groups, gate_up_weights, int32, offsets, random_bytes, weights

TOLERANCE = {torch.float32: 3e-4, torch.bfloat16: 1.5e-3}


# Contiguous groups.


@given(
    sizes=st.lists(st.one_of(st.sampled_from([0, 1]), st.integers(0, 40)), min_size=1, max_size=6),
    start=st.integers(0, 5),
    rest=st.integers(0, 5),
    n=st.integers(1, 24).map(lambda i: 8 * i),
    k=st.integers(1, 24).map(lambda i: 16 * i),
    dtype=st.sampled_from(list(TOLERANCE)),
)
def test_any_groups(sizes, start, rest, n, k, dtype):
    m = start + sum(sizes) + rest
    a, b = activations(m, k), weights(len(sizes), n, k)
    group_offsets = offsets(sizes, start)
    out = torch.full((m, n), float("nan"), dtype=dtype)
    assert grouped_gemm(a, b, group_offsets, out=out) is out
    check_groups(out, a, b, [slice(*pair) for pair in zip(group_offsets, group_offsets[1:], strict=False)])


@pytest.mark.parametrize("rank", [16, 48])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_a_product_of_low_rank_is_added(dtype, rank):
    a, b = activations(20, 144), weights(3, 24, 144)
    ranks, factors = torch.randn(20, rank).bfloat16(), torch.randn(3, 24, rank).bfloat16()
    out = grouped_rows(a, b, int32([2, 9, 9, 17]), dtype, others_zero=True, low_rank=(ranks, factors))
    a, b = dequantize(a, dtype=torch.float64), dequantize(b, dtype=torch.float64)
    for expert, rows in enumerate((slice(2, 9), slice(9, 9), slice(9, 17))):
        expected = a[rows] @ b[expert].T + ranks[rows].double() @ factors[expert].double().T
        assert error_in_its_dtype(out[rows], expected) < TOLERANCE[dtype]
    assert not out[:2].any() and not out[17:].any()


@pytest.mark.parametrize(
    ("ranks", "factors", "error", "match"),
    [
        ((20, 24), (3, 24, 24), ValueError, "ranks: expected a multiple of 16"),
        ((19, 16), (3, 24, 16), ValueError, "ranks: expected shape"),
        ((20, 16), (3, 32, 16), ValueError, "factors: expected shape"),
        ((20, 16), None, ValueError, "factors: expected a tensor"),
        (None, (3, 24, 16), ValueError, "ranks: expected a tensor"),
    ],
)
def test_products_of_low_rank_that_do_not_fit(ranks, factors, error, match):
    low_rank = [None if shape is None else torch.zeros(shape, dtype=torch.bfloat16) for shape in (ranks, factors)]
    with pytest.raises(error, match=match):
        grouped_rows(activations(20, 144), weights(3, 24, 144), int32([2, 9, 9, 17]), torch.bfloat16, low_rank=low_rank)


def test_result_without_out():
    a, b = activations(9, 144), weights(3, 24, 144)
    out = grouped_gemm(a, b, int32([0, 4, 4, 9]))
    assert out.shape == (9, 24) and out.dtype == torch.bfloat16 and out.is_contiguous()
    check_groups(out, a, b, [slice(0, 4), slice(4, 4), slice(4, 9)])


def test_one_group_is_the_dense_gemm():
    a, b = activations(33, 272), weights(1, 136, 272)
    assert torch.equal(grouped_gemm(a, b, int32([0, 33])), gemm(a, FP8Tensor(b.data[0], b.scale[0])))


@pytest.mark.parametrize(
    ("group_offsets", "groups"),
    [
        ((-5, 30, 80), [(0, 30), (30, 80)]),
        ((-90, -50, 80), [(0, 0), (0, 80)]),
        ((0, 40, 9999), [(0, 40), (40, 100)]),
        ((0, 9999, 9999), [(0, 100), (100, 100)]),
        ((50, 20, 40), [(50, 50), (20, 40)]),
        ((0, 60, 20), [(0, 60), (60, 60)]),
        ((-(2**31), 2**31 - 1, 30), [(0, 100), (100, 100)]),
        ((2**31 - 1, -(2**31), 30), [(100, 100), (0, 30)]),
    ],
)
def test_offsets_are_clamped(group_offsets, groups, device):
    a, b = activations(100, 144, spread=4, device=device), weights(2, 24, 144, device=device)
    parent = torch.full((300, 24), float("nan"), device=device)
    for rows in (parent, parent.bfloat16()):
        out = rows[100:200]
        grouped_gemm(a, b, int32(group_offsets, device), out=out)
        check_groups(out, a, b, [slice(*group) for group in groups])
        assert rows[:100].isnan().all() and rows[200:].isnan().all()


@pytest.mark.parametrize(("experts", "m", "n", "k"), [(2, 0, 24, 144), (0, 5, 24, 144), (2, 5, 0, 144), (2, 5, 24, 0)])
def test_empty(experts, m, n, k, device):
    blocks = -(-k // 128)
    a = (random_bytes(m, k, device=device), torch.ones(m, blocks, device=device))
    b = (random_bytes(experts, n, k, device=device), torch.ones(experts, -(-n // 128), blocks, device=device))
    group_offsets = offsets([m] + [0] * (experts - 1) if experts else [], device=device)
    assert grouped_gemm(a, b, group_offsets).shape == (m, n)
    out = grouped_gemm(a, b, group_offsets, out=torch.full((m, n), float("nan"), device=device))
    assert out.shape == (m, n)
    assert out.isnan().all() if experts == 0 else not out.any()


# The masked layout.


@given(
    max_m=st.integers(1, 20),
    masked_m=st.lists(st.integers(-3, 30), min_size=1, max_size=5),
    dtype=st.sampled_from(list(TOLERANCE)),
)
def test_any_masks(max_m, masked_m, dtype):
    experts = len(masked_m)
    a, b = activations(experts, max_m, 144), weights(experts, 24, 144)
    out = torch.full((experts, max_m, 24), float("nan"), dtype=dtype)
    assert grouped_gemm_masked(a, b, int32(masked_m), expected_m=max_m, out=out) is out
    rows = [slice(e * max_m, e * max_m + min(max(size, 0), max_m)) for e, size in enumerate(masked_m)]
    flat = FP8Tensor(a.data.view(-1, 144), a.scale.reshape(-1, 2))
    check_groups(out.view(-1, 24), flat, b, rows)


def test_masked_result_without_out():
    a, b = activations(2, 5, 144), weights(2, 24, 144)
    out = grouped_gemm_masked(a, b, int32([5, 2]))
    assert out.shape == (2, 5, 24) and out.dtype == torch.bfloat16
    contiguous = FP8Tensor(a.data.view(10, 144), a.scale.reshape(10, 2))
    expected = grouped_gemm(contiguous, b, int32([0, 5, 7])).view(2, 5, 24)
    assert torch.equal(out[0], expected[0]) and torch.equal(out[1, :2], expected[1, :2])


def test_masked_out_in_a_larger_tensor():
    a, b = activations(2, 4, 144), weights(2, 24, 144)
    parent = torch.full((8, 64), 7.0)
    out = parent.view(2, 4, 64)[..., 16:40]
    grouped_gemm_masked(a, b, int32([4, 3]), out=out)
    expected = grouped_gemm_masked(a, b, int32([4, 3]))
    assert torch.equal(out[0].bfloat16(), expected[0]) and torch.equal(out[1, :3].bfloat16(), expected[1, :3])
    out[0], out[1, :3] = 7, 7
    assert (parent == 7).all()


@pytest.mark.parametrize("shape", [(0, 5), (2, 0)])
def test_masked_empty(shape):
    a = (torch.empty(*shape, 144, dtype=torch.float8_e4m3fn), torch.empty(*shape, 2))
    assert grouped_gemm_masked(a, weights(shape[0], 24, 144), int32([3] * shape[0])).shape == (*shape, 24)


# GEMM 1 of an experts layer.


@pytest.mark.parametrize(
    "activation",
    [Activation(), Activation(limit=2.0), Activation(limit=2.0, alpha=1.702)],
    ids=["plain", "limit", "alpha"],
)
@pytest.mark.parametrize("size", [16, 96, 128, 208])
def test_swiglu(size, activation):
    a = activations(12, 144)
    gate_up = gate_up_weights(3, size, 144)
    halves = FP8Tensor(gate_up.data.unflatten(1, (2, size)), gate_up.scale.unflatten(1, (2, -1)))
    exact_weights = dequantize(halves, dtype=torch.float64)
    a.scale.mul_(0.02)
    out = grouped_gemm_swiglu(a, gate_up, int32([1, 5, 5, 11]), activation=activation)
    assert out.data.shape == (12, size) and out.scale.shape == (12, -(-size // 128)) and out.scale.stride() == (1, 12)
    x = dequantize(a, dtype=torch.float64)
    for expert, rows in ((0, slice(1, 5)), (2, slice(5, 11))):
        gate, up = (x[rows] @ w.T for w in exact_weights[expert])
        if activation.limit is not None:
            gate, up = gate.clamp(max=2), up.clamp(-2, 2)
        expected = gate * torch.sigmoid(1.702 * gate) * (up + 1) if activation.alpha else F.silu(gate) * up
        # It is what the quantizer makes of the exact result, but for values on the edge of two codes.
        exact = quantize_1x128(expected.float())
        assert torch.allclose(out.scale[rows], exact.scale, rtol=1e-4)
        codes = out.data[rows].view(torch.uint8).int() - exact.data.view(torch.uint8).int()
        assert codes.abs().max() <= 1 and (codes != 0).float().mean() < 0.01


@pytest.mark.parametrize("activation", [Activation(), Activation(limit=2.0, alpha=1.702)], ids=["plain", "alpha"])
@pytest.mark.parametrize("size", [16, 128, 208])
def test_swiglu_keeping_gate_and_up(size, activation):
    """What a product of both projections, rounded, and the quantizer of its SwiGLU, rounded, make."""
    a, gate_up = activations(12, 144), gate_up_weights(3, size, 144)
    a.scale.mul_(0.02)
    out, projected = grouped_gemm_swiglu_keeping(a, gate_up, int32([1, 5, 5, 11]), activation=activation)
    assert projected.dtype == torch.bfloat16 and projected.shape == (12, 2 * size)
    weights = dequantize(FP8Tensor(gate_up.data.unflatten(1, (2, size)), gate_up.scale.unflatten(1, (2, -1))))
    for expert, rows in ((0, slice(1, 5)), (2, slice(5, 11))):
        exact = dequantize(a)[rows] @ weights[expert].flatten(0, 1).T
        assert relative_error(projected[rows], exact) <= 4e-3
    h = quantize_1x128(activation(projected[1:11].float()).bfloat16())
    assert torch.equal(out.data[1:11].view(torch.uint8), h.data.view(torch.uint8))
    assert torch.equal(out.scale[1:11], h.scale)


def test_swiglu_of_the_masked_layout():
    a = activations(8, 144)
    gate_up = gate_up_weights(2, 48, 144)
    masked = grouped_gemm_swiglu(a, gate_up, int32([3, 9]), activation=Activation(), max_m=4, expected_m=2)
    contiguous = grouped_gemm_swiglu(a, gate_up, int32([0, 4, 8]), activation=Activation())
    for rows in (slice(0, 3), slice(4, 8)):
        assert torch.equal(masked.data[rows].view(torch.uint8), contiguous.data[rows].view(torch.uint8))
        assert torch.equal(masked.scale[rows], contiguous.scale[rows])


@pytest.mark.parametrize("activation", [Activation(), Activation(limit=2.0), Activation(limit=2.0, alpha=1.702)])
def test_bad_value_passes_the_activation(activation):
    x = torch.randn(4, 144)
    x[2, 0] = float("nan")
    out = grouped_gemm_swiglu(quantize_1x128(x), gate_up_weights(1, 48, 144), int32([0, 4]), activation=activation)
    finite = dequantize(out).isfinite()
    assert not finite[2].any() and finite[[0, 1, 3]].all()


def test_activations_without_a_gate():
    x = torch.linspace(-4, 4, 33)
    for name, function in FUNCTIONS.items():
        assert torch.equal(Activation(name=name, gated=False)(x), function(x))
        gated = Activation(name=name)(torch.cat([x, x + 1]))
        assert torch.equal(gated, function(x) * (x + 1))
    assert torch.equal(FUNCTIONS["relu2"](x), x.clamp(min=0) ** 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(name="swiglu"), r"^activation: expected one of silu, .* got 'swiglu'"),
        (dict(limit=0.0), r"^swiglu_limit: expected a positive limit of gated experts, got 0.0"),
        (dict(limit=7.0, gated=False), r"^swiglu_limit: expected a positive limit of gated experts"),
        (dict(alpha=1.702), r"^swiglu_alpha: expected with .* a swiglu_limit, got 1.702"),
        (dict(alpha=1.702, limit=7.0, name="gelu"), r"^swiglu_alpha: expected with .* activation='silu'"),
    ],
)
def test_activations_that_mean_nothing(arguments, message):
    with pytest.raises(ValueError, match=message):
        Activation(**arguments)


def test_swiglu_takes_no_other_activation():
    with pytest.raises(ValueError, match=r"^activation: expected a gated silu, got .*gelu"):
        grouped_gemm_swiglu(None, None, None, activation=Activation(name="gelu"))


# What the CUDA kernels are given.


def test_mn_major_scales_of_the_masked_layout_are_not_copied():
    a = activations(3, 5, 272)
    data, scale = grouped_checks.activations(*a)
    assert data.shape == (15, 272) and data.data_ptr() == a.data.data_ptr()
    assert scale.shape == (15, 3) and scale.stride() == (1, 16) and scale.data_ptr() == a.scale.data_ptr()
    each = empty_mn_major((3, 5, 3), device="cpu").copy_(a.scale)
    for other in (a.scale.contiguous(), each):
        copy = grouped_checks.activations(a.data, other)[1]
        assert torch.equal(copy, scale) and copy.stride() == (1, 16)


@pytest.mark.parametrize("max_m", [None, 11])
def test_what_the_cuda_kernels_are_given(monkeypatch, max_m):
    given = []

    monkeypatch.setattr(launch, "find", lambda *arguments: None)
    monkeypatch.setattr(launch, "grouped", lambda index, operands, epilogue, grouping, like=None: (epilogue, grouping))
    monkeypatch.setattr(launch, "run", lambda *arguments: given.append(arguments))
    monkeypatch.setattr(api, "use_cuda", lambda *tensors: True)
    a, b = activations(22, 272), weights(2, 32, 272)
    groups = int32([0, 20, 22]) if max_m is None else int32([11, 3])
    odd_groups = groups.repeat_interleave(2)[::2]
    odd_b = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in b]
    odd_a = (a.data.T.contiguous().T, a.scale.contiguous())
    if max_m is None:
        grouped_gemm(a, b, groups)
        grouped_gemm(odd_a, odd_b, odd_groups)
    else:
        grouped_gemm_masked([t.unflatten(0, (2, 11)) for t in a], b, groups, expected_m=5)
        grouped_gemm_masked([t.unflatten(0, (2, 11)) for t in odd_a], odd_b, odd_groups, expected_m=5)
    activation = Activation(limit=7.0)
    gate_up = gate_up_weights(2, 16, 272)
    monkeypatch.setattr(operator, "use_cuda", lambda *tensors: True)
    grouped_gemm_swiglu(a, gate_up, groups, activation=activation, max_m=max_m, expected_m=5, whole=(44, 4))
    *plain, swiglu = given
    for (epilogue, grouping), operands, out, *more in plain:
        rows = a if max_m is None else [t.unflatten(0, (2, 11)) for t in a]
        for value, like in zip((*operands[:4], operands.groups), (*rows, *b, groups), strict=True):
            assert torch.equal(value.float(), like.float()) and value.stride() == like.stride()
        assert out.shape == (22, 32) and out.stride() == (32, 1) and more == []
        assert grouping == Grouping(None if max_m is None else 5, max_m) and epilogue == PlainStore(torch.bfloat16)
    _, first, *_ = plain[0]
    pairs = zip((*first[:4], first.groups), (*a, *b, groups), strict=True)
    assert all(value.data_ptr() == like.data_ptr() for value, like in pairs)
    (epilogue, grouping), _, data, _, pitch, *kept = swiglu
    assert kept == [0, 0]
    assert grouping == Grouping(5, max_m, (44, 4)) and epilogue == SwigluQuantize(activation)
    assert data.shape == (22, 16) and pitch == 24


def test_weights_are_copied_only_where_tma_cannot_load_them():
    data = weights(2, 24, 144).data
    assert aligned(data) is data
    memory = torch.zeros(data.nbytes + 8, dtype=torch.uint8)[8:].view(data.dtype).view(data.shape).copy_(data)
    for bad in (data.transpose(1, 2), data[:, :8], memory):
        copy = aligned(bad)
        assert copy.is_contiguous() and copy.data_ptr() % 16 == 0
        assert torch.equal(copy.view(torch.uint8), bad.contiguous().view(torch.uint8))


# Operators.


def test_backward_says_that_there_is_none():
    a, b = activations(4, 144), weights(2, 24, 144)
    scale = a.scale.clone().requires_grad_()
    out = grouped_gemm((a.data, scale), b, int32([0, 2, 4]))
    with pytest.raises(RuntimeError, match=r"fp8moe\.grouped_gemm has no backward"):
        out.sum().backward()
    masked = [t.unflatten(0, (2, 2)) for t in (a.data, scale)]
    with pytest.raises(RuntimeError, match=r"fp8moe\.grouped_gemm_masked has no backward"):
        grouped_gemm_masked(masked, b, int32([2, 2])).sum().backward()
    with pytest.raises(RuntimeError, match="out= has no automatic differentiation"):
        grouped_gemm((a.data, scale), b, int32([0, 2, 4]), out=torch.empty(4, 24))
    with torch.no_grad():
        assert not grouped_gemm((a.data, scale), b, int32([0, 2, 4])).requires_grad
