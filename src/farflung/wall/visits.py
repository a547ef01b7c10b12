"""What a member of an elastic run answers to processes that are none: supervisors, and replicas that join."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from farflung.comm import Peer, Purpose
from farflung.comm.visits import Access, answered
from farflung.errors import ConfigError, FarflungError, RunLost
from farflung.membership import Elastic, Page
from farflung.types import Json, Payload, Tag

if TYPE_CHECKING:
    from farflung.tasks import Pending
    from farflung.wall.runtime import WallRuntime

__all__ = ["Guest", "Takes", "elastic_on"]

_KEY, _GUEST = Tag(Purpose.VIEWS.at(1)), Tag(Purpose.VIEWS.at(2))
VISIT_S = 10.0
"""How long a visit of a replica that joins may take."""
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
    """Have a run outlive the loss of members; all members call it.

    Args:
      runtime: of this member; its view is not whole.
      ranks: the members that are there.
      page: takes what a supervisor reads after this process's end; ``None``: it has no supervisor.
      takes: what replicas that join are told; ``None``: the run takes none.
      guest: has asked for this member to join; ``None``: it is there from the start, when the most senior member makes
        the key of the run, and tells the others.
      options: of :class:`farflung.membership.Elastic`.
    """
    key = runtime.launch(_agreed_key(runtime, ranks)).wait() if guest is None else guest.key
    visits = _Visits(runtime, key, page, takes)
    visits.elastic = Elastic(runtime, key, page=page, members=ranks, told=visits.told, **options)
    if runtime.comm.size > 1:
        runtime.launch(visits.listen([] if guest is None else guest.guests))
    return visits.elastic


async def _agreed_key(runtime: WallRuntime, ranks: Sequence[int]) -> bytes:
    comm, first = runtime.comm, ranks[0]
    if comm.rank != first:
        (text,) = (await comm.recv(first, _KEY)).tensors()
        return bytes(text.numpy())
    key = secrets.token_bytes(32)
    for rank in ranks[1:]:
        comm.send(_payload(key), rank, _KEY)
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
        """Replicas that join, by rank, until a view has them."""
        self._invited: dict[int, float] = {}
        """Until when ranks are kept for replicas that have asked for one."""

    async def listen(self, guests: Sequence[Peer]) -> None:
        """Answer from now on, and hear from other members of replicas that join, beside those that do already."""
        for peer in guests:
            self._admit(peer)
        self._runtime.view.transport.receive(self._key, partial(answered, self._find))
        self.told(self.elastic.changes[-1].ranks)
        while True:
            _, payload = await self._runtime.comm.recv_any(_GUEST, deadline_s=math.inf)
            with suppress(FarflungError):
                self._admit(Peer.from_json(_text(payload)))

    def told(self, ranks: Sequence[int]) -> None:
        """Note the members of a view."""
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

    def _find(self, question: object) -> Mapping[str, Json]:
        match question:
            case {"certificate": str(text)}:
                self.elastic.certified(text.encode())
                return {}
            case {"join": bool(here)}:
                return self._invite(here)
            case {"peer": str(text)}:
                return self._welcome(Peer.from_json(text))
            case _:
                raise ValueError("no question")

    def _invite(self, here: bool) -> dict[str, Json]:
        """Give a replica a rank, or name the member to ask for one: one alone gives ranks."""
        if self._takes is None:
            raise ConfigError("the run takes no others (--elastic MIN:MAX)")
        ranks = self.elastic.changes[-1].ranks
        senior = self._runtime.peers.get(ranks[0])
        if not here and ranks[0] != self._runtime.comm.rank and senior is not None and _place(senior):
            return {"ask": _place(senior)}
        now, kept = self._runtime.now(), self._used() | self._guests.keys()
        kept |= {rank for rank, until in self._invited.items() if until > now}
        rank = next((rank for rank in range(self._takes.ranks) if rank not in kept), None)
        if rank is None:
            raise ConfigError(f"all {self._takes.ranks} ranks of the run are used")
        self._invited[rank] = now + INVITED_S
        return {"rank": rank, "members": list(ranks), "config": dict(self._takes.config)}

    def _used(self) -> set[int]:
        return {rank for change in self.elastic.changes for rank in change.ranks}

    def _welcome(self, peer: Peer) -> dict[str, Json]:
        """Admit a replica, and have all others do so."""
        runtime = self._runtime
        if peer.rank in self._used() | self._guests.keys():
            raise ConfigError(f"rank {peer.rank} was given to another replica meanwhile: join again")
        guests: list[Json] = [guest.to_json() for guest in self._guests.values()]
        self._admit(peer)
        for rank in runtime.view.present() - {peer.rank}:
            runtime.comm.send(_payload(peer.to_json().encode()), rank, _GUEST)
        ranks = self.elastic.changes[-1].ranks
        return {"members": [runtime.peers[rank].to_json() for rank in ranks], "guests": guests}

    def _admit(self, peer: Peer) -> None:
        if peer.rank in self._guests:  # another member has told of it too
            return
        greeted = self._runtime.let_in(peer)
        self._guests[peer.rank] = peer

        def come(greeted: Pending[None]) -> None:
            self._invited.pop(peer.rank, None)
            if greeted.error is not None:
                self._guests.pop(peer.rank, None)
                return
            for guest in self._guests.values():
                if guest.rank != peer.rank:
                    self._runtime.comm.send(_payload(guest.to_json().encode()), peer.rank, _GUEST)

        greeted.on_done(come)


class Guest:
    """A replica that joins a run.

    Args:
      access: how the run is reached.
      address: of any member.

    Raises:
      ConfigError: no member of the run answers there, or it takes no others.
    """

    def __init__(self, access: Access, address: str) -> None:
        self.key, self._access, self._address = access.key, access, address
        found = self._ask({"join": False})
        if "ask" in found:
            before, self._address = address, str(found["ask"])
            try:
                found = self._ask({"join": True})
            except ConfigError:  # it may be the one that is lost
                self._address = before
                found = self._ask({"join": True})
        self.rank, self.config, self.members = found["rank"], found["config"], found["members"]
        self.guests: list[Peer] = []
        """Others that join."""

    @property
    def host(self) -> str:
        """Of the member that has answered."""
        return self._address.rpartition(":")[0].strip("[]")

    def _ask(self, question: Mapping[str, Json]) -> dict[str, Any]:
        try:
            answer = self._access.ask(self._address, question, VISIT_S)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise ConfigError(
                f"{self._address}: no run answers there that this key belongs to ({why})"
            ) from None
        if "refused" in answer:
            raise ConfigError(f"{self._address}: {answer['refused']}")
        return answer

    def come(self, me: Peer) -> list[Peer]:
        """Tell the members of this replica; return them.

        Raises:
          RunLost: there are other members by now.
        """
        answer = self._ask({"peer": me.to_json()})
        self.guests = [Peer.from_json(text) for text in answer["guests"]]
        peers = [Peer.from_json(text) for text in answer["members"]]
        if [peer.rank for peer in peers] != self.members:
            raise RunLost("the members of the run have changed meanwhile: join again")
        return [*peers, me]


def _place(peer: Peer) -> str | None:
    """The address without transport."""
    return None if peer.address is None else peer.address.removeprefix("tcp://")


def _payload(text: bytes) -> Payload:
    return Payload((torch.frombuffer(bytearray(text), dtype=torch.uint8),))


def _text(payload: Payload) -> bytes:
    (text,) = payload.tensors()
    return bytes(text.numpy())
