"""Agreement on the next view, as a state machine without sockets and clocks.

It is Paxos without a leader, one instance per view. The ballot is the size of a member's knowledge, a
:class:`MemberReport` is a promise, and a :class:`Vote` accepts. ``docs/membership.md`` lists the rules, which comments
here number, and proves them safe.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Literal, Protocol, TypeAlias

from farflung.membership.knowledge import Knowledge
from farflung.membership.messages import EndCertificate, Fact, MemberReport, Message, Vote
from farflung.membership.views import View, is_majority

__all__ = ["CertificateSigner", "Driver", "Member"]

CertificateSigner: TypeAlias = Callable[[str, int, MemberReport | None], EndCertificate]
"""Function that signs a certificate of a name, an exit code and a final report."""


class Driver(Protocol):
    """Interface that carries out the effects of a member, in the order of the calls."""

    def send(self, name: str, message: Message) -> None:
        """Sends a message to a connected process, after all earlier messages to it."""
        ...

    def store_report(self, report: MemberReport) -> None:
        """Stores a report, before it returns, where the supervisor can read it after the end of the process."""
        ...

    def freeze(self) -> tuple[int, ...]:
        """Stops all exchanges, and returns the complete ones.

        Afterwards no exchange of the view becomes complete on this member, and no contribution is sent.

        Returns:
          The number up to which all exchanges are complete, then the later complete ones, ascending. Empty while this
          process does not have the model.
        """
        ...

    def install_view(self, view: View) -> None:
        """Enters a view.

        Exchanges in ``view.complete_exchanges`` are done, and missing ones are adopted from their givers. All later
        exchanges are repeated under the new number, from the contributions sent before. A process without the model
        drops exchanges that it has adopted. Data of an older view is refused, and data of a newer one is kept until
        that view is installed.
        """
        ...

    def send_handovers(self, view: View) -> None:
        """Sends members of a view their missing results, also after a leave; see :meth:`View.list_handovers`."""
        ...

    def did_suspend(self, view: View) -> bool:
        """Suspends this process because of a view without it, which it did not ask for.

        Returns:
          True if the process drops the model and asks to be admitted again, as a joining one does; False if it stops.
        """
        ...

    def stop(self, reason: str) -> None:
        """Ends this process's part in the run, after its handovers are sent."""
        ...


