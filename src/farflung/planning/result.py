"""Plan of a training: the recipe that reaches a target first on a network, and in what time."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from typing_extensions import override

from farflung.attach_checks import describe_attach_support
from farflung.errors import DataError, MissingExtra
from farflung.files import parse_json, read_text, wrap_read_errors
from farflung.planning.choice import NUM_TENTHS, PlanRow
from farflung.planning.table import render_plan_table
from farflung.planning.timing import Pace
from farflung.recipes import Recipe, parse_recipe
from farflung.report import render_lines, render_text
from farflung.runs.config import parse_variant
from farflung.types import Json

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Plan", "explain_refusal", "parse_components"]

SIMILAR = 1.1
"""Ratio of times up to which the simulator cannot say which recipe is faster."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Recipe that reaches a target first, printed as a table, or as lines if rich is not installed.

    What a recorded script learns is not known: its recipes are only timed, and none is chosen.

    Args:
      rows: Figures of each recipe, the fastest first; those that were not timed last.
      choice: Row of the recipe to take; ``None`` for a script.
      reference: Recipe whose score at the end is the target, less the tolerance.
      tolerance: Tolerance of the score.
      steps: Steps of the training.
      pilots: Steps of all pilots over those of the training.
      settings: Settings of the training that are not defaults.
      is_accuracy: True if scores are shares of right answers.
    """

    rows: Sequence[PlanRow]
    choice: PlanRow | None
    reference: str
    tolerance: float
    steps: int
    pilots: float
    settings: Mapping[str, Json]
    is_accuracy: bool

    @property
    def command(self) -> str:
        """Command that trains with the chosen recipe; empty without a choice."""
        if self.choice is None:
            return ""
        options = {**self.settings, "recipe": self.choice.recipe, "steps": self.steps}
        words = ["farflung train"]
        for name, value in options.items():
            words.append(
                f"--{name.replace('_', '-')}" + ("" if value is True else f" {shlex.quote(str(value))}")
            )
        return " ".join(words)

    @property
    def attach_line(self) -> str:
        """Line that trains with the chosen recipe in a loop of one's own; empty if there is none."""
        if self.choice is None:
            return ""
        recipe, changes = parse_components(self.choice.recipe)
        if explain_refusal(recipe, "attach"):
            return ""
        text = recipe.text if changes else self.choice.recipe
        note = f"  # with optimizer {changes['optimizer']}" if "optimizer" in changes else ""
        return f'farflung.attach(model, optimizer, "{text}"){note}'

    @property
    def similar(self) -> list[PlanRow]:
        """Other recipes that may be as fast as the chosen one, as far as the simulator can say."""
        best_s = SIMILAR * (self.choice.high_s or 0.0) if self.choice else 0.0
        return [row for row in self.rows if row is not self.choice and row.high_s and row.high_s <= best_s]

    def to_json(self) -> dict[str, Json]:
        """Returns the plan as JSON."""
        return {
            "choice": self.choice.recipe if self.choice else None,
            "command": self.command,
            "attach": self.attach_line,
            "reference": self.reference,
            "tolerance": self.tolerance,
            "steps": self.steps,
            "pilots": self.pilots,
            "settings": dict(self.settings),
            "is_accuracy": self.is_accuracy,
            "rows": [{**asdict(row), "uncharged": [*row.uncharged]} for row in self.rows],
        }

    def build_table(self) -> Table:
        """Builds the table of the recipes, with advice below."""
        return render_plan_table(self)

    @classmethod
    def load(cls, path: Path) -> Plan:
        """Loads the plan that ``farflung plan`` has written.

        Raises:
          BadInput: The file has no plan.
        """
        with wrap_read_errors(path, "not a plan of farflung plan", DataError):
            content: Any = parse_json(read_text(path))
            rows = [
                PlanRow(**{**row, "pace": Pace(**row["pace"]) if row["pace"] else None})
                for row in content["rows"]
            ]
            for row in rows:
                _check_types(row)
                parse_components(row.recipe)
                if row.pace is not None:
                    _check_types(row.pace)
                    if not (row.pace.first_ends_s and row.pace.ends_s):
                        raise ValueError(f"{row.recipe}: its block has no steps")
                if len(row.loss_bounds) not in (0, NUM_TENTHS):
                    raise ValueError(f"{row.recipe}: {len(row.loss_bounds)} loss_bounds, not {NUM_TENTHS}")
            choice = next((row for row in rows if row.recipe == content["choice"]), None)
            names = ("reference", "tolerance", "steps", "pilots", "settings", "is_accuracy")
            plan = cls(rows, choice, **{name: content[name] for name in names})
            _check_types(plan)
            return plan

    @override
    def __str__(self) -> str:
        try:
            return render_text(self.build_table())
        except MissingExtra:
            return "\n\n".join(render_lines(asdict(row)) for row in self.rows)


def _check_types(part: Any) -> None:
    """Checks the values of a dataclass that was read from JSON against its annotations.

    Raises:
      TypeError: A value is of another type.
    """
    for name, kind in get_type_hints(type(part)).items():
        if not _is_of_type(getattr(part, name), kind):
            raise TypeError(f"{name} is {getattr(part, name)!r}")


def _is_of_type(value: object, kind: Any) -> bool:
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(_is_of_type(value, arg) for arg in args)
    if origin is Literal:
        return value in args
    if origin is Sequence:
        return isinstance(value, list | tuple) and all(_is_of_type(entry, args[0]) for entry in value)
    if kind in (int, float):
        return isinstance(value, int | kind) and not isinstance(value, bool)
    return isinstance(value, origin or kind)


def parse_components(text: str) -> tuple[Recipe, dict[str, Json]]:
    """Parses a recipe with changes into the recipe, and those of its changes that are settings of the training."""
    changes = parse_variant(text)
    components = {name: changes.pop(name) for name in Recipe().settings if name in changes}
    return parse_recipe(str(changes.pop("recipe"))).with_components(**components), changes


def explain_refusal(recipe: Recipe, loop: str, data_stays: bool = False) -> str:
    """Returns why a loop cannot follow a recipe; empty if it can."""
    support, parts = describe_attach_support(recipe), recipe.build_components(0)
    if loop != "train" and support != "yes":
        return f"{loop} cannot follow it: {support.removeprefix('no: ')}"
    if loop == "ddp_hook" and not parts.schedule.is_synchronous:
        return "ddp_hook takes codecs and reducers of synchronous recipes"
    if data_stays and (parts.sharing.has_data_transfers or parts.sampler.is_balanced):
        return "it needs samples of other replicas, and data stays"
    return ""
