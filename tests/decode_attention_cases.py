"""Operands of `decode_attention`, and what it computes in float64."""

import torch

from fp8moe.kernels.decoder_ops import fp8_cache
from fp8moe.kernels.decoder_ops.decode_attention import StaticCache, decode_attention
from fp8moe.kernels.decoder_ops.rotary import NewTokens, rotary
from fp8moe.quant.formats import FP8Tensor

# sequences; query heads of a key head, key heads, values of a head, of which are rotated, with norms; columns; window
SHAPES = (
    (1, (8, 4, 128, 128, True), 5000, None),
    (3, (1, 2, 64, 32, False), 257, None),
    (5, (7, 1, 40, 16, True), 100, 20),
    (2, (4, 3, 256, 256, True), 640, None),
    (64, (8, 2, 128, 128, True), 300, 100),
    (8, (8, 4, 128, 64, False), 700, None),
    (4, (20, 2, 64, 64, True), 300, None),
    (40, (12, 8, 128, 64, False), 90, None),
    (3, (2, 2, 16, 16, False), 1, None),
    (6, (8, 8, 64, 64, False), 700, 128),  # GPT-OSS
    (4, (3, 2, 64, 64, False), 37, 1),
    (2, (8, 2, 64, 64, False), 50, 1000),
)


FP8_SHAPES = [shape for shape in SHAPES if not shape[1][2] % 16]


def make(batch, heads, length, dtype=torch.bfloat16, seed=0, window=None):
    """q, keys, values, begin, columns, and the new tokens: views of one projection. Unseen columns are full of NaN."""
    group, key_heads, size, rotated, norm = heads
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    parts = [key_heads * group * size, key_heads * size, key_heads * size]
    q, k, v = (x.view(batch, -1, size) for x in normal(batch, sum(parts)).split(parts, dim=1))
    columns = torch.randint(0, length, (batch,), generator=generator)
    begin = (torch.rand(batch, generator=generator) * (columns + 1)).long()
    begin[-1] = columns[-1]  # a single token
    begin[0], columns[0] = 0, length - 1
    column = torch.arange(length)
    first = begin if window is None else torch.maximum(begin, columns + 1 - window)
    unseen = (column < first[:, None]) | (column >= columns[:, None])
    cache = [normal(batch, key_heads, length, size).masked_fill(unseen[:, None, :, None], torch.nan) for _ in range(2)]
    angles = torch.rand(batch, rotated // 2, generator=generator) * 6
    cos, sin = (torch.cat([table(angles)] * 2, 1).to(dtype) for table in (torch.cos, torch.sin))
    weights = (1 + 0.1 * normal(2, size)).unbind() if norm else (None, None)
    return (q, *cache, begin, columns), NewTokens(k, v, cos, sin, *weights, eps=1e-6)


def make_sinks(heads, dtype):
    """A sink of each query head, or None without a dtype; those of the first and the last head take nothing and all."""
    if dtype is None:
        return None
    sinks = 2 * torch.randn(heads[0] * heads[1], generator=torch.Generator().manual_seed(1))
    sinks[0], sinks[-1] = -torch.inf, 3e38 if dtype is not torch.float16 else 6e4
    return sinks.to(dtype)


def attend(q, keys, values, begin, columns, **how):
    """`decode_attention` of what `make` returns first."""
    return decode_attention(q, StaticCache(keys, values, begin, columns), **how)


def in_fp8(q, keys, values, *places):
    """What `make` returns first, with a cache in FP8. Columns of NaN have codes and scales of NaN."""
    return q, fp8_cache.quantized(keys), fp8_cache.quantized(values), *places


def exact(cache):
    """Keys or values in float64."""
    return cache.data.double() * cache.scale.double() if isinstance(cache, FP8Tensor) else cache.double()


def bits(cache):
    """The bits of keys or values, with those of their scales, as integers."""
    parts = cache if isinstance(cache, FP8Tensor) else (cache,)
    return torch.cat([part.contiguous().flatten().view(torch.uint8).cpu() for part in parts])


def copied(cache):
    return FP8Tensor(*(part.clone() for part in cache)) if isinstance(cache, FP8Tensor) else cache.clone()


def moved(value, device):
    if isinstance(value, NewTokens | FP8Tensor):
        return type(value)(*(moved(part, device) for part in value))
    return value.to(device) if isinstance(value, torch.Tensor) else value


def expected(q, keys, values, begin, columns, new, window=None, sinks=None):
    """The attention (B, heads * D) in float64, and the cache with the new tokens."""
    keys, values = copied(keys), copied(values)
    if new is not None:
        tokens = NewTokens(*(x[:, None] for x in new[:4]), *new[4:])
        q = rotary(q[:, None], tokens, keys, values, columns=columns)[:, 0]
    batch, heads, size = q.shape
    exact_keys, exact_values = exact(keys), exact(values)
    group = heads // exact_keys.shape[1]
    out = torch.zeros(batch, heads, size, dtype=torch.float64)
    for b in range(batch):
        last = int(columns[b])
        first = int(begin[b]) if window is None else max(int(begin[b]), last + 1 - window)
        for head in range(heads):
            seen_keys, seen_values = (x[b, head // group, first : last + 1] for x in (exact_keys, exact_values))
            scores = seen_keys @ q[b, head].double() * size**-0.5
            if sinks is not None:
                scores = torch.cat([scores, sinks[head, None].double()])
            out[b, head] = scores.softmax(0)[: len(seen_keys)] @ seen_values
    return out.flatten(1), keys, values
