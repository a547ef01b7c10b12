"""Measurements of a lab's links: delay, speed and loss of every pair of nodes, against the profile."""

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
"""Allowed relative deviation of a pair from its profile."""
LATENCY_GRAIN_S = 100e-6
"""Accuracy of delays, which the kernel's own scheduling limits."""
PINGS = 7
PING_GAP_S = 0.004
PATIENCE_S = 5.0
"""Time limit of a measurement beyond its expected duration."""
TRAIN_S = 0.25
"""Duration of a train of packets, within the bounds below."""
LOSSY_TRAIN_S = 1.0
"""Duration of a train on a link with loss, which needs more packets."""
CHANCE = 4.0
"""Allowed deviation of the number of lost packets, in standard deviations."""
QUIET_S = 0.05
"""Time without a packet after which missing ones may have been lost."""
LEAST_NBYTES, MOST_NBYTES = 75_000, 6_000_000
_PORT = 7
_PING = struct.Struct("!HHd")
_NUMBER = struct.Struct("!I")
_PING_WIRE_NBYTES = 28 + _PING.size
_WIRE, _DATAGRAM = 1500, 1472
_SAME_S = 2e-6
"""Maximum difference of arrival times of datagrams from one packet."""
_SO_RCVBUFFORCE, _SO_SNDBUFFORCE, _SO_TIMESTAMPNS, _UDP_SEGMENT = 33, 32, 35, 103
_ROOM_NBYTES = 1 << 24

Pair = tuple[int, int]
"""Sending and receiving node."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurement of one ordered pair of nodes.

    Args:
      src: Sending node.
      dst: Receiving node.
      latency_s: One-way latency, the median of several small packets; infinity if none arrived.
      expected_latency_s: Latency of the profile, with the time that such a packet takes to pass.
      bandwidth_bps: Bits per second of payload in a train of packets, each as full as TCP's; lost packets
        count, since they took their time.
      expected_bandwidth_bps: Bandwidth of the profile, at the beginning of its traces.
      loss: Fraction of the train's packets that never arrived.
      expected_loss: Loss of the profile.
      packets: Number of packets of the train; 0 if none was sent, because the link has no limit.
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
        """Relative deviation of the latency from the profile's; 0 within the grain."""
        error = abs(self.latency_s - self.expected_latency_s)
        return 0.0 if error <= LATENCY_GRAIN_S else error / max(self.expected_latency_s, LATENCY_GRAIN_S)

    @property
    def bandwidth_off(self) -> float:
        """Relative deviation of the bandwidth from the profile's."""
        if math.isinf(self.expected_bandwidth_bps):
            return 0.0
        return abs(self.bandwidth_bps / self.expected_bandwidth_bps - 1.0)

    @property
    def loss_off(self) -> float:
        """Deviation of the loss from the profile's, as a fraction of all packets; 0 if chance explains it."""
        if not self.packets:
            return 0.0
        share = max(self.expected_loss, 1 / self.packets)
        chance_error = CHANCE * math.sqrt(share * (1 - self.expected_loss) / self.packets)
        error = abs(self.loss - self.expected_loss)
        return 0.0 if error <= chance_error else error

    @property
    def off(self) -> float:
        """Largest of the three deviations."""
        return max(self.latency_off, self.bandwidth_off, self.loss_off)

    @property
    def fits(self) -> bool:
        """Returns True if delay and speed are within :data:`TOLERANCE`, and chance explains the loss."""
        return max(self.latency_off, self.bandwidth_off) <= TOLERANCE and not self.loss_off

    @property
    def usable(self) -> bool:
        """Returns True if all but the delay is accurate, and packets arrive."""
        return self.bandwidth_off <= TOLERANCE and not self.loss_off and math.isfinite(self.latency_s)


def expected(profile: NetworkProfile) -> dict[Pair, tuple[float, float]]:
    """Computes the delay of a small packet and the bits per second of every ordered pair, without loss."""
    wiring, nodes = Wiring(profile, loses=False), range(profile.node_count)

    def compute(path: Path) -> tuple[float, float]:
        speeds = [capacity_at(wiring.capacities[use.resource], 0.0) / use.times for use in path.uses]
        bits = 8 * _PING_WIRE_NBYTES / WIRE_OVER_PAYLOAD
        return path.latency_s + sum(bits / speed for speed in speeds), min(speeds, default=math.inf)

    return {(src, dst): compute(wiring.path(src, dst)) for src in nodes for dst in nodes if src != dst}


