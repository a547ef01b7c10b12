"""One replica: gradient buckets, the exchanges that carry them, the training loop, checkpoints."""

from typing import TYPE_CHECKING

from farflung.lazy import lazy

if TYPE_CHECKING:
    from farflung.replica.buckets import GradientBuckets
    from farflung.replica.checkpoint import (
        Checkpoints,
        check_model,
        check_optimizer_kind,
        check_share,
        fingerprint,
        load_tree,
        save_tree,
        share_name,
    )
    from farflung.replica.engine import Engine
    from farflung.replica.evaluation import Score, evaluate
    from farflung.replica.extension import Extension, StepResult
    from farflung.replica.lockstep import Lockstep, keep_once
    from farflung.replica.loop import Replica
    from farflung.replica.members import Parts
    from farflung.replica.metadata import StepMetadata
    from farflung.replica.optimizers import optimizer_settings
    from farflung.replica.placement import place
    from farflung.replica.plan import StepOutcome
    from farflung.replica.summary import Leg, Summary, TimeSplit
else:
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "buckets": "GradientBuckets",
            "checkpoint": (
                "Checkpoints check_model check_optimizer_kind check_share fingerprint load_tree save_tree share_name"
            ),
            "engine": "Engine",
            "evaluation": "Score evaluate",
            "extension": "Extension StepResult",
            "lockstep": "Lockstep keep_once",
            "loop": "Replica",
            "members": "Parts",
            "metadata": "StepMetadata",
            "optimizers": "optimizer_settings",
            "placement": "place",
            "plan": "StepOutcome",
            "summary": "Leg Summary TimeSplit",
        },
    )

__all__ = [
    "Checkpoints",
    "Engine",
    "Extension",
    "GradientBuckets",
    "Leg",
    "Lockstep",
    "Parts",
    "Replica",
    "Score",
    "StepMetadata",
    "StepOutcome",
    "StepResult",
    "Summary",
    "TimeSplit",
    "check_model",
    "check_optimizer_kind",
    "check_share",
    "evaluate",
    "fingerprint",
    "keep_once",
    "load_tree",
    "optimizer_settings",
    "place",
    "save_tree",
    "share_name",
]
