"""Plans of every cell, and what their choices cost beside the best recipe and three rules of thumb."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import Kept
from benchmarks.planner.judged import NODES, PILOTS, TASKS, Curve, Task, curves_of, steps_to
from farflung import plan
from farflung.errors import Unsupported
from farflung.planning import Pace, time_recipe
from farflung.recipes.planned import CANDIDATES, REFERENCE
from farflung.runs import SimulatedConfig

__all__ = ["HELD_OUT", "NETWORKS", "Cell", "all_cells", "summarize"]

HELD_OUT = "shanghai-boston"
"""Network on which nothing was ever tried while the rule was made."""
NETWORKS = (
    "lan-1g",
    "wifi-100mbps",
    "wifi-shared-100mbps",
    "wifi-10mbps",
    "4g",
    "5g",
    "four-regions",
    HELD_OUT,
)
FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Cell:
    """A workload, a network and a tolerance, with seconds to the target; infinite where it is missed.

    Args:
      name: of the cell.
      best: recipe that is first.
      best_s: its seconds.
      choice: recipe of the plan.
      planned: bounds of its seconds.
      seeds_s: seconds of the choice with each judging seed.
      cost: of the plan, in trainings.
      seconds: of the choice, of the reference, of the fastest step, and of the fewest bytes; means of the seeds.
    """

    name: str
    best: str
    best_s: float
    choice: str
    planned: tuple[float | None, float | None]
    seeds_s: Sequence[float]
    cost: float
    seconds: Mapping[str, float]

    def regret(self, of: str = "plan") -> float:
        """Its time over that of the best."""
        return self.seconds[of] / self.best_s

    def to_json(self) -> dict[str, Any]:
        """Return its fields, with the regrets of all rules; infinite ones are ``None``."""
        fields = {**asdict(self), "regret": {rule: self.regret(rule) for rule in self.seconds}}
        return {name: _drop_infinite(value) for name, value in fields.items() if name != "name"}


def all_cells(*, quick: bool = False) -> list[Cell]:
    """Plan and judge all cells; a part that this commit has made already is kept."""
    if quick:
        tasks = {"quadratic": Task("synthetic/quadratic", 80, (math.inf,) * 3)}
        recipes = [REFERENCE, "synchronous", "local_sgd"]
        return [
            cell
            for task in tasks.values()
            for cell in _cells("quadratic", task, recipes, ("wifi-10mbps",), quick=True)
        ]
    return [
        cell for name, task in TASKS.items() for cell in _cells(name, task, CANDIDATES, NETWORKS, quick=False)
    ]


def _cells(
    name: str, task: Task, recipes: Sequence[str], networks: Sequence[str], *, quick: bool
) -> list[Cell]:
    kept = Kept(FOLDER, "plans", quick=quick)
    paces = {recipe: _paces(kept, task, recipe, networks) for recipe in recipes}
    timed = [recipe for recipe in recipes if paces[recipe]]
    curves = _quick_curves(task, timed) if quick else curves_of(task, timed)
    end = statistics.fmean(curve[-1][1] for curve in curves[REFERENCE])
    found = []
    for place, network in enumerate(networks):
        for tolerance in (1e9,) if quick else task.tolerances:
            level = end - (1.0 if quick else tolerance)
            by_seed = {
                recipe: [_seconds(paces[recipe][place], steps_to(curve, level)) for curve in curves[recipe]]
                for recipe in timed
            }
            true = {recipe: statistics.fmean(seconds) for recipe, seconds in by_seed.items()}
            best = min(true, key=true.__getitem__)
            key = {"cell": name, "network": network, "tolerance": tolerance}
            planned = kept.once(key, lambda n=network, t=tolerance: _plan(name, task, recipes, n, t, quick))  # type: ignore[misc]
            thumbs = {
                "fp16": REFERENCE,
                "fastest step": min(timed, key=lambda r: paces[r][place].compute_seconds(task.steps)),
                "fewest bytes": min(timed, key=lambda r: paces[r][place].compute_nbytes(task.steps)),
            }
            found.append(
                Cell(
                    f"{name}, {network}, {tolerance:g}",
                    best,
                    true[best],
                    planned["choice"],
                    (planned["low_s"], planned["high_s"]),
                    by_seed[planned["choice"]],
                    planned["cost"],
                    {"plan": true[planned["choice"]], **{rule: true[pick] for rule, pick in thumbs.items()}},
                )
            )
    return found


def _paces(kept: Kept, task: Task, recipe: str, networks: Sequence[str]) -> list[Pace]:
    """Those of a recipe on each network; none where what it learns depends on the network."""

    def measure() -> dict[str, Any]:
        config = SimulatedConfig.resolve(
            {"workload": task.workload, "recipe": recipe, "steps": task.steps, "workers": NODES}
        )
        try:
            return {"paces": [asdict(pace) for pace in time_recipe(config, networks)[0]]}
        except Unsupported:
            return {"paces": []}

    line = kept.once({"paces_of": recipe, "workload": task.workload, "networks": list(networks)}, measure)
    return [Pace(**pace) for pace in line["paces"]]


def _seconds(pace: Pace, steps: float) -> float:
    return pace.compute_seconds(round(steps)) if math.isfinite(steps) else math.inf


def _plan(
    name: str, task: Task, recipes: Sequence[str], network: str, tolerance: float, quick: bool
) -> dict[str, Any]:
    made = plan(
        task.workload,
        network,
        recipes=recipes,
        within=tolerance,
        steps=task.steps,
        workers=NODES,
        seeds=PILOTS[:1] if quick else PILOTS,
        out=None if quick else FOLDER / "results" / "parts" / name,
    )
    assert made.choice is not None
    cost = made.pilots / (1 if quick else len(PILOTS))
    return {
        "choice": made.choice.recipe,
        "low_s": made.choice.low_s,
        "high_s": made.choice.high_s,
        "cost": cost,
        "rows": made.to_json()["rows"],
    }


def _quick_curves(task: Task, recipes: Sequence[str]) -> dict[str, list[Curve]]:
    return {recipe: [[(step, float(step)) for step in range(1, task.steps + 1)]] for recipe in recipes}


def _drop_infinite(value: Any) -> Any:
    """Return a value of a cell as JSON, which has no infinite numbers."""
    if isinstance(value, dict):
        return {name: _drop_infinite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_drop_infinite(each) for each in value]
    return None if value == math.inf else value


def summarize(cells: Sequence[Cell], of: str = "plan") -> dict[str, float]:
    """Return the median, the 90 % point and the worst of the regrets of a rule, and the share of cells it misses."""
    regrets = sorted(cell.regret(of) for cell in cells)
    return {
        "median": statistics.median(regrets),
        "p90": regrets[math.ceil(0.9 * len(regrets)) - 1],
        "worst": regrets[-1],
        "missed": sum(map(math.isinf, regrets)) / len(regrets),
    }
