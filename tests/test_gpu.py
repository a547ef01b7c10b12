"""On CUDA tensors: nothing waits for the device, and gradients travel between processes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from farflung.codecs import TopK, error_feedback
from farflung.reducers import CodecReducer, GradiVeQ, PowerSGD, SharedScaleQSGD
from farflung.sim import VirtualWorld
from farflung.types import Reducer, Seeds
from tests.codecs.test_contract import gradient as gradient_of
from tests.codecs.test_contract import spec_of
from tests.helpers import CODEC_ROWS, NUMEL, Cluster
from tests.reducers.replicas import LINK, Replica, gradient, run
from tests.reducers.test_contract import ROWS

pytestmark = pytest.mark.gpu


@contextmanager
def no_waiting() -> Iterator[None]:
    """Inside, whatever has the host wait for the device is an error."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype", UserWarning)
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("numel", [NUMEL, 200_000])
@pytest.mark.parametrize("name", CODEC_ROWS)
def test_no_codec_waits_for_the_device(name: str, numel: int) -> None:
    """From the second step on: in the first a state comes to the device."""
    codec = CODEC_ROWS[name].codec
    grads = [gradient_of(numel, step).cuda() for step in range(3)]
    spec = spec_of(grads[0])
    state = codec.init(spec, Seeds(1, 2))
    payload, state = codec.encode(state, grads[0], step=0, count=1)
    state = codec.update_state(state, codec.decode(state, payload, spec, step=0, count=1), step=0)
    torch.cuda.synchronize()
    with no_waiting():
        for step in (1, 2):
            payload, state = codec.encode(state, grads[step], step=step, count=1)
            decoded = codec.decode(state, payload, spec, step=step, count=1)
            state = codec.update_state(state, decoded, step=step)
    assert decoded.is_cuda
    assert all(tensor.is_cuda for tensor in payload.iter_tensors())


def on_gpu(rank: int, step: int) -> torch.Tensor:
    return gradient(rank, step).cuda()


# What a window has seen is decided on the host, and so is each vote on what to send.
@pytest.mark.parametrize(
    "name", [name for name in ROWS if not name.startswith(("gradiveq (", "adaptive_topk"))]
)
def test_no_reducer_waits_for_the_device(name: str) -> None:
    world = VirtualWorld(3, LINK)
    made = {(rank, step): on_gpu(rank, step) for rank in range(3) for step in range(4)}
    replicas = [
        Replica(runtime, ROWS[name].reducer, make=lambda rank, step: made[rank, step])
        for runtime in world.runtimes
    ]
    world.run([replica.run(range(2)) for replica in replicas])
    torch.cuda.synchronize()
    with no_waiting():
        world.run([replica.run(range(2, 4)) for replica in replicas])
    assert all(replica.results[-1].mean.is_cuda for replica in replicas)


@pytest.mark.parametrize(
    "reducer",
    [
        CodecReducer(),
        CodecReducer(collective="ring"),
        CodecReducer(error_feedback(TopK(0.1))),
        CodecReducer(error_feedback(TopK(0.1)), phases="two"),
        GradiVeQ(warm_up=0, sample_steps=2, slice_size=48),
        GradiVeQ(warm_up=0, sample_steps=2, slice_size=48, sample_bits=None, collective="ring"),
        PowerSGD(),
        SharedScaleQSGD(),
    ],
    ids=repr,
)
def test_gradients_of_a_device_travel_between_processes(reducer: Reducer) -> None:
    """Staged through pinned memory; the same means as in virtual time on the same device."""
    torch.linalg.eigh(
        torch.eye(2, device="cuda")
    )  # torch loads its solvers once, in one thread (pytorch 90613)
    cluster = Cluster()
    real = cluster.run(
        2, lambda runtime, number: Replica(runtime, reducer, make=on_gpu, first=1000 * number).run(range(5))
    )
    cluster.close()
    for one, two in zip(real, run(reducer, 2, steps=5, make=on_gpu), strict=True):
        for a, b in zip(one.results, two.results, strict=True):
            assert a.mean.is_cuda
            assert torch.equal(a.mean, b.mean)
        assert one.nbytes == two.nbytes
