"""Expert parallelism on one node: GPUs write tokens and results to each other's memory (PyTorch's symmetric memory)."""

from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fp8moe.distributed.agreement import Agreement
from fp8moe.distributed.local import LocalExperts
from fp8moe.distributed.transport import Tokens
from fp8moe.kernels.experts import combine, dispatch
from fp8moe.kernels.experts.dispatch import Received
from fp8moe.kernels.experts.operands import row_dtype
from fp8moe.kernels.experts.operator import send_rows
from fp8moe.quant.formats import BLOCK, FP8Tensor, align, ceil_div
from fp8moe.runtime.backend import use_cuda
from fp8moe.runtime.checks import aligned, row_major
from fp8moe.runtime.launch import current_stream, device_guard
from fp8moe.runtime.peer_table import MAX_PEERS, SIGNALS_BYTES, Targets, meeting, no_meeting


class _PeerBuffer:
    """A zeroed buffer of `nbytes` bytes in the symmetric memory of every rank of a group.

    addresses: the address of each rank's buffer, valid on this rank's GPU.
    All ranks must construct it together. Raises ValueError during CUDA graph capture.
    """

    def __init__(self, group: ProcessGroup, device: torch.device, nbytes: int):
        import torch.distributed._symmetric_memory as symmetric_memory

        if torch.cuda.is_current_stream_capturing():
            raise ValueError(
                "hidden_states: expected at most as many tokens in a CUDA graph as in a call before its capture, which "
                "makes the buffers between the GPUs, got more"
            )
        self.memory = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device).zero_()
        self._handle = symmetric_memory.rendezvous(self.memory, group.group_name)
        ranks = range(dist.get_world_size(group))
        self.addresses = [self._handle.get_buffer(rank, (nbytes,), torch.uint8).data_ptr() for rank in ranks]
        # Wait until all ranks get here before any of them writes: a rank may still be reading an old buffer in this
        # memory.
        torch.cuda.synchronize(device)
        Agreement.of(group).gather(None)

    def barrier(self) -> None:
        """Wait, on the current stream, until all ranks get here. Each rank then sees the others' earlier writes."""
        self._handle.barrier(channel=0)


class _ReceiveBuffer(_PeerBuffer):
    """A buffer for the tokens that all ranks send to this rank, with the fields of `Received`."""

    def __init__(self, group: ProcessGroup, device: torch.device, nbytes: int):
        super().__init__(group, device, nbytes)
        self.world, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def parts(self, room: int, hidden: int, top_k: int) -> tuple[Received, list[int]]:
        """Return this rank's `Received`, with slots for `room` tokens of each rank, and where to write on all peers.

        The addresses to write to are in the order of ranks, and for each rank in the order of the fields of `Received`.
        """
        slots, begin, parts, offsets = self.world * room, 0, [], []
        for dtype, columns in received_columns(hidden, top_k):
            nbytes = columns * dtype.itemsize
            parts.append(self.memory[begin : begin + slots * nbytes].view(dtype).view(slots, columns))
            offsets.append(begin + self.rank * room * nbytes)
            begin += align(slots * nbytes, 256)
        return Received(*parts), [address + offset for address in self.addresses for offset in offsets]


