"""A retimed run equals a fresh simulation, to the byte; where it could not, it is refused."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from farflung.cli.main import main
from farflung.devices import CodingRates, DeviceProfile, Points, VaryingStraggler
from farflung.errors import DataError
from farflung.loop import Replica
from farflung.runs import Run, RunFolder, SimulatedConfig, retime, simulate
from farflung.schedules import SCHEDULES
from tests.covering import thorough
from tests.refusals import refuse

NETWORKS = ["lan-1g", "wifi-10mbps", "wifi-shared-100mbps", "four-regions", "shanghai-boston"]
"""Links of their own, alike and unlike; capacities of nodes; a medium; jitter."""


def small_run(path: Path, **settings: Any) -> Run:
    small: dict[str, Any] = {
        "workload": "synthetic/quadratic", "steps": 5, "batch_size": 4, "evaluate_every": 2, "checkpoint_every": 3,
    }  # fmt: skip
    return simulate(out=path, **{**small, **settings})


def made(path: Path, **settings: Any) -> tuple[SimulatedConfig, RunFolder]:
    """A small run."""
    run = small_run(path, **settings)
    assert isinstance(run.config, SimulatedConfig)
    return run.config, run.files


def again(path: Path, stored: RunFolder, **where: Any) -> RunFolder:
    """That run, retimed."""
    return retime(stored.path, out=path, **where).files


def told(folder: RunFolder) -> dict[str, bytes]:
    """All that a run says."""
    files = [folder.summary_path, *sorted((folder.path / "telemetry").iterdir())]
    return {file.name: file.read_bytes() for file in files}


PARTS: list[dict[str, Any]] = [
    {},
    {"recipe": "ring"},
    {"recipe": "parameter_server"},
    {"collective": "multi_parameter_server", "codec": "truncate16"},
    {"recipe": "ring", "codec": "int8"},
    {"codec": "error_feedback(topk(density=0.1))"},
    {"codec": "dgc(density=0.1)", "partition": "labels(k=3)"},
    {"codec": "qsgd(bits=4)", "reducer": "codec(phases='two')", "workers": 3},
    {"collective": "all_gather"},
    {"collective": "direct"},
    {"reducer": "powersgd(rank=1)"},
    {"stream": "rate(200, backlog=9)"},
    {"schedule": "delayed(delay=2)", "count_evaluation": True},
    *({"schedule": schedule} for schedule in SCHEDULES),
    {
        "workload": "fashion-mnist/mlp",
        "data": "packaged",
        "steps": 3,
        "bucket_nbytes": 2000,
        "learning_rate_schedule": "cosine(warmup=2)",
    },
    {
        "workload": "fashion-mnist/mlp",
        "data": "packaged",
        "steps": 3,
        "partition": "iid",
        "sampler": "grouped_importance(groups=5, scored_by='gradient_bound')",
    },
    {
        "workload": "fashion-mnist/mlp",
        "data": "packaged",
        "steps": 3,
        "partition": "iid",
        "sampler": "grouped_importance(rule='half', statistics='uniform')",
    },
    {
        "recipe": "tictac",
        "workload": "fashion-mnist/mlp",
        "data": "packaged",
        "steps": 3,
        "bucket_nbytes": 2000,
    },
]
BASES = {"wifi-10mbps": NETWORKS[:3], "four-regions": NETWORKS[3:]}
"""A network to simulate on, and those to retime to."""


@pytest.mark.parametrize(
    ("parts", "base"),
    [*((PARTS[0], base) for base in BASES), *thorough(*zip(PARTS[1:], itertools.cycle(BASES), strict=False))],
    ids=lambda given: (
        "-".join(map(str, given.values())) or "synchronous" if isinstance(given, dict) else given
    ),
)
def test_retiming_equals_simulating(tmp_path: Path, parts: dict[str, Any], base: str) -> None:
    _, stored = made(tmp_path / "base", network=base, **parts)
    # On its own network only what is plain: what is recorded wrongly comes out wrong elsewhere too.
    for network in BASES[base] if not parts else set(BASES[base]) - {base}:
        _, fresh = made(tmp_path / f"fresh-{network}", network=network, **parts)
        assert told(again(tmp_path / network, stored, network=network)) == told(fresh), network


def test_on_other_devices(tmp_path: Path) -> None:
    slow = tmp_path / "slow.toml"
    slow.write_text("forward_s = 0.004\noptimizer_s = 0.1\n[[varying]]\nspread = 0.5\n")
    _, stored = made(tmp_path / "base", device="v100")
    _, fresh = made(tmp_path / "fresh", device=str(slow))
    retimed = again(tmp_path / "again", stored, device=str(slow))
    assert told(retimed) == told(fresh)
    assert told(retimed) != told(stored)


class Everything(dict[tuple[str, str], Points]):
    """Points of every operation of every method, unlike each other."""

    @override
    def get(self, key: tuple[str, str], default: Any = None) -> Any:
        del default
        letters = sum(map(ord, "".join(key)))
        return (1, 1e-5 * letters), (100, 3e-5 * letters)


CODING = CodingRates(Everything(), message_s=0.0013, copy_s_per_byte=1e-6, encrypt_s_per_byte=3e-6)


@pytest.mark.parametrize(
    ("cores", "parts"),
    [
        (1, {}),
        (2, {"collective": "ring", "codec": "error_feedback(int8)", "reducer": "codec(phases='hops')"}),
        *thorough(
            (1, {"codec": "error_feedback(topk(density=0.1))", "collective": "all_gather"}),
            (2, {"codec": "by_role(other=dgc(density=0.1))", "partition": "labels(k=3)"}),
            (2, {"codec": "error_feedback(qsgd(bits=4))", "reducer": "codec(phases='two')", "workers": 3}),
            (1, {"reducer": "powersgd(rank=1)", "schedule": "delayed(delay=2)", "count_evaluation": True}),
            (2, {"reducer": "shared_scale_qsgd", "schedule": "pipelined"}),
        ),
    ],
    ids=str,
)
def test_on_devices_that_code(tmp_path: Path, cores: int, parts: dict[str, Any]) -> None:
    plain = DeviceProfile(forward_s=0.001, stragglers=(VaryingStraggler(0.5),))
    coding = replace(plain, coding=CODING, cores=cores)
    stored = small_run(tmp_path / "base", device=plain, **parts)
    fresh = small_run(tmp_path / "fresh", device=coding, network="wifi-shared-100mbps", **parts)
    there = retime(stored, device=coding, network="wifi-shared-100mbps")
    assert told(there.files) == told(fresh.files) != told(stored.files)
    assert told(retime(fresh, device=plain, network="lan-1g").files) == told(stored.files)


@pytest.mark.parametrize("schedule", ["synchronous", "delayed(delay=2)"])
def test_the_last_batch_of_a_pass_is_smaller_there_too(tmp_path: Path, schedule: str) -> None:
    slow = tmp_path / "slow.toml"
    slow.write_text("forward_s = 0.004\n")
    parts: dict[str, Any] = {
        "workload": "tests.runs.own:halves", "sampler": "tests.runs.own:Epochs", "schedule": schedule, "batch_size": 25,
    }  # fmt: skip
    _, stored = made(tmp_path / "base", network="wifi-10mbps", device=str(slow), **parts)
    samples = [event["samples"] for event in stored.load_events()[0] if event["event"] == "step"]
    assert samples == [100, 200, 256, 356, 456]
    _, fresh = made(tmp_path / "fresh", network="4g", device=str(slow), **parts)
    retimed = again(tmp_path / "again", stored, network="4g")
    assert told(retimed) == told(fresh)
    compute = [event["compute_s"] for event in retimed.load_events()[0] if event["event"] == "step"]
    assert compute == pytest.approx([3 * 0.004 * count for count in (25, 25, 14, 25, 25)])


def test_no_arithmetic_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, stored = made(tmp_path / "base")

    def never(*_: object) -> None:
        raise AssertionError("arithmetic")

    monkeypatch.setattr("farflung.workloads.synthetic.Quadratic.compute_losses", never)
    monkeypatch.setattr("farflung.workloads.synthetic.Quadratic.compute_metrics", never)
    monkeypatch.setattr("farflung.calibration.count_forward_flops", lambda task: 128.0)
    for name in ("compute_scaled_loss", "backward", "update"):
        monkeypatch.setattr(Replica, name, never)
    monkeypatch.setattr("farflung.codecs.identity.Identity.encode", never)
    again(tmp_path / "again", stored)


def test_a_run_that_was_stopped(tmp_path: Path) -> None:
    asked = iter([False] * 6 + [True] * 20)
    settings: dict[str, Any] = {"workload": "synthetic/quadratic", "steps": 9, "workers": 2}
    run = simulate(out=tmp_path / "base", should_stop=lambda: next(asked), **settings)
    assert run.summary["stopped"]
    assert told(again(tmp_path / "again", run.files)) == told(run.files)


# --- as a command -----------------------------------------------------------------------------------------------


def test_the_command_from_inside_the_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(tmp_path / "base")
    monkeypatch.chdir(tmp_path / "base")
    assert main(["retime", ".", "--network", "4g", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["simulated"]["network"] == "4g"
    folder = RunFolder(Path(found["folder"]))
    assert folder.path == tmp_path / "base-on-4g-cpu-core"
    assert SimulatedConfig.resolve(folder.load_config()).network == "4g"


def refused(capsys: pytest.CaptureFixture[str], run: Path, *options: str) -> str:
    out = run.with_name("never")
    said = refuse(capsys, "retime", run, *options, "--out", out)
    assert not out.exists()
    return said


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({"stream": "rate(200, least=1, most=9)"}, "it decided 'arrivals' by time or arrival at step 0"),
        ({"sharing": "injection"}, "its replicas sent samples (--sharing injection), which is not recorded"),
        (
            {"sharing": "resharding(samples=2, every=2, by='uniform')"},
            "its replicas sent samples (--sharing resharding(samples=2, every=2",
        ),
        ({"elastic": "1", "workers": 2}, "members of an elastic run agree by messages that are not recorded"),
    ],
)
def test_a_run_is_refused_that_would_have_learned_or_sent_otherwise(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, parts: dict[str, Any], says: str
) -> None:
    made(tmp_path / "base", **parts)
    said = refused(capsys, tmp_path / "base", "--network", "4g")
    assert says in said
    assert "simulate it anew instead" in said


def test_a_retimed_run_stands_beside_the_old_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    assert main(["retime", "base", "--network", "4g", "--quiet"]) == 0
    assert "farflung report base-on-4g-" in capsys.readouterr().out


def test_what_cannot_be_retimed_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _, stored = made(tmp_path / "base")
    assert "unknown network" in refused(capsys, stored.path, "--network", "elsewhere")
    assert "no run there" in refused(capsys, tmp_path / "nowhere")
    events = stored.get_telemetry_path(0).read_text().splitlines()
    stored.get_telemetry_path(0).write_text("\n".join(events[:-1]) + "\n")
    assert "has not reached its end" in refused(capsys, stored.path)
    stored.get_telemetry_path(0).write_text("\n".join([*events, events[0]]) + "\n")
    assert "the run was resumed" in refused(capsys, stored.path)
    stored.get_telemetry_path(0).write_text("\n".join(events) + "\n")
    traffic = stored.traffic_path.read_text()
    stored.traffic_path.write_text(traffic[: len(traffic) // 2])
    assert re.search(rf"{stored.traffic_path}, line \d+: damaged", refused(capsys, stored.path))
    stored.traffic_path.unlink()
    assert "only runs of farflung simulate record their traffic" in refused(capsys, stored.path)


def test_what_cannot_be_written_is_no_fault_of_the_stored_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    _, stored = made(tmp_path / "base")
    full = tmp_path / "full" / "telemetry" / "rank-0.jsonl"
    full.parent.mkdir(parents=True)
    full.symlink_to("/dev/full")
    assert main(["retime", str(stored.path), "--out", str(tmp_path / "full")]) == 2
    said = capsys.readouterr().err
    assert said == f"farflung: {full}: cannot be written (No space left on device)\n"


def test_events_of_another_run_are_noticed(tmp_path: Path) -> None:
    _, stored = made(tmp_path / "base")
    _, other = made(tmp_path / "other", steps=4)
    other.get_telemetry_path(1).replace(stored.get_telemetry_path(1))
    with pytest.raises(DataError, match=r"the run's events and its traffic differ at \w+ of rank 1"):
        again(tmp_path / "again", stored)
