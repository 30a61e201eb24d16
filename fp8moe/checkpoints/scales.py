"""The values of scales: what no scale can be, found before anything is computed with it."""

from collections.abc import Iterable
from typing import BinaryIO

import torch
from torch import Tensor

from fp8moe.checkpoints.files import DTYPES, Checkpoint, TensorInfo


def value_problems(checkpoint: Checkpoint, names: Iterable[str]) -> list[str]:
    """The tensors among these scales, all of `SCALE_DTYPES`, that hold a NaN, an infinity, zero or a negative value.

    The scale of a block of zeros is positive, too. Memory holds one scale at a time: 1/16384 of its weight's elements.
    """
    problems, wanted = [], set(names)
    for file, tensors in checkpoint.by_file.items():
        if wanted.isdisjoint(tensors):
            continue
        with (checkpoint.directory / file).open("rb") as stream:
            start = 8 + int.from_bytes(stream.read(8), "little")
            for name in tensors.keys() & wanted:
                found = _no_scales(_read(stream, start, tensors[name]))
                if found:
                    problems.append(f"{name}: has {found}, expected scales that are finite and positive")
    return sorted(problems)


def _read(stream: BinaryIO, start: int, info: TensorInfo) -> Tensor:
    """A tensor's values, flat and in float32, without mapping the whole file as the safetensors library does."""
    stream.seek(start + info.begin)
    content = bytearray(stream.read(info.nbytes))
    return torch.frombuffer(content, dtype=DTYPES[info.dtype]).float() if content else torch.empty(0)


def _no_scales(values: Tensor) -> str:
    """How many values are NaN, infinite, zero or negative; empty if none is."""
    if ((values > 0) & (values < torch.inf)).all():
        return ""
    counts = {
        "NaN": values.isnan(),
        "infinite": values.isinf(),
        "zero": values == 0,
        "negative": (values < 0) & values.isfinite(),
    }
    numbers = [f"{count} {kind}" for kind, where in counts.items() if (count := int(where.sum()))]
    return f"{', '.join(numbers)} of {values.numel()} values"
