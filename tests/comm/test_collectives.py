"""Every collective sums the same, to the last bit, on every rank, in both worlds, whoever is late."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from farflung.comm import COLLECTIVES, Coding, ExchangeChannel
from farflung.comm.collectives.segments import cut_segments, sum_in_order
from farflung.errors import ProtocolError, Unsupported
from farflung.network import costs
from farflung.seeding import create_generator
from farflung.sim import LinkModel, VirtualWorld
from farflung.tasks import Pending, create_completed
from farflung.types import Codec, Payload, Runtime, Seeds, Tag, TensorSpec
from tests.covering import covered, covering
from tests.helpers import CODEC_ROWS, Cluster, in_virtual_time, same_bits

OURS = sorted(COLLECTIVES.keys() - {"native", "auto"})
SIZES = (1, 2, 3, 4, 7)
CODECS: dict[str, Codec | None] = {"nothing": None} | {
    name: row.codec for name, row in CODEC_ROWS.items() if row.codec.can_requantize
}
FAR = LinkModel(latency_s=0.05)

each_collective = pytest.mark.parametrize("name", OURS)
each_size = pytest.mark.parametrize("size", SIZES)


@dataclass
class Result:
    total: Tensor
    side: Tensor
    sent: list[int]
    """Bytes to each rank."""

    @property
    def nbytes(self) -> int:
        return sum(self.sent)


def contribution(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(numel, generator=create_generator(11, rank), dtype=torch.float64).to(dtype)


def side_of(rank: int) -> Tensor:
    """Numbers whose sum shows the order of its additions, and one that is plainly exact."""
    return torch.tensor([(-1.0) ** rank * 1e16 + rank, 0.1 * rank, rank], dtype=torch.float64)


def exchange(
    runtime: Runtime, name: str, tensor: Tensor, codec: Codec | None = None, number: int = 1
) -> Coroutine[Pending[Any], None, Result]:
    channel = ExchangeChannel(runtime.comm, number, part=2)
    side = side_of(runtime.comm.rank)
    coding = Coding(codec, Seeds(1, 2 + channel.rank), 3) if codec else None

    async def run() -> Result:
        total, sides = await channel.get_collective(name)(channel, tensor, side, coding=coding)
        return Result(total, sides, channel.sent_counts.tolist())

    return run()


def simulated(
    size: int, name: str, numel: int, codec: Codec | None = None, dtype: torch.dtype = torch.float32
) -> list[Result]:
    """In virtual time."""
    return in_virtual_time(
        size,
        lambda r: exchange(r, name, contribution(r.comm.rank, numel, dtype), codec),
        FAR,
    )[0]


def assert_same(results: list[Result], wanted: list[Result]) -> None:
    for result, want in zip(results, wanted, strict=True):
        assert same_bits(result.total, want.total)
        assert same_bits(result.side, want.side)
        assert result.sent == want.sent


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    found = Cluster()
    yield found
    found.close()


# --- the sum ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_parts_are_added_first_to_last_and_stay_as_they_were(count: int) -> None:
    parts = [side_of(rank) for rank in range(count)]
    wanted, out = parts[0].clone(), torch.empty(3, dtype=torch.float64)
    for part in parts[1:]:
        wanted = wanted + part
    found = sum_in_order(parts)
    assert sum_in_order(parts, out) is out
    assert same_bits(found, wanted)
    assert same_bits(out, wanted)
    assert all(same_bits(part, side_of(rank)) for rank, part in enumerate(parts))


MILLION = 1_000_000
CASES = covering(itertools.product(OURS, SIZES, CODECS, (0, 1, 5)))
# Megabytes go without a codec in the fewest, largest messages and in the most, with one in between: what a codec makes
# of them is cut in pieces as they are. One replica sends none, as the rows above show; four send as seven do.
CASES += [
    (name, size, codec, MILLION)
    for name in OURS
    for size in SIZES
    for codec in CODECS
    if (codec == "nothing" and size in (2, 3, 7)) or (codec == "int8" and size == 3)
]


@pytest.mark.parametrize(("name", "size", "codec", "numel"), CASES)
def test_both_worlds_give_the_same_bits_and_bytes_on_every_rank(
    name: str, size: int, codec: str, numel: int, cluster: Cluster
) -> None:
    wanted = simulated(size, name, numel, CODECS[codec])
    real = cluster.run(
        size,
        lambda r, number: exchange(r, name, contribution(r.comm.rank, numel), CODECS[codec], number),
    )
    assert_same(real, wanted)
    for result in real[1:]:
        assert same_bits(result.total, real[0].total)
        assert same_bits(result.side, real[0].side)


@covered("name, size, codec, numel", OURS, SIZES, CODECS, [1, 5, 1000], strength=3)
def test_the_sum_is_the_sum(name: str, size: int, codec: str, numel: int) -> None:
    parts = [contribution(rank, numel) for rank in range(size)]
    exact = torch.stack(parts).double().sum(dim=0)
    # A ring encodes partial sums anew on every hop; the others once on the way in and once on the way out.
    error = CODEC_ROWS[codec].error if codec in CODEC_ROWS else 0.0
    bound = ((size + 1) * error * (1 + error) ** size + 1e-6) * sum(float(part.norm()) for part in parts)
    for result in simulated(size, name, numel, CODECS[codec]):
        assert float((result.total.double() - exact).norm()) <= bound
        assert result.total.shape == (numel,)


@pytest.mark.parametrize("name", sorted(set(OURS) - {"ring"}))
@each_size
def test_owners_add_in_rank_order(name: str, size: int) -> None:
    wanted = contribution(0, 9)
    for rank in range(1, size):
        wanted = wanted + contribution(rank, 9)
    assert same_bits(simulated(size, name, 9)[0].total, wanted)


@each_collective
@each_size
def test_sides_add_in_rank_order(name: str, size: int) -> None:
    wanted = side_of(0)
    for rank in range(1, size):
        wanted = wanted + side_of(rank)
    for numel in (0, 1, 50):
        for result in simulated(size, name, numel):
            assert same_bits(result.side, wanted)


@each_collective
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_keep_theirs(name: str, dtype: torch.dtype, cluster: Cluster) -> None:
    wanted = simulated(3, name, 10, dtype=dtype)
    exact = torch.stack([contribution(rank, 10, dtype) for rank in range(3)]).double().sum(dim=0)
    torch.testing.assert_close(wanted[0].total.double(), exact, rtol=0.0, atol=8 * torch.finfo(dtype).eps)
    assert wanted[0].total.dtype == dtype
    real = cluster.run(3, lambda r, n: exchange(r, name, contribution(r.comm.rank, 10, dtype), number=n))
    assert_same(real, wanted)


@each_collective
def test_a_shard_cut_in_pieces_sums_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = simulated(3, name, 1001)
    monkeypatch.setattr(costs, "MAX_PIECE_NBYTES", 64)
    in_pieces = simulated(3, name, 1001)
    assert_same(in_pieces, whole)


@covered("name, size, codec, numel", OURS, SIZES, CODECS, [1, 5, 1000], strength=2)
def test_the_communicator_counts_what_channels_do(name: str, size: int, codec: str, numel: int) -> None:
    async def counted(runtime: Runtime) -> tuple[Result, dict[str, list[int]]]:
        result = await exchange(runtime, name, contribution(runtime.comm.rank, numel), CODECS[codec])
        return result, runtime.comm.sent_bytes.to_json()

    found, _ = in_virtual_time(size, counted, FAR)
    for result, sent in found:
        assert sent == ({"gradients": result.sent} if size > 1 else {})


@each_collective
def test_one_replica_sends_nothing(name: str) -> None:
    own = contribution(0, 5)
    (result,) = simulated(1, name, 5)
    assert same_bits(result.total, own)
    assert same_bits(result.side, side_of(0))
    assert result.nbytes == 0


@pytest.mark.parametrize("numel", [0, 1, 5, 1000])
@each_size
def test_a_sum_off_the_clock_is_direct_without_messages(size: int, numel: int) -> None:
    world = VirtualWorld(size, FAR)

    async def body(runtime: Runtime) -> tuple[Result, dict[str, list[int]]]:
        await runtime.sleep_until(0.5 * runtime.comm.rank)
        assert runtime.untimed is not None
        own = contribution(runtime.comm.rank, numel)
        result = await exchange(runtime.untimed, "direct", own)
        return result, runtime.untimed.comm.sent_bytes.to_json()

    found = world.run([body(runtime) for runtime in world.runtimes])
    assert_same([result for result, _ in found], simulated(size, "direct", numel))
    for result, sent in found:
        assert sent == ({"gradients": result.sent} if size > 1 else {})
    assert world.clock.time() == 0.5 * (size - 1)
    assert world.untimed_network is not None
    assert not world.untimed_network.message_counts


# --- bytes and delays -------------------------------------------------------------------------------------------

SIDE = side_of(0).nbytes


@pytest.mark.parametrize("size", SIZES[1:])
@pytest.mark.parametrize("name", ["ring", "direct"])
def test_each_rank_moves_the_least_there_is(name: str, size: int) -> None:
    numel = 840  # divisible by every size
    results = simulated(size, name, numel)
    # Around the ring the side vector takes every hop but the last of either half; directly it goes to everybody.
    sides = {"ring": 2 * (size - 1), "direct": size * (size - 1)}[name] * SIDE
    assert sum(result.nbytes for result in results) == 2 * (size - 1) * numel * 4 + sides
    for result in results:
        assert 0 <= result.nbytes - 2 * (size - 1) * numel * 4 // size <= 2 * (size - 1) * SIDE


@pytest.mark.parametrize("size", SIZES[1:])
@pytest.mark.parametrize(("name", "servers"), [("parameter_server", 1), ("multi_parameter_server", 2)])
def test_servers_carry_everybodys_bytes(name: str, servers: int, size: int) -> None:
    numel = 840
    servers = servers if servers == 1 else (size + 1) // 2
    results = simulated(size, name, numel)
    shard = numel // servers * 4 + SIDE
    for rank, result in enumerate(results):
        others = servers - (rank < servers)
        answers = (size - 1) if rank < servers else 0
        assert abs(result.nbytes - shard * (others + answers)) <= 8 * (others + answers) + SIDE * answers


@pytest.mark.parametrize("size", SIZES[1:])
def test_truncation_halves_what_moves(size: int) -> None:
    for name in OURS:
        dense, half = simulated(size, name, 840), simulated(size, name, 840, CODECS["truncate16"])
        for a, b in zip(dense, half, strict=True):
            tensors = 2 * (a.nbytes - b.nbytes)
            assert 0 <= a.nbytes - tensors <= 2 * size * SIDE


@pytest.mark.parametrize(
    ("name", "delays"),
    [
        ("direct", lambda n: 2),
        ("parameter_server", lambda n: 2),
        ("multi_parameter_server", lambda n: 2),
        ("ring", lambda n: 2 * (n - 1)),
    ],
)
def test_how_many_one_way_delays_it_takes(name: str, delays: Callable[[int], int]) -> None:
    def body(runtime: Runtime, numel: int) -> Coroutine[Pending[Any], None, Result]:
        return exchange(runtime, name, contribution(runtime.comm.rank, numel))

    for size, numel in itertools.product(SIZES, (0, 16)):
        _, seconds = in_virtual_time(size, partial(body, numel=numel), LinkModel(latency_s=0.25))
        assert seconds == (0.25 * delays(size) if size > 1 else 0.0), (size, numel)


@pytest.mark.usefixtures("unframed")
@pytest.mark.parametrize(("name", "seconds"), [("ring", 6 * 2000e-6), ("direct", 2 * 2000e-6)])
def test_every_link_is_used_at_once(name: str, seconds: float) -> None:
    # 1 MB/s each way and no delay: of 8 kB, each of 4 ranks sends 2 (n-1)/n, three quarters to one rank or to three.
    link = LinkModel(bandwidth_bps=8e6)
    _, took = in_virtual_time(4, lambda r: exchange(r, name, torch.zeros(2000)), link)
    assert took == pytest.approx(seconds, rel=0.02)


# --- arrival ----------------------------------------------------------------------------------------------------


def shuffled(world: VirtualWorld, seed: int) -> None:
    """Each message of this world takes a time of its own."""
    rng, network = random.Random(seed), world.network

    def carry(src: int, dst: int, tag: Tag, payload: Payload, priority: int = 0) -> Pending[None]:
        arrives = world.clock.time() + rng.random()
        world.clock.call_at(arrives, lambda: network.mailboxes[dst].deliver(src, tag, payload))
        return create_completed(None)

    network.send = carry  # type: ignore[method-assign]


@each_collective
@pytest.mark.parametrize("codec", CODECS)
def test_the_order_of_arrival_changes_no_bit(name: str, codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "MAX_PIECE_NBYTES", 64)
    wanted = simulated(4, name, 100, CODECS[codec])
    for seed in range(20):
        world = VirtualWorld(4)
        shuffled(world, seed)
        results = world.run(
            [exchange(r, name, contribution(r.comm.rank, 100), CODECS[codec]) for r in world.runtimes]
        )
        assert_same(results, wanted)


@each_collective
def test_exchanges_under_way_together_do_not_mix(name: str, cluster: Cluster) -> None:
    wanted = {numel: simulated(3, name, numel) for numel in (3, 40, 7000)}

    async def body(runtime: Runtime, number: int) -> list[Result]:
        # Each rank starts them in an order of its own.
        order = [list(wanted)[(k + runtime.comm.rank) % 3] for k in range(3)]
        running = {
            numel: runtime.launch(
                exchange(
                    runtime, name, contribution(runtime.comm.rank, numel), number=10_000 * number + numel
                )
            )
            for numel in order
        }
        return [await running[numel] for numel in wanted]

    simulated_together = in_virtual_time(3, lambda r: body(r, 1), FAR)[0]
    for together in (cluster.run(3, body), simulated_together):
        for index, numel in enumerate(wanted):
            assert_same([results[index] for results in together], wanted[numel])


# --- what is refused --------------------------------------------------------------------------------------------


def test_native_is_refused_where_there_is_none() -> None:
    with pytest.raises(Unsupported, match="real processes only"):
        simulated(2, "native", 4)
    with pytest.raises(Unsupported, match="cannot carry a codec"):
        simulated(2, "native", 4, CODECS["truncate16"])


@each_collective
@pytest.mark.parametrize("odd", ["numel", "codec", "dtype"])
def test_another_kind_of_segment_names_its_sender(name: str, odd: str) -> None:
    def body(runtime: Runtime) -> Coroutine[Pending[Any], None, Result]:
        other = runtime.comm.rank == 1
        tensor = contribution(0, 12 if other and odd == "numel" else 8)
        tensor = tensor.double() if other and odd == "dtype" else tensor
        codec = CODECS["truncate16"] if other and odd == "codec" else None
        return exchange(runtime, name, tensor, codec)

    with pytest.raises(ProtocolError, match=r"rank [01] sent another kind of segment"):
        in_virtual_time(2, body)


# --- cutting ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numel", [0, 1, 6, 7, 8, 100])
@pytest.mark.parametrize("parts", [1, 2, 7])
def test_segments_cover_everything_once_and_evenly(numel: int, parts: int) -> None:
    segments = cut_segments(numel, parts)
    whole = torch.arange(numel)
    assert torch.equal(torch.cat([segment.narrow(whole) for segment in segments]), whole)
    lengths = [segment.length for segment in segments]
    assert lengths == sorted(lengths, reverse=True)
    assert max(lengths) - min(lengths) <= 1
    assert TensorSpec.from_tensor(segments[0].narrow(whole)).numel == lengths[0]
