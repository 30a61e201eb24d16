"""Formats of quantized weights: their kinds, the shapes of their scales, and how configuration files declare them."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from fp8moe.quant.formats import BLOCK, MX_BLOCK, PACKED_FORMATS, ceil_div
from fp8moe.weights.names import CHANNEL_SCALE, GATE_UP, GROUPS, SCALE, WEIGHT, Name
from fp8moe.weights.source import CONFIG, FLOATS, FP8, HF_QUANT_CONFIG, Layout, TensorSpec, shown

INT4_GROUPS = PACKED_FORMATS["int4"].groups
(NVFP4_GROUP,) = PACKED_FORMATS["nvfp4"].groups
SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0")
"""Dtypes that scales may be stored in. float32 represents every value of these dtypes exactly."""
GATE_UP_LAYOUT = "gate_up_layout"
CONCATENATED = "concatenated"
"""The entry {GATE_UP_LAYOUT: CONCATENATED} of quantization_config says that experts have gate rows before up rows."""


def scale_dtype(scale_format: str) -> str:
    """Return the safetensors dtype of scales of this format."""
    return "F8_E8M0" if scale_format == "ue8m0" else "F32"


def scale_grid(matrices: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a weight's 128x128-block scales.

    matrices: how many matrices the weight stacks along its rows; no block spans two of them.
    """
    *lead, rows, columns = shape
    return *lead, matrices * ceil_div(rows // matrices, BLOCK), ceil_div(columns, BLOCK)


def fits_scale(shape: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """Return whether a scale has the expected shape, ignoring dimensions of size 1, which transformers 5.17 drops."""
    if len(shape) == len(expected) == 2:  # (N, 1) are channel scales, (1, N) block scales
        return tuple(shape) == tuple(expected)
    return [size for size in shape if size != 1] == [size for size in expected if size != 1]


def quantization_config(
    tensors: Iterable[tuple[Name, TensorSpec]], scale_format: str, others: Iterable[str], *, channels: bool = False
) -> dict:
    """Make the quantization_config of a checkpoint with these tensors.

    others: further modules to list as unquantized, although no tensor in ``tensors`` has their name. "lm_head" is
    always listed, unless it is stored in FP8: it may be tied to the embedding. channels: whether scales are per output
    channel; the result is then a configuration of compressed-tensors.
    """
    kept, quantized, fused, biases = {"lm_head", *others}, set(), set(), set()
    for name, spec in tensors:
        if name.role == WEIGHT and len(spec.shape) >= 2:
            (quantized if spec.dtype == FP8 else kept).add(name.module)
        if name.projection == GATE_UP and name.role != WEIGHT:
            biases.add(name.text)
        elif name.projection == GATE_UP and spec.dtype == FP8:
            fused.add(name.bias)
    gate_up = {GATE_UP_LAYOUT: CONCATENATED} if fused & biases else {}
    if channels:
        weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
        tokens = weights | {"strategy": "token", "dynamic": True}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": tokens}
        return {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "quantization_status": "compressed",
            "ignore": sorted(kept - quantized),
            "config_groups": {"group_0": group},
            **gate_up,
        }
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        **({"scale_fmt": "ue8m0"} if scale_format == "ue8m0" else {}),
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": sorted(kept - quantized),
        **gate_up,
    }


_EXPERTS = "re:.*\\.experts\\..*"
_GPT_OSS_KEPT = ("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head")


def packed_config(layout: Layout, *, in_turns: bool) -> dict:
    """Make the quantization_config of a checkpoint with experts in four bits.

    layout: all tensors. in_turns: whether experts are stored as GPT-OSS's; otherwise they are as in compressed-tensors.
    """
    if in_turns:
        return {"quant_method": "mxfp4", "modules_to_not_convert": [*_GPT_OSS_KEPT]}
    name, scale = next(
        (name, spec) for name, spec in layout.items() if name.endswith(".weight_scale") and ".experts." in name
    )
    columns = layout[f"{name.removesuffix('_scale')}_packed"]
    values = (8 if columns.dtype == "I32" else 2) * columns.shape[-1]
    kind, form = ("int", "pack-quantized") if columns.dtype == "I32" else ("float", "mxfp4-pack-quantized")
    four = {"num_bits": 4, "type": kind, "symmetric": True, "strategy": "group"}
    if scale.dtype == FP8:
        form, four["strategy"] = "nvfp4-pack-quantized", "tensor_group"
    four |= {"group_size": values // scale.shape[-1], "dynamic": False}
    groups = {"group_0": {"targets": [_EXPERTS], "weights": four, "input_activations": None, "format": form}}
    fp8 = {name.removesuffix(".weight") for name, spec in layout.items() if spec.dtype == FP8}
    fp8 -= {name for name in fp8 if name.endswith(CHANNEL_SCALE)}  # of NVFP4
    if fp8:
        weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "block", "dynamic": False}
        tokens = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "group", "group_size": BLOCK}
        groups["group_1"] = {
            "targets": ["Linear"],
            "weights": weights | {"block_structure": [BLOCK, BLOCK]},
            "input_activations": tokens | {"dynamic": True},
            "format": "float-quantized",
        }
    kept = {name.removesuffix(".weight") for name, spec in layout.items() if _is_kept(name, spec)}
    return {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision" if fp8 else form,
        "quantization_status": "compressed",
        "ignore": sorted({"lm_head", *kept} - fp8),
        "config_groups": groups,
    }


