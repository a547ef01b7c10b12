"""Recipes, which combine one component of each family, and presets."""

from farflung.recipes.recipe import FAMILIES, RECIPES, Recipe, parse_recipe

__all__ = ["FAMILIES", "RECIPES", "Recipe", "parse_recipe"]
