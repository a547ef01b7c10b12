"""Importance sampling: how many times fewer steps than uniform batches, both at their own best learning rate."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common import Benchmark, Group, Measured, main
from benchmarks.sampling.gains import Ask, gains
from benchmarks.sampling.regimes import COTTONWOOD, LEARNS, REGIMES, STREAMED, Regime
from benchmarks.sampling.times import TIME_ROW, sooner
from benchmarks.sampling.training import TRAININGS, Found, Sampled

__all__ = ["BENCHMARK", "OVER_PAPER", "PREDICTED", "over_all"]

OVER_PAPER = "chosen rule over the paper's rule, median of the rows above"
PREDICTED = "predicted over observed gain, median of absolute error over the rows above"


class _Quick:
    """Trains each once."""

    def __init__(self) -> None:
        self._found: dict[Sampled, Found] = {}

    def __call__(self, trainings: Sequence[Sampled]) -> list[Found]:
        for one in trainings:
            if one not in self._found:
                self._found[one] = one.train()
        return [self._found[one] for one in trainings]


QUICK = _Quick()


def regime_rows(regime: Regime, quick: bool) -> Mapping[str, Measured]:
    """The chosen rule's row, and the paper's where there is one."""
    found = gains(*_what(regime, quick))
    rows = {regime.row: found.measured(found.chosen)}
    return {**rows, regime.paper: found.measured("paper")} if regime.paper else rows


def time_row(quick: bool) -> Mapping[str, Measured]:
    """The row of slow links."""
    regime, ask = _what(COTTONWOOD, quick)
    return {TIME_ROW: sooner(regime, gains(regime, ask))}


def over_all(regimes: Sequence[Regime], quick: bool) -> Mapping[str, Measured]:
    """Medians over regimes; that of predictions once samplers predict."""
    found = {one.row: gains(*_what(one, quick)) for one in regimes}
    over = {row: one.over_paper for row, one in found.items()}
    rows = {OVER_PAPER: _median(over)}
    errors = {row: one.misjudged for row, one in found.items() if one.misjudged is not None}
    if errors:
        rows[PREDICTED] = _median(errors, predicted={row: found[row].predicted for row in errors})
    return rows


def _median(values: Mapping[str, float], **config: object) -> Measured:
    spread = (min(values.values()), max(values.values()))
    return Measured(statistics.median(values.values()), spread, {"rows": dict(values), **config})


def _what(regime: Regime, quick: bool) -> tuple[Regime, Ask]:
    return (regime.quickly(), QUICK) if quick else (regime, TRAININGS.curves)


def _group(regime: Regime) -> Group:
    return Group(regime.rows, partial(regime_rows, regime), "trainings", regime.minutes, regime.canaries)


ALL = tuple(dict.fromkeys(canary for regime in REGIMES for canary in regime.canaries))
BENCHMARK = Benchmark(
    Path(__file__).parent,
    [
        *map(_group, REGIMES),
        Group((TIME_ROW,), time_row, "trainings", 0.2, COTTONWOOD.canaries),
        Group((OVER_PAPER, PREDICTED), partial(over_all, REGIMES), "trainings", 0.5, ALL),
        *map(_group, (STREAMED, *LEARNS)),
    ],
    TRAININGS,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
