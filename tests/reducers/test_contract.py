"""What every reducer promises, and every codec as a reducer carries it, in virtual time."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from farflung.codecs import DGC, DeMo, Identity, RandomK, TopK, Truncate16, by_role, by_size, error_feedback
from farflung.comm import COLLECTIVES, Collective, ExchangeChannel
from farflung.errors import ConfigError, ProtocolError, Unsupported
from farflung.reducers import (
    REDUCERS,
    AdaptiveTopK,
    CodecReducer,
    GradiVeQ,
    PowerSGD,
    SharedScaleQSGD,
    list_summed_nbytes,
)
from farflung.sim import LinkModel, VirtualWorld
from farflung.spec import build
from farflung.state_trees import load_tree, save_tree
from farflung.types import (
    Channel,
    CodecState,
    Contribution,
    ParameterSpan,
    Reducer,
    ReduceResult,
    Runtime,
    Seeds,
    SegmentCoding,
    StateSlot,
    TensorSpec,
)
from tests.covering import covering
from tests.helpers import CODEC_ROWS, NUMEL, Cluster, same_bits, same_tree, tensors_in
from tests.reducers.replicas import (
    LINK,
    PARTS,
    SPEC,
    WEIGHTS,
    Replica,
    assert_alike,
    exact_mean,
    gradient,
    run,
)


@dataclass(frozen=True)
class Row:
    """One reducer to try.

    Args:
      reducer: with the options to try it with.
      error: the largest ``|mean - exact| / |exact|`` of weighted means, were there no error feedback; ``None`` where
        its own tests say more.
    """

    reducer: Reducer
    error: float | None = None


WHOLE = (DGC, DeMo)
"""Codecs that keep something of a whole tensor, and so cannot encode segments."""


def _carried() -> dict[str, Row]:
    rows = {}
    for name, row in CODEC_ROWS.items():
        lossless = row.error == 0.0
        rows[f"codec, {name}"] = Row(CodecReducer(row.codec), 1e-6 if lossless else None)
        if not isinstance(row.codec, WHOLE):
            rows[f"codec in two phases, {name}"] = Row(CodecReducer(row.codec, phases="two"))
            rows[f"codec on hops, {name}"] = Row(CodecReducer(row.codec, "ring", phases="hops"))
    return rows


WINDOWS = GradiVeQ(warm_up=0, sample_steps=2, compress_steps=3, sample_bits=None, slice_size=48)
ROWS: dict[str, Row] = _carried() | {
    "adaptive_topk": Row(AdaptiveTopK()),
    "adaptive_topk (dense)": Row(AdaptiveTopK(threshold=0.0), 1e-6),
    "adaptive_topk (exact)": Row(AdaptiveTopK(threshold=0.5, decide="exact")),
    "adaptive_topk (released)": Row(AdaptiveTopK(threshold=1.0, rule="released")),
    "adaptive_topk (by bucket)": Row(AdaptiveTopK(threshold=1.0, decide="bucket")),
    "gradiveq": Row(GradiVeQ(), 1e-6),
    "gradiveq (of short windows)": Row(WINDOWS),
    "gradiveq (of the paper's windows)": Row(replace(WINDOWS, windows="paper", variance_left=0.1)),
    "gradiveq (around a ring)": Row(
        replace(WINDOWS, compress_steps=9, sample_bits=4, matrices=True, slice_size=16, collective="ring")
    ),
    "powersgd": Row(PowerSGD()),
    "powersgd (of full rank)": Row(PowerSGD(rank=36, min_ratio=1.0), 1e-5),
    "powersgd (dense at first)": Row(PowerSGD(dense_steps=100), 1e-6),
    "powersgd (cold)": Row(PowerSGD(warm_start=False, error_feedback=False)),
    "shared_scale_qsgd": Row(SharedScaleQSGD(bits=8, bucket_size=64), 0.05),
    "shared_scale_qsgd (of seven levels)": Row(SharedScaleQSGD(bucket_size=100), 0.6),
}
CARRIED = ("by_role (parts of top-k)", "dgc", "error_feedback", "identity", "qsgd", "randomk")
"""Codecs of which each has what the others lack: parts, a memory of whole tensors, residuals, exact sums, noise, sums
of payloads. What holds for a reducer, whatever its codec, is tried with these.
"""
ALIKE = ("(dense)", "(dense at first)", "(of full rank)", "(of seven levels)")
"""Rows whose code is that of others."""
SOME = [name for name in ROWS if name.partition(", ")[2] in ("", *CARRIED) and not name.endswith(ALIKE)]
each_row = pytest.mark.parametrize("name", SOME)


@functools.cache
def plain(name: str, size: int, steps: int = 3, width: int = 1) -> list[Replica]:
    """A run of a row in which nothing happens, to be looked at and left as it is."""
    return run(ROWS[name].reducer, size, steps, width=width)


def test_the_registry_makes_each_without_arguments() -> None:
    for name, make in REDUCERS.items():
        assert make(collective="ring").collective == "ring"  # type: ignore[attr-defined]
        assert any(type(row.reducer) is type(make()) for row in ROWS.values()), name


@pytest.mark.parametrize("name", ROWS)
def test_all_ranks_end_with_the_same_bits(name: str) -> None:
    for size in (1, 3):
        replicas = plain(name, size)
        assert_alike(replicas)
        assert all(result.mean.isfinite().all() for result in replicas[0].results)
        for replica in replicas:
            assert replica.results[2].weight == sum(WEIGHTS[:size])
            assert replica.results[2].metadata[0] == sum(range(size))
            assert replica.results[2].mean.shape == (NUMEL,)
            assert size > 1 or replica.nbytes == [0, 0, 0]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    found = Cluster()
    yield found
    found.close()


@each_row
def test_both_worlds_give_the_same_bits_bytes_and_states(name: str, cluster: Cluster) -> None:
    reducer, size = ROWS[name].reducer, 3
    real = cluster.run(
        size, lambda runtime, number: Replica(runtime, reducer, width=2, first=1000 * number).run(range(4))
    )
    for one, two in zip(real, plain(name, size, steps=4, width=2), strict=True):
        assert all(same_bits(a.mean, b.mean) for a, b in zip(one.results, two.results, strict=True))
        assert one.nbytes == two.nbytes
        assert same_tree(one.slot.state.local, two.slot.state.local)
        assert same_tree(one.slot.state.shared, two.slot.state.shared)


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.error is not None])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_mean_is_weighted(name: str, size: int) -> None:
    for step, result in enumerate(plain(name, size)[0].results):
        exact = exact_mean(size, step)
        assert (result.mean - exact).norm() <= (ROWS[name].error or 0.0) * exact.norm()


@each_row
def test_who_is_late_changes_no_bit(name: str) -> None:
    replicas = run(ROWS[name].reducer, 3, 2, late={1: 10.0})
    assert_alike(replicas)
    for one, two in zip(replicas, plain(name, 3, steps=2), strict=True):
        assert same_bits(one.results[1].mean, two.results[1].mean)
        assert same_tree(one.slot.state.local, two.slot.state.local)
        assert one.nbytes == two.nbytes


@each_row
def test_exchanges_that_overlap_are_alike_on_all_ranks_and_lose_nothing(name: str) -> None:
    replicas = plain(name, 3, steps=4, width=2)
    assert_alike(replicas)
    assert len(replicas[0].results) == 4
    slower = run(ROWS[name].reducer, 3, steps=4, width=2, link=LinkModel(0.5, 1e4))
    for one, two in zip(replicas, slower, strict=True):  # however long an exchange takes
        assert all(same_bits(a.mean, b.mean) for a, b in zip(one.results, two.results, strict=True))
        assert same_tree(one.slot.state.local, two.slot.state.local)


@each_row
def test_steps_and_states_go_on_after_a_checkpoint(name: str, tmp_path: Path) -> None:
    reducer = ROWS[name].reducer
    wanted = run(reducer, 2, steps=5)
    again = VirtualWorld(2, LINK)
    resumed = [Replica(runtime, reducer) for runtime in again.runtimes]
    for replica, old in zip(resumed, plain(name, 2), strict=True):
        path = tmp_path / f"{replica.rank}.safetensors"
        save_tree(path, {"shared": old.slot.state.shared, "local": old.slot.state.local})
        tree = load_tree(path)
        replica.slot.state = CodecState(tree["shared"], tree["local"])
    again.run([replica.run(range(3, 5)) for replica in resumed])
    for replica, want in zip(resumed, wanted, strict=True):
        assert same_bits(replica.results[-1].mean, want.results[-1].mean)
        assert same_tree(replica.slot.state.local, want.slot.state.local)
        assert same_tree(replica.slot.state.shared, want.slot.state.shared)


@each_row
def test_a_joiner_gets_what_is_shared_and_has_nothing_left_over(name: str) -> None:
    reducer = ROWS[name].reducer
    veterans = run(reducer, 2)
    world = VirtualWorld(3, LINK)
    replicas = [Replica(runtime, reducer, first=10) for runtime in world.runtimes]
    for replica, veteran in zip(replicas, [*veterans, None], strict=True):
        local = veteran.slot.state.local if veteran else replica.slot.state.local
        replica.slot.state = CodecState(veterans[0].slot.state.shared, local)
    assert not any(tensor.any() for tensor in tensors_in(replicas[2].slot.state.local))
    world.run([replica.run(range(3, 6)) for replica in replicas])
    assert_alike(replicas)


@each_row
def test_the_smallest_tensors(name: str) -> None:
    for size, numel in [(1, 1), (2, 0), (2, 3), (4, 2)]:
        make = partial(gradient, numel=numel)
        replicas = run(ROWS[name].reducer, size, 2, spec=TensorSpec((numel,)), make=make)
        assert_alike(replicas)
        assert replicas[0].results[0].mean.shape == (numel,)
        assert replicas[0].results[0].mean.isfinite().all()


def _ways() -> list[tuple[str, str]]:
    """Each collective with each codec and with each way of a codec, and with what has a way of its own."""
    collectives = sorted(COLLECTIVES.keys() - {"direct", "native"})
    carried = [tuple(name.split(", ", 1)) for name in SOME]
    rows = covering((*each, one) for each in carried if len(each) > 1 for one in collectives)
    return [(", ".join(each), one) for *each, one in rows] + [
        (name, one) for (name, *more) in carried if not more for one in collectives
    ]


@pytest.mark.parametrize(("name", "collective"), _ways())
def test_every_collective_carries_it(name: str, collective: str) -> None:
    reducer = ROWS[name].reducer
    carried: Any = replace(reducer, collective=collective)  # type: ignore[type-var]
    assert_alike(run(carried, 4, steps=2))


@each_row
def test_what_was_given_is_not_written_once_it_is_another_s(name: str) -> None:
    """A fast rank's next gradient must not overwrite what slow ones have not read yet."""
    reducer = ROWS[name].reducer
    buffers = [torch.empty(NUMEL) for _ in range(3)]
    late = {1: 5.0, 2: 10.0}
    replicas = run(reducer, 3, late=late, make=lambda rank, step: buffers[rank].copy_(gradient(rank, step)))
    assert_alike(replicas)
    for one, two in zip(replicas, plain(name, 3), strict=True):
        assert all(same_bits(a.mean, b.mean) for a, b in zip(one.results, two.results, strict=True))


