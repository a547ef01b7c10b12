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

from farflung.calibration import forward_flops
from farflung.comm import collective_named
from farflung.comm.visits import Access
from farflung.devices import device_profile
from farflung.engine import place
from farflung.errors import ConfigError, DeadlinePassed, Left, ProtocolError, RunLost
from farflung.files import read_text, reading, write_json, write_whole
from farflung.loop import Replica
from farflung.membership import Among, Elastic, Page
from farflung.network import network_profile
from farflung.runs.config import RunConfig, RunOptions
from farflung.runs.folder import RunFolder
from farflung.runs.preparing import Prepared, run_folder
from farflung.runs.replicas import make_replica, settled_collective
from farflung.runs.result import Run
from farflung.runs.simulation import torch_threads, whole
from farflung.runs.stopping import on_stop
from farflung.state_trees import save_tree
from farflung.telemetry import JsonLines, Sink, Telemetry, count_refusals, read_events
from farflung.wall import LaunchEnv, Pace, WallRuntime
from farflung.wall.rendezvous import ask_leader
from farflung.wall.visits import Guest, Takes, elastic_on

if TYPE_CHECKING:
    from farflung.comm import WallCommunicator

__all__ = ["JOIN_S", "KEY", "NETWORK", "agreed_folder", "join", "join_later"]

KEY = "run.key"
"""File in a run's folder with the run's key and the addresses of its members, for joining replicas."""
NETWORK = "FARFLUNG_NETWORK"
"""Environment variable with the profile or TOML file of the network, as set in the lab."""
JOIN_S = 60.0
_TRIES = 10
"""Largest number of ranks that a joining replica requests if it cannot begin."""
_MEETING = "run"


def agreed_folder(store: dist.Store, rank: int, title: str) -> Path:
    """Chooses a new folder on rank 0 and returns it on all ranks.

    Raises:
      DeadlinePassed: Rank 0 did not publish a folder in time.
    """
    if rank == 0:
        return run_folder(title)
    return Path(ask_leader(store, _MEETING, rank, "the run's folder", JOIN_S))


