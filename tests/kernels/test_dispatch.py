"""Tokens and their experts to the buffers of several ranks: reference backend, errors, and the compiled kernels."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8moe import quantize_1x128
from fp8moe.kernels.experts.dispatch import dispatch, kernel_spec
from fp8moe.runtime.checks import FLOATING
from tests.peer_cases import MARK, as_bytes, new_received, owners, random_tokens
from tests.ptxas import compile_report

INDEX_DTYPES = (torch.int32, torch.int64)


@given(
    tokens=st.lists(st.integers(0, 5), min_size=1, max_size=8),
    hidden=st.integers(1, 20).map(lambda i: 16 * i),
    top_k=st.integers(1, 9),
    dtypes=st.tuples(st.sampled_from(FLOATING), st.sampled_from(INDEX_DTYPES)),
    more=st.integers(0, 2),
    experts=st.integers(0, 60),
)
def test_every_rank_receives_the_tokens_of_its_experts_and_where_all_go(tokens, hidden, top_k, dtypes, more, experts):
    ranks, room = len(tokens), max(tokens) + more
    buffers = [new_received(ranks * room, hidden, top_k) for _ in range(ranks)]
    for rank, count in enumerate(tokens):
        x, index = random_tokens(count, hidden, top_k, dtypes, seed=rank)
        before = [[part.clone() for part in as_bytes(buffer)] for buffer in buffers]
        dispatch(x, index, buffers, rank, ranks * experts)
        slots, free = slice(rank * room, rank * room + count), slice(rank * room + count, (rank + 1) * room)
        quantized = quantize_1x128(x)
        for buffer, old, wanted in zip(buffers, before, owners(index, ranks, ranks * experts).t(), strict=True):
            assert torch.equal(buffer.data[slots].view(torch.uint8)[wanted], quantized.data.view(torch.uint8)[wanted])
            assert torch.equal(buffer.scale[slots][wanted], quantized.scale[wanted])
            assert torch.equal(buffer.index[slots], index.int()) and (buffer.index[free] == -1).all()
            for i, (now, then) in enumerate(zip(as_bytes(buffer), old, strict=True)):
                # Of free slots, and of tokens without an expert there, only the experts are written; the slots of other
                # ranks stay as they are.
                written = torch.zeros(len(now), dtype=torch.bool)
                written[slots] = wanted if i < 2 else True
                written[free] = i >= 2
                assert torch.equal(now[~written], then[~written])


def test_an_index_that_is_no_int32_is_none_of_an_expert():
    x, index = random_tokens(2, 16, 3)
    index[0] = torch.tensor([2**32 + 1, -(2**40), 2**31])
    buffer = new_received(2, 16, 3)
    dispatch(x, index, [buffer], 0, 300)
    assert buffer.index[0].tolist() == [-1, -1, -1] and torch.equal(buffer.index[1], index[1].int())
    assert (buffer.data[0].view(torch.uint8) == MARK).all() and (buffer.scale[0].view(torch.uint8) == MARK).all()


def test_experts_of_each_rank():
    """Both ends of what a rank has, and what lies beside all of them."""
    index = torch.tensor([[0], [2], [3], [5], [6], [8], [9], [-1]])
    buffers = [new_received(24, 16, 1) for _ in range(3)]
    dispatch(torch.zeros(8, 16), index, buffers, 1, 9)
    written = [(buffer.data.view(torch.uint8) != MARK).all(1).nonzero().flatten().tolist() for buffer in buffers]
    assert written == [[8, 9], [10, 11], [12, 13]]
    assert all(buffer.index[8:16].tolist() == index.tolist() for buffer in buffers)


def test_nan_stays_in_its_block():
    x, index = random_tokens(3, 272, 2)
    x[1, 130] = float("nan")
    buffer = new_received(3, 272, 2)
    dispatch(x, index.abs(), [buffer], 0, 300)
    assert buffer.scale.isnan().nonzero().tolist() == [[1, 1]]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(x=None), TypeError, "^x: expected a torch.Tensor, got NoneType"),
        (dict(top_k_index=[[1]]), TypeError, "^top_k_index: expected a torch.Tensor, got list"),
        (dict(x=torch.zeros(3, 32, dtype=torch.float64)), TypeError, "^x: expected bfloat16, float16 or float32"),
        (dict(x=torch.zeros(3, 24)), ValueError, "^x: expected shape .* multiple of 16, got .3, 24."),
        (dict(top_k_index=torch.zeros(3, 2)), TypeError, "^top_k_index: expected int32 or int64"),
        (dict(top_k_index=torch.zeros(4, 2, dtype=torch.int64)), ValueError, "^top_k_index: expected shape .3, "),
        (dict(top_k_index=torch.zeros(3).long()), ValueError, "^top_k_index: expected shape .3, top_k., got .3,."),
        (
            dict(top_k_index=torch.zeros(3, 2, dtype=torch.int64, device="meta")),
            ValueError,
            "^top_k_index: expected on cpu like x, got meta",
        ),
        (dict(rank=2), ValueError, "^rank: expected 0 to 1, the buffers there are, got 2"),
        (dict(rank=-1), ValueError, "^rank: expected 0 to 1"),
        (dict(rank=True), TypeError, "^rank: expected an int"),
        (
            dict(num_experts=7),
            ValueError,
            "^num_experts: expected a multiple of 2, the ranks, up to 1024 for each, got 7",
        ),
        (
            dict(num_experts=-2),
            ValueError,
            "^num_experts: expected a multiple of 2, the ranks, up to 1024 for each, got -2",
        ),
        (dict(num_experts=2050), ValueError, "^num_experts: expected .* up to 1024 for each, got 2050"),
        (dict(num_experts=8.0), TypeError, "^num_experts: expected an int, got float 8.0"),
        (dict(buffers=[]), ValueError, "^buffers: expected those of 1 to 8 ranks, got 0"),
        (dict(buffers=[new_received(27, 32, 2)] * 9), ValueError, "^buffers: expected those of 1 to 8 ranks, got 9"),
        (dict(buffers=[new_received(4, 32, 2)] * 2), ValueError, "^buffers: expected 2 . T slots with T at least 3"),
        (dict(buffers=[new_received(7, 32, 2)] * 2), ValueError, "^buffers: expected 2 . T slots .* got 7"),
        (
            dict(buffers=[new_received(6, 32, 2), new_received(8, 32, 2)]),
            ValueError,
            r"^buffers\[1\].data: expected shape .6, 32., got .8, 32.",
        ),
        (
            dict(buffers=[new_received(6, 32, 2)._replace(index=torch.zeros(6, 2, dtype=torch.int64))]),
            TypeError,
            r"^buffers\[0\].index: expected int32",
        ),
        (
            dict(buffers=[new_received(6, 32, 2)._replace(index=torch.zeros(2, 6, dtype=torch.int32).t())]),
            ValueError,
            r"^buffers\[0\].index: expected contiguous",
        ),
    ],
)
def test_errors_name_the_argument_and_write_nothing(change, error, message):
    x, index = random_tokens(3, 32, 2)
    good = dict(x=x, top_k_index=index, rank=0, num_experts=8)
    arguments = good | dict(buffers=[new_received(6, 32, 2)] * 2) | change
    with pytest.raises(error, match=message):
        dispatch(**arguments)
    for buffer in arguments["buffers"]:
        assert (buffer.data.view(torch.uint8) == MARK).all() and (buffer.scale.view(torch.uint8) == MARK).all()


# ---- kernels ----


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("peers", [1, 2, 8])
def test_every_variant_compiles_without_spills(dtype, peers):
    for hidden, index_dtype in ((7168, torch.int64), (16, torch.int32), (272, torch.int64)):
        report = compile_report(kernel_spec(hidden, dtype, index_dtype, peers))
        assert report.spill_stores == report.spill_loads == report.stack == report.static_smem == 0
        assert report.registers <= 40  # as permute_quantize, whose loads it has
