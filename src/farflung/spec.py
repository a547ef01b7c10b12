"""Parts as text: ``name`` or ``name(option=value, ...)``, as in ``topk(density=0.01)``; and objects as such text.

A name is one of a registry, or ``module:name``, which is imported, from the current folder too:
``my_package.my_module:MyCodec(density=0.01)``. Parts may be options of others. The outermost name of a registry may be
written with hyphens: ``by-order`` is ``by_order``.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import re
import sys
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Generic, TypeVar

from typing_extensions import override

from farflung.errors import ConfigError, UnknownName

__all__ = [
    "Registry",
    "build",
    "imported",
    "is_carried",
    "name_of",
    "options_of",
    "parse",
    "taken",
    "text_of",
    "unparse",
]

T = TypeVar("T")

_MARK = ".__imported__."
"""Stands for the colon while Python's own grammar reads a text."""
_SHOWN = 200
"""Characters of a text that cannot be read."""
_QUOTED_OR_IMPORTED = re.compile(r"""('[^']*'|"[^"]*")|([A-Za-z_][\w.]*):([A-Za-z_][\w.]*)""")


class Registry(UserDict[str, Callable[..., T]], Generic[T]):
    """What makes the members of a family, by name.

    Args:
      package: it is imported from, once it is used.
      members: its name in the package, or itself.

    >>> Registry("fractions", {"share": "Fraction"})["share"](1, 2)
    Fraction(1, 2)
    """

    def __init__(self, package: str, members: Mapping[str, str | Callable[..., T]]) -> None:
        super().__init__()
        self.data: dict[str, Any] = {
            name: (package, member) if isinstance(member, str) else member for name, member in members.items()
        }

    @override
    def __getitem__(self, name: str) -> Callable[..., T]:
        member: Any = self.data[name]
        return getattr(importlib.import_module(member[0]), member[1]) if isinstance(member, tuple) else member  # type: ignore[no-any-return]

    @override
    def __or__(self, other: Registry[Any]) -> Registry[Any]:  # type: ignore[override]
        both: Registry[Any] = Registry("", {})
        both.data = self.data | other.data
        return both

    def name_of(self, made: Callable[..., object]) -> str | None:
        """The name of a member; ``None``: it is none. No other member is imported for it."""
        called = getattr(made, "__qualname__", "")
        return next(
            (
                name
                for name, member in self.data.items()
                if member is made
                or (isinstance(member, tuple) and member[1] == called and self[name] is made)
            ),
            None,
        )


def build(
    kind: str, text: str, registry: Mapping[str, Callable[..., T]], given: Mapping[str, object] | None = None
) -> T:
    """The member that ``text`` names, with its options; members may be options of others.

    Args:
      kind: the family, for messages.
      text: for example ``"synchronous"`` or ``"error_feedback(topk(density=0.01))"``.
      registry: the family's members.
      given: options of the outermost member that have settings of their own, and no place in the text; one that is
        imported gets those that it takes.

    Raises:
      UnknownName: no such member.
      ConfigError: not of this form, an option that the member does not take, or nothing to be imported there.
    """
    return _make(kind, text, parse(kind, text), registry, given or {})


def name_of(kind: str, text: str) -> str:
    """The name of the outermost member in ``text``.

    Raises:
      ConfigError: not of the form that :func:`build` reads.
    """
    return _named(kind, text, parse(kind, text))


