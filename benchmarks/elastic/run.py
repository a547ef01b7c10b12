"""Elastic training: how long survivors wait for a lost replica, what it costs without one, and goodput under losses."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import farflung
from benchmarks.common import Benchmark, Group, Measured, main
from benchmarks.common.workers import environment
from benchmarks.elastic import peers
from farflung.devices import DeviceProfile
from farflung.errors import DataMissing, LabError
from farflung.faults import Fault, FaultPlan
from farflung.lab import Lab
from farflung.network import find_network
from farflung.seeding import create_generator
from farflung.telemetry import Event, read_events
from farflung.workloads import create_workload
from tests.membership.plans import check

STALL = "stall of survivors after kill -9, {}"
CUT = "stall after a silent cut"
BACK = "a silent cut of 10 s: from its end to the first step of the member that was suspended"
HEALTHY = "healthy members put out in 10 min of jitter, loss, a 2 s cut and a 20 s checkpoint"
PARTIAL = "two members cannot reach each other, a third reaches both: members lost"
JOIN = "a joiner: from its start to its first committed step, wifi-100mbps"
HALVES = "views that train at once after all connections between two halves are reset, both alive"
RESTART = "restart"
STATIC = "elastic over static step time, wifi-100mbps"
TWO = "kill -9 of one of two, started by farflung train or farflung worker: runs that go on"
AGREED = "views agreed in 2,000 seeded plans with leaders lost while they set a view, virtual time"
UNEQUAL = "one of four devices at a third of the speed: time to 80 % with batches by speed over plain synchronous, {}"
LOSSES = "final loss under faults over that without, at equal samples, 200 seeded plans, virtual time"
HELD = "committed exchanges lost (held whole by a survivor)"
GOODPUT = (
    "goodput under a fault plan (a member lost every 60 s, back after 20 s), 8 replicas in virtual time; in the lab 4, "
    "paced at 0.5 s a step"
)
NODES, MODEL = 4, "fashion-mnist/mlp"
DEADLINE_S = 2.0
HEALTHY_DEADLINE_S, HEALTHY_STEPS = 5.0, 530
"""Of the run on links that lose packets, which is to take ten minutes."""
AT, STEPS, FROM = 40, 70, 10
"""The step of a fault, those of a run, and the first that counts as ordinary."""
SHORT = 12, 16, 5
"""The same of a quick run."""
WIFI = "wifi-100mbps"


# --- real processes -----------------------------------------------------------------------------------------------


def trained(
    quick: bool, network: str, nodes: int, plan: FaultPlan, steps: int, **settings: object
) -> dict[int, list[Event]]:
    """The events of a training of a small network in the lab, by rank; of a quick one in virtual time.

    Args:
      quick: whether to simulate it.
      network: between the nodes.
      nodes: how many.
      plan: what goes wrong.
      steps: of the training.
      settings: others of it.

    Raises:
      LabError: it did not begin; says what the command said.
    """
    both: dict[str, Any] = {
        "workload": MODEL,
        "codec": "int8",
        "steps": steps,
        "evaluate_every": 10**6,
        "checkpoint_every": 10**6,
        **settings,
    }
    if quick:
        told: list[Event] = []
        farflung.simulate(sink=told.append, network=network, workers=nodes, faults=plan, **both)
        return {rank: [event for event in told if event["rank"] == rank] for rank in range(nodes)}
    with tempfile.TemporaryDirectory(prefix="farflung-elastic-") as folder:
        (Path(folder) / "plan.toml").write_text("".join(map(as_toml, plan.faults)), encoding="utf-8")
        lab = [
            *(sys.executable, "-m", "farflung", "lab", "--network", network, "--nodes", str(nodes)),
            "--any-delay",
        ]
        faults = ["--faults", "plan.toml"] if plan.faults else []
        options = [
            word for name, value in both.items() for word in (f"--{name.replace('_', '-')}", str(value))
        ]
        command = [
            *lab,
            *faults,
            "train",
            *("--data", "packaged", "--out", "run"),
            *options,
        ]
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment(), cwd=folder, check=False
        )
        files = {rank: Path(folder, "run", "telemetry", f"rank-{rank}.jsonl") for rank in range(nodes)}
        if not all(file.exists() for file in files.values()):
            raise LabError(
                f"farflung lab ended with exit code {done.returncode}: {done.stderr[-1000:].strip()}"
            )
        return {rank: read_events(file) for rank, file in files.items()}


def as_toml(fault: Fault) -> str:
    """A fault as a plan's file has it."""
    values = {name: value for name, value in asdict(fault).items() if value is not None}
    return "[[fault]]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items())


