"""register: transformers runs its experts, FP8 linears and indexers on fp8moe."""

import functools
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from fp8moe.hf.experts import experts_forward
from fp8moe.hf.formats import check_formats
from fp8moe.hf.indexers import route_indexers
from fp8moe.hf.linears import route_linears
from fp8moe.hf.name import NAME
from fp8moe.hf.parallel import route_parallelism
from fp8moe.hf.reporting import warn_of_others
from fp8moe.hf.versions import complete_scales_of_fp8_models


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

    - from_pretrained raises ValueError for a checkpoint in a format whose scales transformers would lose on the way to
      fp8moe: ModelOpt's, AutoFP8's with a scale for each tensor, and FP8 codes without a quantization_config; and where
      it has loaded FP8 modules without scales, as the configuration names others than those in the checkpoint.

    Raises ImportError if transformers is missing.
    """
    from transformers.integrations import finegrained_fp8, moe

    moe.ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    route_linears()
    route_indexers()
    route_parallelism()
    _announce_others()
    check_formats()
    complete_scales_of_fp8_models()


def _announce_others() -> None:
    """Have models warn of experts that do not run on fp8moe, when they are made for it or asked to change to it.

    Quantizers of transformers replace modules in a model that is made already: experts by their own, too.
    """
    from transformers import PreTrainedModel
    from transformers.quantizers import HfQuantizer

    def check(model: Any) -> None:
        if model.config._experts_implementation == NAME:
            warn_of_others(model)

    def check_parts(model: Any, experts_implementation: str | dict[str, str]) -> None:
        for part in _asked(model, experts_implementation):
            warn_of_others(part)

    if not hasattr(PreTrainedModel.post_init, "_fp8moe"):
        _run_after(PreTrainedModel, "post_init", check)
        _run_after(PreTrainedModel, "set_experts_implementation", check_parts)
        _run_after(HfQuantizer, "preprocess_model", lambda _, model, *args, **kwargs: check(model))


def _run_after(cls: type, name: str, function: Callable[..., None]) -> None:
    """Have the method of that name, which returns nothing, run this function after it, with its arguments."""
    theirs = getattr(cls, name)

    @functools.wraps(theirs)
    def method(self, *args, **kwargs):
        theirs(self, *args, **kwargs)
        function(self, *args, **kwargs)

    method._fp8moe = True
    setattr(cls, name, method)


def _asked(model: Any, implementation: str | dict[str, str]) -> Iterator[Any]:
    """The model, or the parts of it with these configurations, that are asked to change to fp8moe."""
    asked = implementation if isinstance(implementation, dict) else {"": implementation}
    configs = {"": model.config} | {name: getattr(model.config, name, None) for name in model.config.sub_configs}
    for config in [configs.get(name) for name, wanted in asked.items() if wanted == NAME]:
        if config is not None:
            parts = (part for part in model.modules() if getattr(part, "config", None) is config)
            yield from islice(parts, 1)  # what it contains has the same configuration
