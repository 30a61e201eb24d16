"""Experts with biases: the reference, layers, their state dicts, shares of ranks, and what is refused."""

import math

import pytest
import torch
from torch import nn

from fp8moe import FP8Tensor, GroupedExperts
from fp8moe.kernels.activation import Activation
from fp8moe.kernels.experts import experts_of_rows
from fp8moe.kernels.experts.operands import Biases
from fp8moe.kernels.gemm import launch
from fp8moe.kernels.gemm.epilogue import Columns, PeerStore, PlainStore, SwigluQuantize
from fp8moe.kernels.gemm.tiles import Grouping
from fp8moe.kernels.gemm.warmup import Family
from fp8moe.quant.formats import empty_mn_major
from fp8moe.runtime.sm90 import REGISTERS_PER_SM
from tests import bias_cases, experts_cases
from tests.bias_cases import DTYPES, FORMS, KINDS
from tests.gemm_variants import without_gpu
from tests.ptxas import without_spills

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_groups(kind, dtype):
    bias_cases.check_groups("cpu", [3, 0, 1, 17], 136, 272, kind, dtype)
    bias_cases.check_swiglu("cpu", [3, 0, 1, 17], 80, 272, kind, dtype)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("hidden", "size"), [(144, 72), (100, 50)])
def test_layers(form, hidden, size):
    bias_cases.check_layer("cpu", 9, hidden, size, form)


def test_layers_with_channels():
    bias_cases.check_layer("cpu", 9, 100, 50, "gpt-oss", weight_scales="channel")
    bias_cases.check_layer("cpu", 9, 144, 72, "relu2, no gate", weight_scales="channel", dtype=torch.float16)


def test_state_dict_has_the_names_of_transformers():
    layer = bias_cases.make_layer("cpu", 4, 144, 72, dtype=torch.float32)
    state = layer.state_dict()
    assert (state["gate_up_proj_bias"].shape, state["down_proj_bias"].shape) == ((4, 144), (4, 144))
    assert {state["gate_up_proj_bias"].dtype, state["down_proj_bias"].dtype} == {torch.float32}
    x, index, routing, _ = experts_cases.inputs()
    other = GroupedExperts(num_experts=4, hidden_size=144, intermediate_size=72, dtype=torch.float32, bias=True)
    other.load_state_dict(state)
    assert torch.equal(other(x, index, routing), layer(x, index, routing))
    assert "bias=True" in repr(layer)
    plain = experts_cases.make(gated=False, activation="relu2", bias=True)
    assert {"up_proj_bias", "down_proj_bias"} < plain.state_dict().keys()
    assert not any("bias" in name for name in experts_cases.make().state_dict())
    assert layer.half().down_proj_bias.dtype == torch.float16 and layer.down_proj_scale_inv.dtype == torch.float32
    assert not any(parameter.requires_grad for parameter in layer.parameters())


def test_from_experts():
    layer = bias_cases.make_layer("cpu", 4, 144, 96)
    x, index, routing, _ = experts_cases.inputs()
    shared = GroupedExperts.from_experts(layer)
    assert torch.equal(shared(x, index, routing), layer(x, index, routing))
    assert shared.down_proj_bias.data_ptr() == layer.down_proj_bias.data_ptr()
    with pytest.raises(ValueError, match="bias: expected False with a master_dtype"):
        GroupedExperts.from_experts(layer, master_dtype=torch.float32)
    layer.down_proj_bias = nn.Parameter(torch.zeros(4, 143))
    with pytest.raises(ValueError, match=r"module.down_proj_bias: expected shape \(4, 144\) in bfloat16"):
        GroupedExperts.from_experts(layer)


