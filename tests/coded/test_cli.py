"""farflung coded: what cannot work is said in a line or two, and a run is made by processes of the command."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from farflung.cli.main import main
from farflung.coded.linear_model import InMemoryProducts, LinearModel, Problem
from farflung.coded.run import Learner
from farflung.coded.solvers import solve
from farflung.comm.keys import make_keys
from farflung.tasks import Task
from tests.covering import thorough
from tests.forks import Fork, farflung

PARTITIONS = 3


def samples(number: int, features: int = 12) -> tuple[Any, Any]:
    """One partition's features and labels, whose columns are of unlike sizes, so that it takes some iterates."""
    random = np.random.default_rng(number)
    x = random.standard_normal((150 + number, features)) * np.logspace(0, -2, features)
    y = np.sign(x @ np.logspace(0, 2, features) + random.standard_normal(len(x)))
    return x, y


def written(folder: Path, number: int = 0, **arrays: Any) -> str:
    x, y = samples(number)
    path = folder / f"part-{number}.npz"
    np.savez(path, **{"x": x, "y": y, **arrays})
    return str(path)


def says(capsys: pytest.CaptureFixture[str], code: int, *args: str) -> str:
    """What a command says that ends with a code, in a line or two."""
    assert main(["coded", *args]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("farflung: ")
    assert len(err.splitlines()) <= 2
    return err


# --- what cannot work -------------------------------------------------------------------------------------------------


COORDINATOR = [
    ("--devices 4", "--partitions: give how many partitions training begins with"),
    ("--partitions 4", "--devices: give how many devices training begins with"),
    ("--partitions 0 --devices 2", "partitions 0 must be at least 1"),
    ("--partitions 4 --devices 256", "--devices 256: a run has 255 seats"),
    ("--partitions 4 --devices 2", "devices 2 must be at least 4"),
    ("--patience 0", "patience_s 0.0 must be a number of at least 0.001"),
    ("--redundancy -1", "redundancy -1 must be at least 0"),
    ("--transposed rows", "transposed 'rows' must be 'columns' or 'repair'"),
    ("--on-loss cry", "on_loss 'cry' must be 'wait' or 'go_on'"),
    ("--code raptor", "unknown code 'raptor'; known: mds, rlnc"),
    ("--model forest", "unknown model 'forest'; known: logistic, svc"),
    ("--model svc --loss log", "unknown loss 'log'; known: hinge, squared_hinge"),
    ("--loss hinge", "loss = 'hinge': it is the svc's"),
    ("--C 0", "objective: C 0.0 must be a number above 0"),
    ("--solver newton", "unknown solver 'newton'; known: gd, lbfgs"),
    ("--tolerance -1", "lbfgs: tol -1.0 must be a number of at least 0"),
    ("--max-iterations 0", "--max-iterations 0: must be 1 or more"),
    ("--at here", "'here': an address is HOST:PORT"),
    ("--at 999.1.1.1:1", "999.1.1.1:1: unknown host"),
    ("--keys absent", "--keys absent: no such folder; make it with: farflung keys absent"),
    ("--test mnist", "unknown data 'mnist'; known: a9a, covtype, or a file ending in .npz"),
    ("--folder /dev/null", "/dev/null: a file: a run is kept in a folder"),
]
DEVICE = [
    ("--data mnist", "unknown data 'mnist'; known: a9a, covtype, or a file ending in .npz"),
    ("--data absent.npz", "absent.npz: cannot be read (No such file or directory)"),
    ("--data text.npz", "text.npz: not a file of arrays"),
    ("--data bare.npz", "bare.npz: it has no array 'y'; arrays x and y are due"),
    ("--data long.npz", "long.npz: x of shape [150, 12] and y of [7]: (samples, features) and"),
    ("--data words.npz", "words.npz: y holds something else than finite numbers"),
    ("--data holes.npz", "holes.npz: x holds something else than finite numbers"),
    ("--data large.npz", "large.npz: x holds numbers above 1e+150, whose squares may not be finite"),
    ("--data good.npz --part 4/3", "part 4/3: the part must be between 1 and 3"),
    ("--data good.npz --part 0/3", "part 0/3: the part must be between 1 and 3"),
    ("--data good.npz --part third", "part 'third': write it as I/K, such as 1/4"),
    ("--data good.npz --part 1/500", "part 1/500: there are 150 rows"),
    ("--data good.npz --seed 3", "--seed requires --part"),
    ("--part 1/3", "--part requires --data"),
    ("--name mine", "--name requires --data"),
    ("--pace raspberry-pi-4", "--pace raspberry-pi-4: give --data too, which says how long a row is"),
    ("--data good.npz --pace nowhere", "unknown device 'nowhere'"),
    ("--patience 0", "--patience 0.0: must be a number of seconds above 0"),
    ("--keys absent", "--keys absent: no such folder"),
]
DEMO = [
    ("--room -1", "--room -1: must be 0 or more"),
    ("--kill 9", "--kill 9: there are 8 devices"),
    ("--data mnist", "--data mnist: must be auto, a9a or synthetic"),
    ("--partitions 0", "partitions 0 must be at least 1"),
]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    x, y = samples(0)
    for name, arrays in {
        "good": {"x": x, "y": y},
        "bare": {"x": x},
        "large": {"x": 1e160 * x, "y": y},
        "long": {"x": x, "y": y[:7]},
        "words": {"x": x, "y": y.astype(str)},
        "holes": {"x": np.where(x > 1, np.nan, x), "y": y},
    }.items():
        np.savez(f"{name}.npz", **arrays)
    Path("text.npz").write_text("x, y")


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(
    ("command", "args", "said"),
    [
        *(("coordinator --quiet", *row) for row in COORDINATOR),
        *(("device 127.0.0.1:1 --quiet", *row) for row in DEVICE),
        ("device there", "", "'there': an address is HOST:PORT"),
        ("device 999.1.1.1:1", "--quiet", "999.1.1.1:1: unknown host"),
        *(("demo", *row) for row in DEMO),
    ],
)
def test_what_cannot_work(capsys: pytest.CaptureFixture[str], command: str, args: str, said: str) -> None:
    if "coordinator" in command and not {"--partitions", "--devices"} & {*args.split()}:
        command += " --partitions 2 --devices 3"
    assert said in says(capsys, 2, *command.split(), *args.split())


def test_a_port_that_is_taken(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        at = f"127.0.0.1:{other.getsockname()[1]}"
        args = ["--partitions", "1", "--devices", "1", "--at", at, "--folder", str(tmp_path / "run")]
        assert f"{at}: cannot be listened at" in says(capsys, 2, "coordinator", "--quiet", *args)


def test_nobody_comes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    args = ["--partitions", "2", "--devices", "3", "--patience", "0.3", "--folder", str(tmp_path)]
    said = says(capsys, 1, "coordinator", "--quiet", *args)
    assert "or got further with a block for 0.3 s: 0 of 3 devices and 0 of 2 partitions have come" in said


def test_nobody_is_met(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        at = f"127.0.0.1:{other.getsockname()[1]}"
    said = says(capfd, 1, "device", at, "--patience", "0.3", "--quiet")
    assert f"a coordinator at {at} (Connection refused)" in said, "and torch's stack is not shown"


def test_what_is_met_is_no_store() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        at = f"127.0.0.1:{silent.getsockname()[1]}"
        with farflung("coded", "device", at, "--patience", "0.3", "--quiet") as device:
            _, (said,) = device.finished()
    assert f"a coordinator at {at} (no answer)" in said


def test_a_device_that_looks_for_a_coordinator_is_stopped() -> None:
    with ExitStack() as stack:
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        at = f"127.0.0.1:{silent.getsockname()[1]}"
        device = stack.enter_context(farflung("coded", "device", at))
        assert "looks for a coordinator" in device.stderr.readline()
        silent.accept()[0].close()
        device.send_signal(signal.SIGINT)
        assert device.finished() == ("", ["farflung: interrupted"])
        assert device.returncode == 130


def test_a_folder_of_another_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = ["--patience", "0.1", "--folder", str(tmp_path / "run")]
    args = ["coordinator", "--quiet", "--devices", "2", *folder]
    says(capsys, 1, *args, "--partitions", "1")
    said = says(capsys, 2, *args, "--partitions", "2")
    assert "holds another run: its partitions is 1, not 2: choose another --folder" in said
    (tmp_path / "run" / "config.json").write_text('{"workload": "synthetic/quadratic"}')
    assert "holds a run of another kind" in says(capsys, 2, *args, "--partitions", "1")


# --- runs -------------------------------------------------------------------------------------------------------------


@contextmanager
def coordinator(folder: Path, *args: str) -> Iterator[tuple[Fork, str]]:
    """The command, and where it is met."""
    sizes = (
        () if "--partitions" in args else ("--partitions", str(PARTITIONS), "--devices", str(PARTITIONS + 1))
    )
    with farflung("coded", "coordinator", *sizes, "--folder", str(folder), *args, "--json") as process:
        begun = process.stderr.readline()
        assert "farflung coded device" in begun, begun + process.stderr.read()
        yield process, begun.split("coded device ")[1].split()[0]


def ended(processes: Sequence[Fork]) -> list[dict[str, Any]]:
    """What processes of the command have printed, once they have ended well."""
    said = [process.finished() for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), said
    return [json.loads(out) for out, _ in said]


@contextmanager
def started(
    folder: Path, *args: str, parts: int = PARTITIONS, **arrays: Any
) -> Iterator[tuple[Fork, list[Fork], str]]:
    """The coordinator and its devices, one with room alone, and where they meet."""
    data = [
        written(folder, part, **{name: make(part) for name, make in arrays.items()}) for part in range(parts)
    ]
    sizes = ["--partitions", str(parts), "--devices", str(parts + 1)]
    with ExitStack() as stack:
        process, at = stack.enter_context(coordinator(folder / "run", *sizes, *args))
        devices = [["--data", path] for path in data]
        crowd = [
            stack.enter_context(farflung("coded", "device", at, *more, "--json")) for more in [*devices, []]
        ]
        yield process, crowd, at


def wait_for_training(process: Fork, folder: Path) -> None:
    while not (folder / "run" / "state.safetensors").exists():
        assert process.wait(0.01) is None


def minimum(parts: Sequence[int], **learner: Any) -> float:
    """What is minimised, by one process with all data."""
    both = [samples(part) for part in parts]
    x, y = (torch.from_numpy(np.concatenate([one[place] for one in both])) for place in (0, 1))
    learns = Learner(**learner)
    problem = Problem(InMemoryProducts(x), learns.build_objective(2), learns.build_targets((y > 0).long(), 2))
    training = solve(learns.build_solver(2), problem, max_iterations=1000)
    found: float = Task(training, lambda resume: resume(), eager_start=True).result().objective
    return found


@pytest.mark.parametrize(
    ("args", "learner"),
    [
        (["--code", "mds"], {}),
        *thorough((["--model", "svc", "--transposed", "repair", "--C", "0.5"], {"model": "svc", "C": 0.5})),
    ],
    ids=str,
)
def test_a_run(tmp_path: Path, args: list[str], learner: dict[str, Any]) -> None:
    folder, test = tmp_path / "run", written(tmp_path, 9)
    with started(tmp_path, "--test", test, *args) as (process, devices, _):
        out, err = process.finished()
        assert process.returncode == 0, err
        told = ended(devices)
    summary = json.loads(out)
    assert not any("refused" in line for line in err), "nobody greets before the door is open"
    assert summary["converged"]
    assert summary["objective"] == pytest.approx(minimum(range(PARTITIONS), **learner), rel=1e-8)
    assert summary["samples"] == sum(len(samples(part)[1]) for part in range(PARTITIONS))
    assert json.loads((folder / "summary.json").read_text()).items() <= summary.items()
    assert (folder / "run.png").read_bytes().startswith(b"\x89PNG")
    model = LinearModel.load(folder / "model.safetensors")
    x, y = map(torch.from_numpy, samples(9))
    assert summary["test_accuracy"] == model.compute_accuracy(x, y) > 0.7
    assert sorted(rank for one in told for rank in one["ranks"]) == [1, 2, 3, 4]
    fetched = sum(one["bytes_sent"].get("encoding", 0) for one in told)
    assert sum(summary["encoding_nbytes"].values()) == fetched > 0
    rows, columns = summary["encoding_nbytes"].values()
    assert summary["mds_encoding_nbytes"] >= fetched
    assert (summary["mds_encoding_nbytes"] == fetched) == ("mds" in args)
    assert rows > 0
    assert (columns > 0) == ("repair" not in args)


@pytest.mark.thorough
def test_a_run_with_keys_has_no_room_for_others(tmp_path: Path) -> None:
    keys = {name: tmp_path / name for name in ("friend", "stranger")}
    for name, folder in keys.items():
        make_keys(folder, name)
    data = [written(tmp_path, part) for part in range(2)]
    with ExitStack() as stack:
        mine = ["--keys", str(keys["friend"]), "--json"]
        args = ["--partitions", "2", "--devices", "2", *mine[:2]]
        process, at = stack.enter_context(coordinator(tmp_path / "run", *args))
        stranger = stack.enter_context(
            farflung("coded", "device", at, "--keys", str(keys["stranger"]), "--data", data[0], "--quiet")
        )
        stranger.finished()
        assert stranger.returncode == 2
        friends = [stack.enter_context(farflung("coded", "device", at, "--data", one, *mine)) for one in data]
        (summary,) = ended([process])
        ended(friends)
    assert summary["devices_came"] == 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda x, y: (x[:, :5], y), "has 5 features, and those that are there have 12"),
        *thorough((lambda x, y: (x, y), "is there already: give each device another one")),
    ],
    ids=["width", "name"],
)
def test_a_device_that_does_not_fit_is_sent_away(
    tmp_path: Path, change: Callable[[Any, Any], tuple[Any, Any]], said: str
) -> None:
    fits = written(tmp_path)
    x, y = change(*samples(0))
    unfit = written(tmp_path, 1, x=x, y=y)
    named = [] if "features" in said else ["--name", "the data"]
    with ExitStack() as stack:
        _, at = stack.enter_context(coordinator(tmp_path / "run"))
        first = stack.enter_context(farflung("coded", "device", at, "--data", fits, *named))
        assert "looks for a coordinator" in first.stderr.readline()
        assert "in, as rank" in first.stderr.readline()
        process = stack.enter_context(farflung("coded", "device", at, "--data", unfit, *named, "--quiet"))
        out, err = process.finished()
    assert (process.returncode, out) == (2, "")
    assert said in err[-1]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("args", "arrays", "said"),
    [
        (
            [],
            {"y": lambda part: np.ones(150 + part)},
            "all samples have the label 1: there is nothing to tell",
        ),
        (
            ["--model", "svc", "--solver", "gd(learning_rate=1e149)"],
            {"x": lambda part: 1e100 * samples(part)[0]},
            "a product of the samples is not finite in float64",
        ),
    ],
    ids=["one class", "not finite"],
)
def test_samples_that_cannot_be_learned_from_end_the_run_for_all(
    tmp_path: Path, args: list[str], arrays: dict[str, Any], said: str
) -> None:
    with started(tmp_path, *args, parts=2, **arrays) as (process, devices, _):
        last = [one.finished()[1][-1] for one in (process, *devices)]
    assert [one.returncode for one in (process, *devices)] == [2] * 4
    assert all(said in one for one in last)


