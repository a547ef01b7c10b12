"""One-way delays from an event to the last member's view, and messages: each takes 1, computing takes 0."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from tests.membership.world import World

QUIET = 100.0
"""By then all exchanges are made, and nothing is under way."""


def crash(world: World, name: str, **seen: float) -> None:
    """A process ends; each of the others notices after a while, or not at all."""
    world.crashed(world.nodes[name])
    for other, delay in seen.items():
        node = world.nodes[other]
        world.after(delay, partial(node.do, partial(node.notice, name)))


def crash_seen_by_all(world: World, name: str, delay: float = 0.0) -> None:
    crash(
        world, name, **{node.name: delay for node in world.nodes.values() if node.lives and node.name != name}
    )


def certify(world: World, name: str, delay: float = 0.0) -> None:
    certificate = world.certificate(world.nodes[name], -9)
    for node in world.nodes.values():
        if node.lives:
            world.after(delay, partial(world.tell, certificate, node.name))


def killed(world: World, name: str, delay: float) -> None:
    crash_seen_by_all(world, name)
    certify(world, name, delay)


def certified_first(world: World) -> None:
    world.crashed(world.nodes["g"])
    certify(world, "g")
    world.after(0.5, partial(crash_seen_by_all, world, "g"))


def leave(world: World, name: str) -> None:
    world.nodes[name].do(world.nodes[name].member.leave)


def join(world: World, name: str) -> None:
    world.join(name)
    for other in "abc":
        world.connect(name, other)


def halves(world: World) -> None:
    for one in "ab":
        for other in "cd":
            world.reset(one, other, (0.0, 0.0))
            world.after(0.5, partial(world.connect, one, other))


def two_crash(world: World) -> None:
    world.crashed(world.nodes["d"])
    crash_seen_by_all(world, "e")
    world.after(1.0, partial(crash_seen_by_all, world, "d"))


CASES: dict[str, tuple[str, Callable[[World], object], float | None, int]] = {
    "3, crash of the last": ("abc", partial(crash, name="c", a=0, b=0), 3.0, 8),
    "3, crash of the first": ("abc", partial(crash, name="a", b=0, c=0), 3.0, 8),
    "3, crash of the last, one sees it late": ("abc", partial(crash, name="c", a=0, b=9), 3.0, 9),
    "3, crash of the first, one sees it late": ("abc", partial(crash, name="a", b=0, c=9), 12.0, 9),
    "7, crash of the first": ("abcdefg", partial(crash_seen_by_all, name="a"), 3.0, 120),
    "3, closing and certificate at once": ("abc", partial(killed, name="c", delay=0.0), 3.0, 8),
    "2, kill of the first, certificate after 1": ("ab", partial(killed, name="a", delay=1.0), 1.0, 0),
    "2, kill of the last, no certificate": ("ab", partial(crash, name="b", a=0), 0.0, 0),
    "2, kill of the first, no certificate": ("ab", partial(crash, name="a", b=0), None, 0),
    "7, certificate before the closing": ("abcdefg", certified_first, 2.0, 90),
    "12, crash of the last": ("abcdefghijkl", partial(crash_seen_by_all, name="l"), 3.0, 440),
    "3, one leaves": ("abc", partial(leave, name="b"), 3.0, 18),
    "3, one joins": ("abc", partial(join, name="d"), 4.0, 36),
    "4, halves reset, back after 0.5": ("abcd", halves, 3.5, 64),
    "5, two crash, noticed at 0 and 1": ("abcde", two_crash, 4.0, 33),
}


@pytest.mark.parametrize("case", CASES)
def test_delays_and_messages_are_those_of_the_design(case: str) -> None:
    members, happens, delays, messages = CASES[case]
    world = World(0, members, delay=1.0)
    world.run(QUIET)
    world.messages = 0
    happens(world)
    world.run()
    new = [time for time, view in world.installed.values() if view.number == 2]
    living = [node for node in world.nodes.values() if node.lives]
    assert max(new, default=None) == (None if delays is None else QUIET + delays)
    assert world.messages == messages
    if delays is None:
        (node,) = living
        assert node.member.is_frozen
        node.do(node.member.give_up)
        assert world.told == [
            "b: no agreement on view 2; connected: none; may be alive: a; "
            "needed: more than half of 2 members, or half with a"
        ]
    else:
        assert all(node.member.view == world.decided[2] for node in living)
