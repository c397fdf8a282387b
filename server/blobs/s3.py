"""Blobs in an S3 bucket, or in any store that speaks S3's API (MinIO, Ceph, R2, ...).

Nothing is ever whole in memory: files go up in parts of 8 MiB, four at a time, and come down in ranges of 8 MiB, each
a request of its own that is tried again by itself. A part or a range is signed over its hash, so none is damaged on
the way. What a broken upload leaves behind is invisible; a rule of the bucket should remove it
(AbortIncompleteMultipartUpload).
"""

import hashlib
import os
import re
import secrets
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from io import RawIOBase
from pathlib import Path
from typing import TypeVar

import obstore
from obstore.exceptions import BaseError, GenericError, PreconditionError
from obstore.store import S3Store

from umbel.server.blobs.blobs import BlobsUnavailable, UnknownBlob, is_model_key, model_sha256, require_key
from umbel.server.blobs.files import Scratch
from umbel.server.blobs.model_cache import ModelCache
from umbel.server.settings import Settings

_PIECE_BYTES = 8 << 20  # of the 10,000 parts that S3 takes: files of up to 78 GiB
_PARTS_AT_ONCE = 4
_REQUEST_S = 60  # one try of one piece of 8 MiB: 140 KB/s will do
_CONNECT_S = 5
RETRY_S = 60  # no further try of a request after that
_LOST = "kind: Unknown"  # of obstore's HttpError
_LOST_MAX, _LOST_PAUSE_S = 10, 0.1  # more connections than are ever open at once
_NEEDED = "s3:PutObject, s3:GetObject, s3:DeleteObject and s3:ListBucket"
T = TypeVar("T")
_CAUSES = (
    ("169.254.", "there are no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment"),
    ("NoSuchBucket", "there is no such bucket; create it, or correct the setting `blobs`"),
    ("InvalidAccessKeyId", "the store does not know the access key; check AWS_ACCESS_KEY_ID and s3_endpoint"),
    ("SignatureDoesNotMatch", "the secret key does not fit the access key; check AWS_SECRET_ACCESS_KEY"),
    ("ExpiredToken", "the credentials have expired; renew them"),
    ("AccessDenied", f"access denied; check that the access key may {_NEEDED}"),
    ("403 Forbidden", f"access denied; check that the access key may {_NEEDED}"),
    ("301 Moved", "the bucket is in another region; set s3_region"),
    ("sending request", "the store does not answer; check s3_endpoint and the network"),
)


class Bucket:
    """A client of a bucket, or of a part of one. `signer` makes URLs for clients, which may use another endpoint.

    Each request has a time limit and is retried with back-off, so no call blocks for more than minutes.
    """

    def __init__(self, settings: Settings) -> None:
        match = re.fullmatch(r"s3://([^/]+)/?(.*)", settings.blobs or "")
        assert match is not None, "settings are checked when they are read"
        self.name = match[1]
        self._prefix = match[2].strip("/") or None
        self.store = self._store(settings, settings.s3_endpoint or _endpoint_in_environment())
        public = settings.s3_public_endpoint
        self.signer = self._store(settings, public) if public else self.store

    def _store(self, settings: Settings, endpoint: str | None) -> S3Store:
        if endpoint and endpoint.startswith("http://") and not settings.s3_allow_http:
            raise BlobsUnavailable(
                f"{endpoint} is not encrypted, so others on the network can read models and updates: use https://, "
                "or set s3_allow_http if nobody else uses this network"
            )
        options = {
            "endpoint": endpoint,
            "region": settings.s3_region,
            "access_key_id": settings.s3_access_key_id,
            "secret_access_key": settings.s3_secret_access_key and settings.s3_secret_access_key.get_secret_value(),
        }
        return S3Store(
            self.name,
            prefix=self._prefix,
            config={name: value for name, value in options.items() if value},  # type: ignore[arg-type]  # same keys
            client_options={
                "allow_http": settings.s3_allow_http,
                "connect_timeout": timedelta(seconds=_CONNECT_S),
                "timeout": timedelta(seconds=_REQUEST_S),
            },
            retry_config={
                "max_retries": 20,
                "retry_timeout": timedelta(seconds=RETRY_S),
                "backoff": {
                    "init_backoff": timedelta(milliseconds=100),
                    "max_backoff": timedelta(seconds=5),
                    "base": 2,
                },
            },
        )

    def again(self, request: Callable[[], T]) -> T:
        """Make an idempotent request, and repeat it if its connection was lost.

        obstore itself retries after most failures, but not if a pooled connection proves dead when it is used:
        object_store does not know hyper's error for that.
        """
        for _ in range(_LOST_MAX):
            try:
                return request()
            except GenericError as error:
                if _LOST not in str(error):
                    raise
            time.sleep(_LOST_PAUSE_S)
        return request()

    @contextmanager
    def reading(self, key: str) -> Generator[None]:
        """Raise `UnknownBlob` or `BlobsUnavailable` for what goes wrong in here."""
        try:
            yield
        except FileNotFoundError as error:
            raise UnknownBlob(key) from error
        except BaseError as error:
            raise BlobsUnavailable(f"cannot read from bucket {self.name}: {_cause(error)}") from error

    @contextmanager
    def writing(self) -> Generator[None]:
        """Raise `BlobsUnavailable` for what goes wrong in here."""
        try:
            yield
        except (FileNotFoundError, BaseError) as error:
            raise BlobsUnavailable(f"cannot write to bucket {self.name}: {_cause(error)}") from error

    def link(self, key: str, expires_s: float) -> str:
        with self.reading(key):
            return obstore.sign(self.signer, "GET", key, timedelta(seconds=expires_s))


