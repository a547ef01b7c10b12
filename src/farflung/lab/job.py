"""One command run at every node of a lab, to its end."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from farflung.lab.lab import Counters, Lab

__all__ = ["Event", "JobResult", "run_job"]

STOP_S = 30.0
"""How long a stop that was asked for may take before workers are killed."""

Event = tuple[float, Callable[[Lab], None]]
"""Something that happens to a lab so many seconds after its workers have started."""


@dataclass(frozen=True, slots=True)
class JobResult:
    """How a job ended.

    Args:
      exit_codes: of each worker, in rank order; a worker that was killed has 137.
      counters: what each node's interface counted from the workers' start on.
      lost_packets: packets that full queues, a profile's loss or cuts have taken.
      seconds: from the first worker's start to the last one's end.
      stopped: whether it was asked to stop.
    """

    exit_codes: tuple[int, ...]
    counters: tuple[Counters, ...]
    lost_packets: int
    seconds: float
    stopped: bool


def run_job(
    lab: Lab,
    command: Sequence[str],
    environment: Mapping[str, str],
    outputs: Sequence[int | None] | None = None,
    *,
    events: Sequence[Event] = (),
    bell: int | None = None,
) -> JobResult:
    """Runs a command at every node until all have ended.

    Args:
      lab: the nodes.
      command: a program and its arguments.
      environment: for all; each node's own variables are added.
      outputs: a descriptor for each node that takes what its worker says.
      events: what happens on the way.
      bell: a descriptor from which a byte comes for every request to stop: the first is passed on to the workers as
        SIGINT, the second kills them.

    Raises:
      LabError: the delay line ended.
    """
    before = [lab.counters(node) for node in range(lab.nodes)]
    left = sorted(events, key=lambda event: event[0])
    lab.begin()
    begun = time.monotonic()
    for node in range(lab.nodes):
        lab.start(node, command, environment, None if outputs is None else outputs[node])
    stops, kill_at = 0, float("inf")
    while running := [child for child in lab.workers if child is not None and child.exit_code is None]:
        lab.check_line()
        now = time.monotonic()
        while left and begun + left[0][0] <= now:
            left.pop(0)[1](lab)
        if now >= kill_at or stops > 1:
            for child in running:
                child.kill()
            break
        until = min(kill_at, begun + left[0][0] if left else kill_at)
        watched = [*lab.watched(), *([] if bell is None else [bell])]
        ready, _, _ = select.select(watched, [], [], None if until == float("inf") else max(0.0, until - now))
        for child in running:
            child.wait(0.0)
        if bell is not None and bell in ready:
            os.read(bell, 1)
            stops += 1
            kill_at = now + STOP_S
            for node in range(lab.nodes):
                lab.signal(node, signal.SIGINT)
    codes = [128 + signal.SIGKILL if code is None or code < 0 else code for code in _codes(lab)]
    counted = tuple(lab.counters(node) - before[node] for node in range(lab.nodes))
    return JobResult(tuple(codes), counted, lab.lost(), time.monotonic() - begun, stops > 0)


def _codes(lab: Lab) -> list[int | None]:
    return [None if child is None else child.exit_code for child in lab.workers]
