"""A soak: it goes on over seeds, and says what broke a law and how to see that again."""

from __future__ import annotations

import signal

import pytest

from tests.membership import plans, soak


@pytest.mark.thorough
def test_plans_break_no_law(capsys: pytest.CaptureFixture[str]) -> None:
    assert soak.main(["--seed", "3", "--count", "4"]) == 0
    said = capsys.readouterr().out
    assert "from seed 3: 0 violations; 4 agreements; " in said


def test_what_breaks_a_law_is_said_with_how_to_see_it_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def check(seed: int) -> str:
        if seed == 7:
            signal.raise_signal(signal.SIGALRM)  # as after LIMIT_S
        return "two views" if seed == 6 else ""

    monkeypatch.setattr(plans, "check", check)
    monkeypatch.setattr(soak, "elastic", lambda seed: "runs")
    assert soak.main(["--seed", "5", "--count", "3"]) == 1
    said = capsys.readouterr().out
    assert "seed 6, agreement: two views" in said
    assert "again: scripts/soak --seed 6 --count 1\n" in said
    assert "seed 7, agreement: hangs" in said
    assert "2 violations; 1 agreements; 3 runs\n" in said


def test_interrupted_it_ends_with_the_summary(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(seed: int) -> str:
        if seed == 6:
            raise KeyboardInterrupt
        return "runs"

    monkeypatch.setattr(soak, "elastic", interrupted)
    assert soak.main(["--seed", "5"]) == 0
    assert capsys.readouterr().out.endswith("0 violations; 1 agreements; 1 runs\n")
