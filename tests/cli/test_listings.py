"""``farflung list``: recipes, workloads, data sets; the same as a table and as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from farflung.attach_checks import describe_attach_support
from farflung.cli.main import main
from farflung.codecs import CODECS, TopK
from farflung.data import CATALOG
from farflung.devices import DEVICES
from farflung.errors import DataError
from farflung.network import NETWORKS
from farflung.recipes import RECIPES, Recipe
from farflung.workloads import DATA, WORKLOADS, create_workload, find_dataset


@pytest.fixture(autouse=True)
def nothing_at_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Only what is in the package, until a test adds something; the folder where it may."""
    folder = tmp_path / "data"
    folder.mkdir()
    monkeypatch.setenv("FARFLUNG_DATA", str(folder))
    monkeypatch.setenv("FARFLUNG_CACHE", str(tmp_path / "cache"))
    return folder


@pytest.mark.parametrize("what", ["recipes", "codecs", "workloads", "data", "networks", "devices"])
@pytest.mark.parametrize("width", [80, 100, 120])
def test_each_name_begins_a_line_and_nothing_is_cut(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, what: str, width: int
) -> None:
    assert main(["list", what, "--json"]) == 0
    names = [row["name"] for row in json.loads(capsys.readouterr().out)]
    monkeypatch.setattr("farflung.cli.output.PLAIN_WIDTH", width)
    assert main(["list", what]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    assert not any("…" in line for line in lines)
    assert [line.split()[0] for line in lines if line[:1].strip()] == [what_heads(what), *names, "farflung"]


def what_heads(what: str) -> str:
    """The first word above the names."""
    return {"data": "data"}.get(what, what.removesuffix("s"))


def listed(capsys: pytest.CaptureFixture[str], what: str) -> tuple[dict[str, Any], str]:
    """The rows by name, and the table, without the lines around its cells."""
    assert main(["list", what, "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert main(["list", what]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return rows, plain(out)


def plain(table: str) -> str:
    return " ".join(table.replace("│", " ").split())


def test_recipes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECIPES, "scored", Recipe("scored", "by importance", sampler="grouped_importance"))
    rows, table = listed(capsys, "recipes")
    assert list(rows) == sorted(RECIPES)
    for name, row in rows.items():
        assert row["summary"] == RECIPES[name].summary
        assert row["attach"] == describe_attach_support(RECIPES[name])
        assert name in table
    assert rows["ring"]["parts"] == {
        "codec": "identity", "reducer": "codec", "collective": "ring", "schedule": "synchronous", "sampler": "uniform",
        "stream": "in_memory", "sharing": "none", "scaling": "none",
    }  # fmt: skip
    assert rows["ring"]["attach_alone"]
    assert not rows["scored"]["attach_alone"]
    assert rows["scored"]["attach"] == "draw batches with sampler grouped_importance"
    assert rows["mercury"]["attach"] == "no: it sees no samples and cannot send any to other replicas"
    assert "ring yes plain data-parallel SGD over a ring" in table
    assert "mercury no Mercury: " in table
    assert "scored partly by importance" in table


def test_networks_and_devices(capsys: pytest.CaptureFixture[str]) -> None:
    rows, table = listed(capsys, "networks")
    assert list(rows) == list(NETWORKS)
    assert rows["10gbe-4"] == {"name": "10gbe-4", "nodes": 4, "source": NETWORKS["10gbe-4"].source}
    assert "wifi-10mbps any 10 Mbit/s wifi-50mbps" in table
    devices, table = listed(capsys, "devices")
    assert list(devices) == list(DEVICES)
    assert "v100 15,700 Gflop/s 16 GiB SXM2, as in p3.16xlarge" in table
    assert devices["v100"]["sustained_flops"] == 0.3 * 15.7e12
    assert devices["v100"]["memory_nbytes"] == 16 << 30
    assert all(row["source"] for row in (*rows.values(), *devices.values()))


def test_one_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "networks"]) == 0
    assert "Zeng et al. 2021" not in capsys.readouterr().out
    assert main(["list", "networks", "wifi-10mbps"]) == 0
    assert "Zeng et al. 2021" in capsys.readouterr().out
    assert main(["list", "codecs", "topk"]) == 0
    table = plain(capsys.readouterr().out)
    assert "name topk summary Codec that keeps the density fraction of entries" in table
    assert "density: Fraction of entries sent" in table
    assert "options density=0.01" in table
    assert main(["list", "devices", "raspberry-pi-4"]) == 0
    table = plain(capsys.readouterr().out)
    assert (
        "peak flops 48,000,000,000 sustained flops 14,400,000,000 cores 1 memory nbytes 4,294,967,296"
        in table
    )
    assert main(["list", "workloads", "synthetic/quadratic", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["location"] == "made up"


def test_codecs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CODECS, "half", lambda: TopK(density=0.5))
    rows, table = listed(capsys, "codecs")
    assert list(rows) == list(CODECS)
    found = {name: (row["bytes_per_value"], row["error_feedback"]) for name, row in rows.items()}
    assert found["identity"] == (4.0, "no need")
    assert found["truncate16"] == (2.0, "no need")
    assert found["half"] == (4.0, "needed")
    assert found["error_feedback"] == (pytest.approx(0.08, rel=1e-3), "built in")
    assert found["qsgd"][1] == found["randomk"][1] == "unbiased"
    assert found["dgc"] == (pytest.approx(0.008, rel=1e-2), "built in")  # after its warm-up
    assert found["sign"] == (pytest.approx(1 / 8, rel=1e-3), "needed")
    assert rows["topk"]["options"] == "density=0.01"
    assert "identity 4 0 % no need sends the dense tensor" in table


def test_workloads(capsys: pytest.CaptureFixture[str]) -> None:
    rows, table = listed(capsys, "workloads")
    assert list(rows) == sorted(WORKLOADS)
    cnn = rows["fashion-mnist/cnn"]
    assert cnn["samples"] == {"train": 10_000, "test": 2_000}
    assert cnn["location"] == "packaged subset"
    assert cnn["is_present"]
    assert cnn["parameters"] == 105_866
    assert cnn["defaults"] == create_workload("fashion-mnist/cnn").defaults
    assert rows["cifar10/resnet8"]["samples"] == {"train": 50_000, "test": 10_000}
    assert not rows["cifar10/resnet8"]["is_present"]
    assert rows["tinyshakespeare/lstm"]["samples"] is None
    assert rows["synthetic/quadratic"]["samples"] == {"train": 1024, "test": 1024}
    assert rows["synthetic/quadratic"]["data"] is None
    assert "fashion-mnist/cnn 105,866 packaged subset " in table


def test_workloads_count_what_is_at_hand(capsys: pytest.CaptureFixture[str], nothing_at_hand: Path) -> None:
    folder = nothing_at_hand / "tinyshakespeare"
    folder.mkdir()
    (folder / "input.txt").write_text("damaged")
    (nothing_at_hand / "fashion-mnist").mkdir()
    for file in CATALOG["fashion-mnist"].files:
        (nothing_at_hand / "fashion-mnist" / file.name).touch()
    rows, _ = listed(capsys, "workloads")
    assert rows["fashion-mnist/mlp"]["samples"] == {"train": 60_000, "test": 10_000}
    assert rows["fashion-mnist/mlp"]["location"] == f"in {nothing_at_hand / 'fashion-mnist'}"
    assert rows["tinyshakespeare/lstm"]["samples"] is None
    assert not rows["tinyshakespeare/lstm"]["is_present"]
    assert str(folder / "input.txt") in rows["tinyshakespeare/lstm"]["location"]


def test_every_family_of_workloads_has_its_data() -> None:
    families = {name.split("/")[0] for name in WORKLOADS}
    assert families == DATA.keys()


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("cifar10/resnet18", "cifar-10"),
        ("cifar100/resnet50", "cifar-100"),
        ("cifar100/resnet8", "cifar-100"),
        ("tinyshakespeare/lstm", "tinyshakespeare"),
    ],
)
def test_workloads_without_their_data_say_how_to_get_it(name: str, source: str) -> None:
    with pytest.raises(
        DataError, match=f"^{source} was not found: .*; fetch it with: farflung data fetch {source}$"
    ):
        create_workload(name).load_datasets()


