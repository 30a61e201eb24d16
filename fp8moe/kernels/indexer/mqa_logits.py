"""Index scores of sparse attention: ``mqa_logits`` for keys in one tensor, ``paged_mqa_logits`` for a paged cache."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fp8moe.kernels.indexer import checks, reference
from fp8moe.kernels.indexer.checks import Paged, Prefill
from fp8moe.kernels.indexer.sm90 import TILE, Arguments, MqaConfig, kernel_spec, paged_config, prefill_config
from fp8moe.quant.checks import fp8_operand
from fp8moe.quant.formats import FP8Tensor
from fp8moe.runtime import autograd, config
from fp8moe.runtime.checks import aligned, check_address, check_tensor, row_major
from fp8moe.runtime.jit import load
from fp8moe.runtime.launch import Launcher, TensorMap, current_stream, device_guard, num_sms, planned, tensor_map
from fp8moe.runtime.operator import operator


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
    """Return the index scores of sparse attention: for each query, the scores of the keys in the query's range.

    ``out[s, t] = kv.scale[t] * sum over h of weights[s, h] * relu(q[s, h] . kv.data[t])``

    q: (S, H, D) float8_e4m3fn, H 32 or 64, D 32, 64 or 128. The caller must multiply the scales of q into ``weights``.
    kv: keys, shared by all heads: FP8Tensor or (data, scale), data (T, D) float8_e4m3fn, scale (T,) float32; T < 2**31.
    weights: (S, H) float32.
    starts, ends: (S,) int32, on the device of q: query s scores keys ``starts[s]`` to ``ends[s] - 1``; both are clamped
        to [0, T], and a range whose end comes before its start is empty.
    fill_masked: write -inf to entries outside of the ranges; otherwise they are uninitialized.
    max_range: if an int, each row begins with its own range: ``out[s, i]`` is the score of key ``starts[s] + i``, and
        only the first ``max_range`` keys of a range are scored. None: ``out[s, t]`` is the score of key t.
    Returns (S, T) float32, or (S, max_range). Products are summed in float32; a NaN in an operand reaches the entries
    that depend on it and no other. Equal inputs give equal bits.

    On the CUDA backend the host does not read the ranges, so a call can be captured in a CUDA graph; only tiles that
    contain keys of some range are computed. Rows of keys may be at any multiples of 16 bytes, such as ``cache[:, :D]``
    of wider rows; operands in another layout are copied first. There is no backward: calling it raises RuntimeError.
    Method: the lightning indexer of DeepSeek-V3.2, arXiv:2512.02556, section 2.1.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong rank, size or device, or a max_range outside
    [0, 2**31).
    """
    for name, value in (("q", q), ("weights", weights), ("starts", starts), ("ends", ends)):
        check_tensor(name, value)
    if max_range is not None:
        checks.row_length("max_range", max_range)
    data, scale = fp8_operand("kv", kv)
    return scores(Prefill(q, data, scale, weights, starts, ends, max_range, max_range is not None, fill_masked))


def scores(operands: Prefill) -> Tensor:
    """Compute `mqa_logits` for operands in a `Prefill`, which may ask for any number of columns."""
    return autograd.run(_mqa_logits, "fp8moe.mqa_logits", *operands)


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
    """Return the scores of `mqa_logits` between the last next_n tokens of each sequence and the keys in a paged cache.

    q: (B, next_n, H, D) float8_e4m3fn, next_n 1 to 4, H 32 or 64, D 32, 64 or 128.
    kv_cache: (num_blocks, 64, 1, D + 4) uint8, contiguous, at a multiple of 16 bytes: see
        `fp8moe.kernels.indexer.mqa_cache.new_kv_cache`.
    weights: (B * next_n, H) float32. The caller must multiply the scales of q into ``weights``.
    context_lens: (B,) int32, the number of cached tokens of each sequence: query j of next_n sees the first
        ``context_len - next_n + 1 + j`` tokens. Or (B, next_n) int32, the number of tokens that each query sees. Either
        number is clamped to [0, min(max_context_len, 64 * max_blocks)].
    block_table: (B, max_blocks) int32: tokens 64 * i to 64 * i + 63 of sequence b are in block ``block_table[b, i]``,
        clamped to [0, num_blocks - 1]. Entries past the context are not read. If num_blocks or max_blocks is 0, no
        query sees a token.
    max_context_len: an int, the number of columns of the result.
    fill_masked: write -inf to entries past the tokens that a query sees; otherwise they are uninitialized.
    Returns (B * next_n, max_context_len) float32; see `mqa_logits` for sums, NaN and gradients.

    On the CUDA backend the host does not read the lengths and blocks, so a call can be captured in a CUDA graph whose
    sequences grow between replays. Method: the lightning indexer of DeepSeek-V3.2, arXiv:2512.02556, section 2.1, with
    the paged cache of arXiv:2309.06180.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong rank, size or device, a cache that is not
    contiguous or not aligned, or a max_context_len outside [0, 2**31).
    """
    operands = Paged(q, kv_cache, weights, context_lens, block_table, max_context_len, fill_masked)
    for name, value in zip(Paged._fields[:5], operands, strict=False):
        check_tensor(name, value)
    checks.row_length("max_context_len", max_context_len)
    return autograd.run(_paged_mqa_logits, "fp8moe.paged_mqa_logits", *operands)


# ---- launches of cuda/sm90/mqa_logits.cu ----


class _Kernel(NamedTuple):
    """A kernel's launcher, with the tensor maps (q, keys, key scales) and arguments whose addresses each call sets."""

    launcher: Launcher
    maps: tuple[TensorMap, TensorMap, TensorMap]
    arguments: Arguments

    def launch(self, q: Tensor, keys: Tensor, key_scales: Tensor, **pointers: Tensor) -> None:
        """Enqueue the kernel on PyTorch's current stream. pointers: field name of `arguments` -> tensor."""
        index = q.get_device()
        with device_guard(index), self.launcher.lock:
            for tensor_map, tensor in zip(self.maps, (q, keys, key_scales), strict=True):
                tensor_map.replace_address(tensor.data_ptr())
            for name, tensor in pointers.items():
                setattr(self.arguments, name, tensor.data_ptr())
            self.launcher.launch(current_stream(index))