def join(
    run: Prepared[RunConfig],
    show: Sink,
    env: LaunchEnv,
    page: Page | None = None,
    guest: Guest | None = None,
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
    device = place(options.device, local_rank=env.local_rank, local_size=env.local_size)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    stop_requested, leave_requested = threading.Event(), threading.Event()
    elastic: Elastic | None = None
    replica: Replica | None = None
    has_met = env.meeting is not None  # a wait for a file is short, and the command ends its workers

    def request_stop() -> None:
        if not has_met or leave_requested.is_set():
            raise KeyboardInterrupt
        if guest is None:
            stop_requested.set()
            if replica is not None:
                # On another thread, since the interrupted code may hold locks.
                threading.Thread(target=replica.ask_to_stop).start()
        elif elastic is None:
            raise KeyboardInterrupt
        else:
            leave()

    def publish(access: Access) -> None:
        """Writes key and addresses of the run to a file that only its owner can read."""

        def write(partial: Path) -> None:
            partial.touch(mode=0o600)
            partial.write_text(json.dumps(access.to_json()), encoding="utf-8")

        write_whole(files.path / KEY, write)

    def leave() -> None:
        if elastic is not None and not leave_requested.is_set():
            threading.Thread(target=elastic.leave).start()
        leave_requested.set()

    threads = config.threads or (1 if env.local_size > 1 else torch.get_num_threads())
    decisions = files.decision_log()
    pace_profile = (
        device_profile(options.pace, forward_flops=forward_flops(config.task)) if options.pace else None
    )
    with ExitStack() as stack:
        stack.enter_context(torch_threads(threads))
        stack.enter_context(on_stop(request_stop))
        if config.elastic:
            stack.enter_context(on_stop(leave, {signal.SIGUSR1}))
        file = stack.enter_context(JsonLines(files.telemetry(rank)))
        stack.callback(decisions.write)
        telemetry = Telemetry(rank, file, show, decisions.write)
        system = f"{platform.system()} {platform.release()}, {platform.machine()}, {os.cpu_count()} cores"
        versions = f"torch {torch.__version__}, Python {platform.python_version()}"
        telemetry.emit("hello", pid=os.getpid(), threads=threads, machine=system, versions=versions)
        store = None if guest else run.store or replace(env, size=max(size, config.ranks)).store(JOIN_S)
        runtime = WallRuntime(
            rank,
            config.ranks if config.elastic else size,
            store,
            meeting=_MEETING,
            advice=str(files.path),
            endpoint=replace(options.endpoint.on(env.interface), encrypt=config.encrypt),
            settings={**config.to_json(), "model": config.model_layout()},
            deadline_s=config.deadline,
            members=({rank} if guest else range(size)) if config.elastic else None,
            come=(lambda own_rank: [own_rank]) if guest else None,
            kept_nbytes=math.inf if config.elastic else None,
            native=collective_named(config.recipe.collective).by_backend,
            join_s=JOIN_S,
            decisions=decisions,
            pace=Pace(pace_profile, rank, config.seed) if pace_profile else None,
        )
        has_met = True
        try:
            if guest is not None:
                guest.come(runtime)
            checkpoints = files.checkpoints(rank, size, leader=leader, any_size=bool(config.elastic))
            make = partial(
                make_replica,
                runtime,
                config.task,
                config.recipe,
                config.training,
                telemetry,
                shares=config.make_shares(),
                checkpoints=checkpoints,
                stop_asked=stop_requested.is_set,
                trace=options.trace,
                device=device,
            )
            replica = make()
            if not replica.parts.sharing.data_leaves_device:
                runtime.expect(chain(replica.model.parameters(), replica.model.buffers()))
            network_name = os.environ.get(NETWORK)
            profile = network_profile(network_name) if network_name else None
            settle = partial(runtime.settle_collective, network=profile)
            start = checkpoints.newest() if files.resumed and guest is None else 0
            collective = config.recipe.collective
            if guest is None:
                comm = runtime.comm
                if size < comm.size:  # later joiners are not present yet
                    runtime.comm = cast("WallCommunicator", Among(comm, range(size)))
                collective = settled_collective(settle, config.recipe, replica, start)
                runtime.comm = comm
            if config.elastic:
                can_grow = config.ranks > config.workers
                takes = Takes(config.to_json(), config.ranks, publish) if can_grow else None
                elastic = runtime.elastic = elastic_on(
                    runtime,
                    range(size) if guest is None else guest.members,
                    page=page,
                    takes=takes,
                    guest=guest,
                    least=config.least,
                    quorum=config.quorum,
                    patience_s=config.deadline,
                    returns=True,
                    first_step=start,
                    reach=replica.parts.schedule.reach,
                )
                if leave_requested.is_set():  # before the run existed
                    elastic.leave()
            if files.resumed and guest is None:
                replica.resume(start)
            result, state = runtime.run(whole(replica, make))
            summary = {
                **result.to_json(),
                "collective": collective,
                "partition": config.split_json(),
            }
            if runtime.pace is not None:
                telemetry.emit("pace", t=runtime.now(), **runtime.pace.to_json())
                summary["pace"] = runtime.pace.to_json()
        except Left:
            runtime.close()
            raise
        except BaseException as error:
            runtime.close(error)
            raise
        finally:
            if runtime.view.refusals:
                telemetry.emit("refused", t=runtime.now(), **runtime.view.refusals)
        runtime.close()
        if refusals := count_refusals(read_events(files.telemetry(rank))):
            summary["refused"] = dict(refusals)
    is_first = rank == (0 if elastic is None else elastic.changes[-1].ranks[0])
    if leader or is_first:
        save_tree(files.model, state)
    if is_first:
        write_json(files.summary, summary)
    return run.ended(summary)


def join_later(
    where: str,
    show: Callable[[int], AbstractContextManager[Sink]],
    options: RunOptions,
    key: Path | None = None,
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
    folder = Path(where)
    is_local = folder.is_dir()
    if not is_local and not re.fullmatch(r"[^\s]+:[0-9]{1,5}", where):
        raise ConfigError(f"{where}: neither a run's folder nor HOST:PORT, such as 192.168.1.5:7000")
    if not is_local and key is None:
        raise ConfigError(f"{where}: --key FILE is missing, a copy of {KEY} in the run's folder")
    file = key or folder / KEY
    if is_local and not file.exists():
        raise ConfigError(f"{where}: no run goes on there that others may join (--elastic MIN:MAX)")
    guest = _ask_for_rank(file, [] if is_local else [where])
    config = RunConfig.resolve(guest.config)
    files = RunFolder(folder if is_local else Path(options.out or run_folder(config.title)))
    run = Prepared(config, files, options=options)
    with nullcontext() if is_local else run.begun():
        for tries_left in reversed(range(_TRIES)):
            env = LaunchEnv(
                guest.rank,
                config.ranks,
                guest.rank if is_local else 0,
                config.ranks if is_local else 1,
                master=(guest.host, "0"),
            )
            try:
                with show(guest.rank) as sink:
                    return join(run, sink, env, Page.inherited(), guest)
            except RunLost as lost:
                is_final = isinstance(lost, Left | DeadlinePassed | ProtocolError)
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


def _ask_for_rank(file: Path, addresses: Sequence[str]) -> Guest:
    """Requests a rank from members at the given addresses, and then at those in a key file."""
    with reading(file, "not the key of a run"):
        access = Access.from_json(json.loads(read_text(file)))
    return Guest(access, [*addresses, *access.addresses])
