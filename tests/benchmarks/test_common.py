"""What benchmarks share: verdicts, hashes of sources, results that are kept, the command line."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.common import Benchmark, Expected, Group, Kept, Measured, Stored, main, source_hash, verdict
from benchmarks.common import rows as rows_module
from benchmarks.common.rows import all_but
from benchmarks.common.workers import environment
from farflung.errors import LabError

BENCHMARKS = sorted(path.parent for path in rows_module.ROOT.glob("benchmarks/*/expected.toml"))
FASTER = Expected("fast", "times", "higher", goal=2.0)
SMALLER = Expected("small", "bytes", "lower", goal=2.0)
STORED = Stored("fast", ours=3.0, spread=(2.5, 3.5), simulated=False, sources="now")


# --- verdicts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expected", "ours", "spread", "wanted"),
    [
        (FASTER, 2.0, (1.0, 3.0), "ahead"),
        (FASTER, 1.9, (1.8, 2.0), "equal"),
        (FASTER, 1.9, (1.8, 1.95), "short"),
        (SMALLER, 2.0, (1.0, 3.0), "ahead"),
        (SMALLER, 2.1, (2.0, 2.2), "equal"),
        (SMALLER, 2.1, (2.05, 2.2), "short"),
        (replace(FASTER, goal=None), 0.0, (0.0, 0.0), "ahead"),
    ],
)
def test_a_verdict_compares_with_the_goal(
    expected: Expected, ours: float, spread: tuple[float, float], wanted: str
) -> None:
    assert verdict(expected, replace(STORED, ours=ours, spread=spread), "now") == wanted


def test_what_was_never_measured_is_missing_and_what_no_longer_holds_is_stale() -> None:
    assert verdict(FASTER, None, "now") == "missing"
    assert verdict(FASTER, STORED, "later") == "stale"


@pytest.mark.parametrize("folder", BENCHMARKS, ids=lambda folder: folder.name)
def test_every_stored_row_is_expected(folder: Path) -> None:
    expected = rows_module.load_expected(folder)
    names = [row.name for row in expected]
    assert len(set(names)) == len(names)
    assert rows_module.load_stored(folder).keys() <= set(names)


# --- sources ----------------------------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of its own."""
    monkeypatch.setattr(rows_module, "ROOT", tmp_path)
    (tmp_path / "one.py").write_text('"""Text."""\n\n\ndef one() -> int:\n    return 1  # comment\n')
    (tmp_path / "two.py").write_text("def two() -> int:\n    return 2\n")
    return tmp_path


def test_a_hash_knows_code_and_no_comments(tree: Path) -> None:
    before = source_hash(["*.py"])
    (tree / "one.py").write_text("def one() -> int:\n    '''Other text.'''\n\n    return 1\n")
    assert source_hash(["*.py"]) == before
    (tree / "one.py").write_text("def one() -> int:\n    return 3\n")
    assert source_hash(["*.py"]) != before
    assert source_hash(["two.py"]) == source_hash(["*.py", "!one.py"]) != source_hash(["one.py"])


def test_what_is_not_run_is_left_out_by_name(tree: Path) -> None:
    assert all_but(".", "two") == ["!./one.py"]
    with pytest.raises(ValueError, match=r"no three in \."):
        all_but(".", "two", "three")


# --- kept -------------------------------------------------------------------------------------------------------


def test_what_is_kept_is_measured_once(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "results" / "kept.jsonl")
    times = []

    def measure() -> dict[str, int]:
        times.append(1)
        return {"value": len(times)}

    assert [kept.once({"seed": seed}, measure)["value"] for seed in (0, 0, 1, 0)] == [1, 1, 2, 1]
    assert Kept(tmp_path / "results" / "kept.jsonl", quick=True).once({"seed": 0}, measure)["value"] == 3
    assert len((tmp_path / "results" / "kept.jsonl").read_text().splitlines()) == 2


# --- the command line -------------------------------------------------------------------------------------------


