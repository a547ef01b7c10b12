"""Answers of an elastic run's member to non-members: supervisors, and replicas that join."""

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
from farflung.comm.visits import Access, process_question
from farflung.errors import ConfigError, DeadlinePassed, FarflungError, ProtocolError, RunLost
from farflung.membership import Page, PaxosMembership
from farflung.membership.connections import build_payload, read_payload
from farflung.tasks import Pending
from farflung.types import Json, Tag

if TYPE_CHECKING:
    from farflung.wall.runtime import WallRuntime

__all__ = ["JoinClient", "JoinTerms", "create_elastic"]

_KEY, _GUEST = Tag(Purpose.VIEWS.build_exchange_id(1)), Tag(Purpose.VIEWS.build_exchange_id(2))
VISIT_S = 10.0
"""Maximum time of a visit of a joining replica."""
RETRY_LIMIT_S, _RETRY_S = 60.0, 0.5
"""Maximum time of retries with members that are to be admitted themselves, and delay of a retry."""
_REVISIT_S = 1.0, 8.0
"""Delay before a member that has not greeted is visited, doubled each time, and its maximum."""
INVITATION_S = 600.0
"""Time for which a rank is reserved for a replica that has asked for it."""


@dataclass(frozen=True)
class JoinTerms:
    """Terms that a run offers to replicas that join it.

    Args:
      config: Configuration of the run.
      max_ranks: Maximum number of ranks.
      publish: Function that stores the access to the run, at each change of its members.
    """

    config: Mapping[str, Json]
    max_ranks: int
    publish: Callable[[Access], object]


def create_elastic(
    runtime: WallRuntime,
    ranks: Sequence[int],
    *,
    page: Page | None = None,
    join_terms: JoinTerms | None = None,
    guest: JoinClient | None = None,
    **options: Any,
) -> PaxosMembership:
    """Creates the elastic part of a run, which then survives the loss of members; all members call this.

    Args:
      runtime: Runtime of this member, whose view may lose members.
      ranks: Ranks of the present members.
      page: Memory that a supervisor reads after this process's end; ``None`` without a supervisor.
      join_terms: Terms for replicas that join; ``None`` if the run admits none.
      guest: Guest that has met members for this one to join. ``None`` for a member from the start: then the most
        senior member creates the key of the run, and sends it to the others.
      options: Options of :class:`farflung.membership.PaxosMembership`.
    """
    key = runtime.launch(_agree_key(runtime, ranks)).wait() if guest is None else guest.key
    visits = _VisitHandler(runtime, key, page, join_terms)
    visits.elastic = elastic = PaxosMembership(
        runtime, key, page=page, members=ranks, on_view=visits.handle_view, **options
    )
    elastic.agreement.on_connect = visits.introduce_peer
    if runtime.comm.size > 1:
        elastic.agreement.launch(visits.serve_visitors(guest))
    return elastic


async def _agree_key(runtime: WallRuntime, ranks: Sequence[int]) -> bytes:
    comm, first = runtime.comm, ranks[0]
    if comm.rank != first:
        return read_payload(await comm.recv(first, _KEY))
    key = secrets.token_bytes(32)
    for rank in ranks[1:]:
        comm.send(build_payload(key), rank, _KEY)
    return key


