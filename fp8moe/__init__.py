"""FP8 layers for mixture-of-experts models on PyTorch, with Hopper kernels compiled at run time.

Importing fp8moe needs only PyTorch; CUDA libraries are loaded when the first kernel runs.

Letters in the shapes of all docstrings: T tokens, K experts per token (top-k) or the inner dimension of a GEMM,
E experts, H hidden size, I intermediate size, M and N rows and columns of a result, R rows sorted by expert;
B sequences, D head dimension, L columns of a static KV cache, V vocabulary size, W ranks of a process group.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

__all__ = [
    "FP8Linear",
    "FP8MQAIndexer",
    "FP8Tensor",
    "GroupedExperts",
    "PackedTensor",
    "RefitReport",
    "batch_invariant",
    "dequantize",
    "experts",
    "experts_masked",
    "experts_rows",
    "gemm",
    "grouped_gemm",
    "grouped_gemm_k",
    "grouped_gemm_masked",
    "latent_attention",
    "quantize_latents",
    "linear",
    "mqa_logits",
    "mqa_top_k",
    "paged_mqa_logits",
    "quantize_1x128",
    "quantize_128x1",
    "quantize_128x128",
    "quantize_int4",
    "quantize_mxfp4",
    "refit",
    "refitting",
    "replace_linears",
    "warm",
]
__version__ = "0.2.0"

if TYPE_CHECKING:
    from fp8moe.kernels.experts.api import experts, experts_masked, experts_rows
    from fp8moe.kernels.gemm import gemm, grouped_gemm, grouped_gemm_k, grouped_gemm_masked
    from fp8moe.kernels.indexer.mqa_logits import mqa_logits, paged_mqa_logits
    from fp8moe.kernels.indexer.top_k import mqa_top_k
    from fp8moe.kernels.latent import latent_attention, quantize_latents
    from fp8moe.kernels.linear import linear
    from fp8moe.layers import FP8Linear, FP8MQAIndexer, GroupedExperts, replace_linears, warm
    from fp8moe.quant import (
        FP8Tensor,
        PackedTensor,
        dequantize,
        quantize_1x128,
        quantize_128x1,
        quantize_128x128,
        quantize_int4,
        quantize_mxfp4,
    )
    from fp8moe.runtime.config import batch_invariant
    from fp8moe.weights.refit import RefitReport, refit, refitting
else:
    _DEFINED_IN = (
        "kernels.experts.api",
        "kernels.gemm",
        "kernels.indexer.mqa_logits",
        "kernels.indexer.top_k",
        "kernels.latent",
        "kernels.linear",
        "layers",
        "quant",
        "runtime.config",
        "weights.refit",
    )

    def __getattr__(name):
        if name in __all__:
            for module in _DEFINED_IN:
                defined = vars(import_module(f"{__name__}.{module}"))
                if name in defined:
                    return globals().setdefault(name, defined[name])
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__():
        return sorted({*globals(), *__all__})

    # `import fp8moe` registers all operators, because torch.export.load() looks them up by name. Registering them
    # imports PyTorch, which takes two seconds. The commands `fp8moe` and `python -m fp8moe` (whose sys.argv[0] is "-m"
    # at this point) postpone this import, so that `fp8moe --help` answers at once.
    if Path(*sys.argv[:1]).name not in ("fp8moe", "-m"):
        for _name in __all__:
            # these names define no operators, and importing them is slow
            if _name not in ("RefitReport", "refit", "refitting"):
                __getattr__(_name)
