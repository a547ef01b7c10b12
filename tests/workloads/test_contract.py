"""Every workload keeps the contract of the protocol."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from farflung.config import Training
from farflung.errors import ConfigError, DataError, UnknownName
from farflung.types import Batch, Workload
from farflung.workloads import WORKLOADS, create_workload

OPTIONS = {"fashion-mnist/cnn": {"data": "packaged"}, "fashion-mnist/mlp": {"data": "packaged"}}

# What a sample of each family looks like: shape of an input, and how many values its integers have (0: floats); shape
# of a target, and how many classes.
SAMPLES: dict[str, tuple[tuple[int, ...], int, tuple[int, ...], int]] = {
    "cifar10": ((3, 32, 32), 0, (), 10),
    "cifar100": ((3, 32, 32), 0, (), 100),
    "covtype": ((54,), 0, (), 7),
    "fashion-mnist": ((1, 28, 28), 0, (), 10),
    "synthetic": ((64,), 0, (), 10),
    "tinyshakespeare": ((64,), 65, (64,), 65),
}


def sample(name: str) -> tuple[tuple[int, ...], int, tuple[int, ...], int]:
    """What those of one workload look like."""
    return SAMPLES[name.partition("/")[0]]


@pytest.fixture(params=sorted(WORKLOADS), scope="module")
def task(request: pytest.FixtureRequest) -> Workload:
    return create_workload(request.param, **OPTIONS.get(request.param, {}))


@pytest.fixture
def batch(task: Workload) -> Batch:
    """Three samples of the right shape, so that models are tested where their data is not at hand."""
    shape, values, target, classes = sample(task.name)
    random = torch.Generator().manual_seed(3)
    inputs = (
        torch.randint(values, (3, *shape), generator=random)
        if values
        else torch.randn(3, *shape, generator=random)
    )
    return Batch(inputs, torch.randint(classes, (3, *target), generator=random))


def fresh(task: Workload, seed: int = 0) -> torch.nn.Module:
    return task.build_model(torch.Generator().manual_seed(seed))


def test_name_and_defaults(task: Workload) -> None:
    assert task.name in WORKLOADS
    kinds = {
        "batch_size": int,
        "learning_rate": float,
        "momentum": float,
        "weight_decay": float,
        "steps": int,
    }
    for key, kind in kinds.items():
        assert isinstance(task.defaults[key], kind)
    assert Training.resolve(task.defaults, {}).to_json().items() >= task.defaults.items()


def test_model_depends_on_the_generator_alone(task: Workload) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = fresh(task).state_dict()
    assert torch.equal(torch.get_rng_state(), before), "the global random state is left as it was"
    torch.manual_seed(2)
    generator = torch.Generator().manual_seed(0)
    two, next_one = (task.build_model(generator).state_dict() for _ in range(2))
    assert all(torch.equal(value, two[key]) for key, value in one.items())
    assert any(not torch.equal(value, next_one[key]) for key, value in one.items())


def test_a_step(task: Workload, batch: Batch) -> None:
    """Torch alone draws random numbers: simulations of many replicas switch its random state alone."""
    assert getattr(task, "draws_from_torch_alone", False)
    before = (random.getstate(), [str(part) for part in np.random.get_state()])
    model = fresh(task).train()
    loss, metric = task.compute_losses(model, batch), task.compute_metrics(model, batch)
    assert loss.shape == metric.shape == (len(batch),)
    assert bool(loss.isfinite().all())
    assert bool(metric.isfinite().all())
    assert (loss.requires_grad, metric.requires_grad) == (True, False)
    assert loss.dtype == metric.dtype == torch.float32
    loss.mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.isfinite().all()), name
    assert before == (random.getstate(), [str(part) for part in np.random.get_state()])


def test_samples_do_not_mix_in_evaluation(task: Workload, batch: Batch) -> None:
    model = fresh(task).eval()
    with torch.no_grad():
        together = task.compute_losses(model, batch)
        apart = [
            task.compute_losses(model, Batch(batch.inputs[i : i + 1], batch.targets[i : i + 1]))
            for i in range(3)
        ]
    torch.testing.assert_close(together, torch.cat(apart), rtol=1e-4, atol=1e-5)


def test_data_are_what_the_model_takes(task: Workload, batch: Batch) -> None:
    try:
        train, test = task.load_datasets()
    except DataError as error:
        if "was not found" not in str(error):
            raise
        pytest.skip(str(error))
    for data, training in ((train, True), (test, False)):
        taken = data.take(torch.tensor([2, 0, 1]), train=training)
        assert taken.inputs.shape == batch.inputs.shape
        assert taken.inputs.dtype == batch.inputs.dtype
        assert taken.targets.shape == batch.targets.shape
        assert taken.targets.dtype == torch.int64
        assert bool(task.compute_losses(fresh(task), taken).isfinite().all())
        if data.labels is not None:
            assert data.labels.dtype == torch.int64
            assert data.labels.shape == (len(data),)
            assert int(data.labels.max()) < sample(task.name)[3]


def test_names_and_options() -> None:
    with pytest.raises(UnknownName, match=r"unknown workload 'x'; known: .*fashion-mnist/cnn"):
        create_workload("x")
    with pytest.raises(ConfigError, match="fashion-mnist/cnn has no option 'size'; it has: data"):
        create_workload("fashion-mnist/cnn", size=3)
    with pytest.raises(ConfigError, match="auto, packaged, full"):
        create_workload("fashion-mnist/cnn", data="some").load_datasets()
    with pytest.raises(ConfigError, match="width 128 is no multiple of heads 5"):
        create_workload("tinyshakespeare/gpt", heads=5)
