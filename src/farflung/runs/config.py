"""What decides a run: its resolved configuration, in either world."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias

from typing_extensions import override

from farflung.comm import Endpoint
from farflung.config import Setting, Training, check_ranges, settings_of, unknown_setting
from farflung.devices import DeviceProfile, device_profile
from farflung.errors import CheckpointError, ConfigError
from farflung.faults import FaultPlan, load_faults
from farflung.files import naming
from farflung.network import NetworkProfile, network_profile
from farflung.recipes import FAMILIES, Recipe, recipe
from farflung.recipes.changes import changes_of
from farflung.recipes.recipe import member_settings
from farflung.spec import build, is_carried, text_of
from farflung.types import Json, SampleIds, Workload
from farflung.types.data import Partition

# The options of commands are read from these classes, so what imports torch is imported where it is used.
if TYPE_CHECKING:
    from farflung.data import Share
    from farflung.decisions import DecisionLog
    from farflung.runs.folder import RunFolder
    from farflung.sim import VirtualWorld

__all__ = [
    "COMPARED",
    "DEVICE",
    "NETWORK",
    "RunConfig",
    "RunOptions",
    "Settings",
    "SimulatedConfig",
    "variant",
]

DEFAULTS = {
    **dict.fromkeys(
        ("batch_size", "learning_rate", "momentum", "weight_decay", "steps"), "the workload's own"
    ),
    "evaluate_every": "a tenth of the steps",
    "checkpoint_every": "a fifth of the steps",
}
"""What a setting of the training is when not given, where it has no value of its own."""
AUTO = "auto"
"""A batch size by which each replica takes its share of a step's samples."""
WORKLOAD, RECIPE = "fashion-mnist/cnn", "synchronous"
NETWORK = "lan-1g"
"""What lies between the replicas of a simulated run when nothing is said."""
DEVICE = "cpu-core"
"""What they compute on."""
COMPARED = ("synchronous", "synchronous(codec=int8)", "parameter_server")
"""The recipes that are compared when nothing is said."""

