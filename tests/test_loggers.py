"""The figures of runs in loggers: read back by each logger's own means, where it is installed."""

from __future__ import annotations

import importlib
import json
import logging
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from farflung.cli.main import main
from farflung.errors import MissingExtra, UnknownName
from farflung.loggers import LOGGERS, RunLog, extract_metrics, list_viewers
from farflung.runs import RunFolder
from farflung.types import Json

GIVEN = ["--workload", "synthetic/quadratic", "--steps", "6", "--evaluate-every", "3", "--quiet"]


def figures_of(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What a run's loggers should have: steps and values by name, by its events."""
    found: dict[str, list[tuple[int, float]]] = {}
    for event in RunFolder(folder).load_events()[0]:
        values, step = extract_metrics(event)
        for name, value in values.items():
            found.setdefault(name, []).append((step, value))
    return found


def simulated(logger: str, out: Path) -> dict[str, list[tuple[int, float]]]:
    """The figures of a run that was logged."""
    assert main(["simulate", *GIVEN, "--network", "4g", "--log-to", logger, "--out", str(out)]) == 0
    return {"network/members": [(0, 4)], **figures_of(out)}


def curves(folder: Path) -> dict[str, list[tuple[int, float, float]]]:
    """Step, value and seconds since the first point of each curve."""
    reader = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    read: Any = reader.EventAccumulator(str(folder))
    read.Reload()
    found = {name: read.Scalars(name) for name in read.Tags()["scalars"]}
    return {
        name: [(point.step, point.value, point.wall_time - points[0].wall_time) for point in points]
        for name, points in found.items()
    }


def test_all_loggers_receive_the_same_figures() -> None:
    assert extract_metrics(
        {"event": "step", "rank": 0, "t": 9.0, "step": 2, "mean_loss": 1.5, "loss": 7, "bytes_sent": 80, "in_flight": 1}
    ) == (
        {"train/loss": 1.5, "network/bytes_sent": 80, "network/exchanges_under_way": 1, "seconds/run": 9.0},
        2,
    )  # fmt: skip
    view: dict[str, Json] = {"event": "view", "rank": 0, "t": 1.0, "step": 3, "members": [0, 2], "lost": [1]}
    assert extract_metrics(view) == ({"network/members": 2}, 3)
    assert extract_metrics({"event": "checkpoint", "rank": 0, "t": 1.0, "step": 3, "path": "x"}) == ({}, 3)


def test_tensorboard_has_a_simulated_run_over_its_own_time(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    due = simulated("tensorboard", tmp_path / "run")
    found = curves(tmp_path / "run" / "tensorboard")
    assert found.keys() == due.keys()
    for name, points in due.items():
        assert [step for step, _, _ in found[name]] == [step for step, _ in points]
        assert [value for _, value, _ in found[name]] == pytest.approx([value for _, value in points])
    losses = found["train/loss"]
    assert [step for step, _, _ in losses] == list(range(6))
    assert [step for step, _, _ in found["test/score"]] == [3, 6]
    ends = [value for _, value in due["seconds/run"]]
    assert [at for _, _, at in losses] == [pytest.approx(end - ends[0], abs=1e-5) for end in ends]


def test_a_run_that_goes_on_takes_the_place_of_what_it_does_again(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")

    def leg(first: int, last: int, loss: float) -> None:
        with RunLog("tensorboard", tmp_path) as sink:
            sink({"event": "begin", "rank": 0, "t": 0.5, "step": first, "steps": last})
            for step in range(first, last):
                sink({"event": "step", "rank": 0, "t": 1.0, "step": step, "mean_loss": loss, "loss": 9.0})
                sink({"event": "step", "rank": 1, "t": 1.0, "step": step, "mean_loss": 7.0, "loss": 9.0})

    leg(0, 4, 2.0)
    leg(2, 5, 1.0)
    assert [(step, loss) for step, loss, _ in curves(tmp_path / "tensorboard")["train/loss"]] == [
        (0, 2.0), (1, 2.0), (2, 1.0), (3, 1.0), (4, 1.0),
    ]  # fmt: skip


def wandb_records(file: Path) -> Iterator[bytes]:
    """The records of an offline run: chunks in blocks of 32 KiB, as LevelDB's log has them."""
    data, at, record = file.read_bytes(), 7, b""
    while at < len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        nbytes, kind = struct.unpack_from("<HB", data, at + 4)
        record += data[at + 7 : at + 7 + nbytes]
        at += 7 + nbytes
        if kind in (1, 4):
            yield record
            record = b""


@pytest.mark.filterwarnings("default")
def test_wandb_has_the_figures_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    due = simulated("wandb", tmp_path / "run")
    protocol = importlib.import_module("wandb.proto.wandb_internal_pb2")
    found: dict[str, list[tuple[int, float]]] = {}
    config: dict[str, Json] = {}
    (file,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    for said in wandb_records(file):
        record = protocol.Record()
        record.ParseFromString(said)
        config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        row = {
            item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
        }
        for name, value in row.items():
            if not name.startswith("_"):
                found.setdefault(name, []).append((row["_step"], value))
    assert found == due
    assert (config["workload"], config["steps"]) == ("synthetic/quadratic", 6)


@pytest.mark.filterwarnings("default")
def test_mlflow_has_the_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    store = f"sqlite:///{tmp_path / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "tests")
    due = simulated("mlflow", tmp_path / "run")
    client = mlflow.MlflowClient(store)
    (run,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    assert run.info.status == "FINISHED"
    assert (run.data.params["workload"], run.data.params["steps"]) == ("synthetic/quadratic", "6")
    assert {
        name: [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, name)]
        for name in run.data.metrics
    } == due


@pytest.mark.filterwarnings("default")
def test_trackio_has_the_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    if "trackio" not in sys.modules:  # it reads the folder once
        pytest.importorskip("trackio")
    storage = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
    due = simulated("trackio", tmp_path / "run")
    assert "Trackio" not in capsys.readouterr().out
    (run,) = storage.get_runs("farflung")
    found: dict[str, list[tuple[int, float]]] = {}
    for row in storage.get_logs("farflung", run):
        for name in row.keys() - {"step", "timestamp"}:
            found.setdefault(name, []).append((row["step"], row[name]))
    assert found == due
    assert storage.get_run_config("farflung", run)["workload"] == "synthetic/quadratic"


class Fake:
    """A logger that keeps what it gets, and fails at a step."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.fails_at = fails_at
        self.got: list[tuple[dict[str, float], int]] = []
        self.begun: list[tuple[str, int]] = []
        self.ended: list[str] = []

    @contextmanager
    def __call__(self, folder: Path, title: str, config: Mapping[str, Json], step: int) -> Iterator[Any]:
        self.begun.append((str(config["command"]), step))
        try:
            yield self.log
        except KeyError:
            self.ended.append("failed")
            raise
        self.ended.append("well")

    def log(self, values: Mapping[str, float], step: int, at_s: float) -> None:
        if step == self.fails_at:
            raise OSError("the disk\nis full")
        self.got.append((dict(values), step))


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> tuple[Fake, Fake]:
    """A logger that works, and one that fails at step 2."""
    pair = Fake(), Fake(fails_at=2)
    monkeypatch.setattr("farflung.extras.find_spec", lambda name: object())
    monkeypatch.setitem(LOGGERS, "mlflow", pair[0])
    monkeypatch.setitem(LOGGERS, "wandb", pair[1])
    return pair


def test_a_logger_that_fails_ends_no_run(
    tmp_path: Path, fakes: tuple[Fake, Fake], caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = fakes
    with caplog.at_level(logging.WARNING, "farflung"):
        due = simulated("mlflow,wandb", tmp_path / "run")
    assert caplog.messages == ["--log-to wandb: no longer logged: the disk is full"]
    assert good.begun == bad.begun == [("simulate", 0)]
    assert good.ended == ["well"]
    assert max(step for _, step in bad.got) == 1
    assert [(step, values["train/loss"]) for values, step in good.got if "train/loss" in values] == due[
        "train/loss"
    ]
    assert any("summary/final_accuracy" in values for values, _ in good.got)


def test_real_workers_are_logged_by_the_process_that_started_them(
    tmp_path: Path, fakes: tuple[Fake, Fake]
) -> None:
    assert main(["train", *GIVEN, "--log-to", "mlflow", "--out", str(tmp_path)]) == 0
    (good, _) = fakes
    assert good.begun == [("train", 0)]
    assert good.ended == ["well"]
    losses = [(step, values["train/loss"]) for values, step in good.got if "train/loss" in values]
    assert losses == figures_of(tmp_path)["train/loss"]
    assert len(losses) == 6


def test_a_run_that_is_lost_ends_as_failed(tmp_path: Path, fakes: tuple[Fake, Fake]) -> None:
    log = RunLog("mlflow", tmp_path, config={"command": "train"})
    log({"event": "step", "rank": 0, "t": 0.0, "step": 0, "mean_loss": 1.0})  # before it begins
    log({"event": "begin", "rank": 0, "t": 0.0, "step": 0, "steps": 2})
    log({"event": "step", "rank": 0, "t": 0.0, "step": 0, "mean_loss": None, "bytes_sent": 5})
    with pytest.raises(KeyError), log:
        raise KeyError("lost")
    assert fakes[0].ended == ["failed"]
    assert fakes[0].got == [({"network/bytes_sent": 5, "seconds/run": 0.0}, 0)]


@pytest.mark.parametrize("name", LOGGERS)
def test_where_one_is_not_installed_that_is_said_before_anything_begins(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.setattr("farflung.extras.find_spec", lambda module: None if module == name else object())
    with pytest.raises(MissingExtra):
        RunLog(name, tmp_path)
    for command in ("train", "simulate"):
        assert main([command, *GIVEN, "--log-to", name, "--out", str(tmp_path / "run")]) == 2
        said = f"farflung: --log-to {name} needs {name}: pip install 'farflung[{name}]'\n"
        assert capsys.readouterr().err == said
    assert not (tmp_path / "run").exists()


def test_the_command_says_where_the_figures_are(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fakes: tuple[Fake, Fake],
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("MLFLOW_TRACKING_URI", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    simulated("mlflow", tmp_path / "run")
    assert "mlflow     mlflow ui\n" in capsys.readouterr().out
    folder = tmp_path / "a run"
    assert list_viewers("wandb, tensorboard", folder) == {
        "wandb": "project farflung", "tensorboard": f"tensorboard --logdir '{folder}/tensorboard'",
    }  # fmt: skip
    (folder / "wandb" / "offline-run-1").mkdir(parents=True)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow:5000")
    assert list_viewers("mlflow,wandb", folder) == {
        "mlflow": "mlflow ui --backend-store-uri http://mlflow:5000",
        "wandb": f"wandb sync '{folder}/wandb'/offline-run-*",
    }
    assert list_viewers("", folder) == {}
    assert list_viewers(",".join(LOGGERS), folder).keys() == LOGGERS.keys()


def test_there_are_four(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="unknown logger 'tensorbord'; did you mean tensorboard"):
        RunLog("tensorbord", tmp_path)
