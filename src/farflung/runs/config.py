"""Resolved configurations of runs on real workers and in virtual time."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias

from typing_extensions import override

from farflung.comm import Endpoint
from farflung.config import Setting, Training, check_ranges, list_settings
from farflung.devices import DeviceProfile, find_device
from farflung.errors import CheckpointError, ConfigError, UnknownName
from farflung.faults import FaultPlan, load_faults
from farflung.files import prefix_errors
from farflung.network import NetworkProfile, find_network
from farflung.recipes import FAMILIES, Recipe, parse_recipe
from farflung.recipes.changes import parse_changes
from farflung.recipes.recipe import list_component_settings
from farflung.spec import build, format_spec, is_buildable
from farflung.types import Json, SampleIds, Workload
from farflung.types.data import Partition

# Commands read their options from these classes, so modules that import torch are imported lazily.
if TYPE_CHECKING:
    import torch

    from farflung.data import Share
    from farflung.decisions import DecisionLog
    from farflung.runs.folder import RunFolder
    from farflung.sim import VirtualWorld

__all__ = [
    "DEFAULT_COMPARED",
    "DEFAULT_DEVICE",
    "DEFAULT_NETWORK",
    "RunConfig",
    "RunOptions",
    "Settings",
    "SimulatedConfig",
    "parse_variant",
]

DEFAULT_TEXTS = {
    **dict.fromkeys(
        ("batch_size", "learning_rate", "momentum", "weight_decay", "steps"), "the workload's own"
    ),
    "evaluate_every": "a tenth of the steps",
    "checkpoint_every": "a fifth of the steps",
}
"""Descriptions of defaults that depend on the workload or other settings."""
AUTO_BATCH_SIZE = "auto"
"""Value of the batch size that divides a step's samples by the speed of replicas."""
DEFAULT_WORKLOAD, DEFAULT_RECIPE = "fashion-mnist/cnn", "synchronous"
DEFAULT_NETWORK = "lan-1g"
"""Default network of a simulated run."""
DEFAULT_DEVICE = "cpu-core"
"""Default device of simulated replicas."""
DEFAULT_COMPARED = ("synchronous", "synchronous(codec=int8)", "parameter_server")
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
        min_replicas, max_ranks = self.min_replicas, self.max_ranks
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
                "majority, or 1 together with --elastic",
            ),
            threads=(self.threads >= 0, "1 or more, or 0 to leave it to the machine"),
            deadline=(0 < self.deadline < math.inf, "a number of seconds above 0"),
        )

    @property
    def title(self) -> str:
        return f"{self.workload}, {self.recipe.text}"

    @property
    def seed(self) -> int:
        return self.training.seed

    @property
    def min_replicas(self) -> int:
        """Smallest number of replicas with which an elastic run continues."""
        return self._elastic_range[0]

    @property
    def max_ranks(self) -> int:
        """Largest number of ranks during the run, including lost ones."""
        return self._elastic_range[1] if self.elastic else self.workers

    @property
    def _elastic_range(self) -> tuple[int, int]:
        low, _, high = self.elastic.partition(":")
        with suppress(ValueError):
            return int(low), int(high) if high else self.workers
        return 0, 0

    @property
    def steps(self) -> int:
        return self.training.steps

    # --- settings ---------------------------------------------------------------------------------------------

    @classmethod
    def list_settings(cls) -> dict[str, Setting]:
        """Returns all settings by name: of the run, its training, and the components of its recipe."""
        run_settings = list_settings(cls)
        defaults = {**dict.fromkeys(list_component_settings(), "the recipe's"), **DEFAULT_TEXTS}
        part_settings = {
            name: replace(
                setting,
                description=f"{setting.description.rstrip('.')}; {defaults.get(name, setting.default)} when not given",
            )
            for name, setting in {**_list_training_settings(), **list_component_settings()}.items()
        }
        recipe_setting = Setting("recipe", str, "How to train together; synchronous when not given", None)
        workload_setting = run_settings.pop("workload")
        return {"workload": workload_setting, "recipe": recipe_setting, **part_settings, **run_settings}

    @classmethod
    def resolve(cls, *layers: Settings, task: Workload | None = None) -> Self:
        """Resolves settings: later layers override earlier ones, and all override the recipe and workload.

        If a layer names a recipe, that recipe's components replace those of earlier layers.

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
                layer_settings = {**parse_variant(str(layer_settings.pop("recipe"))), **layer_settings}
            dropped = Recipe().settings if "recipe" in layer_settings else {}
            values = {
                **{name: value for name, value in values.items() if name not in dropped},
                **layer_settings,
            }
        settings = cls.list_settings()
        for name, value in values.items():
            if name not in settings:
                raise UnknownName("setting", name, settings)
            if isinstance(value, str) and not is_buildable(value):
                raise ConfigError(
                    f"{name} {value}: the run was made with an object that has no text: give it again"
                )
            if settings[name].kind is not str:
                settings[name].convert(value, name)
        return cls(**cls._resolve_fields(values, task))

    @classmethod
    def _resolve_fields(cls, settings: dict[str, Any], task: Workload | None) -> dict[str, Any]:
        """Returns the value of each field; removes an automatic batch size from ``settings``."""
        from farflung.workloads import WORKLOADS

        data = str(settings.get("data", "auto"))
        workload = settings.get("workload", DEFAULT_WORKLOAD)
        task = task or _create_workload(workload, data)
        is_balanced = settings.get("batch_size") == AUTO_BATCH_SIZE
        if is_balanced:
            del settings["batch_size"]
        training = Training.resolve(
            task.defaults, {k: v for k, v in settings.items() if k in list_settings(Training)}
        )
        periods = {"evaluate_every": training.steps // 10, "checkpoint_every": training.steps // 5}
        default_periods: dict[str, Any] = {
            name: max(1, steps) for name, steps in periods.items() if settings.get(name) is None
        }
        components = {name: settings[name] for name in Recipe().settings if name in settings}
        base_recipe: Any = settings.get("recipe", DEFAULT_RECIPE)
        if isinstance(base_recipe, str):  # a full set of components needs no preset
            base_recipe = (
                Recipe(base_recipe) if components.keys() >= {*FAMILIES} else parse_recipe(base_recipe)
            )
        base_recipe = base_recipe.with_components(**components)
        if is_balanced:
            base_recipe = _balance_by_speed(base_recipe, training.seed)
        needs_shares = base_recipe.build_components(training.seed).needs_shares
        return {
            "workload": format_spec(workload, WORKLOADS)
            if isinstance(workload, str) or callable(workload)
            else f"<{task.name}>",
            "recipe": base_recipe,
            "training": replace(training, **default_periods),
            "workers": int(settings.get("workers", 2)),
            "data": data,
            "partition": settings.get("partition", "iid" if needs_shares else "shared"),
            "elastic": str(settings.get("elastic", "")),
            "quorum": str(settings.get("quorum", "majority")),
            "deadline": float(settings.get("deadline", 60.0)),
            "encrypt": bool(settings.get("encrypt", False)),
            "threads": int(settings.get("threads", 0)),
            "task": task,
        }

    # --- derived objects --------------------------------------------------------------------------------------

    def compute_model_hash(self) -> str:
        """Computes a short hash of the model's names, shapes and dtypes, for comparing ranks."""
        from farflung.loop import compute_fingerprint
        from farflung.seeding import create_generator

        return compute_fingerprint(self.task.build_model(create_generator(self.seed, "model")))

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
        train, _ = self.task.load_datasets()
        shares = partition.split(train, self.workers, seed=self.seed)
        for rank, share in enumerate(shares):
            if not len(share):
                raise ConfigError(
                    f"--partition {self.partition_text}: replica {rank} gets no sample; use fewer replicas or another "
                    "split"
                )
        return shares

    @property
    def partition_text(self) -> str:
        """Text form of the partition of the training set."""
        from farflung.data import PARTITIONS

        return format_spec(self.partition, PARTITIONS)

    def describe_shares(self) -> list[Share]:
        """Returns size and labels of each replica's share; empty if all draw from all samples."""
        from farflung.data import describe_parts

        shares = self.make_shares()
        return [] if shares is None else describe_parts(shares, self.task.load_datasets()[0].labels)

    def describe_partition(self) -> dict[str, Json]:
        """Returns the partition and its shares as JSON, for summaries."""
        return {
            "partition": self.partition_text,
            "shares": [share.to_json() for share in self.describe_shares()],
        }

    def check(self) -> list[Share]:
        """Checks the configuration before any process is started.

        Returns:
          Size and labels of each replica's share of the training set; empty if all draw from all samples.

        Raises:
          BadInput: The configuration cannot run; the message states the remedy.
        """
        schedule = self.recipe.build_components(self.seed).schedule
        schedule.check(self.workers)
        train, _ = self.task.load_datasets()
        if self.max_ranks > len(train):
            option = f"--workers {self.workers}" if self.workers > len(train) else f"--elastic {self.elastic}"
            raise ConfigError(
                f"{option}: {self.workload} has {len(train)} training samples; "
                "use at most one replica per sample"
            )
        if self.training.batch_size > len(train):
            raise ConfigError(
                f"--batch-size {self.training.batch_size}: {self.workload} has {len(train)} training samples; use at "
                "most as many"
            )
        shares = self.describe_shares()
        self.recipe.build_components(self.seed, 0 if shares else None)
        if self.elastic:
            self._check_elastic()
        return shares

    def _check_elastic(self) -> None:
        """Checks that all parts support the loss of a replica."""
        reason = self.recipe.build_components(self.seed).reason_all_needed
        if not reason and self.recipe.collective == "native":
            reason = "the backend's own collectives need all replicas: choose another --collective"
        if not reason and self.partition_text != "shared":
            reason = f"--partition {self.partition_text}: the share of a lost replica would be missing: choose shared"
        if reason:
            raise ConfigError(f"--elastic {self.elastic}: {reason}")

    def check_buildable(self) -> None:
        """Checks that other processes can build this run from its configuration.

        Raises:
          ConfigError: A part cannot be built there; the message names it and the remedy.
        """
        for name, value in self.to_json().items():
            if isinstance(value, str) and not is_buildable(value):
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
        from farflung.runs.replicas import find_recipe_changes
        from farflung.seeding import create_generator

        shares = self.make_shares()
        for rank in range(self.workers):
            checkpoints = folder.get_checkpoints(
                rank, self.workers, is_leader=False, allows_any_size=bool(self.elastic)
            )
            step = checkpoints.find_newest()
            shared_state, local_state = checkpoints.load(step)
            location = f"{checkpoints.folder}, step {step}"
            if rank == 0:
                model = self.task.build_model(create_generator(self.seed, "model"))
                check_model(shared_state, model, location)
                optimizer = self.training.make_optimizer(model.parameters())
                check_optimizer_kind(local_state, optimizer, location)
                changes = find_recipe_changes(shared_state, self.recipe, location)
                self._check_recipe_change(changes, optimizer, location)
            check_share(local_state, None if shares is None else shares[rank], location)
            if step >= self.steps:
                raise ConfigError(f"--steps {self.steps}: the run in {folder.path} has done {step} already")

    def _check_recipe_change(
        self, changes: Mapping[str, Json], optimizer: torch.optim.Optimizer, location: str
    ) -> None:
        """Checks that a run can continue with another recipe, given the checkpoint's differing components.

        Raises:
          CheckpointError: It cannot.
        """
        from farflung.moments import check_averageable

        if not changes:
            return
        resumes = "resume with the recipe that it was made with"
        for family, text in changes.items():
            if family in ("stream", "sharing"):
                raise CheckpointError(
                    f"{location}: its {family} is {text}, and samples in use stay there: {resumes}"
                )
            if "<" in str(text):
                raise CheckpointError(
                    f"{location}: its {family} is {text}, which only its own script makes: {resumes}"
                )
        old = self.recipe.with_components(**changes).build_components(self.seed)
        if old.sharing.has_data_transfers:
            raise CheckpointError(
                f"{location}: replicas share samples (--sharing {self.recipe.sharing}): {resumes}"
            )
        if self.elastic:
            raise CheckpointError(f"{location}: a run with --elastic cannot change its recipe: {resumes}")
        if not old.schedule.is_gradient_only:
            with prefix_errors(location):
                check_averageable(optimizer, resumes)

    def to_json(self) -> dict[str, Json]:
        """Returns all settings by name, for the run's folder and comparison of ranks; objects as text."""
        names = [field.name for field in fields(self) if field.name in list_settings(type(self))]
        run_settings = {name: getattr(self, name) for name in names}
        settings = {"recipe": self.recipe.name, **self.training.to_json(), **self.recipe.settings}
        return {"workload": self.workload, **settings, **run_settings, "partition": self.partition_text}

    @classmethod
    def load_settings(cls, folder: RunFolder) -> dict[str, Json]:
        """Loads the settings of the run in a folder.

        Raises:
          BadInput: There is no run, or it is damaged or of another kind.
        """
        stored_settings, settings = folder.load_config(), cls.list_settings()
        differences = {
            "lacks": [name for name in settings if name not in stored_settings],
            "has unknown": [name for name in stored_settings if name not in settings],
        }
        if any(differences.values()):
            reason = " and ".join(
                f"{verb} {_list_few(names)}" for verb, names in differences.items() if names
            )
            raise CheckpointError(
                f"{folder.config_path}: not of a run that farflung {cls.command} of this version has made: it {reason}"
            )
        for name, value in stored_settings.items():
            settings[name].convert(value, f"{folder.config_path}: {name}")
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
        return f"{self.workload}, {self.recipe.text}, {self.network_name}"

    @property
    def network_name(self) -> str:
        """Name of the network, or its file."""
        return self.network if isinstance(self.network, str) else self.network.name

    @classmethod
    @override
    def _resolve_fields(cls, settings: dict[str, Any], task: Workload | None) -> dict[str, Any]:
        world = {name: settings.get(name, value) for name, value in _WORLD_DEFAULTS.items()}
        count = _load_profile(world["network"]).nodes
        return {**RunConfig._resolve_fields({"workers": count or 4, **settings}, task), **world}

    def make_network(self) -> NetworkProfile:
        """Creates the profile of the network between the replicas."""
        with prefix_errors(self.network) if isinstance(self.network, str) else nullcontext():
            profile = _load_profile(self.network).with_nodes(self.max_ranks)
        if self.connections == "":
            return profile
        return replace(profile, tcp_connections=self.connections)  # type: ignore[arg-type]

    def make_faults(self) -> FaultPlan:
        """Creates the fault plan."""
        from farflung.sim.fault_environment import check_plan

        if isinstance(self.faults, FaultPlan):
            return self.faults
        if not self.faults:
            return FaultPlan()
        plan = load_faults(Path(self.faults))
        with prefix_errors(self.faults):
            check_plan(plan, self.max_ranks, needs_all_members=not self.elastic)
        return plan

    def make_device(self) -> DeviceProfile:
        """Creates the profile of each replica's device."""
        from farflung.calibration import count_forward_flops

        if isinstance(self.device, DeviceProfile):
            return self.device
        return find_device(self.device, forward_flops=count_forward_flops(self.task))

    def compute_world_hash(self) -> str:
        """Computes a hash of network, device and faults as they are, for files that were changed under their names."""
        world = (self.make_network(), self.make_device(), self.make_faults())
        return hashlib.sha256(repr(world).encode(errors="surrogatepass")).hexdigest()

    def make_world(self, decisions: DecisionLog | None = None) -> VirtualWorld:
        """Creates the virtual world: clock, network and devices."""
        from farflung.sim import VirtualWorld

        return VirtualWorld(
            self.max_ranks,
            network=self.make_network(),
            device=self.make_device(),
            seed=self.seed,
            faults=self.make_faults(),
            deadline_s=self.deadline,
            decisions=decisions,
            count_evaluation=self.count_evaluation or bool(self.elastic),
            needs_all_members=not self.elastic,
            absent_ranks=range(self.workers, self.max_ranks),
        )

    @override
    def check(self) -> list[Share]:
        from farflung.comm import find_collective

        if find_collective(self.recipe.collective).is_native:
            raise ConfigError(
                f"the backend's own collectives (--collective {self.recipe.collective}) run only on real machines: "
                "choose another collective or recipe"
            )
        if self.recipe.build_components(self.seed).stream.is_live:
            raise ConfigError(
                f"--stream {self.recipe.component_texts['stream']}: its samples come when they come, and "
                f"virtual time would "
                "stand still meanwhile: use farflung train, or simulate rate(...)"
            )
        shares = RunConfig.check(self)  # of the number of replicas too, before they are created
        self.make_world()
        return shares

    def describe_world(self) -> dict[str, Json]:
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
        world = {
            **{name: getattr(self, name) for name in _WORLD_DEFAULTS},
            "connections": str(self.connections),
        }
        objects = {
            name: f"<{value if isinstance(value, FaultPlan) else value.name}>"
            for name, value in world.items()
            if not isinstance(value, str | int)
        }
        return {**RunConfig.to_json(self), **world, **objects}


