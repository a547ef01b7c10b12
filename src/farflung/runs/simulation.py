"""Runs in virtual time: made, and timed anew elsewhere."""

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
"""What it takes to simulate one message, on a processor of today."""
LONG_S = 10.0
"""An exchange that takes as long to simulate is warned of."""
UNCHARGED: set[tuple[str, str]] = set()
"""Devices and methods without rates there that this process has warned of."""


def nowhere(event: Event) -> None:
    """A sink that keeps nothing."""
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
    """Trains in virtual time, with the real arithmetic on a modelled clock, as ``farflung simulate`` does.

    >>> run = simulate("synthetic/quadratic", "ring(codec=int8)", network="wifi-10mbps", workers=2, steps=3)
    >>> run.summary["steps"], run.simulated, list(run.state_dict())
    (3, True, ['w'])

    Args:
      workload: what to train: a name, ``module:name``, a workload, or a class or function that makes one;
        fashion-mnist/cnn when not given.
      recipe: how to train together: a name, with changes in brackets if wished, or a
        :class:`farflung.recipes.Recipe` of names and objects; synchronous when not given.
      out: the run's folder; when not given, the files go with the object that is returned.
      resume: the folder of a run that goes on from its last checkpoint; settings given here change its own.
      replay: a ``decisions.jsonl`` whose decisions are made again.
      trace: whether to write each exchange to telemetry too, for ``farflung trace``.
      log_to: loggers of the run's figures: tensorboard, wandb, trackio or mlflow; several with commas between them.
      compute_on: torch's device for the arithmetic: cpu; cuda, one for each replica; or cuda:0, for all of them. Times
        are those of the setting ``device``, whatever computes.
      show: gets the events of all replicas as they happen.
      stop_asked: whether a stop was requested; all replicas then stop after the same step.
      settings: those of the command by name (``steps``, ``learning_rate``, ``partition``, ``network``, ``device``,
        ``faults`` and so on), with its defaults; ``network``, ``device``, ``faults``, ``partition`` and the members of
        the recipe may be objects.

    Raises:
      BadInput: says what is wrong and what to do, before anything begins.
      RunLost: a replica was lost.
    """
    said = {"workload": workload, "recipe": recipe, **settings}
    options = RunOptions(out=out, resume=resume, replay=replay, trace=trace, log_to=log_to, device=compute_on)
    run = prepared(SimulatedConfig, said, options=options, scratch=True)
    return simulate_prepared(run, show, stop_asked=stop_asked)


def simulate_prepared(
    run: Prepared[SimulatedConfig],
    show: Sink = nowhere,
    *,
    stop_asked: Callable[[], bool] = lambda: False,
    checkpointed: bool = True,
) -> Run:
    """Makes the folder, and trains there in virtual time.

    Args:
      run: what and where.
      show: gets the events of all replicas.
      stop_asked: whether a stop was requested; all replicas then stop after the same step.
      checkpointed: whether checkpoints are kept.

    Raises:
      BadInput: another run is there or being made there, or it cannot be written.
      RunLost: a replica was lost.
    """
    with ready_to_simulate(run, stop_asked=stop_asked, checkpointed=checkpointed) as begin:
        return begin(show)


@contextmanager
def ready_to_simulate(
    run: Prepared[SimulatedConfig], *, stop_asked: Callable[[], bool], checkpointed: bool = True
) -> Iterator[Callable[[Sink], Run]]:
    """Makes the folder; inside, what it gives trains there, and tells a sink of the events.

    The arguments and errors are those of :func:`simulate_prepared`.
    """
    ranks = range(run.config.ranks)
    devices = [
        place(run.options.device, local_rank=rank, local_size=len(ranks), option="--compute-on")
        for rank in ranks
    ]
    log = run.log()
    with run.begun(), log:
        yield lambda show: _simulated(run, devices, both(show, log), stop_asked, checkpointed)


