"""StoredWeight: a weight of a checkpoint as one object, with its name, codes, scale, format and values.

`open_weights` reads a directory's headers, pairs every weight with its scale, and finds the format. A checkpoint does
not load if its configuration and tensors disagree, or if nothing tells how its FP8 codes are scaled.
"""

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8moe.quant.formats import BLOCK, MX_BLOCK, FP8Tensor, as_float, ceil_div
from fp8moe.weights.formats import (
    CONCATENATED,
    FP8_KINDS,
    GATE_UP_LAYOUT,
    INT4_GROUPS,
    KINDS,
    NVFP4_GROUP,
    Declared,
    declared,
    fits_scale,
    scale_grid,
)
from fp8moe.weights.names import (
    DOWN,
    GATE_UP,
    GLOBAL_SCALE,
    GROUPS,
    OTHER,
    SCALE,
    TENSOR_SCALES,
    WEIGHT,
    Name,
    is_own_scale,
    is_scale_beside,
    is_unused_scale,
    parse,
    scale_spellings,
    weight_of_codes,
)
from fp8moe.weights.source import (
    E5M2,
    FLOATS,
    FP8,
    Checkpoint,
    CheckpointError,
    Layout,
    Reader,
    TensorInfo,
    TensorSpec,
    open_checkpoint,
    sections,
)

_IN_TURNS = {"gpt_oss": "GPT-OSS"}
"""Models whose fused experts are stored (E, columns, rows) with gate and up rows interleaved, by model_type."""
INTERLEAVED = " or ".join(_IN_TURNS.values())
_QWEIGHT = ".qweight"
_BESIDE = ("qzeros", "g_idx")
"""What GPTQ and AWQ have beside codes and scales: zero points, and the group of each column."""
PACKED = "U8"
"""The safetensors dtype of codes of four bits, two a byte, as a model holds them."""
_OF_THEIR_OWN = {"llama4": "Llama 4", "llama4_text": "Llama 4"}
"""Models whose experts compute something that fp8moe's do not, by model_type."""


