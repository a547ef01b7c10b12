"""Planning of a training: times of recipes, pilots, and the choice."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from farflung.calibration import measure_step_nbytes
from farflung.devices import DeviceProfile
from farflung.errors import ConfigError, Unsupported
from farflung.files import RunFiles, lock_folder, wrap_write_errors, write_json
from farflung.network import NetworkProfile
from farflung.planning.choice import RUNGS, Pilot, PlanRow, Search
from farflung.planning.pilots import train_pilot
from farflung.planning.result import Plan, explain_refusal, parse_components
from farflung.planning.script import record_script
from farflung.planning.timing import Pace, time_recipe
from farflung.recipes.planned import CANDIDATES, REFERENCE
from farflung.runs import DEFAULT_DEVICE, DEFAULT_NETWORK, RunConfig, SimulatedConfig
from farflung.runs.folder import TempFolder
from farflung.types import Json, Workload

__all__ = ["OnPart", "ignore_part", "plan", "plan_script"]

Networks: TypeAlias = str | NetworkProfile | Sequence[str | NetworkProfile]
OnPart: TypeAlias = Callable[[str, int], None]
"""Callback that gets the name of the next part of a plan, and the largest number of parts that are left with it."""

SHARE = 0.25
"""Default length of the main pilot over that of the training."""
RESOLUTION_FACTOR = 1.5
"""Default tolerance over the smallest one that the test set can tell, which is two standard errors."""
GIB = 1 << 30
SCRIPT_SETTINGS = ("steps", "workers", "seed", "connections")
"""Settings of a plan for a script."""


def ignore_part(name: str, num_left: int) -> None:
    """Ignores the progress of a plan, as the default callback."""
    del name, num_left


def plan(
    workload: str | Workload | Callable[..., Workload] | None = None,
    networks: Networks = DEFAULT_NETWORK,
    *,
    recipes: Sequence[str] | None = None,
    within: float | None = None,
    target: float | None = None,
    share: float = SHARE,
    budget: float | None = None,
    seeds: Sequence[int] = (0,),
    loop: Literal["train", "attach", "ddp_hook"] = "train",
    data_stays: bool = False,
    max_memory: float | None = None,
    device: str | DeviceProfile = DEFAULT_DEVICE,
    out: Path | str | None = None,
    on_part: OnPart = ignore_part,
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
      budget: Processor minutes of timing and pilots, which no pilot is begun to exceed; by default pilots have as many
        steps as the training for each seed, beyond the one for ``target``, and twice as many while only the reference
        is known to reach the target.
      seeds: Seeds of the pilots.
      loop: Loop that is to train: ``train`` for ``farflung train``, ``attach`` or ``ddp_hook``.
      data_stays: True to leave out recipes that need samples of other replicas.
      max_memory: GiB of each replica; recipes that need more are left out. Buffers of messages are not counted.
      device: Device of each replica: a name, a TOML file or a profile.
      out: Folder in which an interrupted plan continues.
      on_part: Callback that gets the name of the next part, and how many are left at most.
      settings: Settings of :func:`farflung.simulate` for the training, such as ``steps``, ``workers`` and
        ``learning_rate``.

    Raises:
      BadInput: The input is invalid, the target cannot be reached, or the budget is too small.
    """
    networks = _list_networks(networks)
    configs = _resolve_candidates(recipes, networks, {"workload": workload, "device": device, **settings})
    limits = {"within": within, "target": target, "budget": budget, "max-memory": max_memory}
    _check_inputs(configs, networks, share, seeds, limits, requested=recipes or ())
    reference, begin_s = configs[REFERENCE], time.process_time()
    scratch = TempFolder() if out is None else None
    folder = Path(str(out)) if scratch is None else scratch.path
    max_pilots = len(RUNGS) * len(seeds)
    with lock_folder(folder, "plans"):
        rows: dict[str, PlanRow] = {}
        for number, (text, config) in enumerate(configs.items()):
            on_part(f"timing {text}", len(configs) - number + max_pilots * len(configs))
            rows[text] = _time_recipe(
                folder, text, config, networks, explain_refusal(config.recipe, loop, data_stays)
            )
            if max_memory is not None:
                rows[text] = _drop_large(rows[text], config, max_memory)

        def train(name: str, steps: int, seed: int) -> Pilot:
            undecided = sum(row.status == "timed" for row in search.rows.values())
            on_part(f"pilot of {steps:,} steps: {name}", max_pilots * (undecided + 1))
            key: dict[str, Json] = {**_describe_learning(configs[name]), "pilot": steps, "seed": seed}
            return Pilot(**_find_or_add(folder, key, lambda: asdict(train_pilot(configs[name], steps, seed))))

        timed = {name: row for name, row in rows.items() if row.status == "timed"}
        search = Search(
            timed,
            REFERENCE,
            [name for name in timed if name != REFERENCE and _learns_like_reference(configs[name])],
            reference.steps,
            share,
            lambda name, steps: [train(name, steps, seed) for seed in seeds],
            {name: 2 * _get_period(config) for name, config in configs.items()},
            budget_steps=len(seeds) * reference.steps * (1 if target is None else 2),
        )
        if budget is not None:
            timing_s = time.process_time() - begin_s
            search.budget_s = 60 * budget - timing_s
            if search.budget_s <= 0:
                raise ConfigError(f"--budget {budget:g}: timing alone takes {timing_s:.2g} s")
        search.tolerance, scores = _find_tolerance(search, within, target)
        choice = search.choose()
    rows |= search.rows
    options = {"workload": reference.workload, "workers": reference.workers, **settings}
    result = Plan(
        _sort_rows(rows.values()),
        rows[choice],
        REFERENCE,
        search.tolerance,
        reference.steps,
        search.spent_steps / reference.steps,
        {
            name: value
            for name, value in options.items()
            if isinstance(value, str | int | float) and name != "steps" and name in RunConfig.list_settings()
        }
        | ({"data_stays": True} if data_stays else {}),
        bool(scores.min() >= 0 and scores.max() <= 1),
    )
    if out is not None:
        write_json(folder / "plan.json", result.to_json())
    return result


