"""Recipes with changes, as text: ``synchronous(codec=topk(density=0.01), learning_rate=0.02)``."""

from __future__ import annotations

import ast

from farflung.config import Training
from farflung.errors import ConfigError
from farflung.recipes import Recipe
from farflung.runs.settings import settings_of
from farflung.spec import parse, unparse
from farflung.types import Json

__all__ = ["variant"]


def variant(text: str) -> dict[str, Json]:
    """The settings that a recipe with changes stands for; whether its values are good is found out later.

    >>> variant("synchronous(codec=topk(density=0.01), learning_rate=0.02)")
    {'recipe': 'synchronous', 'codec': 'topk(density=0.01)', 'learning_rate': 0.02}

    Raises:
      ConfigError: not of this form, or a setting that a recipe cannot change.
    """
    kinds = {name: setting.kind for name, setting in settings_of(Training).items() if name != "seed"}
    kinds |= {
        name: setting.kind for name, setting in settings_of(Recipe).items() if name in Recipe().settings
    }
    try:
        tree = parse("recipe", text)
    except ConfigError:
        raise ConfigError(_form(text)) from None
    named = tree.func if isinstance(tree, ast.Call) else tree
    if not isinstance(named, ast.Name) or (isinstance(tree, ast.Call) and tree.args):
        raise ConfigError(_form(text))
    settings: dict[str, Json] = {"recipe": named.id}
    for keyword in tree.keywords if isinstance(tree, ast.Call) else ():
        if keyword.arg not in kinds:
            raise ConfigError(
                f"recipe {text!r}: cannot change {keyword.arg!r}; it can change: {', '.join(sorted(kinds))}"
            )
        settings[keyword.arg] = _value(text, keyword.arg, keyword.value, kinds[keyword.arg])
    return settings


def _value(text: str, name: str, node: ast.expr, kind: type) -> Json:
    """Text for what may be a part, else the number or text that is there."""
    if kind is str and not isinstance(node, ast.Constant):
        return unparse(node)
    value = node.value if isinstance(node, ast.Constant) else None
    if type(value) is int and kind is float:
        return float(value)
    if type(value) is kind and isinstance(value, int | float | str):
        return value
    raise ConfigError(f"recipe {text!r}: {name} = {unparse(node)}: must be of type {kind.__name__}")


def _form(text: str) -> str:
    return f"recipe {text!r}: write it as name or name(setting=value), as in synchronous(codec=int8)"
