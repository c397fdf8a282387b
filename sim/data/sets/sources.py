"""Where data sets come from: the official addresses of their files, with lengths and SHA-256 digests."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

_ARCHIVE_BYTES_MAX = 8 << 20


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file by its name, and the only bytes that it may hold."""

    name: str
    n_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Archive:
    """A ZIP file at a source in which the files are. It may be packed anew: what counts is what is in it."""

    name: str
    bytes_max: int = _ARCHIVE_BYTES_MAX


@dataclass(frozen=True, slots=True)
class Source:
    """The files of one data set. `folder`: where they lie in the data folder; `address`: of where they are fetched,
    ending in a slash, or None where nobody offers them for good; `archive`: what they are packed in there.
    """

    title: str
    folder: str
    address: str | None
    files: tuple[RemoteFile, ...]
    archive: Archive | None = None


MNIST = Source(
    "MNIST",
    "mnist",
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    (
        RemoteFile(
            "train-images-idx3-ubyte.gz",
            9_912_422,
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        ),
        RemoteFile(
            "train-labels-idx1-ubyte.gz", 28_881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"
        ),
        RemoteFile(
            "t10k-images-idx3-ubyte.gz", 1_648_877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"
        ),
        RemoteFile(
            "t10k-labels-idx1-ubyte.gz", 4_542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"
        ),
    ),
)

FASHION_MNIST = Source(
    "Fashion-MNIST",
    "fashion_mnist",
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",  # the only one its authors name; digests guard it
    (
        RemoteFile(
            "train-images-idx3-ubyte.gz",
            26_421_880,
            "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        ),
        RemoteFile(
            "train-labels-idx1-ubyte.gz", 29_515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"
        ),
        RemoteFile(
            "t10k-images-idx3-ubyte.gz", 4_422_102, "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"
        ),
        RemoteFile(
            "t10k-labels-idx1-ubyte.gz", 5_148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"
        ),
    ),
)

HEART_DISEASE = Source(
    "UCI Heart Disease",
    "heart_disease",
    "https://archive.ics.uci.edu/static/public/45/",
    (
        RemoteFile(
            "processed.cleveland.data", 18_461, "a74b7efa387bc9d108d7d0115d831fe9b414b29ae7124f331b622b4efa0427c8"
        ),
        RemoteFile(
            "processed.hungarian.data", 10_263, "d1ad108f785768cd3d7e82dc522e6f5a61eea93cccfb3a46ee8076f73fc3d796"
        ),
        RemoteFile(
            "processed.switzerland.data", 4_109, "834a405ccf5b66ab4056bb77794adc8df0b7125186454c0a1d002d33c6c3b314"
        ),
        RemoteFile("processed.va.data", 6_737, "e7c93d8d0d2acdadfa4c5e8de768e2191e7f618b952e29623f1f0d5949ff6b8f"),
    ),
    Archive("heart+disease.zip"),
)

SHAKESPEARE = Source(
    "Shakespeare's plays",
    "shakespeare",
    None,
    (
        RemoteFile(
            "shakespeare_lines.tsv.gz", 2_695_953, "504e54195719aa24cb46b983efb535a63b406b1e1440d592a18ef91137dfb000"
        ),
    ),
)

SOURCES: Mapping[str, Source] = MappingProxyType(
    {"mnist": MNIST, "fashion-mnist": FASHION_MNIST, "heart-disease": HEART_DISEASE, "shakespeare": SHAKESPEARE}
)
