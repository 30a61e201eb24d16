"""find_format: how the weights of a checkpoint are quantized, found from its configuration and the tensors themselves.

What the two say is compared, and where they disagree, or nothing says how FP8 codes are scaled, the format does not
load. Nothing but headers and JSON is read.
"""

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from fp8moe.quant.formats import BLOCK, ceil_div
from fp8moe.weights.expert_names import DOWN, GATE_UP, matrices_of, parse_expert, parse_fused
from fp8moe.weights.formats import (
    CONCATENATED,
    FP8,
    GATE_UP_LAYOUT,
    TensorSpec,
    fits_scale,
    scale_of,
    scale_shape,
)
from fp8moe.weights.gpt_oss import is_gpt_oss
from fp8moe.weights.read import CONFIG, HF_QUANT_CONFIG, Checkpoint, open_checkpoint
from fp8moe.weights.untrusted import shown

MX_BLOCK = 32  # values along K that share a scale in the OCP's microscaling formats (MX 1.0, section 5)


class Format(NamedTuple):
    """How the weights of a checkpoint are quantized: `find_format` says it.

    name: "fp8-block", "fp8-block-ue8m0", "fp8-tensor", "fp8-channel", "mxfp8", "mxfp4", "nvfp4", "int4", "w4a8", "bf16"
        (nothing is quantized) or "unknown". Of a checkpoint with several: that of the experts, else of the linears.
    bits: of a weight's code; of unquantized weights 16.
    scales: how many values share a scale: "128x128", "tensor", "channel", "1x32"...; "none" of unquantized weights.
    exact: whether 128x128 blocks hold the same values. loads: whether `load_model` and `load_fp8_checkpoint` take it.
    reason: one sentence: how it loads, or why it does not and what to do.
    """

    name: str
    bits: int
    scales: str
    exact: bool
    loads: bool
    reason: str


class Kind(NamedTuple):
    """A way of quantizing one weight. words: what a sentence calls it. refusal: why it does not load, if so."""

    name: str
    bits: int
    scales: str
    words: str
    exact: bool = True
    refusal: str | None = None


_OTHERS = "which fp8moe does not run; take the model's FP8 or unquantized checkpoint"

KINDS = {
    kind.name: kind
    for kind in (
        Kind("fp8-block", 8, f"{BLOCK}x{BLOCK}", f"FP8 with a scale for each {BLOCK}x{BLOCK} values"),
        Kind("fp8-tensor", 8, "tensor", "FP8 with a scale for each tensor"),
        Kind("mxfp8", 8, f"1x{MX_BLOCK}", f"MXFP8, with a power of two for each {MX_BLOCK} values"),
        Kind("mxfp4", 4, f"1x{MX_BLOCK}", f"MXFP4, with a power of two for each {MX_BLOCK} values"),
        Kind(
            "fp8-channel",
            8,
            "channel",
            "FP8 with a scale for each output channel",
            exact=False,
        ),
        Kind("nvfp4", 4, "1x16", "NVFP4", exact=False, refusal=_OTHERS),
        Kind("int4", 4, "group", "INT4", exact=False, refusal=_OTHERS),
        Kind("int8", 8, "channel", "INT8", exact=False, refusal=_OTHERS),
        Kind("w4a8", 4, f"1x{BLOCK}", "W4A8, with INT4 codes", exact=False, refusal=_OTHERS),
    )
}

_FP8_KINDS = ("fp8-block", "fp8-tensor", "fp8-channel", "mxfp8")
_SCALE_SUFFIXES = ("_scale_inv", "_scale")  # of X.weight or of fused experts' Y
_CODES_IN_GROUPS = "_blocks"  # of GPT-OSS's fused experts Y: (E, N, K/32, 16), with scales Y_scales (E, N, K/32)
_UNUSED = (
    *("input_scale", "activation_scale", "output_scale", "input_scale_ub"),
    *("k_scale", "v_scale", "q_scale", "kv_scale", "prob_output_scale"),
)
"""Ends of names of static scales of activations, of keys and of values, which are quantized here as they come."""


class Declared(NamedTuple):
    """What a configuration says. where: the entry; kinds: it allows, None for any; power_of_two: U8 scales are E8M0.

    refusal: why what it says cannot be followed, whatever the tensors are.
    """

    where: str
    method: str
    kinds: frozenset[str] | None = None
    power_of_two: bool = False
    refusal: str | None = None


