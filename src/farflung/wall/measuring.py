"""Measurement of the network between the replicas of a run, by a few small messages over the run's own connections."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from farflung.comm import Purpose
from farflung.network import Link, NetworkProfile, Site, SiteLink
from farflung.types import Communicator, Payload, Runtime, Tag

__all__ = ["measure_network"]

PINGS = 4
"""Number of round trips of one byte to each peer; the shortest counts."""
FIRST_NBYTES, GROWTH = 1 << 12, 4
"""Size of the first message that is timed for bandwidth, and growth factor of later ones."""
MAX_NBYTES = 1 << 22
"""Maximum bytes that one replica sends in its longest messages to all peers together."""
MIN_EXTRA_S = 0.02
"""Minimum time of a message beyond that of a byte, for a sufficient estimate of bandwidth."""
_PROBE, _ECHO, _RESULT = range(3)
_BYTE = torch.zeros(1, dtype=torch.uint8)


async def measure_network(runtime: Runtime) -> NetworkProfile | None:
    """Measures latency and bandwidth from every replica to every other, all at the same time.

    All replicas measure at once, so the bandwidth of each pair includes shared links, as in exchanges of gradients. A
    latency is half the shortest of some round trips. A bandwidth follows from the additional time of a message over
    that of one byte, with messages that grow until it is well above the noise, or until they are long. The measurement
    takes some round trips, and fractions of a second on slow links. Sizes and number of messages are our choice.

    Args:
      runtime: Runtime of one replica; all replicas call this.

    Returns:
      On rank 0, a site for each replica; ``None`` on the others.
    """
    comm = runtime.comm
    peers = [rank for rank in range(comm.size) if rank != comm.rank]
    echoes = [runtime.launch(_serve_echoes(comm, peer)) for peer in peers]
    probes = {peer: runtime.launch(_probe_peer(runtime, peer)) for peer in peers}
    measurements = torch.zeros(comm.size, 2, dtype=torch.float64)
    for peer, probe in probes.items():
        measurements[peer] = torch.tensor(await probe, dtype=torch.float64)
    for echo in echoes:
        await echo
    return await runtime.launch(_gather_profile(comm, measurements))


def _build_tag(part: int, hop: int = 0) -> Tag:
    return Tag(Purpose.MEASURE.build_exchange_id(0), part, hop)


async def _probe_peer(runtime: Runtime, peer: int) -> tuple[float, float]:
    """Returns seconds of latency, and seconds per byte, to one peer."""
    comm, hop = runtime.comm, 0

    async def round_trip_s(nbytes: int) -> float:
        nonlocal hop
        begin = runtime.read_clock()
        comm.send(Payload((torch.zeros(nbytes, dtype=torch.uint8),)), peer, _build_tag(_PROBE, hop))
        hop += 1
        await comm.recv(peer, _build_tag(_ECHO, hop - 1))
        return runtime.read_clock() - begin

    shortest_s = math.inf
    for _ in range(PINGS):
        shortest_s = min(shortest_s, await round_trip_s(1))
    nbytes, extra_s = FIRST_NBYTES, 0.0
    while True:
        extra_s = await round_trip_s(nbytes) - shortest_s
        if extra_s >= MIN_EXTRA_S or GROWTH * nbytes * (comm.size - 1) > MAX_NBYTES:
            break
        nbytes *= GROWTH
    comm.send(Payload((_BYTE[:0],)), peer, _build_tag(_PROBE, hop))
    return shortest_s / 2, max(extra_s, 0.0) / nbytes


async def _serve_echoes(comm: Communicator, peer: int) -> None:
    """Answers each message of a peer with a byte, until an empty one."""
    hop = 0
    while True:
        (probe,) = (await comm.recv(peer, _build_tag(_PROBE, hop))).iter_tensors()
        if not probe.numel():
            return
        comm.send(Payload((_BYTE,)), peer, _build_tag(_ECHO, hop))
        hop += 1


async def _gather_profile(comm: Communicator, measurements: Tensor) -> NetworkProfile | None:
    """Gathers all measurements on rank 0."""
    if comm.rank != 0:
        comm.send(Payload((measurements,)), 0, _build_tag(_RESULT))
        return None
    rows = [measurements]
    for rank in range(1, comm.size):
        (row,) = (await comm.recv(rank, _build_tag(_RESULT))).iter_tensors()
        rows.append(row)
    names = [f"rank {rank}" for rank in range(comm.size)]
    return NetworkProfile(
        "measured",
        tuple(Site(name, 1) for name in names),
        tuple(
            SiteLink(names[src], names[dst], Link(latency_s, 8 / byte_s if byte_s else math.inf))
            for src, row in enumerate(rows)
            for dst, (latency_s, byte_s) in enumerate(row.tolist())
            if src != dst
        ),
    )
