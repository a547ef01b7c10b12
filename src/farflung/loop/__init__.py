"""Training loop of farflung: replica, evaluation, checkpoints and extensions."""

from typing import TYPE_CHECKING

from farflung.lazy import lazy

if TYPE_CHECKING:
    from farflung.loop.checkpoint import (
        Checkpoints,
        check_model,
        check_optimizer_kind,
        check_share,
        fingerprint,
        share_name,
    )
    from farflung.loop.evaluation import Score, evaluate
    from farflung.loop.lockstep import Lockstep, keep_once
    from farflung.loop.members import Parts
    from farflung.loop.optimizers import optimizer_settings
    from farflung.loop.replica import Replica
    from farflung.loop.summary import Leg, Summary, TimeSplit
else:
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "checkpoint": "Checkpoints check_model check_optimizer_kind check_share fingerprint share_name",
            "evaluation": "Score evaluate",
            "lockstep": "Lockstep keep_once",
            "members": "Parts",
            "optimizers": "optimizer_settings",
            "replica": "Replica",
            "summary": "Leg Summary TimeSplit",
        },
    )

__all__ = [
    "Checkpoints",
    "Leg",
    "Lockstep",
    "Parts",
    "Replica",
    "Score",
    "Summary",
    "TimeSplit",
    "check_model",
    "check_optimizer_kind",
    "check_share",
    "evaluate",
    "fingerprint",
    "keep_once",
    "optimizer_settings",
    "share_name",
]
