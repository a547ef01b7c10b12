"""What a lab's links do in fact: delay, speed and loss of every pair of nodes, against the profile."""

from __future__ import annotations

import math
import selectors
import socket
import statistics
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from farflung.lab._kernel import inside
from farflung.lab.queues import WIRE_OVER_PAYLOAD
from farflung.lab.tun import address_of
from farflung.network import Link, NetworkProfile, Path, Wiring
from farflung.network.link import capacity_at

__all__ = [
    "TOLERANCE",
    "Measured",
    "Pair",
    "Train",
    "as_measured",
    "expected",
    "measure_latencies",
    "measure_trains",
]

TOLERANCE = 0.1
"""How far a pair may be from its profile, as a share of it."""
LATENCY_GRAIN_S = 100e-6
"""Delays are not held more finely than this: the kernel's own scheduling is in it."""
PINGS = 7
PING_GAP_S = 0.004
PATIENCE_S = 5.0
"""How long anything may take beyond what it should."""
TRAIN_S = 0.25
"""How long a train of packets is, within these bounds."""
LOSSY_TRAIN_S = 1.0
"""And where some of them are to be lost, which takes more of them to tell."""
CHANCE = 4.0
"""Standard deviations by which the number of lost packets may differ by chance."""
QUIET_S = 0.05
"""After so long without a packet, what is missing may have been lost."""
LEAST_NBYTES, MOST_NBYTES = 75_000, 6_000_000
_PORT = 7
_PING = struct.Struct("!HHd")
_NUMBER = struct.Struct("!I")
_PING_WIRE_NBYTES = 28 + _PING.size
_WIRE, _DATAGRAM = 1500, 1472
_SAME_S = 2e-6
"""Datagrams that came as one packet have times no further apart."""
_SO_RCVBUFFORCE, _SO_SNDBUFFORCE, _SO_TIMESTAMPNS, _UDP_SEGMENT = 33, 32, 35, 103
_ROOM_NBYTES = 1 << 24

Pair = tuple[int, int]
"""The sending and the receiving host."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One ordered pair of nodes.

    Args:
      src: the node that sends.
      dst: the node that receives.
      latency_s: one way, the median of several small packets; infinity where none arrived.
      expected_latency_s: what the profile says, with the time that such a packet takes to pass.
      bandwidth_bps: bits per second of payload in a train of packets, as much of each as TCP would put in it; those
        that were lost count, since they took their time.
      expected_bandwidth_bps: what the profile says, at the beginning of its traces.
      loss: share of the train's packets that never arrived.
      expected_loss: what the profile says.
      packets: of the train; 0 where none was sent, because the link has no limit.
    """

    src: int
    dst: int
    latency_s: float
    expected_latency_s: float
    bandwidth_bps: float
    expected_bandwidth_bps: float
    loss: float = 0.0
    expected_loss: float = 0.0
    packets: int = 0

    @property
    def latency_off(self) -> float:
        """How far the delay is from the profile's, as a share; what is within the grain counts as none."""
        off = abs(self.latency_s - self.expected_latency_s)
        return 0.0 if off <= LATENCY_GRAIN_S else off / max(self.expected_latency_s, LATENCY_GRAIN_S)

    @property
    def bandwidth_off(self) -> float:
        """How far the speed is from the profile's, as a share."""
        if math.isinf(self.expected_bandwidth_bps):
            return 0.0
        return abs(self.bandwidth_bps / self.expected_bandwidth_bps - 1.0)

    @property
    def loss_off(self) -> float:
        """How far the loss is from the profile's, as a share of all packets; what chance explains counts as none."""
        if not self.packets:
            return 0.0
        share = max(self.expected_loss, 1 / self.packets)
        by_chance = CHANCE * math.sqrt(share * (1 - self.expected_loss) / self.packets)
        off = abs(self.loss - self.expected_loss)
        return 0.0 if off <= by_chance else off

    @property
    def off(self) -> float:
        """The largest of the three."""
        return max(self.latency_off, self.bandwidth_off, self.loss_off)

    @property
    def fits(self) -> bool:
        """Whether delay and speed are within :data:`TOLERANCE`, and the loss is what chance explains."""
        return max(self.latency_off, self.bandwidth_off) <= TOLERANCE and not self.loss_off

    @property
    def usable(self) -> bool:
        """Whether all but the delay fits, and packets arrive at all."""
        return self.bandwidth_off <= TOLERANCE and not self.loss_off and math.isfinite(self.latency_s)


