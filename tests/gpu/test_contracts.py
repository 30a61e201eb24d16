"""Every operator keeps every contract, on the CUDA backend, in CUDA graphs, and on other streams."""

import itertools

import pytest
import torch

from tests.contracts import (
    CONTRACTS,
    Call,
    assert_same,
    bad_values_stay_where_they_belong,
    graph_replays_with_other_operands,
    repeats_have_equal_bits,
    streams_do_not_meet,
)
from tests.kernels.test_contracts import DOUBLED, define, doubled, doubled_fake
from tests.operators import BAD_ROW, overload
from tests.operators import CASES as ALL

pytestmark = pytest.mark.gpu

# The CUDA backend refuses weights in four bits.
CASES = ALL
LARGE = [(name, rows) for name, case in CASES.items() for rows in case.rows]


@pytest.mark.parametrize(
    "contract,name",
    [
        (contract, name)
        for contract, (name, case) in itertools.product(CONTRACTS, CASES.items())
        if not {contract, f"{contract}, cuda"} & set(case.exempt) and (contract != "bad values" or case.bad)
    ],
)
def test_contract(contract, name):
    CONTRACTS[contract](overload(name), CASES[name], "cuda")


@pytest.mark.parametrize("name,rows", LARGE)
def test_repeats_of_large_sizes(name, rows):
    repeats_have_equal_bits(overload(name), CASES[name], "cuda", rows, large=True)


@pytest.mark.parametrize("name,rows", [(name, rows) for name, rows in LARGE if CASES[name].bad and rows > BAD_ROW])
def test_bad_values_of_large_sizes(name, rows):
    bad_values_stay_where_they_belong(overload(name), CASES[name], "cuda", rows, large=True)


@pytest.mark.parametrize("name", CASES)
def test_graph(name):
    graph_replays_with_other_operands(overload(name), CASES[name], 7, large=False)


@pytest.mark.parametrize("name,rows", LARGE)
def test_graph_of_large_sizes(name, rows):
    graph_replays_with_other_operands(overload(name), CASES[name], rows, large=True)


@pytest.mark.parametrize("name,rows", LARGE)
def test_streams(name, rows):
    streams_do_not_meet(overload(name), CASES[name], rows, large=True)


@pytest.mark.skipif("torch.cuda.device_count() < 2")
@pytest.mark.parametrize("name", CASES)
def test_device_that_is_not_current(name):
    there, here = (Call(overload(name), CASES[name], device).run() for device in ("cuda:1", "cuda:0"))
    assert all(value.get_device() == 1 for value in there)
    assert_same([value.cpu() for value in there], [value.cpu() for value in here])


def _reads_back(x):
    return doubled(x) if x.sum().item() else doubled_fake(x)


_calls = itertools.count()


def _counts_its_calls(x):
    return doubled(x) + next(_calls)


@pytest.mark.parametrize("run", [_reads_back, _counts_its_calls])
def test_a_broken_operator_is_found(run):
    with pytest.raises((AssertionError, RuntimeError)):
        graph_replays_with_other_operands(define(run), DOUBLED, 7, False)
    torch.cuda.synchronize()


def _on_the_first_stream(x):
    with torch.cuda.stream(torch.cuda.default_stream()):
        return doubled(x)


def test_an_operator_on_another_stream_is_found():
    with pytest.raises(AssertionError):
        streams_do_not_meet(define(_on_the_first_stream), DOUBLED, 300, True)
    torch.cuda.synchronize()


def test_a_sound_operator_passes():
    graph_replays_with_other_operands(define(doubled), DOUBLED, 7, False)
    streams_do_not_meet(define(doubled), DOUBLED, 7, False)
