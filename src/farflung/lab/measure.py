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

from farflung.errors import ConfigError
from farflung.lab._kernel import use_network_namespace
from farflung.lab.queues import WIRE_OVER_PAYLOAD
from farflung.lab.tun import build_address
from farflung.network import Link, NetworkPath, NetworkProfile, Wiring
from farflung.network.link import get_capacity

__all__ = [
    "TOLERANCE",
    "PacketTrain",
    "Pair",
    "PairMeasurement",
    "apply_measured_delays",
    "compute_expected",
    "measure_latencies",
    "measure_trains",
]

TOLERANCE = 0.1
"""Allowed relative deviation of a pair from its profile."""
LATENCY_GRAIN_S = 100e-6
"""Accuracy of delays, which the kernel's own scheduling limits."""
NUM_PINGS = 7
PING_GAP_S = 0.004
TIMEOUT_S = 5.0
"""Time limit of a measurement beyond its expected duration."""
TRAIN_S = 0.25
"""Duration of a train of packets, within the bounds below."""
LOSSY_TRAIN_S = 1.0
"""Duration of a train on a link with loss, which needs more packets."""
MAX_SIGMAS = 4.0
"""Allowed deviation of the number of lost packets, in standard deviations."""
IDLE_S = 0.05
"""Time without a packet after which missing ones may have been lost."""
MIN_TRAIN_NBYTES, MAX_TRAIN_NBYTES = 75_000, 6_000_000
_PORT = 7
_PING = struct.Struct("!HHd")
_NUMBER = struct.Struct("!I")
_PING_WIRE_NBYTES = 28 + _PING.size
_WIRE_NBYTES, _DATAGRAM_NBYTES = 1500, 1472
_SAME_PACKET_S = 2e-6
"""Maximum difference of arrival times of datagrams from one packet."""
_SO_RCVBUFFORCE, _SO_SNDBUFFORCE, _SO_TIMESTAMPNS, _UDP_SEGMENT = 33, 32, 35, 103
_BUFFER_NBYTES = 1 << 24

Pair = tuple[int, int]
"""Sending and receiving node."""


@dataclass(frozen=True, slots=True)
class PairMeasurement:
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
    def latency_error(self) -> float:
        """Absolute relative deviation of the latency from the profile's; 0 within :data:`LATENCY_GRAIN_S`."""
        error = abs(self.latency_s - self.expected_latency_s)
        return 0.0 if error <= LATENCY_GRAIN_S else error / max(self.expected_latency_s, LATENCY_GRAIN_S)

    @property
    def bandwidth_error(self) -> float:
        """Absolute relative deviation of the bandwidth from the profile's; 0 if the profile has no limit."""
        if math.isinf(self.expected_bandwidth_bps):
            return 0.0
        return abs(self.bandwidth_bps / self.expected_bandwidth_bps - 1.0)

    @property
    def loss_error(self) -> float:
        """Deviation of the loss from the profile's, as a fraction of all packets; 0 if chance explains it."""
        if not self.packets:
            return 0.0
        share = max(self.expected_loss, 1 / self.packets)
        chance_error = MAX_SIGMAS * math.sqrt(share * (1 - self.expected_loss) / self.packets)
        error = abs(self.loss - self.expected_loss)
        return 0.0 if error <= chance_error else error

    @property
    def max_error(self) -> float:
        """Largest of the three deviations."""
        return max(self.latency_error, self.bandwidth_error, self.loss_error)

    @property
    def is_accurate(self) -> bool:
        """Returns True if delay and speed are within :data:`TOLERANCE`, and chance explains the loss."""
        return max(self.latency_error, self.bandwidth_error) <= TOLERANCE and not self.loss_error

    @property
    def is_usable(self) -> bool:
        """Returns True if all but the delay is accurate, and packets arrive."""
        return self.bandwidth_error <= TOLERANCE and not self.loss_error and math.isfinite(self.latency_s)


