"""The thread that carries exchanges."""

from __future__ import annotations

import threading

from farflung.wall import WallRuntime

NUM_CALLS = 5000
"""More than a socket pair holds bytes of, each of which takes several hundred of its buffer."""


def test_a_burst_of_calls_from_a_handler_does_not_wait_for_itself() -> None:
    runtime, done = WallRuntime(0, 1, None), threading.Event()
    thread, calls = runtime._thread, list[int]()

    def burst() -> None:
        for number in range(NUM_CALLS):
            thread.call_soon(lambda number=number: calls.append(number))  # type: ignore[misc]
        thread.call_soon(done.set)

    thread.call_soon(lambda: thread.call_at(0.0, burst))
    assert done.wait(timeout=60)
    assert calls == list(range(NUM_CALLS))
    runtime.close()
