"""Names of 0.1, which are in ``farflung.calibration`` and ``farflung.sim`` now; until 0.3."""

from farflung.lazy import lazy

__getattr__, __dir__ = lazy(
    __name__,
    moved={
        "Calibration": "farflung.calibration.Calibration",
        "CodingTask": "farflung.calibration.CodingTask",
        "Costs": "farflung.sim.Costs",
        "MessageCosts": "farflung.calibration.MessageCosts",
        "Move": "farflung.sim.Move",
        "RecordedReplica": "farflung.sim.RecordedReplica",
        "Retimed": "farflung.sim.Retimed",
        "Sharing": "farflung.calibration.Sharing",
        "Spread": "farflung.calibration.Spread",
        "Timeline": "farflung.sim.Timeline",
        "Traffic": "farflung.sim.Traffic",
        "TrafficRecorder": "farflung.sim.TrafficRecorder",
        "calibrate": "farflung.calibration.calibrate",
        "coding_points": "farflung.calibration.coding_points",
        "coding_tasks": "farflung.calibration.coding_tasks",
        "company": "farflung.calibration.company",
        "forward_flops": "farflung.calibration.forward_flops",
        "ladder": "farflung.calibration.ladder",
        "message_costs": "farflung.calibration.message_costs",
        "peak_nbytes": "farflung.calibration.peak_nbytes",
        "retimed_events": "farflung.sim.retimed_events",
        "tensors_like": "farflung.calibration.tensors_like",
        "timeline": "farflung.sim.timeline",
    },
)