def durations(events: Sequence[Event]) -> dict[int, float]:
    """Seconds of each step of a replica."""
    return {int(str(e["step"])): float(str(e["duration_s"])) for e in events if e["event"] == "step"}


def waited_s(took: Mapping[int, float], at: int, begin: int) -> float:
    """What the longest step after a fault took over the median of those before it."""
    ordinary = statistics.median(seconds for step, seconds in took.items() if begin <= step < at - 1)
    return max(seconds for step, seconds in took.items() if step >= at - 1) - ordinary


def delay_s(network: str) -> float:
    """The longest one-way delay between two nodes."""
    profile = find_network(network).with_nodes(NODES)
    sites = [profile.get_site_index(node) for node in range(NODES)]
    return max(
        profile.get_link(a, b).latency_s for a in range(len(sites)) for b in range(len(sites)) if a != b
    )


def stall(network: str, quick: bool) -> Mapping[str, Measured]:
    """Kills each rank in turn."""
    found, (at, steps, begin) = [], SHORT if quick else (AT, STEPS, FROM)
    for turn in range(1 if quick else 8):
        lost = turn % NODES
        plan = FaultPlan().crash(lost, at_step=at)
        events = trained(quick, network, NODES, plan, steps, elastic="1")
        left = [told for rank, told in events.items() if rank != lost]
        ended = [told for told in left if came_to_end(told)]
        if len(ended) < len(left):
            raise LabError(f"{len(ended)} of {len(left)} survivors came to the end")
        found.append(max(waited_s(durations(told), at, begin) for told in left) - 3 * delay_s(network))
    config = {"trials": found, "nodes": NODES, "one_way_s": delay_s(network)}
    return {STALL.format(network): Measured(statistics.median(found), (min(found), max(found)), config)}


def stall_of(peer: str, quick: bool) -> Mapping[str, Measured]:
    """Kills the worker of each node in turn, of a peer."""
    if quick:
        raise DataMissing("peers are measured in the lab alone")
    found = []
    for turn in range(8 if peer in peers.HEARTBEATS else NODES):
        left = peers.survivors(peer, MODEL, WIFI, NODES, lost=turn % NODES, at=AT, steps=AT + 5)
        found.append(max(waited_s(took, AT, FROM) for took in left.values()) - 3 * delay_s(WIFI))
    config = {"trials": found, "nodes": NODES, **peers.HEARTBEATS.get(peer, {})}
    return {of_peer(peer): Measured(statistics.median(found), (min(found), max(found)), config)}


def of_peer(peer: str) -> str:
    """The row of a peer."""
    return f"{STALL.format(WIFI)}, {'torchrun' if peer == RESTART else 'torchft 0.2,'} {peer}"


def joiner(quick: bool) -> Mapping[str, Measured]:
    """Has a replica join four, in a network of its own."""
    if quick:
        plan = FaultPlan().join(NODES, at_step=4)
        events = trained(True, WIFI, NODES, plan, 60, elastic=f"1:{NODES + 1}")
        return {} if events else {JOIN: Measured(None, None)}
    trials = [joined() for _ in range(5)]
    found = [trial["seconds"] for trial in trials]
    return {JOIN: Measured(statistics.median(found), (min(found), max(found)), {"trials": trials})}


