"""One run on disk: its resolved configuration and the folder that holds all it leaves behind."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import ClassVar, Self

from farflung.config import Training
from farflung.data import PARTITIONS, Partition, Share, describe
from farflung.errors import CheckpointError, ConfigError
from farflung.recipes import Recipe, recipe
from farflung.replica import Checkpoints, check_model, check_share
from farflung.runtime import DecisionLog, read_decisions
from farflung.seeding import generator
from farflung.spec import build
from farflung.telemetry import Event, read_events
from farflung.types import Json, SampleIds, Workload
from farflung.workloads import workload

__all__ = ["EVENTS", "RunConfig", "RunFolder", "write_json", "write_text"]

EVENTS = "FARFLUNG_EVENTS"
"""Names the datagram socket on which the starting command listens to its workers."""
PARTS = ("codec", "reducer", "collective", "schedule", "bucket_nbytes")
"""What options may replace in a recipe."""


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Everything that decides a run, resolved: no value is left to a default.

    Raises:
      ConfigError: a value out of its range.
    """

    workload: str
    recipe: str
    workers: int
    steps: int
    batch_size: int
    learning_rate: float
    momentum: float
    weight_decay: float
    learning_rate_schedule: str
    optimizer: str
    clip_norm: float
    on_nonfinite: str
    seed: int
    codec: str
    reducer: str
    collective: str
    schedule: str
    bucket_nbytes: int
    data: str
    partition: str
    evaluate_every: int
    checkpoint_every: int
    deadline: float
    encrypt: bool

    command: ClassVar[str] = "train"
    """Which makes such runs."""

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ConfigError(f"--workers {self.workers}: must be 1 or more")
        if not self.deadline > 0:
            raise ConfigError(f"--deadline {self.deadline}: must be a number of seconds above 0")

    @property
    def title(self) -> str:
        """For people."""
        return f"{self.workload}, {self.recipe}"

    @classmethod
    def fields(cls) -> list[str]:
        """The names of all settings."""
        return [field.name for field in fields(cls)]

    @classmethod
    def lacks(cls, stored: Mapping[str, Json]) -> bool:
        """Whether a setting is absent that every run of this kind has."""
        del stored
        return False

    @classmethod
    def resolve(cls, *layers: Mapping[str, Json]) -> Self:
        """What the last layer says, else the one before it, and so on; else the recipe's and the workload's own.

        A layer that names a recipe takes that recipe's members, not those that earlier layers name.
        """
        return cls(**cls._resolved(layers))  # type: ignore[arg-type]

    @classmethod
    def _resolved(cls, layers: Sequence[Mapping[str, Json]]) -> dict[str, Json]:
        """The value of each setting."""
        said: dict[str, Json] = {}
        for layer in layers:
            dropped = PARTS if "recipe" in layer else ()
            said = {**{name: value for name, value in said.items() if name not in dropped}, **layer}
        preset = recipe(str(said.get("recipe", "synchronous")))
        defaults = workload(str(said.get("workload", "fashion-mnist/cnn"))).defaults
        training = Training.resolve(
            defaults, {k: v for k, v in said.items() if k in Training.__dataclass_fields__}
        )
        parts = preset.but(**{name: said.get(name) for name in PARTS})  # type: ignore[arg-type]
        return {
            **training.to_json(),
            "workload": str(said.get("workload", "fashion-mnist/cnn")),
            "recipe": preset.name,
            "workers": int(said.get("workers", 2)),  # type: ignore[arg-type]
            "codec": parts.codec,
            "reducer": parts.reducer,
            "collective": parts.collective,
            "schedule": parts.schedule,
            "bucket_nbytes": parts.bucket_nbytes,
            "data": str(said.get("data", "auto")),
            "partition": str(said.get("partition", "shared")),
            "deadline": float(said.get("deadline", 60.0)),  # type: ignore[arg-type]
            "encrypt": bool(said.get("encrypt", False)),
            "evaluate_every": said.get("evaluate_every", max(1, training.steps // 10)),
            "checkpoint_every": said.get("checkpoint_every", max(1, training.steps // 5)),
        }

    def make_workload(self) -> Workload:
        """The workload, with its data option where one was given."""
        return workload(self.workload, **({} if self.data == "auto" else {"data": self.data}))

    def make_training(self) -> Training:
        """The settings of the training loop."""
        return Training(**{name: getattr(self, name) for name in Training.__dataclass_fields__})

    def make_recipe(self) -> Recipe:
        """The preset with the members chosen here."""
        return recipe(self.recipe).but(**{name: getattr(self, name) for name in PARTS})

    def make_shares(self, task: Workload) -> list[SampleIds] | None:
        """The training samples of ``task`` for each replica; ``None`` where all draw from the whole set.

        Raises:
          BadInput: a partition that cannot be made, or that leaves a replica nothing.
        """
        known: dict[str, Callable[..., Partition | _Shared]] = {**PARTITIONS, "shared": _Shared}
        how = build("partition", self.partition, known)
        if isinstance(how, _Shared):
            return None
        train, _ = task.datasets()
        shares = how.split(train, self.workers, seed=self.seed)
        for rank, share in enumerate(shares):
            if not len(share):
                raise ConfigError(
                    f"--partition {self.partition}: replica {rank} gets no sample; use fewer replicas or another split"
                )
        return shares

    def split_json(self, shares: Sequence[Share]) -> dict[str, Json]:
        """How the training set is split, for summaries."""
        return {"how": self.partition, "shares": [share.to_json() for share in shares]}

    def check(self, task: Workload) -> list[Share]:
        """Finds out what cannot work before any process is started.

        Args:
          task: what :meth:`make_workload` has made.

        Returns:
          Size and labels of each replica's share of the training set; nothing where all draw from the whole.

        Raises:
          BadInput: says what and what to do.
        """
        self.make_training()
        self.make_recipe().parts(self.seed)
        train, _ = task.datasets()
        if self.workers > len(train):
            raise ConfigError(
                f"--workers {self.workers}: {self.workload} has {len(train)} training samples; "
                "use at most one replica per sample"
            )
        return describe(self.make_shares(task) or [], train.labels)

    def check_resumable(self, folder: RunFolder, task: Workload) -> None:
        """Finds out whether the newest checkpoint of a run belongs to this configuration.

        Args:
          folder: of the run.
          task: what :meth:`make_workload` has made.

        Raises:
          BadInput: says what is wrong with it.
        """
        shares = self.make_shares(task)
        for rank in range(self.workers):
            checkpoints = folder.checkpoints(rank, self.workers, leader=False)
            step = checkpoints.newest()
            shared, own = checkpoints.load(step)
            where = f"{checkpoints.folder}, step {step}"
            if rank == 0:
                check_model(shared, task.model(generator(self.seed, "model")), where)
            check_share(own, None if shares is None else shares[rank], where)
            if step >= self.steps:
                raise ConfigError(f"--steps {self.steps}: the run in {folder.path} has done {step} already")

    def to_json(self) -> dict[str, Json]:
        """For the run's folder and for comparing ranks."""
        return asdict(self)


class _Shared:
    """All replicas draw from the whole training set."""


class RunFolder:
    """What a run leaves behind: configuration, telemetry, checkpoints, picture, logs.

    Args:
      path: the folder.
      resumed: whether it holds a run already that goes on here.

    Raises:
      ConfigError: the folder holds a run already and ``resumed`` is not set.
    """

    def __init__(self, path: Path, *, resumed: bool = False) -> None:
        self.path, self.resumed = path, resumed
        self.config = path / "config.json"
        self.picture = path / "run.png"
        self.partition_picture = path / "partition.png"
        self.summary = path / "summary.json"
        self.log = path / "workers.log"
        self.decisions = path / "decisions.jsonl"
        self.replay = path / "replay.jsonl"
        self.traffic = path / "traffic.jsonl"

    def create(self, config: RunConfig, replay: Path | None = None) -> None:
        """Makes the folder and stores the configuration, and the decisions of another run that this one makes again.

        Raises:
          ConfigError: another run is in it, or ``replay`` is no decision log.
        """
        again = None if replay is None else read_decisions(replay)
        if self.config.exists() and not self.resumed:
            raise ConfigError(
                f"{self.path} holds a run already: choose another --out, or continue it with --resume"
            )
        self.path.mkdir(parents=True, exist_ok=True)
        if again is not None:
            write_text(self.replay, "".join(f"{json.dumps(asdict(decision))}\n" for decision in again))
        write_json(self.config, config.to_json())

    def decision_log(self) -> DecisionLog:
        """Keeps the run's decisions in the folder, and makes those again that are to be replayed."""
        return DecisionLog(self.decisions, read_decisions(self.replay) if self.replay.exists() else None)

    def stored_config(self, kind: type[RunConfig] = RunConfig) -> dict[str, Json]:
        """The settings of the run in it.

        Args:
          kind: of run.

        Raises:
          CheckpointError: there is none, or it is damaged.
        """
        try:
            stored = json.loads(self.config.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(f"{self.path}: no run there ({self.config.name} is missing)") from None
        except ValueError:
            raise CheckpointError(f"{self.config}: damaged; start the run anew") from None
        if not isinstance(stored, dict) or not set(stored) <= set(kind.fields()) or kind.lacks(stored):
            raise CheckpointError(
                f"{self.config}: not of a run that farflung {kind.command} has made"
            ) from None
        return stored

    def telemetry(self, rank: int) -> Path:
        """The events of one rank."""
        return self.path / "telemetry" / f"rank-{rank}.jsonl"

    def events(self) -> dict[int, list[Event]]:
        """All events, by rank."""
        files = (self.path / "telemetry").glob("rank-*.jsonl")
        return {int(file.stem.removeprefix("rank-")): list(read_events(file)) for file in sorted(files)}

    def checkpoints(self, rank: int, size: int, *, leader: bool) -> Checkpoints:
        """The run's checkpoints as one replica sees them."""
        return Checkpoints(self.path / "checkpoints", rank, size, leader=leader)


def write_json(path: Path, value: Json) -> None:
    """Writes a file that appears whole or not at all."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes a file that appears whole or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
