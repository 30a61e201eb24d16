"""A plugin that runs SGLang on fp8moe's kernels: `sglang serve --model-path MODEL --quantization fp8moe`."""

import logging


def register() -> None:
    """Add the quantization method "fp8moe" and its runner of experts to SGLang, which calls this in each process.

    If this SGLang lacks an import that the plugin needs, only log a warning; SGLang then refuses the method's name.
    """
    try:
        from sglang.srt.layers.moe.moe_runner.runner import register_moe_runner_core
        from sglang.srt.layers.quantization import QUANTIZATION_METHODS
        from sglang.srt.server_args import add_quantization_method_choices

        from fp8moe_sglang.quantization import NAME, ExpertsCore, Fp8moeConfig
    except ImportError as error:
        logging.getLogger("sglang.fp8moe").warning(
            "fp8moe: no --quantization fp8moe, which needs SGLang 0.5.23 or later: %s", error
        )
        return
    if NAME not in QUANTIZATION_METHODS:
        register_moe_runner_core(NAME, ExpertsCore)
        QUANTIZATION_METHODS[NAME] = Fp8moeConfig
        add_quantization_method_choices([NAME])
