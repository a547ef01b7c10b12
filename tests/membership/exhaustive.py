"""All interleavings of few faults among few members: ``python -m tests.membership.exhaustive [--without RULE]``.

A step delivers one message, lets one end notice a closed connection, or lets a fault happen; the member settles after
each. Faults may come at any moment and in any order, or not at all. States that were met before are not entered again.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from farflung.membership import EndCertificate, Member, MemberReport, Message, View
from tests.membership.mutants import MUTANTS
from tests.membership.world import Broken, unsigned

T = TypeVar("T")

__all__ = ["ALL", "FEW", "LIMIT", "Exhausted", "Fault", "explore"]

MEMBERS = "abc"
HELD: dict[str, tuple[int, ...]] = {"a": (0,), "b": (1,), "c": (0,)}
"""What the members of the first view hold whole when it ends: an exchange is whole on one of them alone."""

Fault = tuple[str, ...]
Queue = tuple[Message | None, ...]
"""Messages to an end of a connection; ``None``: it is closed."""

ONE: list[tuple[Fault, ...]] = [
    (fault,)
    for fault in (
        *(("crash", x) for x in MEMBERS),
        *(("kill", x) for x in MEMBERS),
        *(("reset", *pair) for pair in itertools.combinations(MEMBERS, 2)),
        *(("flap", *pair) for pair in itertools.combinations(MEMBERS, 2)),
        *(("leave", x) for x in MEMBERS),
        ("join", "d"),
    )
]


class Exhausted(Exception):
    """There are more states than allowed."""


class Effects:
    """The driver of all members: it notes down the effects of one step."""

    def __init__(self) -> None:
        self.begin(())

    def begin(self, held: tuple[int, ...]) -> None:
        self.held = held
        self.sent: list[tuple[str, Message]] = []
        self.kept: MemberReport | None = None
        self.reason: str | None = None

    def send(self, name: str, message: Message) -> None:
        self.sent.append((name, message))

    def store_report(self, report: MemberReport) -> None:
        self.kept = report

    def freeze(self) -> tuple[int, ...]:
        return self.held

    def install_view(self, view: View) -> None:
        if self.held and not {*range(view.complete_exchanges[0] + 1), *view.complete_exchanges}.issuperset(
            self.held
        ):
            raise Broken(
                f"a member holds {self.held}, view {view.number} begins after {view.complete_exchanges}"
            )
        self.held = (view.complete_exchanges[-1],)

    def send_handovers(self, view: View) -> None:
        pass

    def did_suspend(self, view: View) -> bool:
        return False

    def stop(self, reason: str) -> None:
        self.reason = reason


@dataclass(frozen=True)
class State:
    """Members that live, with what they hold and what they have kept, queues, and faults still to come."""

    members: dict[str, Member]
    held: dict[str, tuple[int, ...]]
    kept: dict[str, MemberReport | None]
    queues: dict[tuple[str, str], Queue]
    up: frozenset[frozenset[str]]
    decided: dict[int, View]
    faults: tuple[Fault, ...]
    later: tuple[Fault, ...] = ()
    """What may happen after faults that have happened: certificates, connections."""
    path: tuple[Any, ...] = field(default=(), compare=False)


class Search:
    """Explores every state that is reached from the first view with some faults.

    Args:
      faults: each happens at most once.
      rules: the state machine.
      limit: of states.
    """

    def __init__(self, faults: tuple[Fault, ...], rules: type[Member] = Member, limit: int = 10**9) -> None:
        self.rules, self.limit = rules, limit
        self.driver = Effects()
        self.seen = set[int]()
        self._keys: dict[int, tuple[Any, Any]] = {}
        view = View(1, tuple(MEMBERS), (0,), (tuple(MEMBERS),))
        members = {name: rules(name, self.driver, unsigned, view) for name in MEMBERS}
        for name, member in members.items():
            for other in MEMBERS:
                if other != name:
                    member.handle_connection(other)
            member._report_targets.clear()  # they have told each other of the view
        pairs = frozenset(frozenset(pair) for pair in itertools.combinations(MEMBERS, 2))
        self.first = State(members, HELD, {}, {}, pairs, {1: view}, faults)

    def run(self) -> int:
        """Return how many states there are.

        Raises:
          Broken: a law was violated.
          Exhausted: there are too many.
        """
        stack = [self.first]
        while stack:
            state = stack.pop()
            moved = False
            for after in self.successors(state):
                moved = moved or after.faults == state.faults
                key = hash(self.key(after))
                if key not in self.seen:
                    self.seen.add(key)
                    stack.append(after)
            if not moved:
                self.check_end(state)
            if len(self.seen) > self.limit:
                raise Exhausted
        return len(self.seen)

    # --- steps ------------------------------------------------------------------------------------------------------

    def successors(self, state: State) -> Iterator[State]:
        for (source, name), queue in state.queues.items():
            if queue:
                queues = {**state.queues, (source, name): queue[1:]}
                yield from self.event(replace(state, queues=queues), name, "handle_message", source, queue[0])
        for what in state.later:
            yield from self.carry_out(replace(state, later=tuple(x for x in state.later if x != what)), what)
        for fault in state.faults:
            yield from self.carry_out(
                replace(state, faults=tuple(x for x in state.faults if x != fault)), fault
            )

    def carry_out(self, state: State, fault: Fault) -> Iterator[State]:
        kind, *names = fault
        name = names[0]
        if name not in state.members and kind in ("crash", "kill", "reset", "flap", "leave"):
            return
        if kind in ("crash", "kill"):
            for ended in self.ends(state, name):
                told = [("certificate", other, name) for other in ended.members if kind == "kill"]
                yield replace(ended, later=ended.later + tuple(told), path=(*state.path, fault))
        elif kind == "certificate":
            certificate = unsigned(names[1], -9, state.kept.get(names[1]))
            yield from self.event(state, name, "handle_message", names[1], certificate)
        elif kind in ("reset", "flap"):
            pair = frozenset(names)
            if pair in state.up and all(x in state.members for x in names):
                one, other = names
                for lost in itertools.product((False, True), repeat=2):
                    queues = dict(state.queues)
                    for direction, all_lost in zip(((one, other), (other, one)), lost, strict=True):
                        queue = queues.get(direction, ())
                        if all_lost and not queue:
                            break
                        queues[direction] = (*(() if all_lost else queue), None)
                    else:
                        later = (*state.later, ("connect", one, other)) if kind == "flap" else state.later
                        up = state.up - {pair}
                        yield replace(
                            state, queues=queues, up=up, later=later, path=(*state.path, fault, lost)
                        )
        elif kind == "connect":
            one, other = names
            waiting = any(state.queues.get(x) for x in ((one, other), (other, one)))
            if one not in state.members or other not in state.members:
                return
            if waiting:
                return
            linked = replace(state, up=state.up | {frozenset(names)})
            views = {x: state.members[x].view for x in names}
            for mid in self.event(
                linked, one, "handle_guest" if views[other] is None else "handle_connection", other
            ):
                yield from self.event(
                    mid, other, "handle_guest" if views[one] is None else "handle_connection", one
                )
        elif kind == "leave":
            yield from self.event(state, name, "leave")
        elif kind == "join":
            members = {**state.members, name: self.rules(name, self.driver, unsigned)}
            later = tuple(("connect", name, other) for other in state.members)
            yield replace(
                state,
                members=members,
                held={**state.held, name: ()},
                later=state.later + later,
                path=(*state.path, fault),
            )

    def ends(self, state: State, name: str) -> Iterator[State]:
        """A process ends: of what it has sent to each of the others any suffix may be lost."""
        members = {x: member for x, member in state.members.items() if x != name}
        queues = {pair: queue for pair, queue in state.queues.items() if pair[1] != name}
        linked = [x for x in members if frozenset((x, name)) in state.up]
        later = tuple(x for x in state.later if (x[0] == "certificate" and x[1] != name) or name not in x)
        up = frozenset(pair for pair in state.up if name not in pair)
        sent = [queues.get((name, x), ()) for x in linked]
        for left in itertools.product(*(range(len(queue) + 1) for queue in sent)):
            cut = {
                (name, x): (*queue[:count], None) for x, queue, count in zip(linked, sent, left, strict=True)
            }
            yield replace(state, members=members, queues={**queues, **cut}, up=up, later=later)

    def event(self, state: State, name: str, method: str, *arguments: Any) -> Iterator[State]:
        """A member takes an event and settles."""
        member = state.members.get(name)
        path = (*state.path, (name, method, *arguments))
        if member is None:
            return
        driver = self.driver
        driver.begin(state.held[name])
        after = copied(member)
        try:
            if arguments[-1:] == (None,):
                after.handle_loss(arguments[0])
            else:
                getattr(after, method)(*arguments)
            after.process_events()
        except Broken as error:
            raise Broken(f"{error}; {describe(path)}") from None
        queues = dict(state.queues)
        for other, message in driver.sent:
            if frozenset((name, other)) in state.up:
                queues[name, other] = (*queues.get((name, other), ()), message)
        kept = state.kept if driver.kept is None else {**state.kept, name: driver.kept}
        members = {**state.members, name: after}
        decided = state.decided
        if after.view is not None and after.view != member.view:
            number = after.view.number
            if decided.get(number, after.view) != after.view:
                raise Broken(f"view {number} is {decided[number]} and {after.view}; {describe(path)}")
            decided = {**decided, number: after.view}
        new = replace(
            state,
            members=members,
            held={**state.held, name: driver.held},
            kept=kept,
            queues=queues,
            decided=decided,
            path=path,
        )
        if after.view != member.view:
            self.check_trains(new)
        if driver.reason is None:
            yield new
        else:
            *_, ended = self.ends(new, name)  # all that it has sent arrives
            yield ended

    # --- laws -------------------------------------------------------------------------------------------------------

    def check_trains(self, state: State) -> None:
        views = {member.view for member in state.members.values() if member.view is not None}
        training = [
            view
            for view in views
            if all(
                x in state.members and state.members[x].view == view and not state.members[x].is_frozen
                for x in view.members
            )
        ]
        if len(training) > 1:
            raise Broken(f"views train at once: {training}; {describe(state.path)}")

    def check_end(self, state: State) -> None:
        """Nothing is under way: a member trains with all of its view, or lacks a quorum that can talk."""
        for name, member in state.members.items():
            view, known = member.view, member.knowledge
            if view is None or known is None:
                continue
            same = {x for x in view.members if x in state.members and state.members[x].view == view}
            for other, peer in state.members.items():
                newer = peer.view is not None and peer.view.number > view.number
                if newer and frozenset((name, other)) in state.up:
                    raise Broken(
                        f"{name} is connected to {other}, and not told of its view; {describe(state.path)}"
                    )
            if member.is_frozen:
                part = Member._find_participants(member)  # whatever a mutant does
                linked = all(frozenset(pair) in state.up for pair in itertools.combinations(part, 2))
                if (
                    name in part
                    and linked
                    and same.issuperset(part)
                    and Member._is_quorum(member, part, known.certificates)
                ):
                    raise Broken(f"{name} hangs in {view}; {describe(state.path)}")
            elif len(same) < len(view.members) or any(state.members[x].is_frozen for x in same):
                raise Broken(f"{name} trains in {view} alone; {describe(state.path)}")

    # --- keys -------------------------------------------------------------------------------------------------------

    def key(self, state: State) -> Any:
        return (
            tuple((name, self.member_key(member)) for name, member in sorted(state.members.items())),
            tuple((pair, tuple(map(self.message_key, q))) for pair, q in sorted(state.queues.items()) if q),
            tuple(
                (name, self.message_key(x))
                for name, x in sorted(state.kept.items())
                if name not in state.members
            ),
            tuple(sorted(state.held.items())),
            state.up,
            state.faults,
            tuple(sorted(state.later)),
            tuple(sorted(state.decided.items())),
        )

    def member_key(self, member: Member) -> Any:
        found = self._keys.get(id(member))
        if found is None:
            known = member.knowledge
            key = (
                member.view,
                known and tuple(sorted(known.fact_counts.items())),
                known and tuple((x, self.message_key(c)) for x, c in sorted(known.certificates.items())),
                tuple((x, self.message_key(r)) for x, r in sorted(member._reports.items())),
                tuple(sorted((vote, tuple(sorted(names))) for vote, names in member._voters.items())),
                member._held_exchanges,
                member._vote,
                frozenset(member.connected_names),
                frozenset(member._guests),
                frozenset(member._disconnected_names),
                frozenset(member._certificates),
                member._is_leaving,
            )
            self._keys[id(member)] = found = member, hash(key)
        return found[1]

    def message_key(self, message: Message | None) -> Any:
        if message is None or not isinstance(message, MemberReport | EndCertificate):
            return message
        found = self._keys.get(id(message))
        if found is None:
            if isinstance(message, MemberReport):
                view, know, wills, held, vote = message
                key: Any = (
                    view,
                    tuple(sorted(know.items())),
                    tuple((x, self.message_key(c)) for x, c in sorted(wills.items())),
                    held,
                    vote,
                )
            else:
                key = (
                    message.name,
                    None if message.final_report is None else self.message_key(message.final_report),
                )
            self._keys[id(message)] = found = message, hash(key)
        return found[1]


def copied(member: Member) -> Member:
    after = with_own_values(member)
    after.knowledge = member.knowledge and with_own_values(member.knowledge)
    after._voters = {vote: set(names) for vote, names in member._voters.items()}
    return after


def with_own_values(state: T) -> T:
    """A copy with sets and dictionaries of its own."""
    after = object.__new__(type(state))
    for name, value in vars(state).items():
        setattr(after, name, value.copy() if isinstance(value, set | dict) else value)
    return after


def describe(path: tuple[Any, ...]) -> str:
    """The steps that led to a violation, without what messages say."""
    steps = []
    for name, method, *rest in path:
        what = [
            "closed" if x is None else x if isinstance(x, str) else type(x).__name__.lower() for x in rest
        ]
        steps.append(" ".join((str(name), str(method), *what)))
    return f"{len(steps)} steps: " + ", ".join(steps)


ALL = [*ONE, *((*one, *other) for one, other in itertools.combinations(ONE, 2))]
"""Sets of one fault and of two."""
FEW = [
    *(faults for faults in ONE if faults[0][0] in ("crash", "kill", "reset", "leave")),
    (("reset", "a", "b"), ("reset", "a", "c")),
    (("crash", "c"), ("reset", "a", "b")),
    (("kill", "b"), ("kill", "c")),
    (("crash", "c"), ("leave", "b")),
]
"""Those that have few states."""
LIMIT = 200_000
"""Of states of one set of faults."""


def explore(faults: tuple[Fault, ...], without: str = "", limit: int = 10**9) -> int:
    return Search(faults, MUTANTS[without].rules, limit).run()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--without", choices=sorted(MUTANTS), default="")
    parser.add_argument("--limit", type=int, default=LIMIT, help="states of one set of faults")
    parser.add_argument("--first", type=int, default=0, help="the first set of faults")
    parser.add_argument("--count", type=int, default=len(ALL), help="how many sets of faults")
    given = parser.parse_args()
    total = unfinished = broken = 0
    for number, faults in enumerate(ALL[given.first : given.first + given.count], given.first):
        began = time.process_time()
        try:
            count = explore(faults, given.without, given.limit)
            what = f"{count:,} states"
            total += count
        except Exhausted:
            what = f"more than {given.limit:,} states, not finished"
            unfinished += 1
        except Broken as error:
            what = f"broken: {error}"
            broken += 1
        print(f"{number} {faults}: {what}, {time.process_time() - began:.1f} s", flush=True)
        if broken:
            break
    print(f"{total:,} states; {unfinished} sets of faults not finished; {broken} broken")
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
