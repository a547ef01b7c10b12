"""What pairs of replicas have sent: a row for each, whatever the world."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from farflung.cli.main import main
from farflung.errors import DataError
from farflung.faults import FaultPlan
from farflung.report import TrafficByKind, read_traffic, render_traffic_table
from farflung.runs import simulate
from farflung.telemetry import Event

SENT: TrafficByKind = {"gradients": {0: [0, 5000, 0], 2: [7, 0, 0]}, "evaluation": {0: [0, 8, 0]}}


def shown(sent: TrafficByKind) -> list[list[str]]:
    to = Console(file=StringIO(), width=120)
    to.print(render_traffic_table(sent, title="of a run"))
    assert isinstance(to.file, StringIO)
    lines = to.file.getvalue().translate(str.maketrans("│┃", "  ")).splitlines()
    return [line.split() for line in lines if any(letter.isalnum() for letter in line)]


def end(sent: object) -> Event:
    return {"event": "end", "rank": 0, "bytes_sent_to": sent}  # type: ignore[dict-item]


def test_a_section_for_each_kind_and_a_row_for_each_pair() -> None:
    assert shown(SENT) == [
        ["of", "a", "run"],
        ["kind", "from", "→", "to", "bytes"],
        ["gradients", "all", "5,007"],
        ["0", "→", "1", "5,000"],
        ["2", "→", "0", "7"],
        ["evaluation", "all", "8"],
        ["0", "→", "1", "8"],
        ["all", "kinds", "all", "5,015"],
    ]


def test_nothing_sent_is_a_sum_of_zero() -> None:
    assert shown({}) == [
        ["of", "a", "run"],
        ["kind", "from", "→", "to", "bytes"],
        ["all", "kinds", "all", "0"],
    ]


def test_the_last_end_of_a_resumed_run_counts_and_kinds_keep_one_order() -> None:
    events = {
        1: [end({"gradients": [1, 0]}), end({"own": [3, 0], "evaluation": [4, 0], "gradients": [2, 0]})]
    }
    found = read_traffic(events)
    assert list(found) == ["gradients", "evaluation", "own"]
    assert found["gradients"] == {1: [2, 0]}


@pytest.mark.parametrize(
    ("events", "says"),
    [
        ({}, "has no telemetry events"),
        ({0: [], 1: []}, "rank 0 has not reached the end"),
        ({0: [{"event": "end", "rank": 0}]}, "is damaged"),
        ({0: [end([1])]}, "is damaged"),
        ({0: [end({"gradients": 3})]}, "is damaged"),
        ({0: [end({"gradients": [3, "4"]})]}, "is damaged"),
        ({0: [end({"gradients": [3, True]})]}, "is damaged"),
        ({0: [end({"gradients": [3, -1]})]}, "is damaged"),
    ],
)
def test_what_is_not_there_is_said(events: dict[int, list[Event]], says: str) -> None:
    with pytest.raises(DataError, match=says):
        read_traffic(events)


def test_the_command_shows_what_the_run_has_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = simulate("synthetic/quadratic", "parameter_server", workers=3, steps=3, out=tmp_path / "run")
    assert main(["traffic", str(run.folder), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == json.loads(json.dumps(run.sent_nbytes_by_purpose))
    assert told["gradients"]["1"][1:] == [0, 0]
    assert sum(told["gradients"]["0"]) == run.summary["bytes_sent_per_replica"]
    assert main(["traffic", str(run.folder)]) == 0
    out = capsys.readouterr().out
    for src, to in run.sent_nbytes_by_purpose["gradients"].items():
        assert all(f"{src} → {dst}" in out for dst, count in enumerate(to) if count)


def test_lost_replicas_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings: dict[str, Any] = {"workers": 3, "steps": 6, "elastic": "1", "out": tmp_path / "run"}
    run = simulate("synthetic/quadratic", faults=FaultPlan().crash(0, at_step=2), **settings)
    assert {*run.sent_nbytes_by_purpose["gradients"]} == {1, 2}
    assert main(["traffic", str(run.folder), "--json"]) == 0
    assert {*json.loads(capsys.readouterr().out)["gradients"]} == {"1", "2"}


def test_one_replica_has_sent_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = simulate("synthetic/quadratic", workers=1, steps=2, out=tmp_path / "run")
    assert run.sent_nbytes_by_purpose == {}
    assert main(["traffic", str(run.folder)]) == 0
    assert "→ 0" not in capsys.readouterr().out


def test_a_folder_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["traffic", str(tmp_path)]) == 2
    assert "no run there" in capsys.readouterr().err
