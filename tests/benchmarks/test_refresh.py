"""One command makes the rows of all benchmarks fresh."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks import refresh
from benchmarks.common import Benchmark, Group, Measured, Trainings
from benchmarks.common import main as run_one
from benchmarks.common import rows as rows_module
from benchmarks.common import trainings as trainings_module
from benchmarks.refresh import Part
from farflung.errors import DataError

KINDS = ("trainings", "simulated", "measured")


@dataclass(frozen=True)
class Fake:
    rate: float
    title = "fake"

    def first_steps(self) -> int:
        return 20

    def digest(self, steps: int) -> str:
        return f"{steps}"

    def accuracy(self) -> float:
        return 50.0


@pytest.fixture
def benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Benchmark:
    """One row of each kind, nothing measured."""
    monkeypatch.setattr(rows_module, "ROOT", tmp_path)
    (tmp_path / "code.py").write_text("x = 1\n")
    folder = tmp_path / "benchmarks" / "some"
    folder.mkdir(parents=True)
    row = '[[row]]\nname = "{}"\nunit = "times"\nbetter = "higher"\n'
    (folder / "expected.toml").write_text("".join(row.format(kind) for kind in KINDS))
    trainings: Trainings[Fake, float] = Trainings(
        folder / "results" / "fakes.jsonl", Fake, ["*.py"], minutes=2.0
    )

    def trained(quick: bool) -> Mapping[str, Measured]:
        del quick
        return {"trainings": Measured(trainings.accuracy(Fake(0.1)), (0.0, 0.0))}

    def virtual(quick: bool) -> Mapping[str, Measured]:
        del quick
        return {"simulated": Measured(1.0, (1.0, 1.0), simulated=True)}

    def measured(quick: bool) -> Mapping[str, Measured]:
        del quick
        raise RuntimeError("too busy")

    measures = zip(KINDS, (trained, virtual, measured), strict=True)
    groups = [Group((kind,), measure, kind, 3.0, ["*.py"]) for kind, measure in measures]  # type: ignore[arg-type]
    return Benchmark(folder, groups, trainings)


class Runs:
    """Runs parts in this process, and keeps their names."""

    def __init__(self) -> None:
        self.kinds: list[str] = []

    def __call__(self, part: Part) -> int:
        self.kinds.append(part.kind)
        return run_one(part.benchmark, [f"--{part.kind}", "--json"])


def made(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["parts"]
    return {part["kind"]: part for part in found}


def test_what_is_due_is_made_once_and_shown_with_the_reason(
    benchmark: Benchmark, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = Runs()
    chosen = ["--trainings", "--simulated", "--json"]
    assert refresh.main([*chosen, "--stored"], [benchmark], runs) == 1
    assert made(capsys)["simulated"]["due"] == {"simulated": "never measured"}
    assert refresh.main(chosen, [benchmark], runs) == 0
    assert made(capsys)["simulated"]["fresh"] == ["simulated"]
    assert refresh.main(chosen, [benchmark], runs) == 0
    assert runs.kinds == ["trainings", "simulated"]
    (tmp_path / "code.py").write_text("x = 2\n")
    capsys.readouterr()
    assert refresh.main([*chosen, "--stored"], [benchmark], runs) == 1
    found = made(capsys)
    assert found["simulated"]["due"]["simulated"].startswith("code changed since 20")
    assert found["trainings"]["trainings_due"] == found["trainings"]["trainings_stored"] == 1
    assert found["trainings"]["minutes"] == 5.0


def test_what_fails_is_still_due(benchmark: Benchmark, capsys: pytest.CaptureFixture[str]) -> None:
    assert refresh.main(["--json"], [benchmark], Runs()) == 1
    found = made(capsys)
    assert not found["trainings"]["due"]
    assert found["measured"]["due"] == {"measured": "never measured"}


def test_what_cannot_be_had_on_this_machine_has_a_code_of_its_own(benchmark: Benchmark) -> None:
    assert refresh.main(["--simulated"], [benchmark], lambda part: 2) == 2


def test_it_stops_when_asked_to_and_goes_on_later(
    benchmark: Benchmark, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = Runs()

    def stopped(part: Part) -> int:
        if part.kind == "simulated":
            raise KeyboardInterrupt
        return runs(part)

    assert refresh.main(["--json"], [benchmark], stopped) == 130
    assert "the same command goes on from here" in capsys.readouterr().err
    refresh.main(["--json"], [benchmark], runs)
    assert runs.kinds == ["trainings", "simulated", "measured"]


def test_trainings_that_cannot_be_told_are_left_out_and_data_that_lacks_ends_them(
    benchmark: Benchmark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert benchmark.trainings is not None
    for rate in (0.1, 0.2, 0.3):
        benchmark.trainings.accuracy(Fake(rate))
    (tmp_path / "code.py").write_text("x = 2\n")
    monkeypatch.setattr(trainings_module, "machine", lambda: "another")
    monkeypatch.setattr(Fake, "digest", lambda self, steps: str(self.rate))
    monkeypatch.setattr(Fake, "accuracy", lambda self: pytest.fail("trained"))
    assert run_one(benchmark, ["--trainings", "--json"]) == 2
    assert capsys.readouterr().err.count("cannot be told here") == 4

    def lacking(self: Fake, steps: int) -> str:
        raise DataError("cifar-10 is not at hand")

    monkeypatch.setattr(Fake, "digest", lacking)
    assert run_one(benchmark, ["--trainings", "--json"]) == 2
    assert capsys.readouterr().err.count("cifar-10 is not at hand") == 2


# --- the benchmarks as they are ---------------------------------------------------------------------------------

ALL = {benchmark.name: benchmark for benchmark in refresh.every_benchmark()}


@pytest.mark.parametrize("name", ALL)
def test_a_row_belongs_to_one_group_and_is_expected(name: str) -> None:
    rows = [row for group in ALL[name].groups for row in group.rows]
    assert len(set(rows)) == len(rows)
    assert set(rows) <= {row.name for row in rows_module.load_expected(ALL[name].folder)}


@pytest.mark.parametrize("name", ALL)
def test_every_source_is_there(name: str) -> None:
    trainings = ALL[name].trainings
    sources = [source for group in ALL[name].groups for source in group.sources]
    for source in [*sources, *([] if trainings is None else trainings.sources)]:
        assert list(rows_module.ROOT.glob(source.removeprefix("!"))), source
