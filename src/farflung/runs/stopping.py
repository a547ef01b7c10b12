"""Stop signals of commands: SIGINT (Ctrl-C), SIGTERM, and SIGHUP when a terminal closes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["handle_stop_signals", "watch_stop_signals"]

_STOP_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


@contextmanager
def handle_stop_signals(
    handle_stop: Callable[[], object], signals: Collection[signal.Signals] = _STOP_SIGNALS
) -> Iterator[None]:
    """Calls a function at every stop signal within the context; does nothing outside the main thread.

    If SIGHUP was ignored before, as under ``nohup``, it stays ignored.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        del number, frame
        handle_stop()

    is_main = threading.current_thread() is threading.main_thread()
    ignored_signals = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
    previous = {number: signal.signal(number, handle) for number in {*signals} - ignored_signals if is_main}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def watch_stop_signals(has_begun: Callable[[], bool] = lambda: True) -> Iterator[threading.Event]:
    """Yields an event that the first stop signal sets; the second, or one before work begins, interrupts."""
    stop_requested = threading.Event()

    def request_stop() -> None:
        if stop_requested.is_set() or not has_begun():
            raise KeyboardInterrupt
        stop_requested.set()

    with handle_stop_signals(request_stop):
        yield stop_requested