def _endpoint_in_environment() -> str | None:
    """From the variables that Amazon's own tools read."""
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")


def _cause(error: Exception) -> str:
    """The cause and what to check; for unknown errors the first line of the library's text."""
    text = str(error)
    known = next((cause for sign, cause in _CAUSES if sign in text), None)
    return known or text.splitlines()[0][:300]


class S3Blobs:
    """A bucket of blobs, with scratch files and copies of the models in use on the local disk."""

    def __init__(self, bucket: Bucket, scratch: Scratch, cache: ModelCache) -> None:
        self._bucket = bucket
        self._store = bucket.store
        self._scratch = scratch
        self._cache = cache

    def prepare(self) -> None:
        self._scratch.prepare()
        self._cache.prepare()
        probe = f"probes/{secrets.token_hex(8)}"
        with self.scratch() as path:
            path.write_bytes(b"umbel")
            self.put(path, probe)
        with self.open(probe, 1, 3) as file:
            if file.read() != b"mbe":
                raise BlobsUnavailable(
                    f"bucket {self._bucket.name} sent wrong bytes when it was asked for a part of a file; umbel needs "
                    "a store that can send parts of files"
                )
        if probe not in self.keys("probes"):
            raise BlobsUnavailable(
                f"bucket {self._bucket.name} does not list a file that was just stored; umbel needs a store that lists "
                "new files at once"
            )
        self.delete([probe])

    def put(self, path: Path, key: str) -> None:
        require_key(key)
        with self._bucket.writing():
            self._bucket.again(
                lambda: obstore.put(self._store, key, path, chunk_size=_PIECE_BYTES, max_concurrency=_PARTS_AT_ONCE)
            )
        if is_model_key(key):
            self._cache.add(path, model_sha256(key))  # the process that made a model reads it next

    @contextmanager
    def open(self, key: str, offset: int = 0, length: int | None = None) -> Generator[RawIOBase]:
        require_key(key)
        with self._bucket.reading(key):
            found = self._bucket.again(lambda: obstore.head(self._store, key))
        stop = found["size"] if length is None else min(offset + length, found["size"])
        with _Ranges(self._bucket, key, found["e_tag"], offset, stop) as file:
            yield file

    def size(self, key: str) -> int | None:
        require_key(key)
        with self._bucket.reading(key):
            try:
                return self._bucket.again(lambda: obstore.head(self._store, key))["size"]
            except FileNotFoundError:
                return None

    def delete(self, keys: Iterable[str]) -> None:
        gone = list(keys)
        for key in gone:
            require_key(key)
            if is_model_key(key):
                self._cache.drop(model_sha256(key))
        with self._bucket.writing():
            self._bucket.again(lambda: obstore.delete(self._store, gone))

    def keys(self, prefix: str) -> Iterator[str]:
        require_key(prefix)
        with self._bucket.reading(prefix):
            for page in obstore.list(self._store, prefix + "/"):
                yield from (found["path"] for found in page)

    @contextmanager
    def local(self, key: str) -> Generator[Path]:
        sha256 = model_sha256(key)
        with self._cache.hold(sha256, lambda: self._fetch(key)) as path:
            yield path

    def link(self, key: str, expires_s: float) -> str | None:
        require_key(key)
        return self._bucket.link(key, expires_s)

    def scratch(self) -> AbstractContextManager[Path]:
        return self._scratch.path()

    def _fetch(self, key: str) -> None:
        sha256, digest = model_sha256(key), hashlib.sha256()
        with self.scratch() as path:
            with self.open(key) as source, path.open("xb") as target:
                while piece := source.read(_PIECE_BYTES):
                    digest.update(piece)
                    target.write(piece)
            if digest.hexdigest() != sha256:
                raise BlobsUnavailable(
                    f"{key} in bucket {self._bucket.name} is damaged: its content has the SHA-256 "
                    f"{digest.hexdigest()}; restore it from a backup"
                )
            self._cache.add(path, sha256)


class _Ranges(RawIOBase):
    """Bytes `place` to `stop` of the object version `e_tag`, fetched a range at a time."""

    def __init__(self, bucket: Bucket, key: str, e_tag: str | None, place: int, stop: int) -> None:
        self._bucket = bucket
        self._key = key
        self._e_tag = e_tag
        self._place = place
        self._stop = stop
        self._piece = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "bytearray | memoryview", /) -> int:  # type: ignore[override]  # what we hand in
        if not self._piece and self._place < self._stop:
            self._piece = self._next_piece()
            self._place += len(self._piece)
        n_bytes = min(len(buffer), len(self._piece))
        buffer[:n_bytes] = self._piece[:n_bytes]
        self._piece = self._piece[n_bytes:]
        return n_bytes

    def _next_piece(self) -> memoryview:
        span = (self._place, min(self._place + _PIECE_BYTES, self._stop))
        with self._bucket.reading(self._key):
            try:
                piece = memoryview(
                    self._bucket.again(
                        lambda: obstore.get(
                            self._bucket.store, self._key, options={"range": span, "if_match": self._e_tag}
                        ).bytes()
                    )
                )
            except PreconditionError as error:
                raise BlobsUnavailable(f"{self._key} was replaced while it was read; read it again") from error
        if len(piece) != span[1] - span[0]:
            raise BlobsUnavailable(
                f"bucket {self._bucket.name} sent {len(piece)} bytes of {self._key}, but was asked for the "
                f"{span[1] - span[0]} bytes from byte {span[0]} on"
            )
        return piece
