"""``farflung report`` and ``farflung watch``: where the page goes, which input is refused, and what is served."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import farflung
from farflung.cli.main import main
from farflung.cli.report import PageServer
from tests.refusals import refuse
from tests.web import running


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    farflung.simulate("synthetic/quadratic", workers=2, steps=4, network="wifi-10mbps", out=out)
    return out


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A run's folder, to be changed."""
    return Path(shutil.copytree(made, tmp_path / "run"))


def asked(server: PageServer, path: str = "/data.json", host: str = "") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request("GET", path, headers={"Host": host} if host else {})
    answer = connection.getresponse()
    said = answer.status, answer.read().decode()
    connection.close()
    return said


def state(server: PageServer) -> str:
    status, text = asked(server)
    assert status == 200
    found: dict[str, Any] = json.loads(text)
    return str(found["state"])


# --- report -----------------------------------------------------------------------------------------------------


def test_where_the_page_goes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report", "run"]) == 0
    assert main(["report", "run", "run"]) == 0
    assert capsys.readouterr().out.split() == ["report", "run/report.html", "report", "report.html"]
    assert "2 runs" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert (folder / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([], "give the folder of a run, or of several"),
        (["nowhere"], "nowhere: no run there"),
        (["run", "nowhere"], "nowhere: no run there"),
        (["run", "--out", "run"], "run: cannot be written"),
    ],
)
def test_no_run_and_no_place(
    given: list[str],
    says: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert says in refuse(capsys, "report", *given)


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        ("config.json", "[]", "config.json: damaged"),
        ("summary.json", "{", "summary.json: damaged"),
        ("summary.json", '{"steps": "many"}', "number"),
        ("telemetry/rank-0.jsonl", '{"event":"step","rank":0,"t":1}\n', "rank 0: no number step in an event"),
        ("telemetry/rank-0.jsonl", '{"event":"view","rank":0,"t":1,"members":3}\n', "damaged"),
        ("telemetry/rank-0.jsonl", "nonsense\n", "line 1: not an event"),
        ("telemetry/rank-x.jsonl", "", "rank-x.jsonl: damaged"),
    ],
)
def test_damaged_files(
    file: str, text: str, says: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "view" in text:
        text = '{"event":"begin","rank":0,"t":0,"step":0}\n' + text
        (folder / "telemetry" / "rank-1.jsonl").unlink()
    (folder / file).write_text(text, encoding="utf-8")
    for command in ("report", "watch"):
        assert says in refuse(capsys, command, folder)


# --- watch ------------------------------------------------------------------------------------------------------


def test_a_run_is_followed_from_before_its_first_step(folder: Path) -> None:
    events = (folder / "telemetry" / "rank-0.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    steps = [line for line in events if '"event":"step"' in line]
    shutil.rmtree(folder / "telemetry")
    (folder / "summary.json").unlink()
    with running(PageServer(folder, 0)) as server:
        assert state(server) == "not ended: 0 of 4 steps"
        (folder / "telemetry").mkdir()
        with (folder / "telemetry" / "rank-0.jsonl").open("w", encoding="utf-8") as file:
            for line, done in ((events[0], 0), (steps[0], 1), (steps[1] + '{"event":"st', 2)):
                file.write(line)
                file.flush()
                assert state(server) == f"not ended: {done} of 4 steps"
        status, page = asked(server, "/")
        assert status == 200
        assert "connect-src 'self'" in page
        assert '"live": true' in page
        (folder / "telemetry" / "rank-0.jsonl").write_text("nonsense\n", encoding="utf-8")
        status, text = asked(server)
        assert (status, "line 1: not an event" in text) == (500, True)


def test_other_hosts_are_refused(folder: Path) -> None:
    with running(PageServer(folder, 0)) as server:
        port = server.server_port
        assert server.server_address[0] == "127.0.0.1"
        assert asked(server, host=f"localhost:{port}")[0] == 200
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", f"127.0.0.1.evil.example:{port}"):
            for path in ("/", "/data.json"):
                assert asked(server, path, host) == (421, f"farflung watch answers only at 127.0.0.1:{port}")
        assert asked(server, "/../config.json")[0] == 404


def test_a_port_that_is_taken_or_none(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running(PageServer(folder, 0)) as server:
        assert "--port" in refuse(capsys, "watch", folder, "--port", server.server_port)
    assert "--port 70000: " in refuse(capsys, "watch", folder, "--port", 70000)


def test_it_prints_its_address_and_ctrl_c_ends_it(folder: Path) -> None:
    command = [sys.executable, "-m", "farflung", "watch", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watch:
        assert watch.stdout is not None
        found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/\n", watch.stdout.readline())
        assert found
        connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=30)
        connection.request("GET", "/")
        assert connection.getresponse().status == 200
        connection.close()
        watch.send_signal(signal.SIGINT)
        assert watch.communicate(timeout=30)[1] == "farflung: interrupted\n"
    assert watch.returncode == 130
