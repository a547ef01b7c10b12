"""Where a result comes from: the commit of the code, the machine, and whether a canary has changed since."""

from __future__ import annotations

import functools
import json
import os
import platform
import subprocess
import time
from collections.abc import Collection
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from farflung.errors import FarflungError

__all__ = ["ROOT", "NotCommitted", "changed_canaries", "commit_here", "machine", "today"]

ROOT = Path(__file__).resolve().parents[2]
CODE = (
    "src",
    "benchmarks",
    "pyproject.toml",
    "constraints.txt",
    ":(exclude)benchmarks/*/results/*",
    ":(exclude)benchmarks/*/*.md",
    ":(exclude)benchmarks/*/expected.toml",
)
"""What a result depends on, as pathspecs of git."""
BATTERY = "tests/battery/expected.json"


class NotCommitted(FarflungError):
    """The code that would be measured is in no commit, so the result could not name it."""


def commit_here() -> str:
    """The last commit that changed the code: results measured with the same code name the same commit.

    Raises:
      NotCommitted: the code differs from every commit, or this is no checkout.
    """
    try:
        dirty = _git("status", "--porcelain", "--", *CODE).splitlines()
        commit = _git("log", "-1", "--format=%H", "--", *CODE).strip()
    except (OSError, subprocess.CalledProcessError):
        raise NotCommitted(f"{ROOT} is no checkout of git: a result names the commit of its code") from None
    if dirty:
        raise NotCommitted(
            f"commit the code before it is measured ({dirty[0][3:]}"
            + (f" and {len(dirty) - 1} more" if len(dirty) > 1 else "")
            + "), or use --quick, which stores nothing"
        )
    return commit


def machine() -> dict[str, Any]:
    """The processor, its cores, a GPU where there is one, and the versions of torch and Python."""
    return {
        "cpu": _processor(),
        "cores": os.cpu_count(),
        **({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}),
        "torch": version("torch"),
        "python": platform.python_version(),
    }


def today() -> str:
    """The date, as stored."""
    return time.strftime("%Y-%m-%d")


def changed_canaries(names: Collection[str], commit: str, *, times: bool = True) -> list[str]:
    """Cases of the battery whose recorded values differ from those recorded at a commit.

    Values under keys that only one of the two has, such as bits of another version of torch, are not compared.

    Args:
      names: of the cases.
      commit: to compare with.
      times: whether virtual times count too; what is learned where they alone have changed is in the bits.

    Raises:
      NotCommitted: this clone does not have the commit.
    """
    then, now = _recorded(commit), _recorded(None)
    aside = () if times else ("times",)
    return [name for name in names if _differ(then.get(name), now.get(name), aside)]


def _differ(then: Any, now: Any, aside: Collection[str]) -> bool:
    if isinstance(then, dict) and isinstance(now, dict):
        return any(
            _differ(then[key], now[key], aside) for key in (then.keys() & now.keys()).difference(aside)
        )
    return then is not None and now is not None and then != now


@functools.cache
def _recorded(commit: str | None) -> dict[str, Any]:
    if commit is None:
        text = (ROOT / BATTERY).read_text(encoding="utf-8")
    else:
        try:
            text = _git("show", f"{commit}:{BATTERY}")
        except subprocess.CalledProcessError:
            raise NotCommitted(
                f"this clone has no commit {commit} with {BATTERY}: fetch all of its history"
            ) from None
    recorded: dict[str, Any] = json.loads(text)
    return recorded


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
