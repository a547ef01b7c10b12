"""Messages meet waits by source and tag, whichever comes first, and every wait can be ended with a reason."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farflung.comm import Purpose
from farflung.comm.mailbox import IntervalSet, Mailbox
from farflung.errors import DeadlinePassed, PeerLost, ProtocolError, RunLost, WaitEnded
from farflung.tasks import Pending
from farflung.types import Payload, Tag, TensorSpec
from tests.helpers import number_in, numbered, tag


def received(pending: Pending[Payload]) -> float | None:
    return number_in(pending.result()) if pending.is_done else None


def anybodys(pending: Pending[tuple[int, Payload]]) -> tuple[int, float] | None:
    if not pending.is_done:
        return None
    src, payload = pending.result()
    return src, number_in(payload)


def create_mailbox(times_s: Iterable[float] = itertools.repeat(0.0), **options: Any) -> Mailbox:
    """A mailbox on a clock that shows some times in turn."""
    return Mailbox(iter(times_s).__next__, **options)


# --- memory -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["delivered", "forgotten", "a newer view", "the end"])
def test_memory_is_named_until_its_message_has_come_or_will_not(end: str) -> None:
    mailbox, into = create_mailbox(), torch.zeros(5)
    mailbox.post_recv_buffer(1, tag(2), into)
    place = mailbox.find_recv_buffer(1, tag(2), 0, 20)
    assert place is not None
    assert place.data_ptr() == into.data_ptr()
    assert (
        mailbox.find_recv_buffer(1, tag(2), 0, 16)
        is mailbox.find_recv_buffer(1, tag(2), 1, 20)
        is mailbox.find_recv_buffer(2, tag(2), 0, 20)
        is None
    )
    if end == "delivered":
        mailbox.deliver(1, tag(2), numbered(3))
    elif end == "forgotten":
        mailbox.cancel_exchange(tag(2).exchange)
    elif end == "a newer view":
        mailbox.advance_view(1)
    else:
        mailbox.end(RunLost("it has ended"))
        mailbox.post_recv_buffer(1, tag(2), into)
    assert mailbox.find_recv_buffer(1, tag(2), mailbox.view, 20) is None


# --- matching ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wait_first", [True, False])
@pytest.mark.parametrize("deadline_s", [None, 5.0])
def test_a_message_meets_its_wait(wait_first: bool, deadline_s: float | None) -> None:
    mailbox = create_mailbox()
    for src, anybody in ((3, False), (4, True)):
        if not wait_first:
            mailbox.deliver(src, tag(), numbered(1))
        one = None if anybody else mailbox.recv(src, tag(), deadline_s=deadline_s)
        first = mailbox.recv(None, tag(), deadline_s=deadline_s) if anybody else None
        assert mailbox.waits.get_any() is not None or not wait_first
        if wait_first:
            mailbox.deliver(src, tag(), numbered(1))
        assert one is None or received(one) == 1
        assert first is None or anybodys(first) == (4, 1)
        assert mailbox.waits.get_any() is None
        assert mailbox.waits.fail_due(1e9) is None


@pytest.mark.parametrize("other", [tag(2), tag(1, 1), tag(1, 0, 1)])
def test_another_tag_is_another_message(other: Tag) -> None:
    mailbox = create_mailbox()
    early, any_early = mailbox.recv(0, tag()), mailbox.recv(None, tag())
    mailbox.deliver(0, other, numbered(9))
    assert not early.is_done
    assert not any_early.is_done
    assert received(mailbox.recv(0, other)) == 9


def test_a_wait_for_one_goes_before_a_wait_for_anybody() -> None:
    mailbox = create_mailbox()
    anybody, one = mailbox.recv(None, tag()), mailbox.recv(1, tag())
    mailbox.deliver(1, tag(), numbered(1))
    assert received(one) == 1
    assert not anybody.is_done
    mailbox.deliver(1, tag(), numbered(2))
    assert anybodys(anybody) == (1, 2)


def test_of_each_sender_so_much_is_kept_and_one_message_always() -> None:
    mailbox = create_mailbox(max_unreceived_nbytes=3000)
    for src in (1, 2):
        for value in range(4):
            mailbox.deliver(src, tag(value), numbered(value))
    assert mailbox.num_dropped == 4, "each is counted with 1024 bytes more than it has"
    assert mailbox.unreceived_nbytes == 4 * 1028
    assert received(mailbox.recv(1, tag(0))) == 0
    mailbox.deliver(1, tag(4), numbered(4))
    assert received(mailbox.recv(1, tag(4))) == 4
    mailbox.cancel_exchange(tag(1).exchange)
    assert mailbox.unreceived_nbytes == 1028
    mailbox.advance_view(1)
    assert mailbox.unreceived_nbytes == 0
    mailbox.deliver(3, tag(5), Payload((torch.zeros(10_000),)), view=1)
    assert mailbox.recv(3, tag(5)).is_done


def test_two_waits_for_the_same_message_are_a_mistake() -> None:
    mailbox = create_mailbox()
    mailbox.recv(0, tag(4, 5, 6))
    with pytest.raises(RuntimeError, match="two receives for the exchange at step 4, part 5, hop 6 from 0"):
        mailbox.recv(0, tag(4, 5, 6))


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.integers(0, 2)), max_size=60))
def test_each_message_meets_one_wait_in_order_whatever_comes_first(
    events: list[tuple[bool, int, int]],
) -> None:
    mailbox = create_mailbox()
    sent: dict[tuple[int, int], list[float]] = defaultdict(list)
    waits: dict[tuple[int, int], list[Pending[Payload]]] = defaultdict(list)
    for number, (is_send, src, exchange) in enumerate(events):
        key = (src, exchange)
        if is_send:
            sent[key].append(number)
            mailbox.deliver(src, tag(exchange), numbered(number))
        elif all(pending.is_done for pending in waits[key]):
            waits[key].append(mailbox.recv(src, tag(exchange)))
    for key, pendings in waits.items():
        got = [received(pending) for pending in pendings]
        assert got == [*sent[key][: len(got)], *[None] * (len(got) - len(sent[key]))]


@given(st.lists(st.sampled_from(["send 0", "send 1", "send 2", "wait"]), max_size=40))
def test_waits_for_anybody_take_messages_in_order_of_arrival(events: list[str]) -> None:
    mailbox = create_mailbox()
    sent: list[tuple[int, float]] = []
    waits: deque[Pending[tuple[int, Payload]]] = deque()
    for number, event in enumerate(events):
        if event == "wait":
            if not waits or waits[-1].is_done:
                waits.append(mailbox.recv(None, tag()))
        else:
            sent.append((int(event[-1]), number))
            mailbox.deliver(int(event[-1]), tag(), numbered(number))
    got = [anybodys(pending) for pending in waits]
    assert got == [*sent[: len(got)], *[None] * (len(got) - len(sent))]


# --- what is expected -------------------------------------------------------------------------------------------

PAIR = Payload((torch.zeros(3), Payload((torch.zeros(2, 2, dtype=torch.float64),))))


@pytest.mark.parametrize("wait_first", [True, False])
@pytest.mark.parametrize(
    "expect",
    [
        (TensorSpec((3,)), TensorSpec((2, 2), torch.float64)),
        (TensorSpec((4,)), TensorSpec((2, 2), torch.float64)),
        (TensorSpec((3,), torch.float16), TensorSpec((2, 2), torch.float64)),
        (TensorSpec((3,)),),
        (),
    ],
)
def test_only_what_is_expected_is_handed_over(expect: tuple[TensorSpec, ...], wait_first: bool) -> None:
    mailbox = create_mailbox()
    if not wait_first:
        mailbox.deliver(5, tag(7), PAIR)
    pending = mailbox.recv(5, tag(7), expect)
    if wait_first:
        mailbox.deliver(5, tag(7), PAIR)
    if expect == tuple(map(TensorSpec.from_tensor, PAIR.iter_tensors())):
        assert pending.result() is PAIR
    else:
        with pytest.raises(
            ProtocolError, match=r"rank 5 sent float32\[3\] \+ float64\[2, 2\] for the exchange at step 7"
        ):
            pending.result()


def test_a_mismatch_names_the_sender_where_anybody_would_do_and_ends_that_wait_alone() -> None:
    mailbox = create_mailbox()
    bad = mailbox.recv(None, tag(1), (TensorSpec((2,)),))
    good = mailbox.recv(None, tag(2), (TensorSpec((1,)),))
    mailbox.deliver(2, tag(1), numbered(0))
    mailbox.deliver(3, tag(2), numbered(8))
    with pytest.raises(ProtocolError, match=r"rank 2 sent float32\[1\] .* where float32\[2\] was due"):
        bad.result()
    assert anybodys(good) == (3, 8)


def test_nothing_is_described_as_such() -> None:
    mailbox = create_mailbox()
    pending = mailbox.recv(0, tag(), ())
    mailbox.deliver(0, tag(), numbered(0))
    with pytest.raises(ProtocolError, match="where nothing was due"):
        pending.result()


# --- how long ---------------------------------------------------------------------------------------------------


def test_the_oldest_wait_is_the_one_that_began_first() -> None:
    mailbox = create_mailbox([10.0, 11.0])
    assert mailbox.waits.get_oldest() is None
    mailbox.recv(4, tag(12, 3, 1))
    mailbox.recv(1, tag(12, 3, 2))
    oldest = mailbox.waits.get_oldest()
    assert oldest is not None
    assert (oldest.src, oldest.start_s, oldest.description) == (
        4,
        10.0,
        "the exchange at step 12, part 3, hop 1",
    )
    mailbox.deliver(4, tag(12, 3, 1), numbered(0))
    oldest = mailbox.waits.get_oldest()
    assert oldest is not None
    assert (oldest.src, oldest.start_s) == (1, 11.0)
    mailbox.deliver(1, tag(12, 3, 2), numbered(0))
    assert mailbox.waits.get_oldest() is None


def test_a_wait_with_a_deadline_of_its_own_ends_alone() -> None:
    mailbox = create_mailbox([0.0, 1.0, 1.0, 1.0, 9.0])
    plain, soon = mailbox.recv(1, tag(1)), mailbox.recv(1, tag(2), deadline_s=2.0)
    late, ever = mailbox.recv(None, tag(3), deadline_s=4.0), mailbox.recv(None, tag(4), deadline_s=math.inf)
    oldest = mailbox.waits.get_oldest()
    assert oldest is not None
    assert oldest.tag == tag(1), "the others do not count against the run's"
    assert mailbox.waits.fail_due(2.9) == 3.0
    assert not soon.is_done
    assert mailbox.waits.fail_due(3.0) == 5.0
    with pytest.raises(DeadlinePassed, match=r"^lost rank 1: waited 2\.0 s for the exchange at step 2"):
        soon.result()
    assert mailbox.waits.fail_due(1e9) is None
    with pytest.raises(DeadlinePassed, match="lost any rank"):
        late.result()
    assert not plain.is_done
    assert not ever.is_done
    again = mailbox.recv(1, tag(2))
    mailbox.deliver(1, tag(2), numbered(4))
    assert received(again) == 4, "it may be waited for anew"


def test_a_driver_is_asked_to_call_at_each_deadline() -> None:
    calls: list[tuple[float, Callable[[], Any]]] = []
    mailbox = create_mailbox([1.0, 2.0, 3.0], call_at=lambda due_s, fn: calls.append((due_s, fn)))
    soon = mailbox.recv(1, tag(1), deadline_s=4.0)
    mailbox.recv(1, tag(2), deadline_s=math.inf)
    mailbox.recv(1, tag(3))
    ((due_s, fail_due),) = calls
    assert due_s == 5.0
    fail_due()
    assert isinstance(soon.error, DeadlinePassed)


# --- what is forgotten ------------------------------------------------------------------------------------------


def test_a_forgotten_exchange_ends_its_waits_and_drops_what_comes() -> None:
    mailbox = create_mailbox()
    waits: list[Pending[Any]] = [
        mailbox.recv(1, tag(5)),
        mailbox.recv(2, tag(5, 1), deadline_s=3.0),
        mailbox.recv(None, tag(5, 0, 1)),
    ]
    other = mailbox.recv(1, tag(6))
    mailbox.deliver(3, tag(5, 2), numbered(0))
    mailbox.cancel_exchange(5)
    for pending in waits:
        with pytest.raises(WaitEnded, match=r"the exchange at step 5, .* was given up"):
            pending.result()
    assert mailbox.num_dropped == 1
    mailbox.deliver(1, tag(5), numbered(0))
    assert mailbox.num_dropped == 2
    assert isinstance(mailbox.recv(1, tag(5)).error, WaitEnded)
    mailbox.deliver(1, tag(6), numbered(7))
    assert received(other) == 7


@given(st.lists(st.integers(0, 30), max_size=60))
def test_what_is_forgotten_is_kept_as_runs(numbers: list[int]) -> None:
    forgotten = IntervalSet()
    for number in numbers:
        forgotten.add(number)
    assert [number for number in range(32) if number in forgotten] == sorted(set(numbers))
    runs = sum(number - 1 not in numbers for number in set(numbers))
    assert len(forgotten) == runs


# --- the end ----------------------------------------------------------------------------------------------------


def test_the_end_fails_every_wait_now_and_later() -> None:
    mailbox = create_mailbox()
    waits: list[Pending[Any]] = [mailbox.recv(src, tag()) for src in (0, 1)]
    waits += [
        mailbox.recv(None, tag()),
        mailbox.recv(2, tag(), deadline_s=1.0),
        mailbox.departures.get(),
    ]
    first = RunLost("over")
    mailbox.end(first)
    mailbox.end(RunLost("over again"))
    waits += [mailbox.recv(0, tag(9)), mailbox.departures.get()]
    for pending in waits:
        assert pending.error is first
    assert mailbox.waits.get_oldest() is None


def test_what_arrived_before_the_end_can_still_be_received() -> None:
    mailbox = create_mailbox()
    mailbox.deliver(0, tag(), numbered(3))
    mailbox.end(RunLost("over"))
    assert received(mailbox.recv(0, tag())) == 3
    assert isinstance(mailbox.recv(0, tag()).error, RunLost)


def test_one_sender_fails_alone() -> None:
    mailbox = create_mailbox()
    lost = [mailbox.recv(1, tag(exchange)) for exchange in (1, 2)]
    kept, anybody = mailbox.recv(2, tag(1)), mailbox.recv(None, tag(2))
    error = PeerLost(1, "it had left the run")
    mailbox.fail_from(1, error)
    assert [pending.error for pending in lost] == [error, error]
    assert not kept.is_done
    assert not anybody.is_done
    mailbox.deliver(2, tag(1), numbered(1))
    mailbox.deliver(0, tag(2), numbered(2))
    assert received(kept) == 1
    assert anybodys(anybody) == (0, 2)


def test_who_is_gone_is_told_once_each() -> None:
    mailbox = create_mailbox()
    first = mailbox.departures.get()
    for rank in (4, 2, 4):
        mailbox.fail_from(rank, PeerLost(rank, "gone"))
    assert [first.result(), mailbox.departures.get().result()] == [4, 2]
    waiting = mailbox.departures.get()
    assert not waiting.is_done
    with pytest.raises(RuntimeError, match="two waits for a departure"):
        mailbox.departures.get()


def test_who_comes_again_is_waited_for_again() -> None:
    mailbox = create_mailbox()
    mailbox.admit_sender(3)
    mailbox.fail_from(1, PeerLost(1, "gone"))
    mailbox.admit_sender(1)
    waiting = mailbox.recv(1, tag())
    assert [mailbox.arrivals.get().result() for _ in range(2)] == [3, 1]
    assert not waiting.is_done
    mailbox.deliver(1, tag(), numbered(4))
    assert received(waiting) == 4
    mailbox.fail_from(1, PeerLost(1, "gone again"))
    assert [mailbox.departures.get().result() for _ in range(2)] == [1, 1]


def test_what_a_sender_sent_before_it_failed_can_still_be_received() -> None:
    mailbox = create_mailbox()
    mailbox.deliver(1, tag(), numbered(3))
    error = PeerLost(1, "it had left the run")
    mailbox.fail_from(1, error)
    assert received(mailbox.recv(1, tag())) == 3
    assert mailbox.recv(1, tag()).error is error


def test_messages_about_views_outlive_a_view() -> None:
    """Those of any view are taken at once, and neither they nor a wait for them end with a view."""
    mailbox, about = create_mailbox(), Tag(Purpose.VIEWS.build_exchange_id(0))
    kept, waited = numbered(1.0), numbered(2.0)
    mailbox.deliver(1, about, kept, 7)
    mailbox.advance_view(2)
    assert mailbox.recv(None, about, deadline_s=math.inf).result() == (1, kept)
    wait = mailbox.recv(None, about, deadline_s=math.inf)
    mailbox.advance_view(3)
    assert not wait.is_done
    mailbox.deliver(0, about, waited, 1)
    assert wait.result() == (0, waited)
    assert mailbox.unreceived_nbytes == 0


def test_a_message_of_an_older_view_is_dropped_whether_or_not_it_is_waited_for() -> None:
    mailbox = create_mailbox()
    mailbox.advance_view(2)
    wait = mailbox.recv(1, tag(2))
    for payload in (numbered(1.0), numbered(2.0)):
        mailbox.deliver(1, tag(2), payload, 1)
    assert not wait.is_done
    assert mailbox.num_dropped == 2
    assert mailbox.unreceived_nbytes == 0
    mailbox.deliver(1, tag(2), numbered(3.0), 2)
    assert received(wait) == 3
