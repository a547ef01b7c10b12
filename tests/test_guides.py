"""Tutorials, how-to pages and those for other systems' users tell the truth: what they show runs as it stands.

The blocks of a page run in its order, in one folder. A block that begins with the name of a file, as ``# mine.py``, is
that file. A command that ends with ``&`` runs beside those after it, up to ``wait``; torchrun's replicas are forks.
``<!-- not run: reason -->`` on the line before a block leaves it out.
"""

from __future__ import annotations

import ast
import inspect
import re
import signal
import socket
import sys
from contextlib import ExitStack
from functools import partial, reduce
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from farflung.errors import DataMissing
from farflung.recipes import RECIPES
from farflung.recipes.components import REGISTRIES
from farflung.recipes.recipe import FAMILIES
from farflung.runs import parse_variant
from farflung.spec import build
from farflung.telemetry import read_events
from farflung.workloads import create_workload
from tests.broker import HOME, Broker
from tests.covering import thorough
from tests.forks import Fork, farflung, script
from tests.test_readme import BLOCK, FENCE, LIMIT_S, ROOT, Block, blocks_of, program, python, replicas, run

DOCS = ROOT / "docs"
PAGES = sorted(path for kind in ("tutorials", "how-to", "coming-from") for path in (DOCS / kind).glob("*.md"))
NAMED = re.compile(r"# (?P<file>[\w-]+\.(?:py|toml))\n")
TERMINALS = DOCS / "tutorials" / "elastic.md"
"""Its commands are for two terminals and a run that is under way, which its own test has."""
KAFKA = DOCS / "tutorials" / "kafka.md"


def name_of(page: Path) -> str:
    return page.relative_to(DOCS).as_posix()


