"""Spoken words as pictures of sound."""

from __future__ import annotations

from functools import partial

from farflung.data import speech_commands
from farflung.data.speech_commands import SOURCES, WORDS, Version
from farflung.errors import ConfigError
from farflung.types import Workload
from farflung.workloads._classification import Classification, mercury_settings, settings
from farflung.workloads._plain import vgg as plain

__all__ = ["vgg", "vgg13"]


def vgg(data: Version = "nine") -> Workload:
    """Speech Commands with four convolutions and two dense layers.

    Accuracy on the nine words' 500 test clips, spoken by people not heard in training, with the defaults (600 steps
    of 32, seeds 0 and 1): 90.2 and 85.2 %. A linear model: 45.8 % after 2,000 steps. Versions 0.01 and 0.02 have not
    been measured.

    Args:
      data: ``nine`` words, or all of version ``v0.01`` or ``v0.02``.
    """
    _check(data)
    return Classification(
        name="speech-commands/vgg",
        network=partial(plain, (1, 64, 101), (16, None, 32, None, 64, None, 64, None), 64, WORDS[data]),
        load=partial(speech_commands.load, data),
        defaults=settings(batch_size=32, learning_rate=0.01, weight_decay=1e-4, steps=600),
    )


def vgg13(data: Version = "v0.02") -> Workload:
    """Speech Commands with VGG-13, 9.8 million parameters with all 35 words, as Mercury's paper has it.

    With batch norm, and one dense layer of 128 before the last, as in the released code. For two cores there is
    ``speech-commands/vgg``.

    Args:
      data: ``nine`` words, or all of version ``v0.01`` or ``v0.02``.
    """
    _check(data)
    return Classification(
        name="speech-commands/vgg13",
        network=partial(plain, (1, 64, 101), _VGG13, 128, WORDS[data], norm=True),
        load=partial(speech_commands.load, data),
        defaults=mercury_settings(batch_size=64),
    )


_VGG13 = (64, 64, None, 128, 128, None, 256, 256, None, 512, 512, None, 512, 512, None)


def _check(data: Version) -> None:
    if data not in SOURCES:
        raise ConfigError(f"data={data!r} is not one of {', '.join(SOURCES)}")
