"""register: transformers runs its experts, FP8 linears and indexers on fp8moe."""

import functools
from collections.abc import Iterator
from itertools import islice
from typing import Any

from fp8moe.integrations import NAME
from fp8moe.integrations.finegrained import route_linears
from fp8moe.integrations.transformers.experts import experts_forward
from fp8moe.integrations.transformers.indexers import route_indexers
from fp8moe.integrations.transformers.parallel import route_parallelism
from fp8moe.integrations.transformers.reporting import warn_of_others


def register() -> None:
    """Make ``experts_implementation="fp8moe"`` known to transformers, and run its FP8 linears and indexers on fp8moe's.

    After it, ``AutoModelForCausalLM.from_pretrained(directory, experts_implementation="fp8moe")`` or
    ``model.set_experts_implementation("fp8moe")`` is all it takes. Calling it again changes nothing.
    `report` tells what runs on fp8moe in a model.

    - Experts in bfloat16, float16 or float32 are quantized the first time that they run. The copy is kept beside the
      module, half the size of bfloat16 weights, until the weights move or change, or the module switches between
      training and evaluation; then it is made anew. Writes through ``weight.data`` are not noticed: call
      ``fp8moe.layers.master.invalidate()`` after them.
    - FP8 experts (block size 128x128, dynamic activation scales) run on the module's own weights, with no copy.
    - FP8 linears of every FP8 model in the process, with the same block size and activation scales, run on fp8moe's
      kernels; other formats go on running on transformers' own.
    - The indexers of every DeepSeek-V3.2 and GLM-MoE-DSA model in the process, with 32 or 64 heads of 32, 64 or 128
      values, score in FP8, and the model's cache holds their keys in FP8; those of other sizes run as before. A cache
      made before this call cannot be continued after it.
    - Experts that transformers' expert parallelism shards run on `fp8moe.distributed`. A model whose tensor-parallel
      plan cuts FP8 weights inside their blocks raises ValueError on all ranks before anything is read.

    An experts module that GroupedExperts cannot express raises TypeError or ValueError with its class and the reason
    when it runs first. Frozen experts pass gradients on; a backward through experts whose weights require gradients
    raises RuntimeError. Experts of classes that do not go through transformers' experts interface stay with
    transformers: a model that has them warns of each class when it is made or asked to change to fp8moe.

    Raises ImportError if transformers is missing.
    """
    from transformers.integrations import finegrained_fp8, moe

    moe.ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    route_linears()
    route_indexers()
    route_parallelism()
    _announce_others()


def _announce_others() -> None:
    """Have models warn of experts that do not run on fp8moe, when they are made for it or asked to change to it.

    Quantizers of transformers replace modules in a model that is made already: experts by their own, too.
    """
    from transformers import PreTrainedModel
    from transformers.quantizers import HfQuantizer

    made, changed = PreTrainedModel.post_init, PreTrainedModel.set_experts_implementation
    replaced = HfQuantizer.preprocess_model
    if hasattr(made, "_fp8moe"):
        return

    @functools.wraps(made)
    def post_init(self):
        made(self)
        if self.config._experts_implementation == NAME:
            warn_of_others(self)

    @functools.wraps(changed)
    def set_experts_implementation(self, experts_implementation):
        changed(self, experts_implementation)
        for part in _asked(self, experts_implementation):
            warn_of_others(part)

    @functools.wraps(replaced)
    def preprocess_model(self, model, *args, **kwargs):
        replaced(self, model, *args, **kwargs)
        if model.config._experts_implementation == NAME:
            warn_of_others(model)

    post_init._fp8moe = True
    PreTrainedModel.post_init, PreTrainedModel.set_experts_implementation = post_init, set_experts_implementation
    HfQuantizer.preprocess_model = preprocess_model


def _asked(model: Any, implementation: str | dict[str, str]) -> Iterator[Any]:
    """The model, or the parts of it with these configurations, that are asked to change to fp8moe."""
    asked = implementation if isinstance(implementation, dict) else {"": implementation}
    configs = {"": model.config} | {name: getattr(model.config, name, None) for name in model.config.sub_configs}
    for config in [configs.get(name) for name, wanted in asked.items() if wanted == NAME]:
        if config is not None:
            parts = (part for part in model.modules() if getattr(part, "config", None) is config)
            yield from islice(parts, 1)  # what it contains has the same configuration
