"""The modules whose ``__all__`` is the public interface."""

PUBLIC = (
    "fp8moe",
    "fp8moe.distributed",
    "fp8moe.integrations.checkpoints",
    "fp8moe.integrations.decode",
    "fp8moe.integrations.peft",
    "fp8moe.integrations.transformers",
)
