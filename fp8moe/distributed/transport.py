"""How tokens get to their experts and results back: what the methods have in common, and its derivatives."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from fp8moe.distributed.packet import Tokens, pack, unpack
from fp8moe.kernels.experts.backward import no_double_backward


class Transport(ABC):
    """One call's way from the ranks of the tokens to those of the experts, and back.

    room: rows that `out` sends, at least as many as this rank has tokens.
    rows: assignments to this rank's experts, where the host knows how many there are.
    """

    room: int
    rows: int | None = None

    @abstractmethod
    def out(self, rows: Tensor) -> Tensor:
        """A row for each token of this rank, (T, C) or (room, C), to those for each token here, (N, C)."""

    @abstractmethod
    def back(self, rows: Tensor, dtype: torch.dtype, residual: Tensor | None = None) -> Tensor:
        """(N, C) back to the tokens' ranks: each token's sum in float32, in the order of ranks, rounded once.

        residual: (T, C) of that dtype, to which the result is added. It is the adjoint of `out`.
        """

    def send(self, tokens: Tokens) -> Tokens:
        """The tokens of this rank to those here."""
        return unpack(self.out(pack(tokens, self.room)), tokens)


def send(transport: Transport, tokens: Tokens) -> Tokens:
    """`Transport.send` with gradients of hidden_states, which are not quantized, and top_k_weights."""
    return Tokens(*_Send.apply(transport, *tokens))


def collect(transport: Transport, partial: Tensor, dtype: torch.dtype) -> Tensor:
    """`Transport.back` with a gradient, which travels in the dtype of the result."""
    return _Collect.apply(transport, partial, dtype)


def differentiated_once(backward: Callable) -> Callable:
    """A backward of an autograd.Function whose gradients cannot be differentiated: that is an error.

    Collectives show autograd nothing, so that a second derivative would lack what has gone over them.
    """

    @functools.wraps(backward)
    def run(ctx, *grads: Tensor) -> tuple:
        with torch.no_grad():
            found = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return found
        return tuple(value if value is None else _Once.apply(value, *grads, *ctx.saved_tensors) for value in found)

    return run


class _Once(torch.autograd.Function):
    """A gradient, and what it was computed from."""

    @staticmethod
    def forward(ctx, value, *_):
        return value.view_as(value)

    backward = staticmethod(no_double_backward)


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx, transport, hidden_states, top_k_index, top_k_weights):
        ctx.transport, ctx.dtypes = transport, (hidden_states.dtype, top_k_weights.dtype)
        tokens = transport.send(Tokens(hidden_states, top_k_index, top_k_weights))
        ctx.mark_non_differentiable(tokens.top_k_index)
        return tuple(tokens)

    @staticmethod
    @differentiated_once
    def backward(ctx, d_hidden, _, d_weights):
        # What is asked for is the same on all ranks: they have agreed on it.
        back, needed = ctx.transport.back, ctx.needs_input_grad
        d_hidden = back(d_hidden, ctx.dtypes[0]) if needed[1] else None
        return None, d_hidden, None, back(d_weights.float(), ctx.dtypes[1]) if needed[3] else None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx, transport, partial, dtype):
        ctx.transport = transport
        return transport.back(partial, dtype)

    @staticmethod
    @differentiated_once
    def backward(ctx, grad):
        return None, ctx.transport.out(grad).float(), None
