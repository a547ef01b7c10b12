"""What exchanges compute takes its time on a lane of the modelled device; every time here is worked out by hand."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from farflung.codecs import Int8, TopK, error_feedback
from farflung.comm import ExchangeChannel
from farflung.devices import CodingRates, DeviceProfile, ScheduledStraggler
from farflung.errors import PeerLost
from farflung.faults import FaultPlan
from farflung.reducers import REDUCERS, CodecReducer, PowerSGD, SharedScaleQSGD
from farflung.sim import LinkModel, VirtualWorld
from farflung.tasks import Pending
from farflung.types import (
    Contribution,
    Cost,
    ParameterSpan,
    Payload,
    Reducer,
    ReduceResult,
    Runtime,
    Seeds,
    StateSlot,
    TensorSpec,
)
from tests.helpers import same_bits, tag

pytestmark = pytest.mark.usefixtures("unframed")

NUMEL = 120
LINK = LinkModel(latency_s=0.5)
"""Half a second, whatever the size."""
EF_INT8 = "error_feedback(codec=int8)"


def rates(seconds: Mapping[tuple[str, str], float], **options: float) -> CodingRates:
    """Seconds of each operation on all :data:`NUMEL` elements; of fewer in proportion."""
    return CodingRates(
        {key: ((1, value / NUMEL), (NUMEL, value)) for key, value in seconds.items()}, **options
    )


def gradient(rank: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank))


async def exchange(runtime: Runtime, reducer: Reducer, number: int = 0) -> tuple[ReduceResult, float]:
    """One bucket's, of a matrix of 12 by 10; what it brings, and when."""
    rank = runtime.comm.rank
    channel = ExchangeChannel(runtime.comm, number, 0)
    spec = TensorSpec((NUMEL,), spans=(ParameterSpan((12, 10), 0),))
    slot = StateSlot(reducer.init(spec, Seeds(1, 2 + rank)))
    own = Contribution(gradient(rank), 1.0, torch.zeros(0, dtype=torch.float64))
    reduced = await reducer.reduce(channel, slot, own, step=0)
    await channel.wait_computed()
    return reduced, runtime.read_clock()


def driven(
    size: int,
    body: Callable[[Runtime], Coroutine[Pending[Any], None, Any]],
    coding: CodingRates | None,
    link: LinkModel = LINK,
    **options: Any,
) -> list[Any]:
    device = options.pop("device", DeviceProfile(forward_s=1.0))
    world = VirtualWorld(size, link, device=replace(device, coding=coding), seed=3, **options)
    return world.run([body(runtime) for runtime in world.runtimes])


def ended(size: int, reducer: Reducer, coding: CodingRates, **options: Any) -> list[float]:
    """When each rank has one exchange."""
    return [at for _, at in driven(size, partial(exchange, reducer=reducer), coding, **options)]


# --- journeys ---------------------------------------------------------------------------------------------------


def test_gathered() -> None:
    coding = rates({("encode", "topk"): 0.1, ("accumulate", "topk"): 0.02, ("scale", ""): 0.003})
    reducer = CodecReducer(TopK())
    # Encoded at 0.1 and there at 0.6. Rank 0 has added its own by then; rank 1 adds it last, since ranks add in order.
    assert ended(2, reducer, coding) == pytest.approx([0.623, 0.643])


def test_two_phases() -> None:
    coding = rates(
        {
            ("encode", "int8"): 0.1,
            ("decode", "int8"): 0.04,
            ("add", ""): 0.02,
            ("subtract", ""): 0.006,
            ("copy", ""): 0.008,
        }
    )
    reducer = CodecReducer(error_feedback(Int8()), phases="two")
    # The residual is added (0.02), both halves are encoded (0.1), sent, and decoded for the residual (0.04 + 0.006).
    # At 0.62 the other's half is there. Rank 0 has decoded its own (0.02) by 0.186; it decodes the other's (0.02), adds
    # (0.01) and encodes (0.05), sends at 0.70; meanwhile it decodes and copies its own (0.024). Rank 1 decodes its own
    # after the other's, so it sends at 0.72, and has what rank 0 sent at 1.20.
    first = 0.72 + 0.5 + 0.02 + 0.004 + 0.003
    second = 1.20 + 0.02 + 0.004 + 0.02 + 0.004 + 0.003
    assert ended(2, reducer, coding) == pytest.approx([first, second])


