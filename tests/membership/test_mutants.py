"""Each rule that is left out is caught: by a plan, by all interleavings of some faults, or by a script."""

from __future__ import annotations

from collections import defaultdict

import pytest

from farflung.membership import Certificate, Member, Message, Report, View, Vote
from tests.membership.exhaustive import explore
from tests.membership.mutants import MUTANTS, SendBeforeKeep, WillWithoutKnowledge
from tests.membership.plans import check
from tests.membership.world import Broken, unsigned


@pytest.mark.parametrize("name", [name for name, mutant in MUTANTS.items() if mutant.seed is not None])
def test_a_plan_catches_it(name: str) -> None:
    seed = MUTANTS[name].seed
    assert seed is not None
    assert check(seed, name), "python -m tests.membership.plans --without RULE finds another seed"
    assert not check(seed)


@pytest.mark.parametrize("name", [name for name, mutant in MUTANTS.items() if mutant.faults])
def test_all_interleavings_catch_it(name: str) -> None:
    with pytest.raises(Broken):
        explore(MUTANTS[name].faults, name)


class Script:
    """Members whose messages are passed on by hand."""

    def __init__(self, rules: type[Member], members: str) -> None:
        view = View(1, tuple(members), (0,), (tuple(members),))
        self.wires: defaultdict[tuple[str, str], list[Message]] = defaultdict(list)
        self.kept: dict[str, Report] = {}
        self.ends_with_vote = ""
        """A member that ends as soon as it has sent a vote."""
        self.members = {name: rules(name, Wire(self, name), unsigned, view) for name in members}
        for name, member in self.members.items():
            for other in self.members.keys() - {name}:
                member.back(other)
            member.settle()
        self.wires.clear()

    def lose(self, name: str, others: str) -> None:
        """A member notices that connections are closed."""
        for other in others:
            self.members[name].lost(other)
            self.wires[name, other].clear()
        self.members[name].settle()

    def pass_on(self, *pairs: str) -> None:
        """Pass on all that is under way, and let the receivers settle afterwards."""
        for source, name in pairs:
            messages, self.wires[source, name] = self.wires[source, name], []
            for message in messages:
                self.members[name].hear(source, message)
        for name in sorted({pair[1] for pair in pairs}):
            self.members[name].settle()

    def certify(self, dead: str, name: str) -> None:
        self.members[name].died(Certificate(dead, -9, self.kept[dead], ""))


class Wire:
    def __init__(self, script: Script, name: str) -> None:
        self.script, self.name, self.ended = script, name, False

    def send(self, name: str, message: Message) -> None:
        if not self.ended:
            self.script.wires[self.name, name].append(message)
            self.ended = isinstance(message, Vote) and self.name == self.script.ends_with_vote

    def keep(self, report: Report) -> None:
        if not self.ended:
            self.script.kept[self.name] = report

    def freeze(self) -> tuple[int, ...]:
        return (0,)

    def install(self, view: View) -> None:
        pass

    def hand(self, view: View) -> None:
        pass

    def stop(self, reason: str) -> None:
        pass


def promise_of_the_dead(rules: type[Member]) -> Script:
    """Members d and e promise c a high ballot and die; a and b decide with their certificates; b meets c."""
    script = Script(rules, "abcde")
    for name in "cde":
        script.lose(name, "ab")
    script.pass_on("cd", "ce", "dc", "de", "ec", "ed")
    script.pass_on("dc", "ec")  # c votes for (c, d, e), and both die before they hear it
    assert script.kept["c"].vote is not None
    assert script.kept["d"].ballot == script.kept["e"].ballot == script.kept["c"].vote.ballot == 6
    assert script.kept["d"].vote is script.kept["e"].vote is None
    for name in "ab":
        script.certify("d", name)
        script.certify("e", name)
        script.lose(name, "c")
    script.pass_on("ab", "ba")
    script.pass_on("ab", "ba")  # both vote for (a, b), two of the three that are not certified
    script.pass_on("ba")
    assert script.members["a"].view == View(2, ("a", "b"), (0,), (("a", "b"),))
    script.lose("b", "a")  # what a has sent since is lost
    script.wires["a", "b"].clear()
    for dead in "de":
        script.certify(dead, "c")
    script.members["c"].back("b")
    script.members["b"].back("c")
    script.members["b"].settle()
    script.members["c"].settle()
    for _ in range(4):
        script.pass_on("bc", "cb")
    return script


def test_a_will_is_a_promise_too() -> None:
    script = promise_of_the_dead(Member)
    assert script.members["b"].view == script.members["c"].view == script.members["a"].view
    script = promise_of_the_dead(WillWithoutKnowledge)
    assert script.members["b"].view == View(2, tuple("cde"), (0,), (tuple("cde"),))
    assert script.members["c"].view == View(3, ("c",), (0,), (("c",),)), "beside a in view 2 of (a, b)"


def vote_of_the_dead(rules: type[Member]) -> Script:
    """Members a and d decide, cut off from b and c; d ends with its vote, and b and c hear its certificate."""
    script = Script(rules, "abcd")
    script.ends_with_vote = "d"
    for name, others in ("a", "bc"), ("b", "ad"), ("c", "ad"), ("d", "bc"):
        script.lose(name, others)
    script.pass_on("ad", "da")
    script.pass_on("ad", "da")  # both vote for (a, d), half of the members with the most senior
    script.pass_on("da")
    assert script.members["a"].view == View(2, ("a", "d"), (0,), (("a", "d"),))
    script.certify("d", "b")
    script.certify("d", "c")
    for _ in range(4):
        script.members["b"].settle()
        script.members["c"].settle()
        script.pass_on("bc", "cb")
    return script


def test_a_vote_is_kept_before_it_is_sent() -> None:
    script = vote_of_the_dead(Member)
    assert script.members["b"].stopped
    assert script.members["b"].view == script.members["a"].view
    script = vote_of_the_dead(SendBeforeKeep)
    assert script.members["b"].view == View(2, ("b", "c"), (0,), (("b", "c"),)), (
        "beside a in view 2 of (a, d)"
    )


def test_each_of_the_fourteen_rules_is_caught() -> None:
    caught = {name for name, mutant in MUTANTS.items() if mutant.seed is not None or mutant.faults}
    assert len(MUTANTS) == 1 + 14
    assert MUTANTS.keys() - caught == {"", "keep", "will-knowledge"}
