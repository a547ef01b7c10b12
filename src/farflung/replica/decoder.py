"""Gradient coding: the decoder, a role of rank 0, and what replicas reach it by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from farflung.comm import ExchangeChannel, Purpose
from farflung.comm.channel import describe
from farflung.comm.mailbox import check_expected
from farflung.comm.staging import moved
from farflung.errors import DeadlinePassed
from farflung.files import deciding
from farflung.gradient_coding import GradientCode
from farflung.replica.server import Inside
from farflung.replica.stopping import StopAgreement
from farflung.replica.votes import decoded
from farflung.tasks import Pending, done
from farflung.types import (
    Channel,
    CodingCost,
    Contribution,
    Decision,
    Decode,
    Payload,
    Reduced,
    Runtime,
    StateSlot,
    Tag,
    TensorSpec,
)

__all__ = ["ByDecoder", "Decoder"]

DECODED = "decoded"
"""The name of the decision whose sums a mean is made of; its step counts the parts of all steps."""
LEFT_OUT = "left_out"
"""The name of a replica's decision whether it leaves a step's computation out."""
PUSH, ANSWER = 0, 1
"""Hops of an exchange."""


class Decoder:
    """Decodes the mean of each part from the first sufficient sums, and sends it to all ranks.

    It belongs to the thread that carries exchanges, so nothing that rank 0 computes holds it up. A step begins when the
    means of the one before are made, and then nothing waits for the late sums of that any more.

    Args:
      runtime: rank 0's.
      code: that all replicas have.
      flats: a tensor like each part's gradient.
      numbers: how many ride beside each of them.
      begin: the steps that all have done.
      steps: the steps after which the run ends.
      merge: how long late sums are waited for, and for how long they are of use.
      stop: agrees on the last step where the run is asked to stop.
    """

    def __init__(
        self,
        runtime: Runtime,
        code: GradientCode,
        flats: Mapping[int, Tensor],
        numbers: int,
        begin: int,
        steps: int,
        merge: Decode,
        stop: StopAgreement,
    ) -> None:
        self._runtime, self._code, self._flats, self._numbers = runtime, code, flats, numbers
        self._step, self._merge, self._stop = begin, merge, stop
        self._late: dict[int, dict[tuple[int, int], Pending[Payload]]] = {number: {} for number in flats}
        """Sums that were late, of each part, by step and rank; without a code, which needs the sums of one step."""
        self._inside = Inside()
        self.channels: dict[Tag, ExchangeChannel] = {}
        """Of answers that count as no exchange's of rank 0 yet, by their tags."""
        runtime.launch(self._run(steps)).on_done(self._ended)

    def push(self, payload: Payload, tag: Tag) -> None:
        """A sum of rank 0's; dropped where its step is over."""
        if self._merge.late_steps or tag.exchange >= Purpose.STEP.at(self._step):
            self._inside.send(payload, tag)

    def answer(self, tag: Tag) -> Pending[Payload]:
        """A mean, for rank 0; to be asked for once."""
        return self._inside.recv(tag)

    async def _run(self, steps: int) -> None:
        comm = self._runtime.comm
        while self._step < steps:
            exchange = Purpose.STEP.at(self._step)
            parts = [self._runtime.launch(self._decode(number)) for number in self._flats]
            for part in parts:
                await part
            self._step += 1
            if not self._merge.late_steps:
                comm.forget(exchange)
                for number in self._flats:
                    self._inside.forget(Tag(exchange, number, PUSH))
            # A rank that sends a sum of the last step has reported before, so the request is known.
            if self._stop.is_asked and self._step > await self._stop.agreed:
                return

    async def _decode(self, number: int) -> None:
        """Decodes one part of the step."""
        own, flat = self._runtime.comm.rank, self._flats[number]
        channel = ExchangeChannel(self._runtime.comm, Purpose.STEP.at(self._step), number)
        spec = TensorSpec.of(flat), TensorSpec((self._numbers,), torch.float64)
        expect = None if self._merge.late_steps else spec
        pushes = [
            self._inside.recv(channel.tag(PUSH)) if rank == own else channel.recv(rank, PUSH, expect)
            for rank in range(channel.size)
        ]
        chosen, late = await self._chosen(number, pushes)
        kept = self._late[number]
        sums = [(rank, pushes[rank].result()) for rank in chosen]
        sums += [(at[1], kept.pop(at).result()) for at in late]
        if self._merge.late_steps:
            kept.update(
                {(self._step, rank): pushes[rank] for rank in range(channel.size) if rank not in chosen}
            )
            for rank, each in sums:
                check_expected(each, spec, rank, describe(channel.tag(PUSH)))
        sides = [list(each.tensors())[1] for _, each in sums]
        coefficients = self._coefficients(chosen, [float(side[0]) for side in sides])
        mean = torch.zeros_like(flat)
        for (_, each), coefficient in zip(sums, coefficients.tolist(), strict=True):
            share, tensor = coefficient / channel.size, moved(next(each.tensors()), flat.device)
            channel.compute(CodingCost("add", "", flat.numel()), partial(mean.add_, tensor, alpha=share))
        rider = decoded([side[1:] for side in sides], coefficients)
        whole = all(float(side[0]) > 0 for side in sides)
        weight = torch.tensor([float(channel.size * whole)], dtype=torch.float64)
        answer = Payload((mean, torch.cat([weight, rider])))
        self.channels[channel.tag(ANSWER)] = channel
        for rank in range(channel.size):
            if rank != own:
                channel.send(answer, rank, ANSWER)
        self._inside.send(answer, channel.tag(ANSWER))

    def _coefficients(self, chosen: Sequence[int], weights: Sequence[float]) -> Tensor:
        """What sums are weighed with, times the number of replicas: as their code says, or as their batches weigh."""
        if not self._code.uncoded:
            return self._code.decoding(chosen)
        whole = sum(weights)
        return torch.full((len(weights),), self._code.size / whole if whole else 0.0, dtype=torch.float64)

    async def _chosen(
        self, number: int, pushes: Sequence[Pending[Payload]]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Which ranks' sums are decoded, and which late ones, by step and rank.

        The first that are enough and those that come within the grace after them, or those of the run that is replayed.
        """
        at = self._step * len(self._flats) + list(self._flats).index(number)
        told = self._runtime.decisions.replayed(DECODED, at, self._runtime.comm.rank)
        wanted, wanted_late = (None, []) if told is None else self._read(told, number)
        came: list[int] = []
        enough: Pending[list[int]] = Pending()

        async def end_grace() -> None:
            await self._runtime.sleep_until(self._runtime.now() + self._merge.grace_s)
            enough.set(sorted(came))

        def arrived(rank: int, push: Pending[Payload]) -> None:
            if push.error is not None:
                enough.fail(push.error)
                return
            came.append(rank)
            if wanted is not None:
                if set(wanted) <= set(came):
                    enough.set(wanted)
            elif len(came) == self._code.size or (len(came) == self._code.needed and not self._merge.grace_s):
                enough.set(sorted(came))
            elif len(came) == self._code.needed:
                self._runtime.launch(end_grace())

        for rank, push in enumerate(pushes):
            push.on_done(partial(arrived, rank))
        chosen = await enough
        late = wanted_late if wanted is not None else self._late_ones(number)
        for step, rank in wanted_late:
            await self._late[number][step, rank]
        if self._merge.late_steps:
            self._runtime.decide_own(DECODED, at, lambda: [[*chosen], [[*one] for one in late]])
        else:
            self._runtime.decide_own(DECODED, at, lambda: [*chosen])
        return chosen, late

    def _late_ones(self, number: int) -> list[tuple[int, int]]:
        """The late sums of a part that have come meanwhile; what is of no use any more is dropped."""
        kept = self._late[number]
        for at, push in list(kept.items()):
            if push.done and (
                push.error is not None or _is_empty(push) or self._step > at[0] + self._merge.late_steps
            ):
                del kept[at]
        return sorted(at for at, push in kept.items() if push.done)

    def _read(self, told: Decision, number: int) -> tuple[list[int], list[tuple[int, int]]]:
        with deciding(told.name, told.step):
            value: Any = told.value
            ranks, late = value if self._merge.late_steps else (value, [])
            known, needed = range(self._code.size), self._code.needed
            count = range(needed, self._code.size + 1) if self._code.uncoded else [needed]
            if sorted(set(ranks)) != ranks or not set(ranks) <= {*known} or len(ranks) not in count:
                raise ValueError(f"{ranks!r} are not {needed} ranks")
            found = [(int(step), int(rank)) for step, rank in late]
            if not set(found) <= self._late[number].keys():
                raise ValueError(f"{late!r} are not late")
        return [int(rank) for rank in ranks], found

    def _ended(self, task: Pending[None]) -> None:
        """A task that fails ends the waits inside rank 0, which have no deadline of their own."""
        if task.error is not None:
            self._inside.end(task.error)


def _is_empty(push: Pending[Payload]) -> bool:
    """Whether a replica has left out the step that it was to send a sum of."""
    return not next(push.result().tensors()).numel()


class ByDecoder:
    """A replica's exchanges with the decoder; see :class:`farflung.replica.in_flight.Carrier`.

    Args:
      runtime: the world.
      code: see :class:`Decoder`.
      flats: see :class:`Decoder`.
      rider: how many numbers ride beside a gradient.
      steps: see :class:`Decoder`.
      merge: see :class:`Decoder`.
      stop: see :class:`Decoder`.
    """

    def __init__(
        self,
        runtime: Runtime,
        code: GradientCode,
        flats: Mapping[int, Tensor],
        rider: int,
        steps: int,
        merge: Decode,
        stop: StopAgreement,
    ) -> None:
        self._runtime, self._code, self._flats, self._stop = runtime, code, flats, stop
        self._numbers, self._steps, self._merge = 1 + rider, steps, merge
        self._decoder: Decoder | None = None
        self._left_out = -1
        """The last step that this replica has not computed."""
        self._answers: dict[Tag, Pending[Payload]] = {}
        """Means that have been asked for, and not taken."""

    @property
    def channels(self) -> list[ExchangeChannel]:
        """Of what rank 0 has sent for steps that it has not come to itself."""
        return [] if self._decoder is None else list(self._decoder.channels.values())

    def open(self, step: int) -> None:
        """Before a step; at the first one rank 0 becomes the decoder."""
        if self._decoder is None and self._runtime.comm.rank == 0:
            self._decoder = Decoder(
                self._runtime,
                self._code,
                self._flats,
                self._numbers,
                step,
                self._steps,
                self._merge,
                self._stop,
            )

    def ahead(self, step: int) -> bool:
        """Whether the means of a step were there when the one before was merged, so that its replica leaves it out."""
        answers = [self._answers.get(self._tag(step, number)) for number in self._flats]
        there = all(answer is not None and answer.done for answer in answers)
        decision = self._runtime.decide_own(LEFT_OUT, step, lambda: there)
        with deciding(decision.name, step):
            if type(decision.value) is not bool:
                raise ValueError("neither true nor false")
        if decision.value:
            self._left_out = step
        return decision.value

    async def reduce(self, channel: Channel, slot: StateSlot, own: Contribution, *, step: int) -> Reduced:
        """Sends the coded sum, unless the step is left out, and brings the mean."""
        del slot
        tag, left = channel.tag(ANSWER), done(None)
        if step != self._left_out or self._merge.late_steps:
            side = torch.cat([torch.tensor([own.weight], dtype=torch.float64), own.rider])
            tensor = own.tensor if step != self._left_out else own.tensor[:0]
            # One that is late is read after the replica has gone on.
            payload = Payload((tensor.clone() if self._merge.late_steps else tensor, side))
            if self._decoder is None:
                left = channel.send(payload, 0, PUSH)
            else:
                self._decoder.push(payload, channel.tag(PUSH))
        if tag not in self._answers:
            self._ask(step, tag.part)
        mean, told = (await self._answers.pop(tag)).tensors()
        await left  # a slow link never holds more than one sum
        await self._look(step + 1, tag.part)
        if self._decoder is not None:
            channel.count(self._decoder.channels.pop(tag).sent, for_it=True)
        return Reduced(moved(mean, own.tensor.device), float(told[0]), told[1:])

    async def _look(self, step: int, number: int) -> None:
        """Takes a mean of a step to come, where that is there."""
        if step == self._steps:
            return
        self._ask(step, number, deadline_s=0.0)
        if self._decoder is None:
            try:
                await self._answers[self._tag(step, number)]
            except DeadlinePassed:
                del self._answers[self._tag(step, number)]

    def _ask(self, step: int, number: int, deadline_s: float | None = None) -> None:
        tag = self._tag(step, number)
        if self._decoder is not None:
            self._answers[tag] = self._decoder.answer(tag)
            return
        expect = TensorSpec.of(self._flats[number]), TensorSpec((self._numbers,), torch.float64)
        self._answers[tag] = self._runtime.comm.recv(0, tag, expect, deadline_s=deadline_s)

    def _tag(self, step: int, number: int) -> Tag:
        return Tag(Purpose.STEP.at(step), number, ANSWER)
