"""The benchmarks' results: verdicts, commits, trainings, the command line, and the pages that are made of them."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from benchmarks import pages, release
from benchmarks.common import Benchmark, Expected, Group, Kept, Measured, Result, Trainings, judge, main
from benchmarks.common import provenance as provenance_module
from benchmarks.common.provenance import ROOT, NotCommitted, changed_canaries, commit_here
from benchmarks.common.results import load_expected, load_results
from benchmarks.common.workers import environment
from farflung.errors import LabError
from tests.battery.cases import CASES

BENCHMARKS = {benchmark.name: benchmark for benchmark in release.every_benchmark()}
FASTER = Expected("fast", "times", "higher", published=10.0)
POINTS = Expected("points", "points", "lower", published=1.0)
RESULT = Result("fast", "times", 10.0, 10.0, 10.0, [0], False, "abc", "2026-01-01", {}, 1.0, {}, [])


# --- verdicts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expected", "low", "ours", "high", "wanted"),
    [
        (FASTER, 9.5, 10.9, 11.0, "reproduced"),
        (FASTER, 11.1, 12.0, 13.9, "better"),
        (FASTER, 6.0, 8.0, 8.9, "worse"),
        (FASTER, 8.8, 11.2, 11.3, "undecided"),
        (FASTER, 10.0, 11.2, 11.3, "better"),
        (replace(FASTER, tolerance=2.0), 11.0, 12.0, 12.0, "reproduced"),
        (replace(FASTER, better="lower"), 11.1, 12.0, 13.9, "worse"),
        (POINTS, 1.2, 1.4, 1.5, "reproduced"),
        (POINTS, -0.5, -0.2, 0.4, "better"),
        (replace(FASTER, published=None, goal=20.0), 1.0, 1.0, 1.0, ""),
    ],
)
def test_a_verdict_compares_with_the_published_figure(
    expected: Expected, low: float, ours: float, high: float, wanted: str
) -> None:
    assert judge(expected, replace(RESULT, low=low, ours=ours, high=high))[0] == wanted


def test_a_verdict_has_its_reason() -> None:
    assert judge(replace(FASTER, needs="svhn"), None) == ("not run", "needs svhn")
    assert judge(FASTER, replace(RESULT, reason="other links")) == ("not comparable", "other links")
    missed = replace(RESULT, ours=None, low=None, high=None, not_reached={"best": 68.2, "target": 69.0})
    assert judge(FASTER, missed) == ("not reached", "")
    assert missed.figure == "best 68.2, target 69"


@pytest.mark.parametrize("name", BENCHMARKS)
def test_rows_are_expected_stored_and_covered_by_the_battery(name: str) -> None:
    benchmark = BENCHMARKS[name]
    expected = [row.name for row in load_expected(benchmark.folder)]
    assert len(set(expected)) == len(expected)
    assert load_results(benchmark.folder).keys() <= set(expected)
    for group in benchmark.groups:
        assert set(group.rows) <= set(expected)
        assert group.battery
        assert set(group.battery) <= CASES.keys()
    if benchmark.trainings is not None:
        for training in benchmark.trainings.stored():
            assert set(benchmark.trainings._battery(training)) <= CASES.keys()


# --- commits ----------------------------------------------------------------------------------------------------


def git(folder: Path, *arguments: str) -> str:
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    done = subprocess.run(
        ["git", *author, *arguments], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def commit(folder: Path, **files: str) -> str:
    """With files whose folders are parted by two underscores."""
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_json", ".json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "files")
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with some code and a battery, and a benchmark with two rows, one of which nothing measures."""
    monkeypatch.setattr(provenance_module, "ROOT", tmp_path)
    provenance_module._recorded.cache_clear()
    git(tmp_path, "init", "-q")
    row = '[[row]]\nname = "{}"\nunit = "times"\nbetter = "higher"\npublished = 2.0\n'
    commit(
        tmp_path,
        src__code="1",
        tests__battery__expected_json='{"one": {"bytes": 1, "bits": {"2.13": "a"}, "virtual": {"times": [1]}}}',
        benchmarks__some__run="",
        **{"benchmarks__some__expected.toml": row.format("fast") + row.format("other")},
    )
    return tmp_path


def test_the_commit_is_the_last_that_changed_the_code(tree: Path) -> None:
    before = commit_here()
    commit(tree, docs__page="text", benchmarks__some__results__results="{}")
    (tree / "benchmarks/some/results/results").write_text("more")
    assert commit_here() == before
    assert commit(tree, src__code="2") == commit_here() != before
    (tree / "src" / "code").write_text("3")
    with pytest.raises(NotCommitted, match=r"commit the code before it is measured \(src/code\)"):
        commit_here()