JOINER = """
import json, sys, time
began = time.monotonic()
import torch
with open(sys.argv.pop(1), "w") as file:
    json.dump([began, time.monotonic()], file)
import farflung.telemetry as telemetry
emit = telemetry.Telemetry.emit
def tell(self, event, **fields):
    emit(self, event, **fields)
    if event == "step":
        telemetry.Telemetry.emit = emit
        print(json.dumps([time.monotonic(), fields["step"]]), flush=True)
telemetry.Telemetry.emit = tell
from farflung.__main__ import main
sys.exit(main())
"""
"""``farflung join`` that notes when torch is imported and when its first step is committed."""


def joined() -> dict[str, float]:
    """Seconds of one replica that joins."""
    with (
        tempfile.TemporaryDirectory(prefix="farflung-elastic-") as name,
        Lab(find_network(WIFI).with_nodes(NODES + 1), NODES + 1) as lab,
    ):
        folder = Path(name)
        lab.check(any_delay=True)
        lab.begin()
        command = [
            *("env", f"WORLD_SIZE={NODES}", f"LOCAL_WORLD_SIZE={NODES}"),
            *(sys.executable, "-m", "farflung", "train", "--workload", MODEL),
            *("--data", "packaged", "--codec", "int8", "--steps", "100000", "--elastic", f"1:{NODES + 1}"),
            *("--evaluate-every", "1000000", "--checkpoint-every", "1000000", "--out", f"{name}/run"),
        ]
        with (folder / "log").open("wb") as log:
            for node in range(NODES):
                lab.start(node, command, environment(), log.fileno())
            telemetry = folder / "run" / "telemetry"
            wait_for(lambda: has_step(telemetry / "rank-0.jsonl"), "a step of the run")
            began = time.monotonic()
            said = (folder / "said").open("wb")
            noted = folder / "imported"
            lab.start(
                NODES,
                [sys.executable, "-c", JOINER, str(noted), "join", f"{name}/run", "--quiet"],
                environment(),
                said.fileno(),
            )
            wait_for(lambda: (folder / "said").read_text().count("\n") > 0, "the joiner's first step")
            said.close()
        line = (folder / "said").read_text().splitlines()[0]
        ended, step = json.loads(line) if line.startswith("[") else (math.nan, 0)
        if not step:
            raise LabError(f"the joiner failed: {line}")
        before, after = json.loads(noted.read_text())
        state_s = 8 * state_nbytes() / 100e6
        return {
            "seconds": ended - began - (after - before) - state_s,
            "whole": ended - began,
            "interpreter": before - began,
            "import_of_torch": after - before,
            "transfer_of_state": state_s,
        }


def state_nbytes() -> int:
    """Of parameters and momentum."""
    model = create_workload(MODEL).build_model(create_generator(0, "model"))
    return 2 * sum(one.numel() * one.element_size() for one in model.parameters())


def has_step(file: Path) -> bool:
    """Whether a replica has done a step."""
    return file.exists() and any(event["event"] == "step" for event in read_events(file))


def wait_for(found: Callable[[], bool], what: str) -> None:
    """Polls, for two minutes at most."""
    until = time.monotonic() + 120
    while not found():
        if time.monotonic() > until:
            raise LabError(f"{what} did not come within two minutes")
        time.sleep(0.02)


def halves(quick: bool) -> Mapping[str, Measured]:
    """Resets all connections between two halves of four, five times in a run, at seeded steps and of seeded halves."""
    several, left, resets = [], [], 0
    for seed in range(1 if quick else 20):
        random, plan, step = Random(seed), FaultPlan(), 4
        for _ in range(1 if quick else 5):
            plan = plan.reset(0, group=(random.randint(1, NODES - 1),), at_step=step)
            step += random.randint(10, 20)
        resets += len(plan.faults)
        events = trained(quick, WIFI, NODES, plan, step, elastic="1")
        begins = [int(str(fault.at_step)) for fault in plan.faults]
        several += sorted({(seed, sum(begin <= step for begin in begins)) for step in at_once(events)})
        left.append(sum(map(came_to_end, events.values())))
    config = {"resets": resets, "runs": len(left), "members_at_the_end": left, "several": several}
    return {HALVES: Measured(float(len(several)), None, config)}


def came_to_end(told: Sequence[Event]) -> bool:
    """Whether a replica has done all of its steps."""
    return any(event["event"] == "end" for event in told)


