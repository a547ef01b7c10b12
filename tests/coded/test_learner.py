"""What a run learns: classes, targets, solvers, and the model that is kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from farflung.coded.linear_model import Classes, InMemoryProducts, LinearModel, Problem
from farflung.coded.parts import DataShard
from farflung.coded.run import Learner
from farflung.coded.solvers import solve
from farflung.errors import CheckpointError, DataError
from farflung.tasks import Task

LABELS = torch.tensor([3.0, -1.0, 7.5, 3.0])


def learned(learner: Learner, classes: Classes, x: torch.Tensor, y: torch.Tensor) -> LinearModel:
    count = classes.count
    problem = Problem(
        InMemoryProducts(x), learner.build_objective(count), learner.build_targets(classes.encode(y), count)
    )
    training = solve(learner.build_solver(count), problem, max_iterations=500)
    weights, intercepts = problem.split(
        Task(training, lambda resume: resume(), eager_start=True).result().weights
    )
    return LinearModel(weights, intercepts, classes)


def test_classes_are_numbered_in_order() -> None:
    classes = Classes.from_labels(LABELS)
    assert (classes.labels, classes.count) == ((-1.0, 3.0, 7.5), 3)
    assert classes.encode(torch.tensor([7.5, 8.0, -1.0, -2.0])).tolist() == [2, -1, 0, -1]
    assert classes.decode(torch.tensor([2, 0])).tolist() == [7.5, -1.0]
    assert classes.explain_mismatch(LABELS) == ""
    assert classes.explain_mismatch(torch.tensor([3.0, 4.0])) == (
        "it has the label 4, and training began with -1, 3, 7.5"
    )


def test_one_class_is_told_apart_from_the_rest() -> None:
    classes = Classes.from_labels(LABELS, positive=3.0)
    assert classes.count == 2
    assert classes.encode(torch.tensor([3.0, 8.0])).tolist() == [1, 0]
    assert classes.explain_mismatch(torch.tensor([8.0])) == ""
    with pytest.raises(DataError, match=r"positive = 4: no sample has that label; there are -1, 3, 7.5"):
        Classes.from_labels(LABELS, positive=4.0)
    with pytest.raises(DataError, match="all samples have the label 3"):
        Classes.from_labels(LABELS[:1], positive=3.0)


@pytest.mark.parametrize(
    "learner",
    [
        Learner(),
        Learner(model="svc"),
        Learner(model="svc", loss="hinge"),
        Learner(solver="gd", tolerance=1e-4),
    ],
    ids=str,
)
@pytest.mark.parametrize("positive", [None, 3.0])
def test_what_is_learned_tells_classes_apart(
    learner: Learner, positive: float | None, tmp_path: Path
) -> None:
    places = torch.tensor([[4.0, 0.0], [-4.0, 0.0], [0.0, 6.0]], dtype=torch.float64)
    random = torch.Generator().manual_seed(0)
    codes = torch.randint(3, (90,), generator=random)
    x = places[codes] + torch.randn(90, 2, generator=random, dtype=torch.float64)
    y = torch.tensor([-1.0, 3.0, 7.5], dtype=torch.float64)[codes]
    model = learned(learner, Classes.from_labels(y, positive), x, y)
    assert model.compute_accuracy(x, y) > 0.95
    model.save(tmp_path / "model.safetensors")
    again = LinearModel.load(tmp_path / "model.safetensors")
    assert again.classes == model.classes
    assert torch.equal(again.predict(x), model.predict(x))
    assert set(again.predict(x).tolist()) == ({0.0, 1.0} if positive else {-1.0, 3.0, 7.5})
    with pytest.raises(DataError, match="samples of 1 features, for a model of 2"):
        again.predict(x[:, :1])


def test_a_file_of_something_else_is_no_model(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_text("nothing of the kind")
    with pytest.raises(CheckpointError, match=str(path)):
        LinearModel.load(path)


@pytest.mark.parametrize("seed", [None, 3])
def test_parts_are_all_rows_once(seed: int | None) -> None:
    parts = [DataShard.parse(f"{number}/4", seed) for number in range(1, 5)]
    rows = [part.select_rows(10).tolist() for part in parts]
    assert sorted(row for part in rows for row in part) == list(range(10))
    assert ([row for part in rows for row in part] == list(range(10))) == (seed is None)
    assert str(parts[0]) == ("1/4" if seed is None else "1/4 of seed 3")
