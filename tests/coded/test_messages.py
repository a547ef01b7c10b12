"""Messages of coded training: what is packed is unpacked, and what is no message harms nobody who hears it."""

from __future__ import annotations

import dataclasses
import math
import random
import resource
import threading
import typing
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from farflung.coded import messages
from farflung.coded.blocks import BlockStore
from farflung.coded.coordinator import Coordinator, Settings
from farflung.coded.device import Device, Queue
from farflung.coded.meeting import Address, admit_device, connect_device, start_coordinator
from farflung.coded.messages import (
    BlockPart,
    BlockSource,
    Built,
    Cancel,
    Columns,
    End,
    Failed,
    Fetch,
    MalformedMessage,
    Message,
    Multiply,
    Rows,
    Welcome,
    decode_message,
    encode_message,
    send_message,
)
from farflung.comm import view
from farflung.errors import FarflungError, PeerLost
from farflung.network import Link
from farflung.sim import VirtualWorld
from farflung.tasks import Pending, Task
from farflung.types import Payload, Runtime
from tests.coded_mutations import (
    COMMANDS,
    FEATURES,
    FETCHES,
    OTHERS,
    REPORTS,
    WORK,
    damaged,
    kept_for_later,
)
from tests.coded_runs import part
from tests.helpers import PATIENCE_S, in_threads, same_bits, tag

COUNT, TOLD = 10_000, 4_000
MANY = 50_000
"""Rounds; a run has some hundreds."""
EXACT = 1e-9
KINDS: tuple[type[Message], ...] = typing.get_args(Message)
ALL: Sequence[Message] = (*COMMANDS, *WORK, *REPORTS, *FETCHES, *OTHERS)


def in_range(message: Message) -> bool:
    """Whether it can be a message at all; some are there for what they ask for."""
    try:
        decode_message(encode_message(message), KINDS)
    except MalformedMessage:
        return False
    return True


# --- forms ----------------------------------------------------------------------------------------------------------


def same(one: Message, other: Message) -> bool:
    pairs = [(getattr(one, field.name), getattr(other, field.name)) for field in dataclasses.fields(one)]
    return type(one) is type(other) and all(
        same_bits(a, b) if isinstance(a, Tensor) else (type(a), a) == (type(b), b) for a, b in pairs
    )


def test_there_is_an_example_of_each_kind() -> None:
    assert {type(message) for message in ALL} == set(KINDS)


@pytest.mark.parametrize("message", ALL, ids=lambda message: type(message).__name__)
def test_what_is_packed_is_unpacked(message: Message) -> None:
    if in_range(message):
        assert same(decode_message(encode_message(message), KINDS), message)
    assert not unpacks(encode_message(message), [kind for kind in KINDS if kind is not type(message)])


def unpacks(payload: Payload, kinds: Sequence[type[Message]] = KINDS) -> bool:
    """Whether it is a message; then it is the same when it is packed again."""
    try:
        message = decode_message(payload, kinds)
    except MalformedMessage:
        return False
    assert same(decode_message(encode_message(message), KINDS), message)
    return True


def of_text(text: bytes, *tensors: Tensor) -> Payload:
    return Payload((torch.frombuffer(bytearray(text or b" "), dtype=torch.uint8), *tensors))


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_no_message(text: bytes) -> None:
    assert not unpacks(of_text(text))


