"""farflung produce: what it publishes is what a run reads, and what cannot work is said in one line."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from farflung.cli.main import main
from farflung.telemetry import read_events
from tests.forks import farflung, ran

WORK = ("--workload", "synthetic/quadratic")


def test_a_run_reads_what_was_published_to_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    args = [*WORK, "--folder", str(tmp_path / "in"), "--rate", "[2000, 1500]", "--samples", "90", "--json"]
    assert main(["produce", *args, "--partition", "labels(k=5)"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["samples"] == [90, 90]
    assert summary["asked"] == pytest.approx([2000, 1500])
    assert summary["to"] == f"files in {tmp_path / 'in'}"
    assert not summary["stopped"]
    run = tmp_path / "run"
    stream = f"files({str(tmp_path / 'in')!r})"
    ran("train", *WORK, "--stream", stream, "--steps", "10", "--batch-size", "9", "--out", str(run))
    for rank in range(2):
        steps = [
            one for one in read_events(run / "telemetry" / f"rank-{rank}.jsonl") if one["event"] == "step"
        ]
        assert [one["batch"] for one in steps] == [9] * 10
        assert steps[-1]["skipped"] == steps[-1]["dropped"] == 0


def test_a_table_is_for_people(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    args = [*WORK, "--workers", "1", "--folder", str(tmp_path), "--rate", "[(0, 900), (0.05, 50)]"]
    assert main(["produce", *args, "--seconds", "0.1"]) == 0
    out, err = capsys.readouterr()
    assert "samples/s asked for" in out
    assert err == f"publishing from 1 device to files in {tmp_path}\n"


def test_it_goes_on_until_somebody_stops_it(tmp_path: Path) -> None:
    for bound, code in (((), 0), (("--seconds", "900"), 130)):
        folder = tmp_path / f"{code}"
        args = [*WORK, "--workers", "1", "--folder", str(folder), "--rate", "500", "--json"]
        with farflung("produce", *args, *bound, cwd=tmp_path) as process:
            while not (folder / "0000.records").is_file() or not (folder / "0000.records").stat().st_size:
                assert process.wait(0.01) is None
            process.send_signal(signal.SIGINT)
            out, err = process.finished()
        assert process.returncode == code, err
        assert json.loads(out)["stopped"]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ([], "give --servers and --topic for Kafka, or --folder for files"),
        (
            ["--folder", "x", "--servers", "a:1", "--topic", "t"],
            "give --servers and --topic for Kafka, or --folder",
        ),
        (["--servers", "a:1"], "--servers and --topic belong together"),
        (["--folder", "x", "--topic", "t"], "--servers and --topic belong together"),
        (["--folder", "x", "--rate", "S7"], "no such rates; there are S1"),
        (["--folder", "x", "--rate", "0"], "stream rate(0): must be a number of samples per second above 0"),
        (
            ["--folder", "x", "--rate", "-1"],
            "stream rate(-1): must be a number of samples per second above 0",
        ),
        (["--folder", "x", "--rate", "[1, 2, 3]"], "3 rates for 2 replicas"),
        (["--folder", "x", "--rate", "trace absent.csv"], "absent.csv: cannot be read"),
        (["--folder", "x", "--seconds", "0"], "--seconds 0.0: must be a number of seconds above 0"),
        (["--folder", "x", "--samples", "0"], "--samples 0: must be 1 or more"),
        (["--folder", "x", "--partition", "halves"], "unknown partition 'halves'"),
        (["--folder", "x", "--workers", "0"], "--workers 0: must be 1 or more"),
        (["--folder", "/dev/null/x"], "/dev/null/x: cannot be written"),
    ],
)
def test_what_cannot_work_is_refused(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    args: list[str],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["produce", *WORK, "--quiet", *args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("farflung: ")
    assert says in err
    assert len(err.splitlines()) == 1