def _is_kept(name: str, spec: TensorSpec) -> bool:
    return name.endswith(".weight") and spec.dtype in FLOATS and len(spec.shape) > 1


class Kind(NamedTuple):
    """A way to quantize weights. words: a description for messages.

    exact: whether 128x128 blocks can hold the values of such weights exactly. refusal: why fp8moe does not load such
    weights, or None.
    """

    name: str
    bits: int
    scales: str
    words: str
    exact: bool = True
    refusal: str | None = None


_OTHERS = "which fp8moe does not run; take the model's FP8 or unquantized checkpoint"
_E5M2 = "which fp8moe does not run; take the model's E4M3 or unquantized checkpoint"

NVFP4_ERROR = "3e-2"
"""The bound of the relative error of products with NVFP4 weights."""
_NVFP4 = f"NVFP4 with a scale for each {NVFP4_GROUP} values, and a relative error of products up to {NVFP4_ERROR}"

KINDS = {
    kind.name: kind
    for kind in (
        Kind("fp8-block", 8, f"{BLOCK}x{BLOCK}", f"FP8 with a scale for each {BLOCK}x{BLOCK} values"),
        Kind("fp8-tensor", 8, "tensor", "FP8 with a scale for each tensor"),
        Kind("mxfp8", 8, f"1x{MX_BLOCK}", f"MXFP8, with a power of two for each {MX_BLOCK} values"),
        Kind("mxfp4", 4, f"1x{MX_BLOCK}", f"MXFP4, with a power of two for each {MX_BLOCK} values"),
        Kind("fp8-channel", 8, "channel", "FP8 with a scale for each output channel", exact=False),
        Kind("fp8-e5m2", 8, "unknown", "FP8 of type E5M2", exact=False, refusal=_E5M2),
        Kind("nvfp4", 4, f"1x{NVFP4_GROUP}", _NVFP4, exact=False),
        Kind("int4", 4, "group", "INT4, with a scale for 32 or 128 values", exact=False),
        Kind("int4-other", 4, "group", "INT4", exact=False, refusal=_OTHERS),
        Kind("int8", 8, "channel", "INT8", exact=False, refusal=_OTHERS),
        Kind("w4a8", 4, f"1x{BLOCK}", "W4A8, with INT4 codes", exact=False, refusal=_OTHERS),
    )
}

FP8_KINDS = ("fp8-block", "fp8-tensor", "fp8-channel", "mxfp8")