def test_a_canary_has_changed_where_a_value_that_both_have_differs(tree: Path) -> None:
    before = commit_here()
    expected = tree / "tests" / "battery" / "expected.json"

    def changed(text: str, times: bool = True) -> list[str]:
        expected.write_text(text)
        provenance_module._recorded.cache_clear()
        return changed_canaries(["one", "two"], before, times=times)

    assert changed(expected.read_text()) == []
    assert changed('{"one": {"bytes": 1, "bits": {"2.14": "b"}}, "two": {}}') == []
    assert changed('{"one": {"bytes": 1, "bits": {"2.13": "b"}}}') == ["one"]
    assert changed('{"one": {"bytes": 2}}') == ["one"]
    assert changed('{"one": {"virtual": {"times": [2]}}}') == ["one"]
    assert changed('{"one": {"virtual": {"times": [2]}}}', times=False) == []
    with pytest.raises(NotCommitted, match="this clone has no commit 0123"):
        changed_canaries(["one"], "0123")


def test_parts_are_kept_for_one_commit(tree: Path) -> None:
    times: list[int] = []

    def once(seed: int, *, quick: bool = False) -> int:
        def measure() -> dict[str, int]:
            times.append(seed)
            return {"value": len(times)}

        kept = Kept(tree / "benchmarks" / "some", "cells", quick=quick)
        return int(kept.once({"seed": seed}, measure)["value"])

    (tree / ".gitignore").write_text("parts\n")
    assert [once(seed) for seed in (0, 0, 1, 0)] == [1, 1, 2, 1]
    assert once(0, quick=True) == 3
    commit(tree, src__code="2")
    assert once(0) == 4


# --- trainings --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Apart:
    parent: int
    seed: int
    more: int = 0
    title = "apart"

    def train(self) -> list[float]:
        assert os.getpid() != self.parent
        return [float(self.seed)]


@pytest.mark.thorough
def test_a_training_is_made_once_and_again_when_a_canary_has_changed(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1)  # importing torch is what costs
    path = tree / "benchmarks" / "some" / "results" / "trainings.jsonl"
    kept: Trainings[Apart, list[float]] = Trainings(path, Apart, lambda training: ("one",))
    wanted = [Apart(os.getpid(), seed) for seed in (3, 1)]
    assert kept.curves(wanted) == [[3.0], [1.0]]
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    assert [line["commit"] for line in lines] == [commit_here()] * 2
    for line in lines:
        del line["settings"]["more"]  # a setting that is new has its default
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(Apart, "train", lambda self: [self.seed + 0.5])
    assert kept.curve(wanted[1]) == [1.0]
    assert (kept.stored(), kept.due(), kept.curves([])) == (wanted, [], [])

    commit(tree, tests__battery__expected_json='{"one": {"bytes": 2}}', src__code="2")
    provenance_module._recorded.cache_clear()
    assert kept.due() == wanted
    assert kept.curve(wanted[1]) == [1.5]
    assert (kept.stored(), kept.due()) == (wanted, wanted[:1])


# --- the command line -------------------------------------------------------------------------------------------


