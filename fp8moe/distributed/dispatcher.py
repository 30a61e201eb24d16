"""Dispatcher: the forward of a layer whose experts are spread over the ranks of a process group."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fp8moe.distributed.agreement import Agreement, CallSummary, Exchange
from fp8moe.distributed.local import LocalExperts
from fp8moe.distributed.peers import Peers
from fp8moe.distributed.transport import (
    AllToAll,
    ExactAllToAll,
    ExactGather,
    Gather,
    Replicated,
    Tokens,
    Transport,
    choose_method,
    collect,
    combine_exact,
    permute,
    send,
    weighted_sum,
)
from fp8moe.kernels.experts import checks
from fp8moe.kernels.experts.operands import TokenOperands
from fp8moe.layers.experts import flattened, unflattened
from fp8moe.quant.formats import ceil_div
from fp8moe.quant.quantize import quantize_1x128
from fp8moe.runtime import autograd
from fp8moe.runtime.autograd import check_derivatives, recorded
from fp8moe.runtime.capture import capturing
from fp8moe.runtime.checks import FLOATING

_NAME = "fp8moe.GroupedExperts"


class Options(NamedTuple):
    """The arguments of `ExpertParallel`."""

    method: str
    payload: str
    exact: bool
    uniform: bool


class Inputs(NamedTuple):
    """The arguments of one forward call, checked, with leading dimensions flattened.

    trains: whether the call may have a backward.
    """

    tokens: Tokens
    residual: Tensor | None
    local: LocalExperts
    trains: bool

    def summary(self, layer: int) -> CallSummary:
        x, index, routing = self.tokens
        bits = self.trains, recorded(x), recorded(routing), recorded(*self.local.weights.tensors())
        gradients = sum(bit << position for position, bit in enumerate(bits))
        return CallSummary(len(x), 0, layer, FLOATING.index(x.dtype), index.shape[1], gradients)


class Dispatcher:
    """Runs the forward of one expert-parallel layer; each such layer has its own Dispatcher, as an attribute.

    All ranks must call `forward` together. Either all ranks pass a residual or none does.

    group: the ranks that share the experts, in the order of experts. num_experts: E, the total over all ranks.
    """

    def __init__(self, group: ProcessGroup, num_experts: int, options: Options):
        self.group, self.num_experts, self.options = group, num_experts, options
        self.world, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.agreement = Agreement.of(group)
        self.layer = self.agreement.new_layer()
        self._fits = True  # whether the rows of the last call in training fitted into the room of an even share

    def __deepcopy__(self, memo: dict) -> "Dispatcher":
        return self

    @torch.compiler.disable
    def forward(
        self,
        experts: nn.Module,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Return what a `GroupedExperts` with all E experts would return for the tokens of this rank."""
        captured = isinstance(hidden_states, Tensor) and capturing(hidden_states)
        alone = self.options.uniform or captured
        inputs, error = None, None
        try:
            inputs = self._inputs(experts, Tokens(hidden_states, top_k_index, top_k_weights), residual)
        except (TypeError, ValueError, RuntimeError) as caught:
            if alone:
                raise
            error = caught
        counts = [len(inputs.tokens.top_k_index)] * self.world if alone else self._counts(inputs, error)
        if inputs.trains:
            # What is uniform in training is compared while the GPU computes. Nothing is in inference, nor in a graph.
            exchange = Exchange(self.agreement, inputs.summary(self.layer)) if alone and not captured else None
            out = self._train(inputs, counts, exchange.check_uniform if exchange else lambda: None)
        elif not recorded(inputs.residual):
            return unflattened(self._run(inputs, counts), hidden_states)
        else:
            out = self._run(inputs._replace(residual=None), counts)
        out = out if inputs.residual is None else inputs.residual + out
        return unflattened(out, hidden_states)

    def _inputs(self, experts: nn.Module, tokens: Tokens, residual: Tensor | None) -> Inputs:
        x, index, routing, residual = flattened(*tokens, residual)
        weights = experts.local_weights()
        check_derivatives(_NAME, x, routing, *weights.tensors())
        checks.tokens(TokenOperands(x, index, routing, weights.layer, residual=residual))
        first = self.rank * (self.num_experts // self.world)
        local = LocalExperts(weights, first, self.num_experts, x.dtype)
        return Inputs(Tokens(x, index, routing), residual, local, experts.trains(weights, x, routing))

    def _counts(self, inputs: Inputs | None, error: Exception | None) -> list[int]:
        """Return the number of tokens of each rank.

        Raises the same ValueError on all ranks if any rank passes an error or the ranks' calls differ.
        """
        counts = self.agreement.calls(CallSummary() if error else inputs.summary(self.layer), error)
        if self.options.method == "replicated" and len(set(counts)) > 1:
            raise ValueError(f"hidden_states: expected the same tokens on all ranks, got {counts} tokens")
        return counts

    def _run(self, inputs: Inputs, counts: list[int]) -> Tensor:
        x, _, routing = inputs.tokens
        weights = inputs.local.weights.tensors()
        return autograd.run(lambda *_: self._infer(inputs, counts), _NAME, x, routing, *weights)

    def _train(self, inputs: Inputs, counts: list[int], agree: Callable[[], None]) -> Tensor:
        """Return the layer's result without a residual. agree: called before the CPU waits for the GPU."""
        local, index = inputs.local, inputs.tokens.top_k_index
        method = self._method(index, counts)
        if self.options.exact or method == "all_to_all":
            agree()
        if self.options.exact:
            return self._run_exact(inputs, counts)
        transport = self._transport(method, index, counts)
        received, expected_rows = send(transport, inputs.tokens), self._expected_rows(index, counts)
        if method == "all_to_all":
            partial = local.train(received, transport.num_rows)
        else:
            partial, self._fits = local.train_without_waiting(received, expected_rows, self._fits, agree)
        return collect(transport, partial, local.dtype)

    def _run_exact(self, inputs: Inputs, counts: list[int]) -> Tensor:
        local, (_, index, routing), trains = inputs.local, inputs.tokens, inputs.trains
        if capturing(index):
            exact = ExactGather(self.group, counts, index, self.num_experts)
        else:
            exact = ExactAllToAll(self.group, index, self.num_experts)
        if trains:
            tokens = send(exact.transport, inputs.tokens._replace(top_k_weights=routing.detach()))
        else:
            tokens = exact.transport.send(self._quantized(inputs.tokens))
        groups, rows, count = local.sort(tokens, exact.transport.num_rows)
        x = permute(tokens.hidden_states, rows, count) if trains else local.quantized_rows(tokens, rows, count)
        y = local.results(x, groups, sum(counts) * index.shape[1], trains)
        if trains:
            return combine_exact(exact, y, rows, routing, local.dtype)
        return weighted_sum(exact.back(y, rows), exact.row_index, routing, local.dtype, inputs.residual)

    def _infer(self, inputs: Inputs, counts: list[int]) -> Tensor:
        local, (x, index, _), residual = inputs.local, inputs.tokens, inputs.residual
        if self.options.exact:
            return self._run_exact(inputs, counts)
        replicated = self.options.method == "replicated"
        expected_rows = self._expected_rows(index, counts)
        peers = self._peers(x)
        if peers is None:
            transport = self._transport(self._method(index, counts), index, counts)
            tokens = transport.send(self._quantized(inputs.tokens))
            partial = local.partial_sums(tokens, expected_rows, transport.num_rows)
            return transport.back(partial, local.dtype, residual)
        if replicated:
            return peers.replicated(local, inputs.tokens, expected_rows, residual)
        return peers.gather(local, inputs.tokens, max(counts), expected_rows, residual)

    def _expected_rows(self, index: Tensor, counts: list[int]) -> int:
        """Return the number of assignments to this rank's experts if routing is even. counts: those of `_counts`."""
        tokens = counts[0] if self.options.method == "replicated" else sum(counts)
        return ceil_div(tokens * index.shape[1], self.world)

    def _quantized(self, tokens: Tokens) -> Tokens:
        """Return the tokens in the format in which inference sends them, FP8 or unchanged (`Options.payload`)."""
        if self.options.payload == "bf16":
            return tokens
        return tokens._replace(hidden_states=quantize_1x128(tokens.hidden_states))

    def _peers(self, x: Tensor) -> Peers | None:
        """Return the `Peers` of the group if they support this call, or None if the call needs collectives.

        With `Peers`, "auto" always gathers: `Peers.gather` sends a token only to ranks that have its experts.
        """
        method, payload = self.options.method, self.options.payload
        supported = method == "replicated" or (method != "all_to_all" and payload == "fp8")
        return Peers.of(self.group, x) if supported and x.is_cuda and x.shape[1] % 16 == 0 else None

    def _method(self, index: Tensor, counts: list[int]) -> str:
        """Return the method by which collectives send the tokens: gather, all_to_all or replicated."""
        method = self.options.method
        if method == "auto":
            method = choose_method(max(counts), index.shape[1], self.world)
        return "gather" if method == "all_to_all" and capturing(index) else method

    def _transport(self, method: str, index: Tensor, counts: list[int]) -> Transport:
        if method == "all_to_all":
            return AllToAll(self.group, index, self.num_experts)
        return {"gather": Gather, "replicated": Replicated}[method](self.group, counts)
