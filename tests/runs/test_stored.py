"""A run folder that farflung 0.1 has left is resumed, and ends as 0.1 itself would have ended it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from farflung.replica import load_tree
from farflung.runs import train

STORED = Path(__file__).with_name("stored")


@pytest.mark.usefixtures("forked_workers")
def test_a_run_of_0_1_is_resumed(tmp_path: Path) -> None:
    folder = shutil.copytree(STORED / "run-0.1", tmp_path / "run")
    resumed = train(resume=folder, steps=30)
    assert resumed.summary["steps"] == 30
    expected = load_tree(STORED / "after-30-steps.safetensors")
    found = load_tree(folder / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor)
