"""What the core needs, and what is said where an extra is not installed."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "farflung"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

IMPORTED_AS = {
    "confluent-kafka": "confluent_kafka",
    "cryptography": "cryptography",
    "scikit-learn": "sklearn",
}
USERS = (
    "report",
    "cli",
    "kafka",
    "lab",
    "lightning",
    "accelerate",
    "transformers",
    "tensorboard",
    "wandb",
    "trackio",
    "mlflow",
    "sklearn",
)  # the extras that are not for developers


def modules(requirements: list[str]) -> set[str]:
    """What requirements are imported as; farflung's own extras are left out."""
    names = {re.split(r"[^\w.-]", requirement)[0] for requirement in requirements} - {"farflung"}
    return {IMPORTED_AS.get(name, name) for name in names}


CORE = modules(PROJECT["dependencies"])
EXTRAS = {name: modules(PROJECT["optional-dependencies"][name]) for name in USERS}
OPTIONAL = set().union(*EXTRAS.values())


# --- what is imported -------------------------------------------------------------------------------------------


def imported(node: ast.AST, *, when_loaded: bool) -> Iterator[str]:
    """The packages that a module imports; ``when_loaded``: only those without which it cannot be imported."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name.split(".")[0] for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield (child.module or "").split(".")[0]
        elif when_loaded and (
            isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            or (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING")
        ):
            continue
        else:
            yield from imported(child, when_loaded=when_loaded)


def test_what_is_imported_is_installed_with_it() -> None:
    paths = list(PACKAGE.rglob("*.py"))
    assert paths
    others = set(sys.stdlib_module_names) | {"farflung"}
    for path in paths:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        folder = "cli" if "cli" in path.relative_to(PACKAGE).with_suffix("").parts else path.parent.name
        needed = {"cli": ["report", "cli"], "integrations": [path.stem]}.get(folder, [])
        if path.stem == "estimators":
            needed = ["sklearn"]
        its_own = set().union(*(EXTRAS.get(extra, set()) for extra in needed))
        assert set(imported(tree, when_loaded=True)) - others <= CORE | its_own, path
        assert set(imported(tree, when_loaded=False)) - others <= CORE | OPTIONAL, path


def test_all_is_every_extra_of_users() -> None:
    (everything,) = PROJECT["optional-dependencies"]["all"]
    assert set(re.findall(r"\w+", everything)) == {
        *("farflung", "cli", "kafka", "lab", "sklearn", "tensorboard")
    }
    assert "farflung[report]" in PROJECT["optional-dependencies"]["cli"]


@pytest.mark.parametrize("extra", ["mlflow", "trackio", "wandb"])
def test_loggers_go_with_the_versions_that_are_tested(extra: str) -> None:
    """Of what is pinned in constraints.txt each takes the version there."""
    try:
        requirements = [*map(Requirement, metadata.requires(extra) or ())]
    except metadata.PackageNotFoundError:
        pytest.skip(f"{extra} is not installed")
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("#")[0].strip().split("==") for line in lines if "==" in line)
    for one in requirements:
        if one.name in pins and (one.marker is None or one.marker.evaluate({"extra": ""})):
            assert one.specifier.contains(pins[one.name]), one


STARTS = """
import contextlib, io, sys
import farflung
from farflung.__main__ import main

helps = ("--version", "--help", "train --help", "simulate --help", "compare --help")
for said in (*helps, "list networks", "list devices", "list data"):
    sys.argv[1:] = said.split()
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as out:
        main()
    assert out.getvalue(), said
    print(said, *({"matplotlib", "numpy", "torch"} & sys.modules.keys()))
"""


def test_what_needs_no_torch_imports_none() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STARTS],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = done.stdout.splitlines()
    assert len(found) == 8
    assert [line for line in found if line.endswith(("matplotlib", "numpy", "torch"))] == []


# --- the core alone ---------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_the_core_alone_trains_and_simulates(tmp_path: Path) -> None:
    blocked = f"import sys\nsys.modules.update(dict.fromkeys({sorted(OPTIONAL)!r}))\n"
    (tmp_path / "sitecustomize.py").write_text(blocked, encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), str(ROOT / "src")])
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "core_alone.py")],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
