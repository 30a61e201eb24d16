"""Whether tensors still lie where they lay and hold what they held, without reading them."""

from collections.abc import Iterable, Iterator

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fp8moe.layers import master


class Fingerprint:
    """The state of some tensors at one time: where they lie, and what PyTorch's version counters say.

    After `fp8moe.layers.master.invalidate`, called for writes that change no version, it no longer matches.
    """

    def __init__(self, tensors: Iterable[Tensor]):
        parts = [part for tensor in tensors for part in _parts(tensor)]
        self._generation = master.generation()
        self._stamps = [_stamp(part) for part in parts]
        # Weak references keep no memory alive, but while they exist no new storage gets the address of an old one.
        self._storages = [StorageWeakRef(part.untyped_storage()) for part in parts]

    def matches(self, tensors: Iterable[Tensor]) -> bool:
        stamps = [_stamp(part) for tensor in tensors for part in _parts(tensor)]
        return self._generation == master.generation() and self._stamps == stamps


_PLAIN = (nn.Parameter, Tensor)


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor, and those that a wrapper has its memory from: the local tensor of a DTensor. Each has a version."""
    yield tensor
    if type(tensor) not in _PLAIN and is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for part in (getattr(tensor, name) for name in names):
            if isinstance(part, Tensor):  # not a DTensor's mesh
                yield from _parts(part)


def _stamp(tensor: Tensor) -> tuple[int, int, int | None]:
    version = None if tensor.is_inference() else tensor._version
    return tensor.untyped_storage()._cdata, tensor.data_ptr(), version
