"""What peft's layers on FP8 weights have in common: merging, which rounds, and unmerging, which must not."""

import logging
from collections.abc import Iterable, Sequence

from peft.tuners.lora.layer import LoraLayer
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch import Tensor, nn

from fp8moe.integrations.peft.checks import check_base, check_config
from fp8moe.integrations.peft.merging import MergeError, Stored, check_finite, merge

_log = logging.getLogger(__name__)


class FP8LoraLayer(LoraLayer):
    """A layer of peft around one whose weights are stored in blocks of FP8, or run so.

    name: of the module. merge_error: of the last merge, None before it.
    """

    name: str
    merge_error: MergeError | None = None
    _before_merge: Sequence[tuple[Tensor, Tensor | None]] = ()

    def stored(self, adapters: Iterable[str]) -> list[Stored]:
        """The weights of the base layer, with what these adapters add to them."""
        raise NotImplementedError

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config, **kwargs) -> None:
        check_config(self.name, config)
        super().update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config, **kwargs)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Round W + BA, of all these adapters at once, into the weights of the base layer.

        The weights from before are kept, so that `unmerge` brings the same bits back. ValueError, with nothing written,
        if safe_merge is asked for and a sum is not finite.
        """
        adapters = self.unmerged(adapter_names)
        if adapters:
            before = self._before_merge or [stored.clone() for stored in self.stored(())]
            self._merge(safe_merge, adapters)
            self._before_merge = before

    def unmerge(self) -> None:
        """The weights that were there before the first `merge`, bit for bit."""
        if not self.merged:
            return
        for stored, before in zip(self.stored(()), self._before_merge, strict=True):
            stored.restore(*before)
        self._before_merge = ()
        self.merged_adapters.clear()

    def unload_and_optionally_merge_module(
        self, merge: bool, safe_merge: bool, adapter_names: list[str] | None
    ) -> nn.Module:
        """The base layer, for peft's `merge_and_unload`, which needs no weights from before."""
        adapters = self.unmerged(adapter_names) if merge else []
        if adapters:
            self._merge(safe_merge, adapters)
        return self.get_base_layer()

    def unmerged(self, adapter_names: list[str] | None) -> list[str]:
        """Those of the adapters, by default the active ones, that this layer has and that are not merged."""
        return [name for name in check_adapters_to_merge(self, adapter_names) if name in self.lora_A]

    def check_finite(self, adapter_names: list[str] | None) -> None:
        """ValueError if W + BA of these adapters is not finite."""
        if adapters := self.unmerged(adapter_names):
            check_finite(self.name, self.stored(adapters))

    def _merge(self, safe_merge: bool, adapters: list[str]) -> None:
        check_base(self.name, self.get_base_layer())  # it may have been spread since
        if safe_merge:
            self.check_finite(adapters)
        self.merge_error = merge(self.stored(adapters))
        self.merged_adapters.extend(adapters)
        _log.info(
            "merged %s into %s: relative error %.1e of W + BA, %.1e of BA", adapters, self.name, *self.merge_error
        )

    def _start(self, base_layer: nn.Module, adapter_name: str, config, kwargs: dict) -> None:
        """Refuse what does not work, before anything is made."""
        self.name = kwargs.get("target_name") or type(base_layer).__name__
        check_config(self.name, config, kwargs.get("parameter_name"))
        check_base(self.name, base_layer)
