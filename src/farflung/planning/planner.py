"""Plan of a training: which recipe reaches a target first on a network, and in what time."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from typing_extensions import override

from farflung.attach_checks import describe_attach_support
from farflung.devices import DeviceProfile
from farflung.errors import ConfigError, DataError, MissingExtra, Unsupported
from farflung.files import JsonLinesFile, lock_folder, read_json_lines, write_json
from farflung.network import NetworkProfile
from farflung.planning.choice import Outcome, Pilot, Search
from farflung.planning.pilots import train_pilot
from farflung.planning.script import record_script
from farflung.planning.table import render_plan_table
from farflung.planning.timing import Pace, time_recipe
from farflung.recipes import Recipe, parse_recipe
from farflung.recipes.planned import CANDIDATES, REFERENCE
from farflung.report import render_lines, render_text
from farflung.runs import DEFAULT_DEVICE, DEFAULT_NETWORK, RunConfig, SimulatedConfig
from farflung.runs.config import parse_variant
from farflung.types import Json, Workload

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Plan", "PlanRow", "plan", "plan_script"]

SHARE, BUDGET = 0.25, 1.0
"""Default length of the main pilot, and of all pilots together, over that of the training."""
RESOLUTION_FACTOR = 1.5
"""Default tolerance over the smallest one that the test set can tell, which is two standard errors."""
SIMILAR = 1.1
"""Ratio of times up to which the simulator cannot say which recipe is faster."""


@dataclass(frozen=True, slots=True)
class PlanRow:
    """Figures of one recipe, on the network where it is slowest.

    Args:
      recipe: Recipe with its changes.
      network: That network.
      duration_s: Seconds of all steps; ``None`` if they were not timed.
      step_s: Mean seconds of a step; ``None`` if it was not timed.
      waiting: Share of a step that waits for exchanges.
      status: ``reaches`` the target; ``misses`` it; ``slower`` than one that reaches it; or ``untried``.
      reason: Reason of ``untried``.
      gap: Score of its longest pilot below the reference's; ``None`` without a pilot.
      noise: Twice the standard error of the gap.
      low_s: Lower bound of the seconds to the target; ``None`` if only the upper one is known.
      high_s: Upper bound; ``None`` unless it reaches the target.
      sent_nbytes: Bytes that a replica sends up to the target.
      uncharged: Methods whose coding takes no time, because the device has no rate for it.
    """

    recipe: str
    network: str = ""
    duration_s: float | None = None
    step_s: float | None = None
    waiting: float = 0.0
    status: str = "untried"
    reason: str = ""
    gap: float | None = None
    noise: float | None = None
    low_s: float | None = None
    high_s: float | None = None
    sent_nbytes: float | None = None
    uncharged: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """Recipe that reaches a target first, printed as a table, or as lines if rich is not installed.

    What a recorded script learns is not known: its recipes are only timed, and none is chosen.

    Args:
      rows: Figures of each recipe, the fastest first; those that were not timed last.
      choice: Row of the recipe to take; ``None`` for a script.
      reference: Recipe whose score at the end is the target, less the tolerance.
      tolerance: Tolerance of the score.
      steps: Steps of the training.
      pilots: Steps of all pilots over those of the training.
      settings: Settings of the training that are not defaults.
      is_accuracy: True if scores are shares of right answers.
    """

    rows: Sequence[PlanRow]
    choice: PlanRow | None
    reference: str
    tolerance: float
    steps: int
    pilots: float
    settings: Mapping[str, Json]
    is_accuracy: bool

    @property
    def command(self) -> str:
        """Command that trains with the chosen recipe; empty without a choice."""
        if self.choice is None:
            return ""
        options = {**self.settings, "recipe": self.choice.recipe, "steps": self.steps}
        words = [f"--{name.replace('_', '-')} {shlex.quote(str(value))}" for name, value in options.items()]
        return " ".join(["farflung train", *words])

    @property
    def attach_line(self) -> str:
        """Line that trains with the chosen recipe in a loop of one's own; empty if there is none."""
        if self.choice is None:
            return ""
        changes = parse_variant(self.choice.recipe)
        components = {name: changes[name] for name in Recipe().settings if name in changes}
        if _explain_refusal(parse_recipe(str(changes["recipe"])).with_components(**components), "attach"):
            return ""
        optimizer = changes.get("optimizer")
        options = ", ".join(f"{name}={component}" for name, component in components.items())
        note = f"  # with optimizer {optimizer}" if optimizer else ""
        return f'farflung.attach(model, optimizer, "{changes["recipe"]}{f"({options})" if options else ""}"){note}'

    @property
    def similar(self) -> list[PlanRow]:
        """Other recipes that may be as fast as the chosen one, as far as the simulator can say."""
        best_s = SIMILAR * (self.choice.high_s or 0.0) if self.choice else 0.0
        return [row for row in self.rows if row is not self.choice and row.high_s and row.high_s <= best_s]

    def to_json(self) -> dict[str, Json]:
        """Returns the plan as JSON."""
        return {
            "choice": self.choice.recipe if self.choice else None,
            "command": self.command,
            "attach": self.attach_line,
            "reference": self.reference,
            "tolerance": self.tolerance,
            "steps": self.steps,
            "pilots": self.pilots,
            "rows": [{**asdict(row), "uncharged": [*row.uncharged]} for row in self.rows],
        }

    def build_table(self) -> Table:
        """Builds the table of the recipes, with advice below."""
        return render_plan_table(self)

    @override
    def __str__(self) -> str:
        try:
            return render_text(self.build_table())
        except MissingExtra:
            return "\n\n".join(render_lines(asdict(row)) for row in self.rows)


