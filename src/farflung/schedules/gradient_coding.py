"""The schedule of gradient coding: exact means without the slowest replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import override

from farflung.errors import ConfigError
from farflung.gradient_coding import CONSTRUCTIONS, gradient_code
from farflung.options import whole_option
from farflung.types import Decode, Merge, Part, Schedule, State, Transfer

__all__ = ["GradientCoding"]


@dataclass(frozen=True, slots=True)
class GradientCoding(Schedule):
    r"""Synchronous SGD that waits for all replicas but the s slowest of each step, whichever they are.

    The step's batch is that of synchronous SGD, a share for each of n replicas. Replica i computes the gradients
    :math:`g_j` of s + 1 shares and sends one sum of them,

    .. math:: c_i = \sum_j B_{ij} g_j

    which is one backward pass, since a gradient is linear in the weights of losses. From the first n - s that come
    rank 0, in a role beside its training, makes the mean of all n shares, and sends it to all ranks:

    .. math:: \bar g = \frac{1}{n} \sum_{i \in A} a_i c_i, \qquad a^T B_A = 1^T

    So each step is one of synchronous SGD up to rounding, for any model, and costs s + 1 times the computation. A late
    sum is dropped. Its replica takes the step's mean and goes on; steps whose means are there before it has begun them
    it does not compute. The order of arrival is recorded for each bucket, and so are the steps that a replica left out;
    a replay ends with the same bits.

    What is tolerated is slowness, of any s replicas at a time, in computing or in sending. A lost rank ends the
    run as with other schedules. Evaluations and checkpoints on the wall clock, and the end of a run, wait for all.
    A late replica still needs every mean, so rank 0 keeps for it what it has not taken yet: a gradient for each step
    that it is behind.

    Each share is gone through by itself, under random numbers that are the share's: augmentation, dropout and a batch
    norm treat it alike on all replicas that compute it, as decoding needs. Running statistics are of the replica's own
    s + 1 shares, without those of steps that it left out.

    A replica's own loss is its coded sum of losses, which may be negative; the mean loss is decoded. Where a loss among
    those decoded is not finite there is no mean, and ``exclude`` skips the step as ``skip`` does. A parameter that no
    loss reached has a gradient of zeros.

    With cyclic codes errors of rounding grow by the factor :math:`\max_j \sum_i |a_i B_{ij}|`, over six seeds and the
    worst of 60 sets of replicas: up to 6 at n = 4, s = 1, up to 32 at n = 8, s = 1, up to 900 at n = 8, s = 3. By
    repetition it is 1.

    Args:
      stragglers: s, below the number of replicas; 0 waits for all.
      construction: ``"fractional_repetition"``, for numbers of replicas that s + 1 divides, ``"cyclic"``, or
        ``"auto"``: the first where it is possible. See :func:`farflung.gradient_coding.gradient_code`.

    Raises:
      ConfigError: an option out of its range.

    References: Tandon, Lei, Dimakis & Karampatziakis 2017. Rank 0 for the master, optimizers on all replicas, and
    steps that are left out are our choice.
    """

    stragglers: int = 1
    construction: str = "auto"

    def __post_init__(self) -> None:
        whole_option("gradient_coding", "stragglers", self.stragglers, 0)
        if self.construction not in CONSTRUCTIONS:
            raise ConfigError(
                f"gradient_coding: construction {self.construction!r} must be one of {', '.join(CONSTRUCTIONS)}"
            )

    @property
    @override
    def merges(self) -> tuple[Merge, ...]:
        """The decoded mean in place of the own gradient."""
        return (Decode(self.stragglers, self.construction),)

    @override
    def check(self, size: int) -> None:
        """Whether there is such a code."""
        gradient_code(self.construction, size, self.stragglers, 0)

    @override
    def plan(self, state: State, parts: Sequence[Part], step: int) -> list[Transfer]:
        """One transfer for each bucket."""
        del state
        return [Transfer(part, step, *self.merges) for part in parts]