def compute_expected(profile: NetworkProfile) -> dict[Pair, tuple[float, float]]:
    """Computes the delay of a small packet and the bits per second of every ordered pair, without loss.

    Raises:
      ConfigError: A link is down at the beginning of its trace.
    """
    wiring, nodes = Wiring(profile, apply_loss=False), range(profile.node_count)

    def compute(path: NetworkPath) -> tuple[float, float]:
        speeds = [get_capacity(wiring.capacities[use.resource], 0.0) / use.times for use in path.uses]
        if 0.0 in speeds:
            raise ConfigError(
                f"{profile.name}: a link is down at first, so that the lab cannot measure it: begin its trace "
                "with some bandwidth"
            )
        bits = 8 * _PING_WIRE_NBYTES / WIRE_OVER_PAYLOAD
        return path.latency_s + sum(bits / speed for speed in speeds), min(speeds, default=math.inf)

    return {(src, dst): compute(wiring.get_path(src, dst)) for src in nodes for dst in nodes if src != dst}


def apply_measured_delays(profile: NetworkProfile, pairs: Sequence[PairMeasurement]) -> NetworkProfile:
    """Returns a profile with the delays of this machine, to simulate the network that a lab ran on.

    If a pair's delay deviates, the link between its sites gets the median delay of their pairs. Speeds stay.

    Args:
      profile: Profile with its number of nodes.
      pairs: Measurements of all pairs in a lab.
    """
    groups: dict[tuple[int, int], list[PairMeasurement]] = {}
    for pair in pairs:
        groups.setdefault((profile.get_site_index(pair.src), profile.get_site_index(pair.dst)), []).append(
            pair
        )
    excess_s = {
        ends: statistics.median(pair.latency_s - pair.expected_latency_s for pair in group)
        for ends, group in groups.items()
        if any(pair.latency_error > TOLERANCE for pair in group)
    }
    if not excess_s:
        return profile

    def adjust_link(src: int, dst: int) -> Link:
        base = profile.get_site_link(src, dst).link
        latency_s = max(0.0, base.latency_s + excess_s.get((src, dst), 0.0))
        return replace(base, latency_s=latency_s, jitter_s=min(base.jitter_s, latency_s))

    sites, ends = profile.sites, range(len(profile.sites))
    return replace(
        profile,
        sites=tuple(
            site if site.nodes == 1 else replace(site, inside=adjust_link(index, index))
            for index, site in enumerate(sites)
        ),
        site_links=tuple(
            replace(profile.get_site_link(src, dst), link=adjust_link(src, dst))
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
    missing = NUM_PINGS * len(delays)

    def receive_pings(deadline: float) -> None:
        nonlocal missing
        for _, arrived_s, ping in _receive(sockets, deadline) if missing else ():
            src, dst, sent_s = _PING.unpack(ping)
            delays[src, dst].append(arrived_s - sent_s)
            missing -= 1
            if not missing:
                return

    with _create_sockets(namespaces) as sockets:
        for _ in range(NUM_PINGS):
            for offset in range(1, nodes):
                for src, sock in enumerate(sockets):
                    dst = (src + offset) % nodes
                    sock.sendto(_PING.pack(src, dst, time.time()), (build_address(dst), _PORT))
                receive_pings(time.monotonic() + PING_GAP_S)
        receive_pings(time.monotonic() + TIMEOUT_S)
    return {pair: statistics.median(times) if times else math.inf for pair, times in delays.items()}


@contextmanager
def _create_sockets(namespaces: Sequence[int]) -> Iterator[list[socket.socket]]:
    """Creates a datagram socket at every node."""
    with ExitStack() as stack:
        sockets = []
        for node, namespace in enumerate(namespaces):
            with use_network_namespace(namespace):
                sock = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
                sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
                sock.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER_NBYTES)
                sock.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, _BUFFER_NBYTES)
                sock.bind((build_address(node), _PORT))
                sock.setblocking(False)
            sockets.append(sock)
        yield sockets


def _receive(
    sockets: Sequence[socket.socket], deadline: float, is_over: Callable[[], bool] = lambda: False
) -> Iterator[tuple[int, float, bytes]]:
    """Yields datagrams with the node that received them and the time at which its kernel did.

    Args:
      sockets: Sockets by node.
      deadline: End of receiving, on the machine's monotonic clock.
      is_over: Function that is asked after :data:`IDLE_S` without a datagram, and ends receiving if true.
    """
    with selectors.DefaultSelector() as selector:
        for node, sock in enumerate(sockets):
            selector.register(sock, selectors.EVENT_READ, node)
        while (remaining_s := deadline - time.monotonic()) > 0:
            ready = selector.select(min(remaining_s, IDLE_S))
            for key, _ in ready:
                assert isinstance(key.fileobj, socket.socket)
                datagram, notes, _, _ = key.fileobj.recvmsg(_WIRE_NBYTES, 64)
                seconds, nanoseconds = struct.unpack("qq", notes[0][2])
                yield key.data, seconds + 1e-9 * nanoseconds, datagram
            if not ready and is_over():
                return


