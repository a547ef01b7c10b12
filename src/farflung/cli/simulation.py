"""One run in virtual time: its configuration, its world, and what it leaves behind."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import ClassVar

import torch

from farflung.cli.run import RunConfig, RunFolder, write_json
from farflung.comm import collective_named
from farflung.data import Share, describe
from farflung.errors import CheckpointError, ConfigError
from farflung.faults import FaultPlan, load_faults
from farflung.network import NetworkProfile, device_profile, network_profile
from farflung.reducers import summed_nbytes
from farflung.replica import Replica, Summary, keep_once
from farflung.runtime import DecisionLog, VirtualWorld, read_decisions
from farflung.telemetry import Event, JsonLines, Sink, Telemetry
from farflung.timing import (
    RecordedReplica,
    Retimed,
    Traffic,
    TrafficRecorder,
    forward_flops,
    retimed_events,
)
from farflung.types import Decision, Json, Workload

__all__ = ["SimulatedConfig", "asked_to_stop", "retime", "simulate", "timing_decisions"]

NETWORK, DEVICE = "lan-1g", "cpu-core"


@dataclass(frozen=True, slots=True)
class SimulatedConfig(RunConfig):
    """Everything that decides a run in virtual time.

    Raises:
      ConfigError: a value out of its range.
    """

    network: str
    device: str
    faults: str

    command: ClassVar[str] = "simulate"

    @property
    def title(self) -> str:
        """For people."""
        return f"{self.workload}, {self.recipe}, {self.network}"

    @classmethod
    def lacks(cls, stored: Mapping[str, Json]) -> bool:
        """Whether it is a run of the other world."""
        return "network" not in stored

    @classmethod
    def _resolved(cls, layers: Sequence[Mapping[str, Json]]) -> dict[str, Json]:
        of_the_world: dict[str, Json] = {"network": NETWORK, "device": DEVICE, "faults": ""}
        for layer in layers:
            of_the_world.update({name: layer[name] for name in of_the_world if name in layer})
        count = network_profile(str(of_the_world["network"])).nodes
        return {**RunConfig._resolved(({"workers": count or 4}, *layers)), **of_the_world}

    def make_network(self) -> NetworkProfile:
        """The network between the replicas."""
        return network_profile(self.network).for_nodes(self.workers)

    def make_faults(self) -> FaultPlan:
        """What goes wrong."""
        return load_faults(Path(self.faults)) if self.faults else FaultPlan()

    def make_world(self, task: Workload, decisions: DecisionLog | None = None) -> VirtualWorld:
        """The clock, the network and the devices."""
        return VirtualWorld(
            self.workers,
            network=self.make_network(),
            device=device_profile(self.device, forward_flops=forward_flops(task)),
            seed=self.seed,
            faults=self.make_faults(),
            deadline_s=self.deadline,
            decisions=decisions,
        )

    def check(self, task: Workload) -> list[Share]:
        """See :meth:`RunConfig.check`."""
        if collective_named(self.collective).by_backend:
            raise ConfigError(
                f"the backend's own collectives (--collective {self.collective}) run on real machines alone: choose "
                "another collective or recipe"
            )
        self.make_world(task)
        return RunConfig.check(self, task)

    def world_json(self) -> dict[str, Json]:
        """What a simulated figure depends on beside the run itself, for summaries."""
        profile = self.make_network()
        return {
            "network": self.network,
            "device": self.device,
            "source": profile.source,
            "changes": list(profile.changes),
        }


def simulate(
    config: SimulatedConfig,
    folder: RunFolder,
    show: Sink,
    task: Workload,
    *,
    stop_asked: Callable[[], bool] = lambda: False,
    checkpointed: bool = True,
) -> dict[str, Json]:
    """Trains in virtual time, in a folder that has been made; returns rank 0's summary.

    Args:
      config: of the run.
      folder: where it is kept.
      show: gets the events of all replicas.
      task: what ``config`` makes.
      stop_asked: whether somebody asked to stop; then all stop after the same step.
      checkpointed: whether checkpoints are kept.

    Raises:
      RunLost: a replica was lost.
    """
    world = config.make_world(task, folder.decision_log())
    recipe, shares = config.make_recipe(), config.make_shares(task)
    with ExitStack() as open_files:
        recorder = open_files.enter_context(TrafficRecorder(folder.traffic, config.workers))
        replicas: list[Replica] = []
        for rank, runtime in enumerate(world.runtimes):
            file = open_files.enter_context(JsonLines(folder.telemetry(rank)))
            checkpoints = folder.checkpoints(rank, config.workers, leader=rank == 0)
            replica = RecordedReplica(
                runtime,
                task,
                config.make_training(),
                recipe.parts(config.seed, None if shares is None else rank),
                Telemetry(rank, file, show, world.injector),
                checkpoints if checkpointed else None,
                stop_asked,
                None if shares is None else shares[rank],
                recorder=recorder,
            )
            if folder.resumed:
                replica.resume(checkpoints.newest())
            replicas.append(replica)
        if not config.faults:
            keep_once(replicas)
        collective = _settled(world, config, replicas[0])
        summary = _run(world, replicas)
    split = config.split_json(describe(shares or [], task.datasets()[0].labels))
    return _kept(config, folder, {**summary.to_json(), "collective": collective, "partition": split})


def retime(
    config: SimulatedConfig, stored: RunFolder, folder: RunFolder, task: Workload, show: Sink
) -> dict[str, Json]:
    """A stored run once more on another network or device, without its arithmetic; returns the summary.

    Args:
      config: that of the run, with another network or device.
      stored: the run.
      folder: where the new one is kept; made here.
      task: what ``config`` makes.
      show: gets the events of all replicas.

    Raises:
      BadInput: the run cannot be retimed; says why.
    """
    events, checkpointed = _retimable(stored, config)
    traffic = Traffic.read(stored.traffic)
    folder.create(config, stored.decisions if stored.decisions.exists() else None)
    world = config.make_world(task, folder.decision_log())
    recipe, shares = config.make_recipe(), config.make_shares(task)
    with ExitStack() as open_files:
        replicas: list[Replica] = []
        for rank, runtime in enumerate(world.runtimes):
            file = open_files.enter_context(JsonLines(folder.telemetry(rank)))
            replicas.append(
                Retimed(
                    runtime,
                    task,
                    config.make_training(),
                    recipe.parts(config.seed, None if shares is None else rank),
                    Telemetry(rank, retimed_events(events[rank], file, show), world.injector),
                    share=None if shares is None else shares[rank],
                    traffic=traffic,
                    checkpointed=checkpointed,
                )
            )
        collective = _settled(world, config, replicas[0], anew=True)
        _run(world, replicas)
    (end,) = (event for event in folder.events()[0] if event["event"] == "end")
    summary = {key: value for key, value in end.items() if key not in ("event", "rank", "t")}
    split = config.split_json(describe(shares or [], task.datasets()[0].labels))
    return _kept(config, folder, {**summary, "collective": collective, "partition": split})


def timing_decisions(stored: RunFolder) -> list[Decision]:
    """The decisions of a run that might have been others on another network."""
    if not stored.decisions.exists():
        return []
    return [decision for decision in read_decisions(stored.decisions) if decision.timing]


def _retimable(stored: RunFolder, config: SimulatedConfig) -> tuple[dict[int, list[Event]], bool]:
    """The events of a run, and whether it kept checkpoints; refuses what cannot be retimed."""
    timing = timing_decisions(stored)
    if timing:
        raise ConfigError(
            f"{stored.path}: its learning depended on the network: it decided {timing[0].name!r} by time or arrival "
            f"at step {timing[0].step}; simulate it anew instead"
        )
    events = stored.events()
    told = [event["event"] for event in events.get(0, [])]
    if len(events) != config.workers or "end" not in told:
        raise CheckpointError(f"{stored.path}: the run has not come to its end")
    if told.count("begin") > 1:
        raise ConfigError(f"{stored.path}: the run was resumed, and only one in one piece can be retimed")
    return events, "checkpoint" in told


def _settled(world: VirtualWorld, config: SimulatedConfig, replica: Replica, *, anew: bool = False) -> str:
    reducer = config.make_recipe().parts(config.seed).reducer
    nbytes = summed_nbytes(reducer, replica.bucket_specs, config.workers)
    return world.settle_collective(config.collective, nbytes, step=replica.step_done, anew=anew)


def _run(world: VirtualWorld, replicas: Sequence[Replica]) -> Summary:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as real workers have: the bits depend on it
    try:
        return world.run([replica.run() for replica in replicas])[0]
    finally:
        torch.set_num_threads(threads)


def _kept(config: SimulatedConfig, folder: RunFolder, summary: dict[str, Json]) -> dict[str, Json]:
    whole: dict[str, Json] = {**summary, "simulated": config.world_json()}
    write_json(folder.summary, whole)
    return whole


@contextlib.contextmanager
def asked_to_stop() -> Iterator[threading.Event]:
    """Inside, the first Ctrl-C sets the event, and the second interrupts."""
    asked = threading.Event()

    def ask(number: int, frame: FrameType | None) -> None:
        del number, frame
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
