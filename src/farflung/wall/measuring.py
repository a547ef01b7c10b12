"""Measurements of the network between replicas, by messages over the run's own connections."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from farflung.comm import Endpoint, Purpose
from farflung.engine.averaging import barrier
from farflung.network import Link, Medium, NetworkProfile, Site, SiteLink
from farflung.tasks import Pending
from farflung.types import Communicator, Payload, Runtime, Tag
from farflung.wall.launch_env import LaunchEnv
from farflung.wall.runtime import WallRuntime

__all__ = ["LinkMeasurement", "NetworkMeasurement", "connect_ranks", "measure_network", "probe_network"]

CONNECT_TIMEOUT_S = 60.0
"""Time in which the ranks of a launcher must appear for a measurement."""

FIRST_NBYTES, GROWTH = 1 << 12, 4
"""Size of the first message that is timed for bandwidth, and growth factor of later ones."""
MAX_NBYTES = 1 << 22
"""Maximum bytes that one replica sends in its longest messages to all peers together, before a run."""
MIN_EXTRA_S = 0.02
"""Time of a message beyond that of a byte which tells a bandwidth."""
STREAM_S, STREAM_ROUND_TRIPS, STREAM_MESSAGES = 1.0, 16, 12
"""Least duration of a stream, in seconds and in round trips, and least number of its messages.

TCP's slow start from 10 to 2,560 segments takes eight round trips; they are in the first half, which does not count.
"""
STREAM_WINDOW, STREAM_QUEUE_S = 16, 0.2
"""Messages of a stream that are under way at first, and seconds that one may take beyond two round trips.