class StoredWeight(NamedTuple):
    """A weight, bias or other tensor as a checkpoint stores it, or as a view from `fp8moe.weights.views` presents it.

    name: the weight's name, without a suffix for packed codes. codes, scale, tensor_scale: the stored tensors; only
    NVFP4 has the last. kind: a key of `KINDS`; None for unquantized values, and for FP8 codes whose scale is missing or
    unknown. dtype, shape: the values' safetensors dtype, and (N, K) or (E, N, K). grid, scale_dtype: shape and dtype of
    the scale; grid is None without a scale. coded: whether the weight is stored as FP8 codes or packed integers.
    transposed: whether fused experts are stored (E, K, N). shared: whether experts stored one by one share one scale,
    which is then a StoredWeight itself. make: function (codes, scale), of NVFP4 (codes, scale, tensor scale (1,)), that
    computes a matrix (a Tensor or an FP8Tensor); None to use the codes as stored. layout: dtype and shape by name of
    the tensors to write, of which ``make`` then computes a tuple; None for values, and their scale if there is one,
    under the names of the weight.
    """

    name: Name
    codes: TensorInfo
    scale: TensorInfo | None
    kind: str | None
    dtype: str
    shape: tuple[int, ...]
    grid: tuple[int, ...] | None = None
    scale_dtype: str = "F32"
    coded: bool = False
    transposed: bool = False
    shared: bool = False
    make: Callable[..., Tensor | FP8Tensor | tuple[Tensor, ...]] | None = None
    layout: Layout | None = None
    tensor_scale: TensorInfo | None = None

    @property
    def is_expert(self) -> bool:
        return self.name.projection is not None and (self.name.expert is not None or len(self.shape) == 3)

    @property
    def interleaved(self) -> bool:
        """Return whether these are packed codes with gate and up rows interleaved."""
        return self.name.projection == GATE_UP and self.codes.name.endswith(GROUPS)

    @property
    def scales(self) -> list[TensorInfo]:
        """Return the stored scales of this weight."""
        return [info for info in (self.scale, self.tensor_scale) if info is not None]

    @property
    def has_scale(self) -> bool:
        """Return whether the values, after ``make``, have a scale that belongs to this weight alone."""
        return self.scale is not None and not self.shared and (self.grid is not None or self.make is None)

    @property
    def scale_name(self) -> str:
        """Return the name of the stored scale, or the name that fp8moe gives a scale that fp8moe computes."""
        return self.name.scale if self.scale is None or self.make is not None else self.scale.name

    def specs(self) -> Layout:
        """Return dtype and shape of the tensors that this weight is written as, by name: values and, if any, scale."""
        if self.layout is not None:
            return self.layout
        specs = {self.name.text: TensorSpec(self.dtype, self.shape)}
        return specs if self.grid is None else specs | {self.name.scale: TensorSpec(self.scale_dtype, self.grid)}

    def value(self, codes: Tensor, scale: Tensor | None, *tensor_scale: Tensor) -> Tensor | FP8Tensor:
        """Return the value of one matrix, given its codes and its scales."""
        if self.make is not None:
            return self.make(codes, scale, *tensor_scale)
        return codes if self.grid is None else FP8Tensor(codes, as_float(scale).reshape(self.grid[-2:]))

    def seen(
        self, function: Callable[[Any], Tensor | FP8Tensor | tuple[Tensor, ...]], dtype: str, **changes: Any
    ) -> "StoredWeight":
        """Return a view of this weight that applies ``function`` to the value of each matrix.

        dtype: the dtype of the view. changes: other fields to replace.
        """
        value = self.value
        return self._replace(make=lambda *stored: function(value(*stored)), dtype=dtype, **changes)

    def pieces(
        self, reader: Reader, part: tuple[slice, ...] | None = None
    ) -> Iterator[tuple[int | None, Tensor | FP8Tensor]]:
        """Yield (index, values) for each expert of fused experts, or once (None, values) for any other weight.

        part: slices of the values to read; the scale of an FP8Tensor is always whole. index: the expert's index within
        ``part``. Fused experts can take gigabytes, so memory holds one expert at a time.
        """
        part = part or tuple(slice(0, size) for size in self.shape)
        own_scale = None if self.shared else self.scale
        if len(self.shape) < 3:
            scales = [own_scale and reader.read(own_scale), *([self._factor(reader)] if self.tensor_scale else [])]
            yield None, self._piece(reader, (), part, *scales)
            return
        if not math.prod(self.shape):
            return
        first, *inner = part
        by_expert = own_scale is not None and own_scale.shape[:1] == self.shape[:1]
        scale = own_scale and reader.read(own_scale, (first,) if by_expert else ())
        if scale is not None and not by_expert and self.make is None and self.grid is not None:
            scale, by_expert = scale.reshape(self.grid)[first], True  # dimensions of size 1 may differ
        for place, expert in enumerate(range(first.start, first.stop)):
            yield place, self._piece(reader, (expert,), tuple(inner), scale[place] if by_expert else scale)

    def whole(self, reader: Reader) -> Tensor:
        """Read and return all values of a weight that has no scale."""
        values = [value for _, value in self.pieces(reader)]
        return torch.stack(values) if len(self.shape) > 2 else values[0]

    def _factor(self, reader: Reader) -> Tensor:
        """Return the tensor scale, float32 (1,)."""
        value = reader.read(self.tensor_scale).double().view(1)
        return (1 / value if self.tensor_scale.name.endswith(GLOBAL_SCALE) else value).float()

    def _piece(
        self, reader: Reader, at: tuple[int, ...], part: tuple[slice, ...], *scales: Tensor | None
    ) -> Tensor | FP8Tensor:
        """Return a part of a matrix; without ``make``, only that part is read. at: the matrix's index in the codes."""
        if self.make is None:
            return self.value(reader.read(self.codes, (*at, *part)), *scales)
        value = self.make(reader.read(self.codes, at), *scales)
        if isinstance(value, FP8Tensor):
            return value._replace(data=value.data[part])
        return value[part] if isinstance(value, Tensor) else value


class Format(NamedTuple):
    """How the weights of a checkpoint are quantized, as `find_format` returns it.

    name: "fp8-block", "fp8-block-ue8m0", "fp8-tensor", "fp8-channel", "fp8-e5m2", "mxfp8", "mxfp4", "nvfp4", "int4",
        "int8", "w4a8", "bf16" (nothing is quantized) or "unknown". If a checkpoint has several formats, this is
        the format of its experts, or else of its linears.
    bits: bits of each weight; 16 if unquantized.
    scales: which values share a scale: "128x128", "tensor", "channel", "1x32"...; "none" if unquantized.
    exact: whether 128x128 blocks can hold exactly the same values.
    loads: whether `load_model` and `load_fp8_checkpoint` accept the checkpoint.
    reason: one sentence that tells how it loads, or why it does not and what to do.
    """

    name: str
    bits: int
    scales: str
    exact: bool
    loads: bool
    reason: str


