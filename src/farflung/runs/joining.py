"""Joins a run as one of its replicas, and trains."""

from __future__ import annotations

import itertools
import math
import os
import threading
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist

from farflung.calibration import forward_flops
from farflung.comm import collective_named
from farflung.devices import device_profile
from farflung.files import write_json
from farflung.membership import Elastic, Supervised
from farflung.network import network_profile
from farflung.replica import place, save_tree
from farflung.runs.config import RunConfig
from farflung.runs.preparing import Prepared, run_folder
from farflung.runs.replicas import make_replica, settled_collective
from farflung.runs.result import Run
from farflung.runs.simulation import torch_threads, whole
from farflung.runs.stopping import on_stop
from farflung.telemetry import JsonLines, Sink, Telemetry
from farflung.wall import LaunchEnv, Pace, WallRuntime
from farflung.wall.stores import shared_key, told_by

__all__ = ["NETWORK", "agreed_folder", "join", "meeting"]

NETWORK = "FARFLUNG_NETWORK"
"""Names the network between the replicas where it is known, as in the lab: a profile or a TOML file."""
JOIN_S = 60.0
_FOLDER = "farflung/folder"
_numbers = itertools.count()


def meeting(env: LaunchEnv) -> dist.Store | None:
    """Finds the store of the job; what earlier runs of the same processes have left there is out of sight."""
    store = env.store(JOIN_S)
    if store is None or env.meeting is not None:  # a file is of one run alone
        return store
    return dist.PrefixStore(f"run-{next(_numbers)}", store)


def agreed_folder(store: dist.Store, rank: int, title: str) -> Path:
    """Names a new folder on rank 0, and takes that name over on the other ranks.

    Raises:
      DeadlinePassed: rank 0 did not name one.
    """
    if rank == 0:
        store.set(_FOLDER, str(run_folder(title)))
    return Path(told_by(0, store, _FOLDER, "the run's folder", JOIN_S).decode())


def join(run: Prepared[RunConfig], show: Sink, env: LaunchEnv, supervised: Supervised | None = None) -> Run:
    """Trains as one replica.

    Args:
      run: what, where and on what; its folder has been made.
      show: gets this replica's events.
      env: its rank and size.
      supervised: this process's end of its supervisor, in a run that outlives the loss of replicas.
    """
    config, options, files, rank, size = run.config, run.options, run.files, env.rank, env.size
    leader = env.local_rank == 0
    placed = place(options.device, local_rank=env.local_rank, local_size=env.local_size)
    if placed.type == "cuda":
        torch.cuda.set_device(placed)
    asked = threading.Event()
    met = env.meeting is not None  # a wait in a file is short, and the command ends its workers

    def ask() -> None:
        asked.set()
        if not met:
            raise KeyboardInterrupt

    threads = config.threads or (1 if env.local_size > 1 else torch.get_num_threads())
    decisions = files.decision_log()
    slower = device_profile(options.pace, forward_flops=forward_flops(config.task)) if options.pace else None
    with ExitStack() as stack:
        stack.enter_context(torch_threads(threads))
        stack.enter_context(on_stop(ask))
        file = stack.enter_context(JsonLines(files.telemetry(rank)))
        stack.callback(decisions.write)
        telemetry = Telemetry(rank, file, show, decisions.write)
        telemetry.emit("hello", pid=os.getpid(), threads=threads)
        store = run.store or meeting(env)
        runtime = WallRuntime(
            rank,
            size,
            store,
            endpoint=replace(options.endpoint.on(env.interface), encrypt=config.encrypt),
            settings={**config.to_json(), "model": config.model_layout()},
            deadline_s=config.deadline,
            members=range(size) if config.elastic else None,
            kept_nbytes=math.inf if config.elastic else None,
            native=collective_named(config.recipe.collective).by_backend,
            join_s=JOIN_S,
            decisions=decisions,
            pace=Pace(slower, rank, config.seed) if slower else None,
        )
        met = True
        try:
            checkpoints = files.checkpoints(rank, size, leader=leader, any_size=bool(config.elastic))
            replica = make_replica(
                runtime,
                config.task,
                config.recipe,
                config.training,
                telemetry,
                shares=config.make_shares(),
                checkpoints=checkpoints,
                stop_asked=asked.is_set,
                device=placed,
            )
            if not replica.parts.sharing.data_leaves_device:
                runtime.expect(chain(replica.model.parameters(), replica.model.buffers()))
            known = os.environ.get(NETWORK)
            profile = network_profile(known) if known else None
            settle = partial(runtime.settle_collective, network=profile)
            start = checkpoints.newest() if files.resumed else 0
            collective = settled_collective(settle, config.recipe, replica, start)
            if config.elastic:
                runtime.elastic = elastic = Elastic(
                    runtime,
                    supervised.key if supervised else shared_key(store, rank, JOIN_S),
                    page=supervised.page if supervised else None,
                    least=config.elastic,
                    patience_s=config.deadline,
                    first_step=start,
                    reach=replica.parts.schedule.reach,
                )
                if supervised is not None:
                    end = supervised.certificates
                    runtime.watch(end.fileno(), lambda: elastic.certified(end.recv(1 << 20)))
            if files.resumed:
                replica.resume(start)
            ended, state = runtime.run(whole(replica))
            summary = {
                **ended.to_json(),
                "collective": collective,
                "partition": config.split_json(config.split()),
            }
            if runtime.pace is not None:
                telemetry.emit("pace", t=runtime.now(), **runtime.pace.to_json())
                summary["pace"] = runtime.pace.to_json()
        except BaseException as error:
            runtime.close(error)
            raise
        finally:
            if runtime.view.refusals:
                telemetry.emit("refused", t=runtime.now(), **runtime.view.refusals)
        runtime.close()
        if refused := files.refused(rank):
            summary["refused"] = dict(refused)
    first = rank == (0 if runtime.elastic is None else runtime.elastic.changes[-1].ranks[0])
    if leader or first:
        save_tree(files.model, state)
    if first:
        write_json(files.summary, summary)
    return run.ended(summary)
