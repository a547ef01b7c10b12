"""Choices that depend on time or arrival: one decider, everybody told, all recorded."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable

import torch

from farflung.comm import Purpose
from farflung.types import Communicator, Decision, Json, Payload, Tag

__all__ = ["DecisionLog", "decide_by_rank_0"]


class DecisionLog:
    """The decisions of a run, in order. With an equal log a run is a function of its seed."""

    def __init__(self) -> None:
        self.entries: list[Decision] = []

    def record(self, decision: Decision) -> None:
        """Adds one."""
        self.entries.append(decision)


async def decide_by_rank_0(
    comm: Communicator, log: DecisionLog, name: str, step: int, local: Callable[[], Json]
) -> Decision:
    """Asks ``local`` on rank 0 and carries its value, as JSON, to everybody.

    Args:
      comm: the view whose rank 0 decides.
      log: where rank 0 records it.
      name: what is decided; with ``step`` it names the decision, so each is made once.
      step: the step it belongs to.
      local: the decider's choice.
    """
    tag = Tag(Purpose.DECISION.at(step), zlib.crc32(name.encode()))
    if comm.rank != 0:
        (text,) = (await comm.recv(0, tag)).tensors()
        return Decision(name, step, json.loads(bytes(text.tolist())))
    decision = Decision(name, step, local())
    text = torch.frombuffer(bytearray(json.dumps(decision.value).encode()), dtype=torch.uint8)
    for rank in range(1, comm.size):
        comm.send(Payload((text,)), rank, tag)
    log.record(decision)
    return decision
