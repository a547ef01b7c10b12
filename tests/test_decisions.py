"""The decision log: kept in a file, made again from one, and refused where it does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from farflung.decisions import DecisionLog, read_decisions
from farflung.errors import ConfigError
from farflung.sim import VirtualWorld
from farflung.types import Decision, Json, Runtime
from farflung.wall import WallRuntime


def decided(log: DecisionLog, values: list[int]) -> list[list[Json]]:
    """What each of two ranks is told, where rank 0 would choose ``values`` one after the other."""
    world = VirtualWorld(2, decisions=log)

    async def body(runtime: Runtime) -> list[Json]:
        return [(await runtime.decide("width", step, values.pop)).value for step in range(2)]

    try:
        return world.run([body(runtime) for runtime in world.runtimes])
    finally:
        log.write()


def test_a_log_in_a_file_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    assert decided(DecisionLog(path), [7, 3]) == [[3, 7], [3, 7]]
    kept = read_decisions(path)
    assert kept == [Decision("width", 0, 3), Decision("width", 1, 7)]
    again = DecisionLog(tmp_path / "again.jsonl", kept)
    assert decided(again, [100, 200]) == [[3, 7], [3, 7]]
    assert (tmp_path / "again.jsonl").read_bytes() == path.read_bytes()


def decided_alone(log: DecisionLog, values: list[int]) -> list[list[Json]]:
    """What each of two ranks decides for itself."""
    world = VirtualWorld(2, decisions=log)

    async def body(runtime: Runtime) -> list[Json]:
        return [runtime.decide_locally("width", step, values.pop).value for step in range(2)]

    try:
        return world.run([body(runtime) for runtime in world.runtimes])
    finally:
        log.write()


def noted(path: Path, decision: Decision) -> None:
    """Adds a decision to a file."""
    log = DecisionLog(path)
    log.record(decision)
    log.write()


def test_recording_touches_no_file_and_nothing_stays_in_memory_that_a_file_takes(tmp_path: Path) -> None:
    log = DecisionLog(tmp_path / "decisions.jsonl")
    for rank in (None, 1):
        log.record(Decision("width", 0, 3, rank=rank))
    assert list(tmp_path.iterdir()) == []
    for _ in range(2):
        log.write()
        assert read_decisions(tmp_path / "decisions.jsonl") == [
            Decision("width", 0, 3),
            Decision("width", 0, 3, rank=1),
        ]
    assert log.entries == []


def test_a_real_replica_without_a_folder_keeps_no_decisions() -> None:
    runtime = WallRuntime(0, 1, None)
    try:
        assert runtime.decide_locally("width", 0, lambda: 3).value == 3
        assert runtime.decisions.entries == []
    finally:
        runtime.close()


def test_what_each_replica_decides_for_itself_is_kept_apart(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    assert decided_alone(DecisionLog(path), [4, 3, 2, 1]) == [[1, 2], [3, 4]]
    assert not path.exists()
    assert (tmp_path / "decisions" / "rank-1.jsonl").read_text().splitlines() == [
        '{"name":"width","step":0,"value":3,"timing":true,"rank":1}',
        '{"name":"width","step":1,"value":4,"timing":true,"rank":1}',
    ]
    own = read_decisions(path)
    assert {(d.step, d.rank): d.value for d in own} == {(0, 0): 1, (1, 0): 2, (0, 1): 3, (1, 1): 4}
    assert decided_alone(DecisionLog(replay=own), []) == [[1, 2], [3, 4]]
    noted(path, Decision("width", 0, 9))
    assert read_decisions(path) == [Decision("width", 0, 9), *own]
    assert (
        decided(DecisionLog(replay=[*own, Decision("width", 0, 9), Decision("width", 1, 8)]), [])
        == [[9, 8]] * 2
    )


def test_a_log_without_a_replicas_decision_is_refused() -> None:
    log = DecisionLog(replay=[Decision("width", step, 1, rank=0) for step in range(2)])
    with pytest.raises(ConfigError, match="the log holds no decision 'width' of rank 1 at step 0"):
        decided_alone(log, [4, 3, 2, 1])


def test_a_log_of_another_run_is_refused() -> None:
    with pytest.raises(ConfigError, match="--replay: the log holds no decision 'width' at step 1"):
        decided(DecisionLog(replay=[Decision("width", 0, 3)]), [100, 200])


def test_without_a_log_to_replay_nothing_is_known() -> None:
    assert DecisionLog().find_replayed("stop", 0) is None
    assert DecisionLog(replay=[]).find_replayed("stop", 0) is None
    assert DecisionLog(replay=[Decision("stop", 3, True)]).find_replayed("stop", 3) is not None


def test_a_line_that_was_cut_short_at_the_end_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    noted(path, Decision("stop", 3, True, timing=False))
    with path.open("a") as file:
        file.write('{"name":"wid')
    assert read_decisions(path) == [Decision("stop", 3, True, timing=False)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{\n{}\n", ", line 1: not a decision"),
        ('{"name":"a","step":"1","value":0,"timing":true}\n{}\n', ", line 1: not a decision"),
        ('{"name":"a","step":1,"value":0,"timing":true,"rank":"0"}\n{}\n', ", line 1: not a decision"),
        ('[1]\n"two"\n', ", line 1: not a decision"),
        ("\n{}\n\n", ", line 2: not a decision"),
        ("rubbish", ", line 1: not a decision"),
        ('{"name":"a","step":1,"value":0,"timing":true}\nnull', ", line 2: not a decision"),
    ],
)
def test_a_file_that_is_no_log_is_refused_on_one_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "decisions.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_decisions(path)
    assert str(caught.value).startswith(f"{path}{says}")
    assert "\n" not in str(caught.value)
    for absent in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_decisions(absent)