Settings: TypeAlias = "Mapping[str, object]"
"""Settings by name: text and numbers, or objects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What is said of a run beside its configuration: where it is kept, and what this process runs it on.

    Args:
      out: the run's folder; a new one under runs/ when not given.
      resume: continue the run in this folder from its last checkpoint; other options change its settings.
      replay: decide again what an earlier run decided, from its decisions.jsonl; a new run then ends as that one did.
      device: train on this device of torch's: cpu; cuda, one for each replica of this machine; or cuda:0, which all of
        them share; cpu when not given.
      pace: compute no faster than this device: a name (see ``farflung list devices``) or a TOML file. Replicas idle
        until its time has passed; steps for which this machine is too slow are counted.
      trace: write each exchange to telemetry too, for ``farflung trace``.
      log_to: loggers of the run's figures: tensorboard, wandb, trackio or mlflow; several with commas between them, as
        in tensorboard,mlflow.
      data_stays: refuse to train by a recipe that sends samples to other replicas, or has them computed there.
      endpoint: where torchrun or the like has started this process, how it connects to its peers.
    """

    out: Path | str | None = None
    resume: Path | str | None = None
    replay: Path | str | None = None
    device: str = "cpu"
    pace: str | None = None
    trace: bool = False
    log_to: str = ""
    data_stays: bool = False
    endpoint: Endpoint = Endpoint()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Everything that decides a run, resolved: no value is left to a default.

    Args:
      workload: what to train: a name (see ``farflung list workloads``) or ``module:name``; fashion-mnist/cnn when not
        given.
      recipe: how to train together; synchronous when not given.
      training: for how long and with what settings.
      workers: replicas on this machine; 2 when not given.
      data: where data comes from: auto, packaged or full, for workloads that offer the choice; auto when not given.
      partition: how replicas share the training set: shared, all draw from the whole; or a share each: iid,
        labels(k=1), dirichlet(alpha=0.5), by-order. When not given, shared, or iid where a part of the recipe picks
        from each replica's own samples.
      elastic: MIN, the replicas with which the run at least goes on where others are lost; or MIN:MAX, where others may
        join, up to MAX ranks in all with those that were lost; when not given, the first loss ends the run.
      quorum: majority, or 1: with --elastic, replicas that lose touch with the majority go on alone, so that several
        parts of the run may end with models of their own; majority when not given.
      deadline: seconds of silence after which a replica that is waited for counts as lost; one that answers may be busy
        for ten times as long; 60 when not given.
      encrypt: encrypt messages within this machine too, to see what it costs; those between machines always are.
      threads: threads that torch computes with on each replica; 0 when not given: one where replicas share a machine,
        otherwise torch's default for its cores.
      task: what ``workload`` has made.

    Raises:
      ConfigError: a value out of its range.
    """

    workload: str
    recipe: Recipe
    training: Training
    workers: int
    data: str
    partition: str | Partition
    elastic: str
    quorum: str
    deadline: float
    encrypt: bool
    threads: int
    task: Workload = field(compare=False, repr=False)

    command: ClassVar[str] = "train"
    """Which makes such runs."""

    def __post_init__(self) -> None:
        least, ranks = self.least, self.ranks
        check_ranges(
            self,
            workers=(self.workers >= 1, "1 or more"),
            elastic=(
                not self.elastic or 1 <= least <= self.workers <= ranks,
                "MIN or MIN:MAX with MIN from 1 to --workers and MAX from there on; "
                f"--workers is {self.workers}",
            ),
            quorum=(
                self.quorum == "majority" or (self.quorum == "1" and bool(self.elastic)),
                "majority, or 1 beside --elastic",
            ),
            threads=(self.threads >= 0, "1 or more, or 0 to leave it to the machine"),
            deadline=(0 < self.deadline < math.inf, "a number of seconds above 0"),
        )

    @property
    def title(self) -> str:
        """For people."""
        return f"{self.workload}, {self.recipe.name}"

    @property
    def seed(self) -> int:
        """Everything random derives from it."""
        return self.training.seed

    @property
    def least(self) -> int:
        """The number of replicas with less of which an elastic run ends."""
        return self._elastic[0]

    @property
    def ranks(self) -> int:
        """The number of ranks that there may be in the course of the run."""
        return self._elastic[1] if self.elastic else self.workers

    @property
    def _elastic(self) -> tuple[int, int]:
        least, _, most = self.elastic.partition(":")
        with suppress(ValueError):
            return int(least), int(most) if most else self.workers
        return 0, 0

    @property
    def steps(self) -> int:
        """Updates of the parameters."""
        return self.training.steps

    # --- what can be set --------------------------------------------------------------------------------------

    @classmethod
    def settings(cls) -> dict[str, Setting]:
        """All settings by name: a run's own, those of its training, and the members of its recipe."""
        found = settings_of(cls)
        defaults = {**dict.fromkeys(member_settings(), "the recipe's"), **DEFAULTS}
        others = {
            name: replace(
                one, about=f"{one.about.rstrip('.')}; {defaults.get(name, one.default)} when not given"
            )
            for name, one in {**_training_settings(), **member_settings()}.items()
        }
        chosen = Setting("recipe", str, "How to train together; synchronous when not given", None)
        return {"workload": found.pop("workload"), "recipe": chosen, **others, **found}

    @classmethod
    def resolve(cls, *layers: Settings, task: Workload | None = None) -> Self:
        """What the last layer says, else the one before it, and so on; else the recipe's and the workload's own.

        A layer that names a recipe takes that recipe's members, not those that earlier layers name.

        Args:
          layers: settings by name.
          task: what the workload makes, where it has been made.

        Raises:
          BadInput: a setting that there is not, or a value that is not in its range.
        """
        said: dict[str, Any] = {}
        for layer in layers:
            spread = {name: value for name, value in layer.items() if value is not None}
            if isinstance(spread.get("recipe"), str):
                spread = {**variant(str(spread.pop("recipe"))), **spread}
            dropped = Recipe().settings if "recipe" in spread else {}
            said = {**{name: value for name, value in said.items() if name not in dropped}, **spread}
        known = cls.settings()
        for name, value in said.items():
            if name not in known:
                raise unknown_setting("setting", name, known)
            if isinstance(value, str) and not is_carried(value):
                raise ConfigError(
                    f"{name} {value}: the run was made with an object that has no text: give it again"
                )
            if known[name].kind is not str:
                known[name].read(value, name)
        return cls(**cls._resolved(said, task))

    @classmethod
    def _resolved(cls, said: dict[str, Any], task: Workload | None) -> dict[str, Any]:
        """The value of each field."""
        from farflung.workloads import WORKLOADS

        data = str(said.get("data", "auto"))
        what = said.get("workload", WORKLOAD)
        task = task or _made_workload(what, data)
        by_speed = said.get("batch_size") == AUTO
        if by_speed:
            del said["batch_size"]
        training = Training.resolve(
            task.defaults, {k: v for k, v in said.items() if k in settings_of(Training)}
        )
        periods = {"evaluate_every": training.steps // 10, "checkpoint_every": training.steps // 5}
        own: dict[str, Any] = {
            name: max(1, steps) for name, steps in periods.items() if said.get(name) is None
        }
        members = {name: said[name] for name in Recipe().settings if name in said}
        how: Any = said.get("recipe", RECIPE)
        if isinstance(how, str):  # all members named need no preset
            how = Recipe(how) if members.keys() >= {*FAMILIES} else recipe(how)
        how = how.but(**members)
        if by_speed:
            how = _by_speed(how, training.seed)
        holds_shares = how.parts(training.seed).hold_shares
        return {
            "workload": text_of(what, WORKLOADS)
            if isinstance(what, str) or callable(what)
            else f"<{task.name}>",
            "recipe": how,
            "training": replace(training, **own),
            "workers": int(said.get("workers", 2)),
            "data": data,
            "partition": said.get("partition", "iid" if holds_shares else "shared"),
            "elastic": str(said.get("elastic", "")),
            "quorum": str(said.get("quorum", "majority")),
            "deadline": float(said.get("deadline", 60.0)),
            "encrypt": bool(said.get("encrypt", False)),
            "threads": int(said.get("threads", 0)),
            "task": task,
        }

    # --- what it makes ----------------------------------------------------------------------------------------

    def model_layout(self) -> str:
        """A short hash of the names, shapes and dtypes of the model, for comparing ranks."""
        from farflung.loop import fingerprint
        from farflung.seeding import generator

        return fingerprint(self.task.model(generator(self.seed, "model")))

    def make_shares(self) -> list[SampleIds] | None:
        """The training samples for each replica; ``None`` where all draw from the whole set.

        Raises:
          BadInput: a partition that cannot be made, or that leaves a replica nothing.
        """
        from farflung.data import PARTITIONS

        how: Partition | str | None = self.partition
        if isinstance(how, str):
            known: dict[str, Callable[..., Partition | None]] = {**PARTITIONS, "shared": lambda: None}
            how = build("partition", how, known)
        if how is None:
            return None
        train, _ = self.task.datasets()
        shares = how.split(train, self.workers, seed=self.seed)
        for rank, share in enumerate(shares):
            if not len(share):
                raise ConfigError(
                    f"--partition {self.split_text}: replica {rank} gets no sample; use fewer replicas or another "
                    "split"
                )
        return shares

    @property
    def split_text(self) -> str:
        """How the training set is split, in words."""
        from farflung.data import PARTITIONS

        return text_of(self.partition, PARTITIONS)

    def split(self) -> list[Share]:
        """Size and labels of each replica's share; nothing where all draw from the whole set."""
        from farflung.data import describe

        shares = self.make_shares()
        return [] if shares is None else describe(shares, self.task.datasets()[0].labels)

    def split_json(self) -> dict[str, Json]:
        """How the training set is split, for summaries."""
        return {"how": self.split_text, "shares": [share.to_json() for share in self.split()]}

    def check(self) -> list[Share]:
        """Finds out what cannot work before any process is started.

        Returns:
          Size and labels of each replica's share of the training set; nothing where all draw from the whole.

        Raises:
          BadInput: says what and what to do.
        """
        schedule = self.recipe.parts(self.seed).schedule
        schedule.check(self.workers)
        train, _ = self.task.datasets()
        if self.workers > len(train):
            raise ConfigError(
                f"--workers {self.workers}: {self.workload} has {len(train)} training samples; "
                "use at most one replica per sample"
            )
        if self.training.batch_size > len(train):
            raise ConfigError(
                f"--batch-size {self.training.batch_size}: {self.workload} has {len(train)} training samples; use at "
                "most as many"
            )
        shares = self.split()
        self.recipe.parts(self.seed, 0 if shares else None)
        if self.elastic:
            self._check_elastic()
        return shares

    def _check_elastic(self) -> None:
        """Refuses what does not outlive the loss of a replica."""
        why = self.recipe.parts(self.seed).needs_all
        if not why and self.recipe.collective == "native":
            why = "the backend's own collectives need all replicas: choose another --collective"
        if not why and self.split_text != "shared":
            why = (
                f"--partition {self.split_text}: the share of a lost replica would be missing: choose shared"
            )
        if why:
            raise ConfigError(f"--elastic {self.elastic}: {why}")

    def check_carried(self) -> None:
        """Finds out whether other processes can make this run from its configuration alone.

        Raises:
          ConfigError: names what they cannot make, and says what to do.
        """
        for name, value in self.to_json().items():
            if isinstance(value, str) and not is_carried(value):
                raise ConfigError(
                    f"{name} {value}: workers in processes of their own can only import it: give a class, function or "
                    "frozen dataclass of a module (not of the script itself), or start the script under torchrun"
                )

    def check_resumable(self, folder: RunFolder) -> None:
        """Finds out whether the newest checkpoint of a run belongs to this configuration.

        Raises:
          BadInput: says what is wrong with it.
        """
        from farflung.loop import check_model, check_optimizer_kind, check_share
        from farflung.seeding import generator

        shares = self.make_shares()
        for rank in range(self.workers):
            checkpoints = folder.checkpoints(rank, self.workers, leader=False, any_size=bool(self.elastic))
            step = checkpoints.newest()
            shared, own = checkpoints.load(step)
            where = f"{checkpoints.folder}, step {step}"
            if rank == 0:
                model = self.task.model(generator(self.seed, "model"))
                check_model(shared, model, where)
                check_optimizer_kind(own, self.training.make_optimizer(model.parameters()), where)
            check_share(own, None if shares is None else shares[rank], where)
            if step >= self.steps:
                raise ConfigError(f"--steps {self.steps}: the run in {folder.path} has done {step} already")

    def to_json(self) -> dict[str, Json]:
        """Every setting by name, for the run's folder and for comparing ranks; objects as :func:`text_of` has them."""
        own = {
            one.name: getattr(self, one.name) for one in fields(self) if one.name in settings_of(type(self))
        }
        members = {"recipe": self.recipe.name, **self.training.to_json(), **self.recipe.settings}
        return {"workload": self.workload, **members, **own, "partition": self.split_text}

    @classmethod
    def stored_in(cls, folder: RunFolder) -> dict[str, Json]:
        """The settings of the run in a folder.

        Raises:
          BadInput: there is none, it is damaged, or of another kind.
        """
        stored, known = folder.stored_config(), cls.settings()
        if stored.keys() != known.keys():
            raise CheckpointError(f"{folder.config}: not of a run that farflung {cls.command} has made")
        for name, value in stored.items():
            known[name].read(value, f"{folder.config}: {name}")
        return stored


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedConfig(RunConfig):
    """Everything that decides a run in virtual time.

    Args:
      workers: replicas; as many as the network has nodes when not given, or 4.
      network: what lies between the replicas: a name (see ``farflung list networks``) or a TOML file; lan-1g when not
        given.
      connections: TCP connections of each pair of replicas, for bulk: a number, or auto: by rate, round trip and loss;
        as the network has it when not given, which is 1 in those with a name.
      device: what each replica computes on: a name (see ``farflung list devices``) or a TOML file; cpu-core when not
        given.
      faults: a TOML file that says what goes wrong.
      count_evaluation: let evaluations and checkpoints take time on the simulated clock; they take none when not given.

    Raises:
      ConfigError: a value out of its range.
    """

    network: str | NetworkProfile
    connections: str | int
    device: str | DeviceProfile
    faults: str | FaultPlan
    count_evaluation: bool

    command: ClassVar[str] = "simulate"

    @property
    @override
    def title(self) -> str:
        """For people."""
        return f"{self.workload}, {self.recipe.name}, {self.network_name}"

    @property
    def network_name(self) -> str:
        """Of the network, or its file."""
        return self.network if isinstance(self.network, str) else self.network.name

    @classmethod
    @override
    def _resolved(cls, said: dict[str, Any], task: Workload | None) -> dict[str, Any]:
        of_the_world = {name: said.get(name, value) for name, value in _WORLD.items()}
        count = _profile(of_the_world["network"]).nodes
        return {**RunConfig._resolved({"workers": count or 4, **said}, task), **of_the_world}

    def make_network(self) -> NetworkProfile:
        """The network between the replicas."""
        with naming(self.network) if isinstance(self.network, str) else nullcontext():
            profile = _profile(self.network).for_nodes(self.ranks)
        if self.connections == "":
            return profile
        return replace(profile, tcp_connections=self.connections)  # type: ignore[arg-type]

    def make_faults(self) -> FaultPlan:
        """What goes wrong."""
        from farflung.sim.stage import check_plan

        if isinstance(self.faults, FaultPlan):
            return self.faults
        if not self.faults:
            return FaultPlan()
        plan = load_faults(Path(self.faults))
        with naming(self.faults):
            check_plan(plan, self.ranks, whole=not self.elastic)
        return plan

    def make_world(self, decisions: DecisionLog | None = None) -> VirtualWorld:
        """The clock, the network and the devices."""
        from farflung.calibration import forward_flops
        from farflung.sim import VirtualWorld

        device = self.device
        if isinstance(device, str):
            device = device_profile(device, forward_flops=forward_flops(self.task))
        return VirtualWorld(
            self.ranks,
            network=self.make_network(),
            device=device,
            seed=self.seed,
            faults=self.make_faults(),
            deadline_s=self.deadline,
            decisions=decisions,
            count_evaluation=self.count_evaluation or bool(self.elastic),
            whole=not self.elastic,
            absent=range(self.workers, self.ranks),
        )

    @override
    def check(self) -> list[Share]:
        """See :meth:`RunConfig.check`."""
        from farflung.comm import collective_named

        if collective_named(self.recipe.collective).by_backend:
            raise ConfigError(
                f"the backend's own collectives (--collective {self.recipe.collective}) run on real machines alone: "
                "choose another collective or recipe"
            )
        if self.recipe.parts(self.seed).stream.is_live:
            raise ConfigError(
                f"--stream {self.recipe.members['stream']}: its samples come when they come, and virtual time would "
                "stand still meanwhile: use farflung train, or simulate rate(...)"
            )
        self.make_world()
        return RunConfig.check(self)

    def world_json(self) -> dict[str, Json]:
        """What a simulated figure depends on beside the run itself, for summaries."""
        profile = self.make_network()
        return {
            "network": self.network_name,
            "connections": profile.tcp_connections,
            "device": self.device if isinstance(self.device, str) else self.device.name,
            "source": profile.source,
            "changes": list(profile.changes),
        }

    @override
    def to_json(self) -> dict[str, Json]:
        """See :meth:`RunConfig.to_json`."""
        world = {**{name: getattr(self, name) for name in _WORLD}, "connections": str(self.connections)}
        objects = {
            name: f"<{value if isinstance(value, FaultPlan) else value.name}>"
            for name, value in world.items()
            if not isinstance(value, str | int)
        }
        return {**RunConfig.to_json(self), **world, **objects}


_WORLD: dict[str, Any] = {
    "network": NETWORK,
    "connections": "",
    "device": DEVICE,
    "faults": "",
    "count_evaluation": False,
}
"""What a run in virtual time has beside the others, and what it is when not given."""


def _training_settings() -> dict[str, Setting]:
    found = settings_of(Training)
    about = (
        "Samples per replica and step; auto: as many as by the workload's own in a step of all, of which each replica "
        "takes as many as it is fast (the sampler balanced)"
    )
    return {**found, "batch_size": replace(found["batch_size"], about=about, words=(AUTO,))}


def variant(text: str) -> dict[str, Json]:
    """Returns the settings that a recipe with changes stands for; whether its values are good is found out later.

    >>> variant("synchronous(codec=topk(density=0.01), learning_rate=0.02)")
    {'recipe': 'synchronous', 'codec': 'topk(density=0.01)', 'learning_rate': 0.02}

    Raises:
      ConfigError: not of this form, or a setting that a recipe cannot change.
    """
    known = {**_training_settings(), **member_settings()}
    del known["seed"]
    name, changes = changes_of(text, known)
    return {"recipe": name, **changes}


def _made_workload(what: object, data: str) -> Workload:
    from farflung.workloads import check_workload, workload

    options = {} if data == "auto" else {"data": data}
    if isinstance(what, str):
        return workload(what, **options)
    made: Any = what(**options) if isinstance(what, type) or not hasattr(what, "datasets") else what  # type: ignore[operator]
    if options and made is what:
        raise ConfigError(f"--data {data}: {what!r} is made already")
    return check_workload(made)


def _by_speed(how: Recipe, seed: int) -> Recipe:
    """The recipe whose replicas take as many samples as they are fast."""
    sampler = how.parts(seed).sampler
    if sampler.is_balanced:
        return how
    if not sampler.has_shared_order:
        raise ConfigError(
            f"--batch-size {AUTO}: shares out what the uniform sampler draws, and this is sampler "
            f"{how.members['sampler']}: give a number, or choose another --sampler or --recipe"
        )
    how = how.but(sampler="balanced")
    with naming(f"--batch-size {AUTO}"):
        how.parts(seed)
    return how


def _profile(network: str | NetworkProfile) -> NetworkProfile:
    return network_profile(network) if isinstance(network, str) else network
