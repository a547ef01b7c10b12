"""What a run takes on another network, without its arithmetic."""

from farflung.timing.recording import RecordedReplica, TrafficRecorder
from farflung.timing.retime import Retimed, retimed_events
from farflung.timing.traffic import Traffic

__all__ = ["RecordedReplica", "Retimed", "Traffic", "TrafficRecorder", "retimed_events"]
