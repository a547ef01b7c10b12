"""A run's folder: held by one command at a time, continued after whatever cut it short, refused where it cannot be."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from farflung.cli.main import main
from farflung.errors import BadInput, ConfigError, StorageError
from farflung.files import drop_partial_line, lock_folder, write_text
from farflung.runs import Run, simulate, watch_stop_signals
from farflung.runs.preparing import name_run_folder
from farflung.telemetry import JsonLinesSink
from tests.forks import farflung
from tests.refusals import refuse

SMALL: dict[str, Any] = {
    "steps": 4, "workers": 2, "batch_size": 4, "evaluate_every": 0, "checkpoint_every": 4, "network": "wifi-10mbps",
}  # fmt: skip
WHAT = ("synthetic/quadratic", "synchronous")


def made(folder: Path, **settings: Any) -> Run:
    return simulate(*WHAT, out=folder, **{**SMALL, **settings})


def test_runs_of_one_second_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("farflung.runs.preparing.time.strftime", lambda _: "20260102-030405")
    for _ in range(3):
        assert main(["simulate", "--workload", WHAT[0], "--steps", "2", "--quiet"]) == 0
    capsys.readouterr()
    found = sorted(path.name.partition("-20260102-030405")[2] for path in (tmp_path / "runs").iterdir())
    assert found == ["", "-2", "-3"]


# --- one at a time ------------------------------------------------------------------------------------------------


def test_a_folder_is_named_after_what_was_changed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    small = ["--workload", "synthetic/quadratic", "--steps", "1", "--workers", "2", "--quiet"]
    assert main(["simulate", *small, "--codec", "topk(density=0.5)"]) == 0
    assert len([*tmp_path.glob("runs/synthetic-quadratic-synchronous-codec=topk-density=0.5-lan-1g-2*")]) == 1
    assert len(name_run_folder("quadratic, " + "long(er)" * 100).name) < 160


def test_names_of_folders_are_quoted_for_the_shell(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "lauf 1"
    small = ["--workload", "synthetic/quadratic", "--steps", "1", "--workers", "2", "--quiet"]
    assert main(["simulate", *small, "--out", str(out)]) == 0
    assert f"farflung report '{out}'" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["resume", "out"])
def test_a_run_is_made_by_one_command_at_a_time(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    made(run)
    out.mkdir()
    folder = {"resume": run, "out": out}[command]
    before = sorted(path.name for path in folder.iterdir())
    with lock_folder(folder, "makes a run"):
        said = refuse(capsys, "simulate", f"--{command}", str(folder), "--steps", "8")
        assert f"{folder}: another command (process {os.getpid()}) makes a run there: wait" in said
    assert sorted({*before, ".lock"}) == sorted(path.name for path in folder.iterdir())
    assert (
        main(["simulate", f"--{command}", str(folder), "--workload", WHAT[0], "--steps", "8", "--quiet"]) == 0
    )


def test_a_comparison_is_made_by_one_command_at_a_time(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with lock_folder(tmp_path, "compares"):
        said = refuse(capsys, "compare", "--workload", WHAT[0], "--steps", "2", "--out", str(tmp_path))
    assert f"{tmp_path}: another command (process {os.getpid()}) compares there" in said


def test_a_folder_is_free_again_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError), lock_folder(tmp_path, "makes a run"):
        raise KeyError
    with (
        lock_folder(tmp_path, "makes a run"),
        pytest.raises(ConfigError, match="another command"),
        lock_folder(tmp_path, "x"),
    ):
        pass


# --- resumed ------------------------------------------------------------------------------------------------------


def test_a_resumed_run_counts_all_its_legs(tmp_path: Path) -> None:
    """In virtual time it takes what a run in one piece does, but for the wait for each other behind the checkpoint."""
    whole = made(tmp_path / "whole", steps=8)
    made(tmp_path / "parts")
    resumed = simulate(resume=tmp_path / "parts", steps=8)
    one, parts = dict[str, Any](whole.summary), dict[str, Any](resumed.summary)
    for figure in ("steps", "samples", "bytes_sent_per_replica", "final_loss"):
        assert parts[figure] == one[figure]
    at = {
        (event["event"], event.get("step")): float(str(event["t"]))
        for event in whole.events[0]
        if "t" in event
    }
    waited = at["checkpoint", 4] - at["step", 3]
    assert parts["duration_s"] == pytest.approx(one["duration_s"] - waited)
    for part, seconds in one["time_s"].items():
        lacks = waited if part == "other" else 0.0
        assert parts["time_s"][part] == pytest.approx(seconds - lacks, abs=1e-9), part
    leg = parts["last_leg"]
    assert leg["from_step"] == 4
    assert 0 < leg["duration_s"] < parts["duration_s"]
    assert sum(leg["time_s"].values()) == pytest.approx(leg["duration_s"])
    assert "last_leg" not in one
    assert "at step 4, " in str(resumed)
    third = dict[str, Any](simulate(resume=tmp_path / "parts", steps=12).summary)
    assert third["last_leg"]["from_step"] == 8
    assert third["duration_s"] > parts["duration_s"]


def test_a_line_that_was_cut_short_is_left_out_once(tmp_path: Path) -> None:
    files = made(tmp_path / "run").files
    events = files.load_events()[1]
    with files.get_telemetry_path(1).open("a") as file:
        file.write('{"event":"step","rank":1,"t":0.')
    with pytest.warns(UserWarning, match=r"rank-1.jsonl: its last line was cut short") as said:
        resumed = simulate(resume=files.path, steps=8)
    assert len(said) == 1
    assert resumed.events[1][: len(events)] == events
    assert [event["step"] for event in resumed.events[1] if event["event"] == "step"] == [*range(8)]


@pytest.mark.parametrize(
    ("cut", "left"),
    [
        (b"", b'{"a":1}\n'),
        (b'{"b"', b'{"a":1}\n'),
        (b"\xff" * 200_000, b'{"a":1}\n'),
        (b'{"b":2}', b'{"a":1}\n{"b":2}\n'),
    ],
    ids=["whole", "cut", "long", "without its newline"],
)
@pytest.mark.filterwarnings("ignore:.*cut short")
def test_what_is_appended_to_ends_with_a_whole_line(tmp_path: Path, cut: bytes, left: bytes) -> None:
    path = tmp_path / "lines.jsonl"
    for content in (b'{"a":1}\n' + cut, cut):
        path.write_bytes(content)
        drop_partial_line(path)
        assert path.read_bytes() == (left if content != cut else left[len(b'{"a":1}\n') :])


def test_a_checkpoint_of_another_optimizer_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    made(tmp_path / "run")
    said = refuse(capsys, "simulate", "--resume", tmp_path / "run", "--steps", 8, "--optimizer", "adam")
    says = "its optimizer is SGD, not Adam; resume with the --optimizer that the run was started with"
    assert f"{tmp_path / 'run' / 'checkpoints'}, step 4: {says}" in said


def test_a_log_of_no_decision_is_not_replayed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log = tmp_path / "decisions.jsonl"
    for text, says in (
        ("rubbish", ", line 1: not a decision"),
        ("", ": holds no whole"),
        ('{"na', ": holds no whole"),
    ):
        log.write_text(text)
        out = str(tmp_path / "out")
        said = refuse(capsys, "simulate", "--workload", WHAT[0], "--replay", str(log), "--out", out)
        assert f"{log}{says}" in said


# --- where nothing can be written ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "place", "says"),
    [
        ("train", "file", "a file: a run is kept in a folder"),
        ("simulate", "file/run", "cannot be written (Not a directory)"),
        ("train", "/proc/run", "cannot be written (No such file or directory)"),
    ],
)
def test_a_folder_that_cannot_be(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str, place: str, says: str
) -> None:
    (tmp_path / "file").write_text("")
    out = tmp_path / place
    assert f"{out}: {says}" in refuse(capsys, command, "--workload", WHAT[0], "--out", str(out))


@pytest.mark.parametrize(
    ("command", "place"), [("train", "file"), ("simulate", "file/run"), ("retime", "/proc/run")]
)
def test_what_cannot_be_a_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str, place: str
) -> None:
    (tmp_path / "file").write_text("")
    run = tmp_path / place
    option = [] if command == "retime" else ["--resume"]
    said = refuse(capsys, command, *option, str(run))
    assert f"{run}: no run there" in said


def full(path: Path) -> None:
    """Every byte that is written there finds the disk full."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to("/dev/full")


