"""benchmarks/lora.py: its arithmetic, and its passes on the CPU."""

import pytest
import torch

from benchmarks import lora
from benchmarks.report import judge
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
    plain = lora.step(passes["bf16"])  # peft's factors have the experts side by side
    assert sorted(grad.numel() for grad in plain) == sorted(grad.numel() for grad in (out, *grads))
    with torch.no_grad():
        passes["lora"].layer.lora_B["default"].weight.mul_(-1)
    with pytest.raises(RuntimeError, match="adapters: .* from merged weights, must be <= 0.15"):
        lora.check(passes)


def test_rows_name_how_much_faster_than_bfloat16():
    measured = {
        impl: lora.Measurement(us / 2, us, 10, 12) for impl, us in {"frozen": 10.0, "lora": 13.0, "bf16": 26.0}.items()
    }
    rows = {row["impl"]: row for row in lora.make_rows("qwen3_30b", measured)}
    assert rows["lora"]["speedup"] == 2 and rows["lora"]["ratio"] == 1.3 and rows["bf16"]["speedup"] == 1
    assert all(threshold.passed for threshold in judge(list(rows.values()), lora.LORA.bars))
