"""``farflung schedule``: a grid that can be read, and a picture."""

from __future__ import annotations

from pathlib import Path

import pytest

from farflung.cli.main import main
from farflung.cli.schedule import grid
from farflung.errors import DataError
from farflung.recipes import RECIPES, recipe
from farflung.report import gantt_picture


def rows(schedule: str, steps: int) -> list[str]:
    """The cells of each row of the grid."""
    lines = grid(recipe("synchronous").but(schedule=schedule), steps, 0.1)[2:-1]
    return ["".join(line[27:].split()[:steps]) for line in lines]


def test_grids() -> None:
    assert rows("synchronous", 3) == ["*..", ".*.", "..*"]
    assert rows("pipelined(3, warmup=1)", 4) == ["*...", ".o->", "..o-", "...o"]
    assert rows("delayed(3, 2)", 7) == [".o-->..", "...o-->", ".....o-"]
    assert rows("delayed(0, 2)", 4) == [".*..", "...*"]


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_every_recipe_has_a_grid_and_a_picture(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "schedule.png"
    options = ["--steps", "5", "--workers", "2", "--mbytes", "0.001", "--out", str(out)]
    assert main(["schedule", name, *options]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{name}: ")
    assert out.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["nothing"], "unknown recipe 'nothing'"),
        (["dga", "--steps", "0"], "--steps 0: must be 1 or more"),
        (["dga", "--schedule", "delayed(delay=-1)"], "delay -1 must be at least 0"),
        (["dga", "--bandwidth", "0"], "--bandwidth 0: must be above 0"),
        (["dga", "--latency", "-1"], "--latency -1: must be 0 or more"),
        (["dga", "--latency", "inf"], "--latency inf: must be 0 or more"),
        (["dga", "--compute", "nan"], "--compute nan: must be above 0"),
        (["dga", "--network", "moon"], "moon"),
    ],
)
def test_bad_input(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", *options]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert "Traceback" not in said


def test_a_picture_needs_steps(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="hold no step"):
        gantt_picture(
            {0: [{"event": "begin", "rank": 0, "t": 0.0}]}, tmp_path / "x.png", title="", simulated=True
        )
