"""The clocks of the benchmarks, and the operands that GPU tests are held to."""

import weakref
from contextlib import nullcontext
from functools import partial
from unittest.mock import MagicMock

import pytest
import torch

from benchmarks import operands, timing
from benchmarks.shapes import MODELS
from benchmarks.timing import KernelEvent
from fp8moe import FP8Tensor

FILL = "fill"


def session(calls, repeats):
    """Events of `repeats` times (fill, kernels) for each list of (name, duration) in `calls`, in launch order."""
    events, clock = [], 0
    for kernels in calls:
        for _ in range(repeats):
            for name, duration in [(FILL, 60_000), *kernels]:
                events.append(KernelEvent(name, clock, duration))
                clock += duration + 10
    return events


def test_kernels_are_attributed_between_fills_whatever_the_order_of_the_records():
    events = session([[("gemm", 5_000)], [("quantize", 1_000), ("gemm", 7_000)]], repeats=3)
    one, two = timing.attribute(reversed(events), FILL, calls=2, repeats=3)
    assert (one.median_us, one.kernels) == (5.0, ("gemm",))
    assert (two.samples_us, two.kernels) == ((8.0,) * 3, ("quantize", "gemm"))


def test_kernels_of_calls_in_turn_are_told_apart():
    events = [event for _ in range(3) for event in session([[("a", 4_000), ("tail", 1_000)], [("b", 9_000)]], 1)]
    events = [event._replace(start_ns=100_000 * place) for place, event in enumerate(events)]
    first, second = timing.attribute(events, FILL, calls=2, repeats=3, in_turn=True)
    assert (first.kernels, second.kernels) == (("a", "tail"), ("b",))
    assert (first.median_us, second.median_us) == (5.0, 9.0) and first.places_us[1] == (100.0, 101.0)


def test_steps_count_overlapping_kernels_once():
    starts = ((FILL, 0, 50_000), ("a", 60_000, 4_000), ("b", 62_000, 7_000), ("c", 71_000, 1_000))
    (timed,) = timing.attribute([KernelEvent(*event) for event in starts], FILL, calls=1, repeats=1)
    assert timed.steps_us == (4.0, 5.0, 3.0)  # a; b from the end of a; c with the gap before it
    assert timed.median_us == 12.0 and timed.spans_us == (12.0,)


@pytest.mark.parametrize("index", [0, 2, 1, 3])
def test_lost_records_are_an_error(index):
    events = session([[("gemm", 1)]], repeats=2)
    del events[index]
    with pytest.raises(RuntimeError, match="recorded"):
        timing.attribute(events, FILL, calls=1, repeats=2)


def test_repeats_that_differ_are_an_error():
    events = session([[("gemm", 1)]], repeats=2)
    events[-1] = events[-1]._replace(name="other")
    with pytest.raises(RuntimeError, match="same kernels"):
        timing.attribute(events, FILL, calls=1, repeats=2)


def test_a_graph_holds_the_call_whose_operands_it_reads(monkeypatch):
    for name in ("Stream", "current_stream", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    for name in ("stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, lambda of: nullcontext())
    call = partial(int)
    held = weakref.ref(call)
    replay = timing.capture(call)
    del call
    assert held() is not None
    replay()
    del replay
    assert held() is None


def test_exact_values_and_error_of_quantized_operands():
    torch.manual_seed(0)
    for make, rows in ((operands.activation, 5), (operands.weight, 300)):
        tensor = make(rows, 272, device="cpu")
        values = operands.exact(tensor)
        assert values.shape == (rows, 272)
        block = slice(256, 272)
        assert torch.equal(values[-1, block], tensor.data[-1, block].double() * tensor.scale[-1, -1].double())
    assert operands.relative_error(torch.tensor([3.0, 0.0]), torch.tensor([3.0, 4.0]).double()) == pytest.approx(0.8)
    expected = torch.tensor([1.0, 1 + 2**-12], dtype=torch.float64)
    assert operands.relative_error(expected.bfloat16(), expected) > 1e-4
    assert operands.rounded_error(expected.bfloat16(), expected) == 0  # rounding alone is no error
    assert operands.rounded_error(torch.tensor([1.0, 1 + 2**-7]).bfloat16(), expected) > 1e-3


def test_random_operands_are_normal_and_have_the_layouts_of_the_quantizers():
    torch.manual_seed(0)
    a = operands.random_rows(301, 400, std=2.0, device="cpu")
    assert (a.scale.shape, a.scale.stride()) == ((301, 4), (1, 304))
    assert operands.exact(a).std().item() == pytest.approx(2, rel=0.1)
    b = operands.random_experts(3, 200, 272, std=0.1, device="cpu")
    assert (b.data.shape, b.scale.shape) == ((3, 200, 272), (3, 2, 3))
    values = operands.exact(FP8Tensor(b.data[1], b.scale[1]))
    assert values.std().item() == pytest.approx(0.1, rel=0.1) and values.isfinite().all()
    index = operands.route(MODELS["qwen3_30b"], 9)
    assert torch.equal(index, operands.route(MODELS["qwen3_30b"], 9))
    assert all(len(set(row)) == 8 for row in index.tolist())
