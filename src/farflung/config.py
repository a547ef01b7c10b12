"""Settings as fields of dataclasses, and the settings of a training run."""

from __future__ import annotations

import math
import re
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from farflung._docstrings import get_docstring
from farflung.errors import ConfigError
from farflung.rates import RATES
from farflung.spec import build, format_spec
from farflung.types import Json, OptimizerFactory, RateSchedule

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = [
    "BUCKET_NBYTES",
    "ON_NONFINITE",
    "Setting",
    "Training",
    "check_ranges",
    "list_settings",
]

BUCKET_NBYTES = 25 << 20
"""Size of gradient buckets except the first, as in DistributedDataParallel."""
ON_NONFINITE = ("stop", "skip", "exclude")
"""Values of ``--on-nonfinite``."""
_KIND_NAMES: dict[type, str] = {
    bool: "true or false",
    float: "a number",
    int: "a whole number",
    Path: "a path, in quotes",
    str: "text, in quotes",
}


@dataclass(frozen=True, slots=True)
class Setting:
    """Setting of a run: a command-line option, a key of a file, or an argument.

    Args:
      name: Name of the field.
      kind: ``int``, ``float``, ``bool``, ``str`` or ``Path``; objects are given as text outside Python.
      description: Description from the docstring, on one line, without markup.
      default: Default of the field; ``None`` without one.
      choices: Strings that are valid in addition to ``kind``.
    """

    name: str
    kind: type
    description: str
    default: object
    choices: tuple[str, ...] = ()

    def convert(self, value: object, location: str) -> Any:
        """Converts a value to this setting's kind; integers are valid numbers.

        Raises:
          ConfigError: The value is of another kind; the message begins with ``location``.
        """
        if isinstance(value, str) and value in self.choices:
            return value
        kinds: Any = {float: int | float, Path: str | Path}.get(self.kind, self.kind)
        fits = isinstance(value, kinds) and isinstance(value, bool) == (self.kind is bool)
        if not fits or (self.kind is Path and not value):
            raise ConfigError(f"{location} must be {_KIND_NAMES[self.kind]}, not {value!r}")
        return self.kind(value)


def list_settings(owner: type) -> dict[str, Setting]:
    """Returns the settings of a dataclass by name, from its fields that are numbers or text.

    Descriptions are read from ``Args:`` in the docstrings of the class and its bases.
    """
    descriptions: dict[str, str] = {}
    for base in reversed(owner.__mro__):
        _, _, text = get_docstring(base).partition("Args:\n")
        for name, description in re.findall(r"^  (\w+): (.*(?:\n    .*)*)", text, re.MULTILINE):
            plain = " ".join(description.split())
            descriptions[name] = (plain[:1].upper() + plain[1:]).replace("``", "")
    hints, settings = get_type_hints(owner), dict[str, Setting]()
    for field in fields(owner):
        hint = hints[field.name]
        members = get_args(hint) if get_origin(hint) in (types.UnionType, Union) else (hint,)
        words = [word for member in members if get_origin(member) is Literal for word in get_args(member)]
        kinds = [*members, *map(type, words)]
        kind = next((kind for kind in kinds if kind in (bool, int, float, str, Path)), None)
        if kind is not None and field.init:
            default = None if field.default is MISSING else field.default
            choices = tuple(words) if kind is not str else ()
            description = descriptions.get(field.name, "")
            settings[field.name] = Setting(field.name, kind, description, default, choices)
    return settings


def check_ranges(settings: object, **ranges: tuple[bool, str]) -> None:
    """Checks that settings are in their ranges.

    Args:
      settings: Object with the settings as attributes.
      ranges: For each name, a bool that is True for a valid value, and a description of the range.

    Raises:
      ConfigError: A value is out of range; the message names the option.
    """
    for name, (fits, range_words) in ranges.items():
        if not fits:
            option = name.replace("_", "-")
            raise ConfigError(f"--{option} {getattr(settings, name)}: must be {range_words}")


