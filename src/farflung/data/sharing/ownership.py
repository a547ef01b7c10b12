"""Which samples a replica holds, and the rounds in which some of them change owner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from farflung.comm import ExchangeChannel, Purpose
from farflung.data.datasets import Holding
from farflung.engine import Extension, TrainingLoop
from farflung.errors import ConfigError, ProtocolError
from farflung.tasks import Pending
from farflung.types import (
    Channel,
    Gate,
    Moved,
    Runtime,
    SampleIds,
    Sampler,
    Sharing,
    State,
)

__all__ = ["MovingSharing", "Ownership"]


@dataclass(frozen=True, slots=True, eq=False)
class _Round:
    """One round under way.

    Args:
      step: at which it began.
      places: of the samples that are given away.
      scores: what the sampler knew of them then.
      channel: counts its bytes.
      came: what the partner gives.
    """

    step: int
    places: SampleIds
    scores: Tensor | None
    channel: ExchangeChannel
    came: Pending[Moved]


class MovingSharing(Sharing):
    """A sharing that moves samples for good, in rounds beside training.

    In a round each replica has one partner at most. What it gives away it goes on drawing from until the round takes
    effect, at a step that is known when the round begins; then what the partner has given stands in the same places.
    """

    data_leaves_device = moves_samples = True

    def begins(self, step: int) -> bool:
        """Returns True if a round begins at ``step``; equal on all replicas, and never before the last has ended."""
        del step
        return False

    def due_step(self, step: int) -> int:
        """Returns the later step before whose batch the round takes effect that begins at ``step``; equal on all."""
        raise NotImplementedError

    def partner(self, step: int, rank: int, size: int) -> int | None:
        """Returns the rank that a replica swaps with in the round that begins at ``step``; ``None``: with none."""
        raise NotImplementedError

    def outgoing(self, held: int, sampler: Sampler, *, step: int, rank: int) -> SampleIds:
        """Returns the places of the samples that are given away, of which the first are as good as the last.

        Args:
          held: how many samples the replica holds, in places from 0 on.
          sampler: chooses where :attr:`by_importance` is set.
          step: at which the round begins.
          rank: the replica.
        """
        raise NotImplementedError

    async def swap(self, channel: Channel, partner: int, given: Moved, gate: Gate) -> Moved:
        """Carries out one round of one replica.

        Args:
          channel: of this round.
          partner: see :meth:`partner`.
          given: what it gives away at most.
          gate: says when a message may set out.

        Returns:
          What the partner has given; as many of ``given`` are its own now, the first.
        """
        raise NotImplementedError

    @override
    def extensions(self, loop: TrainingLoop) -> Sequence[Extension]:
        if loop.held is None:
            raise ConfigError(
                f"sharing {type(self).__name__}: moves samples between shares, and all replicas draw from the whole "
                "set: give each a share (--partition iid)"
            )
        return (
            Ownership(self, loop.runtime, loop.held, loop.sampler, loop.engine.gate, loop.training.steps),
        )


class Ownership(Extension):
    """The samples of one replica, and the rounds of a sharing that moves them.

    Rounds go on beside training and end at steps that are known when they begin, on all replicas the same. So every
    sample has one owner at every step, whatever the clock says, and a checkpoint needs no more than the ids. A round
    that was under way is made again from what was chosen.

    Args:
      sharing: decides the steps, receivers and samples.
      runtime: the world.
      held: the replica's samples.
      sampler: draws from them.
      gate: says when samples may set out.
      steps: of the run; no round begins that would take effect after the last of them.
    """

    key: ClassVar[str] = "ownership"

    def __init__(
        self,
        sharing: MovingSharing,
        runtime: Runtime,
        held: Holding,
        sampler: Sampler,
        gate: Gate,
        steps: int,
    ) -> None:
        self._sharing, self._runtime, self._held, self._gate = sharing, runtime, held, gate
        self._sampler, self._steps = sampler, steps
        self._round: _Round | None = None
        self.sent_nbytes = 0

    @override
    async def before_step(self, step: int) -> None:
        """Ends the round that is due before the batch of ``step`` is drawn, and begins one that begins there."""
        under_way = self._round
        if under_way is not None and self._sharing.due_step(under_way.step) <= step:
            came = await under_way.came
            self.sent_nbytes += under_way.channel.sent_nbytes
            self._round = None
            self._settle(under_way, came)
        if self._sharing.begins(step) and self._sharing.due_step(step) < self._steps:
            rank = self._runtime.comm.rank
            places = self._sharing.outgoing(len(self._held), self._sampler, step=step, rank=rank)
            self._begin(step, places, self._sampler.scores_of(places))

    @override
    async def finish(self) -> None:
        """Waits for a round in flight, and leaves it at that: a resumed run makes it again."""
        if self._round is not None:
            await self._round.came
            self.sent_nbytes += self._round.channel.sent_nbytes
            self._round = None

    @property
    @override
    def channels(self) -> list[ExchangeChannel]:
        """Of a round that is under way; a run that goes on from here makes it again."""
        return [] if self._round is None else [self._round.channel]

    @override
    def state_dict(self) -> State:
        """The ids in the order of their places, and what a round under way has begun with."""
        state: State = {"ids": self._held.ids.clone(), "round": {}, "sent_nbytes": self.sent_nbytes}
        if self._round is not None:
            scores = {} if self._round.scores is None else {"scores": self._round.scores}
            state["round"] = {"step": self._round.step, "places": self._round.places, **scores}
        return state

    @override
    def load_state_dict(self, state: State) -> None:
        """Continues from :meth:`state_dict`; a round that was under way begins again."""
        self._held.load_ids(state["ids"])
        self.sent_nbytes = state["sent_nbytes"]
        self.sent_nbytes = state["sent_nbytes"]
        if begun := state["round"]:
            self._begin(begun["step"], begun["places"], begun.get("scores"))

    def _begin(self, step: int, places: SampleIds, scores: Tensor | None) -> None:
        comm = self._runtime.comm
        partner = self._sharing.partner(step, comm.rank, comm.size)
        if partner is None:
            return
        given = Moved(self._held.ids[places], self._held.rows(places), scores)
        channel = ExchangeChannel(comm, Purpose.SHARING.at(step), 0)
        came = self._runtime.launch(self._sharing.swap(channel, partner, given, self._gate))
        self._round = _Round(step, places, scores, channel, came)

    def _settle(self, under_way: _Round, came: Moved) -> None:
        known = len(self._held.data)
        if int(came.ids.min()) < 0 or int(came.ids.max()) >= known:
            raise ProtocolError(
                f"samples swapped at step {under_way.step} are none of the {known} of the training set: do all ranks "
                "train on the same?"
            )
        places = under_way.places[: len(came)]
        self._held.exchange(places, came.ids, came.rows)
        if came.scores is not None:
            self._sampler.incoming(places, came.scores)
