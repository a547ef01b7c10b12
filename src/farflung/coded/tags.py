"""The tags that messages of coded training go by."""

from __future__ import annotations

from farflung.comm.channel import Purpose
from farflung.types import Tag

__all__ = ["ASK", "COMMAND", "OPERAND", "REPORT", "answers", "reply"]

COMMAND = Tag(Purpose.MEMBERS.at(0), 0)
"""What the coordinator tells a device."""
REPORT = Tag(Purpose.MEMBERS.at(0), 1)
"""What a device tells the coordinator."""
ASK = Tag(Purpose.MEMBERS.at(0), 2)
"""What one device asks another for."""
OPERAND = Tag(Purpose.OPERANDS.at(0))
"""What to multiply by, and the end."""


def reply(number: int) -> Tag:
    """What a device gives another that has asked under a number of its own."""
    return Tag(Purpose.ENCODING.at(number))


def answers(round: int) -> Tag:
    """The products of one round."""
    return Tag(Purpose.ANSWERS.at(round))