@dataclass(frozen=True, slots=True)
class Training:
    """Training settings of a run, equal on all replicas.

    Args:
      steps: Number of parameter updates.
      batch_size: Number of samples per replica and step.
      learning_rate: Learning rate of the optimizer.
      momentum: Momentum of SGD and LARS.
      weight_decay: Weight decay of the optimizer.
      optimizer: Optimizer of :mod:`farflung.optimizers` as text, such as ``adamw(betas=(0.9, 0.95))``, or a factory
        object.
      clip_norm: Largest norm of the gradient that the optimizer steps on; 0 for no limit.
      on_nonfinite: Action on all replicas if the loss of one is NaN or infinite: ``stop`` the run, ``skip`` the update,
        or ``exclude`` that replica from the mean.
      seed: Seed of all random numbers.
      evaluate_every: Number of steps between evaluations on the test set; 0 evaluates only at the end.
      checkpoint_every: Number of steps between checkpoints; 0 saves only at the end.
      learning_rate_schedule: Schedule of :mod:`farflung.rates` as text, such as ``cosine(warmup=500)``, or a schedule
        object.

    Raises:
      ConfigError: A value is out of range; the message names the option.
    """

    steps: int
    batch_size: int
    learning_rate: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    optimizer: str | OptimizerFactory = "sgd"
    clip_norm: float = 0.0
    on_nonfinite: str = "stop"
    seed: int = 0
    evaluate_every: int = 0
    checkpoint_every: int = 0
    learning_rate_schedule: str | RateSchedule = "constant"

    def __post_init__(self) -> None:
        minima = {"steps": 1, "batch_size": 1, "seed": 0, "evaluate_every": 0, "checkpoint_every": 0}
        check_ranges(
            self,
            **{name: (getattr(self, name) >= low, f"{low} or more") for name, low in minima.items()},
            learning_rate=(0 < self.learning_rate < math.inf, "a number above 0"),
            momentum=(0 <= self.momentum < 1, "in [0, 1)"),
            weight_decay=(0 <= self.weight_decay < math.inf, "0 or more"),
            clip_norm=(0 <= self.clip_norm < math.inf, "0 or more"),
            on_nonfinite=(self.on_nonfinite in ON_NONFINITE, f"one of {', '.join(ON_NONFINITE)}"),
        )
        self._build_optimizer_factory()
        self.make_rate_schedule()

    @staticmethod
    def resolve(defaults: Mapping[str, Json], overrides: Mapping[str, Json]) -> Training:
        """Combines the settings that are not ``None`` with the workload's defaults."""
        chosen = {name: value for name, value in overrides.items() if value is not None}
        base = {name: value for name, value in defaults.items() if name in Training.__dataclass_fields__}
        return Training(**{**base, **chosen})  # type: ignore[arg-type]

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Creates an optimizer of the trainable parameters."""
        return self._build_optimizer_factory().make(
            [parameter for parameter in parameters if parameter.requires_grad],
            learning_rate=self.learning_rate,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
        )

    def make_rate_schedule(self) -> RateSchedule:
        """Builds the learning-rate schedule."""
        setting = self.learning_rate_schedule
        schedule = build("learning-rate schedule", setting, RATES) if isinstance(setting, str) else setting
        if not isinstance(schedule, RateSchedule):
            raise ConfigError(f"--learning-rate-schedule {setting!r}: neither text nor a RateSchedule")
        return schedule

    def to_json(self) -> dict[str, Json]:
        """Returns the settings as JSON for telemetry and comparison, objects by :func:`farflung.spec.format_spec`."""
        from farflung.optimizers import OPTIMIZERS

        settings = {field.name: getattr(self, field.name) for field in fields(self)}
        registries: dict[str, Mapping[str, Callable[..., object]]] = {
            "optimizer": OPTIMIZERS,
            "learning_rate_schedule": RATES,
        }
        parts = {name: format_spec(settings[name], registry) for name, registry in registries.items()}
        return {**settings, **parts}

    def _build_optimizer_factory(self) -> OptimizerFactory:
        from farflung.optimizers import OPTIMIZERS, SGDSettings  # imports torch, which settings do not need

        setting = self.optimizer
        factory = build("optimizer", setting, OPTIMIZERS) if isinstance(setting, str) else setting
        if not isinstance(factory, OptimizerFactory):
            raise ConfigError(f"--optimizer {setting!r}: neither text nor an OptimizerFactory")
        if isinstance(factory, SGDSettings) and factory.nesterov and not self.momentum:
            raise ConfigError(f"--optimizer {self.optimizer}: Nesterov's momentum needs a --momentum above 0")
        return factory
