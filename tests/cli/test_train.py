"""The main job, as a person runs it: real workers, faults, resuming."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
from pathlib import Path
from typing import IO, Any

import pytest
import torch

from farflung.cli.train import announce_rank
from farflung.state_trees import load_tree
from farflung.telemetry import read_events
from farflung.wall import LaunchEnv
from tests.covering import thorough
from tests.forks import Fork, farflung, ran
from tests.listening import listening

SETTINGS = ["--workers", "2", "--batch-size", "8", "--momentum", "0.9", "--evaluate-every", "0"]
ENDLESS = ["--steps", "100000", "--batch-size", "4", "--checkpoint-every", "5", "--evaluate-every", "0"]
DEADLINE_S = 250


def training(*options: str) -> Fork:
    """A training command that is ended with the block."""
    return farflung("train", "--workload", "synthetic/quadratic", *options)


def line_with(stream: IO[str], text: str) -> str:
    """The next line that contains ``text``; the lines come as things happen."""
    for line in stream:
        if text in line:
            return line
    raise AssertionError(f"the command ended without saying {text!r}")


def worker(folder: Path, rank: int) -> int:
    """The process id of a worker that has begun."""
    events = read_events(folder / "telemetry" / f"rank-{rank}.jsonl")
    return next(int(str(event["pid"])) for event in events if event["event"] == "hello")


def gone(pid: int) -> bool:
    """Whether a process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
    except FileNotFoundError:
        return True


