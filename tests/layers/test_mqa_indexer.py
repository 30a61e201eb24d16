"""FP8MQAIndexer on the reference backend: what it selects against float64, prefill and decode against each other."""

import pytest
import torch
from torch import nn

from fp8moe import FP8MQAIndexer, mqa_logits, quantize_1x128, replace_linears
from fp8moe.kernels.indexer.mqa_cache import new_kv_cache
from fp8moe.layers import mqa_indexer
from fp8moe.layers.linear import FP8Linear
from tests.errors import refused, relative_error
from tests.indexer_reference import angles, operands, scores

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = dict(hidden_size=96, q_lora_rank=48, num_heads=32, head_dim=32, rope_head_dim=16, top_k=8)
LENGTHS = (21, 5, 14)


def make(seed=0, **changes):
    torch.manual_seed(seed)
    return FP8MQAIndexer(**(SIZES | changes))


def inputs(indexer, tokens, seed=1, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, SIZES["hidden_size"], generator=generator).to(dtype)
    q_resid = torch.randn(tokens, SIZES["q_lora_rank"], generator=generator).to(dtype)
    return hidden, q_resid


def packed(indexer, lengths=LENGTHS, dtype=torch.float32):
    """Causal prefill of sequences one after the other: hidden_states, q_resid, (cos, sin), starts, ends."""
    positions = torch.cat([torch.arange(length) for length in lengths])
    ends = torch.arange(1, sum(lengths) + 1, dtype=torch.int32)
    starts = ends - 1 - positions.int()
    embeddings = angles(positions, indexer.rope_head_dim, dtype)
    return *inputs(indexer, sum(lengths), dtype=dtype), embeddings, starts, ends


def check_selection(selected, expected, starts, ends, top_k):
    """The best by the scores `expected`, apart from near ties; -1 exactly where there are no more."""
    assert selected.dtype is torch.int32 and selected.shape == (len(expected), top_k)
    for row, score, start, end in zip(selected.tolist(), expected, starts.tolist(), ends.tolist(), strict=True):
        seen = score[start:end]
        count = min(top_k, len(seen))
        chosen = torch.tensor(row[:count], dtype=torch.long)
        assert row[count:] == [-1] * (top_k - count)
        assert len(set(row[:count])) == count and all(0 <= index < len(seen) for index in row[:count])
        tolerance = 1e-4 * seen.abs().max() if count else 0
        torch.testing.assert_close(seen[chosen], seen.topk(count).values, rtol=0, atol=float(tolerance))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_heads": 64, "head_dim": 128, "rope_head_dim": 64},
        {"head_dim": 64, "rope_head_dim": 64},
        {"rope_head_dim": 0},
        {"interleaved": True},
        {"scale_format": "ue8m0"},
        {"top_k": 64},
    ],
)
def test_prefill_selects_the_best(changes):
    indexer = make(**changes)
    hidden, q_resid, embeddings, starts, ends = packed(indexer)
    selected = indexer(hidden, q_resid, embeddings, starts, ends)
    options = dict(interleaved=indexer.interleaved, scale_format=indexer.scale_format)
    expected = scores(*operands(indexer, hidden, q_resid, *embeddings, **options))
    check_selection(selected, expected, starts, ends, indexer.top_k)


@pytest.mark.parametrize("interleaved", [False, True])
def test_scores(interleaved):
    indexer = make()
    hidden, q_resid, embeddings, *_ = packed(indexer, (30,))
    q, weights, k = mqa_indexer.score_operands(indexer, hidden, q_resid, embeddings, interleaved=interleaved)
    data, scale = quantize_1x128(k)
    starts, ends = torch.zeros(30, dtype=torch.int32), torch.full((30,), 30, dtype=torch.int32)
    logits = mqa_logits(q, (data, scale[:, 0]), weights, starts, ends)
    expected = scores(*operands(indexer, hidden, q_resid, *embeddings, interleaved=interleaved))
    assert relative_error(logits, expected) < 1e-3


def test_ranges_that_are_reversed_negative_or_past_the_end():
    indexer = make(top_k=4)
    hidden, q_resid, embeddings, *_ = packed(indexer, (6,))
    starts = torch.tensor([-5, 4, 3, 2, 6, 0], dtype=torch.int32)
    ends = torch.tensor([3, 2, 100, 2, 9, -1], dtype=torch.int32)
    selected = indexer(hidden, q_resid, embeddings, starts, ends)
    assert [sum(index >= 0 for index in row) for row in selected.tolist()] == [3, 0, 3, 0, 0, 0]
    assert sorted(selected[0, :3].tolist()) == sorted(selected[2, :3].tolist()) == [0, 1, 2]


