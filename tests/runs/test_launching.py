"""What the process that starts workers does while they start."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from farflung.comm import Refusals
from farflung.runs import Run, RunOptions, joining, launching, prepare_training, train, training
from farflung.runs.events import BufferedSink
from farflung.runs.folder import RunFolder
from farflung.runs.launching import WorkerParent
from farflung.telemetry import Event, JsonLinesSink, Telemetry
from tests.covering import thorough

DEADLINE_S = 250


def sleeper() -> WorkerParent:
    """Workers that take forever to start."""
    command = [sys.executable, "-S", "-c", "import signal; signal.pause()"]
    job = subprocess.Popen(command, start_new_session=True)
    return WorkerParent(job.pid, os.open(os.devnull, os.O_WRONLY), job.poll, job.wait)


def test_an_interrupt_while_workers_start_waits_for_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = sleeper()

    def asked() -> int | None:
        if parent.poll() is None:
            signal.raise_signal(signal.SIGINT)
        return parent.poll()

    monkeypatch.setattr(launching, "END_S", 1.0)
    monkeypatch.setattr(launching, "obtain_parent", lambda log, workers: replace(parent, poll=asked))
    run = prepare_training(
        {"workload": "synthetic/quadratic", "workers": 2, "deadline": 1e6},
        options=RunOptions(out=tmp_path / "run"),
    )
    with run.begin_run(), pytest.raises(KeyboardInterrupt):
        launching.launch(run, lambda event: None)
    assert parent.poll() == -signal.SIGKILL


def test_a_stop_is_given_up_once_no_step_ends_for_a_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(launching, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr("farflung.runs.launching.os.kill", lambda pid, number: None)
    parent = WorkerParent(0, 0, lambda: None, lambda _: None)
    with socket.socket() as events:
        watch = launching._WorkerMonitor(
            parent, 1, events, lambda event: None, RunFolder(tmp_path), 60.0, False
        )
        watch._handle_datagram(b'{"event": "hello", "rank": 0, "pid": 1}')
        watch._handle_interrupt()
        assert watch._stop_deadline_s == 160.0
        for now[0], duration_s, by in ((150.0, 50.0, 250.0), (200.0, 1.0, 300.0), (1000.0, 800.0, 2600.0)):
            watch._handle_datagram(
                json.dumps({"event": "step", "rank": 0, "duration_s": duration_s}).encode()
            )
            assert watch._stop_deadline_s == by, "twice the longest step, which is more than the deadline"
        watch._handle_interrupt()
        watch._handle_datagram(b'{"event": "step", "rank": 0, "duration_s": 1.0}')
        assert watch._kill_deadline_s == now[0], "at once"


def test_what_all_workers_have_refused_in_all_legs_is_in_the_summary(tmp_path: Path) -> None:
    run = prepare_training(
        {"workload": "synthetic/quadratic", "workers": 2}, options=RunOptions(out=tmp_path / "run")
    )
    for rank, *legs in ((1, (0, 5), (1, 0)), (0, (2, 1))):
        for messages, connections in legs:
            with JsonLinesSink(run.files.get_telemetry_path(rank)) as file:
                Telemetry(rank, file).emit("refused", t=1.0, messages=messages, connections=connections)
                Telemetry(rank, file).emit("step", t=1.0, words='"refused"')
    parent = sleeper()
    with run.begin_run(), socket.socket() as events:
        watch = launching._WorkerMonitor(parent, 2, events, lambda event: None, run.files, 60.0, False)
        watch._handle_datagram(b'{"event": "end", "rank": 0, "t": 1.0, "steps": 3}')
        summary = watch._build_summary()
    os.killpg(parent.pid, signal.SIGKILL)
    parent.stop()
    assert summary == {"steps": 3, "refused": {"messages": 3, "connections": 6}}
    assert json.loads(run.files.summary_path.read_text(encoding="utf-8")) == summary


def test_a_replica_tells_what_it_has_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = {"messages": 0, "connections": 1234}
    monkeypatch.setattr(Refusals, "to_json", lambda refusals: refused)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    ended = train("synthetic/quadratic", steps=2, out=tmp_path / "run")
    assert ended.summary["refused"] == refused
    (told,) = (event for event in ended.events[0] if event["event"] == "refused")
    assert told == {"event": "refused", "rank": 0, "t": told["t"], **refused}
    assert "1,234 connections" in str(ended)
    assert "messages" not in str(ended)
    resumed = train(resume=tmp_path / "run", steps=4)
    assert resumed.summary["refused"] == {"messages": 0, "connections": 2468}


@pytest.mark.parametrize(("workers", "threads", "expected"), [(2, 0, 1), (2, 3, 3), *thorough((1, 0, 2))])
def test_replicas_that_share_a_machine_have_a_thread_each_unless_told(
    workers: int,
    threads: int,
    expected: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    forked_workers: Callable[..., WorkerParent],
) -> None:
    if workers == 1:  # a fork has the threads of what it is a fork of
        monkeypatch.setattr(launching, "obtain_parent", forked_workers)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    run = train("synthetic/quadratic", workers=workers, steps=1, threads=threads, out=tmp_path / "run")
    found = [
        event["threads"] for rank in range(workers) for event in run.events[rank] if event["event"] == "hello"
    ]
    assert found == [expected] * workers


@pytest.mark.parametrize(("threads", "expected"), [(0, 2), (3, 3)])
def test_a_replica_alone_on_its_machine_has_the_threads_of_torch_unless_told(
    threads: int, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    torch.set_num_threads(2)
    run = train("synthetic/quadratic", steps=1, threads=threads, out=tmp_path / "run")
    assert [event["threads"] for event in run.events[0] if event["event"] == "hello"] == [expected]
    assert torch.get_num_threads() == 2, "as it was before"


# --- a show= that is slow -----------------------------------------------------------------------------------------

MANY = 2000
"""Events: more than may wait."""


def step_of(rank: int) -> Event:
    return {"event": "step", "rank": rank}


def test_events_that_are_not_heard_hold_nothing_up_and_those_of_steps_are_dropped_and_counted() -> None:
    unread: Queue[Event] = Queue(10)
    with BufferedSink(unread.put) as tell:
        for number in range(MANY):
            tell(step_of(number % 2))
        tell({"event": "end", "rank": 0})
        found = [unread.get()]
        while found[-1]["event"] != "end":
            found.append(unread.get())
    told: dict[str, Counter[object]] = {"step": Counter(), "dropped": Counter(), "end": Counter()}
    for event in found:
        told[str(event["event"])][event["rank"]] += int(str(event.get("count", 1)))
    assert min(told["dropped"][rank] for rank in range(2)) > 0
    assert told["step"] + told["dropped"] == Counter({0: MANY // 2, 1: MANY // 2})


def test_an_error_of_show_ends_the_run(tmp_path: Path) -> None:
    def show(event: Event) -> None:
        raise KeyError(event["event"])

    with pytest.raises(KeyError, match="hello"):
        train("synthetic/quadratic", workers=1, steps=3, out=tmp_path / "run", sink=show)


@pytest.mark.thorough
def test_a_show_that_waits_for_the_workers_to_end_does_not_hold_them_up(tmp_path: Path) -> None:
    ends: list[int] = []
    kinds: Counter[object] = Counter()

    def show(event: Event) -> None:
        kinds[event["event"]] += int(str(event.get("count", 1)))
        if event["event"] == "hello":
            ends.append(os.pidfd_open(int(str(event["pid"]))))
        elif event["event"] == "step" and ends:
            with os.fdopen(ends.pop()) as end:
                assert select.select([end], [], [], DEADLINE_S)[0], "it waits for its event to be shown"

    run = train(
        "synthetic/quadratic", workers=1, steps=MANY, evaluate_every=0, out=tmp_path / "run", sink=show
    )
    assert run.summary["steps"] == MANY
    assert kinds["dropped"] > 0
    assert kinds["step"] + kinds["dropped"] == MANY


def test_a_show_that_waits_for_the_replica_to_end_does_not_hold_it_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    over = threading.Event()

    def joined(*args: Any, **options: Any) -> Run:
        run = joining.train_replica(*args, **options)
        over.set()
        return run

    def show(event: Event) -> None:
        assert event["event"] != "step" or over.wait(DEADLINE_S), "it waits for its event to be shown"

    monkeypatch.setattr(training, "train_replica", joined)
    assert train("synthetic/quadratic", steps=3, out=tmp_path / "run", sink=show).summary["steps"] == 3
