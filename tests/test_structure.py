"""The shape of the code base: the order of imports, fences, what is public, the size of classes, what is banned."""

from __future__ import annotations

import ast
import functools
import graphlib
import importlib
import inspect
import os
import pkgutil
import re
import socket
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import cast

import pytest

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src"
PACKAGE = SRC / "farflung"

# A module imports from groups above its own in this list, or from its own package; never from a neighbour.
ORDER: list[set[str]] = [
    {
        "types",
        "errors",
        "extras",
        "lazy",
        "tasks",
        "seeding",
        "noise",
        "tables",
        "trees",
        "options",
        "_docstrings",
        "_linux",
        "_torch",
        "spec",
        "optimizers",
        "rates",
        "config",
        "files",
        "moments",
        "state_trees",
        "telemetry",
    },
    {"network", "devices"},
    {"codecs", "faults"},
    {"comm"},
    {"engine"},
    {"reducers", "schedules", "sampling", "data", "membership", "decisions"},
    {"workloads"},
    {"loop"},
    {"wall", "sim"},
    {"calibration", "recipes", "sites"},
    {"attach_checks"},
    {"importance", "step_tracker", "loop_recorder"},
    {"handle"},
    {"ddp"},
    {"integrations"},
    {"report", "loggers"},
    {"runs"},
    {"planning"},
    {"__init__"},  # farflung itself, which names what a user imports
    {"cli"},
    {"coded", "lab", "streams"},  # behind fences: see FENCED
    {"__main__"},
]
LEVEL = {unit: level for level, group in enumerate(ORDER) for unit in group}
FENCED = ORDER[-2]
"""Each stays a package that can be deleted: nothing imports it but itself."""
BOTTOM = ORDER[0]  # these may import each other, without cycles

BANNED_MODULES = {"asyncio", "cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve", "_pickle"}
OBJECT_COLLECTIVES = (
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
)
BANNED_NAMES = {"torch.load", "torch.save"} | {
    f"{module}.{name}" for module in ("torch.distributed", "dist") for name in OBJECT_COLLECTIVES
}


# --- reading the source -----------------------------------------------------------------------------------------


