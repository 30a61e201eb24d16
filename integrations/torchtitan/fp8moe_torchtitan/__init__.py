"""Trains torchtitan's experts and linears in FP8 on fp8moe's kernels.

With torchtitan 0.3: ``--override.imports fp8moe_torchtitan.experts fp8moe_torchtitan.linears``. With 0.2.2:
``--experimental.custom_import fp8moe_torchtitan.v0_2 --model.converters fp8moe``.
"""

from importlib.metadata import version

from torch.nn import Module

__version__ = "0.1.0"

if tuple(map(int, version("torchtitan").split(".")[:2])) >= (0, 3):
    from torchtitan.config.override import derive, override
    from torchtitan.models.common.linear import Linear
    from torchtitan.models.common.moe import GroupedExperts

    from fp8moe_torchtitan.v0_3 import FP8GroupedExperts, FP8TitanLinear

    @override(target=GroupedExperts.Config, exact=True, description="experts in FP8 (fp8moe)")
    def experts(config: GroupedExperts.Config) -> FP8GroupedExperts.Config:
        """Return a config of FP8 experts. Parameters do not change: checkpoints, shardings, initializers still fit."""
        return derive(config, FP8GroupedExperts.Config)

    @override(
        target=Linear.Config,
        exact=True,
        fqns=["*layers.*.attention.*", "*layers.*.feed_forward.*", "*layers.*.shared_experts.*"],
        description="linears in FP8 (fp8moe)",
    )
    def linears(config: Linear.Config) -> FP8TitanLinear.Config:
        """Return a config of FP8 linears. The override applies to attention, dense MLPs and shared experts only."""
        return derive(config, FP8TitanLinear.Config)


def converted(model: Module) -> dict[str, str]:
    """Return {qualified name: class name} for the modules of a model that compute in FP8 on fp8moe."""
    from fp8moe_torchtitan.modules import Experts
    from fp8moe_torchtitan.modules import Linear as FP8

    return {name: type(module).__name__ for name, module in model.named_modules() if isinstance(module, Experts | FP8)}
