"""Data resharding: replicas swap samples permanently, the important ones first."""

from __future__ import annotations

import torch
from typing_extensions import override

from farflung.data.sharing.ownership import PermanentSharing
from farflung.errors import ConfigError, ProtocolError
from farflung.options import check_fraction, check_integer
from farflung.seeding import create_generator
from farflung.types import Batch, Channel, Gate, Payload, SampleBatch, SampleIds, Sampler, TensorSpec

__all__ = ["Resharding"]

MAX_IDLE_S = 20.0
"""Longest pause between two pieces. It is no setting: a pause follows from ``share`` and the time of a piece, and
this bound keeps it below the deadline of a run."""


class Resharding(PermanentSharing):
    """Importance-aware data resharding: pairs of replicas swap samples permanently, during training.

    In each round replicas are matched at random by a shared seed. Both of a pair give equally many samples, :math:`N_o`
    or all of the smaller share, and keep drawing from them until the round takes effect, at a step that is fixed when
    it begins. Received samples take the slots of those given away. Samples leave the device as they are.

    Args:
      seed: Seed, equal on all replicas.
      samples: :math:`N_o`, samples that a replica gives away in a round.
      every: Steps between the beginnings of two rounds; the first begins after as many.
      within: Steps from the beginning of a round until it takes effect; ``None``: until the next begins.
      by: ``"importance"``, by the sampler's scores, or ``"uniform"``, at random without replacement.
      piece_nbytes: Largest piece; one sample is one piece, however large it is.
      share: Share of the time for pieces if exchanges run during computation, above 0 and at most 1.

    Raises:
      ConfigError: An option is out of range.

    References: Zeng, Yan & Zhang 2021 (Mercury), section on importance-aware data resharding, where aggregations
    pause a round too. Pairs, the period, the step of effect, the pieces and the score of an incoming sample are our
    choice.
    """

    def __init__(
        self,
        seed: int,
        samples: int = 64,
        every: int = 50,
        within: int | None = None,
        by: str = "importance",
        piece_nbytes: int = 1 << 16,
        share: float = 0.25,
    ) -> None:
        name = "sharing resharding"
        check_integer(name, "samples", samples, 1)
        check_integer(name, "every", every, 1)
        if within is not None:
            check_integer(name, "within", within, 1, every)
        if by not in ("importance", "uniform"):
            raise ConfigError(f"{name}: by {by!r} must be 'importance' or 'uniform'")
        check_integer(name, "piece_nbytes", piece_nbytes, 1)
        check_fraction(name, "share", share)
        self._seed, self._samples, self._every, self._within = seed, samples, every, within or every
        self.needs_scores = by == "importance"
        self._piece_nbytes, self._share = piece_nbytes, share

    @override
    def should_begin(self, step: int) -> bool:
        """Returns True every ``every`` steps, but not at the first, when no sample has a score."""
        return step > 0 and step % self._every == 0

    @override
    def get_due_step(self, step: int) -> int:
        return step + self._within

    @override
    def find_partner(self, step: int, rank: int, size: int) -> int | None:
        """Returns the partner by a random order: the first goes with the second, the third with the fourth."""
        order = torch.randperm(size, generator=create_generator(self._seed, "partners", step)).tolist()
        position = order.index(rank) ^ 1
        return order[position] if position < size else None

    @override
    def choose_outgoing(self, num_samples: int, sampler: Sampler, *, step: int, rank: int) -> SampleIds:
        """Chooses by importance or uniformly, and returns the slots in random order."""
        random = create_generator(self._seed, "outgoing", step, rank)
        count = min(self._samples, num_samples)
        if not self.needs_scores:
            return torch.randperm(num_samples, generator=random)[:count]
        return sampler.choose_outgoing(count, step)[torch.randperm(count, generator=random)]

    @override
    async def swap(self, channel: Channel, partner: int, outgoing: SampleBatch, gate: Gate) -> SampleBatch:
        """Exchanges numbers of samples first, then pieces.

        Raises:
          ProtocolError: The partner sent samples of another kind, or an impossible number.
        """
        partner_channel = _PartnerChannel(channel, partner, gate, self._share)
        (partner_count,) = (
            await partner_channel.exchange(Payload((torch.tensor([len(outgoing)]),)))
        ).iter_tensors()
        count = min(len(outgoing), int(partner_count))
        if count < 1:
            raise ProtocolError(
                f"rank {partner} would give {int(partner_count)} samples: do all ranks run one recipe?"
            )
        columns = [column[:count] for column in _list_columns(outgoing)]
        piece_samples = max(1, self._piece_nbytes * count // Payload(tuple(columns)).nbytes)
        answers = []
        for start in range(0, count, piece_samples):
            piece = Payload(tuple(column[start : start + piece_samples] for column in columns))
            answers.append(tuple((await partner_channel.exchange(piece)).iter_tensors()))
        ids, inputs, targets, *scores = (torch.cat(column) for column in zip(*answers, strict=True))
        return SampleBatch(ids, Batch(inputs, targets), *scores)


def _list_columns(samples: SampleBatch) -> list[torch.Tensor]:
    scores = [] if samples.scores is None else [samples.scores]
    return [samples.ids, samples.rows.inputs, samples.rows.targets, *scores]


class _PartnerChannel:
    """Channel of alternating messages with a partner.

    Args:
      channel: Channel of the round.
      partner: Rank that answers.
      gate: Gate that admits messages.
      share: Share of the time for messages if exchanges run during computation.
    """

    def __init__(self, channel: Channel, partner: int, gate: Gate, share: float) -> None:
        self._channel, self._partner, self._gate = channel, partner, gate
        self._idle_ratio = 1 / share - 1
        self._is_responder = channel.rank > partner
        """True if this replica sends after it has received. If both began, one delayed by a gate would send its next
        piece right behind the last, as the partner's had already arrived."""
        self._idle_s = 0.0

    async def exchange(self, payload: Payload) -> Payload:
        """Sends a message and returns the partner's, whose tensors have equal specs."""
        hop = self._channel.reserve_hops(1)
        expect = tuple(TensorSpec.from_tensor(tensor) for tensor in payload.iter_tensors())
        if self._is_responder:
            answer = await self._channel.recv(self._partner, hop, expect)
            await self._gate.wait_open()
            self._channel.send(payload, self._partner, hop)
            return answer
        began_s = await self._gate.wait_open(self._idle_s)
        self._channel.send(payload, self._partner, hop)
        answer = await self._channel.recv(self._partner, hop, expect)
        self._idle_s = min(MAX_IDLE_S, (self._gate.read_clock() - began_s) * self._idle_ratio)
        return answer
