"""vLLM on the kernels of fp8moe: `vllm serve MODEL --quantization fp8moe`."""


def register() -> None:
    """Add the quantization method "fp8moe" to vLLM, which calls this in each of its processes, perhaps repeatedly."""
    from vllm.model_executor.layers.quantization import register_quantization_config

    from fp8moe_vllm.config import Fp8moeConfig

    register_quantization_config("fp8moe")(Fp8moeConfig)