class QuantizedWeight(NamedTuple):
    """A weight as it is stored.

    weight: its name as a tensor of its own, X.weight or a fused Y. codes, scale: the stored tensors. kind: of `KINDS`,
    or None where it has no scale or an unknown one. shape: of its values, (N, K) or (E, N, K). transposed: fused
    experts, stored (E, K, N).
    """

    weight: str
    codes: str
    scale: str | None
    kind: str | None
    shape: tuple[int, ...]
    transposed: bool

    @property
    def has_own_scale(self) -> bool:
        """Whether the scale is not that of all experts, which are stored one by one: transformers writes blocks so."""
        return self.scale is not None and _is_own(self.weight, self.scale)

    @property
    def interleaved(self) -> bool:
        """Whether rows of gate and up take turns, which they do in GPT-OSS."""
        return self.codes.endswith(f".{GATE_UP}{_CODES_IN_GROUPS}")

    @property
    def matrices(self) -> int:
        """How many matrices an expert's weight consists of: gate and up are two."""
        return matrices_of(self.weight, self.shape)


class Found(NamedTuple):
    """What a checkpoint holds. unused: static scales of activations and of the cache of keys and values."""

    checkpoint: Checkpoint
    format: Format
    weights: list[QuantizedWeight]
    unused: set[str]
    declared: Declared | None


def find_format(directory: str | os.PathLike) -> Format:
    """How the weights of a checkpoint are quantized, and whether it loads.

    Raises CheckpointError if there is no checkpoint in ``directory``.
    """
    return examine(open_checkpoint(directory)).format


def examine(checkpoint: Checkpoint) -> Found:
    """Find the format of a checkpoint, with the weights that it quantizes."""
    declarations = [declared(where, content) for where, content in checkpoint.declarations.items()]
    declared_once = declarations[0] if declarations else None
    weights = _quantized_weights(checkpoint, declared_once)
    unused = {name for name, info in checkpoint.tensors.items() if _is_unused(name, info.shape)}
    return Found(checkpoint, _format(checkpoint, declarations, weights), weights, unused, declared_once)


def _format(checkpoint: Checkpoint, declarations: list[Declared], weights: list[QuantizedWeight]) -> Format:
    kinds = Counter(weight.kind for weight in weights)
    experts = Counter(weight.kind for weight in weights if is_expert(weight))
    of_tensors = next((kind for kind, _ in (experts.most_common() or kinds.most_common()) if kind), None)
    named = of_tensors
    if named is None and declarations and declarations[0].kinds:
        named = next(iter(sorted(declarations[0].kinds)))

    def result(reason: str, *, loads: bool = False) -> Format:
        if named is None:
            return Format("unknown" if not loads else "bf16", 16, "none", loads, loads, reason)
        kind = KINDS[named]
        name, exact = kind.name, all(KINDS[other].exact for other in kinds if other)
        if name == "fp8-block" and _in_powers_of_two(checkpoint, declarations, weights):
            name = "fp8-block-ue8m0"
        return Format(name, kind.bits, kind.scales, exact, loads, reason)

    for declaration in declarations:
        if declaration.refusal is not None:
            return result(f"{declaration.where}: {declaration.refusal}")
    for first, second in zip(declarations, declarations[1:], strict=False):
        if first.kinds and second.kinds and not first.kinds & second.kinds:
            return result(f"{first.where} says {first.method}, but {second.where} says {second.method}")
    refused = [weight for weight in weights if weight.kind and KINDS[weight.kind].refusal]
    if refused:
        kind = KINDS[refused[0].kind]
        return result(f"{_prefix(declarations)}{kind.words} ({refused[0].codes}), {kind.refusal}")
    for weight in weights:
        spec = checkpoint.tensors[weight.codes].spec
        if weight.kind is None and spec.dtype != FP8:
            return result(f"{weight.codes}: {spec.dtype} {spec.shape}, expected the codes of matrices")
    for weight in weights:
        for declaration in declarations:
            if declaration.kinds is not None and weight.kind and weight.kind not in declaration.kinds:
                return result(
                    f"{declaration.where} says {declaration.method}, but {weight.codes} is {KINDS[weight.kind].words}"
                )
    for weight in weights:
        problem = _gate_up_problem(weight, checkpoint)
        if problem is not None:
            return result(f"{weight.codes}: {problem}")
    if not weights:
        if declarations:
            return Format("bf16", 16, "none", True, True, f"{_prefix(declarations)}but no weight is quantized")
        return Format("bf16", 16, "none", True, True, "no weight is quantized")
    if of_tensors is None and not checkpoint.incomplete:
        first = weights[0]
        if first.scale is None:
            return result(f"nothing says how the codes of {first.codes} are scaled: no tensor is its scale")
        shapes = f"{checkpoint.tensors[first.scale].shape} for {first.codes} {checkpoint.tensors[first.codes].shape}"
        return result(f"{first.scale}: shape {shapes} is no scale that fp8moe knows")
    others = [KINDS[kind].words for kind in kinds if kind and kind != named]
    mixed = f"; other weights are {' and '.join(others)}" if others else ""
    return result(f"{_prefix(declarations)}{KINDS[named].words if named else 'FP8'}{mixed}", loads=True)


