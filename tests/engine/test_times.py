"""What a replica measures, as it is told and read again."""

from __future__ import annotations

import math
from typing import Any

import pytest

from farflung.engine.times import StepTimer

TOLD: dict[str, Any] = {"elapsed_s": 2.5, "step_s": None, "exchange_s": 1}


def test_what_was_told_is_read() -> None:
    assert StepTimer.from_json({**TOLD, "more": 1}) == TOLD


@pytest.mark.parametrize("name", TOLD)
@pytest.mark.parametrize("value", [[], {}, "1", True, False, -1, math.nan, math.inf], ids=repr)
def test_what_is_no_time_is_refused(name: str, value: object) -> None:
    with pytest.raises(ValueError, match="seconds"):
        StepTimer.from_json({**TOLD, name: value})