def at_once(events: Mapping[int, Sequence[Event]]) -> list[int]:
    """The steps that replicas do in different views."""
    views = dict[int, set[Any]]()
    for told in events.values():
        changes: list[Any] = [(0, sorted(events))]
        for event in told:
            if event["event"] == "view":
                changes.append((event["step"], event["members"]))
            elif event["event"] == "step":
                step = int(str(event["step"]))
                views.setdefault(step, set()).add(tuple([of for begin, of in changes if begin <= step][-1]))
    return [step for step, found in sorted(views.items()) if len(found) > 1]


def silent_cut(quick: bool) -> Mapping[str, Measured]:
    """Cuts the most junior rank off, whose connections stay open."""
    found, (at, steps, begin) = [], SHORT if quick else (AT, STEPS, FROM)
    for _ in range(1 if quick else 4):
        plan = FaultPlan((Fault("cut", NODES - 1, at_step=at, for_s=20.0),))
        events = trained(quick, WIFI, NODES, plan, steps, elastic="1", deadline=DEADLINE_S)
        found.append(max(waited_s(durations(events[rank]), at, begin) for rank in range(NODES - 1)))
    config = {"trials": found, "deadline_s": DEADLINE_S}
    return {CUT: Measured(statistics.median(found), (min(found), max(found)), config)}


def back_again(quick: bool) -> Mapping[str, Measured]:
    """Cuts each rank off for 10 s, and times how soon it takes part again."""
    found, cut_s, after_s = [], 10.0, 5.0
    for turn in range(1 if quick else 4):
        rank = turn % NODES
        plan = FaultPlan((Fault("cut", rank, at_s=after_s, for_s=cut_s),))
        steps = 60 if quick else 600
        events = trained(quick, WIFI, NODES, plan, steps, elastic="1", deadline=DEADLINE_S)
        begins = [event for event in events[rank] if event["event"] == "begin"]
        views = [event for event in events[(rank + 1) % NODES] if event["event"] == "view"]
        if not quick and [(view["lost"], view["joined"]) for view in views] != [([rank], []), ([], [rank])]:
            raise LabError(f"rank {rank} was not suspended and admitted again: {views}")
        if not quick:
            first = next(e for e in events[rank] if e["event"] == "step" and e["step"] == begins[-1]["step"])
            found.append(float(str(first["t"])) - (float(str(begins[0]["t"])) + after_s + cut_s))
    config = {"trials": found, "deadline_s": DEADLINE_S}
    best = statistics.median(found) if found else None
    return {BACK: Measured(best, (min(found), max(found)) if found else None, config)}


def disturbed(folder: Path) -> str:
    """Writes the profile of four regions with a jitter of a fifth of the delay and a loss of 1 %; its name."""
    profile = find_network("four-regions").with_nodes(NODES)
    lines = [
        'name = "four-regions-disturbed"',
        *(f'[[site]]\nname = "{number}"\nnodes = 1\n' for number in range(NODES)),
    ]
    for a in range(NODES):
        for b in range(NODES):
            if a != b:
                link = profile.get_link(profile.get_site_index(a), profile.get_site_index(b))
                lines.append(
                    f'[[link]]\nfrom = "{a}"\nto = "{b}"\nlatency_s = {link.latency_s}\n'
                    f"jitter_s = {link.latency_s / 5}\nbandwidth_bps = {link.bandwidth_bps}\nloss = 0.01\n"
                )
    file = folder / "disturbed.toml"
    file.write_text("\n".join(lines), encoding="utf-8")
    return str(file)


