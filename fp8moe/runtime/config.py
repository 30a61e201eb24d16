"""Every environment variable that fp8moe reads, in one place.

| variable               | values                | meaning                                                        |
| ---------------------- | --------------------- | -------------------------------------------------------------- |
| FP8MOE_BACKEND         | auto, cuda, reference | where ops run; auto takes the kernels on a GPU they support    |
| FP8MOE_CACHE_DIR       | a directory           | compiled kernels and converted models; default ~/.cache/fp8moe |
| FP8MOE_NUM_SMS         | an integer >= 1       | upper limit on the SMs of a GEMM or of index scores            |
| FP8MOE_PRINT_CONFIGS   | 0, 1                  | print the configuration chosen for each new shape              |
| FP8MOE_PRINT_COMPILER  | 0, 1                  | print the compiler's log (compiles even if a cubin is cached)  |
| FP8MOE_DUMP_DIR        | a directory           | write source, PTX, cubin and SASS of each kernel there         |
| FP8MOE_COMPILER        | nvrtc, nvcc           | which compiler builds the kernels                              |
| FP8MOE_BATCH_INVARIANT | 0, 1                  | bits of a token do not depend on what else is in its batch     |

A variable that is set to the empty string counts as unset. What is printed goes to the logger "fp8moe", level INFO; on
standard error where the program has no handlers of its own.
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
    """One of `allowed`, in any case; the first is the default."""
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
    """`$XDG_CACHE_HOME/fp8moe`, `~/.cache/fp8moe`, or a directory of this user's where there is no home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # the XDG specification: a relative path is to be ignored
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
    # The environment is read at the first use of `settings`, so that the command line can report what is wrong with it.
    if name == "settings":
        return reload()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def reload() -> Settings:
    """Read the environment again and replace `config.settings`; ValueError for a value that is not allowed.

    Kernels that are already loaded stay as they are, and launch plans, of which each limit of SMs has its own.
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


_blocks: dict[object, bool] = {}  # the modes of all blocks that are open, the last one entered at the end
_outside = False  # the mode outside of them
_entering = threading.RLock()  # a block may also end while the garbage collector runs


@contextmanager
def batch_invariant(enabled: bool = True) -> Iterator[None]:
    """Within it the bits of a token's result do not depend on what else is in its batch; docs/batch-invariance.md.

    enabled: False for the usual choice of tiles, where FP8MOE_BATCH_INVARIANT=1 holds. The mode is the process's, not
    the thread's: of blocks that are open in several threads, the last one entered decides. CUDA graphs and
    `GraphDecoder`s keep the mode that they were captured in.

    Raises TypeError for anything but True and False, RuntimeError inside of what torch.export traces.
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
