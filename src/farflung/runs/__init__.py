"""Configuration, files and execution of runs on real workers and in virtual time."""

from typing import TYPE_CHECKING

from farflung.lazy import build_lazy_attributes

if TYPE_CHECKING:
    from farflung.runs.comparison import Comparison, compare
    from farflung.runs.config import (
        DEFAULT_COMPARED,
        DEFAULT_DEVICE,
        DEFAULT_NETWORK,
        RunConfig,
        RunOptions,
        SimulatedConfig,
        parse_variant,
    )
    from farflung.runs.events import EVENTS_VARIABLE, listen_for_events
    from farflung.runs.folder import RunFolder
    from farflung.runs.joining import join_run
    from farflung.runs.launching import fork_worker_parent
    from farflung.runs.preparing import PreparedRun, name_run_folder, prepare_run
    from farflung.runs.replicas import make_replica, resolve_run_collective
    from farflung.runs.result import Run
    from farflung.runs.simulation import (
        begin_simulation,
        retime,
        retime_prepared,
        simulate,
        simulate_prepared,
    )
    from farflung.runs.stopping import watch_stop_signals
    from farflung.runs.training import begin_training, prepare_training, train
else:
    __getattr__, __dir__ = build_lazy_attributes(
        __name__,
        {
            "comparison": "Comparison compare",
            "config": "DEFAULT_COMPARED DEFAULT_DEVICE DEFAULT_NETWORK RunConfig RunOptions SimulatedConfig "
            "parse_variant",
            "events": "EVENTS_VARIABLE listen_for_events",
            "folder": "RunFolder",
            "joining": "join_run",
            "launching": "fork_worker_parent",
            "preparing": "PreparedRun prepare_run name_run_folder",
            "replicas": "make_replica resolve_run_collective",
            "result": "Run",
            "simulation": "begin_simulation retime retime_prepared simulate simulate_prepared",
            "stopping": "watch_stop_signals",
            "training": "prepare_training begin_training train",
        },
    )

__all__ = [
    "DEFAULT_COMPARED",
    "DEFAULT_DEVICE",
    "DEFAULT_NETWORK",
    "EVENTS_VARIABLE",
    "Comparison",
    "PreparedRun",
    "Run",
    "RunConfig",
    "RunFolder",
    "RunOptions",
    "SimulatedConfig",
    "begin_simulation",
    "begin_training",
    "compare",
    "fork_worker_parent",
    "join_run",
    "listen_for_events",
    "make_replica",
    "name_run_folder",
    "parse_variant",
    "prepare_run",
    "prepare_training",
    "resolve_run_collective",
    "retime",
    "retime_prepared",
    "simulate",
    "simulate_prepared",
    "train",
    "watch_stop_signals",
]
