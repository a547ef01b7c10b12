"""Training loop of farflung: replica, evaluation, checkpoints and extensions."""

from typing import TYPE_CHECKING

from farflung.lazy import build_lazy_attributes

if TYPE_CHECKING:
    from farflung.loop.checkpoint import (
        Checkpoints,
        check_model,
        check_optimizer_kind,
        check_share,
        compute_fingerprint,
        hash_share,
        wrap_version_errors,
    )
    from farflung.loop.components import Components
    from farflung.loop.evaluation import Score, evaluate
    from farflung.loop.lockstep import Lockstep, share_parameters
    from farflung.loop.optimizers import describe_optimizer
    from farflung.loop.replica import Replica
    from farflung.loop.summary import Leg, Summary, TimeSplit
else:
    __getattr__, __dir__ = build_lazy_attributes(
        __name__,
        {
            "checkpoint": "Checkpoints check_model check_optimizer_kind check_share compute_fingerprint hash_share "
            "wrap_version_errors",
            "evaluation": "Score evaluate",
            "lockstep": "Lockstep share_parameters",
            "components": "Components",
            "optimizers": "describe_optimizer",
            "replica": "Replica",
            "summary": "Leg Summary TimeSplit",
        },
    )

__all__ = [
    "Checkpoints",
    "Components",
    "Leg",
    "Lockstep",
    "Replica",
    "Score",
    "Summary",
    "TimeSplit",
    "check_model",
    "check_optimizer_kind",
    "check_share",
    "compute_fingerprint",
    "describe_optimizer",
    "evaluate",
    "hash_share",
    "share_parameters",
    "wrap_version_errors",
]
