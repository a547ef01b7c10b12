"""A run as a page: its data are those of telemetry and summary, and a browser shows them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

import farflung
from farflung.cli import report as command
from farflung.cli.main import main
from farflung.report import ReportedRun, build_report_data, render_report_page, shorten_names
from farflung.runs import Run
from farflung.telemetry import Event
from tests.web import running

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUICK: dict[str, Any] = {"workers": 3, "steps": 40, "evaluate_every": 10, "network": "wifi-10mbps"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    out = tmp_path_factory.mktemp("runs") / "simulated"
    return farflung.simulate("synthetic/quadratic", "pipe_sgd", out=out, trace=True, **QUICK)


def written(out: Path, *folders: Path) -> str:
    assert main(["report", *map(str, folders), "--out", str(out)]) == 0
    return out.read_text(encoding="utf-8")


def data_of(page: str) -> dict[str, Any]:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    found: dict[str, Any] = json.loads(text)
    return found


def figures(data: dict[str, Any], section: str) -> dict[str, Any]:
    """By title."""
    (found,) = [one["figures"] for one in data["sections"] if one["title"] == section]
    return {figure["title"]: figure for figure in found}


def titles(data: dict[str, Any]) -> list[str]:
    return [one["title"] for one in data["sections"]]


def step(rank: int, number: int, **fields: Any) -> Event:
    """One second after the one before, of which half is a computation."""
    return {
        "event": "step", "rank": rank, "t": number + 1.0, "step": number, "mean_loss": 1.0,
        "in_flight": 0, "bytes_sent": 10 * number, "duration_s": 1.0, "compute_s": 0.5, "exposed_s": 0.25,
        "data_s": 0.25, **fields,
    }  # fmt: skip


def begin(rank: int, number: int = 0, t: float = 0.0) -> Event:
    return {"event": "begin", "rank": rank, "t": t, "step": number, "steps": 9}


def data_for(events: dict[int, list[Event]]) -> dict[str, Any]:
    return build_report_data([ReportedRun("run", {}, events)])


# --- what is in it ----------------------------------------------------------------------------------------------


def test_values_are_those_of_telemetry_and_summary(run: Run, tmp_path: Path) -> None:
    data = data_of(written(tmp_path / "a.html", run.folder))
    assert titles(data) == [
        "Results", "What was learned", "Where the time went", "Steps", "Traffic", "Staleness", "Settings", "Machine",
    ]  # fmt: skip
    steps = [event for event in run.events[0] if event["event"] == "step"]
    scores = [event for event in run.events[0] if event["event"] == "evaluation"]
    learned = figures(data, "What was learned")
    told = [event for event in steps if event["mean_loss"] is not None]
    each, mean = learned["Training loss"]["lines"]
    assert each["y"] == [event["mean_loss"] for event in told]
    assert each["t"] == mean["t"] == [event["t"] for event in told]
    assert each["bytes"] == [event["bytes_sent"] for event in told]
    assert each["faint"]
    (score,) = learned["Test score"]["lines"]
    assert (score["step"], score["y"]) == ([10, 20, 30, 40], [event["accuracy"] for event in scores])
    assert score["y"][-1] == run.summary["final_accuracy"]
    assert learned["Test loss"]["clock"] == "simulated time (s)"
    (bars,) = figures(data, "Where the time went").values()
    split: Any = run.summary["time_s"]
    assert bars["rows"][0] == [0, *(seconds for name, seconds in split.items())]
    assert len(bars["rows"]) == 3
    (flight,) = figures(data, "Staleness").values()
    assert flight["lines"][0]["y"] == [event["in_flight"] for event in steps]
    assert ["duration", f"{run.summary['duration_s']:.3g} s"] in figures(data, "Results")[""]["rows"]
    assert ["network", "wifi-10mbps"] in figures(data, "Settings")[""]["rows"]
    assert data["simulated"] == "All times are simulated; what was learned is real."


def test_last_steps_and_exchanges_lie_where_telemetry_has_them(run: Run, tmp_path: Path) -> None:
    data = data_of(written(tmp_path / "a.html", run.folder))
    rows = figures(data, "Steps")["The last steps, by the clock of each rank"]["rows"]
    for rank, events in run.events.items():
        told: dict[Any, Any] = {event["step"]: event for event in events if event["event"] == "step"}
        moved: dict[Any, Any] = {event["step"]: event for event in events if event["event"] == "exchange"}
        mine = [row for row in rows if row[0] == rank]
        assert {row[2] for row in mine} == set(range(34, 40))
        for _, what, number, start, end in mine:
            if what == "exchange under way":
                assert (start, end) == pytest.approx((moved[number]["began_s"], moved[number]["t"]))
            elif what == "wait for exchange":
                assert (end - start, end) == pytest.approx((told[number]["exposed_s"], told[number]["t"]))
    assert {row[1] for row in rows} >= {"exchange under way", "wait for exchange"}


def test_shares_and_traffic(tmp_path: Path) -> None:
    run = farflung.simulate("synthetic/quadratic", partition="labels(k=5)", **{**QUICK, "workers": 2})
    data = build_report_data([ReportedRun("run", {}, run.events, run.summary)])
    (shares,) = figures(data, "Shares of the training set").values()
    assert shares["columns"] == ["rank", "samples", *(f"label {label}" for label in range(10))]
    assert shares["rows"] == [[0, 514, 103, 103, 103, 103, 102, *[0] * 5], [1, 510, *[0] * 5, *[102] * 5]]
    (traffic,) = figures(data, "Traffic").values()
    assert traffic["columns"] == ["rank", *(f"{kind} (bytes)" for kind in run.sent_nbytes_by_purpose)]
    assert traffic["rows"] == [
        [rank, *(sum(sent[rank]) if rank in sent else 0 for sent in run.sent_nbytes_by_purpose.values())]
        for rank in (0, 1)
    ]


def test_several_runs_stand_beside_each_other(run: Run, tmp_path: Path) -> None:
    real = farflung.train("synthetic/quadratic", "pipe_sgd", workers=3, steps=6, out=tmp_path / "real")
    data = data_of(written(tmp_path / "a.html", run.folder, real.folder))
    table = figures(data, "Results")[""]
    rows = {row[0]: dict(zip(table["columns"], row, strict=True)) for row in table["rows"]}
    assert data["runs"] == [*rows]
    assert data["simulated"].startswith("Times of runs marked (simulated) are")
    for one, title in zip((run, real), rows, strict=True):
        assert title.endswith("(simulated)") == one.is_simulated
        found = rows[title]
        assert found["test score"] == one.summary["final_accuracy"]
        assert found["test loss"] == one.summary["final_loss"]
        assert found["steps"] == one.summary["steps"]
        assert found["bytes sent per replica"] == one.summary["bytes_sent_per_replica"]
        assert found["duration (s)"] == one.summary["duration_s"]
        assert found["state"] == "ended"
    lines = figures(data, "What was learned")["Test score"]["lines"]
    assert [(line["name"], line["run"]) for line in lines] == [
        (name, place) for place, name in enumerate(rows)
    ]
    (pair,) = figures(data, "Measured and simulated").values()
    beside = {row[0]: row[1:] for row in pair["rows"]}
    seconds = [real.summary["duration_s"], run.summary["duration_s"]]
    assert beside["duration (s)"] == [
        *seconds,
        pytest.approx(float(str(seconds[1])) / float(str(seconds[0]))),
    ]
    settings = figures(data, "Settings")["Those that differ come first"]["rows"]
    assert ["steps", 40, 6] in settings[:10]
    processes = figures(data, "Machine")[f"Where it ran, {[*rows][1]}"]
    assert (processes["columns"][0], len(processes["rows"])) == ("rank", 3)
    assert any("torch" in str(cell) for cell in processes["rows"][0])


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["runs/a-ring-seed-0", "runs/a-int8-seed-0"], ["ring", "int8"]),
        (["runs/ring-wifi-0", "runs/ring-int8-wifi-0"], ["ring", "ring-int8"]),
        (["runs/ring-wifi"], ["runs/ring-wifi"]),
        (["ring", "int8"], ["ring", "int8"]),
    ],
)
def test_names_lose_what_all_share(names: list[str], short: list[str]) -> None:
    assert shorten_names(names) == short


def scored(*scores: float) -> dict[int, list[Event]]:
    """A run with an evaluation each second."""
    events = [begin(0), *(step(0, number) for number in range(len(scores)))]
    return {
        0: events + [
            {"event": "evaluation", "rank": 0, "t": at + 1.0, "step": at + 1, "loss": 1.0, "bytes_sent": 1,
             "accuracy": score, "duration_s": 0.0}
            for at, score in enumerate(scores)
        ]
    }  # fmt: skip


def test_runs_are_compared_by_the_time_to_what_all_reached() -> None:
    scores = {"slow": (0.25, 0.5, 0.5, 0.75), "fast": (0.5, 0.8, 0.7, 0.9)}
    data = build_report_data([ReportedRun(name, {}, scored(*each)) for name, each in scores.items()])
    table = figures(data, "Results")[""]
    assert table["columns"][:3] == ["run", "time to 0.75 (s)", "speed-up over the slowest"]
    assert [row[:3] for row in table["rows"]] == [["slow", 4.0, 1.0], ["fast", 2.0, 2.0]]


def test_runs_without_an_evaluation_have_no_time_to_it() -> None:
    runs = [ReportedRun("one", {}, scored(0.5)), ReportedRun("other", {}, scored())]
    table = figures(build_report_data(runs), "Results")[""]
    assert not any("time to" in column for column in table["columns"])


@pytest.mark.parametrize(("scores", "word"), [([0.25, 0.5], "accuracy"), ([0.25, -1.0], "score")])
def test_the_score_has_its_own_word(scores: list[float], word: str) -> None:
    data = data_for(scored(*scores))
    assert figures(data, "What was learned")[f"Test {word}"]["label"] == word
    assert f"test {word}" in figures(data, "Results")[""]["columns"]


def test_members_of_an_elastic_run(tmp_path: Path) -> None:
    plan = "[[fault]]\nkind = 'crash'\nrank = 1\nat_step = 3\n"
    (tmp_path / "plan.toml").write_text(plan, encoding="utf-8")
    given = ["--workers", "3", "--steps", "8", "--elastic", "1", "--faults", str(tmp_path / "plan.toml")]
    out = ["--out", str(tmp_path / "run"), "--quiet"]
    assert main(["simulate", "--workload", "synthetic/quadratic", *given, *out]) == 0
    found = figures(data_of(written(tmp_path / "a.html", tmp_path / "run")), "Members")
    (line,) = found["Members at each step"]["lines"]
    assert (line["step"], line["y"]) == ([*range(8)], [3] * 4 + [2] * 4)
    views = found[f"Views of {tmp_path / 'run'}"]
    (row,) = [dict(zip(views["columns"], row, strict=True)) for row in views["rows"]]
    assert (row["members"], row["lost"], row["joined"], row["steps made again"]) == ([0, 2], [1], [], [3])


def joined(last: int, until: int) -> dict[int, list[Event]]:
    """Rank 0 up to a step, and a rank that has joined at step 4 and come to another step; it was evaluated after 6."""
    late = [begin(1, 4), *({**step(1, number), "t": number - 3.0} for number in range(4, until + 1))]
    seen: list[Event] = [{"event": "evaluation", "rank": 1, "t": 3.0, "step": 6, "accuracy": 0.5, "loss": 1.0,
             "duration_s": 0.5, "bytes_sent": 60}]  # fmt: skip
    return {0: [begin(0), *(step(0, number) for number in range(last + 1))], 1: [*late, *seen]}


def test_a_rank_that_has_joined_is_drawn_beside_the_others() -> None:
    (gantt, *_) = figures(data_for(joined(8, 8)), "Steps").values()
    ends = {rank: [row[4] for row in gantt["rows"] if row[0] == rank and row[2] == 8][-1] for rank in (0, 1)}
    assert ends == {0: 9.0, 1: 9.0}


@pytest.mark.parametrize(("last", "until"), [(8, 7), (8, 8), (8, 9), (4, 9), (3, 6)])
def test_a_rank_that_has_joined_has_the_clock_of_the_others(last: int, until: int) -> None:
    """On a page of a run that goes on it may be a step ahead."""
    data = data_for(joined(last, until))
    newest = max(last, until)
    (line,) = figures(data, "What was learned")["Training loss"]["lines"]
    assert line["t"] == [number + 1.0 for number in range(newest + 1)]
    results = figures(data, "Results")[""]
    row = dict(zip(results["columns"], results["rows"][0], strict=True))
    assert row["duration (s)"] == newest + 1.0
    (score,) = figures(data, "What was learned")["Test accuracy"]["lines"]
    assert score["t"] == [7.0]


@pytest.mark.parametrize(
    ("ranks", "lines"), [(2, ["rank 0", "rank 1"]), (9, ["lowest", "median", "highest"])]
)
def test_buffers(ranks: int, lines: list[str]) -> None:
    events = {
        rank: [begin(rank), *(step(rank, number, buffered=10 * number + rank) for number in range(4))]
        for rank in range(ranks)
    }
    found = figures(data_for(events), "Buffers")
    held = {line["name"]: line["y"] for line in found["Samples held"]["lines"]}
    assert [*held] == lines
    assert held[lines[0]] == [0, 10, 20, 30]
    assert held[lines[-1]] == [ranks - 1 + 10 * number for number in range(4)]
    assert found["Waited for samples"]["lines"][0]["y"] == [0.25] * 4


def test_scores_are_means_over_replicas() -> None:
    def scored(rank: int, number: int) -> dict[str, Any]:
        return {"num_scored": 64 * (rank + 1) if number else 0, "groups": number + 1,
                "variance_ratio": 0.5 + 0.1 * rank,
                "score_quantiles": [number + 0.1 * at for at in range(5)] if number else None,
                "rank_within_5": None, "rank_within_10": None, "gain": None,
                "score_age": 8.0 if number > 2 else None}  # fmt: skip

    events = {
        rank: [begin(rank), *(step(rank, number, **scored(rank, number)) for number in range(5))]
        for rank in range(2)
    }
    found = figures(data_for(events), "Sampling by importance")
    middle = found["Scores of the newest group"]["lines"][2]
    assert (middle["name"], middle["step"]) == ("50 %", [1, 2, 3, 4])
    assert middle["y"] == pytest.approx([1.2, 2.2, 3.2, 4.2])
    (moment,) = found["Batches by scores over uniform ones"]["lines"]
    assert moment["y"] == pytest.approx([0.55] * 5)
    assert found["Samples in the newest group"]["lines"][0]["y"] == [0.0, 96.0, 96.0, 96.0, 96.0]
    assert found["Groups of scores"]["lines"][1]["step"] == [3, 4]
    assert "Ranks since the scores before" not in found


def test_a_resumed_run_counts_steps_once_and_goes_on_in_time() -> None:
    first = [begin(0), *(step(0, number) for number in range(6))]
    again = [begin(0, 4, 100.0), *(step(0, number, t=97.0 + number) for number in range(4, 8))]
    (line,) = figures(data_for({0: [*first, *again]}), "What was learned")["Training loss"]["lines"]
    assert line["step"] == [*range(8)]
    assert line["t"] == [1.0, 2.0, 3.0, 4.0, 7.0, 8.0, 9.0, 10.0]


def test_losses_that_are_not_finite_and_many_steps() -> None:
    events = [
        begin(0),
        *(step(0, number, mean_loss=float("nan") if number % 2 else 1.0) for number in range(10_001)),
    ]
    line, *_ = figures(data_for({0: events}), "What was learned")["Training loss"]["lines"]
    assert {*line["y"]} == {1.0}
    assert len(line["step"]) < 2002
    assert line["step"][-1] == 10_000


@pytest.mark.parametrize("events", [{}, {0: []}, {0: [begin(0)], 1: []}])
def test_a_run_without_a_step(events: dict[int, list[Event]]) -> None:
    data = build_report_data([ReportedRun("run", {"workload": "w", "recipe": "r", "steps": 9}, events)])
    assert titles(data) == ["Results", "Settings"]
    assert (data["state"], data["title"]) == ("not ended: 0 of 9 steps", "run: w, r")


# --- the page itself --------------------------------------------------------------------------------------------


def test_it_asks_for_nothing(run: Run, tmp_path: Path) -> None:
    page = written(tmp_path / "a.html", run.folder)
    asked = re.compile(
        r"https?://|\bsrc\s*=|url\(|@import|\bimport\s*\(|srcset|<(?:iframe|object|embed)", re.IGNORECASE
    )
    assert asked.findall(re.sub(r'id="data">.*?</script>', "", page, flags=re.DOTALL)) == []
    assert "Copyright (c) 2022 Leon Sorokin" in page
    policy = page.split('Content-Security-Policy" content="')[1].split('"')[0]
    assert "default-src 'none'" in policy
    assert "connect-src 'none'" in policy
    assert "unsafe" not in policy
    assert '<html lang="en">' in page


def test_text_of_a_run_folder_stays_text(run: Run, tmp_path: Path) -> None:
    evil = "</script><img src=x onerror=alert(1)><!--{{script}}&"
    data = build_report_data(
        [
            ReportedRun(
                evil,
                {"workload": evil, "recipe": evil},
                {0: [{"event": "hello", "rank": 0, "machine": evil}]},
            )
        ]
    )
    page = render_report_page(data)
    assert data_of(page) == data
    assert "<img" not in page
    assert unescape(page.split("<title>")[1].split("</title>")[0]) == f"farflung: {data['title']}"


# --- in a browser -----------------------------------------------------------------------------------------------

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")


def shown(address: str, home: Path, *options: str) -> str:
    """The text of a page, as it is once its script has run without a word on the console."""
    given = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--virtual-time-budget=6000",
        f"--user-data-dir={home / 'chromium'}",
    ]
    log = ["--enable-logging=stderr", "--v=0", "--dump-dom"]
    assert CHROMIUM is not None
    found = subprocess.run(
        [CHROMIUM, *given, *log, *options, address], capture_output=True, text=True, check=True, timeout=120
    )
    assert "CONSOLE" not in found.stderr
    return found.stdout


def words(dom: str) -> str:
    """What can be read in it; of a script nothing can."""
    inside = re.sub(r"<(script|style)\b.*?</\1>", "", dom, flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", inside)).split())


@needs_chromium
@pytest.mark.parametrize(("theme", "preferred"), [("light", 1), ("dark", 0)])
def test_a_browser_shows_it_in_both_themes(run: Run, tmp_path: Path, theme: str, preferred: int) -> None:
    written(tmp_path / "a.html", run.folder)
    dom = shown(
        f"file://{tmp_path / 'a.html'}", tmp_path, f"--blink-settings=preferredColorScheme={preferred}"
    )
    assert f'data-theme="{theme}"' in dom
    said = words(dom)
    score = [event for event in run.events[0] if event["event"] == "evaluation"][-1]
    assert f"40 {score['t']:.3g} {score['bytes_sent']:,} {score['accuracy']:.3g}" in said
    assert f"duration {run.summary['duration_s']:.3g} s" in said
    charts = [
        figure for one in data_of(dom)["sections"] for figure in one["figures"] if figure["kind"] == "chart"
    ]
    assert dom.count("<canvas") == len(charts) == 5
    assert dom.count('<div class="chips">') == 1
    assert re.search(r"<rect [^>]*><title>rank 2, step 39: wait for exchange, [\d.]+ s</title></rect>", dom)


@needs_chromium
def test_a_browser_shows_runs_without_a_step_and_with_one(tmp_path: Path) -> None:
    one = {0: [begin(0), step(0, 0)]}
    for name, events in (("none", {}), ("one", one)):
        (tmp_path / f"{name}.html").write_text(render_report_page(data_for(events)), encoding="utf-8")
        assert "not ended" in words(shown(f"file://{tmp_path / f'{name}.html'}", tmp_path))


@needs_chromium
def test_a_browser_follows_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = [begin(0), step(0, 0)]

    def grown(folders: object, *, is_live: bool = False) -> dict[str, Any]:
        events.append(step(0, len(events) - 1, mean_loss=0.125))
        return build_report_data([ReportedRun("run", {"steps": 9}, {0: events})], is_live=is_live)

    monkeypatch.setattr(command, "load_report_data", grown)
    with running(command.PageServer(tmp_path, 0)) as server:
        said = words(shown(f"http://127.0.0.1:{server.server_port}/", tmp_path))
    assert len(events) > 4
    assert "not ended: 2 of 9 steps" not in said
    assert re.search(r"not ended: [3-9] of 9 steps", said)
