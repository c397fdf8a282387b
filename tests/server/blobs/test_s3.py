"""Blobs in a bucket when things go wrong: a server that dies and comes back, wrong keys, damaged and crowded copies."""

import hashlib
import random
import threading
import time
from collections.abc import Generator
from pathlib import Path

import httpx
import pytest
from obstore.exceptions import GenericError
from pydantic import SecretStr, ValidationError

from tests.servers.ports import own_port
from tests.servers.s3_server import ANSWER_S, SECRET_KEY, S3Server, Wire, bucket_settings, s3_server
from umbel.server.blobs import s3
from umbel.server.blobs.blobs import BlobStore, BlobsUnavailable, UnknownBlob, model_key
from umbel.server.blobs.choose import open_blobs
from umbel.server.settings import Settings

MIB = 1 << 20


@pytest.fixture(scope="module")
def server() -> Generator[S3Server]:
    with s3_server() as running:
        yield running


@pytest.fixture
def wire(server: S3Server) -> Generator[Wire]:
    wire = Wire(server.url)
    yield wire
    wire.close()


def opened(settings: Settings) -> BlobStore:
    blobs = open_blobs(settings)
    blobs.prepare()
    return blobs


def put(blobs: BlobStore, key: str, data: bytes) -> None:
    with blobs.scratch() as path:
        path.write_bytes(data)
        blobs.put(path, key)


def comes_back(wire: Wire, after_s: float) -> threading.Thread:
    """Brings the wire back some time after it went down."""

    def wait() -> None:
        while not wire.is_down:
            time.sleep(0.01)
        time.sleep(after_s)
        wire.come_back()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_a_server_that_dies_in_mid_put_and_comes_back_gets_the_file(
    server: S3Server, wire: Wire, tmp_path: Path
) -> None:
    blobs = opened(bucket_settings(server, tmp_path, s3_endpoint=wire.url))
    data = random.Random(1).randbytes(30 * MIB)
    wire.go_down_after(12 * MIB)
    waiting = comes_back(wire, after_s=1.0)
    put(blobs, "updates/a/0-0", data)
    waiting.join()
    with blobs.open("updates/a/0-0") as file:
        assert file.read() == data


def test_a_server_that_dies_in_mid_get_and_comes_back_is_read_to_the_end(
    server: S3Server, wire: Wire, tmp_path: Path
) -> None:
    blobs = opened(bucket_settings(server, tmp_path, s3_endpoint=wire.url))
    data = random.Random(1).randbytes(30 * MIB)
    put(blobs, "updates/a/0-0", data)
    wire.go_down_after(12 * MIB)
    waiting = comes_back(wire, after_s=1.0)
    with blobs.open("updates/a/0-0") as file:
        assert file.read() == data
    waiting.join()


@pytest.mark.parametrize(("text", "n_tries"), [("HttpError { kind: Unknown, source: Canceled }", 3), ("403", 1)])
def test_a_request_whose_connection_was_dead_is_made_again_and_no_other(
    server: S3Server, tmp_path: Path, text: str, n_tries: int
) -> None:
    tries: list[str] = []

    def request() -> int:
        tries.append(text)
        if len(tries) < 3:
            raise GenericError(text)
        return 5

    again = s3.Bucket(bucket_settings(server, tmp_path)).again
    if n_tries == 3:
        assert again(request) == 5
    else:
        with pytest.raises(GenericError, match="403"):
            again(request)
    assert len(tries) == n_tries


def test_a_server_that_stays_away_is_given_up_in_a_sentence_and_nothing_half_is_seen(
    server: S3Server, wire: Wire, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "RETRY_S", 2)
    blobs = opened(bucket_settings(server, tmp_path, s3_endpoint=wire.url))
    wire.go_down_after(12 * MIB)
    started = time.monotonic()
    with pytest.raises(
        BlobsUnavailable, match=r"cannot write to bucket umbel-\w+: the store does not answer; check s3_endp"
    ):
        put(blobs, "updates/a/0-0", bytes(30 * MIB))
    assert time.monotonic() - started < 20
    with pytest.raises(BlobsUnavailable, match="cannot read from bucket"):
        blobs.size("updates/a/0-0")
    wire.come_back()
    assert blobs.size("updates/a/0-0") is None
    put(blobs, "updates/a/0-0", b"again")
    assert blobs.size("updates/a/0-0") == 5


def test_a_server_that_was_killed_serves_again_when_it_is_started_again(tmp_path: Path) -> None:
    port = own_port()
    with s3_server(port) as first:
        settings = bucket_settings(first, tmp_path)
        blobs = opened(settings)
        put(blobs, "updates/a/0-0", b"x")
    with s3_server(port) as second:  # its memory is empty: the bucket is gone
        with pytest.raises(BlobsUnavailable, match="no such bucket; create it"):
            put(blobs, "updates/a/0-0", b"x")
        blobs = opened(bucket_settings(second, tmp_path))
        put(blobs, "updates/a/0-0", b"x")


