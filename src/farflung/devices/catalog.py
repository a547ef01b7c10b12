"""Catalog of devices, and their TOML format; the documentation's page on networks and devices lists all keys.

.. code-block:: toml

    name = "field camera"
    forward_s = 0.004              # per sample; or flops_per_s, together with the model's forward_flops
    backward_s = 0.009             # optional: twice forward_s
    memory_nbytes = 4_000_000_000  # optional
    cores = 2                      # optional: processors that a replica has for itself

    [[layer]]                      # in forward order, in place of forward_s and backward_s
    numel = 16640
    forward_s = 0.001
    backward_s = 0.002

    [[coding]]                     # times of a codec or reducer
    operation = "encode"           # in the notation of farflung calibrate
    method = "topk(density=0.1)"   # in recipe syntax; absent for plain sums
    numel = [1024, 65536]          # elements of the dense tensor, ascending
    seconds = [0.00002, 0.0009]    # for each size

    [[occasional]]                 # each step is slow with some probability
    probability = 0.05
    factor = 4
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import zip_longest
from pathlib import Path

from farflung.devices.profile import CodingRates, DeviceProfile, LayerProfile, Points
from farflung.devices.stragglers import OccasionalStraggler, ScheduledStraggler, VaryingStraggler
from farflung.errors import ConfigError, UnknownName
from farflung.files import format_toml_comment, format_toml_text, prefix_errors
from farflung.options import require
from farflung.tables import Table, load_table

__all__ = ["DEVICES", "DeviceSpec", "describe_coding_rates", "find_device", "format_device", "load_device"]

SUSTAINED_FRACTION = 0.3
"""Share of the peak that training reaches: our choice."""
REFERENCE_PATH = Path(__file__).with_name("reference.toml")
"""Machine whose coding and training were measured; the figures of named devices are scaled from it."""
DEFAULT_CORES = 1.0
"""Cores of a named device, known by a single rate: it does not compute while it codes."""
_MESSAGE_KEYS = ("message_s", "copy_s_per_byte", "encrypt_s_per_byte")


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """Figures of a data sheet.

    Args:
      peak_flops: float32 operations per second.
      memory_nbytes: Bytes of memory.
      source: Source of the figures.
    """

    peak_flops: float
    memory_nbytes: int
    source: str


DEVICES: dict[str, DeviceSpec] = {
    "raspberry-pi-4": DeviceSpec(
        48e9,
        4 << 30,
        "Four Cortex-A72 at 1.5 GHz, 8 operations a cycle; 4 GiB version. DGA's Pi is not named.",
    ),
    "jetson-tx1": DeviceSpec(
        511e9, 4 << 30, "256 cores at 0.998 GHz, 2 operations a cycle. Mercury's device."
    ),
    "k80": DeviceSpec(4.37e12, 12 << 30, "One of the card's two GPUs, at boost clock. ScaDLES's device."),
    "titan-x-pascal": DeviceSpec(
        10.97e12, 12 << 30, "3,584 cores at 1.53 GHz, 2 operations a cycle. Pipe-SGD's device."
    ),
    "v100": DeviceSpec(15.7e12, 16 << 30, "SXM2, as in p3.16xlarge. The device of delayed updates."),
    "cpu-core": DeviceSpec(48e9, 4 << 30, "Our choice: 3 GHz, 16 operations a cycle."),
}
"""Devices by name, with the peaks of their data sheets; :func:`find_device` assumes a fraction of them."""


def find_device(name: str, *, forward_flops: float | None = None) -> DeviceProfile:
    """Finds a device by its name in :data:`DEVICES`, or loads it from a TOML file if ``name`` ends in ``.toml``.

    Args:
      name: Name of the device or file.
      forward_flops: float32 operations of the model's forward pass, per sample; a multiplication and an addition
        are two. Required for devices known by their operations per second.

    Raises:
      UnknownName: There is no such name.
      ConfigError: The file is wrong, or ``forward_flops`` is missing.
    """
    if name.endswith(".toml"):
        return load_device(Path(name), forward_flops=forward_flops)
    if name not in DEVICES:
        raise UnknownName("device", name, DEVICES, "a file ending in .toml")
    device, reference = DEVICES[name], _load_reference().coding
    assert reference is not None
    times = _compute_time_ratio(device)
    return DeviceProfile(
        name,
        _compute_forward_s(name, SUSTAINED_FRACTION * device.peak_flops, forward_flops),
        memory_nbytes=device.memory_nbytes,
        source=f"{device.source} {SUSTAINED_FRACTION:.0%} of the peak: our choice. {describe_coding_rates(device)}",
        coding=reference.scale(times, max(1.0, times)),
        cores=DEFAULT_CORES,
    )


def describe_coding_rates(device: DeviceSpec) -> str:
    """Describes how a device's coding rates were scaled from those of the measured reference device."""
    name, times = _load_reference().name, _compute_time_ratio(device)
    return (
        f"Coding takes {times:.3g} times what was measured on {name}, as training does, and nothing else is computed "
        "meanwhile; messages take as long as there, or longer where the device is slower: our choice."
    )


