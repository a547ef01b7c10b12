"""Where connections come in, and when they may."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import resource
import socket
import struct
from collections.abc import Sequence

import zmq

from farflung.comm.gate import Gate
from farflung.comm.interface import is_loopback, tcp
from farflung.errors import ConfigError

__all__ = ["CROWD", "HANDSHAKE_S", "Door", "raise_limit"]

HANDSHAKE_S = 10.0
"""How long anybody may take from connecting to having proved who it is."""
CROWD = 64
"""How many connections may wait at once to prove who they are, beside those of the replicas that are due."""
_BACKLOG = 128
_ENOUGH_DESCRIPTORS = 1 << 16
_RESERVE = 256
"""Descriptors for all but connections of replicas: files, threads' own, and strangers before the door is shut."""
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
_DROP = ctypes.create_string_buffer(
    struct.pack("HBBI", 0x06, 0, 0, 0)
)  # BPF: return 0, keep nothing of a packet
_DROP_ALL = struct.pack("HP", 1, ctypes.addressof(_DROP))


class Door:
    """A replica's listening socket.

    It listens from the start, so that nobody finds a closed port; ZeroMQ accepts from :meth:`open` on. ZeroMQ bounds
    neither how many connections it accepts nor can it stop accepting without cutting those it has. So the door is shut
    in the kernel: a filter on the listening socket drops what would open a connection, and touches no open one. Whoever
    knocks meanwhile knocks again by itself, as TCP does.

    Args:
      sock: of a replica.
      interface: an address of this machine; without encryption one of loopback.
      gate: who is asked about each connection.
      size: number of replicas of the run.
      ports: the first of them that is free; 0: any.

    Raises:
      ConfigError: the address is none of this machine's, or not loopback and there is no encryption; or no port is
        free.
    """

    def __init__(
        self, sock: zmq.Socket[bytes], interface: str, gate: Gate, size: int, ports: Sequence[int] = (0,)
    ) -> None:
        if not is_loopback(interface) and gate.keys is None:
            raise ConfigError(
                f"interface {interface}: nothing leaves this machine without encryption, which takes keys"
            )
        self._listener = _listener(interface, ports, size + _BACKLOG)
        self.port: int = self._listener.getsockname()[1]
        """At which it listens."""
        self.address = f"{tcp(interface)}:{self.port}"
        self._sock, self._gate = sock, gate
        self._is_open = self._shut = False

    def open(self) -> None:
        """Begins to let in those whom the gate admits; once."""
        if self._is_open:
            return
        self._is_open = True
        self._gate.guard(self._sock)
        descriptor = os.dup(self._listener.fileno())  # ZeroMQ closes its own
        for option, value in (
            (zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000)),
            (zmq.IPV6, "[" in self.address),
            (zmq.USE_FD, descriptor),
        ):
            self._sock.setsockopt(option, value)
        self._sock.bind(self.address)
        self._sock.setsockopt(zmq.USE_FD, -1)

    def mind(self, due: int, waiting: int) -> None:
        """Shuts the door where nobody is due, and for as long as too many wait.

        Args:
          due: how many replicas have not come in yet.
          waiting: how many connections have not said who they are.
        """
        shut = due == 0 or waiting > due + (CROWD // 2 if self._shut else CROWD)
        if shut == self._shut:
            return
        self._shut = shut
        option, value = (_SO_ATTACH_FILTER, _DROP_ALL) if shut else (_SO_DETACH_FILTER, 0)
        try:
            self._listener.setsockopt(socket.SOL_SOCKET, option, value)
        except OSError as error:
            logging.getLogger("farflung").warning(
                "%s: cannot be shut here (%s); connections of strangers are refused one by one",
                self.address,
                error.strerror,
            )

    def close(self) -> None:
        """Gives the port back; ZeroMQ's own hold on it goes with its socket."""
        self._listener.close()


def _listener(interface: str, ports: Sequence[int], backlog: int) -> socket.socket:
    """Listens at the first port that is free."""
    family = socket.AF_INET6 if ":" in interface else socket.AF_INET
    for port in ports:
        try:
            return socket.create_server((interface, port), family=family, backlog=backlog)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise ConfigError(f"interface {interface}: cannot listen there ({error.strerror})") from None
    span = f"port {ports[0]}" if len(ports) == 1 else f"ports {ports[0]} to {ports[-1]}"
    raise ConfigError(
        f"interface {interface}: {span} in use: give others with --port, one for each replica here"
    )


def raise_limit(size: int) -> None:
    """Lets this process open as many files as a run of ``size`` replicas takes, and as strangers may make it open.

    Raises:
      ConfigError: it may not.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    most = _ENOUGH_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH_DESCRIPTORS)
    most, needed = max(soft, most), 2 * size + _RESERVE  # two connections of each
    if most < needed:
        raise ConfigError(
            f"{size} replicas take {needed} open files in each process, and {most} are allowed: raise ulimit -n"
        )
    if soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
