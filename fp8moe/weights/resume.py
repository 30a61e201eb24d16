"""Resumes quantize_checkpoint: a journal of finished shards in the destination, and what else is there already."""

import fcntl
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

from fp8moe.runtime.progress import progress
from fp8moe.weights.formats import Layout
from fp8moe.weights.read import INDEX, SINGLE, CheckpointError, read_header
from fp8moe.weights.untrusted import parse_object, shown
from fp8moe.weights.write import Checksum, Stamp, final_name

NAME = ".fp8moe-quantize.jsonl"
_FIRST_LINE = {"format": "fp8moe quantize", "version": 1}


_CHUNK = 1 << 24  # bytes read at once


class Finished(NamedTuple):
    """What a finished shard's source and the shard itself were."""

    source: Stamp
    shard: Stamp


class Journal:
    """A file with a line of JSON for each finished shard, locked while it is open, so that only one run writes there.

    Left without a line, it deletes its file. finished: by shard. begun: whether a run has written anything.

    Raises ValueError if another run holds the lock, CheckpointError for a damaged file.
    """

    def __init__(self, directory: Path):
        self._path = directory / NAME
        self._file = _locked(self._path)
        self.finished: dict[str, Finished] = {}
        try:
            self.begun = self._read()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, kind, value, traceback) -> None:
        if not self.begun:
            self._path.unlink(missing_ok=True)
        self._file.close()

    def begin(self) -> None:
        """Write the first line, before anything else is written."""
        if not self.begun:
            self._append(_FIRST_LINE)
            self.begun = True

    def add(self, file: str, source: Stamp, shard: Stamp) -> None:
        """Note a shard before it gets its final name: one that has it is always known here."""
        self._append({"file": file, "source": asdict(source), "shard": asdict(shard)})
        self.finished[file] = Finished(source, shard)

    def _append(self, line: dict) -> None:
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def _read(self) -> bool:
        """Whether there is a first line. A last line that is cut short is forgotten."""
        lines = self._file.read().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            self._file.truncate(sum(map(len, lines[:-1])))
            del lines[-1]
        if not lines:
            return False
        try:
            first, *others = map(parse_object, lines)
            if first != _FIRST_LINE:
                raise ValueError(f"begins with {shown(first)}")
            for line in others:
                self.finished[line["file"]] = Finished(Stamp(**line["source"]), Stamp(**line["shard"]))
        except (ValueError, TypeError, KeyError) as error:
            raise CheckpointError(
                f"cannot write to {self._path.parent}",
                [f"{NAME}: is not the state of a run of fp8moe quantize; delete it, or give another directory"],
            ) from error
        return True


