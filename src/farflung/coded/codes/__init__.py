"""Codes: the coefficients of coded blocks. One file per algorithm; ``CODES`` names them for configurations."""

from collections.abc import Callable

from farflung.coded.codes.code import Code
from farflung.coded.codes.mds import MDS
from farflung.coded.codes.replication import Replication
from farflung.coded.codes.rlnc import RLNC
from farflung.coded.codes.uncoded import Uncoded

__all__ = ["CODES", "MDS", "RLNC", "Code", "Replication", "Uncoded"]

CODES: dict[str, Callable[..., Code]] = {
    "mds": MDS,
    "replication": Replication,
    "rlnc": RLNC,
    "uncoded": Uncoded,
}
"""All of them by name; each can be made without arguments."""