@given(st.integers(0, 1 << 32))
def test_damaged_messages_are_refused_or_read(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(12):
        unpacks(damaged(draw, ALL))


@pytest.mark.parametrize(
    "text",
    [
        b'{"":"source","rank":1}',
        b'{"":"ready","rank":1' + b"0" * 400 + b"}",
        b'{"":"ready","rank":1.0}',
        b'{"":"ready","rank":true}',
        b'{"":"probe","rank":1}',
        b'{"":"fetch","reply":1,"block":1,"begin":0,"end":1,"partition":-1,"weights":[1e999],"bounds":[]}',
        b'{"":"fetch","reply":1,"block":1,"begin":0,"end":1,"partition":-1,"weights":[1'
        + b"0" * 400
        + b'],"bounds":[]}',
        b'{"":"end","reason":"\\ud800"}',
        b'{"":"end","reason":"\\u001b[2J"}',
        b'{"":"end","reason":"' + b"x" * 5000 + b'"}',
        b'{"":"drop","blocks":[' + b"0," * 5000 + b"0]}",
        b"[" * 100_000,
    ],
)  # fmt: skip
def test_what_json_allows_and_no_message_has(text: bytes) -> None:
    assert not unpacks(of_text(text))


# --- a hostile device -----------------------------------------------------------------------------------------------

DEVICES, PARTITIONS = 5, 3
HOSTILE = DEVICES + 1
LAST = 12_345
"""A round that nothing else speaks of."""
BULK = torch.zeros(1 << 14)
BEGIN, THROUGH = tag(1), tag(2)
NOTHING = Payload(())


async def coordinate(runtime: Runtime) -> tuple[float, Coordinator]:
    """Multiplies until the hostile device has said all that it has to say; the largest error, and the coordinator."""
    wanted = Settings(
        partitions=PARTITIONS, devices=DEVICES + 1, min_timeout_s=PATIENCE_S / 10, patience_s=PATIENCE_S
    )
    coordinator = Coordinator(runtime, wanted)
    await coordinator.gather()
    whole = torch.cat(
        [part(int(one.name.removeprefix("part ")))[0] for one in coordinator.activate_partitions()]
    )
    await runtime.launch(send_message(runtime.comm, NOTHING, hostile_of(coordinator), BEGIN))
    through = runtime.launch(hears_the_end(runtime))
    random_, worst, rounds = torch.Generator().manual_seed(0), 0.0, 0
    while not through.is_done or rounds < 5:
        weights = torch.randn(FEATURES, 2, generator=random_, dtype=torch.float64)
        residuals = torch.randn(len(whole), 2, generator=random_, dtype=torch.float64)
        found = await coordinator.multiply(weights), await coordinator.multiply_transposed(residuals)
        for product, due in zip(found, (whole @ weights, whole.T @ residuals), strict=True):
            worst = max(worst, float((product - due).abs().max() / due.abs().max()))
        rounds += 1
        assert rounds < MANY, "the hostile device has not come to its end"
    await coordinator.end()
    return worst, coordinator


async def hears_the_end(runtime: Runtime) -> None:
    await runtime.comm.recv_any(THROUGH, deadline_s=math.inf)


def hostile_of(coordinator: Coordinator) -> int:
    """The one that could make no block."""
    (rank,) = [rank for rank, member in coordinator.registry.devices.items() if member.cannot_build]
    return rank


async def speaks(runtime: Runtime, seed: int) -> dict[str, int]:
    """Says what nobody should: to the coordinator and to all devices, on all tags that they listen to."""
    comm, draw = runtime.comm, random.Random(seed)
    await comm.recv(0, BEGIN, deadline_s=math.inf)
    others = [rank for rank in range(1, HOSTILE + 1) if rank != comm.rank]
    for rank in others:
        while (await outcome(comm.send(damaged(draw, FETCHES), rank, messages.REQUEST))) is not None:
            await runtime.sleep_until(runtime.read_clock() + 0.02)
    said = dict.fromkeys(("report", "answer", "ask", "command", "operand"), 0)
    for turn in range(COUNT):
        what = draw.choice(list(said))
        said[what] += 1
        rank = draw.choice(others)
        if what == "report":
            left = comm.send(damaged(draw, REPORTS), 0, messages.REPORT)
        elif what == "answer":
            where, payload = kept_for_later(draw, 200)
            left = comm.send(payload, 0, where)
        elif what == "ask":
            left = comm.send(damaged(draw, FETCHES), rank, messages.REQUEST)
        else:
            tag_, intact = (messages.COMMAND, COMMANDS) if what == "command" else (messages.OPERAND, WORK)
            left = comm.send(Payload((damaged(draw, intact), BULK)), rank, tag_)
        if turn % 50 == 0:
            assert await outcome(left) is None
            await runtime.sleep_until(runtime.read_clock() + 0.001)
    await comm.send(NOTHING, 0, THROUGH)
    return said


async def outcome(left: Pending[None]) -> FarflungError | None:
    try:
        await left
    except PeerLost as error:
        return error
    return None


def holding(place: int) -> BlockStore:
    return BlockStore(f"part {place}", *part(place)) if place < PARTITIONS else BlockStore()


def check(worst: float, coordinator: Coordinator, devices: Sequence[Device], said: dict[str, int]) -> None:
    print(said, coordinator.counters, [device.num_refused for device in devices])
    assert worst < EXACT
    assert sum(said.values()) == COUNT
    # Beside what is refused there is what speaks of nothing, such as a block of another device.
    assert coordinator.counters.num_refused > said["report"] // 2
    assert sum(device.num_refused for device in devices) > said["ask"] // 2
    assert len(coordinator.registry.devices) >= DEVICES
    assert {one.name for one in coordinator.registry.partitions} == {
        f"part {place}" for place in range(PARTITIONS)
    }


def test_requests_that_are_taken_back_are_not_answered() -> None:
    """But for those that are being answered."""
    world = VirtualWorld(3, Link(0.001, 1e6), needs_all_members=False)

    async def command(runtime: Runtime) -> None:
        await send_message(runtime.comm, encode_message(Welcome("run", 0)), 1, messages.COMMAND)
        await runtime.sleep_until(10.0)
        await send_message(runtime.comm, encode_message(End()), 1, messages.OPERAND)

    async def attend(runtime: Runtime) -> int:
        device = Device(runtime, BlockStore("part 0", *part(0, rows=5000)))
        await device.run()
        return device.sent_nbytes["encoding"]

    async def ask(runtime: Runtime) -> list[int]:
        await runtime.sleep_until(1.0)
        for number in range(5):
            request = Fetch(number, 0, 1000 * number, 1000 * (number + 1))
            await send_message(runtime.comm, encode_message(request), 1, messages.REQUEST)
        await send_message(runtime.comm, encode_message(Cancel((0, 2, 3))), 1, messages.REQUEST)
        answers = [
            runtime.comm.recv(1, messages.build_reply_tag(number), deadline_s=math.inf) for number in range(5)
        ]
        await runtime.sleep_until(9.0)
        return [number for number, answer in enumerate(answers) if answer.is_done]

    _, nbytes, answered = world.run(
        [command(world.runtimes[0]), attend(world.runtimes[1]), ask(world.runtimes[2])]
    )
    assert answered == [0, 1, 4]
    assert nbytes == 3 * 1000 * FEATURES * 8


@pytest.mark.thorough
def test_a_hostile_device_on_real_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view, "MAX_UNRECEIVED_NBYTES", KEPT_NBYTES := 1 << 22)
    met: list[Address] = []
    there = threading.Event()
    devices: list[Device] = []
    dropped: list[int] = []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def coordinates() -> tuple[float, Coordinator]:
        with start_coordinator(Address("127.0.0.1", 0), "run") as (runtime, at):
            met.append(at)
            there.set()
            return runtime.drive(coordinate(runtime))

    def attends(body: Callable[[Any], Any]) -> Any:
        assert there.wait(PATIENCE_S)
        with connect_device(met[0], patience_s=PATIENCE_S) as runtime:
            return body(runtime)

    def device(runtime: Any, holding: BlockStore, **options: Any) -> Device:
        return Device(
            runtime,
            holding,
            admit=partial(admit_device, runtime),
            **options,
        )

    def honest(place: int, runtime: Any) -> None:
        devices.append(device(runtime, holding(place)))
        runtime.drive(devices[-1].run())
        mailbox = runtime.session.mailbox
        dropped.append(mailbox.num_dropped)
        assert mailbox.unreceived_nbytes <= (DEVICES + 2) * KEPT_NBYTES

    def hostile(runtime: Any) -> dict[str, int]:
        speaking = runtime.launch(speaks(runtime, 1))
        runtime.drive(device(runtime, BlockStore(), room_nbytes=0).run())
        return typing.cast("dict[str, int]", speaking.wait())

    found = in_threads(
        coordinates,
        *(partial(attends, partial(honest, place)) for place in range(DEVICES)),
        partial(attends, hostile),
    )
    for one in found:
        if isinstance(one, Exception):
            raise one
    (worst, coordinator), *_, said = typing.cast(Any, found)
    check(worst, coordinator, devices, said)
    assert sum(dropped) > COUNT // 10, "commands of who is not the coordinator are kept up to a bound"
    grown_nbytes = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    assert grown_nbytes < 1 << 28


