"""``farflung report`` and ``farflung watch``: pages of HTML about finished runs and runs that go on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import tyro
from typing_extensions import override

from farflung.cli.output import create_stdout_console, print_files
from farflung.errors import ConfigError, DataError, FarflungError
from farflung.files import path_exists, wrap_read_errors, write_text
from farflung.planning import Plan
from farflung.planning.table import build_plan_data
from farflung.report import ReportedRun, build_report_data, render_report_page, shorten_names
from farflung.runs import RunFolder
from farflung.runs.stopping import handle_stop_signals
from farflung.types import Json

__all__ = ["PageServer", "Report", "Watch", "load_report_data"]


@dataclass(frozen=True)
class Report:
    """Write an HTML page about runs: what they learned, and their time.

    The page loads nothing from elsewhere, so it can be sent and kept. Runs may be unfinished.
    """

    run_folders: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of runs of farflung train or farflung simulate, of which several are compared; or that of a plan."""
    out: Path | None = None
    """HTML file; by default report.html, in the run's folder if only one is given."""

    def run(self) -> int:
        if not self.run_folders:
            raise ConfigError("give the folder of a run, or of several")
        page = render_report_page(load_report_data(self.run_folders))
        out = self.out or (self.run_folders[0] if len(self.run_folders) == 1 else Path()) / "report.html"
        write_text(out, page)
        print_files(report=out)
        return 0


@dataclass(frozen=True)
class Watch:
    """Show the page of farflung report while a run goes on.

    Serves it at a local address with current figures. Only this machine can see it. Ctrl-C ends it, and leaves the
    run alone.
    """

    run_folder: tyro.conf.Positional[Path]
    """Folder of a run of farflung train or farflung simulate, even before its first step."""
    port: int = 0
    """Port on loopback; a free one when not given."""

    def run(self) -> int:
        load_report_data([self.run_folder])  # refuses a run that cannot be shown
        try:
            server = PageServer(self.run_folder, self.port)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"--port {self.port}: {error}") from None
        # Shuts down without an exception, which Python would drop in a destructor.
        with server, handle_stop_signals(lambda: Thread(target=server.shutdown, daemon=True).start()):
            create_stdout_console().print(f"http://127.0.0.1:{server.server_port}/", soft_wrap=True)
            server.serve_forever()
        raise KeyboardInterrupt


def load_report_data(folders: Sequence[Path], *, is_live: bool = False) -> dict[str, Json]:
    """Loads the data of a page from the current files of runs.

    Raises:
      BadInput: A folder has no run, or a damaged one.
    """
    if len(folders) == 1 and path_exists(plan_path := folders[0] / "plan.json"):
        with wrap_read_errors(plan_path, "not a plan of farflung plan", DataError):
            return build_plan_data(Plan.load(plan_path))
    runs = []
    stored = [RunFolder(path) for path in folders]
    settings = [files.load_config() for files in stored]
    names = shorten_names([str(path).encode(errors="replace").decode() for path in folders])
    if len({"network" in config for config in settings}) > 1:
        names = [
            f"{name} (simulated)" if "network" in config else name
            for name, config in zip(names, settings, strict=True)
        ]
    for files, config, name in zip(stored, settings, names, strict=True):
        with wrap_read_errors(files.path, "its events are damaged and cannot be shown", DataError):
            summary = files.load_summary() if files.summary_path.exists() else None
            runs.append(ReportedRun(name, config, files.load_events(), summary))
    with wrap_read_errors(", ".join(map(str, folders)), "damaged", DataError):
        return build_report_data(runs, is_live=is_live)


class PageServer(ThreadingHTTPServer):
    """Server of a run's page for this machine only, which reads the figures anew for each request.

    Args:
      folder: Folder of the run.
      port: Port on loopback; 0 for a free one.
    """

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        super().__init__(("127.0.0.1", port), _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = 10

    def do_GET(self) -> None:
        """Answers with the page, or with its figures."""
        address = f"127.0.0.1:{self.server.server_port}"
        status, kind, text = HTTPStatus.OK, "text/html", ""
        if self.headers.get("Host") not in (address, f"localhost:{self.server.server_port}"):
            # Otherwise the browser would admit a site whose name resolves to this machine.
            status, text = HTTPStatus.MISDIRECTED_REQUEST, f"farflung watch answers only at {address}"
        elif self.path not in ("/", "/data.json"):
            status, text = HTTPStatus.NOT_FOUND, "not there"
        else:
            try:
                data = load_report_data([self.server.folder], is_live=True)
                text = render_report_page(data) if self.path == "/" else json.dumps(data)
            except FarflungError as error:
                status, text = HTTPStatus.INTERNAL_SERVER_ERROR, str(error)
        if status is not HTTPStatus.OK:
            kind = "text/plain"
        elif self.path != "/":
            kind = "application/json"
        content = text.encode()
        self.send_response(status)
        for name, value in {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(content)),
            "Cache-Control": "no-store",
            "Content-Security-Policy": "frame-ancestors 'none'",
            "X-Content-Type-Options": "nosniff",
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    @override
    def log_message(self, format: str, *args: object) -> None:
        """Prints nothing for a request."""
