"""The delay line: the process that carries every packet of a lab from node to node."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import math
import os
import select
import signal
import socket
import time
from collections.abc import Mapping

from farflung._linux import exit_with_parent
from farflung.faults import LinkCondition
from farflung.lab._kernel import CLONE_NEWNET, enter_network_namespace, unshare
from farflung.lab.queues import Queues
from farflung.lab.tun import (
    MAX_READ_NBYTES,
    compute_wire_nbytes,
    configure_tun,
    create_tun,
    parse_node,
    set_large_packets,
)
from farflung.types import Json

__all__ = ["run_line"]

BATCH = 32
"""Maximum number of packets read from one node before other work has its turn."""
PRIORITY = 10
"""Real-time priority, so that a packet that is due waits for no computation."""
SPIN_S = 150e-6
"""Maximum remaining time that is spent spinning; on a virtual machine a timer would be late by as much."""
_PR_SET_TIMERSLACK = 29


def run_line(
    control: socket.socket,
    parent: int,
    queues: Queues,
    gso_max_nbytes: int,
    congestion_control: str | None,
) -> None:
    """Creates the nodes, hands their namespaces over, and carries packets until ``control`` is closed.

    The devices end with this process, and with them every link between the nodes.

    Args:
      control: Stream of lines of JSON, each of which gets a reply.
      parent: Process that this one must not survive.
      queues: Queues, delay and loss between the nodes.
      gso_max_nbytes: Maximum bytes of a packet.
      congestion_control: Congestion control of the nodes' TCP; ``None`` for this machine's.
    """
    exit_with_parent(parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the parent decides about the end
    try:
        namespaces, devices = _create_nodes(queues.nodes, gso_max_nbytes, congestion_control)
    except OSError as error:
        control.sendall(json.dumps({"error": str(error)}).encode() + b"\n")
        return
    socket.send_fds(control, [json.dumps({"nodes": len(devices)}).encode() + b"\n"], [])
    for namespace in namespaces:
        socket.send_fds(control, [b"n"], [namespace])
        os.close(namespace)
    _set_realtime()
    _Line(control, devices, queues).run()


def _create_nodes(
    count: int, gso_max_nbytes: int, congestion_control: str | None
) -> tuple[list[int], list[int]]:
    """Creates a namespace for each node with a device in it; returns the process to its own namespace."""
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    namespaces, devices = [], []
    for node in range(count):
        unshare(CLONE_NEWNET)
        namespaces.append(os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC))
        devices.append(create_tun())
        configure_tun(node, gso_max_nbytes, congestion_control)
    enter_network_namespace(home)
    os.close(home)
    return namespaces, devices


def _set_realtime() -> None:
    gc.freeze()
    gc.disable()  # nothing here creates cycles
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    # The measurement of pairs shows if one of these is missing and matters.
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(PRIORITY))
    with contextlib.suppress(OSError):
        # While this is open, no processor sleeps so deeply that waking takes time.
        os.write(os.open("/dev/cpu_dma_latency", os.O_WRONLY | os.O_CLOEXEC), bytes(4))


class _Line:
    def __init__(self, control: socket.socket, devices: list[int], queues: Queues) -> None:
        self._control, self._devices, self._queues = control, devices, queues
        self._pending = b""
        self._epoll = select.epoll()
        self._nodes = {device: node for node, device in enumerate(devices)}
        self._epoll.register(control.fileno(), select.EPOLLIN)
        for device in devices:
            self._epoll.register(device, select.EPOLLIN)

    def run(self) -> None:
        """Carries packets until no process is left that could send orders."""
        clock, queues, epoll, nodes = time.monotonic, self._queues, self._epoll, self._nodes
        watched = [epoll.fileno()]
        while True:
            for dst, packet in queues.pop_arrived(clock()):
                self._deliver_packet(dst, packet)
            remaining_s = queues.get_next_time() - clock()
            if remaining_s > SPIN_S:  # epoll's own timeout counts milliseconds
                select.select(watched, [], [], None if math.isinf(remaining_s) else remaining_s)
            for fd, _ in epoll.poll(0):
                if fd in nodes:
                    self._read_packets(fd, nodes[fd])
                elif not self._process_orders():
                    return

    def _read_packets(self, device: int, src: int) -> None:
        enqueue, time_s, nodes = self._queues.enqueue, time.monotonic(), len(self._devices)
        for _ in range(BATCH):
            try:
                packet = os.read(device, MAX_READ_NBYTES)
            except BlockingIOError:
                return
            dst = parse_node(packet)
            if 0 <= dst < nodes and dst != src:
                enqueue(time_s, src, dst, compute_wire_nbytes(packet), packet)

    def _deliver_packet(self, dst: int, packet: bytes) -> None:
        try:
            os.write(self._devices[dst], packet)
        except OSError:  # the device is down or the packet is invalid
            self._queues.num_lost += 1

    def _process_orders(self) -> bool:
        """Carries out the orders that have arrived and replies to each; returns False if the connection is closed."""
        data = self._control.recv(1 << 16)
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in lines:
            reply = self._handle_order(json.loads(line))
            self._control.sendall(json.dumps(reply).encode() + b"\n")
        return bool(data)

    def _handle_order(self, order: Mapping[str, Json]) -> Json:
        queues = self._queues
        match order:
            case {"command": "handover", "seconds": float(seconds)}:
                queues.lead_s = seconds
            case {"command": "lose", "enabled": bool(is_lossy)}:
                queues.is_lossy = is_lossy
            case {"command": "begin"}:
                queues.begin_s = time.monotonic()
            case {"command": "change", "src": int(src), "dst": int(dst), "condition": dict(condition)}:
                queues.set_condition(src, dst, LinkCondition(**condition))  # type: ignore[arg-type]
                if condition["loss"]:
                    for device in self._devices:  # a loss must be one segment
                        set_large_packets(device, False)
            case {"command": "count"}:
                pass
            case _:
                return {"error": f"unknown order {order}"}
        return {"num_lost": queues.num_lost}
