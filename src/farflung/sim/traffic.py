"""Recorded traffic of a run's exchanges, so that they can be timed again: sizes and order, no gradients.

The file has JSON lines. ``{"op_list": n, "ops": [...]}`` are the operations of one rank in an exchange; equal lists are
stored once. ``{"step": s, "number": k, "op_lists": [...], ...}`` is one exchange: the list of each rank, and its
results besides the mean. ``{"step": s, "number": k, "update": [...]}`` is the computation of each rank's state update
when the result of an exchange is merged, from that step on. ``joint_update`` is that of the joint update of a step.
``{"step": s, "rank": r, "bucket_order": [...]}`` is the order in which the buckets of a backward pass filled, if they
did not fill by number.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias, cast

from farflung.errors import DataError
from farflung.files import read_json_lines
from farflung.types import Json

__all__ = ["ExchangeRecord", "Op", "RecordedTraffic"]

Op: TypeAlias = "tuple[str | int, ...]"
"""``("hops", count)``, ``("send", dst, hop, nbytes)``, ``("recv", src, hop)``, ``("compute", operation, method,
numel)`` or ``("collective", collective, dtype, numel, side)``."""


@dataclass(frozen=True, slots=True)
class ExchangeRecord:
    """Record of one exchange of all ranks.

    Args:
      op_list_numbers: Number of the list of each rank.
      weight: Sum of the weights.
      metadata: Sum of the metadata of all ranks.
      has_update: True if the reducer's state changed when the result was merged.
    """

    op_list_numbers: tuple[int, ...]
    weight: float
    metadata: tuple[float, ...]
    has_update: bool


@dataclass(slots=True)
class RecordedTraffic:
    """Traffic recorded by :class:`farflung.sim.TrafficRecorder`.

    Args:
      op_lists: Lists of operations, by number.
      exchanges: Exchanges by step, and by number within the step.
      fills: Bucket orders that are not by number, by step and rank.
      update_ops: Operations of updates from a step on, by joint or not, number, and that step.
    """

    op_lists: dict[int, tuple[Op, ...]] = field(default_factory=dict)
    exchanges: dict[tuple[int, int], ExchangeRecord] = field(default_factory=dict)
    fills: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    update_ops: dict[tuple[bool, int], dict[int, tuple[Op, ...]]] = field(default_factory=dict)

    @staticmethod
    def read(path: Path) -> RecordedTraffic:
        """Reads a file.

        Raises:
          DataError: The file is absent or damaged; names it.
        """
        if not path.exists():
            raise DataError(f"{path}: there is none; only runs of farflung simulate record their traffic")
        traffic = RecordedTraffic()
        read_json_lines(path, "damaged; simulate the run anew", traffic._add_row, DataError, is_strict=True)
        return traffic

    def find_update(self, step: int, number: int, *, is_joint: bool = False) -> tuple[Op, ...]:
        """Finds the operations of the update after an exchange."""
        ops_by_step = self.update_ops.get((is_joint, number), {})
        latest_step = max((step_begun for step_begun in ops_by_step if step_begun <= step), default=None)
        return () if latest_step is None else ops_by_step[latest_step]

    def _add_row(self, row: dict[str, Json]) -> None:
        if "op_list" in row:
            self.op_lists[cast(int, row["op_list"])] = _parse_ops(row["ops"])
        elif "bucket_order" in row:
            self.fills[cast(int, row["step"]), cast(int, row["rank"])] = cast(
                "list[int]", row["bucket_order"]
            )
        elif "op_lists" not in row:
            (kind,) = row.keys() & {"update", "joint_update"}
            ops_by_step = self.update_ops.setdefault((kind == "joint_update", cast(int, row["number"])), {})
            ops_by_step[cast(int, row["step"])] = _parse_ops(row[kind])
        else:
            self.exchanges[cast(int, row["step"]), cast(int, row["number"])] = ExchangeRecord(
                tuple(cast("list[int]", row["op_lists"])),
                cast(float, row["weight"]),
                tuple(cast("list[float]", row["metadata"])),
                cast(bool, row["has_update"]),
            )


def _parse_ops(ops: Json) -> tuple[Op, ...]:
    return tuple(_parse_op(op) for op in cast("list[list[str | int]]", ops))


def _parse_op(op: list[str | int]) -> Op:
    """Parses one operation.

    Raises:
      ValueError: It is not an operation.
    """
    kind, *fields = op
    num_strings = _NUM_STRINGS.get(kind, 0)
    if len(fields) != _NUM_FIELDS[kind] or not all(type(entry) is str for entry in fields[:num_strings]):
        raise ValueError(f"{op}: not an operation")
    if not all(type(entry) is int and 0 <= entry < 1 << 62 for entry in fields[num_strings:]):
        raise ValueError(f"{op}: not an operation")
    return tuple(op)


_NUM_FIELDS: dict[str | int, int] = {"hops": 1, "send": 3, "recv": 2, "compute": 3, "collective": 4}
_NUM_STRINGS: dict[str | int, int] = {"compute": 2, "collective": 2}
