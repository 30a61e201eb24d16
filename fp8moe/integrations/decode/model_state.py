"""Whether a model still computes what it did, so that CUDA graphs and cached keys of it still serve."""

from collections.abc import Iterator
from typing import Any
from weakref import ref

from torch import Tensor, nn

from fp8moe.integrations.fingerprint import Fingerprint


class ModelState:
    """Where a model's weights lie and what they held at one time, and which adapters of peft were active, how much.

    It keeps neither in memory.
    """

    def __init__(self, model: nn.Module):
        self._weights = Fingerprint(_weights(model))
        self._adapters = [(ref(module), _active(module)) for module in model.modules() if _has_adapters(module)]

    def change(self, model: nn.Module) -> str | None:
        """What has changed in the model since: the beginning of a sentence, or None."""
        if not self._weights.matches(_weights(model)):
            return "the model's weights have moved or changed"
        if any(module() is None or _active(module()) != active for module, active in self._adapters):
            return "the model's adapters have been switched, scaled or disabled"
        return None


def _weights(model: nn.Module) -> Iterator[Tensor]:
    """With what is added to the scores of routers, which is a buffer in many models."""
    yield from model.parameters()
    yield from model.buffers()


def _has_adapters(module: nn.Module) -> bool:
    """Whether it is a layer of peft. New ones bring new parameters."""
    return isinstance(getattr(module, "merged_adapters", None), list)


def _active(module: Any) -> tuple:
    scaling = tuple(getattr(module, "scaling", {}).items())
    return tuple(module.active_adapters), module.disable_adapters, tuple(module.merged_adapters), scaling
