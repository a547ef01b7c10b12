"""What training takes: by a schedule's own transfers, measured, and on another network."""

from farflung.timing.calibrate import Calibration, Spread, calibrate
from farflung.timing.coding import CodingTask, coding_points, coding_tasks, ladder, tensors_like
from farflung.timing.probes import MessageCosts, forward_flops, message_costs, peak_nbytes
from farflung.timing.recording import RecordedReplica, TrafficRecorder
from farflung.timing.retime import Retimed, retimed_events
from farflung.timing.sharing import Sharing, company
from farflung.timing.traffic import Traffic
from farflung.timing.transfers import Costs, Move, Timeline, timeline

__all__ = [
    "Calibration",
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
    "forward_flops",
    "ladder",
    "message_costs",
    "peak_nbytes",
    "retimed_events",
    "tensors_like",
    "timeline",
]
