"""The reducer: windows of sums that are watched, and of sums that are compressed by what was seen."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from farflung.codecs import QSGD
from farflung.codecs.base import floating
from farflung.codecs.blocks import working_dtype
from farflung.codecs.qsgd import quantization
from farflung.comm import Coding
from farflung.errors import ConfigError, Unsupported
from farflung.options import number_option, share_option, whole_option
from farflung.reducers.aggregation import Exchange
from farflung.reducers.base import check_rounds, method_of, method_of_rounds, numerator, reduced, side_of
from farflung.reducers.gradiveq import window
from farflung.reducers.gradiveq.layout import Fit, Layout, fingerprint, groups
from farflung.reducers.gradiveq.segments import Coder, ring
from farflung.reducers.gradiveq.window import SharedBases
from farflung.types import (
    Channel,
    CodecState,
    CodingCost,
    Contribution,
    Reduced,
    Seeds,
    State,
    StateSlot,
    TensorSpec,
)

__all__ = ["GradiVeQ"]

_NO_VOTE: State = {"vote": 0.0, "start": None}
"""Of a replica at the start of a window."""
_NOTHING_LEFT: State = {"residual": {}}


@dataclass(frozen=True, slots=True)
class GradiVeQ:
    r"""Sends slices of convolutions as few coefficients, which are summed as they are.

    Gradients of the last :math:`L_t` exchanges tell in which directions U, and around which mean :math:`\mu`, a slice
    of the mean gradient varies. For the next :math:`L_c` exchanges only its coefficients travel:

    .. math::
        q_i = U^\top (w_i g_i - w_i \mu), \qquad \hat g = U \sum_i q_i \Big/ \sum_i w_i + \mu

    U holds the first principal components of the window, as many as explain :math:`1 - \lambda` of its variance: at
    most :math:`L_t - 1`, for the samples have no more directions. All ranks find U by themselves, from the same means;
    the first exchange of those to be compressed carries a hash of it instead, and where the hashes are unlike, the next
    one carries rank 0's. What no convolution is stays dense, in the same messages; matrices may be cut too. In the
    paper nothing of what is left out is kept.

    Over ``ring``, ranks encode and decode their segments while others are on their way (Algorithm 1); any other
    collective sums the encoded tensor as a whole. Each bucket has windows of its own.

    A replica sees how much of its own gradient compression leaves out, relative to its size, and votes in the next
    exchange for a new window if that has grown to more than ``drift`` times what it was at the start of this one.

    Two options lower what is left out, at the same bytes. With ``spread`` the samples of the next window do not come
    one after the other, but evenly among those that are compressed. With ``error_feedback`` a replica adds what it has
    left out to its next gradient; since that has no components on U, it waits for the next sample, which is sent
    whole. So the two belong together: then nothing waits for longer than :math:`L_c / L_t` exchanges.

    Args:
      slice_size: K, numbers in a slice, a multiple of a layer's filters times its depth that fills the layer.
      fit: ``"nearest"`` takes the size closest to ``slice_size`` that fits each layer; ``"exact"`` no other.
      matrices: whether weights of two dimensions are cut too, each slice some inputs with all their outputs.
      reuse: s, so many consecutive slices of a layer share the U of the first of them; ``None``: all.
      variance_left: :math:`\lambda`, share of the variance that U need not explain.
      warm_up: so many steps at the start are summed dense, and nothing is learned from them.
      sample_steps: :math:`L_t`.
      compress_steps: :math:`L_c`.
      spread: whether samples of all windows but the first are taken evenly among those that are compressed.
      error_feedback: whether what is left out is added to the next gradient.
      sample_bits: of QSGD on hops while gradients are sampled; ``None``: they are dense.
      drift: the bound for a vote.
      window_mb: the most that a window may take of memory on each replica, in MB; see :meth:`window_nbytes`.
      collective: a name in :data:`farflung.comm.COLLECTIVES`.

    Raises:
      ConfigError: an option out of its range.
      UnknownName: no such collective.
      Unsupported: collective ``native``, which cannot tell the rounds of several buckets apart.

    References: Yu et al. 2018, eq. (3) to (6), Algorithm 1, and the windows of section 4. The bound of the vote, the
    hash, ``fit``, ``matrices``, ``spread``, ``error_feedback`` and ``window_mb`` are
    our choice.
    """

    slice_size: int = 768
    fit: Fit = "nearest"
    matrices: bool = False
    reuse: int | None = None
    variance_left: float = 0.01
    warm_up: int = 2500
    sample_steps: int = 100
    compress_steps: int = 400
    spread: bool = False
    error_feedback: bool = False
    sample_bits: int | None = 4
    drift: float = 1.25
    window_mb: float = 1024.0
    collective: str = "direct"
    method: str = field(init=False, repr=False, compare=False)
    """What the costs of its arithmetic are called by."""

    def __post_init__(self) -> None:
        name = "gradiveq"
        whole_option(name, "slice_size", self.slice_size, 1)
        if self.fit not in ("nearest", "exact"):
            raise ConfigError(f"{name}: fit {self.fit!r} must be 'nearest' or 'exact'")
        if self.reuse is not None:
            whole_option(name, "reuse", self.reuse, 1)
        share_option(name, "variance_left", self.variance_left)
        whole_option(name, "warm_up", self.warm_up, 0)
        whole_option(name, "sample_steps", self.sample_steps, 2)
        whole_option(name, "compress_steps", self.compress_steps, 2)
        if self.spread and self.compress_steps < self.sample_steps:
            raise ConfigError(
                f"{name}: spread samples need compress_steps of at least sample_steps, and {self.compress_steps} is "
                f"less than {self.sample_steps}"
            )
        if self.sample_bits is not None:
            quantization(name, self.sample_bits, None)
        number_option(name, "drift", self.drift, 1)
        number_option(name, "window_mb", self.window_mb, 0)
        check_rounds(name, self.collective)
        object.__setattr__(self, "method", method_of_rounds(name, self))

    @property
    def _every(self) -> int:
        """One of so many exchanges is a sample, where samples are spread."""
        return 1 + self.compress_steps // self.sample_steps

    def exchanges_until(self, times: int) -> int:
        """Whole windows but for the last, of which the samples, the confirmation and one compressed exchange count."""
        whole = self.sample_steps + self.compress_steps
        if self.spread:
            whole = self.sample_steps * self._every + 1
        return (times - 1) * whole + self.sample_steps + 2

    def check(self, specs: Sequence[TensorSpec], steps: int | None = None) -> None:
        """Refuses a run that it can do nothing for, or whose windows take too much memory.

        Args:
          specs: of all that it will carry.
          steps: of the run, where that is known.

        Raises:
          ConfigError: a slice does not fit, a window takes more than ``window_mb``, or the run ends before the first
            window's samples are there.
          Unsupported: the model has nothing that it would cut.
        """
        if not any(self._layout(spec).layers for spec in specs):
            raise Unsupported(
                "reducer gradiveq compresses matrices and convolutions, and this model has neither: use reducer codec"
                if self.matrices
                else "reducer gradiveq compresses convolutions, and this model has none: try gradiveq(matrices=True), "
                "or powersgd"
            )
        needed = self.window_nbytes(specs) / 1e6
        if needed > self.window_mb:
            raise ConfigError(
                f"gradiveq: a window of {self.sample_steps} samples takes {needed:.0f} MB for this model, and "
                f"window_mb is {self.window_mb:g}: raise reuse or window_mb, or lower slice_size or sample_steps"
            )
        first = self.warm_up + self.exchanges_until(1)
        if steps is not None and steps < first:
            raise ConfigError(
                f"gradiveq: warm_up {self.warm_up} and sample_steps {self.sample_steps} leave nothing to compress in a "
                f"run of {steps} steps: lower them, or use {first} steps or more"
            )

    def window_nbytes(self, specs: Iterable[TensorSpec]) -> int:
        """The most that a replica holds at once for its windows.

        These are the :math:`L_t` samples of the first slices of all groups, at most as many numbers again for the
        bases, the sum of all slices with the mean, and what is left out.
        """
        found = 0
        for spec in specs:
            layout = self._layout(spec)
            sampled = sum(
                layout.layers[group.layer].slice_numel for group in groups(layout.layers, self.reuse)
            )
            numbers = 2 * self.sample_steps * sampled + (2 + self.error_feedback) * layout.sliced_numel
            found += numbers * working_dtype(spec.dtype).itemsize
        return found

    def init(self, spec: TensorSpec, seeds: Seeds) -> CodecState:
        """The first window, of which nothing is known yet.

        Raises:
          ConfigError: a slice does not fit.
          Unsupported: the tensor is not floating.
        """
        floating("gradiveq", spec)
        shared = window.begun(seeds.shared, self._layout(spec))
        return CodecState(shared, {"seed": seeds.own, **_NO_VOTE, **_NOTHING_LEFT})

    async def reduce(self, channel: Channel, slot: StateSlot, own: Contribution, *, step: int) -> Reduced:
        """One exchange, as the window's phase asks for it."""
        state = slot.state.shared
        if step < self.warm_up or not state["layout"]["layers"]:
            exchange = Exchange(channel, self.collective, side_of(own), step)
            return reduced(channel, *await exchange.sum(numerator(channel, own)))
        said = self._said(channel, slot.state, own.tensor.numel())
        side = torch.cat((side_of(own), torch.tensor(said, dtype=torch.float64)))
        exchange = Exchange(channel, self.collective, side, step)
        tensor = numerator(channel, own)
        residual = slot.state.local["residual"].get("all")
        slot.state = CodecState(state, {**slot.state.local, **_NOTHING_LEFT})
        if state["phase"] == "compress" and not self._takes_sample(state):
            return await self._compressed(exchange, state, tensor, residual, own)
        return await self._sampled(exchange, slot.state, tensor, residual, own)

    def _takes_sample(self, state: State) -> bool:
        """Whether an exchange is a sample among those that are compressed."""
        return self.spread and state["count"] % self._every == 0

    async def _sampled(
        self,
        exchange: Exchange,
        state: CodecState,
        tensor: Tensor,
        residual: Tensor | None,
        own: Contribution,
    ) -> Reduced:
        channel, phase = exchange.channel, state.shared["phase"]
        bases: SharedBases | None = None
        if phase == "share":
            most, numel = self.sample_steps - 1, tensor.numel()
            bases = SharedBases(channel, window.bases_of(state.shared), most, numel)
        if residual is not None:
            layout, left = Layout.of_state(state.shared["layout"]), residual.to(tensor.device)
            channel.compute(CodingCost("add", "", left.numel()), partial(layout.add, tensor, left))
        coding = self._coding(state, exchange.step)
        result, said = _parted(reduced(channel, *await exchange.sum(tensor, coding)), own)
        received = None if bases is None else await bases.finish()

        def follow(now: CodecState) -> CodecState:
            if phase == "confirm":
                return CodecState(window.confirmed(now.shared, said, channel.size), now.local)
            if phase == "share":
                assert received is not None
                return CodecState(window.shared_by(now.shared, received), now.local)
            shared, local = now.shared, now.local
            if phase == "compress":
                shared = window.compressed(shared, said[0], steps=math.inf, size=channel.size)
                local = {**local, "vote": 0.0}
            if shared["phase"] == phase:
                shared = self._learned(channel, shared, result.mean)
            return CodecState(shared, local if shared["phase"] == phase else {**local, **_NO_VOTE})

        return _learning(result, state.shared, follow, residual, None)

    def _learned(self, channel: Channel, now: State, mean: Tensor) -> State:
        def solve(numel: int, fn: Callable[[], Tensor]) -> Tensor:
            return channel.compute(CodingCost("pca", self.method, numel), fn)

        cost = CodingCost("learn", self.method, mean.numel())
        taken = channel.compute(cost, partial(window.taken, now, mean, self.reuse))
        if len(taken["rows"]) < self.sample_steps:
            return taken
        return window.solved(taken, self.reuse, self.variance_left, solve)

    def _said(self, channel: Channel, state: CodecState, numel: int) -> list[float]:
        """What this replica says beside its tensor in a phase; as many numbers on all."""
        if state.shared["phase"] == "confirm":
            cost = CodingCost("hash", self.method, numel)
            return channel.compute(cost, partial(fingerprint, window.bases_of(state.shared)))
        return [state.local["vote"]] if state.shared["phase"] == "compress" else []

    async def _compressed(
        self, exchange: Exchange, state: State, tensor: Tensor, residual: Tensor | None, own: Contribution
    ) -> Reduced:
        channel = exchange.channel
        layout, mean = Layout.of_state(state["layout"]), state["means"]["all"]
        left = self._left(mean, residual, tensor)
        coder = Coder(layout, mean, state["bases"], self.reuse, tensor, own.weight, left)
        if self.collective == "ring":
            side = await ring(exchange, coder, self.method, tensor.device)
        else:
            (whole,) = coder.cut(1)
            cost = partial(CodingCost, method=self.method, numel=tensor.numel())
            encoded = channel.compute(cost("encode"), partial(coder.encode, whole))
            summed, side = await exchange.sum(encoded)
            channel.compute(cost("decode"), partial(coder.decode, summed, whole, float(side[0])))
        result, (votes,) = _parted(Reduced(tensor, float(side[0]), side[1:]), own)

        steps = math.inf if self.spread else self.compress_steps

        def learn(now: CodecState) -> CodecState:
            shared = window.compressed(now.shared, votes, steps=steps, size=channel.size)
            if shared["phase"] != "compress":
                return CodecState(shared, {**now.local, **_NO_VOTE})
            return CodecState(shared, {**now.local, **self._voted(now.local["start"], coder.loss)})

        return _learning(result, state, learn, residual, left)

    def _left(self, mean: Tensor, residual: Tensor | None, tensor: Tensor) -> Tensor | None:
        """Where what is left out is written, with what has been left out before."""
        if not self.error_feedback:
            return None
        if residual is None:
            return torch.zeros_like(mean, device=tensor.device)
        return residual.to(tensor.device, copy=True)

    def _voted(self, start: float | None, loss: float | None) -> State:
        """The vote after an exchange, and the loss at the window's start, where they were ``start`` and ``loss``."""
        if loss is None:
            return {"vote": 0.0, "start": start}
        if not math.isfinite(loss):
            return {"vote": 1.0, "start": start}
        start = loss if start is None else start
        return {"vote": float(loss > self.drift * start), "start": start}

    def _layout(self, spec: TensorSpec) -> Layout:
        return Layout.of(spec, self.slice_size, self.fit, matrices=self.matrices)

    def _coding(self, state: CodecState, step: int) -> Coding | None:
        if self.sample_bits is None:
            return None
        codec = QSGD(bits=self.sample_bits)
        seeds = Seeds(state.shared["seed"], state.local["seed"])
        return Coding(codec, seeds, step, method=method_of(codec))


