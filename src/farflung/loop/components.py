"""Components of a recipe that one replica trains with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from farflung.config import BUCKET_NBYTES
from farflung.data import NoSharing
from farflung.errors import ConfigError
from farflung.rates import NoScaling
from farflung.types import (
    BALANCED_LABEL,
    Json,
    RateScaling,
    Reducer,
    Sampler,
    Schedule,
    Sharing,
    Stream,
)

__all__ = ["Components"]


@dataclass(frozen=True)
class Components:
    """Components of a recipe that one replica trains with; new for each replica.

    Raises:
      ConfigError: Components are incompatible.
    """

    reducer: Reducer
    schedule: Schedule
    sampler: Sampler
    stream: Stream
    sharing: Sharing = field(default_factory=NoSharing)
    scaling: RateScaling = field(default_factory=NoScaling)
    bucket_nbytes: int = BUCKET_NBYTES
    """Size of the gradient buckets that the reducer exchanges."""
    settings: Mapping[str, Json] = field(default_factory=dict)
    """Settings of the recipe by name, as text; checkpoints hold them."""

    def __post_init__(self) -> None:
        _check_resharding(self.sharing, self.stream, self.sampler)
        self._check_deferred_updates()
        is_unshared = self.stream.has_random_access and not self.sharing.has_data_transfers
        if self.sampler.is_balanced and not is_unshared:
            raise ConfigError(
                f"{BALANCED_LABEL}: shares out samples that all replicas have: leave out --stream and --sharing"
            )

    def _check_deferred_updates(self) -> None:
        """Checks that nothing needs the moment at which all results of a step have arrived, if there is none.

        Raises:
          ConfigError: a component does.
        """
        if not self.schedule.has_deferred_updates:
            return
        reason = ""
        if self.has_rate_scaling:
            reason = "--scaling: the optimizer steps before all weights are known: leave it out"
        elif not self.has_equal_batch_sizes or self.needs_shares:
            reason = "--sampler, --stream and --sharing: batches depend on results of the step before: leave them out"
        if reason:
            raise ConfigError(f"{reason}, or choose --schedule synchronous")

    @cached_property
    def needs_shares(self) -> bool:
        """Returns True if each replica needs samples of its own, beyond those that a stream brings."""
        return (self.sampler.needs_scores and self.stream.has_random_access) or self.sharing.is_permanent

    @cached_property
    def has_equal_batch_sizes(self) -> bool:
        """Returns True if all replicas have equal batch sizes in every step."""
        lends_samples = self.sharing.has_data_transfers and not self.sharing.is_permanent
        return self.stream.has_random_access and not self.sampler.is_balanced and not lends_samples

    @property
    def reason_all_needed(self) -> str:
        """Reason why a run with these components ends when a replica is lost; empty if it can continue."""
        if not self.schedule.max_steps_ahead:
            return (
                f"schedule {self.schedule!r} needs all replicas: choose synchronous, pipelined, delayed, local_sgd, "
                "post_local_sgd, diloco or streaming_diloco"
            )
        if not self.reducer.is_repeatable:
            return f"reducer {self.reducer!r} needs all replicas: choose a codec"
        if self.reducer.has_shared_delta and self.schedule.has_late_results:
            return (
                f"reducer {self.reducer!r} learns from results in order, and schedule {self.schedule!r} has several "
                "under way: choose a schedule without late results, or a codec"
            )
        if self.sampler.is_balanced:
            return f"{BALANCED_LABEL} needs all replicas: leave it out"
        if self.needs_shares or not self.has_equal_batch_sizes or not self.sampler.has_shared_order:
            return "replicas have to draw from one data set: leave out --sampler, --stream and --sharing"
        return ""

    @property
    def has_rate_scaling(self) -> bool:
        """Returns True if the learning rate follows the weight of gradients."""
        return self.scaling != NoScaling()


def _check_resharding(sharing: Sharing, stream: Stream, sampler: Sampler) -> None:
    """Checks that stream and sampler allow samples to change owner, if the sharing is permanent.

    Raises:
      ConfigError: The stream or the sampler is of the wrong kind.
    """
    if not sharing.is_permanent:
        return
    name = f"sharing {type(sharing).__name__}"
    if not stream.has_random_access:
        raise ConfigError(
            f"{name}: moves samples between shares that stay, and those of stream {type(stream).__name__} come and go: "
            "leave out one of --sharing and --stream"
        )
    if sharing.needs_scores and not sampler.can_transfer_scores:
        raise ConfigError(
            f"{name}: chooses by what the sampler knows of samples, and {type(sampler).__name__} knows nothing: choose "
            "another --sampler, or samples at random (by='uniform')"
        )
