"""Work on a second stream: its results, in order with what the first stream does before and after."""

import pytest
import torch

from fp8moe.hf.fused.feed_forward import SecondStream
from tests.gpu.checks import captured

pytestmark = pytest.mark.gpu


def late_sum(x):
    """x + 1 late on the current stream, x * 2 beside it, and their sum."""
    torch.cuda._sleep(2_000_000)  # x is late
    x = x.clone()
    beside = SecondStream(x.device)
    torch.cuda._sleep(2_000_000)
    one = x + 1

    def double():
        torch.cuda._sleep(3_000_000)
        return x * 2

    return one + beside.run(double)


def test_waits_at_both_ends():
    for seed in range(20):
        x = torch.full((100_000,), float(seed), device="cuda")
        assert torch.equal(late_sum(x), 3 * x + 1)


def test_cuda_graph_with_changed_input():
    x = torch.zeros(100_000, device="cuda")
    graph, out = captured(lambda: late_sum(x))
    for seed in range(1, 20):
        x.fill_(seed)
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, 3 * x + 1)


def test_an_error_leaves_the_first_stream_current():
    stream = torch.cuda.current_stream()

    def fail():
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        SecondStream(torch.device("cuda", torch.cuda.current_device())).run(fail)
    assert torch.cuda.current_stream() == stream
