"""Progress on stderr: a bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

from rich.console import Console, ConsoleOptions, RenderResult
from rich.filesize import decimal
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text
from typing_extensions import override

from farflung.cli.output import stderr_console
from farflung.report import score_words
from farflung.telemetry import Event, number

__all__ = ["Bar", "ComparisonProgress", "Progress", "clock_text"]

REFRESHES_PER_S = 5
RATE_STEPS = 50
"""Number of steps over which the rate of samples is averaged."""
WIDEST = 110


class Bar:
    """Progress bar with the time left, and a line of figures below.

    A terminal is written to from a separate thread, so a slow one delays nothing. Errors of the terminal are
    never raised. Printing the object itself renders the bar as it stands.

    Args:
      state: Text before the bar.
      total: Units of work; 0 if unknown.
      quiet: Whether to show nothing at all.
      thread: Whether to draw on a thread; otherwise at each change, so that nothing runs beside the work.
      unit: Function that formats an amount of work.
      console: Console to draw on; stderr by default.
      clock: Function that returns seconds.
    """

    def __init__(
        self,
        state: str,
        total: float = 0.0,
        *,
        quiet: bool = False,
        thread: bool = True,
        unit: Callable[[float], str] = "{:,.0f}".format,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.state, self.total, self.done = state, total, 0.0
        self.about = ""
        self._quiet, self._thread, self._unit, self._clock = quiet, thread, unit, clock
        self._console = stderr_console() if console is None else console
        self._live: _Live | None = None
        self._began = self._advanced = clock()
        self._ended: float | None = None
        self._paced: tuple[float, float] | None = None

    def open(self) -> None:
        """Displays the bar, in a terminal."""
        with suppress(Exception):
            if self._console.is_interactive and self._console.is_terminal and not self._quiet:
                live = _Live(
                    console=self._console,
                    get_renderable=lambda: self,
                    auto_refresh=self._thread,
                    refresh_per_second=REFRESHES_PER_S,
                    redirect_stdout=False,  # it may be a file
                )
                self._live = live  # set before the start, so that a failed start can be stopped
                live.start()

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            with suppress(Exception):
                self._live.stop()
            self._live = None

    def start(self, state: str, total: float, done: float = 0.0) -> None:
        """Starts to count other work, of which ``num_done`` units need no time."""
        self.state, self.total, self.done = state, total, done
        self._began, self._paced = self._clock(), None

    def advance(self, done: float) -> None:
        """Sets the number of units done; the first call only starts the pace, since the first unit warms up."""
        self.done, self._advanced = done, self._clock()
        if self._paced is None:
            self._paced = done, self._advanced
        if not self._thread and self._live is not None:
            self._live.refresh()

    def skip(self, units: float) -> None:
        """Counts units as done that took no time."""
        self.done += units
        if self._paced is not None:
            self._paced = self._paced[0] + units, self._paced[1]

    def finish(self, state: str) -> None:
        """Stops the clock."""
        self.state, self._ended = state, self._clock()

    def line(self, words: str, *, always: bool = False) -> None:
        """Prints a line if no bar is shown, or always with ``force``."""
        if not self._quiet and (always or self._live is None):
            with suppress(Exception):
                self._console.print(Text(words), soft_wrap=True)

    def left(self) -> str:
        """Formats the time left; empty before the pace is known and after the end."""
        if self._paced is None or self.done <= self._paced[0] or self._ended is not None:
            return ""
        pace = (self._advanced - self._paced[1]) / (self.done - self._paced[0])
        return f"{clock_text(pace * (self.total - self.done) - self._clock() + self._advanced)} left"

    def figures(self) -> Iterable[str]:
        """Returns the figures below the bar."""
        return [self.about]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Renders the bar and, below it, the figures."""
        elapsed = (self._clock() if self._ended is None else self._ended) - self._began
        count = f"{self._unit(self.done)}/{self._unit(self.total)}" if self.total else ""
        text = "  ".join(filter(None, (count, clock_text(elapsed), self.left())))
        grid = Table.grid(Column(), Column(ratio=1), Column(), padding=(0, 1))
        grid.width = min(options.max_width, WIDEST)
        bar = ProgressBar(total=max(1, self.total), completed=self.done, complete_style="cyan")
        grid.add_row(Text(self.state, style="bold"), bar, Text(text, no_wrap=True))
        yield grid
        yield Text("  ".join(self.figures()), no_wrap=True, overflow="ellipsis", style="dim")


