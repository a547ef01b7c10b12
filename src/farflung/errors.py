"""The exception tree: every error farflung raises on purpose.

:class:`BadInput` and its children are the user's to mend and end a command with exit code 2; :class:`RunLost`
and its children end a run that was under way, with exit code 1. Messages say what was wrong, where, and what
to do, on one or two lines.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from typing_extensions import override

__all__ = [
    "BadInput",
    "BadLabels",
    "BadParameter",
    "BadSamples",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DataMissing",
    "DeadlinePassed",
    "FarflungError",
    "LabError",
    "Left",
    "MissingExtra",
    "NonFinite",
    "PeerFailed",
    "PeerLost",
    "ProtocolError",
    "RunLost",
    "StateOutdated",
    "StorageError",
    "Suspended",
    "UnknownName",
    "Unsupported",
    "WaitEnded",
]


class FarflungError(Exception):
    """Base of every error that farflung raises on purpose. A copy in another process has its message and fields."""

    exit_code = 1

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return _copy, (type(self), self.args, vars(self))


def _copy(kind: type[FarflungError], args: tuple[Any, ...], fields: dict[str, Any]) -> FarflungError:
    error = kind.__new__(kind, *args)
    vars(error).update(fields)
    return error


class BadInput(FarflungError):
    """Something the user gave is wrong; the message says what, where and what to do."""

    exit_code = 2


class ConfigError(BadInput):
    """An option, a configuration key or a combination of parts that cannot work."""


class UnknownName(ConfigError):
    """A name that no registry holds.

    Args:
      kind: what was looked for (``"workload"``).
      name: what was given.
      known: the names there are.
    """

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        self.kind, self.name, self.known = kind, name, sorted(known)
        super().__init__(f"unknown {kind} {name!r}; known: {', '.join(self.known)}")


class Unsupported(ConfigError):
    """A part needs a feature that the communicator, runtime or model does not have."""


class DataError(BadInput):
    """A data set is absent, truncated, or not what it should be."""


class DataMissing(DataError):
    """A data set is not on this machine."""


class BadLabels(BadInput, ValueError):
    """Labels that a classifier cannot learn from; a ``ValueError`` too, as scikit-learn's conventions have it."""


class BadParameter(ConfigError, ValueError):
    """A parameter of an estimator that cannot work; a ``ValueError`` too, as scikit-learn's conventions have it."""


class BadSamples(DataError, ValueError):
    """Samples that a model cannot be learned from; a ``ValueError`` too, as scikit-learn's conventions have it."""


class CheckpointError(BadInput):
    """A checkpoint is absent, cut short, or belongs to another model or recipe."""


class StorageError(BadInput):
    """A file or folder cannot be written: no room, no permission, or something else is in its place.

    Args:
      path: which.
      reason: as the system gives it.
    """

    def __init__(self, path: object, reason: str) -> None:
        self.path, self.reason = path, reason
        super().__init__(f"{path}: cannot be written ({reason})")


class MissingExtra(BadInput):
    """Something needs a package that the core does not install.

    Args:
      what: what needs it; the message begins with it.
      module: the package, by the name it is imported by.
      extra: the extra of farflung that installs it.
    """

    def __init__(self, what: str, module: str, extra: str) -> None:
        self.module, self.extra = module, extra
        super().__init__(f"{what} needs {module}: pip install 'farflung[{extra}]'")


class LabError(FarflungError):
    """The lab cannot be set up on this machine, or its links are not what they should be."""


class RunLost(FarflungError):
    """A run that was under way cannot go on."""


class Left(RunLost):
    """This replica has left an elastic run, as it was asked to; the others go on without it."""

    exit_code = 0


class StateOutdated(FarflungError):
    """What a replica that joins has followed is of no use any more: it is given the state of the run anew."""


class Suspended(RunLost):
    """This replica was silent, and the others go on without it until it is admitted again."""


class _OfRank(RunLost):
    """What ended a run is another replica's.

    Args:
      rank: the replica.
      detail: what was seen.
    """

    words = ""

    def __init__(self, rank: int, detail: str) -> None:
        self.rank, self.detail = rank, detail
        super().__init__(f"{self.words.format(rank)}: {detail}")


class PeerLost(_OfRank):
    """The connection to a replica was closed from its end, or a message of it was refused."""

    words = "lost rank {}"


class DeadlinePassed(RunLost):
    """A wait ran out.

    Args:
      rank: the rank that was waited for; ``None``: any rank would have done.
      what: what was waited for.
      waited_s: for how long, in seconds.
      why: why the rank counts as lost, if that is not the time alone; then the message says how to wait longer.
    """

    def __init__(self, rank: int | None, what: str, waited_s: float, *, why: str = "") -> None:
        self.rank, self.what, self.waited_s = rank, what, waited_s
        peer = "any rank" if rank is None else f"rank {rank}"
        longer = f"; {why}: to wait longer, raise deadline_s (--deadline)" if why else ""
        super().__init__(f"lost {peer}: waited {waited_s:.1f} s for {what}{longer}")


class WaitEnded(FarflungError):
    """A wait was given up, because its exchange was forgotten.

    Args:
      rank: the rank that was waited for; ``None``: any rank would have done.
      what: what was waited for.
    """

    def __init__(self, rank: int | None, what: str) -> None:
        self.rank, self.what = rank, what
        peer = "any rank" if rank is None else f"rank {rank}"
        super().__init__(f"a wait for {what} from {peer} was given up: it was forgotten")


class PeerFailed(_OfRank):
    """A replica said that it ended with an error of its own."""

    words = "rank {} failed"


class NonFinite(RunLost):
    """A loss or gradient was NaN or infinite; raised on every replica at the same step.

    Args:
      step: the step at which it was seen.
      ranks: the replicas that saw it, where they can be told.
      count: how many did.
      what: ``loss`` or ``gradient``.
    """

    def __init__(self, step: int, ranks: Iterable[int], count: int, what: str = "loss") -> None:
        self.step, self.ranks, self.count, self.what = step, sorted(ranks), count, what
        which = f"rank {', '.join(map(str, self.ranks))}" if self.ranks else f"{count} ranks"
        super().__init__(
            f"non-finite {what} at step {step} on {which}: stopped everywhere before the update; "
            "lower the learning rate or look at the data there"
        )


class ProtocolError(RunLost):
    """Replicas disagree about the run: unlike settings, versions or models."""
