"""Connections of a member: signs of life of the others, and reconnections."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from farflung.comm import Purpose
from farflung.comm.members import PROCESS_ENDED
from farflung.errors import PeerLost
from farflung.membership.member import Member
from farflung.membership.views import View
from farflung.tasks import Pending
from farflung.types import Payload, Runtime, Tag

__all__ = ["PROBE", "REPAIR_S", "TAG", "Connections", "build_byte_tensor", "build_payload", "read_payload"]

TAG = Tag(Purpose.VIEWS.build_exchange_id(0))
"""Tag of all messages of the agreement."""
PROBE = b"?"
"""Request for a sign of life."""
_DIAL_S, REPAIR_S = 1.5, 3.0
"""Maximum seconds for which votes wait for the repair of a connection: directly, and through a relay."""
_MAX_BREAKS, _BREAK_WINDOW_S = 5, 60.0
"""Number of breaks within a time after which a relay is preferred to a member's connection."""
_RETRY_S = 0.5
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
        get_view: Callable[[], View],
        patience_s: float,
        can_return: bool,
        schedule_processing: Callable[[], None],
    ) -> None:
        self._runtime, self._comm, self._member = runtime, runtime.comm, member
        self._get_view = get_view
        self._patience_s = patience_s
        self._can_return = can_return
        self._schedule_processing = schedule_processing
        self.closed_names = set[str]()
        """Names of processes whose connections are closed."""
        self.silent_names = set[str]()
        """Names of members that were lost because of their silence."""
        self.malformed_names = set[str]()
        """Names of members that have sent malformed messages; they are ignored and not reconnected."""
        self.last_received_s: dict[str, float] = {}
        """Time of the last message of the agreement from each process."""
        self.resumed_s = -math.inf
        """End of the last known stall of this process."""
        self._cut_times: dict[frozenset[str], float] = {}
        """Pairs of members without a connection, with the time since when that is known."""
        self._dials: dict[str, tuple[str | None, Pending[None]]] = {}
        """Reconnections of the view by member: the relay, and the pending connection.

        Those through a relay last as long as the view, because the news of the cut may arrive after them."""
        self._dialled_view: View | None = None
        """View of these reconnections."""
        self._direct_connections: dict[str, Pending[None]] = {}
        """Latest direct reconnection to each member that was connected before."""
        self._break_times: dict[str, list[float]] = {}
        """Times at which connections to each member were found broken."""

    # --- signs of life ----------------------------------------------------------------------------------------------

    def send_probes(self, names: Iterable[str]) -> set[str]:
        """Requests a sign of life from those of some processes that are connected, and returns their names."""
        connected = self._member.connected_names.intersection(names)
        for name in sorted(connected):
            self._comm.send(build_payload(PROBE), int(name), TAG, -1)
        return connected

    async def probe_members(self, seconds: float) -> set[str]:
        """Requests a sign of life from the members, and returns their names after a number of seconds."""
        while True:
            names, start_s = self.send_probes(self._get_view().members), self._runtime.read_clock()
            await self._runtime.sleep_until(start_s + seconds)
            if self._runtime.read_clock() <= start_s + 1.5 * seconds:
                return names
            # This process stalled: arrived messages are not handled yet.
            self.resumed_s = self._runtime.read_clock()

    def compute_silence_s(self, name: str) -> float:
        """Returns the seconds since the last sign of life of a member, without stalls of this process."""
        time_s = self._runtime.read_clock()
        last_s = max(
            self.last_received_s.get(name, -math.inf),
            self.resumed_s,
            time_s - self._comm.get_idle_s(int(name)),
        )
        return time_s - last_s

    def mark_silent(self, names: Iterable[str]) -> None:
        """Marks connected members as lost because of their silence."""
        for name in sorted(self._member.connected_names.intersection(names)):
            self.silent_names.add(name)
            self._dials.pop(name, None)
            self._member.handle_loss(name)
            self._schedule_processing()

    def did_reappear(self, name: str) -> bool:
        """Records a message of a process; returns True if it was unknown or silent before."""
        self.last_received_s[name] = self._runtime.read_clock()
        if name in self._member.connected_names or name in self.closed_names:
            return False
        self.silent_names.discard(name)
        self._member.handle_connection(name)
        return True

    def handle_connection(self, name: str) -> None:
        """Records that a process is connected again."""
        self.closed_names.discard(name)
        self.silent_names.discard(name)
        self._member.handle_connection(name)

    def record_disconnect(self, name: str) -> bool:
        """Records the end of a connection; returns False if it was closed here."""
        if name in self.closed_names:
            return False  # closed by this member
        self.closed_names.add(name)
        self._dials.pop(name, None)
        self._break_times.setdefault(name, []).append(self._runtime.read_clock())
        self._member.handle_loss(name)
        return True

    # --- processes that are no members any more ---------------------------------------------------------------------

    def reconnect_lost(self, names: Iterable[str]) -> None:
        """Reconnects to processes that are not connected; the other ends do so too if they are alive."""
        if not self._can_return or self._member.is_stopped:
            return
        for name in sorted(
            {*names} - self._member.connected_names - self.malformed_names - {self._member.name}
        ):
            link = self._direct_connections.get(name)
            if link is None or link.is_done:
                self._direct_connections[name] = link = self._comm.reconnect(int(name))
                link.add_done_callback(partial(self._retry_connection, name))

    def _retry_connection(self, name: str, connection: Pending[None]) -> None:
        """Retries a connection that was lost before both ends had greeted."""

        async def retry() -> None:
            await self._runtime.sleep_until(self._runtime.read_clock() + _RETRY_S)
            if self._direct_connections.get(name) is connection:
                self.reconnect_lost([name])

        if isinstance(connection.error, PeerLost) and connection.error.detail != PROCESS_ENDED:
            self._runtime.launch(retry())

    def can_peers_return(self) -> bool:
        """Returns True if the process of another member of the view may be alive."""
        errors = [
            link.error
            for name in self._get_view().members
            if (link := self._direct_connections.get(name)) is not None
        ]
        num_ended = sum(isinstance(error, PeerLost) and error.detail == PROCESS_ENDED for error in errors)
        return self._can_return and num_ended < len({*self._get_view().members} - {self._member.name})

    # --- members ----------------------------------------------------------------------------------------------------

    def start_repairs(self) -> bool:
        """Starts to reconnect or relay broken connections.

        Returns:
          True if votes must wait for a connection.
        """
        time_s = self._runtime.read_clock()
        cuts = self._find_cuts()
        is_stranded = self._member.is_stranded
        dial_s, repair_s = min(_DIAL_S, self._patience_s / 4), min(REPAIR_S, self._patience_s / 2)
        for _ in cuts.difference(self._cut_times):
            for seconds in (dial_s, repair_s):
                self.process_at(time_s + seconds)
        self._cut_times = {pair: self._cut_times.get(pair, time_s) for pair in sorted(cuts, key=sorted)}
        is_same_view = self._dialled_view is self._get_view()
        self._dialled_view = self._get_view()
        self._dials = {
            name: (relay, link)
            for name, (relay, link) in self._dials.items()
            if self._build_pair(name) in cuts or (is_same_view and relay is not None)
        }
        must_wait = False
        for pair, since in self._cut_times.items():
            relay = self._find_relay(pair)
            if self._member.name in pair:
                (name,) = pair - {self._member.name}
                if name in self.malformed_names:
                    continue
                via, link = self._dials.get(name, (None, None))
                has_failed = link is not None and via is None and link.error is not None
                is_silent = name in self.silent_names  # its patience is over
                can_dial = (
                    is_stranded and relay is None and self._can_return
                    if is_silent
                    else time_s < since + dial_s
                )
                can_dial &= relay is None or not self._is_flapping(name)
                if (link is None or (is_silent and via is not None)) and can_dial:
                    via, link = None, self._reconnect(name, None)
                is_dialling = (
                    link is not None and via is None and not link.is_done and time_s < since + dial_s
                )
                is_dialling &= not is_silent
                # The other end has not reported yet.
                is_connected = link is not None and link.is_done and link.error is None
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

    def process_at(self, t: float) -> None:
        """Schedules the member's processing of events at a time."""

        async def wait() -> None:
            await self._runtime.sleep_until(t)
            self._schedule_processing()

        self._runtime.launch(wait())

    def has_new_cuts(self) -> bool:
        """Returns True if there are broken connections that :meth:`start_repairs` has not seen."""
        return bool(self._find_cuts().difference(self._cut_times))

    def _find_cuts(self) -> set[frozenset[str]]:
        return set() if self._member.knowledge is None else self._member.knowledge.find_cuts()

    def _reconnect(self, name: str, relay: str | None) -> Pending[None]:
        self.closed_names.add(name)
        self._member.handle_loss(name)
        link = self._comm.reconnect(int(name), None if relay is None else int(relay))
        self._direct_connections.pop(name, None)
        if relay is None:
            self._direct_connections[name] = link
        self._dials[name] = relay, link
        link.add_done_callback(lambda _: self._schedule_processing())
        return link

    def _is_flapping(self, name: str) -> bool:
        """Returns True if the connection to a member breaks repeatedly."""
        since = self._runtime.read_clock() - _BREAK_WINDOW_S
        return sum(t > since for t in self._break_times.get(name, ())) > _MAX_BREAKS

    def _find_relay(self, pair: frozenset[str]) -> str | None:
        """Returns the most senior member that is connected to both members of a pair."""
        cut = {name for broken in self._cut_times if broken & pair for name in broken}
        return next((name for name in self._get_view().members if name not in pair and name not in cut), None)

    def _build_pair(self, name: str) -> frozenset[str]:
        return frozenset((self._member.name, name))


def build_payload(text: bytes) -> Payload:
    """Builds a message of bytes."""
    return Payload((build_byte_tensor(text),))


def read_payload(payload: Payload) -> bytes:
    """Returns the bytes of a message; raises ``ValueError`` if it is not one tensor of bytes."""
    (text,) = payload.iter_tensors()
    if text.dtype != torch.uint8:
        raise ValueError(f"a message of {text.dtype} in place of bytes")
    return bytes(text.numpy())


def build_byte_tensor(text: bytes) -> Tensor:
    """Builds a tensor of bytes."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)
