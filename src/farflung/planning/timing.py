"""Times of a recipe's steps on networks, from a few steps in virtual time without the model's arithmetic."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from farflung.calibration import count_forward_flops
from farflung.devices import find_device
from farflung.engine import GradientBuckets
from farflung.errors import Unsupported
from farflung.network import NetworkProfile
from farflung.runs import PreparedRun, Run, RunFolder, SimulatedConfig, retime, simulate_prepared
from farflung.runs.folder import TempFolder
from farflung.runs.simulation import list_timing_decisions
from farflung.seeding import create_generator
from farflung.sim import LightWorkload
from farflung.telemetry import read_number
from farflung.types import Reducer, Seeds

__all__ = ["Pace", "scale_recipe", "time_recipe"]

MIN_STEPS = 16
"""Smallest number of steps whose time is taken for that of all later steps."""
MIN_JITTER_STEPS = 64
"""The same, on networks whose messages have random delays."""
LEARNING_RATE = 1e-6
"""Learning rate of steps that teach nothing."""
WARMUP_BLOCKS = 4
"""Number of blocks in which a schedule's warm-up is timed, whose own blocks may grow."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Times of a recipe's steps on one network, of rank 0.

    Args:
      warmup: Number of first steps with another pace.
      warmup_step_s: Seconds of one of these.
      warmup_step_nbytes: Bytes sent in one of these.
      first_ends_s: Seconds from the end of the warm-up to the end of each step of the first block.
      ends_s: Seconds from the end of a later block to the end of each step of the next one, which all blocks repeat.
      waiting: Share of a later block that waits for exchanges.
      step_nbytes: Bytes sent in a step of a later block.
      held_nbytes: Largest number of bytes that schedule and reducer hold between steps.
    """

    warmup: int
    warmup_step_s: float
    warmup_step_nbytes: float
    first_ends_s: Sequence[float]
    ends_s: Sequence[float]
    waiting: float
    step_nbytes: float
    held_nbytes: int = 0

    @property
    def step_s(self) -> float:
        """Mean seconds of a step of a later block."""
        return self.ends_s[-1] / len(self.ends_s)

    def compute_seconds(self, steps: int) -> float:
        """Computes the seconds of the first ``steps`` steps."""
        warmup = min(steps, self.warmup)
        warmup_s, later = warmup * self.warmup_step_s, steps - warmup - len(self.first_ends_s)
        if later <= 0:
            return warmup_s + [0.0, *self.first_ends_s][steps - warmup]
        blocks, rest = divmod(later, len(self.ends_s))
        return warmup_s + self.first_ends_s[-1] + blocks * self.ends_s[-1] + [0.0, *self.ends_s][rest]

    def compute_nbytes(self, steps: int) -> float:
        """Computes the bytes that rank 0 sends in the first ``steps`` steps."""
        warmup = min(steps, self.warmup)
        return warmup * self.warmup_step_nbytes + (steps - warmup) * self.step_nbytes


def scale_recipe(config: SimulatedConfig, steps: int) -> SimulatedConfig:
    """Returns the configuration of a training of ``steps`` steps, whose warm-ups are as much shorter."""
    share, parts = steps / config.steps, config.recipe.build_components(config.seed)
    schedule, reducer = parts.schedule.scale_warmup(share), parts.reducer.scale_warmup(share)
    recipe = config.recipe.with_components(
        schedule=schedule if schedule != parts.schedule else None,
        reducer=reducer if reducer != parts.reducer else None,
    )
    return replace(config, recipe=recipe, training=replace(config.training, steps=steps))


def time_recipe(
    config: SimulatedConfig, networks: Sequence[str | NetworkProfile]
) -> tuple[list[Pace], list[str]]:
    """Times the steps of a training on each network.

    The steps are simulated once, without the model's arithmetic, and retimed on each network. The pace is that of a
    block of whole periods of the schedule, at least as long as its results are late, after another such block. It has
    two periods at least, since on some networks every other exchange is faster.

    Args:
      config: Configuration of the whole training.
      networks: Names, TOML files or profiles.

    Returns:
      The pace on each network, and the methods whose coding the device has no rate for.

    Raises:
      Unsupported: What the recipe learns depends on the network, or it sends samples.
      BadInput: The recipe or a network cannot be used.
    """
    if config.recipe.build_components(config.seed).sharing.has_data_transfers:
        raise Unsupported("it sends samples")
    profiles = [replace(config, network=network).make_network() for network in networks]
    has_jitter = any(link.jitter_s for profile in profiles for link in profile.iter_links())
    light, warmup, block = _build_light(config, MIN_JITTER_STEPS if has_jitter else MIN_STEPS)
    scratch = TempFolder()
    run = simulate_prepared(PreparedRun(light, RunFolder(scratch.path / "run")), should_checkpoint=False)
    if list_timing_decisions(run.files):
        raise Unsupported("what it learns depends on the network")
    if config.elastic:  # which cannot be retimed
        runs = [
            simulate_prepared(
                PreparedRun(replace(light, network=network), RunFolder(scratch.path / f"run-{number}")),
                should_checkpoint=False,
            )
            for number, network in enumerate(networks)
        ]
    else:
        runs = [retime(run, network=network) for network in networks]
    full_warmup = _count_warmup(config)[0]
    held_nbytes = int(read_number(run.summary, "schedule_bytes_per_replica")) + _count_reducer_nbytes(light)
    paces = [_read_pace(retimed, full_warmup, warmup, block, held_nbytes) for retimed in runs]
    uncharged = runs[0].summary.get("coding_not_charged", [])
    return paces, [str(method) for method in uncharged] if isinstance(uncharged, list) else []


def _build_light(config: SimulatedConfig, min_steps: int) -> tuple[SimulatedConfig, int, int]:
    """Returns the configuration of a few steps without arithmetic, their warm-up, and the steps of a block."""
    full_warmup, reducer = _count_warmup(config)
    schedule = config.recipe.build_components(config.seed).schedule
    late = schedule.max_steps_ahead - schedule.cycle_steps + 1
    block = schedule.cycle_steps * max(2, math.ceil(max(min_steps, late) / schedule.cycle_steps))
    warmup = min(full_warmup, WARMUP_BLOCKS * block if schedule.warmup_steps else block)
    share = warmup / full_warmup if full_warmup else 1.0
    scaled = reducer.scale_warmup(share)
    recipe = config.recipe.with_components(
        schedule=schedule.scale_warmup(share), reducer=scaled if reducer.warmup_steps else None
    )
    training = replace(
        config.training,
        steps=warmup + 2 * block + max(late, 0),
        learning_rate=LEARNING_RATE,
        clip_norm=0.0,
        evaluate_every=0,
        checkpoint_every=0,
    )
    device = config.device
    if isinstance(device, str):
        device = find_device(device, forward_flops=count_forward_flops(config.task))
    task = LightWorkload(config.task.name, config.task.build_model)
    light = replace(
        config,
        task=task,
        recipe=recipe,
        training=training,
        device=device,
        network="loopback",
        partition="iid" if config.recipe.build_components(config.seed).needs_shares else "shared",
    )
    return light, warmup, block


def _count_warmup(config: SimulatedConfig) -> tuple[int, Reducer]:
    """Returns the steps of the warm-up of schedule and reducer, and the reducer of the whole training."""
    parts, rates = config.recipe.build_components(config.seed), config.training.make_rate_schedule()
    rate_warmup = getattr(rates, "warmup", 0) if rates.unit == "steps" else 0
    reducer = parts.reducer.with_run_length(config.steps, rate_warmup)
    return max(parts.schedule.warmup_steps, reducer.warmup_steps), reducer


def _count_reducer_nbytes(config: SimulatedConfig) -> int:
    """Counts the bytes of the reducer's first states."""
    parts, model = (
        config.recipe.build_components(config.seed),
        config.task.build_model(create_generator(0, "model")),
    )
    buckets = GradientBuckets(model.named_parameters(), parts.bucket_nbytes).buckets
    states = [parts.reducer.init(bucket.spec, Seeds(0, 0)) for bucket in buckets]
    return sum(_count_nbytes([state.shared, state.local]) for state in states)


