"""A lab: nodes with networks of their own on this machine, joined by links as slow as a profile says."""

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
from farflung.extras import need
from farflung.faults import Condition
from farflung.lab._kernel import inside
from farflung.lab.children import Child
from farflung.lab.line import run_line
from farflung.lab.measure import Measured, Pair, expected, measure_latencies, measure_trains
from farflung.lab.queues import Queues
from farflung.lab.tun import INTERFACE, address_of, chosen_congestion_control
from farflung.lab.worker import members, start_worker
from farflung.network import NetworkProfile, Trace, Wiring
from farflung.network.link import mean_capacity
from farflung.types import Json

__all__ = ["Counters", "Lab"]

PORT = 29500
"""Where rank 0's store listens, at its own node."""
PACKET_S = 500e-6
"""How long the largest packet takes on the fastest link: packets share links in pieces of this size."""
SMALLEST, LARGEST = 1500, 65536
ATTEMPTS = 3
"""How often the pairs are measured before a lab is refused."""
LINE_ENDED = "the delay line ended: the nodes no longer reach each other"
PATIENCE_S = 20.0
"""How long the line may take to make the nodes, and to answer."""


@dataclass(frozen=True, slots=True)
class Counters:
    """What a node's interface has counted.

    Args:
      sent_nbytes: with IP and TCP headers, once for each packet.
      sent_packets: packets; a large one counts once.
      received_nbytes: the same of what came.
      received_packets: the same.
    """

    sent_nbytes: int
    sent_packets: int
    received_nbytes: int
    received_packets: int

    def __sub__(self, other: Counters) -> Counters:
        """What was counted since."""
        pairs = zip(asdict(self).values(), asdict(other).values(), strict=True)
        return Counters(*(now - before for now, before in pairs))


