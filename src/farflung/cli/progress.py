"""How a run is doing, on stderr while it goes on."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Self

from rich.console import Console, ConsoleOptions, RenderResult
from rich.filesize import decimal
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text
from typing_extensions import override

from farflung.report import score_words
from farflung.telemetry import Event
from farflung.types import Json

__all__ = ["Progress", "clock_text", "stderr_console"]

REFRESHES_PER_S = 5
RATE_STEPS = 50
"""Steps that the rate of samples is taken over."""
WIDEST = 110


class Progress:
    """A sink that shows how far a run has come: a bar in a terminal, else a line per evaluation and checkpoint.

    Times are those of whoever watches; samples per second are on the run's own clock, which a simulated run does not
    share with the watcher. Bytes sent are those of rank 0. A terminal is written to from a thread of its own, so that
    a slow one holds up nothing, and no trouble with it reaches whoever emits the events. Printing the object itself
    gives the bar as it stands.

    Args:
      quiet: shows nothing at all.
      simulated: the events come from a simulator; its time and rates are marked as simulated.
      console: where to; stderr when not given.
      clock: seconds for whoever watches.
    """

    def __init__(
        self,
        *,
        quiet: bool = False,
        simulated: bool = False,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._quiet, self._simulated, self._clock = quiet, simulated, clock
        self._console = console if console is not None else stderr_console()
        self._live: _Live | None = None
        self._state = "starting: the simulator" if simulated else "starting: the workers"
        self._up: set[int] = set()
        self._began: set[int] = set()
        self._first = self._done = self._steps = 0
        self._begin_t = self._t = 0.0
        self._made_at = clock()
        self._started_at: float | None = None
        self._ended_at: float | None = None
        self._first_step_at = self._last_step_at = 0.0
        self._loss: float | None = None
        self._score: float | None = None
        self._sent = 0
        self._recent: deque[tuple[int, float]] = deque(maxlen=RATE_STEPS)
        self._rate: float | None = None
        self._told: set[tuple[str, int]] = set()

    def __enter__(self) -> Self:
        with suppress(Exception):
            terminal = self._console.is_interactive and self._console.is_terminal
            if terminal and not self._quiet:
                live = _Live(
                    console=self._console,
                    get_renderable=lambda: self,
                    refresh_per_second=REFRESHES_PER_S,
                    redirect_stdout=False,  # it may be a file
                )
                self._live = live  # before it starts: if that fails half-way, there is something to stop
                live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            with suppress(Exception):
                self._live.stop()
            self._live = None

    def __call__(self, event: Event) -> None:
        """Takes in one event; those of other ranks than 0 only say that their replica has begun."""
        with suppress(Exception):
            if event["event"] == "hello":
                self._up.add(int(_number(event["rank"])))
                if self._started_at is None:
                    self._state = f"starting: {len(self._up)} up, they meet"
            if event["event"] == "begin":
                self._began.add(int(_number(event["rank"])))
            if event["rank"] == 0:
                self._take(event)

    # --- what is known --------------------------------------------------------------------------------------------

    def _take(self, event: Event) -> None:
        kind = event["event"]
        if kind == "begin":
            self._first = self._done = int(_number(event["step"]))
            self._steps = int(_number(event["steps"]))
            self._begin_t = self._t = _number(event["t"])
            self._started_at = self._clock()
            self._recent.clear()
            if self._first == 0:  # after a resume the samples so far come with the first step
                self._recent.append((0, 0.0))
            self._state = "simulating" if self._simulated else "training"
        elif kind == "step":
            self._step(event)
        elif kind == "evaluation":
            self._t = _number(event["t"])
            self._score = _number(event["accuracy"])
            loss = _number(event["loss"])
            self._tell(event, f"test {' '.join(score_words(self._score))}, test loss {loss:.4g}")
        elif kind == "checkpoint":
            self._t = _number(event["t"])
            self._tell(event, f"checkpoint {event['path']}")
        elif kind == "end":
            self._state = "stopped" if event.get("stopped") else "done"
            self._ended_at = self._clock()

    def _step(self, event: Event) -> None:
        self._done = int(_number(event["step"])) + 1
        self._t = _number(event["t"])
        self._last_step_at = self._clock()
        if self._done == self._first + 1:
            self._first_step_at = self._last_step_at
        if event["mean_loss"] is not None:
            self._loss = _number(event["mean_loss"])
        self._sent = int(_number(event["bytes_sent"]))
        self._recent.append((int(_number(event["samples"])), _number(event["duration_s"])))
        seconds = sum(duration for _, duration in self._recent) - self._recent[0][1]
        if seconds > 0:
            self._rate = (self._recent[-1][0] - self._recent[0][0]) / seconds

    def _seconds_left(self) -> float | None:
        """From the pace of all steps but the first, which warms up; ``None`` before there are two."""
        paced = self._done - self._first - 1
        if paced < 1:
            return None
        pace = (self._last_step_at - self._first_step_at) / paced
        return max(0.0, pace * (self._steps - self._done) - (self._clock() - self._last_step_at))

    # --- how it looks ---------------------------------------------------------------------------------------------

    def _tell(self, event: Event, words: str) -> None:
        """One plain line, where there is no bar; what is repeated at the end of a run is told once."""
        what = (str(event["event"]), int(_number(event["step"])))
        if self._quiet or self._live is not None or what in self._told:
            return
        self._told.add(what)
        after = f"{clock_text(self._t - self._begin_t)}{' simulated' if self._simulated else ''}"
        line = f"step {what[1]:,} of {self._steps:,}, {after}: {words}"
        self._console.print(Text(line), soft_wrap=True)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The bar and, below it, the figures."""
        head = Table.grid(Column(), Column(ratio=1), Column(), padding=(0, 1))
        head.width = min(options.max_width, WIDEST)
        bar = ProgressBar(total=max(1, self._steps), completed=self._done, complete_style="cyan")
        head.add_row(Text(self._state, style="bold"), bar, Text(self._head(), no_wrap=True))
        yield head
        yield Text("  ".join(self._figures()), no_wrap=True, overflow="ellipsis", style="dim")

    def _head(self) -> str:
        if self._started_at is None:
            return clock_text(self._clock() - self._made_at)
        now = self._clock() if self._ended_at is None else self._ended_at
        words = [f"{self._done:,}/{self._steps:,}", clock_text(now - self._started_at)]
        left = self._seconds_left()
        if self._ended_at is None and left is not None:
            words.append(f"{clock_text(left)} left")
        return "  ".join(words)

    def _figures(self) -> list[str]:
        figures = []
        if self._loss is not None:
            figures.append(f"loss {self._loss:.4f}")
        if self._score is not None:
            figures.append(f"test {' '.join(score_words(self._score))}")
        clock = f"simulated {clock_text(self._t - self._begin_t)}" if self._simulated else ""
        rate = f"{self._rate:,.0f} samples/s" if self._rate is not None else ""
        if clock or rate:
            figures.append(", ".join(filter(None, (clock, rate))))
        if self._sent:
            figures.append(f"sent {decimal(self._sent)}")
        if len(self._began) > 1:
            figures.append(f"{len(self._began)} replicas")
        if self._first:
            figures.append(f"resumed at {self._first:,}")
        return figures


class _Live(Live):
    """Keeps to itself that a terminal cannot be written to, and tries again: there is nobody to tell."""

    @override
    def refresh(self) -> None:
        with suppress(Exception):
            super().refresh()


def stderr_console() -> Console:
    """A console on stderr whose bar is for terminals alone, whatever the environment says of colours."""
    terminal = False
    with suppress(Exception):
        terminal = sys.stderr.isatty()
    return Console(
        stderr=True, force_terminal=None if terminal else False, force_jupyter=False, highlight=False
    )


def clock_text(seconds: float) -> str:
    """Hours, minutes and seconds."""
    return str(timedelta(seconds=int(max(0.0, seconds))))


def _number(value: Json) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"not a number: {value!r}")
    return value
