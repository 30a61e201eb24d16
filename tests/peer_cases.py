"""Tokens of several ranks and the buffers that they go to, on one device, for tests on the CPU and on a GPU."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from fp8moe.kernels.experts.dispatch import Received
from fp8moe.quant.formats import ceil_div
from tests import random_values

MARK = 0xAB  # of bytes that nothing has written


def marked(*shape: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    return torch.full((*shape[:-1], shape[-1] * dtype.itemsize), MARK, dtype=torch.uint8, device=device).view(dtype)


def new_received(slots: int, hidden: int, top_k: int, *, device: str = "cpu") -> Received:
    """Room for so many tokens."""
    return Received(
        marked(slots, hidden, dtype=torch.float8_e4m3fn, device=device),
        marked(slots, ceil_div(hidden, 128), dtype=torch.float32, device=device),
        marked(slots, top_k, dtype=torch.int32, device=device),
    )


def random_tokens(
    tokens: int,
    hidden: int,
    top_k: int,
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.bfloat16, torch.int64),
    seed: int = 0,
    *,
    device: str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor]:
    """x and top_k_index of these dtypes; some indices are of no expert, all are less than 300."""
    dtype, index_dtype = dtypes
    x = random_values.random(tokens, hidden, dtype=dtype, seed=seed, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    index = torch.randint(-3, 300, (tokens, top_k), generator=generator, device=device).to(index_dtype)
    return x, index


def owners(index: torch.Tensor, ranks: int, num_experts: int) -> torch.Tensor:
    """Which ranks have an expert of each token, one assignment at a time: (T, W) bool."""
    found = torch.zeros(len(index), ranks, dtype=torch.bool)
    for token, experts in enumerate(index.tolist()):
        for expert in experts:
            if 0 <= expert < num_experts:
                found[token, expert // (num_experts // ranks)] = True
    return found


def on_one_gpu(layer: Callable, tokens: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """The layer's results for the tokens of each rank: hidden_states, top_k_index and top_k_weights.

    All in one call, in which ranks have as many as the one with most.
    """
    room = max(len(own[0]) for own in tokens)

    def padded(values: Sequence[torch.Tensor], fill: int) -> torch.Tensor:
        return torch.cat([F.pad(value, (0, 0, 0, room - len(value)), value=fill) for value in values])

    x, index, weights = zip(*tokens, strict=True)
    if not room:
        return list(x)
    out = layer(padded(x, 0), padded(index, -1), padded(weights, 0))
    return [part[: len(own)] for part, own in zip(out.split(room), x, strict=True)]


def as_bytes(received: Received) -> list[torch.Tensor]:
    return [part.view(torch.uint8) for part in received]
