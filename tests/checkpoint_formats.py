"""Quantized checkpoints in the layouts that are published, made of unquantized tensors, with the values they hold.

`LAYOUTS` has one for each: it takes the matrices of a model by name and returns the stored tensors, what config.json
says, and what each weight is in float64.
"""

import json
from collections.abc import Callable
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file

from fp8moe.hf.architecture import empty_model, locate
from fp8moe.weights.names import parse

E4M3 = torch.float8_e4m3fn
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


class Quantized(NamedTuple):
    """tensors: as stored. values: of the weights. config: for config.json. files: others, by name."""

    tensors: dict
    values: dict
    config: dict
    files: dict = {}


class Weight(NamedTuple):
    """What one weight becomes: stored tensors by the end of their names, and its values (N, K)."""

    stored: dict
    values: torch.Tensor


def _codes(weight, scale):
    """FP8 codes and values of a weight with scales that broadcast."""
    codes = (weight.double() / scale.double()).float().to(E4M3)
    return codes, codes.double() * scale.double()


def _grid(scale, shape):
    return scale.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]]


def _amax_blocks(weight):
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.abs(), (0, -columns % 128, 0, -rows % 128))
    return padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128)).amax((1, 3))


def block(name, dtype=torch.float32, to_stored=lambda scale: scale):
    def quantize(weight):
        scale = _amax_blocks(weight) / 448
        if dtype is torch.float8_e8m0fnu:
            scale = scale.log2().ceil().exp2()
        scale = scale.to(dtype)
        codes, values = _codes(weight, _grid(scale.float(), weight.shape))
        return Weight({"weight": codes, name: to_stored(scale)}, values)

    return quantize


def tensor(name, dtype=torch.float32, shape=(), static=None):
    def quantize(weight):
        scale = (weight.abs().amax() / 448).to(dtype)
        codes, values = _codes(weight, scale.float())
        unused = {static: torch.tensor(0.02, dtype=dtype).reshape(shape)} if static else {}
        return Weight({"weight": codes, name: scale.reshape(shape), **unused}, values)

    return quantize


def channel(name, dtype=torch.bfloat16, shape=(-1, 1)):
    def quantize(weight):
        scale = (weight.abs().amax(1, keepdim=True) / 448).to(dtype)
        codes, values = _codes(weight, scale.float())
        return Weight({"weight": codes, name: scale.reshape(shape)}, values)

    return quantize


def _exponents(weight, largest):
    """E8M0 exponents for each 1x32, none of all zeros."""
    amax = weight.unflatten(1, (-1, 32)).abs().amax(-1)
    return (amax / largest).log2().ceil().clamp(-126, 127).add(127).to(torch.uint8)


def mxfp8(name):
    def quantize(weight):
        exponents = _exponents(weight, 448)
        scale = (exponents.double() - 127).exp2().repeat_interleave(32, 1)
        codes, values = _codes(weight, scale)
        return Weight({"weight": codes, name: exponents}, values)

    return quantize


def mxfp4(codes_name, scale_name, codes_dtype, scale_dtype):
    def quantize(weight):
        exponents = _exponents(weight, 6)
        scale = (exponents.double() - 127).exp2().repeat_interleave(32, 1)
        codes = ((weight.double() / scale).unsqueeze(-1) - FP4).abs().argmin(-1)
        packed = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
        stored = {codes_name: packed.view(codes_dtype), scale_name: exponents.view(scale_dtype)}
        return Weight(stored, FP4[codes] * scale)

    return quantize


def nvfp4(weight):
    """compressed-tensors' form: E4M3 scales for each 1x16, to be divided by one of the whole tensor."""
    whole = 448 * 6 / weight.abs().amax()
    made = _nvfp4(weight, 1 / whole)
    stored = {"weight_packed": made.stored["weight"], "weight_scale": made.stored["weight_scale"]}
    unused = {"input_global_scale": torch.full((1,), 0.02)}
    return Weight(stored | {"weight_global_scale": whole.reshape(1), **unused}, made.values)


