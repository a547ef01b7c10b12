"""Views, quorums, and the largest set of connected members."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Set
from typing import NamedTuple

__all__ = ["EXACT_MEMBERS", "Handover", "View", "find_largest_connected", "find_reachable", "is_majority"]

EXACT_MEMBERS = 20
"""Maximum number of members with a broken link for which the largest connected set is searched exhaustively."""


class Handover(NamedTuple):
    """Handover of a missing exchange, or of the model's whole state under the first number of ``complete_exchanges``.

    Args:
      giver: Member of the previous view, which may have left.
      receiver: Member of the view.
      exchange: Number of the exchange.
    """

    giver: str
    receiver: str
    exchange: int


class View(NamedTuple):
    """Numbered list of members, and the exchanges that are complete before it begins.

    A member's rank in the view is its index in ``members``. Exchanges up to ``complete_exchanges[0]`` are complete on
    each member that has the model, and later ones in ``complete_exchanges`` on their ``holders``. All others are
    repeated.

    Args:
      number: Number of the previous view plus one.
      members: Names by seniority: members of the previous view in their order, then joining ones.
      complete_exchanges: Ascending numbers from the last common one on; empty if no member has the model.
      holders: Holders of each of these in the previous view, beginning with its giver.
    """

    number: int
    members: tuple[str, ...]
    complete_exchanges: tuple[int, ...]
    holders: tuple[tuple[str, ...], ...]

    def list_handovers(self) -> list[Handover]:
        """Returns the handovers of results that members lack.

        A member without the model receives the state of the first holder, then the exchanges that this holder lacks.
        """
        handovers = []
        for exchange, holders in zip(self.complete_exchanges, self.holders, strict=True):
            for member in self.members:
                is_joining = member not in self.holders[0]
                holder = (
                    self.holders[0][0] if is_joining and exchange != self.complete_exchanges[0] else member
                )
                if holder not in holders:
                    handovers.append(Handover(holders[0], member, exchange))
        return handovers


def is_majority(names: Set[str], members: Iterable[str], dead: Collection[str]) -> bool:
    """Returns True if names are more than half of the members not certified dead, or half with the most senior."""
    alive = [member for member in members if member not in dead]
    missing = sum(member not in names for member in alive)
    return 2 * missing < len(alive) or (2 * missing == len(alive) > 0 and alive[0] in names)


def find_reachable(member: str, members: Iterable[str], cut: Collection[tuple[str, str]]) -> list[str]:
    """Returns the members, in their order, that are connected to one of them directly or through others."""
    names = list(members)
    reached, latest = {member}, {member}
    while latest:
        latest = {
            y
            for y in names
            if y not in reached and any((x, y) not in cut and (y, x) not in cut for x in latest)
        }
        reached |= latest
    return [x for x in names if x in reached]


def find_largest_connected(members: Iterable[str], cut: Collection[tuple[str, str]]) -> list[str]:
    """Returns the largest set of members without a cut pair; of equal sets the one with the most senior members.

    The search is exponential in the number of members of cut pairs. Above :data:`EXACT_MEMBERS` it repeatedly removes
    the member with most cut pairs (of equal members the most junior), so the set may not be the largest. In both cases
    the result is a function of the arguments alone, and no member can be added to it.

    Args:
      members: Members by seniority.
      cut: Pairs without a connection, in either order.
    """
    ordered = list(members)
    broken = {x: {y for y in ordered if (x, y) in cut or (y, x) in cut} for x in ordered}
    unbroken = {x for x in ordered if not broken[x]}
    suspects = [x for x in ordered if x not in unbroken]
    selected = unbroken.union(
        _find_largest(suspects, broken)
        if len(suspects) <= EXACT_MEMBERS
        else _select_greedily(suspects, broken)
    )
    return [x for x in ordered if x in selected]


def _find_largest(members: list[str], broken: dict[str, set[str]]) -> list[str]:
    for place, member in enumerate(members):
        remaining = [*members[:place], *members[place + 1 :]]
        if broken[member].intersection(remaining):
            including = [member, *_find_largest([x for x in remaining if x not in broken[member]], broken)]
            excluding = _find_largest(remaining, broken)
            return max(including, excluding, key=len)  # of equals the first, with the more senior member
    return members


def _select_greedily(members: list[str], broken: dict[str, set[str]]) -> set[str]:
    selected = set(members)
    for _ in members:
        worst = max((x for x in reversed(members) if x in selected), key=lambda x: len(broken[x] & selected))
        if not broken[worst] & selected:
            break
        selected.remove(worst)
    for member in members:
        if not broken[member] & selected:
            selected.add(member)
    return selected
