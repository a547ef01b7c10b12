"""``farflung lab``: runs a program on nodes of this machine, joined by the links of a profile."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro

from farflung.cli.output import print_table
from farflung.errors import ConfigError, LabError
from farflung.faults import FaultPlan, load_faults
from farflung.files import prefix_errors, wrap_write_errors, write_json
from farflung.lab import Lab, PairMeasurement, check_abilities, check_fault_plan, explain_missing, run_job
from farflung.network import find_network
from farflung.runs import EVENTS_VARIABLE, listen_for_events
from farflung.runs.joining import NETWORK_VARIABLE
from farflung.runs.stopping import handle_stop_signals
from farflung.types import Json

__all__ = ["RunInLab"]

INTERRUPTED_CODE = 130


@dataclass(frozen=True)
class RunInLab:
    """Run real workers over the links of a network profile; needs root.

    Nodes are network namespaces of this machine, joined by shaped links.
    farflung lab --network wifi-10mbps --nodes 4 train --steps 100, or any program that torchrun could start:
    farflung lab --network four-regions -- python train.py
    """

    command: tyro.conf.Positional[tuple[str, ...]] = ()
    """After --: program to start at every node, with RANK, WORLD_SIZE, MASTER_ADDR and so on. train and its
    options need no dashes before them."""
    network: str = "wifi-10mbps"
    """Network profile: a name, or a file ending in .toml."""
    nodes: int = 4
    """Number of nodes, each with a network of its own."""
    congestion_control: str | None = None
    """Congestion control of the nodes' TCP, by the kernel's name; the profile's or this machine's by default."""
    logs: Path | None = None
    """Folder for the output of each worker, in rank-0.log and so on; this terminal when not given."""
    report: Path | None = None
    """JSON file for what was measured before the run and counted in it."""
    faults: Path | None = None
    """TOML file with faults: crash, hang, leave, cut, reset, throttle, lose, restore. With train, times count from the
    first step; with another program, from its start."""
    seed: int = 0
    """Seed of jitter and loss."""
    any_delay: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Accept this machine's delays if it cannot keep the profile's, such as 0.1 ms; see the report."""
    check: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print this machine's abilities and what it lacks, and measure the links. Runs no program."""
    quiet: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print only the output of the workers."""

    def run(self) -> int:
        if self.nodes < 1:
            raise ConfigError(f"--nodes {self.nodes}: must be 1 or more")
        profile = find_network(self.network).with_nodes(self.nodes)
        if self.check:
            return self._measure_and_report()
        command = _check_command(self.command)
        plan = self._load_plan()
        for path in (self.logs, self.report and self.report.parent):
            if path is not None:
                with wrap_write_errors(path):
                    path.mkdir(parents=True, exist_ok=True)
        if (reason := explain_missing()) is not None:
            raise LabError(f"{reason}; farflung lab --check says more")
        with ExitStack() as stack:
            outputs = [stack.enter_context(_create_output(self.logs, node)) for node in range(self.nodes)]
            stop = stack.enter_context(_create_stop_pipe())
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="farflung-lab-")))
            sock = stack.enter_context(listen_for_events(folder))
            lab = stack.enter_context(
                Lab(profile, self.nodes, congestion_control=self.congestion_control, seed=self.seed)
            )
            measured, control = lab.check(any_delay=self.any_delay), lab.congestion_control
            off = sum(not pair.is_accurate for pair in measured)
            self._print_note(
                f"{profile.name}, {self.nodes} nodes, congestion control {control}: {len(measured)} pairs measured, "
                + (f"the delays of {off} as this machine makes them" if off else "all as they should be")
            )
            environment = {"OMP_NUM_THREADS": "1", **os.environ}
            environment.pop(EVENTS_VARIABLE, None)
            if self._is_training:
                environment[EVENTS_VARIABLE] = sock.getsockname()
            environment[NETWORK_VARIABLE] = self.network
            result = run_job(
                lab,
                command,
                environment,
                outputs,
                plan=plan,
                event_socket=sock if self._is_training else None,
                stop_fd=stop,
            )
        if self.report is not None:
            pairs: list[Json] = [asdict(pair) for pair in measured]
            write_json(
                self.report,
                {"network": self.network, "congestion_control": control, "pairs": pairs, **asdict(result)},
            )
        for rank, code in enumerate(result.exit_codes):
            if code:
                self._print_note(f"rank {rank} ended with exit code {code}")
        return INTERRUPTED_CODE if result.is_stopped else max(result.exit_codes)

    def _load_plan(self) -> FaultPlan:
        """Loads the fault plan; prints the origin of its times."""
        if self.faults is None:
            return FaultPlan()
        plan = load_faults(self.faults)
        with prefix_errors(str(self.faults)):
            check_fault_plan(plan, self.nodes, reports_steps=self._is_training)
        if any(fault.at_s is not None for fault in plan.faults):
            self._print_note(
                f"{self.faults}: at_s counts from the first step; nothing goes wrong while the workers start"
                if self._is_training
                else f"{self.faults}: at_s counts from the program's start: it tells of no steps, as train does"
            )
        return plan

    @property
    def _is_training(self) -> bool:
        """Returns True if the workers of the program report their events."""
        program, *arguments = self.command
        return arguments[:3] == ["-m", "farflung", "train"] or (
            Path(program).name == "farflung" and arguments[:1] == ["train"]
        )

    def _measure_and_report(self) -> int:
        """Prints the machine's abilities and the profile's measured links; returns 1 if a pair of nodes deviates."""
        rows = check_abilities()
        print_table(
            ["needs", "here", "for"],
            ([ability.name, ability.trouble or "yes", ability.use] for ability in rows),
        )
        if (reason := explain_missing()) is not None:
            raise LabError(reason)
        with Lab(find_network(self.network), self.nodes, congestion_control=self.congestion_control) as lab:
            measured = lab.measure()
        print_links(measured)
        return 0 if all(pair.is_accurate for pair in measured) else 1

    def _print_note(self, text: str) -> None:
        if not self.quiet:
            print(f"farflung lab: {text}", file=sys.stderr, flush=True)


def _check_command(command: Sequence[str]) -> Sequence[str]:
    if not command:
        raise ConfigError("lab: no command; farflung lab -- COMMAND, or farflung lab train ...")
    if shutil.which(command[0]) is None:
        raise ConfigError(f"lab: {command[0]}: no such program")
    return command


def print_links(measured: Sequence[PairMeasurement]) -> None:
    """Prints what was measured of each pair of nodes, beside the figures of the profile."""
    print_table(
        ["from", "to", "ms", "of the profile", "Mbit/s", "of the profile", "lost", "of the profile", ""],
        [
            [
                str(pair.src),
                str(pair.dst),
                f"{1e3 * pair.latency_s:.3f}",
                f"{1e3 * pair.expected_latency_s:.3f}",
                f"{pair.bandwidth_bps / 1e6:.2f}",
                f"{pair.expected_bandwidth_bps / 1e6:.2f}",
                f"{100 * pair.loss:.2f} %",
                f"{100 * pair.expected_loss:.2f} %",
                "" if pair.is_accurate else "off",
            ]
            for pair in measured
        ],
    )


@contextmanager
def _create_output(folder: Path | None, node: int) -> Iterator[int | None]:
    if folder is None:
        yield None
        return
    path = folder / f"rank-{node}.log"
    with wrap_write_errors(path):
        log = path.open("wb")
    with log:
        yield log.fileno()


@contextmanager
def _create_stop_pipe() -> Iterator[int]:
    """Yields a descriptor from which each stop signal makes one byte readable."""
    reader, writer = socket.socketpair()
    with reader, writer, handle_stop_signals(lambda: writer.send(b".")):
        yield reader.fileno()
