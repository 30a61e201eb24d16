"""What the host must know of ``cuda/peers.cuh``: kernels that store to the memory of several GPUs."""

from typing import NamedTuple

MAX_PEERS = 8
SIGNALS_BYTES = 4 * (MAX_PEERS + 2)
"""The bytes of ``struct Signals``, which each GPU has once, zero at first."""

_ARRIVED_BYTES = 4  # of a word of Signals.arrived


class Targets(NamedTuple):
    """Where the rows of a layer go, on so many peers: each to the peer whose token it is, or all to all of them.

    each: assignments of a peer's tokens, which come one peer after the other; with to_all those of all tokens.
    addresses: of (each, H) on every peer, a row for each assignment, then the meeting.
    """

    peers: int
    each: int
    to_all: bool
    addresses: tuple[int, ...]

    @property
    def form(self) -> tuple[int, int, bool]:
        """What the kernels are made for."""
        return self.peers, self.each, self.to_all

    def pointers(self, assignments: int) -> tuple[int, ...]:
        """What a GEMM's epilogue takes: the peers' rows, the assignments of its rows, and the meeting."""
        return *self.addresses[: self.peers], assignments, *self.addresses[self.peers :]


def peer_defines(peers: int) -> tuple[tuple[str, int], ...]:
    """What peers.cuh wants defined."""
    return ("PEERS", peers), ("MEETING_BYTES", 8 * (peers + 1))


def meeting(signals: list[int], rank: int) -> tuple[int, ...]:
    """``struct Meeting``: addresses of this rank's words in the signals of all peers, and of its own signals."""
    return *(address + rank * _ARRIVED_BYTES for address in signals), signals[rank]


def no_meeting(peers: int) -> tuple[int, ...]:
    """``struct Meeting`` of a kernel that ends without waiting for the others."""
    return (0,) * (peers + 1)
