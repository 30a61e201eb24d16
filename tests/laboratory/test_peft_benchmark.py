"""benchmarks/lora.py: its arithmetic, and its passes on the CPU."""

import pytest
import torch

from benchmarks import lora
from benchmarks.shapes import MODELS, Model

peft = pytest.importorskip("peft")

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = Model(hidden=144, intermediate=96, experts=8, top_k=2)


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
