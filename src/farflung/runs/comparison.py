"""Comparison of recipes on networks, in virtual time."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from farflung.devices import DeviceProfile
from farflung.errors import ConfigError, MissingExtra
from farflung.files import lock_folder, prefix_errors
from farflung.network import NetworkProfile
from farflung.recipes import Recipe
from farflung.runs.config import DEFAULT_COMPARED, DEFAULT_DEVICE, SimulatedConfig
from farflung.runs.folder import RunFolder, TempFolder
from farflung.runs.preparing import PreparedRun, format_stem
from farflung.runs.result import Run
from farflung.runs.simulation import discard_event, list_timing_decisions, retime_prepared, simulate_prepared
from farflung.telemetry import Sink, read_events
from farflung.types import Workload

if TYPE_CHECKING:
    from rich.table import Table

    from farflung.report import ComparisonRow, RunHistory

__all__ = ["Comparison", "compare"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Compared runs, printed as a table, or as lines if rich is not installed.

    Args:
      runs: Runs of each recipe and seed on each network.
      courses: Learning curves of the runs.
      target: Score to which the time is reported.
      title: Title of the picture.
      temp_folder: Temporary folder of the files, which lives as long as this object, if ``out`` was not given.
    """

    runs: Sequence[Run]
    courses: Sequence[RunHistory]
    target: float
    title: str
    temp_folder: TempFolder | None = field(default=None, repr=False)

    @property
    def rows(self) -> list[ComparisonRow]:
        """Rows for each network and recipe, with means over seeds."""
        from farflung.report import compare_runs

        return compare_runs(self.courses, self.target)

    def build_table(self, width: int | None = None) -> Table:
        """Builds the table of the comparison, without columns that exceed ``width`` characters, by default 200."""
        from farflung.report import render_comparison_table

        return render_comparison_table(self.rows, self.target, width)

    def draw_picture(self, path: Path | str) -> Path:
        """Draws scores over time and over sent bytes; returns the path of the picture."""
        from farflung.report import draw_comparison

        draw_comparison(self.courses, Path(path), title=self.title, target=self.target)
        return Path(path)

    @override
    def __str__(self) -> str:
        from farflung.report import get_output_width, render_lines, render_text

        try:
            return render_text(self.build_table(get_output_width()))
        except MissingExtra:
            return "\n\n".join(render_lines(row.to_json()) for row in self.rows)


def compare(
    recipes: Sequence[str | Recipe] | Mapping[str, str | Recipe] = DEFAULT_COMPARED,
    networks: Sequence[str | NetworkProfile] = ("wifi-10mbps",),
    *,
    seeds: Sequence[int] = (0,),
    target: float | None = None,
    device: str | DeviceProfile = DEFAULT_DEVICE,
    evaluate_every: int | None = None,
    out: Path | str | None = None,
    sink: Sink = discard_event,
    should_stop: Callable[[], bool] = lambda: False,
    **settings: object,
) -> Comparison:
    """Compares recipes on networks, in virtual time, as ``farflung compare`` does.

    Each recipe trains once for each seed, with real arithmetic. If its learning does not depend on the network and
    it is not elastic, that run is retimed for the other networks.

    Args:
      recipes: Names, with changes in brackets, or :class:`farflung.recipes.Recipe` objects, or a mapping of labels to
        these. The first is the baseline.
      networks: Names, TOML files or profiles.
      seeds: Seeds of the runs.
      target: Score to reach; by default the best score that every run reached.
      device: Device of each replica: a name, a TOML file or a profile.
      evaluate_every: Number of steps between evaluations; by default a twentieth of the steps.
      out: Folder of all runs, in which an interrupted comparison continues. By default the files are deleted with the
        returned object.
      sink: Sink for the events of all runs, and of the comparison: ``compare`` at the start, and ``row`` and
        ``row_end`` before and after each recipe and seed.
      should_stop: Function that returns True after a stop was requested; an incomplete run is removed.
      settings: Settings of :func:`farflung.simulate` for all runs.

    Raises:
      BadInput: The input is invalid; raised before any run starts.
      KeyboardInterrupt: A stop was requested.
    """
    from farflung.report import RunHistory, select_finished

    if target is not None and not math.isfinite(target):
        raise ConfigError(f"--target {target}: must be a finite number")
    rows = _build_rows(recipes, networks, seeds, evaluate_every, {**settings, "device": device})
    scratch = TempFolder() if out is None else None
    folder = Path(str(out)) if scratch is None else scratch.path
    runs: list[Run] = []
    courses: list[RunHistory] = []
    with lock_folder(folder, "compares"):
        steps = sum(configs[0].steps for _, configs in rows)
        sink({"event": "compare", "rank": 0, "rows": len(rows), "steps": steps})
        for recipe, configs in rows:
            name = f"{recipe}, seed {configs[0].seed}"
            sink({"event": "row", "rank": 0, "name": name, "steps": configs[0].steps})
            trained_run: RunFolder | None = None
            for config in configs:
                files = RunFolder(folder / "runs" / _name_run(recipe, config))
                run = PreparedRun(config, files, config.describe_shares())
                if not files.summary_path.exists():
                    if files.config_path.exists():  # an interrupted run
                        shutil.rmtree(files.path)
                    if trained_run is None or config.elastic or list_timing_decisions(trained_run):
                        simulate_prepared(run, sink, should_stop=should_stop, should_checkpoint=False)
                        if should_stop():
                            shutil.rmtree(files.path)
                    else:
                        retime_prepared(run, trained_run)
                if should_stop():
                    raise KeyboardInterrupt
                trained_run = trained_run or files
                runs.append(run.build_result(files.load_summary()))
                # Rank 0 of an elastic run may have been lost.
                rank = min(select_finished(files.load_events()), default=0) if config.elastic else 0
                with prefix_errors(files.get_telemetry_path(rank)):
                    events = read_events(files.get_telemetry_path(rank))
                    course = RunHistory.from_events(
                        recipe, config.network_name, config.seed, events, runs[-1].summary
                    )
                    courses.append(course)
            sink({"event": "row_end", "rank": 0})
    first_config = rows[0][1][0]
    device_name = first_config.describe_world()["device"]
    title = f"{first_config.workload}, {first_config.workers} replicas on {device_name}, simulated"
    best = min(course.max_score for course in courses)
    return Comparison(runs, courses, best if target is None else target, title, scratch)


