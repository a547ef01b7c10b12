"""Recipes, which combine one member of each family, and presets."""

from farflung.recipes.recipe import FAMILIES, RECIPES, Recipe, recipe

__all__ = ["FAMILIES", "RECIPES", "Recipe", "recipe"]