def _parted(result: Reduced, own: Contribution) -> tuple[Reduced, list[float]]:
    """The result without what was said beside the rider, and that."""
    rider, said = result.rider.split([len(own.rider), len(result.rider) - len(own.rider)])
    return Reduced(result.mean, result.weight, rider), said.tolist()


def _learning(
    result: Reduced,
    began: State,
    learn: Callable[[CodecState], CodecState],
    taken: Tensor | None,
    left: Tensor | None,
) -> Reduced:
    """The result of an exchange that teaches something as long as its window's phase lasts.

    Args:
      result: without that.
      began: the shared state in which the exchange began.
      learn: what it teaches; nothing if nobody had any weight in it.
      taken: the residual that it had added.
      left: what it has left out.
    """

    def learned(now: CodecState) -> CodecState:
        now = _with_left(now, left if result.weight else taken)
        lasts = all(now.shared[key] == began[key] for key in ("phase", "window"))
        return learn(now) if lasts and result.weight else now

    return Reduced(result.mean, result.weight, result.rider, learned)


def _with_left(now: CodecState, left: Tensor | None) -> CodecState:
    """With one more residual, or none."""
    if left is None:
        return now
    before = now.local["residual"].get("all")
    residual = left if before is None else before.to(left.device) + left
    return CodecState(now.shared, {**now.local, "residual": {"all": residual}})
