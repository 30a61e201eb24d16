"""Latents of new tokens, from the projections to the cache: against transformers' functions, in place, the kernel."""

from itertools import product

import pytest
import torch

import fp8moe
from fp8moe.kernels.latent.append import append_latents, kernel_spec, serves
from tests.errors import refused
from tests.ptxas import without_spills

HEADS, VALUE, REST, LENGTH = 3, 32, 8, 9


def operands(batch=2, tokens=3, dtype=torch.float32, coded=False):
    draw = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=draw).to(dtype)

    angles = torch.randn(1, tokens, REST // 2, generator=draw).repeat(1, 1, 2)
    cache = torch.full((batch, LENGTH, VALUE + REST), 7.0, dtype=dtype)
    if coded:
        cache = torch.full((batch, LENGTH, VALUE + 4 + 2 * REST), 7, dtype=torch.uint8)
    return {
        **{"q": normal(batch, tokens, HEADS, REST), "latents": normal(batch, tokens, VALUE + REST)},
        **{"weight": normal(VALUE), "cos": angles.cos().to(dtype), "sin": angles.sin().to(dtype)},
        **{"out": normal(batch, tokens, HEADS, REST), "cache": cache},
    }


def expected(q, latents, weight, cos, sin, interleaved, eps):
    """Rotated queries (B, T, heads, P) and new latents (B, T, R + P), by transformers."""
    model = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    norm = model.DeepseekV3RMSNorm(VALUE, eps)
    norm.weight.data.copy_(weight)
    value, rest = latents.split([VALUE, REST], dim=-1)
    rotate = model.apply_rotary_pos_emb_interleave if interleaved else model.apply_rotary_pos_emb
    q, rest = rotate(q.transpose(1, 2), rest[:, None], cos, sin)
    return q.transpose(1, 2), torch.cat([norm(value), rest[:, 0]], dim=-1).detach()


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("tokens", [1, 3])
def test_against_transformers(tokens, interleaved, coded):
    given = operands(tokens=tokens, coded=coded)
    form = {"interleaved": interleaved, "eps": 0.1}
    q, new = expected(*(given[name] for name in ("q", "latents", "weight", "cos", "sin")), **form)
    before = given["cache"].clone()
    append_latents(**given, columns=torch.tensor([4, LENGTH - 2]), **form)
    torch.testing.assert_close(given["out"], q, rtol=1e-6, atol=1e-6)
    if coded:
        new = fp8moe.quantize_latents(new, value_size=VALUE)
    before[0, 4 : 4 + tokens] = new[0]
    before[1, LENGTH - 2 :] = new[1, :2] if tokens > 1 else torch.cat([new[1], before[1, LENGTH - 1 :]])
    torch.testing.assert_close(given["cache"], before, rtol=1e-6, atol=1e-6)


def test_queries_in_place_and_the_first_columns():
    given, whole = operands(dtype=torch.bfloat16), operands(dtype=torch.bfloat16)
    given["out"] = given["q"]
    for each in (given, whole):
        append_latents(**each, eps=1e-6, interleaved=True)
    assert torch.equal(given["q"], whole["out"]) and torch.equal(given["cache"], whole["cache"])
    assert not (whole["cache"][:, :3] == 7).all() and (whole["cache"][:, 3:] == 7).all()


def test_columns_out_of_range_are_not_written():
    given = operands()
    append_latents(**given, columns=torch.tensor([-3, LENGTH]), eps=1e-6, interleaved=False)
    assert (given["cache"] == 7).all()


def test_a_nan_stays_in_its_token():
    given = operands(dtype=torch.bfloat16, coded=True)
    given["latents"][0, 1, 3] = torch.nan
    append_latents(**given, eps=1e-6, interleaved=False)
    values = fp8moe.kernels.latent.fp8_latents.dequantize_latents(given["cache"][:, :3], value_size=VALUE)
    assert values.isnan().any(-1).tolist() == [[False, True, False], [False] * 3]


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (ValueError, "^latents: expected shape", {"latents": torch.randn(2, 3, VALUE)}),
        (ValueError, "^cos: expected", {"cos": torch.randn(1, 3, 4), "sin": torch.randn(1, 3, 4)}),
        (ValueError, "^cache: expected shape", {"cache": torch.randn(2, LENGTH, VALUE)}),
        (ValueError, "^cache: expected a contiguous", {"cache": torch.randn(2, VALUE + REST, LENGTH).mT}),
        (TypeError, "^cache: ", {"cache": torch.randn(2, LENGTH, VALUE + REST).half()}),
        (TypeError, "^weight: ", {"weight": torch.randn(VALUE).half()}),
        (ValueError, "^columns: ", {"columns": torch.tensor([0])}),
        (ValueError, "^out: ", {"out": torch.randn(2, 3, HEADS, 2 * REST)}),
    ],
)
def test_errors(error, message, change):
    refused(error, message, append_latents, **(operands() | {"eps": 1e-6, "interleaved": False} | change))


def test_what_a_backend_serves():
    assert serves(torch.randn(2), 40, 32)


def test_kernels_compile_without_spills():
    for coded, interleaved in product((False, True), (False, True)):
        assert without_spills(kernel_spec(coded, interleaved)).registers <= 48
