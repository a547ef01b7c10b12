"""Text form of parts: ``name`` or ``name(option=value, ...)``, such as ``topk(density=0.01)``.

A name is in a registry, or it is ``module:name``, which is imported, also from the current folder:
``my_package.my_module:MyCodec(density=0.01)``. Options may be parts themselves. The outermost name may have hyphens
instead of underscores: ``by-order`` is ``by_order``.
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
    "format_options",
    "format_spec",
    "import_object",
    "is_buildable",
    "parse",
    "parse_name",
    "select_accepted",
    "unparse",
]

T = TypeVar("T")

_COLON_MARK = ".__imported__."
"""Replacement of the colon while Python's grammar parses a text."""
_MAX_SHOWN = 200
"""Largest number of characters of an invalid text in a message."""
_QUOTED_OR_IMPORTED = re.compile(r"""('[^']*'|"[^"]*")|([A-Za-z_][\w.]*):([A-Za-z_][\w.]*)""")


class Registry(UserDict[str, Callable[..., T]], Generic[T]):
    """Factories of a family's components by name, imported on first use.

    Args:
      package: Package that the factories are imported from.
      entries: Factory, or its name in the package, for each component.

    >>> Registry("fractions", {"share": "Fraction"})["share"](1, 2)
    Fraction(1, 2)
    """

    def __init__(self, package: str, entries: Mapping[str, str | Callable[..., T]]) -> None:
        super().__init__()
        self.data: dict[str, Any] = {
            name: (package, entry) if isinstance(entry, str) else entry for name, entry in entries.items()
        }

    @override
    def __getitem__(self, name: str) -> Callable[..., T]:
        entry: Any = self.data[name]
        return getattr(importlib.import_module(entry[0]), entry[1]) if isinstance(entry, tuple) else entry  # type: ignore[no-any-return]

    @override
    def __or__(self, other: Registry[Any]) -> Registry[Any]:  # type: ignore[override]
        union: Registry[Any] = Registry("", {})
        union.data = self.data | other.data
        return union

    def find_name(self, factory: Callable[..., object]) -> str | None:
        """Returns the name of a factory, or None if it is not an entry; imports no other entry."""
        qualname = getattr(factory, "__qualname__", "")
        return next(
            (
                name
                for name, entry in self.data.items()
                if entry is factory
                or (isinstance(entry, tuple) and entry[1] == qualname and self[name] is factory)
            ),
            None,
        )


def build(
    kind: str,
    text: str,
    registry: Mapping[str, Callable[..., T]],
    settings: Mapping[str, object] | None = None,
) -> T:
    """Builds the part that a text describes; its options may be parts too.

    Args:
      kind: Name of the family for messages.
      text: Text form, for example ``"synchronous"`` or ``"error_feedback(topk(density=0.01))"``.
      registry: Factories of the family.
      settings: Options of the outermost part that are separate settings and not allowed in the text. An imported part
        gets those that it accepts.

    Raises:
      UnknownName: The registry does not have the name.
      ConfigError: The text is malformed, has an option that the part does not accept, or cannot be imported.
    """
    return _make(kind, text, parse(kind, text), registry, settings or {})


def parse_name(kind: str, text: str) -> str:
    """Returns the name of the outermost part in a text.

    Raises:
      ConfigError: The text is malformed.
    """
    return _parse_component_name(kind, text, parse(kind, text))


