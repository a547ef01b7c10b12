"""Commands that refuse what they are given."""

from __future__ import annotations

import pytest

from farflung.cli.main import main


def refuse(capsys: pytest.CaptureFixture[str], *args: object, lines: int = 1) -> str:
    """Runs a command, which must refuse with at most so many lines on stderr, and returns them."""
    assert main([*map(str, args)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("farflung: ")
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) <= lines
    return err
