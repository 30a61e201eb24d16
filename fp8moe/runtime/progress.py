"""Progress on standard error: a bar on a terminal, a line every few seconds in a log or a pipe."""

import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from tqdm import tqdm

SECONDS_BETWEEN_LINES = 5
_LINE = "{desc}: {percentage:.0f}% {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}]"
_shown: ContextVar[bool] = ContextVar("shown", default=True)


class _Lines(tqdm):
    """A tqdm for streams without a cursor: each update is a new line."""

    def display(self, msg=None, pos=None):
        if msg is None or self.n > self.last_print_n:  # skip the empty message with which close() erases a bar
            self.fp.write(f"{self}\n")
            self.fp.flush()
        return False


def progress(steps: Iterable | None = None, *, total: float, label: str, unit: str = "it") -> tqdm:
    """Return a tqdm that counts the items of ``steps``, or what is passed to its method ``update``, up to ``total``.

    unit: name of the counted thing; "B" for bytes.
    """
    options = {"total": total, "desc": label, "unit": unit, "unit_scale": unit == "B", "leave": False}
    if not _shown.get() or _has_room_for_bars():
        return tqdm(steps, disable=not _shown.get(), **options)
    return _Lines(steps, bar_format=_LINE, mininterval=SECONDS_BETWEEN_LINES, miniters=1, **options)


def _has_room_for_bars() -> bool:
    """Return whether standard error is a terminal with a known width; in some containers terminals report 0 columns."""
    return sys.stderr.isatty() and os.get_terminal_size(sys.stderr.fileno()).columns > 0


@contextmanager
def still_running(label: str) -> Iterator[None]:
    """Print every few seconds how long the block has been running. For work whose steps cannot be counted."""
    if not _shown.get():
        yield
        return
    done, start = threading.Event(), time.monotonic()

    def tell() -> None:
        while not done.wait(SECONDS_BETWEEN_LINES):
            tqdm.write(f"{label}: {time.monotonic() - start:.0f} s", file=sys.stderr)

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def is_shown() -> bool:
    """Return whether progress is shown in the current context; see `shown`."""
    return _shown.get()


@contextmanager
def shown(show: bool) -> Iterator[None]:
    """Show or hide progress within this block."""
    token = _shown.set(show)
    try:
        yield
    finally:
        _shown.reset(token)
