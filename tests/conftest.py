"""What every test runs under: one thread, no display, and a word on the parts of the machine it needs."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import settings

os.environ["MPLBACKEND"] = "Agg"
torch.set_num_threads(1)

settings.register_profile("here", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")


# --- parts that a machine may lack ------------------------------------------------------------------------------
#
# A test marked ``lab``, ``kafka`` or ``gpu`` skips where that part is absent. Where FARFLUNG_REQUIRE names the part
# (``FARFLUNG_REQUIRE=lab,kafka``) it fails instead, so that a machine set up for them cannot lose them unnoticed.


def _lacks_lab() -> str | None:
    if os.geteuid() != 0:
        return "needs root"
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "--net", "true"], check=False).returncode != 0:
        return "cannot make a network namespace (unshare --net)"
    if not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun"
    return None


def _lacks_kafka() -> str | None:
    home = os.environ.get("KAFKA_HOME")
    if not home:
        return "KAFKA_HOME is not set"
    if not Path(home, "bin", "kafka-server-start.sh").is_file():
        return f"KAFKA_HOME={home} has no bin/kafka-server-start.sh"
    java_home = os.environ.get("JAVA_HOME")
    if shutil.which("java", path=f"{java_home}/bin" if java_home else None) is None:
        return "there is no java"
    return None


def _lacks_gpu() -> str | None:
    return None if torch.cuda.is_available() else "torch sees no CUDA device"


PARTS: dict[str, Callable[[], str | None]] = {
    "gpu": functools.cache(_lacks_gpu),
    "kafka": functools.cache(_lacks_kafka),
    "lab": functools.cache(_lacks_lab),
}


def _required() -> set[str]:
    return {name.strip() for name in os.environ.get("FARFLUNG_REQUIRE", "").split(",") if name.strip()}


def pytest_configure() -> None:
    if unknown := _required() - PARTS.keys():
        raise pytest.UsageError(
            f"FARFLUNG_REQUIRE names {', '.join(sorted(unknown))}; known: {', '.join(PARTS)}"
        )


def pytest_runtest_setup(item: pytest.Item) -> None:
    for part, lacks in PARTS.items():
        if item.get_closest_marker(part) is None or (reason := lacks()) is None:
            continue
        if part in _required():
            pytest.fail(f"{part} is in FARFLUNG_REQUIRE, but: {reason}", pytrace=False)
        pytest.skip(f"{part}: {reason}")
