"""The environment variables that fp8moe reads.

| variable               | values                | meaning                                                        |
| ---------------------- | --------------------- | -------------------------------------------------------------- |
| FP8MOE_BACKEND         | auto, cuda, reference | where ops run; auto: CUDA kernels on GPUs that they support    |
| FP8MOE_CACHE_DIR       | a directory           | compiled kernels and converted models; default ~/.cache/fp8moe |
| FP8MOE_NUM_SMS         | an integer >= 1       | upper limit on the SMs that a GEMM or index scores may use     |
| FP8MOE_PRINT_CONFIGS   | 0, 1                  | print the configuration chosen for each new shape              |
| FP8MOE_PRINT_COMPILER  | 0, 1                  | print the compiler's log (compiles even if a cubin is cached)  |
| FP8MOE_DUMP_DIR        | a directory           | write source, PTX, cubin and SASS of each kernel there         |
| FP8MOE_COMPILER        | nvrtc, nvcc           | which compiler builds the kernels                              |
| FP8MOE_BATCH_INVARIANT | 0, 1                  | a token's result is bitwise the same whatever its batch        |

An empty value counts as unset. Lines are printed through the logger "fp8moe" at level INFO, which writes to standard
error unless the program has installed handlers.
"""

import logging
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

log = logging.getLogger("fp8moe")


@dataclass(frozen=True)
class Settings:
    """The values of the FP8MOE_* variables; see the table at the top of this module."""

    backend: str
    cache_dir: Path
    num_sms: int | None
    print_configs: bool
    print_compiler: bool
    dump_dir: Path | None
    compiler: str
    batch_invariant: bool


def _get(name: str) -> str:
    return os.environ.get(name, "").strip()


def _choice(name: str, allowed: tuple[str, ...]) -> str:
    """Read a variable that takes one of `allowed`, in upper or lower case; the first is the default."""
    value = _get(name).lower() or allowed[0]
    if value not in allowed:
        raise ValueError(f"{name} is {_get(name)!r}; it must be one of {', '.join(allowed)}")
    return value


def _flag(name: str) -> bool:
    return _choice(name, ("0", "1")) == "1"


def _count(name: str) -> int | None:
    value = _get(name)
    if not value:
        return None
    if not value.isdecimal() or int(value) < 1:
        raise ValueError(f"{name} is {value!r}; it must be an integer >= 1")
    return int(value)


def _path(name: str) -> Path | None:
    value = _get(name)
    return Path(os.path.expanduser(value)).absolute() if value else None


def _default_cache_dir() -> Path:
    """Return `$XDG_CACHE_HOME/fp8moe` or `~/.cache/fp8moe`; without a home, return a temporary directory per user."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # the XDG specification ignores relative paths
        base = os.path.expanduser("~/.cache")
    if not os.path.isabs(base):
        return Path(tempfile.gettempdir()) / f"fp8moe-{os.getuid()}"
    return Path(base) / "fp8moe"


def _read() -> Settings:
    if _get("FP8MOE_JIT"):
        raise ValueError(
            "FP8MOE_JIT is no longer read: unset it, and compile kernels before they are needed with `fp8moe warmup`, "
            "which keeps them in FP8MOE_CACHE_DIR"
        )
    return Settings(
        backend=_choice("FP8MOE_BACKEND", ("auto", "cuda", "reference")),
        cache_dir=_path("FP8MOE_CACHE_DIR") or _default_cache_dir(),
        num_sms=_count("FP8MOE_NUM_SMS"),
        print_configs=_flag("FP8MOE_PRINT_CONFIGS"),
        print_compiler=_flag("FP8MOE_PRINT_COMPILER"),
        dump_dir=_path("FP8MOE_DUMP_DIR"),
        compiler=_choice("FP8MOE_COMPILER", ("nvrtc", "nvcc")),
        batch_invariant=_flag("FP8MOE_BATCH_INVARIANT"),
    )


settings: Settings


def __getattr__(name: str) -> Settings:
    # The environment is read at the first use of `settings`, so that the command line can report a wrong value.
    if name == "settings":
        return reload()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def reload() -> Settings:
    """Read the environment again and replace `config.settings`. Raises ValueError for a value that is not allowed.

    Loaded kernels and launch plans are kept: the settings that a plan depends on are part of its key.
    """
    global settings
    settings = _read()
    if settings.print_configs or settings.print_compiler:
        log.setLevel(logging.INFO)
        if not log.hasHandlers():
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
            log.addHandler(handler)
    return settings


_blocks: dict[object, bool] = {}  # the modes of the open `batch_invariant` blocks, in the order of entry
_outside = False  # whether batch invariance is on when no `batch_invariant` block is open
_entering = threading.RLock()  # reentrant: the garbage collector may close a block while another one is entered


@contextmanager
def batch_invariant(enabled: bool = True) -> Iterator[None]:
    """Within a ``with`` block, make each token's result bitwise independent of the other tokens in its batch.

    See docs/batch-invariance.md. enabled: False restores the usual choice of tiles under FP8MOE_BATCH_INVARIANT=1.
    The mode belongs to the process, not the thread: with blocks open in several threads, the last one entered decides.
    CUDA graphs and `GraphDecoder`s keep the mode in which they were captured.

    Raises TypeError if `enabled` is not a bool, RuntimeError while torch.export traces.
    """
    global settings, _outside
    if not isinstance(enabled, bool):
        raise TypeError(f"enabled: expected a bool, got {type(enabled).__name__}")
    if torch.compiler.is_exporting():
        raise RuntimeError("batch_invariant: an exported program cannot hold the mode; enter it where the program runs")
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(msg="batch_invariant: a graph cannot hold the mode; enter it where the graph runs")
    if "settings" not in globals():
        reload()
    block = object()
    with _entering:
        if not _blocks:
            _outside = settings.batch_invariant
        _blocks[block] = enabled
        settings = replace(settings, batch_invariant=enabled)
    try:
        yield
    finally:
        with _entering:
            del _blocks[block]
            mode = next(reversed(_blocks.values()), _outside)
            settings = replace(settings, batch_invariant=mode)
