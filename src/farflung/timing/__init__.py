"""What training takes: by the equations of papers and a schedule's own transfers, measured, and on another network."""

from farflung.timing.calibrate import Calibration, Spread, calibrate
from farflung.timing.delayed import delayed_s, fedavg_s, least_delay, scalability, synchronous_s
from farflung.timing.flops import forward_flops
from farflung.timing.peak_memory import peak_nbytes
from farflung.timing.pipe_sgd import Cluster, layers_s, period_s, ring_s, server_s
from farflung.timing.recording import RecordedReplica, TrafficRecorder
from farflung.timing.retime import Retimed, retimed_events
from farflung.timing.traffic import Traffic
from farflung.timing.transfers import Costs, Move, Timeline, timeline

__all__ = [
    "Calibration",
    "Cluster",
    "Costs",
    "Move",
    "RecordedReplica",
    "Retimed",
    "Spread",
    "Timeline",
    "Traffic",
    "TrafficRecorder",
    "calibrate",
    "delayed_s",
    "fedavg_s",
    "forward_flops",
    "layers_s",
    "least_delay",
    "peak_nbytes",
    "period_s",
    "retimed_events",
    "ring_s",
    "scalability",
    "server_s",
    "synchronous_s",
    "timeline",
]
