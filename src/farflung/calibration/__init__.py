"""Measurement of a workload on this machine, as a device profile for virtual time."""

from typing import TYPE_CHECKING

from farflung.lazy import build_lazy_attributes

if TYPE_CHECKING:
    from farflung.calibration.coding import (
        CodingTask,
        build_coding_tasks,
        build_ladder,
        measure_coding,
        select_specs,
    )
    from farflung.calibration.device import Calibration, Spread, calibrate, measure_step_nbytes
    from farflung.calibration.probes import (
        MessageCosts,
        count_forward_flops,
        measure_message_cpu_costs,
        measure_peak_nbytes,
    )
    from farflung.calibration.processor_load import ProcessorLoad, run_neighbour_processes
else:
    __getattr__, __dir__ = build_lazy_attributes(
        __name__,
        {
            "coding": "CodingTask measure_coding build_coding_tasks build_ladder select_specs",
            "device": "Calibration Spread calibrate measure_step_nbytes",
            "probes": "MessageCosts count_forward_flops measure_message_cpu_costs measure_peak_nbytes",
            "processor_load": "ProcessorLoad run_neighbour_processes",
        },
    )

__all__ = [
    "Calibration",
    "CodingTask",
    "MessageCosts",
    "ProcessorLoad",
    "Spread",
    "build_coding_tasks",
    "build_ladder",
    "calibrate",
    "count_forward_flops",
    "measure_coding",
    "measure_message_cpu_costs",
    "measure_peak_nbytes",
    "measure_step_nbytes",
    "run_neighbour_processes",
    "select_specs",
]
