"""Operands of the MQA logits, what they give in float64, and the comparison, for tests on the CPU and on a GPU."""

from typing import NamedTuple

import torch
from torch import Tensor

from fp8moe.kernels.indexer import checks
from fp8moe.quant.formats import FP8Tensor
from fp8moe.quant.quantize import quantize_1x128
from tests.gemm_cases import int32

NUM_HEADS = (32, 64)
HEAD_DIMS = (32, 64, 128)
INT32 = torch.iinfo(torch.int32)
TOLERANCE = 1e-3
"""Relative Frobenius error; of one entry, its error against the same sum over absolute products."""

POISON = -12345.0
"""A finite value that no operands here give exactly: entries that must not be written keep it."""


def generator(device: str, seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def random_fp8(*shape: int, device: str = "cpu", seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=generator(device, seed), device=device).to(torch.float8_e4m3fn)


def random_scale(*shape: int, device: str = "cpu", seed: int = 0) -> Tensor:
    """Scales of very different magnitudes, so that one applied to the wrong key shows."""
    return torch.rand(shape, generator=generator(device, seed), device=device).mul_(4).exp_().mul_(1e-2)


def random_weights(*shape: int, device: str = "cpu", seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=generator(device, seed), device=device)


class Prefill(NamedTuple):
    """q (S, H, D), kv of data (T, D) and scale (T,), weights (S, H), starts and ends (S,)."""

    q: Tensor
    kv: FP8Tensor
    weights: Tensor
    starts: Tensor
    ends: Tensor


class Paged(NamedTuple):
    """q (B, next_n, H, D), weights (B * next_n, H), context_lens (B,) or (B, next_n), block_table (B, max_blocks)."""

    q: Tensor
    kv_cache: Tensor
    weights: Tensor
    context_lens: Tensor
    block_table: Tensor


# Operands.


def ranges(kind: str, tokens: int, keys: int) -> tuple[list[int], list[int]]:
    """starts and ends of `tokens` queries over `keys` keys; see RANGES."""
    draw = torch.Generator().manual_seed(tokens * 1009 + keys)
    some = torch.randint(-keys // 4 - 1, keys + keys // 4 + 2, (2, tokens), generator=draw)
    if kind == "full":
        return [0] * tokens, [keys] * tokens
    if kind == "causal":
        return [0] * tokens, [keys - tokens + 1 + s for s in range(tokens)]
    if kind == "packed":  # two to four sequences, each with keys of its own
        cuts = [0, tokens // 5, tokens // 5 + 1, tokens // 2, tokens]
        key_cuts = [keys * cut // max(tokens, 1) for cut in cuts]
        of = [sum(s >= cut for cut in cuts[1:]) for s in range(tokens)]
        return [key_cuts[i] for i in of], [key_cuts[i] + 1 + s - cuts[i] for s, i in enumerate(of)]
    if kind == "ragged":  # also negative, reversed, past the end
        return some[0].tolist(), some[1].tolist()
    if kind == "reversed":
        return some.amax(0).tolist(), some.amin(0).tolist()
    if kind == "extremes":
        starts = [INT32.min, INT32.max, 0, -1, keys, INT32.min, INT32.max]
        ends = [INT32.max, INT32.min, INT32.max, keys + 1, keys, INT32.min, INT32.max]
        return [starts[s % 7] for s in range(tokens)], [ends[s % 7] for s in range(tokens)]
    if kind == "one key":
        return [s * 7 % max(keys, 1) for s in range(tokens)], [s * 7 % max(keys, 1) + 1 for s in range(tokens)]
    raise ValueError(kind)


RANGES = ("full", "causal", "packed", "ragged", "reversed", "extremes", "one key")


def prefill(
    tokens: int,
    keys: int,
    *,
    heads: int = 64,
    head_dim: int = 128,
    kind: str = "causal",
    device: str = "cpu",
    seed: int = 0,
) -> Prefill:
    kv = FP8Tensor(random_fp8(keys, head_dim, device=device, seed=seed + 1), random_scale(keys, device=device))
    return Prefill(
        random_fp8(tokens, heads, head_dim, device=device, seed=seed),
        kv,
        random_weights(tokens, heads, device=device, seed=seed + 2),
        *(int32(bounds, device) for bounds in ranges(kind, tokens, keys)),
    )


def random_cache(num_blocks: int, head_dim: int, *, device: str = "cpu", seed: int = 0) -> Tensor:
    """Blocks full of keys and scales."""
    data = random_fp8(num_blocks, 64 * head_dim, device=device, seed=seed)
    scale = random_scale(num_blocks, 64, device=device, seed=seed)
    blocks = torch.cat([data.view(torch.uint8), scale.view(torch.uint8)], dim=1)
    return blocks.view(num_blocks, 64, 1, head_dim + 4)


def paged(
    context_lens: list,
    *,
    next_n: int = 1,
    heads: int = 64,
    head_dim: int = 128,
    max_blocks: int | None = None,
    device: str = "cpu",
    seed: int = 0,
) -> Paged:
    """Sequences with blocks of their own in random order, and block ids out of range past their contexts."""
    batch = len(context_lens)
    used = [-(-max(lens if isinstance(lens, list) else [lens]) // 64) for lens in context_lens]
    max_blocks = max(used, default=0) if max_blocks is None else max_blocks
    used = [min(max(blocks, 0), max_blocks) for blocks in used]
    num_blocks = sum(used) + 3
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).int()
    table = torch.full((batch, max_blocks), INT32.max, dtype=torch.int32)
    for b, blocks in enumerate(used):
        first = sum(used[:b])
        table[b, :blocks] = order[first : first + blocks]
    return Paged(
        random_fp8(batch, next_n, heads, head_dim, device=device, seed=seed),
        random_cache(num_blocks, head_dim, device=device, seed=seed + 1),
        random_weights(batch * next_n, heads, device=device, seed=seed + 2),
        int32(context_lens, device),
        table.to(device),
    )


# Exact results.


class Exact(NamedTuple):
    """Logits in float64, -inf where they are masked, and the same sums over absolute values, which bound rounding."""

    logits: Tensor
    magnitude: Tensor


def scores(q: Tensor, kv: FP8Tensor, weights: Tensor) -> Exact:
    """Unmasked: q (S, H, D), kv (T, D) and (T,), weights (S, H) -> (S, T) float64."""
    data, scale = kv
    logits = torch.empty(q.shape[0], data.shape[0], dtype=torch.float64, device=q.device)
    magnitude = torch.empty_like(logits)
    keys = data.double().t()
    for s, (queries, weight) in enumerate(zip(q.double(), weights.double(), strict=True)):
        logits[s] = weight @ (queries @ keys).relu()
        magnitude[s] = weight.abs() @ (queries.abs() @ keys.abs())
    return Exact(logits.mul_(scale), magnitude.mul_(scale))


def exact_prefill(operands: Prefill, rows: slice = slice(None)) -> Exact:
    """Of some of the queries."""
    q, kv, weights, starts, ends = operands
    logits, magnitude = scores(q[rows], kv, weights[rows])
    for row, start, end in zip(logits, starts[rows].tolist(), ends[rows].tolist(), strict=True):
        row[: max(start, 0)] = float("-inf")
        row[max(end, 0) :] = float("-inf")
    return Exact(logits, magnitude)


def from_starts(exact: Exact, starts: Tensor, max_range: int) -> Exact:
    """Each row from where its range starts on, max_range columns of it."""

    def shifted(values: Tensor, missing: float) -> Tensor:
        out = values.new_full((len(values), max_range), missing)
        for row, value, start in zip(out, values, starts.clamp(min=0).tolist(), strict=True):
            part = value[start : start + max_range]
            row[: len(part)] = part
        return out

    return Exact(shifted(exact.logits, float("-inf")), shifted(exact.magnitude, 0.0))


def exact_paged(operands: Paged, max_context_len: int, sequences: range | None = None) -> Exact:
    """Of some of the sequences."""
    q, kv_cache, weights, context_lens, block_table = operands
    batch, next_n, _, head_dim = q.shape
    num_blocks, max_blocks = kv_cache.shape[0], block_table.shape[1]
    longest = min(max_context_len, 64 * max_blocks) if num_blocks else 0
    sequences = range(batch) if sequences is None else sequences
    logits = torch.full((len(sequences), next_n, max_context_len), float("-inf"), dtype=torch.float64, device=q.device)
    magnitude = torch.zeros_like(logits)
    for i, b in enumerate(sequences):
        lens = context_lens[b].tolist()
        if context_lens.dim() == 1:
            lens = [lens - next_n + 1 + j for j in range(next_n)]
        lens = [min(max(length, 0), longest) for length in lens]
        if not max(lens):
            continue
        kv = read_cache(kv_cache, block_table[b], max(lens))
        some = scores(q[b], kv, weights[b * next_n : (b + 1) * next_n])
        for j, length in enumerate(lens):
            logits[i, j, :length] = some.logits[j, :length]
            magnitude[i, j, :length] = some.magnitude[j, :length]
    return Exact(logits.flatten(0, 1), magnitude.flatten(0, 1))


def read_cache(kv_cache: Tensor, blocks: Tensor, tokens: int) -> FP8Tensor:
    """The first tokens of a sequence with these blocks, clamped to those that there are."""
    num_blocks, _, _, width = kv_cache.shape
    head_dim = width - 4
    token = torch.arange(tokens, device=kv_cache.device)
    of_block = kv_cache.view(num_blocks, -1)[blocks.clamp(0, num_blocks - 1)[token // 64].long()]
    place = (token % 64)[:, None]
    data = of_block.gather(1, place * head_dim + torch.arange(head_dim, device=kv_cache.device))
    scale = of_block.gather(1, 64 * head_dim + place * 4 + torch.arange(4, device=kv_cache.device))
    return FP8Tensor(data.view(torch.float8_e4m3fn), scale.view(torch.float32).squeeze(1))


# Comparisons.


def assert_matches(out: Tensor, exact: Exact, *, masked: float = float("-inf")) -> None:
    """Logits within TOLERANCE, as a whole and one by one; `masked` exactly where -inf must be."""
    logits, magnitude = exact
    assert out.shape == logits.shape and out.dtype == torch.float32
    seen = logits != float("-inf")
    assert torch.equal(out != masked, seen)
    error = torch.where(seen, out.double() - logits, 0.0)
    assert (error.abs() <= TOLERANCE * magnitude).all()
    assert error.norm() <= TOLERANCE * torch.where(seen, logits, 0.0).norm()


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def write_prefill(write, operands: Prefill, *, fill_masked: bool, max_range: int | None = None) -> Tensor:
    """What `write` (`reference.mqa_logits` or `launch`) makes of a result full of POISON, none of it behind the result.

    max_range: columns, each row from where its range starts on.
    """
    q, (data, scale), *rest = operands
    given = checks.Prefill(q, data, scale, *rest, max_range, max_range is not None, fill_masked)
    columns = data.shape[0] if max_range is None else max_range
    return _write((q.shape[0], columns), q.device, lambda out: write(given, out))


def check_prefill(write, operands: Prefill, *max_ranges: int) -> None:
    """What `write` writes, with and without -inf, by key and in rows of max_ranges from the start of each range on."""
    exact = exact_prefill(operands)
    for max_range in (None, *max_ranges):
        expected = exact if max_range is None else from_starts(exact, operands.starts, max_range)
        assert_matches(write_prefill(write, operands, fill_masked=True, max_range=max_range), expected)
        out = write_prefill(write, operands, fill_masked=False, max_range=max_range)
        assert_matches(out, expected, masked=POISON)


def write_paged(write, operands: Paged, max_context_len: int, *, fill_masked: bool) -> Tensor:
    q, given = operands.q, checks.Paged(*operands, max_context_len, fill_masked)
    return _write((q.shape[0] * q.shape[1], max_context_len), q.device, lambda out: write(given, out))


def _write(shape: tuple[int, int], device: torch.device, run) -> Tensor:
    size, guard = shape[0] * shape[1], 1024
    memory = torch.full((guard + size + guard,), POISON, device=device)
    run(memory[guard : guard + size].view(shape))
    assert (memory[:guard] == POISON).all() and (memory[guard + size :] == POISON).all()
    return memory[guard : guard + size].view(shape)


# Where one NaN must show: in the entries that depend on it, and in no other.


def prefill_nans(operands: Prefill) -> list[tuple[Prefill, Tensor]]:
    """Causal operands with a NaN in one of them, and the entries (S, T) that see it, not all of a row or a column."""
    q, kv, weights, starts, ends = operands
    tokens, keys = q.shape[0], kv.data.shape[0]
    columns = torch.arange(keys, device=q.device)
    seen = (columns >= starts[:, None]) & (columns < ends[:, None])
    row, column = tokens // 2, keys - max(1, tokens // 3)
    of_row, of_column = torch.zeros_like(seen), torch.zeros_like(seen)
    of_row[row], of_column[:, column] = True, True
    unweighted = weights.clone()
    unweighted[row, 5] = 0
    return [
        (operands._replace(q=with_nan(q, row, 5, 3)), seen & of_row),
        (operands._replace(q=with_nan(q, row, 5, 3), weights=unweighted), seen & of_row),
        (operands._replace(kv=FP8Tensor(with_nan(kv.data, column, 7), kv.scale)), seen & of_column),
        (operands._replace(kv=FP8Tensor(kv.data, with_nan(kv.scale, column))), seen & of_column),
        (operands._replace(weights=with_nan(weights, row, 9)), seen & of_row),
    ]


def with_nan(value: Tensor, *index: int) -> Tensor:
    """A copy with one element NaN."""
    value = value.clone()
    if value.dtype is torch.float8_e4m3fn:
        value.view(torch.uint8)[index] = 0xFF  # the negative one: a maximum of bits or of signs would lose it
    else:
        value[index] = float("-nan")
    return value


def assert_nans(out: Tensor, without: Tensor, where: Tensor) -> None:
    assert where.any() and torch.equal(out.isnan(), where)
    assert same_bits(out[~where], without[~where])


def with_nan_key(kv_cache: Tensor, block: int, place: int, *, scale: bool) -> Tensor:
    """A copy with a NaN in the key, or in the scale, at a place of a block."""
    kv_cache = kv_cache.clone()
    num_blocks, _, _, width = kv_cache.shape
    head_dim = width - 4
    of_block = kv_cache.view(num_blocks, -1)[block]
    if scale:
        of_block.view(torch.float32)[16 * head_dim + place] = float("nan")
    else:
        of_block[place * head_dim + 11] = 0x7F
    return kv_cache


# Agreement with scores that nothing was quantized for.


def overlap(tokens: int, keys: int, top_k: int, logits, *, device: str = "cpu") -> float:
    """The mean share of top_k keys that float32 scores of unquantized random normal operands have in common with
    ``logits(q, kv, weights, starts, ends)`` of the quantized ones."""
    q, k, weights = (
        torch.randn(*shape, generator=generator(device, seed), device=device)
        for seed, shape in enumerate(((tokens, 64, 128), (keys, 128), (tokens, 64)))
    )
    plain = torch.stack([weight @ (queries @ k.t()).relu() for queries, weight in zip(q, weights, strict=True)])
    (q_data, q_scale), (k_data, k_scale) = quantize_1x128(q), quantize_1x128(k)
    quantized = logits(
        *(q_data, FP8Tensor(k_data, k_scale[:, 0]), weights * q_scale[..., 0]),
        *(int32([0] * tokens, device), int32([keys] * tokens, device)),
    )
    chosen = [torch.zeros_like(plain).scatter_(1, value.topk(top_k).indices, 1) for value in (plain, quantized)]
    return (chosen[0] * chosen[1]).sum().item() / (tokens * top_k)
