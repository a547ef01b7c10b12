"""Replicas swap samples for good, the important ones first."""

from __future__ import annotations

import torch
from typing_extensions import override

from farflung.data.sharing.ownership import MovingSharing
from farflung.errors import ConfigError, ProtocolError
from farflung.options import part_option, whole_option
from farflung.seeding import generator
from farflung.types import Batch, Channel, Gate, Moved, Payload, SampleIds, Sampler, TensorSpec

__all__ = ["Resharding"]

MOST_REST_S = 20.0
"""The longest rest between two pieces. It is no setting: a rest is as long as ``share`` and the time of a piece ask
for, and this bounds it where that would come near the deadline of a run."""


class Resharding(MovingSharing):
    r"""Importance-aware data resharding: in rounds beside training, pairs of replicas swap samples for good.

    In each round replicas are matched at random by a seed that all have; of an odd number one rests. Both of a pair
    give as many samples, :math:`N_o` or all that the smaller share has. Each goes on drawing from what it gives away
    until the round takes effect, at a step that is set when the round begins; a round that is late then is waited for.
    What has come stands in the places of what has gone, so neither shares nor a sampler's groups change their sizes.

    Samples are chosen by what the sampler knows of them; what it knew when the round began goes along with each, in
    4 bytes. ``by="uniform"`` is the importance-agnostic baseline, which chooses at random without replacement.

    **On the way.** Samples travel as stored, with their ids, in pieces of a bounded size. One of a pair begins, and the
    other answers each piece with one of its own; so of each replica one is on its way at most, in either world. None
    sets out while a step waits for its exchanges. So an aggregation waits for the rest of one piece at most on each
    link: on one that was free, its bytes over the bandwidth, and the latency. Where exchanges go on beside computing
    (pipelined and delayed schedules) there is no such time. While some are under way there, the first of a pair
    leaves the link alone for so long between two pieces that samples are on it for a share of the time; but never for
    longer than 20 s, a third of the usual deadline, since to the waiting partner a rest is silence. So where a piece
    and its answer take seconds, or the deadline is set lower, give a piece fewer bytes.

    **Privacy.** Samples leave the device as they are; in the long run every sample may come to every replica.

    Args:
      seed: alike on all replicas.
      samples: :math:`N_o`, how many a replica gives away in a round.
      every: steps from the beginning of a round to that of the next; the first begins after as many.
      within: steps from the beginning of a round until it takes effect; ``None``: until the next begins.
      by: ``"importance"`` or ``"uniform"``.
      piece_nbytes: of a piece at most; one sample goes in one piece, however large it is.
      share: of the time, for pieces where exchanges go on beside computing, above 0 and at most 1.

    Raises:
      ConfigError: an option out of its range.

    References: Zeng, Yan & Zhang 2021 (Mercury), section on importance-aware data resharding, where a round too is
    paused by aggregations and goes on afterwards. Pairs, how often they swap, when it takes effect, the pieces
    and what an incoming sample's score is are our choice.
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
        whole_option(name, "samples", samples, 1)
        whole_option(name, "every", every, 1)
        if within is not None:
            whole_option(name, "within", within, 1, every)
        if by not in ("importance", "uniform"):
            raise ConfigError(f"{name}: by {by!r} must be 'importance' or 'uniform'")
        whole_option(name, "piece_nbytes", piece_nbytes, 1)
        part_option(name, "share", share)
        self._seed, self._samples, self._every, self._within = seed, samples, every, within or every
        self.by_importance = by == "importance"
        self._piece_nbytes, self._share = piece_nbytes, share

    @override
    def begins(self, step: int) -> bool:
        """Every so many steps, but not at the first, when nothing is known of any sample."""
        return step > 0 and step % self._every == 0

    @override
    def due_step(self, step: int) -> int:
        """So many steps later."""
        return step + self._within

    @override
    def partner(self, step: int, rank: int, size: int) -> int | None:
        """By a random order of all: the first goes with the second, the third with the fourth."""
        order = torch.randperm(size, generator=generator(self._seed, "partners", step)).tolist()
        other = order.index(rank) ^ 1
        return order[other] if other < size else None

    @override
    def outgoing(self, held: int, sampler: Sampler, *, step: int, rank: int) -> SampleIds:
        """By importance or at random, in random order."""
        random = generator(self._seed, "outgoing", step, rank)
        count = min(self._samples, held)
        if not self.by_importance:
            return torch.randperm(held, generator=random)[:count]
        return sampler.outgoing(count, step)[torch.randperm(count, generator=random)]

    @override
    async def swap(self, channel: Channel, partner: int, given: Moved, gate: Gate) -> Moved:
        """Numbers first, then pieces.

        Raises:
          ProtocolError: the partner sent samples of another kind, or a number that cannot be.
        """
        way = _Way(channel, partner, gate, self._share)
        (other,) = (await way.both(Payload((torch.tensor([len(given)]),)))).tensors()
        count = min(len(given), int(other))
        if count < 1:
            raise ProtocolError(
                f"rank {partner} would give {int(other)} samples: do all ranks run one recipe?"
            )
        columns = [column[:count] for column in _columns(given)]
        each = max(1, self._piece_nbytes * count // Payload(tuple(columns)).nbytes)
        came = []
        for first in range(0, count, each):
            piece = Payload(tuple(column[first : first + each] for column in columns))
            came.append(tuple((await way.both(piece)).tensors()))
        ids, inputs, targets, *scores = (torch.cat(column) for column in zip(*came, strict=True))
        return Moved(ids, Batch(inputs, targets), *scores)


def _columns(moved: Moved) -> list[torch.Tensor]:
    scores = [] if moved.scores is None else [moved.scores]
    return [moved.ids, moved.rows.inputs, moved.rows.targets, *scores]


class _Way:
    """Messages to a partner and back, one after the other.

    Args:
      channel: of the round.
      partner: the rank that answers.
      gate: says when one may set out.
      share: of the time, for messages where exchanges go on beside computing.
    """

    def __init__(self, channel: Channel, partner: int, gate: Gate, share: float) -> None:
        self._channel, self._partner, self._gate = channel, partner, gate
        self._rest = 1 / share - 1
        self._answers = channel.rank > partner
        """Whether this replica sends once it has heard. Were both to begin, one that a gate has held up would send its
        next piece right behind the last: the partner's were there already."""
        self._rest_s = 0.0

    async def both(self, own: Payload) -> Payload:
        """Sends a message; the partner's, whose tensors are like those sent."""
        hop = self._channel.hops(1)
        expect = tuple(TensorSpec.of(tensor) for tensor in own.tensors())
        if self._answers:
            theirs = await self._channel.recv(self._partner, hop, expect)
            await self._gate.opened()
            self._channel.send(own, self._partner, hop)
            return theirs
        began_s = await self._gate.opened(self._rest_s)
        self._channel.send(own, self._partner, hop)
        theirs = await self._channel.recv(self._partner, hop, expect)
        self._rest_s = min(MOST_REST_S, (self._gate.now() - began_s) * self._rest)
        return theirs
