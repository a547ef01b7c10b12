"""Virtual network: the ranks' mailboxes, and the links between them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, MutableSequence, Sequence

import numpy as np
from torch import Tensor
from typing_extensions import override

from farflung.comm import BaseCommunicator
from farflung.comm.channel import get_exchange_kind
from farflung.comm.collectives.segments import cut_segments, sum_in_order
from farflung.comm.mailbox import Mailbox
from farflung.errors import PeerLost, Unsupported
from farflung.network import Link, NetworkProfile, Wiring
from farflung.network.link import map_capacity
from farflung.sim.clock import VirtualClock
from farflung.sim.coding_processor import VirtualCodingProcessor
from farflung.sim.flows import Flows
from farflung.sim.membership import Membership
from farflung.sim.pauses import Pauses
from farflung.tasks import Pending, create_failed
from farflung.types import (
    AllReduce,
    Channel,
    CodingProcessor,
    Payload,
    SegmentCoding,
    SentBytes,
    Tag,
)

__all__ = ["LinkModel", "UntimedAllReduce", "VirtualCommunicator", "VirtualNetwork"]

LinkModel = Link
"""Alias of :class:`farflung.network.Link`."""


class VirtualNetwork:
    """Network on a virtual clock: tensors are passed by reference, and only their arrival is modelled.

    Messages of one rank to another and of one priority arrive in the order they were sent. All others are matched by
    tag, so only times depend on their order.

    Args:
      clock: Virtual clock.
      size: Number of ranks.
      network: Profile, or one link that each ordered pair has for itself.
      seed: Seed of the jitter.
      is_encrypted: Messages are encrypted.
      mailboxes: Mailboxes of the ranks; new ones when not given.

    Raises:
      ConfigError: The profile has another number of nodes.
    """

    def __init__(
        self,
        clock: VirtualClock,
        size: int,
        network: NetworkProfile | Link,
        *,
        seed: int = 0,
        is_encrypted: bool = False,
        mailboxes: MutableSequence[Mailbox] | None = None,
    ) -> None:
        profile = NetworkProfile.create_uniform(network) if isinstance(network, Link) else network
        self.profile = profile.with_nodes(size)
        self._clock = clock
        self.mailboxes = [self.create_mailbox() for _ in range(size)] if mailboxes is None else mailboxes
        self.pauses: Pauses | None = None
        """Links that are cut; ``None`` in a world without faults."""
        self.membership: Membership | None = None
        """Members of an elastic view; ``None``: all ranks are members."""
        self.last_arrival_s: dict[tuple[int, int], float] = {}
        """Time of the last arrival, by sender and receiver."""
        self.message_counts: Counter[int] = Counter()
        """Number of messages from and to each rank."""
        self.coding_processors: Sequence[VirtualCodingProcessor | None] = [None] * size
        """Coding processors of the ranks; see :meth:`set_coding_processors`."""
        self._is_charged = False
        self.untimed_all_reduce: UntimedAllReduce | None = None
        """Implementation of ``direct`` without messages, for a network without delays and losses."""
        self._wiring = Wiring(self.profile)
        self._flows = Flows(clock, self._wiring, seed, is_encrypted=is_encrypted)

    def set_coding_processors(self, processors: Sequence[VirtualCodingProcessor | None]) -> None:
        """Sets the coding processors that later exchanges are charged to."""
        self.coding_processors, self._is_charged = processors, any(processors)

    def create_mailbox(self) -> Mailbox:
        """Creates a mailbox on the virtual clock."""
        return Mailbox(self._clock.time, call_at=self._clock.call_at)

    def create_communicator(self, rank: int) -> VirtualCommunicator:
        """Creates a communicator of one rank, with counts of its own."""
        return VirtualCommunicator(self, rank, len(self.mailboxes))

    def send(self, src: int, dst: int, tag: Tag, payload: Payload, priority: int = 0) -> Pending[None]:
        """Sends a message; completes when its last byte has left.

        Fails with :class:`farflung.errors.PeerLost` if the sender knows no present member of rank ``dst``.
        """
        if self.membership is None:
            return self._send_message(src, dst, tag, payload, priority)
        if not self.membership.can_send(src, dst):
            return create_failed(PeerLost(dst, "its connection is gone"))
        departure = self._send_message(src, dst, tag, payload, priority)
        self.membership.track_message(src, departure)
        return departure

    def _send_message(self, src: int, dst: int, tag: Tag, payload: Payload, priority: int) -> Pending[None]:
        mailbox, view, members = self.mailboxes[dst], self.mailboxes[src].view, self.membership
        connection = None if members is None else members.get_connection(src, dst)

        self.message_counts[src] += 1

        def deliver(_: float) -> None:
            self.message_counts[dst] += 1
            self.last_arrival_s[src, dst] = self._clock.time()
            if members is None or members.get_connection(src, dst) is connection:
                mailbox.deliver(src, tag, payload, view)

        nbytes = payload.nbytes
        if not self._is_charged:
            return self._route(src, dst, nbytes, priority, deliver)
        departure: Pending[None] = Pending()
        path, clock, receiver = self._wiring.get_path(src, dst), self._clock, self.coding_processors[dst]

        def send_bytes(delay_s: float) -> None:
            """Sends the bytes; the last piece is ready after ``delay_s``."""
            first_byte_s = clock.time() + path.latency_s - path.jitter_s
            ready_s = first_byte_s + delay_s

            def handle_arrival(t: float) -> None:
                if t < ready_s:
                    clock.call_at(ready_s, lambda: handle_arrival(ready_s))
                elif receiver is None:
                    deliver(t)
                else:
                    receiver.receive(nbytes, t - first_byte_s, lambda: deliver(clock.time()))

            self._route(src, dst, nbytes, priority, handle_arrival).add_done_callback(
                lambda _: departure.set_result(None)
            )

        sender = self.coding_processors[src]
        if sender is None:
            send_bytes(0.0)
        else:
            sender.send(nbytes, send_bytes)
        return departure

    def _route(
        self, src: int, dst: int, nbytes: int, priority: int, on_arrival: Callable[[float], None]
    ) -> Pending[None]:
        """Routes bytes from one rank to another, through a relay if the pair has one."""
        relay = None if self.membership is None else self.membership.find_relay(src, dst)
        if relay is None:
            return self._send_bytes(src, dst, nbytes, priority, on_arrival)

        def forward(_: float) -> None:
            self._send_bytes(relay, dst, nbytes, priority, on_arrival)

        return self._send_bytes(src, relay, nbytes, priority, forward)

    def _send_bytes(
        self, src: int, dst: int, nbytes: int, priority: int, on_arrival: Callable[[float], None]
    ) -> Pending[None]:
        handle_arrival = on_arrival if self.pauses is None else self.pauses.wrap_arrival(src, dst, on_arrival)
        return self._flows.send(src, dst, nbytes, priority, handle_arrival)

    def send_notice(self, src: int, dst: int, on_arrival: Callable[[], None]) -> None:
        """Sends a message without a payload, after those of priority 0."""
        self._send_bytes(src, dst, 0, 0, lambda _: on_arrival())

    def report_closed(self, src: int, dst: int, on_arrival: Callable[[], None]) -> None:
        """Reports an event of ``src`` to ``dst`` without a message, one link delay later."""
        self._clock.call_at(self._clock.time() + self.profile.get_link(src, dst).latency_s, on_arrival)

    def limit(self, src: int, dst: int, *, bandwidth_bps: float = math.inf, loss: float = 0.0) -> None:
        """Limits the bandwidth from one rank to another from now on.

        Args:
          src: Sender.
          dst: Receiver.
          bandwidth_bps: Upper limit in bits per second.
          loss: Share of packets lost, added to the profile's; see :meth:`farflung.network.Link.compute_goodput_bps`.
        """
        goodput = self.profile.compute_goodput_bps(
            self.profile.get_site_index(src), self.profile.get_site_index(dst), loss
        )
        self._flows.limit(src, dst, map_capacity(goodput, lambda bps: min(bps, bandwidth_bps)))

    def get_sent_nbytes(self, src: int, dst: int) -> int:
        """Returns the bytes that have left one rank for another so far."""
        return self._flows.get_sent_nbytes(src, dst)

    def describe_wait(self, rank: int) -> str | None:
        """Describes the sender and the message that a rank waits for; ``None``: it does not wait."""
        wait = self.mailboxes[rank].waits.get_any()
        if wait is None:
            return None
        return f"{'any rank' if wait.src is None else f'rank {wait.src}'} ({wait.description})"


class VirtualCommunicator(BaseCommunicator):
    """Communicator of one rank in a :class:`VirtualNetwork`; see :class:`farflung.types.Communicator`."""

    def __init__(self, network: VirtualNetwork, rank: int, size: int) -> None:
        super().__init__(network.mailboxes[rank], rank, size, SentBytes(size))
        self._network = network

    @property
    def coding_processor(self) -> CodingProcessor | None:
        return self._network.coding_processors[self.rank]

    def send(self, payload: Payload, dst: int, tag: Tag, priority: int = 0) -> Pending[None]:
        """Sends by reference; the smallest ``priority`` is served first."""
        self.sent_bytes.add(get_exchange_kind(tag.exchange), payload.nbytes, dst)
        return self._network.send(self.rank, dst, tag, payload, priority)

    def reconnect(self, rank: int, relay: int | None = None) -> Pending[None]:
        assert self._network.membership is not None
        return self._network.membership.reconnect(self.rank, rank, relay)

    def get_traffic_nbytes(self, rank: int | None = None) -> int:
        ranks = range(self.size) if rank is None else (rank,)
        sent = self._network.get_sent_nbytes
        return sum(sent(self.rank, peer) + sent(peer, self.rank) for peer in ranks if peer != self.rank)

    def relay(self, rank_a: int, rank_b: int) -> None:
        assert self._network.membership is not None
        self._network.membership.offer_relay(self.rank, rank_a, rank_b)

    @override
    def get_collective(self, name: str) -> AllReduce:
        sums = self._network.untimed_all_reduce
        return sums.sum_direct if sums is not None and name == "direct" else super().get_collective(name)

    def all_reduce(self, tensor: Tensor, tag: Tag) -> Pending[Tensor]:
        """Returns a failed completion, since virtual time has no backend."""
        del tensor, tag
        return create_failed(
            Unsupported("collective 'native' runs on real processes only: use ring or direct in virtual time")
        )


class UntimedAllReduce:
    """All-reduce over all ranks without message times: each ends when its last rank joins.

    Bits and bytes equal those of :func:`farflung.comm.collectives.direct`, without its 2 n (n - 1) messages.
    """

    def __init__(self) -> None:
        self._inputs: dict[Tag, dict[int, tuple[Tensor, Tensor]]] = {}
        self._totals: dict[Tag, Pending[tuple[Tensor, Tensor]]] = {}

    async def sum_direct(
        self, channel: Channel, tensor: Tensor, metadata: Tensor, *, coding: SegmentCoding | None = None
    ) -> tuple[Tensor, Tensor]:
        """Sums like :func:`farflung.comm.collectives.direct`."""
        assert coding is None
        rank, size = channel.rank, channel.size
        if size == 1:
            return tensor, metadata
        shards = (
            np.array([shard.length for shard in cut_segments(tensor.numel(), size)]) * tensor.element_size()
        )
        sent = shards + shards[rank] + metadata.nbytes
        sent[rank] = 0
        channel.count_sent(sent)
        tag = channel.get_tag(channel.reserve_hops(1))
        inputs = self._inputs.setdefault(tag, {})
        inputs[rank] = tensor, metadata
        total: Pending[tuple[Tensor, Tensor]] = self._totals.setdefault(tag, Pending())
        if len(inputs) == size:
            del self._inputs[tag], self._totals[tag]
            tensors, sides = zip(*(inputs[peer] for peer in range(size)), strict=True)
            total.set_result((sum_in_order(tensors), sum_in_order(sides)))
        sums = await total
        return tensor.copy_(sums[0]), sums[1].clone()