_WORLD_DEFAULTS: dict[str, Any] = {
    "network": DEFAULT_NETWORK,
    "connections": "",
    "device": DEFAULT_DEVICE,
    "faults": "",
    "count_evaluation": False,
}
"""Defaults of settings that only runs in virtual time have."""


def _list_training_settings() -> dict[str, Setting]:
    """Returns the settings of :class:`Training` by name; the batch size may also be ``auto``."""
    settings = list_settings(Training)
    about = (
        "Samples per replica and step; auto: as many as by the workload's own in a step of all, of which each replica "
        "takes as many as it is fast (the sampler balanced)"
    )
    return {
        **settings,
        "batch_size": replace(settings["batch_size"], description=about, choices=(AUTO_BATCH_SIZE,)),
    }


def parse_variant(text: str) -> dict[str, Json]:
    """Parses a recipe with changes to settings, without checking their values.

    >>> parse_variant("synchronous(codec=topk(density=0.01), learning_rate=0.02)")
    {'recipe': 'synchronous', 'codec': 'topk(density=0.01)', 'learning_rate': 0.02}

    Raises:
      ConfigError: The text is malformed, or has a setting that a recipe cannot change.
    """
    changeable = {**_list_training_settings(), **list_component_settings()}
    del changeable["seed"]
    name, changes = parse_changes(text, changeable)
    return {"recipe": name, **changes}


