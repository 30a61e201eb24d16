"""What is in the destination of quantize_checkpoint already: finished, left by a killed run, or not its own."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from fp8moe.checkpoints import journal as journals
from fp8moe.checkpoints.checksum import changed
from fp8moe.checkpoints.files import INDEX, SINGLE, CheckpointError, read_header
from fp8moe.checkpoints.journal import Journal
from fp8moe.checkpoints.write import Layout, final_name


@dataclass
class Found:
    """finished: files that are as this run would write them. leftovers: temporary files of a run that was killed.
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
    for path in sorted(target.iterdir()):
        if path.name in layouts:
            problem = problems[path.name]
        elif path.name in contents:
            problem = None if _has(path, contents[path.name]) else "is there already, with other content"
        elif path.name == journals.NAME:
            continue
        elif journal.begun and final_name(path.name) in (*layouts, *contents):
            found.leftovers.append(path)
            continue
        else:
            problem = "is there already, and not a file to be written"
        if problem is None:
            found.finished.add(path.name)
        else:
            found.foreign[path.name] = f"{path.name}: {problem}"
    return found


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
    """Within it files of these names are written. An exception leaves no temporary file of theirs.

    Ctrl-C may come between the making of a file and the block that would delete it.
    """
    try:
        yield
    except BaseException:
        for path in target.iterdir():
            if final_name(path.name) in files:
                path.unlink(missing_ok=True)
        raise


def _shard_problems(
    target: Path, source: Path, layouts: Mapping[str, Layout], journal: Journal, verify: bool
) -> dict[str, str | None]:
    """Why each shard cannot be kept if it is there, or None."""
    stamps = {}
    recorded = {file for file in journal.finished if (target / file).is_file()}
    for file in recorded & layouts.keys():
        stamps[source / file], stamps[target / file] = journal.finished[file]
    others = changed(stamps, verify)
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
        header, _ = read_header(path)
    except CheckpointError:
        return None
    return {name: (info.dtype, info.shape) for name, info in header.items()}


def _has(path: Path, content: bytes) -> bool:
    return path.is_file() and path.stat().st_size == len(content) and path.read_bytes() == content
