"""Products of LoRA's factors with rows of experts: reference backend, operators, and the compiled kernels."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8moe.kernels.experts import lora
from fp8moe.kernels.experts.lora import lora_gradient, lora_shrink
from tests.errors import relative_error
from tests.lora_cases import exact, operands
from tests.ptxas import compile_report

TOLERANCE = 3e-3  # rounding to bfloat16 takes 1.7e-3


@given(
    sizes=st.lists(st.integers(0, 20), min_size=1, max_size=5),
    width=st.sampled_from([8, 40, 136]),
    rank=st.sampled_from([16, 48]),
    tokens=st.sampled_from([None, 1, 9]),
    seed=st.integers(0, 99),
)
def test_products(sizes, width, rank, tokens, seed):
    x, factors, ranks, offsets, index = operands(sizes, width, rank, tokens, seed)
    shrunk, gradient = exact(x, factors, ranks, offsets, index)
    got = lora_shrink(x, factors, offsets, index)
    assert got.shape == ranks.shape and got.dtype == torch.bfloat16
    used = slice(0, sum(sizes))
    torch.testing.assert_close(got[used].double(), shrunk[used], rtol=5e-3, atol=1e-4)
    got = lora_gradient(ranks, x, offsets, index)
    assert got.shape == factors.shape and got.dtype == torch.bfloat16
    if sum(sizes):
        assert relative_error(got, gradient) <= TOLERANCE
    assert not got[[size == 0 for size in sizes]].any()


def test_what_does_not_fit_is_refused():
    x, factors, ranks, offsets, index = operands([2, 0, 5], 24, 16, 4)
    for error, match, call in (
        (TypeError, "x: expected bfloat16", lambda: lora_shrink(x.float(), factors, offsets, index)),
        (TypeError, "factors: expected bfloat16", lambda: lora_shrink(x, factors.float(), offsets, index)),
        (TypeError, "tokens: expected int32", lambda: lora_shrink(x, factors, offsets, index.long())),
        (TypeError, "group_offsets: expected int32", lambda: lora_shrink(x, factors, offsets.long(), index)),
        (TypeError, "group_offsets: expected int32", lambda: lora_gradient(ranks, x, offsets.long(), index)),
        (ValueError, "tokens: expected shape .10,.", lambda: lora_shrink(x, factors, offsets, index[:, None])),
        (ValueError, "multiple of 16 ranks", lambda: lora_shrink(x, factors[:, :8], offsets, index)),
        (ValueError, "multiple of 8 columns", lambda: lora_shrink(x[:, :20], factors[..., :20], offsets, index)),
        (ValueError, "factors: expected shape .3, 16, 16.", lambda: lora_shrink(x[:, :16], factors, offsets, index)),
        (ValueError, "group_offsets: expected shape .4,.", lambda: lora_shrink(x, factors, offsets[1:], index)),
        (TypeError, "ranks: expected bfloat16", lambda: lora_gradient(ranks.float(), x, offsets, index)),
        (ValueError, "ranks: expected shape .10, 16.", lambda: lora_gradient(ranks[1:], x, offsets, index)),
    ):
        with pytest.raises(error, match=match):
            call()


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("rank", [16, 48, 256])
def test_every_variant_compiles_without_spills(rank, gathered):
    specs = [lora.shrink_spec(rank, gathered, few) for few in (False, True)]
    for spec in (*specs, lora.gradient_spec(rank, gathered)):
        report = compile_report(spec)
        assert report.spill_stores == report.spill_loads == report.stack == 0
        assert report.registers <= 80