def expected(profile: NetworkProfile) -> dict[Pair, tuple[float, float]]:
    """Delay of a small packet and bits per second of the links, of every ordered pair; loss takes nothing off them."""
    wiring, nodes = Wiring(profile, loses=False), range(profile.node_count)

    def of(path: Path) -> tuple[float, float]:
        speeds = [capacity_at(wiring.capacities[use.resource], 0.0) / use.times for use in path.uses]
        bits = 8 * _PING_WIRE_NBYTES / WIRE_OVER_PAYLOAD
        return path.latency_s + sum(bits / speed for speed in speeds), min(speeds, default=math.inf)

    return {(src, dst): of(wiring.path(src, dst)) for src in nodes for dst in nodes if src != dst}


def as_measured(profile: NetworkProfile, pairs: Sequence[Measured]) -> NetworkProfile:
    """A profile with the delays that its links have on this machine, to simulate what a lab has run on.

    Where a pair's delay does not fit, the link between its sites gets the median delay of their pairs; speeds stay.

    Args:
      profile: with its number of nodes.
      pairs: of all nodes, as a lab has measured them.
    """
    over: dict[tuple[int, int], list[Measured]] = {}
    for pair in pairs:
        over.setdefault((profile.site_index(pair.src), profile.site_index(pair.dst)), []).append(pair)
    late = {
        ends: statistics.median(pair.latency_s - pair.expected_latency_s for pair in found)
        for ends, found in over.items()
        if any(pair.latency_off > TOLERANCE for pair in found)
    }
    if not late:
        return profile

    def link(src: int, dst: int) -> Link:
        known = profile.connection(src, dst).link
        latency_s = max(0.0, known.latency_s + late.get((src, dst), 0.0))
        return replace(known, latency_s=latency_s, jitter_s=min(known.jitter_s, latency_s))

    sites, ends = profile.sites, range(len(profile.sites))
    return replace(
        profile,
        sites=tuple(
            site if site.nodes == 1 else replace(site, inside=link(place, place))
            for place, site in enumerate(sites)
        ),
        connections=tuple(
            replace(profile.connection(src, dst), link=link(src, dst))
            for src in ends
            for dst in ends
            if src != dst
        ),
        changes=(*profile.changes, "delays as measured"),
    )


def measure_latencies(namespaces: Sequence[int]) -> dict[Pair, float]:
    """The median one-way delay of every ordered pair, in seconds."""
    nodes = len(namespaces)
    took: dict[Pair, list[float]] = {(a, b): [] for a in range(nodes) for b in range(nodes) if a != b}
    missing = PINGS * len(took)

    def take(until: float) -> None:
        nonlocal missing
        for _, arrived_s, ping in _receive(ends, until) if missing else ():
            src, dst, sent_s = _PING.unpack(ping)
            took[src, dst].append(arrived_s - sent_s)
            missing -= 1
            if not missing:
                return

    with _listening(namespaces) as ends:
        for _ in range(PINGS):
            for away in range(1, nodes):
                for src, end in enumerate(ends):
                    dst = (src + away) % nodes
                    end.sendto(_PING.pack(src, dst, time.time()), (address_of(dst), _PORT))
                take(time.monotonic() + PING_GAP_S)
        take(time.monotonic() + PATIENCE_S)
    return {pair: statistics.median(times) if times else math.inf for pair, times in took.items()}


@contextmanager
def _listening(namespaces: Sequence[int]) -> Iterator[list[socket.socket]]:
    """Opens a socket for datagrams at every node."""
    with ExitStack() as stack:
        ends = []
        for node, namespace in enumerate(namespaces):
            with inside(namespace):
                end = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
                end.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
                end.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _ROOM_NBYTES)
                end.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, _ROOM_NBYTES)
                end.bind((address_of(node), _PORT))
                end.setblocking(False)
            ends.append(end)
        yield ends


def _receive(
    ends: Sequence[socket.socket], until: float, is_over: Callable[[], bool] = lambda: False
) -> Iterator[tuple[int, float, bytes]]:
    """Yields datagrams with the node they are for and when the kernel got them, not when they are read.

    Args:
      ends: sockets, by node.
      until: when it ends, on the machine's monotonic clock.
      is_over: asked once nothing has come for :data:`QUIET_S`; it ends if so.
    """
    with selectors.DefaultSelector() as selector:
        for node, end in enumerate(ends):
            selector.register(end, selectors.EVENT_READ, node)
        while (left := until - time.monotonic()) > 0:
            ready = selector.select(min(left, QUIET_S))
            for key, _ in ready:
                assert isinstance(key.fileobj, socket.socket)
                datagram, notes, _, _ = key.fileobj.recvmsg(_WIRE, 64)
                seconds, nanoseconds = struct.unpack("qq", notes[0][2])
                yield key.data, seconds + 1e-9 * nanoseconds, datagram
            if not ready and is_over():
                return


