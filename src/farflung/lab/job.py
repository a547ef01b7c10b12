"""One command run at every node of a lab, to its end."""

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
from farflung.lab.stage import LabStage

__all__ = ["JobResult", "run_job"]

STOP_S = 60.0
"""For how long no worker may tell of anything, once a stop was asked for, before workers are killed."""


@dataclass(frozen=True, slots=True)
class JobResult:
    """How a job ended.

    Args:
      exit_codes: of each worker, in rank order; a worker that was killed has 137.
      counters: what each node's interface counted from the workers' start on.
      lost_packets: packets that full queues, a profile's loss or cuts have taken.
      seconds: from the first worker's start to the last one's end.
      stopped: whether it was asked to stop.
      began_s: from the first worker's start to when each worker began its first step, in rank order; times of a plan
        count from the first of them. ``None`` of one that has told of none.
    """

    exit_codes: tuple[int, ...]
    counters: tuple[Counters, ...]
    lost_packets: int
    seconds: float
    stopped: bool
    began_s: tuple[float | None, ...] = ()


def run_job(
    lab: Lab,
    command: Sequence[str],
    environment: Mapping[str, str],
    outputs: Sequence[int | None] | None = None,
    *,
    plan: FaultPlan | None = None,
    told: socket.socket | None = None,
    bell: int | None = None,
) -> JobResult:
    """Runs a command at every node until all have ended; those that a fault has hang for ever are killed at the end.

    Args:
      lab: the nodes.
      command: a program and its arguments.
      environment: for all; each node's own variables are added.
      outputs: a descriptor for each node that takes what its worker says.
      plan: what goes wrong.
      told: a datagram socket on which workers tell of their events; times of the plan are counted from the first step.
        Without it there are no steps, and times are counted from the workers' start.
      bell: a descriptor from which a byte comes for every request to stop: the first is passed on to the workers as
        SIGINT, the second kills them.

    Raises:
      Unsupported, ConfigError: the plan cannot be carried.
      LabError: the delay line ended.
    """
    stage = LabStage(lab, plan or FaultPlan(), told=told is not None)
    before = [lab.counters(node) for node in range(lab.nodes)]
    lab.begin()
    begun = time.monotonic()
    for node in range(lab.nodes):
        lab.start(node, command, environment, None if outputs is None else outputs[node])
    stops, kill_at = 0, math.inf
    while running := [child for child in lab.workers if child is not None and child.exit_code is None]:
        lab.check_line()
        stage.go_on()
        if hung := stage.is_hung_for_good():
            logging.getLogger("farflung").warning("only workers that hang for ever are left: they are killed")
        if hung or stops > 1 or time.monotonic() >= kill_at:
            for child in running:
                child.kill()
            break
        until = min(kill_at, stage.due())
        watched: list[Child | socket.socket | int] = [*lab.watched()]
        watched += [one for one in (bell, told) if one is not None]
        patience = None if math.isinf(until) else max(0.0, until - time.monotonic())
        ready, _, _ = select.select(watched, [], [], patience)
        for child in running:
            child.wait(0.0)
        if told is not None and told in ready:
            stage.hear(json.loads(told.recv(1 << 20)))
            kill_at = time.monotonic() + STOP_S if stops else math.inf
        if bell is not None and bell in ready:
            os.read(bell, 1)
            stops += 1
            kill_at = time.monotonic() + STOP_S
            for node in range(lab.nodes):
                lab.signal(node, signal.SIGINT)
    stage.injector.warn_of_missed()
    ended = [None if child is None else child.exit_code for child in lab.workers]
    codes = [128 + signal.SIGKILL if code is None or code < 0 else code for code in ended]
    counted = tuple(lab.counters(node) - before[node] for node in range(lab.nodes))
    seconds = time.monotonic() - begun
    began = tuple(stage.began[node] - begun if node in stage.began else None for node in range(lab.nodes))
    return JobResult(tuple(codes), counted, lab.lost(), seconds, stops > 0, began)
