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
from farflung.membership.connections import TAG, build_byte_tensor, build_payload, read_payload
from farflung.membership.exchanges import ExchangeLog, LoggedExchange, Result
from farflung.membership.messages import MalformedMessage
from farflung.types import Payload, Tag

if TYPE_CHECKING:
    from farflung.membership.agreement import Agreement

__all__ = ["NEWS", "PIECES", "PLAN", "REQUESTS", "WANT", "ContentName", "StatePublisher"]

NEWS, PIECES, REQUESTS = (Tag(Purpose.STATE.build_exchange_id(number)) for number in range(3))
WANT = b"want "
"""Request for the state of the run; the number of the request follows."""
PLAN = b"plan "
"""Plan of a snapshot for a replica; its rank, its request and the step of the snapshot follow."""
_LEAD_STEPS = 1
"""Number of steps from the current one to the snapshot, so that all members can make it of the same state."""
_BACKLOG_NBYTES = 1 << 23
"""Bytes of results that are always kept for a replica that follows."""

ContentName: TypeAlias = "str | int"
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
    missing_numbers: Collection[int]
    num_started: int
    results: dict[int, Result] = field(default_factory=dict)
    """Results that the replica has not fetched, by number."""
    start_state: Mapping[str, Any] | None = None
    """Start state of the replica, once it is known."""
    view_number: int = 0
    """Number of the last view that was sent to the replica."""

    def needs_result(self, result: Result) -> bool:
        """Returns True if the snapshot does not contain a result."""
        return result.number > self.num_started or result.number in self.missing_numbers

    @property
    def is_stale(self) -> bool:
        """Returns True if a new snapshot would be shorter than the remaining results."""
        snapshot_nbytes = sum(part.nbytes for part in self.parts.values())
        left_nbytes = sum(result.content.nbytes for result in self.results.values())
        return left_nbytes > max(snapshot_nbytes, _BACKLOG_NBYTES)


