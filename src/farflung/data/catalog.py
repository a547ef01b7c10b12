"""All data sets farflung can read: files, sizes, checksums, addresses, licences, and what is at hand."""

from __future__ import annotations

from dataclasses import dataclass

from farflung.data import (
    a9a,
    ag_news,
    aid,
    cifar,
    covtype,
    fashion_mnist,
    newsgroups,
    shakespeare,
    speech_commands,
    svhn,
)
from farflung.data.source import Location, Source, find
from farflung.errors import DataError, UnknownName

__all__ = ["CATALOG", "Entry", "entries", "source_named"]

CATALOG: dict[str, Source] = {
    item.name: item
    for item in (
        a9a.SOURCE,
        ag_news.SOURCE,
        aid.SOURCE,
        cifar.CIFAR10.source,
        cifar.CIFAR100.source,
        covtype.SOURCE,
        fashion_mnist.SOURCE,
        newsgroups.SOURCE,
        shakespeare.SOURCE,
        *speech_commands.SOURCES.values(),
        svhn.SOURCE,
    )
}
"""Every data set by name."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One row of the list of data sets.

    Args:
      source: names, files, checksums, addresses and licence.
      location: where it is; ``None`` when it is nowhere.
      trouble: why what lies there cannot be used; empty when nothing is wrong.
    """

    source: Source
    location: Location | None
    trouble: str = ""

    @property
    def nbytes(self) -> int | None:
        """Bytes to download; ``None`` when a size is not published."""
        sizes = [file.nbytes for file in self.source.files]
        return None if None in sizes else sum(size for size in sizes if size is not None)


def source_named(name: str) -> Source:
    """The data set called ``name``.

    Raises:
      UnknownName: there is none.
    """
    try:
        return CATALOG[name]
    except KeyError:
        raise UnknownName("data set", name, CATALOG) from None


def entries() -> list[Entry]:
    """Every data set with where it is now, by name."""
    rows = []
    for item in CATALOG.values():
        try:
            rows.append(Entry(item, find(item)))
        except DataError as error:
            rows.append(Entry(item, None, str(error)))
    return sorted(rows, key=lambda row: row.source.name)
