"""Comparisons: one training for each recipe and seed, the same figures as single runs, resumable, refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import farflung
from farflung.cli.main import main
from farflung.errors import ConfigError
from farflung.faults import FaultPlan
from farflung.runs import RunFolder, parse_variant
from farflung.runs import comparison as compare
from tests.refusals import refuse

SMALL = ["--workload", "synthetic/quadratic", "--steps", "6", "--batch-size", "4", "--evaluate-every", "2"]
NETWORK = """
name = "own"
[[site]]
name = "all"
nodes = 2
up_bps = {up_bps}
inside = {{ latency_s = 0.001 }}
"""


def compared(capsys: pytest.CaptureFixture[str], out: Path, *options: str) -> dict[str, Any]:
    """What a comparison finds."""
    assert main(["compare", *SMALL, *options, "--out", str(out), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_row_is_what_a_run_says(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = compared(
        capsys,
        tmp_path / "out",
        "--recipes",
        "synchronous",
        "ring(codec=int8)",
        "--networks",
        "wifi-10mbps",
        "4g",
    )
    assert found["simulated"] is True
    assert [(row["network"], row["recipe"]) for row in found["rows"]] == [
        ("wifi-10mbps", "synchronous"), ("wifi-10mbps", "ring(codec=int8)"),
        ("4g", "synchronous"), ("4g", "ring(codec=int8)"),
    ]  # fmt: skip
    assert (tmp_path / "out" / "compare.png").read_bytes().startswith(b"\x89PNG")
    single = ["--recipe", "ring", "--codec", "int8", "--network", "4g", "--checkpoint-every", "0"]
    assert main(["simulate", *SMALL, *single, "--out", str(tmp_path / "one"), "--quiet"]) == 0
    capsys.readouterr()
    one = [e for e in RunFolder(tmp_path / "one").load_events()[0] if e["event"] == "step"]
    (folder,) = (tmp_path / "out" / "runs").glob("ring-codec=int8*4g*")
    assert [e for e in RunFolder(folder).load_events()[0] if e["event"] == "step"] == one
    last = found["rows"][-1]
    assert last["bytes_sent_per_replica"] == one[-1]["bytes_sent"]
    assert last["speed_up"] == found["rows"][2]["time_to_target_s"] / last["time_to_target_s"]
    assert all(row["num_reached"] == 1 for row in found["rows"]), (
        "every run reaches the target that is chosen"
    )


def test_one_training_for_all_networks_and_none_when_started_again(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    for name in ("simulate_prepared", "retime_prepared"):
        real = getattr(compare, name)

        def counted(*args: Any, name: str = name, real: Any = real, **options: Any) -> Any:
            made.append(name)
            return real(*args, **options)

        monkeypatch.setattr(compare, name, counted)
    options = ["--recipes", "synchronous", "ring", "--networks", "wifi-10mbps", "4g", "--seeds", "4"]
    first = compared(capsys, tmp_path, *options)
    assert made == ["simulate_prepared", "retime_prepared"] * 2
    assert compared(capsys, tmp_path, *options) == first
    assert len(made) == 4, "nothing was made twice"
    (cut,) = (tmp_path / "runs").glob("ring-wifi-10mbps-seed-4-*")
    (cut / "summary.json").unlink()
    assert compared(capsys, tmp_path, *options) == first
    assert made[4:] == ["simulate_prepared"]
    assert compared(capsys, tmp_path, *options, "--learning-rate", "0.5") != first
    assert compared(capsys, tmp_path, *options) == first
    assert len(made) == 9, "other settings have runs of their own"


@pytest.mark.parametrize(
    ("option", "contents"),
    [
        ("--networks", [NETWORK.format(up_bps=up_bps) for up_bps in (1e6, 1e3)]),
        ("--device", [f'name = "own"\nforward_s = {forward_s}\n' for forward_s in (0.1, 0.2)]),
        (
            "--faults",
            [
                f'[[fault]]\nkind = "slow"\nrank = 0\nat_step = 1\nfactor = {factor}\n'
                for factor in (2.0, 9.0)
            ],
        ),
    ],
)
def test_an_edited_file_is_simulated_as_it_is_now(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, option: str, contents: list[str]
) -> None:
    file, device = tmp_path / "own.toml", tmp_path / "device.toml"
    device.write_text('name = "slow"\nforward_s = 0.1\n')
    options = ["--recipes", "synchronous", "--device", str(device), option, str(file)]
    durations = []
    for content in (*contents, contents[0]):
        file.write_text(content)
        (row,) = compared(capsys, tmp_path / "out", *options)["rows"]
        durations.append(row["duration_s"])
    assert durations[0] < durations[1]
    assert durations[0] == durations[2]
    assert len([*(tmp_path / "out" / "runs").iterdir()]) == 2


def test_each_network_and_recipe_has_a_folder_of_its_own(tmp_path: Path) -> None:
    files = [tmp_path / folder / "net.toml" for folder in "ab"]
    for file, up_bps in zip(files, (1e6, 1e5), strict=True):
        file.parent.mkdir()
        file.write_text(NETWORK.format(up_bps=up_bps))
    networks = [*map(str, files), f"{files[0]}(congestion=bbr)"]
    names = ["é" * 300, "é" * 299]
    settings: dict[str, Any] = {"workload": "synthetic/quadratic", "steps": 2}
    found = farflung.compare(dict.fromkeys(names, "ring"), networks, out=tmp_path / "out", **settings)
    assert len({(row.network, row.duration_s) for row in found.rows}) == 3
    assert len([*(tmp_path / "out" / "runs").iterdir()]) == 6


def test_what_learns_by_the_network_trains_on_each(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found = compared(capsys, tmp_path, "--recipes", "delayed", "--networks", "wifi-10mbps", "4g")
    assert [row["network"] for row in found["rows"]] == ["wifi-10mbps", "4g"]
    logs = [path.read_text() for path in (tmp_path / "runs").glob("*/decisions.jsonl")]
    assert len(logs) == 2
    assert all('"timing":true' in log for log in logs)


def test_elastic_runs_are_simulated_on_each_network_and_scored_by_a_survivor() -> None:
    networks = ("wifi-10mbps", "4g")
    settings: dict[str, Any] = {
        "workload": "synthetic/quadratic", "workers": 3, "steps": 6, "elastic": "1", "evaluate_every": 1,
        "faults": FaultPlan().crash(0, at_step=2),
    }  # fmt: skip
    found = farflung.compare(("synchronous",), networks, **settings)
    for run, course, network in zip(found.runs, found.courses, networks, strict=True):
        (alone,) = farflung.compare(("synchronous",), (network,), **settings).runs
        assert run.summary["duration_s"] == alone.summary["duration_s"]
        assert len(course.scores) == 6


def test_the_table_is_for_people(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["compare", *SMALL, "--recipes", "ring", "--target", "7", "--out", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("Simulated. Time to score 7")
    assert "0 of 1 runs" in out
    assert "not every run reached score 7; --target sets another" in out
    assert err == "run 1 of 1: ring, seed 0\n"


def test_a_comparison_that_is_stopped_leaves_no_half_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--recipes", "synchronous", "ring", "--out", str(tmp_path)]
    real = getattr(compare, "simulate_prepared")  # noqa: B009

    def stopped(run: Any, *args: Any, should_stop: Any, **options: Any) -> Any:
        if run.config.recipe.name == "ring":
            should_stop.__self__.set()
        return real(run, *args, should_stop=should_stop, **options)

    monkeypatch.setattr(compare, "simulate_prepared", stopped)
    assert main(["compare", *SMALL, *options, "--quiet"]) == 130
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("synchronous-wifi-10mbps-seed-0-")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--recipes", "synchronous", "sinchronous"], "unknown recipe 'sinchronous'"),
        (["--recipes", "ring", "ring"], "--recipes: one of them is there twice"),
        (["--recipes", "ring(codec=int9)"], "unknown codec 'int9'"),
        (["--recipes", "ring(int8)"], "recipe 'ring(int8)': write it as name or name(setting=value)"),
        (
            ["--recipes", "ring(workers=3)"],
            "recipe 'ring(workers=3)': unknown setting 'workers'; ",
        ),
        (
            ["--recipes", "ring(steps=many)"],
            "recipe 'ring(steps=many)': steps must be a whole number, not 'many'",
        ),
        (["--recipes", "ddp"], "run only on real machines"),
        (["--seeds", "0", "0"], "--seeds: one of them is there twice"),
        (["--target", "nan"], "--target nan: must be a finite number"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_wrong_is_said_before_anything_begins(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, options: list[str], says: str
) -> None:
    assert says in refuse(capsys, "compare", *SMALL, *options, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_variants_are_settings() -> None:
    assert parse_variant(" ring ") == {"recipe": "ring"}
    assert parse_variant("ring(codec=chain(topk(density=0.1), int8), learning_rate=1, steps=7)") == {
        "recipe": "ring", "codec": "chain(topk(density=0.1), int8)", "learning_rate": 1.0, "steps": 7,
    }  # fmt: skip
    assert parse_variant('ring(codec="topk(density=0.1)", optimizer="adam")') == {
        "recipe": "ring", "codec": "topk(density=0.1)", "optimizer": "adam",
    }  # fmt: skip
    assert parse_variant("ring(optimizer=adamw(eps=1e-6), bucket_nbytes=1000)") == {
        "recipe": "ring", "optimizer": "adamw(eps=1e-06)", "bucket_nbytes": 1000,
    }  # fmt: skip
    with pytest.raises(ConfigError, match="unknown setting 'seed'; "):
        parse_variant("ring(seed=1)")
