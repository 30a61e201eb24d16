"""Latents of new tokens on a GPU: the cache and queries of the reference backend, in graphs, twice the same bits."""

import pytest
import torch

from fp8moe.kernels.latent.append import AppendOperands, _reference, append_latents
from fp8moe.kernels.latent.fp8_latents import dequantize_latents
from tests.errors import refused
from tests.gpu.checks import captured

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


def operands(batch, tokens, heads, coded, strided=False):
    draw = torch.Generator(DEVICE).manual_seed(batch)

    def normal(*shape):
        return torch.randn(shape, generator=draw, device=DEVICE).bfloat16()

    more = 64 if strided else 0
    angles = torch.randn(1, tokens, 64, generator=draw, device=DEVICE)
    cache = normal(batch, tokens + 50, 576)
    if coded:
        cache = torch.full((batch, tokens + 50, 656), 7, dtype=torch.uint8, device=DEVICE)
    return AppendOperands(
        *(normal(batch, tokens, heads, 3 * more + 64)[..., -64:], normal(batch, tokens, 576 + more)[..., :576]),
        *(normal(512), angles.cos().bfloat16(), angles.sin().bfloat16()),
        *(normal(batch, tokens, heads, 576)[..., 512:], cache),
        *(torch.randint(-2, 53, (batch,), generator=draw, device=DEVICE), 1e-6, False),
    )


def run(given, **change):
    *given, columns, eps, interleaved = given._replace(**change)
    append_latents(*given, columns=columns, eps=eps, interleaved=interleaved)


def values(cache):
    return dequantize_latents(cache, value_size=512) if cache.dtype is torch.uint8 else cache


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize(
    ("batch", "tokens", "heads"), [(1, 1, 16), (64, 1, 20), (3, 7, 128), (2, 300, 5), (1, 4096, 16), (9, 1, 1)]
)
def test_as_the_reference(batch, tokens, heads, coded, interleaved, strided):
    given = operands(batch, tokens, heads, coded, strided)._replace(interleaved=interleaved)
    expected = given._replace(out=torch.empty_like(given.q), cache=given.cache.clone())
    _reference(expected)
    before = given.cache.clone()
    results = []
    for _ in range(20):
        given.cache.copy_(before), given.out.fill_(torch.nan)
        run(given)
        results.append((given.out.clone(), given.cache.clone()))
    assert torch.equal(results[0][0], expected.out)
    # A sum of squares in another order rounds a value the other way now and then.
    found, wanted = values(results[0][1]), values(expected.cache)
    assert (found != wanted).sum() <= 1e-4 * found.numel()
    torch.testing.assert_close(found, wanted, rtol=2**-3 if coded else 2**-7, atol=1e-3)
    assert all(torch.equal(a, b) for again in results[1:] for a, b in zip(results[0], again, strict=True))


def test_in_place_and_columns_that_change_between_replays():
    given = operands(3, 2, 20, False)
    rotated = torch.empty_like(given.q)
    graph, _ = captured(lambda: run(given, out=rotated) or rotated)
    for columns in ([0, 1, 2], [50, -2, 7], [2**40, -(2**40), 51]):
        given.columns.copy_(torch.tensor(columns)), given.q.normal_(), given.latents.normal_(), given.cache.fill_(7)
        expected = given._replace(out=torch.empty_like(given.q), cache=given.cache.clone())
        _reference(expected)
        graph.replay()
        assert torch.equal(rotated, expected.out)
        torch.testing.assert_close(given.cache, expected.cache, rtol=2**-7, atol=1e-3)
        run(given, out=given.q)
        assert torch.equal(given.q, expected.out)


def test_what_the_kernel_does_not_take_is_refused_by_name():
    given = operands(1, 1, 16, False)
    halves = [x.half() if x.dtype is torch.bfloat16 else x for x in given[:7]]
    refused(TypeError, "^q: the kernel takes bf", append_latents, *halves, eps=1e-6, interleaved=True)
    part = {"latents": given.latents[..., :96], "weight": given.weight[:32]}
    shorter = given._replace(**part, cache=given.cache[..., :96].contiguous())
    refused(ValueError, "^latents: the kernel takes 576", run, shorter)