def test_wrong_credentials_and_buckets_are_told_at_the_start(
    server: S3Server, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    good = bucket_settings(server, tmp_path)
    wrong = good.model_copy(update={"s3_access_key_id": "someone"})
    with pytest.raises(BlobsUnavailable, match="the store does not know the access key"):
        opened(wrong)
    absent = good.model_copy(update={"blobs": "s3://nobody-made-this"})
    with pytest.raises(BlobsUnavailable, match="cannot write to bucket nobody-made-this: there is no such bucket"):
        opened(absent)
    readable = good.model_copy(update={"s3_allow_http": False})
    with pytest.raises(BlobsUnavailable, match="is not encrypted"):
        open_blobs(readable)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    with pytest.raises(BlobsUnavailable, match="is not encrypted"):
        open_blobs(readable.model_copy(update={"s3_endpoint": None}))
    assert SECRET_KEY not in repr(good) + caplog.text


def test_endpoint_and_credentials_may_come_from_the_usual_environment(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "umbel-test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    nothing = {"s3_endpoint": None, "s3_access_key_id": None, "s3_secret_access_key": None}
    blobs = opened(bucket_settings(server, tmp_path, **nothing))
    put(blobs, "updates/a/0-0", b"x")
    assert blobs.size("updates/a/0-0") == 1


@pytest.mark.parametrize("blobs", ["s3://", "s3://UPPER", "gs://bucket", "s3://bucket/../x", "s3://bucket?x=1"])
def test_an_address_that_is_no_bucket_is_refused(blobs: str, tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="s3://bucket/prefix"):
        Settings(data=tmp_path, blobs=blobs, s3_secret_access_key=SecretStr("x"))


def test_a_link_can_be_read_by_anyone_until_it_expires(server: S3Server, tmp_path: Path) -> None:
    blobs = opened(bucket_settings(server, tmp_path))
    put(blobs, "updates/a/0-0", b"0123456789")
    link = blobs.link("updates/a/0-0", 60.0)
    assert link is not None
    assert httpx.get(link, headers={"Range": "bytes=3-"}, timeout=ANSWER_S).content == b"3456789"
    assert httpx.get(link.replace("0-0", "0-1"), timeout=ANSWER_S).status_code == 404
    short = blobs.link("updates/a/0-0", 1.0)
    assert short is not None
    while httpx.get(short, timeout=ANSWER_S).status_code == 200:
        time.sleep(0.2)
    assert httpx.get(short, timeout=ANSWER_S).status_code == 403
    assert SECRET_KEY not in link


def test_clients_may_know_the_bucket_by_another_name(server: S3Server, wire: Wire, tmp_path: Path) -> None:
    blobs = opened(bucket_settings(server, tmp_path, s3_public_endpoint=wire.url))
    put(blobs, "updates/a/0-0", b"x")
    link = blobs.link("updates/a/0-0", 60.0)
    assert link is not None
    assert link.startswith(wire.url)
    assert httpx.get(link, timeout=ANSWER_S).content == b"x"


def models(blobs: BlobStore, count: int) -> list[str]:
    made = [bytes([i]) * 1000 for i in range(count)]
    keys = [model_key(hashlib.sha256(data).hexdigest()) for data in made]
    for key, data in zip(keys, made, strict=True):
        put(blobs, key, data)
    return keys


def cached(data: Path) -> set[str]:
    return {f"models/{path.name}" for path in (data / "cache").iterdir()}


def test_copies_beyond_the_cap_go_the_least_recently_used_first_and_never_in_use(
    server: S3Server, tmp_path: Path
) -> None:
    blobs = opened(bucket_settings(server, tmp_path, model_cache_bytes_max=2500))
    keys = models(blobs, 4)
    assert cached(tmp_path) == set(keys[2:])
    with blobs.local(keys[0]) as held:
        for key in keys[1:]:
            with blobs.local(key) as path:
                assert len(path.read_bytes()) == 1000
        assert held.exists()
        assert cached(tmp_path) == {keys[0], keys[3]}
    blobs.delete([keys[0]])
    assert cached(tmp_path) == {keys[3]}
    with pytest.raises(UnknownBlob), blobs.local(keys[0]):
        pass


def test_a_damaged_copy_is_fetched_again_and_a_damaged_model_is_not_used(server: S3Server, tmp_path: Path) -> None:
    settings = bucket_settings(server, tmp_path)
    [key] = models(opened(settings), 1)
    copy = tmp_path / "cache" / key.removeprefix("models/")
    copy.write_bytes(b"torn by a power cut")
    with opened(settings).local(key) as path:
        assert path.read_bytes() == bytes(1000)
    copy.unlink()
    blobs = opened(settings)
    with blobs.scratch() as path:
        path.write_bytes(b"something else")
        blobs.put(path, "updates/x")
    link = f"{server.url}/{(settings.blobs or '')[5:]}/{key}"
    headers = {"Authorization": "AWS4-HMAC-SHA256 Credential=umbel-test/20260101/us-east-1/s3/aws4_request"}
    httpx.put(link, content=b"something else", headers=headers, timeout=ANSWER_S).raise_for_status()
    with pytest.raises(BlobsUnavailable, match="is damaged"), blobs.local(key):
        pass


def test_threads_that_want_the_same_model_fetch_it_once(server: S3Server, wire: Wire, tmp_path: Path) -> None:
    settings = bucket_settings(server, tmp_path / "a")
    data = random.Random(2).randbytes(10 * MIB)
    key = model_key(hashlib.sha256(data).hexdigest())
    put(opened(settings), key, data)
    blobs = opened(settings.model_copy(update={"data": tmp_path / "b", "s3_endpoint": wire.url}))
    wire.go_down_after(15 * MIB)  # enough for one
    found: list[bytes] = []

    def read() -> None:
        with blobs.local(key) as path:
            found.append(path.read_bytes())

    threads = [threading.Thread(target=read) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [data] * 5
    assert not wire.is_down
