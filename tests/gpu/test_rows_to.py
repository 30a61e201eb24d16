"""The results of one rank's experts in the memory of all ranks: the rows of `experts_rows`, bit for bit, no others.

The peers are buffers on one GPU.
"""

import itertools

import pytest
import torch

from fp8moe.kernels.experts import experts_of_rows, sort_by_expert
from fp8moe.kernels.experts.operands import Shard
from fp8moe.kernels.experts.operator import send_rows
from fp8moe.kernels.experts.permute import permute_fp8, permute_quantize
from fp8moe.kernels.gemm.tiles import GroupedProblem, choose_grouped
from fp8moe.quant.quantize import quantize_1x128
from fp8moe.runtime.launch import num_sms
from fp8moe.runtime.peer_table import SIGNALS_BYTES, Targets, meeting, no_meeting
from tests.experts_cases import BIASED, VARIANTS, layer_of
from tests.gpu.checks import captured, same_bits, same_every_time
from tests.gpu.test_combine import write_placed
from tests.gpu.test_experts import make, route
from tests.peer_cases import marked
from tests.waiting import no_waiting

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
NAN = float("nan")
EXPERTS, START, END = 8, 2, 6  # of all ranks; those here
TOP_K = 3
# Ranks, and whether all of them have the tokens.
PEERS = list(itertools.product((2, 8), (False, True)))


def random(tokens, hidden=272, dtype=torch.bfloat16):
    return torch.randn(tokens, hidden, device=DEVICE).to(dtype)


