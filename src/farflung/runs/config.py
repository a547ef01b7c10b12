"""Resolved configurations of runs on real workers and in virtual time."""

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

# Commands read their options from these classes, so modules that import torch are imported lazily.
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
"""Descriptions of defaults that depend on the workload or other settings."""
AUTO = "auto"
"""Value of the batch size that divides a step's samples by the speed of replicas."""
WORKLOAD, RECIPE = "fashion-mnist/cnn", "synchronous"
NETWORK = "lan-1g"
"""Default network of a simulated run."""
DEVICE = "cpu-core"
"""Default device of simulated replicas."""
COMPARED = ("synchronous", "synchronous(codec=int8)", "parameter_server")
"""Default recipes of a comparison."""

Settings: TypeAlias = "Mapping[str, object]"
"""Settings by name: strings and numbers, or objects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options of a run apart from its configuration: folder, device and telemetry.

    Args:
      out: Folder of the run; by default a new one under runs/.
      resume: Folder of a run to continue from its last checkpoint; other options change its settings.
      replay: File decisions.jsonl of an earlier run, whose decisions and result are reproduced.
      device: Torch device: cpu; cuda, one for each replica of this machine; or cuda:0, shared by all of them; cpu when
        not given.
      pace: Device whose speed is not exceeded: a name (see ``farflung list devices``) or a TOML file. Replicas idle
        until its time has passed; steps for which this machine is too slow are counted.
      trace: Write each exchange to telemetry, for ``farflung trace``.
      log_to: Loggers of the run's metrics: tensorboard, wandb, trackio or mlflow, separated by commas, such as
        tensorboard,mlflow.
      data_stays: Refuse recipes that send samples to other replicas or have them computed there.
      endpoint: Connection settings of this process under torchrun or another launcher.
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
    """Complete configuration of a run, with all defaults resolved.

    Args:
      workload: Workload to train: a name (see ``farflung list workloads``) or ``module:name``; fashion-mnist/cnn when
        not given.
      recipe: Recipe of distributed training; synchronous when not given.
      training: Training settings.
      workers: Number of replicas on this machine; 2 when not given.
      data: Source of the data: auto, packaged or full, for workloads that offer the choice; auto when not given.
      partition: Partition of the training set: shared, all replicas draw from all samples; or a share each: iid,
        labels(k=1), dirichlet(alpha=0.5), by-order. When not given, shared, or iid if the recipe needs a share for each
        replica.
      elastic: MIN, the smallest number of replicas with which the run continues after losses; or MIN:MAX, if others may
        join, up to MAX ranks in total including lost ones. When not given, the first loss ends the run.
      quorum: majority, or 1: with --elastic, replicas cut off from the majority continue alone, and each group ends
        with its own model; majority when not given.
      deadline: Seconds of silence after which a replica that is waited for counts as lost; one that answers may be busy
        for ten times as long; 60 when not given.
      encrypt: Encrypt messages within this machine too; messages between machines always are.
      threads: Number of torch threads on each replica; 0 when not given: one if replicas share a machine, otherwise
        torch's default.
      task: Workload object of ``workload``.

    Raises:
      ConfigError: A value is out of range.
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
    """Name of the command that runs such configurations."""

    def __post_init__(self) -> None:
        min_replicas, max_ranks = self.least, self.ranks
        check_ranges(
            self,
            workers=(self.workers >= 1, "1 or more"),
            elastic=(
                not self.elastic or 1 <= min_replicas <= self.workers <= max_ranks,
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
        return f"{self.workload}, {self.recipe.name}"

    @property
    def seed(self) -> int:
        return self.training.seed

    @property
    def least(self) -> int:
        """Smallest number of replicas with which an elastic run continues."""
        return self._elastic[0]

    @property
    def ranks(self) -> int:
        """Largest number of ranks during the run, including lost ones."""
        return self._elastic[1] if self.elastic else self.workers

    @property
    def _elastic(self) -> tuple[int, int]:
        low, _, high = self.elastic.partition(":")
        with suppress(ValueError):
            return int(low), int(high) if high else self.workers
        return 0, 0

    @property
    def steps(self) -> int:
        return self.training.steps

    # --- settings ---------------------------------------------------------------------------------------------

    @classmethod
    def settings(cls) -> dict[str, Setting]:
        """Returns all settings by name: of the run, its training, and the members of its recipe."""
        run_settings = settings_of(cls)
        defaults = {**dict.fromkeys(member_settings(), "the recipe's"), **DEFAULTS}
        part_settings = {
            name: replace(
                setting,
                about=f"{setting.about.rstrip('.')}; {defaults.get(name, setting.default)} when not given",
            )
            for name, setting in {**_training_settings(), **member_settings()}.items()
        }
        recipe_setting = Setting("recipe", str, "How to train together; synchronous when not given", None)
        workload_setting = run_settings.pop("workload")
        return {"workload": workload_setting, "recipe": recipe_setting, **part_settings, **run_settings}

    @classmethod
    def resolve(cls, *layers: Settings, task: Workload | None = None) -> Self:
        """Resolves settings: later layers override earlier ones, and all override the recipe and workload.

        If a layer names a recipe, that recipe's members replace those of earlier layers.

        Args:
          layers: Settings by name.
          task: Workload object, if it exists already.

        Raises:
          BadInput: A setting is unknown, or a value is out of range.
        """
        values: dict[str, Any] = {}
        for layer in layers:
            layer_settings = {name: value for name, value in layer.items() if value is not None}
            if isinstance(layer_settings.get("recipe"), str):
                layer_settings = {**variant(str(layer_settings.pop("recipe"))), **layer_settings}
            dropped = Recipe().settings if "recipe" in layer_settings else {}
            values = {
                **{name: value for name, value in values.items() if name not in dropped},
                **layer_settings,
            }
        settings = cls.settings()
        for name, value in values.items():
            if name not in settings:
                raise unknown_setting("setting", name, settings)
            if isinstance(value, str) and not is_carried(value):
                raise ConfigError(
                    f"{name} {value}: the run was made with an object that has no text: give it again"
                )
            if settings[name].kind is not str:
                settings[name].read(value, name)
        return cls(**cls._resolved(values, task))

    @classmethod
    def _resolved(cls, said: dict[str, Any], task: Workload | None) -> dict[str, Any]:
        """Returns the value of each field."""
        from farflung.workloads import WORKLOADS

        data = str(said.get("data", "auto"))
        workload = said.get("workload", WORKLOAD)
        task = task or _made_workload(workload, data)
        is_balanced = said.get("batch_size") == AUTO
        if is_balanced:
            del said["batch_size"]
        training = Training.resolve(
            task.defaults, {k: v for k, v in said.items() if k in settings_of(Training)}
        )
        periods = {"evaluate_every": training.steps // 10, "checkpoint_every": training.steps // 5}
        default_periods: dict[str, Any] = {
            name: max(1, steps) for name, steps in periods.items() if said.get(name) is None
        }
        members = {name: said[name] for name in Recipe().settings if name in said}
        base_recipe: Any = said.get("recipe", RECIPE)
        if isinstance(base_recipe, str):  # a full set of members needs no preset
            base_recipe = Recipe(base_recipe) if members.keys() >= {*FAMILIES} else recipe(base_recipe)
        base_recipe = base_recipe.but(**members)
        if is_balanced:
            base_recipe = _by_speed(base_recipe, training.seed)
        needs_shares = base_recipe.parts(training.seed).hold_shares
        return {
            "workload": text_of(workload, WORKLOADS)
            if isinstance(workload, str) or callable(workload)
            else f"<{task.name}>",
            "recipe": base_recipe,
            "training": replace(training, **default_periods),
            "workers": int(said.get("workers", 2)),
            "data": data,
            "partition": said.get("partition", "iid" if needs_shares else "shared"),
            "elastic": str(said.get("elastic", "")),
            "quorum": str(said.get("quorum", "majority")),
            "deadline": float(said.get("deadline", 60.0)),
            "encrypt": bool(said.get("encrypt", False)),
            "threads": int(said.get("threads", 0)),
            "task": task,
        }

    # --- derived objects --------------------------------------------------------------------------------------

    def model_layout(self) -> str:
        """Computes a short hash of the model's names, shapes and dtypes, for comparing ranks."""
        from farflung.loop import fingerprint
        from farflung.seeding import generator

        return fingerprint(self.task.model(generator(self.seed, "model")))

    def make_shares(self) -> list[SampleIds] | None:
        """Creates each replica's share of the training samples; None if all draw from all samples.

        Raises:
          BadInput: The partition is impossible, or leaves a replica without samples.
        """
        from farflung.data import PARTITIONS

        partition: Partition | str | None = self.partition
        if isinstance(partition, str):
            factories: dict[str, Callable[..., Partition | None]] = {**PARTITIONS, "shared": lambda: None}
            partition = build("partition", partition, factories)
        if partition is None:
            return None
        train, _ = self.task.datasets()
        shares = partition.split(train, self.workers, seed=self.seed)
        for rank, share in enumerate(shares):
            if not len(share):
                raise ConfigError(
                    f"--partition {self.split_text}: replica {rank} gets no sample; use fewer replicas or another "
                    "split"
                )
        return shares

    @property
    def split_text(self) -> str:
        """Text form of the partition of the training set."""
        from farflung.data import PARTITIONS

        return text_of(self.partition, PARTITIONS)

    def split(self) -> list[Share]:
        """Returns size and labels of each replica's share; empty if all draw from all samples."""
        from farflung.data import describe

        shares = self.make_shares()
        return [] if shares is None else describe(shares, self.task.datasets()[0].labels)

    def split_json(self) -> dict[str, Json]:
        """Returns the partition and its shares as JSON, for summaries."""
        return {"how": self.split_text, "shares": [share.to_json() for share in self.split()]}

    def check(self) -> list[Share]:
        """Checks the configuration before any process is started.

        Returns:
          Size and labels of each replica's share of the training set; empty if all draw from all samples.

        Raises:
          BadInput: The configuration cannot run; the message states the remedy.
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
        """Checks that all parts support the loss of a replica."""
        reason = self.recipe.parts(self.seed).needs_all
        if not reason and self.recipe.collective == "native":
            reason = "the backend's own collectives need all replicas: choose another --collective"
        if not reason and self.split_text != "shared":
            reason = (
                f"--partition {self.split_text}: the share of a lost replica would be missing: choose shared"
            )
        if reason:
            raise ConfigError(f"--elastic {self.elastic}: {reason}")

    def check_carried(self) -> None:
        """Checks that other processes can build this run from its configuration.

        Raises:
          ConfigError: A part cannot be built there; the message names it and the remedy.
        """
        for name, value in self.to_json().items():
            if isinstance(value, str) and not is_carried(value):
                raise ConfigError(
                    f"{name} {value}: workers in processes of their own can only import it: give a class, function or "
                    "frozen dataclass of a module (not of the script itself), or start the script under torchrun"
                )

    def check_resumable(self, folder: RunFolder) -> None:
        """Checks that the newest checkpoint of a run belongs to this configuration.

        Raises:
          BadInput: The checkpoint does not fit.
        """
        from farflung.loop import check_model, check_optimizer_kind, check_share
        from farflung.seeding import generator

        shares = self.make_shares()
        for rank in range(self.workers):
            checkpoints = folder.checkpoints(rank, self.workers, leader=False, any_size=bool(self.elastic))
            step = checkpoints.newest()
            shared_state, local_state = checkpoints.load(step)
            location = f"{checkpoints.folder}, step {step}"
            if rank == 0:
                model = self.task.model(generator(self.seed, "model"))
                check_model(shared_state, model, location)
                check_optimizer_kind(local_state, self.training.make_optimizer(model.parameters()), location)
            check_share(local_state, None if shares is None else shares[rank], location)
            if step >= self.steps:
                raise ConfigError(f"--steps {self.steps}: the run in {folder.path} has done {step} already")

    def to_json(self) -> dict[str, Json]:
        """Returns all settings by name, for the run's folder and comparison of ranks; objects as text."""
        names = [field.name for field in fields(self) if field.name in settings_of(type(self))]
        run_settings = {name: getattr(self, name) for name in names}
        members = {"recipe": self.recipe.name, **self.training.to_json(), **self.recipe.settings}
        return {"workload": self.workload, **members, **run_settings, "partition": self.split_text}

    @classmethod
    def stored_in(cls, folder: RunFolder) -> dict[str, Json]:
        """Loads the settings of the run in a folder.

        Raises:
          BadInput: There is no run, or it is damaged or of another kind.
        """
        stored_settings, settings = folder.stored_config(), cls.settings()
        if stored_settings.keys() != settings.keys():
            raise CheckpointError(f"{folder.config}: not of a run that farflung {cls.command} has made")
        for name, value in stored_settings.items():
            settings[name].read(value, f"{folder.config}: {name}")
        return stored_settings


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedConfig(RunConfig):
    """Complete configuration of a run in virtual time.

    Args:
      workers: Number of replicas; when not given, the network's number of nodes, or 4.
      network: Network between the replicas: a name (see ``farflung list networks``) or a TOML file; lan-1g when not
        given.
      connections: Number of TCP connections of each pair of replicas for bulk data, or auto: by rate, round trip and
        loss; the network's own when not given, which is 1 in those with a name.
      device: Device of each replica: a name (see ``farflung list devices``) or a TOML file; cpu-core when not given.
      faults: TOML file of a fault plan.
      count_evaluation: Let evaluations and checkpoints take time on the simulated clock; they take none when not given.

    Raises:
      ConfigError: A value is out of range.
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
        return f"{self.workload}, {self.recipe.name}, {self.network_name}"

    @property
    def network_name(self) -> str:
        """Name of the network, or its file."""
        return self.network if isinstance(self.network, str) else self.network.name

    @classmethod
    @override
    def _resolved(cls, said: dict[str, Any], task: Workload | None) -> dict[str, Any]:
        world = {name: said.get(name, value) for name, value in _WORLD.items()}
        count = _profile(world["network"]).nodes
        return {**RunConfig._resolved({"workers": count or 4, **said}, task), **world}

    def make_network(self) -> NetworkProfile:
        """Creates the profile of the network between the replicas."""
        with naming(self.network) if isinstance(self.network, str) else nullcontext():
            profile = _profile(self.network).for_nodes(self.ranks)
        if self.connections == "":
            return profile
        return replace(profile, tcp_connections=self.connections)  # type: ignore[arg-type]

    def make_faults(self) -> FaultPlan:
        """Creates the fault plan."""
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
        """Creates the virtual world: clock, network and devices."""
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
        """Returns network and device of the simulation as JSON, for summaries."""
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
"""Defaults of settings that only runs in virtual time have."""


def _training_settings() -> dict[str, Setting]:
    settings = settings_of(Training)
    about = (
        "Samples per replica and step; auto: as many as by the workload's own in a step of all, of which each replica "
        "takes as many as it is fast (the sampler balanced)"
    )
    return {**settings, "batch_size": replace(settings["batch_size"], about=about, words=(AUTO,))}


def variant(text: str) -> dict[str, Json]:
    """Parses a recipe with changes to settings, without checking their values.

    >>> parse_variant("synchronous(codec=topk(density=0.01), learning_rate=0.02)")
    {'recipe': 'synchronous', 'codec': 'topk(density=0.01)', 'learning_rate': 0.02}

    Raises:
      ConfigError: The text is malformed, or has a setting that a recipe cannot change.
    """
    changeable = {**_training_settings(), **member_settings()}
    del changeable["seed"]
    name, changes = changes_of(text, changeable)
    return {"recipe": name, **changes}


def _made_workload(what: object, data: str) -> Workload:
    from farflung.workloads import check_workload, workload

    options = {} if data == "auto" else {"data": data}
    if isinstance(what, str):
        return workload(what, **options)
    task: Any = what(**options) if isinstance(what, type) or not hasattr(what, "datasets") else what  # type: ignore[operator]
    if options and task is what:
        raise ConfigError(f"--data {data}: {what!r} is made already")
    return check_workload(task)


def _by_speed(how: Recipe, seed: int) -> Recipe:
    """Returns the recipe with batch sizes in proportion to the speed of replicas."""
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