class Declared(NamedTuple):
    """What an object in a configuration file declares about quantization.

    where: the object's file and key. kinds: the keys of `KINDS` that the object allows; None for any. power_of_two:
    whether scales stored as U8 are E8M0. refusal: why fp8moe cannot run any checkpoint that declares this, or None.
    groups: how many INT4 values share a scale.
    """

    where: str
    method: str
    kinds: frozenset[str] | None = None
    power_of_two: bool = False
    refusal: str | None = None
    groups: frozenset[int] = frozenset()


def declared(where: str, content: Mapping[str, Any]) -> Declared:
    """Parse an object in a configuration file that declares a quantization. where: its file and key, for messages."""
    if where == HF_QUANT_CONFIG:
        return _modelopt(where, content)
    if where.rpartition(" ")[2] == "quantization":  # the key that MLX writes
        method = f"MLX, {shown(content.get('bits'))} bits"
        return Declared(where, method, refusal=f"quantized by {method}, {_OTHERS}")
    guessed = next((method for name, method in _TELLTALES.items() if name in content), "fp8")
    method = content.get("quant_method", guessed)
    read = _METHODS.get(method) if isinstance(method, str) else None
    if read is not None:
        return read(where, content)
    if isinstance(method, str) and method in _INTEGER_METHODS:
        bits = f", {shown(content['bits'])} bits" if "bits" in content else ""
        return Declared(where, method, refusal=f"quantized by {method}{bits}, {_OTHERS}")
    known = ", ".join(sorted(_METHODS))
    return Declared(where, "unknown", refusal=f"quant_method is {shown(method)}, where fp8moe knows {known}")


def _fp8(where: str, content: Mapping[str, Any]) -> Declared:
    """Parse a configuration of block-scaled FP8 (DeepSeek, transformers) or per-tensor FP8 (AutoFP8, Mistral)."""
    power_of_two = content.get("scale_fmt") == "ue8m0"
    problem = next(iter(config_problems(content)), None)
    if problem is not None:
        return Declared(where, "fp8", refusal=problem.partition(": ")[2])
    match content.get("weight_block_size", "any"):
        case "any":
            return Declared(where, "fp8", frozenset({*FP8_KINDS, "mxfp4"} - {"mxfp8"}), power_of_two)
        case None:
            return _of_kinds(where, "fp8", ["fp8-tensor"])
        case [1, 32]:
            return _of_kinds(where, "fp8", ["mxfp8"])
    return _of_kinds(where, "fp8", ["fp8-block", "mxfp4"], power_of_two=power_of_two)


def config_problems(quantization: Mapping[str, Any]) -> list[str]:
    """List the settings in a DeepSeek-style quantization_config that fp8moe's layers do not support."""
    problems = []
    for name, expected in (("fmt", ("e4m3", "float8_e4m3fn")), ("activation_scheme", ("dynamic", "static"))):
        value = quantization.get(name)
        if value is not None and value not in expected:
            problems.append(f"{CONFIG}: {name} is {shown(value)}, expected {' or '.join(map(repr, expected))}")
    blocks = quantization.get("weight_block_size")
    if blocks not in (None, [BLOCK, BLOCK], [1, MX_BLOCK]):
        problems.append(f"{CONFIG}: weight_block_size is {shown(blocks)}, expected {[BLOCK, BLOCK]}")
    kept = quantization.get("modules_to_not_convert")
    if kept is not None and not (isinstance(kept, list) and all(isinstance(module, str) for module in kept)):
        problems.append(f"{CONFIG}: modules_to_not_convert is {shown(kept)}, expected a list of strings")
    return problems


def _of(method: str, kind: str) -> Callable[[str, Mapping[str, Any]], Declared]:
    return lambda where, content: _of_kinds(where, method, [kind])


