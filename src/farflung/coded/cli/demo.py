"""``farflung coded demo``: a coordinator and devices on this machine, some of which are killed."""

from __future__ import annotations

import multiprocessing
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from farflung.cli.main import label_options
from farflung.cli.output import OutputOptions, print_files, print_json, print_table
from farflung.coded.blocks import BlockStore
from farflung.coded.cli.coordinator import CodedProgress, format_encoding
from farflung.coded.coordinator import Settings
from farflung.coded.linear_model import InMemoryProducts, Problem
from farflung.coded.meeting import Address, run_device
from farflung.coded.parts import partition_rows, read_samples
from farflung.coded.picture import draw_coded_picture
from farflung.coded.record import Folder
from farflung.coded.run import Learner, run_coordinator
from farflung.coded.solvers import Iterate, solve
from farflung.comm.interface import find_loopback_address
from farflung.data import list_entries
from farflung.errors import ConfigError, FarflungError
from farflung.report.tables import format_duration
from farflung.runs import name_run_folder
from farflung.runs.simulation import limit_to_one_thread
from farflung.runs.stopping import watch_stop_signals
from farflung.seeding import create_generator, derive_seed
from farflung.tasks import Task
from farflung.telemetry import Event
from farflung.types import Json

__all__ = ["Demo"]

_EVENT_PERIOD = 8
"""Number of iterates between events: a device is killed or joins."""
_PATIENCE_S = 30.0
_MAX_ITERATIONS = 500


