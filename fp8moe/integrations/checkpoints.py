"""The names of `fp8moe.weights`, by the module's name of 0.2."""

from fp8moe.integrations import hand_on

__getattr__ = hand_on(__name__, "fp8moe.weights")