def module_name(path: Path) -> str:
    """``src/farflung/codecs/__init__.py`` is ``farflung.codecs``."""
    parts = list(path.relative_to(SRC).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def unit_of(module: str) -> str:
    """The package or top-level module that ``farflung.a.b.c`` belongs to: ``a``."""
    return [*module.split("."), "__init__"][1]


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of everything imported anywhere in a file, names of ``from`` imports included."""
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*start, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{origin}.{alias.name}") for alias in node.names)


def units_imported(path: Path) -> Iterator[tuple[int, str]]:
    """Line and unit of each import of farflung; ``__init__`` where it is a name of farflung itself."""
    for line, name in imports_of(path):
        parts = name.split(".")
        if parts[0] == "farflung":
            unit = unit_of(name)
            there = (PACKAGE / unit).is_dir() or (PACKAGE / f"{unit}.py").is_file()
            yield line, unit if there else "__init__"


def top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module, those inside ``if`` and ``try`` included."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            for part in ("body", "orelse", "finalbody"):
                yield from top_level(getattr(node, part, []))
            for handler in getattr(node, "handlers", []):
                yield from top_level(handler.body)


def assigned(node: ast.stmt) -> Iterator[str]:
    """The names a statement assigns, type variables left out."""
    value = getattr(node, "value", None)
    if isinstance(value, ast.Call) and ast.unparse(value.func).split(".")[-1] in ("TypeVar", "ParamSpec"):
        return
    targets = node.targets if isinstance(node, ast.Assign) else []
    if isinstance(node, ast.AnnAssign):
        targets = [node.target]
    for target in targets:
        yield from (leaf.id for leaf in ast.walk(target) if isinstance(leaf, ast.Name))


def public_names(path: Path) -> set[str]:
    """What a module defines without an underscore; in an ``__init__``, what it re-exports from its package too."""
    package = module_name(path)
    names: set[str] = set()
    for node in top_level(tree_of(path).body):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom) and path.name == "__init__.py":
            if f"{node.module}.".startswith(f"{package}."):
                names.update(alias.asname or alias.name for alias in node.names)
        else:
            names.update(assigned(node))
    return {name for name in names if not name.startswith("_")}


def exported(path: Path) -> set[str]:
    """The public names of a module, and those that the ``__init__`` files take from it."""
    return (public_names(path) if path in PUBLIC else set()) | named_by_packages()[module_name(path)]


@functools.cache
def named_by_packages() -> defaultdict[str, set[str]]:
    """What the ``__init__`` files take from each module."""
    names: defaultdict[str, set[str]] = defaultdict(set)
    for package in PACKAGES:
        for node in ast.walk(tree_of(package)):
            if isinstance(node, ast.ImportFrom) and node.module:
                names[node.module].update(alias.name for alias in node.names)
    return names


FILES = sorted(PACKAGE.rglob("*.py"))
PACKAGES = [path for path in FILES if path.name == "__init__.py"]
PUBLIC = [  # farflung itself, its packages and its top-level modules
    path
    for path in FILES
    if (path.name == "__init__.py" or not path.name.startswith("_"))
    and (path.parent == PACKAGE or (path.name == "__init__.py" and path.parent.parent == PACKAGE))
]


# --- the order of imports ---------------------------------------------------------------------------------------


def test_the_source_is_found() -> None:
    assert {"farflung.types", "farflung.tasks"} <= {module_name(path) for path in FILES}


def test_imports_go_one_way() -> None:
    units = {unit_of(module_name(path)) for path in FILES}
    assert units <= LEVEL.keys(), "these have no place in ORDER yet: give them one"
    wrong = []
    for path in FILES:
        unit = unit_of(module_name(path))
        for line, other in units_imported(path):
            assert other in LEVEL, f"{path}:{line} imports {other}, which has no place in ORDER"
            if not (other == unit or LEVEL[other] < LEVEL[unit] or {unit, other} <= BOTTOM):
                wrong.append(f"{path}:{line}: {unit} may not import {other}")
    assert not wrong, "\n".join(wrong)


def test_nothing_imports_what_is_behind_a_fence() -> None:
    broken = [
        f"{path}:{line}"
        for path in FILES
        for line, other in units_imported(path)
        if other in FENCED and unit_of(module_name(path)) != other
    ]
    assert not broken, (
        f"{', '.join(sorted(FENCED))} are each a package on its own, which few users need, so a run without it must "
        "neither load it nor break when it is deleted. Move what both need below (a base class in types, a helper in "
        "the core), or name the member as text in a table that imports it when it is asked for, as COMMANDS in "
        "cli/main.py and STREAMS in data/streams.py do:\n" + "\n".join(broken)
    )


ATTACHED = (
    "model = torch.nn.Linear(2, 1); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    "handle = farflung.attach(model, optimizer)\n"
    "model(torch.ones(1, 2)).sum().backward(); optimizer.step(); handle.finish()\n"
)


@pytest.mark.parametrize("program", [ATTACHED, "farflung.ddp_hook('identity')\n"])
def test_what_a_loop_of_ones_own_loads_is_no_more_than_it_needs(program: str) -> None:
    """A synchronous step, or a hook, loads no virtual time, lab, coded training, runs, commands or pictures."""
    program = (
        f"import sys, torch, farflung\n{program}"
        "print(*(one.__file__ for name, one in sys.modules.items() if name.startswith('farflung')), sep='\\n')"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    loaded = [Path(line) for line in said.splitlines()]
    assert [path for path in loaded if not path.is_relative_to(PACKAGE)] == []
    units = {path.relative_to(PACKAGE).parts[0] for path in loaded}
    assert units.isdisjoint({"calibration", "cli", "faults", "loggers", "report", "runs", "sim", *FENCED})


RUNS = {
    "train": "farflung.train('synthetic/quadratic', steps=3)",
    "simulate": "farflung.simulate('synthetic/quadratic', workers=2, steps=3)",
}


@pytest.mark.parametrize("call", RUNS.values(), ids=RUNS)
def test_a_run_loads_nothing_behind_a_fence_and_no_pictures(call: str, tmp_path: Path) -> None:
    program = (
        f"import sys, farflung\nif __name__ == '__main__':\n    {call}\n"
        "    print(*sorted({name.split('.')[1] for name in sys.modules if name.startswith('farflung.')}))"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    alone = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    said = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **alone},  # so that train makes its replica in this process
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    loaded = set(said.split())
    assert {"runs", "loop", "engine"} <= loaded
    needless = loaded & {*FENCED, "report", "cli"}
    assert not needless, (
        f"{needless}: import it inside the function that needs it, or move what is needed below it"
    )


def test_the_lowest_modules_import_each_other_without_cycles() -> None:
    graph: dict[str, set[str]] = {}
    for path in FILES:
        unit = unit_of(module_name(path))
        if unit in BOTTOM:
            others = {other for _, other in units_imported(path)}
            graph.setdefault(unit, set()).update((others & BOTTOM) - {unit})
    assert graph
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError with the cycle


# --- what is public ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted({*PUBLIC, *PACKAGES}), ids=module_name)
def test_all_names_what_is_public(path: Path) -> None:
    module = importlib.import_module(module_name(path))
    declared = list(getattr(module, "__all__", []))
    assert len(declared) == len(set(declared)), f"{path}: __all__ names something twice"
    assert set(declared) - {"__version__"} == public_names(path)
    for name in declared:
        assert hasattr(module, name), f"{path}: __all__ names {name}, which is not there"


LAZY = [path for path in PACKAGES if "lazy(" in path.read_text(encoding="utf-8")]
"""Packages whose names are imported when they are used."""


@pytest.mark.parametrize("path", LAZY, ids=module_name)
def test_names_that_are_imported_when_used_are_those_that_type_checkers_see(path: Path) -> None:
    (branch,) = (node for node in tree_of(path).body if isinstance(node, ast.If))
    seen = {
        f"{one.module}": [name.name for name in one.names]
        for one in ast.walk(branch)
        if isinstance(one, ast.ImportFrom)
    }
    (homes,) = (one.args[1] for one in ast.walk(branch) if isinstance(one, ast.Call))
    told = {f"{module_name(path)}.{home}": names.split() for home, names in ast.literal_eval(homes).items()}
    assert told == seen


def test_no_name_that_is_imported_when_used_is_that_of_a_module_beside_it() -> None:
    for path in LAZY:
        beside = {other.stem for other in path.parent.iterdir()}
        assert not public_names(path) & beside, (
            f"{path}: importing the module would put it in the name's place"
        )


def test_what_is_public_has_a_docstring() -> None:
    bare = {path: names for path in FILES if (names := without_docstring(path))}
    assert not bare, "\n".join(f"{path}: no docstring: {', '.join(names)}" for path, names in bare.items())


def without_docstring(path: Path) -> list[str]:
    """The public names of a module that have none."""
    body = list(top_level(tree_of(path).body))
    bare: list[str] = []
    for node, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if not node.name.startswith("_") and not ast.get_docstring(node):
                bare.append(node.name)
        elif not (isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)):
            bare += exported(path) & set(assigned(node))  # a string on the line after it is its docstring
    return bare


def test_each_module_says_what_it_is_for() -> None:
    silent = [str(path) for path in PUBLIC if not ast.get_docstring(tree_of(path))]
    assert not silent, "these have no docstring"


ROLE = re.compile(r":(func|class|meth|attr|data|mod):`~?([\w.]+)`")
OF_KIND: dict[str, Callable[[object], bool]] = {
    "func": callable,
    "class": callable,
    "mod": inspect.ismodule,
}
"""What the target of a role has to be; of others, anything but a module."""


def test_docstrings_refer_to_what_there_is() -> None:
    lost = [
        f"{path}: no such {role} {name}"
        for path in FILES
        for role, name in sorted(set(ROLE.findall(path.read_text(encoding="utf-8"))))
        if not refers(role, name, path)
    ]
    assert not lost, "\n".join(lost)


def refers(role: str, name: str, path: Path) -> bool:
    """Whether a reference in a file has a target: by its whole name, or as seen from its module, unit or classes."""
    module = module_name(path)
    classes = [f"{module}.{node.name}" for node in tree_of(path).body if isinstance(node, ast.ClassDef)]
    starts = (module, ".".join(module.split(".")[:2]), *classes)
    is_right = OF_KIND.get(role, lambda target: not inspect.ismodule(target))
    return any(
        (target := target_of(whole)) is not None and is_right(target)
        for whole in (name, *(f"{start}.{name}" for start in starts))
    )


@functools.cache
def target_of(name: str) -> object | None:
    """What a whole name means; an attribute that instances alone have is its name."""
    with suppress(AttributeError, ImportError, ValueError):
        return cast("object", pkgutil.resolve_name(name))
    owner, _, attribute = name.rpartition(".")
    kind = target_of(owner) if owner else None
    if not isinstance(kind, type):
        return None
    bodies = [inspect.getsource(one) for one in kind.__mro__ if one.__module__.startswith("farflung")]
    given = re.compile(rf"^ {{4}}( {{4}}self\.)?{attribute}(: .+)?( = .+)?$", re.MULTILINE)
    return attribute if any(map(given.search, bodies)) else None


REFERENCE = re.compile(r"^\.\. automodule:: (\S+)$", re.MULTILINE)


def test_the_reference_has_every_public_name_once_and_nothing_else() -> None:
    pages = sorted((ROOT / "docs" / "reference").glob("*.md"))
    listed = [name for page in pages for name in REFERENCE.findall(page.read_text(encoding="utf-8"))]
    assert sorted(listed) == sorted(map(module_name, PUBLIC)), "one '.. automodule:: farflung.name' for each"


# --- classes and parts ------------------------------------------------------------------------------------------

MOST_FUNCTIONS = 42
"""Of one class: as many as today's largest has."""
MOST_BY_UNIT = {"comm": 27, "membership": 30, "wall": 27}
"""The same for some packages."""


def test_no_class_grows_beyond_the_largest() -> None:
    sizes = {
        f"{path}:{node.lineno}: {node.name}": sum(
            isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) for each in node.body
        )
        for path in FILES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef)
    }
    largest: defaultdict[str, int] = defaultdict(int)
    for path_and_name, count in sizes.items():
        unit = Path(path_and_name.partition(":")[0]).relative_to(PACKAGE).parts[0]
        largest[unit] = max(largest[unit], count)
    large = [f"{where} has {count}" for where, count in sizes.items() if count > MOST_FUNCTIONS]
    assert not large, (
        f"A class of more than {MOST_FUNCTIONS} functions holds several things whose states cannot be told apart. "
        "Move one state with the functions that use it to a class of its own, beside it:\n" + "\n".join(large)
    )
    assert max(sizes.values()) == MOST_FUNCTIONS, "the largest class has shrunk: lower MOST_FUNCTIONS to it"
    assert {unit: largest[unit] for unit in MOST_BY_UNIT} == MOST_BY_UNIT, "lower a bound, or part a class"


