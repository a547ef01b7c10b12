"""The schedule of a parameter server with bounded staleness: SSP, and at its ends BSP and ASP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import override

from farflung.options import whole_option
from farflung.types import Fetch, Merge, Part, Schedule, State, Transfer

__all__ = ["SSP"]


@dataclass(frozen=True, slots=True)
class SSP(Schedule):
    r"""Each replica sends its update to a server at every step, and goes on with the parameters it finds there.

    The server is a role of rank 0 beside its training. It adds each update as it arrives, and answers with the
    parameters. A replica's clock :math:`c_i` counts its steps; it goes on while

    .. math:: c_i - \min_j c_j \le s

    and waits for its answer otherwise. So what a replica at clock c reads holds all updates of all replicas' first
    c - s steps, its own without exception, and of later ones those that happened to be there. With a bound of 0 this
    is synchronous SGD up to rounding, with momentum too, and no rank goes on before all have arrived (BSP); without a
    bound no rank waits for another (ASP).

    An update is what a replica's own optimizer made of its own gradient, after learning rate, momentum, weight decay
    or Adam; optimizers are the replicas', and the server has none. With :math:`\Delta_i` the update, :math:`b_i` the
    step's weight, 1 for a full batch, and n replicas,

    .. math:: w \leftarrow w + \frac{b_i}{n} \Delta_i

    In which order updates arrive is recorded: the run's log holds, for each update that was added, whose it was. All
    that the server does follows from that, so a replay ends with the same bits.

    At a checkpoint, and at the end of a run, all wait for all, as with a bound of 0. So replicas are alike there, and
    with a bound above 0 training depends on how often a checkpoint is made.

    Evaluation sees the server's parameters as they were when it answered rank 0 at that step. On the wall clock
    replicas wait for each other to be evaluated.

    No rank waits for losses that are not finite either: to skip a step is to leave out that replica's update, as
    ``exclude`` does.

    A step's messages to the server and back are as large as the model, without a codec, and all of them use rank 0's
    link. Holds the parameters once on each replica, and once more on rank 0.

    Args:
      bound: s, the most steps that a replica is ahead of the slowest; ``None``: any number.

    Raises:
      ConfigError: an option out of its range.

    References: Ho et al. 2013 (SSP), whose updates are added by the server as well. Reading at every step, and dividing
    by the number of replicas, so that a learning rate means the same at every bound, are our choice.
    """

    bound: int | None = 2

    def __post_init__(self) -> None:
        if self.bound is not None:
            whole_option("ssp", "bound", self.bound, 0)

    @property
    @override
    def merges(self) -> tuple[Merge, ...]:
        """The server's parameters in place of the own."""
        return (Fetch(self.bound),)

    @override
    def plan(self, state: State, parts: Sequence[Part], step: int) -> list[Transfer]:
        """One transfer for each bucket."""
        del state
        return [Transfer(part, step, *self.merges) for part in parts]