def as_measured(profile: NetworkProfile, pairs: Sequence[Measured]) -> NetworkProfile:
    """Returns a profile with the delays of this machine, to simulate the network that a lab ran on.

    If a pair's delay deviates, the link between its sites gets the median delay of their pairs. Speeds stay.

    Args:
      profile: Profile with its number of nodes.
      pairs: Measurements of all pairs in a lab.
    """
    groups: dict[tuple[int, int], list[Measured]] = {}
    for pair in pairs:
        groups.setdefault((profile.site_index(pair.src), profile.site_index(pair.dst)), []).append(pair)
    excess_s = {
        ends: statistics.median(pair.latency_s - pair.expected_latency_s for pair in group)
        for ends, group in groups.items()
        if any(pair.latency_off > TOLERANCE for pair in group)
    }
    if not excess_s:
        return profile

    def adjust_link(src: int, dst: int) -> Link:
        base = profile.connection(src, dst).link
        latency_s = max(0.0, base.latency_s + excess_s.get((src, dst), 0.0))
        return replace(base, latency_s=latency_s, jitter_s=min(base.jitter_s, latency_s))

    sites, ends = profile.sites, range(len(profile.sites))
    return replace(
        profile,
        sites=tuple(
            site if site.nodes == 1 else replace(site, inside=adjust_link(index, index))
            for index, site in enumerate(sites)
        ),
        connections=tuple(
            replace(profile.connection(src, dst), link=adjust_link(src, dst))
            for src in ends
            for dst in ends
            if src != dst
        ),
        changes=(*profile.changes, "delays as measured"),
    )


def measure_latencies(namespaces: Sequence[int]) -> dict[Pair, float]:
    """Returns the median one-way delay of every ordered pair, in seconds."""
    nodes = len(namespaces)
    delays: dict[Pair, list[float]] = {(a, b): [] for a in range(nodes) for b in range(nodes) if a != b}
    missing = PINGS * len(delays)

    def receive_pings(deadline: float) -> None:
        nonlocal missing
        for _, arrived_s, ping in _receive(sockets, deadline) if missing else ():
            src, dst, sent_s = _PING.unpack(ping)
            delays[src, dst].append(arrived_s - sent_s)
            missing -= 1
            if not missing:
                return

    with _listening(namespaces) as sockets:
        for _ in range(PINGS):
            for offset in range(1, nodes):
                for src, sock in enumerate(sockets):
                    dst = (src + offset) % nodes
                    sock.sendto(_PING.pack(src, dst, time.time()), (address_of(dst), _PORT))
                receive_pings(time.monotonic() + PING_GAP_S)
        receive_pings(time.monotonic() + PATIENCE_S)
    return {pair: statistics.median(times) if times else math.inf for pair, times in delays.items()}


@contextmanager
def _listening(namespaces: Sequence[int]) -> Iterator[list[socket.socket]]:
    """Creates a datagram socket at every node."""
    with ExitStack() as stack:
        sockets = []
        for node, namespace in enumerate(namespaces):
            with inside(namespace):
                sock = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
                sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
                sock.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _ROOM_NBYTES)
                sock.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, _ROOM_NBYTES)
                sock.bind((address_of(node), _PORT))
                sock.setblocking(False)
            sockets.append(sock)
        yield sockets


def _receive(
    ends: Sequence[socket.socket], until: float, is_over: Callable[[], bool] = lambda: False
) -> Iterator[tuple[int, float, bytes]]:
    """Yields datagrams with the node that received them and the time at which its kernel did.

    Args:
      sockets: Sockets by node.
      deadline: End of receiving, on the machine's monotonic clock.
      is_over: Function that is asked after :data:`IDLE_S` without a datagram, and ends receiving if true.
    """
    with selectors.DefaultSelector() as selector:
        for node, sock in enumerate(ends):
            selector.register(sock, selectors.EVENT_READ, node)
        while (remaining_s := until - time.monotonic()) > 0:
            ready = selector.select(min(remaining_s, QUIET_S))
            for key, _ in ready:
                assert isinstance(key.fileobj, socket.socket)
                datagram, notes, _, _ = key.fileobj.recvmsg(_WIRE, 64)
                seconds, nanoseconds = struct.unpack("qq", notes[0][2])
                yield key.data, seconds + 1e-9 * nanoseconds, datagram
            if not ready and is_over():
                return


