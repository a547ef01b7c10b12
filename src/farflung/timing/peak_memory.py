"""How much memory tensors take at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from farflung._torch import DispatchMode, StorageRef, tree_leaves

__all__ = ["peak_nbytes"]


def peak_nbytes(fn: Callable[[], object]) -> int:
    """The most bytes that the tensors made by ``fn`` took at one time; storage that several share counts once.

    Looked at after each operation, so what an operation takes for its own work is not in it, nor what the process
    takes besides: libraries, the device's context.

    Args:
      fn: what to run, once.
    """
    with _Living() as living:
        fn()
    peak: int = living.peak
    return peak


class _Living(DispatchMode):  # type: ignore[misc]
    """Follows the storage of every tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[Any, int]] = {}
        self.peak: int = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                reference = StorageRef(storage)
                self._storages[reference.cdata] = reference, storage.nbytes()
        gone = [key for key, (storage, _) in self._storages.items() if storage.expired()]
        for key in gone:
            del self._storages[key]
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._storages.values()))
        return made
