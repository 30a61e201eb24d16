"""``decode_attention``: attention of one new token per sequence over a static KV cache."""

import ctypes
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from fp8moe.kernels.decoder_ops import fixed_splits, fp8_cache, rotary
from fp8moe.kernels.decoder_ops.rotary import NewTokens
from fp8moe.quant.formats import BLOCK, FP8Tensor, align, ceil_div, empty_quantized
from fp8moe.quant.quantize import quantize_1x128, quantizer_defines
from fp8moe.runtime import autograd, config
from fp8moe.runtime.checks import aligned, check_address, check_dtype, check_int, check_like, check_tensor
from fp8moe.runtime.jit import KernelSpec, load
from fp8moe.runtime.launch import PointerLauncher, num_sms, planned
from fp8moe.runtime.operator import Written, operator
from fp8moe.runtime.sm90 import SHARED_LIMIT, SHARED_PER_SM, WARP

DTYPES = (torch.bfloat16, torch.float16)
MULTIPLE, MAX_HEAD = 8, 256
MAX_BATCH = 65535  # limit of a CUDA grid dimension
_WARPS = 4  # warps of a thread block
_TILE = _ROWS = 16  # _TILE: keys in a tile. _ROWS: query heads of a thread block
_FP8_TILE = 32  # keys in a tile of codes
_MAX_STAGES = 3
_MAX_CLUSTER = 8
_MAX_TILES, _LEAST_TILES = 8, 4  # that a warp loads ahead of use, of keys or values, where the order of sums is fixed
_PART_PITCH = BLOCK + 8  # floats between parts of 128 columns in shared memory
_NO_WINDOW = (1 << 63) - 1
_VECTOR_BYTES = 16


class StaticCache(NamedTuple):
    """The KV cache of B sequences, and the range of cache columns (positions in L) that each sequence uses.

    keys, values: (B, key heads, L, D), contiguous; or FP8Tensors of float8_e4m3fn data of that shape and float32 scale
    (B, key heads, L, 1). begin, columns: (B,) int64, each sequence's first column and the column of its new token.
    """

    keys: Tensor | FP8Tensor
    values: Tensor | FP8Tensor
    begin: Tensor
    columns: Tensor


def decode_attention(
    q: Tensor,
    cache: StaticCache,
    *,
    new: NewTokens | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    quantized: bool = False,
    early: bool = False,
) -> Tensor | FP8Tensor:
    """Attend with one new token per sequence to the keys and values of a static cache, in one kernel.

    q: (B, heads, D) bfloat16 or float16, heads contiguous, D a multiple of 8 up to 256, B up to 65535.
    cache: keys and values in the dtype of q, or in FP8 if D is a multiple of 16; heads is a multiple of key heads.
        Sequence b sees the columns begin[b] to columns[b], both included.
    new: keys and values of the new tokens; its tensors lack the dimension T of `NewTokens`. The kernel then normalizes
        and rotates q and k, and writes k and v to the cache at columns[b], if columns[b] is in [0, L); in FP8 each
        head gets a scale of its own, and the query sees what is written. None: q is normalized and rotated already, and
        the cache has the new tokens.
    window: a query sees at most the `window` most recent keys, its own among them; keys before these are not read.
        None: all.
    sinks: (heads,) float32 or the dtype of q: a logit of each query head that takes part in the softmax, with a value
        of zero. A result is that without sinks times sigmoid(logsumexp(scores) - sink). None: no sinks.
    scale: factor of the scores; None: 1 / sqrt(D).
    quantized: return the result in FP8, in blocks of 1x128. The bits are those that ``quantize_1x128`` gives.
    early: read all tensors except q, k and v before the previous kernel in the stream has ended. That kernel may write
        q, k and v, but none of the other tensors.
    Returns (B, heads * D) in the dtype of q, or an FP8Tensor; zeros for a query that sees no keys. Scores and sums are
    float32; softmax weights are rounded to the dtype of q, and over a cache in FP8, multiplied by the scales of values,
    to float16. Norms and rotation round after each operation. Equal inputs give equal bits. If results are batch
    invariant (`fp8moe.batch_invariant`), keys and values in FP8 are rounded to the dtype of q, and the order of sums is
    that of `fixed_splits`: a query has the bits that `prompt_attention` gives it, whatever the other sequences are.

    Method: FlashAttention, arXiv:2205.14135, on parts of the keys whose results are merged at the end (Flash-Decoding:
    Dao, Haziza, Massa, Sizov, 2023). Sinks: gpt-oss, arXiv:2508.10925. Norms of heads and rotary embedding: see
    `rotary.rotary`. There is no backward: calling it raises RuntimeError.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape or device, and for sizes for which
    `rotary.serves` returns False.
    """
    tokens = (None,) * 6 + (0.0,) if new is None else (*new[:6], float(new.eps))
    keys, values, begin, columns = cache
    check_tensor("q", q)
    fp8_cache.check_tensors(keys, values)
    for name, value in (("begin", begin), ("columns", columns)):
        check_tensor(name, value)
    if new is not None:
        for name, value in zip(NewTokens._fields[:4], new, strict=False):
            check_tensor(name, value)
    if window is not None:
        check_int("window", window, at_least=1)
    if sinks is not None:
        check_tensor("sinks", sinks)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    (keys, key_scales), (values, value_scales) = map(fp8_cache.parts, (keys, values))
    places = keys, values, begin, columns
    operands = q, *places, *tokens, sinks, window, scale, quantized, early, key_scales, value_scales
    out, data, scales = autograd.run(_op, "fp8moe.kernels.decoder_ops.decode_attention", *operands)
    return FP8Tensor(data, scales) if quantized else out


