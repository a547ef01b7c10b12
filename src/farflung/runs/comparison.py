"""Which way of training wins on which network, found out in virtual time."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from farflung.devices import DeviceProfile
from farflung.errors import ConfigError, MissingExtra
from farflung.files import held, naming
from farflung.network import NetworkProfile
from farflung.recipes import Recipe
from farflung.runs.config import COMPARED, DEVICE, SimulatedConfig
from farflung.runs.folder import RunFolder, Scratch
from farflung.runs.preparing import Prepared
from farflung.runs.result import Run
from farflung.runs.simulation import nowhere, retime_prepared, simulate_prepared, timing_decisions
from farflung.telemetry import Sink, read_events
from farflung.types import Workload

if TYPE_CHECKING:
    from rich.table import Table

    from farflung.report import Compared, Course

__all__ = ["Comparison", "compare"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs beside each other; printed, it is the table, or lines of its figures where rich is not installed.

    Args:
      runs: of each recipe and seed, on each network.
      courses: what each of them learned, and when.
      target: the score whose time is told.
      title: above the picture.
      scratch: keeps the files for as long as the comparison is known, where they have no folder of their own.
    """

    runs: Sequence[Run]
    courses: Sequence[Course]
    target: float
    title: str
    scratch: Scratch | None = field(default=None, repr=False)

    @property
    def rows(self) -> list[Compared]:
        """One for each network and recipe: means over seeds."""
        from farflung.report import compare_courses

        return compare_courses(self.courses, self.target)

    def table(self, width: int | None = None) -> Table:
        """Returns the comparison as a table for people, without columns that a width in characters has no room for."""
        from farflung.report import comparison_table

        return comparison_table(self.rows, self.target, width)

    def picture(self, path: Path | str) -> Path:
        """Draws scores over time and over bytes sent; returns where the picture is."""
        from farflung.report import comparison_picture

        comparison_picture(self.courses, Path(path), title=self.title, target=self.target)
        return Path(path)

    @override
    def __str__(self) -> str:
        from farflung.report import as_lines, as_text, text_width

        try:
            return as_text(self.table(text_width()))
        except MissingExtra:
            return "\n\n".join(as_lines(row.to_json()) for row in self.rows)


def compare(
    recipes: Sequence[str | Recipe] | Mapping[str, str | Recipe] = COMPARED,
    networks: Sequence[str | NetworkProfile] = ("wifi-10mbps",),
    *,
    seeds: Sequence[int] = (0,),
    target: float | None = None,
    device: str | DeviceProfile = DEVICE,
    evaluate_every: int | None = None,
    out: Path | str | None = None,
    show: Sink = nowhere,
    stop_asked: Callable[[], bool] = lambda: False,
    **settings: object,
) -> Comparison:
    """Compares recipes on networks, in virtual time, as ``farflung compare`` does.

    Each recipe trains once for each seed, with real arithmetic; what it takes on the other networks is timed from that
    run, where its learning does not depend on the network.

    Args:
      recipes: names, with changes in brackets if wished, or :class:`farflung.recipes.Recipe` objects; as a mapping,
        with names for people. The first is what the others are measured against.
      networks: names, TOML files or profiles.
      seeds: of the runs.
      target: the score to reach; when not given, the best that every run reached.
      device: what each replica computes on: a name, a TOML file or a profile.
      evaluate_every: steps between evaluations; a twentieth of the steps when not given.
      out: the folder of all runs; a comparison that was interrupted goes on there. When not given, the files go with
        the object that is returned.
      show: gets the events of trainings as they happen, and of the comparison: ``compare`` once it begins, and before
        and after each recipe and seed ``row`` and ``row_end``.
      stop_asked: whether a stop was requested; a run that is cut short is removed.
      settings: those of :func:`farflung.simulate`, for all runs alike.

    Raises:
      BadInput: says what is wrong and what to do, before anything begins.
      KeyboardInterrupt: a stop was requested.
    """
    from farflung.report import Course

    if target is not None and not math.isfinite(target):
        raise ConfigError(f"--target {target}: must be a finite number")
    rows = _rows(recipes, networks, seeds, evaluate_every, {**settings, "device": device})
    scratch = Scratch() if out is None else None
    folder = Path(str(out)) if scratch is None else scratch.path
    runs: list[Run] = []
    courses: list[Course] = []
    with held(folder, "compares"):
        steps = sum(configs[0].steps for _, configs in rows)
        show({"event": "compare", "rank": 0, "rows": len(rows), "steps": steps})
        for recipe, configs in rows:
            name = f"{recipe}, seed {configs[0].seed}"
            show({"event": "row", "rank": 0, "name": name, "steps": configs[0].steps})
            first: RunFolder | None = None
            for config in configs:
                stem = re.sub(r"[^\w.=-]+", "-", recipe).strip("-")
                stem = f"{stem}-{Path(config.network_name).stem}-seed-{config.seed}"
                files = RunFolder(folder / "runs" / stem)
                run = Prepared(config, files, config.split())
                if not _is_made(run):
                    if first is None or timing_decisions(first):
                        simulate_prepared(run, show, stop_asked=stop_asked, checkpointed=False)
                        if stop_asked():
                            shutil.rmtree(files.path)
                    else:
                        retime_prepared(run, first)
                if stop_asked():
                    raise KeyboardInterrupt
                first = first or files
                runs.append(run.ended(files.stored_summary()))
                with naming(files.telemetry(0)):
                    events = read_events(files.telemetry(0))
                    course = Course.of(recipe, config.network_name, config.seed, events, runs[-1].summary)
                    courses.append(course)
            show({"event": "row_end", "rank": 0})
    shared = rows[0][1][0]
    device_name = shared.world_json()["device"]
    title = f"{shared.workload}, {shared.workers} replicas on {device_name}, simulated"
    best = min(course.best for course in courses)
    return Comparison(runs, courses, best if target is None else target, title, scratch)


