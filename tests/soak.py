"""A long run of real workers: what each holds and has open as it goes on, and what it leaves behind.

``python -m tests.soak`` takes 20,000 steps; ``--steps 400`` tries it. It ends with an error where memory or open files
grow.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path

from farflung.runs import train
from farflung.telemetry import Event, read_events

STEPS = 20_000
WORKERS = 4
PARTS = 10
"""How often is looked; the first look is what the last is held against."""
GROWTH = 0.02
KIB = 1024


class Watch:
    """A sink that looks at each worker's process at a tenth of the steps, two tenths, and so on, and at the end."""

    def __init__(self, steps: int) -> None:
        self._every, self._last = steps // PARTS, steps - max(1, steps // 100)
        self._pids: dict[int, int] = {}
        self.resident: dict[int, list[int]] = defaultdict(list)
        """Bytes of anonymous memory of each rank: its own, without what it shares with the others."""
        self.descriptors: dict[int, list[int]] = defaultdict(list)

    def __call__(self, event: Event) -> None:
        rank = int(str(event["rank"]))
        if event["event"] == "hello":
            self._pids[rank] = int(str(event["pid"]))
        if event["event"] != "step":
            return
        step = int(str(event["step"]))
        if step == self._last or (step and step % self._every == 0):
            process = Path("/proc", str(self._pids[rank]))
            status = dict(line.split(":\t", 1) for line in (process / "status").read_text().splitlines())
            self.resident[rank].append(int(status["RssAnon"].split()[0]) * KIB)
            self.descriptors[rank].append(len(list((process / "fd").iterdir())))


def soak(steps: int, out: Path) -> None:
    """Trains and looks; prints what it has seen, rank by rank."""
    watch = Watch(steps)
    run = train(
        "fashion-mnist/mlp", workers=WORKERS, steps=steps, data="packaged", out=out, sink=watch,
        evaluate_every=steps // PARTS, checkpoint_every=steps // PARTS,
    )  # fmt: skip
    assert run.summary["steps"] == steps
    assert "refused" not in run.summary
    for rank in range(WORKERS):
        held, opened = watch.resident[rank], watch.descriptors[rank]
        events = list(read_events(out / "telemetry" / f"rank-{rank}.jsonl"))
        took = [float(str(event["duration_s"])) for event in events if event["event"] == "step"]
        first, last = (
            1000 * statistics.median(part) for part in (took[: steps // PARTS], took[-steps // PARTS :])
        )
        print(
            f"rank {rank}: {held[0] / 1e6:.1f} MB after {steps // PARTS} steps, {held[-1] / 1e6:.1f} MB at the end "
            f"({held[-1] / held[0] - 1:+.2%}); {opened[0]} and {opened[-1]} open files; "
            f"steps of {first:.2f} ms at first, of {last:.2f} ms at last"
        )
        assert len(took) == steps
        assert held[-1] <= held[0] * (1 + GROWTH), f"rank {rank} holds more and more: {held}"
        assert opened[-1] == opened[0], f"rank {rank} has more and more open: {opened}"
    sizes = {path: path.stat().st_size for path in out.rglob("*") if path.is_file()}
    for path, size in sorted(sizes.items()):
        print(f"{path.relative_to(out)}: {size:,} bytes")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    with tempfile.TemporaryDirectory() as folder:
        soak(parser.parse_args().steps, Path(folder, "run"))
