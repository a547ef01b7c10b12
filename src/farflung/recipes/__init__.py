"""Recipes: presets that name one member of each family."""

from farflung.recipes.recipe import RECIPES, Recipe, recipe
from farflung.recipes.spec import build

__all__ = ["RECIPES", "Recipe", "build", "recipe"]
