"""Training as one replica of a run, from its start or as a later joiner."""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import re
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist

from farflung.calibration import count_forward_flops
from farflung.comm import find_collective
from farflung.comm.visits import Access
from farflung.decisions import DecisionLog
from farflung.devices import find_device
from farflung.engine import select_device
from farflung.errors import ConfigError, DeadlinePassed, ProtocolError, ReplicaLeft, RunLost
from farflung.files import path_exists, read_text, wrap_read_errors, write_atomically, write_json
from farflung.loop import Replica
from farflung.membership import Page, PaxosMembership, Subgroup
from farflung.network import find_network
from farflung.runs.config import RunConfig, RunOptions
from farflung.runs.folder import RunFolder
from farflung.runs.preparing import PreparedRun, name_run_folder
from farflung.runs.replicas import make_replica, resolve_run_collective, resume_replica
from farflung.runs.result import Run
from farflung.runs.simulation import limit_threads, run_replica
from farflung.runs.stopping import handle_stop_signals
from farflung.state_trees import save_tree
from farflung.telemetry import JsonLinesSink, Sink, Telemetry, count_refusals, read_events
from farflung.wall import LaunchEnv, Pace, WallRuntime
from farflung.wall.rendezvous import ask_leader
from farflung.wall.visits import JoinClient, JoinTerms, create_elastic

if TYPE_CHECKING:
    from farflung.comm import WallCommunicator

__all__ = [
    "CONNECT_TIMEOUT_S",
    "KEY_FILE",
    "NETWORK_VARIABLE",
    "agree_on_folder",
    "join_run",
    "train_replica",
]

KEY_FILE = "run.key"
"""File in a run's folder with the run's key and the addresses of its members, for joining replicas."""
NETWORK_VARIABLE = "FARFLUNG_NETWORK"
"""Environment variable with the profile or TOML file of the network, as set in the lab."""
CONNECT_TIMEOUT_S = 60.0
_MAX_TRIES = 10
"""Largest number of ranks that a joining replica requests if it cannot begin."""
_MEETING = "run"


def agree_on_folder(store: dist.Store, rank: int, title: str) -> Path:
    """Chooses a new folder on rank 0 and returns it on all ranks.

    Raises:
      DeadlinePassed: Rank 0 did not publish a folder in time.
    """
    if rank == 0:
        return name_run_folder(title)
    return Path(ask_leader(store, _MEETING, rank, "the run's folder", CONNECT_TIMEOUT_S))


