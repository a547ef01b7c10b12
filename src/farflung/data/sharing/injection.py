"""Data injection: some replicas send some of their samples to all others."""

from __future__ import annotations

import math

import torch
from typing_extensions import override

from farflung.comm.collectives.segments import list_peers
from farflung.errors import ProtocolError
from farflung.options import check_fraction
from farflung.seeding import create_generator
from farflung.types import Batch, Channel, Payload, Samples, Sharing

__all__ = ["Injection"]


class Injection(Sharing):
    r"""Randomized data injection, for replicas with different distributions of samples.

    A shared seed draws the senders of each step, :math:`\lceil \alpha n \rceil` of n replicas. They send the first
    :math:`\lfloor \beta b_i \rfloor` of the step's :math:`b_i` rows to all others, as they are stored. Every replica
    trains on its own rows and on all that it has received, each augmented by itself. Its weight in the mean is the
    number of samples.

    **Privacy.** Samples leave the device as they are, and every other replica may keep them. Senders change from step
    to step, so in the long run every replica sends about :math:`\alpha \beta` of its training samples.

    Args:
      seed: Seed, equal on all replicas.
      alpha: Share of the replicas that send, in (0, 1].
      beta: Share of its rows that a sender sends, in (0, 1].
      keep_batch: Draws fewer own samples, :math:`b / (1 + \alpha \beta n)`, so that a replica trains on about b with
        those received; otherwise batches grow.

    Raises:
      ConfigError: An option is out of range.

    References: Tyagi & Swany 2022 (ScaDLES), section IV-C, where the rows of a device are those that streamed in;
    ``keep_batch``: Tyagi & Swany 2023 (SelSync), section III-D.
    """

    has_data_transfers = True

    def __init__(self, seed: int, alpha: float = 0.5, beta: float = 0.5, *, keep_batch: bool = False) -> None:
        check_fraction("sharing injection", "alpha", alpha)
        check_fraction("sharing injection", "beta", beta)
        self._seed, self._alpha, self._beta, self._keeps_batch = seed, alpha, beta, keep_batch

    @override
    def is_injection_due(self, step: int) -> bool:
        """Returns True."""
        del step
        return True

    @override
    def get_local_batch_size(self, batch_size: int, size: int) -> int:
        """Returns the batch size that leaves room for received samples."""
        if not self._keeps_batch:
            return batch_size
        return max(1, round(batch_size / (1 + self._alpha * self._beta * size)))

    def choose_senders(self, step: int, size: int) -> list[int]:
        """Chooses the ranks that send at a step, in order."""
        order = torch.randperm(size, generator=create_generator(self._seed, "senders", step))
        return sorted(order[: math.ceil(round(self._alpha * size, 9))].tolist())

    @override
    async def inject_samples(self, channel: Channel, samples: Samples, rows: Batch, *, step: int) -> Batch:
        """Returns own rows first, then those of the senders in rank order; each receiver gets a copy.

        Raises:
          ProtocolError: Rows of another kind were received.
        """
        del samples
        senders, hop = self.choose_senders(step, channel.size), channel.reserve_hops(1)
        if channel.rank in senders:
            count = int(round(self._beta * len(rows), 9))
            sent = Payload((rows.inputs[:count], rows.targets[:count]))
            for peer in list_peers(channel):
                channel.send(sent, peer, hop)
        batches = [rows]
        for rank in senders:
            if rank != channel.rank:
                batches.append(_check_rows(await channel.recv(rank, hop), rows, rank))
        return Batch(
            torch.cat([part.inputs for part in batches]), torch.cat([part.targets for part in batches])
        )


def _check_rows(received: Payload, expected: Batch, rank: int) -> Batch:
    tensors = tuple(received.iter_tensors())
    if len(tensors) == 2:
        inputs, targets = tensors
        is_compatible = all(
            tensor.dtype == ref.dtype and tensor.shape[1:] == ref.shape[1:] and tensor.dim() == ref.dim()
            for tensor, ref in ((inputs, expected.inputs), (targets, expected.targets))
        )
        if is_compatible and len(inputs) == len(targets):
            return Batch(inputs, targets)
    raise ProtocolError(f"rank {rank} sent samples of another kind: do all ranks train the same workload?")
