"""Registry of workloads."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from farflung.data import CATALOG, Source
from farflung.errors import ConfigError, UnknownName
from farflung.spec import build
from farflung.types import Json, Workload
from farflung.workloads import classifiers, shakespeare, synthetic

__all__ = ["DATA", "WORKLOADS", "check_workload", "create_workload", "find_dataset"]

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
"""Workload factories by name; each can be called without arguments, and its arguments are the options."""

DATA: dict[str, Source | None] = {
    "cifar10": CATALOG["cifar-10"],
    "cifar100": CATALOG["cifar-100"],
    "covtype": CATALOG["covtype"],
    "fashion-mnist": CATALOG["fashion-mnist"],
    "synthetic": None,
    "tinyshakespeare": CATALOG["tinyshakespeare"],
}
"""Data set of each family of workloads (the part of a name before the slash) without options; ``None``: samples are
generated."""


def find_dataset(name: str) -> Source | None:
    """Finds the data set of the workload called ``name`` without options; ``None`` if samples are generated."""
    return DATA[name.split("/", maxsplit=1)[0]]


def create_workload(name: str, **options: Json) -> Workload:
    """Creates the workload called ``name``.

    Args:
      name: Key of :data:`WORKLOADS`; or ``module:name``, a workload or its class or factory, with options in
        brackets: ``my_module:MyTask(dim=8)``.
      options: Options of the workload, e.g. ``data="packaged"``.

    Raises:
      UnknownName: The workload does not exist.
      ConfigError: The workload lacks an option, or the object is no workload.

    >>> create_workload("synthetic/quadratic", dim=8).name
    'synthetic/quadratic'
    """
    if ":" in name:
        return check_workload(build("workload", name, {}, options))
    try:
        factory = WORKLOADS[name]
    except KeyError:
        raise UnknownName("workload", name, WORKLOADS, "module:name of your own") from None
    option_names = list(inspect.signature(factory).parameters)
    for option in options:
        if option not in option_names:
            raise ConfigError(
                f"workload {name} has no option {option!r}; it has: {', '.join(option_names) or 'none'}"
            )
    return factory(**options)


def check_workload(candidate: object) -> Workload:
    """Returns ``candidate`` as a workload; raises ConfigError if it lacks attributes of one.

    Raises:
      ConfigError: It lacks some; names them.
    """
    missing = [part for part in _ATTRIBUTES if not hasattr(candidate, part)]
    if missing:
        raise ConfigError(
            f"{candidate!r} is no workload: it has no {', '.join(missing)}; see farflung.types.Workload, or "
            f"make one of a "
            "model and data sets by farflung.TorchWorkload"
        )
    return candidate  # type: ignore[return-value]


_ATTRIBUTES = ("name", "defaults", "build_model", "compute_losses", "compute_metrics", "load_datasets")
