"""Exceptions of farflung.

Users can correct :class:`BadInput` and its subclasses, which end a command with exit code 2. :class:`RunLost` and its
subclasses end a run with exit code 1. Messages state the problem, its location and the remedy, on one or two lines.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
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
    "MissingExtra",
    "NonFinite",
    "PeerFailed",
    "PeerLost",
    "ProtocolError",
    "ReplicaLeft",
    "ReplicaSuspended",
    "RunLost",
    "StateOutdated",
    "StorageError",
    "UnknownName",
    "Unsupported",
    "WaitEnded",
    "suggest_names",
]


class FarflungError(Exception):
    """Base class of farflung's errors, whose copies in other processes keep message and fields."""

    exit_code = 1

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_error, (type(self), self.args, vars(self))


def _rebuild_error(kind: type[FarflungError], args: tuple[Any, ...], fields: dict[str, Any]) -> FarflungError:
    """Rebuilds a pickled error without calling its constructor."""
    error = kind.__new__(kind, *args)
    vars(error).update(fields)
    return error


class BadInput(FarflungError):
    """Invalid input of the user; the message states the problem, its location and the remedy."""

    exit_code = 2


class ConfigError(BadInput):
    """Invalid option, configuration key or combination of parts."""


class UnknownName(ConfigError):
    """Unknown name in a registry.

    Args:
      kind: Kind of the registry's members, such as ``"workload"``.
      name: Unknown name.
      known_names: Names in the registry.
      alternative: Description of what may stand in place of a name, such as ``"a file ending in .toml"``.
    """

    def __init__(self, kind: str, name: str, known_names: Iterable[str], alternative: str = "") -> None:
        self.kind, self.name, self.known_names = kind, name, sorted(known_names)
        super().__init__(f"unknown {kind} {name!r}; {suggest_names(name, self.known_names, alternative)}")


def suggest_names(name: str, known_names: Iterable[str], alternative: str = "") -> str:
    """Returns a question for the known name closest to an unknown one, or all known names if none is close.

    >>> suggest_names("fashion_mnist", ["cifar-10", "fashion-mnist"])
    'did you mean fashion-mnist?'
    >>> suggest_names("5g", ["lan", "wifi"], "a file ending in .toml")
    'known: lan, wifi, or a file ending in .toml'
    """
    by_spelling = {known.lower().replace("-", "_"): known for known in known_names}
    close = get_close_matches(name.lower().replace("-", "_"), by_spelling, n=1)
    if close:
        return f"did you mean {by_spelling[close[0]]}?"
    return f"known: {', '.join([*sorted(by_spelling.values()), *([f'or {alternative}'] if alternative else [])])}"


class Unsupported(ConfigError):
    """Feature that the communicator, runtime or model does not support."""


class DataError(BadInput):
    """Missing, truncated or malformed data set."""


class DataMissing(DataError):
    """Data set that is not on this machine."""


class BadLabels(BadInput, ValueError):
    """Labels that a classifier cannot learn; a ``ValueError`` too, by scikit-learn's conventions."""


class BadParameter(ConfigError, ValueError):
    """Invalid parameter of an estimator; a ``ValueError`` too, by scikit-learn's conventions."""


class BadSamples(DataError, ValueError):
    """Samples that a model cannot learn from; a ``ValueError`` too, by scikit-learn's conventions."""


class CheckpointError(BadInput):
    """Missing or truncated checkpoint, or one of another model or recipe."""


class StorageError(BadInput):
    """Failed write of a file or folder: the disk is full, permission is denied, or the path is of another kind.

    Args:
      path: File or folder.
      reason: Error message of the system.
    """

    def __init__(self, path: object, reason: str) -> None:
        self.path, self.reason = path, reason
        super().__init__(f"{path}: cannot be written ({reason})")


class MissingExtra(BadInput):
    """Missing package that an extra of farflung installs.

    Args:
      feature: Feature that needs the package, which begins the message.
      module: Module name of the package.
      extra: Name of the extra.
    """

    def __init__(self, feature: str, module: str, extra: str) -> None:
        self.module, self.extra = module, extra
        super().__init__(f"{feature} needs {module}: pip install 'farflung[{extra}]'")


class LabError(FarflungError):
    """Failed setup of the lab on this machine, or links that differ from their profile."""


class RunLost(FarflungError):
    """Failure of a running run, which cannot continue."""


class ReplicaLeft(RunLost):
    """Requested leave of this replica from an elastic run; the others continue without it."""

    exit_code = 0


class StateOutdated(FarflungError):
    """Outdated state of a joining replica, which must receive the state of the run again."""


class ReplicaSuspended(RunLost):
    """Suspension of this replica after silence; the others continue without it until it is admitted again."""


class _PeerError(RunLost):
    """Failure of another replica that ended the run.

    Args:
      rank: Rank of the failed replica.
      detail: Description of the failure.
    """

    template = ""

    def __init__(self, rank: int, detail: str) -> None:
        self.rank, self.detail = rank, detail
        super().__init__(f"{self.template.format(rank)}: {detail}")


class PeerLost(_PeerError):
    """Connection that a replica closed, or that was closed because a message of it was refused."""

    template = "lost rank {}"


class DeadlinePassed(RunLost):
    """Wait that exceeded its deadline.

    Args:
      rank: Rank that was waited for; ``None`` for any rank.
      operation: Expected message or operation.
      waited_s: Duration of the wait in seconds.
      reason: Reason to treat the rank as lost apart from the time; the message then explains how to wait longer.
    """

    def __init__(self, rank: int | None, operation: str, waited_s: float, *, reason: str = "") -> None:
        self.rank, self.operation, self.waited_s = rank, operation, waited_s
        peer = "any rank" if rank is None else f"rank {rank}"
        longer = f"; {reason}: to wait longer, raise deadline_s (--deadline)" if reason else ""
        super().__init__(f"lost {peer}: waited {waited_s:.1f} s for {operation}{longer}")


class WaitEnded(FarflungError):
    """Cancelled wait for a message of a cancelled exchange.

    Args:
      rank: Rank that was waited for; ``None`` for any rank.
      operation: Expected message or operation.
    """

    def __init__(self, rank: int | None, operation: str) -> None:
        self.rank, self.operation = rank, operation
        peer = "any rank" if rank is None else f"rank {rank}"
        super().__init__(f"a wait for {operation} from {peer} was given up: it was forgotten")


class PeerFailed(_PeerError):
    """Replica that reported an error of its own."""

    template = "rank {} failed"


class NonFinite(RunLost):
    """NaN or infinite loss or gradient; raised on every replica at the same step.

    Args:
      step: Step of the loss or gradient.
      ranks: Ranks of the affected replicas, if known.
      count: Number of affected replicas.
      quantity: ``loss`` or ``gradient``.
    """

    def __init__(self, step: int, ranks: Iterable[int], count: int, quantity: str = "loss") -> None:
        self.step, self.ranks, self.count, self.quantity = step, sorted(ranks), count, quantity
        affected_ranks = f"rank {', '.join(map(str, self.ranks))}" if self.ranks else f"{count} ranks"
        super().__init__(
            f"non-finite {quantity} at step {step} on {affected_ranks}: stopped everywhere before the update; "
            "lower the learning rate or look at the data there"
        )


class ProtocolError(RunLost):
    """Different settings, versions or models on the replicas of a run."""
