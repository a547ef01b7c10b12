"""Progress on stderr: a bar in a terminal, plain lines elsewhere, and never a word to the one who trains."""

from __future__ import annotations

import io
import sys
import threading
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from farflung.cli.progress import Bar, ComparisonProgress, Progress
from farflung.telemetry import Event


class Clock:
    """A clock that shows what it is told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def console(*, terminal: bool = False, width: int = 80) -> Console:
    kind = {"TERM": "xterm"} if terminal else {}
    return Console(
        file=StringIO(),
        width=width,
        force_terminal=terminal,
        color_system=None,
        highlight=False,
        _environ=kind,
    )


def written(to: Console) -> str:
    assert isinstance(to.file, StringIO)
    return to.file.getvalue()


def shown(progress: Progress, width: int = 80) -> list[str]:
    """The bar as it stands, without the bar itself."""
    to = console(width=width)
    to.print(progress)
    return [" ".join(line.replace("━", "").replace("╸", "").split()) for line in written(to).splitlines()]


def begin(rank: int = 0, step: int = 0, steps: int = 1000) -> Event:
    return {"event": "begin", "rank": rank, "t": 0.0, "step": step, "steps": steps}


def step(number: int, rank: int = 0, mean_loss: float | None = 0.5) -> Event:
    """Step ``number`` of 64 samples in half a second, with half a second after each."""
    return {
        "event": "step", "rank": rank, "t": number + 0.5, "step": number, "loss": 9.0, "mean_loss": mean_loss,
        "samples": 64 * (number + 1), "bytes_sent": 10_000 * (number + 1), "duration_s": 0.5,
        "compute_s": 0.4, "exposed_s": 0.1, "data_s": 0.0,
    }  # fmt: skip


def evaluation(after: int, accuracy: float = 0.8731, rank: int = 0) -> Event:
    return {
        "event": "evaluation", "rank": rank, "t": float(after), "step": after, "accuracy": accuracy, "loss": 0.41234,
    }  # fmt: skip


def checkpoint(after: int) -> Event:
    return {
        "event": "checkpoint", "rank": 0, "t": float(after), "step": after, "path": f"runs/[a]/step-{after}",
    }  # fmt: skip


def end(*, stopped: bool = False) -> Event:
    return {"event": "end", "rank": 0, "t": 5000.0, "stopped": stopped}


# --- the bar ----------------------------------------------------------------------------------------------------


def test_the_bar_says_how_far_how_well_how_fast_and_how_long() -> None:
    clock = Clock()
    progress = Progress(console=console(), clock=clock)
    assert shown(progress) == ["starting: the workers 0:00:00", ""]
    progress(begin())
    assert shown(progress) == ["training 0/1,000 0:00:00", ""]
    clock.now += 30  # the first step warms up: it says nothing about the pace
    progress(step(0))
    assert shown(progress) == ["training 1/1,000 0:00:30", "loss 0.5000 128 samples/s sent 10.0 kB"]
    for number in range(1, 101):
        clock.now += 2
        progress(step(number, mean_loss=0.25 if number < 100 else None))
    progress(evaluation(101))
    clock.now += 1
    assert shown(progress) == [
        "training 101/1,000 0:03:51 0:29:57 left",
        "loss 0.2500 test accuracy 87.3 % 128 samples/s sent 1.0 MB",
    ]


def test_a_resumed_run_starts_where_it_was() -> None:
    clock = Clock()
    progress = Progress(console=console(), clock=clock)
    progress(begin(step=400))
    assert shown(progress) == ["training 400/1,000 0:00:00", "resumed at 400"]
    clock.now += 7
    progress(step(400))  # its samples are all those since step 0: no rate can be told from them
    assert shown(progress) == ["training 401/1,000 0:00:07", "loss 0.5000 sent 4.0 MB resumed at 400"]
    clock.now += 3
    progress(step(401))
    assert shown(progress) == [
        "training 402/1,000 0:00:10 0:29:54 left",
        "loss 0.5000 128 samples/s sent 4.0 MB resumed at 400",
    ]


def test_starting_up_is_shown_as_it_goes() -> None:
    clock = Clock()
    progress = Progress(console=console(), clock=clock)
    clock.now += 3.0
    assert shown(progress)[0] == "starting: the workers 0:00:03"
    for rank in (1, 0):
        progress({"event": "hello", "rank": rank, "pid": 7})
    assert shown(progress)[0] == "starting: 2 up, they meet 0:00:03"
    progress(begin())
    assert shown(progress)[0].startswith("training")
    progress({"event": "hello", "rank": 2, "pid": 7})
    assert shown(progress)[0].startswith("training")


def test_other_ranks_are_counted_and_not_shown() -> None:
    progress = Progress(console=console(), clock=Clock())
    progress(begin(rank=2, step=7))
    assert shown(progress) == ["starting: the workers 0:00:00", ""]
    progress(begin(rank=0))
    progress(step(0))
    before = shown(progress)
    progress(step(50, rank=2, mean_loss=99.0))
    progress(evaluation(50, accuracy=0.1, rank=2))
    assert shown(progress) == before
    assert before[1].endswith("2 replicas")


@pytest.mark.parametrize(("stopped", "word"), [(False, "done"), (True, "stopped")])
def test_the_end_is_said(stopped: bool, word: str) -> None:
    clock = Clock()
    progress = Progress(console=console(), clock=clock)
    progress(begin())
    clock.now += 5
    for event in (step(0), step(1), end(stopped=stopped)):
        progress(event)
    clock.now += 5  # the workers go home
    assert shown(progress)[0] == f"{word} 2/1,000 0:00:05"


def test_simulated_time_is_marked_and_the_wait_is_the_watchers() -> None:
    clock = Clock()
    progress = Progress(console=console(), clock=clock, is_simulated=True)
    progress(begin(steps=4))
    for number in range(3):
        clock.now += 60
        progress(step(number))
    assert shown(progress) == [
        "simulating 3/4 0:03:00 0:01:00 left",
        "loss 0.5000 simulated 0:00:02, 128 samples/s sent 30.0 kB",
    ]


@pytest.mark.parametrize("width", [1, 20, 80, 300])
def test_two_lines_whatever_the_width(width: int) -> None:
    progress = Progress(console=console(), clock=Clock())
    for event in (begin(step=3), step(3), step(4), evaluation(5)):
        progress(event)
    to = console(width=width)
    to.print(progress)
    lines = written(to).splitlines()
    assert len(lines) == 2
    assert max(map(len, lines)) <= min(width, 110)


def test_a_terminal_gets_the_bar_and_no_lines() -> None:
    to = console(terminal=True)
    with Progress(console=to, clock=Clock()) as progress:
        for event in (begin(steps=2), step(0), step(1), evaluation(2), checkpoint(2), end()):
            progress(event)
    assert "2/2  0:00:00\n" in written(to)
    assert "test accuracy 87.3 %" in written(to)
    assert "checkpoint" not in written(to)
    assert written(to).startswith("\x1b[?25l")
    assert written(to).endswith("\x1b[?25h")  # the cursor is back


def test_the_cursor_is_back_after_an_error() -> None:
    to = console(terminal=True)
    stderr, stdout = sys.stderr, sys.stdout

    def run() -> None:
        with Progress(console=to, clock=Clock()) as progress:
            progress(begin())
            assert sys.stdout is stdout
            raise KeyError

    with pytest.raises(KeyError):
        run()
    assert written(to).endswith("\x1b[?25h")
    assert sys.stderr is stderr


# --- plain lines ------------------------------------------------------------------------------------------------

RUN = [
    begin(),
    step(0),
    evaluation(100),
    checkpoint(100),
    evaluation(1000, accuracy=-2.5),
    checkpoint(1000),
    checkpoint(1000),
    evaluation(1000, accuracy=-2.5),
    end(),
]


def test_elsewhere_there_is_a_line_per_evaluation_and_checkpoint() -> None:
    simulated = console()
    with Progress(console=simulated, is_simulated=True) as progress:
        for event in (begin(), evaluation(100)):
            progress(event)
    line = "step 100 of 1,000, 0:01:40 simulated: test accuracy 87.3 %, test loss 0.4123\n"
    assert written(simulated) == line
    to = console(width=30)
    with Progress(console=to, clock=Clock()) as progress:
        for event in RUN:
            progress(event)
    assert written(to).splitlines() == [
        "step 100 of 1,000, 0:01:40: test accuracy 87.3 %, test loss 0.4123",
        "step 100 of 1,000, 0:01:40: checkpoint runs/[a]/step-100",
        "step 1,000 of 1,000, 0:16:40: test score -2.5, test loss 0.4123",
        "step 1,000 of 1,000, 0:16:40: checkpoint runs/[a]/step-1000",
    ]


@pytest.mark.parametrize("terminal", [True, False])
def test_quiet_is_quiet(terminal: bool) -> None:
    to = console(terminal=terminal)
    with Progress(console=to, quiet=True) as progress:
        for event in RUN:
            progress(event)
    assert written(to) == ""


def test_stderr_is_where_it_goes_and_colours_asked_for_make_no_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with Progress() as progress:
        for event in RUN[:3]:
            progress(event)
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "step 100 of 1,000, 0:01:40: test accuracy 87.3 %, test loss 0.4123\n"


# --- trouble stays here -----------------------------------------------------------------------------------------


class Terminal(StringIO):
    """A terminal that may go away, and counts what is written to it then."""

    def __init__(self, *, gone: bool) -> None:
        super().__init__()
        self.gone = gone
        self.tried = threading.Semaphore(0)

    def write(self, text: str) -> int:
        if self.gone:
            self.tried.release()
            raise OSError("gone")
        return super().write(text)

    def flush(self) -> None:
        if self.gone:
            raise ValueError("closed")


@pytest.mark.parametrize("terminal", [True, False])
def test_a_broken_terminal_reaches_nobody(terminal: bool) -> None:
    stderr = sys.stderr
    to = Console(file=Terminal(gone=True), force_terminal=terminal, _environ={"TERM": "xterm"})
    with Progress(console=to) as progress:
        for event in RUN:
            progress(event)
    assert sys.stderr is stderr


def test_a_terminal_that_goes_away_is_written_to_again_in_case_it_returns() -> None:
    file = Terminal(gone=False)
    with Progress(console=Console(file=file, force_terminal=True, _environ={"TERM": "xterm"})) as progress:
        file.gone = True
        for event in RUN:
            progress(event)
        assert file.tried.acquire(timeout=30)
        assert file.tried.acquire(timeout=30)


@pytest.mark.parametrize("stderr", [None, io.TextIOWrapper(io.BytesIO(), encoding="ascii")])
def test_odd_streams_reach_nobody(
    stderr: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if stderr is not None:
        stderr.close()
    monkeypatch.setattr(sys, "stderr", stderr)
    with Progress(clock=Clock()) as progress:
        for event in RUN:
            progress(event)
        assert progress._live is None
    assert sys.stderr is stderr
    assert shown(progress)[0] == "done 1/1,000 0:00:00", "followed to the end all the same"
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("term", ["dumb", "unknown"])
def test_a_dumb_terminal_gets_lines(term: str) -> None:
    to = Console(file=StringIO(), force_terminal=True, highlight=False, _environ={"TERM": term})
    with Progress(console=to) as progress:
        for event in RUN[:3]:
            progress(event)
    assert written(to) == "step 100 of 1,000, 0:01:40: test accuracy 87.3 %, test loss 0.4123\n"


@pytest.mark.parametrize(
    "event",
    [
        {},
        {"event": "step", "rank": 0},
        {"event": "begin", "rank": 0, "t": None, "step": "x", "steps": 1},
        {"event": "hello", "rank": 0, "pid": 4},
        {"event": "evaluation", "rank": 0, "t": 1.0, "step": 1, "accuracy": None, "loss": None},
    ],
)
def test_odd_events_reach_nobody(event: Event) -> None:
    to = console()
    progress = Progress(console=to, clock=Clock())
    progress(begin())
    progress(event)
    progress(step(0))
    assert shown(progress)[0] == "training 1/1,000 0:00:00"
    assert written(to) == ""


def test_an_interrupt_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    to = console()

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    progress = Progress(console=to)
    progress(begin())
    monkeypatch.setattr(to, "print", interrupted)
    with pytest.raises(KeyboardInterrupt):
        progress(evaluation(1))


# --- several runs, and other work -------------------------------------------------------------------------------


def counted(to: Console, *, quiet: bool = False) -> str:
    """Three runs of ten steps, of which the first is there already; a step takes two seconds."""
    clock = Clock()
    with ComparisonProgress(quiet=quiet, console=to, clock=clock) as count:
        count({"event": "compare", "rank": 0, "rows": 3, "steps": 30})
        count({"event": "row", "rank": 0, "name": "ring, seed 0", "steps": 10})
        count({"event": "row_end", "rank": 0})
        for name in ("ring, seed 1", "ring, seed 2"):
            count({"event": "row", "rank": 0, "name": name, "steps": 10})
            for _ in range(10):
                clock.now += 2.0
                count(step(0))
                count(step(0, rank=1))
                count(evaluation(1))
            count({"event": "row_end", "rank": 0})
    return written(to)


def test_a_line_for_each_run_where_there_is_no_terminal() -> None:
    assert counted(Console(file=StringIO(), width=20)).splitlines() == [
        "run 1 of 3: ring, seed 0",
        "run 2 of 3: ring, seed 1; about 0:00:20 left",
        "run 3 of 3: ring, seed 2",
    ]


def test_a_bar_in_a_terminal_and_nothing_when_quiet() -> None:
    drawn = counted(Console(file=StringIO(), width=100, force_terminal=True, force_interactive=True))
    assert "3 of 3" in drawn
    assert "run 1 of 3" not in drawn
    assert counted(Console(file=StringIO()), quiet=True) == ""


def test_without_a_thread_a_bar_is_drawn_at_each_change() -> None:
    to = console(terminal=True)
    threads = threading.active_count()
    with Bar("measuring", 2, thread=False, console=to, clock=Clock()) as bar:
        assert threading.active_count() == threads
        bar.detail = "messages"
        bar.advance(1)
        assert "messages" in written(to)
        assert "1/2" in written(to)
