"""What a workload takes on this machine, for profiles of devices, and what a run takes on another network."""

from farflung.timing.calibrate import Calibration, Spread, calibrate
from farflung.timing.flops import forward_flops
from farflung.timing.peak_memory import peak_nbytes
from farflung.timing.recording import RecordedReplica, TrafficRecorder
from farflung.timing.retime import Retimed, retimed_events
from farflung.timing.traffic import Traffic

__all__ = [
    "Calibration",
    "RecordedReplica",
    "Retimed",
    "Spread",
    "Traffic",
    "TrafficRecorder",
    "calibrate",
    "forward_flops",
    "peak_nbytes",
    "retimed_events",
]
