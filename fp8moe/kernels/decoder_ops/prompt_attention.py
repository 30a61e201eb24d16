"""``prompt_attention``: causal attention of many tokens, summed in the order of a decode step; with a backward."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from fp8moe.kernels.decoder_ops import decode_attention, fixed_splits
from fp8moe.kernels.decoder_ops.fixed_splits import SPLIT
from fp8moe.quant.formats import align, ceil_div
from fp8moe.runtime import autograd
from fp8moe.runtime.backend import use_cuda
from fp8moe.runtime.checks import aligned, check_dtype, check_int, check_like, check_tensor
from fp8moe.runtime.jit import KernelSpec, load
from fp8moe.runtime.launch import PointerLauncher, num_sms, planned
from fp8moe.runtime.operator import Signature, define
from fp8moe.runtime.sm90 import WARP

MAX_SEQUENCES = 65535  # limit of a CUDA grid dimension
_NO_WINDOW = 1 << 30
_VECTOR = 8  # elements in 16 bytes


def prompt_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    sequences: Tensor,
    *,
    most_queries: int,
    most_keys: int | None = None,
    window: int | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend causally with the queries of several sequences, each to the keys of its own sequence.

    q: (T, heads, D) bfloat16 or float16, normalized and rotated, D a multiple of 8 up to 256.
    keys, values: (rows, key heads, D) in the dtype of q, with any strides between rows and between heads; heads is a
        multiple of key heads. Sequences one after the other, or a view of a static cache.
    sequences: (3, B + 1) int32, on the device of q. Column b describes sequence b: its first query, the row of its
        first key, and the number of its keys. The last column holds T, the end of the rows, and anything. The last
        query of a sequence sees all of its keys, each query before it one key less; queries without keys are padding.
    most_queries: at least the largest number of queries of a sequence. most_keys: the same of keys, for the backward;
        None: most_queries.
    window: a query sees at most the `window` most recent keys, its own among them. None: all.
    scale: factor of the scores; None: 1 / sqrt(D).
    Returns the result (T, heads, D) in the dtype of q, zeros for a query that sees no keys, and the logarithms of the
    sums of e^score, (heads, T) float32, infinity for such a query. Queries that no sequence has are not computed.
    A query has the bits that `decode_attention` gives it in `fp8moe.batch_invariant`, whatever the other queries are;
    keys and values that it does not see may be anything, NaN too.

    Method: `fixed_splits`. Gradients of q, keys and values: FlashAttention-2 (arXiv:2307.08691) of PyTorch, from the
    logarithms, with equal bits for equal inputs; each sequence's rows must then begin where those before it end.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape, device or stride.
    """
    for name, value in (("q", q), ("keys", keys), ("values", values), ("sequences", sequences)):
        check_tensor(name, value)
    check_int("most_queries", most_queries, at_least=0)
    most_keys = most_queries if most_keys is None else most_keys
    check_int("most_keys", most_keys, at_least=0)
    if window is not None:
        check_int("window", window, at_least=1)
    autograd.check_derivatives("fp8moe.kernels.decoder_ops.prompt_attention", q, keys, values)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    return _op(q, keys, values, sequences, most_queries, most_keys, window, scale)


class PromptOperands(NamedTuple):
    """Arguments of the operator `prompt_attention`."""

    q: Tensor
    keys: Tensor
    values: Tensor
    sequences: Tensor
    most_queries: int
    most_keys: int
    window: int | None
    scale: float

    @property
    def group(self) -> int:
        """Number of query heads per key head."""
        return self.q.shape[1] // self.keys.shape[1]

    def of_sequences(self) -> Iterator[tuple[slice, slice, int]]:
        """Yield each sequence's queries, rows of keys, and position of the first query. Waits for a GPU."""
        first_query, first_key, count = self.sequences.tolist()
        for b, (query, end) in enumerate(zip(first_query, first_query[1:], strict=False)):
            keys = slice(first_key[b], first_key[b] + count[b])
            yield slice(query, end), keys, count[b] - (end - query)


