"""Small transformers models with random weights, and what tests of them share."""

import pytest
import torch

from fp8moe.weights import quantize_checkpoint


def newer_than_5_17(why: str) -> pytest.MarkDecorator:
    """Skips a test with the oldest supported transformers. why: what that version does, as the rest of a sentence."""
    from fp8moe.hf import versions

    return pytest.mark.skipif(versions.has_styles(), reason=f"transformers 5.17 {why}")


BASE = {
    "vocab_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
MLA = {
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
LENGTH = 12


def prompts(batch=3, length=LENGTH, seed=0, device="cpu"):
    return torch.randint(3, 128, (batch, length), generator=torch.Generator().manual_seed(seed)).to(device)


def left_padded(ids, *padding):
    """The mask of prompts with so much padding in each row."""
    mask = torch.ones_like(ids)
    for row, count in zip(mask, padding, strict=True):
        row[:count] = 0
    return mask


TOKENS = prompts(seed=1)


def random_model(model_type, options, **how):
    """The same weights for the same options of the configuration; `how` goes to from_config."""
    import transformers

    config = transformers.AutoConfig.for_model(model_type, **options)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, **how).eval()


def write_checkpoints(model, directory):
    """The directories of the model as it is and of its FP8 checkpoint."""
    model.save_pretrained(directory / "bf16")
    quantize_checkpoint(directory / "bf16", directory / "fp8")
    return directory / "bf16", directory / "fp8"


def modules_named(model, name):
    """The modules whose path ends in this name."""
    return [module for path, module in model.named_modules() if path.endswith(f".{name}")]
