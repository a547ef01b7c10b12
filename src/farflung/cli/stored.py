"""``farflung retime``, ``traffic`` and ``trace``: evaluations of the folder of a finished run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from farflung.cli.options import print_result
from farflung.cli.output import OutputOptions, create_stdout_console, print_files, print_json
from farflung.cli.progress import Progress
from farflung.errors import DataError
from farflung.files import wrap_read_errors, write_json
from farflung.runs import SimulatedConfig

__all__ = ["Retime", "Trace", "Traffic"]


@dataclass(frozen=True)
class Retime(OutputOptions):
    """Time a simulated run on another network or other devices.

    Repeats no arithmetic. What the replicas learned is unchanged, and every time is that of a fresh simulation. A
    run whose decision log has decisions by time or arrival is refused, since it might learn something else there. So
    is an elastic run, since messages between its members are not recorded.
    """

    run_folder: tyro.conf.Positional[Path]
    """Folder of a run of farflung simulate."""
    network: str | None = None
    """Network to use instead of the run's: a name or a TOML file."""
    device: str | None = None
    """Device to use instead of the run's: a name or a TOML file."""
    out: Path | None = None
    """Folder of the new run; by default beside the old one."""

    def run(self) -> int:
        from farflung.runs import RunFolder, retime

        config = SimulatedConfig.load_settings(RunFolder(self.run_folder))
        network, device = self.network or str(config["network"]), self.device or str(config["device"])
        has_name = self.run_folder.name not in ("", "..")
        stored = self.run_folder if has_name else self.run_folder.resolve()
        out = self.out or stored.with_name(f"{stored.name}-on-{Path(network).stem}-{Path(device).stem}")
        with Progress(quiet=self.quiet or self.json, is_simulated=True) as progress:
            run = retime(self.run_folder, network=network, device=device, out=out, sink=progress)
        print_result(run, as_json=self.json)
        return 0


@dataclass(frozen=True)
class Traffic:
    """Show the bytes that replicas of a finished run sent, by purpose.

    Payloads are counted from tensors, in real and simulated runs. Gradients are all that steps exchange.
    """

    run_folder: tyro.conf.Positional[Path]
    """Folder of a run of farflung train or farflung simulate."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print JSON on stdout and nothing else: for each kind and sender the bytes to each rank."""

    def run(self) -> int:
        from farflung.report import read_traffic, render_traffic_table
        from farflung.runs import RunFolder

        files = RunFolder(self.run_folder)
        files.load_config()
        sent = read_traffic(files.load_events())
        if self.json:
            print_json(sent)
            return 0
        create_stdout_console().print(render_traffic_table(sent, title=f"payload bytes, {self.run_folder}"))
        return 0


@dataclass(frozen=True)
class Trace:
    """Write a Chrome trace of a run, for https://ui.perfetto.dev.

    Contains steps and their parts, evaluations, checkpoints and changes of members, and exchanges if the run
    was traced (--trace). Perfetto opens the file in the browser and sends it nowhere.
    """

    run_folder: tyro.conf.Positional[Path]
    """Folder of a run of farflung train or farflung simulate."""
    out: Path | None = None
    """Trace file; by default trace.json in the run's folder."""

    def run(self) -> int:
        from farflung.report import build_chrome_trace
        from farflung.runs import RunFolder

        files = RunFolder(self.run_folder)
        files.load_config()
        with wrap_read_errors(files.path, "its events are damaged and cannot be traced", DataError):
            trace = build_chrome_trace(files.load_events(), title=str(self.run_folder))
        out = self.out or files.path / "trace.json"
        write_json(out, trace)
        print_files(trace=out)
        return 0
