"""The rotary kernel against a float64 reference, in a graph, and again with the same bits."""

import pytest
import torch

from fp8moe.kernels.decoder_ops import rotary as op
from fp8moe.runtime.checks import FLOATING
from tests.kernels.test_rotary import FORMS, operands, run

pytestmark = pytest.mark.gpu

SHAPES = ((1, 1), (3, 1), (64, 1), (2, 7), (3, 129), (1, 1000))
LIMITS = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 1e-6}


def cuda(values):
    return [value.cuda() for value in values]


def on_gpu(batch, tokens, form, dtype, **how):
    """As `operands`, with q, k and v in one projection still."""
    given, columns, weights = operands(batch, tokens, form, dtype, **how)
    whole = torch.cat([x.flatten(2) for x in given[:3]], dim=-1).cuda()
    parts = whole.split([x.shape[2] * x.shape[3] for x in given[:3]], dim=-1)
    q, k, v = (part.view(x.shape) for part, x in zip(parts, given, strict=False))
    weights = {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in weights.items()}
    return [q, k, v, *cuda(given[3:])], columns.cuda(), weights


def reference(given, columns, weights, dtype=torch.float64):
    """query, keys and values in float64, without any rounding."""
    given = [value.to(dtype) for value in given]
    norms = [None if not weights else weights[name].to(dtype) for name in ("q_weight", "k_weight")]
    if weights:
        for i, weight in enumerate(norms):
            x = given[i]
            given[i] = weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + weights["eps"])
    query = op.reference(op.RotaryOperands(*given, columns, None, None, 0.0))
    return query, given[5], given[6]


def close(got, expected):
    error = (got.double() - expected).norm() / expected.norm()
    return error <= LIMITS[got.dtype]


@pytest.mark.parametrize("batch,tokens", SHAPES)
@pytest.mark.parametrize("form", [*FORMS, (3, 3, 80, 80, False), (5, 1, 96, 32, True)], ids=str)
@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_against_float64(batch, tokens, form, dtype):
    given, columns, weights = on_gpu(batch, tokens, form, dtype)
    expected = reference(given, columns, weights)
    query = run(*given, columns=columns, **weights)
    assert close(query, expected[0]) and close(given[5], expected[1]) and torch.equal(given[6].double(), expected[2])


def test_places_outside_are_not_written_and_nan_stays_in_its_head():
    given, _, weights = on_gpu(3, 4, FORMS[0], torch.bfloat16)
    columns = torch.tensor([-2, 5, 2**40], device="cuda")
    given[0][1, 2, 5, 7] = float("nan")
    given[1][0, 3, 1, 0] = float("inf")
    before = given[5].clone()
    query = run(*given, columns=columns, **weights)
    assert query.isnan().sum() == 128 and query[1, 2, 5].isnan().all()
    assert torch.equal(given[5][0, :, 2:], before[0, :, 2:]) and torch.equal(given[5][2], before[2])
    assert torch.equal(given[5][1, :, :5], before[1, :, :5]) and not given[5][0, 0].isnan().any()
    assert given[5][0, 1, 1].isnan().any()


def test_past_two_to_the_31_elements():
    tokens = 530_000  # of 40 heads of 128
    whole = torch.empty(1, tokens, 40 * 128, dtype=torch.bfloat16, device="cuda").normal_()
    assert whole.numel() > 1 << 31
    q, k, v = (x.view(1, tokens, -1, 128) for x in whole.split([4096, 512, 512], dim=-1))
    cos, sin = torch.randn(2, 1, tokens, 128, device="cuda").bfloat16()
    keys, values = torch.empty(2, 1, 4, tokens, 128, dtype=torch.bfloat16, device="cuda")
    query = run(q, k, v, cos, sin, keys, values)
    some = slice(tokens - 100, tokens)
    small = [x[:, some] for x in (q, k, v, cos, sin)]
    cache = [torch.empty_like(x[:, :, :100]) for x in (keys, values)]
    assert torch.equal(query[:, some], op._launch(op.RotaryOperands(*small, *cache, None, None, None, 0.0)))
    assert torch.equal(keys[:, :, some], cache[0]) and torch.equal(values[:, :, some], cache[1])
