"""Devices: computing times, stragglers, and memory of training."""

from farflung.devices.memory import OPTIMIZER_COPIES, saved_nbytes, training_nbytes
from farflung.devices.named import DEVICES, coding_source, device_profile, device_toml, load_device
from farflung.devices.profile import CodingRates, DeviceProfile, Layer, Points
from farflung.devices.stragglers import Moment, Occasional, Scheduled, Straggler, Varying

__all__ = [
    "DEVICES",
    "OPTIMIZER_COPIES",
    "CodingRates",
    "DeviceProfile",
    "Layer",
    "Moment",
    "Occasional",
    "Points",
    "Scheduled",
    "Straggler",
    "Varying",
    "coding_source",
    "device_profile",
    "device_toml",
    "load_device",
    "saved_nbytes",
    "training_nbytes",
]
