"""``farflung calibrate``: measures a workload on this machine, for simulations of similar machines."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Annotated

import torch
import tyro

from farflung.calibration import Calibration, ProcessorLoad, build_coding_tasks, calibrate
from farflung.cli.output import create_stderr_console, print_json
from farflung.cli.progress import Bar
from farflung.config import Training
from farflung.devices import CodingRates, format_device
from farflung.errors import ConfigError
from farflung.files import path_exists, write_text
from farflung.types import Json
from farflung.workloads import create_workload

__all__ = ["Calibrate"]


@dataclass(frozen=True)
class Calibrate:
    """Measure a workload on this machine; write the profile with --out.

    Times the forward pass, the backward pass and the optimizer, as a whole and layer by layer, the computations
    of codecs and reducers, and messages. Predicts and measures the memory of a step. The profile is TOML, for
    farflung simulate --device FILE.
    """

    workload: str = "fashion-mnist/cnn"
    """Workload to measure; see farflung list workloads."""
    data: str | None = None
    """Source of the data: auto, packaged or full, for workloads that offer the choice."""
    batch_size: int | None = None
    """Samples in a step; the workload's own number when not given."""
    optimizer: str | None = None
    """Optimizer, for example adamw or "sgd(nesterov=True)"; the workload's own when not given."""
    rounds: int = 30
    """Steps to time; medians are kept."""
    threads: int = 1
    """Threads of torch; the workers of farflung train have one each."""
    codecs: tuple[str, ...] | None = None
    """Codecs to time, as in recipes, for example "topk(density=0.1)"; by default all codecs and reducers."""
    reducers: tuple[str, ...] | None = None
    """Reducers to time, for example "powersgd(rank=4)"."""
    replicas: int = 1
    """Number of replicas that share this machine; the others compute while one is measured."""
    name: str | None = None
    """Name of the device; this machine's name when not given."""
    out: Path | None = None
    """Write the profile to this file; print it when not given."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print the measurement as JSON."""

    def run(self) -> int:
        sharing = ProcessorLoad(self.replicas, self.threads)
        if self.out is not None and path_exists(self.out):
            raise ConfigError(f"--out {self.out}: the file exists; choose another name or remove it")
        if self.out is not None and not path_exists(self.out.parent, is_folder=True):
            raise ConfigError(f"--out {self.out}: there is no folder {self.out.parent}")
        work = create_workload(self.workload, **({} if self.data in (None, "auto") else {"data": self.data}))
        training = Training.resolve(
            work.defaults, {"batch_size": self.batch_size, "optimizer": self.optimizer}
        )
        coding = build_coding_tasks(self.codecs, self.reducers)
        threads = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            with Bar("measuring", len(coding) + 2, thread=False) as bar:
                bar.print_line(f"measures {bar.total} things, one after the other")
                position = count()

                def show_name(name: str) -> None:
                    bar.detail = name
                    bar.advance(next(position))

                result = calibrate(
                    work,
                    training,
                    rounds=self.rounds,
                    name=self.name or platform.node() or "device",
                    coding=coding,
                    load=sharing,
                    on_begin=show_name,
                )
        finally:
            torch.set_num_threads(threads)
        quartiles = (
            f"{name} {spread.low:.3g} to {spread.high:.3g}"
            for name, spread in {"forward": result.forward_s, "backward": result.backward_s}.items()
        )
        company = f", one of {self.replicas} replicas at once" if self.replicas > 1 else ""
        notes = [
            f"{self.workload}, batches of {result.batch_size}, on {platform.processor() or platform.machine()}, "
            f"{self.threads} of {os.cpu_count()} cores, torch {torch.__version__}{company}",
            f"medians of {result.rounds} steps; quartiles, in seconds per sample: {', '.join(quartiles)}",
            f"memory of a step, in bytes: {result.predicted_nbytes} predicted, {result.measured_nbytes} measured",
        ]
        text = format_device(result.device, result.names, notes)
        if self.out is not None:
            write_text(self.out, text)
            create_stderr_console().print(f"profile  {self.out}", soft_wrap=True, markup=False)
        if self.json:
            print_json(self._to_json(result))
        elif self.out is None:
            print(text, end="")
        return 0

    def _to_json(self, result: Calibration) -> dict[str, Json]:
        rates = result.device.coding or CodingRates()
        return {
            "workload": self.workload,
            "batch_size": result.batch_size,
            "rounds": result.rounds,
            "threads": self.threads,
            "replicas": self.replicas,
            "cores": result.device.cores,
            "forward_s": list(result.forward_s),
            "backward_s": list(result.backward_s),
            "optimizer_s": list(result.optimizer_s),
            "step_s": result.device.step_s,
            "predicted_nbytes": result.predicted_nbytes,
            "measured_nbytes": result.measured_nbytes,
            "layers": [
                {"name": name, "numel": x.numel, "forward_s": x.forward_s, "backward_s": x.backward_s}
                for name, x in zip(result.names, result.device.layers, strict=True)
            ],
            "message_s": rates.message_s,
            "copy_s_per_byte": rates.copy_s_per_byte,
            "encrypt_s_per_byte": rates.encrypt_s_per_byte,
            "coding": [
                {
                    "operation": operation,
                    "method": method,
                    "numel": [numel for numel, _ in points],
                    "seconds": [seconds for _, seconds in points],
                }
                for (operation, method), points in sorted(rates.operations.items())
            ],
        }
