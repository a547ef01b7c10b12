"""Whatever happened to a file: it is read, or refused in words that name it, and nothing else is ever raised."""

from __future__ import annotations

import codecs
import random
import time
import traceback
from collections import Counter

import pytest

from farflung.errors import FarflungError
from tests.files.mutations import Kind, damaged, examples

FEW, MANY = 100, 4000
LIMIT_S = 600.0
"""After so long the test of many stops, and fails if it has come to less than half of them."""


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Kind]:
    return examples(tmp_path_factory.mktemp("examples"))


def test_the_examples_are_good(kinds: dict[str, Kind]) -> None:
    for kind in kinds.values():
        kind.read(kind.path)


TEXTS = {".csv", ".json", ".jsonl", ".public", ".secret", ".toml"}


def test_a_text_may_begin_with_a_byte_order_mark(kinds: dict[str, Kind]) -> None:
    marked = [kind for kind in kinds.values() if kind.path.suffix in TEXTS]
    assert {kind.path.suffix for kind in marked} == TEXTS
    for kind in marked:
        good = kind.path.read_bytes()
        kind.path.write_bytes(codecs.BOM_UTF8 + good)
        try:
            kind.read(kind.path)
        finally:
            kind.path.write_bytes(good)


def tried(kinds: dict[str, Kind], seed: int, count: int) -> Counter[str]:
    """How many mutations were accepted and refused, and what else was raised."""
    begun, outcomes = time.monotonic(), Counter[str]()
    draw = random.Random(seed)
    names = list(kinds)
    for number in range(count):
        if time.monotonic() - begun > LIMIT_S:
            break
        name = names[number % len(names)]
        kind = kinds[name]
        good = kind.path.read_bytes()
        kind.path.write_bytes(damaged(good, draw))
        try:
            outcomes[_outcome(kind, name)] += 1
        finally:
            kind.path.write_bytes(good)
    return outcomes


def _outcome(kind: Kind, name: str) -> str:
    try:
        kind.read(kind.path)
    except FarflungError as error:
        places = (kind.path, *kind.path.parents[:3], "--replay")
        named = any(str(place) in str(error) for place in places)
        return "refused" if named and "\n" not in str(error) else f"{name}: not named: {error}"
    except Exception:
        return f"{name}: {traceback.format_exc(limit=-3)}"
    return "accepted"


def check(outcomes: Counter[str], least: int) -> None:
    print({outcome: outcomes[outcome] for outcome in ("accepted", "refused")})
    other = outcomes.keys() - {"accepted", "refused"}
    assert not other, "\n".join(f"{outcomes[one]} times {one}" for one in sorted(other))
    assert outcomes.total() >= least


def test_a_few_damaged_files(kinds: dict[str, Kind]) -> None:
    check(tried(kinds, 0, FEW), FEW)


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_S)
def test_many_damaged_files(kinds: dict[str, Kind]) -> None:
    check(tried(kinds, 1, MANY), MANY // 2)
