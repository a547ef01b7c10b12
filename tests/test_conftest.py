"""A test whose part is absent skips, and fails where that part is required."""

from __future__ import annotations

import os
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


TORCH = """
class cuda:
    is_available = lambda: False

def set_num_threads(count): pass
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


@pytest.mark.parametrize(("lab", "runs"), [("with", "2"), ("without", "1"), ("alone", "1")])
def test_the_lab_is_with_the_others_left_out_or_alone(project: Path, lab: str, runs: str) -> None:
    probe = "import pytest\n@pytest.mark.lab\ndef test_lab(): pass\ndef test_other(): pass\n"
    (project / "test_probe.py").write_text(probe)
    said = run(project, "--lab", lab, "--collect-only", "-q").stdout
    assert ("::test_lab" in said, "::test_other" in said) == (lab != "without", lab != "alone")
    assert f"{runs}/2" in said or f"{runs} tests" in said


@pytest.mark.parametrize(
    ("options", "there"),
    [([], False), (["--slow"], True), (["-m", "slow"], True), (["-m", "not slow"], False)],
)
def test_what_is_slow_is_left_out_unless_asked_for(project: Path, options: list[str], there: bool) -> None:
    (project / "test_probe.py").write_text("import pytest\n@pytest.mark.slow\ndef test_long(): pass\n")
    assert ("::test_long" in run(project, *options, "--collect-only", "-q").stdout) == there


def test_what_shares_the_pool_runs_in_one_process() -> None:
    root = Path(__file__).parent.parent
    sharing = [
        str(path.relative_to(root))
        for path in root.glob("tests/**/test_*.py")
        if "(pool: Pool" in path.read_text() or "pool: Pool," in path.read_text()
    ]
    assert sharing
    assert all(path.startswith(POOLED) for path in sharing if path != "tests/test_conftest.py"), sharing
