"""Settings: what can be set, as the fields of dataclasses; and those of a training run."""

from __future__ import annotations

import math
import re
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from farflung._docstrings import docstring_of
from farflung.errors import ConfigError
from farflung.rates import RATES
from farflung.spec import build, text_of
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
    "settings_of",
    "unknown_setting",
]

BUCKET_NBYTES = 25 << 20
"""Of a replica's gradient buckets, the first aside; DistributedDataParallel's choice too."""
ON_NONFINITE = ("stop", "skip", "exclude")
"""What ``--on-nonfinite`` may say."""
_WORDS: dict[type, str] = {
    bool: "true or false",
    float: "a number",
    int: "a whole number",
    Path: "a path, in quotes",
    str: "text, in quotes",
}


@dataclass(frozen=True, slots=True)
class Setting:
    """One thing that can be set: an option, a key of a file, an argument.

    Args:
      name: of the field.
      kind: ``int``, ``float``, ``bool``, ``str`` or ``Path``; what may be an object is text outside Python.
      about: what the docstring says of it, on one line, without markup.
      default: of the field; ``None`` where it has none.
      words: text that it may be besides.
    """

    name: str
    kind: type
    about: str
    default: object
    words: tuple[str, ...] = ()

    def read(self, value: object, where: str) -> Any:
        """Returns a value as one of this kind; whole numbers are numbers too.

        Raises:
          ConfigError: it is of another kind; the message begins with ``where``.
        """
        if isinstance(value, str) and value in self.words:
            return value
        kinds: Any = {float: int | float, Path: str | Path}.get(self.kind, self.kind)
        fits = isinstance(value, kinds) and isinstance(value, bool) == (self.kind is bool)
        if not fits or (self.kind is Path and not value):
            raise ConfigError(f"{where} must be {_WORDS[self.kind]}, not {value!r}")
        return self.kind(value)


def unknown_setting(what: str, name: str, known: Iterable[str]) -> ConfigError:
    """Returns the error for a setting that does not exist, with the closest name or all of them."""
    close = get_close_matches(name.replace("-", "_"), known := [*known], n=1)
    hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(sorted(known))}"
    return ConfigError(f"unknown {what} {name!r}; {hint}")


def settings_of(owner: type) -> dict[str, Setting]:
    """Returns the settings that the fields of a dataclass are, by name; only those whose values are numbers or text.

    What each is about is said under ``Args:`` in the docstrings of the class and of those that it is made from.
    """
    about: dict[str, str] = {}
    for each in reversed(owner.__mro__):
        _, _, text = docstring_of(each).partition("Args:\n")
        for name, words in re.findall(r"^  (\w+): (.*(?:\n    .*)*)", text, re.MULTILINE):
            plain = " ".join(words.split())
            about[name] = (plain[:1].upper() + plain[1:]).replace("``", "")
    hints, found = get_type_hints(owner), dict[str, Setting]()
    for field in fields(owner):
        hint = hints[field.name]
        members = get_args(hint) if get_origin(hint) in (types.UnionType, Union) else (hint,)
        words = [word for one in members if get_origin(one) is Literal for word in get_args(one)]
        kinds = [*members, *map(type, words)]
        kind = next((one for one in kinds if one in (bool, int, float, str, Path)), None)
        if kind is not None and field.init:
            default = None if field.default is MISSING else field.default
            named = tuple(words) if kind is not str else ()
            found[field.name] = Setting(field.name, kind, about.get(field.name, ""), default, named)
    return found


def check_ranges(settings: object, **ranges: tuple[bool, str]) -> None:
    """Checks the values of settings.

    Args:
      settings: their owner.
      ranges: by name, whether the value is in its range, and what it has to be.

    Raises:
      ConfigError: a value out of its range; names the option.
    """
    for name, (fits, range_words) in ranges.items():
        if not fits:
            option = name.replace("_", "-")
            raise ConfigError(f"--{option} {getattr(settings, name)}: must be {range_words}")


