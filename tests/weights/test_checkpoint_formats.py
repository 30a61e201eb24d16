"""Formats of checkpoints: each published layout loads with the values that it holds, or is refused by its name."""

import json
import os
import re
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8moe import FP8Linear, PackedTensor, dequantize, refit
from fp8moe.cli import main
from fp8moe.weights import (
    CheckpointError,
    convert_checkpoint,
    find_format,
    inspect_checkpoint,
    load_fp8_checkpoint,
    quantize_checkpoint,
    save_fp8_checkpoint,
)
from fp8moe.weights.source import SINGLE, Reader
from fp8moe.weights.stored import open_weights
from fp8moe.weights.views import _mxfp4, _mxfp4_values, in_blocks
from tests.checkpoint_formats import E4M3, LAYOUTS, as_gpt_oss, mxfp4, write_layout
from tests.small_checkpoints import Model, bits, same, unquantized

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:.*static scales")]

HIDDEN, INTERMEDIATE = 160, 96  # multiples of 32, not of 128
FLOAT32_SCALES = ("AWQ experts", "W4AFP8, hf_quant_config.json")  # of INT4, as `load_model` makes them
REQUANTIZED = ("fp8-channel", "int4", "nvfp4")
MXFP8_ERROR = 2**-10 / 240  # of a block's largest value; other formats are exact


E = "layers.1.experts.2.up_proj.weight"
FUSED = {"gate_up_proj": (512, 384), "down_proj": (384, 256)}


@pytest.fixture(autouse=True)
def sizes(request, monkeypatch):
    from tests import small_checkpoints

    layout = LAYOUTS.get(request.node.callspec.params.get("layout") if hasattr(request.node, "callspec") else None)
    multiple = 32 if layout is None else layout.multiple
    monkeypatch.setattr(small_checkpoints, "HIDDEN", HIDDEN - HIDDEN % -multiple)
    monkeypatch.setattr(small_checkpoints, "INTERMEDIATE", INTERMEDIATE - INTERMEDIATE % -multiple)


def wanted(name):
    return name.endswith("_proj.weight")


def read_blocks(weights):
    """The tensors of a checkpoint as blocks, by name."""
    reader, tensors = Reader(weights.checkpoint.directory), {}
    for weight in in_blocks(weights):
        values = [value for _, value in weight.pieces(reader)]
        parts = zip(*values, strict=True) if weight.grid else [values]
        for name, part in zip(weight.specs(), parts, strict=True):
            tensors[name] = torch.stack(part) if len(weight.shape) == 3 else part[0]
    reader.close()
    return tensors


def written(directory, layout):
    """Returns the values of weights that are quantized, of experts one by one."""
    if LAYOUTS[layout].experts != "gpt-oss":
        quantized = (
            wanted if LAYOUTS[layout].experts == "separate" else (lambda name: wanted(name) and "experts" in name)
        )
        return write_layout(LAYOUTS[layout], directory, unquantized(), quantized, {"sizes": [HIDDEN]})
    tensors = as_gpt_oss(unquantized(fused=True))
    fused = [name for name, value in tensors.items() if value.dim() == 3]
    values = write_layout(LAYOUTS[layout], directory, tensors, fused.__contains__, {"sizes": [HIDDEN]})
    apart = {}
    for name, value in values.items():
        for expert, matrix in enumerate(value.mT):
            start = f"{name.rpartition('.')[0]}.{expert}"
            if name.endswith("down_proj"):
                apart[f"{start}.down_proj.weight"] = matrix
            else:
                apart[f"{start}.gate_proj.weight"], apart[f"{start}.up_proj.weight"] = matrix[::2], matrix[1::2]
    return apart


def model_for(layout):
    _, name, loads, *_, experts, multiple = LAYOUTS[layout]
    model = Model(
        weight_scales="channel" if name == "fp8-channel" else "block",
        gpt_oss=experts == "gpt-oss",
        weight_format={"int4": {32: "int4-32", 128: "int4"}[multiple], "nvfp4": name}.get(name, "fp8")
        if loads
        else "fp8",
    )
    for layer in model.layers:
        if LAYOUTS[layout].dense or (name == "nvfp4" and experts == "separate"):
            layer.q_proj = FP8Linear(layer.q_proj.in_features, 200)
        for parameter in layer.experts.parameters() if layout in FLOAT32_SCALES else ():
            parameter.data = parameter.float() if parameter.dtype == torch.bfloat16 else parameter.data
    return model


