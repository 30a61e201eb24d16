"""Reading prompts: columns at a time, kernels loaded ahead, graphs for short ones, and a prefix of many read once."""

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8moe.decode.cache import copy_rows, has_states
from fp8moe.decode.model_use import ModelState
from fp8moe.decode.transfers import HostReads
from fp8moe.kernels.gemm.warmup import families
from fp8moe.runtime.jit import load_all
from fp8moe.runtime.launch import num_sms

MOST_WHOLE_TOKENS = 65536
"""Tokens of a batch that are read in one piece, if memory allows it: attention is fastest then."""
MOST_TOKENS = 8192
"""Tokens of a batch in one of several pieces: beyond it the kernels gain little."""
LEAST_COLUMNS = 64
FREE_MEMORY_FRACTION = 0.5
"""The part of the free memory that a piece may take."""
_RECEIVED, _SUM = 1.1, 4  # bytes of a quantized token's column with its scale, and of a partial sum's

MOST_GRAPH_TOKENS = 4096
"""Tokens of a batch: of twice as many, the kernels take the GPU longer to run than the host to launch."""
COLUMNS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
"""Numbers of columns that prompts from graphs are padded to."""


def columns_at_a_time(model: Any, batch: int, end: int, device: torch.device, *, masked: bool, ranks: int = 1) -> int:
    """Return how many columns of a batch of prompts to read at once, of `end`; all of them on a CPU.

    masked: the attention takes a mask, and its keys are repeated for all heads. ranks: that share the experts: each has
    room for the tokens that all send and for the sums that all return.
    """
    if device.type != "cuda":
        return end
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    config, itemsize = model.config.get_text_config(decoder=True), model.dtype.itemsize
    heads, size = config.num_attention_heads, _head_size(config)
    room = FREE_MEMORY_FRACTION * free
    each = _values_of_a_token(config) * itemsize
    if ranks > 1:
        each += ranks * (_RECEIVED + _SUM) * config.hidden_size
    if getattr(config, "kv_lora_rank", None):  # all latents are expanded, then put together with the rotated part
        room -= batch * end * heads * (2 * size + 2 * config.v_head_dim) * itemsize
    if masked:
        room -= 2 * batch * end * heads * size * itemsize
        each += (1 + heads * (config._attn_implementation == "eager")) * 2 * end * itemsize
    tokens = int(room / each)
    if batch * end <= min(tokens, MOST_WHOLE_TOKENS):
        return end
    return max(min(tokens, MOST_TOKENS) // batch, LEAST_COLUMNS)


def _values_of_a_token(config: Any) -> int:
    """Estimate, from above, the values that a layer holds at once for a token."""
    chosen = getattr(config, "num_experts_per_tok", None) or 1
    dense = getattr(config, "intermediate_size", None) or 0
    experts = getattr(config, "moe_intermediate_size", None) or dense
    attention = 6 * config.num_attention_heads * _head_size(config)
    inner = max(4 * dense, chosen * (2 * config.hidden_size + 4 * experts))
    return 8 * config.hidden_size + attention + inner


def _head_size(config: Any) -> int:
    if getattr(config, "kv_lora_rank", None):
        return config.qk_nope_head_dim + config.qk_rope_head_dim
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def compile_for_prompts(device_index: int, tokens: int) -> None:
    """Load every GEMM that prompts of so many tokens together may choose, of all models whose step has run."""
    tokens = min(tokens, MOST_WHOLE_TOKENS)
    sms = num_sms(device_index)
    known = [*families.items()]  # at once: other threads may add to them meanwhile
    load_all(set().union(*(family.variants(rows * tokens, sms) for family, rows in known)))


class _Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    tokens: Tensor
    logits: Tensor


class ShortPrompts:
    """CUDA graphs that read short prompts in a step of `size` rows; none if the model reads values on the host.

    To launch the kernels of a short prompt takes the host longer than they take the GPU. Prompts are padded on the left
    to one of COLUMNS; each has a graph, captured when it is needed a second time. All share one memory pool.

    chunk: most columns that may be read at a time.
    """

    def __init__(self, size: int, chunk: int | None, stream: torch.cuda.Stream, pool: tuple[int, int]):
        self._stream, self._pool = stream, pool
        most = min(MOST_GRAPH_TOKENS // size, chunk or MOST_GRAPH_TOKENS)
        self.columns = [columns for columns in COLUMNS if columns <= most]
        self._graphs: dict[int, _Graph | None] = {}  # None: seen once

    @property
    def most(self) -> int:
        """Columns of the longest prompts that may have a graph; 0 if none may."""
        return max(self.columns, default=0)

    def fit(self, tokens: Tensor, mask: Tensor | None, room: int) -> tuple[Tensor, Tensor | None]:
        """Pad prompts (B, T) to columns that a graph may read, and their mask; unchanged if they are too long.

        room: most columns.
        """
        length = tokens.shape[1]
        columns = next((columns for columns in self.columns if columns >= length), None)
        if columns is None or columns > room:
            return tokens, mask
        if mask is None:
            mask = torch.ones_like(tokens, dtype=torch.bool)
        missing = (columns - length, 0)
        return pad(tokens, missing), pad(mask.bool(), missing)

    def read(self, tokens: Tensor, eagerly: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the logits that `eagerly` gives for tokens (B, T), T one of `columns`; valid until the next call."""
        columns = tokens.shape[1]
        known = self._graphs.get(columns)
        if known is not None:
            known.tokens.copy_(tokens)
            known.graph.replay()
            return known.logits
        if columns not in self._graphs:
            self._graphs[columns] = None
            return eagerly(tokens)
        with HostReads(tokens.device) as reads:
            logits = eagerly(tokens)
        if reads.operations:
            self.columns.clear()
        else:
            self._capture(tokens.clone(), eagerly)
        return logits

    def _capture(self, tokens: Tensor, eagerly: Callable[[Tensor], Tensor]) -> None:
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on calling CUDA.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            logits = eagerly(tokens)
        self._graphs[tokens.shape[1]] = _Graph(graph, tokens, logits)

    def release(self) -> None:
        for known in self._graphs.values():
            if known is not None:
                known.graph.reset()
        self._graphs.clear()


class Prefix:
    """A prefix of prompts: tokens (n,) int64, and a cache of exactly their length that a step has read them into.

    pads: whether prompts that follow it in one batch may have different lengths.
    """

    def __init__(self, decoder: Any, tokens: Tensor):
        """tokens (1, n) int64, on the model's device."""
        self.tokens = tokens[0]
        self.length = tokens.shape[1]
        self._decoder = weakref.ref(decoder)
        self._state = ModelState(decoder.model)
        step = decoder.step_of(1, self.length)
        step.start(1, self.length, None, [], 0)
        step.prefill(tokens, None)
        self.pads = step.capabilities.ragged and not has_states(step.cache)
        self._cache = step.cache

    def check(self, decoder: Any) -> None:
        """Raise ValueError if the decoder cannot continue it."""
        if self._decoder() is not decoder:
            raise ValueError("prefix: it was made by another GraphDecoder")
        if change := self._state.change(decoder.model):
            raise ValueError(f"prefix: {change} since it was made: make it again")

    def put(self, step: Any, tokens: Tensor, mask: Tensor | None) -> tuple[Tensor, int | None]:
        """Begin the rows of a started step with it. tokens, mask (B, T): the prompts that follow.

        Padding between the prefix and a prompt could not be hidden: the last tokens of the prefix take its place and
        are read again, in rows of their own lengths.

        Returns the tokens to read and the column where they begin, None where the rows differ in it.
        Raises ValueError for padding that is not on the left, or that the model cannot do without.
        """
        size, new = tokens.shape
        row = torch.arange(size, device=tokens.device)
        copy_rows(step.cache, size, row, self._cache, torch.zeros_like(row), self.length)
        if mask is None or mask.all():
            step.columns.fill_(self.length)
            return tokens, self.length
        name = type(step.model).__name__
        if (mask[:, :-1] & ~mask[:, 1:]).any():
            raise ValueError("attention_mask: after a prefix expected zeros on the left only, got some between ones")
        if not self.pads:
            raise ValueError(f"prefix: {name} can continue it with prompts of one length only, without padding")
        padding = step.begin[:, None].clone()
        column = torch.arange(new, device=tokens.device)
        source = torch.where(column < padding, self.length - padding + column, self.length + column)
        joined = torch.cat([self.tokens.expand(size, -1), tokens], dim=1)
        step.columns.copy_((self.length - step.begin).clamp(min=0))
        step.begin.sub_(self.length).clamp_(min=0)
        step.mask.copy_(torch.arange(step.mask.shape[1], device=tokens.device) >= step.begin[:, None])
        return joined.gather(1, source.clamp(min=0)), None
