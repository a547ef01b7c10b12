"""Linux calls for namespaces and mounts, which Python 3.11 lacks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from farflung._linux import LIBC, check_call

__all__ = [
    "CLONE_NEWNET",
    "CLONE_NEWNS",
    "CLONE_NEWPID",
    "enter_network_namespace",
    "mount_own_proc",
    "unshare",
    "use_network_namespace",
]

CLONE_NEWNS = 0x00020000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000


def unshare(flags: int) -> None:
    """Moves the calling process to new namespaces of its own.

    Raises:
      OSError: The call is not permitted, or the kernel lacks such namespaces.
    """
    check_call("unshare", LIBC.unshare(flags))


def enter_network_namespace(namespace_fd: int) -> None:
    """Moves the calling thread to a network namespace, given by a descriptor of it.

    Raises:
      OSError: The call is not permitted.
    """
    check_call("setns", LIBC.setns(namespace_fd, CLONE_NEWNET))


@contextlib.contextmanager
def use_network_namespace(namespace_fd: int) -> Iterator[None]:
    """Moves the calling thread to a network namespace during the block; sockets created inside stay there."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        enter_network_namespace(namespace_fd)
        try:
            yield
        finally:
            enter_network_namespace(home)
    finally:
        os.close(home)


def mount_own_proc() -> None:
    """Mounts ``/proc`` anew, so that a process namespace's first process and its children see only their own.

    Raises:
      OSError: The call is not permitted.
    """
    unshare(CLONE_NEWNS)
    check_call("mount", LIBC.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None))
    check_call("mount", LIBC.mount(b"proc", b"/proc", b"proc", 0, None))