SLOW = ["--solver", "gd", "--tolerance", "1e-9", "--max-iterations"]


@pytest.mark.thorough
def test_it_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    with started(tmp_path, *SLOW, "100000") as (process, crowd, _):
        wait_for_training(process, tmp_path)
        process.send_signal(signal.SIGINT)
        first = json.loads(process.finished()[0])
        assert process.returncode == 130
        ended(crowd)
    assert first["interrupted"]
    assert not first["converged"]
    with started(tmp_path, *SLOW, str(first["iterations"] + 5)) as (process, crowd, _):
        (second,) = ended([process])
        ended(crowd)
    assert second["iterations"] == first["iterations"] + 5
    assert second["objective"] < first["objective"]
    assert second["devices_came"] == 2 * (PARTITIONS + 1)


@pytest.mark.thorough
def test_a_coordinator_that_is_killed_comes_again(tmp_path: Path) -> None:
    slow = ["--solver", "gd", "--tolerance", "1e-6", "--max-iterations", "100000"]
    with started(tmp_path, *slow) as (process, crowd, at):
        wait_for_training(process, tmp_path)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        with coordinator(tmp_path / "run", *slow, "--at", at) as (again, _):
            (summary,) = ended([again])
        told = ended(crowd)
    assert summary["converged"]
    assert all(len(one["ranks"]) == 2 for one in told)


