"""The module names of 0.2, handed on until 0.4 with a DeprecationWarning."""

from fp8moe.runtime.aliases import hand_on

__all__ = ["hand_on"]
