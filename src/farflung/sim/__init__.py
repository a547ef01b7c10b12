"""Virtual time: all replicas in one process on a modelled clock, with modelled links, devices and faults."""

from typing import TYPE_CHECKING

from farflung.lazy import lazy

if TYPE_CHECKING:
    from farflung.sim.clock import VirtualClock
    from farflung.sim.network import LinkModel, VirtualCommunicator, VirtualNetwork
    from farflung.sim.recording import RecordedReplica, TrafficRecorder
    from farflung.sim.retime import Retimed, retimed_events
    from farflung.sim.runtime import VirtualRuntime, VirtualWorld
    from farflung.sim.traffic import Traffic
else:
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "clock": "VirtualClock",
            "network": "LinkModel VirtualCommunicator VirtualNetwork",
            "recording": "RecordedReplica TrafficRecorder",
            "retime": "Retimed retimed_events",
            "runtime": "VirtualRuntime VirtualWorld",
            "traffic": "Traffic",
        },
    )

__all__ = [
    "LinkModel",
    "RecordedReplica",
    "Retimed",
    "Traffic",
    "TrafficRecorder",
    "VirtualClock",
    "VirtualCommunicator",
    "VirtualNetwork",
    "VirtualRuntime",
    "VirtualWorld",
    "retimed_events",
]
