"""Members whose events happen by hand."""

from __future__ import annotations

from collections import defaultdict
from typing import Literal

from farflung.membership import EndCertificate, Member, MemberReport, Message, View, Vote
from tests.membership.world import unsigned

__all__ = ["Script"]


class Script:
    """Members whose messages are passed on by hand."""

    def __init__(
        self, members: str, rules: type[Member] = Member, quorum: Literal["majority", 1] = "majority"
    ) -> None:
        view = View(1, tuple(members), (0,), (tuple(members),))
        self.wires: defaultdict[tuple[str, str], list[Message]] = defaultdict(list)
        self.kept: dict[str, MemberReport] = {}
        self.returns = False
        """Whether those that are evicted ask to be admitted again."""
        self.ends_with_vote = ""
        """A member that ends as soon as it has sent a vote."""
        self.members = {
            name: rules(name, Wire(self, name), unsigned, view, quorum=quorum) for name in members
        }
        self.held: dict[str, tuple[int, ...]] = {}
        """What members hold whole where it is not exchange 0 alone."""
        self.handed: dict[str, View] = {}
        self.reasons: dict[str, str] = {}
        for name, member in self.members.items():
            for other in self.members.keys() - {name}:
                member.handle_connection(other)
            member.process_events()
        self.wires.clear()

    def lose(self, name: str, others: str) -> None:
        """A member notices that connections are closed."""
        for other in others:
            self.members[name].handle_loss(other)
            self.wires[name, other].clear()
        self.members[name].process_events()

    def pass_on(self, *pairs: str) -> None:
        """Pass on all that is under way, and let the receivers settle afterwards."""
        for source, name in map(tuple, pairs):
            messages, self.wires[source, name] = self.wires[source, name], []
            for message in messages:
                self.members[name].handle_message(source, message)
        for name in sorted({pair[1] for pair in pairs}):
            self.members[name].process_events()

    def certify(self, dead: str, name: str) -> None:
        self.members[name].handle_certificate(EndCertificate(dead, -9, self.kept.get(dead), ""))

    def until_quiet(self) -> None:
        """Let all settle, and pass messages on until none is under way."""
        for member in self.members.values():
            member.process_events()
        while under_way := [source + name for (source, name), messages in self.wires.items() if messages]:
            self.pass_on(*under_way)

    def join(self, name: str) -> Member:
        """Connect a process without a view to all."""
        member = Member(name, Wire(self, name), unsigned)
        self.held[name] = ()
        for other, peer in self.members.items():
            member.handle_connection(other)
            peer.handle_guest(name)
        self.members[name] = member
        return member


class Wire:
    def __init__(self, script: Script, name: str) -> None:
        self.script, self.name, self.ended = script, name, False

    def send(self, name: str, message: Message) -> None:
        if not self.ended:
            self.script.wires[self.name, name].append(message)
            self.ended = isinstance(message, Vote) and self.name == self.script.ends_with_vote

    def store_report(self, report: MemberReport) -> None:
        if not self.ended:
            self.script.kept[self.name] = report

    def freeze(self) -> tuple[int, ...]:
        return self.script.held.get(self.name, (0,))

    def install_view(self, view: View) -> None:
        pass

    def send_handovers(self, view: View) -> None:
        self.script.handed[self.name] = view

    def did_suspend(self, view: View) -> bool:
        return self.script.returns

    def stop(self, reason: str) -> None:
        self.script.reasons[self.name] = reason