def parameters(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """The model in a checkpoint."""
    model: dict[str, torch.Tensor] = load_tree(
        folder / "checkpoints" / f"step-{step:08d}" / "shared.safetensors"
    )["model"]
    return model


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run of 30 steps and what it printed."""
    out = tmp_path_factory.mktemp("train") / "whole"
    options = [*SETTINGS, "--steps", "30", "--checkpoint-every", "10", "--json", "--out", str(out)]
    return out, json.loads(ran("train", "--workload", "synthetic/quadratic", *options))


@pytest.mark.parametrize(
    ("rank", "local_rank", "quiet", "says"),
    [
        (1, 0, False, "rank 1 of 4 has joined; progress is shown on rank 0\n"),
        (1, 0, True, ""),
        (3, 1, False, ""),
    ],
)
def test_another_machine_says_once_that_it_has_joined(
    capsys: pytest.CaptureFixture[str], rank: int, local_rank: int, quiet: bool, says: str
) -> None:
    env = LaunchEnv(rank, 4, local_rank, 2)
    for event in ("hello", "begin", "step"):
        announce_rank(env, {"event": event, "rank": rank}, quiet=quiet)
        announce_rank(env, {"event": event, "rank": 0}, quiet=quiet)
    assert capsys.readouterr().err == says


def test_a_worker_that_hangs_is_named(tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = ["--workers", "3", "--deadline", "2", "--out", str(out)]
    with training(*ENDLESS, *options) as process:
        line_with(process.stderr, "checkpoint")
        pids = [worker(out, rank) for rank in range(3)]
        os.kill(pids[2], signal.SIGSTOP)
        _, err = process.finished()
    assert process.returncode == 1
    assert "lost rank 2: waited 2" in err[-1]
    assert all(gone(pid) for pid in pids)


@pytest.mark.thorough
def test_the_only_worker_is_named(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with training(*ENDLESS, "--workers", "1", "--out", str(out)) as process:
        line_with(process.stderr, "checkpoint")
        os.kill(worker(out, 0), signal.SIGKILL)
        _, err = process.finished()
    assert process.returncode == 1
    assert "rank 0 was ended by SIGKILL (see " in err[-1]


def test_a_killed_command_leaves_nothing_and_no_worker_could_be_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, scratch = tmp_path / "run", tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    with training(*ENDLESS, "--workers", "2", "--collective", "native", "--out", str(out)) as process:
        line_with(process.stderr, "checkpoint")
        pids = [worker(out, rank) for rank in range(2)]
        command, *forks = (Path(f"/proc/{pid}/cmdline").read_bytes() for pid in (process.pid, *pids))
        assert forks == [command] * 2, "another Python was started for them"
        addresses = {address for pid in (process.pid, *pids) for address, _ in listening(pid)}
        assert addresses == {"127.0.0.1"}, "what others can reach"
        (parent,) = {Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1] for pid in pids}
        ends = [os.pidfd_open(pid) for pid in (*pids, int(parent))]
        process.send_signal(signal.SIGKILL)
        for end in ends:
            assert select.select([end], [], [], DEADLINE_S)[0], "still there"
            os.close(end)
    assert all(gone(pid) for pid in pids)
    assert not list(scratch.glob("farflung-*"))


def test_a_run_that_lost_a_worker_names_it_and_is_resumed_to_the_same_bits(tmp_path: Path) -> None:
    broken, whole = tmp_path / "broken", tmp_path / "whole"
    with training(
        *SETTINGS, "--steps", "100000", "--checkpoint-every", "10", "--out", str(broken)
    ) as process:
        line_with(process.stderr, "checkpoint")
        os.kill(worker(broken, 1), signal.SIGKILL)
        _, err = process.finished()
    assert process.returncode == 1
    assert "lost rank 1: its connection was closed from its end" in err[-1]
    first, *others = sorted((broken / "checkpoints").glob("step-*"))
    for later in others:
        shutil.rmtree(later)

    steps = int(first.name.removeprefix("step-")) + 20  # by the time of the kill it may have come to any
    for options in (["--resume", str(broken)], [*SETTINGS, "--out", str(whole)]):
        with training(*options, "--steps", str(steps), "--json") as process:
            said, _ = process.finished()
        assert process.returncode == 0
        assert json.loads(said)["steps"] == steps
    resumed = parameters(broken, steps)
    assert resumed.keys() == parameters(whole, steps).keys()
    for name, value in parameters(whole, steps).items():
        assert torch.equal(value, resumed[name]), name


@pytest.mark.parametrize("number", [signal.SIGINT, *thorough(signal.SIGHUP)], ids=["ctrl-c", "hangup"])
def test_a_signal_to_stop_keeps_the_checkpoint(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, scratch = tmp_path / "run", tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    with training(*ENDLESS, "--workers", "2", "--out", str(out)) as process:
        line_with(process.stderr, "checkpoint")
        process.send_signal(number)
        _, err = process.finished()
    assert process.returncode == 130, err
    assert "Traceback" not in "\n".join(err)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["stopped"]
    assert (out / "checkpoints" / f"step-{summary['steps']:08d}" / "shared.safetensors").exists()
    assert not list(scratch.glob("farflung-*"))


def test_a_non_finite_loss_stops_all_and_names_the_replica(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with training(
        "--workers", "2", "--steps", "50", "--batch-size", "4", "--learning-rate", "1e30", "--momentum", "0",
        "--out", str(out), "--checkpoint-every", "1", "--evaluate-every", "0",
    ) as process:  # fmt: skip
        _, err = process.finished()
    assert process.returncode == 1
    assert "non-finite loss at step" in err[-1]
    assert "on rank" in err[-1]
    assert list((out / "checkpoints").glob("step-*/shared.safetensors"))


def test_the_summary_and_what_a_run_leaves_behind(whole: tuple[Path, dict[str, Any]]) -> None:
    out, summary = whole
    assert {
        "final_accuracy", "final_loss", "steps", "samples", "bytes_sent_per_replica",
        "schedule_bytes_per_replica", "duration_s", "time_s",
    } <= summary.keys()  # fmt: skip
    assert set(summary["time_s"]) == {"compute", "exposed_communication", "data_wait", "evaluation", "other"}
    assert sum(summary["time_s"].values()) == pytest.approx(summary["duration_s"])
    assert summary["samples"] == 2 * 8 * 30
    assert [e["step"] for e in read_events(out / "telemetry" / "rank-1.jsonl") if e["event"] == "step"] == [
        *range(30)
    ]