def healthy(quick: bool) -> Mapping[str, Measured]:
    """Ten minutes on links that lose packets: a cut of 2 s, a checkpoint of 20 s, and 30 % loss for 10 s."""
    plan = FaultPlan((
        Fault("cut", 1, at_s=150.0, for_s=2.0),
        Fault("lose", 2, at_s=300.0, for_s=10.0, loss=0.3),
        Fault("cut", 3, at_s=450.0, for_s=2.0),
    ))  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="farflung-elastic-") as folder:
        events = trained(
            quick, disturbed(Path(folder)), NODES, plan, 20 if quick else HEALTHY_STEPS,
            workload=MODEL if quick else "benchmarks.elastic.slow:slow", checkpoint_every=100,
            elastic="1", deadline=HEALTHY_DEADLINE_S,
        )  # fmt: skip
    steps = [event for event in events[0] if event["event"] == "step"]
    lost = [event["lost"] for event in events[0] if event["event"] == "view" and event["lost"]]
    config = {
        "seconds": float(str(steps[-1]["t"])),
        "steps": len(steps),
        "longest_step_s": max(float(str(event["duration_s"])) for event in steps),
        "deadline_s": HEALTHY_DEADLINE_S,
        "lost": lost,
    }
    return {HEALTHY: Measured(float(len(lost)), None, config)}


def partial_cut(quick: bool) -> Mapping[str, Measured]:
    """Cuts two ranks of five off from each other."""
    found, (at, steps, _) = [], SHORT if quick else (AT, STEPS, FROM)
    for _ in range(1 if quick else 3):
        plan = FaultPlan((Fault("cut", 1, peer=2, at_step=at, for_s=20.0),))
        events = trained(quick, WIFI, 5, plan, steps, elastic="1", deadline=DEADLINE_S)
        views = [event for event in events[0] if event["event"] == "view"]
        found.append(float(sum(len(event["lost"]) for event in views if isinstance(event["lost"], list))))
    return {PARTIAL: Measured(statistics.median(found), (min(found), max(found)), {"trials": found})}


def without_faults(quick: bool) -> Mapping[str, Measured]:
    """Median steps with and without ``--elastic``, in turns."""
    ratios = []
    for turn in range(1 if quick else 5):
        took = {}
        for name, least in sorted({"elastic": "1", "static": ""}.items(), reverse=turn % 2 == 1):
            events = trained(quick, WIFI, NODES, FaultPlan(), 10 if quick else 120, elastic=least)
            took[name] = statistics.median(s for step, s in durations(events[0]).items() if step >= 5)
        ratios.append(took["elastic"] / took["static"])
    return {STATIC: Measured(statistics.median(ratios), (min(ratios), max(ratios)), {"turns": ratios})}


def one_of_two(quick: bool) -> Mapping[str, Measured]:
    """Kills one of two workers of a machine, the senior or the junior."""
    ended = []
    count = 2 if quick else 20
    for turn in range(count):
        pids: dict[int, int] = {}

        def show(
            event: Event, pids: dict[int, int] = pids, lost: int = turn % 2, at: int = 10 + turn
        ) -> None:
            if event["event"] == "hello":
                pids[int(str(event["rank"]))] = int(str(event["pid"]))
            elif event["event"] == "step" and event["step"] == at and lost in pids:
                os.kill(pids.pop(lost), signal.SIGKILL)

        folder = Path(tempfile.mkdtemp(prefix="farflung-elastic-"))
        try:
            run = farflung.train(
                "synthetic/quadratic",
                sink=show,
                out=folder / "run",
                workers=2,
                elastic="1",
                steps=80,
                deadline=30.0,
            )
            ended.append(float(run.summary["steps"] == 80))
        except farflung.errors.RunLost:
            ended.append(0.0)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return {TWO: Measured(sum(ended) / count, None, {"runs": count})}


# --- virtual time -------------------------------------------------------------------------------------------------


def agreements(quick: bool) -> Mapping[str, Measured]:
    """Plans of the protocol alone: each law holds at every moment, and each member ends in a view or by name."""
    count = 50 if quick else 2_000
    broken = [law for seed in range(count) if (law := check(seed))]
    behind = sum("begins after" in law for law in broken)
    config = {"plans": count, "broken": broken[:5]}
    return {
        AGREED: Measured(1 - len(broken) / count, None, config, simulated=True),
        HELD: Measured(float(behind), None, {"plans": count}, simulated=True),
    }


