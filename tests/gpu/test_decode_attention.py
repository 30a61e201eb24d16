"""Flash attention of a decode step against float64 and against the model's own attention."""

import pytest
import torch

from fp8moe.integrations.decode import attention
from fp8moe.integrations.decode.step import Step
from fp8moe.integrations.transformers import register
from tests.transformers_models import BASE, left_padded, prompts, random_model

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


def operands(batch, key_heads, groups, size, length, dtype, seed=0):
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator, device=DEVICE, dtype=torch.float32).to(dtype)

    cache = (batch, key_heads, length, size)
    return draw(batch, key_heads * groups, 1, size), draw(*cache), draw(*cache)


def reference(query, key, value, begin, end):
    """(B, 1, heads, D) in float64, a sequence and head at a time."""
    batch, heads, _, size = query.shape
    groups = heads // key.shape[1]
    out = torch.empty(batch, 1, heads, size, dtype=torch.float64, device=query.device)
    for b in range(batch):
        for head in range(heads):
            rows = slice(int(begin[b]), int(end[b]))
            keys, values = (x[b, head // groups, rows].double() for x in (key, value))
            weights = (keys @ query[b, head, 0].double() * size**-0.5).softmax(0)
            out[b, 0, head] = weights @ values
    return out


def rows_of(begin, end, key_heads, length):
    first = torch.arange(len(begin) * key_heads, device=DEVICE) * length
    rows = torch.stack([first + begin.repeat_interleave(key_heads), (end - begin).repeat_interleave(key_heads)])
    return torch.nn.functional.pad(rows, (0, 1)).int()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("batch", "key_heads", "groups", "size", "length"),
    [(1, 4, 8, 128, 5000), (3, 2, 1, 64, 257), (5, 1, 7, 40, 100), (2, 3, 4, 256, 640), (64, 2, 8, 128, 300)],
)
def test_against_float64(batch, key_heads, groups, size, length, dtype):
    query, key, value = operands(batch, key_heads, groups, size, length, dtype)
    generator = torch.Generator(DEVICE).manual_seed(1)
    end = torch.randint(1, length + 1, (batch,), generator=generator, device=DEVICE)
    begin = (torch.rand(batch, generator=generator, device=DEVICE) * end).long()
    begin[0], end[0] = 0, length
    begin[-1] = end[-1] - 1  # a single token
    expected = reference(query, key, value, begin, end)
    column = torch.arange(length, device=DEVICE)
    hidden = (column < begin[:, None]) | (column >= end[:, None])
    for cache in (key, value):  # what is not visible has no say
        cache.masked_fill_(hidden[:, None, :, None], float("nan"))
    rows = rows_of(begin, end, key_heads, length)
    results = [attention.attend(None, query, key, value, rows, scaling=size**-0.5)[0] for _ in range(20)]
    assert results[0].shape == expected.shape and results[0].dtype == dtype
    assert all(torch.equal(result, results[0]) for result in results)
    error = (results[0].double() - expected).norm() / expected.norm()
    assert error <= 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("window", [None, 8])
def test_a_step_equals_that_with_the_models_own_attention(window):
    register()
    options = BASE | {"hidden_size": 128, "intermediate_size": 128, "num_local_experts": 4, "num_key_value_heads": 2}
    options |= {"sliding_window": window, "max_position_embeddings": 128}
    how = dict(dtype=torch.bfloat16, experts_implementation="fp8moe", attn_implementation="sdpa")
    model = random_model("mixtral", options, **how).to(DEVICE)
    ids = prompts(3, 20, device=DEVICE)
    mask = left_padded(ids, 5, 0, 13).bool()
    logits = []
    with torch.no_grad():
        for name in (None, attention.NAME):
            step = Step(model, 3, 48, torch.device(DEVICE), name)
            step.start(3, 20, mask, [], 0)
            step.prefill(ids, mask)
            step.tokens.copy_(ids[:, :1])
            logits.append([step.read().float() for _ in range(5)])
    for own, flash in zip(*logits, strict=True):
        assert not own.isnan().any()
        assert (own - flash).norm() <= 0.02 * own.norm()