class Lab:
    """Nodes of a profile, each in a network namespace of its own; nothing is left of them after the ``with`` block.

    Nor is anything left where this process is killed: the line that carries the packets and every worker end with
    it, the namespaces with them, and the devices with the line.

    Args:
      profile: the network.
      nodes: how many nodes.
      fair: how a capacity is shared; see :class:`farflung.lab.queues.Queues`.
      congestion_control: of the nodes' TCP, as the kernel names it; ``None``: the profile's, or this machine's where
        that names none.
      seed: of jitter and loss.

    Raises:
      LabError: this machine cannot do it; says why.
      ConfigError: the profile is of another number of nodes.
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
        need("the lab", "pyroute2", extra="lab")
        self.profile = profile.for_nodes(nodes)
        self.nodes = nodes
        self.workers: list[Child | None] = [None] * nodes
        """What runs at each node."""
        self._queues = Queues(self.profile, seed, fair=fair)
        self._largest_packet = _largest_packet(self.profile)
        self.congestion_control = congestion_control or self.profile.congestion or ""
        """Of the nodes' TCP, once they are there."""
        self._namespaces: list[int] = []
        self._control: socket.socket | None = None
        self._line: Child | None = None

    def __enter__(self) -> Self:
        ours, theirs = socket.socketpair()
        ours.settimeout(PATIENCE_S)
        self._control = ours
        parent, largest = os.getpid(), self._largest_packet

        def carry() -> None:
            run_line(theirs, parent, self._queues, largest, self.congestion_control or None)

        self._line = Child(carry, keep=[theirs.fileno()])
        theirs.close()
        try:
            answer = self._answer()
            if "error" in answer:
                raise LabError(f"the lab's nodes cannot be made: {answer['error']}")
            for _ in range(self.nodes):
                _, (namespace,), _, _ = socket.recv_fds(ours, 1, 1)
                self._namespaces.append(namespace)
            with inside(self._namespaces[0]):
                self.congestion_control = chosen_congestion_control()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all workers and the line; nothing is left."""
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

    def measure(self) -> list[Measured]:
        """Measures every pair, after setting right what handing packets over takes on this machine."""
        wanted = expected(self.profile)
        over = [t - wanted[pair][0] for pair, t in measure_latencies(self._namespaces).items()]
        early = statistics.median(over) if over else 0.0
        if math.isfinite(early):
            self._tell({"do": "early", "seconds": max(0.0, early)})
        return self._measured(wanted)

    def _measured(self, wanted: Mapping[Pair, tuple[float, float]]) -> list[Measured]:
        if not wanted:
            return []
        self._tell({"do": "lose", "now": True})
        trains = measure_trains(
            self._namespaces,
            self.profile,
            {pair: speed for pair, (_, speed) in wanted.items()},
            self._largest_packet,
            self.lost,
        )
        self._tell({"do": "lose", "now": False})
        latencies = measure_latencies(self._namespaces)
        return [
            Measured(
                *pair, latencies[pair], latency, trains[pair].bandwidth_bps, speed,
                trains[pair].loss, self.profile.link(*pair).loss, trains[pair].packets,
            )
            for pair, (latency, speed) in wanted.items()
        ]  # fmt: skip

    def check(self, *, any_delay: bool = False) -> list[Measured]:
        """Measures every pair, and those anew that something else on this machine may have disturbed.

        Args:
          any_delay: take delays as this machine makes them; :func:`farflung.lab.as_measured` is then the network that
            there is.

        Raises:
          LabError: one of them is further from the profile than :data:`farflung.lab.TOLERANCE`, however often it is
            measured; says which.
        """
        wanted = expected(self.profile)

        def off(found: Mapping[Pair, Measured]) -> list[Measured]:
            return [pair for pair in found.values() if not (pair.usable if any_delay else pair.fits)]

        for _ in range(ATTEMPTS):
            found = {(pair.src, pair.dst): pair for pair in self.measure()}
            for _ in range(ATTEMPTS - 1):
                for again in self._measured(
                    {(one.src, one.dst): wanted[one.src, one.dst] for one in off(found)}
                ):
                    of = again.src, again.dst
                    found[of] = min(found[of], again, key=attrgetter("off"))
            if not (wrong := off(found)):
                return list(found.values())
        worst = max(wrong, key=attrgetter("off"))
        raise LabError(
            f"{self.profile.name} does not come out right on this machine ({len(wrong)} of {len(found)} pairs); from "
            f"node {worst.src} to node {worst.dst}: {worst.latency_s * 1e3:.3g} ms instead of "
            f"{worst.expected_latency_s * 1e3:.3g}, {worst.bandwidth_bps / 1e6:.4g} Mbit/s instead of "
            f"{worst.expected_bandwidth_bps / 1e6:.4g}, {worst.loss:.2%} lost instead of "
            f"{worst.expected_loss:.2%}: use fewer nodes, a slower profile or an idle machine"
        )

    def begin(self) -> None:
        """From here on there are jitter and loss, and traces go on."""
        self._tell({"do": "begin"})

    def change(self, src: int, dst: int, condition: Condition) -> None:
        """What happens to the way from one node to another from here on."""
        self._tell({"do": "change", "src": src, "dst": dst, "condition": asdict(condition)})

    def reset(self, src: int, dst: int) -> None:
        """Closes the TCP connections of one node to another at its end, by ``ss -K``.

        Raises:
          LabError: this machine has no ``ss``, of iproute2.
        """
        with inside(self._namespaces[src]):
            try:
                subprocess.run(["ss", "-K", "dst", address_of(dst)], capture_output=True, check=False)
            except OSError as error:
                raise LabError(f"connections cannot be reset: ss of iproute2 is missing ({error})") from None

    def counters(self, node: int) -> Counters:
        """What the kernel has counted at a node's interface."""
        with inside(self._namespaces[node]):
            lines = Path("/proc/thread-self/net/dev").read_text(encoding="ascii").splitlines()
        own = [line for line in lines if line.strip().startswith(f"{INTERFACE}:")]
        if not own:  # the device goes with the line
            raise LabError(LINE_ENDED)
        numbers = [int(number) for number in own[0].partition(":")[2].split()]
        return Counters(numbers[8], numbers[9], numbers[0], numbers[1])

    def lost(self) -> int:
        """How many packets the line has lost so far."""
        return int(str(self._tell({"do": "count"})["lost"]))

    # --- workers ----------------------------------------------------------------------------------------------------

    def start(
        self, node: int, command: Sequence[str], environment: Mapping[str, str], output: int | None = None
    ) -> Child:
        """Starts a command at a node, with :meth:`variables` beside ``environment``; see :func:`start_worker`."""
        whole = {**environment, **self.variables(node)}
        worker = start_worker(self._namespaces[node], command, whole, output)
        self.workers[node] = worker
        return worker

    def variables(self, node: int) -> dict[str, str]:
        """What torchrun tells its workers, and which interface to use."""
        of_the_node = dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK"), str(node))
        of_all = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(self.nodes))
        interfaces = (
            "GLOO_SOCKET_IFNAME",
            "NCCL_SOCKET_IFNAME",
            "TP_SOCKET_IFNAME",
            "UCX_NET_DEVICES",
        )
        return {
            **of_the_node,
            **of_all,
            **dict.fromkeys(interfaces, INTERFACE),
            "MASTER_ADDR": address_of(0),
            "MASTER_PORT": str(PORT),
            "TORCHELASTIC_RUN_ID": f"lab-{os.getpid()}",
        }

    def signal(self, node: int, number: signal.Signals) -> None:
        """Sends a signal to every process at a node."""
        for pid in members(self._namespaces[node]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self, node: int) -> None:
        """Ends every process at a node at once, as ``kill -9`` does; its kernel closes their connections."""
        worker = self.workers[node]
        if worker is not None:
            worker.kill()

    def watched(self) -> Iterator[Child]:
        """What may end by itself: the line, and the workers that still run."""
        assert self._line is not None
        yield self._line
        yield from (worker for worker in self.workers if worker is not None and worker.exit_code is None)

    def check_line(self) -> None:
        """Whether packets are still carried.

        Raises:
          LabError: the line has ended.
        """
        if self._line is None or self._line.wait(0.0) is not None:
            raise LabError(LINE_ENDED)

    # --- the line ---------------------------------------------------------------------------------------------------

    def _tell(self, order: Mapping[str, Json]) -> Mapping[str, Json]:
        assert self._control is not None
        try:
            self._control.sendall(json.dumps(order).encode() + b"\n")
            answer = self._answer()
        except OSError as error:
            raise LabError(f"{LINE_ENDED} ({error})") from None
        if "error" in answer:
            raise LabError(str(answer["error"]))
        return answer

    def _answer(self) -> Mapping[str, Json]:
        assert self._control is not None
        said = b""
        while not said.endswith(b"\n"):  # byte by byte: descriptors that follow are not to be read over
            piece = self._control.recv(1)
            if not piece:
                raise LabError(LINE_ENDED)
            said += piece
        answer: Mapping[str, Json] = json.loads(said)
        return answer


def _largest_packet(profile: NetworkProfile) -> int:
    """The most bytes in one packet, so that the slowest of the fastest links is not held up for long by one."""
    wiring, nodes = Wiring(profile), range(profile.node_count)
    if any(link.loss for link in profile.all_links()):
        return SMALLEST  # what is lost is to be one segment
    for src in nodes:
        for dst in nodes:
            if src != dst:
                wiring.path(src, dst)
    finite = [
        max(capacity.bandwidth_bps) if isinstance(capacity, Trace) else mean_capacity(capacity)
        for capacity in wiring.capacities
    ]
    fastest = max(finite, default=math.inf)
    return LARGEST if math.isinf(fastest) else round(min(max(fastest * PACKET_S / 8, SMALLEST), LARGEST))
