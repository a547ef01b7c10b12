"""Who is there in a view that is not whole, and what each member knows of that."""

from __future__ import annotations

from collections.abc import Callable, Collection, MutableSequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from farflung.comm.mailbox import Mailbox
from farflung.errors import PeerLost
from farflung.tasks import Pending

__all__ = ["Roster", "Tell"]

Tell: TypeAlias = Callable[[int, int, Callable[[], None]], None]
"""Takes word from one rank to another, and calls something when it is there."""


@dataclass(eq=False, slots=True)
class _Stay:
    """A replica, from when it comes in until it leaves or is lost; whoever comes again begins another."""

    rank: int
    mailbox: Mailbox
    knows: dict[int, _Stay]
    """Whom it takes for present, by rank."""
    over: bool = False
    missed: set[int] = field(default_factory=set)
    """The ranks that have seen its end."""
    leaving: int = 0
    """Messages of its own that have not left yet."""
    when_all_left: Callable[[], None] | None = None


class Roster:
    """Members come in and greet the others; they take leave, or are lost.

    Until it has heard a greeting, a member can send nothing to who has come in; and until it has heard of its end, it
    sends to who is there no more. Who comes in knows from the first all who are there.

    Args:
      mailboxes: of all ranks; that of a rank is replaced before it comes in again.
      absent: the ranks that are not there at the start.
      say: sends a word as a message of no bytes.
      notice: tells of a connection that has closed.
    """

    def __init__(
        self, mailboxes: MutableSequence[Mailbox], absent: Collection[int], say: Tell, notice: Tell
    ) -> None:
        self._mailboxes, self._say, self._notice = mailboxes, say, notice
        here = [rank for rank in range(len(mailboxes)) if rank not in absent]
        self._here = {rank: _Stay(rank, mailboxes[rank], {}) for rank in here}
        for stay in self._here.values():
            stay.knows.update(self._here)

    def __contains__(self, rank: int) -> bool:
        """Whether a rank is there."""
        return rank in self._here

    def reaches(self, src: int, dst: int) -> bool:
        """Whether a rank is there that takes another for present."""
        return src in self._here and dst in self._here[src].knows

    def sent(self, src: int, left: Pending[None]) -> None:
        """A member has sent a message."""
        stay = self._here[src]
        stay.leaving += 1
        left.on_done(lambda _: self._one_left(stay))

    def comes(self, rank: int) -> None:
        """A rank comes in, for the first time or again."""
        others = list(self._here.values())
        stay = self._here[rank] = _Stay(rank, self._mailboxes[rank], dict(self._here))
        for other in others:
            self._say(rank, other.rank, partial(self._greeted, other, stay))

    def leaves(self, rank: int) -> None:
        """A member takes leave, behind all that it has sent."""
        stay = self._here.pop(rank)
        stay.over, stay.when_all_left = True, lambda: self._farewell(stay)
        if not stay.leaving:
            self._farewell(stay)

    def crashes(self, rank: int) -> None:
        """A member is lost, and its connections close."""
        stay = self._here.pop(rank)
        stay.over = True
        self._end(stay, PeerLost(rank, "its connection was closed from its end"), self._notice)

    def _one_left(self, stay: _Stay) -> None:
        stay.leaving -= 1
        if not stay.leaving and stay.when_all_left is not None:
            stay.when_all_left()

    def _farewell(self, stay: _Stay) -> None:
        stay.when_all_left = None
        self._end(stay, PeerLost(stay.rank, "it had left the run"), self._say)

    def _end(self, stay: _Stay, error: PeerLost, tell: Tell) -> None:
        for other in list(self._here.values()):
            tell(stay.rank, other.rank, partial(self._parted, other, stay, error))

    def _greeted(self, member: _Stay, newcomer: _Stay) -> None:
        """A member hears of somebody who has come in; who was there under that rank before is gone."""
        if member.over or member.rank in newcomer.missed:
            return
        before = member.knows.get(newcomer.rank)
        if before is not None:
            error = PeerLost(newcomer.rank, "its connection was closed from its end")
            self._parted(member, before, error)
        member.knows[newcomer.rank] = newcomer
        member.mailbox.welcome(newcomer.rank)

    def _parted(self, member: _Stay, gone: _Stay, error: PeerLost) -> None:
        """A member hears of somebody who is gone."""
        gone.missed.add(member.rank)
        if not member.over and member.knows.get(gone.rank) is gone:
            del member.knows[gone.rank]
            member.mailbox.fail_from(gone.rank, error)
