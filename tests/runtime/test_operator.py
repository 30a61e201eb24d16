"""Operators that take a NamedTuple: what it becomes in the schema, and back."""

from typing import Annotated, NamedTuple

import pytest
import torch
from torch import Tensor

from fp8moe.kernels.activation import FUNCTIONS, Activation
from fp8moe.quant.formats import FP8Tensor
from fp8moe.runtime.operator import Signature


class Inner(NamedTuple):
    weight: FP8Tensor
    activation: Activation


class Outer(NamedTuple):
    x: Tensor
    inner: Inner
    count: int
    dtype: torch.dtype
    flag: bool
    sizes: tuple[int, int] | None = None
    limit: int | None = 3
    known: Annotated[Tensor | None, "Tensor(a!)?"] = None


X, DATA, SCALE = (torch.zeros(size) for size in (1, 2, 3))
OPERANDS = Outer(X, Inner(FP8Tensor(DATA, SCALE), Activation(7.0)), 5, torch.float32, True, (1, 2), None, SCALE)


def test_schema():
    assert Signature(Outer).schema == (
        "Tensor x, Tensor weight, Tensor weight_scale, str activation, SymInt count, ScalarType dtype, bool flag, "
        "SymInt[]? sizes=None, SymInt? limit=3, Tensor(a!)? known=None"
    )
    assert Signature(Outer).complete("name -> Tensor") == f"name({Signature(Outer).schema}) -> Tensor"


def test_arguments_and_back():
    signature = Signature(Outer)
    arguments = signature.pack(OPERANDS)
    assert arguments == (X, DATA, SCALE, "silu limit=7.0", 5, torch.float32, True, (1, 2), None, SCALE)
    assert len(arguments) == len(signature.names)
    again = signature.unpack(*(list(value) if isinstance(value, tuple) else value for value in arguments))
    assert again == OPERANDS
    assert isinstance(again.inner.weight, FP8Tensor) and again.inner.activation.limit == 7.0


def test_fields_that_an_operator_does_not_take():
    signature = Signature(Outer, ("x", "inner", "count", "dtype", "flag"))
    assert signature.names == ("x", "weight", "weight_scale", "activation", "count", "dtype", "flag")
    again = signature.unpack(*signature.pack(OPERANDS))
    assert again == OPERANDS._replace(sizes=None, limit=3, known=None)


@pytest.mark.parametrize(
    "activation",
    [
        *(Activation(name=name, gated=gated) for name in FUNCTIONS for gated in (False, True)),
        *(Activation(limit, name=name) for limit in (7, 0.1, 1e-30, float("inf")) for name in FUNCTIONS),
        Activation(7.0, 1.702),
        Activation(1 / 3, -1e300, "swish"),
    ],
    ids=lambda activation: activation.key,
)
def test_the_key_of_an_activation(activation):
    assert Activation.from_key(activation.key) == activation
    assert Activation.from_key(activation.key) is Activation.from_key(activation.key)


@pytest.mark.parametrize(
    "key", ["", "selu", "silu limit", "silu limit=x", "silu limit=-1.0", "silu name=gelu", "silu "]
)
def test_a_text_that_is_no_key(key):
    with pytest.raises(ValueError, match="^activation: expected"):
        Activation.from_key(key)
