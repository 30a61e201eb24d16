"""Mixture-of-experts models with linear attention, in some or all of their layers."""

import torch

from tests.tiny_moe_models import MODELS

NAMES = [
    name
    for name in (
        "BailingHybridForCausalLM",
        "Glm5NextForConditionalGeneration",
        "GraniteMoeHybridForCausalLM",
        "Inkling2ForCausalLM",
        "InklingForCausalLM",
        "JambaForCausalLM",
        "KimiLinearForCausalLM",
        "Lfm2MoeForCausalLM",
        "NemotronHForCausalLM",
        "Qwen3_5MoeForCausalLM",
        "Qwen3NextForCausalLM",
        "Qwen4ExpForCausalLM",
        "ZayaForCausalLM",
    )
    if name in MODELS
]
READ_ON_THE_HOST = {  # by their indexers of sparse attention: a CPU runs the step, but no graph holds it
    "Glm5NextForConditionalGeneration": "aten.index.Tensor",
    "Qwen4ExpForCausalLM": "aten.nonzero.default",
}
PROMPTS = [(1, 1, [0]), (1, 12, [0]), (3, 12, [4, 0, 9])]
"""Batch, length, padding of each row; first a prompt shorter than the convolutions, as a capture has it."""


def build(name, **how):
    """With weights so large that every layer counts."""
    model = MODELS[name].build(**how)
    with torch.no_grad():
        for path, weight in model.named_parameters():
            if weight.dim() > 1 and "embed" not in path and weight.std() < 0.1:
                weight.mul_(4)
    return model
