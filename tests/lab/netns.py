"""Machines that are network namespaces of this one, joined by cables; made with ``ip``, gone at the end."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from farflung.lab._kernel import enter_network_namespace, use_network_namespace
from tests.forks import Fork, command

T = TypeVar("T")

_EVERY_PROTOCOL = 3
_SO_RCVBUFFORCE = 33
END_S = 10.0


@dataclass
class Machine:
    """One end of a cable.

    Args:
      name: of its namespace.
      address: on the cable.
      cable: the name of its network interface.
    """

    name: str
    address: str
    cable: str
    _started: list[Fork] = field(default_factory=list)

    def start(self, *arguments: str, log: Path, environment: Mapping[str, str], cwd: Path) -> Fork:
        """Starts ``farflung`` there; what it says goes to ``log``."""
        started = Fork(partial(_there, self.name, *arguments), log=log, environment=environment, cwd=cwd)
        self._started.append(started)
        return started

    def inside(self, fn: Callable[[], T]) -> T:
        """Calls ``fn`` there; sockets made by it, and threads, stay there."""
        with Path("/run/netns", self.name).open() as namespace, use_network_namespace(namespace.fileno()):
            return fn()

    @contextlib.contextmanager
    def eavesdropper(self) -> Iterator[bytearray]:
        """Everything that passes on the cable, while it listens."""
        heard = bytearray()
        kinds = (socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_EVERY_PROTOCOL))
        tap = self.inside(lambda: socket.socket(*kinds))
        tap.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 1 << 26)
        tap.bind((self.cable, 0))

        ear, bell = socket.socketpair()

        def listen() -> None:
            while True:
                ready, _, _ = select.select([tap, ear], [], [])
                if tap in ready:
                    heard.extend(tap.recv(1 << 17))
                else:  # nothing is left, and it was told to stop
                    return

        thread = threading.Thread(target=listen, daemon=True)
        thread.start()
        try:
            yield heard
        finally:
            bell.send(b"!")
            thread.join(END_S)
            for link in (tap, ear, bell):
                link.close()

    def end(self) -> None:
        """Ends whatever is still running there."""
        running = subprocess.run(
            ["ip", "netns", "pids", self.name], check=False, capture_output=True, text=True
        )
        for pid in running.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        for started in self._started:
            with started:
                started.wait(END_S)


@contextlib.contextmanager
def _made(*machines: Machine) -> Iterator[None]:
    """Makes the machines' namespaces, which go at the end with all that runs there, and cables with either end."""
    try:
        for machine in machines:
            ip("netns", "add", machine.name)
            ip("-n", machine.name, "link", "set", "lo", "up")
        yield
    finally:
        for machine in machines:
            machine.end()
            subprocess.run(["ip", "netns", "delete", machine.name], check=False, capture_output=True)


def _lay(*ends: tuple[str, str, str]) -> None:
    """A cable between two namespaces: for each end the namespace, the interface and its address, where it has one."""
    (one, first, _), (other, second, _) = ends
    ip("link", "add", first, "netns", one, "type", "veth", "peer", "name", second, "netns", other)
    for name, cable, address in ends:
        if address:
            ip("-n", name, "address", "add", address, "dev", cable)
        ip("-n", name, "link", "set", cable, "up")


@contextlib.contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Two machines that reach each other and nothing else."""
    stem = f"ff{os.getpid()}"
    first, second = (
        Machine(f"{stem}{end}", f"10.77.0.{number}", f"{stem}{end}") for number, end in ((1, "a"), (2, "b"))
    )
    with _made(first, second):
        _lay(*((machine.name, machine.cable, f"{machine.address}/24") for machine in (first, second)))
        yield first, second


@contextlib.contextmanager
def around_a_switch(number: int) -> Iterator[tuple[Machine, list[Machine]]]:
    """A machine with a switch in it, and others at the switch, all of which reach each other.

    The switch's end of a machine's cable has the name of the machine's own end.
    """
    stem = f"ff{os.getpid()}"
    switch = Machine(f"{stem}s", "10.78.0.1", "switch")
    machines = [Machine(f"{stem}-{one}", f"10.78.0.{2 + one}", f"to-{one}") for one in range(number)]
    with _made(switch, *machines):
        ip("-n", switch.name, "link", "add", switch.cable, "type", "bridge")
        ip("-n", switch.name, "address", "add", f"{switch.address}/24", "dev", switch.cable)
        ip("-n", switch.name, "link", "set", switch.cable, "up")
        for machine in machines:
            own = machine.name, machine.cable, f"{machine.address}/24"
            _lay((switch.name, machine.cable, ""), own)
            ip("-n", switch.name, "link", "set", machine.cable, "master", switch.cable)
        yield switch, machines


HOME, ROUTER = "192.168.1.2", "192.168.1.1"
"""Of each home's machine, and of its router on the inside: the same in all homes, as it often is."""
_RULES = """
table ip home {
    chain translated {
        type nat hook postrouting priority srcnat
        oifname "out" masquerade
    }
    chain forwarded {
        type filter hook forward priority filter; policy drop
        iifname "in" accept
        ct state established,related accept
        meta l4proto tcp reject with tcp reset
    }
}
"""


@dataclass
class Home(Machine):
    """A machine behind a router that translates addresses and lets nothing in.

    Args:
      router: the router's address outside.
    """

    router: str = ""


@contextlib.contextmanager
def public_and_homes() -> Iterator[tuple[Machine, Home, Home]]:
    """A machine with a public address, and two that reach it from behind address translation, and nothing else."""
    stem = f"ff{os.getpid()}"
    public = Machine(f"{stem}p", "203.0.113.1", "to-a")
    homes = [
        Home(f"{stem}{end}", HOME, "wire", router=f"203.0.113.{outside}")
        for end, outside in (("a", 2), ("b", 6))
    ]
    routers = [Machine(f"{home.name}-router", home.router, "out") for home in homes]
    with _made(public, *routers, *homes):
        for number, (home, machine) in enumerate(zip(homes, routers, strict=True)):
            router = machine.name
            provider = f"203.0.113.{1 + 4 * number}"
            _lay((public.name, f"to-{'ab'[number]}", f"{provider}/30"), (router, "out", f"{home.router}/30"))
            _lay((router, "in", f"{ROUTER}/24"), (home.name, home.cable, f"{HOME}/24"))
            ip("-n", router, "route", "add", "default", "via", provider)
            ip("-n", home.name, "route", "add", "default", "via", ROUTER)
            ip("netns", "exec", router, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
            _run("nft", "-f", "-", within=router, said=_RULES)
        yield public, homes[0], homes[1]


def enter(name: str) -> None:
    """From here on the calling thread is in the namespace of this name."""
    with Path("/run/netns", name).open() as namespace:
        enter_network_namespace(namespace.fileno())


def _there(name: str, *arguments: str) -> int:
    enter(name)
    return command(*arguments)


def ip(*arguments: str) -> None:
    """Runs ``ip``.

    Raises:
      RuntimeError: with what it said.
    """
    _run("ip", *arguments)


def _run(*command: str, within: str = "", said: str = "") -> None:
    inside = ["ip", "netns", "exec", within] if within else []
    done = subprocess.run([*inside, *command], check=False, capture_output=True, text=True, input=said)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