def plan_script(
    command: Sequence[str],
    networks: Networks = DEFAULT_NETWORK,
    *,
    recipes: Sequence[str] | None = None,
    on_part: OnPart = ignore_part,
    **settings: object,
) -> Plan:
    """Times the recipes of a loop with :func:`farflung.attach`, whose script runs a few steps with each, alone.

    Args:
      command: Script of Python with its arguments.
      networks: Networks, as in :func:`plan`.
      recipes: Recipes, as in :func:`plan`.
      on_part: Callback, as in :func:`plan`.
      settings: ``steps``, ``workers``, ``seed`` or ``connections``, as in :func:`farflung.simulate`; the script has its
        own for the rest, and the replicas are as fast as this machine.

    Raises:
      BadInput: The loop cannot be recorded, or a setting is invalid.
    """
    for name in settings:
        if name not in SCRIPT_SETTINGS:
            raise ConfigError(
                f"--{name.replace('_', '-')}: a script is only timed, as it is and on this machine: leave that out"
            )
    networks, scratch = _list_networks(networks), TempFolder()
    on_part(f"recording {command[0]}", 1 + len(CANDIDATES if recipes is None else recipes))
    recorded = record_script(command, REFERENCE)
    base = {**settings, "workload": recorded.workload, "device": recorded.device, "batch_size": 1}
    configs, rows = _resolve_candidates(recipes, networks, base), list[PlanRow]()
    for number, (text, config) in enumerate(configs.items()):
        on_part(f"recording and timing {text}", len(configs) - number)
        reason, changes = explain_refusal(config.recipe, "attach"), parse_components(text)[1]
        if changes:
            reason = (
                f"the loop has its own {' and '.join(changes)}: set that there, and name the recipe alone"
            )
        own_device = config.device
        try:
            if text != REFERENCE and not reason:
                own_device = record_script(command, text).device
        except ConfigError as error:
            reason = str(error)
        rows.append(_time_recipe(scratch.path, text, replace(config, device=own_device), networks, reason))
    return Plan(_sort_rows(rows), None, REFERENCE, 0.0, configs[REFERENCE].steps, 0.0, {}, is_accuracy=False)


def _list_networks(networks: Networks) -> list[str | NetworkProfile]:
    """Returns the networks as a list, which must have one or more, each once."""
    listed = [networks] if isinstance(networks, str | NetworkProfile) else [*networks]
    _check_choices("networks", listed)
    return listed


def _check_choices(option: str, values: Sequence[object]) -> None:
    """Checks that an option has one value or more, each once."""
    if not values:
        raise ConfigError(f"--{option}: give at least one")
    if any(value in values[:place] for place, value in enumerate(values)):
        raise ConfigError(f"--{option}: one of them is there twice")


def _resolve_candidates(
    recipes: Sequence[str] | None, networks: Sequence[str | NetworkProfile], base: Mapping[str, object]
) -> dict[str, SimulatedConfig]:
    """Returns the configuration of each recipe and of the reference, by text."""
    configs: dict[str, SimulatedConfig] = {}
    for text in dict.fromkeys([*(CANDIDATES if recipes is None else recipes), REFERENCE]):
        task = next(iter(configs.values())).task if configs else None
        configs[text] = SimulatedConfig.resolve(base, {"recipe": text, "network": networks[0]}, task=task)
    return configs


