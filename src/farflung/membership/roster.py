"""Members of a run: the newest view, and the members that take samples at each step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from farflung.membership.views import View
from farflung.types import Change, Sampler

__all__ = ["Roster"]


class Roster:
    """Members of a run, as known to one of them.

    Args:
      view: First view.
      change: Members that take samples at the first step.
      max_steps_ahead: Maximum number of steps that a member begins after the last one whose exchanges are all complete.
    """

    def __init__(self, view: View, change: Change, max_steps_ahead: int) -> None:
        self.view = view
        """Newest view that is installed, or known to a joining member."""
        self.known_names = set(view.members)
        """Names of all present and former members."""
        self.changes = [change]
        """Changes of the members that take samples, by their first step."""
        self.first_steps: dict[int, int] = {}
        """First step of each member that has joined."""
        self._max_steps_ahead = max_steps_ahead

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks of the newest view, by seniority."""
        return tuple(map(int, self.view.members))

    def enter_view(self, view: View) -> None:
        """Sets the newest view."""
        self.view = view
        self.known_names.update(view.members)

    def find_change(self, step: int) -> Change:
        """Returns the change that is in force at a step."""
        return next((x for x in reversed(self.changes) if x.step <= step), self.changes[0])

    def list_joiners(self, step: int) -> list[int]:
        """Returns the ranks that begin at a step."""
        return [rank for rank in self.find_change(step).ranks if self.first_steps.get(rank, -1) == step]

    def list_contributors(self, step: int) -> list[int]:
        """Returns the members of the view that take part in exchanges which start after a step has begun."""
        return [rank for rank in self.members if self.first_steps.get(rank, 0) <= step]

    def count_batches(self, step: int) -> int:
        """Returns the number of batches taken at a step, minus those returned at it."""
        return len(self.find_change(step).ranks) - len(self._list_returned_batches(step))

    def return_batches(self, step: int, sampler: Sampler) -> None:
        """Returns the samples of lost members to a sampler if a change takes effect at a step."""
        for before, place in self._list_returned_batches(step):
            sampler.return_batch(before, place)

    def _list_returned_batches(self, step: int) -> list[tuple[int, int]]:
        """Returns the batches returned at a step: the step at which each was taken, and its place in that step."""
        if all(change.step != step for change in self.changes):
            return []
        return [
            (before, self.find_change(before).ranks.index(rank))
            for (before, rank), change in self._find_lost_batches().items()
            if change.step == step
        ]

    def _find_lost_batches(self) -> dict[tuple[int, int], Change]:
        """Returns the change that returns each batch, by the step at which it was taken and the rank."""
        first_last = sorted(self.changes, key=lambda change: (change.step, change.view), reverse=True)
        return {
            (before, rank): change
            for change in first_last  # the first change overwrites later ones
            for before in change.repeated_steps
            for rank in change.lost_ranks
            if rank in self.find_change(before).ranks
        }

    def record_change(
        self, previous_members: Sequence[str], view: View, step_ends: Iterable[tuple[int, int]], time_s: float
    ) -> None:
        """Records the first step at which the members of a view take samples.

        Args:
          previous_members: Members of the previous view.
          view: New view.
          step_ends: Numbers of exchanges that end a step, each with the step.
          time_s: Current time in seconds.
        """
        lost, joined = (
            tuple(int(name) for name in names if name not in other_names)
            for names, other_names in ((previous_members, view.members), (view.members, previous_members))
        )
        last_complete, newest = view.complete_exchanges[0], set(view.complete_exchanges)
        while last_complete + 1 in newest:
            last_complete += 1
        last_done = max(step for number, step in step_ends if number <= last_complete)
        ranks = tuple(map(int, view.members))
        # Later steps need exchanges of the new view: no member has begun them, and by then all its members have.
        first_step = max((self.first_steps.get(rank, 0) for rank in ranks if rank not in joined), default=0)
        repeated = range(last_done + 1, max(last_done + 1 + self._max_steps_ahead, first_step))
        # Earlier lost members count if repeated steps were to be completed by a result of theirs.
        recorded = self._find_lost_batches()
        batches = {
            (step, rank)
            for step in repeated
            for rank in self.find_change(step).ranks
            if rank not in (*ranks, *lost)
        }
        lost += tuple(sorted({rank for _, rank in batches.difference(recorded)}))
        self.changes.append(Change(repeated.stop, ranks, lost, joined, repeated, time_s, view.number))
        self.first_steps.update(dict.fromkeys(joined, repeated.stop))

    def to_json(self) -> dict[str, Any]:
        """Returns the view and the changes as JSON, for replicas that follow."""
        return {
            "number": self.view.number,
            "members": self.members,
            "newest": self.view.complete_exchanges,
            "changes": [
                [*x[:4], [x.repeated_steps.start, x.repeated_steps.stop], *x[5:]] for x in self.changes
            ],
        }

    def replace_changes(self, changes: Sequence[Any]) -> None:
        """Replaces the changes by those of :meth:`to_json`."""
        self.changes = [
            Change(step, tuple(ranks), tuple(lost), tuple(joined), range(*steps), t, view)
            for step, ranks, lost, joined, steps, t, view in changes
        ]
        for change in self.changes:
            self.first_steps.update(dict.fromkeys(change.joined_ranks, change.step))
