"""Large files by name: models, updates, partial sums. One interface, over a local directory or an S3 bucket.

A blob appears under its key only when it is complete and durable. All calls block on a disk or a network, so call them
from worker threads. Keys are short paths: `models/<sha256>`, `updates/<assignment>/<offset>-<hex>`,
`partials/<round id>/<replica>`. A blob under `models/` is named by its content and never changes.

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

KEY_CHARS_MAX = 512
_SEGMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")  # no "..", nothing hidden, short enough for any file system
_MODELS = "models/"


class UnknownBlob(FileNotFoundError):
    """No blob has this key."""

    def __init__(self, key: str) -> None:
        super().__init__(f"no blob is stored under {key}")


class BlobsUnavailable(OSError):
    """The store is unusable, now or with these settings. One sentence says what to check."""


@dataclass(frozen=True, slots=True)
class Blob:
    """A stored file. `sha256`: hex."""

    sha256: str
    size_bytes: int


class BlobStore(Protocol):
    """A store of blobs. Raises `ValueError` for an invalid key, and the module's errors."""

    def prepare(self) -> None:
        """Check that it can be written and read, and remove what a crash left behind."""
        ...

    def put(self, path: Path, key: str) -> None:
        """Store a scratch file durably, and replace an earlier blob. The store may move the file."""
        ...

    def open(self, key: str, offset: int = 0, length: int | None = None) -> AbstractContextManager[RawIOBase]:
        """Read at most `length` bytes from `offset` on. Only a few megabytes are in memory at a time."""
        ...

    def size(self, key: str) -> int | None:
        """Bytes of a blob, None if there is none."""
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Remove blobs; absent ones are ignored. A reader of a removed blob may get `UnknownBlob`."""
        ...

    def keys(self, prefix: str) -> Iterator[str]:
        """The keys below `prefix`, which is made of whole segments: `models`, `updates/demo.1.1.ward-7`."""
        ...

    def local(self, key: str) -> AbstractContextManager[Path]:
        """A model as a complete and verified local file, which stays for the length of the block."""
        ...

    def link(self, key: str, expires_s: float) -> str | None:
        """A URL from which anyone can read this blob until it expires; None if the coordinator must serve it."""
        ...

    def scratch(self) -> AbstractContextManager[Path]:
        """A path on a local disk for a new file, which is removed at the end of the block if it was not `put`."""
        ...


def is_model_key(key: str) -> bool:
    return key.startswith(_MODELS)


def model_key(sha256: str) -> str:
    """Where a model is stored."""
    require_sha256(sha256, "a model's name")
    return _MODELS + sha256


def model_sha256(key: str) -> str:
    """The hash that a model's key names. Raises `ValueError` for the key of anything else."""
    if not is_model_key(key):
        raise ValueError(
            f"{key!r} is not the key of a model: only models can be checked against the SHA-256 in their key"
        )
    require_sha256(sha256 := key.removeprefix(_MODELS), "a model's name")
    return sha256


def require_key(key: str) -> None:
    """Raise `ValueError` unless `key` is valid as a path in a directory, as a bucket's key and in a log line."""
    if len(key) > KEY_CHARS_MAX or not all(_SEGMENT.fullmatch(part) for part in key.split("/")):
        raise ValueError(f"not a blob's key: {key[:100]!r}")