def _kernel(variant: MqaConfig, q: Tensor, keys: TensorMap, key_scales: TensorMap, arguments: Arguments) -> _Kernel:
    if config.settings.print_configs:
        config.log.info(f"mqa_logits queries={arguments.queries} columns={arguments.columns}: {variant}")
    rows, box = q.view(-1, variant.head_dim), (variant.columns, variant.head_dim)
    queries = tensor_map(rows, shape=rows.shape, strides=rows.stride(), box=box, swizzle=variant.head_dim)
    launcher = Launcher(
        load(kernel_spec(variant)),
        grid=num_sms(q.get_device()),
        block=variant.threads,
        smem=variant.shared_bytes,
        args=(queries, keys, key_scales, arguments),
    )
    return _Kernel(launcher, (queries, keys, key_scales), arguments)


@planned
def _prefill_kernel(device_index: int, operands: Prefill) -> _Kernel:
    q, kv, kv_scale, *_ = operands
    (queries, heads, head_dim), tokens = q.shape, kv.shape[0]
    variant = prefill_config(heads, head_dim)
    columns = tokens if operands.columns is None else operands.columns
    keys = tensor_map(kv, shape=kv.shape, strides=kv.stride(), box=(variant.tile_rows, head_dim), swizzle=head_dim)
    scales = tensor_map(kv_scale, shape=(1, tokens), strides=(tokens, 1), box=(1, TILE), l2_promotion=0)
    arguments = Arguments(
        queries=queries,
        limit=tokens,
        longest=columns,
        columns=columns,
        from_starts=operands.from_starts,
        fill_masked=operands.fill_masked,
    )
    return _kernel(variant, q, keys, scales, arguments)


@planned
def _paged_kernel(device_index: int, operands: Paged) -> _Kernel:
    q, kv_cache, _, context_lens, block_table, columns, fill_masked = operands
    batch, next_n, heads, head_dim = q.shape
    num_blocks, max_blocks = kv_cache.shape[0], block_table.shape[1]
    variant = paged_config(heads, head_dim, next_n)
    # The tensor map treats the whole cache, scales included, as rows of head_dim bytes.
    shape, box = (num_blocks * variant.tile_rows, head_dim), (variant.tile_rows, head_dim)
    keys = tensor_map(kv_cache, shape=shape, strides=(head_dim, 1), box=box, swizzle=head_dim)
    arguments = Arguments(
        queries=batch * next_n,
        limit=min(columns, TILE * max_blocks),
        per_query=context_lens.dim() == 2,
        table_pitch=block_table.stride(0),
        num_blocks=num_blocks,
        columns=columns,
        fill_masked=fill_masked,
    )
    return _kernel(variant, q, keys, keys, arguments)