def _gate_up_problem(weight: QuantizedWeight, checkpoint: Checkpoint) -> str | None:
    """Why gate and up of fused experts cannot be told apart, or None, as for other weights."""
    if weight.matrices == 1:
        return None
    rows = weight.shape[1]
    if rows % 2:
        return f"shape {checkpoint.tensors[weight.codes].shape}, expected as many rows of gate as of up"
    if weight.transposed and weight.kind == "fp8-block" and rows // 2 % BLOCK:
        return f"gate and up, of {rows // 2} columns each, share blocks of their scale"
    bias = checkpoint.tensors.get(f"{weight.weight}_bias")
    if weight.interleaved:
        fits = bias is None or bias.shape == weight.shape[:2]
        return None if fits else f"with a bias {bias.shape}, expected {weight.shape[:2]}"
    if (bias is None and not is_gpt_oss(checkpoint)) or _is_concatenated(weight, checkpoint):
        return None
    kind = KINDS[weight.kind].words if weight.kind else "FP8"
    return (
        f"{kind}, of experts with biases, and nothing says whether rows of gate and up take turns, as in GPT-OSS; "
        "take the MXFP4 checkpoint, or quantize the bfloat16 one (fp8moe quantize)"
    )


def _is_concatenated(weight: QuantizedWeight, checkpoint: Checkpoint) -> bool:
    """Whether this is known to have all rows of gate before those of up, as fp8moe writes it.

    Either the configuration says so, or there is none, as where a module was saved that is no model.
    """
    said = any(content.get(GATE_UP_LAYOUT) == CONCATENATED for content in checkpoint.declarations.values())
    return (said or not checkpoint.config) and weight.kind in ("fp8-block", "fp8-channel") and not weight.transposed


def _prefix(declarations: list[Declared]) -> str:
    return f"{declarations[0].method.partition(':')[0]}: " if declarations else ""


def _in_powers_of_two(checkpoint: Checkpoint, declarations: list[Declared], weights: list[QuantizedWeight]) -> bool:
    stored = {checkpoint.tensors[weight.scale].dtype for weight in weights if weight.scale is not None}
    return stored == {"F8_E8M0"} or any(declaration.power_of_two for declaration in declarations)


def is_expert(weight: QuantizedWeight) -> bool:
    """Whether this is a weight of experts, one by one or fused."""
    return parse_expert(weight.weight) is not None or parse_fused(weight.weight, weight.shape) is not None


# What the tensors say.


def _quantized_weights(checkpoint: Checkpoint, declaration: Declared | None) -> list[QuantizedWeight]:
    """The weights that are stored as FP8 codes or packed integers."""
    tensors, weights = checkpoint.tensors, []
    for name, info in tensors.items():
        weight = _weight_of_codes(name, info.dtype, tensors)
        if weight is None:
            continue
        scale = _scale_of_codes(weight, name, tensors)
        transposed = _is_transposed(weight, info.shape, tensors)
        kind = _kind(
            weight,
            name,
            info.spec,
            tensors[scale].spec if scale else None,
            declaration,
            transposed=transposed,
            scale_is_shared=scale is not None and not _is_own(weight, scale),
        )
        shape = info.shape if kind is None else _values_shape(name, info.spec, transposed)
        weights.append(QuantizedWeight(weight, name, scale, kind, shape, transposed))
    return weights


