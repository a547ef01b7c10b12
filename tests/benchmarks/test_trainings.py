"""Stored trainings hold while their first steps end in the same digest."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.common import Trainings, Trial
from benchmarks.common import rows as rows_module
from benchmarks.common import trainings as trainings_module
from benchmarks.common.first_steps import digest, first_steps
from benchmarks.common.trainings import CannotTell
from farflung.codecs import DGC, Int8, chain, error_feedback
from farflung.recipes import recipe
from farflung.reducers import CodecReducer
from farflung.schedules import Synchronous


class Code:
    """What the code under a training does, and what it was asked to."""

    bits, accuracy, steps = "bits", 50.0, 20
    asked: list[str]


@dataclass(frozen=True)
class Fake:
    rate: float
    seed: int = 0
    title = "fake"

    def first_steps(self) -> int:
        return Code.steps

    def digest(self, steps: int) -> str:
        Code.asked.append("first steps")
        return f"{Code.bits} {steps} {self}"

    def accuracy(self) -> float:
        Code.asked.append("training")
        return Code.accuracy


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repository of its own, and code that can be changed."""
    monkeypatch.setattr(rows_module, "ROOT", tmp_path)
    (tmp_path / "code.py").write_text("x = 1\n")
    for name, value in (("bits", "bits"), ("accuracy", 50.0), ("steps", 20)):
        monkeypatch.setattr(Code, name, value)
    monkeypatch.setattr(Code, "asked", [], raising=False)


@pytest.fixture
def kept(tmp_path: Path) -> Trainings[Fake, float]:
    """With one that is stored."""
    kept: Trainings[Fake, float] = Trainings(
        tmp_path / "results" / "fakes.jsonl", Fake, ["*.py"], minutes=0.0
    )
    assert kept.accuracy(Fake(0.1)) == 50.0
    assert asked() == ["first steps", "training"]
    return kept


def asked() -> list[str]:
    found, Code.asked = Code.asked, []
    return found


def changed(monkeypatch: pytest.MonkeyPatch, **code: object) -> None:
    (rows_module.ROOT / "code.py").write_text("x = 2\n")
    for name, value in {"accuracy": 60.0, **code}.items():
        monkeypatch.setattr(Code, name, value)


def on(monkeypatch: pytest.MonkeyPatch, machine: str) -> None:
    monkeypatch.setattr(trainings_module, "machine", lambda: machine)


def test_a_stored_training_is_not_trained_again(kept: Trainings[Fake, float]) -> None:
    assert kept.accuracy(Fake(0.1)) == 50.0
    assert not kept.due()
    assert not asked()
    kept.accuracy(Fake(0.2))
    assert asked() == ["first steps", "training"]
    assert kept.stored() == [Fake(0.1), Fake(0.2)]


