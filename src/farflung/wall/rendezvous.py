"""Rendezvous of ranks in a store of torch.distributed, which may contain keys of earlier processes.

The lowest rank leads. It draws a nonce and publishes it: the call. Every other rank answers the call under its own
key, with its own nonce and a value. After all answers the leader adds them to the call. A rank takes part once it
finds its own answer there, and confirms after it has met all others.

Keys are overwritten, and no process knows how often its rank has met before. Therefore, for any content of the store:

1. An answer of an ended process belongs to an earlier call: the leader waits on.
2. A call of an ended leader does not contain the answer of a process that came later. That process waits on, and
   answers the next call.
3. A rank that ends after its answer and restarts replaces that answer. The leader sees this until the rank confirms,
   and calls again; the others see another call, and answer again.
4. A rank that has confirmed, and meets for another purpose, does not answer the same call twice. The leader calls for
   nothing else before all have confirmed, so no rank takes the next call for a repeated one.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from farflung.errors import DeadlinePassed, ProtocolError

__all__ = ["Rendezvous", "ask_leader"]

_POLL_S = 0.001, 0.02
"""Delay between two reads of the store: initially, growing by half each time, and at most."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """Answer of a rank under its key."""

    call: str
    """Nonce of the call."""
    nonce: str
    value: str
    is_confirmed: bool = False

    def to_json(self) -> list[str | bool]:
        return [self.call, self.nonce, self.value, self.is_confirmed]

    @staticmethod
    def from_json(fields: object) -> _Answer | None:
        match fields:
            case [str(call), str(nonce), str(value), bool(confirmed)]:
                return _Answer(call, nonce, value, confirmed)
            case _:
                return None


class Rendezvous:
    """Meeting of ranks in a store.

    Args:
      store: Store of the job.
      name: Name of the meeting; concurrent meetings need another one.
      rank: Rank of this process.
      members: Ranks that meet, including this one; the lowest leads.
      deadline: Time of :func:`time.monotonic` at which this process gives up.
      advice: Answer of the leader to ranks that ask for it before they come, see :func:`ask_leader`.
    """

    def __init__(
        self,
        store: dist.Store,
        name: str,
        rank: int,
        members: Collection[int],
        deadline: float,
        advice: str = "",
    ) -> None:
        self._board, self._rank, self._members = _Board(store, name), rank, sorted(members)
        self._deadline, self._begin_s, self._advice = deadline, time.monotonic(), advice
        self._peers = [peer for peer in self._members if peer != rank]
        self._is_leader = self._members[0] == rank
        self._answers: dict[int, _Answer] = {}
        self.call = ""
        """Nonce of the call in which this rank takes part."""

    def exchange(self, value: str) -> dict[int, str]:
        """Waits until all members have come, and exchanges their values.

        Returns:
          The members' values, by rank.

        Raises:
          DeadlinePassed: A member has not come in time, or the store has ended.
          ProtocolError: Another process has come in place of this one.
        """
        own_answer = _Answer("", secrets.token_hex(16), value)
        try:
            self._answers = (
                self._run_leader(own_answer) if self._is_leader else self._exchange_as_follower(own_answer)
            )
        except RuntimeError as error:  # the store has ended
            raise self._build_deadline_error(self._peers[0], f" ({type(error).__name__})") from None
        return {rank: answer.value for rank, answer in self._answers.items()}

    def _run_leader(self, own_answer: _Answer) -> dict[int, _Answer]:
        if self._answers or not self.call:
            self._start_call()
        missing = self._peers
        for _ in self._poll():
            self._check_leadership()
            missing = [rank for rank in missing if self._read_answer(rank) is None]
            if self._advice:
                self._board.write_leader_text(missing, self._advice)
            if missing:
                continue
            # Read again, since a rank may have restarted.
            answers = {rank: answer for rank in self._peers if (answer := self._read_answer(rank))}
            missing = [rank for rank in self._peers if rank not in answers]
            if not missing:
                answers[self._rank] = replace(own_answer, call=self.call)
                self._board.write_call(self.call, answers)
                return answers
        raise self._build_deadline_error(self._find_missing())

    def _start_call(self) -> None:
        self.call, self._answers = secrets.token_hex(16), {}
        self._board.write_call(self.call, {})

    def _read_answer(self, rank: int) -> _Answer | None:
        """Reads the answer of a rank; None if it answers another call."""
        answer = self._board.read_answer(rank)
        return answer if answer is not None and answer.call == self.call else None

    def _exchange_as_follower(self, own_answer: _Answer) -> dict[int, _Answer]:
        """Answers the leader's calls until the leader has published the answers of all ranks; returns these by rank."""
        for _ in self._poll():
            call, answers = self._board.read_call()
            if call and call != own_answer.call and not self._has_confirmed(self._rank, call):
                own_answer = replace(own_answer, call=call)
                self._board.write_answer(self._rank, own_answer)
            mirrored = answers.get(self._rank)
            if mirrored is not None and mirrored.nonce == own_answer.nonce:
                self.call = call
                if answers.keys() == set(self._members):
                    return answers
                raise ProtocolError(
                    f"rank {self._members[0]} meets {len(answers)} ranks, and rank {self._rank} {len(self._members)}: "
                    "start all of them with the same number"
                )
        self.call = own_answer.call
        answer = self._read_answer(self._rank)
        if answer is not None and answer.nonce != own_answer.nonce:
            raise self._build_replaced_error()
        raise self._build_deadline_error(self._find_missing())

    def is_repeated(self) -> bool:
        """Returns True if a member has restarted, so that this meeting is over: call :meth:`exchange` again.

        Use this while this rank waits for another one that :meth:`exchange` has named. The leader has started a new
        call when it returns True, and closes its connections afterwards: a rank that finds one closed checks here.

        Raises:
          ProtocolError: Another process has come in place of this one.
        """
        try:
            if not self._is_leader:
                return self._board.read_call()[0] != self.call
            self._check_leadership()
            if self._answers and any(self._has_restarted(rank) for rank in self._peers):
                self._start_call()
            return not self._answers
        except RuntimeError:  # the store has ended; the others may still come
            return False

    def try_confirm(self, is_due: Callable[[int], bool] = lambda rank: True) -> bool:
        """Confirms the meeting; the leader waits for all confirmations, and returns False if a member has restarted.

        Args:
          is_due: Function that returns False for a member that has been lost since and will not confirm.

        Returns:
          False if a member has restarted, so that this rank must call :meth:`exchange` again.

        Raises:
          DeadlinePassed: A member has not met all others in time.
          ProtocolError: Another process has come in place of this one.
        """
        if not self._peers:
            return True
        try:
            if not self._is_leader:
                self._board.write_answer(self._rank, replace(self._answers[self._rank], is_confirmed=True))
                return True
            unconfirmed: list[int] = []
            for _ in self._poll():
                if self.is_repeated():
                    return False
                unconfirmed = [
                    rank for rank in self._peers if is_due(rank) and not self._has_confirmed(rank, self.call)
                ]
                if not unconfirmed:
                    return True
        except RuntimeError:  # the store has ended: no member can restart
            return True
        # The others may wait for one of these.
        lost_ranks = [rank for rank in self._peers if not is_due(rank)]
        raise DeadlinePassed(
            (lost_ranks or unconfirmed)[0],
            "its word that it has met all others",
            time.monotonic() - self._begin_s,
        )

    def _has_restarted(self, rank: int) -> bool:
        answer = self._read_answer(rank)
        return answer is not None and answer.nonce != self._answers[rank].nonce

    def _has_confirmed(self, rank: int, call: str) -> bool:
        answer = self._board.read_answer(rank)
        return answer is not None and answer.call == call and answer.is_confirmed

    def _check_leadership(self) -> None:
        if self._board.read_call()[0] != self.call:
            raise self._build_replaced_error()

    def _build_replaced_error(self) -> ProtocolError:
        return ProtocolError(
            f"another process has come to the store as rank {self._rank}: give each rank and each run that meets in "
            "it a number, or a store, of its own"
        )

    def _find_missing(self) -> int:
        """Returns a member that has not answered the last call; the leader if all have."""
        leader = self._members[0]
        if not self.call:
            return leader
        return next((rank for rank in self._peers if rank != leader and not self._read_answer(rank)), leader)

    def _build_deadline_error(self, rank: int, reason: str = "") -> DeadlinePassed:
        return DeadlinePassed(rank, f"its address in the store{reason}", time.monotonic() - self._begin_s)

    def _poll(self) -> Iterator[None]:
        return _poll_until(self._deadline)


