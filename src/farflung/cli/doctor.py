"""``farflung doctor``: checks this machine and its connection to others."""

from __future__ import annotations

import os
import platform
import resource
import socket
import ssl
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import torch
import tyro

import farflung
from farflung.cli.output import print_json, print_table
from farflung.cli.probing import ProbeResult, create_listener, probe, serve_probes
from farflung.comm.endpoint import parse_ports
from farflung.comm.interface import (
    check_host,
    find_interface_address,
    find_local_address,
    find_loopback_address,
    parse_address,
)
from farflung.errors import ConfigError
from farflung.types import Json
from farflung.wall import LaunchEnv

__all__ = ["Doctor"]

OPTIONAL_PACKAGES = (
    "matplotlib tyro confluent-kafka pyroute2 scikit-learn lightning accelerate transformers tensorboard wandb trackio "
    "mlflow"
)
"""Packages that extras install."""
SYSCTL_FOLDER = Path("/proc/sys/net/ipv4")


@dataclass(frozen=True)
class Doctor:
    """Check this machine, and the connection to other machines.

    On one machine, run farflung doctor --serve; on another, farflung doctor HOST:PORT with the port that the
    first has printed. Reports connections in both directions, round trip, clocks and versions. Exit code 1 if a
    machine cannot be reached. farflung probe measures throughput.
    """

    peers: tyro.conf.Positional[tuple[str, ...]] = ()
    """Machines to reach, each as HOST:PORT."""
    serve: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Answer other machines until Ctrl-C. Anyone who reaches the port can ask for its version and clock."""
    port: int = 0
    """Port to listen on: with --serve for others, else for connections back; 0: any port that is free."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print the results as JSON."""

    def run(self) -> int:
        (port,) = parse_ports(self.port)
        peers = {text: parse_address(text) for text in self.peers}
        for text, (host, _) in peers.items():
            check_host(host, text)
        if self.serve and (peers or self.json):
            raise ConfigError("--serve: answers others: leave out HOST:PORT and --json")
        if self.serve:
            return _serve(port)
        machine = _describe_machine([host for host, _ in peers.values()], LaunchEnv.read_site())
        if not self.json:
            print_table((), [*machine.items()])
        results: dict[str, ProbeResult] = {}
        troubles = _list_machine_troubles()
        for text, address in peers.items():
            try:
                result = results[text] = probe(address, port=port)
            except OSError as error:
                troubles.append(f"{text}: not reached: {error.strerror or error}")
            else:
                if result.connect_back_error:
                    troubles.append(
                        f"{text}: cannot connect back to this machine: {result.connect_back_error}"
                    )
        if self.json:
            rows: list[Json] = [{"peer": text, **asdict(result)} for text, result in results.items()]
            print_json({"machine": machine, "peers": rows, "troubles": troubles})
        elif results:
            lines = [
                {
                    "peer": text,
                    "connects back": "no" if result.connect_back_error else "yes",
                    "round trip": f"{1e3 * result.round_trip_s:.3g} ms",
                    "its clock": f"{1e3 * result.clock_s:+.3g} ms",
                    "its version": result.version
                    if result.version == farflung.__version__
                    else f"{result.version}, here {farflung.__version__}",
                }
                for text, result in results.items()
            ]
            print_table([*lines[0]], [[*line.values()] for line in lines])
        for trouble in troubles:
            print(f"farflung: {trouble}", file=sys.stderr)
        return int(bool(troubles))


def _serve(port: int) -> int:
    try:
        listener = create_listener(port)
    except OSError as error:
        raise ConfigError(f"--port {port}: cannot be listened at ({os.strerror(error.errno or 0)})") from None
    with listener, suppress(KeyboardInterrupt):
        port = listener.getsockname()[1]
        print(
            f"listens at port {port} of {_list_interfaces()}; on another machine: farflung doctor HOST:{port}",
            flush=True,
        )
        serve_probes(listener)
    return 0


def _list_machine_troubles() -> list[str]:
    """Returns why processes of this machine cannot reach each other; empty if they can."""
    address = find_loopback_address()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.create_server((address, 0), family=family) as listener:
            socket.create_connection(listener.getsockname()[:2], timeout=1.0).close()
    except OSError as error:
        return [
            f"{address}: not reached: {error.strerror or error}; workers of this machine need it: ip link set lo up"
        ]
    return []


def _describe_machine(hosts: list[str], site: LaunchEnv | None) -> dict[str, str]:
    """Returns texts about this machine for display, by property.

    Args:
      hosts: Hosts whose local address is shown.
      site: Environment of this site, if set.
    """
    packages = dict.fromkeys(OPTIONAL_PACKAGES.split(), "")
    for name in packages:
        with suppress(PackageNotFoundError):
            packages[name] = version(name)
    free, total = (
        os.sysconf(name) * os.sysconf("SC_PAGE_SIZE") / 1e9 for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES")
    )
    soft, hard = (
        "no limit" if n == resource.RLIM_INFINITY else str(n)
        for n in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    masters = hosts or [host for host in (site and site.master[0], os.environ.get("MASTER_ADDR")) if host]
    routes = ", ".join(f"{find_local_address(host)} to {host}" for host in dict.fromkeys(masters))
    fallback = "under torchrun the address on the way to MASTER_ADDR"
    return {
        "farflung": f"{farflung.__version__}, Python {platform.python_version()}, {platform.platform(terse=True)}",
        "torch": f"{torch.__version__}, {torch.cuda.device_count()} CUDA devices",
        "encryption": _describe_openssl(),
        "installed": ", ".join(f"{name} {release}" for name, release in packages.items() if release),
        "not installed": ", ".join(name for name, release in packages.items() if not release)
        or "nothing is missing",
        "cores": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}",
        "memory": f"{total:.3g} GB, {free:.3g} GB of it unused",
        "open files": f"{soft}; runs raise that as far as they need, up to {hard}",
        "congestion control": _describe_congestion_control(),
        "interfaces": _list_interfaces(),
        "messages and gloo use": routes or f"{find_loopback_address()}, or {fallback}",
        "site": "FARFLUNG_SITE is not set"
        if site is None
        else f"{site.rank} of {site.size}, which meet at {':'.join(map(str, site.master))}",
        "lab": "farflung lab --check says" if packages["pyroute2"] else "no: pip install 'farflung[lab]'",
        "samples from Kafka": "yes" if packages["confluent-kafka"] else "no: pip install 'farflung[kafka]'",
    }


def _describe_openssl() -> str:
    """Describes the OpenSSL that Python is linked to, and whether a later one encrypts faster."""
    is_slow = ssl.OPENSSL_VERSION_INFO < (3, 1)
    return ssl.OPENSSL_VERSION + ("; 3.1 and later encrypt up to twice as fast" if is_slow else "")


def _describe_congestion_control() -> str:
    """Describes the kernel's default congestion control, which farflung uses, and whether bbr is available."""
    try:
        default, available = (
            (SYSCTL_FOLDER / name).read_text(encoding="ascii").strip()
            for name in ("tcp_congestion_control", "tcp_available_congestion_control")
        )
    except OSError:
        return "not known"
    bbr = "is available" if "bbr" in available.split() else "is not: modprobe tcp_bbr"
    return f"{default}, the kernel's default, is used" + ("" if default == "bbr" else f"; bbr {bbr}")


def _list_interfaces() -> str:
    interfaces = []
    for _, name in socket.if_nameindex():
        with suppress(ConfigError):  # without an address of IPv4
            interfaces.append(f"{name} {find_interface_address(name)}")
    return ", ".join(interfaces) or "none with an address"
