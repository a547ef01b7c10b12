"""Results of a benchmark: the rows that are expected, what was measured for each, and the verdict."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeAlias

from benchmarks.common.provenance import machine, today

__all__ = [
    "NOT_RUN",
    "Expected",
    "Measured",
    "Result",
    "System",
    "Verdict",
    "judge",
    "load_expected",
    "load_results",
    "load_system",
    "row_json",
    "store",
    "write_lines",
]

Verdict: TypeAlias = Literal[
    "", "reproduced", "better", "worse", "not reached", "undecided", "not comparable", "not run", "quick"
]
"""How a figure of ours stands to the published one; empty where a source publishes none."""
NOT_RUN: Verdict = "not run"
QUICK: Verdict = "quick"
"""In place of a verdict on a quick run, whose figures mean nothing."""
POINTS, SHARE = 0.5, 0.1
"""What counts as equal where a row has no ``tolerance``: points of a percentage, and a share of any other figure."""


@dataclass(frozen=True, slots=True)
class Expected:
    """One row of ``expected.toml``.

    Args:
      name: of the row, unique in its benchmark.
      unit: of all of its figures.
      better: the direction in which a figure improves.
      goal: what ours should reach; it does not enter the verdict.
      published: the source's figure.
      at: where the source has it.
      peer: the figure of another system, measured beside ours.
      tolerance: the difference to the published figure that counts as none, in the row's unit.
      needs: the data set without which the row cannot be measured.
      note: the setting of paper and ours where it is not the system's, or a remark.
      headline: whether its README shows the row, and where a source publishes one the first screen of the results.
    """

    name: str
    unit: str
    better: Literal["higher", "lower"]
    goal: float | None = None
    published: float | None = None
    at: str = ""
    peer: float | None = None
    tolerance: float | None = None
    needs: str = ""
    note: str = ""
    headline: bool = False

    @property
    def within(self) -> float:
        """The tolerance, or the one for its unit."""
        if self.tolerance is not None:
            return self.tolerance
        if any(word in self.unit for word in ("point", "percent", "%")):
            return POINTS
        return SHARE * abs(self.published or 0.0)


@dataclass(frozen=True, slots=True)
class System:
    """The published system that a benchmark reproduces: the table ``system`` of ``expected.toml``.

    Args:
      name: of the system.
      idea: one sentence.
      source: authors, venue and year.
      paper: the setting of the published figure.
      ours: the setting of ours.
      shown: rows that the repository's README shows, with the claim of the source in a few words.
    """

    name: str
    idea: str
    source: str
    paper: str
    ours: str
    shown: Mapping[str, str]


@dataclass(frozen=True)
class Measured:
    """What a measurement found for one row.

    Args:
      ours: the figure; ``None`` where a target was not reached.
      spread: the lowest and the highest of its seeds or rounds.
      config: settings, and figures that stand beside.
      simulated: whether it is of virtual time.
      reason: why the figure cannot be compared with the published one; empty where it can.
      not_reached: ``best`` and ``target`` where the target was missed.
    """

    ours: float | None
    spread: tuple[float, float] | None
    config: dict[str, Any] = field(default_factory=dict)
    simulated: bool = False
    reason: str = ""
    not_reached: Mapping[str, float] | None = None

    @classmethod
    def missed(
        cls, best: float, target: float, config: dict[str, Any], *, simulated: bool = False, reason: str = ""
    ) -> Measured:
        """A target that was not reached."""
        return cls(None, None, config, simulated, reason, {"best": best, "target": target})


@dataclass(frozen=True)
class Result:
    """One line of ``results/results.jsonl``: a measured row as a fact about a commit.

    Args:
      name, unit: of the row.
      ours, low, high: the figure and its spread.
      seeds: that it is of.
      simulated: whether it is of virtual time.
      commit: the last one that had changed the code when it was measured.
      date: of the measurement.
      machine: processor, cores, versions of torch and Python.
      seconds: that measuring took, with the other rows of its group.
      config: settings, and figures that stand beside.
      battery: cases of ``tests/battery`` that cover the code behind the row.
      reason: why it cannot be compared with the published figure.
      not_reached: ``best`` and ``target`` where a target was missed.
      stored_by_commit: whether the commit is the one that stored the row, which may be later than its code.
    """

    name: str
    unit: str
    ours: float | None
    low: float | None
    high: float | None
    seeds: Sequence[int]
    simulated: bool
    commit: str
    date: str
    machine: Mapping[str, Any]
    seconds: float | None
    config: Mapping[str, Any]
    battery: Sequence[str]
    reason: str = ""
    not_reached: Mapping[str, float] | None = None
    stored_by_commit: bool = False

    @classmethod
    def of(
        cls, row: Expected, measured: Measured, *, commit: str, battery: Sequence[str], seconds: float
    ) -> Result:
        """A measurement on this machine that has just ended."""
        low, high = measured.spread or (None, None)
        return cls(
            name=row.name,
            unit=row.unit,
            ours=measured.ours,
            low=low,
            high=high,
            seeds=list(measured.config.get("seeds", ())),
            simulated=measured.simulated,
            commit=commit,
            date=today(),
            machine=machine(),
            seconds=round(seconds, 1),
            config={name: value for name, value in measured.config.items() if name != "seeds"},
            battery=list(battery),
            reason=measured.reason,
            not_reached=measured.not_reached,
        )

    @property
    def figure(self) -> str:
        """Ours, as tables print it."""
        if self.not_reached is not None:
            best, target = (self.not_reached[name] for name in ("best", "target"))
            return f"best {best:.4g}, target {target:.4g}"
        return f"{self.ours:.4g}" + (" (simulated)" if self.simulated else "")


def judge(expected: Expected, result: Result | None) -> tuple[Verdict, str]:
    """The verdict on a row against its published figure, and the reason where it needs one.

    A figure is better or worse where its whole spread lies beyond the tolerance. Otherwise a spread wider than twice
    the tolerance decides nothing.
    """
    if result is None:
        return NOT_RUN, f"needs {expected.needs}" if expected.needs else ""
    if expected.published is None:
        return "", ""
    if result.reason:
        return "not comparable", result.reason
    if result.ours is None:
        return "not reached", ""
    sign = 1 if expected.better == "higher" else -1
    ahead, low, high = (
        sign * ((result.ours if figure is None else figure) - expected.published)
        for figure in (result.ours, result.low, result.high)
    )
    low, high = min(low, high), max(low, high)
    if low > expected.within:
        return "better", ""
    if high < -expected.within:
        return "worse", ""
    if high - low > 2 * expected.within:
        return (
            "undecided",
            f"{high - low:.3g} between the lowest and the highest, {expected.within:.3g} counts as equal",
        )
    if abs(ahead) <= expected.within:
        return "reproduced", ""
    return ("better" if ahead > 0 else "worse"), ""


def row_json(expected: Expected, result: Result | None, *, quick: bool = False) -> dict[str, Any]:
    """Returns the fields of the results file, and ``published``, ``peer``, ``goal``, ``better`` and ``verdict``.

    The verdict on a row that a quick run has measured is ``"quick"``.
    """
    empty = dict.fromkeys((one.name for one in fields(Result)), None)
    verdict, reason = (QUICK, "") if quick and result is not None else judge(expected, result)
    return {
        **({**empty, "name": expected.name, "unit": expected.unit} if result is None else asdict(result)),
        "reason": reason or ("" if result is None else result.reason),
        **{name: getattr(expected, name) for name in ("published", "peer", "goal", "better")},
        "verdict": verdict,
    }


def load_expected(folder: Path) -> list[Expected]:
    """The rows of a benchmark's ``expected.toml``."""
    return [Expected(**row) for row in _expected(folder)["row"]]


def load_system(folder: Path) -> System | None:
    """The published system that a benchmark reproduces, if it is one of the six."""
    table = _expected(folder).get("system")
    return None if table is None else System(**table)


def _expected(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "expected.toml").read_text(encoding="utf-8"))


def load_results(folder: Path) -> dict[str, Result]:
    """The stored rows, by name."""
    path = folder / "results" / "results.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {line["name"]: Result(**line) for line in map(json.loads, lines)}


def store(folder: Path, results: Mapping[str, Result]) -> None:
    """Puts results in the place of those with the same names."""
    kept = {**load_results(folder), **results}
    write_lines(folder / "results" / "results.jsonl", [asdict(one) for one in kept.values()])


def write_lines(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Writes JSON lines, all or none of them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    part.replace(path)
