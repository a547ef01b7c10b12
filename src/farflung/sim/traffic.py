"""What the exchanges of a run moved, so that they can be timed again: sizes and order, no gradients.

A file of JSON lines. ``{"journey": n, "ops": [...]}`` is what one rank does in an exchange; the same journey is there
once, however often it is taken. ``{"step": s, "number": k, "journeys": [...], ...}`` is one exchange: the journey of
each rank, and what it brought beside the mean. ``{"step": s, "number": k, "learn": [...]}`` is what each rank computes
when the result of an exchange is merged, from that step on; ``learn_together`` likewise, once all of its step are.
``{"step": s, "rank": r, "fill": [...]}`` is the order in which the buckets of a backward pass filled, where that is not
the order of their numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias, cast

from farflung.errors import DataError
from farflung.files import json_lines
from farflung.types import Json

__all__ = ["Exchanged", "Op", "Traffic"]

Op: TypeAlias = "tuple[str | int, ...]"
"""``("hops", count)``, ``("send", dst, hop, nbytes)``, ``("recv", src, hop)``,
``("compute", operation, method, numel)`` or ``("whole", collective, dtype, numel, side)``."""


@dataclass(frozen=True, slots=True)
class Exchanged:
    """One exchange of all ranks.

    Args:
      journeys: what each rank did, by the number of its journey.
      weight: the sum of the weights.
      metadata: of all ranks, summed.
      learns: whether the reducer's state changed when the result was merged.
    """

    journeys: tuple[int, ...]
    weight: float
    metadata: tuple[float, ...]
    learns: bool


@dataclass(slots=True)
class Traffic:
    """What :class:`farflung.sim.TrafficRecorder` has written.

    Args:
      journeys: by number.
      exchanges: by step and by how many began before it at that step.
      fills: orders of buckets that are not those of their numbers, by step and rank.
      learned: what learning computes from a step on, by whether it is together, number, and that step.
    """

    journeys: dict[int, tuple[Op, ...]] = field(default_factory=dict)
    exchanges: dict[tuple[int, int], Exchanged] = field(default_factory=dict)
    fills: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    learned: dict[tuple[bool, int], dict[int, tuple[Op, ...]]] = field(default_factory=dict)

    @staticmethod
    def read(path: Path) -> Traffic:
        """Reads a file.

        Raises:
          DataError: absent or damaged; names it.
        """
        if not path.exists():
            raise DataError(f"{path}: there is none; only runs of farflung simulate record their traffic")
        traffic = Traffic()
        json_lines(path, "damaged; simulate the run anew", traffic._take, DataError, whole=True)
        return traffic

    def learning(self, step: int, number: int, *, together: bool = False) -> tuple[Op, ...]:
        """What learning from an exchange computes."""
        known = self.learned.get((together, number), {})
        since = max((first for first in known if first <= step), default=None)
        return () if since is None else known[since]

    def _take(self, row: dict[str, Json]) -> None:
        if "journey" in row:
            self.journeys[cast(int, row["journey"])] = _ops(row["ops"])
        elif "fill" in row:
            self.fills[cast(int, row["step"]), cast(int, row["rank"])] = cast("list[int]", row["fill"])
        elif "journeys" not in row:
            (kind,) = row.keys() & {"learn", "learn_together"}
            known = self.learned.setdefault((kind == "learn_together", cast(int, row["number"])), {})
            known[cast(int, row["step"])] = _ops(row[kind])
        else:
            self.exchanges[cast(int, row["step"]), cast(int, row["number"])] = Exchanged(
                tuple(cast("list[int]", row["journeys"])),
                cast(float, row["weight"]),
                tuple(cast("list[float]", row["metadata"])),
                cast(bool, row["learns"]),
            )


def _ops(ops: Json) -> tuple[Op, ...]:
    return tuple(_op(op) for op in cast("list[list[str | int]]", ops))


def _op(op: list[str | int]) -> Op:
    """One entry of a journey.

    Raises:
      ValueError: it is none.
    """
    kind, *numbers = op
    words = _WORDS.get(kind, 0)
    if len(numbers) != _NUMBERS[kind] or not all(type(one) is str for one in numbers[:words]):
        raise ValueError(f"{op}: not an entry of a journey")
    if not all(type(one) is int and 0 <= one < 1 << 62 for one in numbers[words:]):
        raise ValueError(f"{op}: not an entry of a journey")
    return tuple(op)


_NUMBERS: dict[str | int, int] = {"hops": 1, "send": 3, "recv": 2, "compute": 3, "whole": 4}
_WORDS: dict[str | int, int] = {"compute": 2, "whole": 2}
