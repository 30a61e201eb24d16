"""The host side of ``cuda/common/peers.cuh``: arguments of kernels that store to the memory of several GPUs."""

from typing import NamedTuple

MAX_PEERS = 8
SIGNALS_BYTES = 4 * (MAX_PEERS + 2)
"""Size of ``struct Signals`` in bytes. Each GPU has one, initialized to zeros."""

_ARRIVED_BYTES = 4  # size of an element of the array Signals.arrived


class Targets(NamedTuple):
    """Where a kernel stores result rows: a row goes to the peer that has its token or, with to_all, to every peer.

    peers: number of GPUs. each: number of assignments (pairs of a token and one of its experts) for the tokens of one
    peer; with to_all, for all tokens.
    addresses: for every peer, the address of its buffer (each, H) with one row per assignment; then the addresses of
    the peers' barrier (`meeting`).
    """

    peers: int
    each: int
    to_all: bool
    addresses: tuple[int, ...]

    @property
    def form(self) -> tuple[int, int, bool]:
        """The fields other than addresses. A kernel and its launch plan depend only on them."""
        return self.peers, self.each, self.to_all

    def pointers(self, assignments: int) -> tuple[int, ...]:
        """Return the address fields of `PeerStore`. assignments: address of an array, one assignment per GEMM row."""
        return *self.addresses[: self.peers], assignments, *self.addresses[self.peers :]


def peer_defines(peers: int) -> tuple[tuple[str, int], ...]:
    """Return the macros for peers.cuh."""
    return ("PEERS", peers), ("MEETING_BYTES", 8 * (peers + 1))


def meeting(signals: list[int], rank: int) -> tuple[int, ...]:
    """Return ``struct Meeting``, the barrier at which a kernel waits for its peers before it ends.

    The struct holds the address of this rank's element in each peer's `Signals.arrived`, then the address of this
    rank's own signals. signals: the address of ``struct Signals`` of each peer.
    """
    return *(address + rank * _ARRIVED_BYTES for address in signals), signals[rank]


def no_meeting(peers: int) -> tuple[int, ...]:
    """Return ``struct Meeting`` for a kernel that ends without waiting for its peers."""
    return (0,) * (peers + 1)