def plan(
    workload: str | Workload | Callable[..., Workload] | None = None,
    networks: str | NetworkProfile | Sequence[str | NetworkProfile] = DEFAULT_NETWORK,
    *,
    recipes: Sequence[str] | None = None,
    within: float | None = None,
    target: float | None = None,
    share: float = SHARE,
    budget: float = BUDGET,
    seeds: Sequence[int] = (0,),
    loop: Literal["train", "attach", "ddp_hook"] = "train",
    device: str | DeviceProfile = DEFAULT_DEVICE,
    out: Path | str | None = None,
    on_part: Callable[[str], None] = lambda name: None,
    **settings: object,
) -> Plan:
    """Plans a training, as ``farflung plan`` does: the recipe that reaches a target first.

    Steps are timed in virtual time without the model's arithmetic. Pilots, short trainings with it, rule out recipes
    that miss the target.

    Args:
      workload: Workload to train: a name, ``module:name``, a workload, or a class or function that creates one.
      networks: Network between the replicas: a name, a TOML file or a profile; with several, the slowest decides.
      recipes: Recipes with changes in brackets; by default :data:`farflung.recipes.planned.CANDIDATES`.
      within: Largest score below that of synchronous SGD with 16 bits after as many steps; by default three standard
        errors of a score on the test set.
      target: Score to reach instead, for which synchronous SGD with 16 bits is trained whole.
      share: Length of the main pilot over that of the training.
      budget: Steps of all pilots over those of the training, after which no other recipe is tried; the whole training
        for ``target`` is not counted.
      seeds: Seeds of the pilots.
      loop: Loop that is to train: ``train`` for ``farflung train``, ``attach`` or ``ddp_hook``.
      device: Device of each replica: a name, a TOML file or a profile.
      out: Folder in which an interrupted plan continues.
      on_part: Callback that gets the name of the next part.
      settings: Settings of :func:`farflung.simulate` for the training, such as ``steps``, ``workers`` and
        ``learning_rate``.

    Raises:
      BadInput: The input is invalid, the target cannot be reached, or the budget is too small.
    """
    networks = [networks] if isinstance(networks, str | NetworkProfile) else [*networks]
    if not 0 < share <= 1:
        raise ConfigError(f"--share {share}: must be above 0 and at most 1")
    configs = _resolve_candidates(recipes, networks, {"workload": workload, "device": device, **settings})
    _check_inputs(configs, networks, share, requested=recipes or ())
    reference = configs[REFERENCE]
    with ExitStack() as stack:
        store = _Store(stack, out)
        rows, paces = _time_candidates(configs, networks, loop, store, on_part)

        def train(name: str, steps: int) -> list[Pilot]:
            pilots = []
            for seed in seeds:
                on_part(f"pilot of {steps:,} steps: {name}")
                key: dict[str, Json] = {
                    "pilot": _describe_learning(configs[name]),
                    "steps": steps,
                    "seed": seed,
                }
                row = store.find_or_add(key, partial(_train, configs[name], steps, seed))
                pilots.append(_read_pilot(row))
            return pilots

        search = Search(
            steps=reference.steps,
            share=share,
            budget_steps=budget * reference.steps,
            reference=REFERENCE,
            equals=[name for name in paces if _learns_like_reference(configs[name]) and name != REFERENCE],
            compute_seconds=lambda name, steps: max(pace.compute_seconds(steps) for pace in paces[name]),
            train=train,
            min_steps={name: 2 * _get_period(configs[name]) for name in paces},
        )
        search.tolerance, scores = _find_tolerance(search, within, target)
        outcomes = search.choose([*paces])
    rows = {
        name: _add_outcome(row, outcomes[name], paces[name], networks, reference.steps)
        if name in paces
        else row
        for name, row in rows.items()
    }
    estimated_s = {
        name: search.compute_seconds(name, outcome.steps)
        for name, outcome in outcomes.items()
        if outcome.steps is not None
    }
    choice = rows[min(estimated_s, key=estimated_s.__getitem__)]
    options = {"workload": reference.workload, "workers": reference.workers, **settings}
    result = Plan(
        _sort_rows(rows.values()),
        choice,
        REFERENCE,
        search.tolerance,
        reference.steps,
        search.spent_steps / reference.steps,
        {
            name: value
            for name, value in options.items()
            if isinstance(value, str | int | float) and name != "steps" and name in RunConfig.list_settings()
        },
        bool(scores.min() >= 0 and scores.max() <= 1),
    )
    if out is not None:
        write_json(Path(out) / "plan.json", result.to_json())
    return result


