"""The clocks of the benchmarks, and the operands that GPU tests are held to."""

import weakref
from contextlib import nullcontext
from functools import partial
from unittest.mock import MagicMock

import pytest
import torch

from benchmarks import calls, operands, timing
from benchmarks.shapes import MODELS
from benchmarks.timing import KernelEvent
from fp8moe import quantize_1x128, quantize_128x128

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


def test_kernels_that_overlap_count_once_in_the_span():
    starts = ((FILL, 0, 50_000), ("a", 60_000, 4_000), ("b", 62_000, 7_000), ("c", 71_000, 1_000))
    (timed,) = timing.attribute([KernelEvent(*event) for event in starts], FILL, calls=1, repeats=1)
    assert timed.places_us == ((0.0, 4.0), (2.0, 9.0), (11.0, 12.0))
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
    for quantize, rows in ((quantize_1x128, 5), (quantize_128x128, 300)):
        tensor = quantize(torch.randn(rows, 272).bfloat16())
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
    make = calls.Operands("cpu")
    a = make.rows(301, 400)
    assert (a.scale.shape, a.scale.stride()) == ((301, 4), (1, 304))
    assert operands.exact(a).std().item() == pytest.approx(1, rel=0.1)
    b = make.weights(3, 200, 272)
    assert (b.data.shape, b.scale.shape) == ((3, 200, 272), (3, 2, 3))
    values = operands.exact(make.weights(1200, 1000))
    assert values.std().item() == pytest.approx(1000**-0.5, rel=0.1) and values.isfinite().all()
    model = MODELS["qwen3_30b"]
    index = calls.route(model, 9)
    assert torch.equal(index, calls.route(model, 9))
    x, _, weights = calls.layer_inputs(model, index, "cpu")
    assert x.shape == (9, 2048) and weights.shape == (9, 8) and weights.dtype == torch.float32
    assert not torch.equal(x, calls.Operands("cpu").normal(9, 2048))  # weights have those values
    assert all(len(set(row)) == 8 for row in index.tolist())
