"""benchmarks/lora.py: its arithmetic, and its passes on the CPU."""

import pytest
import torch

from benchmarks import lora
from benchmarks.shapes import MODELS, Model

peft = pytest.importorskip("peft")

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = Model(hidden=144, intermediate=96, experts=8, top_k=2)


def test_rows_and_thresholds():
    frozen = lora.Measurement(400.0, 1000.0, 2000)
    for us, memory, passed in ((1300.0, 4000, [True, True]), (1400.0, 5001, [False, False])):
        adapted = lora.Measurement(500.0, us, memory, allowed_bytes=5000, difference=0.05)
        rows = lora.make_rows("dsv3_ep8", {"frozen": frozen, "lora": adapted})
        assert [row["ratio"] for row in rows] == [1.0, us / 1000]
        assert [row["forward_ratio"] for row in rows] == [1.0, 1.25]
        assert not lora.thresholds(lora.make_rows("dsv3_ep8", {"frozen": frozen, "lora": adapted}, tokens=64))
        assert rows[1]["tokens"] == 8192 and rows[1]["rank"] == 16 and rows[1]["hidden"] == 7168
        found = lora.thresholds(rows)
        assert [one.passed for one in found] == passed
        assert found[0].name == (
            "LoRA on the experts, dsv3_ep8, 8192 tokens, rank 16, forward and backward / those of frozen experts"
        )


def test_bytes_of_adapters_are_those_of_the_layer():
    layer = lora.passes(TINY, 40, 16, device="cpu")["lora"].layer
    factors = [value for value in layer.parameters() if value.requires_grad]
    assert sum(value.nbytes for value in factors) == lora.adapter_bytes(TINY, 16)
    assert {value.dtype for value in factors} == {torch.bfloat16}
    assert lora.activation_bytes(MODELS["dsv3_ep8"], 8192, 16) < 0.2 * 8192 * 8 * 7168 * 2


def test_adapters_are_compared_with_merged_weights():
    passes = lora.passes(TINY, 40, 16, device="cpu")
    assert 1e-2 < lora.check(passes) <= lora.MAX_DIFFERENCE
    out, *grads = lora.step(passes["lora"])
    assert out.shape == (40, 144) and len(grads) == 5
    with torch.no_grad():
        passes["lora"].layer.lora_B["default"].weight.mul_(-1)
    with pytest.raises(RuntimeError, match="adapters: .* from merged weights, must be <= 0.15"):
        lora.check(passes)
