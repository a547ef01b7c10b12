"""Which members a run has: the newest view, and the members that take samples at each step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from farflung.membership.views import View
from farflung.types import Change, Sampler

__all__ = ["Roster"]


class Roster:
    """The members of a run, as one of them knows them.

    Args:
      view: the first view.
      change: the members that take samples at the first step.
      reach: the most steps that a member begins after the last one whose exchanges are all there.
    """

    def __init__(self, view: View, change: Change, reach: int) -> None:
        self.view = view
        """The newest view that is installed, or that a member which joins has heard of."""
        self.known = set(view.members)
        """All that have been members."""
        self.changes = [change]
        """The members that take samples, by the step from which on they do."""
        self.begins: dict[int, int] = {}
        """The first step of each member that has joined."""
        self._reach = reach

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks of the newest view, by seniority."""
        return tuple(map(int, self.view.members))

    def enter(self, view: View) -> None:
        """Takes a view for the newest."""
        self.view = view
        self.known.update(view.members)

    def at(self, step: int) -> Change:
        """Returns the change that is in force at a step."""
        return next((one for one in reversed(self.changes) if one.step <= step), self.changes[0])

    def joiners(self, step: int) -> list[int]:
        """Returns the ranks that begin at a step."""
        return [rank for rank in self.at(step).ranks if self.begins.get(rank, -1) == step]

    def contributors(self, step: int) -> list[int]:
        """Returns the members of the view that take part in exchanges which start after a step has begun."""
        return [rank for rank in self.members if self.begins.get(rank, 0) <= step]

    def counted(self, step: int) -> int:
        """Returns the number of batches that a step adds to those that are taken, less those given back at it."""
        return len(self.at(step).ranks) - len(self._given_back(step))

    def give_back(self, step: int, sampler: Sampler) -> None:
        """Returns the samples of lost members to a sampler, where a change takes effect at a step."""
        for before, place in self._given_back(step):
            sampler.give_back(before, place)

    def _given_back(self, step: int) -> list[tuple[int, int]]:
        """Returns the batches that are given back at a step: the step that they were taken at, and the place in it."""
        if all(change.step != step for change in self.changes):
            return []
        return [
            (before, self.at(before).ranks.index(rank))
            for (before, rank), change in self._lost_batches().items()
            if change.step == step
        ]

    def _lost_batches(self) -> dict[tuple[int, int], Change]:
        """Returns the change that gives back a batch, by the step that it was taken at and the rank."""
        first_last = sorted(self.changes, key=lambda change: (change.step, change.view), reverse=True)
        return {
            (before, rank): change
            for change in first_last  # the first counts
            for before in change.again
            for rank in change.lost
            if rank in self.at(before).ranks
        }

    def change(
        self, before: Sequence[str], view: View, complete: Iterable[tuple[int, int]], now: float
    ) -> None:
        """Notes from which step on the members of a view take samples.

        Args:
          before: the members of the view before.
          view: the view.
          complete: exchanges that end a step, each with the step.
          now: the time, in seconds.
        """
        lost, joined = (
            tuple(int(name) for name in names if name not in others)
            for names, others in ((before, view.members), (view.members, before))
        )
        whole, newest = view.newest[0], set(view.newest)
        while whole + 1 in newest:
            whole += 1
        done = max(step for number, step in complete if number <= whole)
        ranks = tuple(map(int, view.members))
        # Further steps need exchanges of the new view, so no member has begun them; all members of it have by then.
        begins = max((self.begins.get(rank, 0) for rank in ranks if rank not in joined), default=0)
        again = range(done + 1, max(done + 1 + self._reach, begins))
        # A member that was lost before counts where steps are made again that a result of it was to complete.
        known = self._lost_batches()
        taken = {
            (step, rank) for step in again for rank in self.at(step).ranks if rank not in (*ranks, *lost)
        }
        lost += tuple(sorted({rank for _, rank in taken.difference(known)}))
        self.changes.append(Change(again.stop, ranks, lost, joined, again, now, view.number))
        self.begins.update(dict.fromkeys(joined, again.stop))

    def to_json(self) -> dict[str, Any]:
        """Returns what replicas that follow are told."""
        return {
            "number": self.view.number,
            "members": self.members,
            "newest": self.view.newest,
            "changes": [[*one[:4], [one.again.start, one.again.stop], *one[5:]] for one in self.changes],
        }

    def take_changes(self, changes: Sequence[Any]) -> None:
        """Takes the changes of :meth:`to_json` in place of those that are known."""
        self.changes = [
            Change(step, tuple(ranks), tuple(lost), tuple(joined), range(*again), t, view)
            for step, ranks, lost, joined, again, t, view in changes
        ]
        for change in self.changes:
            self.begins.update(dict.fromkeys(change.joined, change.step))