def goodput(quick: bool) -> Mapping[str, Measured]:
    """Samples per second over those of the members present without faults, over five losses."""
    size, losses, step_s, batch = (3, 1, 1.0, 8) if quick else (8, 5, 0.5, 32)
    plan = FaultPlan()
    for number in range(losses):
        plan = plan.crash(size - 1 - number, at_s=60.0 * (number + 1)).join(
            size + number, at_s=60.0 * (number + 1) + 20
        )
    until_s = 60.0 * (losses + 1)
    settings: dict[str, Any] = {
        "network": WIFI, "device": DeviceProfile("paced", step_s / batch / 3), "batch_size": batch,
        "evaluate_every": 10**6, "checkpoint_every": 10**6, "codec": "int8",
    }  # fmt: skip
    quiet: list[Event] = []
    farflung.simulate(
        "fashion-mnist/mlp",
        sink=quiet.append,
        workers=size,
        steps=5 if quick else 20,
        elastic="1",
        **settings,
    )
    alone_s = statistics.median(durations([event for event in quiet if event["rank"] == 0]).values())
    events: list[Event] = []
    farflung.simulate(
        "fashion-mnist/mlp", sink=events.append, workers=size, elastic=f"1:{size + losses}", faults=plan,
        steps=int(until_s / alone_s), **settings,
    )  # fmt: skip
    lost = {rank: 60.0 * (number + 1) for number, rank in enumerate(range(size - 1, size - 1 - losses, -1))}
    steps = [event for event in events if event["event"] == "step"]
    end_s = max(float(str(event["t"])) for event in steps)
    done = {int(str(event["step"])) for event in steps}
    given = sum(
        batch for event in steps if float(str(event["t"])) <= lost.get(int(str(event["rank"])), end_s)
    )
    present_s = sum(lost.get(rank, end_s) for rank in range(size))
    present_s += sum(max(0.0, end_s - 60.0 * (number + 1) - 20) for number in range(losses))
    share = given / (present_s / alone_s * batch)
    config = {"steps": len(done), "seconds": end_s, "step_s": alone_s, "losses": losses}
    return {GOODPUT: Measured(share, None, config, simulated=True)}


PACED = """name = "paced"
forward_s = {forward_s}

[[scheduled]]
begin_s = 0
end_s = 1000000
factor = 3
ranks = [3]
"""


def unequal(lab: bool, quick: bool) -> Mapping[str, Measured]:
    """Trains on four devices of which one is slow, with equal batches and with batches by speed."""
    where, found = "the lab" if lab else "virtual time", []
    with tempfile.TemporaryDirectory(prefix="farflung-elastic-") as folder:
        device = Path(folder, "paced.toml")
        device.write_text(PACED.format(forward_s=0.1 / 32 / 3), encoding="utf-8")
        for seed in range(1 if quick else 2 if lab else 3):
            took = {}
            for sampler in ("uniform", "balanced"):
                both: dict[str, Any] = {
                    "batch_size": 32, "seed": seed, "sampler": sampler, "evaluate_every": 10,
                    **({"pace": str(device)} if lab else {"device": str(device)}),
                }  # fmt: skip
                both = {**both, "data": "packaged"} if not lab else both
                events = trained(not lab, WIFI, NODES, FaultPlan(), 20 if quick else 240, **both)
                scores = [event for event in events[0] if event["event"] == "evaluation"]
                goal = 0.0 if quick else 0.8
                took[sampler] = next(float(str(e["t"])) for e in scores if float(str(e["accuracy"])) >= goal)
                if lab:
                    took[sampler] -= float(str(events[0][1]["t"]))
            found.append(took["balanced"] / took["uniform"])
    best = Measured(statistics.median(found), (min(found), max(found)), {"seeds": found}, simulated=not lab)
    return {UNEQUAL.format(where): best}


SCHEDULES = (
    "synchronous", "pipelined(width=2)", "pipelined(width=3)", "delayed(delay=2,period=2)", "delayed(delay=3)",
    "local_sgd(sync_every=3)", "post_local_sgd(warmup=4,sync_every=3)", "diloco(sync_every=4)",
    "streaming_diloco(sync_every=4,fragments=2)",
)  # fmt: skip


