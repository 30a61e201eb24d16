"""Short prompts are read from CUDA graphs: to launch their kernels takes the host longer than they take the GPU.

They are padded on the left to one of a few numbers of columns; each has a graph, captured when it is needed a second
time.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8moe.integrations.decode.host_reads import HostReads

FEW_TOKENS = 2048
"""Of a batch: with more the GPU takes as long as the host."""
COLUMNS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)


class _Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    tokens: Tensor
    logits: Tensor


class ShortPrompts:
    """The graphs of a step of `size` rows, in one memory pool; none if the model reads values on the host.

    chunk: most columns that may be read at a time.
    """

    def __init__(self, size: int, chunk: int | None, stream: torch.cuda.Stream, pool: tuple[int, int]):
        self._stream, self._pool = stream, pool
        most = min(FEW_TOKENS // size, chunk or FEW_TOKENS)
        self._columns = [columns for columns in COLUMNS if columns <= most]
        self._graphs: dict[int, _Graph | None] = {}  # None: seen once

    @property
    def most(self) -> int:
        """Columns of the longest prompts that may have a graph; 0 if none may."""
        return max(self._columns, default=0)

    def fit(self, tokens: Tensor, mask: Tensor | None, room: int) -> tuple[Tensor, Tensor | None]:
        """Prompts (B, T) padded to columns that a graph may read, and their mask; as they are, if they are too long.

        room: most columns.
        """
        length = tokens.shape[1]
        columns = next((columns for columns in self._columns if columns >= length), None)
        if columns is None or columns > room:
            return tokens, mask
        if mask is None:
            mask = torch.ones_like(tokens, dtype=torch.bool)
        missing = (columns - length, 0)
        return pad(tokens, missing), pad(mask.bool(), missing)

    def takes(self, columns: int) -> bool:
        return columns in self._columns

    def read(self, tokens: Tensor, eagerly: Callable[[Tensor], Tensor]) -> Tensor:
        """The logits that `eagerly` gives for tokens (B, T) in columns that `takes`; they hold until the next call."""
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
        if reads.found:
            self._columns.clear()
        else:
            self._capture(tokens, eagerly)
        return logits

    def _capture(self, tokens: Tensor, eagerly: Callable[[Tensor], Tensor]) -> None:
        graph, tokens = torch.cuda.CUDAGraph(), tokens.clone()
        # Other threads may go on calling CUDA.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            logits = eagerly(tokens)
        self._graphs[tokens.shape[1]] = _Graph(graph, tokens, logits)

    def release(self) -> None:
        for known in self._graphs.values():
            if known is not None:
                known.graph.reset()
        self._graphs.clear()