def train_replica(
    run: PreparedRun[RunConfig],
    sink: Sink,
    env: LaunchEnv,
    page: Page | None = None,
    guest: JoinClient | None = None,
) -> Run:
    """Trains as one replica.

    Args:
      run: Prepared run, whose folder exists.
      sink: Sink for this replica's events.
      env: Rank and size of this replica.
      page: Memory that this process's supervisor reads after its end; ``None`` without a supervisor.
      guest: Accepted request to join the run; ``None`` for a replica that is present from the start.
    """
    config, options, files, rank, size = run.config, run.options, run.files, env.rank, env.size
    leader = env.local_rank == 0
    device = select_device(options.device, local_rank=env.local_rank, local_size=env.local_size)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    stop_requested, leave_requested = threading.Event(), threading.Event()
    elastic: PaxosMembership | None = None
    replica: Replica | None = None
    has_met = env.rendezvous_file is not None  # a wait for a file is short, and the command ends its workers

    def request_stop() -> None:
        if not has_met or leave_requested.is_set():
            raise KeyboardInterrupt
        if guest is None:
            stop_requested.set()
            if replica is not None:
                # On another thread, since the interrupted code may hold locks.
                threading.Thread(target=replica.request_stop).start()
        elif elastic is None:
            raise KeyboardInterrupt
        else:
            leave()

    def leave() -> None:
        if elastic is not None and not leave_requested.is_set():
            threading.Thread(target=elastic.leave).start()
        leave_requested.set()

    threads = config.threads or (1 if env.local_size > 1 else torch.get_num_threads())
    decisions = files.create_decision_log()
    with ExitStack() as stack:
        stack.enter_context(limit_threads(threads))
        stack.enter_context(handle_stop_signals(request_stop))
        if config.elastic:
            stack.enter_context(handle_stop_signals(leave, {signal.SIGUSR1}))
        file = stack.enter_context(JsonLinesSink(files.get_telemetry_path(rank)))
        stack.callback(decisions.write)
        telemetry = Telemetry(rank, file, sink, decisions.write)
        system = f"{platform.system()} {platform.release()}, {platform.machine()}, {os.cpu_count()} cores"
        versions = f"torch {torch.__version__}, Python {platform.python_version()}"
        telemetry.emit("hello", pid=os.getpid(), threads=threads, machine=system, versions=versions)
        runtime = _create_runtime(run, env, guest, decisions)
        has_met = True
        try:
            if guest is not None:
                guest.announce(runtime)
            checkpoints = files.get_checkpoints(
                rank, size, is_leader=leader, allows_any_size=bool(config.elastic)
            )
            make = partial(
                make_replica,
                runtime,
                config.task,
                recipe=config.recipe,
                training=config.training,
                telemetry=telemetry,
                shares=config.make_shares(),
                checkpoints=checkpoints,
                should_stop=stop_requested.is_set,
                trace=options.trace,
                device=device,
            )
            replica = make()
            if not replica.components.sharing.has_data_transfers:
                runtime.limit_messages(chain(replica.model.parameters(), replica.model.buffers()))
            start = checkpoints.find_newest() if files.is_resumed and guest is None else 0
            collective = config.recipe.collective
            if guest is None:
                collective = _resolve_collective(runtime, config, replica, size, start)
            if config.elastic:
                can_grow = config.max_ranks > config.workers
                publish = partial(_publish_access, files.path / KEY_FILE)
                takes = JoinTerms(config.to_json(), config.max_ranks, publish) if can_grow else None
                elastic = runtime.elastic = create_elastic(
                    runtime,
                    range(size) if guest is None else guest.members,
                    page=page,
                    join_terms=takes,
                    guest=guest,
                    min_members=config.min_replicas,
                    quorum=config.quorum,
                    patience_s=config.deadline,
                    can_return=True,
                    first_step=start,
                    max_steps_ahead=replica.components.schedule.max_steps_ahead,
                )
                if leave_requested.is_set():  # before the run existed
                    elastic.leave()
            predecessor = None
            if files.is_resumed and guest is None:
                predecessor = resume_replica(replica, start, config.recipe, make)
            result, state = runtime.run(run_replica(replica, make, predecessor))
            summary = {
                **result.to_json(),
                "collective": collective,
                "partition": config.describe_partition(),
            }
            if runtime.pace is not None:
                telemetry.emit("pace", t=runtime.read_clock(), **runtime.pace.to_json())
                summary["pace"] = runtime.pace.to_json()
        except ReplicaLeft:
            runtime.close()
            raise
        except BaseException as error:
            runtime.close(error)
            raise
        finally:
            if refused := runtime.session.transport.refusals.to_json():
                telemetry.emit("refused", t=runtime.read_clock(), **refused)
        runtime.close()
        if refusals := count_refusals(read_events(files.get_telemetry_path(rank))):
            summary["refused"] = dict(refusals)
    is_first = rank == (0 if elastic is None else elastic.changes[-1].ranks[0])
    if leader or is_first:
        save_tree(files.model_path, state)
    if is_first:
        write_json(files.summary_path, summary)
    return run.build_result(summary)


def _create_runtime(
    run: PreparedRun[RunConfig], env: LaunchEnv, guest: JoinClient | None, decisions: DecisionLog
) -> WallRuntime:
    """Connects this process with the replicas that are present from the start, or starts it alone for a guest."""
    config, options, store, pace = run.config, run.options, None, None
    if guest is None:
        of_all = replace(env, size=max(env.size, config.max_ranks))
        store = run.store or of_all.connect_store(CONNECT_TIMEOUT_S)
    if options.pace:
        profile = find_device(options.pace, forward_flops=count_forward_flops(config.task))
        pace = Pace(profile, env.rank, config.seed)
    return WallRuntime(
        env.rank,
        config.max_ranks if config.elastic else env.size,
        store,
        meeting=_MEETING,
        advice=str(run.files.path),
        endpoint=replace(options.endpoint.resolve_interface(env.find_address), encrypt=config.encrypt),
        settings={**config.to_json(), "model": config.compute_model_hash()},
        deadline_s=config.deadline,
        members=({env.rank} if guest else range(env.size)) if config.elastic else None,
        announce=(lambda own_rank: [own_rank]) if guest else None,
        max_unreceived_nbytes=math.inf if config.elastic else None,
        is_native=find_collective(config.recipe.collective).is_native,
        connect_timeout_s=CONNECT_TIMEOUT_S,
        decisions=decisions,
        pace=pace,
    )


