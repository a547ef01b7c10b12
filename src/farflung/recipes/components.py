"""Builds the components of a recipe's families from its text and objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from farflung.codecs import CODECS
from farflung.comm import COLLECTIVES, find_collective
from farflung.data import SHARINGS, STREAMS
from farflung.errors import ConfigError
from farflung.loop import Components
from farflung.options import check_integer
from farflung.rates import SCALINGS
from farflung.recipes.recipe import Recipe
from farflung.reducers import REDUCERS
from farflung.sampling import SAMPLERS
from farflung.schedules import SCHEDULES
from farflung.seeding import derive_seed
from farflung.spec import build, format_spec, parse_name, select_accepted
from farflung.types import BALANCED_LABEL, Reducer, Sampler, Schedule, Sharing, Stream

__all__ = ["REGISTRIES", "build_components"]

REGISTRIES: dict[str, Mapping[str, Any]] = {
    "codec": CODECS,
    "reducer": REDUCERS,
    "collective": COLLECTIVES,
    "schedule": SCHEDULES,
    "sampler": SAMPLERS,
    "stream": STREAMS,
    "sharing": SHARINGS,
    "scaling": SCALINGS,
}
"""Registered components of each family, by name."""
_BASE_CLASSES: dict[str, type] = {
    "reducer": Reducer,
    "sampler": Sampler,
    "schedule": Schedule,
    "sharing": Sharing,
    "stream": Stream,
}
"""Base class of a family's components."""
_REQUIRED_METHODS = {"codec": "encode", "scaling": "compute_factor"}
"""Method required of components of the other families."""


def build_components(recipe: Recipe, seed: int, partition_index: int | None) -> Components:
    """Builds the components of a recipe; see :meth:`Recipe.build_components`."""
    is_native = find_collective(recipe.collective).is_native
    check_integer(f"recipe {recipe.name}", "bucket_nbytes", recipe.bucket_nbytes, 1)
    stream: Stream = _build_component("stream", recipe.stream, STREAMS, needs_fresh=True)
    if is_native and not stream.has_random_access:
        raise ConfigError(
            f"stream {format_spec(recipe.stream, STREAMS)}: the backend's own collectives (--collective "
            f"{recipe.collective}) count waits for samples against their deadline: choose another collective"
        )
    schedule: Schedule = _build_component("schedule", recipe.schedule, SCHEDULES)
    if is_native and schedule.has_deferred_updates:
        raise ConfigError(
            f"schedule {format_spec(recipe.schedule, SCHEDULES)}: the backend's own collectives (--collective "
            f"{recipe.collective}) send in the order of their launch: choose another collective"
        )
    sampler_seed = derive_seed(seed, "sampler", *([] if partition_index is None else [partition_index]))
    sampler: Sampler = _build_component(
        "sampler", recipe.sampler, SAMPLERS, {"seed": sampler_seed}, needs_fresh=True
    )
    if partition_index is not None and sampler.is_balanced:
        raise ConfigError(f"{BALANCED_LABEL}: all replicas draw from the whole set: leave out --partition")
    return Components(
        reducer=_build_reducer(recipe),
        schedule=schedule,
        sampler=sampler,
        stream=stream,
        sharing=_build_component(
            "sharing", recipe.sharing, SHARINGS, {"seed": derive_seed(seed, "sharing")}, needs_fresh=True
        ),
        scaling=_build_component("scaling", recipe.scaling, SCALINGS),
        bucket_nbytes=recipe.bucket_nbytes,
        settings=recipe.settings,
    )


def _build_reducer(recipe: Recipe) -> Reducer:
    is_codec = parse_name("reducer", recipe.reducer) == "codec" if isinstance(recipe.reducer, str) else False
    options: dict[str, object] = {"collective": recipe.collective}
    if is_codec:
        options["codec"] = _build_component("codec", recipe.codec, CODECS)
    reducer: Reducer = _build_component("reducer", recipe.reducer, REDUCERS, options)
    if not is_codec and recipe.codec != "identity":
        spec = recipe.reducer
        reducer_kind = parse_name("reducer", spec) if isinstance(spec, str) else type(spec).__name__
        raise ConfigError(
            f"reducer {reducer_kind} takes no codec: leave out one of --reducer and --codec "
            f"{format_spec(recipe.codec, CODECS)}"
        )
    return reducer


def _build_component(
    family: str,
    component: object,
    registry: Mapping[str, Callable[..., Any]],
    options: Mapping[str, object] | None = None,
    *,
    needs_fresh: bool = False,
) -> Any:
    """Returns the component that is named by text, created by a class or function, or passed as an object.

    Args:
      family: Family.
      component: Component as text, class, function or object.
      registry: Components of the family by name.
      options: Options with settings of their own.
      needs_fresh: True if each replica needs its own component, so that an object is rejected.
    """
    if isinstance(component, str):
        instance = build(family, component, registry, options)
    elif isinstance(component, type) or not _is_component(family, component):
        if not callable(component):
            raise ConfigError(f"{family} {component!r}: {_explain_mismatch(family)}")
        instance = component(**select_accepted(component, options or {}))
    elif needs_fresh:
        raise ConfigError(
            f"{family} {component!r}: each replica needs its own; give the class or a function that makes one"
        )
    else:
        instance = component
    if not _is_component(family, instance):
        raise ConfigError(f"{family} {instance!r}: {_explain_mismatch(family)}")
    return instance


def _is_component(family: str, component: object) -> bool:
    return (
        isinstance(component, _BASE_CLASSES[family])
        if family in _BASE_CLASSES
        else hasattr(component, _REQUIRED_METHODS[family])
    )


def _explain_mismatch(family: str) -> str:
    """Explains why an object is not a component of a family."""
    if family in _BASE_CLASSES:
        return f"its class has to derive from farflung.types.{_BASE_CLASSES[family].__name__}"
    return f"it has no method {_REQUIRED_METHODS[family]}(); see farflung.types.{family.title()}"