def runnable(page: Path) -> list[Block]:
    return blocks_of(page.read_text(encoding="utf-8"), "sh", "python", "toml")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_blocks_are_found(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(BLOCK.findall(text)) == len(FENCE.findall(text)), "fences are ```sh or ```python, not indented"


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize(
    "page", thorough(*(page for page in PAGES if runnable(page) and page != TERMINALS)), ids=name_of
)
def test_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside(tmp_path, monkeypatch)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    for number, block in enumerate(runnable(page)):
        if block.language == "sh":
            carry_out([line.replace("29500", port) for line in block.commands()], tmp_path)
        else:
            carry_out_code(block, tmp_path, number)


def inside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes it the folder that this process is in and imports from; modules of an earlier page are forgotten."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    for page in PAGES:
        for block in runnable(page):
            if named := NAMED.match(block.text):
                monkeypatch.delitem(sys.modules, Path(named["file"]).stem, raising=False)


def carry_out_code(block: Block, folder: Path, number: int) -> None:
    """Leaves a file, or runs Python."""
    named = NAMED.match(block.text)
    path = folder / (named["file"] if named else f"block_{number}.py")
    path.write_text(block.text, encoding="utf-8")
    if not named:
        assert block.language == "python", "a file begins with its name"
        python(path, several="init_process_group" in block.text or "farflung.attach(" in block.text)


def carry_out(commands: list[str], folder: Path) -> None:
    """Runs the commands of a block."""
    with ExitStack() as stack:
        beside: list[Fork] = []
        for line in commands:
            words = program(line.removesuffix("&"))
            if words == ["wait"]:
                for process in beside:
                    ended(process)
                beside.clear()
            elif words[0] == "torchrun":
                assert words[1] == "--nproc-per-node"
                replicas(folder / words[3], *words[4:], size=int(words[2]))
            elif words[0] == "python":
                replicas(folder / words[1], *words[2:], size=1)
            elif words[0] == "farflung":
                process = stack.enter_context(farflung(*words[1:], cwd=folder))
                if line.endswith("&"):
                    beside.append(process)
                else:
                    ended(process)
            else:
                run(["bash", "-euc", line], folder)
        assert not beside, "a block that starts something waits for it"


def ended(process: Fork) -> None:
    _, err = process.finished()
    assert process.returncode == 0, "\n".join(err)


@pytest.mark.thorough
@pytest.mark.timeout(LIMIT_S)
def test_the_run_that_loses_members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside(tmp_path, monkeypatch)
    blocks = runnable(TERMINALS)
    (start,), (kill,), (join,) = (block.commands() for block in blocks[:3])
    with farflung(*program(start)[1:], cwd=tmp_path) as first:
        assert any("step" in line for line in first.stderr)
        run(["bash", "-euc", kill], tmp_path)
        assert any("lost rank 2; 2 continue as view 2" in line for line in first.stderr)
        with farflung(*program(join)[1:], cwd=tmp_path) as second:
            assert any("joined rank 3; 3 continue as view 3" in line for line in second.stderr)
            assert any("test score" in line for line in first.stderr)  # of all three
            first.send_signal(signal.SIGINT)
            first.finished()
            ended(second)
    for number, block in enumerate(blocks[3:]):
        if block.language == "sh":
            carry_out(block.commands(), tmp_path)
        else:
            carry_out_code(block, tmp_path, number)


@pytest.mark.thorough
@pytest.mark.kafka
@pytest.mark.timeout(LIMIT_S)
def test_the_run_from_kafka(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fewer steps than on the page, each of which takes a second."""
    try:
        create_workload("fashion-mnist/mlp").load_datasets()
    except DataMissing as missing:
        pytest.skip(str(missing))
    inside(tmp_path, monkeypatch)
    broker = Broker(tmp_path_factory.mktemp("broker"), real=True)
    text = KAFKA.read_text(encoding="utf-8").replace("localhost:9092", broker.servers)
    for steps, fewer in (("--steps 100", "--steps 4"), ("--steps 200", "--steps 6")):
        text = text.replace(steps, fewer)
    needing = [
        found["text"].replace("\\\n", "")
        for found in BLOCK.finditer(text)
        if found["reason"] == "needs a broker"
    ]
    (make, produce), (train,), (resume,) = (block.splitlines() for block in needing)
    try:
        run(["bash", "-euc", f"{HOME}/bin/{make}"], tmp_path)
        with Fork(partial(script, ROOT / program(produce)[1], *program(produce)[2:])) as producer:
            for command in (train, resume):
                carry_out([command], tmp_path)
            producer.send_signal(signal.SIGINT)
            ended(producer)
    finally:
        broker.close()
    (end,) = (
        e for e in read_events(tmp_path / "runs/kafka/telemetry/rank-3.jsonl")[-1:] if e["event"] == "end"
    )
    assert end["steps"] == 6


THEIRS = re.compile(
    r"^<!-- not run: needs (?P<package>\w+) [\d.]+ -->\n```python\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@pytest.mark.parametrize(
    ("page", "package", "text"),
    [
        pytest.param(page, found["package"], found["text"], id=name_of(page))
        for page in PAGES
        for found in THEIRS.finditer(page.read_text(encoding="utf-8"))
    ],
)
def test_the_code_of_other_systems_is_theirs(page: Path, package: str, text: str) -> None:
    tree = ast.parse(text, page.name)
    pytest.importorskip(package, exc_type=ImportError)
    names: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.Import):
            names |= {alias.name: import_module(alias.name) for alias in node.names if alias.name == package}
        elif isinstance(node, ast.ImportFrom):
            module = import_module(str(node.module))
            names |= {alias.name: getattr(module, alias.name) for alias in node.names}
    for call in ast.walk(tree):
        if isinstance(call, ast.Call):
            first, *rest = ast.unparse(call.func).split(".")
            if first in names:
                called = inspect.signature(reduce(getattr, rest, names[first]))
                called.bind_partial(*call.args, **{each.arg: each for each in call.keywords if each.arg})


ENTRY = re.compile(r"^- \[(?P<title>[^\]]+)\]\((?P<page>[\w/-]+)\.html\): \S", re.MULTILINE)
CAPTION = re.compile(r"^:caption: (.+)\n:maxdepth: 1\n\n((?:[\w/-]+\n)+)", re.MULTILINE)


def test_llms_txt_has_every_page_of_the_index_under_its_caption() -> None:
    index = re.sub(r"<!--.*?-->", "", (DOCS / "index.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    top, *sections = re.split(r"^## ", (DOCS / "llms.txt").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert re.match(r"# farflung\n\n> \S", top)
    listed = {
        section.partition("\n")[0]: [found.groups() for found in ENTRY.finditer(section)]
        for section in sections
    }
    assert listed == {
        caption: [
            ((DOCS / f"{page}.md").read_text(encoding="utf-8").partition("\n")[0].removeprefix("# "), page)
            for page in pages.split()
        ]
        for caption, pages in CAPTION.findall(index)
    }
    lines = [line for section in sections for line in section.splitlines() if line.startswith("- ")]
    assert len(lines) == sum(map(len, listed.values())), "an entry is '- [title](page.html): one line'"


QUOTED = re.compile(r'[`"]((\w+)\((?:[^`"\n.]|\.(?!\.\.))*\))[`"]')
"""A part with its options, as ``topk(density=0.01)``, between backticks or quotes; without an ellipsis."""


def quoted(page: Path) -> list[tuple[str, str]]:
    """Returns the parts that a page quotes, each with the name that it begins with."""
    return [(text, name) for text, name in QUOTED.findall(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=name_of)
def test_recipes_that_a_page_quotes_can_be_made(page: Path) -> None:
    for text, name in quoted(page):
        if name in RECIPES:
            settings = parse_variant(text)
            RECIPES[name].with_components(
                **{family: settings.get(family) for family in FAMILIES}
            ).build_components(0)


def test_parts_that_the_choice_of_recipes_quotes_can_be_made() -> None:
    parts = [part for part in quoted(DOCS / "choosing.md") if part[1] not in RECIPES]
    assert parts
    for text, name in parts:
        (family,) = (
            one for one in ("codec", "reducer", "schedule", "sampler", "stream") if name in REGISTRIES[one]
        )
        build(family, text, REGISTRIES[family], {"seed": 0} if family == "sampler" else None)