def _rows(
    recipes: Sequence[str | Recipe] | Mapping[str, str | Recipe],
    networks: Sequence[str | NetworkProfile],
    seeds: Sequence[int],
    evaluate_every: int | None,
    settings: Mapping[str, object],
) -> list[tuple[str, list[SimulatedConfig]]]:
    """Returns the name of each recipe, once for each seed, with the checked runs on all networks."""
    recipes = (recipes,) if isinstance(recipes, str | Recipe) else recipes
    networks = (networks,) if isinstance(networks, str | NetworkProfile) else networks
    if isinstance(recipes, Mapping):
        named = [*recipes.items()]
    else:
        named = [(one.text if isinstance(one, Recipe) else one, one) for one in recipes]
    names = [name for name, _ in named]
    for option, values in (("recipes", names), ("networks", [*networks]), ("seeds", [*seeds])):
        if not values:
            raise ConfigError(f"--{option}: give at least one")
        if any(value in values[:place] for place, value in enumerate(values)):
            raise ConfigError(f"--{option}: one of them is there twice")
    rows: list[tuple[str, list[SimulatedConfig]]] = []
    task: Workload | None = None
    for name, recipe in named:
        for seed in seeds:
            configs: list[SimulatedConfig] = []
            for network in networks:
                # What a recipe says in its brackets wins over what is said for all.
                layers = (settings, {"recipe": recipe, "seed": seed, "network": network})
                config = SimulatedConfig.resolve(*layers, task=task)
                every = max(1, config.steps // 20) if evaluate_every is None else evaluate_every
                training = replace(config.training, evaluate_every=every, checkpoint_every=0)
                configs.append(replace(config, training=training))
                task = config.task
            rows.append((name, configs))
    checked = [config for _, configs in rows for config in configs]
    if len({config.workers for config in checked}) > 1:
        raise ConfigError("the networks are of different numbers of nodes: say how many with --workers")
    for config in checked:
        config.check()
    return rows


def _is_made(run: Prepared[SimulatedConfig]) -> bool:
    """Returns True for a run that has been made; removes one that was cut short.

    Raises:
      ConfigError: another run is in its place.
    """
    files = run.files
    if not files.config.exists():
        return False
    if SimulatedConfig.stored_in(files) != run.config.to_json():
        raise ConfigError(
            f"{files.path} holds a run with other settings: choose another --out, or give the same options"
        )
    if not files.summary.exists():
        shutil.rmtree(files.path)
    return files.summary.exists()
