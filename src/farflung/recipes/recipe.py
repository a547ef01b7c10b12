"""Recipe: a named combination of one component of each family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from farflung.config import BUCKET_NBYTES, Setting, list_settings
from farflung.errors import UnknownName
from farflung.spec import format_spec
from farflung.types import Codec, Json, RateScaling, Reducer, Sampler, Schedule, Sharing, Stream

if TYPE_CHECKING:
    from farflung.loop import Components

__all__ = ["FAMILIES", "RECIPES", "Recipe", "list_component_settings", "parse_recipe"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """Components of each family that a run trains with.

    A component is text, ``name``, ``name(option=value)`` or ``module:name(option=value)``, or an object: a codec,
    reducer or schedule itself, or a class or function that creates it.

    >>> from farflung.codecs import TopK
    >>> Recipe(codec=TopK(density=0.1), schedule="pipelined(width=3)").text
    'own(codec=topk(density=0.1), schedule=pipelined(width=3))'

    Args:
      name: Name of the recipe.
      summary: One-line description.
      codec: Codec of gradients, e.g. truncate16; for the reducer ``codec`` only.
      reducer: Exchange of a bucket: ``codec``, or ``codec(phases='two')`` or ``codec(phases='hops')`` for another way
        to send the codec's payloads; or, without a codec, ``powersgd(rank=2)`` or ``shared_scale_qsgd(bits=4)``.
      collective: Algorithm of an all-reduce: direct, all_gather, ring, parameter_server, multi_parameter_server,
        native, or auto, which is resolved when a run is created (:func:`farflung.comm.resolve_collective`). A reducer
        that is an object has its own.
      schedule: Schedule of exchanges and their due steps.
      sampler: Sampler of a replica's batches; as an object, a factory that takes a ``seed``.
      stream: Source and rate of samples: in_memory, or rate(20) samples per second; as an object, a factory.
      sharing: Policy for sending samples to other replicas: none, injection, for one step, or resharding, permanently;
        as an object, a factory that takes a ``seed``.
      scaling: Dependence of a step's learning rate on its number of samples, if that varies: none, linear or root.
      bucket_nbytes: Size in bytes at which a gradient bucket is closed.
    """

    name: str = "own"
    summary: str = ""
    codec: str | Codec | Callable[..., Codec] = "identity"
    reducer: str | Reducer | Callable[..., Reducer] = "codec"
    collective: str = "auto"
    schedule: str | Schedule | Callable[..., Schedule] = "synchronous"
    sampler: str | Callable[..., Sampler] = "uniform"
    stream: str | Callable[..., Stream] = "in_memory"
    sharing: str | Callable[..., Sharing] = "none"
    scaling: str | RateScaling | Callable[..., RateScaling] = "none"
    bucket_nbytes: int = BUCKET_NBYTES

    def with_components(self, **components: object) -> Recipe:
        """Returns the recipe with the given components replaced; None keeps one."""
        changes: dict[str, Any] = {field: value for field, value in components.items() if value is not None}
        return replace(self, **changes)

    def build_components(self, seed: int, partition_index: int | None = None) -> Components:
        """Builds one replica's components; rejects objects as sampler, stream or sharing.

        Other objects are used unchanged.

        Args:
          seed: Seed of the run.
          partition_index: Index of the part of the training set that only this replica draws from, in its own
            order; ``None`` to draw from the whole set, in turn with the others.

        Raises:
          UnknownName: a component does not exist.
          ConfigError: an option is out of range, components are incompatible, or an object is rejected.
        """
        from farflung.recipes.components import build_components  # imports torch, which text does not need

        return build_components(self, seed, partition_index)

    @property
    def component_texts(self) -> dict[str, str]:
        """Text of each component; in ``<>`` for an object that no other process could create."""
        return {family: _format_component(family, getattr(self, family)) for family in FAMILIES}

    @property
    def settings(self) -> dict[str, Json]:
        """All fields but name and summary."""
        return {**self.component_texts, "bucket_nbytes": self.bucket_nbytes}

    @property
    def text(self) -> str:
        """Name, and components that differ from the preset of that name or from the defaults."""
        defaults = RECIPES.get(self.name, Recipe()).settings
        changes = [f"{name}={text}" for name, text in self.settings.items() if text != defaults[name]]
        return f"{self.name}({', '.join(changes)})" if changes else self.name

    def to_json(self) -> dict[str, Json]:
        """Returns the JSON form for telemetry and comparison of ranks."""
        return {"name": self.name, "summary": self.summary, **self.settings}


FAMILIES = tuple(
    field.name for field in fields(Recipe) if field.name not in ("name", "summary", "bucket_nbytes")
)
"""Families of components in a recipe."""


def _format_component(family: str, component: object) -> str:
    if isinstance(component, str):
        return component
    from farflung.recipes.components import REGISTRIES

    return format_spec(component, REGISTRIES[family])


def list_component_settings() -> dict[str, Setting]:
    """Returns the settings of a recipe without name and summary."""
    return {name: setting for name, setting in list_settings(Recipe).items() if name in Recipe().settings}


def parse_recipe(text: str) -> Recipe:
    """Parses the name of a preset, with optional changes in parentheses.

    >>> parse_recipe("ring(codec=topk(density=0.01))").codec
    'topk(density=0.01)'

    Raises:
      UnknownName: the preset does not exist.
      ConfigError: the form is invalid, or a setting is unknown.
    """
    if text in RECIPES:
        return RECIPES[text]
    from farflung.recipes.changes import parse_changes  # of no use to a name alone

    name, changes = parse_changes(text, list_component_settings())
    if name not in RECIPES:
        raise UnknownName("recipe", name, RECIPES)
    return RECIPES[name].with_components(**changes)


RECIPES: dict[str, Recipe] = {
    preset.name: preset
    for preset in (
        Recipe("synchronous", "plain data-parallel SGD over farflung's direct all-reduce"),
        Recipe("ring", "plain data-parallel SGD over a ring", collective="ring"),
        Recipe("powersgd", "synchronous SGD with gradients of low rank", reducer="powersgd"),
        Recipe(
            "ddp",
            "what DistributedDataParallel does: synchronous SGD over the backend's own all-reduce",
            collective="native",
        ),
        Recipe("parameter_server", "synchronous SGD through one server", collective="parameter_server"),
        Recipe(
            "pipe_sgd",
            "Pipe-SGD: means applied one step late, 16 bits inside the ring (Li et al. 2018)",
            codec="truncate16",
            collective="ring",
            schedule="pipelined(width=2)",
        ),
        Recipe(
            "delayed",
            "delayed updates: local steps, pulled towards a mean that arrives later (after Zhu et al. 2019)",
            schedule="delayed(delay='auto')",
        ),
        Recipe(
            "dga",
            "delayed gradient averaging: blocks of 5, pulled to their mean 20 steps later (after Zhu et al. 2021)",
            schedule="delayed(delay=20, period=5)",
        ),
        Recipe(
            "scadles",
            "ScaDLES: batches, weights and learning rates by the rate at which data arrives (Tyagi & Swany 2022)",
            reducer="adaptive_topk",
            stream="rate('S1', window_s=1, policy='truncation', weigh='by_rate')",
            scaling="linear",
        ),
        Recipe(
            "scadles_baseline",
            "what ScaDLES is measured against: 64 samples on every device, however long they take, and a plain mean",
            stream="rate('S1', least=64)",
        ),
        Recipe(
            "local_sgd",
            "local SGD: parameters are averaged every 8 steps (Stich 2019)",
            schedule="local_sgd(sync_every=8)",
        ),
        Recipe(
            "post_local_sgd",
            "post-local SGD: synchronous for 1,000 steps, then averaged every 16 (Lin et al. 2020)",
            schedule="post_local_sgd(warmup=1000, sync_every=16)",
        ),
        Recipe(
            "adacomm",
            "AdaComm: averaged every 20 steps, and more often as the loss falls (Wang & Joshi 2019)",
            schedule="adacomm(sync_every=20, interval_s=60)",
        ),
        Recipe(
            "diloco",
            "DiLoCo: 50 local steps, then a Nesterov step on their mean; with AdamW (Douillard et al. 2023)",
            schedule="diloco(sync_every=50)",
        ),
        Recipe(
            "streaming_diloco",
            "Streaming DiLoCo: fragments in turn, 4-bit QSGD, merged a step late; with AdamW (Douillard et al. 2025)",
            codec="qsgd(bits=4)",
            schedule="streaming_diloco(sync_every=48, fragments=4)",
            bucket_nbytes=1 << 16,
        ),
        Recipe(
            "sparse_loco",
            "SparseLoCo: 50 local steps, then the largest 1/64 of each chunk in 2 bits; with AdamW (Sarfi et al. 2025)",
            codec="error_feedback(chunked_topk(bits=2), decay=0.95)",
            schedule="diloco(sync_every=50, outer_rate=1.0, outer_momentum=0.0)",
        ),
        Recipe(
            "demo",
            "DeMo: momentum stays, its fast components are sent; with sign_sgd (Peng et al. 2024)",
            codec="demo",
        ),
        Recipe(
            "mercury",
            "Mercury: batches by importance, scored while waiting; important samples change owner (Zeng et al. 2021)",
            collective="ring",
            sampler="grouped_importance(rule='paper', groups='bacc')",
            sharing="resharding",
        ),
        Recipe(
            "tictac",
            "TicTac: no barrier, and means that unlock the next forward pass leave first (Hashemi et al. 2019)",
            schedule="priority",
            bucket_nbytes=1 << 16,
        ),
        Recipe(
            "p3",
            "P3: no barrier, and means leave in the order of their use, in small pieces (Jayarajan et al. 2019)",
            collective="direct",
            schedule="priority(order='forward')",
            bucket_nbytes=200_000,
        ),
    )
}
"""Presets by name."""
