"""Parts as text: imported by name, nested, and back from objects."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from farflung.codecs import CODECS, ByRole, ErrorFeedback, TopK, error_feedback
from farflung.errors import ConfigError
from farflung.recipes import parse_recipe
from farflung.recipes.components import REGISTRIES
from farflung.spec import Registry, build, format_spec, import_object, is_buildable


@pytest.mark.parametrize(
    "text",
    [
        "topk(density=0.5)",
        "farflung.codecs:TopK(density=0.5)",
        "farflung.codecs.topk:TopK(0.5)",
        "error_feedback(farflung.codecs:TopK(density=0.5))",
        "farflung.codecs:error_feedback(topk(density=0.5))",
    ],
)
def test_names_are_of_a_registry_or_imported(text: str) -> None:
    made = build("codec", text, CODECS)
    assert made in (TopK(0.5), ErrorFeedback(TopK(0.5)))


@pytest.mark.parametrize(
    "part",
    [TopK, TopK(0.5), error_feedback, ErrorFeedback(TopK(0.25)), ByRole(), functools.partial(TopK, 0.5)],
    ids=["a class", "an object", "a function", "a nested object", "defaults", "a partial"],
)
def test_the_text_of_a_part_makes_it_again(part: object) -> None:
    registries: list[Mapping[str, Callable[..., object]]] = [{}, CODECS]
    for registry in registries:
        text = format_spec(part, registry)
        assert is_buildable(text)
        made = build("codec", text, registry or {"identity": CODECS["identity"]})
        expected = part() if isinstance(part, functools.partial | type) or part is error_feedback else part
        assert made == expected, text


def test_there_is_one_hint_on_every_python() -> None:
    def hints(density: float = 0.5, **options: object) -> None:
        raise TypeError("TopK.__init__() got an unexpected keyword argument 'x'. Did you mean 'density'?")

    with pytest.raises(ConfigError) as caught:
        build("codec", "topk(densty=0.1)", {"topk": hints})
    said = "got an unexpected keyword argument 'x'; did you mean density? topk takes density=0.5, **options"
    assert str(caught.value).endswith(said)


def test_what_has_no_text_is_told_apart_where_it_can_be() -> None:
    assert (
        format_spec(lambda: 1)
        == "<function test_what_has_no_text_is_told_apart_where_it_can_be.<locals>.<lambda>>"
    )
    assert not is_buildable(format_spec(object()))
    assert format_spec(object()) == format_spec(object()), "without addresses, which no two processes share"


def test_modules_of_the_current_folder_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_here.py").write_text("VALUE = 3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    assert import_object("codec", "only_here:VALUE") == 3
    with pytest.raises(ConfigError, match="codec 'only_here:MISSING': cannot be imported"):
        import_object("codec", "only_here:MISSING")


@pytest.mark.parametrize("family", REGISTRIES)
def test_each_name_of_a_family_is_there_and_is_found_again(family: str) -> None:
    registry = REGISTRIES[family]
    for name in registry:
        made = registry[name]
        if isinstance(registry, Registry):
            assert registry.find_name(made) == name


def test_a_registry_takes_members_and_gives_them_up() -> None:
    registry: Registry[object] = Registry("farflung.codecs", {"topk": "TopK"})
    assert registry["topk"] is TopK
    registry["mine"] = ByRole
    more: Registry[object] = Registry("farflung.codecs", {"by_role": "by_role"})
    both = registry | more
    assert list(both) == ["topk", "mine", "by_role"]
    assert both.find_name(ByRole) == "mine"
    assert both.find_name(ErrorFeedback) is None
    del registry["mine"]
    assert list(registry) == ["topk"]
    assert list(both) == ["topk", "mine", "by_role"]


@pytest.mark.parametrize(
    ("text", "means"),
    {
        "ring": "ring",
        "synchronous(codec=int8)": "synchronous(codec=int8)",
        "ring(codec='topk(0.1)', bucket_nbytes=9)": "ring(codec=topk(0.1), bucket_nbytes=9)",
        "local-sgd(codec=error_feedback(topk(0.1)))": "local_sgd(codec=error_feedback(topk(0.1)))",
        "bell(codec=int8)": "unknown recipe 'bell'",
        "delayed(delay=4)": "delayed(schedule=delayed(delay=4))",
        "delayed(period=8, codec=int8)": "delayed(codec=int8, schedule=delayed(delay='auto', period=8))",
        "local_sgd(4)": "local_sgd(schedule=local_sgd(sync_every=4))",
        "powersgd(rank=4, collective=ring)": "powersgd(reducer=powersgd(rank=4), collective=ring)",
        "demo(decay=0.9)": "demo(codec=demo(decay=0.9))",
        "delayed(perod=8)": "unknown setting 'perod'; did you mean period?",
        "delayed(4, delay=5)": "delay is given twice",
        "delayed(period=8, schedule=diloco)": "period: write options of the schedule into schedule=...",
        "local_sgd(4, 'kept', 5)": "write it as name",
        "ring(int8)": "write it as name",
        "ring(**changes)": "write it as name",
        "ring((": "write it as name",
        "ring(seed=1)": "unknown setting 'seed'; ",
        "ring(codec=5)": "codec must be text, in quotes, not 5",
        "ring(bucket_nbytes=many)": "bucket_nbytes must be a whole number, not 'many'",
    }.items(),
)
def test_a_recipe_may_have_changes_in_brackets(text: str, means: str) -> None:
    assert means in _said(text)


def _said(text: str) -> str:
    try:
        return parse_recipe(text).text
    except ConfigError as refusal:
        return str(refusal)