def test_on_the_hops_of_a_ring() -> None:
    coding = rates(
        {("encode", "int8"): 0.12, ("decode", "int8"): 0.06, ("add", ""): 0.03, ("copy", ""): 0.009}
    )
    reducer = CodecReducer(Int8(), collective="ring", phases="hops")
    # A third of the tensor on each hop: encoded by 0.04; decoded, added and encoded again on two hops (0.07); what is
    # complete is decoded and copied (0.023) before it is sent, and so is what comes on two more.
    whole = 0.04 + 0.5 + 0.07 + 0.5 + 0.07 + 0.023 + 0.5 + 0.023 + 0.5 + 0.023
    assert ended(3, reducer, coding) == pytest.approx([whole] * 3)


def test_on_the_hops_of_direct_with_what_is_left_out() -> None:
    coding = rates(
        {("encode", EF_INT8): 0.1, ("decode", EF_INT8): 0.04, ("add", ""): 0.02, ("copy", ""): 0.008}
    )
    reducer = CodecReducer(error_feedback(Int8()), phases="hops")
    # The residual is added, half encoded by 0.07; at 0.57 the other's half is decoded, added, encoded: 0.65.
    # The own half is decoded and copied beside the other's way.
    assert ended(2, reducer, coding) == pytest.approx([1.15 + 0.02 + 0.004] * 2)


def test_the_rounds_of_powersgd() -> None:
    method = PowerSGD(rank=1, collective="all_gather").method
    assert method == "powersgd(rank=1)"
    coding = rates({("encode", method): 0.1, ("orthonormalize", method): 0.03, ("decode", method): 0.2})
    reducer = PowerSGD(rank=1, collective="all_gather")
    assert ended(2, reducer, coding) == pytest.approx([0.1 + 0.5 + 0.03 + 0.5 + 0.2] * 2)
    (reduced, _), _ = driven(2, partial(exchange, reducer=reducer), coding)
    assert reduced.update_state is not None


def test_the_rounds_of_shared_scales() -> None:
    method = "shared_scale_qsgd"
    coding = rates({("scales", method): 0.01, ("encode", method): 0.1, ("decode", method): 0.2})
    reducer = SharedScaleQSGD(collective="all_gather")
    assert ended(2, reducer, coding) == pytest.approx([0.01 + 0.5 + 0.1 + 0.5 + 0.2] * 2)


def test_sums_and_means_of_dense_tensors() -> None:
    coding = rates({("add", ""): 0.06, ("scale", ""): 0.03, ("copy", ""): 0.012})
    # Thirds are added, two additions for three; copied once by their owner, and once by each other.
    assert ended(3, CodecReducer(), coding) == pytest.approx([0.5 + 0.04 + 0.5 + 0.008 + 0.03] * 3)
    with_copy = 0.012 + 0.5 + 0.12 + 0.03  # of its own tensor, whose memory takes the sum
    assert ended(3, CodecReducer(collective="all_gather"), coding) == pytest.approx([with_copy] * 3)


def test_learning_is_charged_and_delays_the_next_exchange_alone() -> None:
    method = "error_feedback"  # around Top-k, as usual
    coding = rates({("learn", method): 0.3, ("encode", method): 0.1})

    async def body(runtime: Runtime) -> tuple[float, float]:
        reducer = CodecReducer(error_feedback(TopK()))
        reduced, _ = await exchange(runtime, reducer)
        assert reduced.update_state is not None
        reduced.update_state(reducer.init(TensorSpec((NUMEL,)), Seeds(1, 2)))
        merged = runtime.read_clock()
        _, at = await exchange(runtime, reducer, 1)
        return merged, at

    assert driven(2, body, coding)[0] == pytest.approx((0.6, 0.6 + 0.3 + 0.1 + 0.5))


# --- one lane ---------------------------------------------------------------------------------------------------


