"""Processes that import nothing: forks of what the pool's workers are forks of.

Each has its own arguments, environment, folder, outputs and signals, as if it had been started. What is left out is the
start of Python and what it imports, seconds of which would be most of what a test does.
"""

from __future__ import annotations

import os
import runpy
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.context import ForkServerProcess
from multiprocessing.reduction import DupFd
from pathlib import Path
from threading import Timer
from types import ModuleType
from typing import IO, Any, Self

from farflung.runs.launching import WorkerParent
from farflung.runs.workers import serve
from tests.pool import preloaded

DEADLINE_S = 240.0
"""An upper bound for a process, on a busy machine; below that of a test, which would end the tests' own process."""


class Fork:
    """A process that runs ``call``, whose result is its exit code; as a context it is ended with the block.

    One that has not ended after :data:`DEADLINE_S` is killed, so nobody reads what it says forever.

    Args:
      call: a function of a module, or a ``functools.partial`` of one.
      cwd: where; here when not given.
      environment: beside this process's.
      log: gets what it says on both outputs; when not given, :attr:`stderr` is to be read as it comes, and both are
        told by :meth:`finished`.
    """

    def __init__(
        self,
        call: Callable[[], int | None],
        *,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
    ) -> None:
        self._stdout: IO[str] = (tempfile.TemporaryFile if log is None else log.open)("w+")
        self.outputs, theirs = [self._stdout], self._stdout.fileno()
        if log is None:
            ours, theirs = os.pipe()
            self.stderr = os.fdopen(ours)
            self.outputs.append(self.stderr)
        where = str(cwd or Path.cwd()), {**os.environ, **(environment or {})}
        self._process = _Process(call, *where, (self._stdout.fileno(), theirs))
        # A process of multiprocessing's would run this one's main script anew, which may be what a test runs.
        main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
        try:
            self._process.start()
        finally:
            sys.modules["__main__"] = main
        if log is None:
            os.close(theirs)
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        self._late = Timer(DEADLINE_S, self._process.kill)
        self._late.daemon = True
        self._late.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.returncode is None:
            self._process.terminate()
        self.wait()
        for output in self.outputs:
            output.close()

    @property
    def returncode(self) -> int | None:
        """Its exit code, or minus the signal that ended it; ``None`` while it runs."""
        return self._process.exitcode

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Waits for its end; its exit code then."""
        self._process.join(timeout_s)
        if self.returncode is not None:
            self._late.cancel()
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """Sends it a signal."""
        os.kill(self.pid, number)

    def finished(self) -> tuple[str, list[str]]:
        """Waits for its end; all of stdout, and what has not been read of the lines of stderr."""
        err = self.stderr.read()
        self.wait()
        self._stdout.seek(0)
        return self._stdout.read(), err.strip().splitlines()


def farflung(*arguments: str, **options: Any) -> Fork:
    """The ``farflung`` command; ``options`` are those of :class:`Fork`."""
    return Fork(partial(command, *arguments), **options)


def ran(*arguments: str) -> str:
    """What the ``farflung`` command prints, once it has ended well."""
    with farflung(*arguments) as process:
        out, err = process.finished()
    assert process.returncode == 0, "\n".join(err)
    return out


def command(*arguments: str) -> int:
    """What runs in the process of a command."""
    from farflung.__main__ import main

    sys.argv = ["farflung", *arguments]
    return main()


def script(path: Path, *arguments: str) -> None:
    """What runs in the process of a script."""
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.parent))
    runpy.run_path(str(path), run_name="__main__")


def parent_of(log: Path, *, workers: int) -> WorkerParent:
    """A parent of the workers of one run, as :func:`farflung.runs.launching.obtain_parent` starts one."""
    pipe = Path(tempfile.mkdtemp(), "job")
    os.mkfifo(pipe)
    threads = {"OMP_NUM_THREADS": "1"} if workers > 1 else {}
    process = Fork(
        partial(_serves, str(pipe), [path or str(Path.cwd()) for path in sys.path]),
        log=log,
        environment=threads,
    )

    def wait(timeout_s: float) -> None:
        if process.wait(timeout_s) is not None:
            for output in process.outputs:
                output.close()

    ours = os.open(pipe, os.O_RDWR)  # to write alone would wait for a reader, which may end before
    return WorkerParent(process.pid, ours, lambda: process.returncode, wait)


def _serves(pipe: str, path: list[str]) -> int:
    os.setsid()
    sys.path[:] = path
    reads = os.open(pipe, os.O_RDONLY)
    shutil.rmtree(Path(pipe).parent)
    return serve(reads)


def of_torchrun(rank: int, size: int, address: str, port: int, *, machines: int = 1) -> dict[str, str]:
    """What torchrun tells the replicas of as many machines, which are to meet in its own store."""
    here = size // machines
    told = {
        "RANK": rank, "LOCAL_RANK": rank % here, "GROUP_RANK": rank // here, "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": here, "MASTER_ADDR": address, "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    return {name: str(value) for name, value in told.items()}


class _Process(ForkServerProcess):
    """One that gets descriptors with what it is told."""

    def __init__(
        self, call: Callable[[], int | None], cwd: str, environment: dict[str, str], outputs: tuple[int, int]
    ) -> None:
        preloaded()
        super().__init__()
        self._call, self._cwd, self._environment, self._outputs = call, cwd, environment, outputs

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_outputs": tuple(DupFd(fd) for fd in self._outputs)}

    def run(self) -> None:
        for here, inherited in enumerate(self._outputs, start=1):
            fd = inherited.detach()  # type: ignore[attr-defined]
            os.dup2(fd, here)
            os.close(fd)
        os.environ.clear()
        os.environ.update(self._environment)
        os.chdir(self._cwd)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        signal.signal(
            signal.SIGINT, signal.default_int_handler
        )  # ignored where a shell runs the tests beside itself
        tempfile.tempdir = None  # which this process may have looked up before
        sys.exit(self._call())
