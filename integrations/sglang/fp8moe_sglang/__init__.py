"""SGLang on the kernels of fp8moe, where FP8MOE_SGLANG=1 asks for it."""

import os


def register() -> None:
    """Add fp8moe's two hooks to SGLang, which calls this once in each of its processes and then applies them."""
    if os.environ.get("FP8MOE_SGLANG") != "1":
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from fp8moe_sglang import hooks

    for target, hook in (
        ("sglang.srt.layers.moe.moe_runner.base.FusedOpPool.get_fused_func", hooks.get_fused_func),
        ("sglang.srt.layers.quantization.fp8_utils._dispatch_auto_backend", hooks.dispatch_auto_backend),
    ):
        HookRegistry.register(target, hook, HookType.AROUND)
