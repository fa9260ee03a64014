"""Counts the bytes of live tensors, that is, of tensors that torch operations created and that
still exist.
"""

import weakref

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._held: dict[int, weakref.ref] = {}

    @property
    def now(self) -> int:
        """Bytes of all live storages at their present size. FSDP's `fully_shard` frees a storage by
        resizing it to 0.
        """
        storages = [ref() for ref in self._held.values()]
        return sum(storage.nbytes() for storage in storages if storage is not None)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor | AsyncCollectiveTensor) for kind in types):
            return NotImplemented  # torch calls the operation again with plain tensors
        result = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in given and storage._cdata not in self._held:
                self._hold(storage)
        self.peak = max(self.peak, self.now)
        return result

    def _hold(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        self._held[key] = weakref.ref(storage, lambda _: self._held.pop(key, None))


def _tensors(tree) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
