"""Virtual time: all replicas in one process on a modelled clock, with modelled links, devices and faults."""

from typing import TYPE_CHECKING

from farflung.lazy import build_lazy_attributes

if TYPE_CHECKING:
    from farflung.sim.clock import VirtualClock
    from farflung.sim.light import LightWorkload
    from farflung.sim.network import LinkModel, VirtualCommunicator, VirtualNetwork
    from farflung.sim.recording import RecordedReplica, TrafficRecorder
    from farflung.sim.retime import RetimedReplica, build_retimed_sink
    from farflung.sim.runtime import VirtualRuntime, VirtualWorld
    from farflung.sim.traffic import RecordedTraffic
else:
    __getattr__, __dir__ = build_lazy_attributes(
        __name__,
        {
            "clock": "VirtualClock",
            "light": "LightWorkload",
            "network": "LinkModel VirtualCommunicator VirtualNetwork",
            "recording": "RecordedReplica TrafficRecorder",
            "retime": "RetimedReplica build_retimed_sink",
            "runtime": "VirtualRuntime VirtualWorld",
            "traffic": "RecordedTraffic",
        },
    )

__all__ = [
    "LightWorkload",
    "LinkModel",
    "RecordedReplica",
    "RecordedTraffic",
    "RetimedReplica",
    "TrafficRecorder",
    "VirtualClock",
    "VirtualCommunicator",
    "VirtualNetwork",
    "VirtualRuntime",
    "VirtualWorld",
    "build_retimed_sink",
]
