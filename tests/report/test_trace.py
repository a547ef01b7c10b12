"""A run as a trace of Chrome's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import farflung
from farflung.cli.main import main
from farflung.report import build_chrome_trace

QUICK: dict[str, Any] = {"workers": 2, "steps": 6, "network": "wifi-10mbps", "evaluate_every": 3}


def test_steps_and_their_parts_lie_where_telemetry_has_them(tmp_path: Path) -> None:
    run = farflung.simulate("synthetic/quadratic", "dga", out=tmp_path / "run", trace=True, **QUICK)
    assert main(["trace", str(tmp_path / "run")]) == 0
    told = json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]
    assert {one["pid"] for one in told} == {0, 1}
    for rank, events in run.events.items():
        slices = [one for one in told if one["ph"] == "X" and one["pid"] == rank]
        for event in events:
            if event["event"] != "step":
                continue
            found: dict[str, Any] = dict(event)
            (step,) = [one for one in slices if one["name"] == f"step {found['step']}"]
            assert step["ts"] + step["dur"] == pytest.approx(found["t"] * 1e6, abs=0.01)
            inside = [
                one
                for one in slices
                if one["tid"] == 0
                and one["name"] in ("compute", "wait for data", "wait for exchange")
                and step["ts"] <= one["ts"]
                and one["ts"] + one["dur"] <= step["ts"] + step["dur"] + 0.01
            ]
            parts = found["compute_s"] + found["exposed_s"] + found["data_s"]
            assert sum(one["dur"] for one in inside) >= parts * 1e6 - 0.01
        assert sum(one["name"] == "evaluation" for one in slices) == 2
        exchanges = [one for one in told if one["ph"] == "b" and one["pid"] == rank]
        moved = [event for event in events if event["event"] == "exchange"]
        assert [one["args"]["step"] for one in exchanges] == [event["step"] for event in moved] != []
    assert run.folder == tmp_path / "run"
    retimed = farflung.retime(run.folder, network="lan-1g")
    assert "exchange" not in {event["event"] for event in retimed.events[0]}


def test_real_replicas_tell_of_exchanges_where_that_is_asked_for(tmp_path: Path) -> None:
    run = farflung.train("synthetic/quadratic", out=tmp_path / "run", trace=True, workers=2, steps=3)
    assert sum(event["event"] == "exchange" for event in run.events[1]) == 3


def test_exchanges_views_and_a_resumed_run() -> None:
    step = {
        "event": "step",
        "loss": 1.0,
        "duration_s": 1.0,
        "compute_s": 0.5,
        "exposed_s": 0.25,
        "data_s": 0.25,
    }
    exchange = {"event": "exchange", "bucket": 0, "due_step": 2, "bytes_sent": 8, "began_s": 10.5}
    view = {"event": "view", "view": 1, "members": [0, 2]}
    events: list[Any] = [
        {"event": "hello", "pid": 1},
        {"event": "begin", "t": 10.0, "step": 0},
        {**exchange, "t": 11.5, "step": 0},
        {**step, "t": 12.0, "step": 1},
        {"event": "begin", "t": 3.0, "step": 1},
        {**view, "t": 3.5},
        {**step, "t": 4.0, "step": 2},
    ]
    told: Any = build_chrome_trace({3: events}, title="a run")["traceEvents"]
    assert [(one["ph"], one["ts"]) for one in told if one["ph"] in "be"] == [("b", 0.5e6), ("e", 1.5e6)]
    ends = {
        one["name"]: one["ts"] + one["dur"] for one in told if one["ph"] == "X" and one["name"][:4] == "step"
    }
    assert ends == {"step 1": 2e6, "step 2": 3e6}
    assert [one["ts"] for one in told if one["ph"] == "i"] == [2.5e6]


def test_a_rank_that_has_joined_has_the_clock_of_the_others() -> None:
    parts = {"loss": 1.0, "duration_s": 1.0, "compute_s": 0.5, "exposed_s": 0.25, "data_s": 0.25}
    steps: list[Any] = [{"event": "step", "t": number + 1.0, "step": number, **parts} for number in range(4)]
    events: dict[int, Any] = {
        0: [{"event": "begin", "t": 0.0, "step": 0}, *steps],
        2: [{"event": "begin", "t": 50.0, "step": 2}, {**steps[2], "t": 51.0}, {**steps[3], "t": 52.0}],
    }
    told: Any = build_chrome_trace(events, title="a run")["traceEvents"]
    ends = [
        (one["pid"], one["name"], one["ts"] + one["dur"])
        for one in told
        if one["ph"] == "X" and one["name"] in ("step 2", "step 3")
    ]
    assert ends == [(0, "step 2", 3e6), (0, "step 3", 4e6), (2, "step 2", 3e6), (2, "step 3", 4e6)]


def test_no_run_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err
