"""Seeded plans of faults: ``python -m tests.membership.plans --count 20000 [--first 0] [--without RULE]``."""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from functools import partial

from farflung.membership import Member, MessageCodec
from tests.membership.mutants import MUTANTS
from tests.membership.world import LAST, Broken, Node, World

__all__ = ["Plan", "check"]

DURATION = 14.0
"""Faults begin before this time, in mean delays or so."""


class Plan:
    """One to six faults of two to seven members, all drawn from a seed.

    Args:
      seed: of the plan and of all delays.
      without: the rule that is left out; empty: none is.
    """

    def __init__(self, seed: int, without: str = "") -> None:
        self.draw = draw = random.Random(seed)
        self.size = draw.randint(2, 7)
        names = [chr(ord("a") + place) for place in range(self.size)]
        draw.shuffle(names)
        self.world = world = World(
            seed,
            names,
            rules=MUTANTS[without].rules,
            without=MUTANTS[without].driver,
            window=draw.choice((1, 1, 2, 3)),
            codec=MessageCodec(b"key") if seed % 16 == 0 else None,
            lanes=draw.random() < 0.5,
            returns=seed % 2 == 1,
        )
        self.heals = draw.random() < 0.5
        self.apart: list[set[str]] = []
        """Halves that cannot connect."""
        self.done: list[str] = []
        self.joined = 0
        world.on_crash = self.crash
        kinds = (
            (self.kill, 5),
            (self.reset, 4),
            (self.halves, 2),
            (self.one_way, 2),
            (self.partial, 2),
            (self.silence, 2),
            (self.leave, 2),
            (self.join, 3),
            (self.redo, 1),
            (self.flap, 1),
        )
        moments = sorted(draw.uniform(0, DURATION) for _ in range(draw.randint(1, 6)))
        if draw.random() < 0.4:  # all at nearly the same time
            moments = [moments[0] + draw.uniform(0, 2.5) for _ in moments]
        for moment in moments:
            world.at(moment, draw.choices([kind for kind, _ in kinds], [weight for _, weight in kinds])[0])

    # --- faults -----------------------------------------------------------------------------------------------------

    def living(self) -> list[Node]:
        return [node for node in self.world.nodes.values() if node.lives]

    def pick(self, count: int = 1) -> list[Node]:
        living = self.living()
        return self.draw.sample(living, min(count, len(living)))

    def note(self, what: str) -> None:
        self.done.append(f"{self.world.now:.1f} {what}")

    def kill(self) -> None:
        for node in self.pick():
            if self.draw.random() < 0.5:
                node.fuse = self.draw.randrange(0, 3 * self.size)
                self.note(f"{node.name} will crash after {node.fuse} sends")
            else:
                self.world.crashed(node)

    def crash(self, node: Node) -> None:
        world, draw = self.world, self.draw
        told = [x.name for x in self.living() if draw.random() < 0.8] if draw.random() < 0.6 else []
        self.note(f"{node.name} crashed, certified to {''.join(told) or 'none'}")
        world.close_all(node, whole=draw.random() < 0.7, told=draw.random() < 0.8)
        for name in told:
            late = draw.choice((0.0, 1.0, 4.0)) * draw.random()
            world.after(late, partial(world.tell, world.certificate(node, -9), name))

    def may_connect(self, one: str, other: str) -> bool:
        return not any((one in half) != (other in half) for half in self.apart)

    def reconnect(self, one: str, other: str) -> None:
        if self.may_connect(one, other):
            self.world.connect(one, other)

    def cut(self, one: str, other: str) -> None:
        self.world.reset(one, other)
        if self.draw.random() < 0.6:
            self.world.after(self.draw.uniform(0, 6), partial(self.reconnect, one, other))

    def reset(self) -> None:
        pair = self.pick(2)
        if len(pair) == 2:
            self.note(f"reset {pair[0].name}{pair[1].name}")
            self.cut(pair[0].name, pair[1].name)

    def halves(self) -> None:
        living = [node.name for node in self.living()]
        half = (
            set(self.draw.sample(living, self.draw.randint(1, max(1, len(living) - 1)))) if living else set()
        )
        self.note(f"halves {''.join(sorted(half))}")
        self.apart.append(half)
        for one, other in itertools.product(sorted(half), sorted(set(living) - half)):
            self.world.after(
                self.draw.choice((0.0, 0.0, 3.0)) * self.draw.random(), partial(self.cut, one, other)
            )
        if self.draw.random() < 0.7:
            self.world.after(self.draw.uniform(0, 8), partial(self.join_halves, half))

    def join_halves(self, half: set[str]) -> None:
        if half in self.apart:
            self.apart.remove(half)
        self.connect_all()

    def connect_all(self) -> None:
        for one, other in itertools.combinations([node.name for node in self.living()], 2):
            self.reconnect(one, other)

    def one_way(self) -> None:
        pair = self.pick(2)
        if len(pair) == 2:
            one, other = (node.name for node in pair)
            self.note(f"{other} does not hear {one}")
            self.world.block(one, other)
            ends = (
                partial(self.world.unblock, one, other)
                if self.draw.random() < 0.5
                else partial(self.cut, one, other)
            )
            self.world.after(self.draw.uniform(0, 8), ends)

    def partial(self) -> None:
        pairs = list(itertools.combinations([node.name for node in self.living()], 2))
        for one, other in self.draw.sample(pairs, min(len(pairs), self.draw.randint(1, 4))):
            self.note(f"cut {one}{other}")
            self.cut(one, other)

    def silence(self) -> None:
        for node in self.pick():
            node.paused = True
            self.note(f"{node.name} is silent")
            self.world.after(self.draw.uniform(0, 10), node.resume)
            for other in self.pick(self.draw.randint(0, 3)):
                if other is not node:
                    self.world.after(self.draw.uniform(0, 5), partial(self.cut, node.name, other.name))

    def leave(self) -> None:
        for node in self.pick():
            self.note(f"{node.name} leaves")
            node.do(node.member.leave)

    def redo(self) -> None:
        for node in self.pick():
            self.note(f"{node.name} asks for a new view")
            node.do(node.member.request_new_view)

    def join(self) -> None:
        name = f"{chr(ord('t') + self.joined)}"
        self.joined += 1
        self.note(f"{name} comes")
        others = [node.name for node in self.living()]
        self.world.join(name)
        for other in others:
            self.world.after(self.draw.uniform(0, 3), partial(self.reconnect, name, other))

    def flap(self) -> None:
        pair = self.pick(2)
        if len(pair) == 2:
            one, other = (node.name for node in pair)
            self.note(f"{one}{other} flaps")
            for _ in range(self.draw.randint(2, 4)):
                self.world.after(self.draw.uniform(0, 5), partial(self.world.reset, one, other))
                self.world.after(self.draw.uniform(0, 5), partial(self.reconnect, one, other))

    # --- the end ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Carry the plan out until each member trains in a view, has stopped, or is dead.

        Raises:
          Broken: a law was violated.
        """
        world = self.world
        world.run(DURATION + self.draw.uniform(0, 10))
        for node in world.nodes.values():
            if node.paused:
                node.resume()
            node.fuse = -1
        if self.heals:
            self.apart.clear()
        self.end_silence()
        if self.heals:
            self.connect_all()
        world.run()
        while stuck := self.settled():
            node = self.draw.choice(stuck)
            if node.member.view is None:  # connected in the end, or not at all
                self.check_guest(node)
            else:
                self.check_stuck(node)
            node.do(node.member.give_up)
            world.run()
            self.end_silence()
            world.run()
        self.check_end()

    def end_silence(self) -> None:
        """Patience: all notice connections that are closed, or over which one end hears nothing."""
        world = self.world
        for pair, link in list(world.links.items()):
            one, other = sorted(pair)
            if link.blocked and link.up:
                world.reset(one, other)
            for name in sorted(link.unaware):
                world.notice(name, other if name == one else one)

    def settled(self) -> list[Node]:
        """Those that will not go on by themselves."""
        return [node for node in self.living() if node.member.view is None or node.member.is_frozen]

    def check_stuck(self, node: Node) -> None:
        """A quorum that can talk installs a view, and all that can hear of a view have."""
        member, nodes = node.member, self.world.nodes
        assert member.view is not None
        assert member.knowledge is not None
        for other in self.living():
            newer = other.member.view is not None and other.member.view.number > member.view.number
            if newer and self.world.link(node.name, other.name).up:
                raise Broken(f"{node.name} is connected to {other.name}, and not told of its view")
        part = Member._find_participants(member)  # whatever a mutant does
        agree = all(nodes[x].lives and nodes[x].member.view == member.view for x in part)
        linked = all(self.world.link(*pair).up for pair in itertools.combinations(part, 2))
        if (
            agree
            and linked
            and node.name in part
            and Member._is_quorum(member, part, member.knowledge.certificates)
        ):
            raise Broken(f"{node.name} hangs in view {member.view}: {''.join(part)} could decide")

    def check_guest(self, node: Node) -> None:
        for other in self.living():
            view = other.member.view
            if view is not None and not other.member.is_frozen and other.lives:
                if all(self.world.link(node.name, x).up for x in view.members):
                    raise Broken(f"{node.name} is connected to all of {view}, and not let in")

    def check_end(self) -> None:
        for node in self.living():
            view = node.member.view
            assert view is not None
            for name in view.members:
                other = self.world.nodes[name]
                if not other.lives or other.member.view != view or other.member.is_frozen:
                    raise Broken(f"{node.name} trains in {view}, {name} does not: {other.reason}")
            if node.whole != (LAST,):
                raise Broken(f"{node.name} ends with {node.whole}, lacking {node.lacking}")


def check(seed: int, without: str = "") -> str:
    """Run a plan, and return the law that it broke; empty: none."""
    plan = Plan(seed, without)
    try:
        plan.run()
    except Broken as error:
        return f"seed {seed}: {error}; plan: {'; '.join(plan.done)}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--without", choices=sorted(MUTANTS), default="")
    parser.add_argument("--stop", type=int, default=5, help="stop after so many violations")
    given = parser.parse_args()
    began = time.process_time()
    broken: list[str] = []
    tried = 0
    for seed in range(given.first, given.first + given.count):
        tried += 1
        if law := check(seed, given.without):
            broken.append(law)
            print(law)
            if len(broken) >= given.stop:
                break
    print(f"{len(broken)} of {tried} plans broke a law; {time.process_time() - began:.0f} s of the processor")
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
