"""Records the outcomes of the battery's cases: ``python -m tests.battery.record [CASE ...]``; without a name, of all.

With ``PYTHONPATH=<a checkout>/src`` it records the outcomes of that checkout. Bits of other versions of torch stay in
the file. If bytes or times of a case have changed, the case is named and bits of other versions are dropped.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from tests.battery.cases import CASES, DENSE
from tests.battery.process import Battery

EXPECTED = Path(__file__).with_name("expected.json")


def main(names: Collection[str]) -> int:
    """Runs the named cases, or all if there is no name, and writes the file."""
    if unknown := sorted({*names} - {*CASES, DENSE}):
        print(f"no such case: {', '.join(unknown)}; there are: {', '.join((*CASES, DENSE))}", file=sys.stderr)
        return 2
    known: dict[str, Any] = json.loads(EXPECTED.read_text()) if EXPECTED.exists() else {}
    recorded: dict[str, Any] = {}
    battery = Battery()
    for name in (*CASES, DENSE):
        before = known.get(name, {})
        if names and name not in names:
            if before:
                recorded[name] = before
            continue
        found = battery.outcome(name)
        if before and not same(found, before):
            print(f"{name}: other bytes or times than before", file=sys.stderr)
        elif "bits" in found:
            found["bits"] = {**before.get("bits", {}), **found["bits"]}
        recorded[name] = found
    battery.close()
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(values)}" for name, values in recorded.items())
    EXPECTED.write_text(f"{{\n{lines}\n}}\n")
    return 0


def same(found: dict[str, Any], recorded: dict[str, Any]) -> bool:
    """Whether two outcomes have the same bytes and times."""
    return {**found, "bits": None} == {**recorded, "bits": None}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
