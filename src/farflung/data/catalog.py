"""Catalog of data sets: files, sizes, checksums, addresses and licences."""

from __future__ import annotations

from dataclasses import dataclass

from farflung.data.source import File, Location, Source, find
from farflung.errors import ConfigError, DataError, UnknownName
from farflung.spec import import_object

__all__ = ["CATALOG", "Entry", "list_entries", "lookup_source"]

_CIFAR = "https://www.cs.toronto.edu/~kriz/"
_FASHION_MNIST = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
_LIBSVM = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary"

CATALOG: dict[str, Source] = {
    item.name: item
    for item in (
        Source(
            name="a9a",
            title="32,561 + 16,281 people, 123 yes-or-no columns, income above or below $50,000",
            licence="CC BY 4.0",
            homepage=f"{_LIBSVM}.html#a9a",
            files=(
                File(
                    "a9a",
                    url=f"{_LIBSVM}/a9a",
                    lines_sha256="4a64288fba73c4362cf066e219c35663b450f1658867b7ed7bcc1f6accfc4949",
                ),
                File(
                    "a9a.t",
                    url=f"{_LIBSVM}/a9a.t",
                    lines_sha256="506954ec230f3de29ee7ba703521446f458e81ecc317a9661ddc10d908e9d6f0",
                ),
            ),
            layouts=(("a9a.gz", "a9a.t.gz"), ("a9a.bz2", "a9a.t.bz2")),
            samples=(32_561, 16_281),
        ),
        Source(
            name="cifar-10",
            title="50,000 + 10,000 colour images 32x32, 10 classes",
            licence="no licence stated",
            homepage=f"{_CIFAR}cifar.html",
            files=(
                File(
                    "cifar-10-binary.tar.gz",
                    170052171,
                    f"{_CIFAR}cifar-10-binary.tar.gz",
                    md5="c32a1d4ab5d03f1284b67883e8d87530",
                ),
            ),
            layouts=(
                (
                    *(f"cifar-10-batches-bin/data_batch_{i}.bin" for i in range(1, 6)),
                    "cifar-10-batches-bin/test_batch.bin",
                ),
            ),
            samples=(50_000, 10_000),
        ),
        Source(
            name="cifar-100",
            title="50,000 + 10,000 colour images 32x32, 100 classes",
            licence="no licence stated",
            homepage=f"{_CIFAR}cifar.html",
            files=(
                File(
                    "cifar-100-binary.tar.gz",
                    168513733,
                    f"{_CIFAR}cifar-100-binary.tar.gz",
                    md5="03b5dce01913d631647c71ecec9e9cb8",
                ),
            ),
            layouts=(("cifar-100-binary/train.bin", "cifar-100-binary/test.bin"),),
            samples=(50_000, 10_000),
        ),
        Source(
            name="covtype",
            title="581,012 patches of forest, 54 columns, 7 kinds of trees",
            licence="CC BY 4.0",
            homepage="https://archive.ics.uci.edu/dataset/31/covertype",
            files=(
                File(
                    "covtype.data.gz",
                    11240707,
                    "https://archive.ics.uci.edu/ml/machine-learning-databases/covtype/covtype.data.gz",
                    sha256="614360d0257557dd1792834a85a1cdebfadc3c4f30b011d56afee7ffb5b15771",
                ),
            ),
            layouts=(("covtype.csv.gz",),),
            samples=(464_810, 116_202),
        ),
        Source(
            name="fashion-mnist",
            title="60,000 + 10,000 grey images 28x28, 10 kinds of clothing",
            licence="MIT, Zalando SE",
            homepage="https://github.com/zalandoresearch/fashion-mnist",
            files=(
                File(
                    "train-images-idx3-ubyte.gz",
                    26421880,
                    _FASHION_MNIST + "train-images-idx3-ubyte.gz",
                    md5="8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                ),
                File(
                    "train-labels-idx1-ubyte.gz",
                    29515,
                    _FASHION_MNIST + "train-labels-idx1-ubyte.gz",
                    md5="25c81989df183df01b3e8a0aad5dffbe",
                ),
                File(
                    "t10k-images-idx3-ubyte.gz",
                    4422102,
                    _FASHION_MNIST + "t10k-images-idx3-ubyte.gz",
                    md5="bef4ecab320f06d8554ea6380940ec79",
                ),
                File(
                    "t10k-labels-idx1-ubyte.gz",
                    5148,
                    _FASHION_MNIST + "t10k-labels-idx1-ubyte.gz",
                    md5="bb300cfdad3c16e7a12a480ee83cd310",
                ),
            ),
            has_subset=True,
            samples=(60_000, 10_000),
        ),
        Source(
            name="tinyshakespeare",
            title="1,115,394 characters of plays, 65 symbols",
            licence="public domain",
            homepage="https://github.com/karpathy/char-rnn",
            files=(
                File(
                    "input.txt",
                    1115394,
                    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
                    sha256="86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
                ),
            ),
        ),
    )
}
"""Sources of all data sets by name."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Row of the list of data sets.

    Args:
      source: Names, files, checksums, addresses and licence.
      location: Place of its files; ``None`` if it is absent.
      problem: Reason why its files cannot be used; empty if they can.
    """

    source: Source
    location: Location | None
    problem: str = ""

    @property
    def nbytes(self) -> int | None:
        """Bytes to download; ``None`` if a size is not published."""
        sizes = [file.nbytes for file in self.source.files]
        return None if None in sizes else sum(size for size in sizes if size is not None)


def lookup_source(name: str) -> Source:
    """Looks up a data set by name, or as ``module:name`` in a module that declares it.

    Raises:
      UnknownName: No data set has this name.
      ConfigError: The object in the module is no :class:`Source`.
    """
    if ":" in name:
        candidate = import_object("data set", name)
        if not isinstance(candidate, Source):
            raise ConfigError(f"data set {name!r} is {type(candidate).__name__}, not a farflung.data.Source")
        return candidate
    try:
        return CATALOG[name]
    except KeyError:
        raise UnknownName("data set", name, CATALOG) from None


def list_entries() -> list[Entry]:
    """Lists every data set with its current location, by name."""
    rows = []
    for item in CATALOG.values():
        try:
            rows.append(Entry(item, find(item)))
        except DataError as error:
            rows.append(Entry(item, None, str(error)))
    return sorted(rows, key=lambda row: row.source.name)
