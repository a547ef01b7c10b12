"""Real worker processes for benchmarks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["ROOT", "environment", "torchrun"]

ROOT = Path(__file__).resolve().parents[2]


def environment() -> dict[str, str]:
    """Of workers on one thread each that run this checkout's modules and package, whichever is installed."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def torchrun(processes: int, module: str, *args: str, timeout_s: float = 1800) -> list[dict[str, Any]]:
    """Runs a module under torchrun; what its workers printed as JSON objects, one a line.

    Raises:
      RuntimeError: it failed; with the end of what it said.
    """
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes),
        "-m", module, *args,
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, env=environment(), cwd=ROOT, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{module} failed:\n{done.stderr[:4000]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
