"""A loop of one's own as a workload to plan: the script runs as it is, alone, and its steps are recorded."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from farflung.devices import DeviceProfile, LayerProfile, find_device
from farflung.errors import ConfigError, DataError
from farflung.files import parse_json, read_text, wrap_read_errors
from farflung.loop_recorder import RECIPE_VARIABLE, RECORD_VARIABLE, STEPS_VARIABLE
from farflung.sim import LightWorkload

__all__ = ["RecordedLoop", "record_script"]

RECORDED_STEPS, DEADLINE_S = 10, 600.0
"""Number of steps that are recorded, and seconds in which they must end."""


class RecordedLoop(NamedTuple):
    """Loop of a script, as a workload that is only timed, one sample a step, and the device that it ran on."""

    workload: LightWorkload
    device: DeviceProfile


def record_script(command: Sequence[str], recipe: str) -> RecordedLoop:
    """Runs a script with :func:`farflung.attach` alone on this machine until its steps are recorded.

    Args:
      command: Script of Python with its arguments.
      recipe: Recipe in place of the script's own.

    Raises:
      ConfigError: The loop cannot be recorded; names the reason.
    """
    name = Path(command[0]).name
    with wrap_read_errors(command[0], "not a path"):
        is_script = Path(command[0]).is_file()
    if not is_script:
        raise ConfigError(f"{command[0]}: there is no such script")
    with tempfile.TemporaryDirectory(prefix="farflung-plan-") as folder:
        path = Path(folder) / "loop.json"
        environment = {
            name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")
        }
        environment |= {
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            RECORD_VARIABLE: str(path),
            STEPS_VARIABLE: str(RECORDED_STEPS),
            RECIPE_VARIABLE: recipe,
        }
        try:
            ended = subprocess.run(
                [sys.executable, *command],
                env=environment,
                capture_output=True,
                text=True,
                timeout=DEADLINE_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ConfigError(f"{name}: no {RECORDED_STEPS} steps in {DEADLINE_S:.0f} s") from None
        if ended.returncode:
            last_line = (ended.stderr.strip().splitlines() or ["no message"])[-1]
            raise ConfigError(
                f"{name}: ended with exit code {ended.returncode} before its steps were recorded: {last_line}"
            )
        if not path.exists():
            raise ConfigError(
                f"{name}: ended without {RECORDED_STEPS} steps under farflung.attach: let it run longer, or give the "
                "model as --workload"
            )
        with wrap_read_errors(path, "not a recorded loop", DataError):
            record: Any = parse_json(read_text(path))
            return _build_loop(name, record)


def _build_loop(name: str, record: Mapping[str, Any]) -> RecordedLoop:
    """Builds the loop from the content of the recorder's file."""
    parameters = record["parameters"]

    def build_model(generator: torch.Generator) -> nn.Module:
        return nn.ParameterList(
            torch.randn(parameter["shape"], generator=generator).to(getattr(torch, parameter["dtype"]))
            for parameter in parameters
        )

    layers = [LayerProfile(math.prod(p["shape"]), 0.0, p["backward_s"]) for p in parameters]
    coding = find_device("cpu-core", forward_flops=1.0).coding
    device = DeviceProfile(
        f"this machine, by {name}", layers=tuple(layers), step_s=record["step_s"], coding=coding
    )
    return RecordedLoop(LightWorkload(name, build_model), device)
