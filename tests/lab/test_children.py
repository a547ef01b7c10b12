"""Forks that run a function."""

from __future__ import annotations

import gc
import os

from farflung.lab.children import Child


class Left:
    """In a cycle, so that only the garbage collector ends it, which tells of that."""

    def __init__(self, bell: int) -> None:
        self.me, self.bell = self, bell

    def __del__(self) -> None:
        os.write(self.bell, b"!")


def test_a_child_collects_no_garbage_of_its_parent() -> None:
    ear, bell = os.pipe()
    gc.disable()
    try:
        Left(bell)
        child = Child(lambda: gc.collect() and None, keep=[bell])
        assert child.wait() == 0
        os.set_blocking(ear, False)
        gc.collect()
        assert os.read(ear, 2) == b"!"  # here, and not there too
    finally:
        gc.enable()
        os.close(ear)
        os.close(bell)
