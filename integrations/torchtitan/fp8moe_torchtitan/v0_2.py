"""The model converter ``fp8moe`` for torchtitan 0.2. Importing this file registers it:

``--experimental.custom_import fp8moe_torchtitan.v0_2 --model.converters fp8moe``
"""

import logging

import torch
from torch import Tensor, nn
from torchtitan.models.moe.moe import GroupedExperts, MoE
from torchtitan.protocols.model_converter import register_model_converter

from fp8moe import replace_linears
from fp8moe_torchtitan.modules import Experts, Linear, check_tensor_parallel

HIGH_PRECISION = ("output", "router.gate")  # linears whose names end with these are not converted


class FP8GroupedExperts(GroupedExperts, Experts):
    """torchtitan's GroupedExperts in FP8, with the same parameters and arguments. An expert's rows need no padding."""

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        return self.compute(x, num_tokens_per_expert, self.w1, self.w2, self.w3)


class FP8MoE(MoE):
    """torchtitan's MoE around `FP8GroupedExperts`: without parallel experts it neither gathers nor scatters rows.

    The kernels that quantize and sum read and write tokens in their own order.
    """

    def forward(self, x: Tensor) -> Tensor:
        experts = self.experts
        # A wrapper around the experts would be passed over.
        if self.score_before_experts or not (isinstance(experts, FP8GroupedExperts) and experts.alone):
            return super().forward(x)
        tokens = x.flatten(0, -2)
        scores, index, counts = self.router(tokens, self.expert_bias)
        with torch.no_grad():
            self.tokens_per_expert.add_(counts)
        out = experts.compute_tokens(tokens, index, scores, experts.w1, experts.w2, experts.w3)
        if self.shared_experts is not None:
            out = out + self.shared_experts(tokens)
        return out.view(x.shape)


class Converter:
    """Replaces a model's experts and linears with FP8 ones, except routers and the output layer.

    torchtitan calls it when the model is on the meta device and not yet parallelized. Parameters keep their names.
    Raises NotImplementedError for tensor parallelism, unless the model has no linears to convert.
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
        for module in modules.values():
            if type(module) is MoE and isinstance(module.experts, FP8GroupedExperts):
                module.__class__ = FP8MoE
        names = replace_linears(model, skip=skip, master_dtype=next(model.parameters()).dtype)
        for name in names:
            model.get_submodule(name).__class__ = Linear
        logging.getLogger(__name__).info("fp8moe: in FP8 %s", ", ".join([*experts, *names]))

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Do nothing: the first forward after an optimizer's step makes new FP8 copies."""


register_model_converter(Converter, "fp8moe")
