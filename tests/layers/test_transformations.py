"""torch.func and forward-mode differentiation: what has no derivative there says so, and vmap works."""

import pytest
import torch

from fp8moe import (
    FP8Linear,
    GroupedExperts,
    gemm,
    grouped_gemm,
    grouped_gemm_k,
    grouped_gemm_masked,
    mqa_logits,
    quantize_1x128,
    quantize_128x1,
)
from fp8moe.kernels.experts.combine import combine
from fp8moe.kernels.linear.forward import apply as linear
from tests.gemm_cases import activations, int32, weights
from tests.mqa_cases import random_fp8

A, B = activations(4, 128), weights(2, 128, 128)
W = B.data[0], B.scale[0]
K = quantize_128x1(torch.randn(128, 8))
OFFSETS = int32([0, 2, 4])
ROUTING = torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1)
SIZES = {"num_experts": 2, "hidden_size": 128, "intermediate_size": 128}
Q, KEYS = random_fp8(4, 32, 32), (random_fp8(6, 32), torch.ones(6))
RANGES = int32([0] * 4), int32([6] * 4)
FROZEN, TRAINED = FP8Linear(128, 128), FP8Linear(128, 128, master_dtype=torch.float32)
FROZEN_EXPERTS, TRAINED_EXPERTS = GroupedExperts(**SIZES), GroupedExperts(**SIZES, master_dtype=torch.float32)
X = torch.randn(4, 128)

# A function of one tensor that a derivative could be asked for, and the tensor.
OPERATIONS = {
    "gemm": (lambda scale: gemm((A.data, scale), W), A.scale),
    "grouped_gemm": (lambda scale: grouped_gemm((A.data, scale), B, OFFSETS), A.scale),
    "grouped_gemm_masked": (
        lambda scale: grouped_gemm_masked((A.data.unflatten(0, (2, 2)), scale), B, int32([2, 2])),
        A.scale.unflatten(0, (2, 2)),
    ),
    "grouped_gemm_k": (lambda scale: grouped_gemm_k((K.data, scale), K, int32([0, 128])), K.scale),
    "mqa_logits": (lambda weights: mqa_logits(Q, KEYS, weights, *RANGES), torch.randn(4, 32)),
    "combine": (lambda y: combine(y, int32([[0], [1]]), torch.ones(2, 1), torch.float32), torch.randn(4, 8)),
    "FP8Linear": (FROZEN, X),
    "FP8Linear of the kernels": (lambda x: linear(x, *W), X),
    "FP8Linear with a master": (TRAINED, X),
    "GroupedExperts": (lambda x: FROZEN_EXPERTS(x, *ROUTING), X),
    "GroupedExperts with masters": (lambda x: TRAINED_EXPERTS(x, *ROUTING), X),
}
WITH_OUT = {
    "gemm": (lambda scale: gemm((A.data, scale), W, out=torch.empty(4, 128)), A.scale),
    "grouped_gemm": (lambda scale: grouped_gemm((A.data, scale), B, OFFSETS, out=torch.empty(4, 128)), A.scale),
    "grouped_gemm_k": (
        lambda scale: grouped_gemm_k((K.data, scale), K, int32([0, 128]), out=torch.empty(1, 8, 8)),
        K.scale,
    ),
}


def summed(call):
    return lambda value: call(value).float().sum()


def dual(call, value):
    with torch.autograd.forward_ad.dual_level():
        call(torch.autograd.forward_ad.make_dual(value, value))


REVERSE = {
    "vjp": torch.func.vjp,
    "grad": lambda call, value: torch.func.grad(summed(call))(value),
    "jacrev": lambda call, value: torch.func.jacrev(summed(call))(value),
    "vmap of grad": lambda call, value: torch.vmap(torch.func.grad(summed(call)))(value[None]),
    "grad of vmap": lambda call, value: torch.func.grad(summed(torch.vmap(call)))(value[None]),
}
FORWARD = {
    "jvp": lambda call, value: torch.func.jvp(call, (value,), (value,)),
    "hessian": lambda call, value: torch.func.hessian(summed(call))(value),
    "dual": dual,
}


@pytest.mark.parametrize("transform", [*REVERSE, *FORWARD])
@pytest.mark.parametrize("name", [*OPERATIONS, *(f"{name}, out" for name in WITH_OUT)])
def test_derivatives_are_refused(name, transform):
    operation = name.partition(",")[0]
    call, value = WITH_OUT[operation] if operation != name else OPERATIONS[name]
    kind = "no derivative under torch.func" if transform in REVERSE else "no forward-mode derivative"
    with pytest.raises(
        RuntimeError, match=rf"^fp8moe\.\S*{operation.split()[0]} has {kind} \([\w ,.]+\); use backward$"
    ):
        (REVERSE | FORWARD)[transform](call, value)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", OPERATIONS)
def test_vmap(name):
    call, value = OPERATIONS[name]
    assert torch.equal(torch.vmap(call)(torch.stack([value, 2 * value])), torch.stack([call(value), call(2 * value)]))


@pytest.mark.parametrize("name", WITH_OUT)
def test_vmap_cannot_write_to_out(name):
    call, value = WITH_OUT[name]
    for transform in (torch.vmap, torch.func.functionalize):
        with pytest.raises(
            RuntimeError, match=rf"^fp8moe\.{name}: out= does not work under torch\.func or vmap; call it"
        ):
            transform(call)(value[None] if transform is torch.vmap else value)


def test_vmap_over_groups_cannot_write_to_out():
    masked = tuple(value.unflatten(0, (2, 2)) for value in A)
    for name, call, groups in (
        ("grouped_gemm", lambda offsets: grouped_gemm(A, B, offsets, out=torch.empty(4, 128)), OFFSETS),
        (
            "grouped_gemm_masked",
            lambda sizes: grouped_gemm_masked(masked, B, sizes, out=torch.empty(2, 2, 128)),
            int32([2, 2]),
        ),
    ):
        with pytest.raises(RuntimeError, match=rf"^fp8moe\.{name}: out= does not work under torch\.func or vmap; call"):
            torch.vmap(call)(groups[None])


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", [name for name in OPERATIONS if name[0].isupper()] + ["quantize"])
def test_gradients_through_vmap(name):
    layer = FP8Linear(128, 128, bias=False)
    operations = OPERATIONS | {"FP8Linear": (layer, X), "quantize": (lambda x: quantize_1x128(x).scale * x[:, :1], X)}
    call, value = operations[name]
    one, other = (torch.stack([value, 2 * value]).requires_grad_() for _ in range(2))
    torch.vmap(call)(one).sum().backward()
    torch.stack([call(row) for row in other]).sum().backward()
    assert other.grad.any() and torch.equal(one.grad, other.grad)


def test_no_gradients_through_vmap():
    scale = A.scale.clone().requires_grad_()
    with pytest.raises(
        RuntimeError, match=r"^fp8moe\.gemm has no gradients under torch\.func or vmap; its arguments must"
    ):
        torch.vmap(lambda scale: gemm((A.data, scale), W))(scale[None])


@pytest.mark.parametrize("name", WITH_OUT)
def test_a_scale_that_requires_a_gradient_and_out(name):
    call, scale = WITH_OUT[name]
    with pytest.raises(RuntimeError, match=rf"^fp8moe\.{name}: out= has no .* but a\.scale requires a gradient$"):
        call(scale.clone().requires_grad_())
    with torch.no_grad():
        assert not call(scale.clone().requires_grad_()).requires_grad
