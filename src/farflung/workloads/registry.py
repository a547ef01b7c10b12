"""Workloads by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from farflung.data import CATALOG, Source
from farflung.errors import ConfigError, UnknownName
from farflung.spec import build
from farflung.types import Json, Workload
from farflung.workloads import classifiers, shakespeare, synthetic

__all__ = ["DATA", "WORKLOADS", "check_workload", "data_of", "workload"]

WORKLOADS: dict[str, Callable[..., Workload]] = {
    "cifar10/resnet18": classifiers.cifar10_resnet18,
    "cifar10/resnet20": classifiers.cifar10_resnet20,
    "cifar10/resnet32": classifiers.cifar10_resnet32,
    "cifar10/resnet8": classifiers.cifar10_resnet8,
    "cifar10/vgg": classifiers.cifar10_vgg,
    "cifar100/resnet50": classifiers.cifar100_resnet50,
    "cifar100/resnet8": classifiers.cifar100_resnet8,
    "covtype/softmax": classifiers.covtype_softmax,
    "fashion-mnist/cnn": classifiers.fashion_mnist_cnn,
    "fashion-mnist/mlp": classifiers.fashion_mnist_mlp,
    "synthetic/quadratic": synthetic.Quadratic,
    "tinyshakespeare/gpt": shakespeare.GPT,
    "tinyshakespeare/lstm": shakespeare.LSTM,
}
"""Each can be called without arguments; the arguments it takes are its options."""

DATA: dict[str, Source | None] = {
    "cifar10": CATALOG["cifar-10"],
    "cifar100": CATALOG["cifar-100"],
    "covtype": CATALOG["covtype"],
    "fashion-mnist": CATALOG["fashion-mnist"],
    "synthetic": None,
    "tinyshakespeare": CATALOG["tinyshakespeare"],
}
"""The data set that each family of workloads (the part of a name before the slash) trains on without options; ``None``
where the samples are made up."""


def data_of(name: str) -> Source | None:
    """The data set that the workload called ``name`` trains on without options; ``None`` where samples are made up."""
    return DATA[name.split("/", maxsplit=1)[0]]


def workload(name: str, **options: Json) -> Workload:
    """The workload called ``name``.

    Args:
      name: a key of :data:`WORKLOADS`; or ``module:name``, a workload, or a class or function that makes one, with
        options in brackets if wished: ``my_module:MyTask(dim=8)``.
      options: what that workload can be told, e.g. ``data="packaged"``.

    Raises:
      UnknownName: no such workload.
      ConfigError: an option it does not have, or something that is no workload.

    >>> workload("synthetic/quadratic", dim=8).name
    'synthetic/quadratic'
    """
    if ":" in name:
        return check_workload(build("workload", name, {}, options))
    try:
        factory = WORKLOADS[name]
    except KeyError:
        raise UnknownName("workload", name, [*WORKLOADS, "module:name of your own"]) from None
    known = list(inspect.signature(factory).parameters)
    for option in options:
        if option not in known:
            raise ConfigError(
                f"workload {name} has no option {option!r}; it has: {', '.join(known) or 'none'}"
            )
    return factory(**options)


def check_workload(made: object) -> Workload:
    """``made``, if it has all that a workload has.

    Raises:
      ConfigError: it lacks something; names it.
    """
    lacking = [part for part in _PARTS if not hasattr(made, part)]
    if lacking:
        raise ConfigError(
            f"{made!r} is no workload: it has no {', '.join(lacking)}; see farflung.types.Workload, or make one of a "
            "model and data sets by farflung.TorchWorkload"
        )
    return made  # type: ignore[return-value]


_PARTS = ("name", "defaults", "model", "loss", "metric", "datasets")