def _check_inputs(
    configs: Mapping[str, SimulatedConfig],
    networks: Sequence[str | NetworkProfile],
    share: float,
    seeds: Sequence[int],
    limits: Mapping[str, float | None],
    requested: Sequence[str],
) -> None:
    """Checks settings of all candidates before anything is simulated."""
    _check_choices("seeds", seeds)
    for seed in seeds:
        if seed < 0:
            raise ConfigError(f"--seeds {seed}: must be 0 or more")
    for option, limit in limits.items():
        if limit is not None and not math.isfinite(limit):
            raise ConfigError(f"--{option} {limit}: must be a finite number")
    if not 0 < share <= 1:
        raise ConfigError(f"--share {share}: must be above 0 and at most 1")
    first, *others = configs.values()
    for config in (*others, *(replace(first, network=network) for network in networks)):
        config.check()
    other_seed = replace(first, training=replace(first.training, seed=first.seed + 1))
    if first.compute_model_hash() != other_seed.compute_model_hash():
        raise ConfigError(
            f"--workload {first.workload}: its model differs from seed to seed, and a plan is for one"
        )
    for text in requested:
        period, steps = _get_period(configs[text]), first.steps
        if share * steps < 2 * period:
            raise ConfigError(
                f"--steps {steps}: {share:.0%} of it is shorter than two blocks of {period} steps of {text}"
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


def _time_recipe(
    folder: Path, text: str, config: SimulatedConfig, networks: Sequence[str | NetworkProfile], reason: str
) -> PlanRow:
    """Returns the row of a recipe with its times on the slowest network, or why it cannot be timed."""
    names = [network if isinstance(network, str) else network.name for network in networks]

    def measure() -> dict[str, Json]:
        try:
            paces, uncharged = time_recipe(config, networks)
        except Unsupported as error:
            return {"reason": str(error)}
        return {"paces": [asdict(pace) for pace in paces], "uncharged": [*uncharged]}

    part: dict[str, Any] = {"reason": reason}
    if not reason:
        worlds: list[Json] = [replace(config, network=network).compute_world_hash() for network in networks]
        part = _find_or_add(folder, {**config.to_json(), "networks": [*names], "worlds": worlds}, measure)
    if "reason" in part:
        return PlanRow(text, reason=part["reason"])
    paces = zip((Pace(**pace) for pace in part["paces"]), names, strict=True)
    duration_s, pace, network = max(
        ((pace.compute_seconds(config.steps), pace, name) for pace, name in paces), key=lambda each: each[0]
    )
    step_s = duration_s / config.steps
    return PlanRow(
        text, network, pace, duration_s, step_s, pace.waiting, "timed", uncharged=tuple(part["uncharged"])
    )


def _drop_large(row: PlanRow, config: SimulatedConfig, max_memory: float) -> PlanRow:
    """Returns the row, as not tried if the recipe needs more than ``max_memory`` GiB.

    Raises:
      ConfigError: The reference needs more.
    """
    if row.pace is None:
        return row
    memory = (measure_step_nbytes(config.task, config.training) + row.pace.held_nbytes) / GIB
    if memory <= max_memory:
        return row
    if row.recipe == REFERENCE:
        raise ConfigError(f"--max-memory {max_memory:g}: {REFERENCE} alone needs {memory:.2g} GiB")
    return replace(row, status="untried", reason=f"it needs {memory:.2g} GiB")


def _describe_learning(config: SimulatedConfig) -> dict[str, Json]:
    """Returns the settings of a training on which its pilots depend."""
    timed = ("network", "connections", "device", "faults", "count_evaluation")
    return {name: value for name, value in config.to_json().items() if name not in timed}


def _find_tolerance(search: Search, within: float | None, target: float | None) -> tuple[float, Tensor]:
    """Returns the tolerance, which must be one that the test set can tell, and scores of the reference's pilot.

    Raises:
      ConfigError: The tolerance is too small, or the target is above what the reference reaches.
    """
    steps = search.pilot_steps[0] if target is None else search.steps
    scores = torch.tensor(search.run_pilots(search.reference, steps)[0].scores)
    resolution, option = 2 * float(scores.std()) / len(scores) ** 0.5, f"--within {within}"
    if target is not None:
        end = float(scores.mean())
        within = end - target
        option = f"--target {target:g}, {within:.2g} below the reference"
        if within < 0:
            raise ConfigError(
                f"--target {target:g}: the reference does not reach it in {search.steps:,} steps ({end:.4g} at the end)"
            )
    if within is None:
        within = RESOLUTION_FACTOR * resolution
    if within < resolution:
        raise ConfigError(
            f"{option}: this test set tells no less than {resolution:.2g} apart: allow more, or use more test samples"
        )
    return within, scores


def _sort_rows(rows: Iterable[PlanRow]) -> list[PlanRow]:
    return sorted(rows, key=lambda row: math.inf if row.duration_s is None else row.duration_s)


def _find_or_add(
    folder: Path, settings: Mapping[str, Json], measure: Callable[[], Mapping[str, Any]]
) -> dict[str, Any]:
    """Returns the part of a plan with these settings, measured now and stored if there is none."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    path = folder / "parts" / f"{digest[:16]}.json"
    if not path.exists():
        part = measure()
        with wrap_write_errors(path):
            path.parent.mkdir(exist_ok=True)
        write_json(path, {"settings": dict(settings), "part": dict(part)})
    stored: Any = RunFiles(folder).load_json(path)["part"]
    return dict(stored)