def _of_kinds(where: str, method: str, kinds: Iterable[str], *, power_of_two: bool = False) -> Declared:
    """Return the `Declared` of a configuration that allows these kinds."""
    allowed = [KINDS[kind] for kind in dict.fromkeys(kinds)]
    refusal = next((f"{method}: {kind.words}, {kind.refusal}" for kind in allowed if kind.refusal), None)
    power_of_two = power_of_two or any(kind.name in ("mxfp8", "mxfp4") for kind in allowed) and len(allowed) == 1
    words = f"{method}: {allowed[0].words}"
    return Declared(where, words, frozenset(kind.name for kind in allowed), power_of_two, refusal)


def _compressed_tensors(where: str, content: Mapping[str, Any]) -> Declared:
    """Parse compressed-tensors' configuration: groups of modules, each group with a scheme for its weights.

    Source: https://github.com/vllm-project/compressed-tensors.
    """
    groups = content.get("config_groups")
    schemes = [group.get("weights") for group in groups.values() if isinstance(group, dict)] if _is(groups) else []
    if not schemes or not all(map(_is, schemes)):
        return Declared(where, "compressed-tensors", refusal="compressed-tensors without config_groups that say how")
    if content.get("transform_config"):
        return Declared(where, "compressed-tensors", refusal="compressed-tensors with transforms of the weights")
    sparsity = content.get("sparsity_config")
    if _is(sparsity) and sparsity.get("format", "dense") != "dense":
        return Declared(where, "compressed-tensors", refusal="compressed-tensors with sparse weights")
    found = zip(schemes, groups.values(), strict=True)
    sizes = [(_scheme(scheme, group), scheme.get("group_size")) for scheme, group in found]
    kinds = {kind for kind, _ in sizes}
    unknown = next((kind for kind in kinds if kind not in KINDS), None)
    if unknown is not None:
        return Declared(where, "compressed-tensors", refusal=f"compressed-tensors with {unknown}, {_OTHERS}")
    of_int4 = frozenset(size for kind, size in sizes if kind == "int4")
    return _of_kinds(where, "compressed-tensors", kinds)._replace(groups=of_int4)


_IN_ORDER = (None, False, "static", "weight")
"""Orders of columns, as compressed-tensors calls them, that matter to who quantizes, not in what is stored."""


def _scheme(weights: Mapping[str, Any], group: Mapping[str, Any]) -> str:
    """Return the key in `KINDS` of a compressed-tensors scheme, or a description if there is no such kind."""
    bits, kind, strategy = weights.get("num_bits"), weights.get("type"), weights.get("strategy")
    size, blocks = weights.get("group_size"), weights.get("block_structure")
    if kind == "float" and bits == 8:
        if strategy in ("tensor", "channel"):
            return f"fp8-{strategy}"
        if strategy == "block" and blocks in ([BLOCK, BLOCK], f"{BLOCK}x{BLOCK}"):
            return "fp8-block"
        if strategy == "group" and size == MX_BLOCK:
            return "mxfp8"
        return f"FP8 in groups of {shown(blocks or size)}"
    if kind == "float" and bits == 4:
        known = {"mxfp4": MX_BLOCK, "nvfp4": NVFP4_GROUP}
        return next((name for name, group in known.items() if size == group), f"FP4 in groups of {shown(size)}")
    if kind == "int" and bits == 4:
        inputs = group.get("input_activations")
        if _is(inputs) and inputs.get("num_bits") == 8 and inputs.get("type") != "float":
            return "w4a8"
        in_order = weights.get("actorder") in _IN_ORDER
        plain = weights.get("symmetric") is True and in_order and size in INT4_GROUPS
        return "int4" if plain else "int4-other"
    return "int8" if kind == "int" and bits == 8 else f"{shown(bits)}-bit {shown(kind)} weights"


