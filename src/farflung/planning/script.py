"""A loop of one's own as a workload to plan: the script runs as it is, alone, and its steps are recorded."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from farflung.data import TensorDataset
from farflung.devices import DeviceProfile, LayerProfile, find_device
from farflung.errors import ConfigError, DataError
from farflung.files import parse_json, read_text, wrap_read_errors
from farflung.loop_recorder import RECIPE_VARIABLE, RECORD_VARIABLE, STEPS_VARIABLE
from farflung.types import Batch, Dataset, Json

__all__ = ["RecordedLoop", "record_script"]

RECORDED_STEPS, DEADLINE_S = 10, 600.0
"""Number of steps that are recorded, and seconds in which they must end."""


class RecordedLoop:
    """Workload with the parameters of a recorded loop, one sample a step; it has no loss and is only timed.

    Args:
      name: Name of the script.
      record: Content of the recorder's file.
    """

    defaults: ClassVar[Mapping[str, Json]] = {"batch_size": 1, "learning_rate": 0.1, "steps": 1000}

    def __init__(self, name: str, record: Mapping[str, Any]) -> None:
        self.name, self._parameters = f"script/{name}", record["parameters"]
        layers = [
            LayerProfile(torch.Size(parameter["shape"]).numel(), 0.0, parameter["backward_s"])
            for parameter in self._parameters
        ]
        coding = find_device("cpu-core", forward_flops=1.0).coding
        self.device = DeviceProfile(
            f"this machine, by {name}", layers=tuple(layers), step_s=record["step_s"], coding=coding
        )

    def build_model(self, generator: torch.Generator) -> nn.Module:
        """Builds parameters of the recorded shapes and types."""
        return nn.ParameterList(
            nn.Parameter(torch.randn(p["shape"], generator=generator).to(getattr(torch, p["dtype"])))
            for p in self._parameters
        )

    def compute_losses(self, model: nn.Module, batch: Batch) -> Tensor:
        raise NotImplementedError

    def compute_metrics(self, model: nn.Module, batch: Batch) -> Tensor:
        raise NotImplementedError

    def load_datasets(self) -> tuple[Dataset, Dataset]:
        data = TensorDataset(torch.zeros(1024, 1), torch.zeros(1024, dtype=torch.int64))
        return data, data


def record_script(command: Sequence[str]) -> RecordedLoop:
    """Runs a script with :func:`farflung.attach` alone on this machine until its steps are recorded.

    Args:
      command: Script of Python with its arguments.

    Raises:
      ConfigError: The loop cannot be recorded; names the reason.
    """
    name = Path(command[0]).name
    if not Path(command[0]).is_file():
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
            RECIPE_VARIABLE: "synchronous",
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
            return RecordedLoop(name, record)
