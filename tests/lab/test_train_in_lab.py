"""``farflung lab train``: a whole run on shaped links, its bytes against the interfaces' counters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from farflung.cli.main import main
from farflung.telemetry import read_events

STEPS, BATCH = 6, 16
FORWARD_S = 0.004
HEADERS_NBYTES = 52

pytestmark = [pytest.mark.lab, pytest.mark.thorough]


def test_a_run_in_the_lab(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    device = tmp_path / "device.toml"
    device.write_text(f"forward_s = {FORWARD_S}\n", encoding="utf-8")
    out, report = tmp_path / "run", tmp_path / "report.json"
    network = tmp_path / "network.toml"
    network.write_text(
        '[[site]]\nname = "all"\ninside = { latency_s = 0.01 }\nup_bps = 20e6\ndown_bps = 20e6\n',
        encoding="utf-8",
    )
    code = main(
        [
            *("lab", "--network", str(network), "--nodes", "2", "--report", str(report)),
            *("--logs", str(tmp_path / "logs")),
            *("train", "--workload", "fashion-mnist/cnn", "--data", "packaged", "--steps", str(STEPS)),
            *("--batch-size", str(BATCH), "--evaluate-every", "0", "--pace", str(device)),
            *("--out", str(out), "--json"),
        ]
    )
    assert code == 0, (tmp_path / "logs" / "rank-0.log").read_text()
    assert "2 pairs measured" in capfd.readouterr().err

    events: dict[int, list[Any]] = {
        rank: list(read_events(out / "telemetry" / f"rank-{rank}.jsonl")) for rank in range(2)
    }
    said = 0
    for rank in range(2):
        (end,) = (event for event in events[rank] if event["event"] == "end")
        said += end["bytes_sent_per_replica"]
        (pace,) = (event for event in events[rank] if event["event"] == "pace")
        assert pace["steps"] == STEPS
        begin, *steps = (e["t"] for e in events[rank] if e["event"] in ("begin", "step"))
        # A step computes forward and backward, and waits for two delays.
        assert min(b - a for a, b in zip([begin, *steps], steps, strict=False)) > 3 * BATCH * FORWARD_S + 0.02
    told = json.loads(report.read_text())
    assert None not in told["first_steps_s"], "python -m farflung is known as training"
    counters = told["counters"]
    counted = sum(c["sent_nbytes"] - HEADERS_NBYTES * c["sent_packets"] for c in counters)
    assert counted == pytest.approx(said, rel=0.03)


@pytest.mark.parametrize("program", [["farflung"], ["env", "farflung"]])
def test_a_run_of_more_events_than_a_socket_holds(
    program: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """However training is named, nobody waits for a reader of events that is not there."""
    report = tmp_path / "report.json"
    lab = ["lab", "--network", "wifi-100mbps", "--nodes", "2", "--any-delay", "--report", str(report), "--"]
    train = ["train", "--workload", "fashion-mnist/mlp", "--data", "packaged", "--steps", "40"]
    rest = ["--batch-size", "4", "--evaluate-every", "0", "--out", str(tmp_path / "run")]
    assert main([*lab, *program, *train, *rest]) == 0, capfd.readouterr().err
    assert len(list(read_events(tmp_path / "run" / "telemetry" / "rank-1.jsonl"))) > 40
    heard = json.loads(report.read_text())["first_steps_s"]
    assert all((began is None) == (program[0] == "env") for began in heard)
