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

from farflung.errors import DeadlinePassed

__all__ = ["published", "reached", "serving", "told_by"]

S = TypeVar("S", bound=dist.Store)

_LOOK_S = 0.02
"""How often it is looked whether a key has been published."""
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


def reached(host: str, port: int, connect: Callable[[], S], what: str, patience_s: float) -> S:
    """Connects to the store of another process, as soon as that listens.

    Args:
      host: of the other process.
      port: at which it listens.
      connect: makes the store.
      what: it is, for messages.
      patience_s: how long to try, in seconds.

    Raises:
      DeadlinePassed: it was not reached.
    """
    until, seen = time.monotonic() + patience_s, "no attempt was made"
    while (left_s := until - time.monotonic()) > 0:
        try:
            socket.create_connection((host, port), timeout=min(left_s, _TRY_S)).close()
            return _on_a_thread(connect, min(left_s, _TRY_S))
        except TimeoutError:
            seen = "no answer"
        except (OSError, RuntimeError) as error:
            seen = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        time.sleep(min(_RETRY_S, max(0.0, until - time.monotonic())))
    raise DeadlinePassed(0, f"{what} ({seen})", patience_s)


def published(store: dist.Store, key: str, patience_s: float, ended: threading.Event | None = None) -> bool:
    """Waits until a key is in a store; whether it is.

    Args:
      store: where.
      key: which.
      patience_s: how long to wait, in seconds.
      ended: ends the wait when it is set.
    """
    until, ended = time.monotonic() + patience_s, ended or threading.Event()
    while not store.check([key]):
        if time.monotonic() >= until or ended.wait(_LOOK_S):
            return False
    return True


def told_by(
    rank: int,
    store: dist.Store,
    key: str,
    what: str,
    patience_s: float,
    ended: threading.Event | None = None,
) -> bytes:
    """Waits until a rank has set a key of a store; the value.

    Args:
      rank: sets the key.
      store: of the job.
      key: to wait for.
      what: the value is, for messages.
      patience_s: how long to wait, in seconds.
      ended: ends the wait when it is set.

    Raises:
      DeadlinePassed: the rank has not set the key, or the store has ended.
    """
    begin, why = time.monotonic(), ""
    try:
        if published(store, key, patience_s, ended):
            return store.get(key)
    except RuntimeError as error:  # the store has ended
        why = f" ({type(error).__name__})"
    raise DeadlinePassed(rank, f"{what} in the store{why}", time.monotonic() - begin)


def _on_a_thread(connect: Callable[[], S], patience_s: float) -> S:
    """Connects on another thread: torch waits for ever for a process that listens and is no store."""
    made: Future[S] = Future()

    def run() -> None:
        try:
            made.set_result(connect())
        except BaseException as error:
            made.set_exception(error)

    threading.Thread(target=run, name="farflung-store", daemon=True).start()
    return made.result(patience_s)
