"""Memory for what arrives, used again once nobody has it any more."""

from __future__ import annotations

import sys
from collections import OrderedDict

__all__ = ["Pool"]

KEPT_NBYTES = 1 << 28
"""Bytes of free and used buffers that are kept in all; beyond that, those asked for longest ago are let go."""


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
