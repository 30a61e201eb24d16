"""The names of `deep_gemm.utils`, which is in integrations/deep_gemm, by the module's name of 0.2."""

from fp8moe.integrations import hand_on

__getattr__ = hand_on(__name__, "deep_gemm.utils", "./integrations/deep_gemm")
