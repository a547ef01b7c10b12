"""The schedule of backup workers: means of the replicas that come first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import override

from farflung.gradient_coding import gradient_code
from farflung.options import number_option, whole_option
from farflung.types import Decode, Merge, Part, Schedule, State, Transfer

__all__ = ["BackupWorkers"]


@dataclass(frozen=True, slots=True)
class BackupWorkers(Schedule):
    r"""Synchronous SGD without the s slowest replicas of each step, whichever they are.

    Each of n replicas computes the gradient of its own batch. From the first n - s that come, and those that come
    within a grace after them, rank 0 makes the mean, in a role beside its training, and sends it to all:

    .. math:: \bar g = \frac{1}{|A|} \sum_{i \in A} g_i

    A replica whose gradient was late takes the step's mean and goes on; steps whose means are there before it has begun
    them it does not compute. With ``late_steps`` its gradient is not lost: the next mean of those that follow within so
    many steps has it too, weighted like the others, so that slow replicas have a part in what is learned. It was
    computed at the parameters of its own step then.

    Which gradients a mean is made of is recorded, and so are the steps that a replica left out; a replay ends with the
    same bits. As with :class:`GradientCoding`, whose exchanges these are, a lost rank ends the run, and evaluations,
    checkpoints and the end of a run wait for all.

    Args:
      stragglers: s, below the number of replicas.
      grace_s: seconds for which the others are waited for once n - s have come.
      late_steps: for how many steps a gradient that was late is taken into a later mean; 0: it is dropped.

    Raises:
      ConfigError: an option out of its range.

    References: Chen, Monga, Bengio & Jozefowicz 2016 (backup workers); a minimum quorum with a grace window, and late
    contributions weighted by samples, as in Decoupled DiLoCo (2026).
    """

    stragglers: int = 1
    grace_s: float = 0.0
    late_steps: int = 0

    def __post_init__(self) -> None:
        whole_option("backup_workers", "stragglers", self.stragglers, 1)
        number_option("backup_workers", "grace_s", self.grace_s, 0.0)
        whole_option("backup_workers", "late_steps", self.late_steps, 0)

    @property
    @override
    def merges(self) -> tuple[Merge, ...]:
        """The mean of the first in place of the own gradient."""
        return (Decode(self.stragglers, "uncoded", self.grace_s, self.late_steps),)

    @override
    def check(self, size: int) -> None:
        """Whether any replica is left to wait for."""
        gradient_code("uncoded", size, self.stragglers, 0)

    @override
    def plan(self, state: State, parts: Sequence[Part], step: int) -> list[Transfer]:
        """One transfer for each bucket."""
        del state
        return [Transfer(part, step, *self.merges) for part in parts]
