"""Labs on this machine: links as they should be, workers in their places, faults, and nothing left behind."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from farflung.errors import ConfigError, LabError
from farflung.faults import FaultPlan, LinkCondition
from farflung.lab import TOLERANCE, JobResult, Lab, PairMeasurement, check_abilities, explain_missing, run_job
from farflung.lab.children import Child
from farflung.lab.measure import compute_expected
from farflung.lab.tun import build_address, read_congestion_control
from farflung.network import Link, NetworkProfile, Site
from tests.covering import thorough

LIMIT_S = 300.0
"""An upper bound on what anything here may take on a busy machine; a test that passes waits for events alone."""
pytestmark = [pytest.mark.lab, pytest.mark.timeout(2 * LIMIT_S)]

PROFILE = NetworkProfile("test", (Site("all", None, Link(0.01), up_bps=50e6, down_bps=50e6),))


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab(PROFILE, 2) as made:
        yield made


# --- links and workers ------------------------------------------------------------------------------------------


def test_this_machine_can() -> None:
    assert explain_missing() is None
    assert {one.name for one in check_abilities() if one.is_required} > {
        "root",
        "TUN devices",
        "network namespaces",
    }


def test_every_pair_is_as_the_profile_says(lab: Lab) -> None:
    pairs = lab.check()
    assert {(pair.src, pair.dst) for pair in pairs} == {(0, 1), (1, 0)}
    assert all(pair.is_accurate for pair in pairs)


@pytest.mark.thorough
def test_a_link_that_loses_packets_is_measured_as_a_link() -> None:
    lossy = NetworkProfile.create_uniform(Link(0.02, 20e6, loss=0.02), 2)
    with Lab(lossy, 2) as lab:
        for pair in lab.check():
            assert pair.bandwidth_bps == pytest.approx(20e6, rel=TOLERANCE)
            assert 0.0 < pair.loss < 0.05
        lab.set_condition(0, 1, LinkCondition(loss=0.3))
        with pytest.raises(LabError, match=r"1 of 2 pairs.*% lost instead of 2.00%"):
            lab.check()


@pytest.mark.thorough
def test_nodes_have_the_congestion_control_of_the_profile() -> None:
    profile = replace(PROFILE, congestion="reno")
    with Lab(profile, 2) as lab, Lab(profile, 2, congestion_control="bbr") as other, Lab(PROFILE, 2) as own:
        assert lab.congestion_control == "reno"
        assert other.congestion_control == "bbr"
        assert own.congestion_control == read_congestion_control()


@pytest.mark.thorough
def test_a_link_that_is_off_is_refused(lab: Lab) -> None:
    lab.set_condition(0, 1, LinkCondition(bandwidth_bps=25e6))
    with pytest.raises(LabError, match=r"1 of 2 pairs.*from node 0 to node 1"):
        lab.check()


@pytest.mark.thorough
def test_a_crashed_line_is_noticed(lab: Lab) -> None:
    line = next(lab.iter_watched())
    os.kill(line.pid, signal.SIGKILL)
    with pytest.raises(LabError, match="delay line ended"):
        run_job(lab, ["sleep", "1000"], dict(os.environ))


@pytest.mark.thorough
def test_workers_are_told_who_they_are(lab: Lab, tmp_path: Path) -> None:
    script = "import json, os; print(json.dumps([dict(os.environ), os.getpid(), os.listdir('/proc')]))"
    files = [(tmp_path / f"{node}").open("w+") for node in range(2)]
    result = run_job(lab, [sys.executable, "-c", script], {"A": "b"}, [file.fileno() for file in files])
    assert result.exit_codes == (0, 0)
    for node, file in enumerate(files):
        file.seek(0)
        variables, pid, processes = json.loads(file.read())
        file.close()
        assert variables["A"] == "b"
        assert (variables["RANK"], variables["WORLD_SIZE"]) == (str(node), "2")
        assert variables["MASTER_ADDR"] == build_address(0)
        assert str(pid) in processes
        assert str(os.getpid()) not in processes, "a worker sees only what it has started"


def test_delays_may_be_those_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(PROFILE, 2)
    wanted = compute_expected(lab.profile)
    found = [
        PairMeasurement(*pair, 2 * latency, latency, speed, speed)
        for pair, (latency, speed) in wanted.items()
    ]
    monkeypatch.setattr(lab, "measure", lambda: found)
    monkeypatch.setattr(lab, "_measure_pairs", lambda wanted: found)
    assert lab.check(any_delay=True) == found
    with pytest.raises(LabError, match="does not come out right"):
        lab.check()
    found[0] = replace(found[0], bandwidth_bps=found[0].bandwidth_bps / 2)
    with pytest.raises(LabError, match=r"\(1 of 2 pairs\)"):
        lab.check(any_delay=True)


@pytest.mark.thorough
def test_exit_codes_are_the_commands(lab: Lab) -> None:
    script = 'if [ "$RANK" = 1 ]; then kill -9 $$; fi; exit 3'
    assert run_job(lab, ["sh", "-c", script], dict(os.environ)).exit_codes == (3, 137)


# --- faults -----------------------------------------------------------------------------------------------------

TALK = """
import json, os, socket, sys, time
rank, address = int(os.environ["RANK"]), (os.environ["MASTER_ADDR"], 4000)
tell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
tell.connect(sys.argv[1])
if rank == 0:
    with socket.create_server(address) as server:
        talk, _ = server.accept()
    tell.send(json.dumps({"event": "begin", "rank": 0, "step": 0, "t": 100.0}).encode())
