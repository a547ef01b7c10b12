"""Recipes: one member of each family, by name or as objects, and presets of them."""

from farflung.recipes.recipe import FAMILIES, RECIPES, Recipe, recipe

__all__ = ["FAMILIES", "RECIPES", "Recipe", "recipe"]
