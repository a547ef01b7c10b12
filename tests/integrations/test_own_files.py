"""Files that each rank keeps beside a checkpoint of somebody else's loop."""

from __future__ import annotations

from pathlib import Path

from tests.pool import Pool


def test_files_are_taken_on_all_ranks_or_none_and_runs_have_names(pool: Pool, tmp_path: Path) -> None:
    lost = "{own}: there for some ranks and not for all: restore the others' files"
    anew = "what codecs and schedules remember begins anew"
    cases: list[tuple[list[str | None], list[str]]] = [
        (["mine", None], [lost, lost]),
        (["mine", "another's"], [lost, lost]),
        (["damaged", "another's"], [lost, lost]),
        (["mine", "mine"], ["[{{'kept': 0}}] []", "[{{'kept': 1}}] []"]),
        ([None, None], [f"[] ['{{own}} is not there: {anew}']", "[] []"]),
        (["another's", "another's"], [f"[] ['{{own}} is of another checkpoint: {anew}']", "[] []"]),
    ]
    found = pool.run(
        2, "tests.integrations.jobs.restore_files", folder=str(tmp_path), cases=[marks for marks, _ in cases]
    )
    for rank, (*said, first, second) in enumerate(found):
        for number, (marks, expected) in enumerate(cases):
            assert said[number] == expected[rank].format(own=f"{tmp_path}/{number}-{rank}"), marks
        assert first != second
        assert [first, second] == found[0][-2:], "alike on all ranks"
