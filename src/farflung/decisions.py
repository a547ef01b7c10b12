"""Decisions, which depend on time or arrival: a rank makes and logs them; those of rank 0 are broadcast."""

from __future__ import annotations

import json
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from farflung.comm import Purpose, collective_named, resolve_collective
from farflung.errors import ConfigError
from farflung.files import JsonLinesFile, deciding, json_lines
from farflung.telemetry import Event
from farflung.types import Communicator, Decision, Json, Payload, Tag

if TYPE_CHECKING:
    from farflung.network import NetworkProfile

__all__ = [
    "COLLECTIVE",
    "DecisionLog",
    "adopt_collectives",
    "collectives_of",
    "decide_by_rank_0",
    "decision_json",
    "read_decisions",
]


COLLECTIVE = "collective"
"""The name of the decision that resolves ``auto``; its step is the first of the run."""


def collectives_of(nbytes: Iterable[int], size: int, profile: NetworkProfile | None) -> Json:
    """Resolves ``auto`` for a run, as a decision's value: the name of a collective for each size of tensor in bytes.

    Args:
      nbytes: of the tensors that a step sums.
      size: number of replicas.
      profile: of the network; see :func:`farflung.comm.resolve_collective`.
    """
    return {str(each): resolve_collective(each, size, profile) for each in sorted(set(nbytes), reverse=True)}


def adopt_collectives(comm: Communicator, decision: Decision) -> str:
    """Sets the decided collectives in a communicator; returns their names, that for the largest tensor first.

    Raises:
      ConfigError: the decision comes from a log, and is not of such a run.
    """
    with deciding(decision.name, decision.step):
        chosen: Any = decision.value
        comm.auto = {int(nbytes): str(name) for nbytes, name in chosen.items()}
        for name in comm.auto.values():
            collective_named(name)
    return ", ".join(dict.fromkeys(comm.auto.values())) or "direct"


class DecisionLog:
    """The decisions of a run, in order. With an equal log a run is a function of its seed.

    Args:
      path: the file that takes those for all replicas at each :meth:`write`, a JSON object on each line. What a replica
        decides for itself goes beside it, for ``decisions.jsonl`` to ``decisions/rank-<r>.jsonl``. A file appears with
        its first decision, and whatever it holds already stays.
      replay: decisions to make again. Where a choice depends on time or arrival, nothing else is decided then.
      keep: whether to keep in :attr:`entries` what goes to no file.
    """

    def __init__(
        self, path: Path | None = None, replay: Iterable[Decision] | None = None, *, keep: bool = True
    ) -> None:
        self.entries: list[Decision] = []
        """Those made so far, where no file takes them."""
        self._path, self._keep = path, keep
        self._unwritten: deque[Decision] = deque()
        self._replay = None if replay is None else {(d.name, d.step, d.rank): d for d in replay}

    def record(self, decision: Decision) -> None:
        """Adds a decision; callable from any thread, since it touches no file."""
        if self._path is not None:
            self._unwritten.append(decision)
        elif self._keep:
            self.entries.append(decision)

    def write(self, event: Event | None = None) -> None:
        """Appends to the files what was recorded since the last call; always to be called on the same thread.

        Args:
          event: lets this method be a sink of telemetry, which writes at each event of a replica.

        Raises:
          StorageError: a file cannot be written.
        """
        del event
        found: dict[int | None, list[Decision]] = {}
        while self._unwritten:
            decision = self._unwritten.popleft()
            found.setdefault(decision.rank, []).append(decision)
        for rank, decisions in found.items():
            assert self._path is not None
            own = self._path.with_suffix("") / f"rank-{rank}.jsonl"
            with JsonLinesFile(self._path if rank is None else own) as lines:
                for decision in decisions:
                    lines.add(_content(decision))

    def replayed(self, name: str, step: int, rank: int | None = None) -> Decision | None:
        """Finds a decision of the run that is replayed; ``None`` where it made none."""
        return None if self._replay is None else self._replay.get((name, step, rank))

    def first_replayed(self, name: str, step: int) -> int | None:
        """Finds the first step from ``step`` on at which the run that is replayed made such a decision for all."""
        steps = [at for one, at, rank in self._replay or () if (one, rank) == (name, None) and at >= step]
        return min(steps, default=None)

    def decide(
        self, name: str, step: int, local: Callable[[], Json], rank: int | None = None, *, timing: bool = True
    ) -> Decision:
        """Makes a choice: that of the run which is replayed, or a new one.

        Args:
          name: of what is decided.
          step: the step it belongs to.
          local: the choice, where it is a new one.
          rank: the replica that decides for itself alone; ``None``: it is for all.
          timing: see :class:`farflung.types.Decision`. What does not depend on time or arrival may be decided anew
            where the run that is replayed did not decide it.

        Raises:
          ConfigError: the run that is replayed did not make it.
        """
        decision = self.replayed(name, step, rank)
        if decision is None:
            if self._replay is not None and timing:
                whose = "" if rank is None else f" of rank {rank}"
                raise ConfigError(
                    f"--replay: the log holds no decision {name!r}{whose} at step {step}: it is of another run, or "
                    "ends there"
                )
            decision = Decision(name, step, local(), timing, rank)
        self.record(decision)
        return decision


