"""An S3 bucket by way of obstore: from settings to a client, and from its errors to sentences that say what to check.

Each request is bounded in time and tried again with back-off, so no call here blocks for more than minutes.
"""

import os
import re
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import obstore
from obstore.exceptions import BaseError, GenericError
from obstore.store import S3Store

from umbel.server.blobs.blobs import BlobsUnavailable, UnknownBlob
from umbel.server.settings import Settings

_REQUEST_S = 60  # one try of one piece of 8 MiB: 140 KB/s will do
_CONNECT_S = 5
RETRY_S = 60  # no further try of a request after that
_LOST = "kind: Unknown"  # of obstore's HttpError
_LOST_MAX, _LOST_PAUSE_S = 10, 0.1  # more connections than are ever open at once
_NEEDED = "s3:PutObject, s3:GetObject, s3:DeleteObject and s3:ListBucket"
T = TypeVar("T")
_CAUSES = (
    ("169.254.", "there are no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment"),
    ("NoSuchBucket", "there is no such bucket; make it first, or correct the setting `blobs`"),
    ("InvalidAccessKeyId", "the access key is unknown there; check AWS_ACCESS_KEY_ID and s3_endpoint"),
    ("SignatureDoesNotMatch", "the secret key is not the access key's; check AWS_SECRET_ACCESS_KEY"),
    ("ExpiredToken", "the credentials have expired; renew them"),
    ("AccessDenied", f"access denied; check that the access key may {_NEEDED}"),
    ("403 Forbidden", f"access denied; check that the access key may {_NEEDED}"),
    ("301 Moved", "the bucket is in another region; set s3_region"),
    ("sending request", "there is no answer; check s3_endpoint and the network"),
)


class Bucket:
    """A bucket, or a part of one. `signer` makes URLs for clients, who may know the endpoint by another name."""

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
                f"{endpoint} is not encrypted: others on the way can read models and updates; use https://, "
                "or set s3_allow_http if this network is yours alone"
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
        """Make a request that may be made twice, and again when its connection was lost.

        obstore itself tries again after most failures, but not where a connection of its pool proves dead just as it is
        taken up: what hyper says then is of no kind that object_store knows.
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
    """The names that Amazon's own tools know."""
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")


def _cause(error: Exception) -> str:
    """What to check. The library's own text is long and tells of its innards: at most its first line is shown."""
    text = str(error)
    known = next((cause for sign, cause in _CAUSES if sign in text), None)
    return known or text.splitlines()[0][:300]
