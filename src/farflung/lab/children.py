"""Child processes without a new program: forks that run a function and are watched by a descriptor."""

from __future__ import annotations

import gc
import os
import select
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable

__all__ = ["Child"]


class Child:
    """Fork of this process that runs a function and ends; it keeps only the given descriptors.

    Args:
      fn: Function to run; its result is the exit code.
      keep: Descriptors to keep beside standard input, output and error.
    """

    def __init__(self, fn: Callable[[], int | None], keep: Iterable[int] = ()) -> None:
        with warnings.catch_warnings():
            # The child runs no code that other threads may be in the middle of.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                gc.freeze()  # the child must not finalize the parent's garbage
                _close_inherited(keep)
                code = fn() or 0
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
            finally:
                os._exit(code)
        self._fd = os.pidfd_open(self.pid)
        self.exit_code: int | None = None
        """Exit code, or minus the number of the signal that ended the child; ``None`` while it runs."""

    def fileno(self) -> int:
        """Returns a descriptor that is readable once the child has ended."""
        return self._fd

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Waits for the end and returns the exit code, or ``None`` if the child still runs after that time."""
        if self.exit_code is None and select.select([self._fd], [], [], timeout_s)[0]:
            _, status = os.waitpid(self.pid, 0)
            self.exit_code = os.waitstatus_to_exitcode(status)
            os.close(self._fd)
        return self.exit_code

    def kill(self) -> None:
        """Kills the child if it still runs, and waits for its end."""
        if self.exit_code is None:
            signal.pidfd_send_signal(self._fd, signal.SIGKILL)
            self.wait()


def _close_inherited(keep: Iterable[int]) -> None:
    """Closes all descriptors from 3 on, except those in ``keep``."""
    begin = 3
    for fd in sorted(set(keep)):
        os.closerange(begin, fd)
        begin = max(begin, fd + 1)
    os.closerange(begin, os.sysconf("SC_OPEN_MAX"))
