"""What rank 0 and a role in it send each other, which travels no network."""

from __future__ import annotations

from farflung.tasks import Pending, failed
from farflung.types import Payload, Tag

__all__ = ["Inside"]


class Inside:
    """What was sent and not taken yet."""

    def __init__(self) -> None:
        self._messages: dict[Tag, Pending[Payload]] = {}
        self._error: BaseException | None = None

    def send(self, payload: Payload, tag: Tag) -> None:
        """To whoever takes it; nothing after the end."""
        self._at(tag).set(payload)

    def recv(self, tag: Tag) -> Pending[Payload]:
        """Takes a message, once."""
        message = self._at(tag)

        def taken(_: object) -> None:
            self._messages.pop(tag, None)

        message.on_done(taken)
        return message

    def forget(self, tag: Tag) -> None:
        """Nobody waits for a message any more."""
        self._messages.pop(tag, None)

    def end(self, error: BaseException) -> None:
        """Fails every wait, now and from now on."""
        self._error = error
        for message in list(self._messages.values()):
            message.fail(error)

    def _at(self, tag: Tag) -> Pending[Payload]:
        if self._error is not None:
            return failed(self._error)
        return self._messages.setdefault(tag, Pending())