def _create_workload(source: object, data: str) -> Workload:
    from farflung.workloads import check_workload, create_workload

    options = {} if data == "auto" else {"data": data}
    if isinstance(source, str):
        return create_workload(source, **options)
    is_factory = isinstance(source, type) or not hasattr(source, "load_datasets")
    task: Any = source(**options) if is_factory else source  # type: ignore[operator]
    if options and task is source:
        raise ConfigError(f"--data {data}: {source!r} is made already")
    return check_workload(task)


def _balance_by_speed(recipe: Recipe, seed: int) -> Recipe:
    """Returns the recipe with batch sizes in proportion to the speed of replicas."""
    sampler = recipe.build_components(seed).sampler
    if sampler.is_balanced:
        return recipe
    if not sampler.has_shared_order:
        raise ConfigError(
            f"--batch-size {AUTO_BATCH_SIZE}: shares out what the uniform sampler draws, and this is sampler "
            f"{recipe.component_texts['sampler']}: give a number, or choose another --sampler or --recipe"
        )
    recipe = recipe.with_components(sampler="balanced")
    with prefix_errors(f"--batch-size {AUTO_BATCH_SIZE}"):
        recipe.build_components(seed)
    return recipe


def _list_few(names: Sequence[str]) -> str:
    """Lists names in a message, and counts those that would make it long."""
    return ", ".join([*names[:5], *([f"{len(names) - 5} more"] if len(names) > 5 else [])])


def _load_profile(network: str | NetworkProfile) -> NetworkProfile:
    return find_network(network) if isinstance(network, str) else network
