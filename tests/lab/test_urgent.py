"""What is urgent overtakes megabytes on a slow link."""

from __future__ import annotations

import json
import os
import select
import sys

import pytest

from farflung.lab import Lab
from farflung.network import Link, NetworkProfile

LIMIT_S = 120.0
"""An upper bound on a busy machine; the messages take some seconds."""
pytestmark = [pytest.mark.lab, pytest.mark.thorough, pytest.mark.timeout(2 * LIMIT_S)]


@pytest.mark.parametrize(
    "what", [[], ["buckets"]], ids=["a control message", "a bucket that is needed first"]
)
def test_what_is_urgent_overtakes_4_mb_at_10_mbit(what: list[str]) -> None:
    command = [sys.executable, "-m", "tests.lab.urgent_job", *what]
    reads, writes = os.pipe()
    with Lab(NetworkProfile.create_uniform(Link(0.02, 10e6), 2), 2) as lab:
        lab.start(0, command, dict(os.environ))
        lab.start(1, command, dict(os.environ), writes)
        os.close(writes)
        assert select.select([reads], [], [], LIMIT_S)[0], "nothing was said"
        with os.fdopen(reads) as said:
            lines = said.readlines()
    first, second = json.loads(lines[-1])
    print(f"{first[0]} after {first[1]:.3f} s, {second[0]} after {second[1]:.3f} s")
    assert (first[0], second[0]) == ("urgent", "bulk")
    assert first[1] < second[1] / 2, "it has waited for bulk"