def nvfp4_of_modelopt(weight):
    """E4M3 scales for each 1x16, times one of the whole tensor."""
    whole = weight.abs().amax() / 448 / 6
    made = _nvfp4(weight, whole)
    return Weight(made.stored | {"weight_scale_2": whole, "input_scale": torch.tensor(0.02)}, made.values)


def _nvfp4(weight, whole):
    groups = weight.unflatten(1, (-1, 16))
    scale = (groups.abs().amax(-1) / 6 / whole).to(E4M3)
    codes = ((groups.double() / (scale.double() * whole.double()).unsqueeze(-1)).unsqueeze(-1) - FP4).abs().argmin(-1)
    flat = codes.flatten(1)
    stored = {"weight": (flat[:, ::2] | flat[:, 1::2] << 4).to(torch.uint8), "weight_scale": scale}
    values = (FP4[codes].float() * scale.float().unsqueeze(-1)) * whole  # as `dequantize` rounds it
    return Weight(stored, values.flatten(1).double())


def _int4(weight, group, dtype):
    """Codes from -8 to 7 (N, K), scales for each 1xgroup, and values."""
    groups = weight.unflatten(1, (-1, group))
    scale = (groups.abs().amax(-1) / 7).to(dtype)
    codes = (groups / scale.float().unsqueeze(-1)).round().clamp(-8, 7)
    return codes.flatten(1).long(), scale, (codes.double() * scale.double().unsqueeze(-1)).flatten(1)


def _in_words(codes, order=range(8)):
    """Eight codes, 8 more than they stand for, in an integer, in an order."""
    return (codes.unflatten(1, (-1, 8))[..., [*order]] + 8 << torch.arange(0, 32, 4)).sum(-1).to(torch.int32)