class AttentionOperands(NamedTuple):
    """Arguments of the operator `decode_attention`."""

    q: Tensor
    keys: Written
    values: Annotated[Tensor, "Tensor(b!)"]
    begin: Tensor
    columns: Tensor
    k: Tensor | None
    v: Tensor | None
    cos: Tensor | None
    sin: Tensor | None
    q_weight: Tensor | None
    k_weight: Tensor | None
    eps: float
    sinks: Tensor | None
    window: int | None
    scale: float
    quantized: bool
    early: bool
    key_scales: Annotated[Tensor | None, "Tensor(c!)?"] = None
    value_scales: Annotated[Tensor | None, "Tensor(d!)?"] = None

    def heads(self) -> "AttentionHeads":
        (_, heads, size), key_heads = self.q.shape, self.keys.shape[1]
        rotated = None if self.cos is None else self.cos.shape[-1]
        kind = FixedSplitHeads if config.settings.batch_invariant else AttentionHeads
        return kind(
            heads // key_heads, key_heads, size, rotated, self.q_weight is not None, self.key_scales is not None
        )


class AttentionHeads(NamedTuple):
    """The head layout of an attention layer, and the launch sizes that follow from the layout.

    group: query heads per key head. size: values of a head (D). rotated: values of a head that are rotated; None: the
    kernel appends no new tokens. norm: heads are normalized first. fp8: the cache is in FP8.
    """

    group: int
    key_heads: int
    size: int
    rotated: int | None
    norm: bool
    fp8: bool = False

    @property
    def kernel(self) -> str:
        """The name of the kernel, and of its source file without the suffix."""
        return "decode_attention"

    @property
    def lanes(self) -> int:
        """Number of lanes that share a head, a power of two. Each lane holds 8 values; the last lanes may hold none."""
        return 1 << (2 * ceil_div(self.size, 16) - 1).bit_length()

    @property
    def tiles(self) -> int:
        """Number of clusters that split the query heads of one key head between them."""
        return ceil_div(self.group, _ROWS)

    @property
    def pitch(self) -> int:
        """Bytes between consecutive rows (key, value or query vectors of 16 bits) in shared memory."""
        return align(2 * self.size, 128)

    @property
    def tile(self) -> int:
        """Bytes of a tile of keys and values in shared memory."""
        if self.fp8:
            return 2 * _FP8_TILE * (align(self.size, 128 if self.size > 64 else 64) + 4)  # codes and scales
        return 2 * _TILE * self.pitch

    def stages(self, cluster: int) -> int:
        """Return the number of pipeline stages: the number of tiles that a warp loads ahead of use."""
        return min((SHARED_LIMIT - self.smem(0, cluster)) // (_WARPS * self.tile), _MAX_STAGES)

    def smem(self, stages: int, cluster: int) -> int:
        """Return the bytes of the kernel's ``struct Shared``: tiles, queries, new token, sinks, sums, statistics."""
        tiles = _WARPS * stages * self.tile + 4 * _ROWS * self.fp8
        parts = ceil_div(min(self.group, _ROWS) * self.size, BLOCK * cluster)
        statistics = 8 * (_WARPS + cluster) * _ROWS
        return tiles + (_ROWS + 2) * self.pitch + 4 * _ROWS + statistics + 4 * parts * cluster * BLOCK

    @property
    def quantizes(self) -> bool:
        """Whether the kernel can quantize its result: no block of 128 columns mixes query heads of two key heads."""
        return not self.group * self.size % BLOCK

    def cluster(self, batch: int, sms: int) -> int:
        """Return the number of thread blocks in a cluster, which split the keys of one sequence and key head."""
        fits = sms // (batch * self.key_heads * self.tiles)
        return min(1 << max(fits, 1).bit_length() - 1, _MAX_CLUSTER)


class FixedSplitHeads(AttentionHeads):
    """A head layout, and launch sizes of the kernel whose order of sums is fixed (`fixed_splits`)."""

    @property
    def kernel(self) -> str:
        return "decode_attention_fixed"

    def stages(self, cluster: int) -> int:
        """Return the number of tiles, of keys or of values, that a warp loads ahead of use."""
        # Without clusters there are blocks enough for two on each SM.
        limit = SHARED_PER_SM // 2 - 1024 if cluster == 1 else SHARED_LIMIT
        fits, most = ((size - self.smem(0, cluster)) // (_WARPS * self.tile) for size in (limit, SHARED_LIMIT))
        return min(fits if fits >= _LEAST_TILES else most, _MAX_TILES)

    @property
    def tile(self) -> int:
        """Bytes of a tile of keys or values in shared memory, and of the scales of its codes."""
        return _TILE * (self.pitch + 4 * self.fp8)

    def smem(self, stages: int, cluster: int) -> int:
        """Return the bytes of the kernel's ``struct Shared``: tiles, queries, new token, sinks, statistics, sums."""
        parts = ceil_div(min(self.group, _ROWS) * self.size, BLOCK * cluster)
        splits = _WARPS * cluster * (8 * _ROWS + 4 * parts * _PART_PITCH)
        return _WARPS * stages * self.tile + (_ROWS + 2) * self.pitch + 4 * _ROWS + splits


class _AttentionArguments(ctypes.Structure):
    _pointers_ = 17
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("q", "k", "v", "cos", "sin", "q_weight", "k_weight", "sinks")),
        *((name, ctypes.c_int64) for name in ("keys", "values", "begin", "columns", "out", "data", "data_scale")),
        *((name, ctypes.c_int64) for name in ("key_scales", "value_scales")),
        *((name, ctypes.c_int64) for name in ("q_stride", "k_stride", "v_stride", "length", "window", "scale_pitch")),
        *((name, ctypes.c_uint32) for name in ("one_table", "early", "float_sinks")),
        *((name, ctypes.c_float) for name in ("eps", "scale")),
    )


