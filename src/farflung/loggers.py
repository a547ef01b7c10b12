"""Export of a run's metrics to TensorBoard, Weights & Biases, Trackio and MLflow."""

from __future__ import annotations

import json
import logging
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, redirect_stdout
from contextvars import Context
from pathlib import Path
from types import TracebackType
from typing import Self, TypeAlias

from farflung.errors import UnknownName
from farflung.extras import require_modules
from farflung.telemetry import Event
from farflung.types import Json

__all__ = ["LOGGERS", "RunLog", "extract_metrics", "list_viewers"]

_Log: TypeAlias = "Callable[[Mapping[str, float], int, float], None]"
"""Logging function of metrics by name, their step, and their time in seconds since the epoch."""

_METRIC_NAMES = {
    "step": {
        "mean_loss": "train/loss",
        "learning_rate": "train/learning_rate",
        "bytes_sent": "network/bytes_sent",
        "in_flight": "network/exchanges_under_way",
        "t": "seconds/run",
        "duration_s": "seconds/step",
        "compute_s": "seconds/compute",
        "exposed_s": "seconds/exposed_communication",
        "data_s": "seconds/data_wait",
        "scoring_s": "seconds/scoring",
    },
    "evaluation": {"accuracy": "test/score", "loss": "test/loss", "duration_s": "seconds/evaluation"},
}
"""Metric names of event fields, by kind of event."""
_PROJECT = "farflung"
"""Default project or experiment of runs."""


def extract_metrics(event: Event) -> tuple[dict[str, float], int]:
    """Extracts the metrics of an event, by name, and their step.

    >>> extract_metrics({"event": "evaluation", "rank": 0, "t": 1.5, "step": 3, "accuracy": 0.5, "loss": None})
    ({'test/score': 0.5}, 3)
    >>> extract_metrics({"event": "end", "rank": 0, "t": 2.0, "steps": 4, "time_s": {"compute": 1.0}, "stopped": False})
    ({'summary/steps': 4, 'summary/time_s/compute': 1.0}, 4)
    """
    kind, step = event["event"], event.get("step")
    if kind == "view" and isinstance(members := event["members"], list):
        metrics: dict[str, Json] = {"network/members": len(members)}
    elif kind == "end":
        step, metrics = event["steps"], {}
        for name, value in event.items():
            if name not in ("rank", "t"):
                parts = (
                    {f"/{key}": entry for key, entry in value.items()}
                    if isinstance(value, dict)
                    else {"": value}
                )
                metrics |= {f"summary/{name}{suffix}": entry for suffix, entry in parts.items()}
    else:
        metrics = {
            label: event[name] for name, label in _METRIC_NAMES.get(str(kind), {}).items() if name in event
        }
    values = {k: v for k, v in metrics.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    return (values, step) if isinstance(step, int) else ({}, 0)


@contextmanager
def _tensorboard(folder: Path, title: str, config: Mapping[str, Json], step: int) -> Iterator[_Log]:
    from torch.utils.tensorboard import SummaryWriter

    del title
    with SummaryWriter(str(folder / "tensorboard"), purge_step=step or None) as writer:
        if config:
            writer.add_text("config", f"```json\n{json.dumps(config, indent=2)}\n```", step)

        def log(values: Mapping[str, float], step: int, at_s: float) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step, at_s)

        yield log


@contextmanager
def _wandb(folder: Path, title: str, config: Mapping[str, Json], step: int) -> Iterator[_Log]:
    import wandb

    del step
    # Without a key, wandb would prompt for one during the run.
    offline = "WANDB_MODE" not in os.environ and not wandb.login(prompt=False, verify=False)
    folder.mkdir(parents=True, exist_ok=True)
    with wandb.init(
        project=os.environ.get("WANDB_PROJECT", _PROJECT),
        name=title,
        dir=str(folder),
        config=dict(config),
        mode="offline" if offline else None,
    ) as run:
        yield lambda values, step, _: run.log(dict(values), step=step)


@contextmanager
def _trackio(folder: Path, title: str, config: Mapping[str, Json], step: int) -> Iterator[_Log]:
    import trackio

    del folder, step
    name = f"{title}, {time.strftime('%Y%m%d-%H%M%S')}"
    with redirect_stdout(sys.stderr):  # stdout is for results of commands
        # A separate context keeps the caller's runs open and finishes this run only once.
        run = Context().run(trackio.init, project=_PROJECT, name=name, config=dict(config))
    try:
        yield lambda values, step, _: run.log(dict(values), step=step)
    finally:
        with redirect_stdout(sys.stderr):
            run.finish()


