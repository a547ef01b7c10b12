"""Parser of a recipe's changes in parentheses: other components, and options of its namesake."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Collection, Mapping

from farflung.config import Setting
from farflung.errors import ConfigError, UnknownName
from farflung.recipes.recipe import RECIPES
from farflung.spec import parse, parse_name, unparse
from farflung.types import Json

__all__ = ["parse_changes"]


def parse_changes(text: str, settings: Mapping[str, Setting]) -> tuple[str, dict[str, Json]]:
    """Parses ``name(setting=value)`` into the name and the changed settings.

    A recipe that is named after its codec, reducer or schedule accepts that component's options too. Unchanged options
    keep the preset's values.

    >>> from farflung.config import list_settings
    >>> from farflung.recipes import Recipe
    >>> parse_changes("delayed(period=8, codec=int8)", list_settings(Recipe))
    ('delayed', {'codec': 'int8', 'schedule': "delayed(delay='auto', period=8)"})

    Args:
      text: Preset with or without changes.
      settings: Settings that can change.

    Raises:
      ConfigError: the form is invalid, a setting is unknown, or a value is of another type.
    """
    name, nodes = _parse_changed_nodes(text, settings)
    changes: dict[str, Json] = {}
    for option, node in nodes.items():
        setting, words = settings[option], unparse(node)
        value = node.value if isinstance(node, ast.Constant) and words not in setting.choices else words
        changes[option] = setting.convert(value, f"recipe {text!r}: {option}")
    return name, changes


def _parse_changed_nodes(text: str, settings: Collection[str]) -> tuple[str, dict[str, ast.expr]]:
    """Parses a recipe into its name and changed settings as syntax trees; merges options of its namesake component."""
    refusal = f"recipe {text!r}: write it as name or name(setting=value), as in synchronous(codec=int8)"
    try:
        tree = parse("recipe", text)
    except ConfigError:
        raise ConfigError(refusal) from None
    call = tree if isinstance(tree, ast.Call) else ast.Call(tree, [], [])
    changes = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
    if not isinstance(call.func, ast.Name) or len(changes) < len(call.keywords):
        raise ConfigError(refusal)
    name = call.func.id
    unknown = [setting for setting in changes if setting not in settings]
    if not unknown and not call.args:
        return name, changes
    family, allowed = _find_namesake_options(name, settings)
    if len(call.args) > len(allowed):
        raise ConfigError(refusal)
    options = dict(zip(allowed, call.args, strict=False))
    for option in unknown:
        if option not in allowed:
            raise ConfigError(f"recipe {text!r}: {UnknownName('setting', option, [*settings, *allowed])}")
        if option in options:
            raise ConfigError(f"recipe {text!r}: {option} is given twice")
        options[option] = changes.pop(option)
    if family in changes:
        raise ConfigError(
            f"recipe {text!r}: {', '.join(options)}: write options of the {family} into {family}=..., or leave that out"
        )
    component = parse(family, getattr(RECIPES[name], family))
    preset_keywords = component.keywords if isinstance(component, ast.Call) else []
    merged = {keyword.arg: keyword.value for keyword in preset_keywords} | options
    keywords = [ast.keyword(option, value) for option, value in merged.items()]
    return name, {**changes, family: ast.Call(ast.Name(name), [], keywords)}


def _find_namesake_options(name: str, settings: Collection[str]) -> tuple[str, list[str]]:
    """Returns the family whose component has the preset's name, and that component's options that are not settings."""
    for family in ("codec", "reducer", "schedule") if name in RECIPES else ():
        component = getattr(RECIPES[name], family)
        if isinstance(component, str) and parse_name(family, component) == name:
            from farflung.recipes.components import REGISTRIES  # and torch, which other texts do without

            options = inspect.signature(REGISTRIES[family][name]).parameters
            return family, [option for option in options if option not in settings]
    return "", []
