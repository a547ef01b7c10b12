"""Tables of the commands in narrow terminals: no line is too long, nothing is cut off, and no figure is broken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import farflung
from farflung.cli import doctor
from farflung.cli.doctor import Doctor
from farflung.cli.main import main
from farflung.cli.output import create_stdout_console, print_json
from farflung.cli.probe import Probe
from farflung.cli.probing import ProbeResult
from farflung.data import Share
from farflung.lab.cli import print_links
from farflung.lab.measure import PairMeasurement
from farflung.loop import Summary, TimeSplit
from farflung.report import render_partition_table, render_summary_table, render_traffic_table
from farflung.types import Json
from farflung.wall.measuring import LinkMeasurement, NetworkMeasurement

MACHINES = [f"ip-10-0-{n}-200.eu-west-{n}.compute.internal" for n in range(2)]
KINDS = [
    "gradients",
    "sharing",
    "evaluation",
    "checkpoint",
    "decisions",
    "flush",
    "remainder",
    "moments",
    "relayed",
    "views",
    "state",
]
METHODS = [f"error_feedback(topk(density=0.0{n}))" for n in range(1, 6)]
SUMMARY = Summary(
    steps=1_000_000,
    samples=128_000_000,
    final_accuracy=0.8731,
    final_loss=0.41234,
    bytes_sent=987_654_321_000,
    duration_s=360_000.0,
    time_s=TimeSplit(compute=2e5, exposed_communication=1.6e5, data_wait=0.0, other=0.0),
    is_stopped=True,
)


def show_summary() -> None:
    names: list[Json] = [*METHODS]
    summary: dict[str, Json] = {**SUMMARY.to_json(), "coding_not_charged": names}
    create_stdout_console().print(render_summary_table(summary, is_simulated=True))


def show_traffic() -> None:
    traffic = {kind: {0: [0, 123_456_789_012], 1: [98_765_432_109, 0]} for kind in KINDS}
    create_stdout_console().print(render_traffic_table(traffic, title="payload bytes, runs/of-a-long-name"))


def show_partition() -> None:
    shares = [Share(36_625, (6_000,) * 9 + (4_625,)), Share(36_632, (13_861, 10_585, *(1_000,) * 8))]
    create_stdout_console().print(render_partition_table(shares, "dirichlet(alpha=0.5)"))


def show_probe() -> None:
    link = LinkMeasurement(0.0385, 0.0412, 61.25e6, 48.75e6, 63.5e6)
    measurement = NetworkMeasurement({(0, 1): link, (1, 0): link}, (61e6, 61e6), (61e6, 61e6), 122e6)
    Probe()._report(measurement, MACHINES)


def show_doctor() -> None:
    Doctor(tuple(f"{name}:29500" for name in MACHINES)).run()


def show_links() -> None:
    print_links([PairMeasurement(0, 1, 0.3501, 0.3502, 980.25e6, 999.75e6, 0.0125, 0.0105)])


SHOWN: dict[Callable[[], None], list[str]] = {
    show_summary: ["87.3 %", "1,000,000", "987.7 GB", "128,000,000", "44.4 %", "simulated times"],
    show_traffic: [*KINDS, "123,456,789,012", "98,765,432,109", "222,222,221,121", "1 → 0"],
    show_partition: ["36,625", "36,632", "13,861", "10,585", "4,625"],
    show_probe: ["38.5 ms", "41.2 ms", "61.2", "48.8", "63.5"],
    show_doctor: ["12.3 ms", "+1.5 ms", "connects", "congestion control"],
    show_links: ["350.100", "980.25", "999.75", "1.25 %", "1.05 %"],
}


@pytest.mark.parametrize("width", [80, 100, 120])
@pytest.mark.parametrize("show", SHOWN, ids=lambda show: show.__name__)
def test_no_line_is_too_long_and_no_figure_is_broken(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, show: Callable[[], None], width: int
) -> None:
    monkeypatch.setattr("farflung.cli.output.PLAIN_WIDTH", width)
    monkeypatch.setattr(doctor, "probe", lambda address, port: ProbeResult("0.2.0", "", 0.01234, 0.0015))
    monkeypatch.setattr(doctor, "check_host", lambda host, text: None)
    monkeypatch.setattr(doctor, "find_local_address", lambda host: "10.0.0.200")
    show()
    lines = capsys.readouterr().out.partition("# measured")[0].splitlines()
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "…" not in text
    for figure in SHOWN[show]:
        assert figure in text, text
    if show is show_summary:
        joined = "".join(text.translate(str.maketrans("", "", "│")).split())
        assert ",".join(METHODS) in joined


@pytest.mark.parametrize("width", [80, 100, 120])
@pytest.mark.parametrize(
    "command",
    [
        "recipes mercury",
        "codecs demo",
        "workloads fashion-mnist/mlp",
        "networks four-regions",
        "devices v100",
    ],
)
def test_one_entry_in_full_is_not_cut(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str, width: int
) -> None:
    monkeypatch.setattr("farflung.cli.output.PLAIN_WIDTH", width)
    assert main(["list", *command.split()]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    assert not any("…" in line for line in lines)


def test_json_has_null_for_what_is_not_finite(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"bandwidth_bps": [float("inf"), float("nan"), 1.5]})
    assert capsys.readouterr().out == '{"bandwidth_bps": [null, null, 1.5]}\n'


def test_commands_print_json_in_one_way() -> None:
    folder = Path(farflung.__file__).parent
    commands = [
        path for path in folder.rglob("cli/*.py") if "print(json.dumps(" in path.read_text(encoding="utf-8")
    ]
    assert [path.name for path in commands] == ["output.py"]
