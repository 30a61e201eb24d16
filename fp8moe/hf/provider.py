"""What `fp8moe.weights` asks of models of transformers, through `fp8moe.weights.provider`."""

from collections.abc import Mapping

from torch import nn

from fp8moe.hf import experts, linears
from fp8moe.hf.architecture import convert, find_expert_names, ignored_layers, locator
from fp8moe.hf.fused import latent_attention
from fp8moe.weights.quantize import OutputPlan
from fp8moe.weights.stored import StoredWeight

__all__ = ["convert", "find_expert_names", "fit", "ignored_layers", "locator", "refresh"]


def fit(plan: OutputPlan, wanted: Mapping[str, StoredWeight]) -> None:
    """Limit a plan of `quantize_checkpoint` to what transformers can have in FP8. wanted: what may become FP8."""
    from fp8moe.hf.fit import fit_to_transformers  # which imports transformers

    fit_to_transformers(plan, wanted)


def refresh(module: nn.Module) -> None:
    """Bring up to date what is made of a module's weights."""
    for kind in (linears, latent_attention, experts):
        kind.refresh(module)