class PromptTile(NamedTuple):
    """How much a thread block of the kernel computes: its warps, tiles of 16 rows of each, blocks that share an SM."""

    warps: int
    row_tiles: int
    blocks: int

    @property
    def rows(self) -> int:
        """Number of rows, a query head of a token each."""
        return self.warps * self.row_tiles * 16

    def smem(self, size: int) -> int:
        """Return the bytes of the kernel's ``struct Shared``: queries, two stages of keys and values, statistics."""
        return (self.rows + 4 * SPLIT) * align(2 * size, 128) + 8 * self.rows


FEW = PromptTile(warps=4, row_tiles=1, blocks=1)  # for so few rows that larger tiles would leave most SMs idle


def tile_of(size: int, rows: int, groups: int, sms: int) -> PromptTile:
    """Return the tile for `groups` sequences and key heads with up to `rows` rows each. Bits do not depend on it."""
    most = PromptTile(4, 2, 2) if size <= 128 else PromptTile(8, 1, 1)
    return FEW if 2 * groups * ceil_div(rows, most.rows) < sms else most


class _PromptArguments(ctypes.Structure):
    _pointers_ = 6
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("q", "keys", "values", "sequences", "out", "logsumexp")),
        *((name, ctypes.c_int64) for name in ("q_stride", "key_stride", "key_head_stride")),
        *((name, ctypes.c_int64) for name in ("value_stride", "value_head_stride", "queries")),
        *((name, ctypes.c_int32) for name in ("pitch", "window")),
        ("scale", ctypes.c_float),
    )


def kernel_spec(dtype: torch.dtype, size: int, group: int, tile: PromptTile) -> KernelSpec:
    """Return the kernel for heads of `size` values of `dtype`, `group` query heads per key head."""
    kind = "BFloat16" if dtype is torch.bfloat16 else "Float16"
    defines = (("INPUT", kind), ("VECTOR", 1), ("SIZE", size), ("GROUP", group), ("WARPS", tile.warps))
    nbytes = ("SHARED_BYTES", tile.smem(size)), ("ARGUMENTS_BYTES", ctypes.sizeof(_PromptArguments))
    return KernelSpec(
        "prompt_attention.cu",
        "prompt_attention",
        (*defines, ("ROW_TILES", tile.row_tiles), ("BLOCKS_PER_SM", tile.blocks), *nbytes),
    )


@planned
def launcher(device_index: int, operands: PromptOperands) -> PointerLauncher:
    """Return the launcher, to be called with the tensors that the first 6 fields of `_PromptArguments` name."""
    q, keys, values, sequences, most_queries, _, window, scale = operands
    key_heads, size, batch = *keys.shape[1:], sequences.shape[1] - 1
    rows = most_queries * operands.group
    tile = tile_of(size, rows, batch * key_heads, num_sms(device_index))
    arguments = _PromptArguments(
        q_stride=q.stride(0),
        key_stride=keys.stride(0),
        key_head_stride=keys.stride(1),
        value_stride=values.stride(0),
        value_head_stride=values.stride(1),
        queries=q.shape[0],
        pitch=batch + 1,
        window=_NO_WINDOW if window is None else min(window, _NO_WINDOW),
        scale=scale,
    )
    return PointerLauncher(
        load(kernel_spec(q.dtype, size, operands.group, tile)),
        grid=(ceil_div(rows, tile.rows), key_heads, batch),
        block=tile.warps * WARP,
        smem=tile.smem(size),
        pdl=True,
        args=(arguments,),
    )


