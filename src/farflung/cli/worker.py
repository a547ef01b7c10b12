"""``farflung worker``: supervises one replica of an elastic run, and certifies its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from functools import partial

import tyro

from farflung._linux import exit_with_parent
from farflung.errors import ConfigError
from farflung.membership import SUPERVISOR, Page, announce_end

__all__ = ["Worker"]

_FORWARDED_SIGNALS = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT,
)  # fmt: skip


@dataclass(frozen=True)
class Worker:
    """Run one replica of an elastic run, and certify its death.

    torchrun --no-python ... farflung worker -- python train.py

    The program must itself call farflung.attach(elastic=...) or be farflung train --elastic; its child
    processes are not certified. Signals are forwarded to it. The exit code is the program's, or 128 plus the
    number of the signal that ended it.
    """

    command: tyro.conf.Positional[tuple[str, ...]] = ()
    """After --: the program and its arguments."""

    def run(self) -> int:
        if not self.command:
            raise ConfigError("no program is given: farflung worker -- python train.py")
        fd = Page.create_memory()
        page = Page(fd)
        setup_child = partial(exit_with_parent, os.getpid()) if sys.platform == "linux" else None
        try:
            child = subprocess.Popen(
                self.command,
                env={**os.environ, SUPERVISOR: f"{os.getpid()}:{fd}"},
                pass_fds=[fd],
                process_group=0,  # the program gets a signal to this group once, from here
                preexec_fn=setup_child,  # noqa: PLW1509 (there are no threads)
            )
        except OSError as error:
            raise ConfigError(f"{self.command[0]}: cannot be started ({error.strerror})") from None
        for number in _FORWARDED_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda number, _: child.send_signal(number))
        code = child.wait()
        for thread in announce_end(page, code) if code else ():
            thread.join()
        return code if code >= 0 else 128 - code