@torch.no_grad()
def test_shares_of_ranks():
    layer = bias_cases.make_layer("cpu", 4, 144, 72)
    x, index, routing, _ = experts_cases.inputs(dtype=torch.float32)
    parts = []
    for start, end in ((0, 1), (1, 4)):
        parts.append(experts_cases.part(layer, x, index, routing, start, end, row_dtype=torch.float32))
    assert torch.allclose(sum(parts), layer(x, index, routing), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_rows():
    layer = bias_cases.make_layer("cpu", 4, 144, 72)
    x, _, _, _ = experts_cases.inputs(dtype=torch.float32)
    ends = torch.tensor([0, 7, 7, 30, 38], dtype=torch.int32)
    rows = layer.forward_rows(x, ends)
    assert not rows[38:].any()
    expert = torch.arange(4).repeat_interleave(ends.diff())[:, None]
    assert torch.equal(rows[:38], layer(x[:38], expert, torch.ones(38, 1)))


def test_what_is_refused():
    with pytest.raises(ValueError, match="bias: expected False with a master_dtype, got True"):
        experts_cases.make(bias=True, master_dtype=torch.float32)
    layer = bias_cases.make_layer("cpu", 4, 144, 96)
    x, index, routing, grad = experts_cases.inputs()
    x.requires_grad_()
    with pytest.raises(RuntimeError, match="^fp8moe.GroupedExperts with biases has no backward"):
        layer(x, index, routing).backward(grad)
    with pytest.raises(ValueError, match="^biases: expected None for gradients"):
        layer.forward_rows(x, torch.tensor([0, 1, 2, 3, 4], dtype=torch.int32))
    given, down_bias = experts_cases.layer_of(layer), layer.down_proj_bias
    (up, up_scale), (down, down_scale), *_ = given
    nothing = {"up": FP8Tensor(up[:, :0], up_scale[:, :0]), "down": FP8Tensor(down[..., :0], down_scale[..., :0])}
    for error, message, changes in (
        (
            *(ValueError, r"gate_up_proj_bias: expected shape \(4, 192\), got \(4, 191\)"),
            {"biases": Biases(layer.gate_up_proj_bias[:, 1:])},
        ),
        (
            *(TypeError, "down_proj_bias: expected bfloat16, float16 or float32"),
            {"biases": Biases(None, down_bias.double())},
        ),
        (
            *(ValueError, "down_proj_bias: expected None for experts with I = 0"),
            {"biases": Biases(None, down_bias), **nothing},
        ),
    ):
        with pytest.raises(error, match=message):
            experts_of_rows(x.detach(), torch.zeros(5, dtype=torch.int32), given._replace(**changes))


@pytest.mark.parametrize(
    "family",
    [
        Family(5760, 2880, 32, SwigluQuantize(Activation(7.0, 1.702)), Columns(False, torch.bfloat16)),
        Family(5760, 2880, 32, SwigluQuantize(Activation(7.0, 1.702)), Columns(True, torch.float32)),
        Family(2880, 2880, 32, PlainStore(torch.bfloat16), Columns(False, torch.bfloat16)),
        Family(2880, 2880, 32, PeerStore(torch.float32, 2, 0), Columns(True, torch.bfloat16)),
    ],
    ids=lambda family: f"{type(family.epilogue).__name__} {family.columns}",
)
def test_variants_compile_without_spills(family):
    variants = sorted(family.variants(2048 * max(family.groups // 4, 1), 132), key=str)
    for spec in variants[:: math.ceil(len(variants) / 4)]:
        assert without_spills(spec).registers < REGISTERS_PER_SM


def test_kernels_are_noted_with_what_their_columns_get(monkeypatch):
    noted = []
    monkeypatch.setattr(launch, "note", lambda family, rows: noted.append(family))
    without_gpu(monkeypatch)
    a, b = torch.empty(40, 128, dtype=torch.float8_e4m3fn), torch.empty(4, 256, 128, dtype=torch.float8_e4m3fn)
    scale, epilogue = empty_mn_major((40, 1), device="cpu"), SwigluQuantize(Activation())
    for columns in (Columns(), Columns(False, torch.bfloat16), Columns(True, torch.float32)):
        b_scale = torch.empty(4, 256 if columns.channel_scales else 2, 1)
        bias = None if columns.bias_dtype is None else torch.empty(4, 256, dtype=columns.bias_dtype)
        launch.build(launch.GemmOperands(a, scale, b, b_scale, bias), epilogue, Grouping(whole=(40, 4)))
        assert noted.pop() == Family(256, 128, 4, epilogue, columns)
