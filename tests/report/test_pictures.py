"""The frame of every picture: its mark, its title, and a write that fails; and what replicas have told, as read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from farflung.errors import DataError, StorageError
from farflung.report.pictures import create_picture
from farflung.report.reading import read_rank_histories
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


# --- pictures ---------------------------------------------------------------------------------------------------


def texts(figure: Figure) -> str:
    return "\n".join(text.get_text() for text in figure.findobj(Text))


@pytest.mark.parametrize("simulated", [True, False])
def test_simulated_times_are_marked(simulated: bool, tmp_path: Path) -> None:
    with create_picture(tmp_path / "new" / "a.png", (4, 2), r"$\frac{$", is_simulated=simulated) as figure:
        assert ("SIMULATED" in texts(figure)) is simulated
    content = (tmp_path / "new" / "a.png").read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert (b"simulated run" in content) is simulated


def test_a_title_is_taken_as_it_is(tmp_path: Path, drawn: list[Figure]) -> None:
    title = r"a $\nonsense{$ title % " + "that goes on " * 40
    with create_picture(tmp_path / "a.png", (4, 2), title):
        pass
    head = drawn[0].get_suptitle()
    assert head.startswith(r"a $\nonsense{$ title % that")
    assert head.count("\n") == 1
    assert head.endswith("…")


def test_a_failed_write_leaves_the_old_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(b"old")

    def savefig(self: Figure, target: Path, **_: Any) -> None:
        target.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(Figure, "savefig", savefig)
    with (
        pytest.raises(StorageError, match=r"a.png: cannot be written .disk full"),
        create_picture(path, (4, 2)),
    ):
        pass
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


# --- events -----------------------------------------------------------------------------------------------------


def seconds(rank_events: dict[int, list[Event]], part: str) -> list[float]:
    return [course.part_seconds[part] for course in read_rank_histories(rank_events).values()]


def test_time_of_a_run_that_ended_is_what_it_said() -> None:
    (course,) = read_rank_histories({0: session(0, steps=8, evaluate=(4,))}).values()
    assert course.part_seconds == {
        "compute": 8 * COMPUTE_S,
        "exposed_communication": 8 * EXPOSED_S,
        "data_wait": 8 * DATA_S,
        "scoring": 0.0,
        "evaluation": EVALUATION_S,
        "other": 77.0,
    }


def test_time_of_a_run_cut_short_is_summed_from_its_steps() -> None:
    events = {
        3: list(session(3, steps=2, end=False, t=5.0)),
        0: list(session(0, steps=8, evaluate=(4, 6), end=False, t=5.0)),
    }
    assert list(read_rank_histories(events)) == [0, 3]
    assert seconds(events, "compute") == [8 * COMPUTE_S, 2 * COMPUTE_S]
    assert seconds(events, "evaluation") == [2 * EVALUATION_S, 0.0]
    assert seconds(events, "other") == [0.0, 0.0]


def test_a_resumed_run_goes_on_in_time_and_repeats_no_step() -> None:
    # Killed after 10 steps and two evaluations, resumed from the checkpoint of step 6 on a new clock, killed again.
    events = [
        *session(0, steps=10, evaluate=(5, 10), end=False),
        *session(0, first=6, steps=8, evaluate=(8,), end=False, t=1.0),
    ]
    (course,) = read_rank_histories({0: events}).values()
    assert list(course.steps) == list(range(8))
    before = 10 * STEP_S + 2 * EVALUATION_S
    assert {step: at for step, (at, _) in course.evaluations.items()} == {
        5: 5 * STEP_S + EVALUATION_S,
        8: before + 2 * STEP_S + EVALUATION_S,
    }
    assert course.part_seconds["compute"] == 12 * COMPUTE_S
    assert course.part_seconds["evaluation"] == 3 * EVALUATION_S


@pytest.mark.parametrize(
    ("index", "field", "value", "said"),
    [
        (1, "compute_s", None, r"rank 7: no number compute_s in an event \(step\)"),
        (1, "t", True, r"rank 7: no number t in an event \(step\)"),
        (3, "time_s", [], "rank 7: its end has no time_s"),
        (3, "time_s", {}, "rank 7: its end has no number compute"),
    ],
)
def test_damaged_events_are_named(index: int, field: str, value: Any, said: str) -> None:
    events = list(session(7, steps=1, evaluate=(1,)))
    events[index][field] = value
    with pytest.raises(DataError, match=said):
        read_rank_histories({7: events})


def test_events_of_other_kinds_are_passed_over() -> None:
    assert seconds({0: [{"event": "hello", "rank": 0, "pid": 1}, *session(0, steps=2)]}, "compute") == [
        2 * COMPUTE_S
    ]
