"""Files that each rank keeps beside a checkpoint of somebody else's loop."""

from __future__ import annotations

from pathlib import Path

from tests.pool import Pool


def test_a_file_that_some_ranks_lack_is_refused_on_all(pool: Pool, tmp_path: Path) -> None:
    said = pool.run(2, "tests.integrations.jobs.some_have_their_file", folder=str(tmp_path))
    assert said == [
        f"{tmp_path}/own-{rank}: there for some ranks and not for all: restore the others' files"
        for rank in range(2)
    ]
