"""Operands of `prompt_attention`, what it computes in float64, and its tokens decoded by `decode_attention`."""

import torch

import fp8moe
from fp8moe.kernels.decoder_ops.decode_attention import StaticCache, decode_attention
from fp8moe.kernels.decoder_ops.prompt_attention import prompt_attention

# query heads of a key head, key heads, values of a head
HEADS = ((1, 2, 16), (2, 2, 64), (3, 1, 80), (4, 1, 256), (7, 1, 40), (8, 4, 128), (16, 1, 192), (20, 1, 64))


def make(lengths, heads, dtype=torch.bfloat16, seed=0, spread=1.0):
    """q, keys, values of packed sequences, the last two views of one projection, and what describes the sequences."""
    group, key_heads, size = heads
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    q = torch.randn(tokens, group * key_heads, size, generator=generator) * spread
    keys, values = torch.randn(tokens, 2 * key_heads, size, generator=generator).to(dtype).split(key_heads, 1)
    return q.to(dtype), keys, values, sequences_of(lengths)


def sequences_of(lengths):
    """The description (3, B + 1) of packed sequences."""
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return torch.stack([ends, ends, torch.tensor([*lengths, 0])]).int()


def moved(operands, device):
    return tuple(x.to(device) for x in operands)


def attend(q, keys, values, sequences, **how):
    """All results, for sequences of up to all queries."""
    return prompt_attention(q, keys, values, sequences, most_queries=how.pop("most_queries", len(q)), **how)


def expected(q, keys, values, sequences, window=None):
    """The attention and the logarithms of sums in float64; queries that see no keys have 0 and infinity."""
    tokens, heads, size = q.shape
    out = torch.zeros(q.shape, dtype=torch.float64)
    logsumexp = torch.full((heads, tokens), torch.inf, dtype=torch.float64)
    group = heads // keys.shape[1]
    first_query, first_key, count = sequences.tolist()
    for b in range(len(count) - 1):
        for query in range(first_query[b], first_query[b + 1]):
            end = first_key[b] + count[b] - (first_query[b + 1] - 1 - query)
            begin = first_key[b] if window is None else max(first_key[b], end - window)
            if end <= begin:
                continue
            seen_keys, seen_values = (x[begin:end].double().repeat_interleave(group, 1) for x in (keys, values))
            scores = torch.einsum("hd,khd->hk", q[query].double(), seen_keys) * size**-0.5
            out[query] = torch.einsum("hk,khd->hd", scores.softmax(-1), seen_values)
            logsumexp[:, query] = scores.logsumexp(-1)
    return out, logsumexp


def cache_of(keys, values, positions, begin, length):
    """A static cache whose row i has the keys of positions 0 to positions[i], from column begin[i] on, amid NaN."""
    shape = len(positions), keys.shape[1], length, keys.shape[2]
    cached = [torch.full(shape, torch.nan, dtype=keys.dtype, device=keys.device) for _ in range(2)]
    for i, (position, first) in enumerate(zip(positions, begin, strict=True)):
        for cache, x in zip(cached, (keys, values), strict=True):
            cache[i, :, first : first + position + 1] = x[: position + 1].transpose(0, 1)
    begin = torch.tensor(begin, device=keys.device)
    return StaticCache(*cached, begin, begin + torch.tensor(positions, device=keys.device))


def decoded(q, keys, values, positions, begin=None, room=3, window=None):
    """The attention (B, heads, D) of tokens of one sequence, each decoded in a row of a batch."""
    begin = [i % 5 * 7 for i in range(len(positions))] if begin is None else begin
    length = max(first + position for first, position in zip(begin, positions, strict=True)) + 1 + room
    cache = cache_of(keys, values, positions, begin, length)
    with fp8moe.batch_invariant():
        out = decode_attention(q[positions], cache, window=window)
    return out.view(-1, *q.shape[1:])


def same(one, other):
    """Equal bits."""
    one, other = (x.contiguous().view(-1).view(torch.uint8) for x in (one, other))
    return torch.equal(one, other)


def assert_decoded_alike(q, keys, values, out, positions, window=None):
    """Tokens of one sequence alone and in batches have the bits that they have in its prompt."""
    positions = [position for position in positions if position < len(q)]
    assert same(decoded(q, keys, values, positions, window=window), out[positions])
    for position in positions[:: max(len(positions) // 4, 1)]:
        assert same(decoded(q, keys, values, [position], [9], 70, window=window)[0], out[position]), position


def assert_chunks_alike(q, keys, values, out, logsumexp, ends, padding, window=None):
    """Prompts that end at these positions, their last tokens after a cache, behind padding and packed."""
    whole, tokens = list(zip((0, *ends), ends, strict=False)), len(q)
    for first, end in whole:
        for pad in (0, padding):
            ahead = q.new_full((pad, *q.shape[1:]), torch.nan)
            rows = torch.cat([ahead, q[first:end]])
            description = torch.tensor([[0, len(rows)], [0, tokens], [end, 0]]).int()
            if pad and first:
                continue
            found, sums = attend(rows, keys, values, description.to(q.device), window=window)
            assert same(found[pad:], out[first:end]) and same(sums[:, pad:], logsumexp[:, first:end]), (first, end)
            assert (found[:pad] == 0).all() and sums[:, :pad].isposinf().all()
    chunks = torch.tensor([[*(first for first, _ in whole), ends[-1]], [0] * (len(ends) + 1), [*ends, 0]]).int()
    found, sums = attend(q[: ends[-1]], keys, values, chunks.to(q.device), window=window)
    assert same(found, out[: ends[-1]]) and same(sums, logsumexp[:, : ends[-1]])
