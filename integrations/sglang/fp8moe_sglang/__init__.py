"""A plugin that runs SGLang on fp8moe's kernels if the environment has FP8MOE_SGLANG=1."""

import os


def register() -> None:
    """Register fp8moe's two hooks. SGLang calls this once in each of its processes, and then applies the hooks."""
    if os.environ.get("FP8MOE_SGLANG") != "1":
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from fp8moe_sglang import hooks

    for target, hook in (
        ("sglang.srt.layers.moe.moe_runner.base.FusedOpPool.get_fused_func", hooks.get_fused_func),
        ("sglang.srt.layers.quantization.fp8_utils._dispatch_auto_backend", hooks.dispatch_auto_backend),
    ):
        HookRegistry.register(target, hook, HookType.AROUND)
