"""Times of a GraphDecoder's calls, and the memory that it holds. Nothing here makes the GPU wait."""

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
    """calls, new_tokens, steps: since the decoder was made; tokens of all sequences up to their ends, and decode steps,
    of which each gives one token to every sequence. A stream that was left early counts what it had yielded.
    seconds: of the last RECENT calls, from their first tokens to their last ones.

    Of the same calls, None before there is one:
    time_to_first_token: seconds from the start of a call on the device to its first token: the mean.
    tokens_per_second: tokens after the first one of each sequence, by the time from the first token to the last one.

    cache_bytes: keys, values and states of all batch sizes; 0 before they are first used. graph_bytes: memory pool of
    the CUDA graphs; what the driver keeps for their nodes is not in it.
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
    """One call: its times on the device, its tokens and sequences."""

    def __init__(self, device: torch.device):
        self._device = device
        self._begin = self._now()
        self._first = self._last = None
        self.tokens = self.sequences = self.steps = 0

    def first_token(self) -> None:
        self._first = self._now()

    def end(self, lengths: list[int]) -> None:
        """lengths: new tokens of each sequence."""
        self._last = self._now()
        self.tokens, self.sequences = sum(lengths), len(lengths)

    def times(self) -> tuple[float, float]:
        """Return the seconds to the first token, and from there to the end."""
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
    """Sums over all calls, and the last ones."""

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
    """Count the bytes of keys, values and states in transformers' caches; what several layers share counts once."""
    layers = [vars(layer) for cache in caches for layer in cache.layers]
    tensors = [leaf for leaf in tree_leaves(layers) if isinstance(leaf, Tensor) and leaf.dim() > 1]  # not counters
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def pool_bytes(pool: tuple[int, int] | None) -> int:
    """Return the bytes that PyTorch's allocator has reserved for a pool of CUDA graphs."""
    if pool is None:
        return 0
    segments = torch.cuda.memory_snapshot()
    return sum(segment["total_size"] for segment in segments if tuple(segment["segment_pool_id"]) == tuple(pool))
