"""``farflung calibrate`` writes the profile that ``find_device`` reads."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from farflung.cli.main import main
from farflung.devices import find_device

QUICK = [
    "calibrate",
    "--workload",
    "fashion-mnist/mlp",
    "--data",
    "packaged",
    "--rounds",
    "2",
    "--batch-size",
    "4",
    "--codecs",
    "int8",
]


def test_a_profile_that_can_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "here.toml"
    assert main([*QUICK, "--name", "here", "--out", str(path), "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)
    device = find_device(str(path))
    assert device.name == "here"
    assert device.optimizer_s == measured["optimizer_s"][1]
    assert [(one.numel, one.forward_s, one.backward_s) for one in device.layers] == [
        (one["numel"], one["forward_s"], one["backward_s"]) for one in measured["layers"]
    ]
    assert [one.numel for one in device.layers] == [784 * 256 + 256, 256 * 10 + 10]
    coding = device.coding
    assert coding is not None
    assert (device.cores, coding.message_s) == (measured["cores"], measured["message_s"])
    assert {(one["operation"], one["method"]) for one in measured["coding"]} == set(coding.operations)
    assert {("encode", "int8"), ("decode", "int8"), ("add", "")} <= set(coding.operations)
    assert path.read_text(encoding="utf-8").startswith("# fashion-mnist/mlp, batches of 4, on ")
    assert [one.name for one in tmp_path.iterdir()] == ["here.toml"]


def test_without_a_file_it_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(QUICK) == 0
    out, err = capsys.readouterr()
    assert "\n[[layer]]  # 1\nnumel = 200960\n" in out
    assert re.fullmatch(r"measures \d+ things, one after the other\n", err)


@pytest.mark.parametrize(
    ("given", "what"),
    [
        (["--workload", "mnist"], "unknown workload 'mnist'"),
        (["--rounds", "1"], "--rounds 1: must be 2 or more"),
        (["--threads", "0"], "--threads 0: must be 1 or more"),
        (["--replicas", "0"], "--replicas 0: must be 1 or more"),
        (["--codecs", "int9"], "unknown codec 'int9'"),
        (["--reducers", "powersgd(rank=0)"], "powersgd: rank 0 must be at least 1"),
        (["--batch-size", "100000"], "--batch-size 100000: fashion-mnist/mlp has 10000 training samples"),
        (["--optimizer", "lion"], "unknown optimizer 'lion'; known: adam, adamw, lars, sgd"),
        (["--out", "{folder}"], "the file exists; choose another name or remove it"),
        (["--out", "{folder}/none/x.toml"], "x.toml: there is no folder"),
    ],
)
def test_bad_input(given: list[str], what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, *(one.format(folder=tmp_path) for one in given)]) == 2
    said = capsys.readouterr()
    assert what in said.err
    assert said.err.count("\n") <= 2
    assert said.out == ""
