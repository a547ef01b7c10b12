"""Which way of training wins on which network, found out in virtual time."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

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
from farflung.runs.simulation import never, nowhere, retime_prepared, simulate_prepared, timing_decisions
from farflung.telemetry import Event, read_events
from farflung.types import Json

if TYPE_CHECKING:
    from rich.table import Table

    from farflung.report import Compared, Course

__all__ = ["Comparison", "Contest", "Row", "Watch", "compare", "contest"]


class Watch(Protocol):
    """Follows a comparison."""

    def begin(self, name: str, steps: int) -> None:
        """A run of ``steps`` steps begins, or is there already."""
        ...

    def __call__(self, event: Event) -> None:
        """An event of the run."""
        ...

    def end(self) -> None:
        """The run is through, on all networks."""
        ...


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


@dataclass(frozen=True, slots=True)
class Row:
    """One recipe and seed.

    Args:
      recipe: what people call it.
      configs: its runs, one for each network.
    """

    recipe: str
    configs: Sequence[SimulatedConfig]


@dataclass(frozen=True, slots=True)
class Contest:
    """A comparison that has been checked and not begun.

    Args:
      rows: recipes and seeds.
    """

    rows: Sequence[Row]

    @property
    def steps(self) -> int:
        """Of all trainings."""
        return sum(row.configs[0].steps for row in self.rows)

    @property
    def title(self) -> str:
        """For people."""
        first = self.rows[0].configs[0]
        device = first.world_json()["device"]
        return f"{first.workload}, {first.workers} replicas on {device}, simulated"

    def run(
        self,
        out: Path | None = None,
        target: float | None = None,
        watch: Watch | None = None,
        stop_asked: Callable[[], bool] = never,
    ) -> Comparison | None:
        """Makes all runs that are not there yet; ``None`` where a stop was asked for.

        Args:
          out: the folder of all runs; when not given, the files go with the comparison.
          target: the score to reach; when not given, the best that every run reached.
          watch: follows it.
          stop_asked: whether a stop was asked for; a run that is cut short is removed.

        Raises:
          BadInput: a target that is no number, a folder that cannot be written or that another command uses.
        """
        if target is not None and not math.isfinite(target):
            raise ConfigError(f"--target {target}: must be a finite number")
        scratch = Scratch() if out is None else None
        folder = Path(str(out)) if scratch is None else scratch.path
        with held(folder, "compares"):
            made = self._made(folder, watch, stop_asked)
        if made is None:
            return None
        runs, courses = made
        best = min(course.best for course in courses)
        return Comparison(runs, courses, best if target is None else target, self.title, scratch)

    def _made(
        self, folder: Path, watch: Watch | None, stop_asked: Callable[[], bool]
    ) -> tuple[list[Run], list[Course]] | None:
        """All runs in a folder that no other process uses; ``None`` where a stop was asked for."""
        from farflung.report import Course

        runs: list[Run] = []
        courses: list[Course] = []
        for row in self.rows:
            if watch is not None:
                watch.begin(f"{row.recipe}, seed {row.configs[0].seed}", row.configs[0].steps)
            first: RunFolder | None = None
            for config in row.configs:
                files = RunFolder(folder / "runs" / _name(row.recipe, config))
                run = Prepared(config, files, config.split())
                if not _is_there(run):
                    if first is None or timing_decisions(first):
                        simulate_prepared(run, watch or nowhere, stop_asked=stop_asked, checkpointed=False)
                        if stop_asked():
                            shutil.rmtree(files.path)
                    else:
                        retime_prepared(run, first)
                if stop_asked():
                    return None
                first = first or files
                ended = run.ended(files.stored_summary())
                with naming(files.telemetry(0)):
                    course = Course.of(
                        row.recipe,
                        config.network_name,
                        config.seed,
                        read_events(files.telemetry(0)),
                        ended.summary,
                    )
                runs.append(ended)
                courses.append(course)
            if watch is not None:
                watch.end()
        return runs, courses


def compare(
    recipes: Sequence[str | Recipe] | Mapping[str, str | Recipe] = COMPARED,
    networks: Sequence[str | NetworkProfile] = ("wifi-10mbps",),
    *,
    seeds: Sequence[int] = (0,),
    target: float | None = None,
    device: str | DeviceProfile = DEVICE,
    evaluate_every: int | None = None,
    out: Path | str | None = None,
    watch: Watch | None = None,
    **settings: object,
) -> Comparison:
    """Recipes beside each other on networks, in virtual time, as ``farflung compare`` does.

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
      watch: follows it.
      settings: those of :func:`farflung.simulate`, for all runs alike.

    Raises:
      BadInput: says what is wrong and what to do, before anything begins.
    """
    asked = contest(
        recipes, networks, seeds=seeds, evaluate_every=evaluate_every, settings={**settings, "device": device}
    )
    comparison = asked.run(None if out is None else Path(out), target, watch)
    assert comparison is not None  # no stop is asked for
    return comparison


def contest(
    recipes: Sequence[str | Recipe] | Mapping[str, str | Recipe],
    networks: Sequence[str | NetworkProfile],
    *,
    seeds: Sequence[int],
    evaluate_every: int | None,
    settings: Mapping[str, object],
) -> Contest:
    """For each recipe and seed the runs on all networks; everything is checked before anything begins."""
    called = recipes if isinstance(recipes, Mapping) else _called(recipes)
    networks = (networks,) if isinstance(networks, str | NetworkProfile) else networks
    for name, given in (("recipes", called), ("networks", networks), ("seeds", seeds)):
        if not given:
            raise ConfigError(f"--{name}: give at least one")
        each = list(given)
        if any(one in each[:place] for place, one in enumerate(each)):
            raise ConfigError(f"--{name}: one of them is there twice")
    rows: list[Row] = []
    for name, recipe in called.items():
        for seed in seeds:
            configs: list[SimulatedConfig] = []
            for network in networks:
                # What a recipe says in its brackets wins over what is said for all.
                layers = (dict(settings), {"recipe": recipe, "seed": seed, "network": network})
                task = rows[0].configs[0].task if rows else configs[0].task if configs else None
                config = SimulatedConfig.resolve(*layers, task=task)
                every = max(1, config.steps // 20) if evaluate_every is None else evaluate_every
                periods: dict[str, Any] = {"evaluate_every": every, "checkpoint_every": 0}
                configs.append(replace(config, training=replace(config.training, **periods)))
            rows.append(Row(name, configs))
    if len({config.workers for row in rows for config in row.configs}) > 1:
        raise ConfigError("the networks are of different numbers of nodes: say how many with --workers")
    for row in rows:
        for config in row.configs:
            config.check()
    return Contest(rows)


def _called(recipes: Sequence[str | Recipe]) -> dict[str, str | Recipe]:
    """Recipes by what people call them."""
    recipes = (recipes,) if isinstance(recipes, str | Recipe) else recipes
    called = {(recipe.text if isinstance(recipe, Recipe) else recipe): recipe for recipe in recipes}
    if len(called) < len(recipes):
        raise ConfigError("--recipes: one of them is there twice")
    return called


def _name(recipe: str, config: SimulatedConfig) -> str:
    """The name of a run's folder."""
    stem = re.sub(r"[^\w.=-]+", "-", recipe).strip("-")
    return f"{stem}-{Path(config.network_name).stem}-seed-{config.seed}"


def _is_there(run: Prepared[SimulatedConfig]) -> bool:
    """Whether a run has been made already; one that was cut short is removed.

    Raises:
      ConfigError: another run is in its place.
    """
    files = run.files
    if not files.config.exists():
        return False
    stored: Json = SimulatedConfig.stored_in(files)
    if stored != run.config.to_json():
        raise ConfigError(
            f"{files.path} holds a run with other settings: choose another --out, or give the same options"
        )
    if files.summary.exists():
        return True
    shutil.rmtree(files.path)
    return False
