"""Experts spread over the GPUs of a mesh, on torch.distributed."""

from fp8moe.distributed.style import ExpertParallel

__all__ = ["ExpertParallel"]
