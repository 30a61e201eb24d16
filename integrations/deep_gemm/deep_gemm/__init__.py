"""DeepGEMM's Hopper API on the kernels of fp8moe: importing this gives `fp8moe.integrations.deep_gemm`."""

from fp8moe.integrations.deep_gemm import install

install(replace=True)
