"""``farflung.train`` from programs of any kind: none needs a guard, and workers do not run the program again."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

DEADLINE_S = 250

PROGRAM = """
import torch
import farflung

(torch.ones(64, 64, requires_grad=True) @ torch.ones(64, 64)).sum().backward()  # autograd and its threads
print("begins")
run = farflung.train("synthetic/quadratic", workers=2, steps=3)
print(run.summary["steps"])
"""

NOTEBOOK = """
import asyncio, code, threading

async def kernel():
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    shell = code.InteractiveInterpreter({"__name__": "__main__"})
    for cell in CELLS:
        assert not shell.runsource(cell, "<cell>", "exec")

del globals()["__file__"]  # a kernel's main module has none
asyncio.run(kernel())
"""


def script(folder: Path) -> tuple[Sequence[str], str]:
    """A file without a guard."""
    (folder / "script.py").write_text(PROGRAM)
    return ["script.py"], ""


def command(folder: Path) -> tuple[Sequence[str], str]:
    return ["-c", PROGRAM], ""


def piped(folder: Path) -> tuple[Sequence[str], str]:
    return ["-"], PROGRAM


def notebook(folder: Path) -> tuple[Sequence[str], str]:
    """Cells that an event loop runs, beside threads, in a main module without a file."""
    begin, end = PROGRAM.split("print", maxsplit=1)
    (folder / "kernel.py").write_text(f"CELLS = {[begin, 'print' + end]!r}\n{NOTEBOOK}")
    return ["kernel.py"], ""


@pytest.mark.thorough
@pytest.mark.parametrize("program", [script, command, piped, notebook])
def test_train_is_called_from(program: Callable[[Path], tuple[Sequence[str], str]], tmp_path: Path) -> None:
    arguments, typed = program(tmp_path)
    ended = subprocess.run(
        [sys.executable, *arguments],
        input=typed,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert (ended.stdout.split(), ended.stderr) == (["begins", "3"], "")
    (log,) = tmp_path.glob("runs/*/workers.log")
    assert log.read_text() == ""
