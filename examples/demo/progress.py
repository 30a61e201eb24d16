"""What the demo says while it works: on a terminal bars, elsewhere lines, at least one every few seconds."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from fp8moe.runtime.progress import SECONDS_BETWEEN_LINES, progress


@contextmanager
def passes(model: Any, count: int, label: str) -> Iterator[None]:
    """Count the decoder layers that ``count`` forward passes run: one pass may take a minute, one layer does not."""
    layers = model.model.layers
    with progress(total=count * len(layers), label=label, unit=" layers") as bar:

        def finished(*_: Any) -> None:
            bar.update()

        hooks = [layer.register_forward_hook(finished) for layer in layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


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
