"""What a machine must be able to do for a lab, each thing tried."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from farflung.lab._kernel import CLONE_NEWNET, CLONE_NEWNS, CLONE_NEWPID, unshare
from farflung.lab.children import Child
from farflung.lab.tun import open_tun

__all__ = ["Ability", "abilities", "why_not"]


@dataclass(frozen=True, slots=True)
class Ability:
    """Something that a machine can do, or not.

    Args:
      what: in a few words.
      trouble: why it cannot; empty where it can.
      needed: whether a lab is impossible without.
      use: what a lab needs it for.
    """

    what: str
    trouble: str
    needed: bool
    use: str


def abilities() -> list[Ability]:
    """Everything that a lab makes use of, tried in child processes that leave nothing behind."""
    return [
        Ability(
            "Linux",
            "" if sys.platform == "linux" else f"this is {sys.platform}",
            True,
            "namespaces are Linux's",
        ),
        Ability("root", "" if os.geteuid() == 0 else "run it as root", True, "all of what follows"),
        Ability("network namespaces", _tried(lambda: unshare(CLONE_NEWNET)), True, "a network for each node"),
        Ability("TUN devices", _tried(_open_tun), True, "hand each node's packets to the delay line"),
        Ability(
            "process namespaces",
            _tried(lambda: unshare(CLONE_NEWPID | CLONE_NEWNS)),
            True,
            "end everything a worker has started",
        ),
        Ability("real-time priority", _tried(_hurry), False, "packets leave on time while workers compute"),
        Ability("congestion control", "", False, f"of the nodes' TCP: {_congestion_control()}"),
    ]


def why_not() -> str | None:
    """What this machine lacks for a lab, on one line; ``None`` where it can."""
    missing = [f"{one.what} ({one.trouble})" for one in abilities() if one.needed and one.trouble]
    return f"no lab on this machine: {missing[0]}" if missing else None


def _open_tun() -> None:
    unshare(CLONE_NEWNET)
    os.close(open_tun())


def _hurry() -> None:
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))


def _congestion_control() -> str:
    settings = Path("/proc/sys/net/ipv4")
    try:
        default, allowed = (
            (settings / name).read_text(encoding="ascii").strip()
            for name in ("tcp_congestion_control", "tcp_allowed_congestion_control")
        )
    except OSError:
        return "not known"
    return f"{default}; to choose from: {allowed.replace(' ', ', ')}"


def _tried(attempt: Callable[[], None]) -> str:
    """What went wrong when a child process tried; empty: nothing."""
    if sys.platform != "linux":
        return "needs Linux"
    ear, bell = os.pipe()

    def tell() -> None:
        try:
            attempt()
        except OSError as error:
            os.write(bell, str(error).encode())

    child = Child(tell, keep=[bell])
    os.close(bell)
    with os.fdopen(ear, "rb") as heard:
        said = heard.read().decode()
    child.wait()
    return said