def _build_rows(
    recipes: Sequence[str | Recipe] | Mapping[str, str | Recipe],
    networks: Sequence[str | NetworkProfile],
    seeds: Sequence[int],
    evaluate_every: int | None,
    settings: Mapping[str, object],
) -> list[tuple[str, list[SimulatedConfig]]]:
    """Builds the checked configurations on all networks for each recipe and seed, with the recipe's label."""
    recipes = (recipes,) if isinstance(recipes, str | Recipe) else recipes
    networks = (networks,) if isinstance(networks, str | NetworkProfile) else networks
    if isinstance(recipes, Mapping):
        labelled_recipes = [*recipes.items()]
    else:
        labelled_recipes = [(entry.text if isinstance(entry, Recipe) else entry, entry) for entry in recipes]
    names = [name for name, _ in labelled_recipes]
    for option, values in (("recipes", names), ("networks", [*networks]), ("seeds", [*seeds])):
        if not values:
            raise ConfigError(f"--{option}: give at least one")
        if any(value in values[:place] for place, value in enumerate(values)):
            raise ConfigError(f"--{option}: one of them is there twice")
    rows: list[tuple[str, list[SimulatedConfig]]] = []
    task: Workload | None = None
    for name, recipe in labelled_recipes:
        for seed in seeds:
            configs: list[SimulatedConfig] = []
            for network in networks:
                # Changes in a recipe's brackets override the settings for all.
                layers = (settings, {"recipe": recipe, "seed": seed, "network": network})
                config = SimulatedConfig.resolve(*layers, task=task)
                interval = max(1, config.steps // 20) if evaluate_every is None else evaluate_every
                training = replace(config.training, evaluate_every=interval, checkpoint_every=0)
                configs.append(replace(config, training=training))
                task = config.task
            rows.append((name, configs))
    all_configs = [config for _, configs in rows for config in configs]
    if len({config.workers for config in all_configs}) > 1:
        raise ConfigError("the networks are of different numbers of nodes: say how many with --workers")
    for config in all_configs:
        config.check()
    return rows


def _name_run(recipe: str, config: SimulatedConfig) -> str:
    """Names the folder of a run by recipe, network and seed, with a digest of all its settings and of its world."""
    described = json.dumps([recipe, config.to_json(), config.compute_world_hash()], sort_keys=True)
    digest = hashlib.sha256(described.encode()).hexdigest()[:12]
    network = Path(config.network_name).name.replace(".toml", "")
    return f"{format_stem(f'{recipe}-{network}')}-seed-{config.seed}-{digest}"
