"""Members on a network in virtual time, with exchanges of marks above them, and the laws that hold at every moment."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal, NamedTuple

from farflung.membership import EndCertificate, Member, MemberReport, Message, MessageCodec, View, Vote

__all__ = ["LAST", "Broken", "Link", "Node", "World", "unsigned"]

LAST = 10
"""The last exchange of a run."""


class Broken(AssertionError):
    """A law was violated."""


class Crashed(Exception):
    """A process ends between two sends."""


class Data(NamedTuple):
    """A contribution to an exchange."""

    number: int
    exchange: int


class Gift(NamedTuple):
    """An exchange, or the whole state with the exchanges that are whole in it."""

    number: int
    exchange: int
    whole: tuple[int, ...]


class Again(NamedTuple):
    """A wish of a process that was evicted, to be admitted again."""


def unsigned(name: str, exit_code: int, will: MemberReport | None) -> EndCertificate:
    return EndCertificate(name, exit_code, will, "")


class Link:
    """A connection of two processes: messages in order, until it is reset."""

    def __init__(self) -> None:
        self.up, self.epoch = False, 0
        self.latest: dict[tuple[str, bool], float] = defaultdict(float)
        """When the latest message to an end arrives, control and data apart."""
        self.blocked = set[str]()
        """Ends that hear nothing; messages to them wait."""
        self.waiting: list[Callable[[], None]] = []
        self.unaware = set[str]()
        """Ends that have not noticed yet that the connection is closed."""


class Node:
    """A process: a member, its driver, and exchanges, each made of one contribution of every member of a view."""

    def __init__(self, world: World, name: str, view: View | None = None) -> None:
        self.world, self.name = world, name
        self.alive, self.paused, self.fuse = True, False, -1
        self.reason: str | None = None
        self.kept: MemberReport | None = None
        self.backlog: list[Callable[[], None]] = []
        self.epochs: dict[str, int] = {}
        self.settling = False
        self.view: View | None = None
        self.running = self.has_model = False
        self.base, self.extra = -1 if view is None else 0, set[int]()
        self.given = set[tuple[int, int]]()
        self.contributions: dict[int, set[tuple[str, int]]] = defaultdict(set)
        self.lacking: dict[int, str] = {}
        self.later: list[tuple[str, Data | Gift]] = []
        self.member = world.rules(name, self, world.certify, view, quorum=world.quorum)
        if view is not None:
            self.has_model = True

    @property
    def whole(self) -> tuple[int, ...]:
        return (self.base, *sorted(self.extra))

    @property
    def lives(self) -> bool:
        return self.alive and self.reason is None

    # --- effects ----------------------------------------------------------------------------------------------------

    def send(self, name: str, message: Message | Data | Gift | Again) -> None:
        if self.fuse >= 0:
            self.fuse -= 1
            if self.fuse < 0:
                raise Crashed
        if isinstance(message, MemberReport | Vote | EndCertificate):
            self.world.messages += 1
        self.world.transmit(self, name, message)

    def store_report(self, report: MemberReport) -> None:
        self.kept = report

    def freeze(self) -> tuple[int, ...]:
        self.running = self.world.without == "freeze"
        return self.whole if self.has_model else ()

    def install_view(self, view: View) -> None:
        self.view = view
        self.contributions.clear()
        if not self.has_model:  # exchanges that were given before the state are not committed
            self.base, self.extra = -1, set()
        covered = {*range(view.complete_exchanges[0] + 1), *view.complete_exchanges}
        if self.has_model and not covered.issuperset(self.whole):
            raise Broken(
                f"{self.name} holds {self.whole}, view {view.number} begins after {view.complete_exchanges}"
            )
        self.lacking = {x.exchange: x.giver for x in view.list_handovers() if x.receiver == self.name}
        self.running = True
        self.world.entered(self)
        self.ask_again()
        later, self.later = self.later, []
        for source, message in later:
            self.take(source, message)
        self.go_on()

    def send_handovers(self, view: View) -> None:
        for giver, receiver, exchange in view.list_handovers():
            if giver == self.name:
                self.send(receiver, Gift(view.number, exchange, self.whole))

    def did_suspend(self, view: View) -> bool:
        self.running = False
        if not self.world.returns:
            return False
        self.view, self.has_model = None, False
        self.base, self.extra, self.lacking = -1, set(), {}
        self.world.after(self.world.batch(), partial(self.do, self.ask))
        return True

    def ask(self) -> None:
        """Ask to be admitted again."""
        if self.member.view is None:
            for name in sorted(self.member.connected_names):
                self.send(name, Again())

    def stop(self, reason: str) -> None:
        self.reason = reason
        self.running = False

    # --- exchanges --------------------------------------------------------------------------------------------------

    def ask_again(self) -> None:
        """A giver that is no member of the view and has gone leaves members without what it was to give."""
        assert self.view is not None
        for giver in self.lacking.values():
            if giver not in self.view.members and giver not in self.member.connected_names:
                self.member.request_new_view()

    def take(self, source: str, message: Data | Gift) -> None:
        number = 0 if self.view is None else self.view.number
        if message.number > number:
            self.later.append((source, message))
        elif message.number < number and (self.world.without != "refusal" or isinstance(message, Gift)):
            self.world.refused += 1
        elif isinstance(message, Gift):
            self.adopt(message)
        elif self.running:
            self.contributions[message.exchange].add((source, message.number))
            self.complete(message.exchange)

    def adopt(self, gift: Gift) -> None:
        assert self.view is not None
        if self.lacking.pop(gift.exchange, None) is None or not self.running:
            return
        if gift.exchange == self.view.complete_exchanges[0]:
            self.has_model, self.base = True, max(self.base, gift.whole[0])
            self.extra.update(gift.whole)
        self.extra.add(gift.exchange)
        self.advance()
        self.go_on()

    def advance(self) -> None:
        while self.base + 1 in self.extra:
            self.base += 1
        self.extra = {x for x in self.extra if x > self.base}

    def go_on(self) -> None:
        """Contribute to all exchanges of the window that are not whole."""
        if not self.running or self.lacking or not self.has_model:
            return
        assert self.view is not None
        for exchange in range(self.base + 1, min(self.base + self.world.window, LAST) + 1):
            if exchange not in self.extra and (self.view.number, exchange) not in self.given:
                self.given.add((self.view.number, exchange))
                for name in self.view.members:
                    if name != self.name:
                        self.send(name, Data(self.view.number, exchange))
                self.contributions[exchange].add((self.name, self.view.number))
                self.complete(exchange)

    def complete(self, exchange: int) -> None:
        assert self.view is not None
        contributions = self.contributions[exchange]
        if exchange <= self.base or exchange in self.extra or self.lacking or not self.has_model:
            return
        if not {name for name, _ in contributions}.issuperset(self.view.members):
            return
        if contributions != {(name, self.view.number) for name in self.view.members}:
            raise Broken(f"exchange {exchange} of view {self.view} is made of {sorted(contributions)}")
        self.extra.add(exchange)
        self.advance()
        self.go_on()

    # --- events -----------------------------------------------------------------------------------------------------

    def do(self, event: Callable[[], object]) -> None:
        """Pass an event on, and settle soon after; a paused process gets it when it goes on."""
        if not self.lives:
            return
        if self.paused:
            self.backlog.append(partial(self.do, event))
            return
        try:
            event()
            if not self.settling:
                self.settling = True
                self.world.after(self.world.batch(), self.settle)
        except Crashed:
            self.world.crashed(self)
        self.world.look_at(self)

    def settle(self) -> None:
        if not self.lives or self.paused:
            self.settling = False
            return
        self.settling = False
        try:
            self.member.process_events()
        except Crashed:
            self.world.crashed(self)
        self.world.look_at(self)

    def resume(self) -> None:
        self.paused = False
        backlog, self.backlog = self.backlog, []
        for event in backlog:
            event()
        self.do(lambda: None)

    def notice(self, name: str) -> None:
        """Notice that a connection is closed."""
        self.epochs.pop(name, None)
        self.member.handle_loss(name)
        if self.running and self.view is not None:
            self.ask_again()

    def meet(self, name: str, epoch: int, *, has_view: bool) -> None:
        self.epochs[name] = epoch
        (self.member.handle_connection if has_view else self.member.handle_guest)(name)

    def receive(self, source: str, message: Message | Data | Gift | Again) -> None:
        if isinstance(message, Data | Gift):
            self.take(source, message)
        elif isinstance(message, Again):
            self.member.handle_guest(source)
        else:
            self.member.handle_message(source, message)


class World:
    """Processes and their links; time is a number, and everything is drawn from one seed.

    Args:
      seed: of delays.
      members: of the first view, by seniority; all are connected.
      rules: the state machine; a mutant leaves out a rule.
      without: what drivers leave out: ``"freeze"``, ``"refusal"``.
      delay: one-way delay of a message; ``None``: drawn for each.
      window: exchanges in flight.
      returns: whether members that are evicted ask to be admitted again.
      codec: encodes and decodes each message; ``None``: objects are passed.
    """

    def __init__(
        self,
        seed: int,
        members: Iterable[str],
        *,
        rules: type[Member] = Member,
        without: str = "",
        delay: float | None = None,
        window: int = 1,
        quorum: Literal["majority", 1] = "majority",
        returns: bool = False,
        codec: MessageCodec | None = None,
        lanes: bool = False,
    ) -> None:
        self.draw = random.Random(seed)
        self.rules, self.without, self.window, self.quorum, self.lanes = rules, without, window, quorum, lanes
        self.codec, self.delay, self.returns = codec, delay, returns
        self.certify = codec.sign_certificate if codec else unsigned
        self.now, self.messages, self.refused = 0.0, 0, 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = itertools.count()
        self.nodes: dict[str, Node] = {}
        self.links: dict[frozenset[str], Link] = defaultdict(Link)
        self.decided: dict[int, View] = {}
        self.installed: dict[str, tuple[float, View]] = {}
        self.told: list[str] = []
        self.on_crash: Callable[[Node], None] = lambda node: None
        view = View(1, tuple(members), (0,), (tuple(members),))
        for name in view.members:
            self.nodes[name] = Node(self, name, view)
        for one, other in itertools.combinations(view.members, 2):
            self.connect(one, other)
        for node in self.nodes.values():
            node.do(partial(node.install_view, view))

    # --- time -------------------------------------------------------------------------------------------------------

    def at(self, time: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (time, next(self._sequence), event))

    def after(self, delay: float, event: Callable[[], None]) -> None:
        self.at(self.now + delay, event)

    def run(self, until: float = float("inf")) -> None:
        """Carry out events up to a time, or until there are none."""
        while self._heap and self._heap[0][0] <= until:
            self.now, _, event = heapq.heappop(self._heap)
            event()
        if until < float("inf"):
            self.now = until

    def batch(self) -> float:
        """How long a process goes on reading before it settles."""
        if self.delay is not None:
            return 0.0
        return self.draw.choice((0.0, 0.0, 0.1, 0.5))

    def one_way(self) -> float:
        if self.delay is not None:
            return self.delay
        return self.draw.uniform(0.1, 1.0) if self.draw.random() < 0.9 else self.draw.uniform(1.0, 6.0)

    # --- links ------------------------------------------------------------------------------------------------------

    def link(self, one: str, other: str) -> Link:
        return self.links[frozenset((one, other))]

    def transmit(self, source: Node, name: str, message: Any) -> None:
        link = self.link(source.name, name)
        if link.up and source.epochs.get(name) == link.epoch:
            if self.codec is not None and isinstance(message, MemberReport | Vote | EndCertificate):
                message = self.codec.decode(self.codec.encode(message))
            self.pass_on(link, source.name, name, lambda node: node.receive(source.name, message), message)

    def pass_on(
        self, link: Link, source: str, name: str, event: Callable[[Node], object], message: Any = None
    ) -> None:
        """Let an event happen at the other end of a link, after all that happens there by this link already."""
        epoch, lane = link.epoch, self.lanes and isinstance(message, Data | Gift)

        def arrive() -> None:
            if link.epoch == epoch and name in self.nodes:
                if name in link.blocked:
                    link.waiting.append(arrive)
                else:
                    node = self.nodes[name]
                    node.do(lambda: event(node))

        moment = max(self.now + self.one_way(), link.latest[name, lane])
        if message is None:  # a closing comes last
            moment = max(moment, link.latest[name, not lane])
        link.latest[name, lane] = moment
        self.at(moment, arrive)

    def connect(self, one: str, other: str) -> None:
        """Connect two processes again; both have noticed by then that they were not."""
        nodes = self.nodes[one], self.nodes[other]
        link = self.link(one, other)
        if link.up or not all(node.lives for node in nodes):
            return
        for name in sorted(link.unaware):
            self.notice(name, other if name == one else one)
        if not all(node.lives for node in nodes):
            return
        link.up = True
        link.epoch += 1
        link.blocked.clear()
        link.waiting.clear()
        link.latest.clear()
        have_view = [node.member.view is not None for node in nodes]
        for node, peer, has_view in zip(nodes, reversed(nodes), reversed(have_view), strict=True):
            node.do(partial(node.meet, peer.name, link.epoch, has_view=has_view))

    def notice(self, name: str, peer: str) -> None:
        link = self.link(name, peer)
        if name in link.unaware:
            link.unaware.remove(name)
            node = self.nodes[name]
            node.do(partial(node.notice, peer))

    def noticed(self, node: Node, name: str) -> None:
        self.notice(node.name, name)

    def reset(self, one: str, other: str, delays: tuple[float, float] | None = None) -> None:
        """Close a connection, whose messages under way are lost; both ends notice after a while, or at the end."""
        link = self.link(one, other)
        if not link.up:
            return
        link.up = False
        link.epoch += 1
        link.waiting.clear()
        link.unaware = {one, other}
        if delays is None:
            late, later = (self.draw.choice((0.0, 0.1, 1.0, 5.0)) * self.draw.random() for _ in range(2))
            delays = late, later
        for name, peer, delay in zip((one, other), (other, one), delays, strict=True):
            self.after(delay, partial(self.notice, name, peer))

    def block(self, source: str, name: str) -> None:
        """Let messages to a process wait."""
        if self.link(source, name).up:
            self.link(source, name).blocked.add(name)

    def unblock(self, one: str, other: str) -> None:
        link = self.link(one, other)
        link.blocked.clear()
        waiting, link.waiting = link.waiting, []
        for arrive in waiting:
            arrive()

    def close_all(self, node: Node, *, whole: bool = True, told: bool = True) -> None:
        """Close the connections of a process that has ended.

        Args:
          node: the process.
          whole: whether messages under way arrive before the other end notices.
          told: whether the other end notices before the end of the plan.
        """
        for peer in self.nodes.values():
            link = self.link(node.name, peer.name) if peer is not node else None
            if link is not None and link.up:
                link.up = False
                link.unaware = {peer.name}
                if not whole:
                    link.epoch += 1
                if told:
                    self.pass_on(link, node.name, peer.name, partial(self.noticed, name=node.name))

    # --- processes --------------------------------------------------------------------------------------------------

    def crashed(self, node: Node) -> None:
        if node.lives:
            node.alive = False
            node.running = False
            self.on_crash(node)

    def certificate(self, node: Node, exit_code: int) -> EndCertificate:
        return self.certify(node.name, exit_code, node.kept)

    def tell(self, certificate: EndCertificate, name: str) -> None:
        """Pass a certificate of a supervisor on to a process."""
        node = self.nodes[name]
        node.do(partial(node.member.handle_certificate, certificate))

    def join(self, name: str) -> Node:
        self.nodes[name] = node = Node(self, name)
        return node

    # --- laws -------------------------------------------------------------------------------------------------------

    def look_at(self, node: Node) -> None:
        """Check that a number is decided once; end a process that has stopped."""
        view = node.member.view
        if view is not None and self.decided.setdefault(view.number, view) != view and self.quorum != 1:
            raise Broken(f"view {view.number} is {self.decided[view.number]} and {view}")
        if node.reason is not None and node.alive:
            node.alive = False
            self.told.append(f"{node.name}: {node.reason}")
            self.close_all(node)

    def entered(self, node: Node) -> None:
        """Check that no two views train at once: no other view has all its members in it, none of them frozen."""
        assert node.view is not None
        self.installed[node.name] = self.now, node.view
        views = defaultdict[View, int](int)
        for other in self.nodes.values():
            if other.lives and other.view is not None and not other.member.is_frozen:
                views[other.view] += 1
        whole = [view for view, count in views.items() if count == len(view.members)]
        if len(whole) > 1 and self.quorum != 1:
            raise Broken(f"views train at once: {whole}")
