"""Trains under seeded faults for a time and checks the laws: ``scripts/soak [MINUTES] [--seed N] [--count N] [--lab]``.

Each seed draws an elastic run in virtual time (``test_elastic.py``) and a plan of the agreement alone (``plans.py``).
With ``--lab`` the first seed of every fifty is a run of real processes too. Ctrl-C ends it with the summary.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import random
import shlex
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from farflung.faults import FaultPlan
from farflung.lab import Lab, explain_missing, run_job
from farflung.network import find_network
from farflung.runs import EVENTS_VARIABLE, listen_for_events
from farflung.runs.joining import NETWORK_VARIABLE
from farflung.telemetry import read_events
from tests.membership import plans, test_elastic

ROUND = 50
LIMIT_S = 180
"""A plan that takes longer hangs."""
LINKS, LAB_STEPS, KILLED = "wifi-10mbps", 60, 128 + signal.SIGKILL


def elastic(seed: int) -> str:
    """Train in virtual time under a seed's plan, and say how that ended."""
    ended = test_elastic.checked(seed)
    return "runs ended in one model" if ended.error is None else "runs stopped by name"


def agreement(seed: int) -> str:
    """Carry out a seed's plan of the agreement."""
    law = plans.check(seed)
    assert not law, law
    return "agreements"


def lab(seed: int) -> str:
    """Train in real processes under a seed's plan without its joins: those that end have one model, others say why."""
    size, plan, recipe, _ = test_elastic.plan(seed)
    nodes = size - len(plan.joining_ranks)
    plan = FaultPlan(tuple(fault for fault in plan.faults if fault.rank < nodes))
    crashing, leaving = (
        {fault.rank for fault in plan.faults if fault.kind == kind} for kind in ("crash", "leave")
    )
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="farflung-soak-")))
        train = [
            *(sys.executable, "-m", "farflung", "train"),
            *("--workload", "synthetic/quadratic", "--recipe", recipe),
            *("--steps", str(LAB_STEPS), "--seed", str(seed), "--elastic", "1", "--json"),
            *("--deadline", str(test_elastic.DEADLINE_S), "--checkpoint-every", str(LAB_STEPS)),
        ]
        # Each rank is the first of its machine and has a folder of its own, so each keeps its model.
        own = f"LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 exec {shlex.join(train)} --out {folder}/rank-$RANK"
        logs = [stack.enter_context((folder / f"{rank}.log").open("w+b")) for rank in range(nodes)]
        told = stack.enter_context(listen_for_events(folder))
        links = stack.enter_context(Lab(find_network(LINKS), nodes, seed=seed))
        environment = {**os.environ, EVENTS_VARIABLE: told.getsockname(), NETWORK_VARIABLE: LINKS}
        outputs = [log.fileno() for log in logs]
        codes = run_job(
            links, ["sh", "-c", own], environment, outputs, plan=plan, event_socket=told
        ).exit_codes
        models = set()
        for rank, code in enumerate(codes):
            said = (folder / f"{rank}.log").read_text()
            if code == 0:
                events = read_events(folder / f"rank-{rank}" / "telemetry" / f"rank-{rank}.jsonl")
                end = next((event for event in events if event["event"] == "end"), None)
                if end is None:
                    assert rank in leaving, f"rank {rank} ended without an end: {said}"
                    continue
                assert end["steps"] == LAB_STEPS, f"rank {rank} ended after {end['steps']} steps"
                model = (folder / f"rank-{rank}" / "model.safetensors").read_bytes()
                models.add((end["final_loss"], model))
            elif code != KILLED or rank not in crashing:
                assert code == 1, f"rank {rank} ended with exit code {code}: {said}"
                assert said.splitlines()[-1].startswith("farflung: "), f"rank {rank}: {said}"
        assert len(models) < 2, f"those that ended have {len(models)} models; exit codes {codes}"
    return "in the lab ended in one model" if models else "in the lab stopped by name"


def hangs(*_: object) -> None:
    raise TimeoutError(f"hangs: not at its end after {LIMIT_S} s")


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code: 1 where a law was broken."""
    parser = argparse.ArgumentParser("scripts/soak", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("minutes", nargs="?", type=float, help="10 if neither these nor a count are given")
    parser.add_argument("--seed", type=int, help="of the first plan; drawn if not given")
    parser.add_argument("--count", type=int, help="of plans")
    parser.add_argument("--lab", action="store_true", help="real processes too; needs root")
    given = parser.parse_args(arguments)
    if given.lab and (lacking := explain_missing()):
        parser.error(f"--lab: {lacking}")
    minutes = (math.inf if given.count else 10.0) if given.minutes is None else given.minutes
    first = random.randrange(10**6) if given.seed is None else given.seed
    began, seen, broken = time.monotonic(), Counter[str](), 0
    handled = signal.signal(signal.SIGALRM, hangs)

    def tell() -> None:
        counts = "; ".join(f"{count:,} {what}" for what, count in sorted(seen.items()))
        print(
            f"{time.monotonic() - began:,.0f} s, from seed {first}: {broken} violations; {counts}", flush=True
        )

    try:
        for tried in itertools.count():
            if tried == given.count or time.monotonic() - began > 60 * minutes:
                break
            if tried and tried % ROUND == 0:
                tell()
            seed, really = first + tried, given.lab and tried % ROUND == 0
            for carry in (elastic, agreement, *((lab,) if really else ())):
                signal.alarm(LIMIT_S)
                try:
                    seen[carry(seed)] += 1
                except Exception as error:
                    broken += 1
                    at = traceback.extract_tb(error.__traceback__)[-1]
                    print(
                        f"seed {seed}, {carry.__name__}: {str(error) or at.line} ({at.filename}:{at.lineno})"
                    )
                    print(
                        f"again: scripts/soak --seed {seed} --count 1{' --lab' * (carry is lab)}", flush=True
                    )
                finally:
                    signal.alarm(0)
    except KeyboardInterrupt:
        print("interrupted")
    finally:
        signal.signal(signal.SIGALRM, handled)
    tell()
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
