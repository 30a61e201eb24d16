"""LocalExperts: runs the experts of one rank on the tokens that this rank has received."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fp8moe.distributed.transport import Tokens
from fp8moe.kernels.experts.backward import experts_training
from fp8moe.kernels.experts.operands import Shard, pad_columns, row_dtype
from fp8moe.kernels.experts.operator import experts_of_rows, experts_partial
from fp8moe.kernels.experts.permute import permute_fp8, permute_quantize
from fp8moe.kernels.experts.routing import sort_by_expert
from fp8moe.layers.experts import Weights
from fp8moe.quant.formats import FP8Tensor, align
from fp8moe.runtime.capture import capturing

# A pass runs the experts on part of the rows that a rank has received, one row per (token, expert) assignment. Its
# buffers hold _SLACK times the rows that the rank would get if routing were even, but at least as many as _ALWAYS
# tokens have if all their experts are on this rank.
_SLACK, _ALWAYS = 1.25, 256


class LocalExperts(NamedTuple):
    """The experts of one rank in one call.

    first: index of the rank's first expert. total: E, the number of experts on all ranks. dtype: dtype of the tokens
    before quantization.
    """

    weights: Weights
    first: int
    total: int
    dtype: torch.dtype

    @property
    def count(self) -> int:
        return len(self.weights.layer.down.data)

    def partial_sums(self, tokens: Tokens, expected_rows: int, num_rows: int | None) -> Tensor:
        """Return each token's weighted sum over this rank's experts, (N, H) float32, computed in `passes`."""
        sums = known = None
        passes = self.passes(tokens.top_k_index, expected_rows, num_rows)
        for shard in passes:
            before = {"partial": sums, "partial_known": known}
            last = shard is passes[-1]
            sums, known = experts_partial(*tokens, self.weights.layer, shard, **before, wants_known=not last)
        return sums

    def passes(self, top_k_index: Tensor, expected_rows: int, num_rows: int | None = None) -> list[Shard]:
        """Split the rows of this rank into passes that fit into the buffers; return a Shard for each pass.

        expected_rows: number of (token, expert) assignments to this rank if routing is even.
        num_rows: actual number of assignments to this rank; None if unknown. If None, and one pass may not suffice, the
            CPU reads the number from the GPU. In a CUDA graph, where the CPU cannot read it, the largest possible
            number is assumed.
        The list goes from the last rows to the first. Passes over rows that turn out not to exist cost little.
        """
        room, most = self.room(top_k_index, expected_rows), top_k_index.numel()
        if num_rows is None:
            num_rows = most if most <= room or capturing(top_k_index) else int(self.rows_here(top_k_index))
        shard = Shard(self.first, self.total, num_rows=room, row_dtype=row_dtype(self.dtype))
        return [shard._replace(first_row=row) for row in reversed(range(0, max(num_rows, 1), max(room, 1)))]

    def room(self, top_k_index: Tensor, expected_rows: int) -> int:
        """Return how many rows one pass has room for. expected_rows: as for `passes`."""
        room = max(int(expected_rows * _SLACK), _ALWAYS * max(top_k_index.shape[1], 1))
        return min(room, top_k_index.numel())

    def train(self, tokens: Tokens, num_rows: int | None) -> Tensor:
        """Compute `partial_sums` differentiably, in one pass with room for num_rows rows; None: for any number."""
        if num_rows is not None:
            num_rows = min(align(max(num_rows, 1), 128), tokens.top_k_index.numel())
        shard = Shard(self.first, self.total, num_rows=num_rows, out_dtype=torch.float32)
        return experts_training(*tokens, *self.weights, shard=shard)

    def train_without_waiting(
        self, tokens: Tokens, expected_rows: int, fits: bool, launched: Callable[[], None]
    ) -> tuple[Tensor, bool]:
        """Compute `train` with the `room` of an even share; return also whether the rows fit into it.

        fits: whether to expect that. If so, the CPU launches the pass before it waits for the number of rows, and again
        if they do not fit. launched: called before the CPU waits.
        """
        index = tokens.top_k_index
        room = self.room(index, expected_rows)
        if capturing(index) or index.numel() <= room:
            sums = self.train(tokens, None)
            launched()
            return sums, fits
        came = _Arriving(self.rows_here(index))
        sums = self.train(tokens, room) if fits and not _saved_by_hooks() else None
        launched()
        fits = int(came) <= room
        return self.train(tokens, int(came)) if sums is None or not fits else sums, fits

    def rows_here(self, index: Tensor) -> Tensor:
        """Return the number of assignments to this rank's experts, of shape ()."""
        return ((index >= self.first) & (index < self.first + self.count)).sum()

    def sort(self, tokens: Tokens, num_rows: int | None) -> tuple[Tensor, Tensor, int]:
        """Sort the assignments to this rank's experts: return `sort_by_expert`'s groups and rows, and the row count.

        num_rows: the number of assignments; None: reserve rows for the largest possible number.
        """
        count = tokens.top_k_index.numel() if num_rows is None else num_rows
        return *sort_by_expert(tokens.top_k_index, self.count, first_expert=self.first, num_rows=count), count

    def quantized_rows(self, tokens: Tokens, rows: Tensor, count: int) -> FP8Tensor:
        """Return the tokens as `count` quantized rows sorted by expert. rows: second result of `sort`."""
        x = tokens.hidden_states
        data, scale = x if isinstance(x, FP8Tensor) else (x, None)
        hidden = data.shape[1]
        data = pad_columns(data, align(hidden, 16))
        a = permute_quantize(data, rows, count) if scale is None else permute_fp8(FP8Tensor(data, scale), rows, count)
        return FP8Tensor(a.data[:, :hidden], a.scale)

    def results(self, x: Tensor | FP8Tensor, groups: Tensor, assignments: int, training: bool) -> Tensor:
        """Return the experts' results (R, H) for rows x (R, H) sorted by expert.

        groups: first result of `sort`. assignments: number of (token, expert) assignments on all ranks.
        """
        options = {"row_dtype": row_dtype(self.dtype), "whole": (assignments, self.total), "training": training}
        return experts_of_rows(x, groups, self.weights.layer, masters=self.weights.masters, **options)


def _saved_by_hooks() -> bool:
    """Return whether hooks keep the tensors that autograd saves, or true where PyTorch does not say.

    `torch.utils.checkpoint` counts these tensors: a pass that runs again in the forward must in the recomputation, too.
    """
    hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return hooks is None or hooks(True) is not None


class _Arriving:
    """A number that a device computes and copies to the host; int() waits for it, but not for later operations.

    value: of shape ().
    """

    def __init__(self, value: Tensor):
        self._value, self._copied = value, None
        if value.is_cuda:
            self._value = torch.empty((), dtype=value.dtype, device="cpu", pin_memory=True)
            self._value.copy_(value, non_blocking=True)
            self._copied = torch.cuda.current_stream(value.device).record_event()

    def __int__(self) -> int:
        if self._copied is not None:
            self._copied.synchronize()
        return int(self._value)
