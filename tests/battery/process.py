"""The battery's process: its bits are the same on any x86-64, since libraries keep to instructions that all have."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import IO, Any

__all__ = ["PORTABLE", "Battery"]

ROOT = Path(__file__).resolve().parents[2]
PORTABLE = {
    "ATEN_CPU_CAPABILITY": "default",  # torch's own kernels: none of those for AVX2 or AVX512
    "ONEDNN_MAX_CPU_ISA": "SSE41",  # convolutions
    "MKL_CBWR": "COMPATIBLE",  # matrix products
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-AVX,-FMA,-FMA4",  # exp, log and the like
    "OMP_NUM_THREADS": "1",
}
"""What decides between instructions has to be there before the libraries are loaded, so in the environment."""
DEADLINE_S = 290.0
"""An upper bound for a case, on a busy machine."""


class Battery:
    """A process that runs cases, one after the other, with the worker processes that they need."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.battery.process"],
            cwd=ROOT,
            env={**os.environ, **PORTABLE},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def outcome(self, name: str) -> dict[str, Any]:
        """Runs a case; its bits, bytes and virtual times, as ``expected.json`` has them.

        Raises:
          AssertionError: it failed, or did not end before the deadline.
        """
        asked, told = self._process.stdin, self._process.stdout
        assert asked is not None
        assert told is not None
        asked.write(name + "\n")
        asked.flush()
        if not select.select([told], [], [], DEADLINE_S)[0]:
            self._process.kill()
            raise AssertionError(f"{name} did not end within {DEADLINE_S:g} s")
        answer = json.loads(told.readline() or '{"error": "the process of the battery has ended"}')
        assert "error" not in answer, answer["error"]
        found: dict[str, Any] = answer["outcome"]
        return found

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


def main() -> None:
    """Answers each name on standard input with a line of JSON."""
    import torch

    import tests.unsynced  # noqa: F401
    from tests.battery.runs import exact_roots, outcome
    from tests.pool import Pool

    answers: IO[str] = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing that a case prints comes between the answers
    torch.set_num_threads(1)
    exact_roots()
    pool = Pool(4)
    with tempfile.TemporaryDirectory() as scratch:
        for line in sys.stdin:
            name = line.strip()
            try:
                answer: dict[str, Any] = {"outcome": outcome(pool, name, Path(scratch, name))}
            except Exception:
                answer = {"error": traceback.format_exc()}
            print(json.dumps(answer), file=answers, flush=True)
    pool.close()


if __name__ == "__main__":
    main()
