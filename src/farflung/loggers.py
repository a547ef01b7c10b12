"""The figures of a run, handed to loggers: TensorBoard, Weights & Biases, Trackio and MLflow."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, redirect_stdout
from contextvars import Context
from pathlib import Path
from types import TracebackType
from typing import Self, TypeAlias

from farflung.errors import UnknownName
from farflung.extras import need
from farflung.telemetry import Event
from farflung.types import Json

__all__ = ["LOGGERS", "RunLog", "figures"]

_Log: TypeAlias = "Callable[[Mapping[str, float], int, float], None]"
"""Takes values by name, the step that they belong to, and when that was, in seconds since the epoch."""

_NAMES = {
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
"""The name under which a field of an event is logged, by kind of event."""
_PROJECT = "farflung"
"""The project or experiment that runs belong to where the environment names none."""


def figures(event: Event) -> tuple[dict[str, float], int]:
    """What all loggers receive of an event: values by name, and the step that they belong to.

    >>> figures({"event": "evaluation", "rank": 0, "t": 1.5, "step": 3, "accuracy": 0.5, "loss": None})
    ({'test/score': 0.5}, 3)
    >>> figures({"event": "end", "rank": 0, "t": 2.0, "steps": 4, "time_s": {"compute": 1.0}, "stopped": False})
    ({'summary/steps': 4, 'summary/time_s/compute': 1.0}, 4)
    """
    kind, step = event["event"], event.get("step")
    if kind == "view" and isinstance(members := event["members"], list):
        found: dict[str, Json] = {"network/members": len(members)}
    elif kind == "end":
        step, found = event["steps"], {}
        for name, value in event.items():
            if name not in ("rank", "t"):
                parts = (
                    {f"/{part}": one for part, one in value.items()}
                    if isinstance(value, dict)
                    else {"": value}
                )
                found |= {f"summary/{name}{part}": one for part, one in parts.items()}
    else:
        found = {known: event[name] for name, known in _NAMES.get(str(kind), {}).items() if name in event}
    values = {k: v for k, v in found.items() if isinstance(v, int | float) and not isinstance(v, bool)}
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
    # Without a key a terminal would be asked for one while the run goes on.
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
    with redirect_stdout(sys.stderr):  # what it prints is no result of a command
        # In a context of its own, so that no run of the caller's ends, and this one once.
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
    # The client's run is not that of a thread, as mlflow.start_run's is: events may end on another than they began on.
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
"""What begins to log a run, given its folder, title and configuration, and the step that it begins at."""


class RunLog:
    """A sink that hands the figures of rank 0 to loggers: of each step, of evaluations, and of the summary.

    Times are those of the run's clock, so in a simulated run they are simulated. A run that goes on takes the place of
    the steps that it does again in TensorBoard, and is a new run in the others. A logger that fails is left out from
    there on, with a warning.

    Args:
      names: of loggers, with commas between them: tensorboard, wandb, trackio, mlflow.
      folder: of the run; curves for TensorBoard go to ``tensorboard`` in it, and wandb's files to ``wandb``.
      title: of the run.
      config: of the run.

    Raises:
      UnknownName: there is no such logger.
      MissingExtra: its package is not installed.
    """

    def __init__(
        self, names: str, folder: Path | str, *, title: str = "farflung", config: Mapping[str, Json] = {}
    ) -> None:
        self._names = list(dict.fromkeys(filter(None, (name.strip() for name in names.split(",")))))
        for name in self._names:
            if name not in LOGGERS:
                raise UnknownName("logger", name, LOGGERS)
            need(f"--log-to {name}", name, extra=name)
        self._folder, self._title, self._config = Path(folder), title, config
        self._open: dict[str, tuple[ExitStack, _Log]] = {}
        self._zero_s = 0.0

    def __call__(self, event: Event) -> None:
        """Logs one event; those of other ranks are passed over, and what comes before a run has begun."""
        if event["rank"] != 0:
            return
        t = event.get("t")
        at = float(t) if isinstance(t, int | float) else 0.0
        values, step = figures(event)
        if event["event"] == "begin":
            self.__exit__(None, None, None)
            self._zero_s = time.time() - at
            for name in [*self._names]:
                with self._kept_going(name):
                    stack = ExitStack()
                    begun = LOGGERS[name](self._folder, self._title, self._config, step)
                    self._open[name] = stack, stack.enter_context(begun)
            if isinstance(workers := self._config.get("workers"), int):
                values = {"network/members": workers}
        for name, (_, log) in [*self._open.items()] if values else ():
            with self._kept_going(name):
                log(values, step, self._zero_s + at)

    @contextmanager
    def _kept_going(self, name: str) -> Iterator[None]:
        """Leaves a logger out that fails inside."""
        try:
            yield
        except Exception as error:
            self._names.remove(name)
            self._open.pop(name, None)
            said = " ".join(str(error).split()) or type(error).__name__
            logging.getLogger("farflung").warning("--log-to %s: no longer logged: %s", name, said)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends what is logged, as failed after an error."""
        for name, (stack, _) in [*self._open.items()]:
            del self._open[name]
            with self._kept_going(name):
                stack.__exit__(kind, error, trace)
