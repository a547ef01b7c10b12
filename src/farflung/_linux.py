"""System calls of Linux that Python 3.11 lacks."""

from __future__ import annotations

import ctypes
import os
import signal

__all__ = ["LIBC", "check_call", "exit_with_parent"]

_PR_SET_PDEATHSIG = 1

LIBC = ctypes.CDLL(None, use_errno=True)


def exit_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when its parent ends; exits if the parent has ended already.

    Args:
      parent: Id of the parent before the fork; 0 if the parent is in another process namespace.
    """
    check_call("prctl", LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
    if os.getppid() != parent:
        os._exit(1)


def check_call(call: str, result: int) -> None:
    """Raises ``OSError`` if a call of the C library has not returned 0."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
