"""What a checkpoint of a model holds: each of its tensors as a box of one of the model's, and the shard it is in."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from fp8moe.checkpoints.files import DTYPE_NAMES, DTYPES, SINGLE
from fp8moe.checkpoints.names import DOWN, GATE, GATE_UP, UP, parse_fused, scale_name
from fp8moe.checkpoints.sharding import Box, whole
from fp8moe.checkpoints.spelling import Spelling


@dataclass(frozen=True)
class Entry:
    """One tensor to be written, of this name: which box of which of the model's tensors, and in which dtype.

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
    def layout(self) -> tuple[str, tuple[int, ...]]:
        return self.dtype, self.shape

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    @property
    def slices(self) -> Iterator[Box]:
        """The box in parts that follow each other in the file: fused experts, which can take gigabytes, one by one."""
        if len(self.box) < 3:
            yield self.box
            return
        for index in self.box[0]:
            yield range(index, index + 1), *self.box[1:]


def groups(
    stored: Mapping[str, Tensor], scales: set[str], spelling: Spelling | None, scale_dtype: str
) -> Iterator[list[Entry]]:
    """Each weight with its scale, under their names in the checkpoint; other tensors by themselves.

    stored: the tensors of the model. scales: which of them belong to FP8 weights. spelling: of experts one by one, None
    to store them fused.
    """
    for name, value in stored.items():
        if name in scales:
            continue
        scale = scale_name(name)
        single = spelling is not None and _splits(name, stored)
        own_names = _names_one_by_one(name, value) if single else [name]
        for index, own_name in enumerate(own_names):
            part_name = own_name if spelling is None else spelling.name(own_name)
            box = _box(value, index, len(own_names)) if single else whole(value.shape)
            group = [Entry(part_name, name, box, single, DTYPE_NAMES[value.dtype])]
            if scale in scales:
                box = _box(stored[scale], index, len(own_names)) if single else whole(stored[scale].shape)
                group.append(Entry(scale_name(part_name), scale, box, single, scale_dtype))
            yield group


def _splits(name: str, stored: Mapping[str, Tensor]) -> bool:
    """Whether this is a weight of fused experts that can be stored one by one.

    Not so in GPT-OSS, where weights are transposed and have biases.
    """
    fused = parse_fused(name, tuple(stored[name].shape))
    if fused is None or any(f"{fused[0]}.{projection}_bias" in stored for projection in (GATE_UP, UP, DOWN)):
        return False
    gate_up, up, down = (stored.get(f"{fused[0]}.{projection}") for projection in (GATE_UP, UP, DOWN))
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


def shards(groups: Iterable[list[Entry]], max_shard_size: int) -> dict[str, list[Entry]]:
    """Fill one shard after the other; a group stays together."""
    files, size = [[]], 0
    for group in groups:
        nbytes = sum(entry.nbytes for entry in group)
        if files[-1] and size + nbytes > max_shard_size:
            files.append([])
            size = 0
        files[-1] += group
        size += nbytes
    if len(files) == 1:
        return {SINGLE: files[0]}
    return {f"model-{i:05}-of-{len(files):05}.safetensors": entries for i, entries in enumerate(files, 1)}