def test_two_exchanges_share_one_lane() -> None:
    coding = rates({("encode", "topk"): 0.1, ("accumulate", "topk"): 0.02})

    async def body(runtime: Runtime) -> list[float]:
        reducer = CodecReducer(TopK())
        both = [runtime.launch(exchange(runtime, reducer, number)) for number in range(2)]
        return [(await pending)[1] for pending in both]

    # Rank 0 encodes and adds its own of the first, then of the second, which leaves at 0.22; rank 1 adds its own last,
    # so its second leaves at 0.2.
    first, second = driven(2, body, coding)
    assert first == pytest.approx([0.62, 0.72])
    assert second == pytest.approx([0.64, 0.76])


def test_coding_overlaps_with_the_messages_of_other_exchanges() -> None:
    reducer = CodecReducer(TopK(density=0.1))
    coding = rates({("encode", "topk(density=0.1)"): 1.0})
    # Each message takes two seconds: indices and values of twelve, and what rides beside them.
    link = LinkModel(0.0, 4.0 * (12 * 8 + 8))

    async def body(runtime: Runtime) -> list[float]:
        each = [runtime.launch(exchange(runtime, reducer, number)) for number in range(3)]
        return [(await pending)[1] for pending in each]

    assert driven(2, body, coding, link) == [pytest.approx([3.0, 5.0, 7.0])] * 2


@pytest.mark.parametrize(("cores", "ends"), [(2.0, (4.0, 4.0)), (1.0, (4.7, 4.7))])
def test_computing_stands_still_where_there_is_one_processor(cores: float, ends: tuple[float, float]) -> None:
    coding = rates({("encode", "topk"): 0.3, ("accumulate", "topk"): 0.2})

    async def body(runtime: Runtime) -> float:
        pending = runtime.launch(exchange(runtime, CodecReducer(TopK())))
        ready: list[float] = []
        await runtime.compute(Cost("forward", 1), lambda: None)
        await runtime.run_backward(
            Cost("backward", 1, (60, 60)), _fill, lambda index: ready.append(runtime.read_clock())
        )
        forward = (
            1.0 if cores == 2 else 1.7
        )  # 0.3 of it stands still at once, and 0.4 when the message has come
        assert ready == pytest.approx([forward + 1.0, forward + 2.0])
        await runtime.compute(Cost("optimizer", 1), lambda: None)
        await pending
        return runtime.read_clock()

    device = DeviceProfile(forward_s=1.0, optimizer_s=1.0, cores=cores)
    assert driven(2, body, coding, device=device) == pytest.approx(ends)


def _fill(ready: Callable[[int], None]) -> None:
    ready(0)
    ready(1)


def test_stragglers_and_slow_replicas_code_slowly() -> None:
    coding = rates({("encode", "topk"): 0.1, ("accumulate", "topk"): 0.02}, message_s=0.01)
    reducer = CodecReducer(TopK())
    fast = ended(2, reducer, coding)
    # Rank 0 has added its own by then. Rank 1 hears it at 0.62 and adds both.
    assert fast == pytest.approx([0.1 + 0.01 + 0.5 + 0.01 + 0.02, 0.1 + 0.01 + 0.5 + 0.01 + 0.04])
    slow = DeviceProfile(forward_s=1.0, stragglers=(ScheduledStraggler(0.0, 9.0, 3.0),))
    assert ended(2, reducer, coding, device=slow) == pytest.approx([3 * t - 1.0 for t in fast])
    plan = FaultPlan().slow(0, at_s=0.0, factor=3.0).slow(1, at_s=0.0, factor=3.0)

    async def later(runtime: Runtime) -> float:
        await runtime.sleep_until(1.0)
        return (await exchange(runtime, reducer))[1]

    found = driven(2, later, coding, faults=plan)
    assert found == pytest.approx([1.0 + 3 * t - 1.0 for t in fast])


def test_who_hangs_does_not_code_and_who_crashes_never_will() -> None:
    coding = rates({("encode", "topk"): 0.4})
    hung = FaultPlan().hang(0, at_s=0.1).restore(0, at_s=2.1)
    # Rank 0 has 0.3 s of its encoding left when it goes on.
    found = ended(2, CodecReducer(TopK()), coding, faults=hung)
    assert found == pytest.approx([2.4, 2.9])
    with pytest.raises(PeerLost, match="rank 0"):
        ended(2, CodecReducer(TopK()), coding, faults=FaultPlan().crash(0, at_s=0.1))


