"""Connections of a member: signs of life of the others, and reconnections."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from farflung.comm import Purpose
from farflung.comm.meeting import ENDED
from farflung.errors import PeerLost
from farflung.membership.member import Member
from farflung.membership.views import View
from farflung.tasks import Pending
from farflung.types import Payload, Runtime, Tag

__all__ = ["PROBE", "REPAIR_S", "TAG", "Connections", "as_bytes", "text_of", "text_payload"]

TAG = Tag(Purpose.VIEWS.at(0))
"""Tag of all messages of the agreement."""
PROBE = b"?"
"""Request for a sign of life."""
_DIAL_S, REPAIR_S = 1.5, 3.0
"""Maximum seconds for which votes wait for the repair of a connection: directly, and through a relay."""
_FLAPS, _FLAPS_S = 5, 60.0
"""Number of breaks within a time after which a relay is preferred to a member's connection."""
_AGAIN_S = 0.5
"""Seconds after which a failed connection is retried."""


class Connections:
    """Connections of one member, and the times of signs of life of the others.

    Args:
      runtime: Runtime of the member.
      member: Member that is notified of lost processes.
      get_view: Function that returns the newest view.
      patience_s: Seconds without a sign of life after which a member counts as silent.
      can_return: True if connections to former members are restored.
      schedule_processing: Callback that schedules the member's processing of events.
    """

    def __init__(
        self,
        runtime: Runtime,
        member: Member,
        view: Callable[[], View],
        patience_s: float,
        returns: bool,
        settle: Callable[[], None],
    ) -> None:
        self._runtime, self._comm, self._member = runtime, runtime.comm, member
        self._view, self._patience_s, self._returns, self._settle = view, patience_s, returns, settle
        self.closed = set[str]()
        """Names of processes whose connections are closed."""
        self.silent = set[str]()
        """Names of members that were lost because of their silence."""
        self.malformed = set[str]()
        """Names of members that have sent malformed messages; they are ignored and not reconnected."""
        self.heard: dict[str, float] = {}
        """Time of the last message of the agreement from each process."""
        self.awake_s = -math.inf
        """End of the last known stall of this process."""
        self._cuts: dict[frozenset[str], float] = {}
        """Pairs of members without a connection, with the time since when that is known."""
        self._dials: dict[str, tuple[str | None, Pending[None]]] = {}
        """Reconnections of the view by member: the relay, and the pending connection.

        Those through a relay last as long as the view, because the news of the cut may arrive after them."""
        self._dialled_in: View | None = None
        """View of these reconnections."""
        self._made: dict[str, Pending[None]] = {}
        """Latest direct reconnection to each member that was connected before."""
        self._breaks: dict[str, list[float]] = {}
        """Times at which connections to each member were found broken."""

    # --- signs of life ----------------------------------------------------------------------------------------------

    def ask(self, names: Iterable[str]) -> set[str]:
        """Requests a sign of life from those of some processes that are connected, and returns their names."""
        connected = self._member.connected.intersection(names)
        for name in sorted(connected):
            self._comm.send(text_payload(PROBE), int(name), TAG, -1)
        return connected

    async def asked(self, seconds: float) -> set[str]:
        """Requests a sign of life from the members, and returns their names after a number of seconds."""
        while True:
            names, start_s = self.ask(self._view().members), self._runtime.now()
            await self._runtime.sleep_until(start_s + seconds)
            if self._runtime.now() <= start_s + 1.5 * seconds:
                return names
            self.awake_s = self._runtime.now()  # this process stalled: arrived messages are not handled yet

    def silent_s(self, name: str) -> float:
        """Returns the seconds since the last sign of life of a member, without stalls of this process."""
        time_s = self._runtime.now()
        last_s = max(self.heard.get(name, -math.inf), self.awake_s, time_s - self._comm.quiet_s(int(name)))
        return time_s - last_s

    def are_silent(self, names: Iterable[str]) -> None:
        """Marks connected members as lost because of their silence."""
        for name in sorted(self._member.connected.intersection(names)):
            self.silent.add(name)
            self._dials.pop(name, None)
            self._member.lost(name)
            self._settle()

    def hear(self, name: str) -> bool:
        """Records a message of a process; returns True if it was unknown or silent before."""
        self.heard[name] = self._runtime.now()
        if name in self._member.connected or name in self.closed:
            return False
        self.silent.discard(name)
        self._member.back(name)
        return True

    def come(self, name: str) -> None:
        """Records that a process is connected again."""
        self.closed.discard(name)
        self.silent.discard(name)
        self._member.back(name)

    def go(self, name: str) -> bool:
        """Records the end of a connection; returns False if it was closed here."""
        if name in self.closed:
            return False  # closed by this member
        self.closed.add(name)
        self._dials.pop(name, None)
        self._breaks.setdefault(name, []).append(self._runtime.now())
        self._member.lost(name)
        return True

    # --- processes that are no members any more ---------------------------------------------------------------------

    def await_back(self, names: Iterable[str]) -> None:
        """Reconnects to processes that are not connected; the other ends do so too if they are alive."""
        if not self._returns or self._member.stopped:
            return
        for name in sorted({*names} - self._member.connected - self.malformed - {self._member.name}):
            link = self._made.get(name)
            if link is None or link.done:
                self._made[name] = link = self._comm.reconnect(int(name))
                link.on_done(partial(self._back_or_again, name))

    def _back_or_again(self, name: str, made: Pending[None]) -> None:
        """Retries a connection that was lost before both ends had greeted."""

        async def retry() -> None:
            await self._runtime.sleep_until(self._runtime.now() + _AGAIN_S)
            if self._made.get(name) is made:
                self.await_back([name])

        if isinstance(made.error, PeerLost) and made.error.detail != ENDED:
            self._runtime.launch(retry())

    def may_be_back(self) -> bool:
        """Returns True if the process of another member of the view may be alive."""
        errors = [link.error for name in self._view().members if (link := self._made.get(name)) is not None]
        num_ended = sum(isinstance(error, PeerLost) and error.detail == ENDED for error in errors)
        return self._returns and num_ended < len({*self._view().members} - {self._member.name})

    # --- members ----------------------------------------------------------------------------------------------------

    def repair(self) -> bool:
        """Reconnects to members whose connections are broken, first directly and then through a relay.

        Returns:
          True if votes must wait for a connection.
        """
        time_s, cuts, is_stranded = self._runtime.now(), self._member.cuts(), self._member.stranded
        dial_s, repair_s = min(_DIAL_S, self._patience_s / 4), min(REPAIR_S, self._patience_s / 2)
        for _ in cuts.difference(self._cuts):
            for seconds in (dial_s, repair_s):
                self.settle_at(time_s + seconds)
        self._cuts = {pair: self._cuts.get(pair, time_s) for pair in sorted(cuts, key=sorted)}
        is_same_view = self._dialled_in is self._view()
        self._dialled_in = self._view()
        self._dials = {
            name: (relay, link)
            for name, (relay, link) in self._dials.items()
            if self._pair(name) in cuts or (is_same_view and relay is not None)
        }
        must_wait = False
        for pair, since in self._cuts.items():
            relay = self._relay(pair)
            if self._member.name in pair:
                (name,) = pair - {self._member.name}
                if name in self.malformed:
                    continue
                via, link = self._dials.get(name, (None, None))
                has_failed = link is not None and via is None and link.error is not None
                is_silent = name in self.silent  # its patience is over
                can_dial = (
                    is_stranded and relay is None and self._returns if is_silent else time_s < since + dial_s
                )
                can_dial &= relay is None or not self._flaps(name)
                if (link is None or (is_silent and via is not None)) and can_dial:
                    via, link = None, self._reconnect(name, None)
                is_dialling = link is not None and via is None and not link.done and time_s < since + dial_s
                is_dialling &= not is_silent
                # The other end has not reported yet.
                is_connected = link is not None and link.done and link.error is None
                is_settled = has_failed or is_dialling or is_connected
                if relay not in (None, via) and time_s < since + repair_s and not is_settled:
                    self._reconnect(name, relay)
                must_wait |= is_dialling or (is_connected and time_s < since + repair_s)
                if has_failed:
                    continue
            elif relay == self._member.name:
                self._comm.relay(*sorted(map(int, pair)))
            must_wait |= relay is not None and time_s < since + repair_s
        return must_wait

    def settle_at(self, t: float) -> None:
        """Schedules the member's processing of events at a time."""

        async def wait() -> None:
            await self._runtime.sleep_until(t)
            self._settle()

        self._runtime.launch(wait())

    def more_cuts(self) -> bool:
        """Returns True if there are broken connections that :meth:`repair_connections` has not seen."""
        return bool(self._member.cuts().difference(self._cuts))

    def _reconnect(self, name: str, relay: str | None) -> Pending[None]:
        self.closed.add(name)
        self._member.lost(name)
        link = self._comm.reconnect(int(name), None if relay is None else int(relay))
        self._made.pop(name, None)
        if relay is None:
            self._made[name] = link
        self._dials[name] = relay, link
        link.on_done(lambda _: self._settle())
        return link

    def _flaps(self, name: str) -> bool:
        """Returns True if the connection to a member breaks repeatedly."""
        since = self._runtime.now() - _FLAPS_S
        return sum(t > since for t in self._breaks.get(name, ())) > _FLAPS

    def _relay(self, pair: frozenset[str]) -> str | None:
        """Returns the most senior member that is connected to both members of a pair."""
        cut = {name for broken in self._cuts if broken & pair for name in broken}
        return next((name for name in self._view().members if name not in pair and name not in cut), None)

    def _pair(self, name: str) -> frozenset[str]:
        return frozenset((self._member.name, name))


def text_payload(text: bytes) -> Payload:
    """Builds a message of bytes."""
    return Payload((as_bytes(text),))


def text_of(payload: Payload) -> bytes:
    """Returns the bytes of a message; raises ``ValueError`` if it has further tensors."""
    (text,) = payload.tensors()
    return bytes(text.numpy())


def as_bytes(text: bytes) -> Tensor:
    """Builds a tensor of bytes."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)
