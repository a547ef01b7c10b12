"""Quorums, the largest set of members that can reach each other, and what a view's members lack."""

from __future__ import annotations

import itertools
import random

import pytest

from farflung.membership import (
    EXACT_MEMBERS,
    Handover,
    View,
    find_largest_connected,
    find_reachable,
    is_majority,
)


def by_trying_all(members: str, cut: set[tuple[str, str]]) -> list[str]:
    for size in range(len(members), 0, -1):
        for chosen in itertools.combinations(members, size):  # the most senior first
            if not any(pair in cut or pair[::-1] in cut for pair in itertools.combinations(chosen, 2)):
                return list(chosen)
    return []


@pytest.mark.parametrize("seed", range(200))
def test_the_largest_connected_set_is_the_one_that_trying_all_finds(seed: int) -> None:
    draw = random.Random(seed)
    members = "".join(draw.sample("abcdefgh", draw.randint(1, 8)))
    pairs = list(itertools.permutations(members, 2))
    cut = set(draw.sample(pairs, draw.randint(0, len(pairs))))
    assert find_largest_connected(members, cut) == by_trying_all(members, cut)


def test_what_is_reachable_may_lead_over_others() -> None:
    cut = {("a", "c"), ("d", "a"), ("d", "b"), ("c", "d")}
    assert find_reachable("a", "abcd", cut) == find_reachable("c", "abcd", cut) == ["a", "b", "c"]
    assert find_reachable("d", "abcd", cut) == ["d"]


def test_of_a_lone_pair_the_junior_is_left_out() -> None:
    assert find_largest_connected("abc", {("a", "b")}) == ["a", "c"]
    assert find_largest_connected("abc", {("c", "b")}) == ["a", "b"]
    assert find_largest_connected("abc", {("a", "b"), ("c", "a")}) == ["b", "c"]
    assert find_largest_connected("ab", {("a", "elsewhere")}) == ["a", "b"]


@pytest.mark.parametrize("seed", range(5))
def test_above_the_bound_a_set_without_cut_pairs_is_found_quickly_to_which_none_can_be_added(
    seed: int,
) -> None:
    draw = random.Random(seed)
    members = [f"m{place}" for place in range(4 * EXACT_MEMBERS)]
    cut = {(draw.choice(members[:40]), draw.choice(members[40:])) for _ in range(900)}
    cut |= {(draw.choice(members[20:39]), draw.choice(members[39:])) for _ in range(900)}
    found = find_largest_connected(members, cut)
    assert found == find_largest_connected(members, {(y, x) for x, y in cut})

    def broken(x: str) -> bool:
        return any((x, y) in cut or (y, x) in cut for y in found)

    assert not any(broken(x) for x in found)
    assert all(broken(x) for x in members if x not in found)


def test_the_bound_counts_members_of_cut_pairs_alone() -> None:
    members = [f"m{place}" for place in range(100)]
    assert find_largest_connected(members, {("m3", "m4"), ("m4", "m5")}) == [x for x in members if x != "m4"]
    halves = {(x, y) for x in members[:50] for y in members[50:]}
    assert find_largest_connected(members, halves) in (members[:50], members[50:])


@pytest.mark.parametrize(
    ("names", "dead", "decides"),
    [
        ("abc", "", True),
        ("ab", "", True),  # half with the most senior
        ("cd", "", False),
        ("bcd", "", True),
        ("a", "", False),
        ("ab", "d", True),
        ("a", "cd", True),  # half of two
        ("b", "cd", False),
        ("b", "acd", True),
        ("cd", "a", True),
        ("d", "ab", False),
        ("acx", "", True),
        ("bx", "", False),
    ],
)
def test_a_quorum_is_a_majority_or_half_with_the_most_senior_of_those_not_certified_dead(
    names: str, dead: str, decides: bool
) -> None:
    assert is_majority(set(names), "abcd", dead) == decides


def test_members_receive_what_they_lack_and_joiners_the_state() -> None:
    view = View(2, ("a", "b", "t"), (3, 4, 6), (("b", "a", "x"), ("b",), ("x", "a")))
    assert view.list_handovers() == [
        Handover("b", "t", 3),  # the state, with exchange 4 in it
        Handover("b", "a", 4),
        Handover("x", "b", 6),  # x has left
        Handover("x", "t", 6),
    ]
    assert View(2, ("a",), (), ()).list_handovers() == []
