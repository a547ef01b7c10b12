"""Simulation of runs in virtual time, and retiming for other networks and devices."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch

from farflung.codecs import CODECS
from farflung.comm import AUTO, collective_named
from farflung.devices import DeviceProfile
from farflung.engine.placement import place
from farflung.errors import CheckpointError, ConfigError, DataError, Suspended
from farflung.files import naming, reading, write_json, write_whole
from farflung.loop import Replica, Summary, keep_once
from farflung.membership import Elastic
from farflung.network import NetworkProfile
from farflung.recipes import Recipe
from farflung.reducers import REDUCERS
from farflung.runs.bottleneck import slowest
from farflung.runs.config import RunConfig, RunOptions, SimulatedConfig
from farflung.runs.folder import RunFolder, Scratch
from farflung.runs.preparing import Prepared, prepared
from farflung.runs.replicas import make_replica, settled_collective
from farflung.runs.result import Run
from farflung.sim import RecordedReplica, Retimed, Traffic, TrafficRecorder, VirtualWorld, retimed_events
from farflung.spec import is_carried
from farflung.state_trees import save_tree
from farflung.telemetry import Event, JsonLines, Sink, Telemetry, both
from farflung.types import Decision, Json, State, Workload

__all__ = [
    "nowhere",
    "one_thread",
    "ready_to_simulate",
    "retime",
    "retime_prepared",
    "simulate",
    "simulate_prepared",
    "timing_decisions",
    "torch_threads",
    "whole",
]


MESSAGE_S = 1e-4
"""Seconds to simulate one message on a current processor."""
LONG_S = 10.0
"""Seconds to simulate an exchange above which a warning is issued."""
UNCHARGED: set[tuple[str, str]] = set()
"""Devices and methods without rates that this process has warned of."""


def nowhere(event: Event) -> None:
    """Discards an event, as the default sink."""
    del event


def simulate(
    workload: str | Workload | Callable[..., Workload] | None = None,
    recipe: str | Recipe | None = None,
    *,
    out: Path | str | None = None,
    resume: Path | str | None = None,
    replay: Path | str | None = None,
    trace: bool = False,
    log_to: str = "",
    compute_on: str = "cpu",
    show: Sink = nowhere,
    stop_asked: Callable[[], bool] = lambda: False,
    **settings: object,
) -> Run:
    """Trains in virtual time, with real arithmetic on a modelled clock, as ``farflung simulate`` does.

    >>> run = simulate("synthetic/quadratic", "ring(codec=int8)", network="wifi-10mbps", workers=2, steps=3)
    >>> run.summary["steps"], run.is_simulated, list(run.state_dict())
    (3, True, ['w'])

    Args:
      workload: Workload to train: a name, ``module:name``, a workload, or a class or function that creates one; by
        default fashion-mnist/cnn.
      recipe: Recipe of distributed training: a name, with changes in brackets, or a :class:`farflung.recipes.Recipe`;
        by default synchronous.
      out: Folder of the run; by default the files are deleted with the returned object.
      resume: Folder of a run to continue from its last checkpoint; settings given here change its own.
      replay: File ``decisions.jsonl`` whose decisions are repeated.
      trace: True to write each exchange to telemetry, for ``farflung trace``.
      log_to: Loggers of the run's metrics, separated by commas: tensorboard, wandb, trackio or mlflow.
      compute_on: Torch device for the arithmetic: cpu; cuda, one for each replica; or cuda:0, shared by all. Times
        are always those of the setting ``device``.
      sink: Sink for the events of all replicas.
      should_stop: Function that returns True after a stop request; all replicas then stop after the same step.
      settings: Settings of the command by name (``steps``, ``learning_rate``, ``partition``, ``network``, ``device``,
        ``faults`` and so on). ``network``, ``device``, ``faults``, ``partition`` and recipe members may be objects.

    Raises:
      BadInput: The input is invalid; raised before the run starts.
      RunLost: A replica was lost.
    """
    layer = {"workload": workload, "recipe": recipe, **settings}
    options = RunOptions(out=out, resume=resume, replay=replay, trace=trace, log_to=log_to, device=compute_on)
    run = prepared(SimulatedConfig, layer, options=options, scratch=True)
    return simulate_prepared(run, show, stop_asked=stop_asked)


def simulate_prepared(
    run: Prepared[SimulatedConfig],
    show: Sink = nowhere,
    *,
    stop_asked: Callable[[], bool] = lambda: False,
    checkpointed: bool = True,
) -> Run:
    """Creates the folder and trains there in virtual time.

    Args:
      run: Prepared run.
      sink: Sink for the events of all replicas.
      should_stop: Function that returns True after a stop request; all replicas then stop after the same step.
      should_checkpoint: True to save checkpoints.

    Raises:
      BadInput: The folder holds another run, is in use, or cannot be written.
      RunLost: A replica was lost.
    """
    with ready_to_simulate(run, stop_asked=stop_asked, checkpointed=checkpointed) as begin:
        return begin(show)


@contextmanager
def ready_to_simulate(
    run: Prepared[SimulatedConfig], *, stop_asked: Callable[[], bool], checkpointed: bool = True
) -> Iterator[Callable[[Sink], Run]]:
    """Creates and locks the folder, and yields a function that trains there with a given sink.

    Arguments and errors are those of :func:`simulate_prepared`.
    """
    ranks = range(run.config.ranks)
    devices = [
        place(run.options.device, local_rank=rank, local_size=len(ranks), option="--compute-on")
        for rank in ranks
    ]
    log = run.log()
    with run.begun(), log:
        yield lambda sink: _simulated(run, devices, both(sink, log), stop_asked, checkpointed)


@contextmanager
def _world_of(
    run: Prepared[SimulatedConfig],
) -> Iterator[tuple[VirtualWorld, list[JsonLines], Callable[..., Replica]]]:
    """Yields the virtual world, the event file of each rank, and a function that creates replicas."""
    config, files = run.config, run.files
    decisions = files.decision_log()
    world = config.make_world(decisions)
    shares = config.make_shares()

    def make(rank: int, *sinks: Sink, **options: Any) -> Replica:
        telemetry = Telemetry(rank, *sinks, world.injector, decisions.write)
        task, recipe, training = config.task, config.recipe, config.training
        return make_replica(world.runtimes[rank], task, recipe, training, telemetry, shares=shares, **options)

    with ExitStack() as stack:
        stack.callback(decisions.write)
        yield (
            world,
            [stack.enter_context(JsonLines(files.telemetry(rank))) for rank in range(len(world.runtimes))],
            make,
        )
    world.injector.warn_of_missed()


def _simulated(
    run: Prepared[SimulatedConfig],
    devices: list[torch.device],
    show: Sink,
    stop_asked: Callable[[], bool],
    checkpointed: bool,
) -> Run:
    config, files = run.config, run.files
    with (
        _world_of(run) as (world, event_files, make),
        TrafficRecorder(files.traffic, config.ranks) as recorder,
    ):
        factories: list[Callable[[], Replica]] = []
        for rank, file in enumerate(event_files):
            checkpoints = files.checkpoints(
                rank, config.workers, leader=rank == 0, any_size=bool(config.elastic)
            )
            factories.append(
                partial(
                    make,
                    rank,
                    file,
                    show,
                    checkpoints=checkpoints if checkpointed else None,
                    stop_asked=stop_asked,
                    trace=run.options.trace,
                    device=devices[rank],
                    kind=partial(RecordedReplica, recorder=recorder),
                )
            )
        replicas = [create() for create in factories]
        start = checkpoints.newest() if files.resumed else 0
        for runtime in world.runtimes if config.elastic else ():
            runtime.elastic = Elastic(
                runtime,
                b"simulated",
                least=config.least,
                quorum=config.quorum,
                patience_s=config.deadline,
                returns=True,
                first_step=start,
                reach=replicas[0].parts.schedule.reach,
                members=range(config.workers),
            )
        collective = settled_collective(world.settle_collective, config.recipe, replicas[0], start)
        for replica in replicas if files.resumed else ():
            replica.resume(start)
        if not config.make_faults().faults:
            keep_once(replicas)
        _warn_if_slow(world, config.recipe, replicas[0])
        with one_thread():
            summary, model = world.run([whole(*pair) for pair in zip(replicas, factories, strict=True)])[0]
    save_tree(files.model, model)
    return _ended(run, {**summary.to_json(), "collective": collective}, world)


def _warn_if_slow(world: VirtualWorld, recipe: Recipe, replica: Replica) -> None:
    """Warns before a run of exchanges that take long to simulate."""
    auto = replica.runtime.comm.auto
    size, names = len(world.runtimes), [recipe.collective] * len(replica.bucket_specs)
    if recipe.collective == AUTO:
        names = [auto.get(spec.nbytes, "direct") for spec in replica.bucket_specs]
    messages = sum(count(size) for name in names if (count := collective_named(name).messages))
    if messages * MESSAGE_S >= LONG_S:
        logging.getLogger("farflung").warning(
            "an exchange of %s replicas by %s has about %s messages, which are simulated one by one: each will take "
            "about %s",
            f"{size:,}",
            ", ".join(dict.fromkeys(names)),
            f"{messages:,}",
            timedelta(seconds=round(messages * MESSAGE_S)),
        )


async def whole(replica: Replica, again: Callable[[], Replica] | None = None) -> tuple[Summary, State]:
    """Runs a replica to its end; returns its summary and the trained model.

    Args:
      replica: Replica to run.
      rebuild: Function that creates another replica, which continues after a suspension.
    """
    while True:
        try:
            result = await replica.run(), await replica.trained()
            if replica.runtime.elastic is not None:
                await replica.runtime.elastic.finish(replica.step_done)
        except Suspended:
            if again is None:
                raise
            replica = again()
        else:
            return result


def retime(
    run: Run | Path | str,
    *,
    network: str | NetworkProfile | None = None,
    device: str | DeviceProfile | None = None,
    out: Path | str | None = None,
    show: Sink = nowhere,
) -> Run:
    """Recomputes the times of a simulated run for another network or device, without its arithmetic.

    Learning results are unchanged, and all times equal those of a new simulation.

    >>> run = simulate("synthetic/quadratic", network="wifi-10mbps", workers=2, steps=3)
    >>> retime(run, network="4g").summary["duration_s"] > run.summary["duration_s"]
    True

    Args:
      run: Result of :func:`simulate`, or the folder of such a run.
      network: New network: a name, a TOML file or a profile; by default the run's.
      device: New device: a name, a TOML file or a profile; by default the run's.
      out: Folder of the new run; by default the files are deleted with the returned object.
      sink: Sink for the events of all replicas.

    Raises:
      BadInput: The run cannot be retimed, or the network is invalid.
    """
    source = run.files if isinstance(run, Run) else RunFolder(Path(run))
    if isinstance(run, Run):
        original = run.config
        if not isinstance(original, SimulatedConfig):
            raise ConfigError(f"{run.folder}: a run of real workers; only simulated ones can be retimed")
    else:
        with naming(source.config):
            original = SimulatedConfig.resolve(SimulatedConfig.stored_in(source))
    config = replace(original, network=network or original.network, device=device or original.device)
    shares = config.check()
    scratch = Scratch() if out is None else None
    files = RunFolder(Path(str(out)) if scratch is None else scratch.path / "run")
    return retime_prepared(Prepared(config, files, shares, scratch=scratch), source, show)


def retime_prepared(run: Prepared[SimulatedConfig], stored: RunFolder, show: Sink = nowhere) -> Run:
    """Recomputes the times of a stored run for another network or device, in a new folder.

    Args:
      run: Prepared run with the stored run's configuration except network or device.
      source: Folder of the stored run.
      sink: Sink for the events of all replicas.

    Raises:
      BadInput: The run cannot be retimed.
    """
    config, files = run.config, run.files
    events, checkpointed = _retimable(stored, config)
    kind = partial(Retimed, traffic=Traffic.read(stored.traffic), checkpointed=checkpointed)
    replay = stored.decisions if stored.decisions.exists() else None
    with replace(run, options=RunOptions(replay=replay)).begun():
        with _world_of(run) as (world, event_files, make):
            replicas = [
                make(rank, retimed_events(events[rank], file, show), kind=kind)
                for rank, file in enumerate(event_files)
            ]
            settle = partial(world.settle_collective, fresh=True)
            collective = settled_collective(settle, config.recipe, replicas[0])
            _warn_if_slow(world, config.recipe, replicas[0])
            wrong = "cannot be retimed by its events and its traffic; simulate it anew"
            with reading(stored.path, wrong, DataError), one_thread():
                world.run([replica.run() for replica in replicas])
        if stored.model.exists():
            write_whole(files.model, partial(shutil.copyfile, stored.model))
        (end,) = (event for event in files.events()[0] if event["event"] == "end")
        summary = {key: value for key, value in end.items() if key not in ("event", "rank", "t")}
        return _ended(run, {**summary, "collective": collective}, world)


def timing_decisions(stored: RunFolder) -> list[Decision]:
    """Lists the decisions of a run that could differ on another network."""
    return [decision for decision in stored.decided() if decision.timing]


def _retimable(stored: RunFolder, config: RunConfig) -> tuple[dict[int, list[Event]], bool]:
    """Checks that a run can be retimed; returns its events, and True if it saved checkpoints."""
    timing = timing_decisions(stored)
    if timing:
        raise ConfigError(
            f"{stored.path}: its learning depended on the network: it decided {timing[0].name!r} by time or arrival "
            f"at step {timing[0].step}; simulate it anew instead"
        )
    if config.recipe.parts(config.seed).sharing.data_leaves_device:
        raise ConfigError(
            f"{stored.path}: its replicas sent samples (--sharing {config.recipe.members['sharing']}), which is not "
            "recorded; simulate it anew instead"
        )
    events = stored.events()
    kinds = [event["event"] for event in events.get(0, [])]
    if len(events) != config.workers or "end" not in kinds:
        raise CheckpointError(f"{stored.path}: the run has not come to its end")
    if kinds.count("begin") > 1:
        raise ConfigError(f"{stored.path}: the run was resumed, and only one in one piece can be retimed")
    return events, "checkpoint" in kinds


def _ended(run: Prepared[SimulatedConfig], summary: dict[str, Json], world: VirtualWorld) -> Run:
    """Stores the summary of a run, and warns of methods whose coding time is not modelled."""
    bottleneck = slowest(run.files.events())
    full_summary: dict[str, Json] = {
        **summary,
        **coding_told(world, resumed=run.files.resumed),
        **({"slowest": bottleneck} if bottleneck else {}),
        "partition": run.config.split_json(),
        "simulated": run.config.world_json(),
    }
    write_json(run.files.summary, full_summary)
    _warn_of_uncharged(run.config, full_summary.get("coding_not_charged", []))
    return run.ended(full_summary)


def one_thread() -> AbstractContextManager[None]:
    """Limits torch to one thread within the context, as in workers that share a machine; results depend on it."""
    return torch_threads(1)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Sets the number of torch threads within the context."""
    previous = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(previous)


