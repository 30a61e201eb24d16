"""What the GEMM does with its sums: for each cuda/epilogue_*.cuh its constants and the fields of its ``Output``."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from fp8moe.kernels.activation import Activation
from fp8moe.quant.formats import SCALE_DEFINES
from fp8moe.runtime.peer_table import peer_defines

Fields = tuple[tuple[str, type], ...]

_BIAS_KINDS = {None: 0, torch.bfloat16: 1, torch.float32: 2}


@dataclass(frozen=True)
class PlainStore:
    """``sums + bias`` in bfloat16 or float32. bias_dtype: bfloat16 or float32, None without a bias."""

    out_dtype: torch.dtype
    bias_dtype: torch.dtype | None = None

    header: ClassVar[str] = "epilogue_store.cuh"
    fields: ClassVar[Fields] = (("data", ctypes.c_int64), ("pitch", ctypes.c_int64), ("bias", ctypes.c_int64))
    gated: ClassVar[bool] = False  # whether the weights are those of gate and up
    defines: ClassVar[tuple] = ()
    values: ClassVar[dict[str, float]] = {}

    @property
    def kind(self) -> PlainStore:
        """The same for any number of tokens."""
        return self

    @property
    def constants(self) -> dict[str, int]:
        """Compile-time constants."""
        return {"OUT_FLOAT32": int(self.out_dtype == torch.float32), "BIAS": _BIAS_KINDS[self.bias_dtype]}


@dataclass(frozen=True)
class AddAndStore(PlainStore):
    """``sums + bias + c``, c of the result's dtype."""

    header: ClassVar[str] = "epilogue_add.cuh"
    fields: ClassVar[Fields] = (*PlainStore.fields, ("c", ctypes.c_int64), ("c_pitch", ctypes.c_int64))


@dataclass(frozen=True)
class AddLowRank(PlainStore):
    """``sums + ranks @ factors[e].T`` in bfloat16 or float32, for rows of group e. rank: a multiple of 16."""

    rank: int = 0

    header: ClassVar[str] = "epilogue_low_rank.cuh"
    fields: ClassVar[Fields] = tuple((name, ctypes.c_int64) for name in ("data", "pitch", "ranks", "factors"))

    @property
    def constants(self) -> dict[str, int]:
        """Compile-time constants."""
        return super().constants | {"RANK": self.rank}


@dataclass(frozen=True)
class SwigluQuantize:
    """A SwiGLU of gate and up, quantized 1x128."""

    activation: Activation

    out_dtype: ClassVar[torch.dtype] = torch.float8_e4m3fn
    header: ClassVar[str] = "epilogue_swiglu.cuh"
    fields: ClassVar[Fields] = (
        *((name, ctypes.c_int64) for name in ("data", "pitch", "scale", "scale_pitch")),
        *((name, ctypes.c_float) for name in ("limit", "alpha")),
    )
    gated: ClassVar[bool] = True
    defines: ClassVar[tuple] = SCALE_DEFINES

    @property
    def kind(self) -> SwigluQuantize:
        """The same for any number of tokens."""
        return self

    @property
    def constants(self) -> dict[str, int]:
        """Compile-time constants."""
        return {"SWIGLU_FORM": self.activation.form}

    @property
    def values(self) -> dict[str, float]:
        """The fields that do not change from call to call."""
        return {"limit": self.activation.limit or 0.0, "alpha": self.activation.alpha or 0.0}


@dataclass(frozen=True)
class PeerStore:
    """Each row in the memory of the GPU whose token it is, or of all.

    peers: how many GPUs. each: assignments of a GPU's tokens; of all tokens where rows go `to_all`.
    """

    out_dtype: torch.dtype
    peers: int
    each: int
    to_all: bool = False

    header: ClassVar[str] = "epilogue_peers.cuh"
    gated: ClassVar[bool] = False

    @property
    def fields(self) -> Fields:
        """Targets, the assignment of each row, and the meeting (`runtime.peer_table`)."""
        names = [*(f"peer_{i}" for i in range(self.peers)), "assignments"]
        names += [f"meeting_{i}" for i in range(self.peers + 1)]
        return (*((name, ctypes.c_int64) for name in names), ("each", ctypes.c_int))

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        return (*peer_defines(self.peers), ("TO_ALL", int(self.to_all)))

    @property
    def kind(self) -> PeerStore:
        """The same for any number of tokens."""
        return replace(self, each=0)

    @property
    def constants(self) -> dict[str, int]:
        """Compile-time constants."""
        return {"OUT_FLOAT32": int(self.out_dtype == torch.float32)}

    @property
    def values(self) -> dict[str, int]:
        """The field that does not change from call to call."""
        return {"each": self.each}


Epilogue = PlainStore | SwigluQuantize | PeerStore
