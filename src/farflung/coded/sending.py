"""Messages from beside the thread that carries them."""

from __future__ import annotations

from farflung.types import Communicator, Payload, Tag

__all__ = ["sent"]


async def sent(comm: Communicator, payload: Payload, rank: int, tag: Tag) -> None:
    """Sends a message; to be launched. One to somebody who is gone is nobody's loss: the departure is told."""
    comm.send(payload, rank, tag)