def final_losses(quick: bool) -> Mapping[str, Measured]:
    """Losses of seeded plans in which one or two of four crash or leave and one may join, over those without faults."""
    count, steps, batch = (2, 20, 8) if quick else (200, 200, 8)
    differences, losses, ended, stopped = dict[str, list[float]](), [], [], 0
    for seed in range(count):
        draw, schedule = Random(seed), SCHEDULES[seed % len(SCHEDULES)]
        plan, at = FaultPlan(), draw.randrange(5, steps - 5)
        for rank in draw.sample(range(NODES), draw.randint(1, 2)):
            plan = getattr(plan, draw.choice(["crash", "crash", "leave"]))(rank, at_step=at)
            at = min(steps - 3, at + draw.choice([0, 1, 7]))
        if draw.random() < 0.5:
            plan = plan.join(NODES, at_step=draw.randrange(2, steps - 5))
        settings: dict[str, Any] = {
            "data": "packaged", "network": WIFI, "workers": NODES, "batch_size": batch, "seed": seed,
            "recipe": f"synchronous(schedule='{schedule}')", "learning_rate_schedule": "cosine",
            "evaluate_every": 10**6, "checkpoint_every": 10**6,
        }  # fmt: skip
        most = f"1:{NODES + 1}" if any(fault.kind == "join" for fault in plan.faults) else "1"
        try:
            run: Any = farflung.simulate(MODEL, faults=plan, elastic=most, steps=steps, **settings).summary
        except farflung.errors.RunLost:  # half of the members at once, the senior among them
            stopped += 1
            continue
        alike = round(run["samples"] / (NODES * batch))
        without: Any = farflung.simulate(MODEL, steps=alike, **settings).summary
        losses.append(without["final_loss"])
        ended.append(run["final_loss"])
        differences.setdefault(schedule, []).append(ended[-1] - losses[-1])
    every = [difference for one in differences.values() for difference in one]
    error = statistics.stdev(every) / math.sqrt(len(every))
    config = {
        "mean_with_faults": statistics.fmean(ended),
        "mean_without": statistics.fmean(losses),
        "standard_error_of_the_difference": error,
        "by_schedule": {schedule: statistics.fmean(one) for schedule, one in differences.items()},
        "runs": len(ended),
        "stopped_by_name": stopped,
    }
    return {LOSSES: Measured(abs(statistics.fmean(every)) / error, None, config, simulated=True)}


CANARIES = ("preset synchronous",)
BENCHMARK = Benchmark(
    Path(__file__).parent,
    [
        Group((AGREED, HELD), agreements, "simulated", 2.0, CANARIES),
        Group((GOODPUT,), goodput, "simulated", 2.0, CANARIES),
        Group((LOSSES,), final_losses, "simulated", 25.0, CANARIES),
        *(
            Group(
                (UNEQUAL.format("the lab" if lab else "virtual time"),),
                partial(unequal, lab),
                "measured" if lab else "simulated",
                5.0 if lab else 1.0,
                CANARIES,
            )
            for lab in (False, True)
        ),
        Group((STALL.format(WIFI),), partial(stall, WIFI), "measured", 4.0, CANARIES),
        Group((STALL.format("four-regions"),), partial(stall, "four-regions"), "measured", 8.0, CANARIES),
        Group((CUT,), silent_cut, "measured", 2.0, CANARIES),
        Group((BACK,), back_again, "measured", 3.0, CANARIES),
        Group((HEALTHY,), healthy, "measured", 12.0, CANARIES),
        Group((PARTIAL,), partial_cut, "measured", 2.0, CANARIES),
        Group((STATIC,), without_faults, "measured", 6.0, CANARIES),
        Group((TWO,), one_of_two, "measured", 3.0, CANARIES),
        Group((JOIN,), joiner, "measured", 3.0, CANARIES),
        Group((HALVES,), halves, "measured", 12.0, CANARIES),
        *(
            Group((of_peer(peer),), partial(stall_of, peer), "measured", 4.0, CANARIES)
            for peer in (*peers.HEARTBEATS, RESTART)
        ),
    ],
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
