"""Runs: what decides one, what it leaves behind, and how it is made, in either world, from Python or a command."""

from typing import TYPE_CHECKING

from farflung.lazy import lazy

if TYPE_CHECKING:
    from farflung.runs.comparison import Comparison, Contest, Row, Watch, compare, contest
    from farflung.runs.config import COMPARED, DEVICE, NETWORK, RunConfig, RunOptions, SimulatedConfig
    from farflung.runs.events import EVENTS, listener
    from farflung.runs.folder import RunFolder
    from farflung.runs.joining import join_later
    from farflung.runs.launching import forked_ahead
    from farflung.runs.preparing import Filed, Prepared, prepared, run_folder
    from farflung.runs.replicas import make_replica, settled_collective
    from farflung.runs.result import Run
    from farflung.runs.settings import Setting, settings_of, variant
    from farflung.runs.simulation import retime, retime_prepared, simulate, simulate_prepared
    from farflung.runs.stopping import asked_to_stop
    from farflung.runs.training import prepare_training, ready_to_train, train
else:
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "comparison": "Comparison Contest Row Watch compare contest",
            "config": "COMPARED DEVICE NETWORK RunConfig RunOptions SimulatedConfig",
            "events": "EVENTS listener",
            "folder": "RunFolder",
            "joining": "join_later",
            "launching": "forked_ahead",
            "preparing": "Filed Prepared prepared run_folder",
            "replicas": "make_replica settled_collective",
            "result": "Run",
            "settings": "Setting settings_of variant",
            "simulation": "retime retime_prepared simulate simulate_prepared",
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
    "Contest",
    "Filed",
    "Prepared",
    "Row",
    "Run",
    "RunConfig",
    "RunFolder",
    "RunOptions",
    "Setting",
    "SimulatedConfig",
    "Watch",
    "asked_to_stop",
    "compare",
    "contest",
    "forked_ahead",
    "join_later",
    "listener",
    "make_replica",
    "prepare_training",
    "prepared",
    "ready_to_train",
    "retime",
    "retime_prepared",
    "run_folder",
    "settings_of",
    "settled_collective",
    "simulate",
    "simulate_prepared",
    "train",
    "variant",
]
