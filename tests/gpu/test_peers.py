"""Two or four GPUs, a process each, that write to each other's memory: the results of one GPU's layer, bit for bit."""

import math

import pytest
import torch
import torch.distributed as dist

from fp8moe.distributed.local import LocalExperts
from fp8moe.distributed.peers import Peers
from fp8moe.distributed.transport import Tokens
from fp8moe.kernels.experts.operands import Layer
from fp8moe.layers.experts import Weights
from fp8moe.quant.formats import FP8Tensor, ceil_div
from tests import experts_cases, processes
from tests.gpu.checks import captured
from tests.peer_cases import on_one_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two GPUs")]

WORLD, EACH = processes.GPUS, 4  # ranks, experts of each
TOP_K = WORLD + 1
EXPERTS = WORLD * EACH
HIDDEN, SIZE = 1040, 208


def in_processes(work, *arguments):
    """Calls work(peers, *arguments) in a process for each GPU."""
    processes.in_processes(_run, work, arguments, world=WORLD, backend="nccl")


def _run(work, arguments):
    like = torch.empty(1, device="cuda")
    peers = Peers.of(dist.group.WORLD, like)
    assert peers is not None and Peers.of(dist.group.WORLD, like) is peers
    work(peers, *arguments)


def make_layer(**options):
    return experts_cases.make(EXPERTS, HIDDEN, SIZE, device="cuda", **options)


def local_experts(peers, layer, dtype):
    """This rank's part of a layer that all ranks have."""
    first = peers.rank * EACH
    own = slice(first, first + EACH)
    up, up_scale, down, down_scale = (getattr(layer, name)[own] for name in layer.weight_names)
    weights = Weights(Layer(FP8Tensor(up, up_scale), FP8Tensor(down, down_scale), layer.activation))
    return LocalExperts(weights, first, EXPERTS, dtype)


def tokens_of(counts, dtype, seed):
    """Those of each rank, equal on all ranks."""
    found = []
    for rank, count in enumerate(counts):
        x, index, weights, _ = experts_cases.inputs(
            count, EXPERTS, TOP_K, HIDDEN, dtype, seed=WORLD * seed + rank, device="cuda"
        )
        found.append(Tokens(x, index, weights))
    return found


def share(counts):
    return ceil_div(sum(counts) * TOP_K, WORLD)


def gather_eager(peers):
    for dtype, options in ((torch.bfloat16, {}), (torch.float32, {}), (torch.bfloat16, dict(activation="gelu"))):
        layer = make_layer(**options)
        local = local_experts(peers, layer, dtype)
        # A rank without tokens, uneven ones, growing buffers, more than all warps take at a time.
        for seed, some in enumerate(((1,), (0, 5), (3, 0, 1), (64,), (0,), (33, 40, 7), (900, 700), (2000,))):
            counts = processes.on_gpus(*some)
            tokens = tokens_of(counts, dtype, seed)
            mine = tokens[peers.rank]
            residual = torch.randn_like(mine.hidden_states) if seed % 2 else None
            expected = on_one_gpu(layer, tokens)[peers.rank]
            expected = expected if residual is None else residual + expected
            first = peers.gather(local, mine, max(counts), share(counts), residual)
            assert first.dtype == dtype and torch.equal(first, expected), (dtype, options, counts)
            for _ in range(20):
                assert torch.equal(peers.gather(local, mine, max(counts), share(counts), residual), first)


def skewed(peers):
    """All tokens to the experts of one rank: more than one pass, nothing lost."""
    layer = make_layer()
    local = local_experts(peers, layer, torch.bfloat16)
    counts = processes.on_gpus(1500)
    for owner in range(WORLD):
        tokens = [
            own._replace(top_k_index=own.top_k_index % EACH + owner * EACH)
            for own in tokens_of(counts, torch.bfloat16, owner)
        ]
        everything = torch.cat([own.top_k_index for own in tokens])
        assert len(local.passes(everything, share(counts))) == (math.ceil(WORLD / 1.25) if peers.rank == owner else 1)
        out = peers.gather(local, tokens[peers.rank], max(counts), share(counts))
        assert torch.equal(out, on_one_gpu(layer, tokens)[peers.rank])


def replicated_eager(peers):
    for dtype in (torch.bfloat16, torch.float32):
        layer = make_layer()
        local = local_experts(peers, layer, dtype)
        for seed, count in enumerate((1, 0, 40, 700, 3, 64)):
            tokens = tokens_of((count,), dtype, seed)[0]
            residual = torch.ones_like(tokens.hidden_states) if seed % 2 else None
            expected = layer(*tokens, residual=residual)
            first = peers.replicated(local, tokens, share((count,)), residual)
            assert first.dtype == dtype and torch.equal(first, expected), (dtype, count)
            for _ in range(20):
                assert torch.equal(peers.replicated(local, tokens, share((count,)), residual), first)


