"""The modules whose ``__all__`` is the public interface."""

PUBLIC = (
    "fp8moe",
    "fp8moe.distributed",
    "fp8moe.weights",
    "fp8moe.decode",
    "deep_gemm",
    "fp8moe.peft",
    "fp8moe.hf",
)