@contextmanager
def _mlflow(folder: Path, title: str, config: Mapping[str, Json], step: int) -> Iterator[_Log]:
    import mlflow
    from mlflow.entities import Metric, Param

    del folder, step
    # Unlike mlflow.start_run's, the client's run is not bound to a thread, and events come from several threads.
    experiment = mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT))
    client = mlflow.MlflowClient()
    run_id = client.create_run(experiment.experiment_id, run_name=title).info.run_id
    status = "FAILED"
    try:
        client.log_batch(run_id, params=[Param(name, str(value)[:500]) for name, value in config.items()])
        yield lambda values, step, at_s: client.log_batch(
            run_id, [Metric(name, value, int(1000 * at_s), step) for name, value in values.items()]
        )
        status = "FINISHED"
    finally:
        client.set_terminated(run_id, status)


LOGGERS: dict[str, Callable[[Path, str, Mapping[str, Json], int], AbstractContextManager[_Log]]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "trackio": _trackio,
    "mlflow": _mlflow,
}
"""Context managers that log a run, given its folder, title, configuration and first step, by name."""


def list_viewers(names: str, folder: Path) -> dict[str, str]:
    """Lists the command that shows a run's figures, or the place where they are, for each logger.

    Args:
      names: Names of loggers, separated by commas.
      folder: Folder of the run.
    """
    runs = folder / "wandb"
    is_offline = any(runs.glob("offline-run-*"))
    project = os.environ.get("WANDB_PROJECT", _PROJECT)
    store = os.environ.get("MLFLOW_TRACKING_URI")
    viewers = {
        "tensorboard": f"tensorboard --logdir {shlex.quote(str(folder / 'tensorboard'))}",
        "wandb": f"wandb sync {shlex.quote(str(runs))}/offline-run-*" if is_offline else f"project {project}",
        "trackio": f"trackio show --project {_PROJECT}",
        "mlflow": f"mlflow ui --backend-store-uri {shlex.quote(store)}" if store else "mlflow ui",
    }
    return {name: viewers[name] for name in _split_names(names)}


def _split_names(names: str) -> list[str]:
    return list(dict.fromkeys(filter(None, (name.strip() for name in names.split(",")))))


class RunLog:
    """Sink that passes rank 0's metrics of steps, evaluations and the summary to loggers.

    Times are those of the run's clock, which is virtual in a simulated run. In TensorBoard a resumed run replaces the
    steps that it repeats; in other loggers it is a new run. A logger that fails is dropped with a warning.

    Args:
      names: Names of loggers, separated by commas: tensorboard, wandb, trackio, mlflow.
      folder: Folder of the run; TensorBoard's files go to its subfolder ``tensorboard``, wandb's to ``wandb``.
      title: Title of the run.
      config: Configuration of the run.

    Raises:
      UnknownName: No logger has this name.
      MissingExtra: The package of a logger is not installed.
    """

    def __init__(
        self, names: str, folder: Path | str, *, title: str = "farflung", config: Mapping[str, Json] = {}
    ) -> None:
        self._names = _split_names(names)
        for name in self._names:
            if name not in LOGGERS:
                raise UnknownName("logger", name, LOGGERS)
            require_modules(f"--log-to {name}", name, extra=name)
        self._folder, self._title, self._config = Path(folder), title, config
        self._open_loggers: dict[str, tuple[ExitStack, _Log]] = {}
        self._start_s = 0.0

    def __call__(self, event: Event) -> None:
        """Logs an event of rank 0; ignores other ranks, and events before the run begins."""
        if event["rank"] != 0:
            return
        t = event.get("t")
        time_s = float(t) if isinstance(t, int | float) else 0.0
        values, step = extract_metrics(event)
        if event["event"] == "begin":
            self.__exit__(None, None, None)
            self._start_s = time.time() - time_s
            for name in [*self._names]:
                with self._drop_on_error(name):
                    stack = ExitStack()
                    logger = LOGGERS[name](self._folder, self._title, self._config, step)
                    self._open_loggers[name] = stack, stack.enter_context(logger)
            if isinstance(workers := self._config.get("workers"), int):
                values = {"network/members": workers}
        for name, (_, log) in [*self._open_loggers.items()] if values else ():
            with self._drop_on_error(name):
                log(values, step, self._start_s + time_s)

    @contextmanager
    def _drop_on_error(self, name: str) -> Iterator[None]:
        """Drops a logger, with a warning, if an error occurs within the context."""
        try:
            yield
        except Exception as error:
            self._names.remove(name)
            self._open_loggers.pop(name, None)
            reason = " ".join(str(error).split()) or type(error).__name__
            logging.getLogger("farflung").warning("--log-to %s: no longer logged: %s", name, reason)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes all loggers, which mark the run as failed after an error."""
        for name, (stack, _) in [*self._open_loggers.items()]:
            del self._open_loggers[name]
            with self._drop_on_error(name):
                stack.__exit__(kind, error, trace)
