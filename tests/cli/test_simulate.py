"""Runs in virtual time, as a person makes them: repeatable to the byte, stopped, replayed, refused."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from farflung.cli.main import main
from farflung.decisions import read_decisions
from farflung.errors import ConfigError
from farflung.faults import FaultPlan
from farflung.network import Link, NetworkProfile
from farflung.runs import Run, RunFolder, simulate
from farflung.state_trees import load_tree
from farflung.telemetry import TIME_FIELDS, Event
from farflung.types import Decision, Json
from tests.covering import thorough
from tests.forks import farflung, ran
from tests.refusals import refuse

SMALL = [
    "--workload", "synthetic/quadratic", "--steps", "8", "--batch-size", "4", "--evaluate-every", "4",
    "--checkpoint-every", "4", "--network", "wifi-10mbps",
]  # fmt: skip


def simulated(capsys: pytest.CaptureFixture[str], out: Path, *options: str) -> dict[str, Any]:
    """The summary of a small run."""
    assert main(["simulate", *SMALL, *options, "--out", str(out), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


SEEDS = {"one": 0, "two": 0, "other": 1}


def made(path: Path, options: dict[str, Any]) -> RunFolder:
    """A small run without its pictures."""
    small: dict[str, Any] = {
        "workload": "synthetic/quadratic",
        "steps": 8,
        "batch_size": 4,
        "evaluate_every": 4,
    }
    return simulate(out=path, **{**small, **options}).files


def parameters(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """The model in a checkpoint."""
    model: dict[str, torch.Tensor] = load_tree(
        folder / "checkpoints" / f"step-{step:08d}" / "shared.safetensors"
    )["model"]
    return model


def same_parameters(one: Path, other: Path, step: int) -> bool:
    mine, theirs = parameters(one, step), parameters(other, step)
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_several_connections_take_less_time_under_loss_and_change_no_parameter(tmp_path: Path) -> None:
    lossy = NetworkProfile.create_uniform(Link(0.05, 20e6, loss=0.02))

    def run(count: str | int) -> Run:
        out = tmp_path / str(count)
        return simulate("synthetic/quadratic", out=out, steps=4, workers=2, network=lossy, connections=count)

    runs = [run(count) for count in (1, "4", "auto")]
    one, four, auto = (float(str(each.summary["duration_s"])) for each in runs)
    assert one > four > auto
    assert [each.config.to_json()["connections"] for each in runs] == ["1", "4", "auto"]
    assert all(torch.equal(runs[0].state_dict()["w"], each.state_dict()["w"]) for each in runs)
    assert simulate(resume=tmp_path / "1", network=lossy, steps=5).summary["steps"] == 5
    with pytest.raises(ConfigError, match="uniform: connections = 'several': must be from 1 to 64, or auto"):
        run("several")


@pytest.mark.parametrize(
    "options",
    [
        {"network": "wifi-10mbps"},
        {"network": "shanghai-boston", "recipe": "ring", "codec": "error_feedback(topk(density=0.1))"},
        {"network": "wifi-shared-100mbps", "recipe": "parameter_server", "partition": "labels(k=3)"},
    ],
    ids=["wifi", "jitter", "shared"],
)
def test_the_same_seed_gives_the_same_bytes(tmp_path: Path, options: dict[str, Json]) -> None:
    one, two, other = (made(tmp_path / name, {**options, "seed": seed}) for name, seed in SEEDS.items())
    for rank in range(4):
        written = one.get_telemetry_path(rank).read_bytes()
        assert written == two.get_telemetry_path(rank).read_bytes()
        assert written != other.get_telemetry_path(rank).read_bytes()


@pytest.mark.parametrize("count", ["4", "auto"])
def test_a_stored_configuration_repeats_the_number_of_connections(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, count: str
) -> None:
    first = simulated(capsys, tmp_path / "first", "--connections", count)
    again = ["--config", str(tmp_path / "first" / "config.json"), "--out", str(tmp_path / "again")]
    assert main(["simulate", *again, "--json"]) == 0
    repeated = json.loads(capsys.readouterr().out)
    assert (repeated["simulated"]["connections"], repeated["duration_s"]) == (
        first["simulated"]["connections"],
        first["duration_s"],
    )
    assert simulated(capsys, tmp_path / "one")["simulated"]["connections"] == 1


def test_what_a_run_leaves_behind_says_that_it_is_simulated(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    summary = simulated(capsys, tmp_path / "run")
    assert summary["simulated"]["network"] == "wifi-10mbps"
    assert summary["simulated"]["device"] == "cpu-core"
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["simulated"] == summary["simulated"]
    assert main(["simulate", *SMALL, "--out", str(tmp_path / "two"), "--quiet"]) == 0
    assert "simulated times" in capsys.readouterr().out


def test_both_worlds_tell_the_same(tmp_path: Path) -> None:
    """One format: the same events with the same keys, and the same values where no clock has a part in them."""
    settings = [
        "--workers", "2", "--optimizer", "adamw(betas=(0.8, 0.99))", "--bucket-nbytes", "1000",
        "--learning-rate-schedule", "linear(warmup=16, unit='samples')",
    ]  # fmt: skip
    config = [*SMALL[:-2], *settings, "--device", "cpu"]
    ran("train", *config, "--out", str(tmp_path / "real"), "--quiet")
    assert main(["simulate", *SMALL, *settings, "--out", str(tmp_path / "virtual"), "--quiet"]) == 0

    def told(name: str) -> dict[int, list[Event]]:
        events = RunFolder(tmp_path / name).load_events()
        return {rank: [e for e in each if e["event"] != "hello"] for rank, each in events.items()}

    real, virtual = told("real"), told("virtual")
    for rank in (0, 1):
        assert [list(event) for event in real[rank]] == [list(event) for event in virtual[rank]]
        for one, other in zip(real[rank], virtual[rank], strict=True):
            assert {k: v for k, v in one.items() if k not in TIME_FIELDS} == {
                k: v for k, v in other.items() if k not in TIME_FIELDS
            }
    assert same_parameters(tmp_path / "real", tmp_path / "virtual", 8)


# --- stopped and replayed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["synchronous", "pipelined"])
def test_a_stop_is_a_decision_and_is_made_again(tmp_path: Path, schedule: str) -> None:
    asked = iter([False] * 20 + [True] * 100)  # three replicas ask at each step
    run = simulate(
        "synthetic/quadratic", steps=30, batch_size=4, network="4g", workers=3, schedule=schedule,
        out=tmp_path / "stopped", should_stop=lambda: next(asked),
    )  # fmt: skip
    folder, summary = run.files, run.summary
    steps = 9  # the last of the three asks at the end of step 6, when the others have begun step 7
    assert (summary["stopped"], summary["steps"]) == (True, steps)
    assert read_decisions(folder.decisions_path)[1:] == [Decision("stop", 8, True, timing=False)]

    again = tmp_path / "again"
    options = [
        "--config",
        str(folder.config_path),
        "--network",
        "wifi-50mbps",
        "--out",
        str(again),
        "--quiet",
    ]
    assert main(["simulate", *options, "--replay", str(folder.decisions_path)]) == 0
    assert same_parameters(folder.path, again, steps)
    assert RunFolder(again).decisions_path.read_bytes() == folder.decisions_path.read_bytes()


@pytest.mark.parametrize(
    "settings",
    [
        {"codec": "error_feedback(topk(density=0.1))"},
        {"schedule": "pipelined(width=3)"},
        {"schedule": "delayed(delay=3, period=2)", "momentum": 0.9},
        {"schedule": "diloco(sync_every=500)", "elastic": 1},
        *thorough(
            {"schedule": "diloco(sync_every=500)"},
            {"schedule": "diloco(sync_every=500)", "workers": 1},
            {"schedule": "local_sgd(sync_every=6)", "momentum": 0.9},
            {"schedule": "streaming_diloco(sync_every=12, fragments=2)"},
        ),
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_a_run_that_was_stopped_goes_on_from_where_it_was(tmp_path: Path, settings: dict[str, Any]) -> None:
    given: dict[str, Any] = {
        "workload": "synthetic/quadratic", "batch_size": 4, "network": "4g", "workers": 3,
        "checkpoint_every": 100, **settings,
    }  # fmt: skip
    simulate(**given, steps=20, out=tmp_path / "whole")
    asked = iter([False] * (7 * given["workers"] - 1) + [True] * 100)
    stopped = simulate(**given, steps=30, out=tmp_path / "stopped", should_stop=lambda: next(asked))
    at = stopped.files.get_checkpoints(0, given["workers"], is_leader=True).find_newest()
    assert stopped.summary["stopped"]
    assert at == stopped.summary["steps"]
    assert 8 <= at <= 12, "the first step that none had begun"
    simulate(resume=tmp_path / "stopped", steps=20)
    assert same_parameters(tmp_path / "whole", tmp_path / "stopped", 20)


def test_decisions_by_time_are_made_again_on_another_network(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    first, again = tmp_path / "first", tmp_path / "again"
    simulated(capsys, first, "--recipe", "delayed", "--network", "4g")
    log = RunFolder(first).decisions_path
    assert any(decision.timing for decision in read_decisions(log))
    simulated(capsys, again, "--recipe", "delayed", "--network", "lan-1g", "--replay", str(log))
    assert same_parameters(first, again, 8)
    assert RunFolder(again).decisions_path.read_bytes() == log.read_bytes()


@pytest.mark.thorough
@pytest.mark.parametrize(
    "given",
    [
        "--workers 2",
        "--workers 1 --schedule diloco(sync_every=1000000)",
        "--workers 2 --schedule diloco(sync_every=1000000)",
        "--workers 2 --schedule diloco(sync_every=1000000) --elastic 1",
    ],
)
def test_a_real_run_that_was_stopped_is_replayed_in_virtual_time(given: str, tmp_path: Path) -> None:
    real, virtual = tmp_path / "real", tmp_path / "virtual"
    with farflung(
        "train", "--workload", "synthetic/quadratic", *given.split(), "--steps", "1000000", "--batch-size", "4",
        "--checkpoint-every", "20", "--evaluate-every", "0", "--out", str(real),
    ) as process:  # fmt: skip
        assert any("checkpoint" in line for line in process.stderr)
        process.send_signal(signal.SIGINT)
        process.finished()
    assert process.returncode == 130
    steps = json.loads((real / "summary.json").read_text())["steps"]
    assert read_decisions(real / "decisions.jsonl")[1:] == [Decision("stop", steps - 1, True, timing=False)]
    options = ["--config", str(real / "config.json"), "--replay", str(real / "decisions.jsonl")]
    assert main(["simulate", *options, "--out", str(virtual), "--quiet"]) == 0
    assert same_parameters(real, virtual, steps)


# --- bad input --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--network", "absent.toml"], "absent.toml: cannot be read (No such file"),
        (["--device", "abacus"], "unknown device 'abacus'; known: "),
        (["--faults", "absent.toml"], "absent.toml: cannot be read (No such file"),
        (
            ["--network", "10gbe-4", "--workers", "5"],
            "10gbe-4: nodes: it describes 4 nodes, and 5 are to run",
        ),
        (["--replay", "absent.jsonl"], "absent.jsonl: cannot be read"),
        (["--encrypt"], "--encrypt"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_wrong_is_said_on_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, options: list[str], says: str
) -> None:
    where = [] if "--resume" in options else ["--out", str(tmp_path / "run")]
    assert says in refuse(capsys, "simulate", *SMALL, *options, *where)
    assert not (tmp_path / "run").exists()


def test_a_fault_that_ends_the_run_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "faults.toml"
    path.write_text('[[fault]]\nkind = "crash"\nrank = 2\nat_step = 5\n')
    out = tmp_path / "run"
    assert main(["simulate", *SMALL, "--faults", str(path), "--out", str(out), "--quiet"]) == 1
    assert capsys.readouterr().err == "farflung: lost rank 2: its connection was closed from its end\n"
    assert main(["simulate", "--resume", str(out), "--faults", "", "--quiet"]) == 0, "from step 4 on"
    path.write_text('[[fault]]\nkind = "leave"\nrank = 2\nat_step = 5\n')
    assert main(["simulate", *SMALL, "--faults", str(path), "--out", str(tmp_path / "two")]) == 2
    assert "leave of rank 2 at step 5: virtual time supports" in capsys.readouterr().err


def test_faults_that_never_struck_are_named(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    plan = (
        FaultPlan()
        .slow(1, factor=2, at_step=5)
        .slow(0, factor=2, at_s=1e6)
        .slow(1, factor=2, at_step=8)
        .hang(1, at_step=9)
    )
    options: dict[str, Any] = {"faults": plan, "network": "wifi-10mbps"}
    made(tmp_path, options)
    made(tmp_path / "elastic", {**options, "elastic": "1", "workers": 3})
    said = (
        "2 of 4 faults never struck, for the run or their replica had ended: slow of rank 0 at 1e+06 s, hang of rank 1 "
        "at step 9"
    )
    assert [record.getMessage() for record in caplog.records] == [said, said]


def test_runs_of_the_two_worlds_are_told_apart(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    simulated(capsys, tmp_path / "run")
    assert main(["train", "--resume", str(tmp_path / "run"), "--steps", "9"]) == 2
    said = capsys.readouterr().err
    assert "not of a run that farflung train of this version has made: it has unknown network, " in said
