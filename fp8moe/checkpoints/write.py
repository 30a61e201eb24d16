"""Writing the files of a checkpoint so that no file is ever half there under its final name."""

import json
import math
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from fp8moe.checkpoints.checksum import Checksum, Stamp, bytes_of
from fp8moe.checkpoints.files import DTYPES

Layout = dict[str, tuple[str, tuple[int, ...]]]
"""What a file holds: safetensors dtype name and shape of each tensor."""

METADATA = {"format": "pt"}
"""Of every file; transformers asks for it."""


class ShardWriter:
    """Writes a safetensors file, its tensors in any order, under a temporary name in the same directory.

    As a context manager: leaving it normally syncs the file and gives it its name; an exception deletes it.

    path: the final name. layout: of the tensors. metadata: of the file.
    """

    def __init__(self, path: Path, layout: Layout, metadata: Mapping[str, str]):
        self._path = path
        self._temporary = temporary_path(path)
        header, self._left = {"__metadata__": dict(metadata)}, {}
        position = 0
        # The widest first, so that each tensor is aligned to its elements.
        for name, (dtype, shape) in sorted(layout.items(), key=lambda item: (-DTYPES[item[1][0]].itemsize, item[0])):
            nbytes = math.prod(shape) * DTYPES[dtype].itemsize
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + nbytes]}
            self._left[name] = nbytes
            position += nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        text = len(text).to_bytes(8, "little") + text
        self._dtypes = {name: DTYPES[dtype] for name, (dtype, _) in layout.items()}
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
            self._checksum.update(name, bytes_of(data))
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
    """The index of ``shards``: file name -> layout, as `ShardWriter` takes it."""
    total = sum(
        math.prod(shape) * DTYPES[dtype].itemsize for layout in shards.values() for dtype, shape in layout.values()
    )
    weight_map = {name: file for file, layout in shards.items() for name in layout}
    return json_bytes({"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})
