"""Knowledge of a member about its view, and what follows from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from farflung.membership.messages import EndCertificate, Fact
from farflung.membership.views import View, find_largest_connected, find_reachable

__all__ = ["Knowledge"]


class Knowledge:
    """Counts of facts about one view, and certificates of its members; both only grow.

    Args:
      view: View.
    """

    def __init__(self, view: View) -> None:
        self.view = view
        self.fact_counts: dict[Fact, int] = {}
        self.certificates: dict[str, EndCertificate] = {}
        """Certificates of members of the view, by name."""

    @property
    def alive(self) -> list[str]:
        """Members that are not certified dead, by seniority."""
        return [x for x in self.view.members if x not in self.certificates]

    @property
    def is_ending(self) -> bool:
        """True if the view ends (R2): by a cut, even one that has healed, a death or a wish."""
        members = set(self.view.members)
        return bool(self.certificates) or any(
            fact.kind != "link" or fact.peer in members for fact in self.fact_counts
        )

    def merge_facts(self, fact_counts: Mapping[Fact, int]) -> bool:
        """Merges counts of facts; returns True if any has grown."""
        grown = {fact: count for fact, count in fact_counts.items() if count > self.fact_counts.get(fact, 0)}
        self.fact_counts.update(grown)
        return bool(grown)

    def find_cuts(self) -> set[frozenset[str]]:
        """Returns the pairs of members, not certified dead, with a broken connection."""
        alive = set(self.alive)
        pairs = (frozenset((fact.member, fact.peer)) for fact, count in self.fact_counts.items() if count % 2)
        return {pair for pair in pairs if len(pair) == 2 and pair <= alive}

    def find_participants(self, reached_from: str | None = None) -> list[str]:
        """Returns the participants of the agreement (R3), by seniority.

        Args:
          reached_from: Member that has to reach them, directly or through others; ``None`` if all members count.
        """
        links = ((fact, count) for fact, count in self.fact_counts.items() if fact.kind == "link")
        cut = {(fact.member, fact.peer) for fact, count in links if count % 2}
        names = self.alive if reached_from is None else find_reachable(reached_from, self.alive, cut)
        return find_largest_connected(names, cut)

    def find_admitted(self, participants: Iterable[str]) -> list[str]:
        """Returns the guests that are connected to all participants."""
        guests = {fact.peer for fact in self.fact_counts if fact.kind == "link"}.difference(self.view.members)
        links = {
            guest: [self.fact_counts.get(Fact("link", name, guest), 1) for name in participants]
            for guest in guests
        }
        return sorted(guest for guest, counts in links.items() if not any(count % 2 for count in counts))