class _VisitHandler:
    """Handler of visitors, on the communication thread.

    A question is a JSON object. ``certificate`` is that of an ended process, ``join`` is true if this member must
    answer although it is not the most senior one, and ``peer`` is a replica that joins.
    """

    elastic: PaxosMembership

    def __init__(
        self, runtime: WallRuntime, key: bytes, page: Page | None, join_terms: JoinTerms | None
    ) -> None:
        self._runtime, self._key, self._page, self._join_terms = runtime, key, page, join_terms
        self._guests: dict[int, Peer] = {}
        """Joining replicas by rank, until a view contains them or they disappear."""
        self._joined_ranks = set[int]()
        """Ranks of all replicas that have come to join; none is used twice."""
        self._reserved_until: dict[int, float] = {}
        """End of the reservation of ranks for replicas that have asked for one."""

    async def serve_visitors(self, guest: JoinClient | None) -> None:
        """Answers visitors, and admits the replicas that other members announce; never returns."""
        if guest is not None:
            guest.watch_greetings(self._runtime, self.elastic)
            self._joined_ranks.update(guest.used_ranks)
            for peer in guest.guests:
                with suppress(FarflungError):  # this member cannot reach it, as below
                    self._admit_peer(peer)
        self._runtime.session.transport.accept_visits(
            self._key, partial(process_question, self._handle_request)
        )
        self.handle_view(self.elastic.changes[-1].ranks)
        while True:
            _, payload = await self._runtime.comm.recv_any(_GUEST, deadline_s=math.inf)
            with suppress(FarflungError, ValueError):
                self._admit_peer(Peer.from_json(read_payload(payload)))

    def handle_view(self, ranks: Sequence[int]) -> None:
        """Publishes the members of a view."""
        runtime = self._runtime
        for rank in ranks:
            self._guests.pop(rank, None)
        peers = [runtime.peers[rank] for rank in ranks if rank in runtime.peers]
        access = Access(
            self._key,
            runtime.session.transport.keys is not None,
            list(filter(None, map(_get_address, peers))),
        )
        if self._page is not None:
            own_address = _get_address(runtime.session.transport.local_peer)
            addresses = [address for address in access.addresses if address != own_address]
            self._page.write_access(str(runtime.comm.rank), Access(self._key, access.is_encrypted, addresses))
        if self._join_terms is not None:
            publish = self._join_terms.publish
            with suppress(RuntimeError):  # this runtime has ended
                runtime.run_in_executor(lambda: publish(access))

    def introduce_peer(self, rank: int) -> None:
        """Introduces a new non-member to all other present replicas, and these to it."""
        runtime, elastic = self._runtime, self.elastic
        if elastic.is_joining or rank in elastic.members or rank not in runtime.peers:
            return
        for peer_rank in sorted(runtime.session.members.present_ranks - {rank}):
            self._send_peer(peer_rank, runtime.peers[rank])
            self._send_peer(rank, runtime.peers[peer_rank])

    def _send_peer(self, rank: int, peer: Peer) -> None:
        self._runtime.comm.send(build_payload(peer.to_json().encode()), rank, _GUEST)

    def _handle_request(self, question: object) -> Mapping[str, Json]:
        match question:
            case {"certificate": str(text)}:
                self.elastic.agreement.handle_certificate(text.encode())
                return {}
            case {"join": bool(must_answer)} if not self.elastic.is_joining:
                return self._assign_rank(must_answer)
            case {"peer": str(text)} if not self.elastic.is_joining:
                return self._admit_visitor(Peer.from_json(text))
            case {"join": bool()} | {"peer": str()}:
                return {"later": "that replica is to be admitted itself"}
            case _:
                raise ValueError("no question")

    def _assign_rank(self, must_answer: bool) -> dict[str, Json]:
        """Reserves a rank for a joining replica, or returns the address of the member that assigns ranks."""
        if self._join_terms is None:
            raise ConfigError("the run takes no others (--elastic MIN:MAX)")
        ranks, own_rank = self.elastic.members, self._runtime.comm.rank
        senior = self._runtime.peers.get(ranks[0])
        if not must_answer and ranks[0] != own_rank and senior is not None and _get_address(senior):
            return {"ask": _get_address(senior)}
        time_s, taken_ranks = self._runtime.read_clock(), self._list_used_ranks() | self._guests.keys()
        taken_ranks |= {rank for rank, end_s in self._reserved_until.items() if end_s > time_s}
        free = [rank for rank in range(self._join_terms.max_ranks) if rank not in taken_ranks]
        if not free:
            raise ConfigError(f"all {self._join_terms.max_ranks} ranks of the run are used")
        # Members asked at the same time, because the most senior one is lost, assign different ranks.
        rank = free[min(ranks.index(own_rank), len(free) - 1)]
        self._reserved_until[rank] = time_s + INVITATION_S
        addresses: list[Json] = [
            place
            for rank in ranks
            if rank in self._runtime.peers and (place := _get_address(self._runtime.peers[rank]))
        ]
        return {"rank": rank, "addresses": addresses, "config": dict(self._join_terms.config)}

    def _list_used_ranks(self) -> set[int]:
        """Returns the ranks of all present and former members and of replicas that have come to join."""
        return {rank for change in self.elastic.changes for rank in change.ranks} | self._joined_ranks

    def _admit_visitor(self, peer: Peer) -> dict[str, Json]:
        """Admits a replica, and informs all others."""
        runtime = self._runtime
        is_known = runtime.peers.get(peer.rank) == peer  # from another member
        if not is_known and peer.rank in self._list_used_ranks() | self._guests.keys():
            return {"again": f"rank {peer.rank} was given to another replica meanwhile"}
        guests: list[Json] = [guest.to_json() for guest in self._guests.values()]
        self._admit_peer(peer)
        for rank in runtime.session.members.present_ranks - {peer.rank}:
            self._send_peer(rank, peer)
        peers = [runtime.peers[rank] for rank in self.elastic.members if rank in runtime.peers]
        view = self.elastic.view_number
        members: list[Json] = [x.to_json() for x in peers]
        return {
            "view": view,
            "members": members,
            "guests": guests,
            "used": [*sorted(self._list_used_ranks())],
        }

    def _admit_peer(self, peer: Peer) -> None:
        known_peer = self._runtime.peers.get(peer.rank)
        if known_peer == peer or peer.rank in self._guests or peer.rank == self._runtime.comm.rank:
            return  # already announced by another member
        self.elastic.agreement.giver.close_offers([peer.rank])
        greeted = self._runtime.admit(peer)
        self._guests[peer.rank] = peer

        def record_greeting(greeted: Pending[None]) -> None:
            self._reserved_until.pop(peer.rank, None)
            if greeted.error is None:
                self._joined_ranks.add(peer.rank)
                return
            self._guests.pop(peer.rank, None)
            self._runtime.peers.pop(peer.rank, None)

        greeted.add_done_callback(record_greeting)


