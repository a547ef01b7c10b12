"""Runs as one page of HTML that needs nothing from anywhere: what they learned, when, and where their time went."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from statistics import fmean, median
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from farflung.recipes import FAMILIES
from farflung.report.reading import PARTS_OF_TIME, SELDOM, RankCourse, rank_courses
from farflung.report.tables import summary_table
from farflung.report.trace import BESIDE, PARTS
from farflung.report.traffic import sent_by_kind
from farflung.telemetry import Event, number
from farflung.types import Json

__all__ = ["ReportedRun", "report_data", "report_page"]

Figure: TypeAlias = "dict[str, Json]"
"""A chart, bars, a Gantt chart or a table, as the page's script draws it."""
Pick: TypeAlias = "Callable[[Iterable[float]], float]"
"""Makes one value of those of the ranks."""

RAW_AT_LEAST = 30
"""With fewer losses than this there is nothing to smooth."""
MOST_POINTS = 2000
"""Of a line; of more, those at equal distances are left."""
MOST_LINES = 8
"""With more replicas a chart has the lowest, the median and the highest."""
GANTT_STEPS, GANTT_RANKS = 6, 8
"""So many of the last steps, and of the first ranks, are drawn."""
SHADES = {"compute_s": 0, "exposed_s": 1, "data_s": 2, "scoring_s": 3}
"""Colours of the parts of a step: those that they have in the whole time."""
SAME = ("workload", "workers", "batch_size", *FAMILIES)
"""Settings in which a measured and a simulated run agree that are put beside each other."""

FIGURES = {
    "final_accuracy": "test score",
    "final_loss": "test loss",
    "steps": "steps",
    "bytes_sent_per_replica": "bytes sent per replica",
    "duration_s": "duration (s)",
}
"""Those of a summary by which runs are compared."""


class _Chart(NamedTuple):
    """What a chart has: a line is a field of events, or a place in it, of each rank or picked from theirs."""

    section: str
    title: str
    label: str
    lines: Mapping[str, tuple[str, int | None]]
    pick: Pick | None = max
    scores: bool = False


LEARNED, BUFFERS, SAMPLING = "What was learned", "Buffers", "Sampling by importance"
CHARTS = (
    _Chart(LEARNED, "Test score", "accuracy, or another score", {"": ("accuracy", None)}, scores=True),
    _Chart(LEARNED, "Test loss", "loss", {"": ("loss", None)}, scores=True),
    _Chart(LEARNED, "Training loss", "mean over all replicas", {"": ("mean_loss", None)}),
    _Chart("Steps", "Duration of each step, on the rank where it was longest", "seconds", {"": ("duration_s", None)}),
    _Chart("Staleness", "Exchanges in flight at the end of each step", "exchanges", {"": ("in_flight", None)}),
    _Chart(BUFFERS, "Samples held", "samples", {"": ("held", None)}, None),
    _Chart(BUFFERS, "Waited for samples", "seconds of the step", {"": ("data_s", None)}, None),
    _Chart(SAMPLING, "Scores of the newest group", "score",
           {f"{q} %": ("score_quantiles", at) for at, q in enumerate((5, 25, 50, 75, 95))}, fmean),
    _Chart(SAMPLING, "Batches by scores over uniform ones", "factor",
           {"second moment of gradients": ("variance_ratio", None), "gain in steps, predicted": ("gain", None)}, fmean),
    _Chart(SAMPLING, "Ranks since the scores before", "share of samples",
           {f"moved by less than {most} %": (f"rank_within_{most}", None) for most in (5, 10)}, fmean),
    _Chart(SAMPLING, "Samples in the newest group", "samples", {"": ("scored", None)}, fmean),
    _Chart(SAMPLING, "Groups of scores", "steps",
           {"groups": ("groups", None), "age of the scores before": ("score_age", None)}, fmean),
)  # fmt: skip
NEEDED = {"Staleness": "in_flight", BUFFERS: "held", SAMPLING: "scored"}
"""Sections that a run has where one of its steps tells of this and it is not 0."""


