"""Measurement of a workload on this machine, as a device profile for virtual time."""

from typing import TYPE_CHECKING

from farflung.lazy import lazy

if TYPE_CHECKING:
    from farflung.calibration.coding import CodingTask, coding_points, coding_tasks, ladder, tensors_like
    from farflung.calibration.device import Calibration, Spread, calibrate
    from farflung.calibration.probes import MessageCosts, forward_flops, message_costs, peak_nbytes
    from farflung.calibration.sharing import Sharing, company
else:
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "coding": "CodingTask coding_points coding_tasks ladder tensors_like",
            "device": "Calibration Spread calibrate",
            "probes": "MessageCosts forward_flops message_costs peak_nbytes",
            "sharing": "Sharing company",
        },
    )

__all__ = [
    "Calibration",
    "CodingTask",
    "MessageCosts",
    "Sharing",
    "Spread",
    "calibrate",
    "coding_points",
    "coding_tasks",
    "company",
    "forward_flops",
    "ladder",
    "message_costs",
    "peak_nbytes",
    "tensors_like",
]
