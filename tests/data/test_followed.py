"""Files that are appended to: records are read once, wherever a write or a run was broken off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from farflung.data import FileOutlet, as_messages, files
from farflung.data.streams.followed import append
from farflung.data.streams.live import STRIDE
from farflung.errors import BadInput
from farflung.types import Feed
from tests.data.test_live import DATA, VALUES
from tests.data.test_streams import feed


def fed(rank: int = 0, size: int = 1) -> Feed:
    return feed(None, rank, size, data=DATA, batch_size=4)


def step(stream: Any, samples: Any, number: int) -> list[int]:
    """The labels of what the step has used, which say which samples they were."""
    arrivals = stream.poll(0.0, number)
    while arrivals.ready is not None:
        arrivals.ready.wait()
        arrivals = stream.poll(0.0, number)
    ids = arrivals.ids[: arrivals.count]
    labels: list[int] = samples.rows(ids).targets.tolist()
    stream.commit(ids, step=number)
    return labels


def write(path: Path, *values: bytes) -> None:
    with path.open("ab") as file:
        append(file, values)


def test_what_is_added_is_read_and_a_torn_record_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "sensor"
    write(path, *VALUES[:6])
    stream = files(str(path), deadline_s=30.0)
    samples = stream.open(fed())
    assert step(stream, samples, 0) == [0, 1, 2, 3]
    whole = path.read_bytes()
    write(path, VALUES[6], VALUES[7])
    both = path.read_bytes()
    path.write_bytes(both[: len(whole) + 9])
    arrivals = stream.poll(0.0, 1)
    assert arrivals.ready is not None
    with path.open("r+b") as file:
        file.seek(len(whole) + 9)
        file.write(both[len(whole) + 9 :])
    assert step(stream, samples, 1) == [4, 5, 6, 7]
    stream.close()


def test_a_position_is_that_of_a_record(tmp_path: Path) -> None:
    path = tmp_path / "sensor"
    write(path, *VALUES[:9])
    stream = files(str(path))
    samples = stream.open(fed())
    step(stream, samples, 0)
    arrivals = stream.poll(0.0, 1)
    assert [one // STRIDE for one in arrivals.ids.tolist()] == [
        number * (4 + len(VALUES[0])) for number in range(4, 9)
    ]
    state = stream.state_dict()
    stream.close()
    again = files(str(path))
    samples = again.open(fed())
    again.seek(state)
    write(path, *VALUES[9:12])
    assert [step(again, samples, number) for number in (1, 2)] == [[4, 5, 6, 7], [8, 9, 10, 11]]
    again.close()


def test_a_record_may_be_larger_than_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farflung.data.streams.followed.BLOCK", 50)
    path = tmp_path / "sensor"
    write(path, *VALUES[:8])
    stream = files(str(path))
    samples = stream.open(fed())
    assert [step(stream, samples, number) for number in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    stream.close()


def test_the_files_of_a_folder_are_shared_out(tmp_path: Path) -> None:
    for number in range(3):
        write(tmp_path / f"{number}.records", *VALUES[10 * number : 10 * number + 8])
    (tmp_path / "notes.txt").write_text("not followed")
    found = []
    for rank in range(2):
        stream = files(str(tmp_path), least=8 if rank else 16)
        samples = stream.open(fed(rank, 2))
        found.append(step(stream, samples, 0))
        stream.close()
    assert sorted(found[0]) == [*range(8), *range(20, 28)]
    assert found[1] == [*range(10, 18)]


def test_each_replica_may_have_a_file(tmp_path: Path) -> None:
    for rank in range(2):
        write(tmp_path / f"{rank}.bin", *VALUES[50 * rank : 50 * rank + 4])
    for rank in range(2):
        stream = files(str(tmp_path / "{rank}.bin"))
        assert step(stream, stream.open(fed(rank, 2)), 0) == [50 * rank + k for k in range(4)]
        stream.close()


def test_whoever_adds_goes_on_behind_the_last_whole_record(tmp_path: Path) -> None:
    path = tmp_path / "0000.records"
    write(path, *VALUES[:3])
    with path.open("ab") as file:
        file.write(b"\xa0\x00\x00\x00torn")
    outlet = FileOutlet(tmp_path, 1)
    outlet.put(0, as_messages(DATA.rows(torch.arange(3, 8))))
    outlet.finish()
    stream = files(str(tmp_path))
    samples = stream.open(fed())
    assert [step(stream, samples, number) for number in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    stream.close()


def test_what_cannot_be_followed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"absent: cannot be read \(No such file"):
        files(str(tmp_path / "absent")).open(fed())
    with pytest.raises(BadInput, match=r"0 files \*.records for 1 replicas"):
        files(str(tmp_path)).open(fed())
    with pytest.raises(BadInput, match="path 3 must be text"):
        files(3)  # type: ignore[arg-type]
    path = tmp_path / "sensor"
    path.write_bytes(b"\xff\xff\xff\xff" * 9)
    stream = files(str(path))
    samples = stream.open(fed())
    with pytest.raises(BadInput, match="no record at byte 0: 4294967295 bytes long"):
        step(stream, samples, 0)
    path.write_bytes(b"")
    write(path, *VALUES[:6])
    stream = files(str(path))
    samples = stream.open(fed())
    step(stream, samples, 0)
    path.write_bytes(b"")
    with pytest.raises(BadInput, match="became shorter: 0 bytes"):
        step(stream, samples, 1)
