"""Each rule that is left out is caught: by a plan, by all interleavings of some faults, or by a script."""

from __future__ import annotations

import pytest

from farflung.membership import Member, View
from tests.membership.exhaustive import explore
from tests.membership.mutants import MUTANTS, SendBeforeKeep, WillWithoutKnowledge
from tests.membership.plans import check
from tests.membership.script import Script
from tests.membership.world import Broken


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


def promise_of_the_dead(rules: type[Member]) -> Script:
    """Members d and e promise c a high ballot and die; a and b decide with their certificates; b meets c."""
    script = Script("abcde", rules)
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
    script.members["c"].handle_connection("b")
    script.members["b"].handle_connection("c")
    script.members["b"].process_events()
    script.members["c"].process_events()
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
    script = Script("abcd", rules)
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
        script.members["b"].process_events()
        script.members["c"].process_events()
        script.pass_on("bc", "cb")
    return script


def test_a_vote_is_kept_before_it_is_sent() -> None:
    script = vote_of_the_dead(Member)
    assert script.members["b"].is_stopped
    assert script.members["b"].view == script.members["a"].view
    script = vote_of_the_dead(SendBeforeKeep)
    assert script.members["b"].view == View(2, ("b", "c"), (0,), (("b", "c"),)), (
        "beside a in view 2 of (a, d)"
    )


def test_each_of_the_fourteen_rules_is_caught() -> None:
    caught = {name for name, mutant in MUTANTS.items() if mutant.seed is not None or mutant.faults}
    assert len(MUTANTS) == 1 + 14
    assert MUTANTS.keys() - caught == {"", "keep", "will-knowledge"}, "these two by scripts"