class JoinClient:
    """Replica that joins a run.

    Args:
      access: Access to the run.
      addresses: Addresses of members, to be asked in turn.

    Raises:
      ConfigError: No member of the run answers, or it admits no others.
    """

    def __init__(self, access: Access, addresses: Sequence[str]) -> None:
        self.key, self._access, self._addresses = access.key, access, list(dict.fromkeys(addresses))
        answer = self._ask_members({"join": False})
        if "ask" in answer:
            self._put_first([str(answer["ask"])])
            answer = self._ask_members({"join": True})  # the most senior member may be lost
        self.rank, self.config = answer["rank"], answer["config"]
        self._put_first(answer["addresses"])
        self.members: list[int] = []
        """Ranks of the members that had greeted this replica when :meth:`announce` returned."""
        self.guests: list[Peer] = []
        """Other joining replicas."""
        self._greetings: dict[int, Pending[None]] = {}
        """Pending greeting of each member, by rank."""
        self._view_number = 0
        """View of these members."""
        self.used_ranks: list[int] = []
        """Ranks that no other replica may have."""
        self._elastic: PaxosMembership | None = None

    @property
    def host(self) -> str:
        """Host of the member that has answered."""
        return self._addresses[0].rpartition(":")[0].strip("[]")

    @property
    def addresses(self) -> list[str]:
        """Known addresses, beginning with those of the newest members."""
        return list(self._addresses)

    def _put_first(self, addresses: Iterable[str]) -> None:
        """Puts some addresses first for later requests."""
        self._addresses = list(dict.fromkeys([*map(str, addresses), *self._addresses]))

    def _ask_members(self, question: Mapping[str, Json]) -> dict[str, Any]:
        """Asks members in turn until one answers, and puts this one first; retries later if a member says so."""
        deadline = time.monotonic() + RETRY_LIMIT_S
        while True:
            answer, refused = self._ask_once(question)
            if answer is not None:
                return answer
            if "later" not in refused or time.monotonic() >= deadline:
                raise ConfigError(next(iter(refused.values()), "no address of a member is known"))
            time.sleep(_RETRY_S)

    def _ask_once(self, question: Mapping[str, Json]) -> tuple[dict[str, Any] | None, dict[str, str]]:
        """Returns the first answer, or the reasons for its absence, by kind."""
        reasons: dict[str, str] = {}
        for address in self._addresses:
            try:
                answer = self._access.ask(address, question, VISIT_S)
            except (OSError, ValueError) as error:
                reason = getattr(error, "strerror", None) or str(error)
                answer = {"unheard": f"no run answers there that this key belongs to ({reason})"}
            kind = next((kind for kind in ("refused", "later", "unheard") if kind in answer), None)
            if kind is None:
                self._put_first([address])
                return answer, {}
            reasons.setdefault(kind, f"{address}: {answer[kind]}")
        return None, dict(sorted(reasons.items(), key=lambda item: item[0] != "refused"))

    def announce(self, runtime: WallRuntime) -> None:
        """Announces this replica to the members; returns when the first of them has greeted it.

        Args:
          runtime: Runtime of this replica, without others so far.

        Raises:
          ConfigError: The members cannot be connected to from this machine; says why.
          ProtocolError: A member trains with other settings; names them.
          RunLost: The rank has been given to another replica, or the members are lost; a new rank may be requested.
        """
        try:
            answer = self._ask_members({"peer": runtime.session.transport.local_peer.to_json()})
        except ConfigError as error:  # a member has answered before
            raise RunLost(f"no member is left of those that have answered: {error}") from None
        if "again" in answer:
            raise RunLost(answer["again"])
        self._view_number, self.used_ranks = int(answer["view"]), answer["used"]
        self.guests = [Peer.from_json(text) for text in answer["guests"]]
        peers = [Peer.from_json(text) for text in answer["members"]]
        runtime.launch(self._await_first_greeting(runtime, peers)).wait()

    async def _await_first_greeting(self, runtime: WallRuntime, peers: Sequence[Peer]) -> None:
        """Connects to all members; returns when the first has greeted, and keeps in ``members`` those that have."""
        first_greeting: Pending[None] = Pending()
        runtime.launch(self._retry_visits(runtime, peers))
        for peer in sorted(peers, key=lambda peer: (peer.address is None, peer.rank)):  # relays first
            self._greetings[peer.rank] = runtime.admit(peer)

        def check_greeting(greeted: Pending[None]) -> None:
            has_failed = all(x.error is not None for x in self._greetings.values())
            if greeted.error is None:
                first_greeting.set_result(None)
            elif has_failed or isinstance(greeted.error, ProtocolError):
                first_greeting.set_exception(greeted.error)

        for greeted in self._greetings.values():
            greeted.add_done_callback(check_greeting)
        await first_greeting
        self.members = [rank for rank, x in self._greetings.items() if x.is_done and x.error is None]

    async def _retry_visits(self, runtime: WallRuntime, peers: Sequence[Peer]) -> None:
        """Visits members that have not greeted, since the member that was asked may not have reached them."""
        question, wait_s = {"peer": runtime.session.transport.local_peer.to_json()}, _REVISIT_S[0]
        while True:
            await runtime.sleep_until(runtime.read_clock() + wait_s)
            missing = [peer for peer in peers if not self._greetings[peer.rank].is_done]
            if not missing:
                return
            wait_s = min(2 * wait_s, _REVISIT_S[1])
            for peer in missing:
                if (place := _get_address(peer)) is not None:
                    with suppress(OSError, ValueError):
                        visit = partial(self._access.ask, place, question, wait_s)
                        answer = await runtime.run_in_executor(visit)
                        if "again" in answer and self._elastic is not None:
                            self._elastic.agreement.joiner.fail_admission(peer.rank, RunLost(answer["again"]))

    @property
    def has_begun(self) -> bool:
        """Returns True if this replica has, or had, the state of the run."""
        return self._elastic is not None and self._elastic.agreement.joiner.has_begun

    def watch_greetings(self, runtime: WallRuntime, elastic: PaxosMembership) -> None:
        """Ends this replica if a member has not greeted in time and was a member throughout.

        If a view was without the replica in the meantime, for example after a stall, its time begins again.
        """
        self._elastic = elastic

        def check_greeting(rank: int, view: int, greeted: Pending[None]) -> None:
            was_away = any(rank in change.lost_ranks for change in elastic.changes if change.view > view)
            if isinstance(greeted.error, DeadlinePassed) and was_away and elastic.is_joining:
                greeting = self._greetings[rank] = runtime.admit(runtime.peers[rank])
                greeting.add_done_callback(partial(check_greeting, rank, elastic.changes[-1].view))
            elif isinstance(greeted.error, (DeadlinePassed, ProtocolError)):
                elastic.agreement.joiner.fail_admission(rank, greeted.error)

        for rank, greeted in self._greetings.items():
            greeted.add_done_callback(partial(check_greeting, rank, self._view_number))


def _get_address(peer: Peer) -> str | None:
    """Returns the address without transport."""
    return None if peer.address is None else peer.address.removeprefix("tcp://")