SMALL_ROOMS = ("comm", "engine", "membership")
"""Packages whose classes stay below both bounds."""
FEW_FUNCTIONS, FEW_METHODS = 30, 12
"""Of one class there, and of those the public ones that are no properties."""


@pytest.mark.parametrize("room", SMALL_ROOMS)
def test_classes_stay_small_where_everybody_reads(room: str) -> None:
    for path in (PACKAGE / room).rglob("*.py"):
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.ClassDef):
                continue
            functions = [f for f in node.body if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef)]
            public = [
                f.name
                for f in functions
                if not f.name.startswith("_")
                and not any(getattr(mark, "id", "") == "property" for mark in f.decorator_list)
            ]
            where = f"{path}:{node.lineno}: {node.name}"
            assert len(functions) <= FEW_FUNCTIONS, f"{where}: part one state with its functions from it"
            assert len(public) <= FEW_METHODS, f"{where}: merge methods that are called together: {public}"


def test_the_training_loop_names_no_part_of_a_recipe() -> None:
    """A part makes its extensions itself; see :meth:`farflung.types.Sampler.build_extensions`."""
    parts = ("farflung.sampling.", "farflung.schedules.", "farflung.membership.", "farflung.reducers.")
    names = [name for _, name in imports_of(PACKAGE / "loop" / "replica.py") if name.startswith(parts)]
    classes = [name for name in names if name.rpartition(".")[2][0].isupper()]
    assert not classes, f"give the part a method that returns what the loop needs, in place of {classes}"