def test_no_tokens():
    indexer = make()
    hidden, q_resid, embeddings, starts, ends = packed(indexer, (0,))
    assert indexer(hidden, q_resid, embeddings, starts, ends).shape == (0, 8)


def test_long_prefill_goes_in_chunks(monkeypatch):
    indexer = make()
    arguments = packed(indexer)
    whole = indexer(*arguments)
    monkeypatch.setattr(mqa_indexer, "LOGITS_AT_A_TIME", 7 * sum(LENGTHS))
    rows = []
    logits = mqa_indexer.mqa_logits
    monkeypatch.setattr(
        mqa_indexer, "mqa_logits", lambda q, *rest, **how: rows.append(len(q)) or logits(q, *rest, **how)
    )
    assert torch.equal(indexer(*arguments), whole)
    assert rows == [7] * 5 + [5]


# Decode.


def paged(lengths, blocks_each=2, head_dim=32):
    """A cache, and a block table whose blocks are in no order."""
    order = torch.randperm(len(lengths) * blocks_each + 1, generator=torch.Generator().manual_seed(2)).int()
    return new_kv_cache(len(order), head_dim, device="cpu"), order[:-1].view(len(lengths), blocks_each)


def slots_of(block_table, lengths):
    """Slots of the tokens of packed sequences."""
    tokens = [(b, position) for b, length in enumerate(lengths) for position in range(length)]
    return torch.tensor([block_table[b, p // 64] * 64 + p % 64 for b, p in tokens], dtype=torch.int32)


@pytest.mark.parametrize("next_n", [1, 2, 3])
@pytest.mark.parametrize("lens_of_each_query", [False, True])
def test_decode_selects_what_prefill_does(next_n, lens_of_each_query):
    lengths = (60, 3, 66)
    steps = 2 * next_n
    indexer = make()
    whole = tuple(length + steps for length in lengths)
    hidden, q_resid, (cos, sin), starts, ends = packed(indexer, whole)
    expected = indexer(hidden, q_resid, (cos, sin), starts, ends)
    first = torch.tensor([sum(whole[:b]) for b in range(3)])
    prompt = torch.cat([first[b] + torch.arange(length) for b, length in enumerate(lengths)])
    cache, table = paged(lengths)

    def take(rows):
        return hidden[rows], q_resid[rows], (cos[rows], sin[rows])

    prompt_starts = packed(indexer, lengths)[3:]
    out = indexer(*take(prompt), *prompt_starts, kv_cache=cache, slots=slots_of(table, lengths))
    assert torch.equal(out, expected[prompt])
    for step in range(0, steps, next_n):
        seen = torch.tensor(lengths)[:, None] + step + 1 + torch.arange(next_n)
        rows = (first[:, None] + seen - 1).flatten()
        context_lens = (seen if lens_of_each_query else seen[:, -1]).int()
        paging = dict(kv_cache=cache, context_lens=context_lens, block_table=table, max_context_len=100)
        assert torch.equal(indexer.decode(*take(rows), **paging), expected[rows])


def test_prefill_over_cached_tokens():
    indexer = make()
    hidden, q_resid, (cos, sin), starts, ends = packed(indexer, (70,))
    expected = indexer(hidden, q_resid, (cos, sin), starts, ends)
    cache, table = paged((70,))
    slots = slots_of(table, (70,))
    for part in (slice(0, 30), slice(30, 70)):
        chunk = hidden[part], q_resid[part], (cos[part], sin[part]), starts[part], ends[part]
        kv_slots = slots[: part.stop]
        out = indexer(*chunk, kv_cache=cache, slots=slots[part], kv_slots=kv_slots)
        assert torch.equal(out, expected[part])


def test_decode_leaves_out_what_has_no_place():
    """An unused row, a context longer than its table, block ids that the cache does not have."""
    indexer = make()
    cache, table = paged((0,) * 5, blocks_each=1)
    table[2], table[3] = 1 << 30, -(1 << 30)  # 64 times as much wraps to 0 in 32 bits
    hidden, q_resid, embeddings, *_ = packed(indexer, (5,))
    lens = torch.tensor([0, 65, 1, 1, 1], dtype=torch.int32)
    paging = dict(kv_cache=cache, context_lens=lens, block_table=table, max_context_len=64)
    selected = indexer.decode(hidden, q_resid, embeddings, **paging)
    assert selected[0].tolist() == [-1] * 8
    written = cache.flatten(1).any(1).nonzero().flatten().tolist()
    assert written == table[4].tolist()


@pytest.mark.parametrize("blocks", [0, 3])
def test_decode_without_blocks(blocks):
    indexer = make()
    hidden, q_resid, embeddings, *_ = packed(indexer, (2,))
    paging = dict(
        kv_cache=new_kv_cache(3 - blocks, 32, device="cpu"),
        context_lens=torch.ones(2, dtype=torch.int32),
        block_table=torch.zeros(2, blocks, dtype=torch.int32),
        max_context_len=10,
    )
    assert (indexer.decode(hidden, q_resid, embeddings, **paging) == -1).all()


# The module.


def test_state_dict_is_the_checkpoint():
    shapes = {name: (value.dtype, tuple(value.shape)) for name, value in make().state_dict().items()}
    assert shapes == {
        "wq_b.weight": (torch.float8_e4m3fn, (1024, 48)),
        "wq_b.weight_scale_inv": (torch.float32, (8, 1)),
        "wk.weight": (torch.float8_e4m3fn, (32, 96)),
        "wk.weight_scale_inv": (torch.float32, (1, 1)),
        "k_norm.weight": (torch.bfloat16, (32,)),
        "k_norm.bias": (torch.bfloat16, (32,)),
        "weights_proj.weight": (torch.float32, (32, 96)),
    }
    other = make(seed=5)
    other.load_state_dict(make().state_dict())
    arguments = packed(other)
    assert torch.equal(other(*arguments), make()(*arguments))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs(dtype):
    indexer = make(dtype=dtype)
    hidden, q_resid, embeddings, starts, ends = packed(indexer, dtype=dtype)
    ours = indexer(hidden, q_resid, embeddings, starts, ends)
    expected = scores(*operands(indexer, hidden, q_resid, *embeddings, quantize=False))
    for row, score, start, end in zip(ours.tolist(), expected, starts.tolist(), ends.tolist(), strict=True):
        best = set(score[start:end].topk(min(8, end - start)).indices.tolist())
        assert len(best & set(row)) >= len(best) - 3


def transformers_indexer(name, **changes):
    transformers = pytest.importorskip("transformers")
    sizes = {"index_n_heads": 32, "index_head_dim": 32, "index_topk": 8, "qk_rope_head_dim": 16} | changes
    config = transformers.AutoConfig.for_model(name, hidden_size=96, q_lora_rank=48, num_attention_heads=4, **sizes)
    if name == "deepseek_v32":
        from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Indexer as Indexer
    else:
        from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaIndexer as Indexer
    torch.manual_seed(0)
    return Indexer(config, 0).eval()


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_from_transformers(name):
    theirs = transformers_indexer(name)
    ours = FP8MQAIndexer.from_transformers(theirs)
    assert ours.wq_b is theirs.wq_b and ours.weights_proj is theirs.weights_proj and not ours.training
    hidden, q_resid, (cos, sin), starts, ends = packed(ours, (40,))
    selected = ours(hidden, q_resid, (cos, sin), starts, ends)
    mask = torch.ones(1, 40, 40, dtype=torch.bool).tril()
    forward = getattr(type(theirs).forward, "__wrapped__", type(theirs).forward)  # not as register() has it
    expected = forward(theirs, hidden[None], q_resid[None], (cos[None], sin[None]), mask, None)[0]
    overlap = [len(set(a) & set(b)) for a, b in zip(selected[8:].tolist(), expected[8:].tolist(), strict=True)]
    # Rotating other pairs of values, or none, leaves less than 0.75.
    assert sum(overlap) / len(overlap) / 8 > 0.95
    assert replace_linears(ours, skip=("weights_proj",)) == ["wq_b", "wk"]
    assert type(ours.wk) is FP8Linear and type(theirs.wk) is nn.Linear


def test_from_transformers_refuses_others():
    with pytest.raises(TypeError, match="indexer: expected a DeepseekV32Indexer or GlmMoeDsaIndexer, got Linear"):
        FP8MQAIndexer.from_transformers(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"num_heads: expected one of \(32, 64\), got 16"):
        FP8MQAIndexer.from_transformers(transformers_indexer("deepseek_v32", index_n_heads=16))


def test_norm_and_projection_in_their_own_dtypes():
    indexer = make()
    indexer.k_norm.float()
    arguments = packed(indexer, dtype=torch.bfloat16)
    assert indexer(*arguments).shape == (sum(LENGTHS), 8)
    assert replace_linears(indexer) == ["weights_proj"]
    assert indexer(*arguments).shape == (sum(LENGTHS), 8)


def test_nothing_is_recorded():
    indexer = make()
    hidden, *rest = packed(indexer)
    assert not indexer(hidden.requires_grad_(), *rest).requires_grad


@pytest.mark.parametrize("dynamic", [None, True])
def test_compile(dynamic, fresh_compiler):
    indexer = make()
    arguments = packed(indexer)
    compiled = torch.compile(indexer, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    assert torch.equal(compiled(*arguments), indexer(*arguments))
    cache, table = paged((1, 1))
    other = cache.clone()
    hidden, q_resid, embeddings, *_ = packed(indexer, (2,))
    paging = dict(context_lens=torch.ones(2, dtype=torch.int32), block_table=table, max_context_len=64)
    decode = torch.compile(indexer.decode, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    out = decode(hidden, q_resid, embeddings, kv_cache=cache, **paging)
    assert torch.equal(out, indexer.decode(hidden, q_resid, embeddings, kv_cache=other, **paging))
    assert torch.equal(cache, other) and cache.any()


def test_a_nan_reaches_what_depends_on_it():
    indexer = make(top_k=1)
    hidden, q_resid, embeddings, starts, ends = packed(indexer, (6, 6))
    before = indexer(hidden, q_resid, embeddings, starts, ends)
    hidden = hidden.clone()
    hidden[2] = float("nan")
    after = indexer(hidden, q_resid, embeddings, starts, ends)
    assert after[3:6, 0].tolist() == [2] * 3  # PyTorch's top-k puts NaN first
    assert torch.equal(after[6:], before[6:]) and torch.equal(after[:2], before[:2])


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"num_heads": 48}, ValueError, r"num_heads: expected one of \(32, 64\), got 48"),
        ({"head_dim": 96}, ValueError, r"head_dim: expected one of \(32, 64, 128\), got 96"),
        ({"rope_head_dim": 7}, ValueError, "rope_head_dim: expected an even number, at most the head_dim 32, got 7"),
        ({"rope_head_dim": 34}, ValueError, "rope_head_dim: expected an even number"),
        ({"top_k": 0}, ValueError, "top_k: expected at least 1, got 0"),
        ({"hidden_size": 0}, ValueError, "hidden_size: expected at least 1, got 0"),
        ({"dtype": torch.float64}, TypeError, "dtype: expected torch.bfloat16, torch.float16 or torch.float32"),
        ({"scale_format": "e8"}, ValueError, "scale_format: expected one of"),
        ({"top_k": 2.5}, TypeError, "top_k: expected an int, got float 2.5"),
        ({"num_heads": 32.0}, TypeError, "num_heads: expected an int, got float 32.0"),
        ({"rope_head_dim": 16.0}, TypeError, "rope_head_dim: expected an int, got float 16.0"),
    ],
)
def test_refused_sizes(changes, error, message):
    refused(error, message, make, **changes)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"hidden_states": [0.0]}, TypeError, "hidden_states: expected a torch.Tensor, got list"),
        ({"hidden_states": torch.zeros(1, 6, 96)}, ValueError, r"hidden_states: expected shape \(any, 96\), got \(1"),
        ({"hidden_states": torch.zeros(6, 90)}, ValueError, r"hidden_states: expected shape \(any, 96\), got \(6, "),
        ({"hidden_states": torch.zeros(6, 96).double()}, TypeError, "hidden_states: expected bfloat16, float16 or"),
        ({"q_resid": torch.zeros(5, 48)}, ValueError, r"q_resid: expected shape \(6, 48\), got \(5, 48\)"),
        ({"q_resid": torch.zeros(6, 40)}, ValueError, r"q_resid: expected shape \(6, 48\), got \(6, 40\)"),
        ({"q_resid": torch.zeros(6, 48, device="meta")}, ValueError, "q_resid: expected on cpu like hidden_states"),
        ({"position_embeddings": (torch.zeros(6, 16),)}, TypeError, "position_embeddings: expected a .cos, sin. pair"),
        ({"position_embeddings": (None, None)}, TypeError, "position_embeddings, cos: expected a torch.Tensor, got"),
        ({"position_embeddings": [torch.zeros(6, 8)] * 2}, ValueError, r"position_embeddings, cos: .* \(6, 16\), got"),
        ({"starts": [0] * 6}, TypeError, "starts: expected a torch.Tensor, got list"),
        ({"starts": torch.zeros(7, dtype=torch.int32)}, ValueError, r"starts: expected shape \(6,\), got \(7,\)"),
        ({"starts": torch.zeros(6, dtype=torch.int64)}, TypeError, "starts: expected int32, got torch.int64"),
        ({"ends": torch.zeros(6)}, TypeError, "ends: expected int32, got torch.float32"),
        ({"ends": torch.zeros(6, dtype=torch.int32, device="meta")}, ValueError, "ends: expected on cpu like"),
        ({"slots": torch.zeros(5, dtype=torch.int32)}, ValueError, r"slots: expected shape \(6,\), got \(5,\)"),
        ({"slots": None}, ValueError, "kv_cache, slots, kv_slots: expected a cache with slots"),
        ({"kv_cache": None}, ValueError, "kv_cache, slots, kv_slots: expected a cache with slots"),
        ({"kv_cache": None, "slots": None}, ValueError, "kv_cache, slots, kv_slots: expected a cache with slots"),
        ({"kv_cache": new_kv_cache(2, 64, device="cpu")}, ValueError, r"kv_cache: expected shape \(any, 64, 1, 36\)"),
        ({"kv_slots": torch.zeros(6, dtype=torch.int64)}, TypeError, "kv_slots: expected int32, got torch.int64"),
        ({"kv_slots": torch.zeros((), dtype=torch.int32)}, ValueError, r"kv_slots: expected shape \(any,\), got \(\)"),
        ({"kv_slots": torch.zeros(6, dtype=torch.int32, device="meta")}, ValueError, "kv_slots: expected on cpu like"),
    ],
)
def test_prefill_refuses_before_it_writes(changes, error, message):
    indexer = make()
    slots = torch.arange(6, dtype=torch.int32)
    names = ("hidden_states", "q_resid", "position_embeddings", "starts", "ends")
    given = dict(zip(names, packed(indexer, (6,)), strict=True))
    given |= dict(kv_cache=new_kv_cache(2, 32, device="cpu"), slots=slots, kv_slots=slots) | changes
    refused(error, message, indexer, **given)
    assert given["kv_cache"] is None or not given["kv_cache"].any()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"hidden_states": torch.zeros(6, 90)}, ValueError, r"hidden_states: expected shape \(any, 96\), got \(6, "),
        ({"block_table": torch.zeros(4, 2, dtype=torch.int32)}, ValueError, "hidden_states: expected the same number"),
        ({"block_table": torch.zeros(0, 2, dtype=torch.int32)}, ValueError, "hidden_states: expected the same number"),
        (
            {"block_table": torch.zeros(1, 2, dtype=torch.int32)},
            ValueError,
            "hidden_states: .* rows, 1 to 4, for each of",
        ),
        ({"block_table": torch.zeros(7, 2, dtype=torch.int32)}, ValueError, "hidden_states: expected the same number"),
        ({"block_table": None}, TypeError, "block_table: expected a torch.Tensor, got NoneType"),
        ({"block_table": torch.zeros((), dtype=torch.int32)}, ValueError, r"block_table: expected shape \(B, max_b"),
        ({"block_table": torch.zeros(3, 2)}, TypeError, "block_table: expected int32, got torch.float32"),
        ({"context_lens": [2, 2, 2]}, TypeError, "context_lens: expected a torch.Tensor, got list"),
        ({"context_lens": torch.ones(3, dtype=torch.int64)}, TypeError, "context_lens: expected int32"),
        ({"context_lens": torch.ones(4, dtype=torch.int32)}, ValueError, "context_lens: expected shape"),
        ({"max_context_len": 64.0}, TypeError, "max_context_len: expected an int, got float"),
        ({"max_context_len": -1}, ValueError, "max_context_len: expected 0 to"),
        ({"kv_cache": None}, TypeError, "kv_cache: expected a torch.Tensor, got NoneType"),
        ({"kv_cache": new_kv_cache(7, 64, device="cpu")}, ValueError, "kv_cache: expected"),
    ],
)
def test_decode_refuses_before_it_writes(changes, error, message):
    indexer = make()
    cache, table = paged((1, 1, 1))
    given = dict(zip(("hidden_states", "q_resid", "position_embeddings"), packed(indexer, (6,)), strict=False))
    given |= dict(kv_cache=cache, context_lens=torch.full((3,), 2, dtype=torch.int32), block_table=table)
    given |= dict(max_context_len=64) | changes
    refused(error, message, indexer.decode, **given)
    assert given["kv_cache"] is None or not given["kv_cache"].any()
