"""Solvers of linear models on two products, one file each."""

from collections.abc import Callable
from typing import Any

from farflung.coded.solvers.bundle import Bundle, BundleState
from farflung.coded.solvers.gd import GD, GDState
from farflung.coded.solvers.interface import Iterate, Solver
from farflung.coded.solvers.lbfgs import LBFGS, LBFGSState
from farflung.coded.solvers.one_vs_rest import OneVsRest, OneVsRestState
from farflung.coded.solvers.solving import solve

__all__ = [
    "GD",
    "LBFGS",
    "SOLVERS",
    "Bundle",
    "BundleState",
    "GDState",
    "Iterate",
    "LBFGSState",
    "OneVsRest",
    "OneVsRestState",
    "Solver",
    "solve",
]

SOLVERS: dict[str, Callable[..., Solver[Any]]] = {"bundle": Bundle, "gd": GD, "lbfgs": LBFGS}
"""All of them by name."""