def _check(operands: PromptOperands) -> None:
    q, keys, values, sequences, *_ = operands
    check_dtype("q", q, *decode_attention.DTYPES)
    if q.dim() != 3 or not decode_attention.serves(q.shape[2]):
        raise ValueError(
            f"q: expected shape (T, heads, D), D a multiple of {decode_attention.MULTIPLE} up to "
            f"{decode_attention.MAX_HEAD}, got {tuple(q.shape)}"
        )
    _, heads, size = q.shape
    if keys.dim() != 3 or not keys.shape[1] or heads % keys.shape[1] or keys.shape[2] != size:
        raise ValueError(
            f"keys: expected shape (rows, key heads, {size}) for {heads} query heads, got {tuple(keys.shape)}"
        )
    check_like("keys", keys, (q.dtype,), tuple(keys.shape), q.device, "q")
    check_like("values", values, (q.dtype,), tuple(keys.shape), q.device, "q")
    check_dtype("sequences", sequences, torch.int32)
    if sequences.dim() != 2 or sequences.shape[0] != 3 or not 1 <= sequences.shape[1] <= MAX_SEQUENCES + 1:
        raise ValueError(f"sequences: expected shape (3, B + 1), B up to {MAX_SEQUENCES}, got {tuple(sequences.shape)}")
    check_like("sequences", sequences, (torch.int32,), tuple(sequences.shape), q.device, "q")


def _forward(operands: PromptOperands) -> tuple[Tensor, Tensor]:
    _check(operands)
    return (_launch if use_cuda(operands.q) else _reference)(operands)


def _forward_fake(operands: PromptOperands) -> tuple[Tensor, Tensor]:
    _check(operands)
    return _empty(operands)


def _empty(operands: PromptOperands) -> tuple[Tensor, Tensor]:
    q = operands.q
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


def _launch(operands: PromptOperands) -> tuple[Tensor, Tensor]:
    out, logsumexp = _empty(operands)
    if not (out.numel() and operands.most_queries and operands.sequences.shape[1] > 1):
        return out, logsumexp
    q, keys, values = (_loadable(x) for x in operands[:3])
    if q.stride(1) != q.shape[2]:
        q = q.contiguous()
    operands = operands._replace(q=q, keys=keys, values=values, sequences=aligned(operands.sequences), most_keys=0)
    launcher(q.get_device(), operands)(q, keys, values, operands.sequences, out, logsumexp)
    return out, logsumexp


def _loadable(x: Tensor) -> Tensor:
    """Return x (rows, heads, D), or a copy if some head does not lie in one piece that begins at 16 bytes."""
    row, head, value = x.stride()
    return x if value == 1 and not (row | head) % _VECTOR and not x.data_ptr() % 16 else aligned(x.contiguous())


def _reference(operands: PromptOperands) -> tuple[Tensor, Tensor]:
    q, keys, values = operands[:3]
    out, logsumexp = torch.zeros_like(q, memory_format=torch.contiguous_format), _empty(operands)[1].fill_(torch.inf)
    for queries, rows, position in operands.of_sequences():
        how = position, operands.window, operands.scale
        found = fixed_splits.attend(q[queries], keys[rows], values[rows], *how)
        out[queries], logsumexp[:, queries] = found.output(), found.logsumexp()
    return out, logsumexp


# ---- backward ----


class PromptGradients(NamedTuple):
    """Arguments of the operator `prompt_attention_backward`; logsumexp and out are results of `prompt_attention`."""

    grad: Tensor
    operands: PromptOperands
    out: Tensor
    logsumexp: Tensor


def _backward(gradients: PromptGradients) -> tuple[Tensor, Tensor, Tensor]:
    return (_backward_by_flash if use_cuda(gradients.grad) else _backward_reference)(gradients)


def _backward_fake(gradients: PromptGradients) -> tuple[Tensor, Tensor, Tensor]:
    q, keys, values = gradients.operands[:3]
    return q.new_empty(q.shape), keys.new_empty(keys.shape), values.new_empty(values.shape)


