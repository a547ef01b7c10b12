"""Signals that ask a command to stop: Ctrl-C, SIGTERM, and SIGHUP, which comes when a terminal goes away."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["asked_to_stop", "on_stop"]

_STOPS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


@contextmanager
def on_stop(ask: Callable[[], object], signals: Collection[signal.Signals] = _STOPS) -> Iterator[None]:
    """Inside, calls ``ask`` at every signal to stop; nothing outside the main thread, which alone gets signals.

    A SIGHUP that was ignored before, as ``nohup`` has it, stays ignored.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        del number, frame
        ask()

    here = threading.current_thread() is threading.main_thread()
    spared = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
    before = {number: signal.signal(number, handle) for number in {*signals} - spared if here}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def asked_to_stop(begun: Callable[[], bool] = lambda: True) -> Iterator[threading.Event]:
    """Inside, the first signal to stop sets the event; the second interrupts, and so does one before work has begun."""
    asked = threading.Event()

    def ask() -> None:
        if asked.is_set() or not begun():
            raise KeyboardInterrupt
        asked.set()

    with on_stop(ask):
        yield asked
