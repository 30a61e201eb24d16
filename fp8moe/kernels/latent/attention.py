"""``latent_attention``: attention in which all heads of a query share each key and value, a latent."""

from typing import NamedTuple

import torch
from torch import Tensor

from fp8moe.kernels.latent import checks, reference
from fp8moe.kernels.latent.checks import LatentOperands
from fp8moe.kernels.latent.sm90 import (
    MERGE_THREADS,
    THREADS,
    TILE,
    VALUE,
    WIDTH,
    Arguments,
    MergeArguments,
    attention_spec,
    merge_grid,
    merge_spec,
    rows_together,
)
from fp8moe.quant.formats import ceil_div
from fp8moe.runtime import autograd
from fp8moe.runtime.checks import aligned, check_address, check_int, check_tensor
from fp8moe.runtime.jit import load
from fp8moe.runtime.launch import Launcher, TensorMap, current_stream, device_guard, num_sms, planned, tensor_map
from fp8moe.runtime.operator import operator
from fp8moe.runtime.sm90 import SHARED_LIMIT


def latent_attention(
    q: Tensor,
    latents: Tensor,
    lengths: Tensor,
    *,
    value_size: int,
    scale: float,
    indices: Tensor | None = None,
    block_table: Tensor | None = None,
    begin: Tensor | None = None,
) -> Tensor:
    """Attend to latents, each of which is a key and, with its first values, a value, for all heads.

    ``out[b, t, h] = sum over j of softmax_j(scale * q[b, t, h] . latents[b, j]) * latents[b, j, :value_size]``

    q: (B, T, heads, R + P) bfloat16, the last T tokens of each sequence, with the keys' up-projection absorbed.
    latents: (B, L, R + P) in the dtype of q, contiguous, at a multiple of 16 bytes; with a block_table (blocks, 64,
        R + P). In FP8, as `quantize_latents` returns them, with bytes in place of values.
    lengths: (B,) int32, on the device of q: each sequence's number of latents, clamped to [0, L]. Query t sees the
        first ``length - T + 1 + t``; one that sees none has zeros as its result.
    value_size: R. The kernel takes R = 512 and P = 64.
    indices: (B, T, k) int32, distinct: query t reads only these latents, of which those outside [0, length) are
        skipped; whether they come after the query is up to the caller. None: all that it sees.
    block_table: (B, max_blocks) int32: latents 64 * i to 64 * i + 63 of sequence b are in block ``block_table[b, i]``,
        clamped to [0, blocks - 1]. L is then 64 * max_blocks.
    begin: (B,) int32, without indices and block_table: no query sees the latents of a sequence before this one, as of
        padding. None: 0.
    Returns (B, T, heads, value_size) in the dtype of q. Products are summed in float32, weights are rounded to
    bfloat16. Equal inputs give equal bits. A NaN in a latent that some query of the sequence sees may make the results
    of all of its queries NaN; others are not read.

    On the CUDA backend the host does not read the lengths, so a call can be captured in a CUDA graph. There is no
    backward: calling it raises RuntimeError. Method: DeepSeek-V2, arXiv:2405.04434, section 2.1; softmax by tiles,
    arXiv:2205.14135; indices, DeepSeek-V3.2, arXiv:2512.02556, section 2.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape or device, and both for what the kernel
    does not take.
    """
    for name, value in (("q", q), ("latents", latents), ("lengths", lengths)):
        check_tensor(name, value)
    for name, value in (("indices", indices), ("block_table", block_table), ("begin", begin)):
        if value is not None:
            check_tensor(name, value)
    check_int("value_size", value_size)
    operands = LatentOperands(q, latents, lengths, indices, block_table, begin, value_size, float(scale))
    return autograd.run(_latent_attention, "fp8moe.latent_attention", *operands)


# ---- launches ----


