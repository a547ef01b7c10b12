"""What the coding of a simulated run took, and what of it nothing is known of."""

from __future__ import annotations

import logging

from farflung.reducers import REDUCERS
from farflung.runs.result import Run
from farflung.runtime import VirtualWorld
from farflung.spec import is_carried, name_of
from farflung.types import Json

__all__ = ["coding_told", "say_uncharged"]


def coding_told(world: VirtualWorld, *, resumed: bool) -> dict[str, Json]:
    """For a summary; nothing where devices have no rates.

    ``coding_s`` are the seconds in which rank 0 coded and moved messages, of a run in one piece;
    ``coding_not_charged`` names the methods for some of whose work there is no rate, where there are any.
    """
    lanes = [runtime.lane for runtime in world.runtimes if runtime.lane is not None]
    if not lanes:
        return {}
    unknown: list[Json] = list(dict.fromkeys(method for lane in lanes for method in lane.not_charged))
    told: dict[str, Json] = {} if resumed else {"coding_s": lanes[0].busy_s}
    return {**told, **({"coding_not_charged": unknown} if unknown else {})}


def say_uncharged(run: Run, said: set[str]) -> None:
    """Warns in one line of what a run has coded for nothing.

    Args:
      run: that has ended.
      said: the methods that somebody was warned of already; grows.
    """
    unknown = [str(method) for method in _list(run.summary.get("coding_not_charged")) if method not in said]
    said.update(unknown)
    if not unknown:
        return
    options: dict[str, list[str]] = {}
    for method in (one for one in unknown if one and is_carried(one)):
        options.setdefault("--reducers" if name_of("method", method) in REDUCERS else "--codecs", []).append(
            method
        )
    asked = " ".join(f"{option} {' '.join(map(repr, methods))}" for option, methods in options.items())
    logging.getLogger("farflung").warning(
        "coding of %s is not charged on this device: calibrate with %s",
        ", ".join(method or "plain sums" for method in unknown),
        f"farflung calibrate {asked}".rstrip(),
    )


def _list(value: Json) -> list[Json]:
    return value if isinstance(value, list) else []
