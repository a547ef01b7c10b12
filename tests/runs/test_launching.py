"""What the process that starts workers does while they start."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from farflung.comm import ZmqCommunicator
from farflung.runs import launching, prepare_training, train
from farflung.runs.parent import Parent


def sleeper() -> Parent:
    """Workers that take forever to start."""
    command = [sys.executable, "-S", "-c", "import signal; signal.pause()"]
    job = subprocess.Popen(command, start_new_session=True)
    return Parent(job.pid, os.open(os.devnull, os.O_WRONLY), job.poll, job.wait)


def test_an_interrupt_while_workers_start_waits_for_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = sleeper()

    def asked() -> int | None:
        if parent.poll() is None:
            signal.raise_signal(signal.SIGINT)
        return parent.poll()

    monkeypatch.setattr(launching, "STOP_S", float("inf"))
    monkeypatch.setattr(launching, "parent_of", lambda log: replace(parent, poll=asked))
    run = prepare_training({"workload": "synthetic/quadratic", "workers": 2}, out=tmp_path / "run")
    with run.begun(), pytest.raises(KeyboardInterrupt):
        launching.launch(run, lambda event: None)
    assert parent.poll() == -signal.SIGKILL


def test_what_all_workers_have_refused_is_in_the_summary(tmp_path: Path) -> None:
    run = prepare_training({"workload": "synthetic/quadratic", "workers": 2}, out=tmp_path / "run")
    parent = sleeper()
    with run.begun(), socket.socket() as events:
        watch = launching._Watch(parent, 2, events, lambda event: None, run.files)
        for event in (
            {"event": "refused", "rank": 1, "t": 1.0, "messages": 0, "connections": 5},
            {"event": "end", "rank": 0, "t": 1.0, "steps": 3},
            {"event": "refused", "rank": 0, "t": 1.0, "messages": 2, "connections": 1},
        ):
            watch._hear(json.dumps(event).encode())
        summary = watch._outcome()
    parent.end()
    assert summary == {"steps": 3, "refused": {"messages": 2, "connections": 6}}
    assert json.loads(run.files.summary.read_text(encoding="utf-8")) == summary


def test_a_replica_tells_what_it_has_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = {"messages": 0, "connections": 1234}
    monkeypatch.setattr(ZmqCommunicator, "refusals", refused)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    ended = train("synthetic/quadratic", steps=2, out=tmp_path / "run")
    assert ended.summary["refused"] == refused
    (told,) = (event for event in ended.events[0] if event["event"] == "refused")
    assert told == {"event": "refused", "rank": 0, "t": told["t"], **refused}
    assert "1,234 connections" in str(ended)
    assert "messages" not in str(ended)
