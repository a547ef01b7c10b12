"""A coordinator's run from its first device to the trained model, in a folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from farflung.coded.codes import CODES
from farflung.coded.coordinator import Coordinator
from farflung.coded.linear_model import Classes, Learner, LinearModel
from farflung.coded.meeting import Address, coordinating
from farflung.coded.record import Folder, Record
from farflung.coded.settings import Settings
from farflung.coded.training import Trained, train
from farflung.comm import Endpoint
from farflung.errors import BadInput, DataError
from farflung.files import write_json
from farflung.spec import build
from farflung.telemetry import Event, Sink
from farflung.types import Json
from farflung.wall import WallRuntime

__all__ = ["CodedRun", "Outcome"]


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """The outcome of a run.

    Args:
      model: as trained.
      summary: figures, as ``summary.json`` has them.
    """

    model: LinearModel
    summary: dict[str, Json]


@dataclass(frozen=True, slots=True, kw_only=True)
class CodedRun:
    """The task of a coordinator.

    Args:
      settings: of the devices and the code.
      learner: settings of the model.
      folder: of the run; one that was stopped there goes on.
      max_iterations: of the solver, in all.
      test: features and labels on which the model is tested at the end.
    """

    settings: Settings
    learner: Learner
    folder: Folder
    max_iterations: int
    test: tuple[Tensor, Tensor] | None = None

    def coordinate(
        self,
        address: Address,
        endpoint: Endpoint = Endpoint(),
        *,
        met: Callable[[Address], object] = lambda address: None,
        told: Sink = lambda event: None,
        stop_asked: Callable[[], bool] = lambda: False,
    ) -> Outcome:
        """Waits for devices, trains, and writes model and summary.

        Args:
          address: of the coordinator.
          endpoint: its connections to devices.
          met: called with the address at which devices are awaited.
          told: hears of each event.
          stop_asked: whether to stop after the iterate under way.

        Raises:
          ConfigError: the address cannot be used, or another run is in the folder.
          DataError: the samples of the devices cannot be learned from.
          RunLost: too few devices have come, or are left.
        """
        build("code", self.settings.code, CODES)
        endpoint.read_keys()
        settings: dict[str, Json] = {
            **asdict(self.settings),
            **asdict(self.learner),
            "max_iterations": self.max_iterations,
        }
        with (
            self.folder.begun(settings) as name,
            closing(Record(self.folder.path, told)) as record,
            coordinating(address, name, endpoint) as (runtime, at),
        ):
            met(at)
            coordinator = Coordinator(runtime, self.settings, run=name, record=record)
            model, trained = runtime.drive(self._train(coordinator, record, stop_asked))
            model.save(self.folder.model)
            summary = self._summary(coordinator, model, trained, runtime)
            summary["duration_s"] = coordinator.members.elapsed_s
        summary.update(of_encoding(self.folder.told()))
        write_json(self.folder.summary, summary)
        return Outcome(model, summary)

    async def _train(
        self, coordinator: Coordinator, record: Record, stop_asked: Callable[[], bool]
    ) -> tuple[LinearModel, Trained]:
        try:
            await coordinator.gather()
            classes = self._classes(coordinator)
            if self.test is not None and self.test[0].shape[1] != coordinator.features:
                raise DataError(
                    f"the test samples have {self.test[0].shape[1]} features, and those of the devices "
                    f"{coordinator.features}"
                )
        except BadInput as error:
            await coordinator.end(str(error))
            raise
        count, learner = classes.count, self.learner
        objective = learner.objective(count)
        solver = learner.minimiser(count)
        trained = await train(
            coordinator,
            objective,
            solver,
            lambda labels: learner.targets(classes.codes(labels), count),
            max_iterations=self.max_iterations,
            record=record,
            stop_asked=stop_asked,
        )
        weights = trained.iterate.weights
        intercepts = objective.intercept_scaling * weights[coordinator.features :].sum(dim=0)
        return LinearModel(weights[: coordinator.features].clone(), intercepts, classes), trained

    def _classes(self, coordinator: Coordinator) -> Classes:
        labels = torch.cat([partition.labels for partition in coordinator.registry.partitions])
        classes = self.folder.keep_classes(Classes.of(labels, self.learner.positive))
        coordinator.members.check_labels = classes.strange
        return classes

    def _summary(
        self, coordinator: Coordinator, model: LinearModel, trained: Trained, runtime: WallRuntime
    ) -> dict[str, Json]:
        iterate, counters = trained.iterate, coordinator.counters
        sent: dict[str, Json] = {kind: sum(to) for kind, to in runtime.comm.sent.to_json().items()}
        return {
            "objective": iterate.objective,
            "gap": iterate.gap,
            "iterations": iterate.iterations,
            "converged": iterate.converged,
            "interrupted": trained.interrupted,
            "test_accuracy": None if self.test is None else model.accuracy(*self.test),
            "partitions": list(trained.partitions),
            "samples": coordinator.samples,
            "features": coordinator.features,
            "classes": list(model.classes.labels),
            "positive": model.classes.positive,
            "rounds": counters.rounds,
            "late_answers": counters.late,
            "refused": counters.refused,
            "silences": coordinator.members.silences,
            "bytes_sent": sent,
        }


def of_encoding(events: Iterable[Event]) -> dict[str, Json]:
    """Counts the bytes that devices have given each other for blocks, and the devices that came and went.

    ``mds_encoding_nbytes`` are the bytes under a code whose blocks need all partitions.
    """
    counted: Counter[str] = Counter()
    for event in events:
        counted[str(event["event"])] += 1
        if event["event"] == "built":
            values: dict[str, Any] = event
            counted[f"{values['kind']} nbytes"] += values["nbytes"]
            counted["mds_nbytes"] += values["mds_nbytes"]
    return {
        "encoding_nbytes": {kind: counted[f"{kind} nbytes"] for kind in ("rows", "columns")},
        "mds_encoding_nbytes": counted["mds_nbytes"],
        "devices_came": counted["came"],
        "devices_gone": counted["gone"],
        "partitions_lost": counted["lost"],
    }