def parse(kind: str, text: str) -> ast.expr:
    """The expression that ``text`` is, for :func:`unparse` and for other readers.

    Raises:
      ConfigError: it is none.
    """
    plain = re.sub(r"^\s*[\w-]+", lambda name: name[0].strip().replace("-", "_"), text)
    marked = _QUOTED_OR_IMPORTED.sub(lambda m: m[1] or f"{m[2]}{_MARK}{m[3]}", plain)
    try:
        return ast.parse(marked.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
        raise ConfigError(f"{kind} {shown!r}: write it as name or name(option=value)") from None


def unparse(node: ast.expr) -> str:
    """The text of an expression, or of a part of one, from :func:`parse`."""
    return ast.unparse(node).replace(_MARK, ":")


def imported(kind: str, name: str) -> object:
    """What ``module:name`` names; modules of the current folder are found as well.

    Raises:
      ConfigError: there is no such module, or nothing of that name in it.
    """
    module, _, path = name.partition(":")
    here = str(Path.cwd())
    if not {"", here} & {*sys.path}:
        sys.path.append(here)  # as python -m has it
    try:
        return functools.reduce(getattr, path.split("."), importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{kind} {name!r}: cannot be imported ({error})") from None


def text_of(part: object, registry: Mapping[str, Callable[..., object]] | None = None) -> str:
    """The text that :func:`build` would make ``part`` from, or, in ``<>``, words for a part that has none.

    A class, a function, a ``functools.partial`` of one and a dataclass have a text where their names can be imported
    and their options are literals or such parts themselves. The text of anything else is good for comparing it alone.

    Args:
      part: a member, or the text of one, which is given back.
      registry: the family's members, called by their names there.

    >>> from fractions import Fraction
    >>> text_of("topk(density=0.1)"), text_of(Fraction), text_of(Fraction(1, 2))
    ('topk(density=0.1)', 'fractions:Fraction', '<Fraction(1, 2)>')
    """
    if isinstance(part, str):
        return part
    try:
        return _text(part, registry if isinstance(registry, Registry) else Registry("", registry or {}))
    except _NoText:
        return f"<{re.sub(r' at 0x[0-9a-f]+', '', repr(part)).removeprefix('<').removesuffix('>')}>"


def is_carried(text: str) -> bool:
    """Whether another process can make the part that :func:`text_of` gave this text."""
    return not text.startswith("<")


class _NoText(Exception):
    """There is no text for it."""


def _text(value: object, names: Registry[object]) -> str:
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, tuple | list):
        inside = ", ".join(_text(one, names) for one in value)
        return f"[{inside}]" if isinstance(value, list) else f"({inside}{',' if len(value) == 1 else ''})"
    if isinstance(value, type) or inspect.isfunction(value):
        return _name(value, names)
    if isinstance(value, functools.partial):
        options = [_text(one, names) for one in value.args]
        options += [f"{name}={_text(one, names)}" for name, one in value.keywords.items()]
        return f"{_name(value.func, names)}({', '.join(options)})"
    if not dataclasses.is_dataclass(value):
        raise _NoText
    options = [
        f"{field.name}={_text(given, names)}"
        for field in dataclasses.fields(value)
        if field.init
        and (given := getattr(value, field.name))
        != (field.default if field.default_factory is dataclasses.MISSING else field.default_factory())
    ]
    made = _name(type(value), names)
    return f"{made}({', '.join(options)})" if options else made


def _name(made: Callable[..., object], names: Registry[object]) -> str:
    if (name := names.name_of(made)) is not None:
        return name
    module, path = getattr(made, "__module__", "__main__"), getattr(made, "__qualname__", "<")
    if module == "__main__" or "<" in path:
        raise _NoText
    return f"{module}:{path}"


def _named(kind: str, text: str, node: ast.expr) -> str:
    named = node.func if isinstance(node, ast.Call) else node
    name = unparse(named)
    if not (isinstance(named, ast.Name) or (isinstance(named, ast.Attribute) and ":" in name)):
        raise ConfigError(f"{kind} {text!r}: write it as name or name(option=value)")
    return name


def _make(
    kind: str,
    text: str,
    node: ast.expr,
    registry: Mapping[str, Callable[..., T]],
    given: Mapping[str, object],
) -> T:
    call = node if isinstance(node, ast.Call) else None
    name = _named(kind, text, node)
    positional = [_value(kind, text, value, registry) for value in (call.args if call else ())]
    options: dict[str, object] = {}
    for keyword in call.keywords if call else ():
        if keyword.arg is None:
            raise ConfigError(f"{kind} {text!r}: write it as name or name(option=value)")
        if keyword.arg in given and ":" not in name:
            raise ConfigError(f"{kind} {text!r}: {keyword.arg} is a setting of its own, not an option here")
        options[keyword.arg] = _value(kind, text, keyword.value, registry)
    if ":" in name:
        found = imported(kind, name)
        if call is None and not (isinstance(found, type) or inspect.isroutine(found)):
            return found  # type: ignore[return-value]
        member: Callable[..., T] = found  # type: ignore[assignment]
        given = taken(member, given)
    elif name in registry:
        member = registry[name]
    else:
        raise UnknownName(kind, name, registry)
    try:
        return member(*positional, **{**given, **options})
    except TypeError as error:
        reason = str(error).rpartition("__init__() ")[2] or str(error)
        reason = reason.partition(". Did you mean ")[0]  # Python's own hint, from 3.13 on
        raise ConfigError(f"{kind} {text!r}: {reason}; {_instead(name, member, options)}") from None


def options_of(member: Callable[..., object]) -> str:
    """The options that a member takes, with their defaults where these are literals; empty where it does not say.

    >>> options_of(lambda codec, density=0.01: None)
    'codec, density=0.01'
    """
    try:
        known = inspect.signature(member).parameters.values()
    except (TypeError, ValueError):
        return ""
    literal = (bool, int, float, str)
    return ", ".join(
        f"{one.name}={one.default!r}" if isinstance(one.default, literal) else f"{one}".partition(":")[0]
        for one in known
    )


def _instead(name: str, member: Callable[..., object], given: Iterable[str]) -> str:
    """Describes the values that a member accepts, for an error message."""
    takes = options_of(member)
    known = [option.partition("=")[0] for option in takes.split(", ")]
    close = [near for one in given if one not in known for near in get_close_matches(one, known, n=1)]
    return f"{f'did you mean {close[0]}? ' if close else ''}{name} takes {takes or 'no options'}"


def taken(member: Callable[..., object], given: Mapping[str, object]) -> dict[str, object]:
    """Those of the options ``given`` that a member takes."""
    return {name: value for name, value in given.items() if name in inspect.signature(member).parameters}


def _value(kind: str, text: str, node: ast.expr, registry: Mapping[str, Callable[..., T]]) -> object:
    try:
        value: object = ast.literal_eval(node)
    except (ValueError, SyntaxError):
        return _make(kind, text, node, registry, {})
    return value