def kernel_spec(dtype: torch.dtype, heads: AttentionHeads, cluster: int) -> KernelSpec:
    """Return the kernel for heads of `dtype`, with `cluster` thread blocks in a cluster."""
    appends = heads.rotated is not None
    of_head = ("SIZE", heads.size), ("ROTATED", heads.rotated or rotary.MULTIPLE), ("HEAD_LANES", heads.lanes)
    sizes = ("VECTORS", 1), ("KEY_HEADS", heads.key_heads), ("GROUP", heads.group)
    steps = ("NORM", int(heads.norm)), ("APPEND", int(appends)), ("FP8_CACHE", int(heads.fp8))
    stages = heads.stages(cluster)
    work = ("WARPS", _WARPS), ("STAGES", stages), ("CLUSTER", cluster)
    nbytes = ("SHARED_BYTES", heads.smem(stages, cluster)), ("ARGUMENTS_BYTES", ctypes.sizeof(_AttentionArguments))
    defines = (*quantizer_defines(dtype), *of_head, *sizes, *steps, *work, *nbytes)
    return KernelSpec(f"{heads.kernel}.cu", heads.kernel, defines)


@planned
def launcher(device_index: int, operands: AttentionOperands) -> PointerLauncher:
    """Return the launcher, to be called with the tensors that the first 17 fields of `_AttentionArguments` name."""
    q, keys, *_, k, v, cos, _, _, _, eps, sinks, window, scale, _, early, _, _ = operands
    batch = q.shape[0]
    heads = operands.heads()
    cluster = heads.cluster(batch, num_sms(device_index))
    arguments = _AttentionArguments(
        q_stride=q.stride(0),
        k_stride=0 if k is None else k.stride(0),
        v_stride=0 if v is None else v.stride(0),
        length=keys.shape[2],
        window=_NO_WINDOW if window is None else window,
        scale_pitch=align(batch, 4),
        one_table=cos is not None and cos.shape[0] == 1,
        early=early,
        float_sinks=sinks is not None and sinks.dtype is torch.float32,
        eps=eps,
        scale=scale,
    )
    return PointerLauncher(
        load(kernel_spec(q.dtype, heads, cluster)),
        grid=(cluster, heads.key_heads * heads.tiles, batch),
        block=_WARPS * WARP,
        cluster=cluster,
        smem=heads.smem(heads.stages(cluster), cluster),
        pdl=True,
        args=(arguments,),
    )


