"""Coded training: linear models on devices that may vanish at any moment, with exact answers."""

from farflung.coded.codes import CODES, MDS, RLNC, Code, Replication, Uncoded
from farflung.coded.decoder import MAX_CONDITION, Decoder
from farflung.coded.plan import Plan, Plans
from farflung.coded.products import Products
from farflung.coded.recombination import combination, recombined_row
from farflung.coded.redundancy import any_one_may_vanish, rank, redundancy, would_decode

__all__ = [
    "CODES",
    "MAX_CONDITION",
    "MDS",
    "RLNC",
    "Code",
    "Decoder",
    "Plan",
    "Plans",
    "Products",
    "Replication",
    "Uncoded",
    "any_one_may_vanish",
    "combination",
    "rank",
    "recombined_row",
    "redundancy",
    "would_decode",
]
