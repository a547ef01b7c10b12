"""Private parts of torch are used in one module, which names those that are missing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from farflung import _torch
from farflung.errors import Unsupported

PRIVATE = re.compile(
    r"torch\._C|torch\.utils\._|_execution_engine|multiprocessing\.reductions|tensor\._utils"
)


def test_a_missing_part_is_named() -> None:
    with pytest.raises(Unsupported, match=r"torch \S+ has no torch\._C\._no_such_part, which farflung uses"):
        _torch._import_private("torch._C._no_such_part")


def test_no_other_module_uses_private_parts() -> None:
    package = Path(_torch.__file__).parent
    users = [path.name for path in package.rglob("*.py") if PRIVATE.search(path.read_text())]
    assert users == ["_torch.py"]
