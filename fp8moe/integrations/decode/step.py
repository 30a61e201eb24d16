"""The decode step of one batch size: one token for each sequence, with nothing that depends on the host."""

import inspect
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from fp8moe.integrations.decode.attention import used_by
from fp8moe.integrations.decode.cache import static_cache

WARM_UP_RUNS = 3


class Step:
    """The cache of a batch, the tensors that the step reads and writes in place, and its graph.

    tokens, positions (B, 1): what the model reads. mask (B, max_length): False where the prompt is padded; the causal
    mask hides the columns that are still to come. generated (B, max_length): the first `count` columns are known.
    finished (B,). attention: implementation that reads the cache, None for the model's own.
    """

    def __init__(self, model: Any, size: int, max_length: int, device: torch.device, attention: str | None = None):
        self.model = model
        self.attention = attention
        self.size = size
        self.cache = static_cache(model.config, max_length)
        integers = partial(torch.zeros, dtype=torch.int64, device=device)
        self.tokens = integers(size, 1)
        self.positions = integers(size, 1)
        self.mask = torch.ones(size, max_length, dtype=torch.bool, device=device)
        self.generated = integers(size, max_length)
        self.count = integers(1)
        self.finished = torch.zeros(size, dtype=torch.bool, device=device)
        self.is_end = torch.zeros(vocabulary(model), dtype=torch.bool, device=device)
        self.pad = integers(())
        self.graph: torch.cuda.CUDAGraph | None = None

    def start(self, batch: int, length: int, mask: Tensor | None, ends: list[int], pad: int) -> None:
        """Set everything for a batch of prompts; rows from `batch` on are copies of row 0."""
        self.cache.reset()  # writes zeros: masked values are multiplied by 0, which would leave a NaN
        self.count.zero_()
        self.mask.fill_(True)
        if mask is None:
            self.positions.fill_(length - 1)
        else:
            self.mask[:, :length] = self.rows(mask)
            self.positions.copy_(self.mask[:, :length].sum(1, keepdim=True) - 1)
        self.is_end.zero_()
        if ends:
            self.is_end[ends] = True
        self.pad.fill_(pad)
        self.finished.zero_()
        self.finished[batch:] = True

    def prefill(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        """Read the prompts; the logits (B, vocabulary) after them."""
        length = tokens.shape[1]
        arguments = {}
        if mask is None:
            positions = torch.arange(length, device=tokens.device).expand(self.size, length)
        else:
            arguments["attention_mask"] = self.mask[:, :length].long()
            positions = positions_of(arguments["attention_mask"])
        if "logits_to_keep" in inspect.signature(self.model.forward).parameters:
            arguments["logits_to_keep"] = 1
        return self.run(self.rows(tokens), positions, **arguments)

    def replay(self) -> None:
        """One more token for each sequence."""
        if self.graph is None:
            self.advance()
        else:
            self.graph.replay()

    def advance(self) -> None:
        self.accept(self.read())

    def read(self) -> Tensor:
        """Read `tokens`; the logits (B, vocabulary) after them."""
        self.positions.add_(1)
        with used_by(self.model, self.attention):
            return self.run(self.tokens, self.positions, attention_mask=self.mask)

    def run(self, tokens: Tensor, positions: Tensor, **arguments) -> Tensor:
        output = self.model(
            input_ids=tokens, position_ids=positions, past_key_values=self.cache, use_cache=True, **arguments
        )
        return output.logits[:, -1]

    def accept(self, logits: Tensor) -> None:
        """Choose the next token of each sequence."""
        chosen = torch.where(self.finished, self.pad, logits.argmax(-1))
        self.finished.logical_or_(self.is_end[chosen])
        self.tokens.copy_(chosen[:, None])
        self.generated.index_copy_(1, self.count, self.tokens)
        self.count.add_(1)

    def rows(self, values: Tensor) -> Tensor:
        """(batch, ...) -> (size, ...): copies of row 0 below."""
        missing = self.size - len(values)
        return torch.cat([values, values[:1].expand(missing, *values.shape[1:])]) if missing else values

    def result(self, batch: int) -> Tensor:
        """The new tokens (batch, n), up to the end of the sequence that ended last."""
        count = int(self.count)
        new = self.generated[:batch, :count]
        ended = self.is_end[new]
        lengths = torch.where(ended.any(1), ended.int().argmax(1) + 1, count)
        return new[:, : int(lengths.max())].clone()

    def capture(self, stream: torch.cuda.Stream, pool: tuple[int, int]) -> None:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_RUNS):  # allocates the cache, compiles kernels, fills PyTorch's own workspaces
                self.start(self.size, 1, None, [], 0)
                self.advance()  # from empty states of linear attention, which take another way than
                self.advance()  # these: the way that is captured
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on calling CUDA.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self.advance()
        self.graph = graph

    def release(self) -> None:
        if self.graph is not None:
            self.graph.reset()
            self.graph = None


def vocabulary(model: Any) -> int:
    return model.config.get_text_config(decoder=True).vocab_size


def positions_of(mask: Tensor) -> Tensor:
    """The positions (B, L) of tokens where the mask (B, L) of integers has 0 for padding, as generate() counts them."""
    return (mask.cumsum(1) - 1).clamp(min=0)


@cache
def capture_stream(device: int) -> torch.cuda.Stream:
    """One for all decoders: cuBLAS keeps a workspace for every stream that it was called on."""
    return torch.cuda.Stream(device)
