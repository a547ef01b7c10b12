"""A test whose part is absent skips, and fails where that part is required."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import POOLED

PROBE = """
import pytest

@pytest.mark.kafka
def test_part():
    raise AssertionError("it ran")
"""


THREADS = """
import torch

torch.set_num_threads(2)  # as a library does that shares OpenMP with torch

def test_one_thread():
    assert torch.threads == 1
    torch.set_num_threads(2)

def test_one_thread_again():
    assert torch.threads == 1
"""
TORCH = """
threads = 8

class cuda:
    is_available = lambda: False

def set_num_threads(count):
    global threads
    threads = count
"""
"""All that is asked of torch; it takes seconds to import."""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    here = Path(__file__).parent
    (tmp_path / "conftest.py").write_text((here / "conftest.py").read_text())
    (tmp_path / "pyproject.toml").write_text((here.parent / "pyproject.toml").read_text())
    (tmp_path / "test_probe.py").write_text(PROBE)
    (tmp_path / "torch.py").write_text(TORCH)
    return tmp_path


def run(project: Path, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    base = {k: v for k, v in os.environ.items() if k not in ("FARFLUNG_REQUIRE", "KAFKA_HOME", "JAVA_HOME")}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, "test_probe.py"],
        cwd=project,
        env=base | env,
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_test_has_one_thread_whatever_was_imported(project: Path) -> None:
    (project / "test_probe.py").write_text(THREADS)
    result = run(project)
    assert result.returncode == 0, result.stdout
    assert "2 passed" in result.stdout


def test_an_absent_part_skips_its_tests(project: Path) -> None:
    result = run(project)
    assert result.returncode == 0, result.stdout
    assert "kafka: KAFKA_HOME is not set" in result.stdout
    assert "1 skipped" in result.stdout


def test_a_required_part_that_is_absent_fails_its_tests(project: Path) -> None:
    result = run(project, FARFLUNG_REQUIRE="lab,kafka")
    assert result.returncode == 1, result.stdout
    assert "kafka is in FARFLUNG_REQUIRE, but: KAFKA_HOME is not set" in result.stdout


def test_a_part_that_is_there_runs(project: Path) -> None:
    for path in ("bin/kafka-server-start.sh", "bin/java"):
        script = project / path
        script.parent.mkdir(exist_ok=True)
        script.write_text("#!/bin/sh\n")
        script.chmod(0o755)
    result = run(project, KAFKA_HOME=str(project), JAVA_HOME=str(project))
    assert "it ran" in result.stdout


def test_an_unknown_required_part_is_refused(project: Path) -> None:
    result = run(project, FARFLUNG_REQUIRE="kafak")
    assert result.returncode == 4
    assert "kafak" in result.stderr


PROBES = """
import pytest

@pytest.mark.lab
def test_lab(): pass

@pytest.mark.slow
def test_long(): pass

@pytest.mark.lab
@pytest.mark.slow
def test_long_lab(): pass

def test_other(): pass
"""


@pytest.mark.parametrize(
    ("options", "there"),
    [
        ([], {"lab", "other"}),
        (["--lab", "with", "--slow"], {"lab", "long", "long_lab", "other"}),
        (["--lab", "without", "-m", "slow"], {"long"}),
        (["--lab", "alone", "-m", "not slow"], {"lab"}),
    ],
)
def test_the_lab_and_what_is_slow_are_left_out_or_asked_for(
    project: Path, options: list[str], there: set[str]
) -> None:
    """What is slow only where that is asked for; the lab with the others, without them, or alone."""
    (project / "test_probe.py").write_text(PROBES)
    said = run(project, *options, "--collect-only", "-q").stdout
    assert set(re.findall(r"::test_(\w+)", said)) == there
    assert "4 tests collected" in said if len(there) == 4 else f"{len(there)}/4 tests collected" in said


def test_where_the_lab_is_alone_no_file_without_it_is_read(project: Path) -> None:
    (project / "tests").mkdir()
    (project / "test_probe.py").rename(project / "tests" / "test_probe.py")
    (project / "test_probe.py").write_text("import pytest\n@pytest.mark.lab\ndef test_lab(): pass\n")
    (project / "tests" / "test_broken.py").write_text("raise AssertionError('it was read')\n")
    said = run(project, "--lab", "alone", "--collect-only", "-q", "tests").stdout
    assert "1 test collected" in said
    assert "it was read" not in said
    assert "it was read" in run(project, "--lab", "alone", "-q", "tests/test_broken.py").stdout


def test_what_shares_the_pool_runs_in_one_process() -> None:
    root = Path(__file__).parent.parent
    sharing = [
        str(path.relative_to(root))
        for path in root.glob("tests/**/test_*.py")
        if "(pool: Pool" in path.read_text() or "pool: Pool," in path.read_text()
    ]
    assert sharing
    assert all(path.startswith(POOLED) for path in sharing if path != "tests/test_conftest.py"), sharing
