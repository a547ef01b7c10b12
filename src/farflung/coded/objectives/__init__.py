"""Losses and penalties of linear models, one file each."""

from farflung.coded.objectives.hinge import Hinge
from farflung.coded.objectives.interface import Objective
from farflung.coded.objectives.logistic import Logistic
from farflung.coded.objectives.multinomial import Multinomial
from farflung.coded.objectives.squared_hinge import SquaredHinge

__all__ = ["Hinge", "Logistic", "Multinomial", "Objective", "SquaredHinge"]
