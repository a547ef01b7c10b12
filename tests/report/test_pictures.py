"""The picture of a run: it is there, it shows the run's own figures, and it says when they are simulated."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.text import Text

from farflung.errors import DataError, StorageError
from farflung.report import run_picture
from farflung.telemetry import Event

COMPUTE_S, EXPOSED_S, DATA_S, EVALUATION_S = 0.25, 0.5, 0.125, 2.0
STEP_S = COMPUTE_S + EXPOSED_S + DATA_S


def session(
    rank: int, *, first: int = 0, steps: int, evaluate: tuple[int, ...] = (), end: bool = True, t: float = 0.0
) -> Iterator[Event]:
    """The events of one replica from ``begin`` on; all durations are the constants above."""
    yield {"event": "begin", "rank": rank, "t": t, "step": first, "steps": steps}
    for step in range(first, steps):
        t += STEP_S
        yield {
            "event": "step", "rank": rank, "t": t, "step": step, "loss": 9.0, "mean_loss": 2.0 / (1 + step),
            "samples": 32 * (step + 1), "bytes_sent": 100 * (step + 1), "duration_s": STEP_S,
            "compute_s": COMPUTE_S, "exposed_s": EXPOSED_S, "data_s": DATA_S,
        }  # fmt: skip
        if step + 1 in evaluate:
            t += EVALUATION_S
            yield {
                "event": "evaluation", "rank": rank, "t": t, "step": step + 1,
                "accuracy": (step + 1) / 100, "loss": 1.0, "duration_s": EVALUATION_S,
            }  # fmt: skip
    if end:
        count = steps - first
        yield {
            "event": "end", "rank": rank, "t": t,
            "time_s": {
                "compute": COMPUTE_S * count, "exposed_communication": EXPOSED_S * count,
                "data_wait": DATA_S * count, "evaluation": EVALUATION_S * len(evaluate), "other": 77.0,
            },
        }  # fmt: skip


def bars(axes: Axes) -> dict[str, list[float]]:
    """Widths by part, from the top bar down."""
    return {str(c.get_label()): [p.get_width() for p in c] for c in axes.containers}


def texts(figure: Figure) -> str:
    return "\n".join(text.get_text() for text in figure.findobj(Text))


def check_png(path: Path) -> None:
    """Whole, of the width it should be, and neither empty nor one colour."""
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert content.endswith(b"IEND\xaeB`\x82")
    width, height = struct.unpack(">II", content[16:24])
    assert width == 1800
    assert 500 <= height <= 1000
    assert len(content) > 15_000
    pixels = imread(path)
    assert pixels.shape[:2] == (height, width)
    for panel in np.array_split(pixels[:, :, :3], 3, axis=1):
        assert panel.std() > 0.02


@pytest.mark.parametrize("ranks", [1, 64])
def test_any_number_of_replicas_makes_a_picture(ranks: int, tmp_path: Path) -> None:
    path = tmp_path / "new" / "run.png"
    events = {rank: session(rank, steps=40, evaluate=(10, 20, 40)) for rank in range(ranks)}
    run_picture(events, path, title="fashion-mnist/cnn", simulated=False)
    check_png(path)
    assert [file.name for file in path.parent.iterdir()] == ["run.png"]


@pytest.mark.parametrize(("steps", "evaluate"), [(1, ()), (1, (1,)), (200, (200,))])
def test_few_points_make_a_picture(steps: int, evaluate: tuple[int, ...], tmp_path: Path) -> None:
    path = tmp_path / "run.png"
    run_picture({0: session(0, steps=steps, evaluate=evaluate)}, path, title=r"$\frac{$", simulated=True)
    check_png(path)
    assert b"simulated run" in path.read_bytes()


@pytest.mark.parametrize("ranks", [1, 16, 17, 64])
def test_every_rank_has_its_bar(ranks: int, tmp_path: Path, drawn: list[Figure]) -> None:
    events = {rank: session(rank, steps=4 + rank) for rank in reversed(range(ranks))}
    run_picture(events, tmp_path / "run.png", title="", simulated=False)
    axes = drawn[0].axes[2]
    assert bars(axes)["compute"] == [COMPUTE_S * (4 + rank) for rank in range(ranks)]
    bottom, top = axes.get_ylim()
    assert bottom > ranks - 0.6
    assert top < -0.4
    shares = [text.get_text() for text in axes.texts if text.get_text().endswith(" %")]
    assert bool(shares) is (ranks <= 16)
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == [str(rank) for rank in axes.get_yticks()]
    assert len(labels) == {1: 1, 16: 16, 17: 9, 64: 16}[ranks]


def test_an_evaluation_without_steps_makes_a_picture(tmp_path: Path, drawn: list[Figure]) -> None:
    event: Event = {
        "event": "evaluation",
        "rank": 0,
        "t": 3.0,
        "step": 0,
        "accuracy": 0.5,
        "loss": 1.0,
        "duration_s": 0.0,
    }
    run_picture({0: [event], 1: []}, tmp_path / "run.png", title="", simulated=False)
    assert "no losses yet" in texts(drawn[0])
    assert "50.0 %" in texts(drawn[0])


def test_the_curves_are_the_events(tmp_path: Path, drawn: list[Figure]) -> None:
    run_picture(
        {0: session(0, steps=100, evaluate=(40, 100))}, tmp_path / "run.png", title="", simulated=False
    )
    losses, scores, _ = drawn[0].axes
    raw, smooth = losses.lines
    assert np.asarray(raw.get_xdata()).tolist() == list(range(100))
    assert np.asarray(raw.get_ydata()).tolist() == [2.0 / (1 + step) for step in range(100)]
    # Five steps about each; the first stands alone, and behind the last there is nothing.
    expected = {
        0: 2.0,
        1: (2 + 2 / 2 + 2 / 3) / 3,
        50: np.mean([2 / n for n in range(49, 54)]),
        99: np.mean([2 / n for n in (98, 99, 100)]),
    }
    for step, value in expected.items():
        assert np.asarray(smooth.get_ydata())[step] == pytest.approx(value)
    (line,) = scores.lines
    assert np.asarray(line.get_xdata()).tolist() == [
        40 * STEP_S + EVALUATION_S,
        100 * STEP_S + 2 * EVALUATION_S,
    ]
    assert np.asarray(line.get_ydata()).tolist() == [0.4, 1.0]
    assert "100.0 %" in texts(drawn[0])


def test_steps_without_a_mean_loss_are_left_out(tmp_path: Path, drawn: list[Figure]) -> None:
    events = list(session(0, steps=6))
    events[1]["mean_loss"] = None
    events[3]["mean_loss"] = math.nan
    run_picture({0: events}, tmp_path / "run.png", title="", simulated=False)
    assert np.asarray(drawn[0].axes[0].lines[0].get_xdata()).tolist() == [1, 3, 4, 5]


def test_a_score_that_is_no_accuracy_is_not_called_one(tmp_path: Path, drawn: list[Figure]) -> None:
    events = list(session(0, steps=2, evaluate=(1, 2)))
    events[2]["accuracy"] = -2.5
    run_picture({0: events}, tmp_path / "run.png", title="", simulated=False)
    assert drawn[0].axes[1].get_title(loc="left") == "Test score"
    assert "accuracy" not in texts(drawn[0])


def test_time_of_a_run_that_ended_is_what_it_said(tmp_path: Path, drawn: list[Figure]) -> None:
    run_picture({0: session(0, steps=8, evaluate=(4,))}, tmp_path / "run.png", title="", simulated=False)
    assert bars(drawn[0].axes[2]) == {
        "compute": [8 * COMPUTE_S],
        "exposed communication": [8 * EXPOSED_S],
        "data wait": [8 * DATA_S],
        "evaluation, checkpoints": [EVALUATION_S],
        "other": [77.0],
    }


def test_time_of_a_run_cut_short_is_summed_from_its_steps(tmp_path: Path, drawn: list[Figure]) -> None:
    events = {
        0: session(0, steps=8, evaluate=(4, 6), end=False, t=5.0),
        3: session(3, steps=2, end=False, t=5.0),
    }
    run_picture(events, tmp_path / "run.png", title="", simulated=False)
    assert bars(drawn[0].axes[2]) == {
        "compute": [8 * COMPUTE_S, 2 * COMPUTE_S],
        "exposed communication": [8 * EXPOSED_S, 2 * EXPOSED_S],
        "data wait": [8 * DATA_S, 2 * DATA_S],
        "evaluation, checkpoints": [2 * EVALUATION_S, 0.0],
        "other": [0.0, 0.0],
    }
    assert [label.get_text() for label in drawn[0].axes[2].get_yticklabels()] == ["0", "3"]


def test_the_parts_of_a_bar_stand_side_by_side(tmp_path: Path, drawn: list[Figure]) -> None:
    run_picture({0: session(0, steps=8)}, tmp_path / "run.png", title="", simulated=False)
    patches = [part[0] for part in drawn[0].axes[2].containers]
    ends = [patch.get_x() + patch.get_width() for patch in patches]
    assert [patch.get_x() for patch in patches] == [0.0, *ends[:-1]]


def test_a_resumed_run_goes_on_in_time_and_repeats_no_step(tmp_path: Path, drawn: list[Figure]) -> None:
    # Killed after 10 steps and two evaluations, resumed from the checkpoint of step 6 on a new clock, killed again.
    events = [
        *session(0, steps=10, evaluate=(5, 10), end=False),
        *session(0, first=6, steps=8, evaluate=(8,), end=False, t=1.0),
    ]
    run_picture({0: events}, tmp_path / "run.png", title="", simulated=False)
    losses, scores, times = drawn[0].axes
    assert np.asarray(losses.lines[0].get_xdata()).tolist() == list(range(8))
    before = 10 * STEP_S + 2 * EVALUATION_S
    assert np.asarray(scores.lines[0].get_xdata()).tolist() == [
        5 * STEP_S + EVALUATION_S,
        before + 2 * STEP_S + EVALUATION_S,
    ]
    assert bars(times)["compute"] == [12 * COMPUTE_S]
    assert bars(times)["evaluation, checkpoints"] == [3 * EVALUATION_S]


@pytest.mark.parametrize("simulated", [True, False])
def test_simulated_times_are_marked(simulated: bool, tmp_path: Path, drawn: list[Figure]) -> None:
    run_picture({0: session(0, steps=3, evaluate=(3,))}, tmp_path / "run.png", title="t", simulated=simulated)
    assert ("SIMULATED" in texts(drawn[0])) is simulated
    clock = "simulated time (s)" if simulated else "time (s)"
    assert [axes.get_xlabel() for axes in drawn[0].axes[1:]] == [clock, clock]


def test_a_title_is_taken_as_it_is(tmp_path: Path, drawn: list[Figure]) -> None:
    title = r"a $\nonsense{$ title % " + "that goes on " * 40
    run_picture({0: session(0, steps=3)}, tmp_path / "run.png", title=title, simulated=False)
    head = drawn[0].get_suptitle()
    assert head.startswith(r"a $\nonsense{$ title % that")
    assert head.count("\n") == 1
    assert head.endswith("…")


@pytest.mark.parametrize(
    "events",
    [{}, {0: []}, {0: [{"event": "begin", "rank": 0, "t": 0.0, "step": 0, "steps": 9}], 1: []}],
    ids=["no ranks", "no events", "no steps"],
)
def test_nothing_to_draw_is_said(events: dict[int, list[Event]], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"run\.png: the run's events hold no step and no evaluation"):
        run_picture(events, tmp_path / "run.png", title="", simulated=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("index", "field", "value", "said"),
    [
        (1, "compute_s", None, r"rank 7: no number compute_s in an event \(step\)"),
        (1, "t", True, r"rank 7: no number t in an event \(step\)"),
        (2, "accuracy", "high", r"rank 7: no number accuracy in an event \(evaluation\)"),
        (3, "time_s", [], "rank 7: its end has no time_s"),
        (3, "time_s", {}, "rank 7: its end has no number compute"),
    ],
)
def test_damaged_events_are_named(index: int, field: str, value: Any, said: str, tmp_path: Path) -> None:
    events = list(session(7, steps=1, evaluate=(1,)))
    events[index][field] = value
    with pytest.raises(DataError, match=said):
        run_picture({7: events}, tmp_path / "run.png", title="", simulated=False)


def test_events_of_other_kinds_are_passed_over(tmp_path: Path, drawn: list[Figure]) -> None:
    events: list[Event] = [{"event": "hello", "rank": 0, "pid": 1}, *session(0, steps=2)]
    run_picture({0: events}, tmp_path / "run.png", title="", simulated=False)
    assert bars(drawn[0].axes[2])["compute"] == [2 * COMPUTE_S]


def test_a_failed_write_leaves_the_old_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.png"
    path.write_bytes(b"old")

    def savefig(self: Figure, target: Path, **_: Any) -> None:
        target.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(Figure, "savefig", savefig)
    with pytest.raises(StorageError, match=r"run.png: cannot be written .disk full"):
        run_picture({0: session(0, steps=2)}, path, title="", simulated=False)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
