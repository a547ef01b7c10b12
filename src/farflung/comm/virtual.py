"""Messages on a modelled clock: tensors change hands by reference, only their arrival is computed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from farflung.comm.mailbox import Mailbox
from farflung.errors import ConfigError, Unsupported
from farflung.tasks import Pending, failed
from farflung.types import Feature, Payload, Tag, TensorSpec

__all__ = ["Clock", "LinkModel", "VirtualCommunicator", "VirtualNetwork"]


class Clock(Protocol):
    """What the network needs of virtual time."""

    def now(self) -> float:
        """Virtual seconds."""
        ...

    def at(self, t: float, fn: Callable[[], None]) -> None:
        """Runs ``fn`` at time ``t``."""
        ...


@dataclass(frozen=True, slots=True)
class LinkModel:
    """One alpha-beta link: a message of ``n`` bytes takes ``latency_s + 8 n / bandwidth_bps`` seconds.

    Args:
      latency_s: one-way delay, in seconds.
      bandwidth_bps: bits per second; messages in one direction follow each other.
    """

    latency_s: float = 0.0
    bandwidth_bps: float = math.inf

    def __post_init__(self) -> None:
        if not (self.latency_s >= 0 and math.isfinite(self.latency_s)):
            raise ConfigError(f"link latency {self.latency_s} s: must be a number of seconds, 0 or more")
        if not self.bandwidth_bps > 0:
            raise ConfigError(f"link bandwidth {self.bandwidth_bps} bit/s: must be above 0")


class VirtualNetwork:
    """``size`` ranks, each pair joined by its own link in each direction."""

    def __init__(self, clock: Clock, size: int, link: LinkModel) -> None:
        self._clock = clock
        self._link = link
        self._free_at: dict[tuple[int, int], float] = {}
        self.mailboxes = [Mailbox() for _ in range(size)]

    def communicator(self, rank: int) -> VirtualCommunicator:
        """The communicator of one rank."""
        return VirtualCommunicator(self, rank, len(self.mailboxes))

    def carry(self, src: int, dst: int, tag: Tag, payload: Payload) -> Pending[None]:
        """Starts a message; done when its last byte has left."""
        begins = max(self._clock.now(), self._free_at.get((src, dst), 0.0))
        leaves = begins + 8 * payload.nbytes / self._link.bandwidth_bps
        self._free_at[src, dst] = leaves
        sent: Pending[None] = Pending()
        self._clock.at(leaves, lambda: sent.set(None))
        arrives = leaves + self._link.latency_s
        self._clock.at(arrives, lambda: self.mailboxes[dst].deliver(src, tag, payload, arrives))
        return sent

    def recv(
        self, rank: int, src: int | None, tag: Tag, expect: tuple[TensorSpec, ...] | None
    ) -> Pending[Payload]:
        """Waits at ``rank``."""
        return self.mailboxes[rank].recv(src, tag, expect, self._clock.now())


class VirtualCommunicator:
    """One rank's end of a :class:`VirtualNetwork`; see :class:`farflung.types.Communicator`."""

    features: frozenset[Feature] = frozenset({"tags", "any_source"})

    def __init__(self, network: VirtualNetwork, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._network = network

    def send(self, payload: Payload, dst: int, tag: Tag) -> Pending[None]:
        """Sends by reference."""
        return self._network.carry(self.rank, dst, tag, payload)

    def recv(
        self, src: int | None, tag: Tag, expect: tuple[TensorSpec, ...] | None = None
    ) -> Pending[Payload]:
        """Receives."""
        return self._network.recv(self.rank, src, tag, expect)

    def all_reduce(self, tensor: Tensor, tag: Tag) -> Pending[Tensor]:
        """There is no backend in virtual time."""
        del tensor, tag
        return failed(
            Unsupported("collective 'native' runs on real processes only: use ring or direct in virtual time")
        )