@contextmanager
def _world_of(
    run: Prepared[SimulatedConfig],
) -> Iterator[tuple[VirtualWorld, list[JsonLines], Callable[..., Replica]]]:
    """Gives a run's world, the file of each rank's events, and what makes a replica of a rank, sinks and options."""
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
        makes: list[Callable[[], Replica]] = []
        for rank, file in enumerate(event_files):
            checkpoints = files.checkpoints(
                rank, config.workers, leader=rank == 0, any_size=bool(config.elastic)
            )
            makes.append(
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
        replicas = [again() for again in makes]
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
            summary, model = world.run([whole(*each) for each in zip(replicas, makes, strict=True)])[0]
    save_tree(files.model, model)
    return _ended(run, {**summary.to_json(), "collective": collective}, world)


def _warn_if_slow(world: VirtualWorld, recipe: Recipe, replica: Replica) -> None:
    """Warns in one line, before a run begins, of exchanges that take long to simulate."""
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
    """All of a run, and the model that came of it.

    Args:
      replica: the replica.
      again: makes another, which goes on from the state of the run where this one was suspended.
    """
    while True:
        try:
            ended = await replica.run(), await replica.trained()
            if replica.runtime.elastic is not None:
                await replica.runtime.elastic.finish(replica.step_done)
        except Suspended:
            if again is None:
                raise
            replica = again()
        else:
            return ended


def retime(
    run: Run | Path | str,
    *,
    network: str | NetworkProfile | None = None,
    device: str | DeviceProfile | None = None,
    out: Path | str | None = None,
    show: Sink = nowhere,
) -> Run:
    """A simulated run once more on another network or other devices, without its arithmetic.

    What was learned stays as it was; every time is that of a fresh simulation there.

    >>> run = simulate("synthetic/quadratic", network="wifi-10mbps", workers=2, steps=3)
    >>> retime(run, network="4g").summary["duration_s"] > run.summary["duration_s"]
    True

    Args:
      run: what :func:`simulate` gave back, or the folder of such a run.
      network: instead of the run's: a name, a TOML file or a profile.
      device: instead of the run's: likewise.
      out: the new run's folder; when not given, the files go with the object that is returned.
      show: gets the events of all replicas.

    Raises:
      BadInput: the run cannot be retimed, or such a network cannot be; says why.
    """
    stored = run.files if isinstance(run, Run) else RunFolder(Path(run))
    if isinstance(run, Run):
        before = run.config
        if not isinstance(before, SimulatedConfig):
            raise ConfigError(f"{run.folder}: a run of real workers; only simulated ones can be retimed")
    else:
        with naming(stored.config):
            before = SimulatedConfig.resolve(SimulatedConfig.stored_in(stored))
    config = replace(before, network=network or before.network, device=device or before.device)
    shares = config.check()
    scratch = Scratch() if out is None else None
    files = RunFolder(Path(str(out)) if scratch is None else scratch.path / "run")
    return retime_prepared(Prepared(config, files, shares, scratch=scratch), stored, show)


def retime_prepared(run: Prepared[SimulatedConfig], stored: RunFolder, show: Sink = nowhere) -> Run:
    """A stored run once more on another network or device, in a folder that is made here.

    Args:
      run: the configuration of the stored run, with another network or device; and where to keep it.
      stored: the run.
      show: gets the events of all replicas.

    Raises:
      BadInput: the run cannot be retimed; says why.
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
        told = {key: value for key, value in end.items() if key not in ("event", "rank", "t")}
        return _ended(run, {**told, "collective": collective}, world)


def timing_decisions(stored: RunFolder) -> list[Decision]:
    """The decisions of a run that might have been others on another network."""
    return [decision for decision in stored.decided() if decision.timing]


def _retimable(stored: RunFolder, config: RunConfig) -> tuple[dict[int, list[Event]], bool]:
    """The events of a run, and whether it kept checkpoints; refuses what cannot be retimed."""
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
    told = [event["event"] for event in events.get(0, [])]
    if len(events) != config.workers or "end" not in told:
        raise CheckpointError(f"{stored.path}: the run has not come to its end")
    if told.count("begin") > 1:
        raise ConfigError(f"{stored.path}: the run was resumed, and only one in one piece can be retimed")
    return events, "checkpoint" in told


def _ended(run: Prepared[SimulatedConfig], summary: dict[str, Json], world: VirtualWorld) -> Run:
    """Stores the summary of a run, and warns of what it has coded for nothing."""
    slow = slowest(run.files.events())
    found: dict[str, Json] = {
        **summary,
        **coding_told(world, resumed=run.files.resumed),
        **({"slowest": slow} if slow else {}),
        "partition": run.config.split_json(),
        "simulated": run.config.world_json(),
    }
    write_json(run.files.summary, found)
    _warn_of_uncharged(run.config, found.get("coding_not_charged", []))
    return run.ended(found)


def one_thread() -> AbstractContextManager[None]:
    """Has torch compute on one thread, as workers that share a machine do: the bits depend on it."""
    return torch_threads(1)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Has torch compute on so many threads inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# --- coding whose time is not modelled ------------------------------------------------------------


def coding_told(world: VirtualWorld, *, resumed: bool) -> dict[str, Json]:
    """For a summary; nothing where devices have no rates.

    ``coding_s`` are the seconds in which rank 0 coded and moved messages, of a run in one piece;
    ``coding_not_charged`` names the methods for some of whose work there is no rate, where there are any.
    """
    lanes = [runtime.lane for runtime in world.runtimes if runtime.lane is not None]
    if not lanes:
        return {}
    unknown: list[Json] = list(dict.fromkeys(method for lane in lanes for method in lane.not_charged))
    told: dict[str, Json] = {} if resumed else {"coding_s": lanes[0].busy_s}
    return {**told, **({"coding_not_charged": unknown} if unknown else {})}


def _warn_of_uncharged(config: SimulatedConfig, methods: Any) -> None:
    """Warns in one line, once a process, of methods whose coding is not charged.

    What a codec or reducer charges is named by its text; a reducer of one's own may have a name for it of its own.
    """
    device, reducer = str(config.world_json()["device"]), str(config.recipe.members["reducer"])
    new = [method for method in methods if (device, method) not in UNCHARGED]
    UNCHARGED.update((device, method) for method in new)
    calibrated = {method: _calibrated_as(method, reducer) for method in new}
    measurable = [method for method, (_, text) in calibrated.items() if is_carried(text)]
    command = ["farflung calibrate"]
    for option in ("--codecs", "--reducers"):
        texts = dict.fromkeys(text for one, text in map(calibrated.__getitem__, measurable) if one == option)
        command += [option, *map(repr, texts)] if texts else []
    others = [method for method in new if method not in measurable]
    for group, advice in (
        (measurable, f"calibrate with {' '.join(command)}"),
        (others, "farflung calibrate measures only what can be imported, as module:name"),
    ):
        if group:
            names = ", ".join(method or "plain sums" for method in group)
            logging.getLogger("farflung").warning(
                "coding of %s is not charged on this device: %s", names, advice
            )


def _calibrated_as(method: str, reducer: str) -> tuple[str, str]:
    """Returns the option of ``farflung calibrate`` and the text by which a method is measured; sums always are."""
    if not method:
        return "", method
    name = method.partition("(")[0]
    if name in REDUCERS or method == reducer:
        return "--reducers", method
    if name in CODECS or ":" in name or not is_carried(method):
        return "--codecs", method
    return "--reducers", reducer if ":" in reducer else f"<{method}>"
