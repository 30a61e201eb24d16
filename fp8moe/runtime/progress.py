"""Progress on standard error: a bar on a terminal; elsewhere, in a log or a pipe, a line every few seconds."""

import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

SECONDS_BETWEEN_LINES = 5
_LINE = "{desc}: {percentage:.0f}% {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}]"


class _Lines(tqdm):
    """tqdm for streams without a cursor: each state is a line of its own, and none is taken back."""

    def display(self, msg=None, pos=None):
        if msg is None or self.n > self.last_print_n:  # closing asks for an empty line in place of the last state
            self.fp.write(f"{self}\n")
            self.fp.flush()
        return False


def progress(steps: Iterable | None = None, *, total: float, label: str, unit: str = "it") -> tqdm:
    """Count ``steps``, or what its method ``update`` is told, up to ``total``; a context manager, as tqdm is.

    unit: what is counted; "B" for bytes.
    """
    options = {"total": total, "desc": label, "unit": unit, "unit_scale": unit == "B", "leave": False}
    if sys.stderr.isatty():
        return tqdm(steps, **options)
    return _Lines(steps, bar_format=_LINE, mininterval=SECONDS_BETWEEN_LINES, miniters=1, **options)


@contextmanager
def still_running(label: str) -> Iterator[None]:
    """Say every few seconds how long something takes whose steps cannot be counted."""
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