def routing(tokens, seed=0, dtype=torch.int64):
    """Different experts for each token; some assignments and all of one token are none."""
    index = route(tokens, EXPERTS, TOP_K, seed)[0]
    index[::3, -1] = -1
    index[tokens // 2] = torch.tensor([EXPERTS, 2**31 - 1, -(2**31)], device=DEVICE)
    return index.to(dtype)


def new_buffers(peers, assignments, hidden, dtype, to_all):
    each = assignments if to_all else assignments // peers
    return [marked(each, hidden, dtype=dtype, device=DEVICE) for _ in range(peers)]


def send(layer, x, index, buffers, to_all, words=None, **options):
    window = {"num_rows": index.numel()} | options
    shard = Shard(START, EXPERTS, row_dtype=buffers[0].dtype, **window)
    addresses = (*(buffer.data_ptr() for buffer in buffers), *(words or no_meeting(len(buffers))))
    targets = Targets(len(buffers), len(buffers[0]), to_all, addresses)
    send_rows(targets, x, index, layer_of(layer, START, END), shard)


def write(layer, x, index, buffers, to_all, first_row=0, num_rows=None):
    """What `send` is to write, from the operators of the layer."""
    num_rows = index.numel() if num_rows is None else num_rows
    window = {"first_expert": START, "first_row": first_row, "num_rows": num_rows}
    groups, rows = sort_by_expert(index, END - START, **window)
    a = permute_quantize(x, rows, num_rows) if isinstance(x, torch.Tensor) else permute_fp8(x, rows, num_rows)
    form = {"row_dtype": buffers[0].dtype, "whole": (index.numel(), EXPERTS)}
    results = experts_of_rows(a, groups, layer_of(layer, START, END), **form)
    rows = rows.flatten().long()
    for peer, buffer in enumerate(buffers):
        own = rows if to_all else rows[peer * len(buffer) :][: len(buffer)]
        buffer[own >= 0] = results[own[own >= 0]]


def check(layer, x, index, peers, to_all, row_dtype=torch.bfloat16):
    hidden = layer.hidden_size
    buffers, expected = (new_buffers(peers, index.numel(), hidden, row_dtype, to_all) for _ in range(2))
    write(layer, x, index, expected, to_all)
    for _ in range(2):  # with a new plan and with a kept one
        send(layer, x, index, buffers, to_all)
        assert same_bits(buffers, expected)
    untouched = new_buffers(peers, index.numel(), hidden, row_dtype, to_all)
    inside = ((index >= START) & (index < END)).flatten()
    for peer, (buffer, old) in enumerate(zip(buffers, untouched, strict=True)):
        own = inside if to_all else inside[peer * len(buffer) :][: len(buffer)]
        assert torch.equal(buffer[~own].view(torch.uint8), old[~own].view(torch.uint8))
        assert (buffer[own].view(torch.uint8) != old[own].view(torch.uint8)).any(1).all()


@pytest.mark.parametrize(("peers", "to_all"), PEERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("variant", VARIANTS | BIASED)
def test_variants(variant, dtype, peers, to_all):
    layer = make(EXPERTS, **(VARIANTS | BIASED)[variant])
    row_dtype = torch.bfloat16 if dtype is torch.bfloat16 else torch.float32
    for seed, tokens in enumerate((8, 40, 1040)):
        index = routing(tokens, seed, (torch.int64, torch.int32)[seed % 2])
        check(layer, random(tokens, dtype=dtype), index, peers, to_all, row_dtype)


# Few columns, and I that is no multiple of 16; tiles that do not come out even.
@pytest.mark.parametrize(("hidden", "size"), [(16, 200), (272, 77), (1040, 2048), (2048, 768), (4112, 208)])
@pytest.mark.parametrize(("peers", "to_all"), PEERS)
@pytest.mark.parametrize("variant", ["plain", "gelu"])
def test_sizes(variant, peers, to_all, hidden, size):
    layer = make(EXPERTS, hidden, size, **VARIANTS[variant])
    for tokens, row_dtype in itertools.product((8, 64, 520), (torch.bfloat16, torch.float32)):
        check(layer, random(tokens, hidden), routing(tokens), peers, to_all, row_dtype)


@pytest.mark.parametrize("form", ["mxfp4", "int4", "nvfp4"])
@pytest.mark.parametrize(("peers", "to_all"), PEERS)
def test_four_bits(peers, to_all, form):
    layer = make(EXPERTS, 256, 384, weight_format=form)
    for tokens, row_dtype in itertools.product((8, 64, 520), (torch.bfloat16, torch.float32)):
        check(layer, random(tokens, 256), routing(tokens), peers, to_all, row_dtype)


@pytest.mark.parametrize("variant", ["plain", "gelu"])
@pytest.mark.parametrize(("peers", "to_all"), PEERS)
def test_one_token_of_each_rank(peers, to_all, variant):
    layer = make(EXPERTS, 2048, 768, **VARIANTS[variant])
    tokens = 1 if to_all else peers
    for value in (START, END - 1, START - 1, END, -1):  # also none here
        index = torch.full((tokens, 1), value, device=DEVICE)
        check(layer, random(tokens, 2048), index, peers, to_all)


def test_tiles_of_every_kind():
    """Straight and swapped ones, those that split K, and more of them than there are SMs."""
    found, sms = set(), num_sms(torch.cuda.current_device())
    # Of two tokens with two experts, the tiles of an H200 fill the shared memory to the last byte.
    for hidden, size, tokens in ((1040, 2048, 8), (7168, 2048, 2), (7168, 256, 32), (7168, 256, 3000)):
        layer, index = make(EXPERTS, hidden, size), routing(tokens)
        index = index[:, : min(tokens, TOP_K)].contiguous()
        whole = (index.numel(), EXPERTS)
        problem = (whole[0], END - START, whole[0] / EXPERTS, hidden, size, sms)
        config = choose_grouped(GroupedProblem(*problem), whole=whole)
        tiles = -(-index.numel() // config.block_m) * -(-hidden // config.block_n)
        found.add((config.weights_as_rows, config.split_k > 1, tiles > 2 * sms))
        for (peers, to_all), dtype in itertools.product(((2, False), (2, True)), (torch.bfloat16, torch.float32)):
            check(layer, random(tokens, hidden), index, peers, to_all, dtype)
    assert {(True, True, False), (True, False, True), (False, False, True)} <= found


@pytest.mark.parametrize(("peers", "to_all"), PEERS)
@pytest.mark.parametrize("variant", ["plain", "gelu"])
def test_tokens_that_are_quantized_already(variant, peers, to_all):
    layer = make(EXPERTS, **VARIANTS[variant])
    for tokens in (8, 600):
        x, index = random(tokens), routing(tokens)
        quantized = quantize_1x128(x)
        expected = new_buffers(peers, index.numel(), 272, torch.bfloat16, to_all)
        write(layer, x, index, expected, to_all)
        for scale in (quantized.scale, quantized.scale.contiguous()):
            check(layer, quantized._replace(scale=scale), index, peers, to_all)
            buffers = new_buffers(peers, index.numel(), 272, torch.bfloat16, to_all)
            send(layer, quantized._replace(scale=scale), index, buffers, to_all)
            assert same_bits(buffers, expected)


@pytest.mark.parametrize(("peers", "to_all"), [(2, False), (8, True)])
@pytest.mark.parametrize("row_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("variant", ["plain", "gelu"])
def test_passes_over_windows_of_rows(variant, row_dtype, peers, to_all):
    layer, x, index = make(EXPERTS, **VARIANTS[variant]), random(200), routing(200)
    index[:120, 0] = START + 1  # one expert has more rows than there is room for
    index[:120, 1:] = torch.tensor([START, EXPERTS - 1], device=DEVICE)
    used = int(sort_by_expert(index, END - START, first_expert=START).groups[-1])
    whole = new_buffers(peers, index.numel(), 272, row_dtype, to_all)
    write(layer, x, index, whole, to_all)
    for num_rows in (50, 97, used - 1, used):
        buffers, expected = (new_buffers(peers, index.numel(), 272, row_dtype, to_all) for _ in range(2))
        # Also a window without rows, which comes first in a CUDA graph.
        for first_row in reversed(range(0, used + num_rows, num_rows)):
            send(layer, x, index, buffers, to_all, first_row=first_row, num_rows=num_rows)
            write(layer, x, index, expected, to_all, first_row, num_rows)
            assert same_bits(buffers, expected)
        assert same_bits(buffers, whole)


@pytest.mark.parametrize("variant", ["plain", "gelu"])
@pytest.mark.parametrize("tokens", [8, 264])
def test_rows_of_all_ranks_are_added_up_to_the_layer(tokens, variant):
    """The bits of one GPU."""
    layer, peers = make(EXPERTS, 1040, 208, **VARIANTS[variant]), 4
    x, (index, weights) = random(tokens, 1040), route(tokens, EXPERTS, TOP_K)
    index[::5, 0] = -1
    expected = layer(x, index, weights)
    for to_all in (False, True):
        buffers = new_buffers(peers, index.numel(), 1040, torch.bfloat16, to_all)
        for rank, start in enumerate(range(0, EXPERTS, EXPERTS // peers)):
            own = layer_of(layer, start, start + EXPERTS // peers)
            addresses = (*(buffer.data_ptr() for buffer in buffers), *no_meeting(peers))
            shard = Shard(start, EXPERTS, num_rows=index.numel(), row_dtype=torch.bfloat16)
            # As they come to other ranks, and as they are.
            tokens_there = quantize_1x128(x) if rank % 2 else x
            send_rows(Targets(peers, len(buffers[0]), to_all, addresses), tokens_there, index, own, shard)
        parts = (
            [(index, weights)] * peers if to_all else list(zip(index.chunk(peers), weights.chunk(peers), strict=True))
        )
        outs = [
            write_placed(buffer, *part, EXPERTS, torch.bfloat16) for buffer, part in zip(buffers, parts, strict=True)
        ]
        assert all(torch.equal(out, expected) for out in (outs if to_all else [torch.cat(outs)]))


def test_inputs_that_are_not_contiguous():
    layer, x, index = make(EXPERTS), random(48), routing(48)
    expected = new_buffers(2, index.numel(), 272, torch.bfloat16, False)
    write(layer, x, index, expected, False)
    wide = torch.zeros(48, 300, dtype=torch.bfloat16, device=DEVICE)
    wide[:, 7:279] = x
    for tokens in (wide[:, 7:279], x.t().contiguous().t()):
        buffers = new_buffers(2, index.numel(), 272, torch.bfloat16, False)
        send(layer, tokens, index.t().contiguous().t(), buffers, False)
        assert same_bits(buffers, expected)


@pytest.mark.parametrize("variant", ["plain", "gelu"])
def test_memory_that_held_other_values_does_not_show(variant):
    """Nothing is written for rows without an assignment, whatever the memory says that they have."""
    layer, x, index = make(EXPERTS, **VARIANTS[variant]), random(64), routing(64)
    expected = new_buffers(2, index.numel(), 272, torch.bfloat16, False)
    write(layer, x, index, expected, False)
    for value in (0, 1, 0xFF):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        buffers = new_buffers(2, index.numel(), 272, torch.bfloat16, False)
        junk = [torch.full((1 << i,), value, dtype=torch.uint8, device=DEVICE) for i in range(9, 25)]
        del junk
        send(layer, x, index, buffers, False)
        assert same_bits(buffers, expected)


def test_bad_value_touches_its_token_only():
    layer, x, index = make(EXPERTS), random(40), routing(40)
    index[7] = torch.tensor([START, 0, END - 1], device=DEVICE)
    x[7, -1] = NAN
    buffers = new_buffers(2, index.numel(), 272, torch.bfloat16, False)
    send(layer, x, index, buffers, False)
    bad = torch.cat(buffers).isnan().all(1).nonzero().flatten()
    assert bad.tolist() == [7 * TOP_K, 7 * TOP_K + 2] and torch.cat(buffers).isnan().any(1).sum() == 2


@pytest.mark.parametrize(("peers", "to_all"), PEERS)
@pytest.mark.parametrize(("variant", "tokens"), [("plain", 8), ("plain", 520), ("gelu", 64)])
def test_same_bits_every_time(variant, tokens, peers, to_all):
    layer, x, index = make(EXPERTS, 1040, 2048, **VARIANTS[variant]), random(tokens, 1040), routing(tokens)

    def run():
        buffers = new_buffers(peers, index.numel(), 1040, torch.bfloat16, to_all)
        send(layer, x, index, buffers, to_all)
        return buffers

    same_every_time(run)


@pytest.mark.parametrize("to_all", [False, True])
@pytest.mark.parametrize(("variant", "tokens"), [("plain", 2), ("plain", 64), ("plain", 700), ("gelu", 64)])
def test_cuda_graph_with_changed_input(variant, tokens, to_all):
    layer = make(EXPERTS, 1040, 208, **VARIANTS[variant])
    new_x, new_index = random(tokens, 1040), routing(tokens)
    x, index = torch.empty_like(new_x), torch.empty_like(new_index)
    buffers, expected = (new_buffers(2, index.numel(), 1040, torch.bfloat16, to_all) for _ in range(2))
    num_rows = max(index.numel() // 2, 4)

    def passes():
        """All that could be needed, right behind a kernel that writes what they read."""
        x.copy_(new_x)
        index.copy_(new_index)
        for first_row in reversed(range(0, index.numel(), num_rows)):
            send(layer, x, index, buffers, to_all, first_row=first_row, num_rows=num_rows)

    graph, _ = captured(passes)
    write(layer, x, index, expected, to_all)  # what is not written again stays
    for seed in range(1, 6):
        new_x.normal_()
        new_index.copy_(routing(tokens, seed))
        if seed == 3:
            new_index.copy_(torch.tensor([START, -1, -1], device=DEVICE).expand(tokens, -1))
        graph.replay()
        write(layer, x, index, expected, to_all)
        assert same_bits(buffers, expected)


@pytest.mark.parametrize("to_all", [False, True])
@pytest.mark.parametrize(
    ("variant", "size", "tokens"),
    [("plain", 2048, 4), ("plain", 208, 64), ("plain", 208, 4000), ("gelu", 2048, 4), ("gelu", 208, 600)],
)
def test_meeting(variant, size, tokens, to_all):
    """The other ranks have come already, so that a rank alone passes; each time it tells all of them."""
    ranks, rank = 4, 2
    layer, x, index = make(EXPERTS, 1040, size, **VARIANTS[variant]), random(tokens, 1040), routing(tokens)
    buffers, expected = (new_buffers(ranks, index.numel(), 1040, torch.bfloat16, to_all) for _ in range(2))
    write(layer, x, index, expected, to_all)
    signals = torch.zeros(ranks, SIGNALS_BYTES // 4, dtype=torch.int32, device=DEVICE)
    words = meeting([row.data_ptr() for row in signals], rank)
    for meetings in range(1, 21):
        # One is a meeting ahead, as peers may be.
        signals[rank, :ranks] = torch.tensor([meetings, meetings + 1, meetings - 1, meetings], device=DEVICE)
        send(layer, x, index, buffers, to_all, words)
        assert signals[:, rank].tolist() == [meetings] * ranks and signals[rank, 8:].tolist() == [meetings, 0]
        assert same_bits(buffers, expected)
    assert not signals[[0, 1, 3]][:, [0, 1, 3, 4, 5, 6, 7, 8, 9]].any()


@pytest.mark.parametrize(("size", "splits"), [(77, False), (2048, True)])
def test_meeting_without_a_row(size, splits):
    """A rank whose experts no token has is waited for like any other."""
    layer, x, index = make(EXPERTS, 272, size), random(8), torch.full((8, 2), EXPERTS - 1, device=DEVICE)
    problem = (16, END - START, 16 / EXPERTS, 272, size, num_sms(0))
    assert (choose_grouped(GroupedProblem(*problem), whole=(16, EXPERTS)).split_k > 1) == splits
    buffers, untouched = (new_buffers(2, 16, 272, torch.bfloat16, False) for _ in range(2))
    signals = torch.zeros(2, SIGNALS_BYTES // 4, dtype=torch.int32, device=DEVICE)
    signals[0, 1] = 1
    send(layer, x, index, buffers, False, meeting([row.data_ptr() for row in signals], 0))
    assert signals[:, 0].tolist() == [1, 1] and signals[0, 8:].tolist() == [1, 0]
    assert same_bits(buffers, untouched)


def test_nothing_waits_for_the_gpu():
    layers, x, index = [make(EXPERTS), make(EXPERTS, **VARIANTS["gelu"])], random(8), routing(8)
    buffers = new_buffers(2, index.numel(), 272, torch.bfloat16, False)
    calls = [(layer, value, index, buffers, False) for layer in layers for value in (x, quantize_1x128(x))]
    for call in calls:
        send(*call, num_rows=12)
    with no_waiting():
        for call in calls:
            send(*call, num_rows=12)