def parse(kind: str, text: str) -> ast.expr:
    """Parses a text to an expression.

    Raises:
      ConfigError: The text is malformed.
    """
    plain = re.sub(r"^\s*[\w-]+", lambda name: name[0].strip().replace("-", "_"), text)
    marked_text = _QUOTED_OR_IMPORTED.sub(lambda m: m[1] or f"{m[2]}{_COLON_MARK}{m[3]}", plain)
    try:
        return ast.parse(marked_text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        shown = text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"
        raise ConfigError(f"{kind} {shown!r}: write it as name or name(option=value)") from None


def unparse(node: ast.expr) -> str:
    """Returns the text of an expression of :func:`parse`, or of a subexpression."""
    return ast.unparse(node).replace(_COLON_MARK, ":")


def import_object(kind: str, name: str) -> object:
    """Imports the object ``module:name``, also from modules in the current folder.

    Raises:
      ConfigError: The module or the object does not exist.
    """
    module, _, path = name.partition(":")
    folder = str(Path.cwd())
    if not {"", folder} & {*sys.path}:
        sys.path.append(folder)  # as python -m does
    try:
        return functools.reduce(getattr, path.split("."), importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{kind} {name!r}: cannot be imported ({error})") from None


def format_spec(part: object, registry: Mapping[str, Callable[..., object]] | None = None) -> str:
    """Returns the text from which :func:`build` builds a component, or a description in ``<>`` if it has none.

    Classes, functions, their ``functools.partial`` and dataclasses have a text if their names can be imported and their
    options are literals or such parts. Descriptions in ``<>`` are only useful for comparison.

    Args:
      part: Part, or its text, which is returned unchanged.
      registry: Factories of the family, whose names the text uses.

    >>> from fractions import Fraction
    >>> format_spec("topk(density=0.1)"), format_spec(Fraction), format_spec(Fraction(1, 2))
    ('topk(density=0.1)', 'fractions:Fraction', '<Fraction(1, 2)>')
    """
    if isinstance(part, str):
        return part
    try:
        return _format_value(
            part, registry if isinstance(registry, Registry) else Registry("", registry or {})
        )
    except _NotFormattable:
        return f"<{re.sub(r' at 0x[0-9a-f]+', '', repr(part)).removeprefix('<').removesuffix('>')}>"


def is_buildable(text: str) -> bool:
    """Returns True if another process can build the part from its text by :func:`format_spec`."""
    return not text.startswith("<")


class _NotFormattable(Exception):
    """Signal that a part has no text."""


def _format_value(value: object, names: Registry[object]) -> str:
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, tuple | list):
        entries = ", ".join(_format_value(entry, names) for entry in value)
        return f"[{entries}]" if isinstance(value, list) else f"({entries}{',' if len(value) == 1 else ''})"
    if isinstance(value, type) or inspect.isfunction(value):
        return _format_name(value, names)
    if isinstance(value, functools.partial):
        options = [_format_value(argument, names) for argument in value.args]
        options += [f"{name}={_format_value(argument, names)}" for name, argument in value.keywords.items()]
        return f"{_format_name(value.func, names)}({', '.join(options)})"
    if not dataclasses.is_dataclass(value):
        raise _NotFormattable
    options = [
        f"{field.name}={_format_value(option, names)}"
        for field in dataclasses.fields(value)
        if field.init
        and (option := getattr(value, field.name))
        != (field.default if field.default_factory is dataclasses.MISSING else field.default_factory())
    ]
    type_name = _format_name(type(value), names)
    return f"{type_name}({', '.join(options)})" if options else type_name


def _format_name(factory: Callable[..., object], names: Registry[object]) -> str:
    if (name := names.find_name(factory)) is not None:
        return name
    module, path = getattr(factory, "__module__", "__main__"), getattr(factory, "__qualname__", "<")
    if module == "__main__" or "<" in path:
        raise _NotFormattable
    return f"{module}:{path}"


def _parse_component_name(kind: str, text: str, node: ast.expr) -> str:
    target = node.func if isinstance(node, ast.Call) else node
    name = unparse(target)
    if not (isinstance(target, ast.Name) or (isinstance(target, ast.Attribute) and ":" in name)):
        raise ConfigError(f"{kind} {text!r}: write it as name or name(option=value)")
    return name


def _make(
    kind: str,
    text: str,
    node: ast.expr,
    registry: Mapping[str, Callable[..., T]],
    settings: Mapping[str, object],
) -> T:
    call = node if isinstance(node, ast.Call) else None
    name = _parse_component_name(kind, text, node)
    positional = [_parse_value(kind, text, value, registry) for value in (call.args if call else ())]
    options: dict[str, object] = {}
    for keyword in call.keywords if call else ():
        if keyword.arg is None:
            raise ConfigError(f"{kind} {text!r}: write it as name or name(option=value)")
        if keyword.arg in settings and ":" not in name:
            raise ConfigError(f"{kind} {text!r}: {keyword.arg} is a setting of its own, not an option here")
        options[keyword.arg] = _parse_value(kind, text, keyword.value, registry)
    if ":" in name:
        target = import_object(kind, name)
        if call is None and not (isinstance(target, type) or inspect.isroutine(target)):
            return target  # type: ignore[return-value]
        factory: Callable[..., T] = target  # type: ignore[assignment]
        settings = select_accepted(factory, settings)
    elif name in registry:
        factory = registry[name]
    else:
        raise UnknownName(kind, name, registry)
    try:
        return factory(*positional, **{**settings, **options})
    except TypeError as error:
        reason = str(error).rpartition("__init__() ")[2] or str(error)
        reason = reason.partition(". Did you mean ")[0]  # Python's own hint, from 3.13 on
        raise ConfigError(f"{kind} {text!r}: {reason}; {_suggest_options(name, factory, options)}") from None


def format_options(factory: Callable[..., object]) -> str:
    """Formats the options of a component with literal defaults; empty if it has no signature.

    >>> format_options(lambda codec, density=0.01: None)
    'codec, density=0.01'
    """
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return ""
    literal = (bool, int, float, str)
    return ", ".join(
        f"{p.name}={p.default!r}" if isinstance(p.default, literal) else f"{p}".partition(":")[0]
        for p in parameters
    )


def _suggest_options(name: str, factory: Callable[..., object], options: Iterable[str]) -> str:
    """Describes the options that a component accepts, for an error message."""
    accepted_options = format_options(factory)
    names = [option.partition("=")[0] for option in accepted_options.split(", ")]
    close = [match for name in options if name not in names for match in get_close_matches(name, names, n=1)]
    return f"{f'did you mean {close[0]}? ' if close else ''}{name} takes {accepted_options or 'no options'}"


def select_accepted(factory: Callable[..., object], options: Mapping[str, object]) -> dict[str, object]:
    """Selects the options that a component accepts."""
    return {name: value for name, value in options.items() if name in inspect.signature(factory).parameters}


def _parse_value(kind: str, text: str, node: ast.expr, registry: Mapping[str, Callable[..., T]]) -> object:
    try:
        value: object = ast.literal_eval(node)
    except (ValueError, SyntaxError, TypeError):
        return _make(kind, text, node, registry, {})
    return value
