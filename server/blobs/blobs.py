"""Large files by name: models, updates, partial sums. One interface, over a local directory or an S3 bucket.

A blob appears under its key only when it is whole and durable. All calls block, for as long as a disk or a network
takes: call them from worker threads. Keys are short paths: `models/<sha256>`, `updates/<assignment>/<offset>-<hex>`,
`partials/<round id>/<replica>`. What stands under `models/` is named by its content and never changes.

```
OSError
├── UnknownBlob         nothing has this key (a FileNotFoundError)
└── BlobsUnavailable    the store cannot be reached, or refuses; says what to check
```
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path
from typing import Protocol

from umbel.aggregation.types import require_sha256
from umbel.server.settings import Settings

KEY_CHARS_MAX = 512
_SEGMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")  # no "..", nothing hidden, short enough for any file system
_MODELS = "models/"


class UnknownBlob(FileNotFoundError):
    """No blob has this key."""

    def __init__(self, key: str) -> None:
        super().__init__(f"no blob is stored under {key}")


class BlobsUnavailable(OSError):
    """The store cannot be used now, or with these settings. One sentence that says what to check."""


@dataclass(frozen=True, slots=True)
class Blob:
    """A stored file. `sha256`: hex."""

    sha256: str
    size_bytes: int


class BlobStore(Protocol):
    """What every store of blobs does. Raises `ValueError` for what is no key, and as the module says."""

    def prepare(self) -> None:
        """See that it can be written and read, and drop what a crash left behind."""
        ...

    def put(self, path: Path, key: str) -> None:
        """Store a scratch file, durably, in place of what was there. The file is the store's then: it may move."""
        ...

    def open(self, key: str, offset: int = 0, length: int | None = None) -> AbstractContextManager[RawIOBase]:
        """Read from `offset` on, at most `length` bytes, as they come: never more than a few megabytes in memory."""
        ...

    def size(self, key: str) -> int | None:
        """Bytes of a blob, None if there is none."""
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Remove blobs. One that is absent is fine; reading one that goes may fail with `UnknownBlob`."""
        ...

    def keys(self, prefix: str) -> Iterator[str]:
        """The keys below `prefix`, which is made of whole segments: `models`, `updates/demo.1.1.ward-7`."""
        ...

    def local(self, key: str) -> AbstractContextManager[Path]:
        """A model as a local file, whole and verified, to read at any place. It stays for the length of the block."""
        ...

    def link(self, key: str, expires_s: float) -> str | None:
        """A URL from which anyone can read this blob until it expires; None: the coordinator serves it itself."""
        ...

    def scratch(self) -> AbstractContextManager[Path]:
        """A path on a local disk for a file in the making; dropped at the end of the block if it was not `put`."""
        ...


def open_blobs(settings: Settings) -> BlobStore:
    """The store that the settings name. Nothing is touched before `prepare`. Raises `BlobsUnavailable`."""
    from umbel.server.blobs.local import LocalBlobs

    if (directory := settings.blob_directory) is not None:
        return LocalBlobs(directory)
    try:
        from umbel.server.blobs.files import Scratch
        from umbel.server.blobs.model_cache import ModelCache
        from umbel.server.blobs.s3 import Bucket, S3Blobs
    except ModuleNotFoundError as error:
        raise BlobsUnavailable(
            f"{error.name} is missing; in a clone of umbel: pip install -c constraints.txt '.[server,s3]'"
        ) from error
    cache = ModelCache(settings.data / "cache", settings.model_cache_bytes_max)
    return S3Blobs(Bucket(settings), Scratch(settings.data / "making"), cache)


def is_model_key(key: str) -> bool:
    return key.startswith(_MODELS)


def model_key(sha256: str) -> str:
    """Where a model is stored."""
    require_sha256(sha256, "a model's name")
    return _MODELS + sha256


def model_sha256(key: str) -> str:
    """The hash that a model's key names. Raises `ValueError` for the key of anything else."""
    if not is_model_key(key):
        raise ValueError(f"{key!r} is not a model's key: only what is named by its content can be verified")
    require_sha256(sha256 := key.removeprefix(_MODELS), "a model's name")
    return sha256


def require_key(key: str) -> None:
    """Raise `ValueError` unless `key` is a path that can stand in a directory, a bucket and a log line as it is."""
    if len(key) > KEY_CHARS_MAX or not all(_SEGMENT.fullmatch(part) for part in key.split("/")):
        raise ValueError(f"not a blob's key: {key[:100]!r}")