def layers_in_a_graph(peers, count):
    """Both methods one after the other over the same buffers, replayed with tokens and routing that change."""
    layers = [make_layer(seed=seed) for seed in range(4)]
    locals_ = [local_experts(peers, layer, torch.bfloat16) for layer in layers]
    counts = processes.on_gpus(count)
    static = [Tokens(*(value.clone() for value in tokens)) for tokens in tokens_of(counts, torch.bfloat16, 0)]
    mine, shared = static[peers.rank], static[0]

    def run():
        gathered = [peers.gather(local, mine, count, share(counts)) for local in locals_]
        gathered.append(peers.replicated(locals_[0], shared, share((count,))))
        gathered.append(peers.gather(locals_[1], mine, count, share(counts)))
        gathered.extend(peers.replicated(local, shared, share((count,))) for local in locals_[:3])
        return gathered

    graph, outs = captured(run)
    for seed in range(1, 30):
        for old, new in zip(static, tokens_of(counts, torch.bfloat16, seed), strict=True):
            for value, other in zip(old, new, strict=True):
                value.copy_(other)
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        if seed % 7 == 0:
            peers.gather(locals_[0], mine, count, share(counts))  # between replays
        expected = [on_one_gpu(layer, static)[peers.rank] for layer in layers]
        expected += [layers[0](*shared), expected[1], *(layer(*shared) for layer in layers[:3])]
        assert all(map(torch.equal, outs, expected)), seed
        if seed % 5 == peers.rank:
            torch.cuda._sleep(20_000_000)  # one rank is late
    # Larger ones do not touch what the graph has; a graph cannot make them.
    peers.gather(
        locals_[0], tokens_of(processes.on_gpus(count + 50), torch.bfloat16, 1)[peers.rank], count + 50, 2 * count
    )
    for out in outs:
        out.fill_(float("nan"))
    graph.replay()
    assert all(map(torch.equal, outs, expected))
    torch.cuda.synchronize()
    more = tokens_of(processes.on_gpus(count + 500), torch.bfloat16, 1)[peers.rank]
    refused = torch.cuda.CUDAGraph()
    message = "^hidden_states: expected at most as many tokens in a CUDA graph"
    with pytest.raises(ValueError, match=message), torch.cuda.graph(refused):
        peers.gather(locals_[0], more, count + 500, 2 * count)


def what_earlier_calls_left(peers):
    """Tokens go only to the ranks of their experts, and rows come only from these: what lies elsewhere is not read."""
    layer = make_layer()
    local = local_experts(peers, layer, torch.bfloat16)
    counts = processes.on_gpus(70)
    for seed, dtype in enumerate((torch.int64, torch.int32)):
        tokens = [
            own._replace(top_k_index=own.top_k_index.to(dtype)) for own in tokens_of(counts, torch.bfloat16, seed)
        ]
        of_each = [rank * EACH for rank in range(WORLD)]
        everywhere = torch.tensor([[*of_each, -1]], dtype=dtype, device="cuda").repeat(70, 1)
        spoilt = Tokens(torch.full_like(tokens[0].hidden_states, float("nan")), everywhere, tokens[0].top_k_weights)
        assert peers.gather(local, spoilt, 70, share(counts)).isnan().all()
        assert peers.replicated(local, spoilt, share((70,))).isnan().all()
        # Of each token the experts of one rank, of some those of none.
        routed = []
        for own in tokens:
            first = torch.arange(70, device="cuda")[:, None] % (WORLD + 1) * EACH
            index = own.top_k_index % EACH + first
            routed.append(own._replace(top_k_index=torch.where(first < EXPERTS, index, -1).to(dtype)))
        out = peers.gather(local, routed[peers.rank], 70, share(counts))
        assert torch.equal(out, on_one_gpu(layer, routed)[peers.rank])
        assert torch.equal(peers.replicated(local, routed[0], share((70,))), layer(*routed[0]))


@pytest.mark.parametrize("work", [gather_eager, skewed, replicated_eager, what_earlier_calls_left])
def test_eager(work):
    in_processes(work)


@pytest.mark.parametrize("count", [1, 64, 600])
def test_graph(count):
    in_processes(layers_in_a_graph, count)


def one_gpu_for_both(peers):
    assert peers.world == WORLD
    # A GPU that two ranks share, or a tensor on no GPU, is reached by none.
    assert not Peers.reaches(dist.group.WORLD, torch.empty(1))
    assert not Peers.reaches(dist.group.WORLD, torch.empty(1, device="cuda:0"))
    assert Peers.reaches(dist.group.WORLD, torch.empty(1, device=peers.device))


def test_reaches():
    in_processes(one_gpu_for_both)
