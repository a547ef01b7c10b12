"""A coordinator's run from its first device to the trained model, in a folder."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from farflung.coded.codes import CODES
from farflung.coded.coordinator import Coordinator, PartitionsChanged, Settings
from farflung.coded.device import Device
from farflung.coded.linear_model import (
    LOSSES,
    Classes,
    LinearModel,
    Logistic,
    Multinomial,
    Objective,
    Problem,
)
from farflung.coded.meeting import Address, start_coordinator
from farflung.coded.record import Folder, Record
from farflung.coded.solvers import SOLVERS, Iterate, OneVsRest, Solver
from farflung.comm import Endpoint
from farflung.errors import BadInput, CheckpointError, ConfigError, DataError, UnknownName
from farflung.files import write_json
from farflung.sim import VirtualRuntime, VirtualWorld
from farflung.spec import build
from farflung.tasks import Pending
from farflung.telemetry import Event, Sink
from farflung.types import Json, State

__all__ = ["Learner", "TrainingResult", "run_coordinator", "simulate", "train"]

T = TypeVar("T")

_MODELS = ("logistic", "svc")


@dataclass(frozen=True, slots=True)
class Learner:
    """Settings of a linear classifier with an L2 penalty.

    Args:
      model: Model: ``"logistic"`` regression, multinomial for more than two classes; or ``"svc"``, a support
        vector machine, one-vs-rest for more than two classes.
      loss: Loss of the svc, ``"squared_hinge"`` when not given, or ``"hinge"``.
      C: Weight of the losses, above 0: a larger weight means a weaker penalty.
      solver: Solver as text, such as ``gd(learning_rate=0.01)``; ``lbfgs`` when not given. See
        :data:`farflung.coded.SOLVERS`.
      tolerance: Gap at which the solver has converged: the bound of the objective above its minimum, relative
        to it; 1e-10 when not given.
      positive: Label of one class against all others; all classes are distinguished when not given.

    Raises:
      ConfigError: a value is out of its range.
    """

    model: str = "logistic"
    loss: str | None = None
    C: float = 1.0
    solver: str | None = None
    tolerance: float | None = None
    positive: float | None = None

    def __post_init__(self) -> None:
        if self.model not in _MODELS:
            raise UnknownName("model", self.model, _MODELS)
        if self.loss is not None and self.model == "logistic":
            raise ConfigError(f"loss = {self.loss!r}: it is the svc's; logistic regression has its own")
        if self.loss is not None and self.loss not in LOSSES:
            raise UnknownName("loss", self.loss, LOSSES)
        self.build_objective(2)
        self.build_solver(2)

    def build_objective(self, classes: int) -> Objective:
        """Builds the objective for a number of classes."""
        if self.model == "svc":
            return LOSSES[self.loss or "squared_hinge"](C=self.C)
        return Logistic(C=self.C) if classes == 2 else Multinomial(C=self.C, classes=classes)

    def build_targets(self, codes: Tensor, classes: int) -> Tensor:
        """Builds the objective's targets from the class number of each sample."""
        if self.model == "logistic" and classes > 2:
            return codes
        positive_codes = torch.arange(classes) if classes > 2 else torch.tensor([1])
        return torch.where(codes[:, None] == positive_codes, 1.0, -1.0).to(torch.float64)

    def build_solver(self, classes: int) -> Solver[Any]:
        """Builds the solver for a number of classes."""
        solver: Any = build("solver", self.solver or "lbfgs", SOLVERS)
        if self.tolerance is not None:
            solver = dataclasses.replace(solver, tol=self.tolerance)
        return OneVsRest(solver) if self.model == "svc" and classes > 2 else solver


@dataclass(frozen=True, slots=True, eq=False)
class TrainingResult:
    """Result of training.

    Args:
      iterate: Last iterate of the solver.
      partitions: Names of the partitions that were trained on, in the order of their samples.
      was_interrupted: True if training was stopped before its end.
    """

    iterate: Iterate
    partitions: tuple[str, ...]
    was_interrupted: bool


