"""``python -OO``, which leaves out docstrings and assertions, runs the commands as they are run otherwise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from farflung.cli.main import main

SMALL = ["--workload", "synthetic/quadratic", "--steps", "2", "--workers", "2", "--quiet"]
COMMANDS = [
    ["list", "codecs", "--json"],
    ["simulate", *SMALL, "--out", "simulated", "--json"],
    ["train", *SMALL, "--out", "trained"],
]
PROGRAM = f"from farflung.cli.main import main; print([main(one) for one in {COMMANDS}])"


def optimized(folder: Path, *said: str) -> str:
    """Returns what a Python says that leaves out docstrings."""
    told = {**os.environ, "PYTHONOPTIMIZE": "2"}
    done = subprocess.run(
        [sys.executable, *said], cwd=folder, env=told, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.thorough
def test_commands_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = optimized(tmp_path, "-c", PROGRAM)
    assert said.endswith("[0, 0, 0]\n")
    assert main(COMMANDS[0]) == 0
    assert said.startswith(capsys.readouterr().out), "other words about codecs"


def test_options_are_explained(tmp_path: Path) -> None:
    said = " ".join(optimized(tmp_path, "-m", "farflung", "train", "--help").replace("│", " ").split())
    assert "Size in bytes at which a gradient bucket is closed" in said