class ReportedRun:
    """A run, as its folder tells of it; it need not have come to its end.

    Args:
      name: tells it from the others.
      settings: its configuration as stored.
      events: of each replica, in the order they were emitted.
      summary: of its end, where there is one.

    Raises:
      DataError: an event is damaged.
    """

    def __init__(
        self,
        name: str,
        settings: Mapping[str, Json],
        events: Mapping[int, Sequence[Event]],
        summary: Mapping[str, Json] | None = None,
    ) -> None:
        self.name, self.settings, self.events = name, settings, events
        self.simulated = "network" in settings
        self.title = f"{name} (simulated)" if self.simulated else name
        self.courses = rank_courses(events)
        by_length = sorted(self.courses, key=lambda rank: (len(self.courses[rank].steps), -rank))
        farthest = [self.courses[rank] for rank in by_length]
        self.main = farthest[-1] if farthest else RankCourse()
        self.steps: dict[int, tuple[float, Event]] = {}
        self.evaluations: dict[int, tuple[float, Event]] = {}
        for course in farthest:  # where replicas tell of one step, the one that came farthest counts
            self.steps.update(course.steps)
            self.evaluations.update(course.evaluations)
        self.summary = summary if any(course.ended for course in farthest) else None

    @property
    def state(self) -> str:
        """How far it has come."""
        if self.summary is None:
            return f"not ended: {len(self.steps):,} of {self.settings.get('steps')} steps"
        return "stopped early" if self.summary.get("stopped") else "ended"

    @property
    def figures(self) -> dict[str, float]:
        """What it has come to, by name; without an end so far."""
        at, step = self.steps[max(self.steps)] if self.steps else (0.0, {})
        score = self.evaluations[max(self.evaluations)][1] if self.evaluations else {}
        told: Mapping[str, Json] = self.summary or {
            "final_accuracy": score.get("accuracy"), "final_loss": score.get("loss"), "steps": len(self.steps),
            "bytes_sent_per_replica": step.get("bytes_sent"), "duration_s": at,
        }  # fmt: skip
        found = {words: number(told, name) for name, words in FIGURES.items() if told.get(name) is not None}
        for part in ("compute", "exposed_communication", "data_wait") if self.main.steps else ():
            found[f"{PARTS_OF_TIME[part]} of a step (s)"] = self.main.seconds[part] / len(self.main.steps)
        return found

    def lines(self, chart: _Chart) -> Iterator[tuple[str, dict[int, float]]]:
        """Name and values by step of each line that a chart has of this run."""
        for name, (field, place) in chart.lines.items():
            told = self._by_step(field, place, scores=chart.scores)
            if chart.pick is not None:
                yield name, {step: chart.pick(values.values()) for step, values in told.items()}
            elif len(self.courses) <= MOST_LINES:
                for rank in self.courses:
                    yield (
                        f"rank {rank}",
                        {step: values[rank] for step, values in told.items() if rank in values},
                    )
            else:
                picks: dict[str, Pick] = {"lowest": min, "median": median, "highest": max}
                for words, pick in picks.items():
                    yield words, {step: pick(values.values()) for step, values in told.items()}

    def _by_step(self, field: str, place: int | None, *, scores: bool) -> dict[int, dict[int, float]]:
        found: dict[int, dict[int, float]] = {}
        for rank, course in self.courses.items():
            for step, (_, event) in (course.evaluations if scores else course.steps).items():
                value: Any = event.get(field)
                if value is not None and place is not None:
                    value = value[place] if isinstance(value, list) and len(value) > place else "none"
                told = event if place is None else {**event, field: value}
                if value is not None and math.isfinite(value := number(told, field)):
                    found.setdefault(step, {})[rank] = value
        return dict(sorted(found.items()))


# --- figures ----------------------------------------------------------------------------------------------------


