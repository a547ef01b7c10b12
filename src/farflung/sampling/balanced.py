"""Batch sizes in proportion to the speed of replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from typing_extensions import override

from farflung.engine import Extension, StepResult, TrainingLoop
from farflung.files import wrap_decision_errors
from farflung.options import check_coefficient, check_integer
from farflung.sampling.uniform import UniformSampler, slice_ranges
from farflung.telemetry import Telemetry
from farflung.types import Draw, DrawContext, Json, Runtime, State

__all__ = ["BalancedSampler", "compute_balanced_counts"]

SHARES = "shares"
"""Name of the decisions on how many samples each rank takes from the next step on."""


class BalancedSampler(UniformSampler):
    r"""Sampler in shuffled passes like :class:`UniformSampler` that gives fast replicas more samples than slow ones.

    The :math:`RB` samples of a step are shared among its R replicas in proportion to the samples per second that each
    has computed since the last decision, so that all end their computation at about the same time (our choice;
    ScaDLES, eq. 1, does so for the rates of streams). The mean gradient is weighted by samples, so it is the mean
    over the same :math:`RB` samples. Every sample comes once per pass.

    Measurements are summed with the exchanges, so all replicas compute equal shares. Each decision is recorded, and
    a replay repeats it.

    Args:
      seed: Seed, equal on all replicas.
      every: Number of exchanges between two decisions.
      min_gain: Share by which a step's computation must become shorter for batches to change.

    Raises:
      ConfigError: An option is out of range.
    """

    is_balanced = True

    def __init__(self, seed: int, every: int = 16, min_gain: float = 0.1) -> None:
        super().__init__(seed)
        check_integer("balanced", "every", every, 1)
        check_coefficient("balanced", "min_gain", min_gain)
        self._period, self._min_gain = every, min_gain
        self.counts: tuple[int, ...] = ()
        """Samples of each rank in a step; empty if all ranks take equal batches."""
        self._rank = self._size = 0
        self._num_samples = self._num_exchanges = 0
        self._compute_s = 0.0

    @override
    def build_extensions(self, loop: TrainingLoop) -> Sequence[Extension]:
        return (_BalancedBatches(loop.runtime, self, loop.training.batch_size, loop.telemetry),)

    def set_rank(self, rank: int, size: int) -> None:
        """Sets rank and number of replicas."""
        self._rank, self._size = rank, size

    @override
    def draw(self, context: DrawContext) -> Draw:
        if len(self.counts) != context.size or not isinstance(context.pool, int):
            return super().draw(context)
        ranges = self._take_positions(sum(self.counts))
        rank_ranges = slice_ranges(ranges, sum(self.counts[: context.rank]), self.counts[context.rank])
        return Draw(
            torch.cat([self._list_samples(span.start, len(span), context.pool) for span in rank_ranges])
        )

    def record_compute(self, samples: int, seconds: float) -> None:
        """Records the computing time of a step's samples."""
        self._num_samples += samples
        self._compute_s += seconds

    @override
    def report_metadata(self) -> Mapping[str, float]:
        """Returns the samples per second of this replica, and 0 for others; 0 too without a measurement."""
        speed = self._num_samples / self._compute_s if self._compute_s else 0.0
        return {_format_name(rank): speed * (rank == self._rank) for rank in range(self._size)}

    def collect_speeds(self, sums: Mapping[str, float]) -> list[float] | None:
        """Counts an exchange; returns the speeds of all replicas if a decision is due."""
        if not sums:
            return None
        self._num_exchanges += 1
        return (
            None
            if self._num_exchanges % self._period
            else [sums[_format_name(rank)] for rank in range(self._size)]
        )

    def choose_counts(self, speeds: Sequence[float], batch_size: int) -> list[int]:
        """Chooses the samples of each rank by measured speeds; keeps the present ones if little is gained."""
        current = list(self.counts) or [batch_size] * self._size
        speeds = [float(f"{speed:.3g}") for speed in speeds]  # equal devices differ in the last places
        if not all(speed > 0 for speed in speeds):
            return current  # a replica has no measurement yet
        new = compute_balanced_counts(speeds, batch_size * self._size)
        current_s, new_s = (
            max(count / speed for count, speed in zip(counts, speeds, strict=True))
            for counts in (current, new)
        )
        return new if new_s <= (1 - self._min_gain) * current_s else current

    def set_counts(self, counts: Sequence[int]) -> None:
        """Sets the samples of each rank from the next step on, and restarts the measurement.

        Raises:
          ValueError: The counts are not one number above 0 for each rank.
        """
        if len(counts) != self._size or not all(type(count) is int and count > 0 for count in counts):
            raise ValueError(f"{counts!r} as the samples of {self._size} replicas")
        self.counts = tuple(counts)
        self._num_samples, self._compute_s = 0, 0.0

    @override
    def state_dict(self) -> State:
        measured = {
            "samples": self._num_samples,
            "seconds": self._compute_s,
            "exchanges": self._num_exchanges,
        }
        return {**super().state_dict(), "counts": list(self.counts), **measured}

    @override
    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        counts = state.get("counts", [])
        self.counts = tuple(counts) if len(counts) in (0, self._size) else ()
        self._num_exchanges, self._num_samples = int(state.get("exchanges", 0)), int(state.get("samples", 0))
        self._compute_s = float(state.get("seconds", 0.0))


