"""Subgroups of the ranks of a run, and the channels of their exchanges."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from typing_extensions import override

from farflung.comm import ExchangeChannel
from farflung.comm.channel import describe
from farflung.errors import Unsupported, WaitEnded
from farflung.tasks import Pending, failed
from farflung.types import AllReduce, Counts, Group, Payload, Tag, TensorSpec

__all__ = ["Among", "ViewChannel"]


class ViewChannel(ExchangeChannel):
    """Channel of an exchange within a view, whose bytes are counted by rank in the first view.

    An attempt whose message has arrived just before a newer view resumes after that view is installed. It must neither
    send nor receive then, because the messages belong to the next attempt.

    Args:
      group: Members that take part.
      full_channel: Channel of the exchange among all ranks, which counts the bytes.
      is_current: Function that returns True while the view is the newest.
    """

    def __init__(self, within: Among, counts: ExchangeChannel, current: Callable[[], bool]) -> None:
        super().__init__(within, *counts.tag(0)[:2])
        self.sent = counts.sent
        self._ranks, self._current = within.ranks, current

    @override
    def recv(self, src: int, hop: int, expect: tuple[TensorSpec, ...] | None = None) -> Pending[Payload]:
        if not self._current():
            return self._ended(src, hop)
        return self._comm.recv(src, self.tag(hop), expect, deadline_s=math.inf)

    @override
    def land(self, src: int, hop: int, into: Tensor) -> None:
        if self._current():
            super().land(src, hop, into)

    def _ended(self, rank: int, hop: int) -> Pending[Any]:
        return failed(WaitEnded(self._ranks[rank], describe(self.tag(hop))))

    @override
    def send(self, payload: Payload, dst: int, hop: int) -> Pending[None]:
        if not self._current():
            return self._ended(dst, hop)
        self.sent[self._ranks[dst]] += payload.nbytes
        return self._comm.send(payload, dst, self.tag(hop))

    @override
    def count(self, nbytes: Counts) -> None:
        raise Unsupported("native collectives in a run that outlives the loss of members")


class Among:
    """Group of some of the ranks of a larger group; see :class:`farflung.types.Group`.

    Args:
      comm: Larger group.
      ranks: Ranks of the subgroup, as numbered in the larger group.
    """

    lane: Any

    def __init__(self, comm: Group, ranks: Sequence[int]) -> None:
        self._comm, self.ranks = comm, tuple(ranks)
        self.rank, self.size = self.ranks.index(comm.rank), len(self.ranks)
        self.lane, self.sent = comm.lane, comm.sent

    @property
    def auto(self) -> Mapping[int, str]:
        return self._comm.auto

    @auto.setter
    def auto(self, names: Mapping[int, str]) -> None:
        self._comm.auto = names

    def send(self, payload: Payload, dst: int, tag: Tag, priority: int = 0) -> Pending[None]:
        return self._comm.send(payload, self.ranks[dst], tag, priority)

    def recv(
        self,
        src: int,
        tag: Tag,
        expect: tuple[TensorSpec, ...] | None = None,
        *,
        deadline_s: float | None = None,
    ) -> Pending[Payload]:
        return self._comm.recv(self.ranks[src], tag, expect, deadline_s=deadline_s)

    def land(self, src: int, tag: Tag, into: Tensor) -> None:
        self._comm.land(self.ranks[src], tag, into)

    def collective(self, name: str) -> AllReduce:
        return self._comm.collective(name)

    def all_reduce(self, tensor: Tensor, tag: Tag) -> Pending[Tensor]:
        del tensor, tag
        return failed(Unsupported("native collectives in a run that outlives the loss of members"))
