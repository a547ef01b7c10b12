"""What a workload takes on this machine: seconds, operations and memory, for profiles of devices."""

from farflung.timing.calibrate import Calibration, Spread, calibrate
from farflung.timing.flops import forward_flops
from farflung.timing.peak_memory import peak_nbytes

__all__ = ["Calibration", "Spread", "calibrate", "forward_flops", "peak_nbytes"]