def test_changed_sources_ask_for_the_first_steps_alone(
    kept: Trainings[Fake, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    changed(monkeypatch)
    assert kept.due() == [Fake(0.1)]
    assert kept.accuracy(Fake(0.1)) == 50.0
    assert asked() == ["first steps"]
    assert kept.due() == []


def test_first_steps_that_differ_ask_for_a_training(
    kept: Trainings[Fake, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept.accuracy(Fake(0.2))
    asked()
    changed(monkeypatch, bits="others")
    assert kept.accuracy(Fake(0.1)) == 60.0
    assert asked() == ["first steps", "training"]
    assert kept.due() == [Fake(0.2)]
    assert kept.accuracy(Fake(0.1)) == 60.0
    assert kept.stored() == [Fake(0.1), Fake(0.2)]


def test_first_steps_that_are_too_few_say_nothing(
    kept: Trainings[Fake, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    changed(monkeypatch, steps=30)
    assert kept.accuracy(Fake(0.1)) == 60.0
    changed(monkeypatch, steps=20, accuracy=70.0)
    (rows_module.ROOT / "code.py").write_text("x = 3\n")
    assert kept.accuracy(Fake(0.1)) == 60.0


def test_another_machine_proves_what_is_equal_and_nothing_else(
    kept: Trainings[Fake, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    changed(monkeypatch)
    on(monkeypatch, "another")
    assert kept.accuracy(Fake(0.1)) == 50.0
    (rows_module.ROOT / "code.py").write_text("x = 3\n")
    on(monkeypatch, "a third")
    monkeypatch.setattr(Code, "bits", "others")
    asked()
    with pytest.raises(CannotTell, match=r"fake: its first 20 steps .* another; this is a third"):
        kept.accuracy(Fake(0.1))
    assert asked() == ["first steps"]
    assert kept.due() == [Fake(0.1)]
    on(monkeypatch, "another")
    assert kept.accuracy(Fake(0.1)) == 60.0


def test_the_same_code_on_another_machine_adds_a_digest(
    kept: Trainings[Fake, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch, "another")
    monkeypatch.setattr(Code, "bits", "others")
    assert kept.due() == [Fake(0.1)]
    assert kept.accuracy(Fake(0.1)) == 50.0
    assert asked() == ["first steps"]
    changed(monkeypatch)
    assert kept.accuracy(Fake(0.1)) == 50.0
    assert asked() == ["first steps"]


def test_a_setting_that_is_new_has_its_default(kept: Trainings[Fake, float], tmp_path: Path) -> None:
    path = tmp_path / "results" / "fakes.jsonl"
    line = json.loads(path.read_text())
    del line["seed"]
    path.write_text(json.dumps(line) + "\n")
    assert kept.accuracy(Fake(0.1)) == 50.0
    assert asked() == []


@dataclass(frozen=True)
class Apart:
    parent: int
    seed: int
    title = "apart"

    def first_steps(self) -> int:
        return 20

    def digest(self, steps: int) -> str:
        return f"{steps} {self}"

    def accuracy(self) -> float:
        assert os.getpid() != self.parent
        return float(self.seed)


def test_several_are_trained_in_processes_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1)  # importing torch is what costs
    kept: Trainings[Apart, float] = Trainings(
        tmp_path / "results" / "apart.jsonl", Apart, ["*.py"], minutes=0.0
    )
    wanted = [Apart(os.getpid(), seed) for seed in (3, 1, 2)]
    assert kept.accuracies(wanted) == [3.0, 1.0, 2.0]
    assert kept.stored() == wanted
    assert not kept.due()
    monkeypatch.setattr(Apart, "accuracy", None)
    assert kept.accuracies(wanted[1:]) == [1.0, 2.0]
    assert kept.accuracies([]) == []


# --- how many steps ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "steps"),
    [
        ("synchronous", 20),
        ("pipelined(width=2)", 20),
        ("pipelined(width=21)", 22),
        ("pipelined(width=2, warmup=100)", 103),
        ("delayed(delay=20)", 22),
        ("delayed(delay=20, period=5)", 30),
        ("delayed(delay=0, period=20)", 40),
        ("delayed(delay=20, period=8)", 36),
        ("delayed(delay=0, period=150)", 150),
        ("delayed(delay='auto')", 36),
    ],
)
def test_first_steps_last_until_everything_has_happened_twice(schedule: str, steps: int) -> None:
    parts = recipe("synchronous").but(schedule=schedule).parts(0)
    assert first_steps(nn.Linear(2, 2), parts.schedule, parts.reducer, 200) == steps


@pytest.mark.parametrize("codec", [DGC(warmup_steps=50), error_feedback(chain(DGC(warmup_steps=50), Int8()))])
def test_first_steps_outlast_the_warm_up_of_a_codec(codec: DGC) -> None:
    assert first_steps(nn.Linear(2, 2), Synchronous(), CodecReducer(codec), 200) == 52


# --- digests ----------------------------------------------------------------------------------------------------

TRIAL = Trial(workload="synthetic/quadratic", replicas=2, steps=40, batch_size=8)
RECIPES = [{"schedule": "synchronous"}, {"schedule": "delayed(delay=3, period=2)"}]


@pytest.mark.parametrize("parts", RECIPES, ids=str)
def test_a_digest_is_of_the_first_steps_of_the_whole_training(parts: dict[str, str]) -> None:
    trial = replace(TRIAL, parts=parts)
    found = trial.digest(20)
    assert trial.digest(20) == found
    others = [replace(trial, learning_rate=0.03), replace(trial, seed=1), replace(trial, steps=50)]
    assert found not in {other.digest(20) for other in others} | {trial.digest(21)}


def test_a_digest_knows_every_bit_name_and_shape() -> None:
    model = nn.Linear(2, 3)
    found = digest(model)
    assert digest(model.to(memory_format=torch.channels_last)) == found  # type: ignore[call-overload]
    with torch.no_grad():
        model.bias[1] = torch.nextafter(model.bias[1], torch.tensor(torch.inf))
    assert digest(model) != found
    flat = nn.ParameterDict({"w": torch.zeros(4)})
    assert len({digest(flat), digest(nn.ParameterDict({"w": torch.zeros(2, 2)}))}) == 2
    assert digest(flat) != digest(nn.ParameterDict({"v": torch.zeros(4)}))
