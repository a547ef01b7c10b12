"""The two worlds behind :class:`farflung.types.Runtime`: the wall clock and virtual time."""

from typing import TYPE_CHECKING

from farflung.lazy import lazy

if TYPE_CHECKING:
    from farflung.runtime.decisions import DecisionLog, decision_json, read_decisions
    from farflung.runtime.fleet import FleetTimes, time_fleet
    from farflung.runtime.measuring import measured_network
    from farflung.runtime.pace import Pace
    from farflung.runtime.seat import Seat, interface_to_master
    from farflung.runtime.virtual import VirtualClock, VirtualRuntime, VirtualWorld
    from farflung.runtime.wall import WallRuntime
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "DecisionLog",
    "FleetTimes",
    "Pace",
    "Seat",
    "VirtualClock",
    "VirtualRuntime",
    "VirtualWorld",
    "WallRuntime",
    "decision_json",
    "interface_to_master",
    "measured_network",
    "read_decisions",
    "time_fleet",
]
