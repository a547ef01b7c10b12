"""A result arrives once, errors travel to whoever awaits them, and a task never leaves its driver."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflung.tasks import Pending, Task, create_completed, create_failed, wait_any
from tests.helpers import PATIENCE_S, Driver


def run(coroutine: Coroutine[Pending[Any], None, Any]) -> Any:
    driver = Driver()
    task = Task(coroutine, driver.schedule)
    driver.run()
    return task.result()


async def wait_for(pending: Pending[Any]) -> Any:
    return await pending


# --- pending results --------------------------------------------------------------------------------------------


def test_a_value_arrives() -> None:
    pending: Pending[int] = Pending()
    assert not pending.is_done
    with pytest.raises(RuntimeError, match="not there yet"):
        pending.result()
    pending.set_result(3)
    assert pending.is_done
    assert pending.error is None
    assert pending.result() == 3
    assert pending.wait() == 3


def test_an_error_arrives() -> None:
    pending: Pending[int] = Pending()
    error = ValueError("no")
    pending.set_exception(error)
    assert pending.is_done
    assert pending.error is error
    for ask in (pending.result, pending.wait):
        with pytest.raises(ValueError, match="no") as caught:
            ask()
        assert caught.value is error


def test_the_first_completion_stands() -> None:
    value: Pending[int] = Pending()
    value.set_result(1)
    value.set_result(2)
    value.set_exception(ValueError())
    assert value.result() == 1
    error: Pending[int] = Pending()
    error.set_exception(KeyError("first"))
    error.set_exception(ValueError("second"))
    error.set_result(1)
    with pytest.raises(KeyError, match="first"):
        error.result()


def test_callbacks_come_once_in_order_and_at_once_when_it_is_late() -> None:
    seen: list[str] = []
    pending: Pending[None] = Pending()
    pending.add_done_callback(lambda _: seen.append("a"))
    pending.add_done_callback(lambda p: seen.append("b" if p.is_done else "too early"))
    assert seen == []
    pending.set_result(None)
    pending.set_result(None)
    assert seen == ["a", "b"]
    pending.add_done_callback(lambda _: seen.append("c"))
    assert seen == ["a", "b", "c"]


def test_of_many_threads_one_completes_it() -> None:
    pending: Pending[int] = Pending()
    seen: list[int] = []
    pending.add_done_callback(lambda p: seen.append(p.result()))
    start = threading.Barrier(8)

    def set_it(value: int) -> None:
        start.wait(PATIENCE_S)
        pending.set_result(value)

    threads = [threading.Thread(target=set_it, args=(value,)) for value in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [pending.result()]


# --- tasks ------------------------------------------------------------------------------------------------------


def test_nothing_runs_before_the_driver_does() -> None:
    driver, seen = Driver(), []

    async def body() -> int:
        seen.append("ran")
        return 4

    task = Task(body(), driver.schedule)
    assert seen == []
    assert not task.is_done
    driver.run()
    assert seen == ["ran"]
    assert task.result() == 4


def test_it_resumes_when_what_it_awaits_arrives() -> None:
    driver = Driver()
    arrives: Pending[int] = Pending()

    async def body() -> int:
        return 1 + await arrives

    task = Task(body(), driver.schedule)
    driver.run()
    assert not task.is_done
    arrives.set_result(6)
    assert not task.is_done, "it resumed outside its driver"
    driver.run()
    assert task.result() == 7


def test_an_error_is_raised_where_it_is_awaited_and_can_be_caught() -> None:
    async def careful() -> str:
        try:
            await create_failed(KeyError("k"))
        except KeyError as error:
            return f"caught {error}"
        return "nothing happened"

    assert run(careful()) == "caught 'k'"
    with pytest.raises(KeyError, match="k"):
        run(wait_for(create_failed(KeyError("k"))))


def test_tasks_await_each_other() -> None:
    driver = Driver()
    first: Pending[int] = Pending()
    inner = Task(wait_for(first), driver.schedule)
    one, two = Task(wait_for(inner), driver.schedule), Task(wait_for(inner), driver.schedule)
    driver.run()
    first.set_exception(ValueError("deep"))
    driver.run()
    for task in (one, two):
        with pytest.raises(ValueError, match="deep"):
            task.result()


def test_what_is_there_already_costs_no_turn_and_no_stack() -> None:
    async def body() -> int:
        return sum([await create_completed(1) for _ in range(20_000)])

    driver = Driver()
    task = Task(body(), driver.schedule)
    assert len(driver.queue) == 1
    driver.queue.popleft()()
    assert task.result() == 20_000


def test_a_task_ended_from_outside_unwinds() -> None:
    driver, seen = Driver(), []
    never: Pending[None] = Pending()

    async def body() -> None:
        try:
            await never
        finally:
            seen.append("unwound")

    task = Task(body(), driver.schedule)
    driver.run()
    task.set_exception(RuntimeError("ended"))
    never.set_result(None)
    driver.run()
    assert seen == ["unwound"]
    with pytest.raises(RuntimeError, match="ended"):
        task.result()


def test_a_task_stays_on_its_drivers_thread_whoever_completes() -> None:
    turns: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    arrives: Pending[int] = Pending()
    threads = []

    async def body() -> int:
        threads.append(threading.get_ident())
        value = await arrives
        threads.append(threading.get_ident())
        return value

    task = Task(body(), turns.put)
    turns.get(timeout=PATIENCE_S)()
    other = threading.Thread(target=arrives.set_result, args=(9,))
    other.start()
    turns.get(timeout=PATIENCE_S)()
    other.join()
    assert task.result() == 9
    assert threads == [threading.get_ident()] * 2


@given(order=st.permutations(range(6)), bad=st.sets(st.integers(0, 5)))
def test_results_do_not_depend_on_the_order_of_arrival(order: list[int], bad: set[int]) -> None:
    driver = Driver()
    arrivals: list[Pending[int]] = [Pending() for _ in range(6)]

    async def body() -> list[int]:
        got = []
        for pending in arrivals:
            try:
                got.append(await pending)
            except ValueError:
                got.append(-1)
        return got

    task = Task(body(), driver.schedule)
    for index in order:
        driver.run()
        if index in bad:
            arrivals[index].set_exception(ValueError())
        else:
            arrivals[index].set_result(index)
    driver.run()
    assert task.result() == [-1 if index in bad else index for index in range(6)]


# --- the first of several ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, 1, 2])
def test_first_of_names_the_first(first: int) -> None:
    pendings: list[Pending[int]] = [Pending() for _ in range(3)]
    index = wait_any(pendings)
    assert not index.is_done
    pendings[first].set_result(1)
    for pending in pendings:
        pending.set_result(2)
    assert index.result() == first
    assert wait_any([Pending(), create_completed(1), create_completed(2)]).result() == 1, (
        "the lowest of a tie"
    )
    assert wait_any([Pending(), create_failed(ValueError())]).result() == 1, "an error is a completion too"
