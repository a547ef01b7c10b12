"""Log and replay of decisions that depend on time or arrival; rank 0 broadcasts decisions for all ranks."""

from __future__ import annotations

import json
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from farflung.comm import Purpose, find_collective, resolve_collective
from farflung.errors import ConfigError
from farflung.files import JsonLinesFile, read_json_lines, wrap_decision_errors, wrap_read_errors
from farflung.telemetry import Event
from farflung.types import Communicator, Decision, Json, Payload, Tag

if TYPE_CHECKING:
    from farflung.network import NetworkProfile

__all__ = [
    "COLLECTIVE",
    "DecisionLog",
    "apply_collectives",
    "decide_by_rank_0",
    "format_decision",
    "read_decisions",
    "resolve_collectives",
]


COLLECTIVE = "collective"
"""Name of the decision that resolves ``auto``; its step is the first of the run."""


def resolve_collectives(
    nbytes: Iterable[int], size: int, profile: NetworkProfile | None, *, is_measured: bool = False
) -> Json:
    """Resolves ``auto`` for a run to the name of a collective for each tensor size, as the value of a decision.

    Args:
      nbytes: Sizes of the tensors that a step sums.
      size: Number of replicas.
      profile: Profile of the network; see :func:`farflung.comm.resolve_collective`.
      is_measured: True if the profile is measured.
    """
    return {
        str(n): resolve_collective(n, size, profile, is_measured=is_measured)
        for n in sorted(set(nbytes), reverse=True)
    }


def apply_collectives(comm: Communicator, decision: Decision) -> str:
    """Sets the decided collectives in a communicator; returns their names, for the largest tensor first.

    Raises:
      ConfigError: The decision comes from the log of another kind of run.
    """
    with wrap_decision_errors(decision.name, decision.step):
        chosen: Any = decision.value
        comm.auto_collectives = {int(nbytes): str(name) for nbytes, name in chosen.items()}
        for name in comm.auto_collectives.values():
            find_collective(name)
    return ", ".join(dict.fromkeys(comm.auto_collectives.values())) or "direct"


class DecisionLog:
    """Ordered log of a run's decisions; given the log, a run is a function of its seed.

    Args:
      path: JSON lines file of decisions for all replicas, appended to by :meth:`write`. Decisions of a single replica
        go to files in a folder: with ``decisions.jsonl`` to ``decisions/rank-<r>.jsonl``. A file is created with its
        first decision.
      replay: Decisions to repeat; new ones that depend on time or arrival are then refused.
      keep: True to collect decisions in :attr:`entries` if there is no file.
    """

    def __init__(
        self, path: Path | None = None, replay: Iterable[Decision] | None = None, *, keep: bool = True
    ) -> None:
        self.entries: list[Decision] = []
        """Decisions so far, if there is no file."""
        self._path, self._keep = path, keep
        self._pending: deque[Decision] = deque()
        self._replay = None if replay is None else {(d.name, d.step, d.rank): d for d in replay}

    def record(self, decision: Decision) -> None:
        """Adds a decision; safe to call from any thread, since it accesses no file."""
        if self._path is not None:
            self._pending.append(decision)
        elif self._keep:
            self.entries.append(decision)

    def write(self, event: Event | None = None) -> None:
        """Appends decisions recorded since the last call to the files; always call this on the same thread.

        Args:
          event: Ignored; makes this method a telemetry sink that writes at each event.

        Raises:
          StorageError: A file cannot be written.
        """
        del event
        by_rank: dict[int | None, list[Decision]] = {}
        while self._pending:
            decision = self._pending.popleft()
            by_rank.setdefault(decision.rank, []).append(decision)
        for rank, decisions in by_rank.items():
            assert self._path is not None
            rank_path = self._path.with_suffix("") / f"rank-{rank}.jsonl"
            with JsonLinesFile(self._path if rank is None else rank_path) as lines:
                for decision in decisions:
                    lines.add(_to_json(decision))

    def find_replayed(self, name: str, step: int, rank: int | None = None) -> Decision | None:
        """Returns a decision of the replayed run, or None if it did not make it."""
        return None if self._replay is None else self._replay.get((name, step, rank))

    def find_replayed_step(self, name: str, step: int) -> int | None:
        """Returns the first step from ``step`` on with such a decision for all replicas in the replayed run."""
        keys = self._replay or ()
        return min((at for key, at, rank in keys if (key, rank) == (name, None) and at >= step), default=None)

    def decide(
        self,
        name: str,
        step: int,
        choose: Callable[[], Json],
        rank: int | None = None,
        *,
        timing: bool = True,
    ) -> Decision:
        """Makes a decision, or repeats that of the replayed run, and records it.

        Args:
          name: Name of the decision.
          step: Step that it belongs to.
          choose: Function that makes a new decision.
          rank: Rank of the replica that decides for itself; ``None`` for a decision for all.
          timing: True if it depends on time or arrival, see :class:`farflung.types.Decision`. Other decisions may be
            made anew if the replayed run did not make them.

        Raises:
          ConfigError: The replayed run did not make the decision.
        """
        decision = self.find_replayed(name, step, rank)
        if decision is None:
            if self._replay is not None and timing:
                whose = "" if rank is None else f" of rank {rank}"
                raise ConfigError(
                    f"--replay: the log holds no decision {name!r}{whose} at step {step}: it is of another run, or "
                    "ends there"
                )
            decision = Decision(name, step, choose(), timing, rank)
        self.record(decision)
        return decision