def test_known_numbers_of_samples_are_right() -> None:
    checked = 0
    for name in WORKLOADS:
        source = find_dataset(name)
        if source is not None and source.samples is not None:
            train, test = source.samples
            assert source.title.startswith((f"{train:,} + {test:,} ", f"{train + test:,} ")), name
            checked += 1
    assert checked


def test_data_sets(capsys: pytest.CaptureFixture[str], nothing_at_hand: Path) -> None:
    (nothing_at_hand / "tinyshakespeare").mkdir()
    (nothing_at_hand / "tinyshakespeare" / "input.txt").touch()
    (nothing_at_hand / "a9a").mkdir()
    (nothing_at_hand / "a9a" / "a9a.t").touch()
    rows, table = listed(capsys, "data")
    assert list(rows) == sorted(CATALOG)
    assert rows["fashion-mnist"]["kind"] == "packaged"
    assert rows["fashion-mnist"]["licence"] == "MIT, Zalando SE"
    assert rows["tinyshakespeare"]["folder"] == str(nothing_at_hand / "tinyshakespeare")
    assert rows["cifar-10"]["download_nbytes"] == 170_052_171
    assert rows["cifar-10"]["how_to_get"] == "fetch it with: farflung data fetch cifar-10"
    assert rows["a9a"]["download_nbytes"] is None
    assert [name for name, row in rows.items() if row["is_present"]] == ["fashion-mnist", "tinyshakespeare"]
    assert "incomplete: no a9a;" in rows["a9a"]["problem"]
    assert "cifar-10 no 170.1 MB 50,000 + 10,000 colour images" in table
    assert "fashion-mnist packaged subset 30.9 MB" in table


@pytest.mark.parametrize(
    "command",
    [
        ["list"],
        ["list", "recipe"],
        ["list", "recipes", "--all"],
        ["list", "recipes", "rong"],
        ["data"],
        ["networks"],
    ],
    ids=" ".join,
)
def test_what_there_is_not(capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    assert main(command) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
