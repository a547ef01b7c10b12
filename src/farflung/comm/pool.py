"""Pool of buffers for received messages and sums, reused once no tensor refers to them."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict

import torch
from torch import Tensor

__all__ = ["ALIGNMENT", "BufferPool", "allocate_like"]

MAX_POOL_NBYTES = 1 << 28
"""Most bytes of free and used buffers in all; beyond that, sizes requested longest ago are dropped."""
MIN_POOLED_NBYTES = 1 << 20
"""Least bytes of a pooled tensor; malloc itself reuses smaller memory."""
ALIGNMENT = 64
"""Alignment of tensors in bytes, equal to torch's; on some processors the last bit of a product depends on it."""


class BufferPool:
    """Buffers by size. Touching a page that is new to a process costs about as much as copying it.

    A buffer is free once no tensor, view or message refers to it, by its reference count. A pool belongs to one
    thread; tensors may be freed on any.

    >>> pool = BufferPool()
    >>> first = pool.take_buffer(8)
    >>> held = memoryview(first)
    >>> del first
    >>> second = pool.take_buffer(8)
    >>> second is held.obj
    False
    >>> del held
    >>> third = pool.take_buffer(8)
    >>> third is second
    False
    """

    def __init__(self) -> None:
        self._by_size: OrderedDict[int, list[bytearray]] = OrderedDict()
        self._nbytes = 0

    def allocate_tensor(self, nbytes: int) -> Tensor:
        """Allocates an uninitialized tensor of ``nbytes``, at an address that is a multiple of :data:`ALIGNMENT`."""
        if nbytes < MIN_POOLED_NBYTES:
            return torch.empty(nbytes, dtype=torch.uint8)
        memory = torch.frombuffer(self.take_buffer(nbytes + ALIGNMENT), dtype=torch.uint8)
        begin = -memory.data_ptr() % ALIGNMENT
        return memory[begin : begin + nbytes]

    def take_buffer(self, nbytes: int) -> bytearray:
        """Returns an uninitialized buffer of ``nbytes``."""
        buffers = self._by_size.setdefault(nbytes, [])
        self._by_size.move_to_end(nbytes)
        for index in range(len(buffers)):
            if sys.getrefcount(buffers[index]) == _IDLE_REFS:
                return buffers[index]
        buffer = bytearray(nbytes)
        buffers.append(buffer)
        self._nbytes += nbytes
        while self._nbytes > MAX_POOL_NBYTES:
            size, oldest = next(iter(self._by_size.items()))
            oldest.pop(0)
            self._nbytes -= size
            if not oldest:
                del self._by_size[size]
        return buffer


def _count_idle_refs() -> int:
    """Counts the references of a buffer that only a list refers to, as this call sees them."""
    buffers = [bytearray()]
    return sys.getrefcount(buffers[0])


_IDLE_REFS = _count_idle_refs()


class _ThreadLocalPool(threading.local):
    """Pool of the calling thread."""

    def __init__(self) -> None:
        self.pool = BufferPool()


_scratch = _ThreadLocalPool()


def allocate_like(tensor: Tensor) -> Tensor:
    """Allocates an uninitialized tensor like ``tensor``, for sums and copies of an exchange.

    On the host it reuses memory of the same thread and size if possible. It may be given away like any tensor:
    its memory is reused only once no sender, receiver or view holds it.
    """
    if tensor.device.type != "cpu" or tensor.nbytes < MIN_POOLED_NBYTES:
        return torch.empty_like(tensor)
    return _scratch.pool.allocate_tensor(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
