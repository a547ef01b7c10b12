"""What every test runs under: one thread, no display, worker processes to share, and the parts a machine may lack."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from hypothesis import settings

import tests.unsynced  # noqa: F401

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from xdist.remote import Producer
    from xdist.scheduler import LoadScopeScheduling

    from tests.pool import Pool

os.environ["MPLBACKEND"] = "Agg"

EXAMPLES = 50
settings.register_profile("here", deadline=None, max_examples=EXAMPLES)
settings.register_profile("ci", deadline=None, max_examples=EXAMPLES, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")


# --- side by side -----------------------------------------------------------------------------------------------
#
# Under pytest-xdist the tests of a file run in one process, for the sake of what they share.

POOLED = (
    "tests/integrations/",
    "tests/models/",
    "tests/sites/",
    "tests/test_attach.py",
    "tests/test_attach_start.py",
    "tests/test_ddp.py",
    "tests/test_importance.py",
    "tests/test_step_tracker.py",
    "tests/test_unlike.py",
    "tests/worlds/",
)
"""These share the pool too, so they all run in one process."""
APART = (
    "tests/runs/test_python.py",
    "tests/runs/test_retime.py",
    "tests/test_guides.py",
    "tests/test_readme.py",
)
"""These share nothing and take long, so each of their tests runs wherever there is room, at the end."""

UNMEASURED = ("tests/lab/test_behind_nat.py", "tests/lab/test_coded_cut.py", "tests/lab/test_two_machines.py")
"""These make network namespaces as the lab does and measure nothing, so they run with the others."""

CROWDED = ("tests/coded/test_seats.py",)
"""These start a dozen processes each, and run where the lab's tests do, with nothing beside them."""


@pytest.fixture(scope="module")
def unframed() -> Iterator[None]:
    """In virtual time messages have as many bytes on the wire as their payload, for arithmetic on paper."""
    from farflung.comm import framing

    with mock.patch.multiple(
        framing, RECORD_HEADER_NBYTES=0, HEAD_NBYTES=0, PIECE_HEADER_NBYTES=0, TLS_OVERHEAD_NBYTES=0
    ):
        yield


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four processes that have imported torch, for all tests that need real replicas."""
    from tests.pool import Pool

    pool = Pool(4)
    yield pool
    pool.close()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith(POOLED):
                return "pool"
            return nodeid if nodeid.startswith(APART) else nodeid.partition("::")[0]

    return Scheduling(config, log)


@pytest.fixture(scope="session", autouse=True)
def forked_workers() -> Iterator[Callable[..., object]]:
    """No Python is started for the workers of :func:`farflung.train`; yields the function that starts one."""
    from farflung.runs import launching
    from tests.forks import parent_of

    starts = launching.obtain_parent
    with mock.patch.object(launching, "obtain_parent", parent_of):
        yield starts


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are saved from now on; not rendered, which takes a second each."""
    from matplotlib.figure import Figure

    figures: list[Figure] = []

    def savefig(self: Figure, target: Path, **_: Any) -> None:
        figures.append(self)
        target.touch()

    monkeypatch.setattr(Figure, "savefig", savefig)
    return figures


@pytest.fixture
def hangup() -> Iterator[None]:
    """A hangup ends processes, as it does unless whoever started the tests ignores it, as ``nohup`` does."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--lab",
        choices=("with", "without", "alone"),
        default="with",
        help="tests marked lab with the others, without them, or alone: they measure links, so company disturbs them",
    )
    parser.addoption(
        "--slow", action="store_true", help="tests marked slow too, which are left out unless -m names them"
    )
    parser.addoption(
        "--thorough",
        action="store_true",
        help="tests marked thorough alone, which are left out otherwise unless :: names them",
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files of which nothing runs where the lab is alone are not read there, unless they are named."""
    if config.getoption("lab") != "alone" or collection_path.suffix != ".py":
        return None
    named = {Path(config.invocation_params.dir, argument.partition("::")[0]) for argument in config.args}
    crowded = collection_path.as_posix().endswith(CROWDED)
    return (
        not crowded and collection_path not in named and "mark.lab" not in collection_path.read_text()
    ) or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    which = config.getoption("lab")
    slow = config.getoption("slow") or "slow" in config.getoption("markexpr")
    thorough = config.getoption("thorough")
    named = tuple(argument for argument in config.args if "::" in argument)

    def runs(item: pytest.Item) -> bool:
        of_the_lab, is_slow, is_thorough = (
            item.get_closest_marker(mark) is not None for mark in ("lab", "slow", "thorough")
        )
        alone = item.nodeid.startswith(CROWDED) or (of_the_lab and not item.nodeid.startswith(UNMEASURED))
        if which != "with" and alone != (which == "alone"):
            return False
        return slow if is_slow else is_thorough == thorough or item.nodeid.startswith(named)

    left_out = [item for item in items if not runs(item)]
    if left_out:
        items[:] = [item for item in items if runs(item)]
        config.hook.pytest_deselected(items=left_out)


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


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    # Before each: what a test file imports may set the threads of OpenMP, which torch shares (numba does), and sums
    # of two threads have other bits than those of one.
    torch.set_num_threads(1)
    for part, lacks in PARTS.items():
        if item.get_closest_marker(part) is not None and (reason := lacks()) is not None:
            _cannot_run(part, reason)


@pytest.fixture
def nft() -> None:
    """For tests of the lab that translate addresses."""
    if shutil.which("nft") is None:
        _cannot_run("lab", "there is no nft (nftables)")


def _cannot_run(part: str, reason: str) -> None:
    if part in _required():
        pytest.fail(f"{part} is in FARFLUNG_REQUIRE, but: {reason}", pytrace=False)
    pytest.skip(f"{part}: {reason}")
