"""Engine of a training step: gradient buckets, exchanges, merges and extensions."""

from typing import TYPE_CHECKING

from farflung.lazy import build_lazy_attributes

if TYPE_CHECKING:
    from farflung.engine.accumulated import AccumulatedGradient
    from farflung.engine.buckets import GradientBucket, GradientBuckets
    from farflung.engine.engine import Engine
    from farflung.engine.extension import Extension, StepResult, TrainingLoop
    from farflung.engine.flight import Flight
    from farflung.engine.metadata import StepMetadata
    from farflung.engine.placement import select_device
    from farflung.engine.plan import Arrival, StepOutcome
else:
    __getattr__, __dir__ = build_lazy_attributes(
        __name__,
        {
            "accumulated": "AccumulatedGradient",
            "buckets": "GradientBucket GradientBuckets",
            "engine": "Engine",
            "extension": "Extension StepResult TrainingLoop",
            "flight": "Flight",
            "metadata": "StepMetadata",
            "placement": "select_device",
            "plan": "Arrival StepOutcome",
        },
    )

__all__ = [
    "AccumulatedGradient",
    "Arrival",
    "Engine",
    "Extension",
    "Flight",
    "GradientBucket",
    "GradientBuckets",
    "StepMetadata",
    "StepOutcome",
    "StepResult",
    "TrainingLoop",
    "select_device",
]
