"""Records what the battery's cases end with, from whatever farflung is imported.

``PYTHONPATH=<a checkout>/src python -m tests.battery.record`` takes the values of that checkout's code. Bits of other
versions of torch stay in the file, unless a case has other bytes or times than before: then it is named, and theirs go.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.battery.cases import CASES, DENSE
from tests.battery.process import Battery

EXPECTED = Path(__file__).with_name("expected.json")


def main() -> int:
    """Runs all cases and writes the file."""
    known: dict[str, Any] = json.loads(EXPECTED.read_text()) if EXPECTED.exists() else {}
    recorded: dict[str, Any] = {}
    battery = Battery()
    for name in (*CASES, DENSE):
        found, before = battery.outcome(name), known.get(name, {})
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
    sys.exit(main())