def _weight_of_codes(name: str, dtype: str, tensors: Mapping[str, Any]) -> str | None:
    """The weight that this tensor holds the codes of, None for a tensor of another kind."""
    if dtype == FP8:
        of = next((name.removesuffix(suffix) for suffix in _SCALE_SUFFIXES if name.endswith(suffix)), None)
        is_scale = of is not None and any(other in tensors for other in (of, f"{of}_packed"))
        return None if is_scale else name
    if name.endswith(".weight_packed"):
        return name.removesuffix("_packed")
    if name.endswith(".qweight"):
        return name.removesuffix("qweight") + "weight"
    if name.endswith(_CODES_IN_GROUPS) and f"{name.removesuffix(_CODES_IN_GROUPS)}_scales" in tensors:
        return name.removesuffix(_CODES_IN_GROUPS)
    integers = dtype in ("I8", "U8", "I32", "U32")
    is_weight = name.endswith(".weight") or parse_fused(name, tuple(tensors[name].shape)) is not None
    return name if integers and is_weight and len(tensors[name].shape) > 1 else None


def _scale_of_codes(weight: str, codes: str, tensors: Mapping[str, Any]) -> str | None:
    spellings = [weight + suffix for suffix in _SCALE_SUFFIXES]
    if codes.endswith(_CODES_IN_GROUPS):
        spellings.append(f"{weight}_scales")
    if not weight.endswith(".weight"):
        spellings.append(f"{weight}_weight_scale")
    elif codes.endswith(".qweight"):
        spellings.append(weight.removesuffix("weight") + "scales")
    return next((name for name in spellings if name in tensors), scale_of(weight, tensors))


def _is_own(weight: str, scale: str) -> bool:
    return scale.startswith(weight.removesuffix("weight"))


def _is_transposed(weight: str, shape: tuple[int, ...], tensors: Mapping[str, Any]) -> bool:
    """Whether fused experts are stored (E, K, N), with as many rows of gate_up as columns of down."""
    fused = parse_fused(weight, shape)
    if fused is None or fused.projection not in (GATE_UP, DOWN):
        return False
    pair = [tensors.get(f"{fused.module}.{projection}") for projection in (GATE_UP, DOWN)]
    if None in pair or any(len(info.shape) != 3 for info in pair):
        return False
    (_, rows, columns), (_, down_rows, down_columns) = (info.shape for info in pair)
    return rows == down_columns and columns == 2 * down_rows


def _values_shape(name: str, codes: TensorSpec, transposed: bool) -> tuple[int, ...]:
    if codes.dtype == FP8:
        *lead, rows, columns = codes.shape
        return (*lead, columns, rows) if transposed else codes.shape
    lead = codes.shape[: -2 if name.endswith(_CODES_IN_GROUPS) else -1]
    return *lead, 2 * math.prod(codes.shape[len(lead) :])


def _kind(
    weight: str,
    name: str,
    codes: TensorSpec,
    scale: TensorSpec | None,
    declaration: Declared | None,
    *,
    transposed: bool,
    scale_is_shared: bool,
) -> str | None:
    """The kind of a weight, of `KINDS`: the first that is declared and fits the shape of its scale, else that fits."""
    if codes.dtype != FP8:
        return _packed_kind(name, codes, scale)
    if scale is None or len(codes.shape) not in (2, 3):
        return None
    if scale_is_shared:
        return "fp8-block"
    fitting = [kind for kind in _FP8_KINDS if _FITS[kind](weight, codes.shape, scale, transposed)]
    preferred = [kind for kind in fitting if declaration and declaration.kinds and kind in declaration.kinds]
    return next(iter(preferred or fitting), None)


