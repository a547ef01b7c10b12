"""Stores of torch.distributed, where processes find each other, in waits that a signal ends.

A store of torch's that waits does not return to Python, so Ctrl-C has no effect until its timeout, and a store that
cannot be reached prints its stack to stderr.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch.distributed as dist

from farflung.errors import ConfigError, DeadlinePassed

__all__ = ["host_of", "reached", "serving"]

T = TypeVar("T")

_SERVE_S = 60.0
"""How long a store may take to be served; a name server may delay the look-up of its address by 10 s."""
_TRY_S = 5.0
"""How long one attempt to reach a store may take."""
_RETRY_S = 0.5
"""How long it takes from one attempt to the next."""


def serving(host: str, port: int) -> dist.TCPStore:
    """Makes a store that listens at one address of this machine alone, where torch's own would listen at all.

    Args:
      host: the address, or a name of it.
      port: 0: any that is free.

    Raises:
      OSError: there is no such host, it cannot be listened at, or the store does not answer its own client.
    """
    (family, _, _, _, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    listener = socket.create_server(address, family=family, backlog=socket.SOMAXCONN)
    port = listener.getsockname()[1]

    def serve() -> dist.TCPStore:
        fd = listener.detach()
        return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=fd)

    try:
        return _on_a_thread(serve, _SERVE_S)
    except TimeoutError:
        raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)) from None


def reached(connect: Callable[[], T], what: str, patience_s: float) -> T:
    """Connects to another process, as soon as that listens.

    Args:
      connect: makes the connection, or what comes of it.
      what: it is, for messages.
      patience_s: how long to try, in seconds.

    Raises:
      DeadlinePassed: it was not reached.
    """
    until, seen = time.monotonic() + patience_s, "no attempt was made"
    while (left_s := until - time.monotonic()) > 0:
        try:
            return _on_a_thread(connect, min(left_s, _TRY_S))
        except TimeoutError:
            seen = "no answer"
        except (ConfigError, OSError, RuntimeError) as error:
            seen = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        time.sleep(min(_RETRY_S, max(0.0, until - time.monotonic())))
    raise DeadlinePassed(0, f"{what} ({seen})", patience_s)


def host_of(store: dist.Store | None) -> str | None:
    """Returns the host at which a store is reached; None if it has none, as a file."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store.host if isinstance(store, dist.TCPStore) else None


def _on_a_thread(connect: Callable[[], T], patience_s: float) -> T:
    """Connects on another thread: torch waits for ever for a process that listens and is no store."""
    made: Future[T] = Future()

    def run() -> None:
        try:
            made.set_result(connect())
        except BaseException as error:
            made.set_exception(error)

    threading.Thread(target=run, name="farflung-store", daemon=True).start()
    return made.result(patience_s)
