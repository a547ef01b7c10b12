"""Devices: computing times, stragglers, and memory of training."""

from farflung.devices.catalog import DEVICES, describe_coding_rates, find_device, format_device, load_device
from farflung.devices.memory import OPTIMIZER_COPIES, estimate_training_nbytes, measure_saved_nbytes
from farflung.devices.profile import CodingRates, DeviceProfile, LayerProfile, Points
from farflung.devices.stragglers import (
    Moment,
    OccasionalStraggler,
    ScheduledStraggler,
    Straggler,
    VaryingStraggler,
)

__all__ = [
    "DEVICES",
    "OPTIMIZER_COPIES",
    "CodingRates",
    "DeviceProfile",
    "LayerProfile",
    "Moment",
    "OccasionalStraggler",
    "Points",
    "ScheduledStraggler",
    "Straggler",
    "VaryingStraggler",
    "describe_coding_rates",
    "estimate_training_nbytes",
    "find_device",
    "format_device",
    "load_device",
    "measure_saved_nbytes",
]
