"""The model converter ``fp8moe`` for torchtitan 0.2: importing this registers it.

``--experimental.custom_import fp8moe_torchtitan.v0_2 --model.converters fp8moe``
"""

import logging

from torch import Tensor, nn
from torchtitan.models.moe.moe import GroupedExperts
from torchtitan.protocols.model_converter import register_model_converter

from fp8moe import replace_linears
from fp8moe_torchtitan.modules import Experts, Linear, check_tensor_parallel

HIGH_PRECISION = ("output", "router.gate")  # names, or their ends, of linears that stay


class FP8GroupedExperts(GroupedExperts, Experts):
    """torchtitan's GroupedExperts in FP8: the same parameters and arguments. Groups of any size come as they are."""

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        return self.compute(x, num_tokens_per_expert, self.w1, self.w2, self.w3)


class Converter:
    """Put experts and linears in FP8 in place of a model's own, all but routers and the output layer.

    The model is as torchtitan converts it: on the meta device, and not yet parallel. Parameters keep their names. With
    tensor parallelism NotImplementedError, unless the model has no linears to convert.
    """

    def __init__(self, job_config, parallel_dims):
        self.tensor_parallel = parallel_dims.tp

    def convert(self, model: nn.Module) -> None:
        modules = dict(model.named_modules())
        skip = [name for name in modules if name.endswith(HIGH_PRECISION)]
        if any(type(module) is nn.Linear and name not in skip for name, module in modules.items()):
            check_tensor_parallel(self.tensor_parallel)
        experts = [name for name, module in modules.items() if type(module) is GroupedExperts]
        for name in experts:
            modules[name].__class__ = FP8GroupedExperts
        names = replace_linears(model, skip=skip, master_dtype=next(model.parameters()).dtype)
        for name in names:
            model.get_submodule(name).__class__ = Linear
        logging.getLogger(__name__).info("fp8moe: in FP8 %s", ", ".join([*experts, *names]))

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Nothing to do: FP8 copies are made anew in the first call after an optimizer's step."""


register_model_converter(Converter, "fp8moe")
