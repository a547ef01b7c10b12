"""Metadata of training steps, summed over the ranks with their gradients so that all decide equally."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from farflung.comm import Purpose
from farflung.engine.averaging import sum_over_ranks
from farflung.engine.units import UnitState
from farflung.types import Runtime, State

__all__ = ["MetadataLayout", "PendingMetadata", "ReducedMetadata", "StepMetadata"]

_FIXED_FIELDS = ("loss", "nonfinite", "ranks", "squares of ranks", "answers")
"""First numbers of every metadata vector."""
_DIGIT_BASE = 1 << 16
"""Base of ``answers``, in which each boolean is summed in one digit; larger than any number of ranks."""


@dataclass(frozen=True, slots=True)
class StepMetadata:
    """Metadata of one step of one rank.

    Args:
      loss: Weighted mean loss of the rank.
      weight: Weight of the rank in the mean.
      samples: Number of samples in the rank's batch.
      is_exhausted: True if the rank has run out of data and only takes part in exchanges.
    """

    loss: float
    weight: float
    samples: int = 0
    is_exhausted: bool = False

    @property
    def is_finite(self) -> bool:
        """Returns True if the loss is finite."""
        return math.isfinite(self.loss)


@dataclass(frozen=True, slots=True)
class ReducedMetadata:
    """Metadata summed over all ranks.

    Args:
      loss: Sum of losses times weights.
      num_nonfinite: Number of losses that are not finite.
      nonfinite_ranks: Ranks of one or two such losses; empty for more.
      has_unused_changes: True if the parameters used by a rank have changed; see
        :class:`farflung.engine.unused.UnusedParameters`.
      num_exhausted: Number of ranks that have run out of data.
      sums: Sums of the numbers added by extensions, by name.
    """

    loss: float
    num_nonfinite: int
    nonfinite_ranks: list[int]
    has_unused_changes: bool
    num_exhausted: int
    sums: Mapping[str, float]


class MetadataLayout:
    """Layout of the float64 vector that is summed with every exchange.

    Args:
      names: Names of the numbers that extensions add, equal on all ranks.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = tuple(names)

    @property
    def numel(self) -> int:
        return len(_FIXED_FIELDS) + len(self._names)

    def pack(
        self,
        steps: Sequence[StepMetadata],
        rank: int,
        numbers: Mapping[str, float],
        *,
        has_unused_changes: bool = False,
    ) -> tuple[float, Tensor]:
        """Returns a rank's weight in an exchange, the mean over its steps, and its metadata as a vector.

        A step whose loss is not finite has weight 0.

        Args:
          steps: Steps of the unit since its last exchange.
          rank: Rank of this replica.
          numbers: Numbers of extensions; 0 if a name is missing.
          has_unused_changes: True if the parameters used by the rank have changed.

        Raises:
          ValueError: a number has no place.
        """
        weight, loss, nonfinite, is_exhausted = 0.0, 0.0, 0, True
        for step in steps:
            is_exhausted &= step.is_exhausted
            if step.is_finite:
                weight += step.weight
                loss += step.loss * step.weight
            else:
                nonfinite += 1
        count = len(steps)
        answers = has_unused_changes + _DIGIT_BASE * is_exhausted
        values = [
            loss / count, nonfinite, nonfinite * rank, nonfinite * rank**2, answers, *[0.0] * len(self._names)
        ]  # fmt: skip
        for name, value in numbers.items():
            values[len(_FIXED_FIELDS) + self._names.index(name)] += value
        return weight / count, torch.tensor(values, dtype=torch.float64)

    def unpack(self, summed: Tensor) -> ReducedMetadata:
        """Unpacks the sum of all ranks' vectors."""
        loss, nonfinite, ranks, squares, answers, *values = summed.tolist()
        num_exhausted, unused_changed = divmod(int(answers), _DIGIT_BASE)
        return ReducedMetadata(
            loss,
            int(nonfinite),
            _solve_ranks(int(nonfinite), ranks, squares),
            bool(unused_changed),
            num_exhausted,
            dict(zip(self._names, values, strict=True)),
        )


class PendingMetadata:
    """Metadata not sent in any exchange yet: steps by unit, and numbers by name.

    Args:
      units: Units of the model.
      rank: Rank of this replica.
    """

    def __init__(self, units: Collection[UnitState], rank: int) -> None:
        self._units, self._rank = units, rank
        self._names: list[str] = []
        self.layout = MetadataLayout()
        self._numbers: dict[str, float] = {}

    @property
    def is_empty(self) -> bool:
        """Returns True if no unit has a step that was not sent."""
        return not any(unit.steps for unit in self._units)

    def extend(self, names: Iterable[str]) -> None:
        """Adds names of numbers, before the first step."""
        self._names += names
        self.layout = MetadataLayout(self._names)

    def add(self, step: StepMetadata, numbers: Mapping[str, float]) -> None:
        """Adds a step, and the numbers of extensions."""
        for unit in self._units:
            unit.steps.append(step)
        for name, value in numbers.items():
            self._numbers[name] = self._numbers.get(name, 0.0) + value

    def replace_step_metadata(self, step: StepMetadata, replacement: StepMetadata) -> None:
        """Replaces the metadata of the last step in every unit that has not sent it yet."""
        for unit in self._units:
            if unit.steps and unit.steps[-1] is step:
                unit.steps[-1] = replacement

    def pack(
        self, unit: UnitState, *, is_first_of_step: bool, has_unused_changes: bool
    ) -> tuple[float, Tensor]:
        """Packs and removes pending metadata; returns the rank's weight in an exchange, and the vector.

        Args:
          unit: Unit of the exchange.
          is_first_of_step: True if the exchange carries the numbers.
          has_unused_changes: True if the parameters used by the rank have changed.
        """
        numbers: Mapping[str, float] = {}
        if is_first_of_step:
            numbers, self._numbers = self._numbers, {}
        steps, unit.steps = unit.steps, []
        return self.layout.pack(steps, self._rank, numbers, has_unused_changes=has_unused_changes)

    def clear(self, *, numbers: bool = False) -> None:
        """Clears the steps, and optionally the numbers."""
        for unit in self._units:
            unit.steps.clear()
        if numbers:
            self._numbers.clear()

    async def sum_remaining(self, runtime: Runtime, number: int) -> Mapping[str, float]:
        """Sums the numbers not sent in any exchange; their names are equal on all ranks."""
        if not self._numbers:
            return {}
        vector = torch.tensor(list(self._numbers.values()), dtype=torch.float64)
        _, summed = await sum_over_ranks(runtime, torch.empty(0), vector, number, purpose=Purpose.REMAINDER)
        names, self._numbers = list(self._numbers), {}
        return dict(zip(names, summed.tolist(), strict=True))

    def state_dict(self) -> State:
        """Returns the state that a rank resumes from."""
        return {
            "steps": {
                str(unit.number): [[step.loss, step.weight] for step in unit.steps] for unit in self._units
            },
            "numbers": dict(self._numbers),
        }

    def load_state_dict(self, state: State) -> None:
        """Restores :meth:`state_dict`."""
        for unit in self._units:
            unit.steps = [StepMetadata(*step) for step in state["steps"].get(str(unit.number), ())]
        self._numbers = dict(state["numbers"])


def _solve_ranks(count: int, total: float, squares: float) -> list[int]:
    """Returns one or two ranks computed from their sum and the sum of their squares."""
    if count == 1:
        return [int(total)]
    if count == 2:
        spread = (2 * squares - total**2) ** 0.5
        return sorted({round((total - spread) / 2), round((total + spread) / 2)})
    return []
