"""A lab: nodes with networks of their own on this machine, joined by links as slow as a profile specifies."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import statistics
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import Self

from farflung.errors import LabError
from farflung.extras import require_modules
from farflung.faults import LinkCondition
from farflung.lab._kernel import use_network_namespace
from farflung.lab.children import Child
from farflung.lab.line import run_line
from farflung.lab.measure import Pair, PairMeasurement, compute_expected, measure_latencies, measure_trains
from farflung.lab.queues import Queues
from farflung.lab.tun import INTERFACE, build_address, read_congestion_control
from farflung.lab.worker import list_processes, start_worker
from farflung.network import BandwidthTrace, NetworkProfile, Wiring
from farflung.network.link import compute_mean_capacity
from farflung.types import Json

__all__ = ["Counters", "Lab"]

PORT = 29500
"""Port of rank 0's store, at its own node."""
PACKET_S = 500e-6
"""Maximum time of the largest packet on the fastest link: packets share links in pieces of this size."""
MIN_GSO_NBYTES, MAX_GSO_NBYTES = 1500, 65536
MAX_ATTEMPTS = 3
"""Number of measurements of the pairs before a lab is refused."""
LINE_ENDED = "the delay line ended: the nodes no longer reach each other"
TIMEOUT_S = 20.0
"""Time limit of the line to create the nodes, and to reply."""


@dataclass(frozen=True, slots=True)
class Counters:
    """Counters of a node's interface.

    Args:
      sent_nbytes: Bytes sent, with IP and TCP headers once for each packet.
      sent_packets: Packets sent; a large one counts once.
      received_nbytes: Bytes received, likewise.
      received_packets: Packets received, likewise.
    """

    sent_nbytes: int
    sent_packets: int
    received_nbytes: int
    received_packets: int

    def __sub__(self, baseline: Counters) -> Counters:
        """Returns what was counted since ``baseline``."""
        pairs = zip(asdict(self).values(), asdict(baseline).values(), strict=True)
        return Counters(*(count - baseline_count for count, baseline_count in pairs))


