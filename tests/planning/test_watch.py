"""A run that leaves its plan says so in one line with the command to go on, and a plan has a page."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from farflung.cli.main import main
from farflung.planning import Pace, Plan, PlanRow, PlanWatch
from farflung.planning.table import build_plan_data
from farflung.recipes.planned import REFERENCE
from farflung.runs import RunConfig
from farflung.telemetry import Event
from farflung.types import Json
from tests.refusals import refuse

STEPS, STEP_S = 400, 0.5
SETTINGS: dict[str, Json] = {"workload": "synthetic/quadratic", "workers": 2}
BLOCKS = "local_sgd(sync_every=4)"


@pytest.fixture
def plan_path(tmp_path: Path) -> Path:
    """A plan of two recipes; each block of the first waits at its end, and its loss falls by a tenth in each tenth."""
    ends_s = [0.1, 0.2, 0.3, 4 * STEP_S]
    pace = Pace(0, 0.0, 0.0, ends_s, ends_s, 0.9, 100.0)
    bounds = [1 - tenth / 10 for tenth in range(10)]
    rows = [
        PlanRow(
            BLOCKS, "4g", pace, 200.0, STEP_S, 0.9, "reaches", low_s=90.0, high_s=180.0, loss_bounds=bounds
        ),
        PlanRow("powersgd(rank=2)", "4g", pace, 200.0, STEP_S, 0.9, "misses"),
        PlanRow(REFERENCE, "4g", pace, 200.0, STEP_S, 0.9, "reaches", high_s=210.0),
        PlanRow("delayed", reason="what it learns depends on the network"),
    ]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(Plan(rows, rows[0], REFERENCE, 0.1, STEPS, 0.7, SETTINGS, False).to_json()))
    return path


def watch(
    plan_path: Path,
    recipe: str,
    get_duration_s: Callable[[int], float],
    get_loss: Callable[[int], float | None],
) -> list[tuple[int, str]]:
    """Returns steps and texts of what is said in a whole run."""
    config = RunConfig.resolve({**SETTINGS, "steps": STEPS, "recipe": recipe})
    events: list[Event] = []
    sink = PlanWatch(plan_path, config, Path("runs/mine")).wrap(events.append)
    for step in range(STEPS):
        for rank in range(2):
            duration_s, loss = (get_duration_s(step), get_loss(step)) if rank == 0 else (99.0, 99.0)
            sink({"event": "step", "rank": rank, "step": step, "duration_s": duration_s, "mean_loss": loss})
    assert len(events) - 2 * STEPS == sum(event["event"] == "plan" for event in events)
    return [(int(str(event["step"])), str(event["text"])) for event in events if event["event"] == "plan"]


def take_block(step: int) -> float:
    return 4 * STEP_S - 0.3 if step % 4 == 3 else 0.1


def learn(step: int) -> float | None:
    return 0.9 * (1 - step / STEPS) if step % 4 == 3 else None


GO_ON = f"; to go on with another: farflung train --resume runs/mine --recipe '{REFERENCE}'"


def test_run_as_planned_says_nothing(plan_path: Path) -> None:
    assert watch(plan_path, BLOCKS, take_block, learn) == []


def test_slow_steps_are_said_once_until_they_are_as_planned_again(plan_path: Path) -> None:
    slow = range(100, 200)
    said = watch(plan_path, BLOCKS, lambda step: take_block(step) * (1.5 if step in slow else 1), learn)
    assert said == [(149, f"not as planned: a step takes 0.726 s in place of 0.484 s{GO_ON}")]


def test_loss_above_that_of_the_pilot_is_said(plan_path: Path) -> None:
    said = watch(plan_path, BLOCKS, take_block, lambda step: 0.75 if step >= 100 else learn(step))
    assert said == [(199, f"not as planned: the loss is 0.75 in place of at most 0.6{GO_ON}")]


def test_recipe_without_a_pilot_is_compared_by_its_times(plan_path: Path) -> None:
    (said,) = watch(plan_path, "powersgd(rank=2)", lambda step: 0.1, lambda step: 5.0)
    assert said == (
        49,
        f"not as planned: a step takes 0.1 s in place of 0.484 s{GO_ON.replace(REFERENCE, BLOCKS)}",
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--steps 40", "of a training with --steps 400, and this one has 40"),
        ("--workers 3", "of a training with --workers 2, and this one has 3"),
        ("--recipe delayed", "it has no times of recipe delayed"),
        ("--recipe diloco", "it has no times of recipe diloco"),
    ],
)
def test_plan_of_another_training_is_refused(
    options: str, message: str, plan_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--workload", "synthetic/quadratic", "--workers", "2", "--steps", str(STEPS), *options.split()]
    assert (
        main(["train", "--quiet", "--plan", str(plan_path), "--out", str(plan_path.parent / "run"), *words])
        == 2
    )
    assert capsys.readouterr().err.strip() == f"farflung: --plan {plan_path}: {message}"


def test_file_that_is_no_plan_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plan.json").write_text("{}")
    assert main(["train", "--plan", str(tmp_path / "plan.json"), "--workload", "synthetic/quadratic"]) == 2
    assert "not a plan of farflung plan" in capsys.readouterr().err
    assert main(["report", str(tmp_path)]) == 2


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("settings",), []),
        (("settings",), None),
        (("steps",), "many"),
        (("rows", 0, "recipe"), 3),
        (("rows", 0, "recipe"), "local_sgd("),
        (("rows", 0, "high_s"), "soon"),
        (("rows", 0, "status"), "lost"),
        (("rows", 0, "loss_bounds"), [1.0]),
        (("rows", 0, "loss_bounds"), 7),
        (("rows", 0, "pace", "ends_s"), []),
        (("rows", 0, "pace", "first_ends_s"), []),
        (("rows", 0, "pace", "ends_s"), ["a"]),
        (("rows", 0, "pace", "warmup"), None),
    ],
    ids=str,
)
def test_damaged_plan_is_refused(
    path: tuple[str | int, ...], value: Json, plan_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = part = json.loads(plan_path.read_text())
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    plan_path.write_text(json.dumps(content))
    out = refuse(capsys, "train", "--plan", plan_path, "--workload", "synthetic/quadratic", "--steps", STEPS)
    assert str(plan_path) in out


def test_plan_that_lacks_a_setting_is_refused(plan_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = json.loads(plan_path.read_text())
    del content["settings"]["workload"]
    plan_path.write_text(json.dumps(content))
    assert main(["train", "--plan", str(plan_path), "--workload", "synthetic/quadratic"]) == 2
    assert "of a training with --workload None" in capsys.readouterr().err
    assert main(["report", str(plan_path.parent)]) == 2
    assert "not a plan of farflung plan" in capsys.readouterr().err


def test_page_of_a_plan_has_bars_of_what_reaches_the_target(plan_path: Path) -> None:
    assert main(["report", str(plan_path.parent)]) == 0
    page = (plan_path.parent / "report.html").read_text()
    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0].replace("\\u003c", "<"))
    bars, table = data["sections"][0]["figures"]
    assert bars["rows"] == [[BLOCKS, 90.0, 90.0], [REFERENCE, 0.0, 210.0]]
    assert [row[0] for row in table["rows"]] == [BLOCKS, "powersgd(rank=2)", REFERENCE, "delayed"]
    assert data["state"] == f"take {BLOCKS}"


def test_page_of_a_plan_has_only_finite_numbers() -> None:
    row = PlanRow(BLOCKS, "4g", None, 1.0, 1.0, 0.9, "misses", gap=float("inf"), noise=float("nan"))
    made = Plan([row], None, REFERENCE, 0.1, STEPS, 0.7, SETTINGS, False)
    json.dumps(build_plan_data(made), allow_nan=False)
