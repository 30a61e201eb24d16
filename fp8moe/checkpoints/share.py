"""How much of a checkpoint is FP8."""

import math
import re
import warnings
from collections import Counter
from collections.abc import Mapping

from fp8moe.checkpoints.files import FLOATS, FP8
from fp8moe.checkpoints.names import scale_name
from fp8moe.checkpoints.untrusted import printable

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_SHOWN = 5


def unquantized_matrices(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, int]:
    """Parameters of matrices that are not FP8, largest first, by name with * for numbers.

    tensors: name -> (safetensors dtype, shape), without scales.
    """
    sizes = Counter()
    for name, (dtype, shape) in tensors.items():
        if dtype in FLOATS and len(shape) > 1:
            sizes[_NUMBER.sub("*", name)] += math.prod(shape)
    return dict(sizes.most_common())


def shares(sizes: Mapping[str, int], total: int) -> str:
    """The first of these, each with its share of ``total``."""
    lines = [f"{name} {size / max(total, 1):.1%}" for name, size in sizes.items()]
    shown = ", ".join(lines[:_SHOWN])
    return f"{shown}, and {len(lines) - _SHOWN} more" if lines[_SHOWN:] else shown or "nothing"


def warn_if_hardly_fp8(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """Warn if FP8 weights have less than half of the parameters in matrices. tensors: name -> (dtype, shape)."""
    fp8 = {name: math.prod(shape) for name, (dtype, shape) in tensors.items() if dtype == FP8}
    scales = {scale_name(name) for name in fp8}
    stayed = unquantized_matrices({name: entry for name, entry in tensors.items() if name not in scales})
    total = sum(fp8.values()) + sum(stayed.values())
    if 2 * sum(fp8.values()) < total:
        warnings.warn(
            printable(
                f"FP8 weights have only {sum(fp8.values()) / total:.1%} of the parameters in matrices; what stayed as "
                f"it is: {shares(stayed, total)}"
            ),
            stacklevel=3,
        )