def test_before_training_a_device_leaves_at_once(tmp_path: Path) -> None:
    with ExitStack() as stack:
        process, at = stack.enter_context(coordinator(tmp_path / "run"))
        device = stack.enter_context(farflung("coded", "device", at, "--data", written(tmp_path)))
        assert "looks for a coordinator" in device.stderr.readline()
        assert "in, as rank 1" in device.stderr.readline()
        device.send_signal(signal.SIGTERM)
        device.finished()
        assert device.returncode == 0
        process.send_signal(signal.SIGINT)
        assert process.finished()[0] == ""
        assert process.returncode == 130


@pytest.mark.thorough
def test_a_device_leaves_when_others_hold_what_it_has(tmp_path: Path) -> None:
    with started(tmp_path, *SLOW, "100000") as (process, crowd, _):
        wait_for_training(process, tmp_path)
        crowd[0].send_signal(signal.SIGTERM)
        (left,) = ended(crowd[:1])
        assert process.returncode is None
        process.send_signal(signal.SIGINT)
        summary = json.loads(process.finished()[0])
    assert left["left"]
    assert len(summary["partitions"]) == PARTITIONS


@pytest.mark.thorough
def test_the_demonstration(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    args = ["--data", "synthetic", "--partitions", "3", "--room", "1", "--kill", "1", "--folder", "run"]
    assert main(["coded", "demo", *args, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["objective"] == pytest.approx(summary["uncoded_objective"], rel=1e-8)
    assert len(summary["vanished"]) == 1
    (*_, last) = map(json.loads, (tmp_path / "run" / "events.jsonl").read_text().splitlines())
    assert 0 < last["t"] <= summary["duration_s"], "by one clock"
    assert summary["mds_encoding_nbytes"] > sum(summary["encoding_nbytes"].values())
    assert (tmp_path / "run" / "run.png").read_bytes().startswith(b"\x89PNG")
