"""Index scores of sparse attention: ``mqa_logits`` over keys in a row, ``paged_mqa_logits`` over a paged cache.

S query tokens, T keys, H heads, D head width, B sequences, next_n query tokens of each (speculative decoding).
"""

import torch
from torch import Tensor

from fp8moe.kernels.indexer import checks, mqa_logits_plan, reference
from fp8moe.kernels.indexer.checks import Paged, Prefill
from fp8moe.quant.checks import fp8_operand
from fp8moe.quant.formats import FP8Tensor
from fp8moe.runtime import autograd
from fp8moe.runtime.backend import use_cuda
from fp8moe.runtime.checks import check_tensor
from fp8moe.runtime.operator import define


def mqa_logits(
    q: Tensor,
    kv: FP8Tensor | tuple[Tensor, Tensor],
    weights: Tensor,
    starts: Tensor,
    ends: Tensor,
    *,
    fill_masked: bool = True,
    max_range: int | None = None,
) -> Tensor:
    """``out[s, t] = kv.scale[t] * sum over h of weights[s, h] * relu(q[s, h] . kv.data[t])`` for t in the range of s.

    q: (S, H, D) float8_e4m3fn, H 32 or 64, D 32, 64 or 128. Its scales are the caller's to multiply into ``weights``.
    kv: keys, one for all heads, FP8Tensor or (data, scale): data (T, D) float8_e4m3fn, scale (T,) float32; T < 2**31.
    weights: (S, H) float32.
    starts, ends: (S,) int32, on the device of the operands: query s scores the keys ``starts[s]`` up to ``ends[s]``,
        both clamped to [0, T]; a range whose end comes before its start is empty.
    fill_masked: write -inf to entries outside of the ranges. Otherwise they are not written: uninitialized.
    max_range: an int: each row begins with its own range, ``out[s, i]`` is the score of key ``starts[s] + i``, and of a
        longer range the keys behind the first ``max_range`` are left out.
    Returns (S, T) float32, or (S, max_range). Products are summed in float32; a NaN in an operand reaches the entries
    that depend on it and no other. Equal inputs give equal bits.

    On the CUDA backend the host neither knows nor waits for the ranges, and only tiles that some range meets are
    computed, so that a call can be captured in a CUDA graph. Keys there may lie at any multiple of 16 bytes, such as
    ``cache[:, :D]`` of wider rows; operands in another layout are copied first. There is no backward: calling it raises
    RuntimeError. Method: the lightning indexer of DeepSeek-V3.2, arXiv:2512.02556, section 2.1.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong rank, size or device, or a max_range outside
    [0, 2**31).
    """
    for name, value in (("q", q), ("weights", weights), ("starts", starts), ("ends", ends)):
        check_tensor(name, value)
    if max_range is not None:
        checks.row_length("max_range", max_range)
    operands = Prefill(q, *fp8_operand("kv", kv), weights, starts, ends)
    return scores(operands, max_range, from_starts=max_range is not None, fill_masked=fill_masked)


def scores(operands: Prefill, columns: int | None, *, from_starts: bool, fill_masked: bool) -> Tensor:
    """`mqa_logits` with T columns (None), with more, or with any number of them from the start of each range on."""
    return autograd.run(_mqa_logits_op, "fp8moe.mqa_logits", *operands, columns, from_starts, fill_masked)


def paged_mqa_logits(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    *,
    max_context_len: int,
    fill_masked: bool = True,
) -> Tensor:
    """The scores of `mqa_logits` for the last next_n tokens of each sequence over the keys in a paged cache.

    q: (B, next_n, H, D) float8_e4m3fn, next_n 1 to 4, H 32 or 64, D 32, 64 or 128.
    kv_cache: (num_blocks, 64, 1, D + 4) uint8, contiguous, from a multiple of 16 bytes on, as described in
        `fp8moe.kernels.indexer.mqa_cache`.
    weights: (B * next_n, H) float32, with the scales of q.
    context_lens: (B,) int32, the cached tokens of each sequence: query j of next_n sees the first
        ``context_len - next_n + 1 + j``. Or (B, next_n) int32: a query sees exactly as many as it says. The number that
        a query sees is clamped to [0, min(max_context_len, 64 * max_blocks)].
    block_table: (B, max_blocks) int32: tokens 64 * i to 64 * i + 63 of sequence b are in block ``block_table[b, i]``,
        clamped to [0, num_blocks - 1]. Entries past the context may hold anything. Without any block
        (num_blocks or max_blocks 0) no query sees a token.
    max_context_len: an int, the number of columns of the result.
    fill_masked: write -inf to entries past what a query sees. Otherwise they are not written: uninitialized.
    Returns (B * next_n, max_context_len) float32; see `mqa_logits` for sums, NaN and gradients.

    On the CUDA backend the host neither knows nor waits for lengths and blocks, so that a call can be captured in a
    CUDA graph whose sequences grow between replays. Method: the lightning indexer of DeepSeek-V3.2, arXiv:2512.02556,
    section 2.1, over the paged cache of arXiv:2309.06180.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong rank, size or device, a cache that is not
    contiguous or not aligned, or a max_context_len outside [0, 2**31).
    """
    operands = (q, kv_cache, weights, context_lens, block_table)
    for name, value in zip(("q", "kv_cache", "weights", "context_lens", "block_table"), operands, strict=True):
        check_tensor(name, value)
    checks.row_length("max_context_len", max_context_len)
    return autograd.run(_paged_op, "fp8moe.paged_mqa_logits", *operands, max_context_len, fill_masked)


def _mqa_logits(*arguments: Tensor | int | None) -> Tensor:
    *operands, _, from_starts, fill_masked = arguments
    operands = Prefill(*operands)
    out = _mqa_logits_fake(*arguments)
    if out.numel() and operands.kv.shape[0]:
        backend = mqa_logits_plan if use_cuda(operands.q) else reference
        backend.mqa_logits(operands, out, fill_masked=fill_masked, from_starts=from_starts)
    elif fill_masked:
        out.fill_(-torch.inf)
    return out


def _mqa_logits_fake(*arguments: Tensor | int | None) -> Tensor:
    *operands, columns, _, _ = arguments
    queries, tokens = checks.prefill(Prefill(*operands))
    shape = queries, tokens if columns is None else columns
    return torch.empty(shape, dtype=torch.float32, device=operands[0].device)


def _paged(*arguments: Tensor | int) -> Tensor:
    operands, fill_masked = Paged(*arguments[:-2]), arguments[-1]
    out = _paged_fake(*arguments)
    checks.cache_address(operands.kv_cache)
    if out.numel():
        backend = mqa_logits_plan if use_cuda(operands.q) else reference
        backend.paged_mqa_logits(operands, out, fill_masked=fill_masked)
    return out


def _paged_fake(*arguments: Tensor | int) -> Tensor:
    *operands, max_context_len, _ = arguments
    shape = checks.paged(Paged(*operands)), max_context_len
    return torch.empty(shape, dtype=torch.float32, device=operands[0].device)


_mqa_logits_op = define(
    "mqa_logits(Tensor q, Tensor kv, Tensor kv_scale, Tensor weights, Tensor starts, Tensor ends, SymInt? columns, "
    "bool from_starts, bool fill_masked) -> Tensor",
    _mqa_logits,
    _mqa_logits_fake,
    forward_only=True,
)
_paged_op = define(
    "paged_mqa_logits(Tensor q, Tensor kv_cache, Tensor weights, Tensor context_lens, Tensor block_table, "
    "SymInt max_context_len, bool fill_masked) -> Tensor",
    _paged,
    _paged_fake,
    forward_only=True,
)
