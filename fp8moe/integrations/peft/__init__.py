"""LoRA by peft on FP8 models: adapters for FP8 linears and experts, whose base stays in FP8 on our kernels."""

from fp8moe.integrations.peft.registration import merge_and_unload, register

__all__ = ["merge_and_unload", "register"]
