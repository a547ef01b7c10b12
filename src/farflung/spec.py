"""Parts as text: ``name`` or ``name(option=value, ...)``, as in ``topk(density=0.01)``.

The outermost name may be written with hyphens: ``by-order`` is ``by_order``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from typing import TypeVar

from farflung.errors import ConfigError, UnknownName

__all__ = ["build", "name_of"]

T = TypeVar("T")


def build(
    kind: str, text: str, registry: Mapping[str, Callable[..., T]], given: Mapping[str, object] | None = None
) -> T:
    """The member that ``text`` names, with its options; members may be options of others.

    Args:
      kind: the family, for messages.
      text: for example ``"synchronous"`` or ``"error_feedback(topk(density=0.01))"``.
      registry: the family's members.
      given: options of the outermost member that have settings of their own, and no place in the text.

    Raises:
      UnknownName: no such member.
      ConfigError: not of this form, or an option that the member does not take.
    """
    return _make(kind, text, _parsed(kind, text), registry, given or {})


def name_of(kind: str, text: str) -> str:
    """The name of the outermost member in ``text``.

    Raises:
      ConfigError: not of the form that :func:`build` reads.
    """
    return _named(kind, text, _parsed(kind, text)).id


def _parsed(kind: str, text: str) -> ast.expr:
    try:
        plain = re.sub(r"^\s*[\w-]+", lambda name: name[0].strip().replace("-", "_"), text)
        return ast.parse(plain.strip(), mode="eval").body
    except SyntaxError:
        raise ConfigError(f"{kind} {text!r}: write it as name or name(option=value)") from None


def _named(kind: str, text: str, node: ast.expr) -> ast.Name:
    named = node.func if isinstance(node, ast.Call) else node
    if not isinstance(named, ast.Name):
        raise ConfigError(f"{kind} {text!r}: write it as name or name(option=value)")
    return named


def _make(
    kind: str,
    text: str,
    node: ast.expr,
    registry: Mapping[str, Callable[..., T]],
    given: Mapping[str, object],
) -> T:
    call = node if isinstance(node, ast.Call) else None
    named = _named(kind, text, node)
    if named.id not in registry:
        raise UnknownName(kind, named.id, registry)
    positional: list[object] = []
    options: dict[str, object] = {}
    for value in call.args if call else ():
        positional.append(_value(kind, text, value, registry))
    for keyword in call.keywords if call else ():
        if keyword.arg is None:
            raise ConfigError(f"{kind} {text!r}: write it as name or name(option=value)")
        if keyword.arg in given:
            raise ConfigError(f"{kind} {text!r}: {keyword.arg} is a setting of its own, not an option here")
        options[keyword.arg] = _value(kind, text, keyword.value, registry)
    try:
        return registry[named.id](*positional, **given, **options)
    except TypeError as error:
        reason = str(error).rpartition("__init__() ")[2] or str(error)
        raise ConfigError(f"{kind} {text!r}: {reason}") from None


def _value(kind: str, text: str, node: ast.expr, registry: Mapping[str, Callable[..., T]]) -> object:
    try:
        value: object = ast.literal_eval(node)
    except (ValueError, SyntaxError):
        return _make(kind, text, node, registry, {})
    return value
