"""One worker of a lab: a command in a node's network namespace, and in a process namespace that ends with it.

The worker consists of three processes. The *guard* is a child of the lab and ends with it. The *first* process
of the new process namespace ends with the guard; the kernel then ends every process in the namespace. The
*command* is the first one's child, the only one in the node's network.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from farflung._linux import exit_with_parent
from farflung.lab._kernel import CLONE_NEWPID, enter_network_namespace, mount_own_proc, unshare
from farflung.lab.children import Child

__all__ = ["list_processes", "start_worker"]

_START_FAILED = 127


def start_worker(
    namespace_fd: int, command: Sequence[str], environment: Mapping[str, str], output: int | None
) -> Child:
    """Starts a command at a node; the child's exit code is the command's, or 128 plus the signal that ended it.

    Args:
      namespace_fd: Descriptor of the node's network namespace.
      command: Program, found on ``PATH``, and its arguments.
      environment: Full environment of the command.
      output: Descriptor for its output; ``None`` for this process's standard output and error.
    """
    parent = os.getpid()
    keep = [namespace_fd, *([] if output is None else [output])]
    return Child(lambda: _run_guard_process(parent, namespace_fd, command, environment, output), keep)


def list_processes(namespace_fd: int) -> Iterator[int]:
    """Yields the ids of all processes in a network namespace."""
    name = f"net:[{os.fstat(namespace_fd).st_ino}]"
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                link = str((entry / "ns" / "net").readlink())
            except OSError:  # it has ended, or is about to
                continue
            if link == name:
                yield int(entry.name)


def _run_guard_process(
    parent: int,
    namespace_fd: int,
    command: Sequence[str],
    environment: Mapping[str, str],
    output: int | None,
) -> int:
    """Runs a command in a new process namespace, which ends with this process; returns its exit code."""
    exit_with_parent(parent)
    os.setsid()  # only the lab gets a terminal's signals, and passes them on
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    unshare(CLONE_NEWPID)
    reader, writer = os.pipe()
    keep = [namespace_fd, reader, *([] if output is None else [output])]
    init = Child(lambda: _run_init_process(reader, namespace_fd, command, environment, output), keep)
    os.write(writer, b"!")
    code = init.wait()
    return 1 if code is None or code < 0 else code


def _run_init_process(
    go: int, namespace_fd: int, command: Sequence[str], environment: Mapping[str, str], output: int | None
) -> int:
    exit_with_parent(0)
    if not os.read(go, 1):  # the guard ended before this process was bound to it
        return 1
    os.close(go)
    mount_own_proc()
    pid = os.fork()
    if pid == 0:
        _execute_command(namespace_fd, command, environment, output)
    while True:  # reaps every orphan of the namespace
        pid_ended, status = os.wait()
        if pid_ended == pid:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _execute_command(
    namespace: int, command: Sequence[str], environment: Mapping[str, str], output: int | None
) -> None:
    try:
        enter_network_namespace(namespace)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        if output is not None:
            os.dup2(output, 1)
            os.dup2(output, 2)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(ignored, signal.SIG_DFL)
        os.execvpe(command[0], list(command), dict(environment))
    except OSError as error:
        print(f"farflung lab: {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
    finally:
        os._exit(_START_FAILED)
