"""The state of quantize_checkpoint in its destination: which shards are finished and what they were made from.

A file of lines of JSON, one for each finished shard. It is also what runs lock, so that only one writes there.
"""

import fcntl
import json
import os
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO

from fp8moe.checkpoints.checksum import Stamp
from fp8moe.checkpoints.files import CheckpointError
from fp8moe.checkpoints.untrusted import parse_object, shown

NAME = ".fp8moe-quantize.jsonl"
_FIRST_LINE = {"format": "fp8moe quantize", "version": 1}


class Journal:
    """Holds the lock while it is open. Left without a line, it deletes its file.

    finished: the stamps of each finished shard's source and of the shard itself. begun: whether a run has written
    anything.

    Raises ValueError if another run holds the lock, CheckpointError for a damaged file.
    """

    def __init__(self, directory: Path):
        self._path = directory / NAME
        self._file = _locked(self._path)
        self.finished: dict[str, tuple[Stamp, Stamp]] = {}
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
        """Before anything else is written."""
        if not self.begun:
            self._append(_FIRST_LINE)
            self.begun = True

    def add(self, file: str, source: Stamp, shard: Stamp) -> None:
        """Before the shard gets its final name: one that has it is always known here."""
        self._append({"file": file, "source": asdict(source), "shard": asdict(shard)})
        self.finished[file] = source, shard

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
                self.finished[line["file"]] = Stamp(**line["source"]), Stamp(**line["shard"])
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
