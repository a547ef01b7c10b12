"""Subgroups of the ranks of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from farflung.comm.channel import describe_tag
from farflung.errors import Unsupported, WaitEnded
from farflung.tasks import Pending, create_failed
from farflung.types import Communicator, Counts, Payload, SentBytes, Tag, TensorSpec

__all__ = ["Subgroup"]


class Subgroup:
    """Group of some of the ranks of a communicator; see :class:`farflung.types.Group`.

    An attempt at an exchange whose message has arrived just before a newer view resumes after that view is installed.
    It must neither send nor receive then, because the messages belong to the next attempt.

    Args:
      comm: Communicator of all ranks.
      ranks: Ranks of the subgroup, as numbered by the communicator.
      is_current: Function that returns True while the subgroup's view is the newest; its waits end with the view, and
        by no deadline. None for a subgroup that stays, whose waits have the run's deadline.
      sent_counts: Counts to which bytes are added by receiving rank, as numbered by the communicator.
    """

    coding_processor: Any

    def __init__(
        self,
        comm: Communicator,
        ranks: Sequence[int],
        *,
        is_current: Callable[[], bool] | None = None,
        sent_counts: Counts | None = None,
    ) -> None:
        self._comm, self.ranks = comm, tuple(ranks)
        self.rank, self.size = self.ranks.index(comm.rank), len(self.ranks)
        self.coding_processor, self.get_collective = comm.coding_processor, comm.get_collective
        self.sent_bytes = SentBytes(self.size)
        """Bytes that bypass :meth:`send`, which a subgroup does not support."""
        self._is_current: Callable[[], bool] = is_current or (lambda: True)
        self._deadline_s = None if is_current is None else math.inf
        self._sent_counts = np.zeros(comm.size, dtype=np.int64) if sent_counts is None else sent_counts
        self.auto_collectives: Mapping[int, str] = {}

    def _fail_wait(self, rank: int, tag: Tag) -> Pending[Any]:
        return create_failed(WaitEnded(self.ranks[rank], describe_tag(tag)))

    def send(self, payload: Payload, dst: int, tag: Tag, priority: int = 0) -> Pending[None]:
        if not self._is_current():
            return self._fail_wait(dst, tag)
        self._sent_counts[self.ranks[dst]] += payload.nbytes
        return self._comm.send(payload, self.ranks[dst], tag, priority)

    def recv(self, src: int, tag: Tag, expect: tuple[TensorSpec, ...] | None = None) -> Pending[Payload]:
        if not self._is_current():
            return self._fail_wait(src, tag)
        return self._comm.recv(self.ranks[src], tag, expect, deadline_s=self._deadline_s)

    def post_recv_buffer(self, src: int, tag: Tag, buffer: Tensor) -> None:
        if self._is_current():
            self._comm.post_recv_buffer(self.ranks[src], tag, buffer)

    def all_reduce(self, tensor: Tensor, tag: Tag) -> Pending[Tensor]:
        del tensor, tag
        return create_failed(Unsupported("native collectives in a run that outlives the loss of members"))
