"""What a recipe's text and objects are made into: fresh members of each family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from farflung.codecs import CODECS
from farflung.comm import COLLECTIVES, collective_named
from farflung.data import SHARINGS, STREAMS
from farflung.errors import ConfigError
from farflung.options import whole_option
from farflung.rates import SCALINGS
from farflung.recipes.recipe import Recipe
from farflung.reducers import REDUCERS
from farflung.replica import Parts
from farflung.sampling import SAMPLERS
from farflung.schedules import SCHEDULES
from farflung.seeding import derive
from farflung.spec import build, name_of, taken, text_of
from farflung.types import BALANCED, Reducer, Sampler, Schedule, SharesOut, Stream

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
"""The families that a recipe takes a member of, and what can be had of each by name."""
_BASES: dict[str, type] = {"schedule": Schedule, "reducer": Reducer}
"""What members derive from."""


def parts_of(recipe: Recipe, seed: int, share: int | None) -> Parts:
    """Makes the members of a recipe; see :meth:`Recipe.parts`."""
    by_backend = collective_named(recipe.collective).by_backend
    whole_option(f"recipe {recipe.name}", "bucket_nbytes", recipe.bucket_nbytes, 1)
    stream: Stream = _made("stream", recipe.stream, STREAMS, "poll", fresh=True)
    if by_backend and not stream.everything:
        raise ConfigError(
            f"stream {text_of(recipe.stream, STREAMS)}: the backend's own collectives (--collective "
            f"{recipe.collective}) count waits for samples against their deadline: choose another collective"
        )
    schedule: Schedule = _made("schedule", recipe.schedule, SCHEDULES, "plan")
    derived = derive(seed, "sampler", *([] if share is None else [share]))
    sampler: Sampler = _made("sampler", recipe.sampler, SAMPLERS, "next", {"seed": derived}, fresh=True)
    if share is not None and isinstance(sampler, SharesOut):
        raise ConfigError(f"{BALANCED}: all replicas draw from the whole set: leave out --partition")
    return Parts(
        reducer=_reducer(recipe),
        schedule=schedule,
        sampler=sampler,
        stream=stream,
        sharing=_made(
            "sharing",
            recipe.sharing,
            SHARINGS,
            ("exchange", "swap"),
            {"seed": derive(seed, "sharing")},
            fresh=True,
        ),
        scaling=_made("scaling", recipe.scaling, SCALINGS, "factor"),
        bucket_nbytes=recipe.bucket_nbytes,
    )


def _reducer(recipe: Recipe) -> Reducer:
    plain = name_of("reducer", recipe.reducer) == "codec" if isinstance(recipe.reducer, str) else False
    given: dict[str, object] = {"collective": recipe.collective}
    if plain:
        given["codec"] = _made("codec", recipe.codec, CODECS, "encode")
    reducer: Reducer = _made("reducer", recipe.reducer, REDUCERS, "reduce", given)
    if not plain and recipe.codec != "identity":
        raise ConfigError(
            f"reducer {_outermost(recipe.reducer)} takes no codec: leave out one of --reducer and --codec "
            f"{text_of(recipe.codec, CODECS)}"
        )
    return reducer


def _made(
    kind: str,
    member: object,
    registry: Mapping[str, Callable[..., Any]],
    has: str | tuple[str, ...],
    given: Mapping[str, object] | None = None,
    *,
    fresh: bool = False,
) -> Any:
    """The member that text names, a class or function makes, or that is there already.

    Args:
      kind: the family.
      member: of it.
      registry: its members by name.
      has: a method that all of them have; several: each has one of these.
      given: options that have settings of their own.
      fresh: whether each replica needs one of its own, so that one that is there already will not do.
    """
    methods = (has,) if isinstance(has, str) else has
    lacks = (
        f"it has no method {' or '.join(f'{name}()' for name in methods)}; see farflung.types.{kind.title()}"
    )
    if isinstance(member, str):
        made = build(kind, member, registry, given)
    elif isinstance(member, type) or not any(hasattr(member, name) for name in methods):
        if not callable(member):
            raise ConfigError(f"{kind} {member!r}: {lacks}")
        made = member(**taken(member, given or {}))
    elif fresh:
        raise ConfigError(
            f"{kind} {member!r}: each replica needs its own; give the class or a function that makes one"
        )
    else:
        made = member
    if not any(hasattr(made, name) for name in methods):
        raise ConfigError(f"{kind} {made!r}: {lacks}")
    if (base := _BASES.get(kind)) is not None and not isinstance(made, base):
        raise ConfigError(f"{kind} {made!r}: its class has to derive from farflung.types.{base.__name__}")
    return made


def _outermost(reducer: object) -> str:
    return name_of("reducer", reducer) if isinstance(reducer, str) else type(reducer).__name__