class Member:
    """State of one process in the agreement on views.

    The driver calls a method for each event. After it has passed on all arrived events it calls
    :meth:`process_events`, which reports, votes and installs. Messages are sent to connected processes only.

    Args:
      name: Unique name of this process, kept when the process is admitted again.
      driver: Driver that carries out effects.
      sign_certificate: Function that signs a certificate; see :meth:`MessageCodec.sign_certificate`.
      view: First view of a run; ``None`` if this process asks to join one.
      quorum: With ``"majority"``, more than half of the members not certified dead install a view, or half with the
        most senior. With 1, any member does, so that halves without a connection both continue.
    """

    def __init__(
        self,
        name: str,
        driver: Driver,
        sign_certificate: CertificateSigner,
        view: View | None = None,
        *,
        quorum: Literal["majority", 1] = "majority",
    ) -> None:
        self.name, self.is_stopped = name, False
        self._driver, self._sign_certificate, self._quorum = driver, sign_certificate, quorum
        self.connected_names, self._guests, self._disconnected_names = set[str](), set[str](), set[str]()
        self._certificates: dict[str, EndCertificate] = {}
        self._is_leaving = False
        self._suspended_view = 0
        """Number of the view that suspended this member."""
        self.has_left = False
        """True if this member has left on its own request: by a view without it, or before it had a view."""
        self._enter_view(view)

    def _enter_view(self, view: View | None) -> None:
        """Begins the state that belongs to one view."""
        self.view = view
        self.knowledge = None if view is None else Knowledge(view)
        """Knowledge of the view; ``None`` without a view."""
        self._reports: dict[str, MemberReport] = {}
        self._voters: dict[Vote, set[str]] = {}
        self._held_exchanges: tuple[int, ...] | None = None
        self._vote: Vote | None = None
        self._report_targets = set[str]()
        """Names of processes that must receive a report."""
        self._has_news = False
        """True if knowledge has grown, so that all connected processes must receive a report."""

    @property
    def is_frozen(self) -> bool:
        """Returns True if exchanges are stopped because the view is ending."""
        return self._held_exchanges is not None

    # --- events (R1) ------------------------------------------------------------------------------------------------

    def handle_loss(self, name: str) -> None:
        """Records that a process is unreachable, or that a message to it may be lost."""
        self.connected_names.discard(name)
        self._guests.discard(name)
        self._disconnected_names.add(name)
        self._record_connection(name)

    def handle_connection(self, name: str) -> None:
        """Records a new connection to a process that has a view."""
        self.connected_names.add(name)
        self._disconnected_names.discard(name)
        self._report_targets.add(name)
        self._record_connection(name)

    def handle_guest(self, name: str) -> None:
        """Records a new connection to a process without a view that asks to join; its settings have been checked."""
        self._guests.add(name)
        self.handle_connection(name)

    def handle_certificate(self, certificate: EndCertificate) -> None:
        """Records that a process has ended or no longer takes part; its final report counts from now."""
        name, final_report = certificate.name, certificate.final_report
        if name == self.name or name in self._certificates:
            return
        self._certificates[name] = certificate
        self.handle_loss(name)
        if final_report is not None:
            self._handle_report(name, final_report)
        if self.knowledge is not None and name in self.knowledge.view.members:
            self.knowledge.certificates[name] = certificate
            self._has_news = True

    def leave(self) -> None:
        """Requests to be left out of the next view; a process without a view stops at once."""
        if self.view is None:
            self.has_left = not self.is_stopped
            self.give_up()
        elif not self._is_leaving:
            self._is_leaving = True
            self._add_wish("leave")

    def request_new_view(self) -> None:
        """Requests a new view of the same members, for example after the early leave of a state's giver."""
        if self.view is not None and not self.is_frozen:
            self._add_wish("redo")

    def handle_message(self, source: str, message: Message) -> None:
        """Handles an arrived message, in the order in which its source has sent them."""
        if isinstance(message, MemberReport):
            self._handle_report(source, message)
        elif isinstance(message, EndCertificate):
            self.handle_certificate(message)
        elif self.view is not None and message.value.number == self.view.number + 1:
            if source in self.view.members:
                self._count_vote(source, message)

    def process_events(self, *, can_vote: bool = True, can_admit: bool = True) -> None:
        """Reports changes, and votes if all participants have the same knowledge.

        Args:
          can_vote: False if votes must wait, for example for connections under repair.
          can_admit: True if the view may end just for an admission; a driver may wait for the end of exchanges.
        """
        known = None
        while self.knowledge not in (None, known) and not self.is_stopped:  # repeat after each installed view
            known = self.knowledge
            assert known is not None
            is_ending = known.is_ending or any(
                report.held_exchanges is not None for report in self._reports.values()
            )
            if not self.is_frozen and (is_ending or (can_admit and self.has_candidates)):
                self._held_exchanges = self._driver.freeze()
                self._has_news = True
            if self._has_news:
                self._report_targets, self._has_news = set(self.connected_names), False
            if targets := self._report_targets & self.connected_names:
                self._report_targets = set()
                self._broadcast(targets, self._build_report())
            if self.is_frozen and can_vote:
                self._cast_vote()

    @property
    def has_candidates(self) -> bool:
        """Returns True if a process connected to all participants waits for admission."""
        return self.knowledge is not None and bool(self.knowledge.find_admitted(self._find_participants()))

    @property
    def ballot(self) -> int:
        """Size of this member's knowledge of the view; it grows with each recorded or received change."""
        return self._build_report().ballot

    @property
    def is_stranded(self) -> bool:
        """Returns True if the view is ending and the reachable members are too few to agree on the next."""
        if self.knowledge is None or not self.is_frozen:
            return False
        reached = {self.name, *self.connected_names.intersection(self.knowledge.view.members)}
        return not self._is_quorum(reached, self.knowledge.certificates)

    def end(self) -> None:
        """Stops this member because its process ends on its own, and certifies that (R9), so that nobody waits."""
        if not self.is_stopped:
            if self.view is not None and not self.is_frozen:
                self._held_exchanges = self._driver.freeze()
            self.give_up()

    def give_up(self) -> None:
        """Stops without an agreement after the driver's patience has run out, and announces it (R9)."""
        if self.is_stopped or not (self.view is None or self.is_frozen):
            return
        final_report = None
        reason = "no view has admitted this process"
        if self.knowledge is not None:
            final_report = self._build_report()
            self._driver.store_report(final_report)
            alive = self.knowledge.alive
            reached = [x for x in alive if x in self.connected_names]
            unreached = [x for x in alive if x not in (self.name, *reached)]
            reason = (
                f"no agreement on view {self.knowledge.view.number + 1}; connected: {', '.join(reached) or 'none'}; "
                f"may be alive: {', '.join(unreached) or 'none'}; "
                f"needed: more than half of {len(alive)} members, or half with {alive[0]}"
            )
        for name in sorted(self.connected_names):
            self._driver.send(name, self._sign_certificate(self.name, 0, final_report))
        self._stop(reason)

    # --- knowledge (R1, R7) -----------------------------------------------------------------------------------------

    def _handle_report(self, source: str, report: MemberReport) -> None:
        """Merges a member's report into this member's knowledge; installs its view if it is newer."""
        for certificate in report.certificates.values():
            self.handle_certificate(certificate)
        if report.view.number > (self._suspended_view if self.view is None else self.view.number):
            if self.view is not None or self.name in report.view.members:
                self._install_view(report.view)
        if self.knowledge is None:
            return
        self._guests.discard(source)  # it has a view
        self._record_connection(source)
        if report.view.number < self.knowledge.view.number:
            self._report_targets.add(source)
        elif report.view == self.knowledge.view:  # with a quorum of 1 there may be several views of a number
            self._reports[source] = report
            self._has_news |= self.knowledge.merge_facts(report.fact_counts)

    def _record_connection(self, name: str) -> None:
        """Counts a change of the link to a process; links start whole for members, and cut for guests."""
        if self.knowledge is None or name == self.name:
            return
        fact, fact_counts = Fact("link", self.name, name), self.knowledge.fact_counts
        if name not in self.knowledge.view.members:
            count, is_whole = fact_counts.get(fact, 1), name in self._guests
        elif name in self._certificates:
            return
        else:
            count, is_whole = fact_counts.get(fact, 0), name not in self._disconnected_names
        if (count % 2 == 0) != is_whole:
            fact_counts[fact] = count + 1
            self._has_news = True

    def _add_wish(self, kind: Literal["leave", "redo"]) -> None:
        assert self.knowledge is not None
        fact = Fact(kind, self.name)
        self.knowledge.fact_counts[fact] = self.knowledge.fact_counts.get(fact, 0) + 1
        self._has_news = True

    def _build_report(self) -> MemberReport:
        assert self.knowledge is not None
        return MemberReport(
            self.knowledge.view,
            dict(self.knowledge.fact_counts),
            dict(self.knowledge.certificates),
            self._held_exchanges,
            self._vote,
        )

    def _broadcast(self, names: Collection[str], message: MemberReport | Vote) -> None:
        """Stores the report, then sends a message (R8)."""
        self._driver.store_report(self._build_report())
        for name in sorted(names):
            self._driver.send(name, message)

    # --- what follows from knowledge (R2 to R5) ---------------------------------------------------------------------

    def _find_participants(self) -> list[str]:
        """Returns the participants of the agreement (R3), by seniority."""
        assert self.knowledge is not None
        return self.knowledge.find_participants(self.name if self._quorum == 1 else None)

    def _is_quorum(self, names: Collection[str], dead: Collection[str]) -> bool:
        """Returns True if names are a quorum (R4) of the members without those certified dead."""
        assert self.view is not None
        return self._quorum == 1 or is_majority(set(names), self.view.members, dead)

    def _cast_vote(self) -> None:
        """Casts a vote, once per ballot, if all participants have reported the same knowledge (R5)."""
        assert self.knowledge is not None
        part = self._find_participants()
        dead = tuple(sorted(self.knowledge.certificates))
        own_report = self._build_report()
        if self.name not in part or not self._is_quorum(part, dead):
            return
        if self._vote is not None and self._vote.ballot >= own_report.ballot:
            return
        reports = self._collect_unanimous(part, own_report)
        if reports is not None:
            self._vote = Vote(own_report.ballot, dead, self._choose_value(reports))
            self._broadcast(self.connected_names.intersection(self.knowledge.view.members), self._vote)
            self._count_vote(self.name, self._vote)

    def _collect_unanimous(
        self, participants: Iterable[str], own_report: MemberReport
    ) -> dict[str, MemberReport] | None:
        """Returns the reports of all participants if they are frozen and agree with this member's knowledge."""
        reports = {}
        for name in participants:
            report = own_report if name == self.name else self._reports.get(name)
            if (
                report is None
                or report.held_exchanges is None
                or report.fact_counts != own_report.fact_counts
            ):
                return None
            if report.certificates.keys() != own_report.certificates.keys():
                return None
            reports[name] = report
        return reports

    def _choose_value(self, reports: Mapping[str, MemberReport]) -> View:
        """Returns the view voted for at the highest ballot in a report or final report, or else the successor view."""
        assert self.knowledge is not None
        final_reports = [
            x.final_report
            for x in self.knowledge.certificates.values()
            if x.final_report is not None and x.final_report.view == self.view
        ]
        earlier = [report.vote for report in (*reports.values(), *final_reports) if report.vote is not None]
        return max(earlier, key=lambda vote: vote.ballot).value if earlier else self._build_successor(reports)

    def _build_successor(self, reports: Mapping[str, MemberReport]) -> View:
        assert self.knowledge is not None
        number, fact_counts = self.knowledge.view.number + 1, self.knowledge.fact_counts
        leaving_names = {x for x in reports if Fact("leave", x) in fact_counts}
        members = (*(x for x in reports if x not in leaving_names), *self.knowledge.find_admitted(reports))
        held_exchanges = {x: report.held_exchanges for x, report in reports.items() if report.held_exchanges}
        if not held_exchanges:
            return View(number, members, (), ())
        base = min(numbers[0] for numbers in held_exchanges.values())
        held_numbers = {x: {*range(base, held_exchanges[x][0]), *held_exchanges[x]} for x in held_exchanges}
        # Members that leave come last, then those that hold least; ties are by seniority.
        givers = sorted(held_exchanges, key=lambda x: (x in leaving_names, -len(held_numbers[x])))
        newest = tuple(sorted(set().union(*held_numbers.values())))
        holders = tuple(tuple(x for x in givers if exchange in held_numbers[x]) for exchange in newest)
        return View(number, members, newest, holders)

    # --- decision (R6) ----------------------------------------------------------------------------------------------

    def _count_vote(self, name: str, vote: Vote) -> None:
        """Counts a vote, and installs its value if a quorum has cast it, at any ballot."""
        names = self._voters.setdefault(vote, set())
        names.add(name)
        if self._is_quorum(names, vote.dead_members):
            self._install_view(vote.value)

    def _install_view(self, view: View) -> None:
        """Enters a view with the facts that persist, or stops if it excludes this process."""
        if self.is_stopped:
            return
        is_evicted = self.name not in view.members
        if is_evicted and not self._is_leaving and self._driver.did_suspend(view):
            self._suspended_view = view.number
            self._enter_view(None)
            return
        gone_names = set(self.view.members if self.view else ()).difference(view.members)
        self._enter_view(view)
        assert self.knowledge is not None
        for name in gone_names:  # names are never reused
            self._certificates.pop(name, None)
            self._disconnected_names.discard(name)
        self.has_left = is_evicted and self._is_leaving
        if not is_evicted:
            self.knowledge.certificates.update(
                {x: self._certificates[x] for x in view.members if x in self._certificates}
            )
            for name in (*view.members, *self._guests):
                self._record_connection(name)
            if self._is_leaving:
                self._add_wish("leave")
        self._has_news = True
        if is_evicted or not view.complete_exchanges:
            self._broadcast(self.connected_names, self._build_report())
        else:
            self._driver.install_view(view)
        if any(transfer.giver == self.name for transfer in view.list_handovers()):
            self._driver.send_handovers(view)
        if is_evicted:
            self._stop(f"{'left with' if self.has_left else 'evicted by'} view {view.number}")
        elif not view.complete_exchanges:
            self._stop(f"no member of view {view.number} holds the model")

    def _stop(self, reason: str) -> None:
        self.is_stopped = True
        self._driver.stop(reason)