class Weights(NamedTuple):
    """The weights of a checkpoint, in the order of its files.

    stored: every tensor, except that a scale is left out if it belongs to a single weight; a scale that all experts
    share is listed. unused: names of static scales of activations and of the KV cache. declared: the first declaration
    of quantization in the configuration, or None. interleaved: whether config.json is of a model whose experts have
    gate and up rows interleaved.
    """

    checkpoint: Checkpoint
    stored: list[StoredWeight]
    format: Format
    unused: set[str]
    declared: Declared | None
    interleaved: bool

    @property
    def quantized(self) -> list[StoredWeight]:
        """Return the weights that are stored as FP8 codes or packed integers."""
        return [weight for weight in self.stored if weight.coded]

    def check(self, what: str) -> None:
        """Raise CheckpointError if the format does not load or a shard cannot be read. what: begins the message.

        The reason why the format does not load is the first problem in the error. If a shard cannot be read, tensors
        that a model would miss are not listed: they may be in that shard.
        """
        refusals = [] if self.format.loads else [self.format.reason]
        if self.format.name == "int4" and self.format.loads and not self.checkpoint.incomplete:
            refusals += int4_problems(self)
        if refusals or self.checkpoint.incomplete:
            raise CheckpointError(what, [*refusals, *self.checkpoint.problems])


