"""Self-contained HTML page about runs: what they learned over time, and where their time went."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from itertools import takewhile
from statistics import fmean, median
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from farflung.files import replace_nonfinite
from farflung.recipes import FAMILIES
from farflung.report.reading import OPTIONAL_PARTS, TIME_PARTS, RankHistory, read_rank_histories
from farflung.report.tables import format_score, render_summary_table
from farflung.report.trace import BACKGROUND_EVENTS, STEP_PARTS
from farflung.report.traffic import read_traffic, select_finished
from farflung.telemetry import Event, read_number
from farflung.types import Json

__all__ = ["ReportedRun", "build_report_data", "build_table", "render_report_page", "shorten_names"]

Figure: TypeAlias = "dict[str, Json]"
"""Chart, bars, Gantt chart or table, as the page's script draws it."""
Aggregate: TypeAlias = "Callable[[Iterable[float]], float]"
"""Function that reduces the values of all ranks to one."""

MIN_SMOOTHED = 30
"""Number of losses from which a moving mean is drawn."""
MAX_POINTS = 2000
"""Maximum number of points of a line; longer lines are thinned evenly."""
MAX_LINES = 8
"""Number of replicas above which a chart shows only the lowest, the median and the highest value."""
GANTT_STEPS, GANTT_RANKS = 6, 8
"""Numbers of last steps and of first ranks that are drawn."""
SHADES = {"compute_s": 0, "exposed_s": 1, "data_s": 2, "scoring_s": 3}
"""Colours of the parts of a step, equal to those in the chart of total time."""
COMPARED_SETTINGS = ("workload", "workers", "batch_size", *FAMILIES)
"""Settings that a measured and a simulated run must share to be compared."""

SUMMARY_FIGURES = {
    "final_accuracy": "test score",
    "final_loss": "test loss",
    "steps": "steps",
    "bytes_sent_per_replica": "bytes sent per replica",
    "duration_s": "duration (s)",
}
"""Summary figures by which runs are compared, and their labels."""


class _Chart(NamedTuple):
    """Specification of a chart: each line is a field of events, or an item of it, per rank or aggregated."""

    section: str
    title: str
    label: str
    lines: Mapping[str, tuple[str, int | None]]
    aggregate: Aggregate | None = max
    uses_evaluations: bool = False


LEARNING, BUFFERS, SAMPLING = "What was learned", "Buffers", "Sampling by importance"
CHARTS = (
    _Chart(LEARNING, "Test {score}", "{score}", {"": ("accuracy", None)}, uses_evaluations=True),
    _Chart(LEARNING, "Test loss", "loss", {"": ("loss", None)}, uses_evaluations=True),
    _Chart(LEARNING, "Training loss", "mean over all replicas", {"": ("mean_loss", None)}),
    _Chart("Steps", "Duration of each step, on the rank where it was longest", "seconds", {"": ("duration_s", None)}),
    _Chart("Staleness", "Exchanges in flight at the end of each step", "exchanges", {"": ("in_flight", None)}),
    _Chart(BUFFERS, "Samples held", "samples", {"": ("buffered", None)}, None),
    _Chart(BUFFERS, "Waited for samples", "seconds of the step", {"": ("data_s", None)}, None),
    _Chart(SAMPLING, "Scores of the newest group", "score",
           {f"{q} %": ("score_quantiles", i) for i, q in enumerate((5, 25, 50, 75, 95))}, fmean),
    _Chart(SAMPLING, "Batches by scores over uniform ones", "factor",
           {"second moment of gradients": ("variance_ratio", None), "gain in steps, predicted": ("gain", None)}, fmean),
    _Chart(SAMPLING, "Ranks since the scores before", "share of samples",
           {f"moved by less than {limit} %": (f"rank_within_{limit}", None) for limit in (5, 10)}, fmean),
    _Chart(SAMPLING, "Samples in the newest group", "samples", {"": ("num_scored", None)}, fmean),
    _Chart(SAMPLING, "Groups of scores", "steps",
           {"groups": ("groups", None), "age of the scores before": ("score_age", None)}, fmean),
)  # fmt: skip
REQUIRED_FIELDS = {"Staleness": "in_flight", BUFFERS: "buffered", SAMPLING: "num_scored"}
"""Fields of which a run needs a value other than 0 for the section to appear."""


