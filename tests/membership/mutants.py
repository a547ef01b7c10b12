"""The protocol with one rule left out at a time; each must be caught."""

from __future__ import annotations

from typing import NamedTuple

from farflung.membership import Member

__all__ = ["MUTANTS", "Mutant"]


class Mutant(NamedTuple):
    rules: type[Member]
    driver: str = ""


MUTANTS = {"": Mutant(Member)}
