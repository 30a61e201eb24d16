"""Heads between projections and attention: reference backend, errors, autograd, operator, and the compiled kernels."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8moe.kernels.decoder_ops.rotary import NewTokens, RotaryHeads, kernel_spec, rotary, serves
from fp8moe.runtime.checks import FLOATING
from tests.ptxas import compile_report

FORMS = ((32, 4, 128, 128, True), (96, 8, 128, 64, True), (8, 2, 256, 256, False), (14, 2, 64, 64, True))
"""heads, key heads, values of a head, rotated, norm"""


def operands(batch, tokens, form, dtype=torch.float32, room=3, seed=0):
    """q, k, v as views of one projection, cos, sin, keys, values; columns; the weights of the norms."""
    heads, key_heads, size, rotated, norm = form
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    parts = [heads * size, key_heads * size, key_heads * size]
    q, k, v = (x.view(batch, tokens, -1, size) for x in normal(batch, tokens, sum(parts)).split(parts, dim=-1))
    caches = [torch.full((batch, key_heads, tokens + room, size), 7.0, dtype=dtype) for _ in range(2)]
    columns = torch.randint(0, room + 1, (batch,), generator=generator)
    weights = {"q_weight": normal(size), "k_weight": normal(size), "eps": 1e-6} if norm else {}
    return (q, k, v, normal(batch, tokens, rotated), normal(batch, tokens, rotated), *caches), columns, weights


def run(q, k, v, cos, sin, keys, values, columns=None, **norms):
    """`rotary` of what `operands` returns."""
    return rotary(q, NewTokens(k, v, cos, sin, **norms), keys, values, columns=columns)


def normalized(x, weight, eps):
    """transformers' RMSNorm."""
    values = x.float()
    values = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + eps)
    return weight * values.to(x.dtype)


@given(
    batch=st.integers(1, 3),
    tokens=st.integers(1, 5),
    form=st.sampled_from(((3, 1, 16, 16, True), (4, 2, 32, 16, False), (2, 2, 24, 16, True))),
    dtype=st.sampled_from(FLOATING),
    one_table=st.booleans(),
)
def test_equals_the_operations_of_transformers(batch, tokens, form, dtype, one_table):
    from transformers.models.glm4_moe.modeling_glm4_moe import apply_rotary_pos_emb

    (q, k, v, cos, sin, keys, values), columns, weights = operands(batch, tokens, form, dtype)
    if one_table:
        cos, sin = cos[:1], sin[:1]
    query = run(q, k, v, cos, sin, keys, values, columns, **weights)
    if weights:
        q = normalized(q, weights["q_weight"], weights["eps"])
        k = normalized(k, weights["k_weight"], weights["eps"])
    expected = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    assert query.is_contiguous() and torch.equal(query.transpose(1, 2), expected[0])
    for b, first in enumerate(columns.tolist()):
        for cache, new in ((keys, expected[1]), (values, v.transpose(1, 2))):
            assert torch.equal(cache[b, :, first : first + tokens], new[b])
            assert (cache[b, :, :first] == 7).all() and (cache[b, :, first + tokens :] == 7).all()


def test_without_columns_tokens_begin_at_0_and_places_outside_are_not_written():
    given, _, _ = operands(2, 3, (2, 1, 16, 16, False))
    keys, values = given[5:]
    run(*given)
    assert torch.equal(values[:, :, :3], given[2].transpose(1, 2)) and (keys[:, :, 3:] == 7).all()
    keys.fill_(7.0)
    run(*given, columns=torch.tensor([-2, 4]))
    assert (keys[0, :, 1:] == 7).all() and (keys[1, :, :4] == 7).all()
    assert (keys[0, :, 0] != 7).all() and (keys[1, :, 4:] != 7).all()


# ---- errors ----


def test_errors():
    given, columns, weights = operands(2, 3, (4, 2, 32, 32, True))
    names = ("q", "k", "v", "cos", "sin", "keys", "values")

    def message(kind, text, **changed):
        values = [changed.get(name, value) for name, value in zip(names, given, strict=True)]
        options = {"columns": columns, **weights, **{k: v for k, v in changed.items() if k not in names}}
        with pytest.raises(kind, match=text):
            run(*values, **options)

    for name in names:
        message(TypeError, f"^{name}: expected a torch.Tensor, got int 1", **{name: 1})
    message(TypeError, "^q: expected bfloat16, float16 or float32, got torch.float64", q=given[0].double())
    message(ValueError, r"^q: expected shape \(B, T, heads, D\)", q=given[0][0])
    message(TypeError, "^k: expected float32, got torch.bfloat16", k=given[1].bfloat16())
    message(ValueError, r"^v: expected shape \(2, 3, 2, 32\), got \(2, 3, 1, 32\)", v=given[2][:, :, :1])
    message(ValueError, r"^cos: expected shape \(1 or 2, 3, R\)", cos=given[3][:, :2])
    message(ValueError, r"^sin: expected shape \(2, 3, 32\) like cos, got \(1, 3, 32\)", sin=given[4][:1])
    message(ValueError, "^q: expected heads of a multiple of 8", cos=given[3][..., :8], sin=given[4][..., :8])
    message(ValueError, r"^keys: expected shape \(2, 2, 6, 32\), got \(2, 1, 6, 32\)", keys=given[5][:, :1])
    message(ValueError, "^values: expected a contiguous tensor", values=given[6].transpose(0, 1))
    message(TypeError, "^columns: expected int64, got torch.int32", columns=columns.int())
    message(ValueError, "^q_weight: expected it with k_weight, or neither", k_weight=None)
    message(ValueError, "^q: expected a multiple of the 2 key heads, got 3 heads", q=given[0][:, :, :3])
    message(ValueError, r"^k_weight: expected shape \(32,\), got \(16,\)", k_weight=weights["k_weight"][:16])


def test_sizes_that_are_served():
    assert serves(128, 128) and serves(128, 64) and serves(256, 256) and serves(80, 80)
    assert not (serves(128, 0) or serves(128, 24) or serves(264, 64) or serves(100, 32) or serves(64, 128))


def test_backward_raises():
    given, columns, weights = operands(1, 2, (2, 1, 16, 16, True))
    query = run(given[0].clone().requires_grad_(), *given[1:], columns=columns, **weights)
    with pytest.raises(RuntimeError, match="rotary has no backward"):
        query.sum().backward()


# ---- operator ----


# ---- kernels ----


@pytest.mark.parametrize("dtype,many", list(itertools.product(FLOATING, (False, True))), ids=str)
def test_every_variant_compiles_without_spills(dtype, many):
    for form in (*FORMS, (3, 3, 80, 80, False)):
        report = compile_report(kernel_spec(dtype, RotaryHeads(*form), many))
        assert report.spill_stores == report.spill_loads == report.stack == report.static_smem == 0
        assert report.registers <= 96
