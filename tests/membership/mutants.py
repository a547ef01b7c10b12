"""The protocol with one rule left out at a time; a checker that does not catch each of them checks nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from farflung.membership import EndCertificate, Member, MemberReport, View, Vote, is_majority

__all__ = ["MUTANTS", "Mutant"]


class AnySet(Member):
    """Any reachable set decides."""

    def _is_quorum(self, names: Collection[str], dead: Collection[str]) -> bool:
        return True


class CutLeaveDenominator(Member):
    """Members whose connection is closed are not counted."""

    def _is_quorum(self, names: Collection[str], dead: Collection[str]) -> bool:
        assert self.view is not None
        return is_majority(set(names), self.view.members, {*dead, *self._disconnected_names})


class AnyHalf(Member):
    """Half of the members decides, with or without the most senior."""

    def _is_quorum(self, names: Collection[str], dead: Collection[str]) -> bool:
        assert self.view is not None
        alive = [x for x in self.view.members if x not in dead]
        return 2 * len(set(alive).intersection(names)) >= len(alive)


class WillWithoutVote(Member):
    """A certificate has an exit code and no vote."""

    def handle_certificate(self, certificate: EndCertificate) -> None:
        will = certificate.final_report
        super().handle_certificate(certificate._replace(final_report=will and will._replace(vote=None)))


class WillWithoutKnowledge(Member):
    """A certificate has a vote, but its promise is not kept."""

    def handle_certificate(self, certificate: EndCertificate) -> None:
        will = certificate.final_report
        super().handle_certificate(
            certificate._replace(final_report=will and will._replace(fact_counts={}, certificates={}))
        )


class SendBeforeKeep(Member):
    """A message leaves before its sender's will knows of it."""

    def _broadcast(self, names: Collection[str], message: MemberReport | Vote) -> None:
        for name in sorted(names):
            self._driver.send(name, message)
        self._driver.store_report(self._build_report())


class WithoutVotes(Member):
    """Unanimous reports decide."""

    def _cast_vote(self) -> None:
        assert self.knowledge is not None
        part = self._find_participants()
        if self.name in part and self._is_quorum(part, self.knowledge.certificates):
            reports = self._collect_unanimous(part, self._build_report())
            if reports is not None:
                self._install_view(self._choose_value(reports))


class WithoutEarlierVotes(Member):
    """Earlier votes are not adopted."""

    def _choose_value(self, reports: Mapping[str, MemberReport]) -> View:
        return self._build_successor(reports)


class WithoutUnanimity(Member):
    """A quorum of frozen reports is enough, whatever they know."""

    def _collect_unanimous(
        self, participants: Iterable[str], own_report: MemberReport
    ) -> dict[str, MemberReport] | None:
        assert self.knowledge is not None
        names = list(participants)
        reports = {x: own_report if x == self.name else self._reports.get(x) for x in names}
        frozen = {
            x: report
            for x, report in reports.items()
            if report is not None and report.held_exchanges is not None
        }
        return frozen if self._is_quorum(frozen, self.knowledge.certificates) else None


class OldestHeld(Member):
    """A view begins after the exchanges that all hold, not those that any holds."""

    def _build_successor(self, reports: Mapping[str, MemberReport]) -> View:
        view = super()._build_successor(reports)
        return view._replace(complete_exchanges=view.complete_exchanges[:1], holders=view.holders[:1])


class WithoutLateAnswer(Member):
    """A process of an older view is not told of the newer one when it connects or reports."""

    def handle_connection(self, name: str) -> None:
        super().handle_connection(name)
        self._report_targets.discard(name)

    def _handle_report(self, source: str, report: MemberReport) -> None:
        if self.view is None or report.view.number >= self.view.number:
            super()._handle_report(source, report)


class AccusedLeave(Member):
    """Each member to which a connection is cut is left out, in the place of the fewest that break all cut pairs."""

    def _find_participants(self) -> list[str]:
        assert self.view is not None
        assert self.knowledge is not None
        accused = {
            fact.peer
            for fact, count in self.knowledge.fact_counts.items()
            if fact.kind == "link" and count % 2
        }
        return [x for x in self.view.members if x not in self.knowledge.certificates and x not in accused]


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
