"""Whether a shard is still what it was: by its size and time, and for certain by a checksum."""

import ctypes
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from fp8moe.checkpoints.files import CheckpointError, read_header
from fp8moe.runtime.progress import progress

_CHUNK = 1 << 24  # bytes read at once


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

    def update(self, name: str, data: bytes | memoryview) -> None:
        """The next bytes of a tensor."""
        self._tensors[name] = zlib.crc32(data, self._tensors[name])

    def __str__(self) -> str:
        parts = b"".join(value.to_bytes(4, "little") for value in self._tensors.values())
        return f"{zlib.crc32(parts, zlib.crc32(self._header)):08x}"


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, which must outlive the view."""
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr()))


def header_bytes(path: Path) -> bytes:
    """Of a safetensors file: the length and the JSON, all that comes before the first tensor."""
    with path.open("rb") as file:
        length = file.read(8)
        return length + file.read(int.from_bytes(length, "little"))


def changed(stamps: Mapping[Path, Stamp], verify: bool) -> set[Path]:
    """The shards that are no longer as stamped. Those of another time are read; with ``verify`` all are."""
    states = {path: path.stat() for path in stamps}
    other_size = {path for path, stamp in stamps.items() if states[path].st_size != stamp.size}
    unsure = [
        path
        for path, stamp in stamps.items()
        if path not in other_size and (verify or states[path].st_mtime_ns != stamp.mtime_ns)
    ]
    if not unsure:
        return other_size
    with progress(total=sum(stamps[path].size for path in unsure), label="verifying", unit="B") as bar:
        return other_size | {path for path in unsure if _file_checksum(path, bar.update) != stamps[path].checksum}


def _file_checksum(path: Path, advance: Callable[[int], object]) -> str | None:
    """Of a whole shard, None if its header is damaged; ``advance`` is told the bytes read."""
    try:
        tensors, _ = read_header(path)
    except CheckpointError:
        return None
    header = header_bytes(path)
    checksum = Checksum(header, tensors)
    advance(len(header))
    with path.open("rb") as file:
        file.seek(len(header))
        for name, info in tensors.items():
            for begin in range(info.begin, info.end, _CHUNK):
                chunk = file.read(min(_CHUNK, info.end - begin))
                checksum.update(name, chunk)
                advance(len(chunk))
    return str(checksum)
