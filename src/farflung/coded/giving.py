"""How a device gives others what they ask for: one answer after the other to each, so that little is under way."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from farflung.coded import tags
from farflung.coded.blocks import Holding
from farflung.coded.messages import Fetch, Malformed, unpacked
from farflung.errors import FarflungError
from farflung.types import Payload, Runtime

__all__ = ["Giver"]

_MOST = 64
"""Questions of one device that wait to be answered; more are refused."""
_NO_BLOCK = Payload(())
"""The answer to who asks for something that is not there."""


class Giver:
    """Answers the questions of all other devices.

    Args:
      runtime: the device's.
      holding: what it has.
      refuse: called for what is no question, or one of a part that a block does not have.
    """

    def __init__(self, runtime: Runtime, holding: Holding, refuse: Callable[[Exception], object]) -> None:
        self._runtime, self._comm, self._holding, self._refuse = runtime, runtime.comm, holding, refuse
        self._asked: dict[int, deque[Fetch]] = {}
        """By those who are being answered."""

    async def run(self) -> None:
        """As long as there is somebody."""
        while True:
            rank, payload = await self._comm.recv_any(tags.ASK, deadline_s=math.inf)
            try:
                request = unpacked(payload, (Fetch,))
                assert isinstance(request, Fetch)
                if request.reply < 0 or len(self._asked.get(rank, ())) == _MOST:
                    raise Malformed("a question that cannot be answered")
            except Malformed as error:
                self._refuse(error)
                continue
            if rank in self._asked:
                self._asked[rank].append(request)
            else:
                self._asked[rank] = deque([request])
                self._runtime.launch(self._answer(rank))

    async def _answer(self, rank: int) -> None:
        asked = self._asked[rank]
        try:
            while asked:
                request = asked.popleft()
                await self._comm.send(self._given(request), rank, tags.reply(request.reply))
        except FarflungError:  # who has asked is gone
            return
        finally:
            del self._asked[rank]

    def _given(self, request: Fetch) -> Payload:
        """The rows, or nothing where the block is not there: an order may be older than the end of a block."""
        if request.block not in self._holding.blocks:
            return _NO_BLOCK
        try:
            return Payload((self._holding.give(request),))
        except Malformed as error:
            self._refuse(error)
            return _NO_BLOCK