def run(folder: Path, *args: str, ours: float = 3.0) -> int:
    def measure(quick: bool) -> Mapping[str, Measured]:
        return {"fast": Measured(ours, (ours, ours), {"quick": quick})}

    return main(one_row(folder, measure), [*args, "--json"])


def one_row(folder: Path, measure: Callable[[bool], Mapping[str, Measured]]) -> Benchmark:
    return Benchmark(folder, [Group(("fast",), measure, "measured", 1.0, ["one.py"])])


@pytest.fixture
def folder(tree: Path) -> Path:
    """Of a benchmark with two rows, one of which nothing measures."""
    folder = tree / "benchmarks" / "some"
    folder.mkdir(parents=True)
    row = '[[row]]\nname = "{}"\nunit = "times"\nbetter = "higher"\ngoal = 2.0\n'
    (folder / "expected.toml").write_text(row.format("fast") + row.format("other"))
    return folder


def verdicts(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    rows = json.loads(capsys.readouterr().out)["rows"]
    for row in rows:
        assert set(row) == {"name", "unit", "published", "goal", "ours", "spread", "simulated", "verdict"}
    return {row["name"]: row["verdict"] for row in rows}


def test_rows_are_measured_once_and_again_when_stale(
    tree: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, "--stored") == 0
    assert verdicts(capsys) == {"fast": "missing", "other": "missing"}
    run(folder)
    assert verdicts(capsys) == {"fast": "ahead", "other": "missing"}
    run(folder, ours=1.0)
    assert verdicts(capsys) == {"fast": "ahead", "other": "missing"}
    (tree / "one.py").write_text("def one() -> int:\n    return 3\n")
    run(folder, "--stored")
    assert verdicts(capsys) == {"fast": "stale", "other": "missing"}
    run(folder, ours=1.0)
    assert verdicts(capsys) == {"fast": "short", "other": "missing"}


def test_a_machine_that_does_not_allow_a_measurement_is_told_so(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(quick: bool) -> Mapping[str, Measured]:
        del quick
        raise LabError("some-network does not come out right on this machine")

    assert main(one_row(folder, measure), []) == 2
    assert "some: some-network does not come out right on this machine" in capsys.readouterr().err


def test_quick_runs_are_not_stored(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(folder, "--quick")
    assert verdicts(capsys) == {"fast": "ahead", "other": "missing"}
    assert not (folder / "results").exists()


def test_what_fails_or_is_stopped_leaves_what_was_measured(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(quick: bool) -> Mapping[str, Measured]:
        del quick
        raise RuntimeError("a worker failed")

    def stops(quick: bool) -> Mapping[str, Measured]:
        del quick
        raise KeyboardInterrupt

    def measures(quick: bool) -> Mapping[str, Measured]:
        del quick
        return {"fast": Measured(3.0, (3.0, 3.0))}

    groups = [Group((row,), how, "measured", 1.0, []) for row, how in (("other", fails), ("fast", measures))]
    assert main(Benchmark(folder, groups), ["--json"]) == 1
    assert verdicts(capsys) == {"fast": "ahead", "other": "missing"}
    assert main(Benchmark(folder, [Group(("other",), stops, "measured", 1.0, [])]), ["--json"]) == 130
    assert verdicts(capsys) == {"fast": "stale", "other": "missing"}


def test_only_rows_of_the_chosen_kinds_are_measured(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(folder, "--simulated", "--trainings")
    assert verdicts(capsys) == {"fast": "missing", "other": "missing"}
    run(folder, "--simulated", "--measured")
    assert verdicts(capsys) == {"fast": "ahead", "other": "missing"}


# --- workers ----------------------------------------------------------------------------------------------------


def test_workers_import_the_package_of_their_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere/src")
    here = f"{rows_module.ROOT}/src:{rows_module.ROOT}"
    assert environment()["PYTHONPATH"] == f"{here}:/elsewhere/src"
    monkeypatch.delenv("PYTHONPATH")
    assert environment()["PYTHONPATH"] == here