def share_of_keys(logsumexp: Tensor, sinks: Tensor) -> Tensor:
    """Return the sum of all keys' softmax weights, where a sink takes the rest. logsumexp: that of the keys' scores."""
    return (logsumexp - sinks.to(logsumexp.dtype)).sigmoid()


def serves(size: int) -> bool:
    """Return whether there is a kernel for heads of `size` values."""
    return not size % MULTIPLE and 0 < size <= MAX_HEAD


def _check(operands: AttentionOperands) -> None:
    q, keys, values, begin, columns, k, v, cos, sin, q_weight, k_weight, *_ = operands
    sinks = operands.sinks
    check_dtype("q", q, *DTYPES)
    if q.dim() != 3 or q.shape[0] > MAX_BATCH or not serves(q.shape[2]):
        raise ValueError(
            f"q: expected shape (B, heads, D), B up to {MAX_BATCH} and D a multiple of {MULTIPLE} up to {MAX_HEAD}, "
            f"got {tuple(q.shape)}"
        )
    batch, heads, size = q.shape
    if keys.dim() != 4 or not keys.shape[1] or heads % keys.shape[1]:
        raise ValueError(f"keys: expected shape (B, key heads, L, D) for {heads} query heads, got {tuple(keys.shape)}")
    key_heads, length = keys.shape[1:3]
    like = (q.dtype,)
    fp8_cache.check_cache(keys, values, operands.key_scales, operands.value_scales, q, (batch, key_heads, length, size))
    for name, places in (("begin", begin), ("columns", columns)):
        check_like(name, places, (torch.int64,), (batch,), q.device, "q")
    if sinks is not None:
        check_like("sinks", sinks, (q.dtype, torch.float32), (heads,), q.device, "q")
    if k is None:
        return
    check_like("k", k, like, (batch, key_heads, size), q.device, "q")
    check_like("v", v, like, (batch, key_heads, size), q.device, "q")
    rotated = rotary.check_tables(cos, sin, q)
    if not rotary.serves(size, rotated):
        raise ValueError(
            f"cos: expected a multiple of {rotary.MULTIPLE} up to the {size} values of a head, got {rotated} of them"
        )
    rotary.check_head_norms(q_weight, k_weight, q)


def _launch(operands: AttentionOperands) -> tuple[Tensor, Tensor, Tensor]:
    out, data, scale = results = _empty(operands)
    if not operands.q.numel():
        return results
    check_address("keys", operands.keys)
    check_address("values", operands.values)
    quantizes = operands.quantized and operands.heads().quantizes
    values = None if quantizes else out if not operands.quantized else operands.q.new_empty(_shape(operands))
    loaded = {name: _rows(getattr(operands, name)) for name in ("q", "k", "v")}
    others = ("begin", "columns", "cos", "sin", "q_weight", "k_weight", "sinks")
    loaded |= {name: None if (x := getattr(operands, name)) is None else aligned(x) for name in others}
    operands = operands._replace(**loaded)
    q, keys, cache_values, begin, columns, k, v, cos, sin, q_weight, k_weight, _, sinks, *_ = operands
    launch = launcher(q.get_device(), operands)
    written = (values, *((data, scale) if quantizes else (None, None)))
    cache = keys, cache_values, begin, columns
    scales = operands.key_scales, operands.value_scales
    launch(q, k, v, cos, sin, q_weight, k_weight, sinks, *cache, *written, *scales)
    return (out, *quantize_1x128(values)) if operands.quantized and not quantizes else results