class _Kernels(NamedTuple):
    """The launchers of both kernels, with the tensor maps (q, latents) and arguments whose addresses each call sets."""

    attend: Launcher
    merge: Launcher
    maps: tuple[TensorMap, TensorMap]
    arguments: Arguments
    merge_arguments: MergeArguments
    blocks: int
    together: int

    def launch(self, operands: LatentOperands, out: Tensor) -> None:
        """Enqueue both kernels on PyTorch's current stream."""
        q, latents, lengths, indices, block_table, begin, *_ = operands
        index = q.get_device()
        sums = q.new_empty((2 * self.blocks, self.together, VALUE), dtype=torch.float32)
        statistics = q.new_empty((2 * self.blocks, self.together, 2), dtype=torch.float32)
        records = q.new_empty((self.blocks, 4), dtype=torch.int32)
        with device_guard(index), self.attend.lock:
            for tensor_map, tensor in zip(self.maps, (q, latents), strict=True):
                tensor_map.replace_address(tensor.data_ptr())
            for arguments in (self.arguments, self.merge_arguments):
                arguments.out, arguments.sums = out.data_ptr(), sums.data_ptr()
                arguments.statistics, arguments.records = statistics.data_ptr(), records.data_ptr()
            self.arguments.lengths = lengths.data_ptr()
            self.arguments.begin = 0 if begin is None else begin.data_ptr()
            self.arguments.block_table = 0 if block_table is None else block_table.data_ptr()
            self.arguments.indices = 0 if indices is None else indices.data_ptr()
            self.arguments.latents, self.arguments.q = latents.data_ptr(), q.data_ptr()
            stream = current_stream(index)
            self.attend.launch(stream)
            self.merge.launch(stream)


@planned
def _kernels(device_index: int, operands: LatentOperands) -> _Kernels:
    q, latents, _, indices, block_table, *_, scale = operands
    batch, queries, heads, width = q.shape
    # With indices each query is a sequence of its own to the kernel.
    rows, blocks = heads if indices is not None else queries * heads, num_sms(device_index)
    together = rows_together(rows, operands.coded)
    maps = tuple(
        tensor_map(flat, shape=flat.shape, strides=flat.stride(), box=(box, 64), swizzle=128)
        for flat, box in ((q.view(-1, width), together), (latents.view(-1, latents.shape[2]), TILE))
    )
    arguments = Arguments(
        sequences=batch if indices is None else batch * queries,
        rows=rows,
        heads=heads,
        queries=queries,
        limit=operands.limit,
        table_pitch=0 if block_table is None else block_table.stride(0),
        num_blocks=latents.shape[0],
        stride=latents.shape[1],
        chosen=0 if indices is None else indices.shape[2],
        scale=scale,
    )
    merge_arguments = MergeArguments(rows=rows)
    kernel = load(attention_spec(indices is not None, together, operands.coded))
    attend = Launcher(kernel, grid=blocks, block=THREADS, smem=SHARED_LIMIT, args=(*maps, arguments))
    parts, grid = merge_grid(arguments.sequences * ceil_div(rows, together), min(rows, together), blocks)
    merge = Launcher(
        load(merge_spec(blocks, parts, together)), grid=grid, block=MERGE_THREADS, pdl=True, args=(merge_arguments,)
    )
    return _Kernels(attend, merge, maps, arguments, merge_arguments, blocks, together)


def _launch(operands: LatentOperands) -> Tensor:
    q, latents, lengths, indices, block_table, begin, value_size, scale = operands
    if q.dtype is not torch.bfloat16:
        raise TypeError(f"q: the kernel takes bfloat16, got {q.dtype}")
    if (q.shape[3], value_size) != (WIDTH, VALUE):
        raise ValueError(
            f"value_size: the kernel takes latents of {WIDTH} values, of which {VALUE} are the value, got {q.shape[3]} "
            f"and {value_size}"
        )
    out = _empty(operands)
    if not out.numel():
        return out
    if not all(x is None or x.numel() for x in (latents, indices, block_table)):
        return out.zero_()
    indices, block_table, begin = (x if x is None else x.contiguous() for x in (indices, block_table, begin))
    check_address("latents", latents)
    q = aligned(q.contiguous())
    operands = LatentOperands(q, latents, lengths.contiguous(), indices, block_table, begin, value_size, scale)
    _kernels(q.get_device(), operands).launch(operands, out)
    return out


def _empty(operands: LatentOperands) -> Tensor:
    return operands.q.new_empty((*operands.q.shape[:3], operands.value_size))


_latent_attention = operator(
    "latent_attention -> Tensor",
    check=checks.operands,
    cuda=_launch,
    reference=reference.latent_attention,
    fake=_empty,
    forward_only=True,
)
