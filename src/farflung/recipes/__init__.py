"""Recipes: presets that name one member of each family."""

from farflung.recipes.recipe import RECIPES, Recipe, recipe

__all__ = ["RECIPES", "Recipe", "recipe"]
