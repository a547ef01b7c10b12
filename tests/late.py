"""A view to whose first meeting one does not come."""

from __future__ import annotations

from typing import Any

from farflung.comm import TcpTransport, ViewSession, WallCommunicator
from tests.helpers import Group

__all__ = ["Late"]


class Late(Group):
    """A view of which the last has not come yet."""

    def __init__(self, size: int, **options: Any) -> None:
        self._late: dict[str, Any] = {"allow_late": True, **options}
        super().__init__(size, about={"needs_all_members": False}, **self._late)

    def take(self, transports: Any, settings: Any, **about: Any) -> None:
        super().take(transports, settings, **about, members=range(len(transports) - 1))

    def meet(self) -> Group:
        for view in self.views[:-1]:
            view.members.connect(self.peers[:-1])
        self.until(lambda: all(view.members.ready.is_done for view in self.views[:-1]))
        return self

    def newcomer(self, settings: dict[str, Any] | None = None) -> ViewSession:
        """In the place of the last, with an address of its own."""
        if self.views[-1] in self._open:
            self.close(self.views[-1])
        rank, size = len(self.views) - 1, len(self.views)
        self.transports[-1] = TcpTransport(rank, size, **self._late)
        self.views[-1] = ViewSession(
            self.transports[-1],
            size,
            read_clock=lambda: self.clock,
            needs_all_members=False,
            settings=settings,
        )
        self.comms[-1] = WallCommunicator(self.views[-1])
        self._open.append(self.views[-1])
        return self.views[-1]

    def admit(self) -> None:
        for view in self.views[:-1]:
            view.members.admit(self.peers[-1])
        self.views[-1].members.connect(self.peers)