@dataclass(frozen=True, slots=True)
class Train:
    """What came of a train of packets.

    Args:
      bandwidth_bps: bits per second of payload.
      loss: share of its packets that never arrived.
      packets: how many it had.
    """

    bandwidth_bps: float
    loss: float = 0.0
    packets: int = 0


def measure_trains(
    namespaces: Sequence[int],
    profile: NetworkProfile,
    speeds: dict[Pair, float],
    largest_nbytes: int,
    lost: Callable[[], int],
) -> dict[Pair, Train]:
    """A train of packets for every pair that has a limit: at once for those that share nothing.

    Args:
      namespaces: of the nodes.
      profile: what pairs share.
      speeds: bits per second to expect.
      largest_nbytes: the most in one packet.
      lost: how many packets the delay line has lost so far.
    """
    found: dict[Pair, Train] = {}
    for group in _disjoint(profile, [pair for pair, speed in speeds.items() if math.isfinite(speed)]):
        wanted = {}
        for pair in group:
            nbytes = speeds[pair] * (LOSSY_TRAIN_S if profile.link(*pair).loss else TRAIN_S) / 8
            wanted[pair] = round(min(max(nbytes, LEAST_NBYTES), MOST_NBYTES) / _WIRE)
        patience_s = PATIENCE_S + max(8 * _WIRE * count / speeds[pair] for pair, count in wanted.items())
        found.update(_transfer(namespaces, wanted, largest_nbytes, patience_s, lost))
    return {pair: found.get(pair, Train(math.inf)) for pair in speeds}


def _disjoint(profile: NetworkProfile, pairs: Sequence[Pair]) -> Iterator[list[Pair]]:
    """Splits pairs into groups in which no two share a capacity or a node in the same part."""
    wiring, left = Wiring(profile), list(pairs)
    while left:
        group, taken, rest = [], set[tuple[str, int]](), list[Pair]()
        for src, dst in left:
            uses = {("capacity", use.resource) for use in wiring.path(src, dst).uses}
            uses |= {("src", src), ("dst", dst)}
            if taken & uses:
                rest.append((src, dst))
            else:
                taken |= uses
                group.append((src, dst))
        yield group
        left = rest


def _transfer(
    namespaces: Sequence[int],
    wanted: dict[Pair, int],
    largest_nbytes: int,
    patience_s: float,
    lost: Callable[[], int],
) -> dict[Pair, Train]:
    before, total = lost(), sum(wanted.values())
    seen: dict[int, list[tuple[float, int]]] = {dst: [] for _, dst in wanted}

    def missing() -> int:
        return total - sum(map(len, seen.values()))

    # The kernel cuts what is sent at once into datagrams, at the device where that can take it whole.
    at_once = max(1, largest_nbytes // _WIRE)
    with _listening(namespaces) as ends:
        for (src, dst), packets in wanted.items():
            ends[src].setsockopt(socket.IPPROTO_UDP, _UDP_SEGMENT, _DATAGRAM)
            for first in range(0, packets, at_once):
                numbers = range(first, min(first + at_once, packets))
                whole = b"".join(_NUMBER.pack(number) + bytes(_DATAGRAM - _NUMBER.size) for number in numbers)
                ends[src].sendto(whole, (address_of(dst), _PORT))
        until = time.monotonic() + patience_s
        for node, arrived_s, datagram in _receive(ends, until, lambda: missing() <= lost() - before):
            seen[node].append((arrived_s, *_NUMBER.unpack_from(datagram)))
            if not missing():
                break
    return {pair: _train(seen[pair[1]], packets) for pair, packets in wanted.items()}


def _train(seen: Sequence[tuple[float, int]], packets: int) -> Train:
    """Payload per second, as if it were TCP's, of all packets sent after those that came first, up to the last."""
    loss = 1 - len(seen) / packets
    if not seen or seen[-1][0] == seen[0][0]:
        return Train(0.0, loss, packets)
    begun = max(number for t, number in seen if t <= seen[0][0] + _SAME_S)
    bits = 8 * (seen[-1][1] - begun) * _WIRE / WIRE_OVER_PAYLOAD
    return Train(bits / (seen[-1][0] - seen[0][0]), loss, packets)