@dataclass(frozen=True, slots=True)
class Train:
    """Measurement of a train of packets.

    Args:
      bandwidth_bps: Bits per second of payload.
      loss: Fraction of packets that never arrived.
      packets: Number of packets.
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
    """Sends a train of packets for every pair with a limit, at the same time for pairs that share nothing.

    Args:
      namespaces: Network namespaces of the nodes.
      profile: Profile that tells which capacities pairs share.
      speeds: Expected bits per second.
      max_packet_nbytes: Maximum bytes of a packet.
      count_lost: Function that returns how many packets the delay line has lost so far.
    """
    trains: dict[Pair, Train] = {}
    for group in _disjoint(profile, [pair for pair, speed in speeds.items() if math.isfinite(speed)]):
        counts = {}
        for pair in group:
            nbytes = speeds[pair] * (LOSSY_TRAIN_S if profile.link(*pair).loss else TRAIN_S) / 8
            counts[pair] = round(min(max(nbytes, LEAST_NBYTES), MOST_NBYTES) / _WIRE)
        timeout_s = PATIENCE_S + max(8 * _WIRE * count / speeds[pair] for pair, count in counts.items())
        trains.update(_transfer(namespaces, counts, largest_nbytes, timeout_s, lost))
    return {pair: trains.get(pair, Train(math.inf)) for pair in speeds}


def _disjoint(profile: NetworkProfile, pairs: Sequence[Pair]) -> Iterator[list[Pair]]:
    """Splits pairs into groups in which no two share a capacity, a sender or a receiver."""
    wiring, remaining = Wiring(profile), list(pairs)
    while remaining:
        group, used, postponed = [], set[tuple[str, int]](), list[Pair]()
        for src, dst in remaining:
            uses = {("capacity", use.resource) for use in wiring.path(src, dst).uses}
            uses |= {("src", src), ("dst", dst)}
            if used & uses:
                postponed.append((src, dst))
            else:
                used |= uses
                group.append((src, dst))
        yield group
        remaining = postponed


def _transfer(
    namespaces: Sequence[int],
    wanted: dict[Pair, int],
    largest_nbytes: int,
    patience_s: float,
    lost: Callable[[], int],
) -> dict[Pair, Train]:
    base, total = lost(), sum(wanted.values())
    arrivals: dict[int, list[tuple[float, int]]] = {dst: [] for _, dst in wanted}

    def count_missing() -> int:
        return total - sum(map(len, arrivals.values()))

    # The kernel splits each call's data into datagrams, in the device if that supports it.
    batch_size = max(1, largest_nbytes // _WIRE)
    with _listening(namespaces) as sockets:
        for (src, dst), packets in wanted.items():
            sockets[src].setsockopt(socket.IPPROTO_UDP, _UDP_SEGMENT, _DATAGRAM)
            for start in range(0, packets, batch_size):
                numbers = range(start, min(start + batch_size, packets))
                data = b"".join(_NUMBER.pack(number) + bytes(_DATAGRAM - _NUMBER.size) for number in numbers)
                sockets[src].sendto(data, (address_of(dst), _PORT))
        end_s = time.monotonic() + patience_s
        for node, arrived_s, datagram in _receive(sockets, end_s, lambda: count_missing() <= lost() - base):
            arrivals[node].append((arrived_s, *_NUMBER.unpack_from(datagram)))
            if not count_missing():
                break
    return {pair: _train(arrivals[pair[1]], packets) for pair, packets in wanted.items()}


def _train(seen: Sequence[tuple[float, int]], packets: int) -> Train:
    """Computes payload per second, as if by TCP, of the packets after the first arrivals, up to the last."""
    loss = 1 - len(seen) / packets
    if not seen or seen[-1][0] == seen[0][0]:
        return Train(0.0, loss, packets)
    first = max(number for t, number in seen if t <= seen[0][0] + _SAME_S)
    bits = 8 * (seen[-1][1] - first) * _WIRE / WIRE_OVER_PAYLOAD
    return Train(bits / (seen[-1][0] - seen[0][0]), loss, packets)
