"""Views, quorums, and the largest set of members that can reach each other."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Set
from typing import NamedTuple

__all__ = ["EXACT_MEMBERS", "Transfer", "View", "is_majority", "largest_connected", "reachable"]

EXACT_MEMBERS = 20
"""Up to this many members with a broken link the largest connected set is found by exhaustive search."""


class Transfer(NamedTuple):
    """An exchange that a member of a view lacks, or the whole state of the model under the first number of ``newest``.

    Args:
      giver: a member of the view before, which may have left.
      receiver: a member of the view.
      exchange: its number.
    """

    giver: str
    receiver: str
    exchange: int


class View(NamedTuple):
    """A numbered list of members, and the exchanges that are whole before it begins.

    A member's rank in the view is its place in ``members``. Exchanges up to ``newest[0]`` are whole on each member
    that has the model, later ones in ``newest`` on the members named beside them; all others are made again.

    Args:
      number: one more than that of the view before.
      members: names by seniority: members of the view before in their order, then those that join.
      newest: numbers of whole exchanges, ascending, from the last common one on; empty: no member has the model.
      holders: for each of these the members of the view before that hold it, beginning with its giver.
    """

    number: int
    members: tuple[str, ...]
    newest: tuple[int, ...]
    holders: tuple[tuple[str, ...], ...]

    def transfers(self) -> list[Transfer]:
        """Returns what members lack and which holders give it.

        A member without the model receives the state of the first holder, then exchanges that this one lacks.
        """
        found = []
        for exchange, holders in zip(self.newest, self.holders, strict=True):
            for member in self.members:
                joins = member not in self.holders[0]
                has = self.holders[0][0] if joins and exchange != self.newest[0] else member
                if has not in holders:
                    found.append(Transfer(holders[0], member, exchange))
        return found


def is_majority(names: Set[str], members: Iterable[str], dead: Collection[str]) -> bool:
    """Returns whether names are more than half of the members not certified dead, or half with the most senior."""
    alive = [member for member in members if member not in dead]
    missing = sum(member not in names for member in alive)
    return 2 * missing < len(alive) or (2 * missing == len(alive) > 0 and alive[0] in names)


def reachable(member: str, members: Iterable[str], cut: Collection[tuple[str, str]]) -> list[str]:
    """Returns the members that connections lead to from one of them, over others too, in their order."""
    rest = list(members)
    found, latest = {member}, {member}
    while latest:
        latest = {
            y for y in rest if y not in found and any((x, y) not in cut and (y, x) not in cut for x in latest)
        }
        found |= latest
    return [x for x in rest if x in found]


def largest_connected(members: Iterable[str], cut: Collection[tuple[str, str]]) -> list[str]:
    """Returns the largest set of members without a cut pair; of several the one with the most senior members.

    The search is exponential in the members of cut pairs. Above :data:`EXACT_MEMBERS` of these the member with most
    cut pairs is left out repeatedly (of several the most junior), so the set may not be the largest. Either way it
    is a function of the arguments alone, and no member can be added to it.

    Args:
      members: by seniority.
      cut: pairs without a connection, in either order.
    """
    ordered = list(members)
    broken = {x: {y for y in ordered if (x, y) in cut or (y, x) in cut} for x in ordered}
    whole = {x for x in ordered if not broken[x]}
    suspects = [x for x in ordered if x not in whole]
    kept = whole.union(
        _largest(suspects, broken) if len(suspects) <= EXACT_MEMBERS else _greedy(suspects, broken)
    )
    return [x for x in ordered if x in kept]


def _largest(members: list[str], broken: dict[str, set[str]]) -> list[str]:
    for place, member in enumerate(members):
        rest = [*members[:place], *members[place + 1 :]]
        if broken[member].intersection(rest):
            including = [member, *_largest([x for x in rest if x not in broken[member]], broken)]
            excluding = _largest(rest, broken)
            return max(including, excluding, key=len)  # the first of equals, which has the more senior member
    return members


def _greedy(members: list[str], broken: dict[str, set[str]]) -> set[str]:
    kept = set(members)
    for _ in members:
        worst = max((x for x in reversed(members) if x in kept), key=lambda x: len(broken[x] & kept))
        if not broken[worst] & kept:
            break
        kept.remove(worst)
    for member in members:
        if not broken[member] & kept:
            kept.add(member)
    return kept