def format_decision(decision: Decision) -> str:
    """Formats a decision as one line of a log."""
    return json.dumps(_to_json(decision), separators=(",", ":"))


def _to_json(decision: Decision) -> dict[str, Json]:
    return {key: value for key, value in asdict(decision).items() if key != "rank" or value is not None}


def read_decisions(path: Path) -> list[Decision]:
    """Reads a run's decisions from the file for all replicas and those of each; see :class:`DecisionLog`.

    A truncated last line is ignored.

    Raises:
      ConfigError: A file cannot be read or a line is not a decision; the message names file and line.
    """
    with wrap_read_errors(path, "not a path"):
        rank_paths = sorted((path.parent / path.stem).glob("rank-*.jsonl"))
        files = rank_paths if rank_paths and not path.exists() else [path, *rank_paths]
    decisions: list[Decision] = []
    for file in files:
        read_json_lines(
            file,
            "not a decision; give the decisions.jsonl of a run",
            lambda content: decisions.append(_parse_decision(content)),
            ConfigError,
        )
    return decisions


def _parse_decision(content: dict[str, Json]) -> Decision:
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
    choose: Callable[[], Json],
    *,
    timing: bool = True,
    purpose: Purpose = Purpose.DECISION,
) -> Decision:
    """Calls ``choose`` on rank 0 and broadcasts its value as JSON to all ranks.

    Args:
      comm: Communicator of the view whose rank 0 decides.
      log: Log in which rank 0 records the decision or finds the replayed one.
      name: Name of the decision, unique for each step.
      step: Step that it belongs to.
      choose: Function that makes the decision on rank 0.
      timing: True if it depends on time or arrival; see :class:`farflung.types.Decision`.
      purpose: Purpose of the messages.
    """
    tag = Tag(purpose.build_exchange_id(step), zlib.crc32(name.encode()))
    if comm.rank != 0:
        (text,) = (await comm.recv(0, tag)).iter_tensors()
        return Decision(name, step, json.loads(bytes(text.tolist())), timing)
    decision = log.decide(name, step, choose, timing=timing)
    text = torch.frombuffer(bytearray(json.dumps(decision.value).encode()), dtype=torch.uint8)
    for rank in range(1, comm.size):
        comm.send(Payload((text,)), rank, tag)
    return decision