def int4_layout(codes: TensorInfo, scale: TensorInfo | None) -> tuple[str, tuple[int, ...]] | None:
    """Return the method whose layout codes in INT4 and their scale have, and the values' shape (..., N, K); or None.

    "compressed-tensors" has eight of K in an integer, lowest bits first, and "gptq" has that transposed. "awq" has
    (K, N/8), with eight of N in an integer, the even ones first. "w4afp8" has two of K in a byte, in two's complement.
    The other three store integers plus 8.
    """
    if scale is None or scale.dtype not in ("F32", "BF16", "F16") or len(codes.shape) not in (2, 3):
        return None
    *lead, rows, columns = codes.shape
    groups, shapes = INT4_GROUPS, {}
    if codes.dtype == "I32" and codes.name.endswith(_QWEIGHT) and not lead:
        shapes = {"gptq": (columns, 8 * rows), "awq": (8 * columns, rows)}
    elif codes.dtype == "I32" and codes.name.endswith(".weight_packed"):
        shapes = {"compressed-tensors": (*lead, rows, 8 * columns)}
    elif codes.dtype == "I8" and scale.name.endswith(SCALE) and not lead:
        groups, shapes = (BLOCK,), {"w4afp8": (rows, 2 * columns)}
    for method, shape in shapes.items():
        grids = [(*shape[:-1], shape[-1] // group) for group in groups if shape[-1] % group == 0]
        if scale.shape in [grid[::-1] if codes.name.endswith(_QWEIGHT) else grid for grid in grids]:
            return method, shape
    return None


def int4_problems(weights: Weights) -> list[str]:
    """List a tensor of GPTQ or AWQ that says that codes are not integers plus 8, in groups of adjacent columns."""
    checkpoint, expected = weights.checkpoint, {}
    first = all(content.get("checkpoint_format") != "gptq_v2" for content in checkpoint.declarations.values())
    for weight in weights.quantized:
        if weight.kind == "int4" and weight.codes.name.endswith(_QWEIGHT):
            (method, (_, columns)), groups = int4_layout(weight.codes, weight.scale), weight.scale.shape[0]
            zero = b"\x77" if method == "gptq" and first else b"\x88"  # GPTQ's first version stores 8 less one
            for end, values in zip(
                _BESIDE,
                (
                    torch.tensor([int.from_bytes(4 * zero, signed=True)], dtype=torch.int32, device="cpu"),
                    torch.arange(columns, dtype=torch.int32, device="cpu") // (columns // max(groups, 1) or 1),
                ),
                strict=True,
            ):
                info = checkpoint.tensors.get(weight.codes.name.removesuffix(_QWEIGHT[1:]) + end)
                if info is not None:
                    expected[info] = values
    whats = dict(zip(_BESIDE, ("zero points", "an order of columns of its own"), strict=True))
    return [
        f"{info.name}: INT4 with {whats[info.name.rpartition('.')[2]]}, which fp8moe does not run"
        for info, values in checkpoint.read_unmapped(expected)
        if expected[info].numel() not in (1, values.numel()) or bool((values != expected[info]).any())
    ][:1]


def is_interleaved(config: dict) -> bool:
    """Return whether a configuration, or one nested in it, is of a model with gate and up of experts interleaved."""
    return any(content.get("model_type") in [*_IN_TURNS] for _, content in sections(config))  # a type may be unhashable


def experts_of_their_own(config: dict) -> str | None:
    """Return why fp8moe cannot run the experts of the model with this configuration, or None if it can."""
    kinds = [content.get("model_type") for _, content in sections(config)]
    name = next((name for kind, name in _OF_THEIR_OWN.items() if kind in kinds), None)  # a kind may be unhashable
    if name is None:
        return None
    return f"the experts of {name} scale their input by the router and are stored transposed, which fp8moe does not run"


def find_format(directory: str | os.PathLike) -> Format:
    """Return how the weights of a checkpoint are quantized, and whether it loads.

    directory: the checkpoint's directory, or its name on the Hugging Face Hub, from which it is then downloaded.
    Raises CheckpointError if there is no checkpoint in ``directory``.
    """
    return open_weights(directory).format


def open_weights(directory: str | os.PathLike) -> Weights:
    """Return the weights of a checkpoint, reading only headers and JSON files.

    Raises CheckpointError if there is no checkpoint in ``directory``.
    """
    checkpoint = open_checkpoint(directory)
    declarations = [declared(where, content) for where, content in checkpoint.declarations.items()]
    first = declarations[0] if declarations else None
    stored, unused = _paired(checkpoint, first)
    found, in_turns = _format(checkpoint, declarations, stored), is_interleaved(checkpoint.config)
    return Weights(checkpoint, stored, found, unused, first, in_turns)


# Weights and their scales.


def _paired(checkpoint: Checkpoint, declaration: Declared | None) -> tuple[list[StoredWeight], set[str]]:
    """Parse all names and pair each weight with its scale; return weights, and the names of unused static scales."""
    tensors = checkpoint.tensors
    names = {text: parse(text, len(info.shape)) for text, info in tensors.items()}
    stored, own_scales = [], set()
    for text, info in tensors.items():
        stem, _, end = text.rpartition(".")
        if f"{text.removesuffix('_shape')}_packed" in tensors or (end in _BESIDE and f"{stem}{_QWEIGHT}" in tensors):
            continue  # the shape of packed values, which codes and scales tell; what `Weights.check` reads
        name = _weight_of(names[text], info, tensors)
        scale = None if name is None else next(filter(tensors.__contains__, scale_spellings(name, text)), None)
        if name is None:
            stored.append(StoredWeight(names[text], info, None, None, info.dtype, info.shape))
            continue
        weight = StoredWeight(
            name=name,
            codes=info,
            scale=None if scale is None else tensors[scale],
            scale_dtype="F32" if scale is None else tensors[scale].dtype,
            kind=None,
            dtype=info.dtype,
            shape=info.shape,
            coded=True,
            transposed=_is_transposed(name, info.shape, tensors),
            shared=scale is not None and not is_own_scale(name, scale),
        )
        kind = _kind(weight, declaration)
        weight = weight if kind is None else weight._replace(kind=kind, shape=_values_shape(weight))
        if kind == "nvfp4":
            found = filter(tensors.__contains__, (name.text + suffix for suffix in TENSOR_SCALES))
            weight = weight._replace(tensor_scale=tensors.get(next(found, "")))
        stored.append(weight)
        if scale is not None and not weight.shared:
            own_scales |= {scale} if weight.tensor_scale is None else {scale, weight.tensor_scale.name}
    unused = {text for text, info in tensors.items() if math.prod(info.shape[1:]) == 1 and is_unused_scale(text)}
    left = [weight for weight in stored if weight.codes.name not in own_scales]
    if not checkpoint.incomplete:  # a scale of no weight is a parameter of the model
        left = [
            one._replace(name=one.name._replace(role=OTHER))
            if one.name.text.endswith(".scale") and one.dtype in FLOATS
            else one
            for one in left
        ]
    return left, unused


def _weight_of(name: Name, info: TensorInfo, tensors: Mapping[str, TensorInfo]) -> Name | None:
    """Return the name of the weight whose codes a tensor holds, or None if the tensor holds no codes."""
    if info.dtype in (FP8, E5M2):
        return None if is_scale_beside(name.text, tensors) else name
    text = weight_of_codes(name.text, tensors)
    if text is not None:
        return parse(text)
    return name if info.dtype in ("I8", "U8", "I32", "U32") and name.role == WEIGHT and len(info.shape) > 1 else None


def _is_transposed(name: Name, shape: tuple[int, ...], tensors: Mapping[str, TensorInfo]) -> bool:
    """Return whether fused experts are stored (E, K, N): gate_up then has as many rows as down has columns."""
    if name.expert is not None or len(shape) != 3 or name.projection not in (GATE_UP, DOWN):
        return False
    pair = [tensors.get(f"{name.module}.{projection}") for projection in (GATE_UP, DOWN)]
    if None in pair or any(len(info.shape) != 3 for info in pair):
        return False
    (_, rows, columns), (_, down_rows, down_columns) = (info.shape for info in pair)
    return rows == down_columns and columns == 2 * down_rows


def _values_shape(weight: StoredWeight) -> tuple[int, ...]:
    shape = weight.codes.shape
    if weight.codes.dtype == E5M2:
        return shape
    if weight.codes.dtype == FP8:
        *lead, rows, columns = shape
        return (*lead, columns, rows) if weight.transposed else shape
    if found := int4_layout(weight.codes, weight.scale):
        return found[1]
    lead = shape[: -2 if weight.codes.name.endswith(GROUPS) else -1]
    return *lead, (8 if weight.codes.dtype == "I32" else 2) * math.prod(shape[len(lead) :])


def _kind(weight: StoredWeight, declaration: Declared | None) -> str | None:
    """Return a weight's kind, a key of `KINDS` that fits its scale. If several fit, prefer one that is declared."""
    shape, scale = weight.codes.shape, weight.scale
    if weight.codes.dtype != FP8:
        return _other_kind(weight.codes, scale)
    if scale is None or len(shape) not in (2, 3):
        return None
    if weight.shared:
        return "fp8-block"
    fitting = [kind for kind in FP8_KINDS if fits(weight, kind)]
    preferred = [kind for kind in fitting if declaration and declaration.kinds and kind in declaration.kinds]
    return next(iter(preferred or fitting), None)


def fits(weight: StoredWeight, kind: str) -> bool:
    """Return whether the scale of FP8 codes has a shape and dtype that this kind allows."""
    scale, matrices = weight.scale, weight.name.matrices if len(weight.codes.shape) == 3 else 1
    *lead, rows, columns = weight.codes.shape
    exponents = scale.dtype in ("U8", "F8_E8M0")
    if kind == "fp8-block":
        blocks = (*lead, ceil_div(rows, BLOCK), ceil_div(columns, BLOCK))
        return fits_scale(scale.shape, blocks if weight.transposed else scale_grid(matrices, weight.codes.shape))
    if kind == "fp8-tensor":
        sizes = [(), tuple(lead), (*lead, matrices)]
        return scale.dtype != "U8" and any(fits_scale(scale.shape, size) for size in sizes)
    if kind == "fp8-channel":
        each = (*lead, columns, 1) if weight.transposed else (*lead, rows, 1)
        flat = (*lead, 1, columns) if weight.transposed else each
        return scale.dtype != "U8" and scale.shape in (each, each[:-1], flat)
    return exponents and not weight.transposed and scale.shape == (*lead, rows, ceil_div(columns, MX_BLOCK))


def _other_kind(codes: TensorInfo, scale: TensorInfo | None) -> str | None:
    """Return the kind of codes that are not E4M3; None if they have the wrong number of dimensions for matrices."""
    if codes.dtype == E5M2:
        return "fp8-e5m2"
    in_groups = codes.name.endswith(GROUPS)
    if len(codes.shape) not in ((4,) if in_groups else (2, 3)):
        return None
    if scale is None:
        return "int4-other"
    if scale.dtype == FP8 and codes.dtype in ("I8", "U8"):
        return "nvfp4"
    *rows, columns = codes.shape
    if int4_layout(codes, scale) is not None:
        return "int4"
    if codes.dtype in ("I8", "U8") and scale.dtype in ("F8_E8M0", "U8"):
        grouped = tuple(rows) if in_groups else (*rows, 2 * columns // MX_BLOCK)
        if scale.shape == grouped and 2 * columns % MX_BLOCK == 0 and (not in_groups or 2 * columns == MX_BLOCK):
            return "mxfp4"
    if codes.dtype == "I8":
        if scale.shape[-2:] == (rows[-1], ceil_div(2 * columns, BLOCK)):
            return "w4a8"
        if math.prod(scale.shape) <= math.prod(rows):
            return "int8"
    return "int4-other"


# The format of a whole checkpoint.


def _format(checkpoint: Checkpoint, declarations: list[Declared], stored: list[StoredWeight]) -> Format:
    weights = [weight for weight in stored if weight.coded]
    kinds = Counter(weight.kind for weight in weights)
    experts = Counter(weight.kind for weight in weights if weight.is_expert)
    named = of_tensors = next((kind for kind, _ in (experts.most_common() or kinds.most_common()) if kind), None)
    if named is None and declarations and declarations[0].kinds:
        named = next(iter(sorted(declarations[0].kinds)))
    problem = _problem(checkpoint, declarations, weights)
    if problem is None and not weights and not (checkpoint.incomplete and named):
        said = f"{_prefix(declarations)}but no weight is quantized" if declarations else "no weight is quantized"
        return Format("bf16", 16, "none", True, True, said)
    if problem is None and of_tensors is None and not checkpoint.incomplete:
        codes, scale = weights[0].codes, weights[0].scale
        problem = f"nothing says how the codes of {codes.name} are scaled: no tensor is its scale"
        if scale is not None:
            problem = f"{scale.name}: shape {scale.shape} for {codes.name} {codes.shape} is no scale that fp8moe knows"
    loads = problem is None
    if loads:
        others = [KINDS[kind].words for kind in kinds if kind and kind != named]
        mixed = f"; other weights are {' and '.join(others)}" if others else ""
        problem = f"{_prefix(declarations)}{KINDS[named].words if named else 'FP8'}{mixed}"
    if named is None:
        return Format("bf16" if loads else "unknown", 16, "none", loads, loads, problem)
    scales = {weight.scale.dtype for weight in weights if weight.scale is not None}
    exponents = scales == {"F8_E8M0"} or any(declaration.power_of_two for declaration in declarations)
    name = "fp8-block-ue8m0" if named == "fp8-block" and exponents else named.removesuffix("-other")
    exact = all(KINDS[other].exact for other in kinds if other)
    return Format(name, KINDS[named].bits, KINDS[named].scales, exact, loads, problem)


def _problem(checkpoint: Checkpoint, declarations: list[Declared], weights: list[StoredWeight]) -> str | None:
    """Return why the checkpoint's format does not load, judged by the configuration and the headers, or None."""
    for declaration in declarations:
        if declaration.refusal is not None:
            return f"{declaration.where}: {declaration.refusal}"
    for first, second in zip(declarations, declarations[1:], strict=False):
        if first.kinds and second.kinds and not first.kinds & second.kinds:
            return f"{first.where} says {first.method}, but {second.where} says {second.method}"
    for weight in weights:
        if weight.kind and KINDS[weight.kind].refusal:
            kind = KINDS[weight.kind]
            return f"{_prefix(declarations)}{kind.words} ({weight.codes.name}), {kind.refusal}"
        if weight.kind in _PROBLEMS:
            problem = _PROBLEMS[weight.kind](weight, checkpoint)
            if problem is not None:
                return f"{_prefix(declarations)}{problem}"
    refusal = experts_of_their_own(checkpoint.config)
    if refusal is not None:
        for weight in weights:
            if weight.is_expert:
                return f"{weight.codes.name}: {refusal}"
    for weight in weights:
        if weight.kind is None and weight.codes.dtype != FP8:
            return f"{weight.codes.name}: {weight.codes.dtype} {weight.codes.shape}, expected the codes of matrices"
    for weight in weights:
        for declaration in declarations:
            if declaration.kinds is not None and weight.kind and weight.kind not in declaration.kinds:
                return (
                    f"{declaration.where} says {declaration.method}, but {weight.codes.name} is "
                    f"{KINDS[weight.kind].words}"
                )
    problems = (_gate_up_problem(weight, checkpoint) for weight in weights if weight.name.projection == GATE_UP)
    return next(filter(None, problems), None)


def _int4_problem(weight: StoredWeight, checkpoint: Checkpoint) -> str | None:
    """Return why fp8moe does not run weights in INT4, or None."""
    text = weight.name.text
    if not weight.is_expert:
        return f"{weight.codes.name}: INT4 in a linear, which fp8moe does not run; it keeps four bits in experts only"
    for suffix, what in (("_zero_point", "zero points"), ("_g_idx", "an order of columns of its own")):
        if text + suffix in checkpoint.tensors:
            return f"{text}{suffix}: INT4 with {what}, which fp8moe does not run"
    zeros = f"{weight.codes.name.removesuffix(_QWEIGHT)}.qzeros"
    if int4_layout(weight.codes, weight.scale)[0] != "awq" or zeros in checkpoint.tensors or checkpoint.incomplete:
        return None
    return f"{zeros}: missing, expected the zero points of AWQ"


def _nvfp4_problem(weight: StoredWeight, checkpoint: Checkpoint) -> str | None:
    """Return why fp8moe does not run weights in NVFP4, or None."""
    codes, scale, whole, text = weight.codes, weight.scale, weight.tensor_scale, weight.name.text
    if len(weight.shape) > 2:
        return f"{codes.name}: fused experts in NVFP4, which fp8moe does not run"
    rows, columns = weight.shape
    if columns % MX_BLOCK:
        return f"{codes.name}: NVFP4 of {columns} columns, expected a multiple of {MX_BLOCK}"
    if scale.shape != (rows, columns // NVFP4_GROUP):
        return f"{scale.name}: shape {scale.shape}, expected {(rows, columns // NVFP4_GROUP)} for {codes.name}"
    of_inputs = f"{text.removesuffix('weight')}pre_quant_scale"
    if of_inputs in checkpoint.tensors:
        return f"{of_inputs}: NVFP4 with a scale of inputs for each channel, which fp8moe does not run"
    if whole is None:
        names = " or ".join(text + suffix for suffix in TENSOR_SCALES)
        return None if checkpoint.incomplete else f"{names}: missing, expected the tensor scale of NVFP4"
    if whole.dtype not in ("F32", "F64") or math.prod(whole.shape) != 1:
        return f"{whole.name}: {whole.dtype} {whole.shape}, expected one tensor scale in F32"
    return None


_PROBLEMS = {"int4": _int4_problem, "nvfp4": _nvfp4_problem}


def _gate_up_problem(weight: StoredWeight, checkpoint: Checkpoint) -> str | None:
    """Return why gate and up of fused experts cannot be told apart, or None."""
    name = weight.codes.name
    if len(weight.shape) != 3:
        return None
    rows = weight.shape[1]
    if rows % 2:
        return f"{name}: shape {weight.codes.shape}, expected as many rows of gate as of up"
    if weight.transposed and weight.kind == "fp8-block" and rows // 2 % BLOCK:
        return f"{name}: gate and up, of {rows // 2} columns each, share blocks of their scale"
    bias = checkpoint.tensors.get(weight.name.bias)
    if weight.interleaved:
        fits_bias = bias is None or bias.shape == weight.shape[:2]
        return None if fits_bias else f"{name}: with a bias {bias.shape}, expected {weight.shape[:2]}"
    if (bias is None and not is_interleaved(checkpoint.config)) or _is_concatenated(weight, checkpoint):
        return None
    kind = KINDS[weight.kind].words if weight.kind else "FP8"
    return (
        f"{name}: {kind}, of experts with biases, and nothing says whether rows of gate and up take turns, as in "
        f"{INTERLEAVED}; take the MXFP4 checkpoint, or quantize the bfloat16 one (fp8moe quantize)"
    )


def _is_concatenated(weight: StoredWeight, checkpoint: Checkpoint) -> bool:
    """Return whether a fused weight is known to have all gate rows before the up rows, as fp8moe writes it.

    Either the configuration says so, or there is no configuration: a module that is no transformers model was saved.
    """
    said = any(content.get(GATE_UP_LAYOUT) == CONCATENATED for content in checkpoint.declarations.values())
    return (said or not checkpoint.config) and weight.kind in ("fp8-block", "fp8-channel") and not weight.transposed


def _prefix(declarations: list[Declared]) -> str:
    return f"{declarations[0].method.partition(':')[0]}: " if declarations else ""
