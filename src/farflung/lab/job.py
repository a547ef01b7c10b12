"""Execution of one command at every node of a lab, to its end."""

from __future__ import annotations

import json
import logging
import math
import os
import select
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from farflung.faults import FaultPlan
from farflung.lab.children import Child
from farflung.lab.lab import Counters, Lab
from farflung.lab.stage import LabEnvironment

__all__ = ["JobResult", "run_job"]

STOP_TIMEOUT_S = 60.0
"""Time without events of any worker after which workers are killed, once a stop was requested."""


@dataclass(frozen=True, slots=True)
class JobResult:
    """Result of a job.

    Args:
      exit_codes: Exit codes of workers in rank order; a killed worker has 137.
      counters: Counters of each node's interface since the workers' start.
      lost_packets: Number of packets lost by full queues, a profile's loss or cuts.
      seconds: Time from the first worker's start to the last one's end.
      is_stopped: Whether the job was asked to stop.
      first_steps_s: Time from the first worker's start to each worker's first step; ``None`` if not reported. Times
        of a plan count from the earliest.
    """

    exit_codes: tuple[int, ...]
    counters: tuple[Counters, ...]
    lost_packets: int
    seconds: float
    is_stopped: bool
    first_steps_s: tuple[float | None, ...] = ()


def run_job(
    lab: Lab,
    command: Sequence[str],
    environment: Mapping[str, str],
    outputs: Sequence[int | None] | None = None,
    *,
    plan: FaultPlan | None = None,
    event_socket: socket.socket | None = None,
    stop_fd: int | None = None,
) -> JobResult:
    """Runs a command at every node until all have ended, and kills workers that a fault hangs for ever.

    Args:
      lab: Lab with the nodes.
      command: Program and its arguments.
      environment: Environment of all workers; each node's own variables are added.
      outputs: Descriptor for the output of each node's worker.
      plan: Fault plan.
      event_socket: Datagram socket on which workers report events. The plan's times count from the first step;
        without the socket, from the workers' start.
      stop_fd: Descriptor with a byte for each request to stop; the first sends SIGINT, the second kills.

    Raises:
      Unsupported, ConfigError: The lab cannot carry out the plan.
      LabError: The delay line ended.
    """
    faults = LabEnvironment(lab, plan or FaultPlan(), has_events=event_socket is not None)
    baseline = [lab.read_counters(node) for node in range(lab.nodes)]
    lab.begin()
    start = time.monotonic()
    for node in range(lab.nodes):
        lab.start(node, command, environment, None if outputs is None else outputs[node])
    stops, kill_at = 0, math.inf
    while running := [child for child in lab.workers if child is not None and child.exit_code is None]:
        lab.check_line()
        faults.run_due()
        if is_hung := faults.is_permanently_hung():
            logging.getLogger("farflung").warning("only workers that hang for ever are left: they are killed")
        if is_hung or stops > 1 or time.monotonic() >= kill_at:
            for child in running:
                child.kill()
            break
        deadline = min(kill_at, faults.get_next_time())
        sources: list[Child | socket.socket | int] = [*lab.iter_watched()]
        sources += [source for source in (stop_fd, event_socket) if source is not None]
        timeout_s = None if math.isinf(deadline) else max(0.0, deadline - time.monotonic())
        ready, _, _ = select.select(sources, [], [], timeout_s)
        for child in running:
            child.wait(0.0)
        if event_socket is not None and event_socket in ready:
            faults.handle_event(json.loads(event_socket.recv(1 << 20)))
            kill_at = time.monotonic() + STOP_TIMEOUT_S if stops else math.inf
        if stop_fd is not None and stop_fd in ready:
            os.read(stop_fd, 1)
            stops += 1
            kill_at = time.monotonic() + STOP_TIMEOUT_S
            for node in range(lab.nodes):
                lab.send_signal(node, signal.SIGINT)
    faults.injector.warn_of_missed_faults()
    exit_codes = [None if child is None else child.exit_code for child in lab.workers]
    codes = [128 + signal.SIGKILL if code is None or code < 0 else code for code in exit_codes]
    counters = tuple(lab.read_counters(node) - baseline[node] for node in range(lab.nodes))
    seconds = time.monotonic() - start
    steps_s = tuple(
        faults.first_steps_s[node] - start if node in faults.first_steps_s else None
        for node in range(lab.nodes)
    )
    return JobResult(tuple(codes), counters, lab.count_lost(), seconds, stops > 0, steps_s)
