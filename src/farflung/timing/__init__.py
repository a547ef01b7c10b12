"""What training takes: by the equations of papers and a schedule's own transfers, measured, and on another network."""

from farflung.timing.calibrate import Calibration, Spread, calibrate
from farflung.timing.coding import CodingTask, coding_points, coding_tasks, ladder, tensors_like
from farflung.timing.delayed import delayed_s, fedavg_s, least_delay, scalability, synchronous_s
from farflung.timing.flops import forward_flops
from farflung.timing.messages import MessageCosts, message_costs
from farflung.timing.peak_memory import peak_nbytes
from farflung.timing.pipe_sgd import Cluster, layers_s, period_s, ring_s, server_s
from farflung.timing.recording import RecordedReplica, TrafficRecorder
from farflung.timing.retime import Retimed, retimed_events
from farflung.timing.sharing import Sharing, company
from farflung.timing.traffic import Traffic
from farflung.timing.transfers import Costs, Move, Timeline, timeline

__all__ = [
    "Calibration",
    "Cluster",
    "CodingTask",
    "Costs",
    "MessageCosts",
    "Move",
    "RecordedReplica",
    "Retimed",
    "Sharing",
    "Spread",
    "Timeline",
    "Traffic",
    "TrafficRecorder",
    "calibrate",
    "coding_points",
    "coding_tasks",
    "company",
    "delayed_s",
    "fedavg_s",
    "forward_flops",
    "ladder",
    "layers_s",
    "least_delay",
    "message_costs",
    "peak_nbytes",
    "period_s",
    "retimed_events",
    "ring_s",
    "scalability",
    "server_s",
    "synchronous_s",
    "tensors_like",
    "timeline",
]
