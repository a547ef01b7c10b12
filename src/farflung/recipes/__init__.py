"""Recipes: one member of each family, by name or as objects, and presets of them."""

from farflung.recipes.recipe import MEMBERS, RECIPES, Recipe, recipe

__all__ = ["MEMBERS", "RECIPES", "Recipe", "recipe"]
