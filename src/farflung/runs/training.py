"""Runs of real workers, started on this machine or by a launcher such as torchrun."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from farflung.calibration import count_forward_flops
from farflung.comm import Endpoint
from farflung.devices import find_device
from farflung.engine import select_device
from farflung.errors import ConfigError
from farflung.membership import Page
from farflung.recipes import Recipe
from farflung.runs.config import RunConfig, RunOptions, Settings
from farflung.runs.events import EVENTS_VARIABLE, BufferedSink, connect_event_sink
from farflung.runs.joining import CONNECT_TIMEOUT_S, agree_on_folder, train_replica
from farflung.runs.launching import launch
from farflung.runs.preparing import PreparedRun, name_run_folder, prepare_run
from farflung.runs.result import Run
from farflung.runs.simulation import discard_event
from farflung.telemetry import Sink, combine_sinks
from farflung.types import Workload
from farflung.wall import LaunchEnv

__all__ = ["begin_training", "prepare_training", "train"]


def train(
    workload: str | Workload | Callable[..., Workload] | None = None,
    recipe: str | Recipe | None = None,
    *,
    sink: Sink = discard_event,
    **settings: object,
) -> Run:
    """Trains as ``farflung train`` does: on workers of this machine, or as one replica under torchrun.

    Under torchrun, Slurm's srun or mpirun, this process trains as one replica and returns that replica's result.
    Otherwise workers are started on this machine, in processes that import parts by name. Objects such as workload,
    codec or schedule must then be classes, functions or frozen dataclasses of a module, not of the script itself. The
    first Ctrl-C ends such a run after the current step, the second immediately.

    Args:
      workload: Workload to train: a name, ``module:name``, or a class or function that creates it; under torchrun also
        a workload object. By default fashion-mnist/cnn.
      recipe: Recipe of distributed training: a name, with changes in brackets, or a :class:`farflung.recipes.Recipe`;
        by default synchronous.
      sink: Sink for events, called on a separate thread: of all workers started here, or of this replica under
        torchrun. If it is slow, step events are dropped, and an event ``dropped`` counts them.
      settings: Options of :class:`farflung.runs.RunOptions` by name (``out``, ``resume``, ``replay``, ``device``,
        ``pace``, ``trace``, ``log_to``, ``data_stays``, ``endpoint``), and settings of the command (``steps``,
        ``workers``, ``learning_rate`` and so on).

    Raises:
      BadInput: The input is invalid; raised before the run starts.
      RunLost: A worker was lost or failed; the message names it.
    """
    names = {field.name for field in fields(RunOptions)} & settings.keys()
    options: dict[str, Any] = {name: settings.pop(name) for name in names}
    run = prepare_training(
        {"workload": workload, "recipe": recipe, **settings}, options=RunOptions(**options)
    )
    with begin_training(run) as begin:
        return begin(sink)


def prepare_training(*layers: Settings, options: RunOptions = RunOptions()) -> PreparedRun[RunConfig]:
    """Prepares a run of real workers, see :func:`farflung.runs.prepare_run`.

    Under a launcher, only rank 0 checks the run, and it publishes a new folder to the other ranks through the store.

    Raises:
      BadInput: The run cannot work, or the number of workers differs from the launcher's.
    """
    env = LaunchEnv.read()
    prepare = partial(prepare_run, RunConfig, options=options)
    encryption: Settings = {"encrypt": True} if options.endpoint.encrypt else {}
    if env is None:
        return prepare(*layers, encryption)
    workers = layers[-1].get("workers") if layers else None
    if workers not in (None, env.size):
        raise ConfigError(f"--workers {workers}: {env.launcher} has started {env.size}")
    store: dist.Store | None = None

    def name_folder(title: str) -> Path:
        nonlocal store
        store = env.connect_store(CONNECT_TIMEOUT_S)
        return name_run_folder(title) if store is None else agree_on_folder(store, env.rank, title)

    layer = {**encryption, "workers": env.size}
    run = prepare(*layers, layer, should_check=env.rank == 0, name_folder=name_folder)
    return replace(run, store=store)


@contextmanager
def begin_training(
    run: PreparedRun[RunConfig],
) -> Iterator[Callable[[Sink], Run]]:
    """Creates and locks the folder, and yields a function that trains there with a given sink.

    Raises:
      BadInput: This machine cannot run it; nothing has been created.
    """
    config, options, endpoint = run.config, run.options, run.options.endpoint
    components, component_texts = config.recipe.build_components(config.seed), config.recipe.component_texts
    if options.data_stays and components.sharing.has_data_transfers:
        raise ConfigError(
            f"--data-stays: --sharing {component_texts['sharing']} sends samples to other replicas: leave out "
            "--data-stays, or choose --sharing none"
        )
    if options.data_stays and components.sampler.is_balanced:
        raise ConfigError(
            f"--data-stays: --sampler {component_texts['sampler']} has samples computed by other replicas: leave out "
            "--data-stays, or choose --sampler uniform"
        )
    env = LaunchEnv.read()
    if env is not None:
        endpoint.read_keys()
        if ":" in (endpoint.advertise or "").rpartition("]")[2] and env.local_size > 1:
            raise ConfigError(
                f"--advertise {endpoint.advertise}: {env.local_size} replicas here cannot be reached at one port: "
                "give only the host, and a --port range that is forwarded as it is"
            )

        log = run.create_log() if env.rank == 0 else nullcontext(discard_event)

        def start_training(user_sink: Sink) -> Run:
            sink = (
                combine_sinks(user_sink, connect_event_sink(os.environ[EVENTS_VARIABLE]))
                if EVENTS_VARIABLE in os.environ
                else user_sink
            )
            with log as log_sink, BufferedSink(combine_sinks(sink, log_sink)) as buffered_sink:
                return train_replica(run, buffered_sink, env, Page.from_environment())

        with run.begin_run() if env.rank == 0 else nullcontext():
            yield start_training
        return
    if replace(endpoint, encrypt=False) != Endpoint():
        raise ConfigError(
            "--interface, --port, --advertise, --keys and --connections are for several machines: start this under "
            "torchrun there"
        )
    config.check_buildable()
    select_device(options.device, local_size=config.workers)
    if options.pace is not None:
        find_device(options.pace, forward_flops=count_forward_flops(config.task))
    log = run.create_log()
    with run.begin_run(), log:
        yield lambda sink: launch(run, combine_sinks(sink, log))
