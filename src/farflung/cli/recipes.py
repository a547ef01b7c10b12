"""``farflung recipes``: the presets there are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from farflung.cli.tables import print_rows, print_table
from farflung.handle import carries
from farflung.recipes import RECIPES, Recipe
from farflung.types import Json

__all__ = ["Recipes"]


@dataclass(frozen=True)
class Recipes:
    """List the recipes: ways to train together, and the parts of each."""

    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print them as JSON."""

    def run(self) -> int:
        """Carries it out; returns the exit code."""
        chosen = [RECIPES[name] for name in sorted(RECIPES)]
        if self.json:
            print_rows(_row(recipe) for recipe in chosen)
        else:
            print_table(
                ["recipe", "what", "parts of its own", "with attach"],
                (_cells(recipe) for recipe in chosen),
            )
        return 0


def _parts(recipe: Recipe) -> dict[str, Json]:
    return {**recipe.members}


def _row(recipe: Recipe) -> dict[str, Json]:
    return {
        "name": recipe.name,
        "what": recipe.summary,
        "parts": _parts(recipe),
        "attach_alone": carries(recipe) == "yes",
        "attach": carries(recipe),
    }


def _cells(recipe: Recipe) -> list[str]:
    plain = _parts(Recipe())
    own = [f"{family} {member}" for family, member in _parts(recipe).items() if member != plain[family]]
    return [recipe.name, recipe.summary, ", ".join(own) or "the plain ones", carries(recipe)]
