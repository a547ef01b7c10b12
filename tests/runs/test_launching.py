"""What the process that starts workers does while they start."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from farflung.runs import launching, prepare_training


class Interrupted(subprocess.Popen[bytes]):
    """Workers that take forever to start; whoever asks how they are is interrupted."""

    def __init__(self, command: list[str], **options: Any) -> None:
        del command
        super().__init__([sys.executable, "-S", "-c", "import signal; signal.pause()"], **options)

    def poll(self) -> int | None:
        if self.returncode is None:
            signal.raise_signal(signal.SIGINT)
        return super().poll()


def test_an_interrupt_while_workers_start_waits_for_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "STOP_S", float("inf"))
    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    run = prepare_training({"workload": "synthetic/quadratic", "workers": 2}, out=tmp_path / "run")
    with run.begun(), pytest.raises(KeyboardInterrupt):
        launching.launch(run, lambda event: None)
