"""FP8MQAIndexer and transformers' indexers on the CUDA kernels, against the reference backend and transformers' own."""

import copy

import pytest
import torch

from fp8moe import FP8MQAIndexer
from fp8moe.decode import GraphDecoder
from fp8moe.kernels.indexer.mqa_cache import new_kv_cache
from tests.gpu.checks import captured
from tests.indexer_reference import angles
from tests.transformers_indexers import (
    ALL,
    FEW,
    NEW_TOKENS,
    arguments,
    generate,
    left_padded,
    make_model,
    random_indexer,
    without,
)
from tests.transformers_models import prompts

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
SIZES = dict(hidden_size=256, q_lora_rank=192, top_k=64)
VARIANTS = [(32, 32, 16), (32, 128, 64), (64, 64, 32), (64, 128, 64)]
"""num_heads, head_dim, rope_head_dim"""


def make(variant, **changes):
    torch.manual_seed(0)
    heads, head_dim, rope = variant
    return FP8MQAIndexer(**(SIZES | changes), num_heads=heads, head_dim=head_dim, rope_head_dim=rope)


def inputs(indexer, positions, seed=1):
    """hidden_states, q_resid and (cos, sin), on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    hidden, q_resid = (
        torch.randn(len(positions), width, generator=generator).bfloat16()
        for width in (SIZES["hidden_size"], SIZES["q_lora_rank"])
    )
    return hidden, q_resid, angles(positions, indexer.rope_head_dim, torch.bfloat16)


def on_device(value):
    if isinstance(value, tuple):
        return tuple(map(on_device, value))
    return value.to(DEVICE)


def overlap(ours, expected):
    """How much of the expected selections was selected, -1 left out; they agree on how many there are."""
    ours, expected = ours.tolist(), expected.tolist()
    assert [row.count(-1) for row in ours] == [row.count(-1) for row in expected]
    common = [len(set(a) & set(b) - {-1}) for a, b in zip(ours, expected, strict=True)]
    return sum(common) / sum(len(set(row) - {-1}) for row in expected)


# Some values fall on the other side of an edge of E4M3, and near ties go the other way.
AGREEMENT = 0.97


@pytest.mark.parametrize("variant", VARIANTS)
def test_prefill(variant):
    indexer = make(variant)
    lengths = (300, 1, 77)
    positions = torch.cat([torch.arange(length) for length in lengths])
    ends = torch.arange(1, len(positions) + 1, dtype=torch.int32)
    call = *inputs(indexer, positions), ends - 1 - positions.int(), ends
    expected = indexer(*call)
    indexer.to(DEVICE)
    ours = indexer(*map(on_device, call))
    assert overlap(ours, expected) > AGREEMENT
    assert torch.equal(indexer(*map(on_device, call)), ours)


@pytest.mark.parametrize("next_n", [1, 2])
@pytest.mark.parametrize("variant", VARIANTS)
def test_decode_under_a_graph(variant, next_n):
    """One graph, replayed while the contexts grow past the ends of blocks, against the reference step by step."""
    indexer = make(variant)
    gpu = copy.deepcopy(indexer).to(DEVICE)
    batch, blocks = 3, 4
    table = torch.randperm(batch * blocks, generator=torch.Generator().manual_seed(3)).int().view(batch, blocks)
    cache = new_kv_cache(batch * blocks, indexer.head_dim, device="cpu")
    lens = torch.tensor([0, 60, 120], dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in lens.tolist()])
    slots = torch.cat(
        [table[b, torch.arange(n) // 64] * 64 + torch.arange(n) % 64 for b, n in enumerate(lens.tolist())]
    )
    ends = torch.arange(1, len(positions) + 1, dtype=torch.int32)
    indexer(*inputs(indexer, positions), ends - 1, ends, kv_cache=cache, slots=slots.int())

    static = dict(kv_cache=cache.to(DEVICE), block_table=table.to(DEVICE), context_lens=lens.to(DEVICE))
    held = [on_device(value) for value in inputs(indexer, torch.zeros(batch * next_n))]

    def step():
        return gpu.decode(*held, **static, max_context_len=256)

    # The call before has contexts too short for their tokens: nothing but what is overwritten below.
    graph, out = captured(step)
    static["kv_cache"].copy_(cache)
    for turn in range(8):
        lens += next_n
        seen = lens[:, None] - next_n + 1 + torch.arange(next_n)
        new = inputs(indexer, (seen - 1).flatten(), seed=turn)
        for old, value in zip((*held[:2], *held[2]), (*new[:2], *new[2]), strict=True):
            old.copy_(value)
        static["context_lens"].copy_(lens)
        graph.replay()
        paging = dict(kv_cache=cache, block_table=table, context_lens=lens, max_context_len=256)
        assert overlap(out.cpu(), indexer.decode(*new, **paging)) > AGREEMENT
    written = (static["kv_cache"].cpu() != 0).flatten(1).any(1)
    assert torch.equal(written, (cache != 0).flatten(1).any(1))


# transformers.


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("top_k", [FEW, ALL])
def test_tokens_are_equal(top_k):
    model = make_model(top_k, device=DEVICE)
    model.set_experts_implementation("batched_mm")  # transformers' default cannot be captured
    ids, mask = left_padded(prompts(device=DEVICE), 0, 5, 3)
    with without(model):
        expected = generate(model, ids, mask)
    assert torch.equal(generate(model, ids, mask), expected)
    decoder = GraphDecoder(model, batch_sizes=(3,), max_length=48)
    for _ in range(2):
        assert torch.equal(decoder.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS), expected)


@pytest.mark.usefixtures("registered")
def test_selections_in_bfloat16():
    """With DeepSeek's sizes, against transformers' unquantized scores."""
    sizes = {"index_n_heads": 64, "index_head_dim": 128, "qk_rope_head_dim": 64, "num_hidden_layers": 1}
    indexer = random_indexer(64, **sizes).to(DEVICE, torch.bfloat16)
    mask = torch.ones(1, 512, 512, dtype=torch.bool, device=DEVICE).tril()
    inputs = *map(on_device, arguments(indexer, 2, 512, torch.bfloat16)), mask, None
    chosen, best = (
        torch.zeros(2, 512, 512, device=DEVICE).scatter(-1, selected.long(), 1)
        for selected in (indexer(*inputs), type(indexer).forward.__wrapped__(indexer, *inputs))
    )
    assert (chosen * best)[:, 64:].sum() / best[:, 64:].sum() > 0.93
