"""Abilities that a machine needs for a lab, each tested by trying it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from farflung.lab._kernel import CLONE_NEWNET, CLONE_NEWNS, CLONE_NEWPID, unshare
from farflung.lab.children import Child
from farflung.lab.tun import create_tun

__all__ = ["Ability", "check_abilities", "explain_missing"]


@dataclass(frozen=True, slots=True)
class Ability:
    """Ability that a machine has or lacks.

    Args:
      name: Name of the ability.
      trouble: Reason why it is missing; empty if the machine has it.
      is_required: Whether a lab is impossible without it.
      use: Purpose of the ability in a lab.
    """

    name: str
    trouble: str
    is_required: bool
    use: str


def check_abilities() -> list[Ability]:
    """Tries everything that a lab uses, in child processes that leave nothing behind."""
    return [
        Ability(
            "Linux",
            "" if sys.platform == "linux" else f"this is {sys.platform}",
            True,
            "namespaces are Linux's",
        ),
        Ability("root", "" if os.geteuid() == 0 else "run it as root", True, "all of what follows"),
        Ability(
            "network namespaces",
            _try_in_child(lambda: unshare(CLONE_NEWNET)),
            True,
            "a network for each node",
        ),
        Ability(
            "TUN devices", _try_in_child(_create_tun), True, "hand each node's packets to the delay line"
        ),
        Ability(
            "process namespaces",
            _try_in_child(lambda: unshare(CLONE_NEWPID | CLONE_NEWNS)),
            True,
            "end everything a worker has started",
        ),
        Ability(
            "real-time priority",
            _try_in_child(_set_realtime),
            False,
            "packets leave on time while workers compute",
        ),
        Ability("congestion control", "", False, f"of the nodes' TCP: {_describe_congestion_control()}"),
    ]


def explain_missing() -> str | None:
    """Explains in one line which ability this machine lacks for a lab; returns ``None`` if none."""
    missing = [f"{x.name} ({x.trouble})" for x in check_abilities() if x.is_required and x.trouble]
    return f"no lab on this machine: {missing[0]}" if missing else None


def _create_tun() -> None:
    unshare(CLONE_NEWNET)
    os.close(create_tun())


def _set_realtime() -> None:
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))


def _describe_congestion_control() -> str:
    settings = Path("/proc/sys/net/ipv4")
    try:
        default, allowed = (
            (settings / name).read_text(encoding="ascii").strip()
            for name in ("tcp_congestion_control", "tcp_allowed_congestion_control")
        )
    except OSError:
        return "not known"
    return f"{default}; to choose from: {allowed.replace(' ', ', ')}"


def _try_in_child(attempt: Callable[[], None]) -> str:
    """Returns the error of an attempt in a child process; empty if it succeeded."""
    if sys.platform != "linux":
        return "needs Linux"
    reader, writer = os.pipe()

    def report_error() -> None:
        try:
            attempt()
        except OSError as error:
            os.write(writer, str(error).encode())

    child = Child(report_error, keep=[writer])
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        message = stream.read().decode()
    child.wait()
    return message
