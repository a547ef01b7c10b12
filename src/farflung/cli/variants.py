"""Recipes with changes, as text: ``synchronous(codec=topk(density=0.01), learning_rate=0.02)``."""

from __future__ import annotations

import ast

from farflung.cli.run import PARTS
from farflung.config import Training
from farflung.errors import ConfigError
from farflung.types import Json

__all__ = ["variant"]


def variant(text: str) -> dict[str, Json]:
    """The settings that a recipe with changes stands for; whether its values are good is found out later.

    >>> variant("synchronous(codec=topk(density=0.01), learning_rate=0.02)")
    {'recipe': 'synchronous', 'codec': 'topk(density=0.01)', 'learning_rate': 0.02}

    Raises:
      ConfigError: not of this form, or a setting that a recipe cannot change.
    """
    known = (*PARTS, *Training.__dataclass_fields__)
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        raise ConfigError(_form(text)) from None
    named = tree.func if isinstance(tree, ast.Call) else tree
    if not isinstance(named, ast.Name) or (isinstance(tree, ast.Call) and tree.args):
        raise ConfigError(_form(text))
    settings: dict[str, Json] = {"recipe": named.id}
    for keyword in tree.keywords if isinstance(tree, ast.Call) else ():
        if keyword.arg not in known or keyword.arg == "seed":
            allowed = ", ".join(sorted(set(known) - {"seed"}))
            raise ConfigError(f"recipe {text!r}: cannot change {keyword.arg!r}; it can change: {allowed}")
        settings[keyword.arg] = _value(text, keyword.arg, keyword.value)
    return settings


def _value(text: str, name: str, node: ast.expr) -> Json:
    """Text for a part of a recipe, else the number or text that is there."""
    kind = str(Training.__dataclass_fields__[name].type) if name in Training.__dataclass_fields__ else "str"
    kind = "int" if name == "bucket_nbytes" else kind.partition(" ")[0]
    if kind == "str" and not isinstance(node, ast.Constant):
        return ast.unparse(node)
    value = node.value if isinstance(node, ast.Constant) else None
    if isinstance(value, int) and not isinstance(value, bool) and kind == "float":
        return float(value)
    if type(value).__name__ == kind and isinstance(value, int | float | str):
        return value
    raise ConfigError(f"recipe {text!r}: {name} = {ast.unparse(node)}: must be of type {kind}")


def _form(text: str) -> str:
    return f"recipe {text!r}: write it as name or name(setting=value), as in synchronous(codec=int8)"