else:
    while True:
        try:
            talk = socket.create_connection(address)
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
step = 0
while step != int(sys.argv[2]):
    try:
        talk.sendall(b"x")
        here = talk.recv(1)
    except OSError:
        here = b""
    if not here:
        sys.exit(7)
    tell.send(json.dumps({"event": "step", "rank": rank, "step": step}).encode())
    step += 1
    time.sleep(0.02)
"""
"""Both ends send a byte and wait for the other's, so many times, and tell of it; 7 where the connection ends.

They tell of a start-up of 100 s, which is no time of a plan.
"""


def talk(lab: Lab, plan: FaultPlan, times: int, folder: Path) -> JobResult:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        told.bind(str(folder / "told"))
        command = [sys.executable, "-S", "-c", TALK, told.getsockname(), str(times)]
        return run_job(lab, command, dict(os.environ), plan=plan, event_socket=told)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["cut", "hang"])
def test_a_connection_outlives_a_cut_and_a_stop(lab: Lab, kind: str, tmp_path: Path) -> None:
    plan = getattr(FaultPlan(), kind)(1, at_s=0.2, for_s=0.3)
    result = talk(lab, plan, 30, tmp_path)
    assert result.exit_codes == (0, 0)
    began_s, nothing = result.first_steps_s
    assert nothing is None
    assert began_s is not None
    assert result.seconds - began_s > 0.5
    assert (result.lost_packets > 0) == (kind == "cut")


STOPPED = """
import json, os, signal, socket, sys
if os.environ["RANK"] == "1":
    signal.signal(signal.SIGCONT, lambda *_: sys.exit(5))
    tell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    tell.connect(sys.argv[1])
    tell.send(json.dumps({"event": "begin", "rank": 1, "step": 0}).encode())
    while True:
        signal.pause()
