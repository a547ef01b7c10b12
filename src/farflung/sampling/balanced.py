"""Batches as large as replicas are fast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from typing_extensions import override

from farflung.engine import Extension, StepResult, TrainingLoop
from farflung.files import deciding
from farflung.options import share_option, whole_option
from farflung.sampling.uniform import Uniform, part_of
from farflung.telemetry import Telemetry
from farflung.types import Draw, Json, PoolView, Runtime, State

__all__ = ["Balanced", "balanced_counts"]

SHARES = "shares"
"""Name of the decisions on how many samples each rank takes from the step after."""


class Balanced(Uniform):
    r"""Shuffled passes as :class:`Uniform` makes them, of which a fast replica takes more than a slow one.

    The :math:`RB` samples of a step are shared among its R replicas in proportion to the samples per second that each
    of them has computed since the last decision, so that all end their computation at about the same time (our choice;
    ScaDLES, eq. 1, does so for the rates of streams). The mean gradient is weighted by samples, so it is that of the
    same :math:`RB` samples. Every sample comes once per pass.

    What replicas have measured rides on their exchanges, so all share alike; each decision is recorded, and a replay
    repeats it.

    Args:
      seed: equal on all replicas.
      every: exchanges between two decisions.
      least_gain: by which share a step's computation has to become shorter for batches to change.

    Raises:
      ConfigError: an option out of its range.
    """

    is_balanced = True

    def __init__(self, seed: int, every: int = 16, least_gain: float = 0.1) -> None:
        super().__init__(seed)
        whole_option("balanced", "every", every, 1)
        share_option("balanced", "least_gain", least_gain)
        self._every, self._least_gain = every, least_gain
        self.counts: tuple[int, ...] = ()
        """The samples of each rank in a step; empty: as many on all."""
        self._rank = self._size = 0
        self._samples = self._exchanges = 0
        self._seconds = 0.0

    @override
    def extensions(self, loop: TrainingLoop) -> Sequence[Extension]:
        return (_BalancedBatches(loop.runtime, self, loop.training.batch_size, loop.telemetry),)

    def set_rank(self, rank: int, size: int) -> None:
        """Note which replica this is, of how many."""
        self._rank, self._size = rank, size

    @override
    def next(self, view: PoolView) -> Draw:
        if len(self.counts) != view.size or not isinstance(view.pool, int):
            return super().next(view)
        ranges = self._take(sum(self.counts))
        rank_ranges = part_of(ranges, sum(self.counts[: view.rank]), self.counts[view.rank])
        return Draw(torch.cat([self._at(positions.start, len(positions), view.pool) for positions in rank_ranges]))

    def record_compute(self, samples: int, seconds: float) -> None:
        """Note how long this replica took for a step's samples."""
        self._samples += samples
        self._seconds += seconds

    @override
    def report_metadata(self) -> Mapping[str, float]:
        """This replica's samples per second, and 0 in the places of the others; 0 too where it has measured nothing."""
        speed = self._samples / self._seconds if self._seconds else 0.0
        return {_name(rank): speed * (rank == self._rank) for rank in range(self._size)}

    def speeds_due(self, sums: Mapping[str, float]) -> list[float] | None:
        """Count an exchange, and return the speeds of all replicas where it is time to decide by them."""
        if not sums:
            return None
        self._exchanges += 1
        return None if self._exchanges % self._every else [sums[_name(rank)] for rank in range(self._size)]

    def choose_counts(self, speeds: Sequence[float], batch_size: int) -> list[int]:
        """Return the shares of a step that follow from measured speeds; the present ones where little is gained."""
        current = list(self.counts) or [batch_size] * self._size
        speeds = [float(f"{speed:.3g}") for speed in speeds]  # equal devices differ in the last places
        if not all(speed > 0 for speed in speeds):
            return current  # one has measured nothing yet
        new = balanced_counts(speeds, batch_size * self._size)
        current_s, new_s = (
            max(count / speed for count, speed in zip(counts, speeds, strict=True)) for counts in (current, new)
        )
        return new if new_s <= (1 - self._least_gain) * current_s else current

    def set_counts(self, counts: Sequence[int]) -> None:
        """Take a step's samples so from the next one on, and measure anew.

        Raises:
          ValueError: not a number above 0 for each rank.
        """
        if len(counts) != self._size or not all(type(count) is int and count > 0 for count in counts):
            raise ValueError(f"{counts!r} as the samples of {self._size} replicas")
        self.counts = tuple(counts)
        self._samples, self._seconds = 0, 0.0

    @override
    def state_dict(self) -> State:
        measured = {"samples": self._samples, "seconds": self._seconds, "exchanges": self._exchanges}
        return {**super().state_dict(), "counts": list(self.counts), **measured}

    @override
    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        counts = state.get("counts", [])
        self.counts = tuple(counts) if len(counts) in (0, self._size) else ()
        self._exchanges, self._samples = int(state.get("exchanges", 0)), int(state.get("samples", 0))
        self._seconds = float(state.get("seconds", 0.0))


class _BalancedBatches(Extension):
    """Shares out a step's samples by the speeds of the ranks.

    Args:
      runtime: the world.
      sampler: measures speeds, and draws the rank's share.
      batch_size: of all ranks on average.
      telemetry: gets an event for each choice.
    """

    def __init__(self, runtime: Runtime, sampler: Balanced, batch_size: int, telemetry: Telemetry) -> None:
        self._runtime, self._sampler = runtime, sampler
        self._batch_size, self._telemetry = batch_size, telemetry
        sampler.set_rank(runtime.comm.rank, runtime.comm.size)

    @override
    async def after_step(self, result: StepResult) -> None:
        self._sampler.record_compute(result.samples, result.compute_s)
        speeds = self._sampler.speeds_due(result.outcome.sums)
        if speeds is None:
            return
        counts, step = self._sampler.choose_counts(speeds, self._batch_size), result.step
        # Rank 0's choice is sent, since the log of a run that is replayed need not be on each machine.
        decision = await self._runtime.decide(SHARES, step, lambda: list[Json](counts))
        with deciding(SHARES, step):
            chosen: Any = decision.value
            if sum(chosen) != sum(counts):
                raise ValueError(f"{sum(chosen)} samples in a step of {sum(counts)}")
            self._sampler.set_counts(chosen)
            self._telemetry.emit("shares", t=self._runtime.now(), step=step, samples=list[Json](chosen))


def balanced_counts(speeds: Sequence[float], total: int) -> list[int]:
    """Share whole samples in proportion to speeds: 1 at least, the rest by largest remainders, of equal ones the first.

    >>> balanced_counts([3.0, 3.0, 1.0], 14)
    [6, 6, 2]
    """
    exact = [max(1.0, total * speed / sum(speeds)) for speed in speeds]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(counts)), key=lambda rank: (counts[rank] - exact[rank], rank))
    for rank in by_remainder[: max(0, total - sum(counts))]:
        counts[rank] += 1
    while sum(counts) > total:  # where slow ones were raised to 1
        counts[counts.index(max(counts))] -= 1
    return counts


def _name(rank: int) -> str:
    return f"samples per second of rank {rank}"
