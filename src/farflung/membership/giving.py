"""Transfer of a run's state from members to joining replicas: a snapshot, and the results since.

Members make the snapshot at one step, and keep later results for each replica that follows the run by these results;
see :mod:`farflung.membership.following`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from torch import Tensor

from farflung.comm import Purpose
from farflung.membership.connections import TAG, as_bytes, text_payload
from farflung.membership.exchanges import ExchangeLog, Logged, Result
from farflung.membership.messages import Malformed
from farflung.types import Payload, Tag

if TYPE_CHECKING:
    from farflung.membership.agreement import Agreement

__all__ = ["NEWS", "PIECES", "PLAN", "REQUESTS", "WANT", "Name", "StateGiver"]

NEWS, PIECES, REQUESTS = (Tag(Purpose.STATE.at(number)) for number in range(3))
WANT = b"want "
"""Request for the state of the run; the number of the request follows."""
PLAN = b"plan "
"""Plan of a snapshot for a replica; its rank, its request and the step of the snapshot follow."""
_AHEAD = 1
"""Number of steps from the current one to the snapshot, so that all members can make it of the same state."""
_BACKLOG_NBYTES = 1 << 23
"""Bytes of results that are always kept for a replica that follows."""

Name: TypeAlias = "str | int"
"""Name of fetched content: digest of a part of the snapshot, or number of an exchange."""


@dataclass(eq=False)
class _Offer:
    """Snapshot and results that one joining replica may request.

    Args:
      request: Number of its request for a snapshot.
      step: Step before which the state was saved.
      parts: Bytes of the snapshot, by digest.
      missing_numbers: Numbers of started exchanges whose results the snapshot lacks.
      num_started: Number of exchanges that had started.
    """

    request: int
    step: int
    parts: Mapping[str, Tensor]
    needed: Collection[int]
    started: int
    results: dict[int, Result] = field(default_factory=dict)
    """Results that the replica has not fetched, by number."""
    begins: Mapping[str, Any] | None = None
    """Start state of the replica, once it is known."""
    view: int = 0
    """Number of the last view that was sent to the replica."""

    def lacks(self, result: Result) -> bool:
        """Returns True if the snapshot does not contain a result."""
        return result.number > self.started or result.number in self.needed

    @property
    def is_stale(self) -> bool:
        """Returns True if a new snapshot would be shorter than the remaining results."""
        snapshot_nbytes = sum(part.nbytes for part in self.parts.values())
        left_nbytes = sum(result.content.nbytes for result in self.results.values())
        return left_nbytes > max(snapshot_nbytes, _BACKLOG_NBYTES)


class StateGiver:
    """Server of the run's state for joining replicas.

    Args:
      agreement: Agreement of this member.
      log: Exchanges of this member.
    """

    def __init__(self, agreement: Agreement, log: ExchangeLog) -> None:
        self._agreement, self._log, self._roster = agreement, log, agreement.roster
        self._comm = agreement.runtime.comm
        self._offers: dict[int, _Offer] = {}
        self._wanted: dict[int, tuple[int, int | None]] = {}
        """Number of each replica's request for a snapshot, and its planned step; ``None`` while unplanned."""

    @property
    def ranks(self) -> list[int]:
        """Ranks of the replicas that follow."""
        return list(self._offers)

    # --- snapshots --------------------------------------------------------------------------------------------------

    def hear(self, source: str, text: bytes) -> None:
        """Handles a request for a snapshot, or a plan of one.

        Raises:
          MalformedMessage: The text is neither.
        """
        numbers = text[len(WANT) :].split(b" ")
        if not all(map(bytes.isdigit, numbers)) or len(numbers) != (1 if text.startswith(WANT) else 3):
            raise Malformed("numbers are wanted")
        if text.startswith(PLAN):
            rank, request, step = map(int, numbers)
            if rank not in self._offers or self._offers[rank].request < request:
                self._wanted[rank] = request, step
        elif (
            source in self._roster.view.members
            and self._roster.begins.get(int(source), math.inf) <= self._log.step
        ):
            self._tell(int(source), {"late": True})  # too late for a snapshot of a state before it begins
        else:
            self._want(int(source), int(numbers[0]))
            self.plan()

    def _want(self, rank: int, request: int) -> None:
        offered_request = self._offers[rank].request if rank in self._offers else 0
        if request > max(self._wanted.get(rank, (0, None))[0], offered_request):
            self._wanted[rank] = request, None

    def plan(self) -> None:
        """Plans the snapshots for replicas that request one; only one member does this."""
        roster, step = self._roster, self._log.step
        first = next((rank for rank in roster.members if roster.begins.get(rank, -1) <= step), None)
        if self._agreement.joins or first != self._comm.rank:
            return
        members = self._agreement.member.connected.intersection(roster.view.members)
        for rank, (request, planned_step) in self._wanted.items():
            if planned_step is None:
                self._wanted[rank] = request, step + _AHEAD
                text = PLAN + b"%d %d %d" % (rank, request, step + _AHEAD)
                for member in sorted(members):
                    self._comm.send(text_payload(text), int(member), TAG, -1)

    def begin_step(self, step: int) -> bool:
        """Starts a step, and informs the replicas that begin at it.

        Returns:
          True if a snapshot of the state must be offered before it; see :meth:`publish_state`.
        """
        if self._roster.begins.get(self._comm.rank) == step:
            return False  # the others have informed all replicas that begin at it
        joiners = set(self._roster.joiners(step))
        if followers := joiners.intersection(self.ranks):
            self._agreement.launch(self._let_begin(sorted(followers), step, self._log.started))
        return bool(self._due(step) or joiners.difference(self.ranks))

    def _due(self, step: int) -> list[int]:
        """Returns the replicas that need a snapshot before a step."""
        return [rank for rank, (_, due) in tuple(self._wanted.items()) if due is not None and due <= step]

    async def offer(
        self, step: int, parts: Sequence[Tensor], started: int, merged: Collection[Logged[Any]]
    ) -> None:
        """Offers a snapshot to joining replicas.

        Args:
          step: Step before which the state was saved.
          parts: Parts of the snapshot.
          num_started: Number of exchanges that had started.
          merged: Exchanges whose results are in the snapshot.
        """
        missing = [x for x in self._log.up_to(started) if x not in merged]
        joiners = set(self._roster.joiners(step))
        ranks = {*self._due(step), *joiners.difference(self.ranks)}
        content = {blake2b(cast("Any", part.numpy()), digest_size=16).hexdigest(): part for part in parts}
        for rank in ranks:
            request, _ = self._wanted.pop(rank, (0, None))
            self._offers[rank] = _Offer(request, step, content, {x.number for x in missing}, started)
            self.greet(rank)
        for logged in missing:
            if logged.kept is not None:
                self._keep(logged)
        if begin_now := sorted(joiners.intersection(ranks)):
            await self._let_begin(begin_now, step, started)

    async def _let_begin(self, ranks: Sequence[int], step: int, started: int) -> None:
        """Sends replicas their start state, once all earlier exchanges are whole.

        It includes all results that a member may lack, so that the replicas can hand these over as well.
        """
        for logged in self._log.up_to(started):
            await logged.result
        start_state = {"step": step, "auto": [*self._comm.auto.items()], **self._log.to_begin(started)}
        results = [x.to_result() for x in self._log.up_to(started)]
        for rank in ranks:
            offer = self._offers.get(rank)
            if offer is None or rank not in self._roster.members or self._roster.begins.get(rank) != step:
                continue
            offer.begins = start_state
            for result in results:
                if not offer.lacks(result):  # all others were announced when they became whole
                    offer.results[result.number] = result
                    self._tell_result(rank, result, 0)
            self._tell(rank, {"begins": start_state})

    # --- messages to replicas ---------------------------------------------------------------------------------------

    def greet(self, rank: int) -> None:
        """Sends a replica its offer, also after a reconnection."""
        if (offer := self._offers.get(rank)) is None:
            return
        view = self._roster.to_json()
        offer_json = {
            "step": offer.step,
            "parts": [[digest, part.nbytes] for digest, part in offer.parts.items()],
            "needed": [*offer.needed],
            "started": offer.started,
            "view": view["number"],
        }
        self._tell(rank, {"offer": offer_json})
        self._tell_view(rank, view)
        for result in offer.results.values():
            self._tell_result(rank, result, 0)
        if offer.begins is not None:
            self._tell(rank, {"begins": offer.begins})

    def add(self, logged: Logged[Any]) -> None:
        """Retains the result of an exchange for replicas that follow, unless they have begun before it started."""
        members = self._roster.members
        begun_ranks = [r for r in self._offers if logged.begun >= self._roster.begins.get(r, math.inf)]
        self.close(set(begun_ranks).intersection(members))
        if self._offers:
            self._keep(logged)

    def _keep(self, logged: Logged[Any]) -> None:
        """Retains a result; a replica that is too far behind must restart, unless the others wait for it."""
        result, first_retained, members = logged.to_result(), self._log.least, self._roster.members
        for rank, offer in list(self._offers.items()):
            if offer.lacks(result):
                offer.results[result.number] = result
                self._tell_result(rank, result, first_retained)
                if offer.is_stale and rank not in members:
                    self.close([rank])

    def _tell_result(self, rank: int, result: Result, least: int) -> None:
        self._tell(rank, {"result": [*result[:4], result.content.nbytes, least]})

    def close(self, ranks: Iterable[int]) -> None:
        """Closes the offers to some replicas, and informs these."""
        for rank in ranks:
            self._wanted.pop(rank, None)
            if self._offers.pop(rank, None) is not None:
                self._tell(rank, {"closed": True})

    def tell_view(self) -> None:
        """Sends the newest view to the replicas that follow."""
        view = self._roster.to_json()
        for rank in self._offers:
            self._tell_view(rank, view)

    def _tell_view(self, rank: int, view: Mapping[str, Any]) -> None:
        self._offers[rank].view = view["number"]
        self._tell(rank, {"view": view})

    def _tell(self, rank: int, news: Mapping[str, Any]) -> None:
        self._comm.send(text_payload(json.dumps(news).encode()), rank, NEWS, -1)

    async def serve(self) -> None:
        """Serves requests for pieces: after all other messages, unless the others wait for the replica."""
        while True:
            rank, payload = await self._comm.recv_any(REQUESTS, deadline_s=math.inf)
            with suppress(ValueError, TypeError, KeyError):  # a malformed request gets no answer
                view, fetched, name, begin, nbytes = json.loads(bytes(next(payload.tensors()).numpy()))
                self._answer(rank, view, fetched, name, begin, nbytes)

    def _answer(
        self, rank: int, view: int, fetched: Iterable[int], name: Name, begin: int, nbytes: int
    ) -> None:
        """Sends a piece of the snapshot or of a result, and drops results that have been fetched.

        A newer view may have repeated results that the replica named for an older one.
        """
        if (offer := self._offers.get(rank)) is None:
            return
        for number in fetched if view >= offer.view else ():
            offer.results.pop(number, None)
        content = offer.parts.get(name) if isinstance(name, str) else offer.results[name].content
        if content is not None and 0 <= begin < begin + nbytes <= content.nbytes:
            head = as_bytes(json.dumps([name, begin]).encode())
            priority = 1 if offer.begins is None else -1
            self._comm.send(Payload((head, content[begin : begin + nbytes])), rank, PIECES, priority)
