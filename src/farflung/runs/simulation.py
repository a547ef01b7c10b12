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
from farflung.comm import AUTO, find_collective
from farflung.devices import DeviceProfile
from farflung.engine.placement import select_device
from farflung.errors import CheckpointError, ConfigError, DataError, ReplicaSuspended
from farflung.files import prefix_errors, wrap_read_errors, write_atomically, write_json
from farflung.loop import Replica, Summary, share_parameters
from farflung.membership import PaxosMembership
from farflung.network import NetworkProfile
from farflung.recipes import Recipe
from farflung.reducers import REDUCERS
from farflung.runs.bottleneck import find_bottleneck
from farflung.runs.config import RunConfig, RunOptions, SimulatedConfig
from farflung.runs.folder import RunFolder, TempFolder
from farflung.runs.preparing import PreparedRun, prepare_run
from farflung.runs.replicas import make_replica, resolve_run_collective, resume_replica
from farflung.runs.result import Run
from farflung.sim import (
    RecordedReplica,
    RecordedTraffic,
    RetimedReplica,
    TrafficRecorder,
    VirtualWorld,
    build_retimed_sink,
)
from farflung.spec import is_buildable
from farflung.state_trees import save_tree
from farflung.telemetry import Event, JsonLinesSink, Sink, Telemetry, combine_sinks
from farflung.types import Decision, Json, State, Workload

__all__ = [
    "begin_simulation",
    "discard_event",
    "limit_threads",
    "limit_to_one_thread",
    "list_timing_decisions",
    "retime",
    "retime_prepared",
    "run_replica",
    "simulate",
    "simulate_prepared",
]


MESSAGE_COST_S = 1e-4
"""Seconds to simulate one message on a current processor."""
SLOW_EXCHANGE_S = 10.0
"""Seconds to simulate an exchange above which a warning is issued."""
WARNED_UNCHARGED: set[tuple[str, str]] = set()
"""Devices and methods without rates that this process has warned of."""


