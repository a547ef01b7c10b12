"""Replicas that are killed while they write checkpoints go on from one that is whole, with the same bits."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pytest

from farflung import files, state_trees
from farflung.errors import CheckpointError
from tests.forks import Fork
from tests.helpers import same_tree
from tests.schedules.runs import Run

BETWEEN, WITHIN, STEPS = 40, 10, 4
"""Kills between two lines and within the write of a file, and the steps of a run."""
WRITERS = {state_trees.__file__, files.__file__, shutil.__file__}


def make(folder: Path) -> Run:
    """Two replicas that write a checkpoint after each step, and keep two of these."""
    settings = {"steps": STEPS, "momentum": 0.9, "checkpoint_every": 1}
    parts = {"codec": "error_feedback(topk(density=0.2))"}
    run = Run("synchronous", 2, parts, settings=settings, folder=folder)
    for replica in run.replicas:
        assert replica.checkpoints is not None
        replica.checkpoints._num_kept = 2
    return run


def runs(folder: Path, line: Callable[[], object], written: Callable[[Path], object]) -> Run:
    """Run to the end; calls a function before each line that writes or removes files, another after each write."""

    def synced(descriptor: int) -> None:
        written(Path(f"/proc/self/fd/{descriptor}").readlink())

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        del arg
        if frame.f_code.co_filename not in WRITERS:
            return None
        if event == "line":
            line()
        return trace

    run = make(folder)
    with mock.patch.object(os, "fsync", synced):
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            return run.whole()
        finally:
            sys.settrace(before)


def killed(folder: Path, lines: int, writes: int, share: float) -> None:
    """Run, and be killed after so many lines, or within the write of a file, a share of which is there then."""
    lines_left, writes_left = iter(range(lines)), iter(range(writes))

    def line() -> None:
        if next(lines_left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    def written(path: Path) -> None:
        if next(writes_left, None) is None:
            os.truncate(path, int(share * path.stat().st_size))
            os.kill(os.getpid(), signal.SIGKILL)

    runs(folder, line, written)


@pytest.mark.thorough
def test_fifty_kills_while_checkpoints_are_written(tmp_path: Path) -> None:
    lines: list[None] = []
    writes: list[Path] = []
    whole = runs(tmp_path / "whole", lambda: lines.append(None), writes.append)
    assert len(writes) == 3 * STEPS
    never = len(lines) + len(writes) + 1
    between = [(at * len(lines) // BETWEEN, never, 0.0) for at in range(BETWEEN)]
    within = [(2 * never, at * len(writes) // WITHIN, at / WITHIN) for at in range(WITHIN)]
    found: list[int] = []
    for number, kill in enumerate(between + within):
        folder = tmp_path / f"kill-{number}"
        with Fork(partial(killed, folder, *kill), log=tmp_path / "log") as process:
            assert process.wait() == -signal.SIGKILL, kill
        resumed = make(folder)
        first = resumed.replicas[0].checkpoints
        assert first is not None
        try:
            found.append(first.find_newest())
        except CheckpointError:  # none was complete: the run begins anew
            found.append(0)
        for replica in resumed.replicas if found[-1] else ():
            replica.resume(found[-1])
        resumed.whole()
        assert first.list_complete()[-2:] == [STEPS - 1, STEPS], kill
        for got, wanted in zip(resumed.replicas, whole.replicas, strict=True):
            assert same_tree(dict(got.model.state_dict()), dict(wanted.model.state_dict())), kill
    for one in (found[:BETWEEN], found[BETWEEN:]):
        assert one == sorted(one), "a checkpoint that was complete is lost"
        assert set(one) >= set(range(STEPS))
