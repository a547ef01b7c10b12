"""Measurement of a workload on this machine, layer by layer."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from farflung.calibration.coding import CodingTask, measure_coding, select_specs
from farflung.calibration.probes import measure_message_cpu_costs, measure_peak_nbytes, measure_step_s
from farflung.calibration.processor_load import ProcessorLoad, run_neighbour_processes
from farflung.config import Training
from farflung.devices import (
    CodingRates,
    DeviceProfile,
    LayerProfile,
    estimate_training_nbytes,
    measure_saved_nbytes,
)
from farflung.engine import GradientBuckets
from farflung.errors import ConfigError
from farflung.seeding import RandomState, create_generator, derive_seed
from farflung.types import Batch, Dataset, TensorSpec, Workload

__all__ = ["Calibration", "Spread", "calibrate", "measure_step_nbytes"]

WARM_UP = 3
"""Number of first steps that are not counted, since they allocate."""
STEPS_PER_ROUND = 3
"""Number of timed steps for each timed exchange and each round of messages."""


class Spread(NamedTuple):
    """Quartiles of a duration over all rounds."""

    low: float
    median: float
    high: float

    @staticmethod
    def from_values(values: Sequence[float]) -> Spread:
        """Computes the quartiles of at least two values."""
        return Spread(*statistics.quantiles(values, n=4, method="inclusive"))


@dataclass(frozen=True, slots=True)
class Calibration:
    """Result of a calibration.

    Args:
      device: Profile with medians.
      names: Names of its layers.
      batch_size: Number of samples in each pass.
      rounds: Number of each pass.
      forward_s: Seconds of the forward pass per sample.
      backward_s: Seconds of the backward pass per sample.
      optimizer_s: Seconds of the optimizer per step.
      predicted_nbytes: Memory of a step by :func:`farflung.devices.estimate_training_nbytes`.
      measured_nbytes: Peak memory of tensors in such a step.
    """

    device: DeviceProfile
    names: tuple[str, ...]
    batch_size: int
    rounds: int
    forward_s: Spread
    backward_s: Spread
    optimizer_s: Spread
    predicted_nbytes: int
    measured_nbytes: int


def calibrate(
    work: Workload,
    training: Training,
    *,
    rounds: int = 30,
    name: str = "this machine",
    coding: Sequence[CodingTask] = (),
    load: ProcessorLoad | None = None,
    clock: Callable[[], float] | None = None,
    on_begin: Callable[[str], None] = lambda name: None,
) -> Calibration:
    """Times the passes of a replica's step, and the arithmetic and the messages of its exchanges.

    Whole passes are timed first, then once more with a clock after each layer. The layers' shares of the second
    are scaled to the medians of the first, so that the clock costs nothing. A layer is a module with its own
    parameters; work between two layers counts to the later one in its pass. The loss counts to the last layer.
    The step's own time is that of a replica that trains alone beyond its passes, as for loading samples.

    Args:
      work: Workload to measure.
      training: Batch size and optimizer.
      rounds: Number of each pass; a third as many exchanges and messages are measured.
      name: Name of the device.
      coding: Codecs and reducers to measure; if empty, messages are not measured either.
      load: Sharing of the machine, with as many threads as torch has; by default one replica of one thread.
      clock: Function that returns seconds; by default that of ``load``.
      on_begin: Callback that gets the name of the next measurement.

    Raises:
      ConfigError: The rounds are fewer than two, or the batch is larger than the training set.
    """
    if rounds < 2:
        raise ConfigError(f"--rounds {rounds}: must be 2 or more")
    load = load or ProcessorLoad()
    clock = clock or load.read_clock
    with RandomState.preserve_globals():
        RandomState(derive_seed(training.seed, "replica", 0)).install()
        train, _ = work.load_datasets()
        if training.batch_size > len(train):
            raise ConfigError(
                f"--batch-size {training.batch_size}: {work.name} has {len(train)} training samples"
            )
        step = _Step(work, train, training, clock)
        with run_neighbour_processes(load.replicas - 1, partial(_repeat_measurements, step, rounds, coding)):
            on_begin("forward and backward")
            for _ in range(WARM_UP):
                step.run()
            steps = [step.run() for _ in range(rounds)]
            with step.watch_layers():
                watched_steps = [step.run() for _ in range(rounds)]
            step_s = measure_step_s(work, training, warm_up=WARM_UP, rounds=rounds, clock=clock)
            rates = _measure_coding_rates(
                coding, step.specs, max(1, rounds // STEPS_PER_ROUND), clock, load, on_begin
            )
        predicted, layer_sizes = step.estimate_nbytes(), step.layers
        del step
        measured = measure_peak_nbytes(lambda: _run_two_steps(work, train, training, clock))
    size = training.batch_size
    forward = Spread.from_values([times.forward_s / size for times in steps])
    backward = Spread.from_values([times.backward_s / size for times in steps])
    optimizer = Spread.from_values([times.optimizer_s for times in steps])
    shares = zip(
        _scale_medians([times.layers_forward_s for times in watched_steps], forward.median),
        _scale_medians([times.layers_backward_s for times in watched_steps], backward.median),
        strict=True,
    )
    layers = tuple(
        LayerProfile(numel, fore, back) for (_, numel), (fore, back) in zip(layer_sizes, shares, strict=True)
    )
    passes_s = size * (forward.median + backward.median) + optimizer.median
    device = DeviceProfile(
        name,
        optimizer_s=optimizer.median,
        layers=layers,
        coding=rates,
        cores=load.cores,
        step_s=max(0.0, step_s - passes_s),
    )
    return Calibration(
        device,
        tuple(name for name, _ in layer_sizes),
        size,
        rounds,
        forward,
        backward,
        optimizer,
        predicted,
        measured,
    )


def _repeat_measurements(step: _Step, rounds: int, coding: Sequence[CodingTask]) -> Iterator[None]:
    """Repeats all measured work forever; yields after each piece."""
    while True:
        for _ in range(rounds):
            step.run()
            yield
        for task in coding:
            measure_coding([task], step.specs, rounds=1)
            yield


def _measure_coding_rates(
    coding: Sequence[CodingTask],
    specs: Sequence[TensorSpec],
    rounds: int,
    clock: Callable[[], float],
    load: ProcessorLoad,
    on_begin: Callable[[str], None],
) -> CodingRates | None:
    """Measures the times of coding these buckets, and of messages; returns None if ``coding`` is empty."""
    if not coding:
        return None
    points = measure_coding(coding, select_specs(specs), rounds=rounds, clock=clock, on_begin=on_begin)
    on_begin("messages")
    return CodingRates(points, *measure_message_cpu_costs(rounds=rounds, slowdown=load.slowdown))


def _scale_medians(rounds: Sequence[Sequence[float]], total_s: float) -> list[float]:
    """Returns the median of each layer, scaled so that their sum is ``total_s``."""
    medians = [statistics.median(times) for times in zip(*rounds, strict=True)]
    total = sum(medians)
    return [total_s * median / total if total else total_s / len(medians) for median in medians]


class _StepTimes(NamedTuple):
    """Seconds of one step's passes and, if watched, of each layer in them."""

    forward_s: float
    backward_s: float
    optimizer_s: float
    layers_forward_s: list[float]
    layers_backward_s: list[float]


