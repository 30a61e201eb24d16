"""Every operator keeps every contract, on the reference backend; and operators that break one are found."""

import importlib
import itertools
import pkgutil
from collections.abc import Callable

import pytest
import torch
from torch.testing._internal.optests.generate_tests import OpCheckError

import fp8moe
from tests.contracts import CONTRACTS
from tests.operators import BAD_ROW, CASES, NOT_OPERATIONS, Case, overload

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    "contract,name",
    [
        (contract, name)
        for contract, (name, case) in itertools.product(CONTRACTS, CASES.items())
        if contract not in case.exempt and (contract != "bad values" or case.bad)
    ],
)
def test_contract(contract, name):
    CONTRACTS[contract](overload(name), CASES[name], "cpu")


def test_every_operator_is_in_the_table():
    for module in pkgutil.walk_packages(fp8moe.__path__, "fp8moe."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    names = {schema.name for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("fp8moe::")}
    assert names == {f"fp8moe::{name.partition(',')[0]}" for name in (*CASES, *NOT_OPERATIONS)}


def test_bad_values_of_every_operator():
    said = {name.partition(",")[0] for name, case in CASES.items() if case.bad or "bad values" in case.exempt}
    assert said == {name.partition(",")[0] for name in CASES}


@pytest.mark.parametrize(
    "contract,name", [(contract, name) for name, case in CASES.items() for contract in case.exempt]
)
def test_an_exemption_is_needed(contract, name):
    with pytest.raises((Exception, pytest.fail.Exception)):  # noqa: B017  whatever it is
        CONTRACTS[contract](overload(name), CASES[name], "cpu")


# ---- operators that are broken on purpose ----

broken = torch.library.Library("broken", "FRAGMENT")
numbers = itertools.count()


def checked(x: torch.Tensor) -> None:
    if x.dtype != torch.float32:
        raise TypeError(f"x: expected float32, got {x.dtype}")
    if x.dim() != 2:
        raise ValueError(f"x: expected shape (M, K), got {tuple(x.shape)}")


def doubled(x: torch.Tensor) -> torch.Tensor:
    checked(x)
    return x.contiguous() * 2


def doubled_fake(x: torch.Tensor) -> torch.Tensor:
    checked(x)
    return x.new_empty(x.shape)


def define(run: Callable, fake: Callable = doubled_fake, schema: str = "(Tensor x) -> Tensor"):
    name = f"operator_{next(numbers)}"
    broken.define(name + schema)
    broken.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"broken::{name}", fake, lib=broken)
    return getattr(torch.ops.broken, name).default


DOUBLED = Case(
    lambda draw: (draw.normal(draw.rows, 9, dtype=torch.float32),), bad={"x": ((BAD_ROW, 3), lambda a: [(BAD_ROW, 3)])}
)
OUT = "(Tensor x, Tensor(a!) out) -> ()"
DOUBLED_OUT = Case(lambda draw: 2 * (draw.normal(draw.rows, 9, dtype=torch.float32),))


def _writes_past(x, out):
    out.as_strided((out.numel() + 1,), (1,)).fill_(1.0)


def _writes_operand(x):
    result = doubled(x)
    x.zero_()
    return result


def _leaks_memory(x):
    result = torch.empty(x.shape)
    result[1:] = doubled(x)[1:]
    return result


def _reads_memory_as_if_contiguous(x):
    return doubled(x.as_strided(x.shape, (x.shape[1], 1)))


def _spreads(x):
    return doubled(x) + 0 * x.sum()


def _loses_nan(x):
    return doubled(x).nan_to_num()


def _read_back(x):
    return doubled_fake(x) if x.sum().item() else x


def _writes_before_it_checks(x, out):
    out.zero_()
    checked(x)
    out.copy_(doubled(x))


def _late_fake(x, out):
    checked(x)


BROKEN = {
    "a fake with other strides": ("fakes", lambda: define(doubled, lambda x: x.new_empty(x.shape[::-1]).t())),
    "a fake of another dtype": ("opcheck", lambda: define(doubled, lambda x: x.new_empty(x.shape).double())),
    "a fake that reads back": ("compile", lambda: define(doubled, _read_back)),
    "a fake of fixed sizes": ("fakes", lambda: define(doubled, lambda x: x.new_empty(7, 9))),
    "no fake for export": ("export", lambda: define(doubled, _read_back)),
    "writes past its result": ("written memory", lambda: define(_writes_past, _late_fake, OUT)),
    "writes an operand": ("what the schema says", lambda: define(_writes_operand)),
    "returns an operand": ("what the schema says", lambda: define(lambda x: x)),
    "other bits again": ("repeats", lambda: define(lambda x: doubled(x) + next(numbers))),
    "uninitialized memory": ("repeats", lambda: define(_leaks_memory)),
    "takes strides for granted": ("layouts", lambda: define(_reads_memory_as_if_contiguous)),
    "no rows are something": ("nothing to do", lambda: define(lambda x: doubled(x) if len(x) else x.new_ones(1, 9))),
    "NaN in all rows": ("bad values", lambda: define(_spreads)),
    "NaN is lost": ("bad values", lambda: define(_loses_nan)),
    "any dtype": ("wrong operands", lambda: define(lambda x: x * 2)),
    "any rank": ("ranks are refused", lambda: define(lambda x: x * 2)),
    "writes before it checks": ("wrong operands", lambda: define(_writes_before_it_checks, _late_fake, OUT)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_operator_is_found(name):
    contract, made = BROKEN[name]
    op = made()
    case = DOUBLED_OUT if len(op._schema.arguments) == 2 else DOUBLED
    with pytest.raises((AssertionError, RuntimeError, OpCheckError, pytest.fail.Exception)):
        CONTRACTS[contract](op, case, "cpu")


@pytest.mark.parametrize("contract", CONTRACTS)
def test_a_sound_operator_passes(contract):
    CONTRACTS[contract](define(doubled), DOUBLED, "cpu")


def test_every_contract_finds_something():
    assert {contract for contract, _ in BROKEN.values()} == set(CONTRACTS)
