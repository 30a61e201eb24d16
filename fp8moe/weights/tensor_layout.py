"""What a checkpoint of a model holds: which part of which tensor, in which shard, and how much of it is FP8."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor

from fp8moe.quant.formats import has_channel_scales
from fp8moe.weights.expert_names import DOWN, GATE, GATE_UP, UP, ExpertNames, parse_fused
from fp8moe.weights.formats import (
    CHANNEL_SCALE,
    DTYPE_NAMES,
    FLOATS,
    FP8,
    SCALE,
    Layout,
    TensorSpec,
    scale_dtype,
    scale_name,
)
from fp8moe.weights.read import SINGLE
from fp8moe.weights.sharded import Box, whole

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_SHOWN = 5


@dataclass(frozen=True)
class StoredTensor:
    """A tensor to be written, of this name: which box of which of the model's tensors, and in which dtype.

    single: whether it is the matrix of one expert, stored without the dimension of experts.
    """

    name: str
    source: str
    box: Box
    single: bool
    dtype: str  # of safetensors

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(len, self.box[1:] if self.single else self.box))

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.dtype, self.shape)

    @property
    def slices(self) -> Iterator[Box]:
        """The box in parts that follow each other in the file: fused experts, which can take gigabytes, one by one."""
        if len(self.box) < 3:
            yield self.box
            return
        for index in self.box[0]:
            yield range(index, index + 1), *self.box[1:]


def groups(
    tensors: Mapping[str, Tensor], scales: set[str], expert_names: ExpertNames | None, scale_format: str
) -> Iterator[list[StoredTensor]]:
    """Each weight with its scale, under their names in the checkpoint; other tensors by themselves.

    tensors: those of the model. scales: which of them belong to FP8 weights. expert_names: of experts stored one by
    one, None to store them fused.
    """
    for name, value in tensors.items():
        if name in scales:
            continue
        scale = scale_name(name)
        single = expert_names is not None and _splits(name, tensors)
        own_names = _names_one_by_one(name, value) if single else [name]
        for index, own_name in enumerate(own_names):
            part_name = own_name if expert_names is None else expert_names.stored(own_name)
            box = _box(value, index, len(own_names)) if single else whole(value.shape)
            group = [StoredTensor(part_name, name, box, single, DTYPE_NAMES[value.dtype])]
            if scale in scales:
                box = _box(tensors[scale], index, len(own_names)) if single else whole(tensors[scale].shape)
                suffix = CHANNEL_SCALE if has_channel_scales(value, tensors[scale]) else SCALE
                group.append(StoredTensor(part_name + suffix, scale, box, single, scale_dtype(scale_format)))
            yield group


def _splits(name: str, tensors: Mapping[str, Tensor]) -> bool:
    """Whether this is a weight of fused experts that can be stored one by one.

    Not so with biases, which GPT-OSS has fused.
    """
    fused = parse_fused(name, tuple(tensors[name].shape))
    if fused is None or any(f"{fused.module}.{projection}_bias" in tensors for projection in (GATE_UP, UP, DOWN)):
        return False
    gate_up, up, down = (tensors.get(f"{fused.module}.{projection}") for projection in (GATE_UP, UP, DOWN))
    if down is None or (gate_up is None) == (up is None):
        return False
    count, hidden, size = down.shape
    return gate_up.shape == (count, 2 * size, hidden) if up is None else up.shape == (count, size, hidden)


def _names_one_by_one(name: str, value: Tensor) -> list[str]:
    module, fused = parse_fused(name, tuple(value.shape))
    projections = (GATE, UP) if fused == GATE_UP else (fused,)
    return [f"{module}.{expert}.{part}.weight" for expert in range(value.shape[0]) for part in projections]


def _box(fused: Tensor, index: int, count: int) -> Box:
    """One of the ``count`` matrices, one expert's after the other's, that make up a fused tensor."""
    experts, rows, columns = fused.shape
    expert, matrix = divmod(index, count // experts)
    size = rows * experts // count
    return range(expert, expert + 1), range(matrix * size, (matrix + 1) * size), range(columns)


def split_into_shards(groups: Iterable[list[StoredTensor]], max_shard_size: int) -> dict[str, list[StoredTensor]]:
    """The tensors of each file; a group stays together."""
    by_name = {group[0].name: group for group in groups}
    split = split_state_dict_into_shards_factory(
        by_name,
        get_storage_size=lambda group: sum(tensor.spec.nbytes for tensor in group),
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    files = split.filename_to_tensors or {SINGLE: []}
    return {file: [tensor for name in names for tensor in by_name[name]] for file, names in files.items()}


def unquantized_matrices(layout: Layout) -> dict[str, int]:
    """Parameters of matrices that are not FP8, largest first, by name with * for numbers. layout: without scales."""
    sizes = Counter()
    for name, spec in layout.items():
        if spec.dtype in FLOATS and len(spec.shape) > 1:
            sizes[_NUMBER.sub("*", name)] += math.prod(spec.shape)
    return dict(sizes.most_common())


def fractions(sizes: Mapping[str, int], total: int) -> str:
    """The first of these sizes, each as a percentage of ``total``."""
    lines = [f"{name} {size / max(total, 1):.1%}" for name, size in sizes.items()]
    shown = ", ".join(lines[:_SHOWN])
    return f"{shown}, and {len(lines) - _SHOWN} more" if lines[_SHOWN:] else shown or "nothing"


def low_fp8_fraction(layout: Layout) -> str | None:
    """A warning if FP8 weights have less than half of the parameters in matrices, otherwise None."""
    fp8 = {name: math.prod(spec.shape) for name, spec in layout.items() if spec.dtype == FP8}
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