@cache
def _load_reference() -> DeviceProfile:
    """Loads the reference machine; its forward pass is one operation."""
    return load_device(REFERENCE_PATH, forward_flops=1.0)


def _compute_time_ratio(device: DeviceSpec) -> float:
    """Computes the time of arithmetic over that of the reference machine."""
    return 1 / (SUSTAINED_FRACTION * device.peak_flops * _load_reference().forward_s)


def load_device(path: Path, *, forward_flops: float | None = None) -> DeviceProfile:
    """Loads a device from TOML; the format is at the top of this module.

    Raises:
      ConfigError: The file is absent, no TOML, or has a wrong value; one line with file and key.
    """
    top = load_table(path)
    layers = tuple(table.build(LayerProfile) for table in top.read_tables("layer"))
    if "flops_per_s" in top:
        forward_s = _compute_forward_s(str(path), top.read_number("flops_per_s"), forward_flops)
    else:
        forward_s = top.read_number("forward_s", 0.0 if layers else None)
    rates = top.read_fields(CodingRates, operations=_parse_operations(top.read_tables("coding")))
    with prefix_errors(path):
        coding = CodingRates(**rates) if rates["operations"] or len(rates) > 1 else None
    stragglers = {
        "occasional": OccasionalStraggler,
        "varying": VaryingStraggler,
        "scheduled": ScheduledStraggler,
    }
    return top.build(
        DeviceProfile,
        name=top.read_text("name", path.stem),
        forward_s=forward_s,
        layers=layers,
        stragglers=tuple(
            table.build(kind) for key, kind in stragglers.items() for table in top.read_tables(key)
        ),
        source=str(path),
        coding=coding,
    )


def format_device(
    device: DeviceProfile, layer_names: Sequence[str] = (), comments: Sequence[str] = ()
) -> str:
    """Formats a device as TOML for :func:`load_device`, without stragglers.

    Args:
      device: Device to format.
      layer_names: Names of its layers, for comments.
      comments: Lines of comments at the top.
    """
    lines = [*map(format_toml_comment, comments), f"name = {format_toml_text(device.name)}"]
    if not device.layers:
        lines += [f"forward_s = {device.forward_s!r}", f"backward_s = {device.backward_per_sample_s!r}"]
    lines += [f"{key} = {getattr(device, key)!r}" for key in ("optimizer_s", "step_s", "slowdown")]
    if device.memory_nbytes is not None:
        lines.append(f"memory_nbytes = {device.memory_nbytes}")
    lines.append(f"cores = {device.cores!r}")
    coding = device.coding or CodingRates()
    if device.coding is not None:
        lines += [f"{key} = {getattr(coding, key)!r}" for key in _MESSAGE_KEYS]
    for layer, name in zip_longest(device.layers, layer_names):
        lines += [
            "",
            "[[layer]]" + (f"  # {name}" if name else ""),
            f"numel = {layer.numel}",
            f"forward_s = {layer.forward_s!r}",
            f"backward_s = {layer.backward_s!r}",
        ]
    for (operation, method), points in sorted(coding.operations.items()):
        lines += [
            "",
            "[[coding]]",
            f"operation = {format_toml_text(operation)}",
            *([f"method = {format_toml_text(method)}"] if method else []),
            f"numel = {[numel for numel, _ in points]}",
            f"seconds = {[seconds for _, seconds in points]}",
        ]
    return "\n".join(lines) + "\n"


def _parse_operations(tables: Sequence[Table]) -> dict[tuple[str, str], Points]:
    operations: dict[tuple[str, str], Points] = {}
    for table in tables:
        key = table.read_text("operation"), table.read_text("method", "")
        sizes, seconds = table.read_integers("numel"), table.read_numbers("seconds")
        if len(sizes) != len(seconds):
            raise ConfigError(
                f"{table.location}: numel has {len(sizes)} entries and seconds {len(seconds)}: give each size one time"
            )
        if key in operations:
            raise ConfigError(
                f"{table.location}: operation {key[0]!r} of method {key[1]!r} is there already: leave out one"
            )
        operations |= table.build_with(
            partial(CodingRates, {key: tuple(zip(sizes, seconds, strict=True))})
        ).operations
    return operations


def _compute_forward_s(source: str, flops_per_s: float, forward_flops: float | None) -> float:
    require(0 < flops_per_s < math.inf, f"{source}: flops_per_s", flops_per_s, "above 0")
    if forward_flops is None:
        raise ConfigError(f"{source}: known by its operations per second: give the model's forward_flops too")
    return forward_flops / flops_per_s
