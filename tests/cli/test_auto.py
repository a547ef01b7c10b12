"""The collective ``auto`` is the same in both worlds, where both know the network."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from farflung.decisions import read_decisions
from farflung.runs import joining
from tests.forks import ran

NETWORK = "wifi-shared-100mbps"


def summary(folder: Path, command: str, *options: str) -> dict[str, object]:
    """Of a small run on three replicas."""
    size = ["--workers", "3", "--steps", "1", "--batch-size", "8", "--data", "packaged", "--json"]
    workload = ["--workload", "fashion-mnist/cnn", "--checkpoint-every", "0"]
    found: dict[str, object] = json.loads(
        ran(command, *workload, *size, "--out", str(folder / command), *options)
    )
    return found


@pytest.mark.thorough
def test_simulated_and_real_runs_send_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = summary(tmp_path, "simulate", "--network", NETWORK)
    monkeypatch.setenv(joining.NETWORK_VARIABLE, NETWORK)
    real = summary(tmp_path, "train")
    for fact in ("bytes_sent_per_replica", "collective", "final_loss"):
        assert real[fact] == simulated[fact], fact
    assert real["collective"] == "parameter_server"
    decided = [read_decisions(tmp_path / command / "decisions.jsonl") for command in ("simulate", "train")]
    assert decided[0] == decided[1]
    assert [(d.name, d.step, d.timing) for d in decided[0]] == [("collective", 0, False)]


@pytest.mark.thorough
def test_a_real_run_takes_what_a_simulated_one_took(tmp_path: Path) -> None:
    simulated = summary(tmp_path, "simulate", "--network", NETWORK)
    log = str(tmp_path / "simulate" / "decisions.jsonl")
    replayed = summary(tmp_path, "train", "--replay", log)
    assert replayed["collective"] == "parameter_server"
    assert replayed["bytes_sent_per_replica"] == simulated["bytes_sent_per_replica"]
    assert replayed["final_loss"] == simulated["final_loss"]
