"""What weights/ asks of a model's class: names of experts, places of tensors, what can be FP8. hf answers it."""

from importlib import import_module
from typing import Any


def provider() -> Any:
    """Return the module whose functions answer for models of transformers, imported when it is first asked.

    find_expert_names(model), fit(plan, wanted), locator(model), convert(model, locations, values),
    ignored_layers(model), refresh(module).
    """
    return import_module("fp8moe.hf.provider")
