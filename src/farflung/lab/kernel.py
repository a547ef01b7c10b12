"""The calls of Linux that Python 3.11 lacks: namespaces, mounts, and the end of a child with its parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator

__all__ = [
    "CLONE_NEWNET",
    "CLONE_NEWNS",
    "CLONE_NEWPID",
    "die_with_parent",
    "enter_network",
    "inside",
    "mount_own_proc",
    "unshare",
]

CLONE_NEWNS = 0x00020000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000
_PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)


def unshare(flags: int) -> None:
    """The calling process gets namespaces of its own.

    Raises:
      OSError: it may not, or the kernel has none of that kind.
    """
    _check("unshare", _libc.unshare(flags))


def enter_network(namespace: int) -> None:
    """The calling thread moves to a network namespace, given by a descriptor of it.

    Raises:
      OSError: it may not.
    """
    _check("setns", _libc.setns(namespace, CLONE_NEWNET))


@contextlib.contextmanager
def inside(namespace: int) -> Iterator[None]:
    """The calling thread is in a network namespace for a while; sockets made there stay there."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        enter_network(namespace)
        try:
            yield
        finally:
            enter_network(home)
    finally:
        os.close(home)


def mount_own_proc() -> None:
    """A new process namespace's first process shows its own processes under ``/proc``, to itself and its children.

    Raises:
      OSError: it may not.
    """
    unshare(CLONE_NEWNS)
    _check("mount", _libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None))
    _check("mount", _libc.mount(b"proc", b"/proc", b"proc", 0, None))


def die_with_parent(parent: int) -> None:
    """The calling process is killed when its parent ends, however that ends; at once where it has.

    Args:
      parent: what the parent's id was before this process was made; 0 where it is in another process namespace.
    """
    _check("prctl", _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
    if os.getppid() != parent:
        os._exit(1)


def _check(call: str, result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