def plan_script(
    command: Sequence[str],
    networks: str | NetworkProfile | Sequence[str | NetworkProfile] = DEFAULT_NETWORK,
    *,
    recipes: Sequence[str] | None = None,
    device: DeviceProfile | None = None,
    on_part: Callable[[str], None] = lambda name: None,
    **settings: object,
) -> Plan:
    """Times the recipes of a loop with :func:`farflung.attach`, whose script runs a few steps on this machine, alone.

    Args:
      command: Script of Python with its arguments.
      networks: Networks, as in :func:`plan`.
      recipes: Recipes, as in :func:`plan`.
      device: Profile of each replica's device; by default this machine, as its steps were.
      on_part: Callback that gets the name of the next part.
      settings: Settings of :func:`farflung.simulate`, such as ``steps`` and ``workers``.

    Raises:
      BadInput: The loop cannot be recorded, or a setting is invalid.
    """
    networks = [networks] if isinstance(networks, str | NetworkProfile) else [*networks]
    on_part(f"recording {command[0]}")
    recorded = record_script(command)
    base = {**settings, "workload": recorded.workload, "device": device or recorded.device, "batch_size": 1}
    configs = _resolve_candidates(recipes, networks, base)
    with ExitStack() as stack:
        rows, paces = _time_candidates(configs, networks, "attach", _Store(stack, None), on_part)
    steps = configs[REFERENCE].steps
    for name in paces:
        rows[name] = _add_outcome(rows[name], Outcome("timed"), paces[name], networks, steps)
    return Plan(_sort_rows(rows.values()), None, REFERENCE, 0.0, steps, 0.0, {}, is_accuracy=False)


def _resolve_candidates(
    recipes: Sequence[str] | None, networks: Sequence[str | NetworkProfile], base: Mapping[str, object]
) -> dict[str, SimulatedConfig]:
    """Returns the configuration of each recipe and of the reference, by text."""
    configs: dict[str, SimulatedConfig] = {}
    for text in dict.fromkeys([*(CANDIDATES if recipes is None else recipes), REFERENCE]):
        task = next(iter(configs.values())).task if configs else None
        configs[text] = SimulatedConfig.resolve(base, {"recipe": text, "network": networks[0]}, task=task)
    return configs


