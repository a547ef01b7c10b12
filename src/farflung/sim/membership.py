"""The members of a view that is not whole, in virtual time, and which peers each member knows."""

from __future__ import annotations

from collections.abc import Callable, Collection, MutableSequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from farflung.comm.mailbox import Mailbox
from farflung.errors import PeerLost
from farflung.tasks import Pending

__all__ = ["Membership", "Tell"]

Tell: TypeAlias = Callable[[int, int, Callable[[], None]], None]
"""Sends a notice from one rank to another, and calls a function when it arrives."""


@dataclass(eq=False, slots=True)
class _Membership:
    """A rank's membership from its admission until it leaves or is lost; a rank that is admitted again has another."""

    rank: int
    mailbox: Mailbox
    knows: dict[int, _Membership]
    """The memberships that this member believes to be current, by rank."""
    over: bool = False
    missed: set[int] = field(default_factory=set)
    """The ranks that have learnt of its end."""
    leaving: int = 0
    """The number of its messages that are still being sent."""
    when_all_left: Callable[[], None] | None = None


class Membership:
    """Admits members, ends their membership, and carries the news between ranks.

    A member can send to an admitted rank once the rank's greeting has arrived, and keeps sending to a rank until the
    notice of its end has arrived. An admitted rank knows all present members at once.

    Args:
      mailboxes: of all ranks; a rank's mailbox is replaced before the rank is admitted again.
      absent: the ranks that are not members at the start.
      say: sends a notice as a message of no bytes.
      notice: reports a closed connection, one link delay later.
    """

    def __init__(
        self, mailboxes: MutableSequence[Mailbox], absent: Collection[int], say: Tell, notice: Tell
    ) -> None:
        self._mailboxes, self._say, self._notice = mailboxes, say, notice
        here = [rank for rank in range(len(mailboxes)) if rank not in absent]
        self._here = {rank: _Membership(rank, mailboxes[rank], {}) for rank in here}
        for membership in self._here.values():
            membership.knows.update(self._here)

    def __contains__(self, rank: int) -> bool:
        """Whether a rank is a member."""
        return rank in self._here

    def reaches(self, src: int, dst: int) -> bool:
        """Whether ``src`` is a member and believes ``dst`` to be one."""
        return src in self._here and dst in self._here[src].knows

    def sent(self, src: int, left: Pending[None]) -> None:
        """Counts a message of a member's until it has left."""
        membership = self._here[src]
        membership.leaving += 1
        left.on_done(lambda _: self._one_left(membership))

    def comes(self, rank: int) -> None:
        """Admits a rank, for the first time or again."""
        others = list(self._here.values())
        membership = self._here[rank] = _Membership(rank, self._mailboxes[rank], dict(self._here))
        for other in others:
            self._say(rank, other.rank, partial(self._greeted, other, membership))

    def leaves(self, rank: int) -> None:
        """Ends the membership of a rank that leaves, once its messages have been sent."""
        membership = self._here.pop(rank)
        membership.over, membership.when_all_left = True, lambda: self._leave(membership)
        if not membership.leaving:
            self._leave(membership)

    def crashes(self, rank: int) -> None:
        """Ends the membership of a rank that is lost, and closes its connections."""
        membership = self._here.pop(rank)
        membership.over = True
        self._end(membership, PeerLost(rank, "its connection was closed from its end"), self._notice)

    def _one_left(self, membership: _Membership) -> None:
        membership.leaving -= 1
        if not membership.leaving and membership.when_all_left is not None:
            membership.when_all_left()

    def _leave(self, membership: _Membership) -> None:
        membership.when_all_left = None
        self._end(membership, PeerLost(membership.rank, "it had left the run"), self._say)

    def _end(self, membership: _Membership, error: PeerLost, tell: Tell) -> None:
        for other in list(self._here.values()):
            tell(membership.rank, other.rank, partial(self._parted, other, membership, error))

    def _greeted(self, member: _Membership, newcomer: _Membership) -> None:
        """Handles a greeting at a member; an earlier membership of the newcomer's rank is lost."""
        if member.over or member.rank in newcomer.missed:
            return
        before = member.knows.get(newcomer.rank)
        if before is not None:
            error = PeerLost(newcomer.rank, "its connection was closed from its end")
            self._parted(member, before, error)
        member.knows[newcomer.rank] = newcomer
        member.mailbox.welcome(newcomer.rank)

    def _parted(self, member: _Membership, gone: _Membership, error: PeerLost) -> None:
        """Handles at a member the end of another's membership."""
        gone.missed.add(member.rank)
        if not member.over and member.knows.get(gone.rank) is gone:
            del member.knows[gone.rank]
            member.mailbox.fail_from(gone.rank, error)
