"""Write the files of a checkpoint so that an incomplete file never has its final name."""

import ctypes
import fcntl
import json
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from fp8moe.runtime.progress import progress
from fp8moe.weights.source import DTYPES, INDEX, SINGLE, Checkpoint, CheckpointError, Layout, Reader
from fp8moe.weights.stored import StoredWeight


class ShardWriter:
    """Writes a safetensors file under a temporary name in the same directory; the tensors may come in any order.

    As a context manager: leaving it normally syncs the file and gives it its final name; an exception deletes it.

    path: the final name. layout: the tensors' dtypes and shapes. source: text for the header that identifies the file
    which the tensors were made from.
    """

    def __init__(self, path: Path, layout: Layout, source: str | None = None):
        self._path = path
        self._temporary = temporary_path(path)
        metadata = {"format": "pt"} | ({"fp8moe_source": source} if source else {})  # transformers needs "format"
        header: dict = {"__metadata__": metadata}
        position = 0
        # The widest dtypes first, so that each tensor is aligned to the size of its elements.
        for name, spec in sorted(layout.items(), key=lambda item: (-DTYPES[item[1].dtype].itemsize, item[0])):
            offsets = [position, position + spec.nbytes]
            header[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": offsets}
            position += spec.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._header = len(text).to_bytes(8, "little") + text
        self._size = len(self._header) + position
        self._dtypes = {name: DTYPES[spec.dtype] for name, spec in layout.items()}
        self._left = {name: spec.nbytes for name, spec in layout.items()}
        self._ends = {name: len(self._header) + header[name]["data_offsets"][1] for name in layout}

    def is_written(self) -> bool:
        """Return whether the final file exists already, with the size and header that this writer would give it."""
        if not self._path.is_file() or self._path.stat().st_size != self._size:
            return False
        with self._path.open("rb") as file:
            return file.read(len(self._header)) == self._header

    def put(self, name: str, tensor: Tensor) -> None:
        """Write all of a tensor, or its next slices along the first dimension."""
        if tensor.dtype != self._dtypes[name] or tensor.nbytes > self._left[name]:
            raise RuntimeError(f"{name}: {tensor.dtype} {tuple(tensor.shape)} does not fit its place in the file")
        data = tensor.detach().cpu().contiguous()
        if data.nbytes:
            self._file.seek(self._ends[name] - self._left[name])
            self._file.write(memoryview((ctypes.c_ubyte * data.nbytes).from_address(data.data_ptr())))
        self._left[name] -= data.nbytes

    def __enter__(self) -> "ShardWriter":
        self._file = self._temporary.open("xb")
        self._file.write(self._header)
        return self

    def __exit__(self, kind, value, traceback) -> None:
        """Sync the file to the disk and rename it. Raises RuntimeError if a tensor has not been written completely."""
        try:
            missing = [name for name, left in self._left.items() if left]
            if kind is None and missing:
                raise RuntimeError(f"{self._path.name}: not all was written of {', '.join(missing)}")
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            if kind is None:
                replace(self._temporary, self._path)
        finally:
            self._file.close()
            self._temporary.unlink(missing_ok=True)


def into_directory(
    outputs: Iterable[StoredWeight], source: Checkpoint, target: Path, contents: Mapping[str, bytes], *, force: bool
) -> None:
    """Write the weights of a checkpoint and its small files into the directory ``target``.

    Each weight goes into a shard with the same name as the shard of its codes in the source. An existing shard is
    skipped if it has the header that this run would write, which records size and time of the source shard.

    contents: the small files, by name. Raises CheckpointError for a directory with files that this run would not write,
    unless ``force``, and ValueError while another run writes there.
    """
    by_file: dict[str, list[StoredWeight]] = {file: [] for file in source.files}
    for weight in outputs:
        by_file[weight.codes.file].append(weight)
    layouts = {
        file: {name: spec for weight in weights for name, spec in weight.specs().items()}
        for file, weights in by_file.items()
    }
    if source.files != [SINGLE]:
        contents = {**contents, INDEX: index_of(layouts)}
    target.mkdir(parents=True, exist_ok=True)
    with _locked(target):
        writers = {
            file: ShardWriter(target / file, layout, _stamp(source.directory / file))
            for file, layout in layouts.items()
        }
        finished = {file for file, writer in writers.items() if writer.is_written()}
        finished |= {name for name, content in contents.items() if _has(target / name, content)}
        ours = {Path(name).name for name in (*layouts, *contents)}
        entries = list(_entries(target, contents))
        foreign = [
            f"{name}: is there already, {_what(name, layouts, contents)}"
            for path in entries
            if (name := str(path.relative_to(target))) not in finished and final_name(path.name) not in ours
        ]
        if foreign and not force:
            raise CheckpointError(
                f"cannot write to {target}; give another directory, or force=True (--force) to overwrite", foreign
            )
        for path in entries:
            if final_name(path.name) in ours:  # temporary file of a killed run: no other run holds the lock
                path.unlink()
        if layouts.keys() - finished:
            finished.discard(INDEX)  # to delete the index below: with an index, the directory would look complete
        for name in {SINGLE, INDEX} - finished:
            (target / name).unlink(missing_ok=True)
        try:
            for name in contents.keys() - finished - {INDEX}:
                write_bytes(target / name, contents[name])
            with progress(total=sum(info.nbytes for info in source.tensors.values()), label="writing", unit="B") as bar:
                for file, weights in by_file.items():
                    if file in finished:
                        bar.update(sum(weight.codes.nbytes for weight in weights))
                    else:
                        _write_shard(writers[file], weights, Reader(source.directory), bar.update)
            if INDEX in contents.keys() - finished:
                write_bytes(target / INDEX, contents[INDEX])
        except BaseException:  # Ctrl-C may come after a file is created but before the block that would delete it
            for path in _entries(target, contents):
                if final_name(path.name) in ours:
                    path.unlink(missing_ok=True)
            raise


def _write_shard(writer: ShardWriter, weights: Iterable[StoredWeight], reader: Reader, advance) -> None:
    """Read the weights of a shard piece by piece and write them. advance: called with the numbers of bytes read."""
    with writer:
        for weight in weights:
            specs = weight.specs()
            for place, value in weight.pieces(reader):
                values = value if isinstance(value, tuple) else (value,)
                for (name, spec), tensor in zip(specs.items(), values, strict=True):
                    writer.put(name, tensor.to(DTYPES[spec.dtype]))
                advance(weight.codes.nbytes // (1 if place is None else weight.shape[0]))
        reader.close()


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Keep other runs from writing to a directory. Raises ValueError if one is writing there."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ValueError(f"dst_dir: another run of fp8moe writes to {directory}; wait for it to end") from None
    try:
        yield
    finally:
        os.close(descriptor)


def _stamp(path: Path) -> str:
    """Return a text that identifies a source file: its name, size and modification time."""
    status = path.stat()
    return f"{path.name} {status.st_size} {status.st_mtime_ns}"


def _what(name: str, layouts: Mapping[str, Layout], contents: Mapping[str, bytes]) -> str:
    """Return why an existing file cannot be kept, for a message."""
    if name in layouts:
        return "of another source, or made with other options"
    return "with other content" if name in contents else "and not a file to be written"


def _entries(target: Path, contents: Iterable[str]) -> Iterator[Path]:
    """Yield the paths in ``target``, and in its subdirectories where ``contents`` has files."""
    folders = {Path(name).parent for name in contents}
    for path in sorted(target.iterdir()):
        if path.is_dir() and path.relative_to(target) in folders:
            yield from sorted(path.iterdir())
        else:
            yield path


def _has(path: Path, content: bytes) -> bool:
    return path.is_file() and path.stat().st_size == len(content) and path.read_bytes() == content


def temporary_path(path: Path) -> Path:
    """Return a temporary name for ``path``, random because process ids may repeat in containers."""
    return path.with_name(f".{path.name}.{secrets.randbits(64)}.partial")


def final_name(temporary: str) -> str | None:
    """Return the final name that belongs to a temporary name, or None for any other name."""
    match = re.fullmatch(r"\.(.+)\.\d+\.partial", temporary)
    return match and match.group(1)


def replace(temporary: Path, path: Path) -> None:
    """Rename a file, and sync its directory so that the new name is on the disk."""
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
    """Return the JSON index of these shards. shards: the layout of each, by file name."""
    total = sum(spec.nbytes for layout in shards.values() for spec in layout.values())
    weight_map = {name: file for file, layout in shards.items() for name in layout}
    return json_bytes({"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})