async def train(
    coordinator: Coordinator,
    objective: Objective,
    solver: Solver[Iterate],
    targets: Callable[[Tensor], Tensor],
    *,
    max_iterations: int,
    sample_weights: Callable[[Tensor], Tensor] | None = None,
    start: Tensor | None = None,
    record: Record | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> TrainingResult:
    """Gathers the devices and trains until the solver has converged, or reaches its limit of iterations.

    If partitions are added or lost for good, the objective changes, and the solver restarts at its current
    weights.

    Args:
      coordinator: Coordinator of the devices.
      objective: Objective to minimise.
      solver: Solver that minimises it.
      targets: Function from labels to the objective's targets.
      max_iterations: Maximum number of iterations in all.
      sample_weights: Function from labels to the weights of samples; by default all are 1.
      start: Initial weights of the model; zeros by default.
      record: Store of iterates; training resumes from the last one in it.
      should_stop: Returns True to stop after the current iterate.

    Raises:
      BadSamples: a product of the samples is not finite.
      CheckpointError: the record has the state of another solver.
      RunLost: see :meth:`Coordinator.gather` and :meth:`Coordinator.multiply`.
    """
    await coordinator.gather()
    saved = None if record is None else record.load_state()
    state = None if saved is None else _restore_state(solver, saved["solver"])
    trained_names = None if saved is None else tuple(saved["partitions"])
    num_spent = 0 if saved is None else int(saved["num_spent"])
    while True:
        active = coordinator.activate_partitions()
        names = tuple(partition.name for partition in active)
        labels = torch.cat([partition.labels for partition in active])
        factors = None if sample_weights is None else sample_weights(labels)
        problem = Problem(coordinator, objective, targets(labels), factors)
        try:
            if state is None or names != trained_names:
                fresh = await solver.init(problem, start if state is None else state.weights)
                num_spent += 0 if state is None else state.iterations
                state, trained_names = fresh, names
            while not (state.is_over or num_spent + state.iterations >= max_iterations or should_stop()):
                state = await solver.step(problem, state)
                coordinator.record_event(
                    "iterate", iterations=state.iterations, objective=state.objective, gap=state.gap
                )
                if record is not None:
                    record.save_state(
                        {"solver": state.to_tree(), "partitions": list(names), "num_spent": num_spent}
                    )
                if coordinator.has_new_partitions:
                    break
        except PartitionsChanged:
            continue
        if not coordinator.has_new_partitions:
            await coordinator.end()
            return TrainingResult(state, names, should_stop() and not state.is_over)


def _restore_state(solver: Solver[Iterate], tree: State) -> Iterate:
    try:
        return solver.restore_state(tree)
    except KeyError as error:
        raise CheckpointError(f"the run has the state of another solver: {error} is missing in it") from None


def simulate(
    world: VirtualWorld,
    settings: Settings,
    create_device: Callable[[VirtualRuntime], Device],
    body: Callable[[Coordinator], Awaitable[T]],
    record: Record | None = None,
) -> T:
    """Runs a coordinator and devices in virtual time, and returns the coordinator's result.

    Args:
      world: World of the coordinator, rank 0, and the devices; without a whole view.
      settings: Settings of the run.
      create_device: Creates a device, also for a rank that returns.
      body: Coroutine to run once the devices have been gathered; they are released after it.
      record: Store of events and of the registry.
    """
    results: list[T] = []

    async def run_rank0(runtime: VirtualRuntime) -> None:
        coordinator = Coordinator(runtime, settings, record=record)
        await coordinator.gather()
        results.append(await body(coordinator))
        await coordinator.end()

    async def run_rank(runtime: VirtualRuntime) -> None:
        await create_device(runtime).run()

    rank0, *devices = world.runtimes
    bodies: list[Coroutine[Pending[Any], None, None]] = [run_rank0(rank0), *map(run_rank, devices)]
    world.run(bodies, build_rejoined=run_rank)
    return results[0]


def run_coordinator(
    settings: Settings,
    learner: Learner,
    folder: Folder,
    address: Address,
    endpoint: Endpoint = Endpoint(),
    *,
    max_iterations: int,
    test: tuple[Tensor, Tensor] | None = None,
    on_ready: Callable[[Address], object] = lambda address: None,
    sink: Sink = lambda event: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> dict[str, Json]:
    """Waits for devices, trains, and writes model and summary; returns the summary.

    Args:
      settings: Settings of the devices and the code.
      learner: Settings of the model.
      folder: Folder of the run; a stopped run in it is resumed.
      address: Address of the coordinator.
      endpoint: Settings of its connections to devices.
      max_iterations: Maximum number of iterations in all.
      test: Features and labels for a test of the final model.
      on_ready: Function called with the address once devices can connect.
      sink: Function that receives each event.
      should_stop: Returns True to stop after the current iterate.

    Raises:
      ConfigError: the address cannot be used, or another run is in the folder.
      DataError: the samples of the devices cannot be learned from.
      RunLost: too few devices have joined, or are left.
    """
    build("code", settings.code, CODES)
    endpoint.read_keys()

    async def train_all(coordinator: Coordinator, record: Record) -> tuple[LinearModel, TrainingResult]:
        try:
            await coordinator.gather()
            labels = torch.cat([partition.labels for partition in coordinator.registry.partitions])
            classes = folder.resolve_classes(Classes.from_labels(labels, learner.positive))
            if mismatch := classes.explain_mismatch(labels):  # of a partition that is new in a resumed run
                raise DataError(mismatch)
            coordinator.check_labels, features = classes.explain_mismatch, coordinator.features
            if test is not None and test[0].shape[1] != features:
                raise DataError(
                    f"the test samples have {test[0].shape[1]} features, and those of the devices {features}"
                )
            objective = learner.build_objective(classes.count)
            trained = await train(
                coordinator,
                objective,
                learner.build_solver(classes.count),
                lambda labels: learner.build_targets(classes.encode(labels), classes.count),
                max_iterations=max_iterations,
                record=record,
                should_stop=should_stop,
            )
        except BadInput as error:
            await coordinator.end(str(error))
            raise
        weights = trained.iterate.weights
        intercepts = objective.intercept_scaling * weights[features:].sum(dim=0)
        return LinearModel(weights[:features].clone(), intercepts, classes), trained

    config = {**asdict(settings), **asdict(learner), "max_iterations": max_iterations}
    with (
        folder.start_run(config) as name,
        closing(Record(folder.path, sink)) as record,
        start_coordinator(address, name, endpoint) as (runtime, bound_address),
    ):
        on_ready(bound_address)
        coordinator = Coordinator(runtime, settings, run=name, record=record)
        model, training_result = runtime.drive(train_all(coordinator, record))
        model.save(folder.model_path)
        iterate, counters = training_result.iterate, coordinator.counters
        summary: dict[str, Json] = {
            "objective": iterate.objective,
            "gap": iterate.gap,
            "iterations": iterate.iterations,
            "converged": iterate.has_converged,
            "stalled": iterate.has_stalled,
            "interrupted": training_result.was_interrupted,
            "test_accuracy": None if test is None else model.compute_accuracy(*test),
            "partitions": list(training_result.partitions),
            "samples": coordinator.samples,
            "features": coordinator.features,
            "classes": list(model.classes.labels),
            "positive": model.classes.positive,
            "rounds": counters.rounds,
            "late_answers": counters.num_late,
            "refused": counters.num_refused,
            "silences": counters.silences,
            "bytes_sent": {kind: sum(to) for kind, to in runtime.comm.sent_bytes.to_json().items()},
            "duration_s": coordinator.elapsed_s,
        }
    summary.update(summarize_encoding(folder.load_events()))
    write_json(folder.summary_path, summary)
    return summary


def summarize_encoding(events: Iterable[Event]) -> dict[str, Json]:
    """Counts the bytes that devices sent each other for blocks, and the devices that joined and left.

    ``mds_encoding_nbytes`` is the number of bytes under a code whose blocks need all partitions.
    """
    counts: Counter[str] = Counter()
    for event in events:
        counts[str(event["event"])] += 1
        if event["event"] == "built":
            values: dict[str, Any] = event
            counts[f"{values['kind']} nbytes"] += values["nbytes"]
            counts["mds_nbytes"] += values["mds_nbytes"]
    return {
        "encoding_nbytes": {kind: counts[f"{kind} nbytes"] for kind in ("rows", "columns")},
        "mds_encoding_nbytes": counts["mds_nbytes"],
        "devices_came": counts["came"],
        "devices_gone": counts["gone"],
        "partitions_lost": counts["lost"],
    }
