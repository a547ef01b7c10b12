"""A pool of buffers for received messages and sums, reused once no tensor refers to them."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict

import torch
from torch import Tensor

__all__ = ["ALIGNMENT", "Pool", "scratch_like"]

KEPT_NBYTES = 1 << 28
"""Bytes of free and used buffers that are kept in all; beyond that, those asked for longest ago are let go."""
WORTH_NBYTES = 1 << 20
"""Bytes from which on a tensor's memory is pooled; malloc keeps by itself what is smaller."""
ALIGNMENT = 64
"""Of tensors in bytes, as torch aligns its own; on some processors the last bit of a product depends on it."""


class Pool:
    """Buffers by size. A page that is new to a process costs it about as much as copying it does.

    A buffer is free once no tensor, view or message refers to it, which its count of references tells. It belongs to
    one thread; tensors may die on any.

    >>> pool = Pool()
    >>> first = pool.take(8)
    >>> held = memoryview(first)
    >>> del first
    >>> second = pool.take(8)
    >>> second is held.obj
    False
    >>> del held
    >>> third = pool.take(8)
    >>> third is second
    False
    """

    def __init__(self) -> None:
        self._by_size: OrderedDict[int, list[bytearray]] = OrderedDict()
        self._nbytes = 0

    def tensor(self, nbytes: int) -> Tensor:
        """Makes an uninitialized tensor of so many bytes, at an address that is a multiple of :data:`ALIGNMENT`."""
        if nbytes < WORTH_NBYTES:
            return torch.empty(nbytes, dtype=torch.uint8)
        memory = torch.frombuffer(self.take(nbytes + ALIGNMENT), dtype=torch.uint8)
        begin = -memory.data_ptr() % ALIGNMENT
        return memory[begin : begin + nbytes]

    def take(self, nbytes: int) -> bytearray:
        """A buffer of so many bytes, with anything in it."""
        known = self._by_size.setdefault(nbytes, [])
        self._by_size.move_to_end(nbytes)
        for at in range(len(known)):
            if sys.getrefcount(known[at]) == _UNUSED:
                return known[at]
        made = bytearray(nbytes)
        known.append(made)
        self._nbytes += nbytes
        while self._nbytes > KEPT_NBYTES:
            size, oldest = next(iter(self._by_size.items()))
            oldest.pop(0)
            self._nbytes -= size
            if not oldest:
                del self._by_size[size]
        return made


def _unused() -> int:
    """The count of a buffer that a list alone refers to, and the call that asks for it."""
    known = [bytearray()]
    return sys.getrefcount(known[0])


_UNUSED = _unused()


class _OfThread(threading.local):
    """The pool of the thread that asks."""

    def __init__(self) -> None:
        self.pool = Pool()


_scratch = _OfThread()


def scratch_like(tensor: Tensor) -> Tensor:
    """An uninitialized tensor like ``tensor``, for sums and copies of an exchange.

    On the host its memory is that of a dropped one, of the same thread and size, where there is one. It may be given
    away like any other: it comes again once no sender, receiver or view has it.
    """
    if tensor.device.type != "cpu" or tensor.nbytes < WORTH_NBYTES:
        return torch.empty_like(tensor)
    return _scratch.pool.tensor(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
