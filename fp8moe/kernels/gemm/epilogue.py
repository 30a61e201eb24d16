"""What the GEMM does with its sums: `Columns`, and for each cuda/epilogue_*.cuh its constants and ``Output``."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch

from fp8moe.kernels.activation import Activation
from fp8moe.quant.formats import SCALE_DEFINES
from fp8moe.runtime.peer_table import peer_defines

Fields = tuple[tuple[str, type], ...]

_BIAS_KINDS = {None: 0, torch.bfloat16: 1, torch.float32: 2}


def _addresses(names: Iterable[str]) -> Fields:
    """Fields that are addresses or pitches."""
    return tuple((name, ctypes.c_int64) for name in names)


class Columns(NamedTuple):
    """What the sums of each output feature get before the epilogue, all kinds of it.

    channel_scales: whether they are multiplied by a weight scale, in place of one for 128x128. bias_dtype: bfloat16 or
    float32 of what is added; None: nothing.
    """

    channel_scales: bool = False
    bias_dtype: torch.dtype | None = None

    @property
    def bytes(self) -> int:
        """Bytes of an output feature's scale and bias."""
        return 4 * self.channel_scales + (0 if self.bias_dtype is None else self.bias_dtype.itemsize)

    @property
    def constants(self) -> dict[str, int]:
        return {"CHANNEL": int(self.channel_scales), "BIAS": _BIAS_KINDS[self.bias_dtype]}


class Epilogue:
    """What becomes of the sums, in the CUDA struct that has the class's name.

    out_dtype: of the result. header: the file of the struct. fields: of its ``Output``, addresses and pitches first.
    gated: whether the weights are those of gate and up. defines: macros. constants: compile-time constants.
    values: the fields that do not change from call to call. kind: the epilogue for any number of tokens.
    """

    out_dtype: torch.dtype
    header: ClassVar[str]
    fields: Fields
    gated: ClassVar[bool] = False
    defines: tuple = ()
    values: dict[str, float] = {}  # noqa: RUF012 (never changed)

    @property
    def constants(self) -> dict[str, int]:
        return {"OUT_FLOAT32": int(self.out_dtype == torch.float32)}

    @property
    def kind(self) -> Epilogue:
        return self


@dataclass(frozen=True)
class PlainStore(Epilogue):
    """The sums in bfloat16 or float32."""

    out_dtype: torch.dtype

    header: ClassVar[str] = "epilogue_store.cuh"
    fields: ClassVar[Fields] = _addresses(("data", "pitch"))


@dataclass(frozen=True)
class AddAndStore(PlainStore):
    """``sums + c``, c of the result's dtype."""

    header: ClassVar[str] = "epilogue_add.cuh"
    fields: ClassVar[Fields] = _addresses(("data", "pitch", "c", "c_pitch"))


@dataclass(frozen=True)
class AddLowRank(PlainStore):
    """``sums + ranks @ factors[e].T`` in bfloat16 or float32, for rows of group e. rank: a multiple of 16."""

    rank: int = 0

    header: ClassVar[str] = "epilogue_low_rank.cuh"
    fields: ClassVar[Fields] = _addresses(("data", "pitch", "ranks", "factors"))

    @property
    def constants(self) -> dict[str, int]:
        return super().constants | {"RANK": self.rank}


@dataclass(frozen=True)
class SwigluQuantize(Epilogue):
    """A SwiGLU of gate and up, quantized 1x128."""

    activation: Activation

    out_dtype: ClassVar[torch.dtype] = torch.float8_e4m3fn
    header: ClassVar[str] = "epilogue_swiglu.cuh"
    fields: ClassVar[Fields] = (
        *_addresses(("data", "pitch", "scale", "scale_pitch")),
        *((name, ctypes.c_float) for name in ("limit", "alpha")),
    )
    gated: ClassVar[bool] = True
    defines: ClassVar[tuple] = SCALE_DEFINES

    @property
    def constants(self) -> dict[str, int]:
        return {"SWIGLU_FORM": self.activation.form}

    @property
    def values(self) -> dict[str, float]:
        return {"limit": self.activation.limit or 0.0, "alpha": self.activation.alpha or 0.0}


@dataclass(frozen=True)
class PeerStore(Epilogue):
    """Each row in the memory of the GPU whose token it is, or of all.

    peers: how many GPUs. each: assignments of a GPU's tokens; of all tokens where rows go `to_all`.
    """

    out_dtype: torch.dtype
    peers: int
    each: int
    to_all: bool = False

    header: ClassVar[str] = "epilogue_peers.cuh"

    @property
    def fields(self) -> Fields:
        """Targets, the assignment of each row, and the meeting (`runtime.peer_table`)."""
        targets = [f"peer_{i}" for i in range(self.peers)]
        meeting = [f"meeting_{i}" for i in range(self.peers + 1)]
        return *_addresses((*targets, "assignments", *meeting)), ("each", ctypes.c_int)

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        return (*peer_defines(self.peers), ("TO_ALL", int(self.to_all)))

    @property
    def kind(self) -> PeerStore:
        return replace(self, each=0)

    @property
    def values(self) -> dict[str, int]:
        return {"each": self.each}
