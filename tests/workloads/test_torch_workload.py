"""Any module, loss and data sets of torch's as a workload: what fits, and one line for what does not."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from farflung import TorchWorkload
from farflung.data import Labels
from farflung.errors import ConfigError
from farflung.seeding import create_generator
from tests.helpers import same_tree

INPUTS = torch.arange(30, dtype=torch.float32).reshape(10, 3)
CLASSES = torch.arange(10) % 2
DATA = TensorDataset(INPUTS, CLASSES)


def linear() -> nn.Module:
    return nn.Linear(3, 2)


def _three() -> Any:
    return 3


def made(data: Any = DATA, loss: Callable[..., Tensor] = F.cross_entropy, **options: Any) -> TorchWorkload:
    return TorchWorkload(linear, data, data, loss, **options)


class Pairs(Dataset[tuple[list[float], int]]):
    """Samples that are no tensors."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[Tensor, int]:  # type: ignore[override]
        self.taken.append(index)
        return INPUTS[index], int(CLASSES[index])


def test_weights_are_those_of_the_seed_or_of_the_module() -> None:
    task = made()
    one, two, other = (task.build_model(create_generator(seed, "model")).state_dict() for seed in (0, 0, 1))
    assert same_tree(dict(one), dict(two))
    assert not same_tree(dict(one), dict(other))
    module = nn.Linear(3, 2)
    task = TorchWorkload(module, DATA, DATA, F.cross_entropy)
    copied = task.build_model(create_generator(1, "model"))
    assert same_tree(dict(copied.state_dict()), dict(module.state_dict()))
    assert copied is not module


@pytest.mark.parametrize(
    "loss",
    [
        F.cross_entropy,
        nn.CrossEntropyLoss(reduction="none"),
        lambda outputs, targets: F.cross_entropy(outputs, targets, reduction="none"),
    ],
    ids=["function", "module", "own"],
)
def test_a_loss_is_one_number_for_each_sample(loss: Callable[..., Tensor]) -> None:
    task = made(loss=loss)
    model = task.build_model(create_generator(0, "model"))
    batch = task.load_datasets()[0].take(torch.tensor([4, 2, 7]), train=True)
    assert torch.equal(batch.inputs, INPUTS[[4, 2, 7]])
    expected = F.cross_entropy(model(batch.inputs), batch.targets, reduction="none")
    assert torch.equal(task.compute_losses(model, batch), expected)
    right = (model(batch.inputs).argmax(dim=1) == batch.targets).float()
    assert torch.equal(task.compute_metrics(model, batch), right)


def test_more_dimensions_are_averaged_and_the_score_is_minus_the_loss() -> None:
    data = TensorDataset(INPUTS, INPUTS[:, :2])
    task = made(data, F.mse_loss)
    model = task.build_model(create_generator(0, "model"))
    batch = task.load_datasets()[1].take(torch.arange(4), train=False)
    expected = (model(batch.inputs) - batch.targets).square().mean(dim=1)
    assert torch.allclose(task.compute_losses(model, batch), expected)
    assert torch.equal(task.compute_metrics(model, batch), -task.compute_losses(model, batch))
    own = made(data, F.mse_loss, metric=lambda outputs, targets: outputs[:, 0])
    assert torch.equal(own.compute_metrics(model, batch), model(batch.inputs)[:, 0])


def test_labels_are_for_partitions_and_read_only_when_asked_for() -> None:
    pairs = Pairs()
    train, _ = made(pairs).load_datasets()
    assert set(pairs.taken) <= {0, 1}
    assert train.labels is not None
    assert train.labels.tolist() == CLASSES.tolist()
    assert [sorted(part.tolist()) for part in Labels().split(train, 2)] == [
        [0, 2, 4, 6, 8],
        [1, 3, 5, 7, 9],
    ]
    pairs.targets = [1] * 10  # type: ignore[attr-defined]
    again, _ = made(pairs).load_datasets()
    assert again.labels is not None
    assert again.labels.tolist() == [1] * 10, "as torchvision's data sets have them"
    regression, _ = made(TensorDataset(INPUTS, INPUTS[:, :2]), F.mse_loss).load_datasets()
    assert regression.labels is None


def test_defaults_are_what_was_given() -> None:
    task = made(defaults={"batch_size": 4, "steps": 7}, name="mine/linear")
    assert (task.name, task.defaults["batch_size"], task.defaults["steps"]) == ("mine/linear", 4, 7)
    assert made().name == "own/Linear"


class Endless(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(INPUTS)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: made(loss=nn.CrossEntropyLoss()), "CrossEntropyLoss gives the mean of a batch; make it with"),
        (lambda: made(loss=lambda o, t: o.mean()), "own/Linear: loss gives () for 2 samples, not a number for each"),
        (lambda: made(metric=lambda o, t: 1.0), "own/Linear: metric gives float for 2 samples"),
        (lambda: made(Endless()), "train Endless is not map-style"),
        (lambda: made(TensorDataset(INPUTS[:0], CLASSES[:0])), "train has no sample"),
        (lambda: made(TensorDataset(INPUTS)), "train[0] is tuple, not an (input, target); wrap the data set"),
        (lambda: made([({"x": INPUTS[0]}, 1)]), "collate to dict and Tensor"),
        (lambda: made(TensorDataset(INPUTS[:, :2], CLASSES)), "cannot take the samples of train, inputs (2, 2)"),
        (lambda: TorchWorkload(_three, DATA, DATA, F.cross_entropy), "makes int, not an nn.Module"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_line(make: Callable[[], object], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)) as refused:
        make()
    assert len(str(refused.value).splitlines()) == 1


def test_one_logit_names_no_class_and_the_score_is_minus_the_loss() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(outputs[:, 0], targets.float(), reduction="none")

    task = TorchWorkload(nn.Linear(3, 1), DATA, DATA, loss)
    model, batch = (
        task.build_model(create_generator(0)),
        task.load_datasets()[0].take(torch.arange(10), train=False),
    )
    torch.testing.assert_close(task.compute_metrics(model, batch), -task.compute_losses(model, batch))