@dataclass(frozen=True, slots=True)
class PacketTrain:
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
    gso_max_nbytes: int,
    count_lost: Callable[[], int],
) -> dict[Pair, PacketTrain]:
    """Sends a train of packets for every pair with a limit, at the same time for pairs that share nothing.

    Args:
      namespaces: Network namespaces of the nodes.
      profile: Profile that tells which capacities pairs share.
      speeds: Expected bits per second.
      gso_max_nbytes: Maximum bytes of a packet.
      count_lost: Function that returns how many packets the delay line has lost so far.
    """
    trains: dict[Pair, PacketTrain] = {}
    for group in _split_disjoint(profile, [pair for pair, speed in speeds.items() if math.isfinite(speed)]):
        counts = {}
        for pair in group:
            nbytes = speeds[pair] * (LOSSY_TRAIN_S if profile.get_link(*pair).loss else TRAIN_S) / 8
            counts[pair] = round(min(max(nbytes, MIN_TRAIN_NBYTES), MAX_TRAIN_NBYTES) / _WIRE_NBYTES)
        timeout_s = TIMEOUT_S + max(8 * _WIRE_NBYTES * count / speeds[pair] for pair, count in counts.items())
        trains.update(_transfer(namespaces, counts, gso_max_nbytes, timeout_s, count_lost))
    return {pair: trains.get(pair, PacketTrain(math.inf)) for pair in speeds}


def _split_disjoint(profile: NetworkProfile, pairs: Sequence[Pair]) -> Iterator[list[Pair]]:
    """Splits pairs into groups in which no two share a capacity, a sender or a receiver."""
    wiring, remaining = Wiring(profile), list(pairs)
    while remaining:
        group, used, postponed = [], set[tuple[str, int]](), list[Pair]()
        for src, dst in remaining:
            uses = {("capacity", use.resource) for use in wiring.get_path(src, dst).uses}
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
    packet_counts: dict[Pair, int],
    gso_max_nbytes: int,
    timeout_s: float,
    count_lost: Callable[[], int],
) -> dict[Pair, PacketTrain]:
    base, total = count_lost(), sum(packet_counts.values())
    arrivals: dict[int, list[tuple[float, int]]] = {dst: [] for _, dst in packet_counts}

    def count_missing() -> int:
        return total - sum(map(len, arrivals.values()))

    # The kernel splits each call's data into datagrams, in the device if that supports it.
    batch_size = max(1, gso_max_nbytes // _WIRE_NBYTES)
    with _create_sockets(namespaces) as sockets:
        for (src, dst), packets in packet_counts.items():
            sockets[src].setsockopt(socket.IPPROTO_UDP, _UDP_SEGMENT, _DATAGRAM_NBYTES)
            for start in range(0, packets, batch_size):
                numbers = range(start, min(start + batch_size, packets))
                data = b"".join(
                    _NUMBER.pack(number) + bytes(_DATAGRAM_NBYTES - _NUMBER.size) for number in numbers
                )
                sockets[src].sendto(data, (build_address(dst), _PORT))
        end_s = time.monotonic() + timeout_s
        for node, arrived_s, datagram in _receive(
            sockets, end_s, lambda: count_missing() <= count_lost() - base
        ):
            arrivals[node].append((arrived_s, *_NUMBER.unpack_from(datagram)))
            if not count_missing():
                break
    return {pair: _evaluate_train(arrivals[pair[1]], packets) for pair, packets in packet_counts.items()}


def _evaluate_train(arrivals: Sequence[tuple[float, int]], packets: int) -> PacketTrain:
    """Computes payload per second, as if by TCP, of the packets after the first arrivals, up to the last."""
    loss = 1 - len(arrivals) / packets
    if not arrivals or arrivals[-1][0] == arrivals[0][0]:
        return PacketTrain(0.0, loss, packets)
    first = max(number for t, number in arrivals if t <= arrivals[0][0] + _SAME_PACKET_S)
    bits = 8 * (arrivals[-1][1] - first) * _WIRE_NBYTES / WIRE_OVER_PAYLOAD
    return PacketTrain(bits / (arrivals[-1][0] - arrivals[0][0]), loss, packets)