def ask_leader(store: dist.Store, name: str, rank: int, description: str, patience_s: float) -> str:
    """Asks rank 0 for its advice before this rank comes to a meeting; rank 0 answers once it is present.

    Args:
      store: Store of the job.
      name: Name of the meeting.
      rank: Rank of this process, other than 0.
      description: Subject of the advice, for errors.
      patience_s: Maximum time in seconds.

    Raises:
      DeadlinePassed: Rank 0 has not come, or the store has ended.
    """
    board, question, begin, reason = _Board(store, name), secrets.token_hex(16), time.monotonic(), ""
    try:
        board.write_question(rank, question)
        for _ in _poll_until(begin + patience_s):
            if (advice := board.read_leader_text(rank, question)) is not None:
                return advice
    except RuntimeError as error:  # the store has ended
        reason = f" ({type(error).__name__})"
    raise DeadlinePassed(0, f"{description} in the store{reason}", time.monotonic() - begin)


class _Board:
    """Keys of a meeting; unreadable ones count as absent."""

    def __init__(self, store: dist.Store, name: str) -> None:
        self._store, self._name = store, f"farflung/{name}"
        self._present_keys: set[str] = set()

    def read_call(self) -> tuple[str, dict[int, _Answer]]:
        """Returns the last call: its nonce, empty if there is none, and the answers once all have answered."""
        match self._read(self._name):
            case [str(nonce), dict(texts)]:
                parsed = {rank: _Answer.from_json(fields) for rank, fields in texts.items()}
                return nonce, {
                    int(rank): answer for rank, answer in parsed.items() if answer and rank.isdecimal()
                }
            case _:
                return "", {}

    def write_call(self, nonce: str, answers: dict[int, _Answer]) -> None:
        self._write(self._name, [nonce, {rank: answer.to_json() for rank, answer in answers.items()}])

    def read_answer(self, rank: int) -> _Answer | None:
        return _Answer.from_json(self._read(f"{self._name}/{rank}"))

    def write_answer(self, rank: int, answer: _Answer) -> None:
        self._write(f"{self._name}/{rank}", answer.to_json())

    def write_question(self, rank: int, question: str) -> None:
        self._write(f"{self._name}/{rank}/question", question)

    def read_leader_text(self, rank: int, question: str) -> str | None:
        """Returns the leader's advice for a question, or None if it has not replied to this question."""
        match self._read(f"{self._name}/{rank}/advice"):
            case [str(asked), str(text)] if asked == question:
                return text
            case _:
                return None

    def write_leader_text(self, ranks: Iterable[int], text: str) -> None:
        """Answers the pending questions of some ranks."""
        for rank in ranks:
            question = self._read(f"{self._name}/{rank}/question")
            if isinstance(question, str) and self.read_leader_text(rank, question) is None:
                self._write(f"{self._name}/{rank}/advice", [question, text])

    def _read(self, key: str) -> Any:
        if key not in self._present_keys and not self._store.check([key]):  # `get` would wait for it
            return None
        self._present_keys.add(key)
        try:
            return json.loads(self._store.get(key))
        except (ValueError, RecursionError):
            return None

    def _write(self, key: str, value: object) -> None:
        self._store.set(key, json.dumps(value))


def _poll_until(deadline: float) -> Iterator[None]:
    """Yields at once and then every few milliseconds, until a time of :func:`time.monotonic`."""
    pause_s, max_s = _POLL_S
    yield
    while (left_s := deadline - time.monotonic()) > 0:
        time.sleep(min(pause_s, left_s))
        pause_s = min(1.5 * pause_s, max_s)
        yield
