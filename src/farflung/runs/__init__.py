"""Configuration, files and execution of runs on real workers and in virtual time."""

from typing import TYPE_CHECKING

from farflung.lazy import lazy

if TYPE_CHECKING:
    from farflung.runs.comparison import Comparison, compare
    from farflung.runs.config import (
        COMPARED,
        DEVICE,
        NETWORK,
        RunConfig,
        RunOptions,
        SimulatedConfig,
        variant,
    )
    from farflung.runs.events import EVENTS, listener
    from farflung.runs.folder import RunFolder
    from farflung.runs.joining import join_later
    from farflung.runs.launching import forked_ahead
    from farflung.runs.preparing import Prepared, prepared, run_folder
    from farflung.runs.replicas import make_replica, settled_collective
    from farflung.runs.result import Run
    from farflung.runs.simulation import (
        ready_to_simulate,
        retime,
        retime_prepared,
        simulate,
        simulate_prepared,
    )
    from farflung.runs.stopping import asked_to_stop
    from farflung.runs.training import prepare_training, ready_to_train, train
else:
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "comparison": "Comparison compare",
            "config": "COMPARED DEVICE NETWORK RunConfig RunOptions SimulatedConfig variant",
            "events": "EVENTS listener",
            "folder": "RunFolder",
            "joining": "join_later",
            "launching": "forked_ahead",
            "preparing": "Prepared prepared run_folder",
            "replicas": "make_replica settled_collective",
            "result": "Run",
            "simulation": "ready_to_simulate retime retime_prepared simulate simulate_prepared",
            "stopping": "asked_to_stop",
            "training": "prepare_training ready_to_train train",
        },
    )

__all__ = [
    "COMPARED",
    "DEVICE",
    "EVENTS",
    "NETWORK",
    "Comparison",
    "Prepared",
    "Run",
    "RunConfig",
    "RunFolder",
    "RunOptions",
    "SimulatedConfig",
    "asked_to_stop",
    "compare",
    "forked_ahead",
    "join_later",
    "listener",
    "make_replica",
    "prepare_training",
    "prepared",
    "ready_to_simulate",
    "ready_to_train",
    "retime",
    "retime_prepared",
    "run_folder",
    "settled_collective",
    "simulate",
    "simulate_prepared",
    "train",
    "variant",
]