PARTS = {"Sampler", "Schedule", "Sharing", "Stream"}
"""Families of which nothing asks what kind a member is; :mod:`farflung.recipes.components` asks whether it is one at
all."""


def test_nothing_asks_what_kind_a_part_is() -> None:
    members = PARTS | {
        name
        for package in (
            "farflung.sampling",
            "farflung.schedules",
            "farflung.data.sharing",
            "farflung.streams",
        )
        for name in importlib.import_module(package).__all__
        if name[0].isupper() and not name.isupper()
    }
    asked = [
        f"{path}:{node.lineno}: {ast.unparse(node)}"
        for path in FILES
        if path != PACKAGE / "recipes" / "parts.py"
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance"
        if members & {ast.unparse(each).split(".")[-1] for each in ast.walk(node.args[1])}
    ]
    assert not asked, (
        "A member of a user's own may behave as one of ours without being one. Give the family's base class a "
        "method or an attribute with a default, override it in the member, and ask that:\n" + "\n".join(asked)
    )


# --- what is banned ---------------------------------------------------------------------------------------------


def test_nothing_is_pickled_and_no_event_loop_is_borrowed() -> None:
    found = [f"{path}:{line}: {name}" for path in FILES for line, name in banned(path)]
    assert not found, "\n".join(found)


def banned(path: Path) -> list[tuple[int, str]]:
    """Line and name of each thing in a file that nothing here may use."""
    found = [(line, name) for line, name in imports_of(path) if name.split(".")[0] in BANNED_MODULES]
    found += [(line, name) for line, name in imports_of(path) if name in BANNED_NAMES]
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if name in BANNED_NAMES:
                found.append((node.lineno, name))
        elif (
            isinstance(node, ast.keyword)
            and node.arg == "allow_pickle"
            and ast.unparse(node.value) != "False"
        ):
            found.append((node.value.lineno, "allow_pickle"))
    return found