def _chart(chart: _Chart, runs: Sequence[ReportedRun]) -> Iterator[Figure]:
    """A chart with the lines of all runs; many losses have their moving mean, beside which one run has each."""
    lines: list[Json] = []
    for run in runs:
        if (need := NEEDED.get(chart.section)) and not any(
            event.get(need) for _, event in run.steps.values()
        ):
            continue
        for name, values in run.lines(chart):
            title = ", ".join(filter(None, [name, run.title if len(runs) > 1 or not name else ""]))
            smoothed = chart.title == "Training loss" and len(values) >= RAW_AT_LEAST
            if values and not (smoothed and len(runs) > 1):
                lines.append({**_line(run, title, values, scores=chart.scores), "faint": smoothed})
            if smoothed:
                means = _smooth(values.values(), max(2, len(values) // 50))
                lines.append(_line(run, f"{title}, moving mean", dict(zip(values, means, strict=True))))
    if lines:
        yield _lines(chart.title, chart.label, runs, lines, zero=chart.section != LEARNED)


def _smooth(values: Iterable[float], half: int) -> list[float]:
    """Takes the mean over ``half`` values on either side; over fewer at the start, where losses fall fast."""
    known = np.array([*values])
    at = np.arange(len(known))
    reach = np.clip(at, half // 10, half)
    start, stop = np.maximum(at - reach, 0), np.minimum(at + reach + 1, len(known))
    sums = np.concatenate(([0.0], np.cumsum(known)))
    means: list[float] = ((sums[stop] - sums[start]) / (stop - start)).tolist()
    return means


def _line(
    run: ReportedRun, name: str, values: Mapping[int, float], *, scores: bool = False
) -> dict[str, Json]:
    told = run.evaluations if scores else run.steps
    every = math.ceil(len(values) / MOST_POINTS)
    steps = [step for at, step in enumerate(values) if at % every == 0 or at == len(values) - 1]
    return {
        "name": name, "step": list[Json](steps), "t": [told[step][0] for step in steps],
        "bytes": [number(told[step][1], "bytes_sent") for step in steps], "y": [values[step] for step in steps],
    }  # fmt: skip


def _lines(title: str, label: str, runs: Sequence[ReportedRun], lines: list[Json], *, zero: bool) -> Figure:
    clock = "simulated time (s)" if all(run.simulated for run in runs) else "time (s)"
    return {"kind": "chart", "title": title, "label": label, "clock": clock, "lines": lines, "zero": zero}


def _table(title: str, columns: Iterable[str], rows: Iterable[Sequence[Json]]) -> Figure:
    return {"kind": "table", "title": title, "columns": [*columns], "rows": [list(row) for row in rows]}


def _bars(run: ReportedRun, title: str) -> Iterator[Figure]:
    seconds = {rank: course.seconds for rank, course in run.courses.items() if any(course.seconds.values())}
    parts = [
        name for name in PARTS_OF_TIME if name not in SELDOM or any(one[name] for one in seconds.values())
    ]
    colours = ("compute", "exposed_communication", "data_wait", "scoring", "evaluation", "other")
    if seconds:
        yield {
            "kind": "bars", "title": title, "shades": [colours.index(name) for name in parts],
            "columns": ["rank", *(f"{PARTS_OF_TIME[name]} (s)" for name in parts)],
            "rows": [[rank, *(one[name] for name in parts)] for rank, one in seconds.items()],
        }  # fmt: skip


def _gantt(run: ReportedRun, title: str) -> Iterator[Figure]:
    last = max(run.main.steps, default=-1)
    rows: list[Json] = []
    for rank in [rank for rank, course in run.courses.items() if last in course.steps][:GANTT_RANKS]:
        course = run.courses[rank]
        steps = [step for step in range(last + 1 - GANTT_STEPS, last + 1) if step in course.steps]
        for step in steps:
            end, event = course.steps[step]
            begin = end - number(event, "duration_s")
            for field, name in PARTS.items():
                if took := number({"scoring_s": 0.0, **event}, field):
                    rows.append([rank, name, step, begin, begin + took])
                begin += took
        exchanges: dict[int, tuple[float, float]] = {}
        for end, event in [*course.others, *course.evaluations.values()]:
            kind, step = str(event["event"]), int(number(event, "step"))
            if kind in BESIDE and steps[0] < step <= steps[-1] and (took := number(event, "duration_s")):
                rows.append([rank, BESIDE[kind], step, end - took, end])
            elif kind == "exchange" and step in steps:
                begin = end - number(event, "t") + number(event, "began_s")
                first, latest = exchanges.get(step, (begin, end))
                exchanges[step] = min(first, begin), max(latest, end)
        rows += [[rank, "exchange under way", step, *exchanges[step]] for step in sorted(exchanges)]
    shades: dict[str, Json] = {PARTS[field]: shade for field, shade in SHADES.items()}
    columns: list[Json] = ["rank", "what", "step", "begins (s)", "ends (s)"]
    if rows:
        shades |= dict.fromkeys(BESIDE.values(), 4)
        yield {"kind": "gantt", "title": title, "shades": shades, "columns": columns, "rows": rows}


def _members(run: ReportedRun, title: str) -> Iterator[Figure]:
    """How many members each step had, and the views; nothing of a run whose members have not changed."""
    views: list[tuple[float, Any]] = [
        (at, event) for at, event in run.main.others if event["event"] == "view"
    ]
    if views:
        _, first = views[0]
        counts = dict.fromkeys(
            sorted(run.steps), len(first["members"]) - len(first["joined"]) + len(first["lost"])
        )
        for _, event in views:
            counts |= {step: len(event["members"]) for step in counts if step >= event["step"]}
        line: dict[str, Json] = {**_line(run, "members", counts), "stepped": True}
        yield _lines(title, "members", [run], [line], zero=True)
        fields = ("view", "step", "members", "lost", "joined", "again")
        rows = [[*map(event.get, fields), at] for at, event in views]
        yield _table(f"Views of {run.title}", [*fields[:-1], "steps made again", "time (s)"], rows)


def _shares(run: ReportedRun, title: str) -> Iterator[Figure]:
    """Returns the split of the training set, where each rank has a share of its own."""
    split: Any = (run.summary or {}).get("partition")
    if split and (shares := split["shares"]):
        labels = [f"label {label}" for label in range(max(len(share["labels"]) for share in shares))]
        rows = [[rank, share["samples"], *share["labels"]] for rank, share in enumerate(shares)]
        yield _table(f"{title}, split as {split['how']}", ["rank", "samples", *labels], rows)


def _traffic(run: ReportedRun, title: str) -> Iterator[Figure]:
    """Returns the payload bytes that each rank has sent, by kind."""
    ended = {rank: events for rank, events in run.events.items() if run.courses[rank].ended}
    if sent := sent_by_kind(ended) if ended else {}:
        rows = [[rank, *(sum(senders.get(rank, ())) for senders in sent.values())] for rank in ended]
        yield _table(title, ["rank", *(f"{kind} (bytes)" for kind in sent)], rows)


def _results(runs: Sequence[ReportedRun]) -> Iterator[Figure]:
    """The end of one run, or what several have come to beside each other."""
    if len(runs) == 1 and (summary := runs[0].summary):
        what, much = summary_table(summary, simulated=runs[0].simulated).columns
        yield _table("", ["what", "how much"], zip(map(str, what.cells), map(str, much.cells), strict=True))
        return
    names = dict.fromkeys(name for run in runs for name in run.figures)
    yield _table(
        "", ["run", *names, "state"], ([run.title, *map(run.figures.get, names), run.state] for run in runs)
    )


def _beside(runs: Sequence[ReportedRun]) -> Iterator[Figure]:
    """Measured runs beside simulated ones of the same training."""
    pairs = [(one, other) for one in runs for other in runs if other.simulated and not one.simulated]
    for one, other in pairs:
        if all(one.settings.get(name) == other.settings.get(name) for name in SAME):
            real, model = one.figures, other.figures
            yield _table(
                f"{one.name} and {other.name}",
                ["what", "measured", "simulated", "simulated / measured"],
                [[name, real[name], model[name], model[name] / real[name] if real[name] else None]
                 for name in real if name in model],
            )  # fmt: skip


def _settings(runs: Sequence[ReportedRun]) -> Iterator[Figure]:
    names = dict.fromkeys(name for run in runs for name in run.settings)
    rows = [[name, *(run.settings.get(name) for run in runs)] for name in names]
    rows.sort(key=lambda row: all(value == row[1] for value in row[1:]))
    yield _table(
        "Those that differ come first" if len(runs) > 1 else "",
        ["setting", *(run.name for run in runs)],
        rows,
    )


def _machines(run: ReportedRun, title: str) -> Iterator[Figure]:
    """Where its processes ran, or what a simulated run was modelled on."""
    told = [events[0] for events in run.events.values() if events and events[0]["event"] == "hello"]
    if names := dict.fromkeys(name for event in told for name in event if name != "event"):
        yield _table(title, names, [[event.get(name) for name in names] for event in told])
    if run.summary and isinstance(model := run.summary.get("simulated"), dict):
        yield _table(title, ["modelled", "as"], model.items())


# --- the page ---------------------------------------------------------------------------------------------------


def report_data(runs: Sequence[ReportedRun], *, live: bool = False) -> dict[str, Json]:
    """Gathers what a page shows: sections of charts, bars and tables, those alone that a run has data for.

    Args:
      runs: at least one.
      live: the page asks where it came from for newer figures.

    Raises:
      DataError: an event or the summary is damaged; so may other errors be that :func:`farflung.files.reading` knows.
      MissingExtra: rich is not installed.
    """
    several = len(runs) > 1

    def each(figures: Callable[[ReportedRun, str], Iterator[Figure]], words: str) -> list[Figure]:
        return [one for run in runs for one in figures(run, f"{words}, {run.title}" if several else words)]

    sections: dict[str, list[Figure]] = {
        "Results": [*_results(runs)],
        LEARNED: [],
        "Measured beside simulated": [*_beside(runs)],
        "Where the time went": each(_bars, "Seconds of each rank"),
        "Steps": each(_gantt, "The last steps, by the clock of each rank"),
        "Members": each(_members, "Members at each step"),
        "Shares of the training set": each(_shares, "Samples of each rank"),
        "Traffic": each(_traffic, "Payload bytes that each rank has sent"),
    }
    for chart in CHARTS:
        sections.setdefault(chart.section, []).extend(_chart(chart, runs))
    sections |= {"Settings": [*_settings(runs)], "Machine": each(_machines, "Where it ran")}
    one = f"{runs[0].name}: {runs[0].settings.get('workload')}, {runs[0].settings.get('recipe')}"
    simulated = ", ".join(run.name for run in runs if run.simulated)
    found = {
        "title": f"{len(runs)} runs" if several else one,
        "state": "; ".join(f"{run.name} {run.state}" if several else run.state for run in runs),
        "simulated": f"Simulated: times of {simulated} are modelled; what was learned is real."
        if simulated
        else "",
        "live": live,
        "sections": [{"title": title, "figures": figures} for title, figures in sections.items() if figures],
    }
    # JSON of a browser has no numbers that are not finite.
    data: dict[str, Json] = json.loads(json.dumps(found), parse_constant=lambda name: None)
    return data


def report_page(data: Mapping[str, Json]) -> str:
    """Makes the page: one file of HTML with its style, its script and uPlot, which asks no other address for anything.

    Args:
      data: what :func:`report_data` gives.
    """
    assets = files("farflung.report") / "assets"
    names = ("page.html", "page.css", "page.js", "uplot.js", "uplot.css", "uplot-LICENSE.txt")
    page, style, script, uplot, uplot_style, licence = (
        (assets / name).read_text(encoding="utf-8") for name in names
    )
    parts = {
        "style": uplot_style + style,
        "library": "/*! uPlot\n"
        + licence
        + "*/\n"
        + uplot.partition("\n")[2],  # behind a line with its address
        "script": script,
        "data": json.dumps(data).replace("<", "\\u003c"),
        "title": html.escape(f"farflung: {data['title']}"),
    }
    hashes = {
        name: f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
        for name, text in parts.items()
    }
    asked = "'self'" if data["live"] else "'none'"
    parts["policy"] = (
        f"default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:; connect-src {asked}; "
        f"style-src {hashes['style']}; script-src {hashes['library']} {hashes['script']}"
    )
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], page)