# --- messages ---------------------------------------------------------------------------------------------------


def heard(coding: CodingRates, nbytes: int, count: int = 1, link: LinkModel = LINK) -> list[float]:
    """When messages of one size are there that rank 0 sends to rank 1 at once."""

    async def body(runtime: Runtime) -> list[float]:
        if runtime.comm.rank == 0:
            for number in range(count):
                runtime.comm.send(Payload((torch.zeros(nbytes, dtype=torch.uint8),)), 1, tag(number))
            return []
        at = []
        for number in range(count):
            await runtime.comm.recv(0, tag(number))
            at.append(runtime.read_clock())
        return at

    found: list[float] = driven(2, body, coding, link)[1]
    return found


def test_a_message_takes_its_time_at_both_ends() -> None:
    assert heard(CodingRates(message_s=0.1), 4, 3) == pytest.approx([0.7, 0.8, 0.9])


def test_encryption_goes_on_beside_sending() -> None:
    piece = 1 << 18
    coding = CodingRates(
        copy_s_per_byte=0.25 / piece, encrypt_s_per_byte=0.75 / piece
    )  # a second for each piece
    assert heard(coding, piece // 2) == pytest.approx([0.5 + 0.5 + 0.5])
    # Four pieces, each of which is on the link for two seconds: the first has to be ready, and the last is taken up
    # when it has come.
    slow = LinkModel(0.5, 8 * piece / 2)
    assert heard(coding, 4 * piece, 1, slow) == pytest.approx([1 + 8 + 0.5 + 1])
    # A link without a limit: the last piece leaves after four seconds, and is taken up in one more.
    assert heard(coding, 4 * piece) == pytest.approx([4 + 0.5 + 1])
    # Another message's first piece is ready after five seconds, and its last after eight.
    assert heard(coding, 4 * piece, 2) == pytest.approx([5.5, 9.5])
    # The fixed time of each message is taken by the same thread.
    assert heard(replace(coding, message_s=0.1), 4 * piece, 2) == pytest.approx([5.7, 9.8])


def test_nothing_is_encrypted_where_there_is_no_network() -> None:
    async def body(runtime: Runtime) -> float:
        runtime.comm.send(Payload((torch.zeros(1),)), 1 - runtime.comm.rank, tag(1))
        await runtime.comm.recv(1 - runtime.comm.rank, tag(1))
        return runtime.read_clock()

    device = DeviceProfile(coding=CodingRates(encrypt_s_per_byte=1.0, copy_s_per_byte=0.25))
    world = VirtualWorld(2, device=device)
    assert world.run([body(runtime) for runtime in world.runtimes]) == pytest.approx([2.0, 2.0])


# --- without ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(REDUCERS))
def test_rates_of_nothing_change_no_time_and_rates_no_bit(name: str) -> None:
    reducer = REDUCERS[name]()
    body = partial(exchange, reducer=reducer)
    link = LinkModel(0.0123, 3.7e6)
    plain = driven(3, body, None, link)
    nothing = driven(3, body, CodingRates(), link)
    assert [at for _, at in nothing] == [at for _, at in plain]
    some = rates({("add", ""): 0.1, ("encode", "powersgd"): 0.1, ("scales", "shared_scale_qsgd"): 0.1})
    charged = driven(3, body, some, link)
    for (one, at), (other, later) in zip(plain, charged, strict=True):
        assert same_bits(one.mean, other.mean)
        assert at < later


def test_what_is_off_the_clock_takes_no_time() -> None:
    async def body(runtime: Runtime) -> float:
        off = runtime.untimed
        assert off is not None
        assert off.comm.coding_processor is None
        await exchange(off, CodecReducer(TopK()))
        channel = ExchangeChannel(off.comm, 1, 0)
        channel.charge("encode", NUMEL, "topk")
        await channel.wait_computed()
        return runtime.read_clock()

    assert driven(2, body, rates({("encode", "topk"): 1.0}, message_s=1.0)) == [0.0, 0.0]
