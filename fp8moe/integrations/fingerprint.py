"""Whether tensors still lie where they lay and hold what they held, without reading them."""

from collections.abc import Iterable

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fp8moe.layers import master


class Fingerprint:
    """Of tensors at one time. Sees other memory and every write that PyTorch's version counters see.

    After `fp8moe.layers.master.outdate`, called for writes that they do not see, it matches no more.
    """

    def __init__(self, tensors: Iterable[Tensor]):
        tensors = list(tensors)
        self._outdated = master.outdated()
        self._stamps = [_stamp(tensor) for tensor in tensors]
        # They keep no memory alive, but as long as they exist no new storage gets the id of an old one.
        self._storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]

    def matches(self, tensors: Iterable[Tensor]) -> bool:
        return self._outdated == master.outdated() and self._stamps == [_stamp(tensor) for tensor in tensors]


def _stamp(tensor: Tensor) -> tuple[int, int, int | None]:
    version = None if tensor.is_inference() else tensor._version
    return tensor.untyped_storage()._cdata, tensor.data_ptr(), version
