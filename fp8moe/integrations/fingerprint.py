"""Whether tensors still lie where they lay and hold what they held, without reading them."""

from collections.abc import Iterable

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fp8moe.layers import master


class Fingerprint:
    """The state of some tensors at one time: where they lie, and what PyTorch's version counters say.

    After `fp8moe.layers.master.invalidate`, called for writes that change no version, it no longer matches.
    """

    def __init__(self, tensors: Iterable[Tensor]):
        tensors = list(tensors)
        self._generation = master.generation()
        self._stamps = [_stamp(tensor) for tensor in tensors]
        # Weak references keep no memory alive, but while they exist no new storage gets the address of an old one.
        self._storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]

    def matches(self, tensors: Iterable[Tensor]) -> bool:
        return self._generation == master.generation() and self._stamps == [_stamp(tensor) for tensor in tensors]


def _stamp(tensor: Tensor) -> tuple[int, int, int | None]:
    version = None if tensor.is_inference() else tensor._version
    return tensor.untyped_storage()._cdata, tensor.data_ptr(), version
