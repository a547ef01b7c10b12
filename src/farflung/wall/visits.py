"""What a member of an elastic run answers to processes that are none: supervisors, and replicas that join."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from farflung.comm import Peer, Purpose
from farflung.comm.visits import Access, answered
from farflung.errors import ConfigError, DeadlinePassed, FarflungError, ProtocolError, RunLost
from farflung.membership import Elastic, Page
from farflung.membership.connections import text_of, text_payload
from farflung.tasks import Pending
from farflung.types import Json, Tag

if TYPE_CHECKING:
    from farflung.wall.runtime import WallRuntime

__all__ = ["Guest", "Takes", "elastic_on"]

_KEY, _GUEST = Tag(Purpose.VIEWS.at(1)), Tag(Purpose.VIEWS.at(2))
VISIT_S = 10.0
"""How long a visit of a replica that joins may take."""
LATER_S, _AGAIN_S = 60.0, 0.5
"""For how long members are asked again that are to be admitted themselves, and how soon."""
_INSISTS_S = 1.0, 8.0
"""After how long a member that has not greeted is visited, doubled each time, and the most."""
INVITED_S = 600.0
"""For how long a rank is kept for a replica that has asked for it and has yet to come."""


@dataclass(frozen=True)
class Takes:
    """What a run tells replicas that join it.

    Args:
      config: of the run.
      ranks: how many there may be in all.
      publish: keeps how the run is reached, at each change of its members.
    """

    config: Mapping[str, Json]
    ranks: int
    publish: Callable[[Access], object]


def elastic_on(
    runtime: WallRuntime,
    ranks: Sequence[int],
    *,
    page: Page | None = None,
    takes: Takes | None = None,
    guest: Guest | None = None,
    **options: Any,
) -> Elastic:
    """Has a run outlive the loss of members; all members call it.

    Args:
      runtime: of this member; its view is not whole.
      ranks: the members that are there.
      page: takes what a supervisor reads after this process's end; ``None``: it has no supervisor.
      takes: what replicas that join are told; ``None``: the run takes none.
      guest: has met members for this one to join; ``None``: it is there from the start, when the most senior member
        makes the key of the run, and tells the others.
      options: of :class:`farflung.membership.Elastic`.
    """
    key = runtime.launch(_agreed_key(runtime, ranks)).wait() if guest is None else guest.key
    visits = _Visits(runtime, key, page, takes)
    visits.elastic = elastic = Elastic(runtime, key, page=page, members=ranks, told=visits.told, **options)
    elastic.agreement.met = visits.introduce
    if runtime.comm.size > 1:
        runtime.launch(visits.listen(guest))
    return elastic


async def _agreed_key(runtime: WallRuntime, ranks: Sequence[int]) -> bytes:
    comm, first = runtime.comm, ranks[0]
    if comm.rank != first:
        return text_of(await comm.recv(first, _KEY))
    key = secrets.token_bytes(32)
    for rank in ranks[1:]:
        comm.send(text_payload(key), rank, _KEY)
    return key


class _Visits:
    """Answers visitors, on the communication thread.

    A question is a JSON object: ``certificate``, of a process that has ended; ``join``, whether this member is to
    answer where it is not the most senior one; ``peer``, a replica that joins.
    """

    elastic: Elastic

    def __init__(self, runtime: WallRuntime, key: bytes, page: Page | None, takes: Takes | None) -> None:
        self._runtime, self._key, self._page, self._takes = runtime, key, page, takes
        self._guests: dict[int, Peer] = {}
        """Replicas that join, by rank, until a view has them or they are gone."""
        self._met = set[int]()
        """The ranks of all replicas that have come to join: none is used twice."""
        self._invited: dict[int, float] = {}
        """Until when ranks are kept for replicas that have asked for one."""

    async def listen(self, guest: Guest | None) -> None:
        """Answers from now on, and hears from other members of replicas that join."""
        if guest is not None:
            guest.watch(self._runtime, self.elastic)
            self._met.update(guest.used)
            for peer in guest.guests:
                self._admit(peer)
        self._runtime.view.transport.receive(self._key, partial(answered, self._find))
        self.told(self.elastic.changes[-1].ranks)
        while True:
            _, payload = await self._runtime.comm.recv_any(_GUEST, deadline_s=math.inf)
            with suppress(FarflungError, ValueError):
                self._admit(Peer.from_json(text_of(payload)))

    def told(self, ranks: Sequence[int]) -> None:
        """Notes the members of a view."""
        runtime = self._runtime
        for rank in ranks:
            self._guests.pop(rank, None)
        peers = [runtime.peers[rank] for rank in ranks if rank in runtime.peers]
        access = Access(
            self._key, runtime.view.transport.keys is not None, list(filter(None, map(_place, peers)))
        )
        if self._page is not None:
            mine = _place(runtime.view.transport.me)
            others = [address for address in access.addresses if address != mine]
            self._page.tell(str(runtime.comm.rank), Access(self._key, access.encrypted, others))
        if self._takes is not None:
            publish = self._takes.publish
            with suppress(RuntimeError):  # this runtime has ended
                runtime.aside(lambda: publish(access))

    def introduce(self, rank: int) -> None:
        """Tells a process that is no member and has come of all others that are here, and these of it."""
        runtime, mine = self._runtime, self.elastic
        if mine.joins or rank in mine.members or rank not in runtime.peers:
            return
        for other in sorted(runtime.view.present() - {rank}):
            self._tell(other, runtime.peers[rank])
            self._tell(rank, runtime.peers[other])

    def _tell(self, rank: int, peer: Peer) -> None:
        self._runtime.comm.send(text_payload(peer.to_json().encode()), rank, _GUEST)

    def _find(self, question: object) -> Mapping[str, Json]:
        match question:
            case {"certificate": str(text)}:
                self.elastic.agreement.certified(text.encode())
                return {}
            case {"join": bool(here)} if not self.elastic.joins:
                return self._invite(here)
            case {"peer": str(text)} if not self.elastic.joins:
                return self._welcome(Peer.from_json(text))
            case {"join": bool()} | {"peer": str()}:
                return {"later": "that replica is to be admitted itself"}
            case _:
                raise ValueError("no question")

    def _invite(self, here: bool) -> dict[str, Json]:
        """Gives a replica a rank, or names the member to ask for one: one alone gives ranks while it is there."""
        if self._takes is None:
            raise ConfigError("the run takes no others (--elastic MIN:MAX)")
        ranks, mine = self.elastic.members, self._runtime.comm.rank
        senior = self._runtime.peers.get(ranks[0])
        if not here and ranks[0] != mine and senior is not None and _place(senior):
            return {"ask": _place(senior)}
        now, kept = self._runtime.now(), self._used() | self._guests.keys()
        kept |= {rank for rank, until in self._invited.items() if until > now}
        free = [rank for rank in range(self._takes.ranks) if rank not in kept]
        if not free:
            raise ConfigError(f"all {self._takes.ranks} ranks of the run are used")
        # Members that are asked at the same time, because the most senior one is lost, give different ranks.
        rank = free[min(ranks.index(mine), len(free) - 1)]
        self._invited[rank] = now + INVITED_S
        addresses: list[Json] = [
            place
            for rank in ranks
            if rank in self._runtime.peers and (place := _place(self._runtime.peers[rank]))
        ]
        return {"rank": rank, "addresses": addresses, "config": dict(self._takes.config)}

    def _used(self) -> set[int]:
        """Returns the ranks of all that are or were members, or have come to be."""
        return {rank for change in self.elastic.changes for rank in change.ranks} | self._met

    def _welcome(self, peer: Peer) -> dict[str, Json]:
        """Admits a replica, and has all others do so."""
        runtime = self._runtime
        is_known = runtime.peers.get(peer.rank) == peer  # by another member
        if not is_known and peer.rank in self._used() | self._guests.keys():
            return {"again": f"rank {peer.rank} was given to another replica meanwhile"}
        guests: list[Json] = [guest.to_json() for guest in self._guests.values()]
        self._admit(peer)
        for rank in runtime.view.present() - {peer.rank}:
            self._tell(rank, peer)
        known = [runtime.peers[rank] for rank in self.elastic.members if rank in runtime.peers]
        view = self.elastic.view_number
        members: list[Json] = [one.to_json() for one in known]
        return {"view": view, "members": members, "guests": guests, "used": [*sorted(self._used())]}

    def _admit(self, peer: Peer) -> None:
        known = self._runtime.peers.get(peer.rank)
        if known == peer or peer.rank in self._guests or peer.rank == self._runtime.comm.rank:
            return  # another member has told of it too
        self.elastic.agreement.giver.close([peer.rank])
        greeted = self._runtime.let_in(peer)
        self._guests[peer.rank] = peer

        def come(greeted: Pending[None]) -> None:
            self._invited.pop(peer.rank, None)
            if greeted.error is None:
                self._met.add(peer.rank)
                return
            self._guests.pop(peer.rank, None)
            self._runtime.peers.pop(peer.rank, None)

        greeted.on_done(come)


class Guest:
    """A replica that joins a run.

    Args:
      access: how the run is reached.
      addresses: of members, to be asked in turn.

    Raises:
      ConfigError: no member of the run answers there, or it takes no others.
    """

    def __init__(self, access: Access, addresses: Sequence[str]) -> None:
        self.key, self._access, self._addresses = access.key, access, list(dict.fromkeys(addresses))
        found = self._ask({"join": False})
        if "ask" in found:
            self._prefer([str(found["ask"])])
            found = self._ask({"join": True})  # the senior may be the one that is lost
        self.rank, self.config = found["rank"], found["config"]
        self._prefer(found["addresses"])
        self.members: list[int] = []
        """The ranks of the members that have greeted this replica when it was made."""
        self.guests: list[Peer] = []
        """Others that join."""
        self._greetings: dict[int, Pending[None]] = {}
        """When each member greets, by rank."""
        self._view = 0
        """The view whose members these are."""
        self.used: list[int] = []
        """The ranks that no other replica may have."""
        self._elastic: Elastic | None = None

    @property
    def host(self) -> str:
        """Of the member that has answered."""
        return self._addresses[0].rpartition(":")[0].strip("[]")

    @property
    def addresses(self) -> list[str]:
        """All that are known, those of the newest members first."""
        return list(self._addresses)

    def _prefer(self, addresses: Iterable[str]) -> None:
        """Asks at some addresses first from now on."""
        self._addresses = list(dict.fromkeys([*map(str, addresses), *self._addresses]))

    def _ask(self, question: Mapping[str, Json]) -> dict[str, Any]:
        """Asks members in turn until one answers, which is asked first from then on; later again if one says so."""
        until = time.monotonic() + LATER_S
        while True:
            answer, refused = self._ask_once(question)
            if answer is not None:
                return answer
            if "later" not in refused or time.monotonic() >= until:
                raise ConfigError(next(iter(refused.values()), "no address of a member is known"))
            time.sleep(_AGAIN_S)

    def _ask_once(self, question: Mapping[str, Json]) -> tuple[dict[str, Any] | None, dict[str, str]]:
        """Returns the first answer, or why there is none, by kind."""
        reasons: dict[str, str] = {}
        for address in self._addresses:
            try:
                answer = self._access.ask(address, question, VISIT_S)
            except (OSError, ValueError) as error:
                why = getattr(error, "strerror", None) or str(error)
                answer = {"unheard": f"no run answers there that this key belongs to ({why})"}
            kind = next((kind for kind in ("refused", "later", "unheard") if kind in answer), None)
            if kind is None:
                self._prefer([address])
                return answer, {}
            reasons.setdefault(kind, f"{address}: {answer[kind]}")
        return None, dict(sorted(reasons.items(), key=lambda item: item[0] != "refused"))

    def come(self, runtime: WallRuntime) -> None:
        """Tells the members of this replica; returns when the first of them has greeted it, while others do yet.

        Args:
          runtime: of this replica alone so far.

        Raises:
          ConfigError: the members may not be connected to from here; says why.
          ProtocolError: a member trains something else; says what.
          RunLost: the rank is another's by now, or the members are lost; another may be asked for.
        """
        try:
            answer = self._ask({"peer": runtime.view.transport.me.to_json()})
        except ConfigError as error:  # one has answered before
            raise RunLost(f"no member is left of those that have answered: {error}") from None
        if "again" in answer:
            raise RunLost(answer["again"])
        self._view, self.used = int(answer["view"]), answer["used"]
        self.guests = [Peer.from_json(text) for text in answer["guests"]]
        peers = [Peer.from_json(text) for text in answer["members"]]
        runtime.launch(self._meet(runtime, peers)).wait()

    async def _meet(self, runtime: WallRuntime, peers: Sequence[Peer]) -> None:
        met: Pending[None] = Pending()
        runtime.launch(self._insist(runtime, peers))
        for peer in sorted(peers, key=lambda peer: (peer.address is None, peer.rank)):  # relays first
            self._greetings[peer.rank] = runtime.let_in(peer)

        def greets(greeted: Pending[None]) -> None:
            ended = all(one.error is not None for one in self._greetings.values())
            if greeted.error is None:
                met.set(None)
            elif ended or isinstance(greeted.error, ProtocolError):
                met.fail(greeted.error)

        for greeted in self._greetings.values():
            greeted.on_done(greets)
        await met
        self.members = [rank for rank, one in self._greetings.items() if one.done and one.error is None]

    async def _insist(self, runtime: WallRuntime, peers: Sequence[Peer]) -> None:
        """Visits members that do not greet: the one that was asked may not have reached them."""
        question, wait_s = {"peer": runtime.view.transport.me.to_json()}, _INSISTS_S[0]
        while True:
            await runtime.sleep_until(runtime.now() + wait_s)
            late = [peer for peer in peers if not self._greetings[peer.rank].done]
            if not late:
                return
            wait_s = min(2 * wait_s, _INSISTS_S[1])
            for peer in late:
                if (place := _place(peer)) is not None:
                    with suppress(OSError, ValueError):
                        visit = partial(self._access.ask, place, question, wait_s)
                        answer = await runtime.aside(visit)
                        if "again" in answer and self._elastic is not None:
                            self._elastic.agreement.joiner.cannot_reach(peer.rank, RunLost(answer["again"]))

    @property
    def has_begun(self) -> bool:
        """Whether this replica has, or had, the state of the run."""
        return self._elastic is not None and self._elastic.agreement.joiner.has_begun

    def watch(self, runtime: WallRuntime, elastic: Elastic) -> None:
        """Ends where a member has not greeted in time, and was one all that time.

        Where a view was without it meanwhile, as without one that stood still, its time begins again.
        """
        self._elastic = elastic

        def greets(rank: int, view: int, greeted: Pending[None]) -> None:
            was_away = any(rank in change.lost for change in elastic.changes if change.view > view)
            if isinstance(greeted.error, DeadlinePassed) and was_away and elastic.joins:
                again = self._greetings[rank] = runtime.let_in(runtime.peers[rank])
                again.on_done(partial(greets, rank, elastic.changes[-1].view))
            elif isinstance(greeted.error, (DeadlinePassed, ProtocolError)):
                elastic.agreement.joiner.cannot_reach(rank, greeted.error)

        for rank, greeted in self._greetings.items():
            greeted.on_done(partial(greets, rank, self._view))


def _place(peer: Peer) -> str | None:
    """The address without transport."""
    return None if peer.address is None else peer.address.removeprefix("tcp://")
