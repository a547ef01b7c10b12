"""What must work where farflung is installed without extras; ends with an error where something does not.

Run by a test, with the extras hidden, and by scripts/package where they are not installed.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import pkgutil
import sys
from collections.abc import Callable
from pathlib import Path

import torch

import farflung
from farflung.data import Share, a9a
from farflung.data.source import Location
from farflung.errors import MissingExtra
from farflung.lab import Lab
from farflung.network import find_network
from farflung.report import render_comparison_table, render_partition_table, render_summary_table
from farflung.report.pictures import create_picture
from farflung.streams.kafka_topic import KafkaSource


def import_everything() -> None:
    with_extras = (
        "farflung.cli",
        "farflung.__main__",
        "farflung.coded.cli",
        "farflung.coded.estimators",
        "farflung.lab.cli",
        "farflung.integrations.",
    )
    for module in pkgutil.walk_packages(farflung.__path__, "farflung.", onerror=lambda name: None):
        if not module.name.startswith(with_extras):
            importlib.import_module(module.name)


def train() -> None:
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = farflung.attach(model, optimizer, "synchronous")
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(4, 8)).square().mean().backward()
        optimizer.step()
    handle.finish()


def say_the_version_and_what_the_command_needs() -> None:
    from farflung.__main__ import main

    for options, code, told in (
        (["--version"], 0, f"farflung {farflung.__version__}\n"),
        (["train"], 2, "farflung: the farflung command needs tyro: pip install 'farflung[cli]'\n"),
    ):
        said = io.StringIO()
        sys.argv[1:] = options
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            assert main() == code
        assert said.getvalue() == told


def simulate() -> None:
    """What is printed is lines, where tables need an extra."""
    run = farflung.simulate("synthetic/quadratic", workers=2, steps=3, network="wifi-10mbps")
    assert refusal(run.build_table) == "a table needs rich: pip install 'farflung[report]'"
    lines = str(run).splitlines()
    assert f"final_accuracy {run.summary['final_accuracy']}" in lines
    assert any(line.startswith("time_s.compute ") for line in lines)
    found = farflung.compare(["ring"], workload="synthetic/quadratic", workers=2, steps=3)
    assert {"network wifi-10mbps", "recipe ring", "num_reached 1"} <= set(str(found).splitlines())


def refusal(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except MissingExtra as error:
        return str(error)
    return "it did without"


def say_what_is_missing() -> None:
    here = Path()
    needs: list[tuple[Callable[[], object], str]] = [
        (
            lambda: create_picture(here, (1, 1)).__enter__(),
            "a picture needs matplotlib: [report]",
        ),
        (lambda: render_summary_table({}), "a table needs rich: [report]"),
        (lambda: render_partition_table([Share(1, (1,))], ""), "a table needs rich: [report]"),
        (lambda: render_comparison_table([], 0.5), "a table needs rich: [report]"),
        (lambda: Lab(find_network("lan-1g"), 2), "the lab needs pyroute2: [lab]"),
        (
            lambda: KafkaSource("localhost:9092", "readings", "earliest", "farflung", None).connect(0, 1),
            "the stream kafka needs confluent_kafka: [kafka]",
        ),
        (
            lambda: a9a.read(Location(here, ("a9a", "a9a.t"), "folder"), counts=(1, 1), num_positive=(0, 0)),
            "data set a9a needs sklearn: [sklearn]",
        ),
        (
            lambda: importlib.import_module("farflung.coded.estimators"),
            "farflung.coded.estimators needs sklearn: [sklearn]",
        ),
    ]
    for attempt, message in needs:
        what, extra = message.split("[")
        assert refusal(attempt) == f"{what}pip install 'farflung[{extra}'"


if __name__ == "__main__":
    train()
    assert "farflung.runs" not in sys.modules
    simulate()
    assert "farflung.cli" not in sys.modules
    say_what_is_missing()
    say_the_version_and_what_the_command_needs()
    import_everything()