class Command:
    """A benchmark's command, whose one row is measured as told."""

    def __init__(self, tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self._capsys = tree / "benchmarks" / "some", capsys
        self.groups = [Group(("fast",), self._measure, "measured", 1.0, ("one",))]
        self.ours: float | Exception | type[BaseException] = 3.0
        self.said = ""

    def _measure(self, quick: bool) -> Mapping[str, Measured]:
        if not isinstance(self.ours, float):
            raise self.ours
        return {"fast": Measured(self.ours, (self.ours, self.ours), {"quick": quick, "seeds": [4]})}

    def __call__(self, *args: str) -> tuple[int, str]:
        """The exit code, and the verdict on the row."""
        code = main(Benchmark(self.folder, self.groups), [*args, "--json"])
        captured = self._capsys.readouterr()
        self.said = captured.err
        row, other = json.loads(captured.out)["rows"]
        assert {"ours", "low", "high", "seeds", "commit", "date", "machine", "config", "battery"} < row.keys()
        assert {"published", "peer", "goal", "better", "verdict", "reason", "not_reached"} < row.keys()
        assert other["verdict"] == "not run"
        return code, row["verdict"]


@pytest.fixture
def command(tree: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    """Of the benchmark in the checkout."""
    return Command(tree, capsys)


def test_rows_are_measured_once_a_commit(tree: Path, command: Command) -> None:
    assert command("--stored") == (0, "not run")
    assert command() == (0, "better")
    command.ours = 1.0
    assert command() == (0, "better")
    assert command("--again") == (0, "worse")
    before = load_results(command.folder)["fast"]
    assert (before.commit, before.seeds, before.battery) == (commit_here(), [4], ["one"])
    command.ours = 2.0
    commit(tree, src__code="2")
    assert command("--stored") == (0, "worse")
    assert command() == (0, "reproduced")


def test_uncommitted_code_is_measured_by_quick_runs_alone(tree: Path, command: Command) -> None:
    (tree / "src" / "code").write_text("2")
    assert command() == (2, "not run")
    assert "some: commit the code before it is measured (src/code), or use --quick" in command.said
    assert command("--quick") == (0, "quick")
    assert not (command.folder / "results").exists()


def test_a_quick_run_shows_what_has_run_and_no_figure(
    command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(Benchmark(command.folder, command.groups), ["--quick"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("quick: shows that everything runs; figures mean nothing")
    assert [[cell.strip() for cell in line[1:-1].split("│")] for line in lines if line[0] == "│"] == [
        ["fast", "yes, 0.0 s"], ["other", "not run"],
    ]  # fmt: skip


@pytest.mark.parametrize("name", BENCHMARKS)
def test_rows_are_readable_at_80_columns(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(BENCHMARKS[name], ["--stored"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) == 80
    assert "…" not in "".join(lines)
    cells = [[cell.strip() for cell in line[1:-1].split("│")] for line in lines if line[0] == "│"]
    told = " ".join(cell for row in cells for cell in row)
    for result in load_results(BENCHMARKS[name].folder).values():
        assert (
            f"{result.low:.4g} to {result.high:.4g}" in told
            if result.low is not None
            else result.date in told
        )
    width = lines[-1].index("┴") - 3
    assert width > 15, "the names of rows have room"


def test_a_measurement_that_fails_or_is_stopped_leaves_the_others(command: Command) -> None:
    command.ours = LabError("some-network does not come out right on this machine")
    assert command() == (2, "not run")
    assert "some: some-network does not come out right on this machine" in command.said
    command.ours = RuntimeError("a worker failed")
    assert command() == (1, "not run")
    command.ours = KeyboardInterrupt
    assert command() == (130, "not run")


def test_a_row_of_trainings_is_as_old_as_the_oldest_of_them(tree: Path, command: Command) -> None:
    path = command.folder / "results" / "trainings.jsonl"
    path.parent.mkdir()
    line = {
        "settings": {"parent": 0, "seed": 5},
        "curve": [5.0],
        "commit": commit_here(),
        "date": "2020-01-01",
    }
    path.write_text(json.dumps({**line, "machine": {"cpu": "old"}}) + "\n")
    kept: Trainings[Apart, list[float]] = Trainings(path, Apart, lambda training: ("one",))
    commit(tree, src__code="2")

    def measure(quick: bool) -> Mapping[str, Measured]:
        del quick
        (value,) = kept.curve(Apart(0, 5))
        return {"fast": Measured(value, (value, value))}

    benchmark = Benchmark(command.folder, [Group(("fast",), measure, "trainings", 0.0, ("one",))], kept)
    assert main(benchmark, ["--json"]) == 0
    row = load_results(command.folder)["fast"]
    assert (row.ours, row.commit, row.date, row.machine) == (
        5.0,
        line["commit"],
        "2020-01-01",
        {"cpu": "old"},
    )


def test_the_release_runs_what_is_due(tree: Path, command: Command) -> None:
    asked: list[str] = []
    benchmark = Benchmark(command.folder, command.groups)

    def one(benchmark: Benchmark, kind: str) -> int:
        asked.append(kind)
        return main(benchmark, [f"--{kind}", "--json"])

    assert [release.main([], [benchmark], one), asked] == [0, ["measured"]]
    assert [release.main([], [benchmark], one), asked] == [0, ["measured"]]
    commit(tree, src__code="2")
    assert [release.main(["--simulated"], [benchmark], one), asked] == [0, ["measured"]]
    assert [release.main([], [benchmark], one), asked] == [0, ["measured", "measured"]]
    (tree / "src" / "code").write_text("3")
    assert release.main([], [benchmark], one) == 2


# --- pages ------------------------------------------------------------------------------------------------------


def test_pages_say_what_is_stored() -> None:
    found = pages.pages()
    assert pages.PAGE.read_text() == pages.results_page(found), "write them: scripts/bench --pages"
    assert sum(page.system is not None for page in found) == 6
    for path, block in pages.generated(found):
        text = path.read_text()
        assert text == pages.with_block(text, block), "write them: scripts/bench --pages"
    for page in found:
        assert len((page.folder / "README.md").read_text().splitlines()) <= 60, page.folder
        assert any(row.headline for row, _ in page.rows)


@pytest.mark.parametrize("name", ["mercury", "coded", "pipe_sgd", "gradiveq", "delayed", "scadles"])
def test_pages_of_papers_have_both_figures_and_their_pictures(name: str) -> None:
    path = pages.PAPERS / f"{name}.md"
    text = path.read_text()
    results = load_results(ROOT / "benchmarks" / name)
    headlines = [
        row for row in load_expected(ROOT / "benchmarks" / name) if row.headline and row.published is not None
    ]
    assert headlines
    for row in headlines:
        (line,) = (line for line in text.splitlines() if line.startswith(f"| {row.name} |"))
        cells = [cell.strip() for cell in line.split("|")]
        assert any(cell.startswith(f"{row.published:.4g} (") for cell in cells), line
        assert results[row.name].figure in cells, line
    linked = re.findall(r"!\[[^]]*\]\(([^)]+)\)", text)
    assert linked
    assert all((path.parent / picture).is_file() for picture in linked), linked


# --- workers ----------------------------------------------------------------------------------------------------


def test_workers_import_the_package_of_their_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere/src")
    assert environment()["PYTHONPATH"] == f"{ROOT}/src:{ROOT}:/elsewhere/src"
    monkeypatch.delenv("PYTHONPATH")
    assert environment()["PYTHONPATH"] == f"{ROOT}/src:{ROOT}"
