"""How many copies of the parameters a recipe holds beside the model, as the schedules' docstrings say."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
from torch import nn

import farflung
from farflung.engine import Engine
from farflung.recipes import parse_recipe

WIDTH, LAYERS, STEPS = 128, 4, 12
COPIES = {
    "synchronous": (1, 1),
    "synchronous(codec=int8)": (1, 1),
    "local_sgd(sync_every=3)": (2, 2),
    "diloco(sync_every=3)": (3, 3),
    "streaming_diloco(sync_every=8, fragments=4, delay=1, codec=identity)": (3.5, 3.5),
    "delayed(delay=2)": (7, 9),
    "delayed(delay=2, pull='swap')": (6, 8),
    "dga(schedule=delayed(4, 2))": (7, 9),
    "synchronous(schedule=pipelined(2))": (3, 5),
    "synchronous(schedule=pipelined(2, correction=0.1))": (4, 7),
}
"""Between two steps, the gradient among them, and at most: while exchanges start before earlier ones are merged."""


@pytest.fixture(scope="module", autouse=True)
def unfrozen() -> Iterator[None]:
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def unseen() -> None:
    """Lets the collector forget what was there before the test; the first has much to forget."""
    gc.collect()
    gc.freeze()


def count_copies() -> float:
    """Returns the bytes of all new tensors that are not small, over those of the parameters."""
    gc.collect()
    found = (each for each in gc.get_objects() if issubclass(type(each), torch.Tensor))
    stores = {store.data_ptr(): store.nbytes() for store in (each.untyped_storage() for each in found)}
    nbytes = WIDTH * WIDTH * 4
    return float(sum(each for each in stores.values() if each >= nbytes)) / (LAYERS * nbytes)


@pytest.mark.filterwarnings("ignore:.*and there is one")
@pytest.mark.parametrize("how", COPIES)
def test_a_recipe_holds_what_its_docstring_says(how: str) -> None:
    track: Callable[[Engine], None] = Engine._track_peak
    most = [0.0]

    def tracked(engine: Engine) -> None:
        track(engine)
        most.append(count_copies() - 1)

    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    chosen = parse_recipe(how).with_components(bucket_nbytes=WIDTH * WIDTH * 4)
    with mock.patch.object(Engine, "_track_peak", tracked), farflung.attach(model, optimizer, chosen):
        rest = []
        for _ in range(STEPS):
            model(torch.ones(1, WIDTH)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            rest.append(count_copies() - 1)
    assert (max(rest[3:]), max(most)) == COPIES[how]
