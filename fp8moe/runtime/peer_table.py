"""The host side of ``cuda/common/peers.cuh``: arguments of kernels that store to the memory of several GPUs."""

from typing import NamedTuple

MAX_PEERS = 8
SIGNALS_BYTES = 4 * (MAX_PEERS + 2)
"""Bytes of ``struct Signals``. Each GPU has one, which begins as zeros."""

_ARRIVED_BYTES = 4  # bytes of a word of Signals.arrived


class Targets(NamedTuple):
    """The destinations of a layer's rows: each row goes to the peer that has its token, or with to_all to every peer.

    peers: how many GPUs. each: assignments of the tokens of one peer; with to_all, of all tokens.
    addresses: on every peer the address of (each, H), a row for each assignment; then those of `meeting`.
    """

    peers: int
    each: int
    to_all: bool
    addresses: tuple[int, ...]

    @property
    def form(self) -> tuple[int, int, bool]:
        """The compile-time constants of the kernels."""
        return self.peers, self.each, self.to_all

    def pointers(self, assignments: int) -> tuple[int, ...]:
        """Return the pointers of a GEMM's epilogue: rows on the peers, assignments of the GEMM's rows, the meeting."""
        return *self.addresses[: self.peers], assignments, *self.addresses[self.peers :]


def peer_defines(peers: int) -> tuple[tuple[str, int], ...]:
    """Return the macros that peers.cuh needs."""
    return ("PEERS", peers), ("MEETING_BYTES", 8 * (peers + 1))


def meeting(signals: list[int], rank: int) -> tuple[int, ...]:
    """Return ``struct Meeting``: addresses of this rank's word in the signals of each peer, and of its own signals."""
    return *(address + rank * _ARRIVED_BYTES for address in signals), signals[rank]


def no_meeting(peers: int) -> tuple[int, ...]:
    """Return ``struct Meeting`` for a kernel that ends without waiting for the other GPUs."""
    return (0,) * (peers + 1)