def int4(weight, group=32):
    """compressed-tensors' form: (N, K/8) codes, and a scale for each 1xgroup."""
    codes, scale, values = _int4(weight, group, torch.bfloat16)
    stored = {"weight_packed": _in_words(codes), "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}
    return Weight(stored, values)


def awq(weight):
    """(K, N/8) codes, scales (K/32, N) and zero points (K/32, N/8)."""
    codes, scale, values = _int4(weight, 32, torch.float16)
    zeros = torch.full((scale.shape[1], len(weight) // 8), int.from_bytes(b"\x88" * 4, signed=True))
    stored = {"qweight": _in_words(codes.t(), (0, 2, 4, 6, 1, 3, 5, 7)), "qzeros": zeros.to(torch.int32)}
    return Weight(stored | {"scales": scale.t().contiguous()}, values)


def w4afp8(dtype):
    def quantize(weight):
        """(N, K/2) bytes of two codes in two's complement, scales (N, K/128), and a static scale of the input."""
        codes, scale, values = _int4(weight, 128, dtype)
        stored = {"weight": (codes[:, ::2] & 15 | codes[:, 1::2] << 4).to(torch.int8), "weight_scale_inv": scale}
        return Weight(stored | {"input_scale": torch.full((1,), 0.02)}, values)

    return quantize


def gptq(weight):
    """(K/8, N) codes, 8 more than they stand for, of which the zero points say one less; scales (K/32, N)."""
    made = int4(weight)
    codes, scale = (made.stored[name].t().contiguous() for name in ("weight_packed", "weight_scale"))
    stored = {"qweight": codes, "scales": scale, "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // 32}
    zeros = torch.full((len(scale), len(weight) // 8), 0x77777777, dtype=torch.int32)
    return Weight(stored | {"qzeros": zeros}, made.values)


def gpt_oss(weight):
    """MXFP4 of what GPT-OSS has as (K, N): codes (N, K/32, 16), scales (N, K/32)."""
    made = mxfp4("weight_blocks", "weight_scales", torch.uint8, torch.uint8)(weight.T)
    blocks = made.stored["weight_blocks"].unflatten(1, (-1, 16))
    return Weight(made.stored | {"weight_blocks": blocks}, made.values.T)


def rows_of_gpt_oss(quantize):
    """FP8 of what GPT-OSS has as (K, N): codes (N, K), rows of gate and up still in turns."""

    def quantize_rows(weight):
        made = quantize(weight.T.contiguous())
        return Weight(made.stored, made.values.T)

    return quantize_rows


def as_gpt_oss(tensors):
    """Fused experts as GPT-OSS has them unquantized: (E, K, N), rows of gate and up in turns, and with biases."""
    generator, made = torch.Generator().manual_seed(0), {}
    for name, value in tensors.items():
        if value.dim() == 3:
            made[f"{name}_bias"] = torch.randn(value.shape[:2], generator=generator).to(value.dtype)
            rows = value.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2) if "gate_up" in name else value
            value = rows.mT.contiguous()
        made[name] = value
    return made


def e5m2(name):
    def quantize(weight):
        scale = weight.abs().amax() / 57344
        codes = (weight / scale).to(torch.float8_e5m2)
        return Weight({"weight": codes, name: scale}, codes.double() * scale.double())

    return quantize


def packed(codes_name, scale_name, codes_dtype, scale_dtype, *, values_each, group):
    """Integers that stand for nothing: of formats that are refused."""

    def quantize(weight):
        rows, columns = weight.shape
        codes = torch.randint(0, 100, (rows, columns // values_each)).to(codes_dtype)
        scale = torch.ones(rows, -(-columns // group)).to(scale_dtype)
        return Weight({codes_name: codes, scale_name: scale}, weight.double())

    return quantize


class Layout(NamedTuple):
    """quantize: a weight. name: of the format. loads. config: quantization_config, or a whole config for the root.

    experts: "separate"; or, where nothing else is quantized, "alone", or "gpt-oss" for those that `as_gpt_oss` makes.
    multiple: what sizes of the model are multiples of.
    """

    quantize: Callable[[torch.Tensor], Weight]
    name: str
    loads: bool
    config: dict | None
    root: dict = {}
    files: dict = {}
    exact: bool = True
    dense: Callable[[torch.Tensor], Weight] | None = None
    experts: str = "separate"
    multiple: int = 32


def _compressed(strategy, form="float-quantized", bits=8, kind="float", inputs=None, **weights):
    scheme = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False, **weights}
    group = {"targets": ["Linear"], "weights": scheme, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def _modelopt(algorithm):
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"]}


def _hf_quant(algorithm):
    content = {
        "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": algorithm, "exclude_modules": ["lm_head"]},
    }
    return {"hf_quant_config.json": content}


def _four_dimensions(scale):
    return scale[:, None, :, None].clone()


BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
STATIC = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": False, "version": "gemm"}
FP8_TOKENS = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
NOT_EXACT = {"exact": False}
GPT_OSS = {"model_type": "gpt_oss"}

LAYOUTS = {
    "block": Layout(block("weight_scale_inv"), "fp8-block", True, BLOCKS),
    "block, bfloat16 scales": Layout(block("weight_scale_inv", torch.bfloat16), "fp8-block", True, BLOCKS),
    "block, float16 scales": Layout(block("weight_scale_inv", torch.float16), "fp8-block", True, BLOCKS),
    "block, .scale": Layout(block("scale"), "fp8-block", True, BLOCKS),
    "block, E8M0": Layout(block("scale", torch.float8_e8m0fnu), "fp8-block-ue8m0", True, BLOCKS),
    "block, E8M0 in bytes": Layout(
        block("weight_scale_inv", torch.float8_e8m0fnu, lambda scale: scale.view(torch.uint8)),
        "fp8-block-ue8m0",
        True,
        BLOCKS | {"scale_fmt": "ue8m0"},
    ),
    "block, config in text_config": Layout(
        block("weight_scale_inv"), "fp8-block", True, None, root={"text_config": {"quantization_config": BLOCKS}}
    ),
    "block, no quantization_config": Layout(block("weight_scale_inv"), "fp8-block", True, None),
    "block 64x64": Layout(block("weight_scale_inv"), "fp8-block", False, BLOCKS | {"weight_block_size": [64, 64]}),
    "compressed-tensors block": Layout(
        block("weight_scale", torch.bfloat16), "fp8-block", True, _compressed("block", block_structure=[128, 128])
    ),
    "quark block": Layout(
        block("weight_scale"),
        "fp8-block",
        True,
        {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_block"}}},
    ),
    "quark block, MXFP4 experts": Layout(
        mxfp4("weight", "weight_scale", torch.uint8, torch.uint8),
        "mxfp4",
        True,
        {
            "quant_method": "quark",
            "global_quant_config": {"weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32}},
            "layer_quant_config": {"*self_attn*": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_block"}}},
        },
        dense=block("weight_scale"),
    ),
    "ModelOpt FP8_BLOCK_SCALES": Layout(block("weight_scale_inv"), "fp8-block", True, _modelopt("FP8_BLOCK_SCALES")),
    "ModelOpt FP8_PB_WO": Layout(
        block("weight_scale", to_stored=_four_dimensions), "fp8-block", True, _modelopt("FP8_PB_WO")
    ),
    "compressed-tensors tensor": Layout(
        tensor("weight_scale", torch.bfloat16, (1,), "input_scale"), "fp8-tensor", True, _compressed("tensor")
    ),
    "AutoFP8 static": Layout(
        tensor("weight_scale", static="input_scale"),
        "fp8-tensor",
        True,
        {"quant_method": "fp8", "activation_scheme": "static"},
    ),
    "AutoFP8 dynamic": Layout(
        tensor("weight_scale"), "fp8-tensor", True, {"quant_method": "fp8", "activation_scheme": "dynamic"}
    ),
    "Mistral static": Layout(
        tensor("weight_scale_inv", torch.bfloat16, static="activation_scale"), "fp8-tensor", True, STATIC
    ),
    "ModelOpt FP8": Layout(tensor("weight_scale", static="input_scale"), "fp8-tensor", True, _modelopt("FP8")),
    "ModelOpt FP8, hf_quant_config.json": Layout(
        tensor("weight_scale", static="input_scale"), "fp8-tensor", True, None, files=_hf_quant("FP8")
    ),
    "quark tensor": Layout(
        tensor("weight_scale", static="input_scale"),
        "fp8-tensor",
        True,
        {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}}},
    ),
    "MXFP8": Layout(
        mxfp8("weight_scale_inv"), "mxfp8", True, {"quant_method": "mxfp8", "weight_block_size": [1, 32]}, **NOT_EXACT
    ),
    "ModelOpt MXFP8": Layout(mxfp8("weight_scale"), "mxfp8", True, _modelopt("MXFP8"), **NOT_EXACT),
    "FP8 with FP4 experts": Layout(
        mxfp4("weight", "scale", torch.int8, torch.float8_e8m0fnu),
        "mxfp4",
        True,
        BLOCKS | {"scale_fmt": "ue8m0"},
        root={"expert_dtype": "fp4"},
        dense=block("scale", torch.float8_e8m0fnu),
    ),
    "compressed-tensors MXFP4": Layout(
        mxfp4("weight_packed", "weight_scale", torch.uint8, torch.uint8),
        "mxfp4",
        True,
        _compressed("group", "mxfp4-pack-quantized", bits=4, group_size=32),
    ),
    "GPT-OSS": Layout(
        gpt_oss,
        "mxfp4",
        True,
        {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                *("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"),
            ],
        },
        experts="gpt-oss",
    ),
    "GPT-OSS, block": Layout(
        rows_of_gpt_oss(block("weight_scale_inv")), "fp8-block", False, BLOCKS, GPT_OSS, experts="gpt-oss"
    ),
    "GPT-OSS, channel": Layout(
        rows_of_gpt_oss(channel("weight_scale")),
        "fp8-channel",
        False,
        _compressed("channel"),
        GPT_OSS,
        experts="gpt-oss",
    ),
    "compressed-tensors channel": Layout(channel("weight_scale"), "fp8-channel", True, _compressed("channel")),
    "compression_config channel": Layout(
        channel("weight_scale"), "fp8-channel", True, None, root={"compression_config": _compressed("channel")}
    ),
    "fbgemm_fp8": Layout(
        channel("weight_scale", torch.float32),
        "fp8-channel",
        True,
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200},
    ),
    "ModelOpt per channel": Layout(
        channel("weight_scale", torch.float32, (-1,)), "fp8-channel", True, _modelopt("FP8_PER_CHANNEL_PER_TOKEN")
    ),
    "E5M2": Layout(e5m2("weight_scale"), "fp8-e5m2", False, {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    "E5M2, from weight_scale_inv": Layout(e5m2("weight_scale_inv"), "fp8-e5m2", False, None),
    "ModelOpt NVFP4": Layout(nvfp4_of_modelopt, "nvfp4", True, _modelopt("NVFP4"), **NOT_EXACT),
    "ModelOpt NVFP4 experts, hf_quant_config.json": Layout(
        nvfp4_of_modelopt, "nvfp4", True, None, files=_hf_quant("NVFP4"), experts="alone", **NOT_EXACT
    ),
    "compressed-tensors NVFP4": Layout(
        nvfp4,
        "nvfp4",
        True,
        _compressed("tensor_group", "nvfp4-pack-quantized", bits=4, group_size=16),
        **NOT_EXACT,
    ),
    "compressed-tensors NVFP4 experts": Layout(
        nvfp4,
        "nvfp4",
        True,
        _compressed("tensor_group", "nvfp4-pack-quantized", bits=4, group_size=16),
        experts="alone",
        **NOT_EXACT,
    ),
    "compressed-tensors INT4": Layout(
        int4,
        "int4",
        False,
        _compressed("group", "pack-quantized", bits=4, kind="int", group_size=32),
    ),
    "compressed-tensors INT4 experts": Layout(
        int4,
        "int4",
        True,
        _compressed("group", "pack-quantized", bits=4, kind="int", group_size=32, actorder="static"),
        experts="alone",
    ),
    "INT4, no quantization_config": Layout(int4, "int4", False, None),
    "GPTQ": Layout(
        packed("qweight", "scales", torch.int32, torch.float16, values_each=8, group=128),
        "int4",
        False,
        {"quant_method": "gptq", "bits": 4, "group_size": 128},
    ),
    "GPTQ experts": Layout(gptq, "int4", True, {"quant_method": "gptq", "bits": 4, "group_size": 32}, experts="alone"),
    "AWQ": Layout(awq, "int4", False, AWQ),
    "AWQ experts": Layout(awq, "int4", True, AWQ, experts="alone"),
    "MLX": Layout(
        packed("weight", "scales", torch.uint32, torch.bfloat16, values_each=8, group=64),
        "int4",
        False,
        None,
        root={"quantization": {"group_size": 64, "bits": 4}},
    ),
    "W4AFP8": Layout(
        w4afp8(torch.bfloat16),
        "int4",
        True,
        {"quant_method": "w4afp8", "group_size": 128},
        dense=block("weight_scale_inv"),
        multiple=128,
    ),
    "W4AFP8, hf_quant_config.json": Layout(
        w4afp8(torch.float32),
        "int4",
        True,
        None,
        files=_hf_quant("MIXED_PRECISION"),
        dense=block("weight_scale_inv"),
        multiple=128,
    ),
    "compressed-tensors W4AFP8 experts": Layout(
        lambda weight: int4(weight, 128),
        "int4",
        True,
        _compressed("group", "pack-quantized", bits=4, kind="int", group_size=128, inputs=FP8_TOKENS),
        experts="alone",
        multiple=128,
    ),
    "ModelOpt W4A8_AWQ": Layout(
        packed("weight", "weight_scale", torch.int8, torch.float32, values_each=2, group=128),
        "w4a8",
        False,
        _modelopt("W4A8_AWQ"),
    ),
}


def _stored_name(name, end):
    """X.weight becomes X.end, fused experts Y become Y_end, without "weight"."""
    if name.endswith(".weight"):
        return name.removesuffix("weight") + end
    return name if end == "weight" else f"{name}_{end.removeprefix('weight_')}"


def _stacked(parts):
    if parts[0].itemsize > 1:
        return torch.stack(parts)
    return torch.stack([part.view(torch.uint8) for part in parts]).view(parts[0].dtype)


def write_layout(layout, directory, tensors, wanted, config, *, is_expert=lambda name: "experts" in name):
    """Write a checkpoint in a layout. wanted: whether a weight is quantized. Returns the values of what was."""
    stored, values = {}, {}
    for name, value in tensors.items():
        if not wanted(name):
            stored[name] = value
            continue
        quantize = layout.quantize if layout.dense is None or is_expert(name) else layout.dense
        parts = [quantize(matrix.float()) for matrix in (value if value.dim() == 3 else [value])]
        for end in parts[0].stored:
            made = [part.stored[end].contiguous() for part in parts]
            stored[_stored_name(name, end)] = made[0] if value.dim() < 3 else _stacked(made)
        values[name] = parts[0].values if value.dim() < 3 else torch.stack([part.values for part in parts])
    directory.mkdir(parents=True, exist_ok=True)
    save_file(stored, directory / "model.safetensors", {"format": "pt"})
    quantization = {} if layout.config is None else {"quantization_config": layout.config}
    content = {**config, **quantization}
    for key, value in layout.root.items():
        content[key] = content.get(key, {}) | value if isinstance(value, dict) else value
    (directory / "config.json").write_text(json.dumps(content))
    for file, value in layout.files.items():
        (directory / file).write_text(json.dumps(value))
    return values


def _leave_out(content, modules):
    """A configuration, if it is one, in which the entries of quantizations name these modules as not quantized."""
    if not isinstance(content, dict):
        return content
    entries = {"fp8": "modules_to_not_convert", "compressed-tensors": "ignore", "modelopt": "ignore"}
    entry = "exclude_modules" if "exclude_modules" in content else entries.get(content.get("quant_method"))
    parts = {key: _leave_out(value, modules) for key, value in content.items()}
    return parts if entry is None else parts | {entry: modules}


class Source:
    """An unquantized checkpoint of a model of transformers, to be written in other layouts. kind: the model's class."""

    def __init__(self, directory, kind):
        self.directory, self.kind = directory, kind
        self.tensors = load_file(directory / "model.safetensors")
        self.config = json.loads((directory / "config.json").read_text())

    @classmethod
    def of_random(cls, directory, model):
        """Save a model with weights so large that logits depend on all of them."""
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=0.1)
        model.save_pretrained(directory)
        return cls(directory, type(model))

    def write(self, layout, directory, wanted=lambda name: name.endswith("_proj.weight"), config=None):
        """Write a checkpoint in this layout; returns the unquantized model of the values that it holds.

        The configuration names the modules that are not quantized, where its form has an entry for them.
        """
        from transformers import AutoConfig

        own = AutoConfig.from_pretrained(self.directory)
        others = {name for name, value in self.tensors.items() if value.dim() > 1 and not wanted(name)}
        located = locate(empty_model(own), map(parse, others)).values()
        kept = sorted({"lm_head", *(location.key.rpartition(".")[0] for location in located)})
        left_out = {field: _leave_out(getattr(layout, field), kept) for field in ("config", "root", "files")}
        layout = layout._replace(**left_out)
        values = write_layout(layout, directory, self.tensors, wanted, self.config | (config or {}))
        tensors = {name: values[name].float() if name in values else value for name, value in self.tensors.items()}
        return self.kind.from_pretrained(None, config=own, state_dict=tensors, dtype=torch.float32)
