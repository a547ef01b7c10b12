"""Real replicas that are killed, stopped, or end: the others go on, on one model."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import farflung
from farflung.errors import RunLost
from farflung.telemetry import Event

STEPS, AT = 60, 20


class Strikes:
    """Sends a signal to workers once one of them has come to a step."""

    def __init__(self, ranks: tuple[int, ...], number: signal.Signals = signal.SIGKILL, at: int = AT) -> None:
        self._ranks, self._number, self._at = ranks, number, at
        self._pids: dict[int, int] = {}
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if event["event"] == "hello":
            self._pids[int(str(event["rank"]))] = int(str(event["pid"]))
        if self._ranks and event["event"] == "step" and event["step"] == self._at:
            ranks, self._ranks = self._ranks, ()
            for rank in ranks:
                os.kill(self._pids[rank], self._number)

    def of(self, kind: str) -> list[Event]:
        return [event for event in self.events if event["event"] == kind]


def trained(strikes: Strikes, workers: int, out: Path, **settings: object) -> farflung.Run:
    return farflung.train(
        "synthetic/quadratic", show=strikes, out=out, workers=workers, steps=STEPS,
        **{"elastic": 1, "deadline": 20.0, "evaluate_every": 25, "checkpoint_every": 25, **settings},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("workers", "lost"), [(3, (0,)), (3, (1,)), (3, (2,)), (4, (1, 3)), (2, (0,)), (2, (1,))]
)
def test_a_run_goes_on_without_those_that_were_killed(
    workers: int, lost: tuple[int, ...], tmp_path: Path
) -> None:
    strikes = Strikes(lost)
    run = trained(strikes, workers, tmp_path / "run")
    left = [rank for rank in range(workers) if rank not in lost]
    assert run.summary["steps"] == STEPS
    assert sorted(int(str(event["rank"])) for event in strikes.of("end")) == left
    assert len({event["final_loss"] for event in strikes.of("end")}) == 1
    assert {event["rank"] for event in strikes.of("lost")} == set(lost)
    views = strikes.of("view")
    assert views[-1]["members"] == left
    assert {rank for event in views for rank in event["lost"]} == set(lost)  # type: ignore[union-attr]
    assert (tmp_path / "run" / "model.safetensors").exists()


def test_it_goes_on_from_a_checkpoint_with_any_number(tmp_path: Path) -> None:
    trained(Strikes((1,)), 3, tmp_path / "run")
    step = f"step-{STEPS:08d}"
    assert {f.name for f in (tmp_path / "run" / "checkpoints" / step).iterdir()} == {
        "shared.safetensors", "rank-0-of-2.safetensors", "rank-1-of-2.safetensors",
    }  # fmt: skip
    run = farflung.train(resume=tmp_path / "run", workers=3, steps=STEPS + 10)
    assert run.summary["steps"] == STEPS + 10


def test_one_that_was_stopped_hears_that_it_is_out(tmp_path: Path) -> None:
    strikes = Strikes((1,), signal.SIGSTOP)

    def show(event: Event) -> None:
        strikes(event)
        if event["event"] == "view" and event["rank"] == 0:
            os.kill(strikes._pids[1], signal.SIGCONT)

    run = farflung.train(
        "synthetic/quadratic",
        show=show,
        out=tmp_path / "run",
        workers=3,
        elastic=1,
        steps=STEPS,
        deadline=1.0,
    )
    assert run.summary["steps"] == STEPS
    assert strikes.of("view")[0]["lost"] == [1]


def test_it_ends_by_name_where_too_few_are_left(tmp_path: Path) -> None:
    with pytest.raises(RunLost, match="view 2 has 2 members, and the run needs 3"):
        trained(Strikes((1,)), 3, tmp_path / "run", elastic=3)
