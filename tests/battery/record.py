"""Records what the battery's trainings end with, from whatever farflung is imported.

``PYTHONPATH=<a checkout>/src python -m tests.battery.record`` takes the values of that checkout's code. The bits of
other machines stay in the file, unless a case has other bytes or times than before: then it is named, and theirs go.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common.first_steps import machine
from tests.battery.cases import CASES
from tests.battery.runs import virtual, wall
from tests.pool import Pool

EXPECTED = Path(__file__).with_name("expected.json")


def main() -> int:
    """Runs all cases in both worlds and writes the file."""
    known: dict[str, Any] = json.loads(EXPECTED.read_text()) if EXPECTED.exists() else {}
    recorded: dict[str, Any] = {}
    pool = Pool(4)
    with tempfile.TemporaryDirectory() as scratch:
        for name, case in CASES.items():
            here = Path(scratch, name)
            outcomes: dict[str, Any] = {}
            if case.virtual:
                outcomes["virtual"] = virtual(case, here / "virtual")
            outcomes["wall"] = wall(pool, case, here / "wall", here / "virtual" / "decisions.jsonl")
            bits = {world: outcome.pop("bits") for world, outcome in outcomes.items()}
            if len({json.dumps(of_world) for of_world in bits.values()}) > 1:
                print(f"{name}: the worlds end with other bits: {bits}", file=sys.stderr)
                return 1
            before = known.get(name)
            same = before is not None and all(before[world] == outcomes[world] for world in outcomes)
            if before is not None and not same:
                print(f"{name}: other bytes or times than before", file=sys.stderr)
            kept = before["bits"] if before is not None and same else {}
            recorded[name] = {"bits": {**kept, machine(): bits["wall"]}, **outcomes}
    pool.close()
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(values)}" for name, values in recorded.items())
    EXPECTED.write_text(f"{{\n{lines}\n}}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