# --- a coordinator that says anything -------------------------------------------------------------------------------


def test_a_device_that_is_told_anything_still_does_what_is_sensible() -> None:
    """What would end it, or make it wait for who is not there, is left out: that is sensible to say."""
    data, labels = part(0)
    brought, world = (
        BlockStore("part 0", data, labels),
        VirtualWorld(2, Link(0.001, 1e9), needs_all_members=False),
    )
    devices: list[Device] = []

    async def told(runtime: Runtime) -> Tensor:
        comm, draw = runtime.comm, random.Random(3)
        await comm.recv(1, messages.REPORT)
        for turn in range(TOLD):
            at_work = draw.random() < 0.5
            payload = damaged(draw, WORK if at_work else COMMANDS)
            if b"end" not in b"".join(tensor.numpy().tobytes() for tensor in payload.iter_tensors()):
                comm.send(payload, 1, messages.OPERAND if at_work else messages.COMMAND)
            if turn % 50 == 0:
                await runtime.sleep_until(runtime.read_clock() + 0.001)
        comm.send(encode_message(Welcome("again", 7)), 1, messages.COMMAND)
        comm.send(
            encode_message(Rows(70, len(data), FEATURES, (BlockSource(1, 7, 2.0),))), 1, messages.COMMAND
        )
        parts = (BlockPart(0, len(data), is_raw=True, sources=(BlockSource(1, 7, 1.0),)),)
        comm.send(encode_message(Columns(71, (1.0, 1.0), (0, 5, FEATURES), parts)), 1, messages.COMMAND)
        made: set[int] = set()
        while not made >= {70, 71}:
            try:
                report = decode_message(await comm.recv(1, messages.REPORT), (Built, Failed))
            except MalformedMessage:
                continue
            if isinstance(report, Built):
                made.add(report.block)
        weights = torch.ones(FEATURES, 1, dtype=torch.float64)
        comm.send(
            encode_message(Multiply(LAST, LAST, (70,), (), len(data), 1, 0, weights)), 1, messages.OPERAND
        )
        _, product = (await comm.recv(1, messages.build_answer_tag(LAST))).iter_tensors()
        comm.send(encode_message(End()), 1, messages.OPERAND)
        return product

    async def attend(runtime: Runtime) -> None:
        devices.append(Device(runtime, brought, room_nbytes=1 << 20, fetch_s=0.001))
        await devices[0].run()

    bodies: list[Coroutine[Pending[Any], None, Any]] = [told(world.runtimes[0]), attend(world.runtimes[1])]
    product = world.run(bodies)[0]
    assert torch.allclose(product, 2 * data @ torch.ones(FEATURES, 1, dtype=torch.float64))
    assert devices[0].num_refused > TOLD // 2
    assert brought.nbytes <= 1 << 20


