"""The progress of the demo, counted in decoder layers."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fp8moe.runtime.progress import progress


@contextmanager
def passes(model: Any, count: int, label: str) -> Iterator[None]:
    """Show progress over the decoder layers of ``count`` forward passes: a pass may take a minute, a layer does not."""
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