class _BalancedBatches(Extension):
    """Extension that shares the samples of a step by the speeds of the ranks.

    Args:
      runtime: Runtime of the replica.
      sampler: Sampler that measures speeds and draws the rank's share.
      batch_size: Mean batch size over the ranks.
      telemetry: Receiver of an event for each choice.
    """

    def __init__(
        self, runtime: Runtime, sampler: BalancedSampler, batch_size: int, telemetry: Telemetry
    ) -> None:
        self._runtime, self._sampler = runtime, sampler
        self._batch_size, self._telemetry = batch_size, telemetry
        sampler.set_rank(runtime.comm.rank, runtime.comm.size)

    @override
    async def finish_step(self, result: StepResult) -> None:
        """Records the step's computing time; if a choice is due, awaits rank 0's samples per rank and sets them."""
        self._sampler.record_compute(result.samples, result.compute_s)
        speeds = self._sampler.collect_speeds(result.outcome.sums)
        if speeds is None:
            return
        counts, step = self._sampler.choose_counts(speeds, self._batch_size), result.step
        # Rank 0's choice is broadcast, since the log of a replayed run may exist on one machine only.
        decision = await self._runtime.decide(SHARES, step, lambda: list[Json](counts))
        with wrap_decision_errors(SHARES, step):
            chosen: Any = decision.value
            if sum(chosen) != sum(counts):
                raise ValueError(f"{sum(chosen)} samples in a step of {sum(counts)}")
            self._sampler.set_counts(chosen)
            self._telemetry.emit(
                "shares", t=self._runtime.read_clock(), step=step, samples=list[Json](chosen)
            )


def compute_balanced_counts(speeds: Sequence[float], total: int) -> list[int]:
    """Computes whole samples in proportion to speeds: at least 1, the rest by largest remainders, the first of equals.

    >>> compute_balanced_counts([3.0, 3.0, 1.0], 14)
    [6, 6, 2]
    """
    exact = [max(1.0, total * speed / sum(speeds)) for speed in speeds]
    counts = [int(share) for share in exact]
    ranks_by_remainder = sorted(range(len(counts)), key=lambda rank: (counts[rank] - exact[rank], rank))
    for rank in ranks_by_remainder[: max(0, total - sum(counts))]:
        counts[rank] += 1
    while sum(counts) > total:  # if slow ranks were raised to 1
        counts[counts.index(max(counts))] -= 1
    return counts


def _format_name(rank: int) -> str:
    return f"samples per second of rank {rank}"
