"""A run that continues with another recipe: merged where it was, and equal on all replicas in both worlds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from farflung.runs import Run, simulate, train
from farflung.runs.folder import RunFolder
from farflung.telemetry import read_events
from tests.refusals import refuse

SMALL: dict[str, Any] = {
    "steps": 7,
    "workers": 2,
    "batch_size": 4,
    "evaluate_every": 0,
    "checkpoint_every": 7,
}
MODELLED: dict[str, Any] = {**SMALL, "network": "wifi-10mbps"}
RECIPES = {
    "pipelined": "synchronous(schedule=pipelined(width=3))",
    "delayed": "delayed(schedule=delayed(delay=3))",
    "local": "local_sgd(schedule=local_sgd(4))",
    "outer": "diloco(schedule=diloco(sync_every=4))",
    "residual": "synchronous(codec=error_feedback(topk(density=0.1)))",
}
DROPPED = {  # pipelined gradients are still due, at the rate of the steps to come
    "delayed": ["schedule delayed(delay=3)"],
    "local": [],
    "outer": ["schedule diloco(sync_every=4)"],
    "residual": ["codec error_feedback(topk(density=0.1))"],
}


def first_leg(folder: Path, recipe: str, **settings: Any) -> Run:
    return simulate("fashion-mnist/mlp", recipe, out=folder, data="packaged", **{**MODELLED, **settings})


def load_replicas(folder: Path, step: int, size: int = 2) -> list[dict[str, Any]]:
    """Returns the trees of a checkpoint, one of each replica."""
    files = RunFolder(folder)
    return [files.get_checkpoints(rank, size, is_leader=False).load(step)[1] for rank in range(size)]


@pytest.mark.parametrize("kind", DROPPED)
def test_a_recipe_begins_where_the_one_before_would_have_ended(tmp_path: Path, kind: str) -> None:
    before = first_leg(tmp_path / "run", RECIPES[kind]).state_dict()
    resumed = simulate(resume=tmp_path / "run", recipe="synchronous", steps=8, learning_rate=1e-30)
    after = resumed.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    begin = [event for event in read_events(resumed.files.get_telemetry_path(0)) if event["event"] == "begin"]
    assert [event.get("dropped") for event in begin] == [None, DROPPED[kind]]


@pytest.mark.parametrize("kind", ["delayed", "local", "outer"])
def test_replicas_that_took_steps_of_their_own_go_on_with_equal_moments(tmp_path: Path, kind: str) -> None:
    first_leg(tmp_path / "run", RECIPES[kind], momentum=0.9)
    own = [tree["optimizer"]["state"]["0"]["momentum_buffer"] for tree in load_replicas(tmp_path / "run", 7)]
    assert not torch.equal(*own)
    simulate(resume=tmp_path / "run", recipe="synchronous", steps=9, checkpoint_every=9)
    trees = load_replicas(tmp_path / "run", 9)
    for entries in zip(*(tree["optimizer"]["state"].values() for tree in trees), strict=True):
        assert torch.equal(*(entry["momentum_buffer"] for entry in entries))
    assert not any(tree["parameters"] for tree in trees)


@pytest.mark.parametrize(("old", "new"), [("delayed", "residual"), ("outer", "pipelined")])
def test_both_worlds_continue_with_equal_bits(tmp_path: Path, old: str, new: str) -> None:
    first_leg(tmp_path / "simulated", RECIPES[old])
    simulated = simulate(resume=tmp_path / "simulated", recipe=RECIPES[new], steps=12)
    train("fashion-mnist/mlp", RECIPES[old], data="packaged", out=tmp_path / "real", **SMALL)
    real = train(resume=tmp_path / "real", recipe=RECIPES[new], steps=12)
    expected, found = simulated.state_dict(), real.state_dict()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert real.summary["samples"] == simulated.summary["samples"]
    assert real.summary["bytes_sent_to"] == simulated.summary["bytes_sent_to"]


@pytest.mark.parametrize(
    ("recipe", "settings", "options", "says"),
    [
        (
            "synchronous",
            {},
            ["--stream", "rate(20)"],
            "its stream is in_memory, and samples in use stay there",
        ),
        (
            "local_sgd",
            {"optimizer": "lars"},
            ["--recipe", "ring", "--schedule", "synchronous"],
            "of Lars cannot be",
        ),
        (
            "pipe_sgd",
            {"elastic": "1"},
            ["--recipe", "synchronous"],
            "a run with --elastic cannot change its recipe",
        ),
    ],
    ids=["stream", "optimizer", "elastic"],
)
def test_what_cannot_go_on_is_refused(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    recipe: str,
    settings: dict[str, Any],
    options: list[str],
    says: str,
) -> None:
    simulate("synthetic/quadratic", recipe, out=tmp_path / "run", **{**MODELLED, **settings})
    said = refuse(capsys, "simulate", "--resume", tmp_path / "run", "--steps", "9", *options)
    assert says in said
    assert "resume with the recipe that it was made with" in said