class Progress(Bar):
    """Sink that shows the progress of a run; outside a terminal, only evaluations and checkpoints.

    Elapsed time is that of this machine; samples per second are on the run's own clock. Bytes sent are those of
    rank 0. Other arguments are those of :class:`Bar`.

    Args:
      is_simulated: Whether events come from a simulator; its time and rates are marked as simulated.
      followed_rank: Rank whose events are shown at first.
    """

    def __init__(
        self,
        *,
        quiet: bool = False,
        simulated: bool = False,
        followed: int = 0,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        source = "simulator" if simulated else "workers"
        super().__init__(f"starting: the {source}", quiet=quiet, console=console, clock=clock)
        self._simulated = simulated
        self._up: set[int] = set()
        self._replicas: set[int] = set()
        self._first = 0
        self._begin_t = self._t = 0.0
        self._loss: float | None = None
        self._score: float | None = None
        self._sent = 0
        self._recent: deque[tuple[int, float]] = deque(maxlen=RATE_STEPS)
        self._rate = ""
        self._told: set[tuple[str, int]] = set()
        self._followed = followed
        """Rank whose events are shown."""

    def __call__(self, event: Event) -> None:
        """Handles one event; of other ranks, only their start matters."""
        with suppress(Exception):
            if event["event"] == "hello":
                self._up.add(int(number(event, "rank")))
                if not self.total:
                    self.state = f"starting: {len(self._up)} up, they meet"
            if event["event"] == "begin":
                self._replicas.add(int(number(event, "rank")))
            if event["event"] == "view":
                self._view(event)
            if event["rank"] == self._followed:
                self._take(event)

    def _view(self, event: Event) -> None:
        values: Mapping[str, Any] = event
        members: list[int] = values["members"]
        if self._followed not in members:
            self._followed = members[0]
        changed = [
            f"{word} rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
            for word in ("lost", "joined")
            if (ranks := values[word])
        ]
        self._tell(event, f"{' and '.join(changed)}; {len(members)} go on as view {event['view']}")
        self._replicas = {*members}

    def _take(self, event: Event) -> None:
        kind = event["event"]
        if kind == "begin":
            first, steps, t = (number(event, name) for name in ("step", "steps", "t"))
            self._first, self._begin_t, self._t = int(first), t, t
            self.start("simulating" if self._simulated else "training", steps, first)
            self._recent.clear()
            if self._first == 0:  # after a resume the first step has the samples so far
                self._recent.append((0, 0.0))
        elif kind == "step":
            self._step(event)
        elif kind == "evaluation":
            self._t, loss = number(event, "t"), number(event, "loss")
            self._score = number(event, "accuracy")
            self._tell(event, f"test {' '.join(score_words(self._score))}, test loss {loss:.4g}")
        elif kind == "checkpoint":
            self._t = number(event, "t")
            self._tell(event, f"checkpoint {event['path']}")
        elif kind == "end":
            self.finish("stopped" if event.get("stopped") else "done")

    def _step(self, event: Event) -> None:
        self._t = number(event, "t")
        self.advance(int(number(event, "step")) + 1)
        if event["mean_loss"] is not None:
            self._loss = number(event, "mean_loss")
        self._sent = int(number(event, "bytes_sent"))
        self._recent.append((int(number(event, "samples")), number(event, "duration_s")))
        seconds = sum(duration for _, duration in self._recent) - self._recent[0][1]
        if seconds > 0:
            self._rate = f"{(self._recent[-1][0] - self._recent[0][0]) / seconds:,.0f} samples/s"

    def _tell(self, event: Event, words: str) -> None:
        """Prints a line for an event, once even if the event is repeated at the end of a run."""
        key = (str(event["event"]), int(number(event, "step")))
        if key not in self._told:
            self._told.add(key)
            elapsed = f"{clock_text(self._t - self._begin_t)}{' simulated' if self._simulated else ''}"
            self.line(f"step {key[1]:,} of {self.total:,.0f}, {elapsed}: {words}")

    @override
    def figures(self) -> Iterable[str]:
        if self._loss is not None:
            yield f"loss {self._loss:.4f}"
        if self._score is not None:
            yield f"test {' '.join(score_words(self._score))}"
        clock = f"simulated {clock_text(self._t - self._begin_t)}" if self._simulated else ""
        if clock or self._rate:
            yield ", ".join(filter(None, (clock, self._rate)))
        if self._sent:
            yield f"sent {decimal(self._sent)}"
        if len(self._replicas) > 1:
            yield f"{len(self._replicas)} replicas"
        if self._first:
            yield f"resumed at {self._first:,}"


class ComparisonProgress(Bar):
    """Sink that counts the steps of several runs; outside a terminal, prints a line at the end of each run.

    Other arguments are those of :class:`Bar`.
    """

    def __init__(
        self,
        *,
        quiet: bool = False,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__("starting", quiet=quiet, console=console, clock=clock)
        self._runs, self._number, self._through = 0, 0, 0.0

    @override
    def __enter__(self) -> Self:  # refused input shows no bar
        return self

    def __call__(self, event: Event) -> None:
        """Handles one event of the comparison, or of a run."""
        kind = event["event"]
        if kind == "compare":
            self._runs, self.total = int(number(event, "rows")), number(event, "steps")
            self.open()
        elif kind == "row":
            self._number += 1
            self._through += number(event, "steps")
            self.state, self.about = f"run {self._number} of {self._runs}", str(event["name"])
        elif kind == "row_end":  # no step of a stored run was counted
            self.skip(self._through - self.done)
            remaining = self.left() if self.done < self.total else ""
            self.line(f"{self.state}: {self.about}{f'; about {remaining}' if remaining else ''}")
        elif kind == "step" and event["rank"] == 0:
            self.advance(self.done + 1)


class _Live(Live):
    """Display that ignores errors of the terminal and tries again."""

    @override
    def refresh(self) -> None:
        with suppress(Exception):
            super().refresh()


def clock_text(seconds: float) -> str:
    """Formats a duration as hours, minutes and seconds."""
    return str(timedelta(seconds=int(max(0.0, seconds))))
