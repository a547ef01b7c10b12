"""The recipe: a name for one member of each family."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from farflung.codecs import CODECS
from farflung.comm import AUTO, collective_named
from farflung.config import BUCKET_NBYTES
from farflung.data import InMemory
from farflung.errors import ConfigError, UnknownName
from farflung.options import whole_option
from farflung.reducers import REDUCERS
from farflung.replica import Parts
from farflung.sampling import SAMPLERS
from farflung.schedules import SCHEDULES
from farflung.seeding import derive
from farflung.spec import build, name_of
from farflung.types import Json, Reducer

__all__ = ["RECIPES", "Recipe", "recipe"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """Which member of each family a run trains with, as text.

    Args:
      name: of the recipe.
      summary: one line for people.
      codec: gradient to payload and back; for reducer ``codec`` alone.
      reducer: how a bucket travels: ``codec``, ``codec(phases='two')``, or one that needs no codec.
      collective: how an all-reduce travels; ``auto`` is settled when a run is made, by
        :func:`farflung.comm.resolve_collective`.
      schedule: what starts when and is due when.
      sampler: which samples a replica takes.
      bucket_nbytes: of the buckets that gradients are exchanged in; a bucket is closed once it holds as many.
    """

    name: str
    summary: str
    codec: str = "identity"
    reducer: str = "codec"
    collective: str = AUTO
    schedule: str = "synchronous"
    sampler: str = "uniform"
    bucket_nbytes: int = BUCKET_NBYTES

    def but(self, **given: str | int | None) -> Recipe:
        """The same with other members where one is given."""
        changes = {field: value for field, value in given.items() if value is not None}
        return replace(self, **changes)  # type: ignore[arg-type]

    def parts(self, seed: int, share: int | None = None) -> Parts:
        """Fresh members for one replica.

        Args:
          seed: of the run.
          share: which part of the training set this replica draws from alone, in an order of its own; ``None``: it
            draws from the whole set, in turn with the others.

        Raises:
          UnknownName: no such member.
          ConfigError: an option out of its range, or members that do not go together.
        """
        collective_named(self.collective)
        if self.sampler not in SAMPLERS:
            raise UnknownName("sampler", self.sampler, SAMPLERS)
        whole_option(f"recipe {self.name}", "bucket_nbytes", self.bucket_nbytes, 1)
        return Parts(
            reducer=self._reducer(),
            schedule=build("schedule", self.schedule, SCHEDULES),
            sampler=SAMPLERS[self.sampler](derive(seed, "sampler", *([] if share is None else [share]))),
            stream=InMemory(),
            bucket_nbytes=self.bucket_nbytes,
        )

    def _reducer(self) -> Reducer:
        named = name_of("reducer", self.reducer)
        given: dict[str, object] = {"collective": self.collective}
        if named == "codec":
            given["codec"] = build("codec", self.codec, CODECS)
        reducer = build("reducer", self.reducer, REDUCERS, given)
        if named != "codec" and self.codec != "identity":
            raise ConfigError(
                f"reducer {named} takes no codec: leave out one of --reducer and --codec {self.codec}"
            )
        return reducer

    def to_json(self) -> dict[str, Json]:
        """For telemetry and for comparing ranks."""
        return asdict(self)


def recipe(name: str) -> Recipe:
    """The preset called ``name``.

    Raises:
      UnknownName: no such preset.
    """
    if name not in RECIPES:
        raise UnknownName("recipe", name, RECIPES)
    return RECIPES[name]


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
            "delayed updates: own ones at once, swapped for the mean once that can be there (Zhu et al. 2019)",
            schedule="delayed(delay='auto')",
        ),
        Recipe(
            "dga",
            "delayed gradient averaging: blocks of 5 steps, averaged 20 steps later (Zhu et al. 2021)",
            schedule="delayed(delay=20, period=5)",
        ),
    )
}
"""The presets, by name."""
