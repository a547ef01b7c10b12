"""One product of the whole data: its tasks, answers, decoded result, and deadline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from farflung.coded.blocks import compute_piece_bounds
from farflung.coded.codes import Decoder, Plan
from farflung.coded.messages import MalformedMessage, Multiply
from farflung.coded.registry import Block, Kind, build_matrix
from farflung.types import Json, Payload

__all__ = ["Deadline", "Round"]

_DEADLINE_FACTOR = 3.0


@dataclass(slots=True)
class Round:
    """A product in progress, cut into pieces that are decoded separately.

    Args:
      number: Number of the round.
      kind: Kind of the blocks to multiply.
      unknowns: Partitions, or column blocks, whose products the answers combine.
      heights: Number of rows of each unknown's product.
      operand: (features, outputs) weights, or (samples, outputs) residuals.
      partitions: Partitions of the residuals in the operand; empty for weights.
      pieces: Number of pieces of the product.
      replayed_blocks: Blocks that decoded each piece, in a replay.
    """

    number: int
    kind: Kind
    unknowns: Sequence[int]
    heights: Sequence[int]
    operand: Tensor
    partitions: tuple[int, ...]
    pieces: int
    replayed_blocks: Sequence[frozenset[int]] | None = None
    requested_blocks: dict[int, set[int]] = field(default_factory=dict)
    """Blocks that each device was asked to multiply."""
    pending_pieces: Counter[int] = field(default_factory=Counter)
    """Number of pieces that each device has not answered."""
    responders: set[int] = field(default_factory=set)
    """Devices that have sent a piece since the last check."""
    num_late: int = 0
    """Number of answers for pieces that were already decoded."""
    has_overflowed: bool = False
    """True if a device has sent numbers that are not finite."""
    products: list[Tensor] = field(default_factory=list)
    """Product of each unknown, complete at the end of the round."""
    _blocks: dict[int, Block] = field(default_factory=dict)
    _decoders: list[Decoder[int]] = field(default_factory=list)
    _answers: list[dict[int, Tensor]] = field(default_factory=list)
    _plans: dict[int, Plan[int]] = field(default_factory=dict)
    """Plans of the decoded pieces."""

    def __post_init__(self) -> None:
        self.pieces = max(1, min(self.pieces, max(self.heights)))
        self._decoders = [Decoder[int](len(self.unknowns)) for _ in range(self.pieces)]
        self._answers = [{} for _ in range(self.pieces)]
        outputs = self.operand.shape[1]
        self.products = [torch.empty(height, outputs, dtype=torch.float64) for height in self.heights]

    # --- asking -----------------------------------------------------------------------------------------------------

    def build_tasks(self, blocks: Sequence[Block], first_open_round: int) -> dict[int, Multiply]:
        """Builds the tasks of devices, by rank, for blocks that were not requested yet.

        Each device begins with another piece. So all pieces are decoded at about the same time, and the answers
        of slow devices count.
        """
        new_blocks: dict[int, list[Block]] = {}
        for block in blocks:
            if block.holder is not None and block.number not in self.requested_blocks.get(block.holder, ()):
                new_blocks.setdefault(block.holder, []).append(block)
        tasks, devices = {}, len(self.requested_blocks.keys() | new_blocks.keys())
        for rank, own_blocks in sorted(new_blocks.items()):
            first = len(self.requested_blocks) * self.pieces // devices % self.pieces
            self.requested_blocks.setdefault(rank, set()).update(block.number for block in own_blocks)
            self.pending_pieces[rank] += self.pieces * len(own_blocks)
            self._blocks.update((block.number, block) for block in own_blocks)
            tasks[rank] = Multiply(
                self.number,
                first_open_round,
                tuple(block.number for block in own_blocks),
                self.partitions,
                max(self.heights),
                self.pieces,
                first,
                self.operand,
            )
        return tasks

    def drop_device(self, rank: int) -> None:
        """Removes the tasks of a lost device, as a later one may have its rank."""
        self.requested_blocks.pop(rank, None)
        self.pending_pieces.pop(rank, None)

    def pop_silent_devices(self) -> set[int]:
        """Returns the devices that owe pieces and have sent none since the last check."""
        ranks = {rank for rank, pieces in self.pending_pieces.items() if pieces > 0} - self.responders
        self.responders.clear()
        return ranks

    # --- answers ----------------------------------------------------------------------------------------------------

    def can_use_block(self, block: Block) -> bool:
        """Returns True if a block contains only unknowns of this round."""
        return set(self.unknowns).issuperset(block.coefficients)

    @property
    def is_complete(self) -> bool:
        """Returns True if all pieces are decoded."""
        return len(self._plans) == self.pieces

    def is_hopeless(self, ranks: Iterable[int]) -> bool:
        """Returns True if pieces are missing after an overflow, and none of these devices owes one."""
        return (
            self.has_overflowed
            and not self.is_complete
            and not any(self.pending_pieces[rank] > 0 for rank in ranks)
        )

    def list_decoding_blocks(self) -> Json:
        """Lists the blocks by which each piece was decoded, for a replay."""
        return [list[Json](self._plans[piece].indices) for piece in range(self.pieces)]

    def add_answer(self, rank: int, payload: Payload) -> None:
        """Adds an answer, and decodes its piece if possible.

        Raises:
          MalformedMessage: it does not belong to this round, or is not finite.
        """
        parts = list(payload.iter_tensors())
        if len(parts) != 2 or parts[0].dtype != torch.int64 or parts[0].shape != (2,):
            raise MalformedMessage("no answer")
        (number, piece), product = parts[0].tolist(), parts[1]
        if number not in self.requested_blocks.get(rank, ()) or not 0 <= piece < self.pieces:
            raise MalformedMessage("an answer that was not asked for")
        begin, end = compute_piece_bounds(max(self.heights), self.pieces, piece)
        block = self._blocks[number]
        heights = zip(self.unknowns, self.heights, strict=True)
        height = max(rows for unknown, rows in heights if unknown in block.coefficients)
        rows = max(0, min(end, height) - begin)
        if product.dtype != torch.float64 or product.shape != (rows, self.operand.shape[1]):
            raise MalformedMessage("no product of the size that was asked for")
        self.responders.add(rank)
        self.pending_pieces[rank] -= 1
        if not bool(torch.isfinite(product).all()):
            self.has_overflowed = True
            raise MalformedMessage("a product that is not finite")
        answers, decoder = self._answers[piece], self._decoders[piece]
        if piece in self._plans or number in answers:
            self.num_late += 1
            return
        if self.replayed_blocks is not None and number not in self.replayed_blocks[piece]:
            return
        answers[number] = pad(product, (0, 0, 0, end - begin - rows)) if rows < end - begin else product
        decoder.add(number, build_matrix([block], self.unknowns)[0])
        if (plan := decoder.find_plan()) is not None:
            for total, part in zip(self.products, plan.apply(answers), strict=True):
                if begin < len(total):
                    total[begin:end] = part[: len(total[begin:end])]
            self._plans[piece] = plan
            answers.clear()


class Deadline:
    r"""A timeout that is learned from earlier durations.

    .. math:: d = f \, (\mu + 4 \sigma)

    with the mean :math:`\mu` and the mean deviation :math:`\sigma` of the durations, smoothed as in TCP, by 1/8
    and 1/4. The factor :math:`f = 3` is a choice of this package.

    Args:
      initial_s: Timeout before the first duration, in seconds.
      min_s: Minimum timeout, in seconds.

    References: Jacobson & Karels 1988; RFC 6298.
    """

    def __init__(self, initial_s: float, min_s: float) -> None:
        self.timeout_s, self._min_s = initial_s, min_s
        self._mean: float | None = None
        self._deviation = 0.0

    def record_duration(self, duration_s: float) -> None:
        """Updates the timeout with a duration."""
        if self._mean is None:
            self._mean, self._deviation = duration_s, duration_s / 2
        else:
            self._deviation += (abs(duration_s - self._mean) - self._deviation) / 4
            self._mean += (duration_s - self._mean) / 8
        self.timeout_s = max(self._min_s, _DEADLINE_FACTOR * (self._mean + 4 * self._deviation))