def _packed_kind(name: str, codes: TensorSpec, scale: TensorSpec | None) -> str | None:
    """The kind of codes that are packed into integers, None if they are not those of matrices."""
    in_groups = name.endswith(_CODES_IN_GROUPS)
    if len(codes.shape) not in ((4,) if in_groups else (2, 3)):
        return None
    if scale is not None and scale.dtype == FP8:
        return "nvfp4"
    two_each = codes.dtype in ("I8", "U8")
    if two_each and scale is not None and scale.dtype in ("F8_E8M0", "U8"):
        *rows, columns = codes.shape
        grouped = tuple(rows) if in_groups else (*rows, 2 * columns // MX_BLOCK)
        if scale.shape == grouped and 2 * columns % MX_BLOCK == 0 and (not in_groups or 2 * columns == MX_BLOCK):
            return "mxfp4"
    if codes.dtype in ("I8", "U8") and scale is not None:
        *_, rows, columns = (1, *codes.shape)
        if scale.shape[-2:] == (rows, ceil_div(2 * columns, BLOCK)) and codes.dtype == "I8":
            return "w4a8"
        if codes.dtype == "I8" and math.prod(scale.shape) <= math.prod(codes.shape[:-1]):
            return "int8"
    return "int4"


def _fits_blocks(weight: str, shape: tuple[int, ...], scale: TensorSpec, transposed: bool) -> bool:
    if transposed:
        *lead, rows, columns = shape
        return fits_scale(scale.shape, (*lead, ceil_div(rows, BLOCK), ceil_div(columns, BLOCK)))
    return fits_scale(scale.shape, scale_shape(weight, shape))


def _fits_tensor(weight: str, shape: tuple[int, ...], scale: TensorSpec, transposed: bool) -> bool:
    lead = shape[:-2]
    whole = [(), lead, (*lead, matrices_of(weight, shape))]
    return any(fits_scale(scale.shape, sizes) for sizes in whole) and scale.dtype != "U8"


def _fits_channel(weight: str, shape: tuple[int, ...], scale: TensorSpec, transposed: bool) -> bool:
    *lead, rows, columns = shape
    each = (*lead, columns, 1) if transposed else (*lead, rows, 1)
    return scale.dtype != "U8" and scale.shape in (each, each[:-1], (*lead, 1, columns) if transposed else each)


def _fits_mx(weight: str, shape: tuple[int, ...], scale: TensorSpec, transposed: bool) -> bool:
    exponents = scale.dtype in ("U8", "F8_E8M0")
    return exponents and not transposed and scale.shape == (*shape[:-1], ceil_div(shape[-1], MX_BLOCK))


_FITS: Mapping[str, Callable[[str, tuple[int, ...], TensorSpec, bool], bool]] = {
    "fp8-block": _fits_blocks,
    "fp8-tensor": _fits_tensor,
    "fp8-channel": _fits_channel,
    "mxfp8": _fits_mx,
}


def _is_unused(name: str, shape: tuple[int, ...]) -> bool:
    last = name.rpartition(".")[2]
    return math.prod(shape[1:]) == 1 and (last in _UNUSED or last.endswith(("_input_scale", "_activation_scale")))


# What configurations say.


def declared(where: str, content: Mapping[str, Any]) -> Declared:
    """What an entry of a configuration says. where: its name for messages."""
    if where == HF_QUANT_CONFIG:
        return _modelopt(where, content)
    if where.rpartition(" ")[2] == "quantization":  # MLX
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
    """DeepSeek's and transformers' fine-grained FP8, and AutoFP8's and Mistral's with one scale a tensor."""
    power_of_two = content.get("scale_fmt") == "ue8m0"
    problem = next(iter(config_problems(content)), None)
    if problem is not None:
        return Declared(where, "fp8", refusal=problem.partition(": ")[2])
    match content.get("weight_block_size", "any"):
        case "any":
            return Declared(where, "fp8", frozenset({*_FP8_KINDS, "mxfp4"} - {"mxfp8"}), power_of_two)
        case None:
            return _of_kinds(where, "fp8", ["fp8-tensor"])
        case [1, 32]:
            return _of_kinds(where, "fp8", ["mxfp8"])
    return _of_kinds(where, "fp8", ["fp8-block", "mxfp4"], power_of_two=power_of_two)


def config_problems(quantization: Mapping[str, Any]) -> list[str]:
    """What in a quantization_config of DeepSeek's kind these layers cannot follow."""
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
    """What an entry says that allows these kinds."""
    allowed = [KINDS[kind] for kind in dict.fromkeys(kinds)]
    refusal = next((f"{method}: {kind.words}, {kind.refusal}" for kind in allowed if kind.refusal), None)
    power_of_two = power_of_two or any(kind.name in ("mxfp8", "mxfp4") for kind in allowed) and len(allowed) == 1
    words = f"{method}: {allowed[0].words}"
    return Declared(where, words, frozenset(kind.name for kind in allowed), power_of_two, refusal)


def _compressed_tensors(where: str, content: Mapping[str, Any]) -> Declared:
    """https://github.com/vllm-project/compressed-tensors: groups of modules, each with a scheme for its weights."""
    groups = content.get("config_groups")
    schemes = [group.get("weights") for group in groups.values() if isinstance(group, dict)] if _is(groups) else []
    if not schemes or not all(map(_is, schemes)):
        return Declared(where, "compressed-tensors", refusal="compressed-tensors without config_groups that say how")
    if content.get("transform_config"):
        return Declared(where, "compressed-tensors", refusal="compressed-tensors with transforms of the weights")
    sparsity = content.get("sparsity_config")
    if _is(sparsity) and sparsity.get("format", "dense") != "dense":
        return Declared(where, "compressed-tensors", refusal="compressed-tensors with sparse weights")
    kinds = {_scheme(scheme, group) for scheme, group in zip(schemes, groups.values(), strict=True)}
    unknown = next((kind for kind in kinds if kind not in KINDS), None)
    if unknown is not None:
        return Declared(where, "compressed-tensors", refusal=f"compressed-tensors with {unknown}, {_OTHERS}")
    return _of_kinds(where, "compressed-tensors", kinds)


def _scheme(weights: Mapping[str, Any], group: Mapping[str, Any]) -> str:
    """The kind of a scheme of compressed-tensors, or words for one that is none of `KINDS`."""
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
        return "mxfp4" if size == MX_BLOCK else "nvfp4"
    if kind == "int" and bits == 4:
        inputs = group.get("input_activations")
        return "w4a8" if _is(inputs) and inputs.get("num_bits") == 8 else "int4"
    return "int8" if kind == "int" and bits == 8 else f"{shown(bits)}-bit {shown(kind)} weights"


_MODELOPT = {
    "FP8": "fp8-tensor",
    "FP8_PB_WO": "fp8-block",
    "FP8_PB": "fp8-block",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8-channel",
    "MXFP8": "mxfp8",
    "MXFP4": "mxfp4",
    "NVFP4": "nvfp4",
    "NVFP4_AWQ": "nvfp4",
    "W4A16_AWQ": "int4",
    "W4A8_AWQ": "w4a8",
    "W4A8_MXFP4_FP8": "mxfp4",
    "W4AFP8": "w4a8",
}


def _modelopt(where: str, content: Mapping[str, Any]) -> Declared:
    """NVIDIA's Model Optimizer, of config.json or of hf_quant_config.json."""
    content = content["quantization"] if _is(content.get("quantization")) else content
    algorithm = content.get("quant_algo")
    if algorithm == "MIXED_PRECISION":
        layers = content.get("quantized_layers")
        algorithms = [layer.get("quant_algo") for layer in layers.values() if _is(layer)] if _is(layers) else []
    else:
        algorithms = [algorithm]
    kinds = {_MODELOPT.get(name) if isinstance(name, str) else None for name in algorithms}
    method = "ModelOpt's " + " and ".join(sorted({shown(name).strip("'") for name in algorithms}))
    if not kinds or None in kinds:
        return Declared(where, method, refusal=f"quantized by {method}, which fp8moe does not know")
    return _of_kinds(where, method, kinds)


def _quark(where: str, content: Mapping[str, Any]) -> Declared:
    """AMD's Quark."""
    config = content.get("global_quant_config")
    weight = config.get("weight") if _is(config) else None
    weight = weight[0] if isinstance(weight, list) and weight else weight
    dtype, scheme = (weight.get("dtype"), weight.get("qscheme")) if _is(weight) else (None, None)
    if dtype == "fp8_e4m3":
        kinds = {"per_tensor": "fp8-tensor", "per_channel": "fp8-channel", "per_block": "fp8-block"}
        return _of_kinds(where, "Quark", [kinds.get(scheme, "fp8-block") if isinstance(scheme, str) else "fp8-block"])
    if dtype == "fp4":
        return _of_kinds(where, "Quark", ["mxfp4"])
    return Declared(where, "Quark", refusal=f"quantized by Quark in {shown(dtype)}, which fp8moe does not run")


_METHODS: Mapping[str, Callable[[str, Mapping[str, Any]], Declared]] = {
    "fp8": _fp8,
    "mxfp8": _of("mxfp8", "mxfp8"),
    "mxfp4": _of("mxfp4", "mxfp4"),
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "quark": _quark,
    "fbgemm_fp8": _of("fbgemm_fp8", "fp8-channel"),
}
_TELLTALES = {"quant_algo": "modelopt", "config_groups": "compressed-tensors"}
"""Entries that tell the method where quant_method is missing."""

_INTEGER_METHODS = {
    *("gptq", "awq", "auto-round", "bitsandbytes", "torchao", "hqq", "quanto", "aqlm", "eetq", "vptq", "higgs"),
    *("spqr", "w4afp8", "gguf", "bitnet", "quip", "modelopt_fp4", "intel/auto-round", "auto_round", "fouroversix"),
}


def _is(value: object) -> bool:
    return isinstance(value, dict)
