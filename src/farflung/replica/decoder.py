"""Gradient coding: the decoder, a role of rank 0, and what replicas reach it by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from farflung.comm import ExchangeChannel, Purpose
from farflung.comm.staging import moved
from farflung.errors import DeadlinePassed
from farflung.files import deciding
from farflung.gradient_coding import GradientCode
from farflung.replica.server import Inside
from farflung.replica.votes import asks_to_stop, decoded
from farflung.tasks import Pending, done
from farflung.types import (
    Channel,
    CodingCost,
    Contribution,
    Decision,
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
    """

    def __init__(
        self,
        runtime: Runtime,
        code: GradientCode,
        flats: Mapping[int, Tensor],
        numbers: int,
        begin: int,
        steps: int,
    ) -> None:
        self._runtime, self._code, self._flats, self._numbers = runtime, code, flats, numbers
        self._step = begin
        self._inside = Inside()
        self.channels: dict[Tag, ExchangeChannel] = {}
        """Of answers that count as no exchange's of rank 0 yet, by their tags."""
        runtime.launch(self._run(steps)).on_done(self._ended)

    def push(self, payload: Payload, tag: Tag) -> None:
        """A sum of rank 0's; dropped where its step is over."""
        if tag.exchange >= Purpose.STEP.at(self._step):
            self._inside.send(payload, tag)

    def answer(self, tag: Tag) -> Pending[Payload]:
        """A mean, for rank 0; to be asked for once."""
        return self._inside.recv(tag)

    async def _run(self, steps: int) -> None:
        comm = self._runtime.comm
        while self._step < steps:
            exchange = Purpose.STEP.at(self._step)
            parts = [self._runtime.launch(self._decode(number)) for number in self._flats]
            stops = [await part for part in parts]
            self._step += 1
            comm.forget(exchange)
            for number in self._flats:
                self._inside.forget(Tag(exchange, number, PUSH))
            if stops[0]:  # the first part's votes are those that count
                return

    async def _decode(self, number: int) -> bool:
        """Decodes one part of the step; returns whether a rank among the decoded ones was asked to stop."""
        own, flat = self._runtime.comm.rank, self._flats[number]
        channel = ExchangeChannel(self._runtime.comm, Purpose.STEP.at(self._step), number)
        expect = TensorSpec.of(flat), TensorSpec((self._numbers,), torch.float64)
        pushes = [
            self._inside.recv(channel.tag(PUSH)) if rank == own else channel.recv(rank, PUSH, expect)
            for rank in range(channel.size)
        ]
        chosen = await self._chosen(number, pushes)
        coefficients = self._code.decoding(chosen)
        mean, sides = torch.zeros_like(flat), []
        for rank, coefficient in zip(chosen, coefficients.tolist(), strict=True):
            coded, side = pushes[rank].result().tensors()
            share, tensor = coefficient / channel.size, moved(coded, flat.device)
            channel.compute(CodingCost("add", "", flat.numel()), partial(mean.add_, tensor, alpha=share))
            sides.append(side)
        rider = decoded([side[1:] for side in sides], coefficients)
        whole = all(float(side[0]) > 0 for side in sides)
        weight = torch.tensor([float(channel.size * whole)], dtype=torch.float64)
        answer = Payload((mean, torch.cat([weight, rider])))
        self.channels[channel.tag(ANSWER)] = channel
        for rank in range(channel.size):
            if rank != own:
                channel.send(answer, rank, ANSWER)
        self._inside.send(answer, channel.tag(ANSWER))
        return asks_to_stop(rider)

    async def _chosen(self, number: int, pushes: Sequence[Pending[Payload]]) -> list[int]:
        """Whose sums are decoded, by rank: the first that are enough, or those of the run that is replayed."""
        at = self._step * len(self._flats) + list(self._flats).index(number)
        told = self._runtime.decisions.replayed(DECODED, at, self._runtime.comm.rank)
        wanted = None if told is None else self._read(told)
        came: list[int] = []
        enough: Pending[list[int]] = Pending()

        def arrived(rank: int, push: Pending[Payload]) -> None:
            if push.error is not None:
                enough.fail(push.error)
                return
            came.append(rank)
            if len(came) == self._code.needed if wanted is None else set(wanted) <= set(came):
                enough.set(sorted(came) if wanted is None else wanted)

        for rank, push in enumerate(pushes):
            push.on_done(partial(arrived, rank))
        chosen = await enough
        self._runtime.decide_own(DECODED, at, lambda: [*chosen])
        return chosen

    def _read(self, told: Decision) -> list[int]:
        with deciding(told.name, told.step):
            ranks: Any = told.value
            known = range(self._code.size)
            if sorted(set(ranks)) != ranks or not set(ranks) <= {*known} or len(ranks) != self._code.needed:
                raise ValueError(f"{ranks!r} are not {self._code.needed} ranks")
        return [int(rank) for rank in ranks]

    def _ended(self, task: Pending[None]) -> None:
        """A task that fails ends the waits inside rank 0, which have no deadline of their own."""
        if task.error is not None:
            self._inside.end(task.error)


class ByDecoder:
    """A replica's exchanges with the decoder; see :class:`farflung.replica.in_flight.Carrier`.

    Args:
      runtime: the world.
      code: see :class:`Decoder`.
      flats: see :class:`Decoder`.
      rider: how many numbers ride beside a gradient.
      steps: see :class:`Decoder`.
    """

    def __init__(
        self, runtime: Runtime, code: GradientCode, flats: Mapping[int, Tensor], rider: int, steps: int
    ) -> None:
        self._runtime, self._code, self._flats = runtime, code, flats
        self._numbers, self._steps = 1 + rider, steps
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
            self._decoder = Decoder(self._runtime, self._code, self._flats, self._numbers, step, self._steps)

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
        if step != self._left_out:
            side = torch.cat([torch.tensor([own.weight], dtype=torch.float64), own.rider])
            payload = Payload((own.tensor, side))
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
