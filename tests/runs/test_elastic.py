"""Real replicas that are killed, stopped, or end: the others go on, on one model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import pytest

import farflung
from farflung.errors import ConfigError, ProtocolError, ReplicaLeft, RunLost
from farflung.runs import RunOptions, joining
from farflung.telemetry import Event, read_events
from farflung.workloads.synthetic import Quadratic
from tests.covering import thorough
from tests.refusals import refuse

STEPS, AT = 400, 20


class Strikes:
    """Sends a signal to workers once one of them has come to a step."""

    def __init__(self, ranks: tuple[int, ...], number: signal.Signals = signal.SIGKILL, at: int = AT) -> None:
        self._ranks, self._number, self._at = ranks, number, at
        self._pids: dict[int, int] = {}
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if event["event"] == "hello":
            self._pids[int(str(event["rank"]))] = int(str(event["pid"]))
        if self._ranks and event["event"] == "step" and int(str(event["step"])) >= self._at:
            ranks, self._ranks = self._ranks, ()
            for rank in ranks:
                os.kill(self._pids[rank], self._number)

    def of(self, kind: str) -> list[Event]:
        return [event for event in self.events if event["event"] == kind]


def trained(strikes: Strikes, workers: int, out: Path, **settings: Any) -> farflung.Run:
    return farflung.train(
        "synthetic/quadratic", sink=strikes, out=out, workers=workers, steps=STEPS,
        **{"elastic": "1", "deadline": 20.0, "evaluate_every": 100, "checkpoint_every": 100, **settings},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("workers", "lost"), [(3, (0,)), *thorough((2, (0,)), (2, (1,)), (3, (1,)), (3, (2,)), (4, (1, 3)))]
)
def test_a_run_goes_on_without_those_that_were_killed(
    workers: int, lost: tuple[int, ...], tmp_path: Path
) -> None:
    strikes = Strikes(lost)
    run = trained(strikes, workers, tmp_path / "run")
    left = [rank for rank in range(workers) if rank not in lost]
    assert run.summary["steps"] == STEPS
    assert sorted(int(str(event["rank"])) for event in strikes.of("end")) == left
    assert len({event["final_loss"] for event in strikes.of("end")}) == 1
    assert {event["rank"] for event in strikes.of("lost")} == set(lost)
    views = strikes.of("view")
    assert views[-1]["members"] == left
    assert {rank for event in views for rank in event["lost"]} == set(lost)  # type: ignore[union-attr]
    assert (tmp_path / "run" / "model.safetensors").exists()


@pytest.mark.parametrize(("workers", "leave"), [(2, (0,)), *thorough((3, (0,)), (3, (1, 2)))])
@pytest.mark.parametrize("schedule", ["synchronous", *thorough("pipelined(width=2)")])
def test_a_run_goes_on_without_those_that_leave(
    workers: int, leave: tuple[int, ...], schedule: str, tmp_path: Path
) -> None:
    strikes = Strikes(leave, signal.SIGUSR1)
    run = trained(strikes, workers, tmp_path / "run", schedule=schedule)
    left = [rank for rank in range(workers) if rank not in leave]
    assert run.summary["steps"] == STEPS
    assert not strikes.of("lost")
    assert not strikes.of("error")
    assert sorted(int(str(event["rank"])) for event in strikes.of("end")) == left
    assert len({event["final_loss"] for event in strikes.of("end")}) == 1
    views = [event["members"] for event in strikes.of("view") if event["rank"] == left[0]]
    assert views[-1] == left


def test_one_that_is_asked_to_leave_before_the_run_is_set_up_leaves(tmp_path: Path) -> None:
    class Early(Strikes):
        def __call__(self, event: Event) -> None:
            super().__call__(event)
            if event["event"] == "hello" and event["rank"] == 1:
                os.kill(self._pids[1], signal.SIGUSR1)

    early = Early(())
    run = trained(early, 3, tmp_path / "run")
    assert run.summary["steps"] == STEPS
    assert not early.of("lost")
    assert [event["members"] for event in early.of("view") if event["rank"] == 0] == [[0, 2]]


@pytest.mark.thorough
def test_it_goes_on_from_a_checkpoint_with_any_number(tmp_path: Path) -> None:
    trained(Strikes((1,)), 3, tmp_path / "run")
    step = f"step-{STEPS:08d}"
    assert {f.name for f in (tmp_path / "run" / "checkpoints" / step).iterdir()} == {
        "shared.safetensors", "rank-0-of-2.safetensors", "rank-1-of-2.safetensors",
    }  # fmt: skip
    run = farflung.train(resume=tmp_path / "run", workers=3, steps=STEPS + 10)
    assert run.summary["steps"] == STEPS + 10


@pytest.mark.thorough
@pytest.mark.parametrize("schedule", ["synchronous", "pipelined(width=2)"])
def test_one_that_was_stopped_is_suspended_and_comes_back(schedule: str, tmp_path: Path) -> None:
    strikes, steps = Strikes((1,), signal.SIGSTOP), 3000

    def show(event: Event) -> None:
        strikes(event)
        if event["event"] == "view" and event["rank"] == 0 and event["lost"]:
            os.kill(strikes._pids[1], signal.SIGCONT)

    run = farflung.train(
        "synthetic/quadratic",
        sink=show,
        out=tmp_path / "run",
        workers=3,
        elastic=1,
        steps=steps,
        deadline=5.0,
        schedule=schedule,
    )
    assert run.summary["steps"] == steps
    views = [event for event in strikes.of("view") if event["rank"] == 0]
    assert [(event["lost"], event["joined"], event["members"]) for event in views] == [
        ([1], [], [0, 2]),
        ([], [1], [0, 2, 1]),
    ]
    assert sorted(int(str(event["rank"])) for event in strikes.of("end")) == [0, 1, 2]
    assert len({event["final_loss"] for event in strikes.of("end")}) == 1


def test_it_ends_by_name_where_too_few_are_left(tmp_path: Path) -> None:
    with pytest.raises(RunLost, match="view 2 has 2 members, and the run needs 3"):
        trained(Strikes((1,)), 3, tmp_path / "run", elastic="3")


@pytest.mark.thorough
def test_one_that_has_joined_leaves_where_it_is_interrupted(tmp_path: Path) -> None:
    folder, joined, views = tmp_path / "run", list[subprocess.Popen[str]](), list[Event]()
    pids: dict[object, int] = {}
    done = 0

    def show(event: Event) -> None:
        nonlocal done
        if event["event"] == "hello":
            pids[event["rank"]] = int(str(event["pid"]))
        elif event["event"] == "step" and not joined and int(str(event["step"])) >= AT:
            command = [sys.executable, "-m", "farflung", "join", str(folder), "--quiet"]
            joined.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        elif event["event"] == "view" and event["rank"] == 0:
            views.append(event)
            if event["lost"]:
                os.kill(pids[0], signal.SIGINT)
        elif event["event"] == "step" and views and event["rank"] == 0:
            done += 1
            if done == AT:  # the other takes part
                joined[0].send_signal(signal.SIGINT)

    run = farflung.train(
        "synthetic/quadratic", sink=show, out=folder, workers=2, elastic="1:3", steps=100_000, deadline=30.0,
        evaluate_every=100_000,
    )  # fmt: skip
    _, said = joined[0].communicate(timeout=60)
    assert said == "farflung: left with view 3\n"
    assert joined[0].returncode == 0
    assert [event["lost"] for event in views] == [[], [2]]
    assert int(str(run.summary["steps"])) < 100_000


@pytest.mark.thorough
@pytest.mark.parametrize("workers", [1, 2])
def test_one_that_has_joined_goes_on_where_all_workers_of_the_command_die(
    workers: int, tmp_path: Path
) -> None:
    folder, joined, pids = tmp_path / "run", list[subprocess.Popen[str]](), dict[object, int]()
    done, begins = 0, 0

    def show(event: Event) -> None:
        nonlocal done, begins
        if event["event"] == "hello":
            pids[event["rank"]] = int(str(event["pid"]))
        elif event["event"] == "step" and not joined and int(str(event["step"])) >= AT:
            command = [sys.executable, "-m", "farflung", "join", str(folder), "--quiet"]
            joined.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        elif event["event"] == "view" and event["joined"]:
            begins = int(str(event["step"]))
        elif event["event"] == "step" and begins and int(str(event["step"])) >= begins + AT:
            done += 1
            if done == 1:  # the other takes part
                for pid in pids.values():
                    os.kill(pid, signal.SIGKILL)

    with pytest.raises(RunLost, match="was ended by SIGKILL"):
        farflung.train(
            "synthetic/quadratic", sink=show, out=folder, workers=workers, elastic="1:4", steps=10_000_000,
            deadline=5.0, evaluate_every=0,
        )  # fmt: skip
    joined[0].send_signal(signal.SIGINT)
    _, said = joined[0].communicate(timeout=60)
    assert joined[0].returncode == 0, said
    telemetry = read_events(folder / "telemetry" / f"rank-{workers}.jsonl")
    lost = [event["lost"] for event in telemetry if event["event"] == "view"][1:]
    assert {rank for ranks in lost for rank in ranks} == {*range(workers)}  # type: ignore[union-attr]


class Joins:
    """Has a replica join a run, and the most senior one killed once it is in; then the others are asked to stop."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pids: dict[int, int] = {}
        self.joined: subprocess.Popen[str] | None = None
        self.views: dict[int, list[Event]] = {0: [], 1: []}
        self._until = 0

    def __call__(self, event: Event) -> None:
        kind, rank = event["event"], int(str(event["rank"]))
        if kind == "hello":
            self._pids[rank] = int(str(event["pid"]))
        elif kind == "step" and self.joined is None and int(str(event["step"])) >= AT:
            command = [sys.executable, "-m", "farflung", "join", str(self._folder), "--json"]
            self.joined = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        elif kind == "view":
            self.views[rank].append(event)
            if event["joined"] and rank == 0:
                os.kill(self._pids[0], signal.SIGKILL)
            elif event["lost"]:
                self._until = int(str(event["step"])) + 50
        elif kind == "step" and self._until and int(str(event["step"])) >= self._until:
            self._until = 0
            os.kill(self._pids[1], signal.SIGINT)


