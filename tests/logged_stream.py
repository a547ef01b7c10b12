"""A stream that writes down which samples each step has used, for tests of what is lost or used twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from farflung.data import LiveStream, files, kafka
from farflung.data.streams.live import STRIDE
from farflung.types import Feed, SampleIds, Samples


def logged(folder: str, source: str = "kafka", **options: Any) -> LiveStream:
    """The stream of that kind; a line for each step in a file of each replica in ``folder``."""
    stream = kafka(**options) if source == "kafka" else files(**options)
    opened, committed = stream.open, stream.commit
    path = Path(folder)

    def open_(feed: Feed) -> Samples:
        nonlocal path
        path = Path(folder) / f"used-{feed.rank}.jsonl"
        return opened(feed)

    def commit(ids: SampleIds, *, step: int) -> None:
        committed(ids, step=step)
        places = [[one % STRIDE, one // STRIDE] for one in ids.tolist()]
        with path.open("a") as file:
            file.write(json.dumps([step, places]) + "\n")

    stream.open, stream.commit = open_, commit  # type: ignore[method-assign]
    return stream


def used(folder: Path, rank: int) -> dict[int, list[tuple[int, int]]]:
    """The partition and position of each sample by step; of a step that was made again the last time counts."""
    lines = map(json.loads, (folder / f"used-{rank}.jsonl").read_text().splitlines())
    return {step: [(partition, position) for partition, position in places] for step, places in lines}
