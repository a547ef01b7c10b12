"""Runs of real workers: started on this machine, or joined where torchrun has started them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from farflung.calibration import forward_flops
from farflung.comm import Endpoint
from farflung.devices import device_profile
from farflung.engine import place
from farflung.errors import ConfigError
from farflung.membership import Page
from farflung.recipes import Recipe
from farflung.runs.config import RunConfig, RunOptions, Settings
from farflung.runs.events import EVENTS, Buffered, teller
from farflung.runs.joining import JOIN_S, agreed_folder, join
from farflung.runs.launching import launch
from farflung.runs.preparing import Prepared, prepared, run_folder
from farflung.runs.result import Run
from farflung.runs.simulation import nowhere
from farflung.telemetry import Sink, both
from farflung.types import Workload
from farflung.wall import LaunchEnv

__all__ = ["prepare_training", "ready_to_train", "train"]


def train(
    workload: str | Workload | Callable[..., Workload] | None = None,
    recipe: str | Recipe | None = None,
    *,
    show: Sink = nowhere,
    **settings: object,
) -> Run:
    """Trains on real workers, as ``farflung train`` does.

    Under torchrun, Slurm's srun or mpirun this process joins the run as one of its replicas, and gets back that
    replica's account of it.
    Elsewhere workers are started on this machine, in processes that import what they need by name: workload, codec,
    schedule and whatever else is an object has to be a class, a function or a frozen dataclass of a module, not of the
    script itself. The first Ctrl-C ends such a run after the step it is in, and the second at once.

    Args:
      workload: what to train: a name, ``module:name``, or a class or function that makes it; under torchrun a workload
        itself will do. fashion-mnist/cnn when not given.
      recipe: how to train together: a name, with changes in brackets if wished, or a
        :class:`farflung.recipes.Recipe` of names and objects; synchronous when not given.
      show: gets the events as they happen, on a thread of its own: of all workers that are started here, of this
        replica under torchrun. Where it is slow, events of steps are dropped, and an event ``dropped`` counts them.
      settings: by name the options that :class:`farflung.runs.RunOptions` documents (``out``, ``resume``, ``replay``,
        ``device``, ``pace``, ``trace``, ``log_to``, ``data_stays``, ``endpoint``), and the settings of the command
        (``steps``, ``workers``, ``learning_rate`` and so on), with its defaults.

    Raises:
      BadInput: says what is wrong and what to do, before anything begins.
      RunLost: a worker was lost or failed; names it.
    """
    own = {one.name for one in fields(RunOptions)} & settings.keys()
    options: dict[str, Any] = {name: settings.pop(name) for name in own}
    run = prepare_training(
        {"workload": workload, "recipe": recipe, **settings}, options=RunOptions(**options)
    )
    with ready_to_train(run) as begin:
        return begin(show)


def prepare_training(*layers: Settings, options: RunOptions = RunOptions()) -> Prepared[RunConfig]:
    """See :func:`farflung.runs.prepared`; under torchrun, Slurm and MPI rank 0 alone looks whether it can work.

    There rank 0 also names a new folder, and tells the other ranks through the store.

    Raises:
      BadInput: says what is wrong; other than torchrun's number of workers, too.
    """
    env = LaunchEnv.read()
    ready = partial(prepared, RunConfig, options=options)
    encrypted: Settings = {"encrypt": True} if options.endpoint.encrypt else {}
    if env is None:
        return ready(*layers, encrypted)
    given = layers[-1].get("workers") if layers else None
    if given not in (None, env.size):
        raise ConfigError(f"--workers {given}: {env.started_by} has started {env.size}")
    store: dist.Store | None = None

    def folder(title: str) -> Path:
        nonlocal store
        store = env.store(JOIN_S)
        return run_folder(title) if store is None else agreed_folder(store, env.rank, title)

    run = ready(*layers, {**encrypted, "workers": env.size}, check=env.rank == 0, folder=folder)
    return replace(run, store=store)


@contextmanager
def ready_to_train(
    run: Prepared[RunConfig],
) -> Iterator[Callable[[Sink], Run]]:
    """Makes the folder; inside, what it gives trains there, and tells a sink of the events.

    Raises:
      BadInput: this machine cannot do it; says why, and nothing has been made.
    """
    config, options, endpoint = run.config, run.options, run.options.endpoint
    parts, named = config.recipe.parts(config.seed), config.recipe.members
    if options.data_stays and parts.sharing.data_leaves_device:
        raise ConfigError(
            f"--data-stays: --sharing {named['sharing']} sends samples to other replicas: leave out "
            "--data-stays, or choose --sharing none"
        )
    env = LaunchEnv.read()
    if env is not None:
        endpoint.read_keys()
        if ":" in (endpoint.advertise or "").rpartition("]")[2] and env.local_size > 1:
            raise ConfigError(
                f"--advertise {endpoint.advertise}: {env.local_size} replicas here cannot be reached at one port: "
                "give the host alone, and a --port range that is forwarded as it is"
            )

        log = run.log() if env.rank == 0 else nullcontext(nowhere)

        def joined(show: Sink) -> Run:
            sink = both(show, teller(os.environ[EVENTS])) if EVENTS in os.environ else show
            with log as logged, Buffered(both(sink, logged)) as shown:
                return join(run, shown, env, Page.inherited())

        with run.begun() if env.rank == 0 else nullcontext():
            yield joined
        return
    if replace(endpoint, encrypt=False) != Endpoint():
        raise ConfigError(
            "--interface, --port, --advertise, --keys and --connections are for several machines: start this under "
            "torchrun there"
        )
    config.check_carried()
    place(options.device, local_size=config.workers)
    if options.pace is not None:
        device_profile(options.pace, forward_flops=forward_flops(config.task))
    log = run.log()
    with run.begun(), log:
        yield lambda show: launch(run, both(show, log))