# --- what is summed ---------------------------------------------------------------------------------------------

LATE = 1 << 20
"""A step at which no method warms up any more."""
MANY = TensorSpec(
    (NUMEL + 200,), spans=(*PARTS, ParameterSpan((10, 10), NUMEL), ParameterSpan((10, 10), NUMEL + 100))
)


DTYPES = {"float32": torch.float32, "float16": torch.float16, "float64": torch.float64}
SUMS = [
    (name, dtype)
    for name in ROWS
    for dtype in (DTYPES if name in SOME else ("float16",))
    if dtype != "float64" or name.rpartition(", ")[2] not in ("truncate16", "chain (of three)")
]


@pytest.mark.parametrize(("name", "dtype"), SUMS)
def test_it_says_what_it_sums_before_it_does(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row, spec, found = ROWS[name].reducer, replace(MANY, dtype=DTYPES[dtype]), [[], [], []]  # type: ignore[var-annotated]
    if isinstance(row, AdaptiveTopK):
        row = replace(row, threshold=0.0)  # so that it is dense

    async def watched(
        channel: Channel, tensor: Tensor, metadata: Tensor, *, coding: SegmentCoding | None = None
    ) -> tuple[Tensor, Tensor]:
        if coding is None:
            found[channel.rank].append(tensor.nbytes)
        return await COLLECTIVES["direct"].run(channel, tensor, metadata, coding=coding)

    def make(rank: int, step: int) -> Tensor:
        return gradient(rank, step, MANY.numel).to(spec.dtype)

    monkeypatch.setitem(COLLECTIVES, "watched", Collective(watched))
    reducer: Any = replace(row, collective="watched")  # type: ignore[type-var]
    run(reducer, 3, 1, spec=spec, make=make, first_step=LATE)
    assert all(sorted(each) == sorted(reducer.list_summed_nbytes(spec, 3)) for each in found)


@pytest.mark.parametrize("name", ROWS)
def test_it_says_so_without_a_state_or_an_encoding(name: str) -> None:
    numel = 1 << 50  # more than any memory holds
    spec = TensorSpec((numel,), torch.float32, (ParameterSpan((1 << 25, 1 << 25), 0),))
    assert max(ROWS[name].reducer.list_summed_nbytes(spec, 2), default=0) <= 4 * numel


def test_a_reducer_that_does_not_say_sums_the_tensor_as_it_is() -> None:
    assert list_summed_nbytes(Reducer(), [SPEC, TensorSpec((3,), torch.float16)], 2) == [4 * NUMEL, 6]


# --- what is refused --------------------------------------------------------------------------------------------

REFUSED = {
    "codec(collective='circle')": "unknown collective 'circle'",
    "codec(phases='three')": "phases 'three'",
    "codec(3)": "made of codecs, not of 3",
    "powersgd(rank=0)": "rank 0",
    "powersgd(min_ratio=0.5)": "min_ratio 0.5",
    "powersgd(min_ratio='x')": "min_ratio 'x'",
    "powersgd(dense_steps=-1)": "dense_steps -1",
    "shared_scale_qsgd(bucket_size=0)": "bucket_size 0",
    "shared_scale_qsgd(bits=1)": "bits 1",
    "adaptive_topk(density=0.0)": "density 0.0",
    "adaptive_topk(threshold=-0.1)": "threshold -0.1",
    "adaptive_topk(smoothing=0.0)": "smoothing 0.0",
    "adaptive_topk(smoothing=1.5)": "smoothing 1.5",
    "adaptive_topk(decide='now')": "decide 'now'",
    "adaptive_topk(rule='papers')": "rule 'papers' must be 'paper' or 'released'",
    "adaptive_topk(epoch_steps=3)": "epoch_steps is only for rule='released'",
    "adaptive_topk(rule='released', epoch_steps=0)": "epoch_steps 0",
    "adaptive_topk(rule='released', smoothing=1.0)": "smoothing and decide are not of rule='released'",
    "adaptive_topk(rule='released', decide='exact')": "smoothing and decide are not of rule='released'",
    "gradiveq(slice_size=0)": "slice_size 0",
    "gradiveq(ratio=0.5)": "ratio 0.5",
    "gradiveq(ratio=8, variance_left=0.01)": "give ratio or variance_left, not both",
    "gradiveq(variance_left=1.0)": "variance_left 1.0",
    "gradiveq(warm_up=-1)": "warm_up -1",
    "gradiveq(sample_steps=1)": "sample_steps 1",
    "gradiveq(compress_steps=1)": "compress_steps 1",
    "gradiveq(sample_bits=9)": "bits 9",
    "gradiveq(drift=0.5)": "drift 0.5",
    "gradiveq(windows='short')": "windows 'short' must be 'spread' or 'paper'",
    "gradiveq(compress_steps=99)": "99 is less than 100",
} | {
    f"{name}(collective='{collective}')": message
    for name in sorted(REDUCERS.keys() - {"codec"})
    for collective, message in (("circle", "collective"), ("native", "'native' matches sums by their order"))
}


@pytest.mark.parametrize("text", REFUSED)
def test_bad_options_are_refused_when_it_is_made(text: str) -> None:
    with pytest.raises(ConfigError, match=REFUSED[text]):
        build("reducer", text, REDUCERS)


def test_the_backend_s_own_collective_carries_what_is_summed_alone() -> None:
    CodecReducer(Identity(), "native").init(SPEC, Seeds(1, 2))
    CodecReducer(CODEC_ROWS["randomk"].codec, "native").init(SPEC, Seeds(1, 2))
    CodecReducer(by_size(numel=NUMEL + 1), "native").init(SPEC, Seeds(1, 2))
    for codec in (
        Truncate16(),
        TopK(),
        error_feedback(TopK()),
        CODEC_ROWS["by_role"].codec,
        by_role(RandomK(), RandomK()),
    ):
        with pytest.raises(Unsupported, match="native"):
            CodecReducer(codec, "native").init(SPEC, Seeds(1, 2))


def test_a_codec_with_a_memory_of_its_own_is_not_cut_in_shards() -> None:
    routed = error_feedback(CODEC_ROWS["by_role (parts of top-k)"].codec)
    for codec in (DGC(), DeMo(), routed):
        for phases in ("two", "hops"):
            with pytest.raises(Unsupported, match="phases='gather'"):
                CodecReducer(codec, phases=phases).init(SPEC, Seeds(1, 2))


def test_another_model_s_payload_names_its_sender() -> None:
    world = VirtualWorld(2)

    async def body(runtime: Runtime) -> ReduceResult:
        numel = 100 + runtime.comm.rank
        reducer = CodecReducer(TopK(0.1 + runtime.comm.rank * 0.1))
        slot = StateSlot(reducer.init(TensorSpec((numel,)), Seeds(1, 2)))
        own = Contribution(torch.randn(numel), 1.0, torch.zeros(0, dtype=torch.float64))
        return await reducer.reduce(ExchangeChannel(runtime.comm, 1, 0), slot, own, step=0)

    with pytest.raises(ProtocolError, match=r"rank [01] sent .* do all ranks run the same model and recipe"):
        world.run([body(runtime) for runtime in world.runtimes])