def _launch(kernel: _Kernel, operands: Prefill, out: Tensor) -> Tensor:
    q, kv, kv_scale, weights, starts, ends, *_ = operands
    kernel.launch(q, kv, kv_scale, weights=weights, starts=starts, ends=ends, scores=out)
    return out


def _launch_paged(kernel: _Kernel, operands: Paged, out: Tensor) -> Tensor:
    q, kv_cache, weights, ends, block_table, *_ = operands
    kernel.launch(q, kv_cache, kv_cache, weights=weights, ends=ends, block_table=block_table, scores=out)
    return out


def launch(operands: Prefill, out: Tensor) -> None:
    """Launch ``mqa_logits`` for checked operands; write to out (S, columns) float32, contiguous, not empty."""
    q, kv, kv_scale, weights, starts, ends, *options = operands
    q, kv, kv_scale, weights = aligned(q), row_major(kv), aligned(kv_scale), aligned(weights)
    operands = Prefill(q, kv, kv_scale, weights, starts.contiguous(), ends.contiguous(), *options)
    _launch(_prefill_kernel(q.get_device(), operands), operands, out)


def launch_paged(operands: Paged, out: Tensor) -> None:
    """Launch ``paged_mqa_logits`` for checked operands; write to out (B * next_n, max_context_len) float32."""
    q, kv_cache, weights, context_lens, block_table, *options = operands
    max_blocks = block_table.shape[1]
    if not kv_cache.shape[0] or not max_blocks:
        if operands.fill_masked:
            out.fill_(-torch.inf)
        return
    q, weights, context_lens = aligned(q), aligned(weights), context_lens.contiguous()
    if block_table.stride(1) != 1 or block_table.stride(0) < max_blocks:
        block_table = block_table.contiguous()
    operands = Paged(q, kv_cache, weights, context_lens, block_table, *options)
    _launch_paged(_paged_kernel(q.get_device(), operands), operands, out)


# ---- operators ----


def _empty(operands: Prefill) -> Tensor:
    columns = operands.kv.shape[0] if operands.columns is None else operands.columns
    return operands.q.new_empty((operands.q.shape[0], columns), dtype=torch.float32)


def _scores(operands: Prefill, write: Callable[[Prefill, Tensor], None]) -> Tensor:
    out = _empty(operands)
    if out.numel() and operands.kv.shape[0]:
        write(operands, out)
    elif operands.fill_masked:
        out.fill_(-torch.inf)
    return out


def _ready(operands: Prefill) -> Callable[[Prefill], Tensor] | None:
    """Return a function that launches without checks; None if operands in these layouts were not checked before."""
    q, kv, kv_scale, weights, *_ = operands
    kernel = _prefill_kernel.find(q.get_device(), operands)
    if kernel is None or (q.data_ptr() | kv.data_ptr() | kv_scale.data_ptr() | weights.data_ptr()) % 16:
        return None
    return lambda operands: _launch(kernel, operands, _empty(operands))


def _empty_paged(operands: Paged) -> Tensor:
    batch, next_n, *_ = operands.q.shape
    return operands.q.new_empty((batch * next_n, operands.max_context_len), dtype=torch.float32)


def _paged_scores(operands: Paged, write: Callable[[Paged, Tensor], None]) -> Tensor:
    check_address("kv_cache", operands.kv_cache)
    out = _empty_paged(operands)
    if out.numel():
        write(operands, out)
    return out


def _ready_paged(operands: Paged) -> Callable[[Paged], Tensor] | None:
    """Return a function that launches without checks; None if operands in these layouts were not checked before."""
    q, kv_cache, weights, *_ = operands
    kernel = _paged_kernel.find(q.get_device(), operands)
    if kernel is None or (q.data_ptr() | kv_cache.data_ptr() | weights.data_ptr()) % 16:
        return None
    return lambda operands: _launch_paged(kernel, operands, _empty_paged(operands))


_mqa_logits = operator(
    "mqa_logits -> Tensor",
    check=checks.prefill,
    quick=_ready,
    cuda=partial(_scores, write=launch),
    reference=partial(_scores, write=reference.mqa_logits),
    fake=_empty,
    forward_only=True,
)
_paged_mqa_logits = operator(
    "paged_mqa_logits -> Tensor",
    check=checks.paged,
    quick=_ready_paged,
    cuda=partial(_paged_scores, write=launch_paged),
    reference=partial(_paged_scores, write=reference.paged_mqa_logits),
    fake=_empty_paged,
    forward_only=True,
)
