"""Compiled kernels on disk; what goes wrong with the disk costs a compile and breaks no run."""

import functools
import hashlib
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from fp8moe.runtime.driver import cuda_core

if TYPE_CHECKING:
    from cuda.core.utils import FileStreamProgramCache

_MAGIC = b"fp8moe-cubin-1\n"
_HEADER = len(_MAGIC) + hashlib.sha256().digest_size
_MAX_BYTES = 256 << 20  # least recently read entries go first


class CubinCache:
    """Maps a key (bytes) to a cubin (bytes) in `directory`/kernels, which is created with mode 0700.

    A cubin is code, so the directory has to be the user's own, and every entry carries a SHA-256 digest of its key and
    its cubin: an entry that is truncated, damaged, or belongs to another key is ignored, and the next compile replaces
    it.
    """

    def __init__(self, directory: Path):
        self._directory = directory
        try:
            self._files = _open(directory)
        except (OSError, _Unsafe) as error:
            self._files = None
            self._warn(error)

    def get(self, key: bytes) -> bytes | None:
        """The cubin stored under `key`, or None if there is none, or none that can be trusted."""
        if self._files is None:
            return None
        try:
            entry = self._files[key]
        except (KeyError, OSError):
            return None
        cubin = entry[_HEADER:]
        return cubin if entry[:_HEADER] == _header(key, cubin) else None

    def put(self, key: bytes, cubin: bytes) -> None:
        """Store a cubin, replacing what is there in one step, so that other processes see the old or the new one."""
        if self._files is None:
            return
        try:
            self._files[key] = _header(key, cubin) + cubin
        except OSError as error:
            self._warn(error)

    def _warn(self, reason: Exception) -> None:
        warnings.warn(
            f"compiled kernels are not kept in {self._directory} ({reason}), so every process compiles them again: "
            "set FP8MOE_CACHE_DIR to a directory of your own",
            RuntimeWarning,
            stacklevel=2,
        )


class _Unsafe(Exception):
    pass


def _header(key: bytes, cubin: bytes) -> bytes:
    return _MAGIC + hashlib.sha256(hashlib.sha256(key).digest() + cubin).digest()


def _open(directory: Path) -> "FileStreamProgramCache":
    kernels = directory / "kernels"
    directory.parent.mkdir(parents=True, exist_ok=True)
    directory.mkdir(mode=0o700, exist_ok=True)
    _require_own(directory, 0o022)
    kernels.mkdir(mode=0o700, exist_ok=True)
    # Nothing for others here: the files inside are then safe whatever the umask.
    _require_own(kernels, 0o077)
    return cuda_core().utils.FileStreamProgramCache(kernels, max_size_bytes=_MAX_BYTES)


def _require_own(directory: Path, forbidden: int) -> None:
    status = os.stat(directory)
    if status.st_uid != os.getuid():
        raise _Unsafe(f"{directory} belongs to user {status.st_uid}, not to you")
    if status.st_mode & forbidden:
        raise _Unsafe(f"{directory} has mode {status.st_mode & 0o777:o}, which lets other users in")


@functools.cache
def open_cache(directory: Path) -> CubinCache:
    """The cache in a directory, opened once per process."""
    return CubinCache(directory)
