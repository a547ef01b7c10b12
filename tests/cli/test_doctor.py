"""``farflung doctor``: this machine on one screen, and the way to others, over loopback."""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread

import pytest

from farflung import __version__
from farflung.cli import probing
from farflung.cli.main import main
from farflung.comm.visits import LENGTH
from tests.refusals import refuse

ROOT = Path(__file__).parents[2]


@contextmanager
def served(by: Callable[[socket.socket], None] = probing.serve_probes) -> Iterator[str]:
    """What answers on loopback; its HOST:PORT."""

    def until_closed() -> None:
        with suppress(OSError):
            by(listener)

    with probing.create_listener() as listener:
        thread = Thread(target=until_closed)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_it_says_what_this_machine_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    machine = found["machine"]
    assert found["peers"] == found["troubles"] == []
    assert machine["farflung"].startswith(__version__)
    assert machine["cores"] == f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}"
    assert "lo 127.0.0.1" in machine["interfaces"]
    assert main(["doctor"]) == 0
    table, err = capsys.readouterr()
    assert err == ""
    assert all(name in table for name in machine)


@pytest.mark.parametrize(("version", "is_slow"), [((3, 0, 19), True), ((3, 1, 0), False), ((4, 0, 0), False)])
def test_an_openssl_that_encrypts_slowly_is_named(
    version: tuple[int, ...],
    is_slow: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(ssl, "OPENSSL_VERSION_INFO", version)
    assert main(["doctor", "--json"]) == 0
    encryption = json.loads(capsys.readouterr().out)["machine"]["encryption"]
    assert encryption.startswith(ssl.OPENSSL_VERSION)
    assert ("twice as fast" in encryption) == is_slow


def test_a_machine_that_cannot_reach_itself_is_told_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_connection(*address: object, **options: object) -> None:
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr(socket, "create_connection", refuse_connection)
    assert main(["doctor"]) == 1
    assert "127.0.0.1: not reached: Network is unreachable; " in capsys.readouterr().err


def test_the_address_is_that_on_the_way_to_the_master(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["machine"]["messages and gloo use"] == "127.0.0.1 to localhost"


def test_it_says_which_site_this_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FARFLUNG_SITE", "1/3@localhost:29400")
    assert main(["doctor", "--json"]) == 0
    machine = json.loads(capsys.readouterr().out)["machine"]
    assert machine["site"] == "1 of 3, which meet at localhost:29400"
    assert machine["messages and gloo use"] == "127.0.0.1 to localhost"
    monkeypatch.setenv("FARFLUNG_SITE", "1 of 3")
    assert "FARFLUNG_SITE is '1 of 3'" in refuse(capsys, "doctor")


def test_a_peer_is_reached_in_both_directions(capsys: pytest.CaptureFixture[str]) -> None:
    with served() as peer:
        assert main(["doctor", peer, "--json"]) == 0
        (found,) = json.loads(capsys.readouterr().out)["peers"]
        assert main(["doctor", peer]) == 0
    assert (found["peer"], found["version"], found["connect_back_error"]) == (peer, __version__, "")
    assert found["round_trip_s"] > 0
    assert abs(found["clock_s"]) <= found["round_trip_s"], "it is the same clock"
    table = capsys.readouterr().out
    assert peer in table
    assert "yes" in table


def test_one_that_cannot_connect_back_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(probing, "_try_connect_back", lambda link, port, token: "No route to host")
    with served() as peer:
        assert main(["doctor", peer]) == 1
    assert capsys.readouterr().err == (
        f"farflung: {peer}: cannot connect back to this machine: No route to host\n"
    )


def test_each_that_is_not_reached_is_named_on_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with served() as peer:
        assert main(["doctor", f"127.0.0.1:{port}", peer, "--json"]) == 1
    out, err = capsys.readouterr()
    assert err == f"farflung: 127.0.0.1:{port}: not reached: Connection refused\n"
    assert [one["peer"] for one in json.loads(out)["peers"]] == [peer]


def say(text: bytes) -> Callable[[socket.socket], None]:
    """A server that says the same to all."""

    def serve(listener: socket.socket) -> None:
        while True:
            link, _ = listener.accept()
            with link:
                link.sendall(text)
                link.shutdown(socket.SHUT_WR)
                while link.recv(1 << 16):
                    pass

    return serve


@pytest.mark.parametrize(
    "text",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        LENGTH.pack(1 << 31),
        LENGTH.pack(2) + b"[]",
        LENGTH.pack(4) + b"\xff\xff\xff\xff",
        LENGTH.pack(27) + b'{"version": 1, "back": "x"}' + LENGTH.pack(17) + b'{"time_s": "now"}',
    ],
)
def test_what_answers_as_no_doctor_is_named(capsys: pytest.CaptureFixture[str], text: bytes) -> None:
    with served(say(text)) as peer:
        assert main(["doctor", peer]) == 1
    said = f"farflung: {peer}: not reached: what answers there is not farflung doctor --serve\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    "question",
    [
        b"",
        b"\x00",
        b"null",
        b"[1]",
        b"{}",
        b'{"ask": "go"}',
        b'{"ask": ["hello"]}',
        b'{"ask": "hello", "port": "x", "token": 1}',
        b'{"ask": "hello", "port": 1e999, "token": 1}',
        b'{"ask": "hello", "port": 1' + b"0" * 400 + b', "token": 1}',
        b"[" * 1000,
    ],
)
def test_what_is_no_question_is_not_answered(question: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    with ours:
        ours.sendall(LENGTH.pack(len(question)) + question)
        probing.handle_requests(theirs)
        assert theirs.fileno() == -1
        assert ours.recv(1) == b""


def test_it_connects_to_no_host_but_the_one_that_asks() -> None:
    with served() as peer:
        host, port = peer.split(":")
        with (
            probing.create_listener() as back,
            socket.create_connection((host, int(port)), source_address=("127.0.0.9", 0)) as link,
        ):
            text = json.dumps(
                {"ask": "hello", "port": back.getsockname()[1], "token": 5, "host": "127.0.0.1"}
            )
            link.sendall(LENGTH.pack(len(text)) + text.encode())
            came, _ = back.accept()
            with came:
                assert came.getsockname()[0] in ("127.0.0.9", "::ffff:127.0.0.9")
                assert came.recv(100)[4:] == b'{"token": 5}'


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["somewhere"], "somewhere: must be HOST:PORT, an address of IPv6 in brackets"),
        (["127.0.0.1:0"], "127.0.0.1:0: must be HOST:PORT"),
        (["::1:80"], "::1:80: must be HOST:PORT"),
        (["no.such.host.invalid:80"], "no.such.host.invalid:80: unknown host ("),
        (["--serve", "127.0.0.1:80"], "--serve: answers others: leave out HOST:PORT and --json"),
        (["--serve", "--port", "70000"], "--port 70000: must be a port"),
    ],
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], args: list[str], says: str) -> None:
    assert refuse(capsys, "doctor", *args).startswith(f"farflung: {says}")


def test_a_port_that_is_taken_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with probing.create_listener() as taken:
        port = taken.getsockname()[1]
        assert main(["doctor", "--serve", "--port", str(port)]) == 2
    assert capsys.readouterr().err == (
        f"farflung: --port {port}: cannot be listened at (Address already in use)\n"
    )


SERVES = """
import signal, sys
from farflung.cli.main import main

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
sys.exit(main(["doctor", "--serve"]))
"""


@pytest.mark.thorough
def test_serving_ends_at_ctrl_c(capsys: pytest.CaptureFixture[str]) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SERVES],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        stdout=subprocess.PIPE, text=True,
    ) as serving:  # fmt: skip
        try:
            assert serving.stdout is not None
            ready, _, _ = select.select([serving.stdout], [], [], 60)
            assert ready
            port = serving.stdout.readline().rpartition("HOST:")[2].strip()
            assert main(["doctor", f"127.0.0.1:{port}", "--json"]) == 0
            serving.send_signal(signal.SIGINT)
            assert serving.wait(30) == 0
        finally:
            serving.kill()
    assert json.loads(capsys.readouterr().out)["peers"][0]["version"] == __version__