@pytest.mark.thorough
@pytest.mark.parametrize("schedule", ["synchronous", "delayed(delay=3,period=2)"])
def test_a_replica_joins_and_goes_on_without_the_one_that_gave_it_the_state(
    schedule: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    joins = Joins(folder)
    run = farflung.train(
        "synthetic/quadratic", sink=joins, out=folder, workers=2, elastic="1:3", steps=100_000, codec="int8",
        schedule=schedule,
        evaluate_every=1_000, checkpoint_every=10_000, deadline=30.0,
    )  # fmt: skip
    assert joins.joined is not None
    printed, _ = joins.joined.communicate(timeout=60)
    assert joins.joined.returncode == 0
    summary = json.loads(printed)
    assert joins.views[1][0]["joined"] == [2]
    assert joins.views[1][-1]["members"] == [1, 2]
    assert run.summary["steps"] == summary["steps"] < 100_000
    assert run.summary["samples"] == summary["samples"]
    said = {rank: read_events(folder / "telemetry" / f"rank-{rank}.jsonl") for rank in (1, 2)}
    losses = {rank: [e["mean_loss"] for e in said[rank] if e["event"] == "step"][-3:] for rank in (1, 2)}
    assert losses[1] == losses[2]


def point() -> Quadratic:
    """A workload whose model depends on the process."""
    return Quadratic(dim=int(os.environ.get("DIM", "8")))


@pytest.mark.thorough
def test_a_replica_with_another_model_is_refused_alone_and_leaves_its_rank_to_the_next(
    tmp_path: Path,
) -> None:
    folder, said, pids = tmp_path / "run", list[str](), dict[object, int]()
    views, joined = list[Event](), list[subprocess.Popen[str]]()

    def show(event: Event) -> None:
        if event["event"] == "hello":
            pids[event["rank"]] = int(str(event["pid"]))
        elif event["event"] == "step" and not said and int(str(event["step"])) >= AT:
            command = [sys.executable, "-m", "farflung", "join", str(folder), "--quiet"]
            other = {**os.environ, "DIM": "9"}
            done = subprocess.run(
                command, env=other, stderr=subprocess.PIPE, text=True, check=False, timeout=60
            )
            said.append(f"{done.returncode}: {done.stderr}")
            joined.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        elif event["event"] == "view" and event["rank"] == 0:
            views.append(event)
            os.kill(pids[0], signal.SIGINT)

    farflung.train(
        f"{__name__}:point", sink=show, out=folder, workers=2, elastic="1:3", steps=100_000, deadline=30.0,
        evaluate_every=100_000,
    )  # fmt: skip
    (ended,) = said
    assert ended.startswith("1: farflung: ranks disagree on model: ")
    assert len(ended.splitlines()) == 1
    joined[0].communicate(timeout=60)
    assert [event["joined"] for event in views] == [[2]]


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("runs", "runs: neither a run's folder nor HOST:PORT"),
        (".", "no run is going on there that others may join"),
    ],
)
def test_where_there_is_no_run_to_join(
    where: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert says in refuse(capsys, "join", where)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--elastic 3", "--elastic 3: must be MIN or MIN:MAX with MIN from 1 to --workers"),
        ("--elastic 1 --quorum half", "--quorum half: must be majority, or 1 together with --elastic"),
        ("--quorum 1", "--quorum 1: must be majority, or 1 together with --elastic"),
        ("--elastic 1 --collective native", "the backend's own collectives need all replicas"),
        ("--elastic 1 --partition iid", "the share of a lost replica would be missing"),
    ],
)
def test_bad_options_are_one_line(options: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--workload", "synthetic/quadratic", "--workers", "2", *options.split()]
    assert says in refuse(capsys, "train", *given, lines=2)


class Asked:
    """Stands for a replica that has asked to join."""

    addresses: ClassVar[list[str]] = ["127.0.0.1:1"]
    host = "127.0.0.1"
    config: ClassVar[dict[str, Any]] = {"workload": "synthetic/quadratic", "workers": 1, "elastic": "1:3"}

    def __init__(self, rank: int, has_begun: bool = False) -> None:
        self.rank, self.has_begun = rank, has_begun


@pytest.mark.parametrize(
    ("has_begun", "error", "tries"),
    [
        (False, RunLost("rank 1 cannot begin: members 0 are lost or silent"), 3),
        (True, RunLost("no agreement on view 3"), 1),
        (False, ReplicaLeft("the run has ended before this replica could begin"), 1),
        (False, ProtocolError("ranks disagree on model"), 1),
    ],
)
def test_one_that_could_not_begin_asks_again(
    has_begun: bool, error: RunLost, tries: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[int]()

    def asks(*_: object) -> Any:
        asked.append(len(asked) + 1)
        if len(asked) > 3:
            raise ConfigError("127.0.0.1:1: no run answers there")
        return Asked(asked[-1], has_begun)

    def fails(*_: object) -> Any:
        raise error

    monkeypatch.setattr(joining, "_ask_for_rank", asks)
    monkeypatch.setattr(joining, "train_replica", fails)
    (tmp_path / "run.key").touch()
    with pytest.raises(type(error), match=str(error)):
        joining.join_run(str(tmp_path), lambda rank: nullcontext(lambda event: None), RunOptions())
    assert asked == list(range(1, tries + 1 + (tries > 1)))
