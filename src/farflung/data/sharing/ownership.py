"""Ownership of samples, and the rounds in which some of them change owner."""

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
    Runtime,
    SampleBatch,
    SampleIds,
    Sampler,
    Sharing,
    State,
)

__all__ = ["Ownership", "PermanentSharing"]


@dataclass(frozen=True, slots=True, eq=False)
class _Round:
    """Exchange of samples in flight.

    Args:
      step: Step at which it began.
      slots: Slots of the samples offered.
      scores: Scores of these samples at that step.
      channel: Channel that counts its bytes.
      incoming: Samples from the partner.
    """

    step: int
    slots: SampleIds
    scores: Tensor | None
    channel: ExchangeChannel
    incoming: Pending[SampleBatch]


class PermanentSharing(Sharing):
    """Sharing that moves samples permanently, in rounds concurrent with training.

    In a round each replica has one partner at most. It keeps drawing from the samples that it gives away until the
    round takes effect, at a step fixed when the round begins. The partner's samples then take their slots.
    """

    has_data_transfers = is_permanent = True

    def should_begin(self, step: int) -> bool:
        """Returns True if a round begins at ``step``; equal on all replicas, and never before the last has ended."""
        del step
        return False

    def get_due_step(self, step: int) -> int:
        """Returns the later step before whose batch the round of ``step`` takes effect; equal on all."""
        raise NotImplementedError

    def find_partner(self, step: int, rank: int, size: int) -> int | None:
        """Returns the rank that a replica swaps with in the round that begins at ``step``; ``None``: with none."""
        raise NotImplementedError

    def choose_outgoing(self, num_samples: int, sampler: Sampler, *, step: int, rank: int) -> SampleIds:
        """Returns the slots of the samples to give away; any prefix of them is as good a choice.

        Args:
          num_samples: Number of samples that the replica owns, in slots from 0 on.
          sampler: Sampler that chooses if :attr:`needs_scores` is set.
          step: Step at which the round begins.
          rank: Rank of the replica.
        """
        raise NotImplementedError

    async def swap(self, channel: Channel, partner: int, outgoing: SampleBatch, gate: Gate) -> SampleBatch:
        """Carries out one round of one replica.

        Args:
          channel: Channel of this round.
          partner: Rank from :meth:`find_partner`.
          outgoing: Samples to give away at most.
          gate: Gate that admits messages.

        Returns:
          The partner's samples; they replace as many of ``choose_outgoing``, the first ones.
        """
        raise NotImplementedError

    @override
    def build_extensions(self, loop: TrainingLoop) -> Sequence[Extension]:
        if loop.holding is None:
            raise ConfigError(
                f"sharing {type(self).__name__}: moves samples between shares, and all replicas draw from the whole "
                "set: give each a share (--partition iid)"
            )
        return (
            Ownership(self, loop.runtime, loop.holding, loop.sampler, loop.engine.gate, loop.training.steps),
        )


class Ownership(Extension):
    """Extension with the samples of one replica, and the rounds of a sharing that moves them.

    Rounds are concurrent with training and end at steps fixed when they begin, equal on all replicas. Every sample
    thus has one owner at every step, whatever the clock says, and a checkpoint needs only ids. An interrupted round
    is repeated with its chosen samples.

    Args:
      sharing: Sharing that decides steps, receivers and samples.
      runtime: Clock and messages of the replica.
      holding: Samples of the replica.
      sampler: Sampler that draws from them.
      gate: Gate that admits messages.
      steps: Steps of the run; no round begins that would take effect after the last of them.
    """

    key: ClassVar[str] = "ownership"

    def __init__(
        self,
        sharing: PermanentSharing,
        runtime: Runtime,
        holding: Holding,
        sampler: Sampler,
        gate: Gate,
        steps: int,
    ) -> None:
        self._sharing, self._runtime, self._holding, self._gate = sharing, runtime, holding, gate
        self._sampler, self._steps = sampler, steps
        self._round: _Round | None = None
        self.sent_nbytes = 0

    @override
    async def prepare_step(self, step: int) -> None:
        """Finishes the round that is due before the batch of ``step``, and begins one if this step begins a round."""
        active_round = self._round
        if active_round is not None and self._sharing.get_due_step(active_round.step) <= step:
            incoming = await active_round.incoming
            self.sent_nbytes += active_round.channel.sent_nbytes
            self._round = None
            self._apply_round(active_round, incoming)
        if self._sharing.should_begin(step) and self._sharing.get_due_step(step) < self._steps:
            rank = self._runtime.comm.rank
            slots = self._sharing.choose_outgoing(len(self._holding), self._sampler, step=step, rank=rank)
            self._begin_round(step, slots, self._sampler.get_scores(slots))

    @override
    async def finish(self) -> None:
        """Waits for a round in flight without applying it; a resumed run repeats it."""
        if self._round is not None:
            await self._round.incoming
            self.sent_nbytes += self._round.channel.sent_nbytes
            self._round = None

    @property
    @override
    def channels(self) -> list[ExchangeChannel]:
        """Channel of a round in flight, which a resumed run repeats."""
        return [] if self._round is None else [self._round.channel]

    @override
    def state_dict(self) -> State:
        """Returns the ids in the order of their slots, and the start of a round in flight."""
        state: State = {"ids": self._holding.ids.clone(), "round": {}, "sent_nbytes": self.sent_nbytes}
        if self._round is not None:
            scores = {} if self._round.scores is None else {"scores": self._round.scores}
            state["round"] = {"step": self._round.step, "slots": self._round.slots, **scores}
        return state

    @override
    def load_state_dict(self, state: State) -> None:
        """Continues from :meth:`state_dict`, and begins a round again that was in flight."""
        self._holding.load_ids(state["ids"])
        self.sent_nbytes = state["sent_nbytes"]
        if round_state := state["round"]:
            self._begin_round(round_state["step"], round_state["slots"], round_state.get("scores"))

    def _begin_round(self, step: int, slots: SampleIds, scores: Tensor | None) -> None:
        comm = self._runtime.comm
        partner = self._sharing.find_partner(step, comm.rank, comm.size)
        if partner is None:
            return
        outgoing = SampleBatch(self._holding.ids[slots], self._holding.get_rows(slots), scores)
        channel = ExchangeChannel(comm, Purpose.SHARING.build_exchange_id(step), 0)
        incoming = self._runtime.launch(self._sharing.swap(channel, partner, outgoing, self._gate))
        self._round = _Round(step, slots, scores, channel, incoming)

    def _apply_round(self, current: _Round, incoming: SampleBatch) -> None:
        total = len(self._holding.data)
        if int(incoming.ids.min()) < 0 or int(incoming.ids.max()) >= total:
            raise ProtocolError(
                f"samples swapped at step {current.step} are none of the {total} of the training set: do all ranks "
                "train on the same?"
            )
        slots = current.slots[: len(incoming)]
        self._holding.replace_samples(slots, incoming.ids, incoming.rows)
        if incoming.scores is not None:
            self._sampler.set_scores(slots, incoming.scores)
