"""The page on coded training: its commands run as they stand, machine by machine, on addresses of this one."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_readme import FENCE, LIMIT_S, ROOT, blocks_of

PAGE = (ROOT / "docs" / "coded.md").read_text(encoding="utf-8")
MACHINE = re.compile(r"# on machine (\w)\n")


def start(text: str, folder: Path) -> subprocess.Popen[str]:
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        ["bash", "-euc", text],
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


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
        process = start(block.text.replace("192.0.2.10:29500", at), folder)
        if "--at" in block.text or " device " in block.text:
            together.append(process)
            continue
        said, _ = process.communicate(timeout=LIMIT_S / 2)
        assert process.returncode == 0, said
        for own, other in (("A", "B"), ("B", "A")):
            for key in (machines[own] / "keys").glob("*.public"):
                if (machines[other] / "keys").is_dir() and key.stem == own.lower():
                    shutil.copy(key, machines[other] / "keys")
    assert len(together) == 2
    for process in together:
        said, _ = process.communicate(timeout=LIMIT_S / 2)
        assert process.returncode == 0, said
    assert (machines["A"] / "runs" / "coded" / "model.safetensors").is_file()
    assert (tmp_path / "runs" / "demo" / "run.png").is_file()