As in TCP's slow start, each echo lets two more leave while they take less time, else one. So the kernel buffers no
more than a slow link sends in a moment.
"""
STREAM_PARTS = 3
"""Parts of the second half, each of which tells a bandwidth."""
SHARED_BELOW = 0.8
"""Share of the sum of single rates below which flows that run at once are limited by something shared."""
_PROBE, _ECHO, _RESULT = range(3)
_BYTE = torch.zeros(1, dtype=torch.uint8)
_Flow = tuple[int, int]
"""Sending and receiving rank."""


@dataclass(frozen=True, slots=True)
class _Effort:
    """Number and size of a measurement's messages; the figures are our choice.

    Args:
      pings: Round trips of one byte; the shortest counts.
      max_nbytes: Maximum bytes of the growing messages of one replica to all peers, and of its streams.
      has_stream: True to measure the second half of a stream of messages; False to compare the longest growing message
        with a byte instead, which counts a connection's slow start.
    """

    pings: int
    max_nbytes: int = MAX_NBYTES
    has_stream: bool = False


_BEFORE_RUN = _Effort(pings=4)
_ALONE = _Effort(pings=6, max_nbytes=1 << 26, has_stream=True)
_AT_ONCE = _Effort(pings=1, max_nbytes=1 << 26, has_stream=True)


@dataclass(frozen=True, slots=True)
class LinkMeasurement:
    """Measurement of the link from one replica to another.

    Args:
      latency_s: Half the shortest round trip of one byte.
      median_latency_s: Half the median round trip.
      bandwidth_bps: Median of the measured bandwidths, in bits per second.
      low_bps: Smallest of them.
      high_bps: Largest of them.
    """

    latency_s: float
    median_latency_s: float
    bandwidth_bps: float
    low_bps: float
    high_bps: float


@dataclass(frozen=True, slots=True)
class NetworkMeasurement:
    """Measurement of all links, alone and at once.

    Args:
      links: Links by sending and receiving rank, each measured while no other flow had one of its ends.
      up_bps: Sum of the bandwidths of each rank's links while it alone sends on all of them.
      down_bps: Sum of the bandwidths of the links to each rank while it alone receives on all of them.
      total_bps: Sum of all bandwidths while all ranks send to all others.
    """

    links: dict[_Flow, LinkMeasurement]
    up_bps: tuple[float, ...]
    down_bps: tuple[float, ...]
    total_bps: float

    def build_profile(self, name: str, names: list[str]) -> NetworkProfile:
        """Builds a profile with a site for each rank.

        A rank's links share a capacity if they are slower at once than alone, by more than :data:`SHARED_BELOW`. If all
        links at once are slower than these capacities allow, all sites share a medium.
        """
        ranks = range(len(names))
        up_bps, down_bps = (
            [
                measured if measured < SHARED_BELOW * alone else math.inf
                for measured, alone in zip(all_measured, all_alone, strict=True)
            ]
            for all_measured, all_alone in (
                (self.up_bps, [self._sum_alone(src=rank) for rank in ranks]),
                (self.down_bps, [self._sum_alone(dst=rank) for rank in ranks]),
            )
        )
        possible_bps = min(
            sum(min(up_bps[rank], self._sum_alone(src=rank)) for rank in ranks),
            sum(min(down_bps[rank], self._sum_alone(dst=rank)) for rank in ranks),
        )
        has_medium = self.total_bps < SHARED_BELOW * possible_bps
        medium = "shared by all" if has_medium else None
        return NetworkProfile(
            name,
            tuple(
                Site(site, 1, up_bps=up_bps[rank], down_bps=down_bps[rank], medium=medium)
                for rank, site in enumerate(names)
            ),
            tuple(
                SiteLink(names[src], names[dst], Link(link.latency_s, link.bandwidth_bps))
                for (src, dst), link in self.links.items()
            ),
            media=(Medium("shared by all", self.total_bps),) if has_medium else (),
        )

    def _sum_alone(self, *, src: int | None = None, dst: int | None = None) -> float:
        return sum(
            link.bandwidth_bps for ends, link in self.links.items() if ends[0] == src or ends[1] == dst
        )


@contextmanager
def connect_ranks(
    env: LaunchEnv, meeting: str, *, endpoint: Endpoint, deadline_s: float
) -> Iterator[WallRuntime]:
    """Connects the ranks of a launcher for a measurement; an error in the context ends the others too.

    Args:
      env: Rank and size of this process.
      meeting: Name of the meeting in the launcher's store.
      endpoint: Settings of this process's connections.
      deadline_s: Seconds of silence after which another rank is lost.
    """
    runtime = WallRuntime(
        env.rank,
        env.size,
        env.connect_store(CONNECT_TIMEOUT_S),
        meeting=meeting,
        endpoint=endpoint.resolve_interface(env.find_address),
        deadline_s=deadline_s,
        connect_timeout_s=CONNECT_TIMEOUT_S,
    )
    try:
        yield runtime
    except BaseException as error:
        runtime.close(error)
        raise
    runtime.close()


async def measure_network(runtime: Runtime) -> NetworkProfile | None:
    """Measures latency and bandwidth from every replica to every other, all at the same time.

    All replicas measure at once, so the bandwidth of each pair includes shared links, as in exchanges of gradients. A
    latency is half the shortest of some round trips. A bandwidth follows from the additional time of a message over
    that of one byte, with messages that grow until it is well above the noise, or until they are long. The measurement
    takes some round trips, and fractions of a second on slow links.

    Args:
      runtime: Runtime of one replica; all replicas call this.

    Returns:
      On rank 0, a site for each replica; ``None`` on the others.
    """
    ranks = range(runtime.comm.size)
    row = await _measure_flows(
        runtime, 0, [(src, dst) for src in ranks for dst in ranks if src != dst], _BEFORE_RUN
    )
    rows = await runtime.launch(_gather(runtime.comm, row))
    if rows is None:
        return None
    names = [f"rank {rank}" for rank in ranks]
    links = {
        (src, dst): Link(rows[src, dst, 0].item(), rows[src, dst, 2].item()) for src, dst in _list_flows(rows)
    }
    return NetworkProfile(
        "measured",
        tuple(Site(name, 1) for name in names),
        tuple(SiteLink(names[src], names[dst], link) for (src, dst), link in links.items()),
    )


async def probe_network(runtime: Runtime) -> NetworkMeasurement | None:
    """Measures each link alone, then the links of each replica at once, then all of them at once.

    A bandwidth is that of the second half of a stream of messages, so a connection's slow start does not count. Two
    pairs without a common replica are measured at the same time, in as many rounds as there are
    other replicas.

    Args:
      runtime: Runtime of one replica; all replicas call this.

    Returns:
      The measurement on rank 0; ``None`` on the others.
    """
    comm, ranks = runtime.comm, range(runtime.comm.size)
    everything = [(src, dst) for src in ranks for dst in ranks if src != dst]
    alone = [flows for pairs in _pair_up(comm.size) for flows in (pairs, [(b, a) for a, b in pairs])]
    ups = [[flow for flow in everything if flow[0] == rank] for rank in ranks]
    downs = [[flow for flow in everything if flow[1] == rank] for rank in ranks]
    phases = [*alone, *ups, *downs, everything] if comm.size > 2 else alone
    rows = []
    for number, flows in enumerate(phases):
        await barrier(runtime, number, Purpose.MEASURE)
        effort = _ALONE if number < len(alone) else _AT_ONCE
        rows.append(await _measure_flows(runtime, number + 1, flows, effort))
    measured = await runtime.launch(_gather(comm, torch.stack(rows, dim=1)))  # by source, destination, phase
    if measured is None:
        return None
    links = {
        flow: LinkMeasurement(*measured[flow][phase].tolist())
        for phase, flows in enumerate(alone)
        for flow in flows
    }

    def sum_bps(phase: int) -> float:
        """Sums the lowest bandwidths of a phase, since a higher one was measured while other flows were pausing."""
        return float(sum(measured[flow][phase][3] for flow in phases[phase]))

    first = len(alone)
    if comm.size == 2:
        up = (links[0, 1].bandwidth_bps, links[1, 0].bandwidth_bps)
        return NetworkMeasurement(dict(sorted(links.items())), up, up[::-1], sum(up))
    return NetworkMeasurement(
        dict(sorted(links.items())),
        tuple(sum_bps(first + rank) for rank in ranks),
        tuple(sum_bps(first + comm.size + rank) for rank in ranks),
        sum_bps(len(phases) - 1),
    )


def _pair_up(size: int) -> Iterator[list[_Flow]]:
    """Yields rounds of disjoint pairs in which each pair occurs once, by the circle method."""
    others = list(range(1, size + size % 2))
    for _ in others:
        circle = [0, *others]
        pairs = [(circle[i], circle[-1 - i]) for i in range(len(circle) // 2)]
        yield [pair for pair in pairs if max(pair) < size]
        others = others[-1:] + others[:-1]


def _list_flows(rows: Tensor) -> list[_Flow]:
    size = len(rows)
    return [(src, dst) for src in range(size) for dst in range(size) if src != dst]


async def _measure_flows(runtime: Runtime, number: int, flows: Collection[_Flow], effort: _Effort) -> Tensor:
    """Measures the flows of this rank at once; returns the fields of :class:`LinkMeasurement` by receiving rank."""
    comm = runtime.comm
    echoes = [runtime.launch(_serve_echoes(comm, src, number)) for src, dst in flows if dst == comm.rank]
    probes = {
        dst: runtime.launch(_probe_peer(runtime, dst, number, effort))
        for src, dst in flows
        if src == comm.rank
    }
    row = torch.zeros(comm.size, 5, dtype=torch.float64)
    for peer, probe in probes.items():
        row[peer] = torch.tensor(await probe, dtype=torch.float64)
    for echo in echoes:
        await echo
    return row


def _build_tag(number: int, part: int, hop: int = 0) -> Tag:
    return Tag(Purpose.MEASURE.build_exchange_id(number), part, hop)


async def _probe_peer(runtime: Runtime, peer: int, number: int, effort: _Effort) -> tuple[float, ...]:
    """Returns the fields of a :class:`LinkMeasurement`."""
    comm, hop = runtime.comm, 0

    def send(nbytes: int) -> tuple[Pending[None], Pending[float]]:
        """Sends a message; returns when it has left, and the time at which its echo arrives."""
        nonlocal hop
        sent = comm.send(
            Payload((torch.zeros(nbytes, dtype=torch.uint8),)), peer, _build_tag(number, _PROBE, hop)
        )
        hop += 1
        return sent, runtime.launch(receive_echo(hop - 1))

    async def receive_echo(echo_hop: int) -> float:
        await comm.recv(peer, _build_tag(number, _ECHO, echo_hop))
        return runtime.read_clock()

    async def measure_s(nbytes: int) -> float:
        begin_s = runtime.read_clock()
        return await send(nbytes)[1] - begin_s

    round_trips_s = [await measure_s(1) for _ in range(effort.pings)]
    shortest_s, nbytes = min(round_trips_s), FIRST_NBYTES
    while True:
        extra_s = await measure_s(nbytes) - shortest_s
        if extra_s >= MIN_EXTRA_S or GROWTH * nbytes * (comm.size - 1) > effort.max_nbytes:
            break
        nbytes *= GROWTH
    rates = [8 * nbytes / extra_s if extra_s > 0 else math.inf]
    if effort.has_stream:
        end_s = runtime.read_clock() + max(STREAM_S, STREAM_ROUND_TRIPS * shortest_s)
        max_messages = max(STREAM_MESSAGES, effort.max_nbytes // (nbytes * (comm.size - 1)))
        echoes: list[tuple[float, Pending[float]]] = []
        num_received, window = 0, STREAM_WINDOW
        while len(echoes) < STREAM_MESSAGES or (runtime.read_clock() < end_s and len(echoes) < max_messages):
            begin_s = runtime.read_clock()
            sent, echo = send(nbytes)
            echoes.append((begin_s, echo))
            await sent
            while len(echoes) - num_received >= window:
                begin_s, echo = echoes[num_received]
                took_s = await echo - begin_s
                num_received += 1
                window += took_s <= 2 * shortest_s + STREAM_QUEUE_S
        times_s = [await echo for _, echo in echoes][len(echoes) // 2 :]
        marks = [part * (len(times_s) - 1) // STREAM_PARTS for part in range(STREAM_PARTS + 1)]
        rates = sorted(
            8 * nbytes * (end - begin) / max(times_s[end] - times_s[begin], 1e-9)
            for begin, end in pairwise(marks)
        )
    comm.send(Payload((_BYTE[:0],)), peer, _build_tag(number, _PROBE, hop))
    return shortest_s / 2, statistics.median(round_trips_s) / 2, statistics.median(rates), rates[0], rates[-1]


async def _serve_echoes(comm: Communicator, peer: int, number: int) -> None:
    """Answers each message of a peer with a byte, until an empty one."""
    hop = 0
    while True:
        (probe,) = (await comm.recv(peer, _build_tag(number, _PROBE, hop))).iter_tensors()
        if not probe.numel():
            return
        comm.send(Payload((_BYTE,)), peer, _build_tag(number, _ECHO, hop))
        hop += 1


async def _gather(comm: Communicator, row: Tensor) -> Tensor | None:
    """Stacks the rows of all ranks on rank 0; returns ``None`` on the others."""
    if comm.rank != 0:
        comm.send(Payload((row,)), 0, _build_tag(0, _RESULT))
        return None
    rows = [row]
    for rank in range(1, comm.size):
        (received,) = (await comm.recv(rank, _build_tag(0, _RESULT))).iter_tensors()
        rows.append(received)
    return torch.stack(rows)