class Lab:
    """Nodes of a profile, each in a network namespace of its own, which the end of the ``with`` block removes.

    If this process is killed, nothing is left either: the line that carries the packets and every worker end
    with it, the namespaces with them, and the devices with the line.

    Args:
      profile: Network profile.
      nodes: Number of nodes.
      fair: Whether pairs share a capacity equally; see :class:`farflung.lab.queues.Queues`.
      congestion_control: Congestion control of the nodes' TCP, as the kernel names it; ``None`` for the
        profile's or this machine's.
      seed: Seed of jitter and loss.

    Raises:
      LabError: This machine lacks an ability; says why.
      ConfigError: The profile has another number of nodes.
      MissingExtra: pyroute2 is not installed.
    """

    def __init__(
        self,
        profile: NetworkProfile,
        nodes: int,
        *,
        fair: bool = True,
        congestion_control: str | None = None,
        seed: int = 0,
    ) -> None:
        require_modules("the lab", "pyroute2", extra="lab")
        self.profile = profile.with_nodes(nodes)
        self.nodes = nodes
        self.workers: list[Child | None] = [None] * nodes
        """Process at each node."""
        self._queues = Queues(self.profile, seed, fair=fair)
        self._gso_max_nbytes = _compute_gso_max_nbytes(self.profile)
        self.congestion_control = congestion_control or self.profile.congestion or ""
        """Congestion control of the nodes' TCP, once the nodes exist."""
        self._namespaces: list[int] = []
        self._control: socket.socket | None = None
        self._line: Child | None = None

    def __enter__(self) -> Self:
        lab_end, line_end = socket.socketpair()
        lab_end.settimeout(TIMEOUT_S)
        self._control = lab_end
        parent, max_nbytes = os.getpid(), self._gso_max_nbytes

        def run() -> None:
            run_line(line_end, parent, self._queues, max_nbytes, self.congestion_control or None)

        self._line = Child(run, keep=[line_end.fileno()])
        line_end.close()
        try:
            reply = self._receive_reply_or_error()
            if "error" in reply:
                raise LabError(f"the lab's nodes cannot be made: {reply['error']}")
            for _ in range(self.nodes):
                _, (namespace,), _, _ = socket.recv_fds(lab_end, 1, 1)
                self._namespaces.append(namespace)
            with use_network_namespace(self._namespaces[0]):
                self.congestion_control = read_congestion_control()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all workers and the line, and leaves nothing behind."""
        for worker in self.workers:
            if worker is not None:
                worker.kill()
        if self._line is not None:
            self._line.kill()
        if self._control is not None:
            self._control.close()
        while self._namespaces:
            os.close(self._namespaces.pop())

    # --- links ------------------------------------------------------------------------------------------------------

    def measure(self) -> list[PairMeasurement]:
        """Measures every pair, after correcting the delays for this machine's packet handling."""
        expectations = compute_expected(self.profile)
        excess_s = [t - expectations[pair][0] for pair, t in measure_latencies(self._namespaces).items()]
        early_s = statistics.median(excess_s) if excess_s else 0.0
        if math.isfinite(early_s):
            self._send_order({"command": "handover", "seconds": max(0.0, early_s)})
        return self._measure_pairs(expectations)

    def _measure_pairs(self, expectations: Mapping[Pair, tuple[float, float]]) -> list[PairMeasurement]:
        if not expectations:
            return []
        self._send_order({"command": "lose", "enabled": True})
        trains = measure_trains(
            self._namespaces,
            self.profile,
            {pair: speed for pair, (_, speed) in expectations.items()},
            self._gso_max_nbytes,
            self.count_lost,
        )
        self._send_order({"command": "lose", "enabled": False})
        latencies = measure_latencies(self._namespaces)
        return [
            PairMeasurement(
                *pair, latencies[pair], latency, trains[pair].bandwidth_bps, speed,
                trains[pair].loss, self.profile.get_link(*pair).loss, trains[pair].packets,
            )
            for pair, (latency, speed) in expectations.items()
        ]  # fmt: skip

    def check(self, *, any_delay: bool = False) -> list[PairMeasurement]:
        """Measures every pair, and repeats measurements that other load on this machine may have disturbed.

        Args:
          any_delay: Whether to accept delays as this machine makes them, as
            :func:`farflung.lab.apply_measured_delays` models.

        Raises:
          LabError: A pair deviates by more than :data:`farflung.lab.TOLERANCE` in every measurement.
        """
        expectations = compute_expected(self.profile)

        def find_misfits(results: Mapping[Pair, PairMeasurement]) -> list[PairMeasurement]:
            return [
                pair for pair in results.values() if not (pair.is_usable if any_delay else pair.is_accurate)
            ]

        for _ in range(MAX_ATTEMPTS):
            results = {(pair.src, pair.dst): pair for pair in self.measure()}
            for _ in range(MAX_ATTEMPTS - 1):
                for retry in self._measure_pairs(
                    {(m.src, m.dst): expectations[m.src, m.dst] for m in find_misfits(results)}
                ):
                    key = retry.src, retry.dst
                    results[key] = min(results[key], retry, key=attrgetter("max_error"))
            if not (bad := find_misfits(results)):
                return list(results.values())
        worst = max(bad, key=attrgetter("max_error"))
        raise LabError(
            f"{self.profile.name} does not come out right on this machine ({len(bad)} of {len(results)} pairs); from "
            f"node {worst.src} to node {worst.dst}: {worst.latency_s * 1e3:.3g} ms instead of "
            f"{worst.expected_latency_s * 1e3:.3g}, {worst.bandwidth_bps / 1e6:.4g} Mbit/s instead of "
            f"{worst.expected_bandwidth_bps / 1e6:.4g}, {worst.loss:.2%} lost instead of "
            f"{worst.expected_loss:.2%}: use fewer nodes, a slower profile or an idle machine"
        )

    def begin(self) -> None:
        """Starts jitter, loss and traces."""
        self._send_order({"command": "begin"})

    def set_condition(self, src: int, dst: int, condition: LinkCondition) -> None:
        """Sets the condition of the link from one node to another."""
        self._send_order({"command": "change", "src": src, "dst": dst, "condition": asdict(condition)})

    def reset(self, src: int, dst: int) -> None:
        """Closes a node's TCP connections to another at its end, by ``ss -K``.

        Raises:
          LabError: This machine lacks ``ss`` of iproute2.
        """
        with use_network_namespace(self._namespaces[src]):
            try:
                subprocess.run(["ss", "-K", "dst", build_address(dst)], capture_output=True, check=False)
            except OSError as error:
                raise LabError(f"connections cannot be reset: ss of iproute2 is missing ({error})") from None

    def read_counters(self, node: int) -> Counters:
        """Reads the kernel's counters of a node's interface."""
        with use_network_namespace(self._namespaces[node]):
            lines = Path("/proc/thread-self/net/dev").read_text(encoding="ascii").splitlines()
        rows = [line for line in lines if line.strip().startswith(f"{INTERFACE}:")]
        if not rows:  # the device ends with the line
            raise LabError(LINE_ENDED)
        numbers = [int(number) for number in rows[0].partition(":")[2].split()]
        return Counters(numbers[8], numbers[9], numbers[0], numbers[1])

    def count_lost(self) -> int:
        """Returns the number of packets that the line has lost so far."""
        return int(str(self._send_order({"command": "count"})["num_lost"]))

    # --- workers ----------------------------------------------------------------------------------------------------

    def start(
        self, node: int, command: Sequence[str], environment: Mapping[str, str], output: int | None = None
    ) -> Child:
        """Starts a command at a node, with variables of :meth:`build_environment`; see :func:`start_worker`."""
        variables = {**environment, **self.build_environment(node)}
        worker = start_worker(self._namespaces[node], command, variables, output)
        self.workers[node] = worker
        return worker

    def build_environment(self, node: int) -> dict[str, str]:
        """Builds the variables that torchrun would set, and those that select the interface."""
        node_values = dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK"), str(node))
        shared = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(self.nodes))
        interfaces = (
            "GLOO_SOCKET_IFNAME",
            "NCCL_SOCKET_IFNAME",
            "TP_SOCKET_IFNAME",
            "UCX_NET_DEVICES",
        )
        return {
            **node_values,
            **shared,
            **dict.fromkeys(interfaces, INTERFACE),
            "MASTER_ADDR": build_address(0),
            "MASTER_PORT": str(PORT),
            "TORCHELASTIC_RUN_ID": f"lab-{os.getpid()}",
        }

    def send_signal(self, node: int, number: signal.Signals) -> None:
        """Sends a signal to every process at a node."""
        for pid in list_processes(self._namespaces[node]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self, node: int) -> None:
        """Kills every process at a node, as ``kill -9`` does; its kernel closes their connections."""
        worker = self.workers[node]
        if worker is not None:
            worker.kill()

    def iter_watched(self) -> Iterator[Child]:
        """Yields the processes that may end by themselves: the line, and the running workers."""
        assert self._line is not None
        yield self._line
        yield from (worker for worker in self.workers if worker is not None and worker.exit_code is None)

    def check_line(self) -> None:
        """Checks that packets are still carried.

        Raises:
          LabError: The line has ended.
        """
        if self._line is None or self._line.wait(0.0) is not None:
            raise LabError(LINE_ENDED)

    # --- the line ---------------------------------------------------------------------------------------------------

    def _send_order(self, order: Mapping[str, Json]) -> Mapping[str, Json]:
        assert self._control is not None
        try:
            self._control.sendall(json.dumps(order).encode() + b"\n")
            reply = self._receive_reply_or_error()
        except OSError as error:
            raise LabError(f"{LINE_ENDED} ({error})") from None
        if "error" in reply:
            raise LabError(str(reply["error"]))
        return reply

    def _receive_reply_or_error(self) -> Mapping[str, Json]:
        """Receives one JSON reply, which may hold an error; raises LabError if the delay line has ended."""
        assert self._control is not None
        data = b""
        while not data.endswith(b"\n"):  # byte by byte, to leave the descriptors that follow
            byte = self._control.recv(1)
            if not byte:
                raise LabError(LINE_ENDED)
            data += byte
        reply: Mapping[str, Json] = json.loads(data)
        return reply


def _compute_gso_max_nbytes(profile: NetworkProfile) -> int:
    """Returns the kernel's limit for packets of several segments, so that none blocks the fastest link for long."""
    wiring, nodes = Wiring(profile), range(profile.node_count)
    if any(link.loss for link in profile.iter_links()):
        return MIN_GSO_NBYTES  # a loss must be one segment
    for src in nodes:
        for dst in nodes:
            if src != dst:
                wiring.get_path(src, dst)
    finite = [
        max(capacity.bandwidth_bps)
        if isinstance(capacity, BandwidthTrace)
        else compute_mean_capacity(capacity)
        for capacity in wiring.capacities
    ]
    fastest = max(finite, default=math.inf)
    return (
        MAX_GSO_NBYTES
        if math.isinf(fastest)
        else round(min(max(fastest * PACKET_S / 8, MIN_GSO_NBYTES), MAX_GSO_NBYTES))
    )
