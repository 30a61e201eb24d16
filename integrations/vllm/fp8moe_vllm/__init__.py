"""A plugin that runs vLLM on fp8moe's kernels: `vllm serve MODEL --quantization fp8moe`."""

import logging


def register() -> None:
    """Add the quantization method "fp8moe" to vLLM, which calls this in each of its processes, perhaps repeatedly.

    If this vLLM lacks an import that the plugin needs, only log a warning; vLLM then refuses `--quantization fp8moe`.
    """
    try:
        from vllm.model_executor.layers.quantization import register_quantization_config

        from fp8moe_vllm.config import Fp8moeConfig
    except ImportError as error:
        logging.getLogger("vllm.fp8moe").warning(
            "fp8moe: no --quantization fp8moe, which is tried with vLLM 0.26.0 to 0.33.0: %s", error
        )
        return
    register_quantization_config("fp8moe")(Fp8moeConfig)