def _rows(x: Tensor | None) -> Tensor | None:
    """Return x (B, heads, D) itself if each sequence's heads are contiguous and 16-byte aligned, or else a copy."""
    if x is None:
        return None
    row, head, value = x.stride()
    together = value == 1 and (x.shape[1] == 1 or head == x.shape[2])
    return x if together and not (row * x.itemsize | x.data_ptr()) % _VECTOR_BYTES else aligned(x.contiguous())


def _shape(operands: AttentionOperands) -> tuple[int, int]:
    batch, heads, size = operands.q.shape
    return batch, heads * size


def _empty(operands: AttentionOperands) -> tuple[Tensor, Tensor, Tensor]:
    """Return uninitialized values, data and scale; results that are not requested have no elements."""
    q, (batch, columns) = operands.q, _shape(operands)
    if operands.quantized:
        return q.new_empty(0), *empty_quantized(q, batch, columns)
    return q.new_empty((batch, columns)), q.new_empty(0), q.new_empty(0)


def _reference(operands: AttentionOperands) -> tuple[Tensor, Tensor, Tensor]:
    q, keys, values, begin, columns, k, v, cos, sin, q_weight, k_weight, *others = operands
    eps, sinks, window, scale, quantized, _, *scales = others
    if k is not None:
        heads = (x[:, None] for x in (q, k, v, cos, sin))
        given = rotary.RotaryOperands(*heads, keys, values, columns, q_weight, k_weight, eps, *scales)
        q = rotary.reference(given)[:, 0]
    invariant = config.settings.batch_invariant
    if operands.key_scales is not None:
        dtype = q.dtype if invariant else torch.float32
        keys, values = (fp8_cache.dequantized(FP8Tensor(*x), dtype) for x in zip((keys, values), scales, strict=True))
    if invariant:
        return _reference_of_splits(operands._replace(keys=keys, values=values), q)
    (batch, heads, size), (key_heads, length) = q.shape, keys.shape[1:3]
    column = torch.arange(length, device=q.device)
    seen = (column >= begin[:, None]) & (column <= columns[:, None])
    if window is not None:
        seen &= column > columns[:, None] - window
    seen = seen[:, None, None]
    scores = (
        torch.einsum("bhgd,bhkd->bhgk", q.float().unflatten(1, (key_heads, heads // key_heads)), keys.float()) * scale
    )
    scores = scores.masked_fill(~seen, -torch.inf)
    weights = scores.softmax(-1)
    if sinks is not None:
        weights = weights * share_of_keys(scores.logsumexp(-1), sinks.view(key_heads, -1))[..., None]
    weights = weights.where(seen.any(-1, keepdim=True), 0)
    visible = values.float().masked_fill(~seen.mT, 0)
    out = torch.einsum("bhgk,bhkd->bhgd", weights, visible).to(q.dtype).reshape(batch, heads * size)
    return _results(out, quantized)


def _reference_of_splits(operands: AttentionOperands, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the attention of normalized and rotated queries with the order of sums of `fixed_splits`."""
    out, length = torch.zeros_like(q), operands.keys.shape[2]
    for b, (begin, column) in enumerate(zip(operands.begin.tolist(), operands.columns.tolist(), strict=True)):
        end = min(column + 1, length)
        if end <= begin:
            continue
        keys, values = (cache[b, :, begin:end].transpose(0, 1) for cache in (operands.keys, operands.values))
        found = fixed_splits.attend(q[b, None], keys, values, column - begin, operands.window, operands.scale)
        out[b] = found.output(operands.sinks)[0]
    return _results(out.flatten(1), operands.quantized)


def _results(out: Tensor, quantized: bool) -> tuple[Tensor, Tensor, Tensor]:
    return (out.new_empty(0), *quantize_1x128(out)) if quantized else (out, out.new_empty(0), out.new_empty(0))


_op = operator(
    "decode_attention -> (Tensor, Tensor, Tensor)",
    check=_check,
    cuda=_launch,
    reference=_reference,
    fake=_empty,
    forward_only=True,
)
