"""Real worker processes on the shaped links of a lab."""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.common.runs import step_s
from benchmarks.common.workers import environment
from farflung.lab import Lab, run_job
from farflung.network import NetworkProfile

__all__ = ["in_lab", "paced_step_s"]


def in_lab(
    network: NetworkProfile,
    nodes: int,
    module: str,
    *args: str,
    fair: bool = True,
    congestion_control: str | None = None,
) -> list[list[dict[str, Any]]]:
    """Runs a module at every node; what each printed as JSON objects, one a line, in rank order.

    Raises:
      LabError: this machine has no lab, or its links do not come out right.
      RuntimeError: a worker failed; with the end of what it said.
    """
    with ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(nodes)]
        lab = stack.enter_context(Lab(network, nodes, congestion_control=congestion_control, fair=fair))
        lab.check()
        command = [sys.executable, "-m", module, *args]
        result = run_job(lab, command, environment(), [output.fileno() for output in outputs])
        said = []
        for output in outputs:
            output.seek(0)
            said.append(output.read())
    for rank, code in enumerate(result.exit_codes):
        if code:
            raise RuntimeError(f"{module} of rank {rank} ended with exit code {code}:\n{said[rank][-4000:]}")
    return [[json.loads(line) for line in text.splitlines() if line.startswith("{")] for text in said]


def paced_step_s(
    network: NetworkProfile,
    nodes: int,
    workload: str,
    *options: str,
    batch: int,
    forward_s: float,
    warm_up: int,
    steps: int,
) -> float:
    """What a step takes of ``farflung train`` on packaged data, at the pace of a device.

    Args:
      network: between the nodes.
      nodes: how many replicas.
      workload: its name.
      options: more of the command line.
      batch: samples of each step and replica.
      forward_s: seconds of a forward pass for each sample; a backward pass takes twice that.
      warm_up: steps that do not count.
      steps: those after them that do.
    """
    with tempfile.TemporaryDirectory() as scratch:
        device, run = Path(scratch) / "device.toml", Path(scratch) / "run"
        device.write_text(f'name = "paced"\nforward_s = {forward_s}\n', encoding="utf-8")
        in_lab(
            network, nodes, "farflung", "train", "--workload", workload, "--data", "packaged", *options,
            "--workers", str(nodes), "--steps", str(warm_up + steps), "--batch-size", str(batch),
            "--checkpoint-every", "0", "--evaluate-every", "0", "--pace", str(device), "--quiet", "--out", str(run),
        )  # fmt: skip
        return step_s(run, warm_up)
