"""The calls of Linux for namespaces and mounts, which Python 3.11 lacks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from farflung._linux import LIBC, check_call

__all__ = [
    "CLONE_NEWNET",
    "CLONE_NEWNS",
    "CLONE_NEWPID",
    "enter_network",
    "inside",
    "mount_own_proc",
    "unshare",
]

CLONE_NEWNS = 0x00020000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000


def unshare(flags: int) -> None:
    """The calling process gets namespaces of its own.

    Raises:
      OSError: it may not, or the kernel has none of that kind.
    """
    check_call("unshare", LIBC.unshare(flags))


def enter_network(namespace: int) -> None:
    """The calling thread moves to a network namespace, given by a descriptor of it.

    Raises:
      OSError: it may not.
    """
    check_call("setns", LIBC.setns(namespace, CLONE_NEWNET))


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
    check_call("mount", LIBC.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None))
    check_call("mount", LIBC.mount(b"proc", b"/proc", b"proc", 0, None))
