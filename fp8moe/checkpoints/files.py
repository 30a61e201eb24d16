"""Reading the files of a checkpoint directory: headers, the shard index, config.json, and tensors piece by piece.

The format is that of https://github.com/huggingface/safetensors: eight bytes with the length of a JSON header, the
header with dtype, shape and byte range of each tensor, then the bytes. Headers are read here without the tensors.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
FP8 = "F8_E4M3"
FLOATS = ("BF16", "F16", "F32", "F64")

_SHOWN_PROBLEMS = 100
_MAX_HEADER = 100_000_000  # bytes, as in the safetensors library


class CheckpointError(ValueError):
    """A checkpoint that cannot be used. ``problems`` lists everything that is wrong, the message the first hundred."""

    def __init__(self, what: str, problems: Iterable[str]):
        self.problems = list(problems)
        lines = [f"\n  {problem}" for problem in self.problems[:_SHOWN_PROBLEMS]]
        if len(self.problems) > _SHOWN_PROBLEMS:
            lines.append(f"\n  ... and {len(self.problems) - _SHOWN_PROBLEMS} more")
        super().__init__(f"{what}:{''.join(lines)}")


@dataclass(frozen=True)
class TensorInfo:
    """What a header says of one tensor: safetensors dtype name, shape, byte range after the header, file name."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    file: str

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclass
class Checkpoint:
    """A directory as its headers describe it.

    files: names of the shards that could be read. problems: what is wrong with the files themselves. incomplete:
    whether a shard is missing or damaged, so that ``tensors`` lacks what it holds.
    """

    directory: Path
    files: list[str]
    tensors: dict[str, TensorInfo]
    config: dict
    problems: list[str]
    incomplete: bool

    @cached_property
    def by_file(self) -> dict[str, dict[str, TensorInfo]]:
        """The tensors of each of ``files``."""
        groups: dict[str, dict[str, TensorInfo]] = {file: {} for file in self.files}
        for name, info in self.tensors.items():
            groups[info.file][name] = info
        return groups

    @property
    def quantization(self) -> dict:
        """config.json's quantization_config, empty without one."""
        return self.config.get("quantization_config") or {}


def open_checkpoint(directory: str | os.PathLike) -> Checkpoint:
    """Read config.json, the index and the header of each shard.

    Raises CheckpointError if there is no checkpoint at all; a missing or damaged file becomes an entry of ``problems``.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise CheckpointError(
            f"{directory} is not a checkpoint",
            ["it is not a directory" if directory.exists() else "there is no such directory"],
        )
    problems: list[str] = []
    config = _read_json(directory / CONFIG, problems) if (directory / CONFIG).is_file() else {}
    listed: dict[str, str] | None = None
    if (directory / INDEX).is_file():
        weight_map = _read_json(directory / INDEX, problems).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise CheckpointError(f"{directory} is not a checkpoint", problems or [f"{INDEX}: has no weight_map"])
        listed = weight_map
        files = sorted(set(listed.values()))
    elif (directory / SINGLE).is_file():
        files = [SINGLE]
    else:
        raise CheckpointError(f"{directory} is not a checkpoint", [f"there is neither {SINGLE} nor {INDEX}"])

    tensors: dict[str, TensorInfo] = {}
    unread = []
    for file in files:
        try:
            if Path(file).name != file or not (directory / file).is_file():
                raise CheckpointError(f"{directory} is not complete", [f"{file}: there is no such file"])
            header = read_header(directory / file)[0]
        except CheckpointError as error:
            names = sorted(name for name, place in (listed or {}).items() if place == file)
            lost = f"; {INDEX} puts {len(names)} tensors there, from {names[0]} to {names[-1]}" if names else ""
            problems += [problem + lost for problem in error.problems]
            unread.append(file)
            continue
        for name, info in header.items():
            if listed is not None and listed.get(name) != file:
                problems.append(f"{name}: is in {file}, but {INDEX} does not say so")
            else:
                tensors[name] = info
    for name, file in (listed or {}).items():
        if name not in tensors and file not in unread:
            problems.append(f"{name}: {INDEX} says it is in {file}, but it is not")
    return Checkpoint(
        directory, [file for file in files if file not in unread], tensors, config, problems, bool(unread)
    )


def read_header(path: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """The tensors of a safetensors file, in the order of their bytes, and its metadata.

    Raises CheckpointError for a file that is cut short, too long, or not safetensors.
    """

    def broken(why: str) -> CheckpointError:
        return CheckpointError(f"{path} cannot be read", [f"{path.name}: {why}"])

    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or 8 + length > size or length > _MAX_HEADER:
            raise broken("is cut short, or no safetensors file")
        try:
            header = json.loads(file.read(length))
            metadata = header.pop("__metadata__", {})
            tensors = {
                name: TensorInfo(entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"], path.name)
                for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"])
            }
            position = 0
            for name, info in tensors.items():
                dtype = DTYPES.get(info.dtype)
                if info.begin != position or info.nbytes < 0:
                    raise broken(f"the bytes of {name} do not follow on those before")
                if dtype is not None and info.nbytes != math.prod(info.shape) * dtype.itemsize:
                    raise broken(f"{name} has {info.nbytes} bytes, which does not fit {info.dtype} {info.shape}")
                position = info.end
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise broken(f"has no valid safetensors header ({error})") from error
    if size != 8 + length + position:
        state = "is cut short" if size < 8 + length + position else "is too long"
        raise broken(f"{state}: {size} bytes, the header says {8 + length + position}")
    return tensors, metadata


def read_pieces(file: safe_open, name: str, info: TensorInfo) -> Iterator[tuple[int | None, Tensor]]:
    """A tensor of an open file: (None, all of it), or (index, slice) for each index of three dimensions or more.

    Fused experts can take gigabytes: so memory holds one expert at a time.
    """
    if len(info.shape) < 3:
        yield None, file.get_tensor(name)
        return
    view = file.get_slice(name)
    for index in range(info.shape[0]):
        yield index, view[index]


def _read_json(path: Path, problems: list[str]) -> dict:
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        problems.append(f"{path.name}: is not JSON ({error})")
        return {}
    if not isinstance(content, dict):
        problems.append(f"{path.name}: is not a JSON object")
        return {}
    return content