def _resolve_collective(
    runtime: WallRuntime, config: RunConfig, replica: Replica, size: int, start: int
) -> str:
    """Agrees on the collective with the replicas that are present from the start."""
    network_name = os.environ.get(NETWORK_VARIABLE)
    profile = find_network(network_name) if network_name else None
    comm = runtime.comm
    if size < comm.size:  # later joiners are not present yet
        runtime.comm = cast("WallCommunicator", Subgroup(comm, range(size)))
    resolve = partial(runtime.resolve_collective, network=profile)
    collective = resolve_run_collective(resolve, config.recipe, replica, start)
    comm.auto_collectives, runtime.comm = runtime.comm.auto_collectives, comm
    return collective


def _publish_access(path: Path, access: Access) -> None:
    """Writes key and addresses of a run to a file that only its owner can read."""

    def write(unfinished: Path) -> None:
        unfinished.touch(mode=0o600)
        unfinished.write_text(json.dumps(access.to_json()), encoding="utf-8")

    write_atomically(path, write)


def join_run(
    location: str,
    create_sink: Callable[[int], AbstractContextManager[Sink]],
    options: RunOptions,
    key_file: Path | None = None,
) -> Run:
    """Joins a running run as an additional replica.

    If a replica cannot begin because the members that it knows are lost, it requests another rank.

    Args:
      location: Folder of the run on one of its machines, or host and port of any replica.
      create_sink: Context manager that creates the sink of the replica's events from its rank.
      options: Options of this replica, with a folder if the run's is on another machine.
      key_file: File :data:`KEY_FILE` of the run's folder, or a copy; required with host and port.

    Raises:
      ConfigError: There is no run that replicas may join, or all its ranks are used.
      ReplicaLeft: The run ended before this replica could begin.
      RunLost: No view admits this replica.
    """
    folder = Path(location)
    is_local = path_exists(folder, is_folder=True)
    if not is_local and not re.fullmatch(r"[^\s]+:[0-9]{1,5}", location):
        raise ConfigError(f"{location}: neither a run's folder nor HOST:PORT, such as 192.168.1.5:7000")
    if not is_local and key_file is None:
        raise ConfigError(f"{location}: --key FILE is missing, a copy of {KEY_FILE} in the run's folder")
    file = key_file or folder / KEY_FILE
    if is_local and not path_exists(file):
        raise ConfigError(f"{location}: no run is going on there that others may join (--elastic MIN:MAX)")
    guest = _ask_for_rank(file, [] if is_local else [location])
    config = RunConfig.resolve(guest.config)
    files = RunFolder(folder if is_local else Path(options.out or name_run_folder(config.title)))
    run = PreparedRun(config, files, options=options)
    with nullcontext() if is_local else run.begin_run():
        for tries_left in reversed(range(_MAX_TRIES)):
            env = LaunchEnv(
                guest.rank,
                config.max_ranks,
                guest.rank if is_local else 0,
                config.max_ranks if is_local else 1,
                master=(guest.host, "0"),
            )
            try:
                with create_sink(guest.rank) as sink:
                    return train_replica(run, sink, env, Page.from_environment(), guest)
            except RunLost as lost:
                is_final = isinstance(lost, ReplicaLeft | DeadlinePassed | ProtocolError)
                if is_final or guest.has_begun or not tries_left:
                    raise
                logging.getLogger("farflung").warning(
                    "rank %d has not begun, and asks again: %s", guest.rank, lost
                )
                try:
                    guest = _ask_for_rank(file, guest.addresses)
                except ConfigError as refused:
                    raise RunLost(f"this replica has not begun: {lost}; asked again, {refused}") from None
    raise AssertionError("the last try returns or raises")


def _ask_for_rank(file: Path, addresses: Sequence[str]) -> JoinClient:
    """Requests a rank from members at the given addresses, and then at those in a key file."""
    with wrap_read_errors(file, "not the key of a run"):
        access = Access.from_json(json.loads(read_text(file)))
    return JoinClient(access, [*addresses, *access.addresses])
