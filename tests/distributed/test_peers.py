"""Where GPUs write to each other's memory, as far as no GPU is needed: who is served, and how buffers are laid out."""

import torch
import torch.distributed as dist

from fp8moe.distributed import peers
from fp8moe.distributed.peers import Peers, received_bytes
from fp8moe.kernels.experts.dispatch import dispatch
from fp8moe.runtime.peer_table import MAX_PEERS, SIGNALS_BYTES, meeting, no_meeting
from tests.peer_cases import MARK, as_bytes, new_received, random_tokens
from tests.processes import in_processes


def processes_without_gpus():
    group = dist.new_group([0, 1])
    assert Peers.of(group, torch.empty(1)) is None and Peers.of(group, torch.empty(1)) is None
    # Every rank asks, and all get the same answer, also where the kernels could run on some.
    rank, use_cuda = dist.get_rank(), peers.use_cuda
    peers.use_cuda = lambda x: rank == 0
    torch.cuda.get_device_properties = lambda device: type("Properties", (), {"uuid": "a"})
    assert not Peers.reaches(group, torch.empty(1))
    # Nor do two ranks on one GPU reach each other, or GPUs that one of them does not see.
    peers.use_cuda = lambda x: True
    assert not Peers.reaches(group, torch.empty(1))
    torch.cuda.get_device_properties = lambda device: type("Properties", (), {"uuid": f"gpu {rank}"})
    assert not Peers.reaches(group, torch.empty(1))
    torch.cuda.device_count = lambda: 2
    torch.cuda.can_device_access_peer = lambda device, other: True
    torch.cuda.get_device_properties = lambda device: type(
        "Properties", (), {"uuid": f"gpu {device if isinstance(device, int) else rank}"}
    )
    assert Peers.reaches(group, torch.empty(1))
    torch.cuda.can_device_access_peer = lambda device, other: rank == 0
    assert not Peers.reaches(group, torch.empty(1))
    peers.use_cuda = use_cuda


def test_all_ranks_agree_on_who_is_reached():
    in_processes(processes_without_gpus)


def received_on_the_cpu(world, rank, room, hidden, top_k):
    """The class without symmetric memory: this rank's buffer only."""
    buffer = object.__new__(peers._ReceiveBuffer)
    buffer.world, buffer.rank = world, rank
    buffer.memory = torch.full((received_bytes(world * room, hidden, top_k),), MARK, dtype=torch.uint8)
    buffer.addresses = [buffer.memory.data_ptr()] * world
    return buffer


def test_parts_of_a_buffer_and_addresses_of_slots():
    world, room, hidden, top_k = 3, 5, 272, 4
    for rank in range(world):
        buffer = received_on_the_cpu(world, rank, room, hidden, top_k)
        tokens, slots = buffer.parts(room, hidden, top_k)
        assert slots == [part[rank * room :].data_ptr() for part in tokens] * world
        assert all(part.data_ptr() % 16 == 0 and part.is_contiguous() for part in tokens)
        # Parts do not overlap: what is written to all of them is there.
        expected = [new_received(world * room, hidden, top_k)]
        x, index = random_tokens(world * room, hidden, top_k)
        index = index.abs()  # all tokens have an expert
        dispatch(x, index, expected, 0, 300)
        dispatch(x, index, [tokens], 0, 300)
        assert all(map(torch.equal, as_bytes(tokens), as_bytes(expected[0])))
        # A smaller call fits in the same memory.
        smaller, _ = buffer.parts(room - 2, hidden, top_k)
        assert smaller.index.shape == (world * (room - 2), top_k)


def test_words_of_a_meeting():
    signals = [1 << 20, 2 << 20, 3 << 20]
    assert meeting(signals, 1) == ((1 << 20) + 4, (2 << 20) + 4, (3 << 20) + 4, 2 << 20)
    assert no_meeting(3) == (0, 0, 0, 0) and len(meeting(signals, 0)) == 4
    assert SIGNALS_BYTES >= 4 * (MAX_PEERS + 2)
