"""Help: a line for each command in four groups, options of most use first; what is mistyped is asked about."""

from __future__ import annotations

import re

import pytest

from farflung.cli.main import COMMAND_GROUPS, COMMANDS, main
from tests.refusals import refuse


def read_help(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    with pytest.raises(SystemExit) as end:
        main([*args])
    assert end.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("args", [[], ["-h"], ["--help"]], ids=str)
def test_each_command_has_one_line_that_fits(capsys: pytest.CaptureFixture[str], args: list[str]) -> None:
    lines = read_help(capsys, *args).splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines if line.startswith("  ")] == [*COMMANDS]
    assert all(len(line.split()) > 2 for line in lines if line.startswith("  "))
    assert [line for line in lines if line in COMMAND_GROUPS] == [*COMMAND_GROUPS]
    assert len(lines) < 40


@pytest.mark.parametrize(
    ("command", "first", "last"),
    [
        ("train", ["workload", "recipe", "workers", "steps", "out", "network"], "log-to"),
        ("simulate", ["workload", "recipe", "workers", "steps", "out", "network"], "log-to"),
        (
            "compare",
            ["workload", "recipes", "networks", "workers", "steps", "seeds", "target", "out"],
            "quiet",
        ),
    ],
)
def test_options_of_most_use_come_first(
    capsys: pytest.CaptureFixture[str], command: str, first: list[str], last: str
) -> None:
    options = re.findall(r"^[│| ] --([a-z-]+)", read_help(capsys, command, "--help"), re.MULTILINE)
    assert options[: len(first)] == first
    assert options[-1] == last


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["tran"], "unknown command 'tran'; did you mean train?"),
        (["networks"], "unknown command 'networks'; known: calibrate, "),
        (["list", "recipez"], "unknown table 'recipez'; did you mean recipes?"),
        (["list", "codecs", "tpk"], "unknown codec 'tpk'; did you mean topk?"),
        (["simulate", "--stpes", "3"], "Unrecognized options: --stpes, 3; did you mean --steps?"),
        (["simulate", "--colour", "3"], "Unrecognized options: --colour, 3; see farflung simulate --help"),
        (["simulate", "--network", "4gg"], "unknown network '4gg'; did you mean 4g?"),
        (["simulate", "--recipe", "syncronous"], "unknown recipe 'syncronous'; did you mean synchronous?"),
        (["simulate", "--recipe", "delayed(peroid=8)"], "unknown setting 'peroid'; did you mean period?"),
        (["simulate", "--workload", "fashionmnist/mlp"], "did you mean fashion-mnist/mlp?"),
        (
            ["simulate", "--device", "raspberry-pi"],
            "unknown device 'raspberry-pi'; did you mean raspberry-pi-4?",
        ),
        (["simulate", "--optimizer", "adma"], "unknown optimizer 'adma'; did you mean adam?"),
        (["data", "fetch", "cifar"], "unknown data set 'cifar'; did you mean cifar-10"),
        (["traffic"], "; see farflung traffic --help"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_mistyped_is_asked_about(
    capsys: pytest.CaptureFixture[str], args: list[str], says: str
) -> None:
    assert says in refuse(capsys, *args)