class ReportedRun:
    """Stored run, read from its folder; it may still be going on.

    Args:
      name: Name of the run on the page, which is unique there.
      settings: Stored configuration.
      events: Events of each replica, in the order they were emitted.
      summary: Final summary, if the run has ended.

    Raises:
      DataError: An event is damaged.
    """

    def __init__(
        self,
        name: str,
        settings: Mapping[str, Json],
        events: Mapping[int, Sequence[Event]],
        summary: Mapping[str, Json] | None = None,
    ) -> None:
        self.name, self.settings, self.events = name, settings, events
        self.is_simulated = "network" in settings
        self.histories = read_rank_histories(events)
        ranks = sorted(self.histories, key=lambda rank: (len(self.histories[rank].steps), -rank))
        by_progress = [self.histories[rank] for rank in ranks]
        self.longest_history = by_progress[-1] if by_progress else RankHistory()
        self.steps: dict[int, tuple[float, Event]] = {}
        self.evaluations: dict[int, tuple[float, Event]] = {}
        for history in by_progress:  # the replica that came farthest overrides others
            self.steps.update(history.steps)
            self.evaluations.update(history.evaluations)
        self.summary = summary if any(history.has_ended for history in by_progress) else None

    @property
    def status(self) -> str:
        """Progress of the run, as text."""
        if self.summary is None:
            return f"not ended: {len(self.steps):,} of {self.settings.get('steps')} steps"
        return "stopped early" if self.summary.get("stopped") else "ended"

    @property
    def figures(self) -> dict[str, float]:
        """Figures of the summary by label; those so far if the run has not ended."""
        time_s, step = self.steps[max(self.steps)] if self.steps else (0.0, {})
        score = self.evaluations[max(self.evaluations)][1] if self.evaluations else {}
        end: Mapping[str, Json] = self.summary or {
            "final_accuracy": score.get("accuracy"), "final_loss": score.get("loss"), "steps": len(self.steps),
            "bytes_sent_per_replica": step.get("bytes_sent"), "duration_s": time_s,
        }  # fmt: skip
        result = {
            label: read_number(end, name)
            for name, label in SUMMARY_FIGURES.items()
            if end.get(name) is not None
        }
        for part in ("compute", "exposed_communication", "data_wait") if self.longest_history.steps else ():
            result[f"{TIME_PARTS[part]} of a step (s)"] = self.longest_history.part_seconds[part] / len(
                self.longest_history.steps
            )
        return result

    def build_lines(self, chart: _Chart) -> Iterator[tuple[str, dict[int, float]]]:
        """Yields the name and the values by step of each line of a chart."""
        for name, (field, index) in chart.lines.items():
            values_by_step = self._collect_values_by_step(
                field, index, from_evaluations=chart.uses_evaluations
            )
            if chart.aggregate is not None:
                yield (
                    name,
                    {step: chart.aggregate(values.values()) for step, values in values_by_step.items()},
                )
            elif len(self.histories) <= MAX_LINES:
                for rank in self.histories:
                    yield (
                        f"rank {rank}",
                        {step: values[rank] for step, values in values_by_step.items() if rank in values},
                    )
            else:
                aggregates: dict[str, Aggregate] = {"lowest": min, "median": median, "highest": max}
                for label, aggregate in aggregates.items():
                    yield label, {step: aggregate(values.values()) for step, values in values_by_step.items()}

    def _collect_values_by_step(
        self, field: str, index: int | None, *, from_evaluations: bool
    ) -> dict[int, dict[int, float]]:
        """Returns the finite values of a field of events, by step and then by rank."""
        values: dict[int, dict[int, float]] = {}
        for rank, history in self.histories.items():
            for step, (_, event) in (history.evaluations if from_evaluations else history.steps).items():
                value: Any = event.get(field)
                if value is not None and index is not None:
                    value = value[index] if isinstance(value, list) and len(value) > index else "none"
                checked = event if index is None else {**event, field: value}
                if value is not None and math.isfinite(value := read_number(checked, field)):
                    values.setdefault(step, {})[rank] = value
        return dict(sorted(values.items()))