def _count_nbytes(tree: object) -> int:
    if isinstance(tree, Tensor):
        return tree.nbytes
    nodes = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, list | tuple) else ()
    return sum(map(_count_nbytes, nodes))


def _read_pace(run: Run, full_warmup: int, warmup: int, block: int, held_nbytes: int) -> Pace:
    events = run.events[0]
    steps = [event for event in events if event["event"] == "step"]
    begin = next(event for event in events if event["event"] == "begin")
    begin_s = read_number(begin, "t")
    ends_s = [begin_s, *(read_number(step, "t") for step in steps)]
    sent = [0.0, *(read_number(step, "bytes_sent") for step in steps)]
    start, end = warmup + block, warmup + 2 * block
    waited_s, duration_s = (
        math.fsum(read_number(step, name) for step in steps[start:end])
        for name in ("exposed_s", "duration_s")
    )
    return Pace(
        full_warmup,
        (ends_s[warmup] - begin_s) / max(1, warmup),
        sent[warmup] / max(1, warmup),
        [end_s - ends_s[warmup] for end_s in ends_s[warmup + 1 : start + 1]],
        [end_s - ends_s[start] for end_s in ends_s[start + 1 : end + 1]],
        waited_s / duration_s if duration_s else 0.0,
        (sent[end] - sent[start]) / block,
        held_nbytes,
    )