class StatePublisher:
    """Server of the run's state for joining replicas.

    Args:
      agreement: Agreement of this member.
      log: Exchanges of this member.
    """

    def __init__(self, agreement: Agreement, log: ExchangeLog) -> None:
        self._agreement, self._log, self._roster = agreement, log, agreement.roster
        self._comm = agreement.runtime.comm
        self._offers: dict[int, _Offer] = {}
        self._requests: dict[int, tuple[int, int | None]] = {}
        """Number of each replica's request for a snapshot, and its planned step; ``None`` while unplanned."""

    @property
    def ranks(self) -> list[int]:
        """Ranks of the replicas that follow."""
        return list(self._offers)

    # --- snapshots --------------------------------------------------------------------------------------------------

    def handle_request(self, source: str, text: bytes) -> None:
        """Handles a request for a snapshot, or a plan of one.

        Raises:
          MalformedMessage: The text is neither.
        """
        numbers = text[len(WANT) :].split(b" ")
        if not all(map(bytes.isdigit, numbers)) or len(numbers) != (1 if text.startswith(WANT) else 3):
            raise MalformedMessage("numbers are wanted")
        if text.startswith(PLAN):
            rank, request, step = map(int, numbers)
            if rank not in self._offers or self._offers[rank].request < request:
                self._requests[rank] = request, step
        elif (
            source in self._roster.view.members
            and self._roster.first_steps.get(int(source), math.inf) <= self._log.step
        ):
            # Too late for a snapshot of a state before it begins.
            self._send_news(int(source), {"late": True})
        else:
            self._add_request(int(source), int(numbers[0]))
            self.plan_snapshots()

    def _add_request(self, rank: int, request: int) -> None:
        offered_request = self._offers[rank].request if rank in self._offers else 0
        if request > max(self._requests.get(rank, (0, None))[0], offered_request):
            self._requests[rank] = request, None

    def plan_snapshots(self) -> None:
        """Plans the snapshots for replicas that request one; only one member does this."""
        roster, step = self._roster, self._log.step
        first = next((rank for rank in roster.members if roster.first_steps.get(rank, -1) <= step), None)
        if self._agreement.is_joining or first != self._comm.rank:
            return
        members = self._agreement.member.connected_names.intersection(roster.view.members)
        for rank, (request, planned_step) in self._requests.items():
            if planned_step is None:
                self._requests[rank] = request, step + _LEAD_STEPS
                text = PLAN + b"%d %d %d" % (rank, request, step + _LEAD_STEPS)
                for member in sorted(members):
                    self._comm.send(build_payload(text), int(member), TAG, -1)

    def should_publish_state(self, step: int) -> bool:
        """Starts a step, and informs the replicas that begin at it.

        Returns:
          True if a snapshot of the state must be offered before it; see :meth:`publish_state`.
        """
        if self._roster.first_steps.get(self._comm.rank) == step:
            return False  # the others have informed all replicas that begin at it
        joiners = set(self._roster.list_joiners(step))
        if followers := joiners.intersection(self.ranks):
            self._agreement.launch(self._send_start_state(sorted(followers), step, self._log.num_started))
        return bool(self._list_due(step) or joiners.difference(self.ranks))

    def _list_due(self, step: int) -> list[int]:
        """Returns the replicas that need a snapshot before a step."""
        return [rank for rank, (_, due) in tuple(self._requests.items()) if due is not None and due <= step]

    async def publish_state(
        self, step: int, parts: Sequence[Tensor], num_started: int, merged: Collection[LoggedExchange[Any]]
    ) -> None:
        """Offers a snapshot to joining replicas.

        Args:
          step: Step before which the state was saved.
          parts: Parts of the snapshot.
          num_started: Number of exchanges that had started.
          merged: Exchanges whose results are in the snapshot.
        """
        missing = [x for x in self._log.list_retained(num_started) if x not in merged]
        joiners = set(self._roster.list_joiners(step))
        ranks = {*self._list_due(step), *joiners.difference(self.ranks)}
        content = {blake2b(cast("Any", part.numpy()), digest_size=16).hexdigest(): part for part in parts}
        for rank in ranks:
            request, _ = self._requests.pop(rank, (0, None))
            self._offers[rank] = _Offer(request, step, content, {x.number for x in missing}, num_started)
            self.send_offer(rank)
        for logged in missing:
            if logged.stored_result is not None:
                self._retain_result(logged)
        if begin_now := sorted(joiners.intersection(ranks)):
            await self._send_start_state(begin_now, step, num_started)

    async def _send_start_state(self, ranks: Sequence[int], step: int, num_started: int) -> None:
        """Sends replicas their start state, once all earlier exchanges are complete.

        It includes all results that a member may lack, so that the replicas can hand these over as well.
        """
        for logged in self._log.list_retained(num_started):
            # A result with which this member began is stored, and never comes if nothing here has waited for it.
            if logged.stored_result is None:
                await logged.result
        start_state = {
            "step": step,
            "auto": [*self._comm.auto_collectives.items()],
            **self._log.build_start_state(num_started),
        }
        results = [x.to_result() for x in self._log.list_retained(num_started)]
        for rank in ranks:
            offer = self._offers.get(rank)
            if (
                offer is None
                or rank not in self._roster.members
                or self._roster.first_steps.get(rank) != step
            ):
                continue
            offer.start_state = start_state
            for result in results:
                if not offer.needs_result(result):  # all others were announced when they became complete
                    offer.results[result.number] = result
                    self._send_result(rank, result, 0)
            self._send_news(rank, {"begins": start_state})

    # --- messages to replicas ---------------------------------------------------------------------------------------

    def send_offer(self, rank: int) -> None:
        """Sends a replica its offer, also after a reconnection."""
        if (offer := self._offers.get(rank)) is None:
            return
        view = self._roster.to_json()
        offer_json = {
            "step": offer.step,
            "parts": [[digest, part.nbytes] for digest, part in offer.parts.items()],
            "needed": [*offer.missing_numbers],
            "started": offer.num_started,
            "view": view["number"],
        }
        self._send_news(rank, {"offer": offer_json})
        self._send_view(rank, view)
        for result in offer.results.values():
            self._send_result(rank, result, 0)
        if offer.start_state is not None:
            self._send_news(rank, {"begins": offer.start_state})

    def add_result(self, logged: LoggedExchange[Any]) -> None:
        """Retains the result of an exchange for replicas that follow, unless they have begun before it started."""
        members = self._roster.members
        begun_ranks = [
            r for r in self._offers if logged.begun_step >= self._roster.first_steps.get(r, math.inf)
        ]
        self.close_offers(set(begun_ranks).intersection(members))
        if self._offers:
            self._retain_result(logged)

    def _retain_result(self, logged: LoggedExchange[Any]) -> None:
        """Retains a result; a replica that is too far behind must restart, unless the others wait for it."""
        result, first_retained, members = logged.to_result(), self._log.first_retained, self._roster.members
        for rank, offer in list(self._offers.items()):
            if offer.needs_result(result):
                offer.results[result.number] = result
                self._send_result(rank, result, first_retained)
                if offer.is_stale and rank not in members:
                    self.close_offers([rank])

    def _send_result(self, rank: int, result: Result, first_retained: int) -> None:
        self._send_news(rank, {"result": [*result[:4], result.content.nbytes, first_retained]})

    def close_offers(self, ranks: Iterable[int]) -> None:
        """Closes the offers to some replicas, and informs these."""
        for rank in ranks:
            self._requests.pop(rank, None)
            if self._offers.pop(rank, None) is not None:
                self._send_news(rank, {"closed": True})

    def broadcast_view(self) -> None:
        """Sends the newest view to the replicas that follow."""
        view = self._roster.to_json()
        for rank in self._offers:
            self._send_view(rank, view)

    def _send_view(self, rank: int, view: Mapping[str, Any]) -> None:
        self._offers[rank].view_number = view["number"]
        self._send_news(rank, {"view": view})

    def _send_news(self, rank: int, news: Mapping[str, Any]) -> None:
        self._comm.send(build_payload(json.dumps(news).encode()), rank, NEWS, -1)

    async def serve_requests(self) -> None:
        """Serves requests for pieces: after all other messages, unless the others wait for the replica."""
        while True:
            rank, payload = await self._comm.recv_any(REQUESTS, deadline_s=math.inf)
            with suppress(ValueError, TypeError, KeyError, RecursionError):  # a malformed one gets no answer
                view, fetched, name, begin, nbytes = json.loads(read_payload(payload))
                self._send_piece(rank, view, fetched, name, begin, nbytes)

    def _send_piece(
        self, rank: int, view: int, fetched: Iterable[int], name: ContentName, begin: int, nbytes: int
    ) -> None:
        """Sends a piece of the snapshot or of a result, and drops results that have been fetched.

        A newer view may have repeated results that the replica named for an older one.
        """
        if (offer := self._offers.get(rank)) is None:
            return
        for number in fetched if view >= offer.view_number else ():
            offer.results.pop(number, None)
        content = offer.parts.get(name) if isinstance(name, str) else offer.results[name].content
        if content is not None and 0 <= begin < begin + nbytes <= content.nbytes:
            head = build_byte_tensor(json.dumps([name, begin]).encode())
            priority = 1 if offer.start_state is None else -1
            self._comm.send(Payload((head, content[begin : begin + nbytes])), rank, PIECES, priority)