# --- figures ----------------------------------------------------------------------------------------------------


def _build_chart(chart: _Chart, runs: Sequence[ReportedRun]) -> Iterator[Figure]:
    """Builds a chart of all runs; many losses get a moving mean, with raw values for one run only.

    Lines that stand for a whole run have its number, which selects their colour in all charts.
    """
    lines: list[Json] = []
    for number, run in enumerate(runs):
        if (required := REQUIRED_FIELDS.get(chart.section)) and not any(
            event.get(required) for _, event in run.steps.values()
        ):
            continue
        for name, values in run.build_lines(chart):
            title = ", ".join(filter(None, [name, run.name if len(runs) > 1 or not name else ""]))
            entry: dict[str, Json] = {} if name else {"run": number}
            smoothed = chart.title == "Training loss" and len(values) >= MIN_SMOOTHED
            if values and not (smoothed and len(runs) > 1):
                raw = "each step" if smoothed else title
                line = _build_thinned_line(run, raw, values, from_evaluations=chart.uses_evaluations)
                lines.append({**line, **entry, "faint": smoothed})
            if smoothed:
                means = _smooth(values.values(), max(2, len(values) // 50))
                mean = f"{title}, moving mean" if len(runs) > 1 else "moving mean"
                line = _build_thinned_line(run, mean, dict(zip(values, means, strict=True)))
                lines.append({**line, **entry})
    if lines:
        title, label = (text.format(score=_name_score(runs)) for text in (chart.title, chart.label))
        yield _build_line_chart(title, label, runs, lines, from_zero=chart.section != LEARNING)


def _name_score(runs: Sequence[ReportedRun]) -> str:
    """Returns the word for the score of all runs: accuracy if all of them can be one."""
    scores = [read_number(event, "accuracy") for run in runs for _, event in run.evaluations.values()]
    names = {format_score(score)[0] for score in scores}
    return names.pop() if len(names) == 1 else "score"


def _smooth(values: Iterable[float], half: int) -> list[float]:
    """Averages over ``half`` values on either side; over fewer at the start, where losses fall fast."""
    samples = np.array([*values])
    indices = np.arange(len(samples))
    reach = np.clip(indices, half // 10, half)
    start, stop = np.maximum(indices - reach, 0), np.minimum(indices + reach + 1, len(samples))
    sums = np.concatenate(([0.0], np.cumsum(samples)))
    means: list[float] = ((sums[stop] - sums[start]) / (stop - start)).tolist()
    return means


def _build_thinned_line(
    run: ReportedRun, name: str, values: Mapping[int, float], *, from_evaluations: bool = False
) -> dict[str, Json]:
    """Returns a chart's line as JSON: step, time, bytes and value of about :data:`MAX_POINTS` points at most."""
    events = run.evaluations if from_evaluations else run.steps
    stride = math.ceil(len(values) / MAX_POINTS)
    steps = [step for index, step in enumerate(values) if index % stride == 0 or index == len(values) - 1]
    return {
        "name": name, "step": list[Json](steps), "t": [events[step][0] for step in steps],
        "bytes": [read_number(events[step][1], "bytes_sent") for step in steps], "y": [values[step] for step in steps],
    }  # fmt: skip


def _build_line_chart(
    title: str, label: str, runs: Sequence[ReportedRun], lines: list[Json], *, from_zero: bool
) -> Figure:
    clock = "simulated time (s)" if all(run.is_simulated for run in runs) else "time (s)"
    return {
        "kind": "chart",
        "title": title,
        "label": label,
        "clock": clock,
        "lines": lines,
        "zero": from_zero,
    }


def build_table(
    title: str, columns: Iterable[str], rows: Iterable[Sequence[Json]], *, is_exact: bool = False
) -> Figure:
    """Builds a table, whose figures have three digits unless they are exact."""
    cells: list[Json] = [list(row) for row in rows]
    return {"kind": "table", "title": title, "columns": [*columns], "rows": cells, "exact": is_exact}


def _build_time_bars(run: ReportedRun, title: str) -> Iterator[Figure]:
    """Yields a bar chart of each replica's total seconds by part; nothing if there are none."""
    seconds = {rank: h.part_seconds for rank, h in run.histories.items() if any(h.part_seconds.values())}
    parts = [
        name
        for name in TIME_PARTS
        if name not in OPTIONAL_PARTS or any(row[name] for row in seconds.values())
    ]
    colours = ("compute", "exposed_communication", "data_wait", "scoring", "evaluation", "other")
    if seconds:
        yield {
            "kind": "bars", "title": title, "shades": [colours.index(name) for name in parts],
            "columns": ["rank", *(f"{TIME_PARTS[name]} (s)" for name in parts)],
            "rows": [[rank, *(row[name] for name in parts)] for rank, row in seconds.items()],
        }  # fmt: skip


def _build_gantt(run: ReportedRun, title: str) -> Iterator[Figure]:
    last = max(run.longest_history.steps, default=-1)
    rows: list[Json] = []
    for rank in [rank for rank, history in run.histories.items() if last in history.steps][:GANTT_RANKS]:
        history = run.histories[rank]
        steps = [step for step in range(last + 1 - GANTT_STEPS, last + 1) if step in history.steps]
        for step in steps:
            end, event = history.steps[step]
            begin = end - read_number(event, "duration_s")
            for field, name in STEP_PARTS.items():
                if span_s := read_number({"scoring_s": 0.0, **event}, field):
                    rows.append([rank, name, step, begin, begin + span_s])
                begin += span_s
        exchanges: dict[int, tuple[float, float]] = {}
        for end, event in [*history.other_events, *history.evaluations.values()]:
            kind, step = str(event["event"]), int(read_number(event, "step"))
            if (
                kind in BACKGROUND_EVENTS
                and steps[0] < step <= steps[-1]
                and (span_s := read_number(event, "duration_s"))
            ):
                rows.append([rank, BACKGROUND_EVENTS[kind], step, end - span_s, end])
            elif kind == "exchange" and step in steps:
                begin = end - read_number(event, "t") + read_number(event, "began_s")
                start, stop = exchanges.get(step, (begin, end))
                exchanges[step] = min(start, begin), max(stop, end)
        rows += [[rank, "exchange under way", step, *exchanges[step]] for step in sorted(exchanges)]
    shades: dict[str, Json] = {STEP_PARTS[field]: shade for field, shade in SHADES.items()}
    columns: list[Json] = ["rank", "what", "step", "begins (s)", "ends (s)"]
    if rows:
        shades |= dict.fromkeys(BACKGROUND_EVENTS.values(), 4)
        yield {"kind": "gantt", "title": title, "shades": shades, "columns": columns, "rows": rows}


def _build_members(run: ReportedRun, title: str) -> Iterator[Figure]:
    """Builds the number of members at each step and the table of views; nothing if the members never change."""
    views: list[tuple[float, Any]] = [
        (time_s, event) for time_s, event in run.longest_history.other_events if event["event"] == "view"
    ]
    if views:
        _, first = views[0]
        counts = dict.fromkeys(
            sorted(run.steps), len(first["members"]) - len(first["joined"]) + len(first["lost"])
        )
        for _, event in views:
            counts |= {step: len(event["members"]) for step in counts if step >= event["step"]}
        line: dict[str, Json] = {**_build_thinned_line(run, "members", counts), "stepped": True}
        yield _build_line_chart(title, "members", [run], [line], from_zero=True)
        fields = ("view", "step", "members", "lost", "joined", "repeated_steps")
        rows = [[*map(event.get, fields), time_s] for time_s, event in views]
        yield build_table(f"Views of {run.name}", [*fields[:-1], "steps made again", "time (s)"], rows)


def _build_shares(run: ReportedRun, title: str) -> Iterator[Figure]:
    """Builds the table of the training set's partition, if each rank has a share of its own."""
    split: Any = (run.summary or {}).get("partition")
    if split and (shares := split["shares"]):
        labels = [f"label {label}" for label in range(max(len(share["labels"]) for share in shares))]
        rows = [[rank, share["samples"], *share["labels"]] for rank, share in enumerate(shares)]
        yield build_table(f"{title}, split as {split['partition']}", ["rank", "samples", *labels], rows)


def _build_traffic(run: ReportedRun, title: str) -> Iterator[Figure]:
    """Yields the table of payload bytes sent by each replica that has ended, by kind."""
    finished = select_finished(run.events)
    if sent := read_traffic(finished) if finished else {}:
        rows = [[rank, *(sum(senders.get(rank, ())) for senders in sent.values())] for rank in finished]
        yield build_table(title, ["rank", *(f"{kind} (bytes)" for kind in sent)], rows)


def _build_results(runs: Sequence[ReportedRun]) -> Iterator[Figure]:
    """Builds the summary of one run, or a comparison of several."""
    if len(runs) == 1 and (summary := runs[0].summary):
        cells = (map(str, column.cells) for column in render_summary_table(summary).columns)
        yield build_table("", [], zip(*cells, strict=True))
        return
    target = _TargetTimes.from_runs(runs) if len(runs) > 1 else None
    names = dict.fromkeys(name for run in runs for name, value in run.figures.items() if value)
    columns = [f"test {_name_score(runs)}" if name == "test score" else name for name in names]
    rows = [[run.name, *map(run.figures.get, names), run.status] for run in runs]
    if target is not None:
        columns = [f"time to {target.score:.3g} (s)", "speed-up over the slowest", *columns]
        slowest_s = max(target.seconds)
        for row, seconds in zip(rows, target.seconds, strict=True):
            row[1:1] = [seconds, slowest_s / seconds if seconds else None]
    yield build_table("", ["run", *columns, "state"], rows)


class _TargetTimes(NamedTuple):
    """Best score that every run reached, and the seconds in which each did."""

    score: float
    seconds: Sequence[float]

    @staticmethod
    def from_runs(runs: Sequence[ReportedRun]) -> _TargetTimes | None:
        """Returns None if a run was never evaluated."""
        courses = [
            [
                (time_s, read_number(event, "accuracy"))
                for _, (time_s, event) in sorted(run.evaluations.items())
            ]
            for run in runs
        ]
        if not all(courses):
            return None
        target = min(max(score for _, score in course) for course in courses)
        return _TargetTimes(target, [next(t for t, score in course if score >= target) for course in courses])


def _compare_to_simulated(runs: Sequence[ReportedRun]) -> Iterator[Figure]:
    """Compares measured runs with simulated runs of the same training."""
    pairs = [(real, model) for real in runs for model in runs if model.is_simulated and not real.is_simulated]
    for real, model in pairs:
        if all(real.settings.get(name) == model.settings.get(name) for name in COMPARED_SETTINGS):
            expected, modelled = real.figures, model.figures
            yield build_table(
                f"{real.name} and {model.name}",
                ["what", "measured", "simulated", "simulated / measured"],
                [[name, expected[name], modelled[name], modelled[name] / expected[name] if expected[name] else None]
                 for name in expected if name in modelled],
            )  # fmt: skip


def _build_settings(runs: Sequence[ReportedRun]) -> Iterator[Figure]:
    names = dict.fromkeys(name for run in runs for name in run.settings)
    rows = [[name, *(run.settings.get(name) for run in runs)] for name in names]
    rows.sort(key=lambda row: all(value == row[1] for value in row[1:]))
    yield build_table(
        "Those that differ come first" if len(runs) > 1 else "",
        ["setting", *(run.name for run in runs)],
        rows,
        is_exact=True,
    )


def _build_machines(run: ReportedRun, title: str) -> Iterator[Figure]:
    """Builds the tables of machines, or of what a simulated run was modelled on."""
    hellos = [events[0] for events in run.events.values() if events and events[0]["event"] == "hello"]
    if names := dict.fromkeys(name for event in hellos for name in event if name != "event"):
        yield build_table(
            title, names, [[event.get(name) for name in names] for event in hellos], is_exact=True
        )
    if run.summary and isinstance(model := run.summary.get("simulated"), dict):
        yield build_table(title, ["modelled", "as"], model.items(), is_exact=True)


# --- the page ---------------------------------------------------------------------------------------------------


def shorten_names(names: Sequence[str]) -> list[str]:
    """Returns names without the words that all of them begin or end with.

    >>> shorten_names(["runs/ring-wifi-seed-0", "runs/ring-int8-wifi-seed-0"])
    ['ring', 'ring-int8']
    """
    words = [re.split(r"(?<=[/-])", name) for name in names]
    free = min(map(len, words)) - 1 if len(words) > 1 else 0

    def count_equal(columns: Iterable[Sequence[str]]) -> int:
        return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))

    num_last = min(free, count_equal(zip(*map(reversed, words), strict=False)))
    num_first = min(free - num_last, count_equal(zip(*words, strict=False)))
    return ["".join(name[num_first : len(name) - num_last]).rstrip("/-") for name in words]


def build_report_data(runs: Sequence[ReportedRun], *, is_live: bool = False) -> dict[str, Json]:
    """Builds the data of a page: its sections of charts, bars and tables, without empty ones.

    Args:
      runs: Runs to show, at least one.
      is_live: Whether the page polls its server for newer figures.

    Raises:
      DataError: An event or the summary is damaged. Other errors of :func:`farflung.files.wrap_read_errors` may occur.
      MissingExtra: rich is not installed.
    """
    several = len(runs) > 1

    def build_all(build: Callable[[ReportedRun, str], Iterator[Figure]], title: str) -> list[Figure]:
        return [fig for run in runs for fig in build(run, f"{title}, {run.name}" if several else title)]

    sections: dict[str, list[Figure]] = {
        "Results": [*_build_results(runs)],
        LEARNING: [],
        "Measured and simulated": [*_compare_to_simulated(runs)],
        "Where the time went": build_all(_build_time_bars, "Seconds of each rank"),
        "Steps": build_all(_build_gantt, "The last steps, by the clock of each rank"),
        "Members": build_all(_build_members, "Members at each step"),
        "Shares of the training set": build_all(_build_shares, "Samples of each rank"),
        "Traffic": build_all(_build_traffic, "Payload bytes that each rank has sent"),
    }
    for chart in CHARTS:
        sections.setdefault(chart.section, []).extend(_build_chart(chart, runs))
    sections |= {"Settings": [*_build_settings(runs)], "Machine": build_all(_build_machines, "Where it ran")}
    heading = f"{runs[0].name}: {runs[0].settings.get('workload')}, {runs[0].settings.get('recipe')}"
    num_simulated = sum(run.is_simulated for run in runs)
    whose = "All times" if num_simulated == len(runs) else "Times of runs marked (simulated)"
    states = dict.fromkeys(run.status for run in runs)
    content = {
        "title": f"{len(runs)} runs" if several else heading,
        "state": states.popitem()[0]
        if len(states) == 1
        else "; ".join(f"{run.name} {run.status}" for run in runs),
        "simulated": f"{whose} are simulated; what was learned is real." if num_simulated else "",
        "runs": [run.name for run in runs] if several else [],
        "live": is_live,
        "sections": [{"title": title, "figures": figures} for title, figures in sections.items() if figures],
    }
    return dict(replace_nonfinite(content))


def render_report_page(data: Mapping[str, Json]) -> str:
    """Renders one HTML file with its style, its script and uPlot, which loads nothing from elsewhere.

    Args:
      data: Data from :func:`build_report_data`.
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
        + uplot.partition("\n")[2],  # without its first line, a URL
        "script": script,
        "data": json.dumps(data).replace("<", "\\u003c"),
        "title": html.escape(f"farflung: {data['title']}"),
    }
    hashes = {
        name: f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
        for name, text in parts.items()
    }
    connect_sources = "'self'" if data["live"] else "'none'"
    parts["policy"] = (
        f"default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:; connect-src {connect_sources}; "
        f"style-src {hashes['style']}; script-src {hashes['library']} {hashes['script']}"
    )
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], page)
