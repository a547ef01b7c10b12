"""Files that each rank keeps beside a checkpoint of somebody else's loop."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pool import Pool

JOB = "tests.integrations.jobs.some_have_their_file"


@pytest.mark.parametrize("marks", [["mine", None], ["mine", "another's"], ["damaged", "another's"]], ids=str)
def test_a_file_that_some_ranks_lack_is_refused_on_all(
    pool: Pool, tmp_path: Path, marks: list[str | None]
) -> None:
    said = pool.run(2, JOB, folder=str(tmp_path), marks=marks)
    assert said == [
        f"{tmp_path}/own-{rank}: there for some ranks and not for all: restore the others' files"
        for rank in range(2)
    ]


def test_files_of_the_checkpoint_are_taken(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, JOB, folder=str(tmp_path), marks=["mine", "mine"]) == [
        "[{'kept': 0}] []",
        "[{'kept': 1}] []",
    ]


@pytest.mark.parametrize(("mark", "why"), [(None, "is not there"), ("another's", "is of another checkpoint")])
def test_files_of_none_or_another_checkpoint_are_left_alone(
    pool: Pool, tmp_path: Path, mark: str | None, why: str
) -> None:
    said = pool.run(2, JOB, folder=str(tmp_path), marks=[mark, mark])
    assert said == [
        f"[] ['{tmp_path}/own-0 {why}: what codecs and schedules remember begins anew']",
        "[] []",
    ]


def test_a_run_has_a_name_of_its_own_alike_on_all_ranks(pool: Pool) -> None:
    (first, second), others = pool.run(2, "tests.integrations.jobs.begun_runs")
    assert others == [first, second]
    assert first != second
