"""The cache of compiled kernels on disk. A disk error never stops a run; it only costs a compilation."""

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
_MAX_BYTES = 256 << 20  # size limit of the cache; beyond it, the least recently read entries are deleted


class CubinCache:
    """Maps a key (bytes) to a cubin (bytes) in `directory`/kernels, which is created with mode 0700.

    A cubin is code, so the directory must belong to the user. Every entry carries a SHA-256 digest of its key and
    cubin: a truncated, damaged or foreign entry is ignored, and the next compilation replaces it.
    """

    def __init__(self, directory: Path):
        self._directory = directory
        try:
            self._files = _open(directory)
        except OSError as error:
            self._files = None
            self._warn(error)

    def get(self, key: bytes) -> bytes | None:
        """Return the cubin stored under `key`, or None if there is no valid entry."""
        if self._files is None:
            return None
        try:
            entry = self._files[key]
        except (KeyError, OSError):
            return None
        cubin = entry[_HEADER:]
        return cubin if entry[:_HEADER] == _header(key, cubin) else None

    def put(self, key: bytes, cubin: bytes) -> None:
        """Store a cubin atomically: other processes see either the old entry or the new one."""
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


def _header(key: bytes, cubin: bytes) -> bytes:
    return _MAGIC + hashlib.sha256(hashlib.sha256(key).digest() + cubin).digest()


def _open(directory: Path) -> "FileStreamProgramCache":
    kernels = directory / "kernels"
    directory.parent.mkdir(parents=True, exist_ok=True)
    directory.mkdir(mode=0o700, exist_ok=True)
    _require_own(directory, 0o022)
    kernels.mkdir(mode=0o700, exist_ok=True)
    # If other users cannot enter this directory, the files in it are safe whatever the umask.
    _require_own(kernels, 0o077)
    return cuda_core().utils.FileStreamProgramCache(kernels, max_size_bytes=_MAX_BYTES)


def _require_own(directory: Path, forbidden: int) -> None:
    status = os.stat(directory)
    if status.st_uid != os.getuid():
        raise PermissionError(f"{directory} belongs to user {status.st_uid}, not to you")
    if status.st_mode & forbidden:
        raise PermissionError(f"{directory} has mode {status.st_mode & 0o777:o}, which lets other users in")


@functools.cache
def open_cache(directory: Path) -> CubinCache:
    """Return the cache in a directory, opened once per process."""
    return CubinCache(directory)
