"""Rank 0's bases for all, where the replicas have found unlike ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from farflung.comm.collectives.segments import cut, others
from farflung.comm.staging import moved
from farflung.errors import ProtocolError
from farflung.types import Channel, Payload, TensorSpec

__all__ = ["SharedBases"]


class SharedBases:
    """The bases and means on their way from rank 0; they leave when this is made.

    Bases may be larger than the tensor that they are for, and no message may be; so they go in pieces as long as that.

    Args:
      channel: the exchange's.
      own: this rank's: bases of shape ``(K, d)``, and the flat mean; all ranks have equal K, and may have unlike d.
      most_columns: no basis has more.
      piece_numel: the most numbers in a message.
    """

    def __init__(self, channel: Channel, own: Sequence[Tensor], most_columns: int, piece_numel: int) -> None:
        self._channel, self._own = channel, own
        self._most_columns, self._piece_numel = most_columns, piece_numel
        self._hop = channel.hops(1)
        self._columns = torch.tensor([basis.shape[1] for basis in own[:-1]])
        if channel.rank == 0:
            self._send(self._columns, self._hop)

    async def finish(self) -> list[Tensor]:
        """Rank 0's, on all ranks.

        Raises:
          ProtocolError: they do not fit the own tensor.
        """
        if self._channel.rank:
            (self._columns,) = await self._receive(self._hop, self._columns)
        columns = self._columns.tolist()
        *bases, mean = self._own
        if not all(
            1 <= d <= min(self._most_columns, len(basis)) for d, basis in zip(columns, bases, strict=True)
        ):
            raise ProtocolError(
                f"rank 0 sent bases of {columns} columns: do all ranks run the same model and recipe?"
            )
        sizes = [d * len(basis) for d, basis in zip(columns, bases, strict=True)] + [len(mean)]
        pieces = cut(sum(sizes), math.ceil(sum(sizes) / self._piece_numel))
        hop = self._channel.hops(len(pieces))
        if self._channel.rank == 0:
            flat = torch.cat([tensor.reshape(-1) for tensor in self._own])
            for index, piece in enumerate(pieces):
                self._send(piece.of(flat), hop + index)
            return list(self._own)
        received = []
        for index, piece in enumerate(pieces):
            received += await self._receive(hop + index, mean.new_empty(piece.length))
        *flats, mean = torch.cat(received).split(sizes)
        return [*(flat.view(len(own), -1) for flat, own in zip(flats, bases, strict=True)), mean.clone()]

    def _send(self, tensor: Tensor, hop: int) -> None:
        for peer in others(self._channel):
            self._channel.send(Payload((tensor,)), peer, hop)

    async def _receive(self, hop: int, like: Tensor) -> list[Tensor]:
        payload = await self._channel.recv(0, hop, (TensorSpec.of(like),))
        return [moved(tensor, like.device) for tensor in payload.tensors()]