@pytest.mark.parametrize(
    "request_",
    [
        Fetch(1, 0, 0, 1 << 20),
        Fetch(1, 0, 0, 1 << 40),
        Fetch(1, 0, 5, 4),
        Fetch(1, 0, 0, 5, 0),
        Fetch(1, 0, 0, 5, -1, (1.0,), (0, 9)),
        Fetch(1, 0, 0, 5, -1, (1.0, 1.0), (0, 11, 10)),
        Fetch(1, 9, 0, 5),
    ],
    ids=str,
)
def test_no_more_is_given_than_there_is_and_than_is_given_at_once(request_: Fetch) -> None:
    brought = BlockStore("part 0", *part(0))
    brought.bind_run("run", 0)
    with pytest.raises(MalformedMessage):
        brought.read_rows(request_)


def test_rounds_that_are_over_are_passed_over() -> None:
    """Of two that come while another one is carried out, the first; and the rest of that one."""
    data, labels = part(0)
    world = VirtualWorld(2, Link(0.001, 1e9), seconds_per_sample=0.1, needs_all_members=False)
    devices: list[Device] = []

    async def told(runtime: Runtime) -> None:
        comm, weights = runtime.comm, torch.ones(FEATURES, 1, dtype=torch.float64)
        await comm.recv(1, messages.REPORT)
        comm.send(encode_message(Welcome("run", 0)), 1, messages.COMMAND)
        await runtime.sleep_until(1.0)
        for round, since in ((1, 1), (2, 1), (3, 3)):
            task = Multiply(round, since, (0,), (), len(data), 4, 0, weights)
            comm.send(encode_message(task), 1, messages.OPERAND)
        await runtime.sleep_until(100.0)
        comm.send(encode_message(End()), 1, messages.OPERAND)

    async def attend(runtime: Runtime) -> None:
        devices.append(Device(runtime, BlockStore("part 0", data, labels)))
        await devices[0].run()

    world.run([told(world.runtimes[0]), attend(world.runtimes[1])])
    assert devices[0].num_rounds == 2
    assert devices[0].sent_nbytes["answers"] < 2 * 8 * len(data)
    assert devices[0].num_refused == 0


def test_a_queue_is_filled_by_one_thread_while_another_takes() -> None:
    queue, count = Queue[int](), 50_000

    def put() -> None:
        for number in range(count):
            queue.put(number)

    async def take() -> list[int]:
        return [await queue.get() for _ in range(count)]

    putter = threading.Thread(target=put)
    taken = Task(take(), lambda resume: resume())
    putter.start()
    assert taken.wait() == list(range(count))
    putter.join()