def _time_candidates(
    configs: Mapping[str, SimulatedConfig],
    networks: Sequence[str | NetworkProfile],
    loop: str,
    store: _Store,
    on_part: Callable[[str], None],
) -> tuple[dict[str, PlanRow], dict[str, list[Pace]]]:
    """Returns a row of each recipe, and the paces on each network of those that can be timed."""
    rows: dict[str, PlanRow] = {}
    paces: dict[str, list[Pace]] = {}
    for text, config in configs.items():
        rows[text] = PlanRow(text, reason=_explain_refusal(config.recipe, loop))
        if rows[text].reason:
            continue
        on_part(f"timing {text}")
        timed = _time_once(store, config, networks)
        rows[text] = replace(rows[text], uncharged=timed["uncharged"], reason=timed["refusal"])
        if not timed["refusal"]:
            paces[text] = [Pace(**pace) for pace in timed["paces"]]
    return rows, paces


def _sort_rows(rows: Iterable[PlanRow]) -> list[PlanRow]:
    return sorted(rows, key=lambda row: math.inf if row.duration_s is None else row.duration_s)


def _check_inputs(
    configs: Mapping[str, SimulatedConfig],
    networks: Sequence[str | NetworkProfile],
    share: float,
    requested: Sequence[str],
) -> None:
    """Checks settings of all candidates before anything is simulated."""
    first, *others = configs.values()
    for config in (*others, *(replace(first, network=network) for network in networks)):
        config.check()
    other_seed = replace(first, training=replace(first.training, seed=first.seed + 1))
    if first.compute_model_hash() != other_seed.compute_model_hash():
        raise ConfigError(
            f"--workload {first.workload}: its model differs from seed to seed, and a plan is for one"
        )
    for text in requested:
        config = configs[text]
        period = _get_period(config)
        if share * config.steps < 2 * period:
            raise ConfigError(
                f"--steps {config.steps}: {share:.0%} of it is shorter than two blocks of {period} steps of {text}"
            )


def _get_period(config: SimulatedConfig) -> int:
    return config.recipe.build_components(config.seed).schedule.cycle_steps


def _learns_like_reference(config: SimulatedConfig) -> bool:
    """Returns True for means of the same gradients, up to the rounding to 16 bits."""
    texts = config.recipe.component_texts
    return {name: texts[name] for name in ("reducer", "schedule", "sampler")} == {
        "reducer": "codec",
        "schedule": "synchronous",
        "sampler": "uniform",
    } and texts["codec"] in ("identity", "truncate16")


def _explain_refusal(recipe: Recipe, loop: str) -> str:
    """Returns why a loop cannot follow a recipe; empty if it can."""
    support = describe_attach_support(recipe)
    if loop != "train" and support != "yes":
        return f"{loop} cannot follow it: {support.removeprefix('no: ')}"
    if loop == "ddp_hook" and not recipe.build_components(0).schedule.is_synchronous:
        return "ddp_hook takes codecs and reducers of synchronous recipes"
    return ""


def _time_once(
    store: _Store, config: SimulatedConfig, networks: Sequence[str | NetworkProfile]
) -> dict[str, Any]:
    """Returns the paces of a recipe and its methods without a rate, or why it cannot be timed, as JSON."""
    names: list[Json] = [network if isinstance(network, str) else network.name for network in networks]

    def measure() -> dict[str, Json]:
        try:
            paces, uncharged = time_recipe(config, networks)
        except Unsupported as error:
            return {"paces": [], "uncharged": [], "refusal": str(error)}
        return {"paces": [asdict(pace) for pace in paces], "uncharged": [*uncharged], "refusal": ""}

    return store.find_or_add({"timing": config.to_json(), "networks": names}, measure)


def _describe_learning(config: SimulatedConfig) -> dict[str, Json]:
    """Returns the settings of a training on which its pilots depend."""
    timed = ("network", "connections", "device", "faults", "count_evaluation")
    return {name: value for name, value in config.to_json().items() if name not in timed}