@dataclass(frozen=True, slots=True)
class Training:
    """How long and with what settings a model trains; equal on all replicas.

    Args:
      steps: updates of the parameters.
      batch_size: samples per replica and step.
      learning_rate: of the optimizer.
      momentum: of SGD and LARS.
      weight_decay: of the optimizer.
      optimizer: one of :mod:`farflung.optimizers` as text, such as ``adamw(betas=(0.9, 0.95))``, or an object that
        makes one.
      clip_norm: largest norm of the gradient that the optimizer steps on; 0: no limit.
      on_nonfinite: what all replicas do at a step where one's loss is NaN or infinite: ``stop`` the run, ``skip`` the
        update, or ``exclude`` that replica from the mean.
      seed: everything random derives from it.
      evaluate_every: steps between evaluations on the test set; 0: at the end only.
      checkpoint_every: steps between checkpoints; 0: at the end only.
      learning_rate_schedule: what becomes of the learning rate: one of :mod:`farflung.rates` as text, such as
        ``cosine(warmup=500)``, or an object of one's own.

    Raises:
      ConfigError: a value out of its range; names the option.
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
        leasts = {"steps": 1, "batch_size": 1, "seed": 0, "evaluate_every": 0, "checkpoint_every": 0}
        check_ranges(
            self,
            **{name: (getattr(self, name) >= least, f"{least} or more") for name, least in leasts.items()},
            learning_rate=(0 < self.learning_rate < math.inf, "a number above 0"),
            momentum=(0 <= self.momentum < 1, "in [0, 1)"),
            weight_decay=(0 <= self.weight_decay < math.inf, "0 or more"),
            clip_norm=(0 <= self.clip_norm < math.inf, "0 or more"),
            on_nonfinite=(self.on_nonfinite in ON_NONFINITE, f"one of {', '.join(ON_NONFINITE)}"),
        )
        self._optimizer_factory()
        self.make_rates()

    @staticmethod
    def resolve(defaults: Mapping[str, Json], given: Mapping[str, Json]) -> Training:
        """The settings given, the workload's defaults where one is ``None``."""
        chosen = {name: value for name, value in given.items() if value is not None}
        known = {name: value for name, value in defaults.items() if name in Training.__dataclass_fields__}
        return Training(**{**known, **chosen})  # type: ignore[arg-type]

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """A fresh optimizer of those parameters that are trained."""
        return self._optimizer_factory().make(
            [parameter for parameter in parameters if parameter.requires_grad],
            learning_rate=self.learning_rate,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
        )

    def make_rates(self) -> RateSchedule:
        """What becomes of the learning rate."""
        how = self.learning_rate_schedule
        made = build("learning-rate schedule", how, RATES) if isinstance(how, str) else how
        if not isinstance(made, RateSchedule):
            raise ConfigError(f"--learning-rate-schedule {how!r}: neither text nor a RateSchedule")
        return made

    def to_json(self) -> dict[str, Json]:
        """For telemetry and for comparing ranks; objects by :func:`farflung.spec.text_of`."""
        from farflung.optimizers import OPTIMIZERS

        told = {field.name: getattr(self, field.name) for field in fields(self)}
        known: dict[str, Mapping[str, Callable[..., object]]] = {
            "optimizer": OPTIMIZERS,
            "learning_rate_schedule": RATES,
        }
        return {**told, **{name: text_of(told[name], registry) for name, registry in known.items()}}

    def _optimizer_factory(self) -> OptimizerFactory:
        from farflung.optimizers import OPTIMIZERS, SGDSettings  # and torch, which settings do without

        how = self.optimizer
        made = build("optimizer", how, OPTIMIZERS) if isinstance(how, str) else how
        if not isinstance(made, OptimizerFactory):
            raise ConfigError(f"--optimizer {how!r}: neither text nor an OptimizerFactory")
        if isinstance(made, SGDSettings) and made.nesterov and not self.momentum:
            raise ConfigError(f"--optimizer {self.optimizer}: Nesterov's momentum needs a --momentum above 0")
        return made