@pytest.mark.parametrize("name", ["telemetry/rank-1.jsonl", "decisions.jsonl", "traffic.jsonl"])
def test_a_disk_that_is_full(capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str) -> None:
    full(tmp_path / "run" / name)
    options = ["--collective", "auto", "--workload", WHAT[0], "--steps", "2"]
    said = refuse(capsys, "simulate", *options, "--quiet", "--out", tmp_path / "run")
    assert f"{tmp_path / 'run' / name}: cannot be written (No space left on device)" in said


def test_a_disk_that_becomes_full_under_a_worker(tmp_path: Path) -> None:
    """The log of the workers too, in which they would have said it."""
    run = tmp_path / "run"
    full(run / "telemetry" / "rank-1.jsonl")
    full(run / "workers.log")
    options = ["--workload", WHAT[0], "--steps", "2", "--workers", "2", "--batch-size", "4"]
    with farflung("train", *options, "--out", str(run), "--quiet") as process:
        _, err = process.finished()
    assert process.returncode == BadInput.exit_code
    assert err == [f"farflung: {run}/telemetry/rank-1.jsonl: cannot be written (No space left on device)"]


def test_a_file_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file.json"
    write_text(path, "before")

    def cut(self: Path, text: str, encoding: str) -> int:
        self.write_bytes(text[:2].encode())
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", cut)
    with pytest.raises(StorageError, match=r"file.json: cannot be written .No space left on device"):
        write_text(path, "after")
    assert [file.name for file in tmp_path.iterdir()] == ["file.json"]
    assert path.read_text() == "before"


def test_an_error_before_is_told_rather_than_that_of_a_full_disk(tmp_path: Path) -> None:
    full(tmp_path / "events.jsonl")

    def ends(error: Exception | None) -> None:
        with JsonLinesSink(tmp_path / "events.jsonl") as sink:
            sink({"event": "step", "rank": 0})
            if error is not None:
                raise error

    with pytest.raises(KeyError):
        ends(KeyError())
    with pytest.raises(StorageError, match=r"events.jsonl: cannot be written"):
        ends(None)


# --- signals ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("hangup")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_every_signal_to_stop_asks_first(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with watch_stop_signals() as asked:
        assert not asked.is_set()
        signal.raise_signal(number)
        assert asked.is_set()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert signal.getsignal(number) == before


def test_what_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with watch_stop_signals() as asked:
            signal.raise_signal(signal.SIGHUP)
            assert not asked.is_set()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
