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

from farflung.cli.output import create_stderr_console
from farflung.report import format_score
from farflung.telemetry import Event, read_number

__all__ = ["Bar", "ComparisonProgress", "Progress", "format_clock"]

REFRESHES_PER_S = 5
RATE_STEPS = 50
"""Number of steps over which the rate of samples is averaged."""
MAX_WIDTH = 110


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
        self.state, self.total, self.num_done = state, total, 0.0
        self.detail = ""
        self._is_quiet, self._uses_thread, self._unit, self._clock = quiet, thread, unit, clock
        self._console = create_stderr_console() if console is None else console
        self._live: _Live | None = None
        self._start_s = self._advance_s = clock()
        self._end_s: float | None = None
        self._pace_origin: tuple[float, float] | None = None

    def start_display(self) -> None:
        """Starts the live display, if the console is a terminal and not quiet."""
        with suppress(Exception):
            if self._console.is_interactive and self._console.is_terminal and not self._is_quiet:
                live = _Live(
                    console=self._console,
                    get_renderable=lambda: self,
                    auto_refresh=self._uses_thread,
                    refresh_per_second=REFRESHES_PER_S,
                    redirect_stdout=False,  # it may be a file
                )
                self._live = live  # set before the start, so that a failed start can be stopped
                live.start()

    def __enter__(self) -> Self:
        self.start_display()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            with suppress(Exception):
                self._live.stop()
            self._live = None

    def start(self, state: str, total: float, num_done: float = 0.0) -> None:
        """Starts to count other work, of which ``num_done`` units need no time."""
        self.state, self.total, self.num_done = state, total, num_done
        self._start_s, self._pace_origin = self._clock(), None

    def advance(self, num_done: float) -> None:
        """Sets the number of units done; the first call only starts the pace, since the first unit warms up."""
        self.num_done, self._advance_s = num_done, self._clock()
        if self._pace_origin is None:
            self._pace_origin = num_done, self._advance_s
        if not self._uses_thread and self._live is not None:
            self._live.refresh()

    def skip(self, units: float) -> None:
        """Counts units as done that took no time."""
        self.num_done += units
        if self._pace_origin is not None:
            self._pace_origin = self._pace_origin[0] + units, self._pace_origin[1]

    def finish(self, state: str) -> None:
        """Stops the clock."""
        self.state, self._end_s = state, self._clock()

    def print_line(self, text: str, *, force: bool = False) -> None:
        """Prints a line if no bar is shown, or above the bar with ``force``; nothing if quiet."""
        if not self._is_quiet and (force or self._live is None):
            with suppress(Exception):
                self._console.print(Text(text), soft_wrap=True)

    def format_remaining(self) -> str:
        """Formats the time left; empty before the pace is known and after the end."""
        if self._pace_origin is None or self.num_done <= self._pace_origin[0] or self._end_s is not None:
            return ""
        pace = (self._advance_s - self._pace_origin[1]) / (self.num_done - self._pace_origin[0])
        return f"{format_clock(pace * (self.total - self.num_done) - self._clock() + self._advance_s)} left"

    def list_figures(self) -> Iterable[str]:
        """Returns the figures below the bar."""
        return [self.detail]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Renders the bar and, below it, the figures."""
        elapsed = (self._clock() if self._end_s is None else self._end_s) - self._start_s
        count = f"{self._unit(self.num_done)}/{self._unit(self.total)}" if self.total else ""
        text = "  ".join(filter(None, (count, format_clock(elapsed), self.format_remaining())))
        grid = Table.grid(Column(), Column(ratio=1), Column(), padding=(0, 1))
        grid.width = min(options.max_width, MAX_WIDTH)
        bar = ProgressBar(total=max(1, self.total), completed=self.num_done, complete_style="cyan")
        grid.add_row(Text(self.state, style="bold"), bar, Text(text, no_wrap=True))
        yield grid
        yield Text("  ".join(self.list_figures()), no_wrap=True, overflow="ellipsis", style="dim")


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
        is_simulated: bool = False,
        followed_rank: int = 0,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        source = "simulator" if is_simulated else "workers"
        super().__init__(f"starting: the {source}", quiet=quiet, console=console, clock=clock)
        self._is_simulated = is_simulated
        self._started_ranks: set[int] = set()
        self._replicas: set[int] = set()
        self._first_step = 0
        self._begin_s = self._time_s = 0.0
        self._loss: float | None = None
        self._score: float | None = None
        self._sent = 0
        self._recent: deque[tuple[int, float]] = deque(maxlen=RATE_STEPS)
        self._rate = ""
        self._reported: set[tuple[str, int]] = set()
        self._followed_rank = followed_rank
        """Rank whose events are shown."""

    def __call__(self, event: Event) -> None:
        """Handles one event; of other ranks, only their start matters."""
        with suppress(Exception):
            if event["event"] == "hello":
                self._started_ranks.add(int(read_number(event, "rank")))
                if not self.total:
                    self.state = f"starting: {len(self._started_ranks)} up, they meet"
            if event["event"] == "begin":
                self._replicas.add(int(read_number(event, "rank")))
            if event["event"] == "view":
                self._handle_view(event)
            if event["rank"] == self._followed_rank:
                self._update_from_followed_rank(event)

    def _handle_view(self, event: Event) -> None:
        values: Mapping[str, Any] = event
        members: list[int] = values["members"]
        if self._followed_rank not in members:
            self._followed_rank = members[0]
        changed = [
            f"{word} rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
            for word in ("lost", "joined")
            if (ranks := values[word])
        ]
        self._report_event(event, f"{' and '.join(changed)}; {len(members)} continue as view {event['view']}")
        self._replicas = {*members}

    def _update_from_followed_rank(self, event: Event) -> None:
        kind = event["event"]
        if kind == "begin":
            first, steps, t = (read_number(event, name) for name in ("step", "steps", "t"))
            self._first_step, self._begin_s, self._time_s = int(first), t, t
            self.start("simulating" if self._is_simulated else "training", steps, first)
            self._recent.clear()
            if self._first_step == 0:  # after a resume the first step has the samples so far
                self._recent.append((0, 0.0))
            if isinstance(dropped := event.get("dropped"), list):
                names = ", ".join(map(str, dropped)) or "none"
                self._report_event(
                    event, f"another recipe: exchanges in flight are merged; dropped states: {names}"
                )
        elif kind == "step":
            self._handle_step(event)
        elif kind == "evaluation":
            self._time_s, loss = read_number(event, "t"), read_number(event, "loss")
            self._score = read_number(event, "accuracy")
            self._report_event(event, f"test {' '.join(format_score(self._score))}, test loss {loss:.4g}")
        elif kind == "checkpoint":
            self._time_s = read_number(event, "t")
            self._report_event(event, f"checkpoint {event['path']}")
        elif kind == "plan":
            self._report_event(event, str(event["text"]), force=True)
        elif kind == "end":
            self.finish("stopped" if event.get("stopped") else "done")

    def _handle_step(self, event: Event) -> None:
        self._time_s = read_number(event, "t")
        self.advance(int(read_number(event, "step")) + 1)
        if event["mean_loss"] is not None:
            self._loss = read_number(event, "mean_loss")
        self._sent = int(read_number(event, "bytes_sent"))
        self._recent.append((int(read_number(event, "samples")), read_number(event, "duration_s")))
        seconds = sum(duration for _, duration in self._recent) - self._recent[0][1]
        if seconds > 0:
            self._rate = f"{(self._recent[-1][0] - self._recent[0][0]) / seconds:,.0f} samples/s"

    def _report_event(self, event: Event, text: str, *, force: bool = False) -> None:
        """Prints a line for an event, once even if the event is repeated at the end of a run."""
        key = (str(event["event"]), int(read_number(event, "step")))
        if key not in self._reported:
            self._reported.add(key)
            elapsed = (
                f"{format_clock(self._time_s - self._begin_s)}{' simulated' if self._is_simulated else ''}"
            )
            self.print_line(f"step {key[1]:,} of {self.total:,.0f}, {elapsed}: {text}", force=force)

    @override
    def list_figures(self) -> Iterable[str]:
        if self._loss is not None:
            yield f"loss {self._loss:.4f}"
        if self._score is not None:
            yield f"test {' '.join(format_score(self._score))}"
        clock = f"simulated {format_clock(self._time_s - self._begin_s)}" if self._is_simulated else ""
        if clock or self._rate:
            yield ", ".join(filter(None, (clock, self._rate)))
        if self._sent:
            yield f"sent {decimal(self._sent)}"
        if len(self._replicas) > 1:
            yield f"{len(self._replicas)} replicas"
        if self._first_step:
            yield f"resumed at {self._first_step:,}"


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
        self._num_runs, self._run_number, self._end_steps = 0, 0, 0.0

    @override
    def __enter__(self) -> Self:  # refused input shows no bar
        return self

    def __call__(self, event: Event) -> None:
        """Handles one event of the comparison, or of a run."""
        kind = event["event"]
        if kind == "compare":
            self._num_runs, self.total = int(read_number(event, "rows")), read_number(event, "steps")
            self.start_display()
        elif kind == "row":
            self._run_number += 1
            self._end_steps += read_number(event, "steps")
            self.state, self.detail = f"run {self._run_number} of {self._num_runs}", str(event["name"])
        elif kind == "row_end":  # no step of a stored run was counted
            self.skip(self._end_steps - self.num_done)
            remaining = self.format_remaining() if self.num_done < self.total else ""
            self.print_line(f"{self.state}: {self.detail}{f'; about {remaining}' if remaining else ''}")
        elif kind == "step" and event["rank"] == 0:
            self.advance(self.num_done + 1)


class _Live(Live):
    """Display that ignores errors of the terminal and tries again."""

    @override
    def refresh(self) -> None:
        with suppress(Exception):
            super().refresh()


def format_clock(seconds: float) -> str:
    """Formats a duration as hours, minutes and seconds."""
    return str(timedelta(seconds=int(max(0.0, seconds))))
