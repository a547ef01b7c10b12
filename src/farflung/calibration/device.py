"""Measures a workload on this machine, layer by layer."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from farflung.calibration.coding import CodingTask, coding_points, tensors_like
from farflung.calibration.probes import message_costs, peak_nbytes, whole_steps_s
from farflung.calibration.sharing import Sharing, company
from farflung.config import Training
from farflung.devices import CodingRates, DeviceProfile, Layer, saved_nbytes, training_nbytes
from farflung.engine import GradientBuckets
from farflung.errors import ConfigError
from farflung.seeding import RandomState, derive, generator
from farflung.types import Batch, Dataset, TensorSpec, Workload

__all__ = ["Calibration", "Spread", "calibrate"]

WARM_UP = 3
"""Steps that are not counted: the first ones allocate."""
ROUNDS_EACH = 3
"""Steps that are timed for each exchange that is, and for each round of messages."""


class Spread(NamedTuple):
    """Quartiles of what the rounds took."""

    low: float
    median: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """Of two values or more."""
        return Spread(*statistics.quantiles(values, n=4, method="inclusive"))


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was measured.

    Args:
      device: medians, as a profile.
      names: of its layers.
      batch_size: samples in each pass.
      rounds: how many of each pass.
      forward_s: seconds per sample.
      backward_s: seconds per sample.
      optimizer_s: seconds per step.
      predicted_nbytes: the memory of a step, by :func:`farflung.devices.training_nbytes`.
      measured_nbytes: the most that tensors took at a time in such a step.
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
    sharing: Sharing | None = None,
    clock: Callable[[], float] | None = None,
    begins: Callable[[str], None] = lambda what: None,
) -> Calibration:
    """Times the passes of a replica's step, and the arithmetic and the messages of its exchanges.

    Passes are timed whole first, then once more with a look at the clock after each layer; the layers' shares of the
    second are laid over the medians of the first, so that looking costs nothing. A layer is a module with parameters
    of its own; what comes between two of them counts to the one after it in its pass. The loss counts to the last
    layer. What a replica that trains alone takes for a step beyond its passes is the step's own: loading samples,
    bookkeeping.

    Args:
      work: what to measure.
      training: batch size and optimizer.
      rounds: of each pass; of exchanges and messages there are a third as many.
      name: of the device.
      coding: the codecs and reducers to measure; none: neither these nor messages.
      sharing: of the machine, with as many threads as torch has now; one replica of one thread when not given.
      clock: in seconds; the sharing's when not given.
      begins: is told what is measured next.

    Raises:
      ConfigError: fewer than two rounds, or a batch larger than the training set.
    """
    if rounds < 2:
        raise ConfigError(f"--rounds {rounds}: must be 2 or more")
    sharing = sharing or Sharing()
    clock = clock or sharing.clock
    with RandomState.scope():
        RandomState(derive(training.seed, "replica", 0)).install()
        train, _ = work.datasets()
        if training.batch_size > len(train):
            raise ConfigError(
                f"--batch-size {training.batch_size}: {work.name} has {len(train)} training samples"
            )
        step = _Step(work, train, training, clock)
        with company(sharing.replicas - 1, partial(_forever, step, rounds, coding)):
            begins("forward and backward")
            for _ in range(WARM_UP):
                step.run()
            taken = [step.run() for _ in range(rounds)]
            with step.watched():
                watched = [step.run() for _ in range(rounds)]
            whole_s = whole_steps_s(work, training, warm_up=WARM_UP, rounds=rounds, clock=clock)
            rates = _rates(coding, step.specs, max(1, rounds // ROUNDS_EACH), clock, sharing, begins)
        predicted, layers_of = step.predicted_nbytes(), step.layers
        del step
        measured = peak_nbytes(lambda: _two_steps(work, train, training, clock))
    size = training.batch_size
    forward = Spread.of([one.forward_s / size for one in taken])
    backward = Spread.of([one.backward_s / size for one in taken])
    optimizer = Spread.of([one.optimizer_s for one in taken])
    shares = zip(
        _medians([one.layers_forward_s for one in watched], forward.median),
        _medians([one.layers_backward_s for one in watched], backward.median),
        strict=True,
    )
    layers = tuple(
        Layer(numel, fore, back) for (_, numel), (fore, back) in zip(layers_of, shares, strict=True)
    )
    passes_s = size * (forward.median + backward.median) + optimizer.median
    device = DeviceProfile(
        name,
        optimizer_s=optimizer.median,
        layers=layers,
        coding=rates,
        cores=sharing.cores,
        step_s=max(0.0, whole_s - passes_s),
    )
    return Calibration(
        device,
        tuple(name for name, _ in layers_of),
        size,
        rounds,
        forward,
        backward,
        optimizer,
        predicted,
        measured,
    )


def _forever(step: _Step, rounds: int, coding: Sequence[CodingTask]) -> Iterator[None]:
    """What is measured, over and over."""
    while True:
        for _ in range(rounds):
            step.run()
            yield
        for task in coding:
            coding_points([task], step.specs, rounds=1)
            yield


def _rates(
    coding: Sequence[CodingTask],
    specs: Sequence[TensorSpec],
    rounds: int,
    clock: Callable[[], float],
    sharing: Sharing,
    begins: Callable[[str], None],
) -> CodingRates | None:
    """What exchanges of these buckets take; ``None`` where nothing is to be measured."""
    if not coding:
        return None
    points = coding_points(coding, tensors_like(specs), rounds=rounds, clock=clock, begins=begins)
    begins("messages")
    return CodingRates(points, *message_costs(rounds=rounds, turns=sharing.turns))


def _medians(rounds: Sequence[Sequence[float]], whole: float) -> list[float]:
    """The median of each layer, all of them together as long as ``whole``."""
    medians = [statistics.median(times) for times in zip(*rounds, strict=True)]
    total = sum(medians)
    return [whole * one / total if total else whole / len(medians) for one in medians]


class _Taken(NamedTuple):
    """One step: seconds of its passes and, where it was watched, of each layer in them."""

    forward_s: float
    backward_s: float
    optimizer_s: float
    layers_forward_s: list[float]
    layers_backward_s: list[float]


class _Step:
    """The passes of a replica's step on one batch."""

    def __init__(
        self, work: Workload, train: Dataset, training: Training, clock: Callable[[], float]
    ) -> None:
        self._work, self._training, self._clock = work, training, clock
        self._batch: Batch = train.take(torch.arange(training.batch_size), train=True)
        self._model = work.model(generator(training.seed, "model"))
        self._optimizer = training.make_optimizer(self._model.parameters())
        self._buckets = GradientBuckets(self._model.named_parameters())
        self.layers: list[tuple[str, int]] = []
        """Names and numbers of parameters of the layers that are watched."""
        self._forward_at: list[float] = []
        self._backward_at: list[float] = []

    def run(self) -> _Taken:
        clock = self._clock
        self._model.train()
        begin = clock()
        loss = self._loss()
        forward = clock()
        self._buckets.backward(loss, lambda bucket: None)
        backward = clock()
        self._optimizer.step()
        end = clock()
        self._buckets.clear()
        fore = _between(self._forward_at, begin, forward)
        back = _between(self._backward_at[::-1], forward, backward)
        return _Taken(forward - begin, backward - forward, end - backward, fore, back[::-1])

    def _loss(self) -> Tensor:
        return self._work.loss(self._model, self._batch).mean()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within it, layers note when they were through."""
        hooks, seen = [], set[int]()

        def note(times: list[float], index: int) -> None:
            times[index] = self._clock()

        for name, module in self._model.named_modules():
            own = [p for p in module.parameters(recurse=False) if p.requires_grad and id(p) not in seen]
            seen.update(map(id, own))  # tied parameters count once
            if not own:
                continue
            index = len(self.layers)
            self.layers.append((name or "model", sum(parameter.numel() for parameter in own)))
            self._forward_at.append(0.0)
            self._backward_at.append(0.0)
            hooks.append(module.register_forward_hook(lambda *_, index=index: note(self._forward_at, index)))
            hooks += [
                parameter.register_post_accumulate_grad_hook(
                    lambda _, index=index: note(self._backward_at, index)
                )
                for parameter in own
            ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @property
    def specs(self) -> list[TensorSpec]:
        return [bucket.spec for bucket in self._buckets.buckets]

    def predicted_nbytes(self) -> int:
        """Of a step, by the formula."""
        training = self._training
        sgd = isinstance(self._optimizer, torch.optim.SGD)
        kind = "momentum" if sgd and training.momentum else type(self._optimizer).__name__.lower()
        parameters = [p for p in self._model.parameters() if p.requires_grad]
        besides = [*self._model.parameters(), *self._model.buffers(), self._batch.inputs, self._batch.targets]
        sample = (self._batch.inputs.nbytes + self._batch.targets.nbytes) / training.batch_size
        return training_nbytes(
            sum(p.nbytes for p in parameters),
            training.batch_size,
            optimizer=kind,
            sample_nbytes=sample,
            activations_nbytes=saved_nbytes(self._loss, besides) / training.batch_size,
        )


def _two_steps(work: Workload, train: Dataset, training: Training, clock: Callable[[], float]) -> None:
    """The second has the optimizer's state."""
    step = _Step(work, train, training, clock)
    step.run()
    step.run()


def _between(ends: Sequence[float], begin: float, end: float) -> list[float]:
    """How long each took that was through at these times, one after the other; the last takes what is left."""
    found: list[float] = []
    before = begin
    for at in ends:
        through = min(max(at, before), end)
        found.append(through - before)
        before = through
    if found:
        found[-1] += end - before
    return found
