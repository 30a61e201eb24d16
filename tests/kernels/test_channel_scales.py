"""Weights with a scale for each output channel: the reference, layers, their state dicts, and what is refused."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file

from fp8moe import FP8Linear, GroupedExperts, gemm
from fp8moe.kernels.activation import Activation
from fp8moe.kernels.gemm.epilogue import Columns, PlainStore, SwigluQuantize
from fp8moe.kernels.gemm.warmup import Family
from fp8moe.runtime.sm90 import REGISTERS_PER_SM
from fp8moe.weights import find_format, load_fp8_checkpoint, save_fp8_checkpoint
from tests import channel_cases
from tests.channel_cases import rows, weight
from tests.checkpoint_formats import LAYOUTS, write_layout
from tests.errors import refused
from tests.ptxas import without_spills
from tests.small_checkpoints import Model, same
from tests.tiny_moe_models import TinyModel

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(("m", "n", "k"), [(1, 8, 16), (37, 136, 320), (5, 200, 128)])
def test_dense(m, n, k):
    channel_cases.check_dense("cpu", m, n, k)


def test_groups():
    channel_cases.check_grouped("cpu", [3, 0, 1, 17], 136, 272)
    channel_cases.check_swiglu("cpu", [3, 0, 1, 17], 80, 272)


@pytest.mark.parametrize(("hidden", "size"), [(144, 72), (100, 50)])
def test_layers(hidden, size):
    layer, x, index, routing = channel_cases.check_layers("cpu", 9, 4, hidden, size)
    other = GroupedExperts(num_experts=4, hidden_size=hidden, intermediate_size=size, weight_scales="channel")
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x, index, routing), layer(x, index, routing))
    shared = GroupedExperts.from_experts(layer)
    assert torch.equal(shared(x, index, routing), layer(x, index, routing))
    assert shared.down_proj_scale_inv.shape == (4, hidden, 1)


@pytest.mark.parametrize("experts", ["separate", "fused"])
def test_saved_as_compressed_tensors_has_it(tmp_path, experts):
    model, other = Model(weight_scales="channel"), Model(weight_scales="channel")
    save_fp8_checkpoint(model, tmp_path / "saved", experts=experts)
    assert find_format(tmp_path / "saved").name == "fp8-channel"
    load_fp8_checkpoint(other, tmp_path / "saved")
    same(dict(model.state_dict()), dict(other.state_dict()))
    with pytest.raises(ValueError, match="scale_format: expected 'float32' for scales of channels, got 'ue8m0'"):
        save_fp8_checkpoint(model, tmp_path / "again", scale_format="ue8m0")
    model.layers[0].q_proj = FP8Linear(144, 200)
    with pytest.raises(ValueError, match="scales of blocks in all modules, or of channels in all, got both"):
        save_fp8_checkpoint(model, tmp_path / "again")


def test_a_saved_model_loads_again(tmp_path):
    pytest.importorskip("transformers")
    from fp8moe.hf import load_model

    tiny = TinyModel("qwen3_moe", "AutoModelForCausalLM", {"num_hidden_layers": 1})
    tiny.build().save_pretrained(tmp_path / "source")
    tensors = load_file(tmp_path / "source" / "model.safetensors")
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    layout = LAYOUTS["compressed-tensors channel"]
    write_layout(layout, tmp_path / "channel", tensors, lambda name: name.endswith("_proj.weight"), config)
    model = load_model(tmp_path / "channel")
    save_fp8_checkpoint(model, tmp_path / "saved")
    same(dict(load_model(tmp_path / "saved").state_dict()), dict(model.state_dict()))


def test_what_is_refused():
    for make in (
        lambda **options: FP8Linear(64, 64, **options),
        lambda **options: GroupedExperts(num_experts=2, hidden_size=64, intermediate_size=64, **options),
    ):
        with pytest.raises(ValueError, match="weight_scales: expected 'block' with a master_dtype, got 'channel'"):
            make(weight_scales="channel", master_dtype=torch.float32)
        refused(ValueError, r"weight_scales: expected one of .*, got 'row'", make, weight_scales="row")
    linear = FP8Linear(64, 64, weight_scales="channel")
    with pytest.raises(RuntimeError, match="a scale for each output channel, not for 128x128 blocks, .*backward"):
        linear(torch.randn(3, 64, requires_grad=True)).sum().backward()
    layer = GroupedExperts(num_experts=2, hidden_size=64, intermediate_size=64, weight_scales="channel")
    with pytest.raises(RuntimeError, match="backward"):
        out = layer(torch.randn(3, 64, requires_grad=True), torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, 1))
        out.sum().backward()
    a, b = rows("cpu", 3, 256), weight("cpu", 64, 256)
    refused(ValueError, r"b.scale: expected shape \(1, 2\)", gemm, a, (b.data, b.scale[:-1]))


@pytest.mark.parametrize(
    "family",
    [
        Family(2112, 7168, 0, PlainStore(torch.bfloat16), Columns(True, torch.bfloat16)),
        Family(4096, 7168, 32, SwigluQuantize(Activation()), Columns(True)),
        Family(7168, 2048, 32, PlainStore(torch.bfloat16), Columns(True)),
    ],
    ids=lambda family: type(family.epilogue).__name__ + str(family.groups),
)
def test_variants_compile_without_spills(family):
    variants = sorted(family.variants(2048 * max(family.groups // 4, 1), 132), key=str)
    for spec in variants[:: math.ceil(len(variants) / 4)]:
        report = without_spills(spec)
        assert "constexpr int CHANNEL = 1;" in spec.prelude
        assert report.registers < REGISTERS_PER_SM
