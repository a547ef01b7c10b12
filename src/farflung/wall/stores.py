"""Stores of torch.distributed, where processes find each other, with waits that a signal can interrupt.

A waiting torch store does not return to Python, so Ctrl-C has no effect until its timeout. An unreachable store prints
its stack to stderr.
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

__all__ = ["get_host", "retry_connect", "serve_store"]

T = TypeVar("T")

_SERVE_S = 60.0
"""Maximum time to start serving a store; a name server may delay the look-up of its address by 10 s."""
_TRY_S = 5.0
"""Maximum time of one attempt to reach a store."""
_RETRY_S = 0.5
"""Delay between two attempts."""


def serve_store(host: str, port: int) -> dist.TCPStore:
    """Serves a store that listens at one address of this machine only; torch's own would listen at all addresses.

    Args:
      host: Address, or a name of it.
      port: Port; 0 for any that is free.

    Raises:
      OSError: The host does not exist, cannot be listened at, or the store does not answer its own client.
    """
    (family, _, _, _, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    listener = socket.create_server(address, family=family, backlog=socket.SOMAXCONN)
    port = listener.getsockname()[1]

    def serve() -> dist.TCPStore:
        fd = listener.detach()
        return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=fd)

    try:
        return _run_in_thread(serve, _SERVE_S)
    except TimeoutError:
        raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)) from None


def retry_connect(connect: Callable[[], T], description: str, patience_s: float) -> T:
    """Connects to another process, with retries until it listens.

    Args:
      connect: Function that connects, and returns the connection or a product of it.
      description: Name of the process, for messages.
      patience_s: Maximum time in seconds.

    Raises:
      DeadlinePassed: The process was not reached.
    """
    deadline, problem = time.monotonic() + patience_s, "no attempt was made"
    while (left_s := deadline - time.monotonic()) > 0:
        try:
            return _run_in_thread(connect, min(left_s, _TRY_S))
        except TimeoutError:
            problem = "no answer"
        except (ConfigError, OSError, RuntimeError) as error:
            problem = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        time.sleep(min(_RETRY_S, max(0.0, deadline - time.monotonic())))
    raise DeadlinePassed(0, f"{description} ({problem})", patience_s)


def get_host(store: dist.Store | None) -> str | None:
    """Returns the host of a store; None if it has none, as a file."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store.host if isinstance(store, dist.TCPStore) else None


def _run_in_thread(connect: Callable[[], T], patience_s: float) -> T:
    """Connects on another thread, because torch may wait forever; raises TimeoutError after ``patience_s``."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(connect())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="farflung-store", daemon=True).start()
    return result.result(patience_s)
