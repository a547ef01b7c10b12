"""farflung: trains one PyTorch model on many devices that are far apart."""

from importlib import import_module
from typing import TYPE_CHECKING

from farflung.attach import Handle, attach
from farflung.ddp import ddp_hook
from farflung.importance import ImportanceSampler
from farflung.recipes import RECIPES, Recipe, recipe
from farflung.workloads import TorchWorkload

if TYPE_CHECKING:
    from farflung.runs import Comparison, Run, compare, retime, simulate, train

__version__ = "0.1.0"

__all__ = [
    "RECIPES",
    "Comparison",
    "Handle",
    "ImportanceSampler",
    "Recipe",
    "Run",
    "TorchWorkload",
    "__version__",
    "attach",
    "compare",
    "ddp_hook",
    "recipe",
    "retime",
    "simulate",
    "train",
]


def __getattr__(name: str) -> object:
    """What makes runs is imported when it is first used: loops that attach need none of it."""
    if name in __all__:
        return getattr(import_module("farflung.runs"), name)
    raise AttributeError(f"module 'farflung' has no attribute {name!r}")