"""
"""Rank 0 ends at once; rank 1 tells that it begins, and ends by 5 when it goes on after a stop."""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("plan", "code"),
    [
        (FaultPlan().hang(1, at_step=0), 137),
        (FaultPlan().hang(1, at_step=0).cut(1, at_s=1e6), 137),
        (FaultPlan().hang(1, at_step=0, for_s=0.3), 5),
        (FaultPlan().hang(1, at_step=0).restore(1, at_s=0.3), 5),
    ],
    ids=["for ever", "beyond other faults", "for a time", "until restored"],
)
def test_a_job_ends_without_workers_that_hang_for_ever(
    lab: Lab, plan: FaultPlan, code: int, tmp_path: Path
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        told.bind(str(tmp_path / "told"))
        command = [sys.executable, "-S", "-c", STOPPED, told.getsockname()]
        assert run_job(lab, command, dict(os.environ), plan=plan, event_socket=told).exit_codes == (0, code)


@pytest.mark.thorough
def test_packets_are_lost_and_links_slowed_until_restored(lab: Lab, tmp_path: Path) -> None:
    plan = FaultPlan().lose(0, loss=0.3, at_step=2).throttle(0, 1, bandwidth_bps=1e5, at_step=2)
    result = talk(lab, plan.restore(0, at_s=1.0), 60, tmp_path)
    assert result.exit_codes == (0, 0)
    assert result.lost_packets > 0


@pytest.mark.thorough
def test_faults_that_never_struck_are_named(
    lab: Lab, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    talk(lab, FaultPlan().cut(1, at_step=2, for_s=0.1).hang(1, at_step=99).cut(0, at_s=1e6), 4, tmp_path)
    assert [record.getMessage() for record in caplog.records] == [
        "2 of 3 faults never struck, for the run or their replica had ended: hang of rank 1 at step 99, cut of rank 0 "
        "at 1e+06 s"
    ]


@pytest.mark.thorough
def test_a_step_of_what_tells_of_none_is_refused(lab: Lab) -> None:
    with pytest.raises(ConfigError, match=r"crash of rank 1 at step 5: at_step requires farflung train"):
        run_job(lab, ["true"], {}, plan=FaultPlan().crash(1, at_step=5))


@pytest.mark.thorough
def test_a_crash_closes_connections(lab: Lab, tmp_path: Path) -> None:
    assert talk(lab, FaultPlan().crash(1, at_step=5), -1, tmp_path).exit_codes == (7, 137)


# --- nothing is left --------------------------------------------------------------------------------------------

LASTING = 'setsid sleep 1000 & echo up > "$UP"; exec sleep 1000'
"""A worker that leaves something behind if it can."""
Way = Callable[[Child, int, list[int], Path], None]


def interrupted(parent: Child, line: int, guards: list[int], folder: Path) -> None:
    os.kill(parent.pid, signal.SIGUSR1)


def killed(parent: Child, line: int, guards: list[int], folder: Path) -> None:
    os.kill(parent.pid, signal.SIGKILL)


def line_killed(parent: Child, line: int, guards: list[int], folder: Path) -> None:
    os.kill(line, signal.SIGKILL)


def guards_killed(parent: Child, line: int, guards: list[int], folder: Path) -> None:
    for guard in guards:
        os.kill(guard, signal.SIGKILL)


def workers_ended(parent: Child, line: int, guards: list[int], folder: Path) -> None:
    for pid in processes(folder):
        with suppress(OSError):  # a guard may be faster
            if Path(f"/proc/{pid}/comm").read_text().strip() in ("sh", "setsid", "sleep"):
                os.kill(pid, signal.SIGTERM)


WAYS = (interrupted, killed, line_killed, guards_killed, workers_ended)


def processes(folder: Path) -> list[int]:
    """Those whose working folder it is, and so all that one there has started; other labs may be on this machine."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                if (entry / "cwd").readlink() == folder:
                    found.append(int(entry.name))
    return found


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("time_", [0, *thorough(1, 2, 3)])
def test_nothing_is_left_however_it_ends(way: Way, time_: int, tmp_path: Path) -> None:
    up = tmp_path / "up"
    os.mkfifo(up)
    heard = os.open(up, os.O_RDWR)  # with an end for writing here, it never ends
    ear, bell = os.pipe()

    def run() -> None:
        os.chdir(tmp_path)
        with Lab(PROFILE, 2) as lab:
            stop, ring = os.pipe()
            signal.signal(signal.SIGUSR1, lambda *_: os.write(ring, b"!!"))
            real_start = lab.start

            def start(*args, **kwargs) -> Child:
                worker = real_start(*args, **kwargs)
                line = next(lab.iter_watched()).pid
                os.write(bell, json.dumps({"line": line, "guard": worker.pid}).encode() + b"\n")
                return worker

            lab.start = start  # type: ignore[method-assign]
            run_job(lab, ["sh", "-c", LASTING], {**os.environ, "UP": str(up)}, stop_fd=stop)

    parent = Child(run, keep=[bell])
    os.close(bell)
    try:
        said = [json.loads(line) for line in read_lines(ear, 2)]
        assert read_lines(heard, 2) == ["up", "up"]
        # The parent and the line; for each node a guard, a first process, the command, and what that has started.
        there = {pid: os.pidfd_open(pid) for pid in processes(tmp_path)}
        guards = [one["guard"] for one in said]
        assert {parent.pid, said[0]["line"], *guards} < there.keys()
        assert len(there) == 10
        way(parent, said[0]["line"], guards, tmp_path)
        assert parent.wait(LIMIT_S) is not None
        until = time.monotonic() + LIMIT_S
        for pid, fd in there.items():
            gone, _, _ = select.select([fd], [], [], max(0.0, until - time.monotonic()))
            assert gone, f"process {pid} is still there"
            os.close(fd)
    finally:
        parent.kill()
        os.close(heard)
        os.close(ear)
    assert not processes(tmp_path), "and with the line its devices"


def read_lines(fd: int, count: int) -> list[str]:
    """So many lines, waited for."""
    text, until = "", time.monotonic() + LIMIT_S
    while text.count("\n") < count:
        ready, _, _ = select.select([fd], [], [], max(0.0, until - time.monotonic()))
        assert ready, f"heard only {text!r}"
        piece = os.read(fd, 4096)
        assert piece, f"nobody is left to say more than {text!r}"
        text += piece.decode()
    return text.splitlines()