def decision_json(decision: Decision) -> str:
    """Formats a decision as one line of a log."""
    return json.dumps(_content(decision), separators=(",", ":"))


def _content(decision: Decision) -> dict[str, Json]:
    return {key: value for key, value in asdict(decision).items() if key != "rank" or value is not None}


def read_decisions(path: Path) -> list[Decision]:
    """Reads the decisions of a run: a file for all replicas, and those of each beside it; see :class:`DecisionLog`.

    A last line that was cut short is left out.

    Raises:
      ConfigError: a file cannot be read, or a line is no decision; one line with file and line.
    """
    own = sorted((path.parent / path.stem).glob("rank-*.jsonl"))
    files = own if own and not path.exists() else [path, *own]
    decisions: list[Decision] = []
    for file in files:
        json_lines(
            file,
            "not a decision; give the decisions.jsonl of a run",
            lambda content: decisions.append(_decision(content)),
            ConfigError,
        )
    return decisions


def _decision(content: dict[str, Json]) -> Decision:
    name, step, value, timing = (content[key] for key in ("name", "step", "value", "timing"))
    rank = content.get("rank")
    if not (isinstance(name, str) and type(step) is int and isinstance(timing, bool)):
        raise TypeError("a name, a step and whether it depends on time were due")
    if not (rank is None or type(rank) is int):
        raise TypeError("rank is no number")
    return Decision(name, step, value, timing, rank)


async def decide_by_rank_0(
    comm: Communicator,
    log: DecisionLog,
    name: str,
    step: int,
    local: Callable[[], Json],
    *,
    timing: bool = True,
    purpose: Purpose = Purpose.DECISION,
) -> Decision:
    """Calls ``local`` on rank 0 and broadcasts its value, as JSON, to all ranks.

    Args:
      comm: the view whose rank 0 decides.
      log: where rank 0 records it, or finds what was decided in the run that is replayed.
      name: what is decided; with ``step`` it names the decision, so each is made once.
      step: the step it belongs to.
      local: the decider's choice.
      timing: whether it depends on time or arrival; see :class:`farflung.types.Decision`.
      purpose: of the messages.
    """
    tag = Tag(purpose.at(step), zlib.crc32(name.encode()))
    if comm.rank != 0:
        (text,) = (await comm.recv(0, tag)).tensors()
        return Decision(name, step, json.loads(bytes(text.tolist())), timing)
    decision = log.decide(name, step, local, timing=timing)
    text = torch.frombuffer(bytearray(json.dumps(decision.value).encode()), dtype=torch.uint8)
    for rank in range(1, comm.size):
        comm.send(Payload((text,)), rank, tag)
    return decision
