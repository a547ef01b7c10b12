"""GradiVeQ reducer: sums are sampled in windows, then compressed by the bases found from the samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from farflung.codecs import QSGD
from farflung.codecs.base import check_floating
from farflung.codecs.qsgd import resolve_levels
from farflung.comm import Coding
from farflung.errors import ConfigError, Unsupported
from farflung.options import check_choice, check_coefficient, check_integer, check_number
from farflung.reducers.aggregation import CodecExchange
from farflung.reducers.base import (
    build_result,
    cast_mean,
    check_rounds,
    compute_mean,
    compute_numerator,
    format_codec,
    format_reducer,
    pack_metadata,
)
from farflung.reducers.gradiveq import window
from farflung.reducers.gradiveq.slices import Layout, SliceCoder, reduce_ring
from farflung.types import (
    Channel,
    CodecState,
    Contribution,
    Reducer,
    ReduceResult,
    Seeds,
    State,
    StateSlot,
    TensorSpec,
)

__all__ = ["GradiVeQ"]

_DEFAULT_RATIO = 32.0
"""Default of ``ratio``."""
_NO_VOTE: State = {"vote": 0.0, "start": None}
"""Local state at the start of a window."""
_NO_RESIDUAL: State = {"residual": {}}


@dataclass(frozen=True, slots=True)
class GradiVeQ(Reducer):
    r"""Reducer that sends slices of convolutions as few coefficients, which are summed without decoding.

    Directions U and mean :math:`\mu` are those of :math:`L_t` exchanges; the next :math:`L_c` send only coefficients:

    .. math:: q_i = U^\top (w_i g_i - w_i \mu), \qquad \hat g = U \sum_i q_i \Big/ \sum_i w_i + \mu

    Args:
      slice_size: K, size of a slice; each layer is cut into the number of slices that comes closest.
      matrices: If True, cut weights of two dimensions too.
      ratio: r, size of a slice over the number of its coefficients; 32 if ``variance_left`` is not set either.
      variance_left: :math:`\lambda`, share of the variance that U need not explain, in place of ``ratio``.
      warm_up: Number of steps at the start that are summed dense and not sampled.
      sample_steps: :math:`L_t`.
      compress_steps: :math:`L_c`.
      windows: ``"spread"``: samples alternate with compressed exchanges, with error feedback; ``"paper"``: neither.
      sample_bits: Bits of QSGD on hops for sampled gradients; None sends them dense.
      drift: Growth of the share left out at which a replica votes for a new window.
      collective: Name in :data:`farflung.comm.COLLECTIVES`.

    Raises:
      ConfigError: An option is out of range, or ``ratio`` and ``variance_left`` are both set.
      UnknownName: There is no such collective.
      Unsupported: Collective ``native``, which cannot tell the rounds of several buckets apart.

    References: Yu et al. 2018, eq. (3) to (6), Alg. 1; spread windows, ``ratio``, ``matrices``, votes are our choice.
    """

    compresses_matrices: ClassVar[bool] = True

    slice_size: int = 512
    matrices: bool = False
    ratio: float | None = None
    variance_left: float | None = None
    warm_up: int = 2500
    sample_steps: int = 100
    compress_steps: int = 400
    windows: Literal["spread", "paper"] = "spread"
    sample_bits: int | None = 4
    drift: float = 1.25
    collective: str = "direct"

    def __post_init__(self) -> None:
        name = "gradiveq"
        check_integer(name, "slice_size", self.slice_size, 1, 4096)
        if self.ratio is not None and self.variance_left is not None:
            raise ConfigError(f"{name}: give ratio or variance_left, not both")
        if self.ratio is not None:
            check_number(name, "ratio", self.ratio, 1)
        if self.variance_left is not None:
            check_coefficient(name, "variance_left", self.variance_left)
        check_integer(name, "warm_up", self.warm_up, 0)
        check_integer(name, "sample_steps", self.sample_steps, 2)
        check_integer(name, "compress_steps", self.compress_steps, 2)
        check_choice(name, "windows", self.windows, ("spread", "paper"))
        if self._is_spread and self.compress_steps < self.sample_steps:
            raise ConfigError(
                f"{name}: spread windows need compress_steps of at least sample_steps, and {self.compress_steps} is "
                f"less than {self.sample_steps}"
            )
        if self.sample_bits is not None:
            resolve_levels(name, self.sample_bits, None)
        check_number(name, "drift", self.drift, 1)
        check_rounds(name, self.collective)

    @property
    def method(self) -> str:
        """Name of the arithmetic for coding costs."""
        return format_reducer(self)

    @property
    def _is_spread(self) -> bool:
        return self.windows == "spread"

    @property
    def _sample_period(self) -> int:
        """Number of exchanges from one sample to the next in spread windows."""
        return 1 + self.compress_steps // self.sample_steps

    @property
    @override
    def warmup_steps(self) -> int:
        return self.warm_up

    @override
    def scale_warmup(self, share: float) -> GradiVeQ:
        return replace(self, warm_up=round(share * self.warm_up))

    @override
    def compute_num_exchanges(self, repeats: int) -> int:
        """Returns exchanges of ``times - 1`` windows, and of one until its first compressed exchange."""
        window_exchanges = self.sample_steps + self.compress_steps
        if self._is_spread:
            window_exchanges = self.sample_steps * self._sample_period + 1
        return (repeats - 1) * window_exchanges + self.sample_steps + 2

    @override
    def check(self, specs: Sequence[TensorSpec], steps: int | None = None) -> None:
        """Checks that the reducer can compress in this run.

        Args:
          specs: Specs of all buckets.
          steps: Number of steps of the run if known.

        Raises:
          ConfigError: The run ends before the samples of the first window are complete.
          Unsupported: The model has no parameter to cut.
        """
        if not any(self._build_layout(spec).layers for spec in specs):
            raise Unsupported(
                "reducer gradiveq compresses matrices and convolutions, and this model has neither: use reducer codec"
                if self.matrices
                else "reducer gradiveq compresses convolutions, and this model has none: try gradiveq(matrices=True), "
                "or powersgd"
            )
        first = self.warm_up + self.compute_num_exchanges(1)
        if steps is not None and steps < first:
            raise ConfigError(
                f"gradiveq: warm_up {self.warm_up} and sample_steps {self.sample_steps} leave nothing to compress in a "
                f"run of {steps} steps: lower them, or use {first} steps or more"
            )

    @override
    def init(self, spec: TensorSpec, seeds: Seeds) -> CodecState:
        """Returns the initial state of the first window.

        Raises:
          Unsupported: The tensor is not floating.
        """
        check_floating("gradiveq", spec)
        shared = window.init_window(seeds.shared, self._build_layout(spec))
        return CodecState(shared, {"seed": seeds.local, **_NO_VOTE, **_NO_RESIDUAL})

    @override
    def list_summed_nbytes(self, spec: TensorSpec, size: int) -> Sequence[int]:
        """Returns the bytes of a dense sample; the size of compressed gradients is not known in advance."""
        is_sampled = self.sample_bits is not None and self._build_layout(spec).layers
        return () if is_sampled else (spec.nbytes,)

    @override
    async def reduce(
        self, channel: Channel, slot: StateSlot, contribution: Contribution, *, step: int
    ) -> ReduceResult:
        state, local = slot.state.shared, slot.state.local
        if step < self.warm_up or not state["layout"]["layers"]:
            exchange = CodecExchange(
                channel, self.collective, pack_metadata(contribution), step, contribution.tensor.dtype
            )
            return build_result(
                channel,
                *await exchange.sum_dense(compute_numerator(channel, contribution)),
                contribution.tensor.dtype,
            )
        phase, method, numel = state["phase"], self.method, contribution.tensor.numel()
        numbers = [local["vote"]] if phase == "compress" else []
        if phase == "confirm":
            channel.charge("hash", numel, method)
            numbers = window.compute_fingerprint(window.list_bases(state))
        packed = torch.cat((pack_metadata(contribution), torch.tensor(numbers, dtype=torch.float64)))
        exchange = CodecExchange(channel, self.collective, packed, step, contribution.tensor.dtype)
        tensor, residual = compute_numerator(channel, contribution), local["residual"].get("all")
        slot.state = CodecState(state, {**local, **_NO_RESIDUAL})
        unsent = torch.zeros_like(tensor) if self._is_spread else None
        if residual is not None:
            residual = residual.to(tensor.device)
            channel.charge("add", numel)
            tensor.add_(residual)
        received, loss, num_accumulated = [], None, int(phase == "sample")
        if self._is_spread and phase == "compress" and state["count"] % self._sample_period == 0:
            num_accumulated = self._sample_period
        if phase == "compress" and not num_accumulated:
            coder = SliceCoder(
                Layout.from_state(state["layout"]),
                state["means"],
                state["bases"],
                tensor,
                contribution.weight,
                unsent,
            )
            mean = tensor
            if self.collective == "ring":
                packed = await reduce_ring(exchange, coder, method, tensor.device)
            else:
                (segment,) = coder.split(1)
                channel.charge("encode", numel, method)
                total, packed = await exchange.sum(coder.encode(segment))
                channel.charge("decode", numel, method)
                coder.decode(total, segment, float(packed[0]))
            if not self._is_spread or state["count"] % self._sample_period == 1:
                loss = coder.relative_error
        else:
            if self.sample_bits is None:
                total, packed = await exchange.sum_dense(tensor)
            else:
                codec, seeds = QSGD(bits=self.sample_bits), Seeds(state["seed"], local["seed"])
                coding = Coding(codec, seeds, step, unsent, format_codec(codec))
                total, packed = await exchange.sum(tensor, coding)
            mean = compute_mean(channel, total, packed)
            if phase == "share":
                received = await window.broadcast_bases(channel, window.list_bases(state), tensor.numel())
        weight, metadata, sums = packed.split([1, len(contribution.metadata), len(numbers)])

        def learn(current: CodecState) -> CodecState:
            """Updates the window if its phase is unchanged, and adds the residual."""
            is_valid = bool(weight and mean.isfinite().all())
            current = _with_residual(current, unsent if is_valid else residual)
            if not is_valid or any(current.shared[key] != state[key] for key in ("phase", "window")):
                return current
            shared, local = current.shared, current.local
            if phase == "confirm":
                is_alike = window.is_unanimous(sums.tolist(), channel.size)
                shared = {**shared, "phase": "compress" if is_alike else "share", "count": 1}
                local = {**local, **_NO_VOTE}
            elif phase == "share":
                shared = window.adopt_bases(shared, received)
            elif phase == "compress":
                steps = math.inf if self._is_spread else self.compress_steps
                shared = window.advance_window(shared, float(sums), steps=steps, size=channel.size)
                if loss is not None:
                    start = loss if local["start"] is None else local["start"]
                    local = {**local, "vote": float(not loss <= self.drift * start), "start": start}
            if shared["window"] == state["window"]:
                shared = self._update_window(channel, shared, mean, num_accumulated)
            return CodecState(shared, local)

        return ReduceResult(
            cast_mean(channel, mean, contribution.tensor.dtype), float(weight), metadata, learn
        )

    def _update_window(self, channel: Channel, state: State, mean: Tensor, num_accumulated: int) -> State:
        """Adds a mean to the window's statistics, and computes the bases once there are enough samples."""
        if not num_accumulated and not self._is_spread:
            return state
        channel.charge("learn" if num_accumulated else "total", mean.numel(), self.method)
        state = window.add_mean(state, mean, num_accumulated)
        if state["samples"] < self.sample_steps:
            return state

        ratio = _DEFAULT_RATIO if self.ratio is None and self.variance_left is None else self.ratio
        return window.solve_bases(
            state,
            ratio,
            self.variance_left or 0.0,
            lambda numel: channel.charge("pca", numel, self.method),
        )

    def _build_layout(self, spec: TensorSpec) -> Layout:
        return Layout.from_spec(spec, self.slice_size, matrices=self.matrices)


def _with_residual(state: CodecState, unsent: Tensor | None) -> CodecState:
    """Adds ``unsent`` to the residual of a state, unless it is None."""
    if unsent is None:
        return state
    previous = state.local["residual"].get("all")
    residual = unsent if previous is None else previous.to(unsent.device) + unsent
    return CodecState(state.shared, {**state.local, "residual": {"all": residual}})
