"""Real worker processes on the shaped links of a lab."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from contextlib import ExitStack
from typing import Any

from benchmarks.common.workers import ROOT
from farflung.lab import Lab, run_job
from farflung.network import NetworkProfile

__all__ = ["in_lab"]


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
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(nodes)]
        lab = stack.enter_context(Lab(network, nodes, congestion_control=congestion_control, fair=fair))
        lab.check()
        command = [sys.executable, "-m", module, *args]
        result = run_job(lab, command, environment, [output.fileno() for output in outputs])
        said = []
        for output in outputs:
            output.seek(0)
            said.append(output.read())
    for rank, code in enumerate(result.exit_codes):
        if code:
            raise RuntimeError(f"{module} of rank {rank} ended with exit code {code}:\n{said[rank][-4000:]}")
    return [[json.loads(line) for line in text.splitlines() if line.startswith("{")] for text in said]
