"""The page on coded training: its commands run as they stand, machine by machine, on addresses of this one."""

from __future__ import annotations

import re
import runpy
import shutil
import socket
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from tests.forks import Fork, command, farflung
from tests.test_readme import FENCE, LIMIT_S, ROOT, Block, blocks_of, program

PAGE = (ROOT / "docs" / "coded.md").read_text(encoding="utf-8")
MACHINE = re.compile(r"# on machine (\w)\n")


def every(*commands: list[str]) -> int:
    """What a block is in a process: its commands side by side, as ``&`` has it, or a single one."""
    with ExitStack() as stack:
        others = [stack.enter_context(farflung(*words)) for words in commands[:-1]]
        codes = [command(*commands[-1]), *(other.wait() for other in others)]
    return max(code or 0 for code in codes)


def start(block: Block, folder: Path, at: str) -> Fork:
    lines = [line.removesuffix("&") for line in block.commands() if line != "wait"]
    words = [program(line.replace("192.0.2.10:29500", at)) for line in lines]
    assert all(line[0] == "farflung" for line in words)
    return Fork(partial(every, *(line[1:] for line in words)), cwd=folder)


def ended(process: Fork) -> None:
    with process:
        said = process.finished()
    assert process.returncode == 0, said


@pytest.mark.thorough
@pytest.mark.timeout(LIMIT_S)
def test_its_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        at = f"127.0.0.1:{free.getsockname()[1]}"
    shell, python = blocks_of(PAGE, "sh"), blocks_of(PAGE, "python")
    assert len(shell) + len(python) == len(FENCE.findall(PAGE)) == 6
    machines = {name: tmp_path / name for name in "AB"}
    for folder in machines.values():
        folder.mkdir()
    monkeypatch.chdir(machines["B"])
    for block in python:
        script = machines["B"] / "block.py"
        script.write_text(block.text, encoding="utf-8")
        runpy.run_path(str(script), run_name="__main__")
    together = []
    for block in shell:
        named = MACHINE.match(block.text)
        folder = tmp_path if named is None else machines[named[1]]
        process = start(block, folder, at)
        if "--at" in block.text or " device " in block.text:
            together.append(process)
            continue
        ended(process)
        for own, other in (("A", "B"), ("B", "A")):
            for key in (machines[own] / "keys").glob("*.public"):
                if (machines[other] / "keys").is_dir() and key.stem == own.lower():
                    shutil.copy(key, machines[other] / "keys")
    assert len(together) == 2
    for process in together:
        ended(process)
    assert (machines["A"] / "runs" / "coded" / "model.safetensors").is_file()
    assert (tmp_path / "runs" / "demo" / "run.png").is_file()