_MODELOPT = {
    "FP8": "fp8-tensor",
    "FP8_PB_WO": "fp8-block",
    "FP8_PB": "fp8-block",
    "FP8_BLOCK_SCALES": "fp8-block",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8-channel",
    "MXFP8": "mxfp8",
    "MXFP4": "mxfp4",
    "NVFP4": "nvfp4",
    "NVFP4_AWQ": "nvfp4",
    "W4A16_AWQ": "int4-other",
    "W4A8_AWQ": "w4a8",
    "W4A16_MXFP4": "mxfp4",
    "W4A8_MXFP4_FP8": "mxfp4",
    "W4A8_MXFP4_MXFP8": "mxfp4",
    "W4AFP8": "w4a8",
}


def _modelopt(where: str, content: Mapping[str, Any]) -> Declared:
    """Parse the configuration of NVIDIA's Model Optimizer, from config.json or hf_quant_config.json."""
    content = content["quantization"] if _is(content.get("quantization")) else content
    algorithm = content.get("quant_algo")
    if algorithm == "MIXED_PRECISION":
        layers = content.get("quantized_layers")
        if not layers and "config_groups" not in content:  # W4AFP8, which lists no layers
            return _of_kinds(where, "ModelOpt's MIXED_PRECISION", ["int4", "fp8-block"])
        algorithms = [layer.get("quant_algo") for layer in layers.values() if _is(layer)] if _is(layers) else []
    else:
        algorithms = [algorithm]
    kinds = {_MODELOPT.get(name) if isinstance(name, str) else None for name in algorithms}
    method = "ModelOpt's " + " and ".join(sorted({shown(name).strip("'") for name in algorithms}))
    if not kinds or None in kinds:
        return Declared(where, method, refusal=f"quantized by {method}, which fp8moe does not know")
    return _of_kinds(where, method, kinds)


_SETTINGS: Mapping[str, tuple[tuple[str, Any, tuple[Any, ...]], ...]] = {
    "gptq": (
        ("bits", None, (4,)),
        ("sym", True, (True,)),
        ("desc_act", False, (False,)),
        ("group_size", None, INT4_GROUPS),
        ("checkpoint_format", "gptq", ("gptq", "gptq_v2")),
    ),
    "awq": (
        ("bits", None, (4,)),
        ("zero_point", True, (False,)),
        ("group_size", None, INT4_GROUPS),
        ("version", "gemm", ("gemm",)),
    ),
    "w4afp8": (("group_size", BLOCK, (BLOCK,)),),
}
"""Settings of INT4 that fp8moe reads, by method: name, default, and the values that it knows.

Sources: https://github.com/ModelCloud/GPTQModel, class QuantizeConfig; class AwqConfig of transformers;
https://github.com/sgl-project/sglang, class W4AFp8Config.
"""


def _int4(method: str, *others: str) -> Callable[[str, Mapping[str, Any]], Declared]:
    """Return a parser of a method's configuration of experts in INT4. others: kinds that other weights may have."""

    def parse(where: str, content: Mapping[str, Any]) -> Declared:
        values = {name: content.get(name, default) for name, default, _ in _SETTINGS[method]}
        for name, _, known in _SETTINGS[method]:
            if values[name] not in known:
                return Declared(where, method, refusal=f"{method} with {name} {shown(values[name])}, {_OTHERS}")
        return _of_kinds(where, method, ["int4", *others])._replace(groups=frozenset([values["group_size"]]))

    return parse


_QUARK = {
    ("fp8_e4m3", "per_tensor"): "fp8-tensor",
    ("fp8_e4m3", "per_channel"): "fp8-channel",
    ("fp8_e4m3", "per_block"): "fp8-block",
    ("fp8_e4m3", "per_group"): "mxfp8",
    ("fp4", "per_group"): "mxfp4",
}


