"""Curves for TensorBoard: read back by TensorBoard itself, where it is installed."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from farflung.cli.main import main
from farflung.errors import MissingExtra
from farflung.report import TensorBoard
from farflung.runs import RunFolder

pytest.importorskip("tensorboard")


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


def test_a_simulated_run_has_its_losses_and_scores_over_its_own_time(tmp_path: Path) -> None:
    out = tmp_path / "run"
    given = ["--workload", "synthetic/quadratic", "--steps", "6", "--evaluate-every", "3", "--network", "4g"]
    assert main(["simulate", *given, "--quiet", "--tensorboard", "--out", str(out)]) == 0
    found = curves(out / "tensorboard")
    losses, scores = found["train/loss"], found["test/score"]
    assert [step for step, _, _ in losses] == list(range(6))
    assert [step for step, _, _ in scores] == [3, 6]
    assert losses[-1][1] < losses[0][1]
    ends = [event["t"] for event in RunFolder(out).events()[0] if event["event"] == "step"]
    assert [at for _, _, at in losses] == [pytest.approx(end - ends[0], abs=1e-5) for end in ends]  # type: ignore[operator]
    assert found["network/bytes_sent"][0][1] > 0
    assert found["seconds/evaluation"][0][1] == 0


def test_a_run_that_goes_on_takes_the_place_of_what_it_does_again(tmp_path: Path) -> None:
    def leg(first: int, last: int, loss: float) -> None:
        with TensorBoard(tmp_path, clock=lambda: 100.0 + first) as sink:
            sink({"event": "begin", "rank": 0, "t": 0.5, "step": first, "steps": last})
            for step in range(first, last):
                sink({"event": "step", "rank": 0, "t": 1.0, "step": step, "mean_loss": loss, "loss": 9.0})
                sink({"event": "step", "rank": 1, "t": 1.0, "step": step, "mean_loss": 7.0, "loss": 9.0})

    leg(0, 4, 2.0)
    leg(2, 5, 1.0)
    assert [(step, loss) for step, loss, _ in curves(tmp_path)["train/loss"]] == [
        (0, 2.0), (1, 2.0), (2, 1.0), (3, 1.0), (4, 1.0),
    ]  # fmt: skip


def test_steps_without_a_finite_loss_have_no_point(tmp_path: Path) -> None:
    with TensorBoard(tmp_path) as sink:
        sink({"event": "step", "rank": 0, "t": 0.0, "step": 0, "mean_loss": 1.0})  # before it begins
        sink({"event": "begin", "rank": 0, "t": 0.0, "step": 0, "steps": 2})
        sink({"event": "step", "rank": 0, "t": 0.0, "step": 0, "mean_loss": None, "bytes_sent": 5})
        sink({"event": "checkpoint", "rank": 0, "t": 0.0, "step": 0, "path": "x"})
    assert list(curves(tmp_path)) == ["network/bytes_sent"]


def test_where_it_is_not_installed_that_is_said_before_anything_begins(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("farflung.extras.find_spec", lambda name: None if name == "tensorboard" else object())
    with pytest.raises(MissingExtra):
        TensorBoard(tmp_path)
    assert main(["train", "--tensorboard", "--out", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err == (
        "farflung: --tensorboard needs tensorboard: pip install 'farflung[tensorboard]'\n"
    )
    assert not (tmp_path / "run").exists()