def dequantized(experts, name, scale, projections):
    """The values of a weight of experts, of which FP8 has blocks for each projection."""
    if experts.weight_format != "fp8":
        stored, n = experts.state_dict(), getattr(experts, name).shape[1]
        factor = stored.get(f"{name}_tensor_scale")
        factor = factor if factor is None else factor.view(len(factor), -1).repeat_interleave(n // projections, 1)
        return dequantize(PackedTensor(stored[name], stored[scale], experts.weight_format.partition("-")[0], factor))
    data, scale = getattr(experts, name), getattr(experts, scale)
    parts = zip(data.chunk(projections, 1), scale.chunk(projections, 1), strict=True)
    return torch.cat([dequantize(part) for part in parts], 1)


def loaded_values(model):
    """The weights of FP8 modules in float32, under the names of single experts."""
    values = {}
    for name, module in model.named_modules():
        if isinstance(module, FP8Linear):
            values[f"{name}.weight"] = dequantize((module.weight, module.weight_scale_inv))
        elif name.endswith("experts"):
            for parameter, scale, projections in zip(
                module.weight_names[::2],
                module.weight_names[1::2],
                (("gate_proj", "up_proj"), ("down_proj",)),
                strict=True,
            ):
                for expert, matrix in enumerate(dequantized(module, parameter, scale, len(projections))):
                    for projection, value in zip(projections, matrix.chunk(len(projections)), strict=True):
                        values[f"{name}.{expert}.{projection}.weight"] = value
    return values


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout(tmp_path, layout, capsys):
    expected = written(tmp_path / "checkpoint", layout)
    found, model = find_format(tmp_path / "checkpoint"), model_for(layout)
    want = LAYOUTS[layout]
    assert (found.name, found.loads) == (want.name, want.loads)
    with pytest.raises(CheckpointError, match="quantized already"):
        quantize_checkpoint(tmp_path / "checkpoint", tmp_path / "again")
    assert not (tmp_path / "again").exists()
    status = main(["inspect", str(tmp_path / "checkpoint")])
    first = capsys.readouterr().out.splitlines()[0]
    if not want.loads:
        assert status == 1 and "does not load" in first and found.reason[:60] in first
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(CheckpointError) as error:
            load_fp8_checkpoint(model, tmp_path / "checkpoint")
        assert error.value.problems == [found.reason]
        assert all(torch.equal(bits(value), bits(before[name])) for name, value in model.state_dict().items())
        return
    assert status == (layout == "block, no quantization_config") and "loads" in first
    load_fp8_checkpoint(model, tmp_path / "checkpoint")
    values = loaded_values(model)
    assert values.keys() == expected.keys()
    for name, value in values.items():
        if found.name == "nvfp4" and "q_proj" in name:  # a code times its group's scale is rounded to E4M3
            assert ((value - expected[name]).abs() <= expected[name].abs() / 16).all(), name
        elif found.name != "mxfp8":
            assert torch.equal(value, expected[name].float()), name
        else:
            assert (value - expected[name]).abs().max() / expected[name].abs().max() <= MXFP8_ERROR, name


@pytest.mark.parametrize(
    "layout",
    [name for name, layout in LAYOUTS.items() if layout.loads and layout.name not in REQUANTIZED],
)
def test_converted(tmp_path, layout):
    written(tmp_path / "source", layout)
    assert convert_checkpoint(tmp_path / "source", tmp_path / "blocks") is None
    report = inspect_checkpoint(tmp_path / "blocks")
    assert (report.format.scales, report.format.loads, report.problems) == ("128x128", True, [])
    assert not [name for name in os.listdir(tmp_path / "blocks") if name == "hf_quant_config.json"]
    before, after = model_for(layout), model_for(layout)
    load_fp8_checkpoint(before, tmp_path / "source")
    load_fp8_checkpoint(after, tmp_path / "blocks")
    assert all(torch.equal(bits(value), bits(after.state_dict()[name])) for name, value in before.state_dict().items())


@pytest.mark.parametrize(
    "layout", [name for name, layout in LAYOUTS.items() if not layout.loads or layout.name in REQUANTIZED]
)
def test_conversions_that_need_to_quantize_again(tmp_path, layout, capsys):
    expected = written(tmp_path / "source", layout)
    with pytest.raises(CheckpointError) as error:
        convert_checkpoint(tmp_path / "source", tmp_path / "blocks")
    (problem,) = error.value.problems
    assert problem.startswith(find_format(tmp_path / "source").reason)
    command = ["convert", str(tmp_path / "source"), str(tmp_path / "blocks"), "--requantize"]
    if not LAYOUTS[layout].loads:
        with pytest.raises(SystemExit, match="does not run|expected|rows of gate and up take turns"):
            main(command)
        assert not (tmp_path / "blocks").exists()
        return
    assert main(command) == 0
    alone = LAYOUTS[layout].experts == "alone"
    model, squares = Model(), torch.zeros(2, dtype=torch.float64)
    if alone:
        for layer in model.layers:
            layer.q_proj = torch.nn.Linear(layer.q_proj.in_features, 200, dtype=torch.bfloat16)
    load_fp8_checkpoint(model, tmp_path / "blocks")
    for name, value in loaded_values(model).items():
        if "experts" in name or LAYOUTS[layout].dense is None:
            squares += torch.stack([(value - expected[name]).square().sum(), expected[name].square().sum()])
    error = float((squares[0] / squares[1]).sqrt())
    assert 0.01 < error < 0.04 and f"a relative error of {error:.2%} added" in capsys.readouterr().out


def test_tensor_scales_of_nvfp4_are_saved_bit_for_bit(tmp_path):
    """Also those that are no reciprocal of a float32."""
    model, again = (Model(1, weight_format="nvfp4") for _ in range(2))
    values = torch.linspace(1.5, 2, 1000)
    values = values[1 / (1 / values) != values][:9]
    state, experts = model.state_dict(), "layers.0.experts"
    state[f"{experts}.gate_up_proj_tensor_scale"] = values[:6].view(3, 2)
    state[f"{experts}.down_proj_tensor_scale"] = values[6:]
    model.load_state_dict(state)
    save_fp8_checkpoint(model, tmp_path / "x")
    load_fp8_checkpoint(again, tmp_path / "x")
    same(again.state_dict(), state)


def test_nvfp4_that_is_refused_by_name(tmp_path):
    """In every function that reads checkpoints, before a model is changed; a scale of zero is right."""
    layout = "ModelOpt NVFP4 experts, hf_quant_config.json"
    written(tmp_path / "x", layout)
    path, model, start = tmp_path / "x" / SINGLE, model_for(layout), E.removesuffix("weight")
    tensors = load_file(path)
    scale, whole = tensors[f"{E}_scale"], tensors[f"{E}_scale_2"]
    zero, negative, nan = (scale.view(torch.uint8).clone() for _ in range(3))
    zero[3, 2], negative[3, 2], nan[3, 2] = 0, 0x81, 0x7F
    values = "values, expected scales that are finite and positive"
    wide = {E: torch.zeros(96, 88, dtype=torch.uint8)}
    load_fp8_checkpoint(model, tmp_path / "x")
    before = {name: bits(value).clone() for name, value in model.state_dict().items()}
    for changed, problem in (
        ({f"{E}_scale": negative.view(E4M3)}, f"{E}_scale: has 1 negative of 960 {values}"),
        ({f"{E}_scale": nan.view(E4M3)}, f"{E}_scale: has 1 NaN of 960 {values}"),
        ({f"{E}_scale_2": -whole}, f"{E}_scale_2: has 1 negative of 1 {values}"),
        ({f"{E}_scale_2": whole * torch.inf}, f"{E}_scale_2: has 1 infinite of 1 {values}"),
        ({f"{E}_scale_2": None}, f"{E}_scale_2 or {E}_global_scale: missing, expected the tensor scale of NVFP4"),
        ({f"{E}_scale_2": whole.repeat(96)}, f"{E}_scale_2: F32 (96,), expected one tensor scale in F32"),
        ({f"{E}_scale": scale[:, :9].clone()}, f"{E}_scale: shape (96, 9), expected (96, 10) for {E}"),
        (wide, f"{E}: NVFP4 of 176 columns, expected a multiple of 32"),
        (
            {f"{start}pre_quant_scale": torch.ones(160)},
            f"{start}pre_quant_scale: NVFP4 with a scale of inputs for each",
        ),
    ):
        save_file({name: value for name, value in (tensors | changed).items() if value is not None}, path)
        assert any(problem in line for line in inspect_checkpoint(tmp_path / "x").problems), problem
        for read in (
            lambda: load_fp8_checkpoint(model, tmp_path / "x"),
            lambda: refit(model, tmp_path / "x"),
            lambda: convert_checkpoint(tmp_path / "x", tmp_path / "y", requantize=True),
        ):
            with pytest.raises(CheckpointError, match=re.escape(problem)):
                read()
    assert all(torch.equal(bits(value), before[name]) for name, value in model.state_dict().items())
    save_file(tensors | {f"{E}_scale": zero.view(E4M3)}, path)
    for read in (load_fp8_checkpoint, refit):
        read(model, tmp_path / "x")
        kept = model.layers[1].experts.state_dict()["gate_up_proj_scale"][2, 96:]
        assert torch.equal(bits(kept), zero.flatten())


@pytest.mark.parametrize("bad", [float("nan"), -1.0])
def test_requantizing_channels_with_bad_scales(tmp_path, bad):
    written(tmp_path / "x", "compressed-tensors channel")
    tensors = load_file(tmp_path / "x" / SINGLE)
    tensors[f"{E}_scale"][1] = bad
    save_file(tensors, tmp_path / "x" / SINGLE)
    with pytest.raises(CheckpointError, match=f"{E}_scale: has 1 (NaN|negative) of 96 values"):
        convert_checkpoint(tmp_path / "x", tmp_path / "y", requantize=True)


def test_only_quantized_checkpoints_are_converted(tmp_path):
    tmp_path.joinpath("x").mkdir()
    save_file(unquantized(), tmp_path / "x" / SINGLE)
    with pytest.raises(CheckpointError, match="no weight is quantized; quantize it instead"):
        convert_checkpoint(tmp_path / "x", tmp_path / "y")


@pytest.mark.parametrize("size", [96, 128])
def test_fused_experts_stored_the_other_way(tmp_path, monkeypatch, size):
    """Qwen3-VL's layout: (E, K, N), with scales to match."""
    monkeypatch.setattr("tests.small_checkpoints.INTERMEDIATE", size)
    tensors, expected = {}, {}
    for name, value in unquantized(fused=True, layers=1).items():
        tensors[name] = value
        if name.endswith(("gate_up_proj", "down_proj")):
            data = (value.float().mT * 448).contiguous().to(E4M3)  # (E, K, N)
            scale = torch.rand(data.shape[0], *(-(-size // 128) for size in data.shape[1:]))
            tensors[name], tensors[f"{name}_scale_inv"] = data, scale
            expected[name], expected[f"{name}_scale_inv"] = data.float().mT, scale.mT
    (tmp_path / "x").mkdir()
    save_file({name: value for name, value in tensors.items() if "q_proj" not in name}, tmp_path / "x" / SINGLE)
    if size % 128:
        assert "gate and up, of 96 columns each, share blocks" in find_format(tmp_path / "x").reason
        return
    weights = open_weights(tmp_path / "x")
    assert weights.format.name == "fp8-block" and all(weight.transposed for weight in weights.quantized)
    blocks = read_blocks(weights)
    assert all(torch.equal(blocks[name].float(), value) for name, value in expected.items())


@pytest.mark.parametrize("scales", [(), (1, 1), (2, 1)])
def test_fused_experts_with_a_scale_each(tmp_path, scales):
    """Mistral's layout: (E, 1, 1), and with one for gate and one for up."""
    tensors = {}
    for name, value in unquantized(fused=True, layers=1).items():
        tensors[name] = value
        if name.endswith(("gate_up_proj", "down_proj")):
            shape = (value.shape[0], *(scales if name.endswith("gate_up_proj") else scales and (1, 1)))
            tensors[name] = (value.float() * 448).to(E4M3)
            tensors[f"{name}_scale_inv"] = torch.rand(shape if scales else value.shape[:1]).bfloat16()
            tensors[f"{name}_activation_scale"] = torch.rand(value.shape[0], 1, 1)
    tensors = {name: value for name, value in tensors.items() if "q_proj" not in name}
    config = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}}
    (tmp_path / "x").mkdir()
    save_file(tensors, tmp_path / "x" / SINGLE)
    (tmp_path / "x" / "config.json").write_text(json.dumps(config))
    weights = open_weights(tmp_path / "x")
    assert (weights.format.name, weights.format.loads) == ("fp8-tensor", True)
    blocks = read_blocks(weights)
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        scale, stored = blocks[name], tensors[name].float()
        rows = scale.shape[1] // (2 if scales == (2, 1) and "gate_up" in name else 1)
        each = stored.reshape(stored.shape[0], -1, 1).repeat_interleave(rows, 1)
        assert torch.equal(scale, each.expand(scale.shape))


def test_mxfp4_that_blocks_cannot_hold_is_refused_by_name(tmp_path):
    written(tmp_path / "x", "FP8 with FP4 experts")
    path = tmp_path / "x" / SINGLE
    tensors = load_file(path)
    scale = E.removesuffix("weight") + "scale"
    powers = tensors[scale].view(torch.uint8).clone()
    powers[0, 0] += 14
    save_file(tensors | {scale: powers.view(torch.float8_e8m0fnu)}, path)
    problem = f"{E}: MXFP4 exponents that differ by more than 14 within 128x128 values, which E4M3 cannot hold"
    model = Model()
    before = model.layers[1].experts.down_proj.view(torch.uint8).clone()
    with pytest.raises(CheckpointError, match=re.escape(problem)):
        load_fp8_checkpoint(model, tmp_path / "x")
    assert torch.equal(model.layers[1].experts.down_proj.view(torch.uint8), before)
    codes = tensors[E].clone()
    codes[1:], codes[:, 16:] = 0, 0  # the group with the large exponent is the only one of its block that counts
    save_file(tensors | {scale: powers.view(torch.float8_e8m0fnu), E: codes}, path)
    load_fp8_checkpoint(Model(), tmp_path / "x")


def test_gate_and_up_of_gpt_oss(tmp_path, capsys):
    """Rows of gate and up take turns: they have blocks of their own, and exponents differ within each by 14 at most."""
    layout, blocks = "GPT-OSS", "layers.1.experts.gate_up_proj_blocks"
    expected = written(tmp_path / "x", layout)
    path, model = tmp_path / "x" / SINGLE, model_for(layout)
    tensors = load_file(path)
    load_fp8_checkpoint(model, tmp_path / "x")
    bias, experts = tensors["layers.1.experts.gate_up_proj_bias"], model.layers[1].experts
    assert torch.equal(experts.gate_up_proj_bias, torch.cat([bias[:, ::2], bias[:, 1::2]], 1))
    assert torch.equal(experts.down_proj_bias, tensors["layers.1.experts.down_proj_bias"])

    scales = tensors["layers.1.experts.gate_up_proj_scales"]
    scales[:, ::2] -= 12
    save_file(tensors, path)
    load_fp8_checkpoint(model, tmp_path / "x")
    values = loaded_values(model)
    assert torch.equal(values[E], expected[E].float())
    assert torch.equal(values[E.replace("up_proj", "gate_proj")], expected[E.replace("up_proj", "gate_proj")] * 2**-12)

    scales[2, 4] += 14
    save_file(tensors, path)
    problem = f"{blocks}: MXFP4 exponents that differ by more than 14 within 128x128 values, which E4M3 cannot hold"
    for read in (lambda: load_fp8_checkpoint(model, tmp_path / "x"), lambda: convert_checkpoint(tmp_path / "x", "y")):
        with pytest.raises(CheckpointError) as error:
            read()
        assert error.value.problems == [problem]
    assert main(["convert", str(tmp_path / "x"), str(tmp_path / "blocks"), "--requantize"]) == 0
    assert "error of" in capsys.readouterr().out
    load_fp8_checkpoint(model, tmp_path / "blocks")
    values["layers.1.experts.2.gate_proj.weight"][2] *= 2**14
    for name, value in loaded_values(model).items():
        error = torch.linalg.norm(value - values[name]) / torch.linalg.norm(values[name])
        assert error < 0.04 if "layers.1" in name and "down_proj" not in name else error == 0, name
    assert torch.equal(experts.gate_up_proj_bias, torch.cat([bias[:, ::2], bias[:, 1::2]], 1))


@pytest.mark.parametrize("weight_scales", ["block", "channel"])
def test_experts_with_biases_that_were_saved(tmp_path, weight_scales):
    model, again = (Model(weight_scales=weight_scales, gpt_oss=True) for _ in range(2))
    save_fp8_checkpoint(model, tmp_path / "x")
    load_fp8_checkpoint(again, tmp_path / "x")
    same(dict(again.state_dict()), dict(model.state_dict()))


def test_gate_and_up_that_cannot_be_told_apart(tmp_path):
    written(tmp_path / "x", "GPT-OSS")
    path, name = tmp_path / "x" / SINGLE, "layers.0.experts.gate_up_proj"
    tensors = load_file(path)
    save_file(tensors | {f"{name}_bias": tensors[f"{name}_bias"][:, 2:].clone()}, path)
    assert find_format(tmp_path / "x").reason == f"{name}_blocks: with a bias (3, 190), expected (3, 192)"
    save_file(
        tensors | {f"{name}_{end}": tensors[f"{name}_{end}"][:, 1:].clone() for end in ("blocks", "scales")}, path
    )
    assert "as many rows of gate as of up" in find_format(tmp_path / "x").reason
    (tmp_path / "x" / "config.json").unlink()
    codes = {f"layers.0.experts.{end}": torch.zeros(3, *shape) for end, shape in FUSED.items()}
    for scales, transposed, loads in (("blocks", False, True), ("tensor", False, False), ("blocks", True, False)):
        stored = {}
        for name, value in codes.items():
            value = value.mT.contiguous() if transposed else value
            grid = value.shape[-2] // 128, value.shape[-1] // 128
            stored |= {name: value.to(E4M3), f"{name}_bias": torch.zeros(value.shape[:2])}
            stored[f"{name}_scale_inv"] = torch.ones(3, *grid if scales == "blocks" else (1, 1))
        save_file(stored, path)
        config = tmp_path / "x" / "config.json"
        for said in (None, {"gate_up_layout": "concatenated"}, {"gate_up_layout": "interleaved"}, {}):
            if said is not None:
                config.write_text(json.dumps({"quantization_config": {"quant_method": "fp8", **said}}))
            found, known = find_format(tmp_path / "x"), said is None or "concatenated" in said.values()
            assert found.loads == (loads and known), said
            assert found.loads or "take turns, as in GPT-OSS" in found.reason
        config.unlink()


@pytest.mark.parametrize("spread", range(15))
def test_mxfp4_is_exact_up_to_a_spread_of_14(spread):
    made = mxfp4("codes", "scale", torch.uint8, torch.uint8)(torch.randn(130, 64))
    powers = torch.full((130, 2), 120, dtype=torch.uint8)
    powers[::3] -= spread
    expected = _mxfp4_values(made.stored["codes"], powers)
    assert torch.equal(dequantize(_mxfp4(made.stored["codes"], powers), dtype=torch.float64), expected)


def test_configuration_and_tensors_that_disagree_are_refused(tmp_path):
    written(tmp_path / "x", "ModelOpt FP8")
    path = tmp_path / "x" / "config.json"
    path.write_text(json.dumps({"quantization_config": LAYOUTS["block"].config}))
    says = "config.json: quantization_config says fp8: FP8 with a scale for each 128x128 values, but "
    assert find_format(tmp_path / "x").reason.startswith(says)
    assert find_format(tmp_path / "x").reason.endswith(" is FP8 with a scale for each tensor")
    path.write_text(json.dumps({"quantization_config": {"quant_method": "nosuch"}}))
    assert "quant_method is 'nosuch', where fp8moe knows" in find_format(tmp_path / "x").reason


def test_fp8_codes_without_scales_are_refused(tmp_path):
    tensors = {name: value.to(E4M3) if wanted(name) else value for name, value in unquantized().items()}
    tmp_path.joinpath("x").mkdir()
    save_file(tensors, tmp_path / "x" / SINGLE)
    found = find_format(tmp_path / "x")
    assert not found.loads and found.reason.startswith("nothing says how the codes of layers.0.experts.0")
    with pytest.raises(CheckpointError, match="nothing says how"):
        load_fp8_checkpoint(Model(), tmp_path / "x")


def test_static_scales_are_said_once(tmp_path):
    written(tmp_path / "x", "ModelOpt FP8")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_fp8_checkpoint(Model(), tmp_path / "x")
    assert ["static scales" in str(warning.message) for warning in caught] == [True]


def test_the_page_of_formats():
    """docs/formats.md has the formats of the layouts above, and says of each whether it loads."""
    row = r"^\| `([\w-]+)`[^|]*\|[^|]*\|[^|]*\| (yes|no)\b"
    rows = re.findall(row, Path("docs/formats.md").read_text(), re.MULTILINE)
    said = {(name, loads == "yes") for name, loads in rows}
    tried = {(layout.name, layout.loads) for layout in LAYOUTS.values() if layout.name != "fp8-block" or layout.loads}
    assert tried == said - {("bf16", True)}
    recorded = json.loads(Path("validation/formats.json").read_text())["layouts"]
    formats = {layout: row["format"] for layout, row in recorded.items()}
    assert tried >= {(found["name"], found["loads"]) for found in formats.values() if found["loads"]}
    assert list(recorded) == list(LAYOUTS)