# --- coding whose time is not modelled ------------------------------------------------------------


def coding_told(world: VirtualWorld, *, resumed: bool) -> dict[str, Json]:
    """Summarizes coding times; empty if devices have no rates.

    ``coding_s`` is rank 0's seconds of coding and moving messages, unless the run was resumed. ``coding_not_charged``
    lists methods that lack a rate for some of their work.
    """
    lanes = [runtime.lane for runtime in world.runtimes if runtime.lane is not None]
    if not lanes:
        return {}
    unknown: list[Json] = list(dict.fromkeys(method for lane in lanes for method in lane.not_charged))
    times: dict[str, Json] = {} if resumed else {"coding_s": lanes[0].busy_s}
    return {**times, **({"coding_not_charged": unknown} if unknown else {})}


def _warn_of_uncharged(config: SimulatedConfig, methods: Any) -> None:
    """Warns once per process of methods whose coding is not charged.

    Methods are identified by the text of a codec or reducer; custom reducers may use another name.
    """
    device, reducer = str(config.world_json()["device"]), str(config.recipe.members["reducer"])
    new = [method for method in methods if (device, method) not in UNCHARGED]
    UNCHARGED.update((device, method) for method in new)
    calibrations = {method: _calibrated_as(method, reducer) for method in new}
    measurable = [method for method, (_, text) in calibrations.items() if is_carried(text)]
    command = ["farflung calibrate"]
    for option in ("--codecs", "--reducers"):
        texts = dict.fromkeys(
            text for key, text in map(calibrations.__getitem__, measurable) if key == option
        )
        command += [option, *map(repr, texts)] if texts else []
    unmeasurable = [method for method in new if method not in measurable]
    for group, advice in (
        (measurable, f"calibrate with {' '.join(command)}"),
        (unmeasurable, "farflung calibrate measures only what can be imported, as module:name"),
    ):
        if group:
            names = ", ".join(method or "plain sums" for method in group)
            logging.getLogger("farflung").warning(
                "coding of %s is not charged on this device: %s", names, advice
            )


def _calibrated_as(method: str, reducer: str) -> tuple[str, str]:
    """Returns the option of ``farflung calibrate`` that measures a method, and its text; plain sums need none."""
    if not method:
        return "", method
    name = method.partition("(")[0]
    if name in REDUCERS or method == reducer:
        return "--reducers", method
    if name in CODECS or ":" in name or not is_carried(method):
        return "--codecs", method
    return "--reducers", reducer if ":" in reducer else f"<{method}>"
