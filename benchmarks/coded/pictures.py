"""Pictures of what encoding costs: answers beyond K by bytes, and joins one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.pictures import create_drawing

__all__ = ["draw_curve", "draw_joins"]

COLOURS = {
    "binary": "#1f77b4",
    "masked": "#2ca02c",
    "balanced": "#d62728",
    "rlnc": "#d62728",
    "mds": "#444444",
}
KINDS = {"rows": "-", "rows and columns": "--"}


def draw_curve(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Answers beyond K over encoding bytes, side by side for each size.

    Args:
      path: of the picture.
      lines: as ``results/parts/curve.jsonl`` has them.
    """
    sizes = sorted({(line["devices"], line["partitions"]) for line in lines})
    with create_drawing(path, (10, 4)) as figure:
        every = figure.subplots(1, len(sizes), sharex=True)
        for axes, size in zip(every, sizes, strict=True):
            ours = [line for line in lines if (line["devices"], line["partitions"]) == size]
            for law in dict.fromkeys(line["law"] for line in ours):
                chosen = [line for line in ours if line["law"] == law]
                for kind, style in KINDS.items():
                    axes.plot(
                        [line["encoding_bytes_over_mds"][kind] for line in chosen],
                        [line["extra_answers"] for line in chosen],
                        style if len(chosen) > 1 else {"rows": "o", "rows and columns": "s"}[kind],
                        color=COLOURS[law],
                        label=f"{law}, {kind}",
                    )
            axes.set(xlabel="encoding bytes over MDS", ylabel="mean answers beyond K", ylim=(-0.1, None))
            axes.set_title(f"N = {size[0]}, K = {size[1]}")
        every[-1].legend(fontsize="small", loc="upper center")


def draw_joins(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """What each device that joins fetches, and answers beyond K once it is there.

    Args:
      path: of the picture.
      lines: as ``results/parts/joins.jsonl`` has them.
    """
    with create_drawing(path, (10, 4)) as figure:
        left, right = figure.subplots(1, 2, sharex=True)
        for line in lines:
            joined = range(1, len(line["joins"]) + 1)
            look = {"color": COLOURS[line["code"]], "linestyle": KINDS[line["kinds"]], "marker": "o"}
            label = f"{line['code']}, {line['kinds']}"
            left.plot(joined, [one["partitions_fetched"] for one in line["joins"]], label=label, **look)
            if line["kinds"] == "rows":
                right.plot(
                    joined, [one["extra_answers"] for one in line["joins"]], label=line["code"], **look
                )
        left.set(xlabel="coded device that joins", ylabel="partitions that it fetches", ylim=(0, None))
        right.set(xlabel="coded devices there", ylabel="mean answers beyond K")
        for axes in (left, right):
            axes.legend()