def _locked(path: Path) -> BinaryIO:
    """The file opened to read and append, made if needed, and locked until it is closed."""
    while True:
        file = path.open("a+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            if not isinstance(error, BlockingIOError):
                raise
            raise ValueError(
                f"dst_dir: another run of fp8moe quantize is writing to {path.parent}; wait for it to end"
            ) from None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                file.seek(0)
                return file
        file.close()  # its last owner deleted it before it let go of the lock


@dataclass
class Found:
    """What the destination holds.

    finished: files that are as this run would write them. leftovers: temporary files of a run that was killed.
    foreign: by name, what is wrong with everything else.
    """

    finished: set[str] = field(default_factory=set)
    leftovers: list[Path] = field(default_factory=list)
    foreign: dict[str, str] = field(default_factory=dict)


def survey(
    target: Path,
    source: Path,
    layouts: Mapping[str, Layout],
    contents: Mapping[str, bytes],
    journal: Journal,
    verify: bool,
) -> Found:
    """Compare the directory ``target`` with what is to be written there: shards and small files.

    verify: read finished shards and their sources again. Otherwise size and time suffice, where they are the same.
    """
    found = Found()
    problems = _shard_problems(target, source, layouts, journal, verify)
    for path in _entries(target, contents):
        name = str(path.relative_to(target))
        if name in layouts:
            problem = problems[name]
        elif name in contents:
            problem = None if _has(path, contents[name]) else "is there already, with other content"
        elif name == NAME:
            continue
        elif journal.begun and final_name(path.name) in {Path(name).name for name in (*layouts, *contents)}:
            found.leftovers.append(path)
            continue
        else:
            problem = "is there already, and not a file to be written"
        if problem is None:
            found.finished.add(name)
        else:
            found.foreign[name] = f"{name}: {problem}"
    return found


def _entries(target: Path, contents: Iterable[str]) -> Iterator[Path]:
    """What is in a directory, and in those of its directories that files are to be written to."""
    folders = {Path(name).parent for name in contents}
    for path in sorted(target.iterdir()):
        if path.is_dir() and path.relative_to(target) in folders:
            yield from sorted(path.iterdir())
        else:
            yield path


def make_room(target: Path, found: Found, shards: Iterable[str]) -> None:
    """Delete what a killed run left, and the index or model.safetensors that readers would take for the result.

    An index that is as it should be goes, too, before a shard changes: with it the directory would be a checkpoint.
    """
    for leftover in found.leftovers:
        leftover.unlink()
    if set(shards) - found.finished:
        found.finished.discard(INDEX)
    for name in {SINGLE, INDEX} - found.finished:
        (target / name).unlink(missing_ok=True)


@contextmanager
def tidied(target: Path, files: Collection[str]) -> Iterator[None]:
    """Delete the temporary files of these names when an exception ends the block.

    Ctrl-C may come between the making of a file and the block that would delete it.
    """
    try:
        yield
    except BaseException:
        for path in _entries(target, files):
            if final_name(path.name) in {Path(name).name for name in files}:
                path.unlink(missing_ok=True)
        raise


def _shard_problems(
    target: Path, source: Path, layouts: Mapping[str, Layout], journal: Journal, verify: bool
) -> dict[str, str | None]:
    """Why each shard cannot be kept if it is there, or None."""
    stamps = {}
    recorded = {file for file in journal.finished if (target / file).is_file()}
    for file in recorded & layouts.keys():
        finished = journal.finished[file]
        stamps[source / file], stamps[target / file] = finished.source, finished.shard
    others = _changed(stamps, verify)
    problems = {}
    for file in layouts:
        if file not in recorded:
            problem = "is there already, and was not written by fp8moe quantize"
        elif target / file in others:
            problem = "has changed since it was written"
        elif source / file in others:
            problem = "was made from another source"
        elif _layout(target / file) != layouts[file]:
            problem = "was made with other options"
        else:
            problem = None
        problems[file] = problem
    return problems


def _layout(path: Path) -> Layout | None:
    try:
        header = read_header(path)
    except CheckpointError:
        return None
    return {name: info.spec for name, info in header.tensors.items()}


def _has(path: Path, content: bytes) -> bool:
    return path.is_file() and path.stat().st_size == len(content) and path.read_bytes() == content


def _changed(stamps: Mapping[Path, Stamp], verify: bool) -> set[Path]:
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
        return other_size | {path for path in unsure if file_checksum(path, bar.update) != stamps[path].checksum}


def file_checksum(path: Path, advance: Callable[[int], object] = lambda _: None) -> str | None:
    """The checksum of a whole shard, None if its header is damaged; ``advance`` is told the bytes read."""
    try:
        header = read_header(path)
    except CheckpointError:
        return None
    checksum = Checksum(header.content, header.tensors)
    advance(len(header.content))
    with path.open("rb") as file:
        file.seek(len(header.content))
        for name, info in header.tensors.items():
            for begin in range(info.begin, info.end, _CHUNK):
                chunk = file.read(min(_CHUNK, info.end - begin))
                checksum.update(name, chunk)
                advance(len(chunk))
    return str(checksum)
