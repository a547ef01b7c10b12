"""One worker of a lab: a command in a node's network namespace, and in a process namespace that ends with it.

Three processes, one below the other. The *guard* is a child of the lab and ends with it. The *first* process of the
new process namespace ends with the guard; with it the kernel ends every process in there, whatever they have become
since. The *command* is the first one's child, the only one in the node's network.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from farflung._linux import die_with_parent
from farflung.lab._kernel import CLONE_NEWPID, enter_network, mount_own_proc, unshare
from farflung.lab.children import Child

__all__ = ["members", "start_worker"]

_NOT_STARTED = 127


def start_worker(
    namespace: int, command: Sequence[str], environment: Mapping[str, str], output: int | None
) -> Child:
    """Starts a command at a node; the child's exit code is the command's, 128 more than a signal that ended it.

    Args:
      namespace: a descriptor of the node's network namespace.
      command: a program, found on ``PATH``, and its arguments.
      environment: all of it.
      output: a descriptor that takes what it says; ``None``: this process's own standard output and error.
    """
    parent = os.getpid()
    keep = [namespace, *([] if output is None else [output])]
    return Child(lambda: _guard(parent, namespace, command, environment, output), keep)


def members(namespace: int) -> Iterator[int]:
    """The ids of all processes in a network namespace."""
    name = f"net:[{os.fstat(namespace).st_ino}]"
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                there = str((entry / "ns" / "net").readlink())
            except OSError:  # it has ended, or is about to
                continue
            if there == name:
                yield int(entry.name)


def _guard(
    parent: int,
    namespace: int,
    command: Sequence[str],
    environment: Mapping[str, str],
    output: int | None,
) -> int:
    die_with_parent(parent)
    os.setsid()  # what a terminal sends goes to the lab alone, which passes it on
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    unshare(CLONE_NEWPID)
    go, ready = os.pipe()
    keep = [namespace, go, *([] if output is None else [output])]
    first = Child(lambda: _first(go, namespace, command, environment, output), keep)
    os.write(ready, b"!")
    code = first.wait()
    return 1 if code is None or code < 0 else code


def _first(
    go: int, namespace: int, command: Sequence[str], environment: Mapping[str, str], output: int | None
) -> int:
    die_with_parent(0)
    if not os.read(go, 1):  # the guard ended before this one was bound to it
        return 1
    os.close(go)
    mount_own_proc()
    pid = os.fork()
    if pid == 0:
        _become(namespace, command, environment, output)
    while True:  # everything that has lost its parent comes here to be waited for
        ended, status = os.wait()
        if ended == pid:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _become(
    namespace: int, command: Sequence[str], environment: Mapping[str, str], output: int | None
) -> None:
    try:
        enter_network(namespace)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        if output is not None:
            os.dup2(output, 1)
            os.dup2(output, 2)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        for ignored_by_python in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(ignored_by_python, signal.SIG_DFL)
        os.execvpe(command[0], list(command), dict(environment))
    except OSError as error:
        print(f"farflung lab: {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
    finally:
        os._exit(_NOT_STARTED)
