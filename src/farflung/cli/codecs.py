"""``farflung codecs``: the codecs there are, what each sends, and whether it wants error feedback."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import torch
import tyro
from torch import Tensor

from farflung.cli.tables import print_rows, print_table
from farflung.codecs import CODECS
from farflung.seeding import generator
from farflung.spec import options_of
from farflung.trees import only_seeds
from farflung.types import Codec, CodecState, Json, Placed, Seeds, TensorSpec

__all__ = ["Codecs"]

SHAPE = (1024, 1024)
"""Of the float32 tensor that each codec encodes: a layer of normally distributed gradients."""
SMALL = 0.02
"""An error below this share of the gradient's norm is lost in the noise of its batch."""


@dataclass(frozen=True)
class Codecs:
    """List the codecs: what each sends for a value, and whether it wants error feedback.

    Each encodes a million normally distributed values of float32 with the options that it has when none are given. Its
    error is the norm of what it leaves out over that of the gradient. error_feedback(CODEC) is for codecs that are
    biased and leave out much.
    """

    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print them as JSON."""

    def run(self) -> int:
        """Carries it out; returns the exit code."""
        if self.json:
            print_rows(_rows())
        else:
            columns = ["codec", "what", "bytes per value", "error", "error feedback", "options"]
            print_table(columns, (_cells(row) for row in _rows()))
        return 0


def _cells(row: dict[str, Json]) -> list[str]:
    nbytes, error = f"{row['bytes_per_value']:.3g}", f"{row['error']:.1%}"
    return [
        str(row["name"]),
        str(row["what"]),
        nbytes,
        error,
        str(row["error_feedback"]),
        str(row["options"]),
    ]


def _rows() -> Iterator[dict[str, Json]]:
    gradient = torch.randn(SHAPE, generator=generator(0, "codecs")).flatten()
    for name, make in CODECS.items():
        codec = make()
        tried = _tried(codec, gradient)
        yield {
            "name": name,
            "what": (inspect.getdoc(type(codec)) or "").partition("\n")[0].replace("``", ""),
            **tried,
            "unbiased": codec.unbiased,
            "options": options_of(make),
        }


def _tried(codec: Codec, gradient: Tensor) -> dict[str, Json]:
    """What it makes of a gradient."""
    spec = TensorSpec(tuple(gradient.shape), gradient.dtype, (Placed(SHAPE, 0),))
    payload, state = codec.encode(codec.init(spec, Seeds(0, 1)), gradient, step=0, count=1)
    found = codec.decode(state, payload, spec, step=0, count=1)
    error = float((found - gradient).norm() / gradient.norm())
    if not only_seeds(CodecState({}, state.local)):
        feedback = "keeps its own"
    elif codec.unbiased or error < SMALL:
        feedback = "needs none"
    else:
        feedback = "wants it"
    return {"bytes_per_value": payload.nbytes / gradient.numel(), "error": error, "error_feedback": feedback}
