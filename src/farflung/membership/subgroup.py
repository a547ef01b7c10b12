"""Subgroups of the ranks of a run, and the channels of their exchanges."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from typing_extensions import override

from farflung.comm import ExchangeChannel
from farflung.comm.channel import describe_tag
from farflung.errors import Unsupported, WaitEnded
from farflung.tasks import Pending, create_failed
from farflung.types import Counts, Group, Payload, Tag, TensorSpec

__all__ = ["Subgroup", "ViewChannel"]


class ViewChannel(ExchangeChannel):
    """Channel of an exchange within a view, whose bytes are counted by rank in the first view.

    An attempt whose message has arrived just before a newer view resumes after that view is installed. It must neither
    send nor receive then, because the messages belong to the next attempt.

    Args:
      group: Members that take part.
      full_channel: Channel of the exchange among all ranks, which counts the bytes.
      is_current: Function that returns True while the view is the newest.
    """

    def __init__(
        self, group: Subgroup, full_channel: ExchangeChannel, is_current: Callable[[], bool]
    ) -> None:
        super().__init__(group, *full_channel.get_tag(0)[:2])
        self.sent_counts = full_channel.sent_counts
        self._ranks, self._is_current = group.ranks, is_current

    @override
    def recv(self, src: int, hop: int, expect: tuple[TensorSpec, ...] | None = None) -> Pending[Payload]:
        if not self._is_current():
            return self._fail_wait(src, hop)
        return self._comm.recv(src, self.get_tag(hop), expect, deadline_s=math.inf)

    @override
    def post_recv_buffer(self, src: int, hop: int, buffer: Tensor) -> None:
        if self._is_current():
            super().post_recv_buffer(src, hop, buffer)

    def _fail_wait(self, rank: int, hop: int) -> Pending[Any]:
        return create_failed(WaitEnded(self._ranks[rank], describe_tag(self.get_tag(hop))))

    @override
    def send(self, payload: Payload, dst: int, hop: int) -> Pending[None]:
        if not self._is_current():
            return self._fail_wait(dst, hop)
        self.sent_counts[self._ranks[dst]] += payload.nbytes
        return self._comm.send(payload, dst, self.get_tag(hop))

    @override
    def count_sent(self, nbytes: Counts) -> None:
        raise Unsupported("native collectives in a run that outlives the loss of members")


class Subgroup:
    """Group of some of the ranks of a larger group; see :class:`farflung.types.Group`.

    Args:
      comm: Larger group.
      ranks: Ranks of the subgroup, as numbered in the larger group.
    """

    coding_processor: Any

    def __init__(self, comm: Group, ranks: Sequence[int]) -> None:
        self._comm, self.ranks = comm, tuple(ranks)
        self.rank, self.size = self.ranks.index(comm.rank), len(self.ranks)
        self.coding_processor, self.sent_bytes = comm.coding_processor, comm.sent_bytes
        self.get_collective = comm.get_collective
        self.auto_collectives: Mapping[int, str] = {}

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

    def post_recv_buffer(self, src: int, tag: Tag, buffer: Tensor) -> None:
        self._comm.post_recv_buffer(self.ranks[src], tag, buffer)

    def all_reduce(self, tensor: Tensor, tag: Tag) -> Pending[Tensor]:
        del tensor, tag
        return create_failed(Unsupported("native collectives in a run that outlives the loss of members"))