def discard_event(event: Event) -> None:
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
    sink: Sink = discard_event,
    should_stop: Callable[[], bool] = lambda: False,
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
      compute_on: Torch device for the arithmetic: cpu; cuda, one for each replica; or cuda:0, shared by all.
      sink: Sink for the events of all replicas.
      should_stop: Function that returns True after a stop request; all replicas then stop after the same step.
      settings: Settings of the command by name (``steps``, ``learning_rate``, ``partition``, ``network``, ``device``,
        ``faults`` and so on). ``network``, ``device``, ``faults``, ``partition`` and recipe components may be objects.

    Raises:
      BadInput: The input is invalid; raised before the run starts.
      RunLost: A replica was lost.
    """
    layer = {"workload": workload, "recipe": recipe, **settings}
    options = RunOptions(out=out, resume=resume, replay=replay, trace=trace, log_to=log_to, device=compute_on)
    run = prepare_run(SimulatedConfig, layer, options=options, is_temporary=True)
    return simulate_prepared(run, sink, should_stop=should_stop)


def simulate_prepared(
    run: PreparedRun[SimulatedConfig],
    sink: Sink = discard_event,
    *,
    should_stop: Callable[[], bool] = lambda: False,
    should_checkpoint: bool = True,
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
    with begin_simulation(run, should_stop=should_stop, should_checkpoint=should_checkpoint) as begin:
        return begin(sink)


@contextmanager
def begin_simulation(
    run: PreparedRun[SimulatedConfig], *, should_stop: Callable[[], bool], should_checkpoint: bool = True
) -> Iterator[Callable[[Sink], Run]]:
    """Creates and locks the folder, and yields a function that trains there with a given sink.

    Arguments and errors are those of :func:`simulate_prepared`.
    """
    ranks = range(run.config.max_ranks)
    devices = [
        select_device(run.options.device, local_rank=rank, local_size=len(ranks), option="--compute-on")
        for rank in ranks
    ]
    log = run.create_log()
    with run.begin_run(), log:
        yield lambda sink: _run_simulation(
            run, devices, combine_sinks(sink, log), should_stop, should_checkpoint
        )


@contextmanager
def _create_world(
    run: PreparedRun[SimulatedConfig],
) -> Iterator[tuple[VirtualWorld, list[JsonLinesSink], Callable[..., Replica]]]:
    """Yields the virtual world, the event file of each rank, and a function that creates replicas."""
    config, files = run.config, run.files
    decisions = files.create_decision_log()
    world = config.make_world(decisions)
    shares = config.make_shares()

    def make(rank: int, *sinks: Sink, recipe: Recipe = config.recipe, **options: Any) -> Replica:
        telemetry = Telemetry(rank, *sinks, world.injector, decisions.write)
        runtime, task, training = world.runtimes[rank], config.task, config.training
        return make_replica(runtime, task, recipe, training, telemetry, shares=shares, **options)

    with ExitStack() as stack:
        stack.callback(decisions.write)
        yield (
            world,
            [
                stack.enter_context(JsonLinesSink(files.get_telemetry_path(rank)))
                for rank in range(len(world.runtimes))
            ],
            make,
        )
    world.injector.warn_of_missed_faults()


def _run_simulation(
    run: PreparedRun[SimulatedConfig],
    devices: list[torch.device],
    sink: Sink,
    should_stop: Callable[[], bool],
    should_checkpoint: bool,
) -> Run:
    config, files = run.config, run.files
    with (
        _create_world(run) as (world, event_files, make),
        TrafficRecorder(files.traffic_path, config.max_ranks) as recorder,
    ):
        factories: list[Callable[..., Replica]] = []
        for rank, file in enumerate(event_files):
            checkpoints = files.get_checkpoints(
                rank, config.workers, is_leader=rank == 0, allows_any_size=bool(config.elastic)
            )
            factories.append(
                partial(
                    make,
                    rank,
                    file,
                    sink,
                    checkpoints=checkpoints if should_checkpoint else None,
                    should_stop=should_stop,
                    trace=run.options.trace,
                    device=devices[rank],
                    replica_type=partial(RecordedReplica, recorder=recorder),
                )
            )
        replicas = [create() for create in factories]
        start = checkpoints.find_newest() if files.is_resumed else 0
        for runtime in world.runtimes if config.elastic else ():
            runtime.elastic = PaxosMembership(
                runtime,
                b"simulated",
                min_members=config.min_replicas,
                quorum=config.quorum,
                patience_s=config.deadline,
                can_return=True,
                first_step=start,
                max_steps_ahead=replicas[0].components.schedule.max_steps_ahead,
                members=range(config.workers),
            )
        collective = resolve_run_collective(world.resolve_collective, config.recipe, replicas[0], start)
        predecessors: list[Replica | None] = [None] * len(replicas)
        if files.is_resumed:
            predecessors = [
                resume_replica(replica, start, config.recipe, create)
                for replica, create in zip(replicas, factories, strict=True)
            ]
        if not config.make_faults().faults and predecessors[0] is None:
            share_parameters(replicas)
        _warn_if_slow(world, config.recipe, replicas[0])
        with limit_to_one_thread():
            summary, model = world.run(
                [run_replica(*each) for each in zip(replicas, factories, predecessors, strict=True)]
            )[0]
    save_tree(files.model_path, model)
    return _finish_run(run, {**summary.to_json(), "collective": collective}, world)


def _warn_if_slow(world: VirtualWorld, recipe: Recipe, replica: Replica) -> None:
    """Warns before a run of exchanges that take long to simulate."""
    auto = replica.runtime.comm.auto_collectives
    size, names = len(world.runtimes), [recipe.collective] * len(replica.bucket_specs)
    if recipe.collective == AUTO:
        names = [auto.get(spec.nbytes, "direct") for spec in replica.bucket_specs]
    messages = sum(count(size) for name in names if (count := find_collective(name).count_messages))
    if messages * MESSAGE_COST_S >= SLOW_EXCHANGE_S:
        logging.getLogger("farflung").warning(
            "an exchange of %s replicas by %s has about %s messages, which are simulated one by one: each will take "
            "about %s",
            f"{size:,}",
            ", ".join(dict.fromkeys(names)),
            f"{messages:,}",
            timedelta(seconds=round(messages * MESSAGE_COST_S)),
        )


async def run_replica(
    replica: Replica,
    build_successor: Callable[[], Replica] | None = None,
    predecessor: Replica | None = None,
) -> tuple[Summary, State]:
    """Runs a replica, and its successors after suspensions, to the end; returns summary and trained model.

    Args:
      replica: Replica to run.
      build_successor: Function that creates another replica, which continues after a suspension.
      predecessor: Resumed replica with another recipe, which this one takes over from.
    """
    if predecessor is not None:
        await replica.take_over(predecessor)
    while True:
        try:
            result = await replica.run(), await replica.get_consensus_state()
            if replica.runtime.elastic is not None:
                await replica.runtime.elastic.finish(replica.completed_steps)
        except ReplicaSuspended:
            if build_successor is None:
                raise
            replica = build_successor()
        else:
            return result


def retime(
    run: Run | Path | str,
    *,
    network: str | NetworkProfile | None = None,
    device: str | DeviceProfile | None = None,
    out: Path | str | None = None,
    sink: Sink = discard_event,
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
        with prefix_errors(source.config_path):
            original = SimulatedConfig.resolve(SimulatedConfig.load_settings(source))
    config = replace(original, network=network or original.network, device=device or original.device)
    shares = config.check()
    scratch = TempFolder() if out is None else None
    files = RunFolder(Path(str(out)) if scratch is None else scratch.path / "run")
    return retime_prepared(PreparedRun(config, files, shares, temp_folder=scratch), source, sink)


def retime_prepared(run: PreparedRun[SimulatedConfig], source: RunFolder, sink: Sink = discard_event) -> Run:
    """Recomputes the times of a stored run for another network or device, in a new folder.

    Args:
      run: Prepared run with the stored run's configuration except network or device.
      source: Folder of the stored run.
      sink: Sink for the events of all replicas.

    Raises:
      BadInput: The run cannot be retimed.
    """
    config, files = run.config, run.files
    events, checkpointed = _load_retimable(source, config)
    kind = partial(
        RetimedReplica, traffic=RecordedTraffic.read(source.traffic_path), has_checkpoints=checkpointed
    )
    replay = source.decisions_path if source.decisions_path.exists() else None
    with replace(run, options=RunOptions(replay=replay)).begin_run():
        with _create_world(run) as (world, event_files, make):
            replicas = [
                make(rank, build_retimed_sink(events[rank], file, sink), replica_type=kind)
                for rank, file in enumerate(event_files)
            ]
            settle = partial(world.resolve_collective, ignores_replay=True)
            collective = resolve_run_collective(settle, config.recipe, replicas[0])
            _warn_if_slow(world, config.recipe, replicas[0])
            wrong = "cannot be retimed by its events and its traffic; simulate it anew"
            with wrap_read_errors(source.path, wrong, DataError), limit_to_one_thread():
                world.run([replica.run() for replica in replicas])
        if source.model_path.exists():
            write_atomically(files.model_path, partial(shutil.copyfile, source.model_path))
        (end,) = (event for event in files.load_events()[0] if event["event"] == "end")
        summary = {key: value for key, value in end.items() if key not in ("event", "rank", "t")}
        return _finish_run(run, {**summary, "collective": collective}, world)


def list_timing_decisions(source: RunFolder) -> list[Decision]:
    """Lists the decisions of a run that could differ on another network."""
    return [decision for decision in source.load_decisions() if decision.timing]


def _load_retimable(source: RunFolder, config: RunConfig) -> tuple[dict[int, list[Event]], bool]:
    """Checks that a run can be retimed; returns its events, and True if it saved checkpoints."""
    if config.elastic:
        raise ConfigError(
            f"{source.path}: members of an elastic run agree by messages that are not recorded; "
            "simulate it anew instead"
        )
    timing = list_timing_decisions(source)
    if timing:
        raise ConfigError(
            f"{source.path}: its learning depended on the network: it decided {timing[0].name!r} by time or arrival "
            f"at step {timing[0].step}; simulate it anew instead"
        )
    if config.recipe.build_components(config.seed).sharing.has_data_transfers:
        raise ConfigError(
            f"{source.path}: its replicas sent samples (--sharing {config.recipe.component_texts['sharing']}), "
            f"which is not "
            "recorded; simulate it anew instead"
        )
    events = source.load_events()
    kinds = [event["event"] for event in events.get(0, [])]
    if len(events) != config.workers or "end" not in kinds:
        raise CheckpointError(f"{source.path}: the run has not reached its end")
    if kinds.count("begin") > 1:
        raise ConfigError(f"{source.path}: the run was resumed, and only one in one piece can be retimed")
    return events, "checkpoint" in kinds


def _finish_run(run: PreparedRun[SimulatedConfig], summary: dict[str, Json], world: VirtualWorld) -> Run:
    """Stores the summary of a run, and warns of methods whose coding time is not modelled."""
    bottleneck = find_bottleneck(run.files.load_events())
    full_summary: dict[str, Json] = {
        **summary,
        **summarize_rank0_coding(world, is_resumed=run.files.is_resumed),
        **({"bottleneck": bottleneck} if bottleneck else {}),
        "partition": run.config.describe_partition(),
        "simulated": run.config.describe_world(),
    }
    write_json(run.files.summary_path, full_summary)
    _warn_of_uncharged(run.config, full_summary.get("coding_not_charged", []))
    return run.build_result(full_summary)


def limit_to_one_thread() -> AbstractContextManager[None]:
    """Limits torch to one thread within the context, as in workers that share a machine; results depend on it."""
    return limit_threads(1)


@contextmanager
def limit_threads(count: int) -> Iterator[None]:
    """Sets the number of torch threads within the context."""
    previous = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(previous)


# --- coding whose time is not modelled ------------------------------------------------------------


def summarize_rank0_coding(world: VirtualWorld, *, is_resumed: bool) -> dict[str, Json]:
    """Returns rank 0's coding seconds, unless resumed, and all methods without a rate; empty if devices have no rates.

    ``coding_s`` is rank 0's seconds of coding and moving messages, unless the run was resumed. ``coding_not_charged``
    lists methods that lack a rate for some of their work.
    """
    lanes = [runtime.coding_processor for runtime in world.runtimes if runtime.coding_processor is not None]
    if not lanes:
        return {}
    unknown: list[Json] = list(dict.fromkeys(method for lane in lanes for method in lane.uncharged_methods))
    times: dict[str, Json] = {} if is_resumed else {"coding_s": lanes[0].busy_s}
    return {**times, **({"coding_not_charged": unknown} if unknown else {})}


def _warn_of_uncharged(config: SimulatedConfig, methods: Any) -> None:
    """Warns once per process of methods whose coding is not charged.

    Methods are identified by the text of a codec or reducer; custom reducers may use another name.
    """
    device, reducer = str(config.describe_world()["device"]), str(config.recipe.component_texts["reducer"])
    new = [method for method in methods if (device, method) not in WARNED_UNCHARGED]
    WARNED_UNCHARGED.update((device, method) for method in new)
    calibrations = {method: _find_calibration_option(method, reducer) for method in new}
    measurable = [method for method, (_, text) in calibrations.items() if is_buildable(text)]
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


def _find_calibration_option(method: str, reducer: str) -> tuple[str, str]:
    """Returns the option of ``farflung calibrate`` that measures a method, and its text; plain sums need none."""
    if not method:
        return "", method
    name = method.partition("(")[0]
    if name in REDUCERS or method == reducer:
        return "--reducers", method
    if name in CODECS or ":" in name or not is_buildable(method):
        return "--codecs", method
    return "--reducers", reducer if ":" in reducer else f"<{method}>"
