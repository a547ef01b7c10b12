"""Sites of two FSDP2 processes in four regions: torchft's HSDP and farflung, time to a loss, bytes, and a lost site."""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common import Benchmark, Group, Measured, main, torchrun
from benchmarks.common.workers import environment
from farflung.errors import DataMissing, LabError
from farflung.extras import require_modules
from farflung.lab import Lab
from farflung.lab.tun import build_address
from farflung.network import find_network

SITES, PROCESSES, NETWORK = 4, 2, "four-regions"
TORCHFT = "torchft"
RECIPES = {"synchronous": "synchronous", "int8": "synchronous(codec=int8)", "diloco": "diloco(sync_every=10)"}
SYSTEMS = {TORCHFT: TORCHFT, **RECIPES}
ROUNDS = 1
LOST_AT = 30
LIMIT_S = 240.0
PORT = 29500
TIME = "seconds to a twentieth of the first loss, {}"
SENT = "bytes that a site sends until then, {}"
STALL = "a site dies: longest step of the others after it, {}"


def trained(system: str, lost_at: int = -1) -> list[list[dict[str, Any]]]:
    """Runs a system at every site in the lab; what the first process of each site printed, by site.

    Raises:
      MissingExtra: torchft is not installed.
      LabError: a site that was not killed ended with an error; says what it printed.
    """
    if system == TORCHFT:
        require_modules("torchft's rows", "torchft", extra="peers")
    with ExitStack() as stack:
        lab = stack.enter_context(Lab(find_network(NETWORK).with_nodes(SITES), SITES))
        lab.check(any_delay=True)
        lab.begin()
        outputs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(SITES)]
        for site in range(SITES):
            command = [
                *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(PROCESSES)),
                *("--master-addr", build_address(site), "--master-port", str(PORT + 1)),
                *("-m", "benchmarks.sites.worker", system, str(SITES), str(lost_at)),
            ]
            variables = {
                "SITE": str(site),
                "SITE_ADDRESS": build_address(site),
                "FARFLUNG_SITE": f"{site}/{SITES}@{build_address(0)}:{PORT}",
                "LIGHTHOUSE": f"{build_address(0)}:{PORT}",
            }
            lab.start(site, command, {**environment(), **variables}, outputs[site].fileno())
        until = time.monotonic() + LIMIT_S
        codes = []
        for site in range(SITES):
            child = lab.workers[site]
            assert child is not None
            codes.append(child.wait(max(0.0, until - time.monotonic())))
        printed = []
        for output in outputs:
            output.seek(0)
            printed.append(output.read())
        for site, code in enumerate(codes):
            if code and (lost_at < 0 or site != 1):
                raise LabError(f"{system}: site {site} ended with exit code {code}: {printed[site][:3000]}")
        decoder = json.JSONDecoder()  # torchft's own lines may follow on the same line
        return [
            [decoder.raw_decode(line)[0] for line in text.splitlines() if line.startswith('{"step"')]
            for text in printed
        ]


def alone() -> list[dict[str, Any]]:
    """Trains one site of two processes on loopback; returns what its first process printed."""
    os.environ |= {"SITE": "0", "SITE_ADDRESS": "127.0.0.1"}
    return torchrun(PROCESSES, "benchmarks.sites.worker", "synchronous", "1", "-1")


def learn(name: str, quick: bool) -> Mapping[str, Measured]:
    """Measures time and bytes to the target; quickly, one site of ours trains alone on loopback."""
    runs = [[alone()]] if quick else [trained(SYSTEMS[name]) for _ in range(ROUNDS)]
    times_s = [max(told[-1]["t"] for told in run) for run in runs]
    sent = [statistics.fmean(told[-1]["sent"] for told in run) for run in runs]
    config = {"sites": SITES, "processes": PROCESSES, "steps": [run[0][-1]["step"] + 1 for run in runs]}
    return {
        TIME.format(name): Measured(statistics.median(times_s), (min(times_s), max(times_s)), config),
        SENT.format(name): Measured(statistics.median(sent), (min(sent), max(sent)), config),
    }


def lose(name: str, quick: bool) -> Mapping[str, Measured]:
    """Kills one process of a site; measures the longest step of the others from then on."""
    if quick:
        raise DataMissing("sites are measured in the lab only")
    stalls_s = []
    for _ in range(ROUNDS):
        run = [told for site, told in enumerate(trained(SYSTEMS[name], LOST_AT)) if site != 1]
        if any(told[-1]["sites"] != SITES - 1 for told in run):
            raise LabError(f"{name}: sites count {[told[-1]['sites'] for told in run]} others after a loss")
        stalls_s.append(
            max(
                after["t"] - before["t"]
                for told in run
                for before, after in zip(told[LOST_AT - 2 :], told[LOST_AT - 1 :], strict=False)
            )
        )
    config = {"sites": SITES, "processes": PROCESSES, "step": LOST_AT}
    return {STALL.format(name): Measured(statistics.median(stalls_s), (min(stalls_s), max(stalls_s)), config)}


CANARIES = ("preset synchronous",)
BENCHMARK = Benchmark(
    Path(__file__).parent,
    [
        *(
            Group((TIME.format(name), SENT.format(name)), partial(learn, name), "measured", 3.0, CANARIES)
            for name in SYSTEMS
        ),
        *(
            Group((STALL.format(name),), partial(lose, name), "measured", 3.0, CANARIES)
            for name in (TORCHFT, "synchronous")
        ),
    ],
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
