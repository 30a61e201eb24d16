"""Statistics of a GraphDecoder: times of its calls, and its memory. Recording them does not make the GPU wait."""

import math
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

RECENT = 16
"""The number of calls over which times are averaged."""


@dataclass(frozen=True)
class Stats:
    """Statistics of a GraphDecoder. calls, new_tokens, steps: totals since the decoder was made.

    new_tokens counts the tokens of each sequence up to its end. For a stream that was left early, it counts the tokens
    that the stream had yielded. A step is a decode step, which gives one token to every sequence.

    The next three fields cover the last RECENT calls. Until the first call, time_to_first_token and tokens_per_second
    are None.
    seconds: the sum of the times from a call's first token to its last token.
    time_to_first_token: the mean of the seconds from the start of a call on the device to its first token.
    tokens_per_second: the number of tokens, without the first token of each sequence, divided by ``seconds``.

    cache_bytes: keys, values and states of all batch sizes; 0 before they are first used. graph_bytes: the memory pool
    of the CUDA graphs, without what the driver keeps for their nodes.
    """

    calls: int
    new_tokens: int
    steps: int
    seconds: float
    time_to_first_token: float | None
    tokens_per_second: float | None
    cache_bytes: int
    graph_bytes: int


class Record:
    """The record of one call: its times on the device, and its numbers of tokens, sequences and steps."""

    def __init__(self, device: torch.device):
        self._device = device
        self._begin = self._now()
        self._first = self._last = None
        self.tokens = self.sequences = self.steps = 0

    def first_token(self) -> None:
        self._first = self._now()

    def end(self, lengths: list[int]) -> None:
        """Record the end of the call. lengths: the number of new tokens of each sequence."""
        self._last = self._now()
        self.tokens, self.sequences = sum(lengths), len(lengths)

    def times(self) -> tuple[float, float]:
        """Return the seconds from the start to the first token, and from the first token to the end."""
        return self._seconds(self._begin, self._first), self._seconds(self._first, self._last)

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _seconds(self, begin: Any, end: Any) -> float:
        if self._device.type != "cuda":
            return end - begin
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


class Records:
    """Totals over all calls of a decoder, and the records of the last RECENT calls."""

    def __init__(self) -> None:
        self._recent: deque[Record] = deque(maxlen=RECENT)
        self._calls = self._tokens = self._steps = 0

    def add(self, record: Record) -> None:
        self._recent.append(record)
        self._calls += 1
        self._tokens += record.tokens
        self._steps += record.steps

    def stats(self, cache_bytes: int, graph_bytes: int) -> Stats:
        records = [*self._recent]
        times = [record.times() for record in records]
        seconds = math.fsum(after for _, after in times)
        return Stats(
            calls=self._calls,
            new_tokens=self._tokens,
            steps=self._steps,
            seconds=seconds,
            time_to_first_token=sum(first for first, _ in times) / len(times) if times else None,
            tokens_per_second=sum(r.tokens - r.sequences for r in records) / seconds if seconds else None,
            cache_bytes=cache_bytes,
            graph_bytes=graph_bytes,
        )


def cache_bytes(caches: Iterable[Any]) -> int:
    """Count the bytes of keys, values and states in transformers' caches; memory that layers share counts once."""
    layers = [vars(layer) for cache in caches for layer in cache.layers]
    # Skip counters, which have at most one dimension.
    tensors = [leaf for leaf in tree_leaves(layers) if isinstance(leaf, Tensor) and leaf.dim() > 1]
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def pool_bytes(pool: tuple[int, int] | None) -> int:
    """Return the bytes that PyTorch's allocator has reserved for a pool of CUDA graphs."""
    if pool is None:
        return 0
    segments = torch.cuda.memory_snapshot()
    return sum(segment["total_size"] for segment in segments if tuple(segment["segment_pool_id"]) == tuple(pool))
