"""Writes the files of a checkpoint so that no file is ever half there under its final name."""

import ctypes
import json
import os
import re
import secrets
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from fp8moe.weights.formats import DTYPES, Layout


@dataclass(frozen=True)
class Stamp:
    """What a shard was when it was read or written. checksum: as `Checksum` has it."""

    size: int
    mtime_ns: int
    checksum: str


class Checksum:
    """The CRC-32 of a shard while its tensors pass by, in any order: of its header and the CRC-32 of each tensor.

    header: the bytes before the first tensor. names: of all tensors.
    """

    def __init__(self, header: bytes, names: Iterable[str]):
        self._header = header
        self._tensors = dict.fromkeys(sorted(names), 0)

    def update(self, name: str, data: bytes | Tensor) -> None:
        """Take in the next bytes of a tensor."""
        self._tensors[name] = zlib.crc32(bytes_of(data) if isinstance(data, Tensor) else data, self._tensors[name])

    def __str__(self) -> str:
        parts = b"".join(value.to_bytes(4, "little") for value in self._tensors.values())
        return f"{zlib.crc32(parts, zlib.crc32(self._header)):08x}"


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, which must outlive the view."""
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr()))


class ShardWriter:
    """Writes a safetensors file, its tensors in any order, under a temporary name in the same directory.

    As a context manager: leaving it normally syncs the file and gives it its name; an exception deletes it.

    path: the final name. layout: of the tensors.
    """

    def __init__(self, path: Path, layout: Layout):
        self._path = path
        self._temporary = temporary_path(path)
        header: dict = {"__metadata__": {"format": "pt"}}  # transformers asks for it
        position = 0
        # The widest first, so that each tensor is aligned to its elements.
        for name, spec in sorted(layout.items(), key=lambda item: (-DTYPES[item[1].dtype].itemsize, item[0])):
            offsets = [position, position + spec.nbytes]
            header[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": offsets}
            position += spec.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        text = len(text).to_bytes(8, "little") + text
        self._dtypes = {name: DTYPES[spec.dtype] for name, spec in layout.items()}
        self._left = {name: spec.nbytes for name, spec in layout.items()}
        self._ends = {name: len(text) + header[name]["data_offsets"][1] for name in layout}
        self._checksum = Checksum(text, layout)
        self._file = self._temporary.open("xb")
        self._file.write(text)

    def put(self, name: str, tensor: Tensor) -> None:
        """Write all of a tensor, or its next slices along the first dimension."""
        if tensor.dtype != self._dtypes[name] or tensor.nbytes > self._left[name]:
            raise RuntimeError(f"{name}: {tensor.dtype} {tuple(tensor.shape)} does not fit its place in the file")
        data = tensor.detach().cpu().contiguous()
        if data.nbytes:
            self._file.seek(self._ends[name] - self._left[name])
            self._file.write(bytes_of(data))
            self._checksum.update(name, data)
        self._left[name] -= data.nbytes

    def seal(self) -> Stamp:
        """Sync the whole file to the disk. RuntimeError if a tensor has not been put."""
        missing = [name for name, left in self._left.items() if left]
        if missing:
            raise RuntimeError(f"{self._path.name}: not all was written of {', '.join(missing)}")
        self._file.flush()
        os.fsync(self._file.fileno())
        status = os.fstat(self._file.fileno())
        return Stamp(status.st_size, status.st_mtime_ns, str(self._checksum))

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, kind, value, traceback) -> None:
        try:
            if kind is None:
                self.seal()
            self._file.close()
            if kind is None:
                replace(self._temporary, self._path)
        finally:
            self._file.close()
            self._temporary.unlink(missing_ok=True)


def temporary_path(path: Path) -> Path:
    """A new name to write what will become ``path``. In containers processes of the same number follow each other."""
    return path.with_name(f".{path.name}.{secrets.randbits(64)}.partial")


def final_name(temporary: str) -> str | None:
    """The name of the file that any process writes under this temporary name; None for other names."""
    match = re.fullmatch(r"\.(.+)\.\d+\.partial", temporary)
    return match and match.group(1)


def replace(temporary: Path, path: Path) -> None:
    """Rename, and see to it that the new name is on the disk."""
    os.replace(temporary, path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a small file so that ``path`` is always either the old file or the whole new one."""
    path.parent.mkdir(exist_ok=True)
    temporary = temporary_path(path)
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def json_bytes(content: Mapping) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()


def index_of(shards: Mapping[str, Layout]) -> bytes:
    """The index of these shards, by file name."""
    total = sum(spec.nbytes for layout in shards.values() for spec in layout.values())
    weight_map = {name: file for file, layout in shards.items() for name in layout}
    return json_bytes({"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})
