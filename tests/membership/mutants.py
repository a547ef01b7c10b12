"""The protocol with one rule left out at a time; a checker that does not catch each of them checks nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from farflung.membership import Certificate, Member, Report, View, Vote, is_majority

__all__ = ["MUTANTS", "Mutant"]


class AnySet(Member):
    """Any reachable set decides."""

    def _is_quorum(self, names: Collection[str], dead: Collection[str]) -> bool:
        return True


class CutLeaveDenominator(Member):
    """Members whose connection is closed are not counted."""

    def _is_quorum(self, names: Collection[str], dead: Collection[str]) -> bool:
        assert self.view is not None
        return is_majority(set(names), self.view.members, {*dead, *self._down})


class AnyHalf(Member):
    """Half of the members decides, with or without the most senior."""

    def _is_quorum(self, names: Collection[str], dead: Collection[str]) -> bool:
        assert self.view is not None
        alive = [x for x in self.view.members if x not in dead]
        return 2 * len(set(alive).intersection(names)) >= len(alive)


class WillWithoutVote(Member):
    """A certificate has an exit code and no vote."""

    def died(self, certificate: Certificate) -> None:
        will = certificate.will
        super().died(certificate._replace(will=will and will._replace(vote=None)))


class WillWithoutKnowledge(Member):
    """A certificate has a vote, but its promise is not kept."""

    def died(self, certificate: Certificate) -> None:
        will = certificate.will
        super().died(certificate._replace(will=will and will._replace(know={}, wills={})))


class SendBeforeKeep(Member):
    """A message leaves before its sender's will knows of it."""

    def _tell(self, names: Collection[str], message: Report | Vote) -> None:
        for name in sorted(names):
            self._driver.send(name, message)
        self._driver.keep(self._report())


class WithoutVotes(Member):
    """Unanimous reports decide."""

    def _cast(self) -> None:
        assert self.view is not None
        part = self._part()
        if self.name in part and self._is_quorum(part, self._wills):
            reports = self._unanimous(part, self._report())
            if reports is not None:
                self._install(self._value(reports))


class WithoutEarlierVotes(Member):
    """Earlier votes are not adopted."""

    def _value(self, reports: Mapping[str, Report]) -> View:
        return self._successor(reports)


class WithoutUnanimity(Member):
    """A quorum of frozen reports is enough, whatever they know."""

    def _unanimous(self, part: Iterable[str], own: Report) -> dict[str, Report] | None:
        names = list(part)
        reports = {x: own if x == self.name else self._reports.get(x) for x in names}
        frozen = {
            x: report for x, report in reports.items() if report is not None and report.held is not None
        }
        return frozen if self._is_quorum(frozen, self._wills) else None


class OldestHeld(Member):
    """A view begins after the exchanges that all hold, not those that any holds."""

    def _successor(self, reports: Mapping[str, Report]) -> View:
        view = super()._successor(reports)
        return view._replace(newest=view.newest[:1], holders=view.holders[:1])


class WithoutLateAnswer(Member):
    """A process of an older view is not told of the newer one when it connects or reports."""

    def back(self, name: str) -> None:
        super().back(name)
        self._due.discard(name)

    def _hear_report(self, source: str, report: Report) -> None:
        if self.view is None or report.view.number >= self.view.number:
            super()._hear_report(source, report)


class AccusedLeave(Member):
    """Each member to which a connection is cut is left out, in the place of the fewest that break all cut pairs."""

    def _part(self) -> list[str]:
        assert self.view is not None
        accused = {fact.other for fact, count in self._know.items() if fact.kind == "link" and count % 2}
        return [x for x in self.view.members if x not in self._wills and x not in accused]


class Mutant(NamedTuple):
    """What is left out, and by which means that is found.

    Args:
      rules: of the members.
      driver: what the driver leaves out.
      seed: the first whose plan breaks a law; ``None``: no plan of 20,000 does.
      faults: of which some interleaving breaks a law; empty: none is known.
    """

    rules: type[Member]
    driver: str = ""
    seed: int | None = None
    faults: tuple[tuple[str, ...], ...] = ()


TWO_RESETS = (("reset", "a", "b"), ("reset", "a", "c"))

MUTANTS = {
    "": Mutant(Member),
    "majority": Mutant(AnySet, seed=9, faults=TWO_RESETS),
    "denominator": Mutant(CutLeaveDenominator, seed=2296, faults=TWO_RESETS),
    "senior": Mutant(AnyHalf, seed=215),
    "will-vote": Mutant(WillWithoutVote, seed=67),
    "will-knowledge": Mutant(WillWithoutKnowledge),
    "keep": Mutant(SendBeforeKeep),
    "votes": Mutant(WithoutVotes, seed=23, faults=TWO_RESETS),
    "adopt": Mutant(WithoutEarlierVotes, seed=67),
    "unanimity": Mutant(WithoutUnanimity, seed=10),
    "newest": Mutant(OldestHeld, seed=0),
    "freeze": Mutant(Member, "freeze", seed=2),
    "refusal": Mutant(Member, "refusal", seed=24),
    "late-answer": Mutant(WithoutLateAnswer, seed=14),
    "pairs": Mutant(AccusedLeave, seed=9),
}