@label_options
@dataclass(frozen=True)
class Demo(OutputOptions):
    """Train on devices of this machine, kill some of them on the way, and compare with training without a code.

    The data are a9a if it is present, and otherwise drawn from the seed.
    """

    partitions: int = 6
    """Number of devices with data."""
    room: int = 2
    """Number of devices with room for coded blocks only."""
    kill: int = 2
    """Number of devices that are killed during training, one after the other."""
    join: int = 1
    """Number of devices with room that join during training."""
    redundancy: int = 1
    """Number of devices that may vanish at any time; lost blocks are replaced."""
    code: str = "rlnc"
    """Code of coded blocks: rlnc or mds."""
    model: str = "logistic"
    """logistic or svc."""
    data: str = "auto"
    """a9a, synthetic, or auto, which is a9a if it is present."""
    seed: int = 0
    """Seed of synthetic data, of the code, and of the devices that are killed."""
    folder: Path | None = None
    """Folder of the run; a new one under runs/ when not given."""

    def run(self) -> int:
        """Runs the command; returns the exit code."""
        for name in ("room", "kill", "join"):
            if getattr(self, name) < 0:
                raise ConfigError(f"--{name} {getattr(self, name)}: must be 0 or more")
        data, samples, labels, test = self._load_samples()
        learner = Learner(model=self.model)
        settings = Settings(
            partitions=self.partitions,
            devices=self.partitions + self.room,
            code=self.code,
            seed=self.seed,
            redundancy=self.redundancy,
            patience_s=_PATIENCE_S,
        )
        if self.kill > settings.devices:
            raise ConfigError(f"--kill {self.kill}: there are {settings.devices} devices")
        folder = Folder(self.folder or name_run_folder("coded-demo"))
        order = random.Random(derive_seed(self.seed, "killed"))
        victims = order.sample(range(settings.devices), self.kill)
        with ExitStack() as stack:
            stack.enter_context(limit_to_one_thread())
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="farflung-coded-")))
            start, processes = stack.enter_context(_start_processes())
            progress = stack.enter_context(
                CodedProgress(settings, learner, _MAX_ITERATIONS, quiet=self.quiet or self.json)
            )
            stop = stack.enter_context(watch_stop_signals(lambda: progress.is_training))
            addresses: list[Address] = []

            def start_devices(address: Address) -> None:
                addresses.append(address)
                for number, rows in enumerate(partition_rows(len(samples), self.partitions), start=1):
                    path = scratch / f"part {number}.npz"
                    np.savez(path, x=samples[rows].numpy(), y=labels[rows].numpy())
                    start(address, path)
                for _ in range(self.room):
                    start(address)

            def handle_event(event: Event) -> None:
                progress(event)
                turn, remainder = divmod(int(str(event.get("iterations", 0))), _EVENT_PERIOD)
                if event["event"] != "iterate" or remainder or not turn:
                    return
                if turn % 2 and turn // 2 < self.kill:
                    processes[victims[turn // 2]].kill()
                elif not turn % 2 and turn // 2 <= self.join:
                    start(addresses[0])

            result = run_coordinator(
                settings,
                learner,
                folder,
                Address(find_loopback_address(), 0),
                max_iterations=_MAX_ITERATIONS,
                test=test,
                on_ready=start_devices,
                sink=handle_event,
                should_stop=stop.is_set,
            )
            uncoded = _train_uncoded(learner, samples, labels)
        events = folder.load_events()
        draw_coded_picture(
            events, folder.picture, title=f"Coded training: {data}, {self.kill} devices killed"
        )
        summary = {**result, "data": data, "uncoded_objective": uncoded.objective}
        self._print_summary(summary, events, folder)
        return 130 if summary["interrupted"] else 0

    def _load_samples(self) -> tuple[str, Tensor, Tensor, tuple[Tensor, Tensor] | None]:
        """Loads the data: its name, features, labels, and a test set."""
        if self.data not in ("auto", "a9a", "synthetic"):
            raise ConfigError(f"--data {self.data}: must be auto, a9a or synthetic")
        at_hand = any(entry.source.name == "a9a" and entry.location for entry in list_entries())
        if self.data == "a9a" or (self.data == "auto" and at_hand):
            return "a9a", *read_samples("a9a"), read_samples("a9a", test=True)
        splits = [_draw_samples(4000, self.seed, part) for part in ("train", "test")]
        return "synthetic data", *splits[0], splits[1]

    def _print_summary(self, summary: dict[str, Any], events: list[Event], folder: Folder) -> None:
        difference = abs(summary["objective"] / summary["uncoded_objective"] - 1)
        victims = _format_lost_devices(events)
        if self.json:
            output: dict[str, Json] = {**summary, "vanished": list(victims), "folder": str(folder.path)}
            print_json(output)
            return
        print_table(
            (),
            [
                (
                    "data",
                    f"{summary['data']}, {summary['samples']:,} samples, {summary['features']} features",
                ),
                ("iterates", f"{summary['iterations']}"),
                ("objective", f"{summary['objective']:.10g}"),
                ("the same without a code", f"{summary['uncoded_objective']:.10g} ({difference:.0e} away)"),
                ("test accuracy", f"{100 * summary['test_accuracy']:.2f} %"),
                ("encoding", format_encoding(summary)),
                ("vanished", "; ".join(victims) or "none"),
                ("joined on the way", f"{summary['devices_came'] - self.partitions - self.room}"),
                ("duration", format_duration(summary["duration_s"])),
            ],
        )
        print_files(picture=folder.picture)


@contextmanager
def _start_processes() -> Iterator[tuple[Callable[..., None], list[ForkServerProcess]]]:
    """Yields a function that starts a device with an address and a file, and the processes of all devices.

    They are forks of a process with the needed imports; the remaining ones end with the context.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    processes: list[ForkServerProcess] = []

    def start(address: Address, path: Path | None = None) -> None:
        process = context.Process(target=_run_device, args=(str(address), path), daemon=True)
        process.start()
        processes.append(process)

    wait_s = 0.0
    try:
        yield start, processes
        wait_s = _PATIENCE_S
    finally:
        for process in processes:
            process.join(wait_s)
            process.kill()
            process.join()


def _run_device(address: str, path: Path | None) -> None:
    torch.set_num_threads(1)
    with Path(os.devnull).open("wb") as sink:
        os.dup2(sink.fileno(), 2)  # hides messages of killed devices
    store = BlockStore() if path is None else BlockStore(path.stem, *read_samples(str(path)))
    with suppress(FarflungError, KeyboardInterrupt):
        run_device(Address.parse(address), store, patience_s=_PATIENCE_S)


def _draw_samples(count: int, seed: int, part: str) -> tuple[Tensor, Tensor]:
    """Draws samples of two overlapping classes."""
    random, features = create_generator(seed, "coded demo", part), 40
    direction = torch.randn(features, generator=create_generator(seed, "coded demo"), dtype=torch.float64)
    spread = torch.logspace(0, -3, features, dtype=torch.float64)
    samples = torch.randn(count, features, generator=random, dtype=torch.float64) * spread
    noise = 0.5 * torch.randn(count, generator=random, dtype=torch.float64)
    return samples, torch.sign(samples @ (direction / spread) + noise)


def _train_uncoded(learner: Learner, samples: Tensor, labels: Tensor) -> Iterate:
    problem = Problem(
        InMemoryProducts(samples),
        learner.build_objective(2),
        learner.build_targets((labels > 0).to(torch.int64), 2),
    )
    training = solve(learner.build_solver(2), problem, max_iterations=_MAX_ITERATIONS)
    state: Iterate = Task(training, lambda resume: resume(), eager_start=True).result()
    return state


def _format_lost_devices(events: list[Event]) -> list[str]:
    """Formats rank, partition and time of each lost device, one text for each."""
    partitions, lines = {}, []
    for event in events:
        if event["event"] == "came":
            partitions[event["rank"]] = event["partition"]
        elif event["event"] == "gone":
            content = partitions.get(event["rank"]) or "no data"
            lines.append(f"rank {event['rank']} ({content}) after {float(str(event['t'])):.1f} s")
    return lines
