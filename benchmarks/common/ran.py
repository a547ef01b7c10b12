"""Which code a measurement ran."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

from benchmarks.common.rows import ROOT

__all__ = ["ran"]


@contextmanager
def ran(patterns: Iterable[str]) -> Iterator[set[str]]:
    """Fills with the files, of those that match, of whose functions any is called meanwhile.

    A measurement depends on these alone: a new codec beside those that it used leaves it as it is. What only happens
    on import does not count.

    Args:
      patterns: relative to the repository.
    """
    watched = {str(file): str(file.relative_to(ROOT)) for pattern in patterns for file in ROOT.glob(pattern)}
    found: set[str] = set()
    if not watched:
        yield found
        return

    def called(frame: FrameType, event: str, arg: object) -> None:
        del event, arg
        file = watched.get(frame.f_code.co_filename)
        if file is not None and frame.f_code.co_name != "<module>":
            found.add(file)

    before, before_in_threads = sys.gettrace(), threading.gettrace()
    sys.settrace(called)
    threading.settrace(called)
    try:
        yield found
    finally:
        sys.settrace(before)
        threading.settrace(before_in_threads)
