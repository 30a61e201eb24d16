"""Epilogues of the GEMM: `Columns`, and one class per cuda/sm90/epilogue_*.cuh with its macros and argument fields."""

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
    """Return ctypes fields of 64 bits with these names, which hold addresses and pitches."""
    return tuple((name, ctypes.c_int64) for name in names)


class Packing(NamedTuple):
    """How weights in four bits are stored: the format, the values along K that share a scale, and the scales' dtype."""

    format: str
    group: int
    scale_dtype: torch.dtype

    @property
    def constants(self) -> dict[str, int]:
        return {
            "PACKED": 1 + ("mxfp4", "int4", "nvfp4").index(self.format),
            "GROUP": self.group,
            "FLOAT32_SCALES": int(self.scale_dtype == torch.float32),
        }


class Columns(NamedTuple):
    """Operations on the sums of each output feature, applied before the epilogue.

    channel_scales: multiply by one weight scale per feature, instead of one per 128x128 block. bias_dtype: dtype of the
    bias to add, bfloat16 or float32, or None. packing: how the
    weights are stored if they have four bits.
    """

    channel_scales: bool = False
    bias_dtype: torch.dtype | None = None
    packing: Packing | None = None

    @property
    def bytes(self) -> int:
        """Bytes of channel scale and bias per output feature."""
        return 4 * self.channel_scales + (0 if self.bias_dtype is None else self.bias_dtype.itemsize)

    @property
    def constants(self) -> dict[str, int]:
        packing = {"PACKED": 0, "GROUP": 32, "FLOAT32_SCALES": 0} if self.packing is None else self.packing.constants
        return {"CHANNEL": int(self.channel_scales), "BIAS": _BIAS_KINDS[self.bias_dtype]} | packing


class Epilogue:
    """The last step of a GEMM: the CUDA struct with the same name as the class turns sums into results.

    out_dtype: dtype of the result. header: file that defines the struct. fields: fields of the struct's ``Output``,
    addresses and pitches first. gated: whether the weights are a gate_up projection. defines: macros.
    constants: compile-time constants. values: values of the fields that have the same value in every call.
    kind: the same epilogue, with fields that depend on the number of tokens set to 0.
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
    """Stores the sums in bfloat16 or float32."""

    out_dtype: torch.dtype

    header: ClassVar[str] = "epilogue_store.cuh"
    fields: ClassVar[Fields] = _addresses(("data", "pitch"))


@dataclass(frozen=True)
class AddAndStore(PlainStore):
    """Stores ``sums + c``, with c of the result's dtype."""

    header: ClassVar[str] = "epilogue_add.cuh"
    fields: ClassVar[Fields] = _addresses(("data", "pitch", "c", "c_pitch"))


@dataclass(frozen=True)
class AddLowRank(PlainStore):
    """Stores ``sums + ranks @ factors[e].T`` for the rows of group e, in bfloat16 or float32.

    ranks is (M, r), factors (E, N, r). rank: r, a multiple of 16.
    """

    rank: int = 0

    header: ClassVar[str] = "epilogue_low_rank.cuh"
    fields: ClassVar[Fields] = _addresses(("data", "pitch", "ranks", "factors"))

    @property
    def constants(self) -> dict[str, int]:
        return super().constants | {"RANK": self.rank}


@dataclass(frozen=True)
class SwigluQuantize(Epilogue):
    """Applies a SwiGLU to gate and up, and stores the result quantized 1x128.

    keeps: also stores gate and up in bfloat16, from which it computes the SwiGLU, rounded to bfloat16.
    """

    activation: Activation
    keeps: bool = False

    out_dtype: ClassVar[torch.dtype] = torch.float8_e4m3fn
    header: ClassVar[str] = "epilogue_swiglu.cuh"
    fields: ClassVar[Fields] = (
        *_addresses(("data", "pitch", "scale", "scale_pitch", "projected", "projected_pitch")),
        *((name, ctypes.c_float) for name in ("limit", "alpha")),
    )
    gated: ClassVar[bool] = True
    defines: ClassVar[tuple] = SCALE_DEFINES

    @property
    def constants(self) -> dict[str, int]:
        return {"SWIGLU_FORM": self.activation.form, "KEEPS": int(self.keeps)}

    @property
    def values(self) -> dict[str, float]:
        return {"limit": self.activation.limit or 0.0, "alpha": self.activation.alpha or 0.0}


@dataclass(frozen=True)
class PeerStore(Epilogue):
    """Stores each row in the memory of the GPU that has its token, or with `to_all` in the memory of every GPU.

    peers: number of GPUs. each: number of assignments (pairs of a token and one of its experts) for the tokens of one
    GPU; with `to_all`, for all tokens.
    """

    out_dtype: torch.dtype
    peers: int
    each: int
    to_all: bool = False

    header: ClassVar[str] = "epilogue_peers.cuh"

    @property
    def fields(self) -> Fields:
        """Fields: addresses of the result on each peer, of the assignments and of the peers' barrier; then `each`."""
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