def _quark(where: str, content: Mapping[str, Any]) -> Declared:
    """Parse AMD's Quark configuration: settings for all layers, and for layers selected by name pattern or type."""
    configs = [content.get("global_quant_config")]
    for name in ("layer_quant_config", "layer_type_quant_config"):
        layers = content.get(name)
        configs += layers.values() if _is(layers) else []
    kinds = []
    for config in filter(None, configs):
        weight = config.get("weight") if _is(config) else None
        weight = weight[0] if isinstance(weight, list) and weight else weight
        if weight is None and _is(config):
            continue  # the layers of this configuration stay unquantized
        dtype, scheme = (weight.get("dtype"), weight.get("qscheme")) if _is(weight) else (None, None)
        kind = _QUARK.get((dtype, scheme)) if isinstance(dtype, str) and isinstance(scheme, str) else None
        if kind is None:
            how = f"{shown(dtype)} {shown(scheme)}"
            return Declared(where, "Quark", refusal=f"quantized by Quark in {how}, which fp8moe does not run")
        kinds.append(kind)
    if not kinds:
        return Declared(where, "Quark", refusal="quantized by Quark, but nothing says how weights are")
    return _of_kinds(where, "Quark", kinds)


_METHODS: Mapping[str, Callable[[str, Mapping[str, Any]], Declared]] = {
    "fp8": _fp8,
    "mxfp8": _of("mxfp8", "mxfp8"),
    "mxfp4": _of("mxfp4", "mxfp4"),
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "quark": _quark,
    "gptq": _int4("gptq"),
    "awq": _int4("awq"),
    "w4afp8": _int4("w4afp8", "fp8-block"),
    "fbgemm_fp8": _of("fbgemm_fp8", "fp8-channel"),
}
_TELLTALES = {"quant_algo": "modelopt", "config_groups": "compressed-tensors"}
"""Keys that identify the quantization method of a configuration without quant_method."""

_INTEGER_METHODS = {
    *("auto-round", "bitsandbytes", "torchao", "hqq", "quanto", "aqlm", "eetq", "vptq", "higgs", "spqr"),
    *("gguf", "bitnet", "quip", "intel/auto-round", "auto_round", "fouroversix"),
}


def _is(value: object) -> bool:
    return isinstance(value, dict)


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


_SHOWN = 5


def unquantized_matrices(layout: Layout) -> dict[str, int]:
    """Count the elements of unquantized matrices by name (numbers in names become *), largest count first.

    layout: all tensors except scales.
    """
    sizes = Counter()
    for name, spec in layout.items():
        if spec.dtype in FLOATS and len(spec.shape) > 1:
            sizes[_NUMBER.sub("*", name)] += math.prod(spec.shape)
    return dict(sizes.most_common())


def fractions(sizes: Mapping[str, int], total: int) -> str:
    """Format sizes for a message, each as a percentage of ``total``: the first five, and the number of the others."""
    lines = [f"{name} {size / max(total, 1):.1%}" for name, size in sizes.items()]
    shown = ", ".join(lines[:_SHOWN])
    return f"{shown}, and {len(lines) - _SHOWN} more" if lines[_SHOWN:] else shown or "nothing"


def low_fp8_fraction(layout: Layout) -> str | None:
    """Return a warning if less than half of the parameters in matrices are in FP8 or four bits, otherwise None."""
    fp8 = {name: math.prod(spec.shape) for name, spec in layout.items() if spec.dtype == FP8}
    for name, spec in layout.items():
        fp8.pop(f"{name.removesuffix('_packed')}_scale", None)  # of NVFP4
        if name.endswith(("_packed", GROUPS)):
            fp8[name] = (8 if spec.dtype == "I32" else 2) * math.prod(spec.shape)
    scales = {name + suffix for name in fp8 for suffix in (SCALE, CHANNEL_SCALE)}
    rest = unquantized_matrices({name: spec for name, spec in layout.items() if name not in scales})
    total = sum(fp8.values()) + sum(rest.values())
    if 2 * sum(fp8.values()) >= total:
        return None
    fraction = sum(fp8.values()) / total
    return (
        f"FP8 weights have only {fraction:.1%} of the parameters in matrices; what stayed as it is: "
        f"{fractions(rest, total)}"
    )
