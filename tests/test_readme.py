"""The README and the pages on Python and on configuration tell the truth: their blocks run as they stand.

A block of the README or on configuration runs by itself in an empty folder. Those of the page on Python run one
after the other in one. A block that makes a process group runs on two processes that are told what torchrun tells.
``<!-- not run: reason -->`` on the line before a block leaves it out.
"""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from farflung.cli.main import main
from tests.covering import thorough
from tests.forks import Fork, of_torchrun, ran, script

ROOT = Path(__file__).parent.parent
LIMIT_S = 250

RUN = {"farflung", "python", "torchrun"}
NOT_RUN = {("git", "clone"), ("pip", "install")}

BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<reason>[^\n]+?) -->\n+)?^```(?P<language>sh|python|toml)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A fenced block: where it begins, what it is in, and its text."""

    line: int
    language: str
    text: str

    def commands(self) -> list[str]:
        """One command a line; a backslash joins lines, a comment is none."""
        lines = (line.strip() for line in self.text.replace("\\\n", " ").splitlines())
        return [line for line in lines if line and not line.startswith("#")]


def blocks_of(text: str, *languages: str) -> list[Block]:
    """The blocks in these languages, those marked as not run left out."""
    return [
        Block(text.count("\n", 0, found.start("text")), found["language"], found["text"])
        for found in BLOCK.finditer(text)
        if found["language"] in languages and not found["reason"]
    ]


def program(command: str) -> list[str]:
    """The words of a command without the variables set before it and the comment after it."""
    words = shlex.split(command, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0], re.DOTALL):
        words.pop(0)
    return words


def run(command: list[str], cwd: Path) -> None:
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "MPLBACKEND": "Agg",
        "OMP_NUM_THREADS": "1",
    }
    result = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert result.returncode == 0, f"{command}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}"


FENCE = re.compile(r"^\s*(?:```|~~~)\s*(?:sh|bash|shell|console|zsh|python|py|pycon|toml)\b", re.MULTILINE)
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGE = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
CONFIGURATION = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
SHELL = blocks_of(README, "sh")
CONFIGURING = blocks_of(CONFIGURATION, "sh")


def where(block: Block) -> str:
    return f"line {block.line}"


def test_the_first_screen_shows_what_it_does() -> None:
    lines = README.splitlines()
    assert len(lines) <= 140
    (picture,) = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", README)
    assert f"]({picture})" in "".join(lines[:20])
    assert (ROOT / picture).read_text(encoding="utf-8").startswith("<svg ")
    comments_aside = re.sub(r"<!--.*?-->", "", README, flags=re.DOTALL)
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]+)#?([^)]*)\)", comments_aside):
        assert (ROOT / target).exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", (ROOT / target).read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in headings}, (
                target
            )


def test_the_blocks_are_found() -> None:
    for text in (README, CONFIGURATION):
        assert len(BLOCK.findall(text)) == len(FENCE.findall(text)), (
            "fences are ```sh or ```python, not indented"
        )
    assert ["make", "test"] in [program(command) for block in SHELL for command in block.commands()]


@pytest.mark.timeout(LIMIT_S * 6)
@pytest.mark.parametrize("block", [*SHELL, *thorough(*CONFIGURING)], ids=where)
def test_commands_run(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for command in block.commands():
        words = program(command)
        if words[0] == "make":
            run(["make", "-n", *words[1:]], ROOT)
        elif words[:2] == ["farflung", "train"] and command.startswith("farflung"):
            ran(*words[1:])
        elif words[0] == "farflung" and command.startswith("farflung"):
            assert main(words[1:]) == 0, f"{command}\n{capfd.readouterr().err}"
        elif words[0] in RUN:
            run(["bash", "-euc", command], tmp_path)
        else:
            known = tuple(words[:2]) in NOT_RUN or words[0] == "cd"
            assert known, f"line {block.line}: this test does not know what to do with: {command}"


LOOP = """
import torch

model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss_fn = torch.nn.functional.mse_loss
loader = [(torch.randn(4, 8), torch.randn(4, 1)) for _ in range(3)]
"""
"""What the script whose difference the README shows has before it."""


def test_the_changed_ddp_script_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (lines,) = re.findall(r"^```diff\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    kept = [line[1:] for line in lines.splitlines() if not line.startswith("-")]
    path = tmp_path / "train.py"
    path.write_text("\n".join([LOOP, *kept]), encoding="utf-8")
    replicas(path, size=2)


def python(path: Path, *, several: bool) -> None:
    """Runs a script in its folder, on two processes as under torchrun if it is for several, else in this one."""
    if several:
        replicas(path, size=2)
    else:
        runpy.run_path(str(path), run_name="__main__")


def replicas(path: Path, *arguments: str, size: int) -> None:
    """Runs a script in its folder on so many processes, as torchrun would."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with ExitStack() as stack:
        started = [
            stack.enter_context(
                Fork(
                    partial(script, path, *arguments),
                    cwd=path.parent,
                    environment=of_torchrun(rank, size, "127.0.0.1", store.port),
                )
            )
            for rank in range(size)
        ]
        for replica in started:
            _, err = replica.finished()
            assert replica.returncode == 0, "\n".join(err)


@pytest.mark.timeout(LIMIT_S * 6)
def test_the_page_on_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = blocks_of(PAGE, "python")
    assert (len(blocks), len(FENCE.findall(PAGE))) == (4, 5)  # one takes two sites
    found: dict[str, Any] = {}
    for number, block in enumerate(blocks):
        path = tmp_path / f"block_{number}.py"
        path.write_text(block.text, encoding="utf-8")
        if "init_process_group" in block.text:
            replicas(path, size=2)
        else:
            found |= runpy.run_path(str(path), run_name="__main__")
    plain, half, quarter = found["comparison"].rows
    assert quarter.duration_s < 0.6 * half.duration_s
    assert half.duration_s < 0.6 * plain.duration_s
    assert (tmp_path / "recipes.png").read_bytes().startswith(b"\x89PNG")
