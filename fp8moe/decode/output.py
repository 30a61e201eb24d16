"""The output layer in FP8, as an option of a decoder."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from fp8moe.layers.linear import FP8Linear, check_linear
from fp8moe.layers.parameters import check_not_sharded
from fp8moe.layers.replaced import check_no_hooks
from fp8moe.quant.formats import BLOCK, FP8Tensor, ceil_div
from fp8moe.quant.quantize import quantize_128x128
from fp8moe.runtime.checks import FLOATING, check_dtype

_locks: WeakKeyDictionary[nn.Module, threading.Lock] = WeakKeyDictionary()
"""For each output layer: held by the decoder that runs a copy in its place."""


class OutputLayer:
    """An FP8 copy of a model's output layer, which a decoder's steps run in its place; the model keeps its own."""

    def __init__(self, model: Any):
        self._own = model.get_output_embeddings()
        self._copy: FP8Linear | None = FP8Linear.from_linear(self._own)

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Run the copy within this context, in this thread. What the model does to logits (caps, scales) stays."""
        attributes, thread, forward = self._own.__dict__, threading.get_ident(), self._copy.forward
        with _locks.setdefault(self._own, threading.Lock()):
            own, replaced = self._own.forward, "forward" in attributes  # by accelerate, which only moves inputs
            attributes["forward"] = lambda x: (forward if threading.get_ident() == thread else own)(x)
            try:
                yield
            finally:
                del attributes["forward"]
                if replaced:
                    attributes["forward"] = own

    def renew(self) -> None:
        """Quantize the model's weight again, into the same memory."""
        if self._copy is not None:
            copy = FP8Tensor(self._copy.weight, self._copy.weight_scale_inv)
            quantize_128x128(self._own.weight.detach(), out=copy)

    def release(self) -> None:
        self._copy = None


def check_output_layer(model: Any) -> None:
    """Raise TypeError or ValueError for a model whose output layer cannot have an FP8 copy."""
    name = f"output_dtype: the output layer of {type(model).__name__}"
    layer = model.get_output_embeddings()
    if layer is None:
        raise ValueError(f"output_dtype: {type(model).__name__} has no output layer")
    if isinstance(layer, FP8Linear) or getattr(layer, "weight_scale_inv", None) is not None:
        raise ValueError(f"{name} is in FP8 already: leave output_dtype out")
    check_linear(name, layer)
    check_no_hooks(name, layer)
    check_dtype(f"{name}, its weight", layer.weight, *FLOATING)
    check_not_sharded(name, layer.weight)
    rows, columns = layer.weight.shape
    if rows % 8 or columns % 16:  # each step would pad the weight
        raise ValueError(f"{name} is ({rows}, {columns}), and FP8 needs multiples of 8 and 16")


def bytes_of_copy(layer: nn.Linear) -> int:
    """Return the memory that an FP8 copy of a linear takes."""
    rows, columns = layer.weight.shape
    return rows * columns + 4 * ceil_div(rows, BLOCK) * ceil_div(columns, BLOCK)