def _train(config: SimulatedConfig, steps: int, seed: int) -> dict[str, Json]:
    pilot = train_pilot(config, steps, seed)
    scores: list[Json] = [round(score, 6) for score in pilot.scores.tolist()]
    return {"curve": [list(point) for point in pilot.curve], "scores": scores}


def _read_pilot(row: Mapping[str, Any]) -> Pilot:
    return Pilot(row["steps"], [(step, score) for step, score in row["curve"]], torch.tensor(row["scores"]))


def _find_tolerance(search: Search, within: float | None, target: float | None) -> tuple[float, Tensor]:
    """Returns the tolerance, which must be one that the test set can tell, and scores of the reference's pilot.

    Raises:
      ConfigError: The tolerance or the budget is too small, or the target is above what the reference reaches.
    """
    steps = search.pilot_steps[0]
    if steps > search.budget_steps:
        raise ConfigError(
            f"--budget {search.budget_steps / search.steps:g}: the reference alone takes "
            f"{steps / search.steps:.2g} trainings"
        )
    if target is not None:  # a whole training beyond the budget
        steps = search.steps
        search.budget_steps += steps
    scores = search.run_pilots(search.reference, steps)[0].scores
    resolution = 2 * float(scores.std()) / len(scores) ** 0.5
    if target is not None:
        end = float(scores.mean())
        within = end - target
        if within < 0:
            raise ConfigError(
                f"--target {target:g}: the reference does not reach it in {search.steps:,} steps ({end:.4g} at the end)"
            )
    if within is None:
        within = RESOLUTION_FACTOR * resolution
    if within < resolution:
        option = (
            f"--within {within:.4g}"
            if target is None
            else f"--target {target:g}, {within:.2g} below the reference"
        )
        raise ConfigError(
            f"{option}: this test set tells no less than {resolution:.2g} apart: allow more, or use more test samples"
        )
    return within, scores


def _add_outcome(
    row: PlanRow,
    outcome: Outcome,
    paces: Sequence[Pace],
    networks: Sequence[str | NetworkProfile],
    steps: int,
) -> PlanRow:
    """Returns the row with times on the network where it is slowest, and the outcome of its pilots."""
    pace, network = max(zip(paces, networks, strict=True), key=lambda pair: pair[0].compute_seconds(steps))
    bounds = outcome.bound_seconds(pace.compute_seconds) or (None, None)
    return replace(
        row,
        network=network if isinstance(network, str) else network.name,
        duration_s=pace.compute_seconds(steps),
        step_s=pace.compute_seconds(steps) / steps,
        waiting=pace.waiting,
        status=outcome.status,
        reason=outcome.reason,
        gap=None if outcome.gap is None else outcome.gap.mean,
        noise=None if outcome.gap is None else outcome.gap.noise,
        low_s=bounds[0],
        high_s=bounds[1],
        sent_nbytes=None if outcome.steps is None else pace.compute_nbytes(outcome.steps),
    )


class _Store:
    """Parts of a plan by their settings, in a file if there is a folder, so that an interrupted plan continues."""

    def __init__(self, stack: ExitStack, folder: Path | str | None) -> None:
        self._parts: dict[str, dict[str, Any]] = {}
        self._file: JsonLinesFile | None = None
        if folder is not None:
            stack.enter_context(lock_folder(Path(folder), "plans"))
            path = Path(folder) / "parts.jsonl"
            if path.exists():
                read_json_lines(path, "no part of a plan", self._load, DataError)
            self._file = stack.enter_context(JsonLinesFile(path))

    def _load(self, row: dict[str, Any]) -> None:
        self._parts[json.dumps(row["key"], sort_keys=True)] = row

    def find_or_add(
        self, key: Mapping[str, Json], measure: Callable[[], Mapping[str, Json]]
    ) -> dict[str, Any]:
        """Returns the part with a key, measured now if there is none."""
        name = json.dumps(key, sort_keys=True)
        if name not in self._parts:
            self._parts[name] = {"key": key, **key, **measure()}
            if self._file is not None:
                self._file.add(self._parts[name], flush=True)
        return self._parts[name]
