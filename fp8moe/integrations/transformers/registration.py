"""register: transformers runs its experts, FP8 linears and indexers on fp8moe."""

from fp8moe.integrations.transformers.experts import NAME, experts_forward
from fp8moe.integrations.transformers.indexers import route_indexers
from fp8moe.integrations.transformers.linears import routed


def register() -> None:
    """Make ``experts_implementation="fp8moe"`` known to transformers, and run its FP8 linears and indexers on fp8moe's.

    After it, ``AutoModelForCausalLM.from_pretrained(directory, experts_implementation="fp8moe")`` or
    ``model.set_experts_implementation("fp8moe")`` is all it takes. Calling it again changes nothing.

    - Experts in bfloat16, float16 or float32 are quantized the first time that they run. The copy is kept beside the
      module, half the size of bfloat16 weights, until the weights move or change; then it is made anew. Writes through
      ``weight.data`` are not noticed: call ``fp8moe.layers.master.invalidate()`` after them.
    - FP8 experts (block size 128x128, dynamic activation scales) run on the module's own weights, with no copy.
    - FP8 linears of every FP8 model in the process, with the same block size and activation scales, run on fp8moe's
      kernels; other formats go on running on transformers' own.
    - The indexers of every DeepSeek-V3.2 and GLM-MoE-DSA model in the process, with 32 or 64 heads of 32, 64 or 128
      values, score in FP8, and the model's cache holds their keys in FP8; those of other sizes run as before. A cache
      made before this call cannot be continued after it.

    An experts module that GroupedExperts cannot express raises TypeError or ValueError with its class and the reason
    when it runs first. Frozen experts pass gradients on; a backward through experts whose weights require gradients
    raises RuntimeError.

    Raises ImportError if transformers is missing.
    """
    from transformers.integrations import finegrained_fp8, moe

    moe.ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    # FP8Linear.forward looks this function up in its module at each call. transformers 5.17 calls it with keywords,
    # 5.23 by position and, where the input needs gradients, inside an autograd function that has a backward.
    if not hasattr(finegrained_fp8.fp8_linear, "_fp8moe"):
        finegrained_fp8.fp8_linear = routed(finegrained_fp8.fp8_linear)
    route_indexers()