class Peers:
    """The GPUs of a group, one for each rank, and the buffers through which they exchange data.

    One object serves all layers of a group, on one stream at a time, so that calls never overlap. Each rank has one
    buffer for the tokens of all ranks (`Received`) and one with a result row for each (token, expert) assignment of its
    own tokens. It adds up these rows as a layer with all experts would: the results have the same bits as on one GPU.

    No buffer is overwritten before all ranks have read it. `gather` has two meetings, at which all ranks wait for each
    other: the first after tokens are sent and before experts read them, the second after result rows are sent and
    before they are added up. A rank sends tokens after the second meeting of the previous call, when all ranks have
    read the tokens of that call. A rank sends result rows after the first meeting of this call, when all ranks have
    added up the rows of the previous call. So one buffer for tokens and one buffer for rows are enough. `replicated`
    sends no tokens, and has a barrier at its beginning in place of the first meeting.
    """

    def __init__(self, group: ProcessGroup, device: torch.device):
        self._group, self.device = ref(group), device  # a weak reference: peers do not keep their group alive
        self.world, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self._signals = _PeerBuffer(group, device, SIGNALS_BYTES)
        self._buffers: dict[type[_PeerBuffer], _PeerBuffer] = {}
        # replaced by larger buffers, but kept because CUDA graphs may hold their addresses
        self._outgrown: list[_PeerBuffer] = []
        self._captured = False

    @classmethod
    def of(cls, group: ProcessGroup, x: Tensor) -> "Peers | None":
        """Return the Peers of a group, or None if a GPU cannot write to the memory of all others.

        x: tokens of a call, on this rank's GPU. All ranks must make the first call for a group together, outside of
        CUDA graph capture.
        """
        if group not in _peers:
            reached = cls.reaches(group, x)
            _peers[group] = cls(group, x.device) if reached else None
        return _peers[group]

    @staticmethod
    def reaches(group: ProcessGroup, x: Tensor) -> bool:
        """Return whether each rank has its own GPU, which runs the kernels and can write to the memory of all GPUs."""
        agreement = Agreement.of(group)
        mine = str(torch.cuda.get_device_properties(x.device).uuid) if use_cuda(x) else None
        uuids = agreement.gather(mine)
        reached = 1 < len(uuids) <= MAX_PEERS and None not in uuids and len(set(uuids)) == len(uuids)
        return all(agreement.gather(reached and _can_write(x.device.index, set(uuids) - {mine})))

    def gather(
        self, local: LocalExperts, tokens: Tokens, room: int, expected_rows: int, residual: Tensor | None = None
    ) -> Tensor:
        """Send tokens to their experts; return the weighted sums for this rank's tokens, (T, H), plus the residual.

        tokens: the tokens of this rank, not quantized; H a multiple of 16. room: the largest number of tokens of any
        rank. expected_rows: see `LocalExperts.passes`. room and expected_rows must be equal on all ranks. The result
        has the dtype of the tokens. The CPU waits for the GPU only in `LocalExperts.passes`, if at all.

        Raises ValueError in a CUDA graph for more tokens than in any call before its capture.
        """
        if not room:
            return _nothing(tokens, residual)
        x, index = row_major(tokens.hidden_states), tokens.top_k_index.contiguous()
        hidden, top_k = x.shape[1], index.shape[1]
        buffer = self._buffer(_ReceiveBuffer, received_bytes(self.world * room, hidden, top_k))
        rows = self._buffer(_PeerBuffer, room * top_k * hidden * row_dtype(x.dtype).itemsize)
        received, slots = buffer.parts(room, hidden, top_k)
        device = self.device.index
        launch = dispatch.launcher(device, x, index, room, self.world, local.total // self.world).launch
        with device_guard(device):
            launch(current_stream(device), x.data_ptr(), index.data_ptr(), *slots, *self._meeting())
        everyone = FP8Tensor(received.data, received.scale)
        self._compute(local, everyone, received.index, expected_rows, rows, room * top_k, to_all=False)
        return self._combine(rows, local, tokens._replace(top_k_index=index), residual)

    def replicated(
        self, local: LocalExperts, tokens: Tokens, expected_rows: int, residual: Tensor | None = None
    ) -> Tensor:
        """Compute the sums of `gather`, (T, H), for tokens that are the same on all ranks. No tokens are sent."""
        x, index = tokens.hidden_states, tokens.top_k_index.contiguous()
        if not len(x):
            return _nothing(tokens, residual)
        rows = self._buffer(_PeerBuffer, index.numel() * x.shape[1] * row_dtype(x.dtype).itemsize)
        rows.barrier()
        self._compute(local, x, index, expected_rows, rows, index.numel(), to_all=True)
        return self._combine(rows, local, tokens._replace(top_k_index=index), residual)

    def _compute(
        self,
        local: LocalExperts,
        x: Tensor | FP8Tensor,
        index: Tensor,
        expected_rows: int,
        rows: _PeerBuffer,
        each: int,
        *,
        to_all: bool,
    ) -> None:
        """Run this rank's experts, send result rows to the tokens' ranks or to all ranks, and wait for all ranks.

        x, index: tokens of all ranks and their top-k experts. rows: the buffer of result rows. `each`: the number of
        assignments for which the buffer of each rank has rows.
        """
        passes = local.passes(index, expected_rows)
        for shard in passes:
            meeting = self._meeting() if shard is passes[-1] else no_meeting(self.world)
            targets = Targets(self.world, each, to_all, (*rows.addresses, *meeting))
            send_rows(targets, x, index, local.weights.layer, shard)

    def _combine(self, rows: _PeerBuffer, local: LocalExperts, tokens: Tokens, residual: Tensor | None) -> Tensor:
        """Return the weighted sums (T, H) of the result rows received for this rank's tokens, plus the residual."""
        x, index, weights = tokens
        (count, hidden), top_k = x.shape, index.shape[1]
        out = torch.empty((count, hidden), dtype=x.dtype, device=self.device)
        if not count:
            return out
        residual, weights = None if residual is None else aligned(residual), weights.contiguous()
        dtypes = combine.Dtypes(row_dtype(x.dtype), weights.dtype, x.dtype, index.dtype)
        launch = combine.launcher(self.device.index, count, hidden, top_k, local.total, dtypes, pdl=True)
        launch(rows.memory, index, weights, residual, None, None, out)
        return out

    def _meeting(self) -> tuple[int, ...]:
        return meeting(self._signals.addresses, self.rank)

    def _buffer(self, kind: type[_PeerBuffer], nbytes: int) -> Any:
        """Return the buffer of class `kind`; make a new one if there is none or it has fewer than `nbytes` bytes."""
        self._captured |= torch.cuda.is_current_stream_capturing()
        buffer = self._buffers.get(kind)
        if buffer is None or buffer.memory.numel() < nbytes:
            if buffer is not None and self._captured:
                self._outgrown.append(buffer)
            buffer = self._buffers[kind] = kind(self._group(), self.device, nbytes)
        return buffer


_peers: WeakKeyDictionary[ProcessGroup, Peers | None] = WeakKeyDictionary()


def received_columns(hidden: int, top_k: int) -> tuple[tuple[torch.dtype, int], ...]:
    """Return (dtype, columns) of each field of `Received`: FP8 values, scales and top-k indices."""
    return (torch.float8_e4m3fn, hidden), (torch.float32, ceil_div(hidden, BLOCK)), (torch.int32, top_k)


def received_bytes(slots: int, hidden: int, top_k: int) -> int:
    """Return the bytes of a `Received` with this number of slots, each field aligned to 256 bytes."""
    return sum(align(slots * columns * dtype.itemsize, 256) for dtype, columns in received_columns(hidden, top_k))


def _nothing(tokens: Tokens, residual: Tensor | None) -> Tensor:
    """Return the empty result of a call in which no rank has tokens."""
    return torch.zeros_like(tokens.hidden_states) if residual is None else residual.clone()


def _can_write(device: int, uuids: set[str]) -> bool:
    """Return whether this process sees all GPUs with these UUIDs and `device` has peer access to all of them."""
    visible = {str(torch.cuda.get_device_properties(other).uuid): other for other in range(torch.cuda.device_count())}
    return uuids <= visible.keys() and all(torch.cuda.can_device_access_peer(device, visible[uuid]) for uuid in uuids)