def _backward_by_flash(gradients: PromptGradients) -> tuple[Tensor, Tensor, Tensor]:
    grad, operands, out, logsumexp = gradients
    _, _, _, sequences, most_queries, most_keys, window, scale = operands
    if not (grad.numel() and most_queries and most_keys and sequences.shape[1] > 1):
        return tuple(x.new_zeros(x.shape) for x in operands[:3])
    windows = {"window_size_left": window - 1, "window_size_right": 0} if window is not None else {}
    unused = torch.empty(2, dtype=torch.uint64, device=grad.device)  # the state of dropout
    with _deterministic():
        return torch.ops.aten._flash_attention_backward(
            *map(aligned, (grad, *operands[:3], out, logsumexp)),
            *(sequences[0].contiguous(), sequences[1].contiguous(), most_queries, most_keys),
            *(0.0, True, unused, unused),
            scale=scale,
            **windows,
        )


@contextmanager
def _deterministic() -> Iterator[None]:
    """Within the context, PyTorch's flash attention adds up gradients in one order."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)  # with warn_only it would add them up in any order
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _backward_reference(gradients: PromptGradients) -> tuple[Tensor, Tensor, Tensor]:
    grad, operands, out, logsumexp = gradients
    q, keys, values = operands[:3]
    results = tuple(torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (q, keys, values))
    for queries, rows, position in operands.of_sequences():
        parts = _sequence_gradients(
            *(x[queries].contiguous().float() for x in (grad, q, out)),
            *(x[rows].float().repeat_interleave(operands.group, 1) for x in (keys, values)),
            logsumexp[:, queries].contiguous(),
            position,
            operands,
        )
        for result, place, part in zip(results, (queries, rows, rows), parts, strict=True):
            result[place] = part.unflatten(1, (result.shape[1], -1)).sum(2)
    return tuple(result.to(x.dtype) for result, x in zip(results, (q, keys, values), strict=True))


def _sequence_gradients(
    grad: Tensor,
    q: Tensor,
    out: Tensor,
    keys: Tensor,
    values: Tensor,
    logsumexp: Tensor,
    position: int,
    operands: PromptOperands,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of q, and of keys and values that are repeated for each query head; tensors (n, heads, D)."""
    key = torch.arange(len(keys), device=q.device)
    own = position + torch.arange(len(q), device=q.device)[:, None]
    seen = key <= own
    if operands.window is not None:
        seen &= key > own - operands.window
    scores = torch.einsum("qhd,khd->hqk", q, keys) * operands.scale
    weights = (scores - logsumexp[..., None]).exp().masked_fill(~seen, 0)
    of_weights = torch.einsum("qhd,khd->hqk", grad, values) - (grad * out).sum(-1).T[..., None]
    of_scores = weights * of_weights.masked_fill(~seen, 0) * operands.scale
    return (
        torch.einsum("hqk,khd->qhd", of_scores, keys),
        torch.einsum("hqk,qhd->khd", of_scores, q),
        torch.einsum("hqk,qhd->khd", weights, grad),
    )


def _setup_context(ctx, inputs, output) -> None:
    out, logsumexp = output
    ctx.mark_non_differentiable(logsumexp)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:4], out, logsumexp)
    ctx.how = inputs[4:]


def _run_backward(ctx, grad, _):
    *operands, out, logsumexp = ctx.saved_tensors
    if grad is None:
        return (None,) * (len(operands) + len(ctx.how))
    return *_backward_op(grad, *operands, *ctx.how, out, logsumexp), *(None,) * (1 + len(ctx.how))


def _no_double_backward(ctx, *grads):
    raise RuntimeError("fp8moe.kernels.decoder_ops.prompt_attention: there is no double backward")


_op = define(
    "prompt_attention -> (Tensor, Tensor)",
    _forward,
    _forward_fake,
    backward=_run_backward,
    setup_context=_setup_context,
    signature=Signature(PromptOperands),
)
_backward_op = define(
    "prompt_attention_backward -> (Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
    backward=_no_double_backward,
    signature=Signature(PromptGradients),
)
