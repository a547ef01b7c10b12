"""Builds the members of a recipe's families from its text and objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from farflung.codecs import CODECS
from farflung.comm import COLLECTIVES, collective_named
from farflung.data import SHARINGS, STREAMS
from farflung.errors import ConfigError
from farflung.loop import Parts
from farflung.options import whole_option
from farflung.rates import SCALINGS
from farflung.recipes.recipe import Recipe
from farflung.reducers import REDUCERS
from farflung.sampling import SAMPLERS
from farflung.schedules import SCHEDULES
from farflung.seeding import derive
from farflung.spec import build, name_of, taken, text_of
from farflung.types import BALANCED, Reducer, Sampler, Schedule, Sharing, Stream

__all__ = ["MEMBERS", "parts_of"]

MEMBERS: dict[str, Mapping[str, Any]] = {
    "codec": CODECS,
    "reducer": REDUCERS,
    "collective": COLLECTIVES,
    "schedule": SCHEDULES,
    "sampler": SAMPLERS,
    "stream": STREAMS,
    "sharing": SHARINGS,
    "scaling": SCALINGS,
}
"""Registered members of each family, by name."""
_BASES: dict[str, type] = {
    "reducer": Reducer,
    "sampler": Sampler,
    "schedule": Schedule,
    "sharing": Sharing,
    "stream": Stream,
}
"""Base class of a family's members."""
_METHODS = {"codec": "encode", "scaling": "factor"}
"""Method required of members of the other families."""


def parts_of(recipe: Recipe, seed: int, share: int | None) -> Parts:
    """Builds the members of a recipe; see :meth:`Recipe.build_components`."""
    is_native = collective_named(recipe.collective).by_backend
    whole_option(f"recipe {recipe.name}", "bucket_nbytes", recipe.bucket_nbytes, 1)
    stream: Stream = _made("stream", recipe.stream, STREAMS, fresh=True)
    if is_native and not stream.everything:
        raise ConfigError(
            f"stream {text_of(recipe.stream, STREAMS)}: the backend's own collectives (--collective "
            f"{recipe.collective}) count waits for samples against their deadline: choose another collective"
        )
    schedule: Schedule = _made("schedule", recipe.schedule, SCHEDULES)
    sampler_seed = derive(seed, "sampler", *([] if share is None else [share]))
    sampler: Sampler = _made("sampler", recipe.sampler, SAMPLERS, {"seed": sampler_seed}, fresh=True)
    if share is not None and sampler.is_balanced:
        raise ConfigError(f"{BALANCED}: all replicas draw from the whole set: leave out --partition")
    return Parts(
        reducer=_reducer(recipe),
        schedule=schedule,
        sampler=sampler,
        stream=stream,
        sharing=_made("sharing", recipe.sharing, SHARINGS, {"seed": derive(seed, "sharing")}, fresh=True),
        scaling=_made("scaling", recipe.scaling, SCALINGS),
        bucket_nbytes=recipe.bucket_nbytes,
    )


def _reducer(recipe: Recipe) -> Reducer:
    is_codec = name_of("reducer", recipe.reducer) == "codec" if isinstance(recipe.reducer, str) else False
    options: dict[str, object] = {"collective": recipe.collective}
    if is_codec:
        options["codec"] = _made("codec", recipe.codec, CODECS)
    reducer: Reducer = _made("reducer", recipe.reducer, REDUCERS, options)
    if not is_codec and recipe.codec != "identity":
        spec = recipe.reducer
        reducer_kind = name_of("reducer", spec) if isinstance(spec, str) else type(spec).__name__
        raise ConfigError(
            f"reducer {reducer_kind} takes no codec: leave out one of --reducer and --codec "
            f"{text_of(recipe.codec, CODECS)}"
        )
    return reducer


def _made(
    kind: str,
    member: object,
    registry: Mapping[str, Callable[..., Any]],
    given: Mapping[str, object] | None = None,
    *,
    fresh: bool = False,
) -> Any:
    """Returns the member named by text, created by a class or function, or passed as an object.

    Args:
      kind: Family.
      member: Member as text, class, function or object.
      registry: Members of the family by name.
      options: Options with settings of their own.
      needs_fresh: True if each replica needs its own member, so that an object is rejected.
    """
    if isinstance(member, str):
        instance = build(kind, member, registry, given)
    elif isinstance(member, type) or not _is_member(kind, member):
        if not callable(member):
            raise ConfigError(f"{kind} {member!r}: {_lack(kind)}")
        instance = member(**taken(member, given or {}))
    elif fresh:
        raise ConfigError(
            f"{kind} {member!r}: each replica needs its own; give the class or a function that makes one"
        )
    else:
        instance = member
    if not _is_member(kind, instance):
        raise ConfigError(f"{kind} {instance!r}: {_lack(kind)}")
    return instance


def _is_member(kind: str, one: object) -> bool:
    return isinstance(one, _BASES[kind]) if kind in _BASES else hasattr(one, _METHODS[kind])


def _lack(kind: str) -> str:
    """Explains why an object is no member of a family."""
    if kind in _BASES:
        return f"its class has to derive from farflung.types.{_BASES[kind].__name__}"
    return f"it has no method {_METHODS[kind]}(); see farflung.types.{kind.title()}"
