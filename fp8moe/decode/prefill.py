"""Prefill on a GPU: load its kernels in advance, pad prompts to few shapes, and read short ones with CUDA graphs."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8moe.decode.memory import MOST_WHOLE_TOKENS
from fp8moe.decode.transfers import HostReads
from fp8moe.kernels.gemm.warmup import families
from fp8moe.runtime.jit import load_all
from fp8moe.runtime.launch import num_sms

MOST_GRAPH_TOKENS = 4096
"""A prefill graph has at most this many tokens: with twice as many, the host launches kernels faster than they run."""
COLUMNS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
"""The numbers of columns that prompts are padded to, so that a graph can prefill them."""


def shared_columns(length: int) -> int:
    """Return the number of columns that prompts of ``length`` are padded to, so that few shapes occur.

    That is at most an eighth more, or the next multiple of 16. A GPU's plans are made once for each shape; cuDNN's take
    some 60 ms.
    """
    step = 1 << max((length - 1).bit_length() - 4, 4)
    return (length + step - 1) // step * step


def pad_to(columns: int, tokens: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Pad prompts (B, T) and their mask on the left."""
    if mask is None:
        mask = torch.ones_like(tokens, dtype=torch.bool)
    missing = (columns - tokens.shape[1], 0)
    return pad(tokens, missing), pad(mask.bool(), missing)


def compile_for_prompts(device_index: int, tokens: int) -> None:
    """Load every GEMM kernel that prompts of up to ``tokens`` tokens may use, for all models whose step has run."""
    tokens = min(tokens, MOST_WHOLE_TOKENS)
    sms = num_sms(device_index)
    known = [*families.items()]  # a copy: other threads may add families meanwhile
    load_all(set().union(*(family.variants(rows * tokens, sms) for family, rows in known)))


class _Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    tokens: Tensor
    logits: Tensor


class ShortPrompts:
    """CUDA graphs that prefill short prompts in a step of ``size`` rows.

    The host takes longer to launch the kernels of a short prompt than the GPU to run them. Prompts are padded on the
    left to one of COLUMNS. Each of these lengths has a graph, captured at its second use, and another that also records
    routing. All graphs share one memory pool. If the model reads values on the host, prompts are prefilled without
    graphs.

    chunk: the most columns to prefill at a time.
    """

    def __init__(self, size: int, chunk: int | None, stream: torch.cuda.Stream, pool: tuple[int, int]):
        self._stream, self._pool = stream, pool
        most = min(MOST_GRAPH_TOKENS // size, chunk or MOST_GRAPH_TOKENS)
        self.columns = [columns for columns in COLUMNS if columns <= most]
        # By number of columns, and whether they record routing; None until the second use.
        self._graphs: dict[tuple[int, bool], _Graph | None] = {}

    def columns_of(self, length: int) -> int | None:
        """Return the columns of the shortest graph that may prefill prompts of this length; None if no graph may."""
        return next((columns for columns in self.columns if columns >= length), None)

    def read(self, tokens: Tensor, eagerly: Callable[[Tensor], Tensor], recorded: bool = False) -> Tensor:
        """Return the logits ``eagerly(tokens)``, from a graph if there is one. They are valid until the next call.

        tokens: (B, T), where T is one of ``self.columns``. recorded: whether ``eagerly`` records routing.
        """
        kind = tokens.shape[1], recorded
        known = self._graphs.get(kind)
        if known is not None:
            known.tokens.copy_(tokens)
            known.graph.replay()
            return known.logits
        if kind not in self._graphs:
            self._graphs[kind] = None
            return eagerly(tokens)
        with HostReads(tokens.device) as reads:
            logits = eagerly(tokens)
        if reads.operations:
            self.columns.clear()
        else:
            self._graphs[kind] = self._capture(tokens.clone(), eagerly)
        return logits

    def _capture(self, tokens: Tensor, eagerly: Callable[[Tensor], Tensor]) -> _Graph:
        graph = torch.cuda.CUDAGraph()
        # "thread_local", so that other threads may call CUDA during the capture.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            logits = eagerly(tokens)
        return _Graph(graph, tokens, logits)

    def release(self) -> None:
        for known in self._graphs.values():
            if known is not None:
                known.graph.reset()
        self._graphs.clear()