class _Step:
    """Passes of a replica's step on one batch."""

    def __init__(
        self, work: Workload, train: Dataset, training: Training, clock: Callable[[], float]
    ) -> None:
        self._work, self._training, self._clock = work, training, clock
        self._batch: Batch = train.take(torch.arange(training.batch_size), train=True)
        self._model = work.build_model(create_generator(training.seed, "model"))
        self._optimizer = training.make_optimizer(self._model.parameters())
        self._buckets = GradientBuckets(self._model.named_parameters())
        self.layers: list[tuple[str, int]] = []
        """Names and numbers of parameters of the watched layers."""
        self._forward_ends_s: list[float] = []
        self._backward_ends_s: list[float] = []

    def run(self) -> _StepTimes:
        clock = self._clock
        self._model.train()
        begin = clock()
        loss = self._compute_loss()
        forward = clock()
        self._buckets.run_backward(loss, lambda bucket: None)
        backward = clock()
        self._optimizer.step()
        end = clock()
        self._buckets.clear()
        fores = _split_durations(self._forward_ends_s, begin, forward)
        backs = _split_durations(self._backward_ends_s[::-1], forward, backward)
        return _StepTimes(forward - begin, backward - forward, end - backward, fores, backs[::-1])

    def _compute_loss(self) -> Tensor:
        return self._work.compute_losses(self._model, self._batch).mean()

    @contextmanager
    def watch_layers(self) -> Iterator[None]:
        """Appends all layers to ``layers``, and records the time at which each ends, inside the block."""
        hooks, ids = [], set[int]()

        def stamp(times: list[float], index: int) -> None:
            times[index] = self._clock()

        for name, module in self._model.named_modules():
            params = [p for p in module.parameters(recurse=False) if p.requires_grad and id(p) not in ids]
            ids.update(map(id, params))  # tied parameters count once
            if not params:
                continue
            index = len(self.layers)
            self.layers.append((name or "model", sum(parameter.numel() for parameter in params)))
            self._forward_ends_s.append(0.0)
            self._backward_ends_s.append(0.0)
            hooks.append(
                module.register_forward_hook(lambda *_, index=index: stamp(self._forward_ends_s, index))
            )
            hooks += [
                parameter.register_post_accumulate_grad_hook(
                    lambda _, index=index: stamp(self._backward_ends_s, index)
                )
                for parameter in params
            ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @property
    def specs(self) -> list[TensorSpec]:
        return [bucket.spec for bucket in self._buckets.buckets]

    def estimate_nbytes(self) -> int:
        """Estimates the peak bytes of a step from parameters, batch and the tensors that a forward pass saves."""
        training = self._training
        sgd = isinstance(self._optimizer, torch.optim.SGD)
        kind = "momentum" if sgd and training.momentum else type(self._optimizer).__name__.lower()
        parameters = [p for p in self._model.parameters() if p.requires_grad]
        inputs = [*self._model.parameters(), *self._model.buffers(), self._batch.inputs, self._batch.targets]
        sample = (self._batch.inputs.nbytes + self._batch.targets.nbytes) / training.batch_size
        return estimate_training_nbytes(
            sum(p.nbytes for p in parameters),
            training.batch_size,
            optimizer=kind,
            sample_nbytes=sample,
            activations_nbytes=measure_saved_nbytes(self._compute_loss, inputs) / training.batch_size,
        )


def measure_step_nbytes(work: Workload, training: Training) -> int:
    """Measures the peak bytes of the tensors of a replica that trains alone, by two of its steps."""
    with RandomState.preserve_globals():
        RandomState(derive_seed(training.seed, "replica", 0)).install()
        train, _ = work.load_datasets()
        return measure_peak_nbytes(lambda: _run_two_steps(work, train, training, time.perf_counter))


def _run_two_steps(work: Workload, train: Dataset, training: Training, clock: Callable[[], float]) -> None:
    """Runs two steps of a new model; only in the second does the optimizer's state exist from the beginning."""
    step = _Step(work, train, training, clock)
    step.run()
    step.run()


def _split_durations(ends: Sequence[float], begin: float, end: float) -> list[float]:
    """Splits a duration at the times when layers ended; the last layer gets the remainder."""
    durations: list[float] = []
    previous = begin
    for time_s in ends:
        finish = min(max(time_s, previous), end)
        durations.append(finish - previous)
        previous = finish
    if durations:
        durations[-1] += end - previous
    return durations
