"""farflung: trains one PyTorch model on many devices that are far apart."""

from farflung.attach import Handle, attach
from farflung.ddp import ddp_hook
from farflung.recipes import RECIPES, Recipe, recipe

__version__ = "0.1.0"

__all__ = ["RECIPES", "Handle", "Recipe", "__version__", "attach", "ddp_hook", "recipe"]
