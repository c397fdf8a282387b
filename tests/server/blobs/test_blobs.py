"""What every store of blobs does, over a local directory and over an S3 server in a process of its own."""

import hashlib
import multiprocessing
import os
import random
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.servers.s3_server import S3Server, bucket_settings, s3_server
from umbel.server.blobs.blobs import BlobStore, UnknownBlob, model_key
from umbel.server.blobs.choose import open_blobs
from umbel.server.settings import Settings

UPDATE = "updates/demo.1.1.ward-7/0-00ff"


@pytest.fixture(scope="module")
def server() -> Generator[S3Server]:
    with s3_server() as running:
        yield running


@pytest.fixture(params=["local", "s3"])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> Settings:
    if request.param == "local":
        return Settings(data=tmp_path / "data")
    server: S3Server = request.getfixturevalue("server")
    return bucket_settings(server, tmp_path / "data")


@pytest.fixture
def blobs(settings: Settings) -> BlobStore:
    store = open_blobs(settings)
    store.prepare()
    return store


def put(blobs: BlobStore, key: str, data: bytes) -> None:
    with blobs.scratch() as path:
        path.write_bytes(data)
        blobs.put(path, key)


def put_model(blobs: BlobStore, data: bytes) -> str:
    key = model_key(hashlib.sha256(data).hexdigest())
    put(blobs, key, data)
    return key


def content(blobs: BlobStore, key: str, offset: int = 0, length: int | None = None) -> bytes:
    with blobs.open(key, offset, length) as file:
        return file.read() or b""


def test_what_was_put_is_read_whole_and_in_spans(blobs: BlobStore) -> None:
    put(blobs, UPDATE, b"0123456789")
    assert blobs.size(UPDATE) == 10
    assert content(blobs, UPDATE) == b"0123456789"
    assert content(blobs, UPDATE, 3) == b"3456789"
    assert content(blobs, UPDATE, 3, 4) == b"3456"
    assert content(blobs, UPDATE, 8, 100) == b"89"
    assert content(blobs, UPDATE, 10) == content(blobs, UPDATE, 99, 1) == content(blobs, UPDATE, 2, 0) == b""


def test_a_file_of_many_parts_comes_back_as_it_was(blobs: BlobStore) -> None:
    data = random.Random(1).randbytes((20 << 20) + 12345)
    put(blobs, UPDATE, data)
    assert content(blobs, UPDATE) == data
    assert content(blobs, UPDATE, (8 << 20) - 5, 10) == data[(8 << 20) - 5 :][:10]
    buffer, found = bytearray(300_001), hashlib.sha256()
    with blobs.open(UPDATE) as file:
        while n_read := file.readinto(buffer):
            found.update(buffer[:n_read])
    assert found.digest() == hashlib.sha256(data).digest()


def test_an_empty_file_is_a_blob(blobs: BlobStore) -> None:
    put(blobs, UPDATE, b"")
    assert blobs.size(UPDATE) == 0
    assert content(blobs, UPDATE) == b""


def test_a_missing_blob_is_told_with_its_key(blobs: BlobStore) -> None:
    missing = model_key("0" * 64)
    assert blobs.size(missing) is None
    with pytest.raises(UnknownBlob, match="000000"), blobs.open(missing):
        pass
    with pytest.raises(UnknownBlob, match="000000"), blobs.local(missing):
        pass
    with pytest.raises(UnknownBlob), blobs.open("updates"):
        pass


@pytest.mark.parametrize(
    "key", ["", "/a", "a/", "a//b", "..", "a/../b", "a/.b", "a b", "a\nb", "ä", "a/" + "b" * 201, "a/" * 300 + "a"]
)
def test_what_is_no_key_is_refused_everywhere(blobs: BlobStore, key: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x")
    with pytest.raises(ValueError, match="key"):
        blobs.put(file, key)
    with pytest.raises(ValueError, match="key"), blobs.open(key):
        pass
    with pytest.raises(ValueError, match="key"), blobs.local(key):
        pass
    for use in (blobs.size, lambda bad: blobs.delete([bad]), lambda bad: list(blobs.keys(bad))):
        with pytest.raises(ValueError, match="key"):
            use(key)


def test_keys_are_listed_below_whole_segments(blobs: BlobStore) -> None:
    names = {f"updates/demo.1.1.{who}/{offset}-aa" for who in ("a", "ab") for offset in (0, 5)}
    for name in names:
        put(blobs, name, b"x")
    put(blobs, "partials/1/r0", b"x")
    assert set(blobs.keys("updates")) == names
    assert set(blobs.keys("updates/demo.1.1.a")) == {name for name in names if ".a/" in name}
    assert list(blobs.keys("nothing")) == []


def test_deleting_twice_is_fine_and_leaves_the_others(blobs: BlobStore) -> None:
    put(blobs, UPDATE, b"one")
    put(blobs, UPDATE + "1", b"two")
    for _ in range(2):
        blobs.delete([UPDATE, "updates/never/was"])
    assert list(blobs.keys("updates")) == [UPDATE + "1"]
    blobs.delete([UPDATE + "1"])
    blobs.delete([])
    put(blobs, UPDATE, b"again")
    assert content(blobs, UPDATE) == b"again"


def test_the_same_again_is_the_same_and_another_replaces(blobs: BlobStore) -> None:
    key = put_model(blobs, b"model")
    assert put_model(blobs, b"model") == key
    assert list(blobs.keys("models")) == [key]
    put(blobs, UPDATE, b"old")
    put(blobs, UPDATE, b"new and longer")
    assert content(blobs, UPDATE) == b"new and longer"


def test_a_model_is_at_hand_as_a_file(blobs: BlobStore, settings: Settings) -> None:
    key = put_model(blobs, b"model")
    with blobs.local(key) as path:
        assert path.read_bytes() == b"model"
        assert path.is_relative_to(settings.data)
    other = open_blobs(settings)  # as after a restart
    other.prepare()
    with other.local(key) as path:
        assert path.read_bytes() == b"model"


def test_a_scratch_file_that_is_not_put_is_dropped(blobs: BlobStore, settings: Settings) -> None:
    with blobs.scratch() as path:
        path.write_bytes(b"x")
    assert not path.exists()
    assert list(settings.data.rglob("making/*")) == []
    assert open_below(settings.data) == [], "each upload would use up one of the files that a process may open"


def open_below(directory: Path) -> list[str]:
    """Paths in this directory that this process has open, even if they were deleted."""
    found = list[str]()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of the listing itself
            found.append(os.readlink(descriptor))
    return [name for name in found if Path(name).is_relative_to(directory)]


def _die_in_the_making(settings: Settings) -> None:
    with open_blobs(settings).scratch() as path:
        path.write_bytes(b"left")
        os._exit(0)


def test_a_start_sweeps_what_a_crash_left_and_nothing_that_is_being_made(blobs: BlobStore, settings: Settings) -> None:
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_die_in_the_making, args=(settings,))
    process.start()
    process.join()
    [left] = settings.data.rglob("making/*")
    with blobs.scratch() as path:
        path.write_bytes(b"mine")
        open_blobs(settings).prepare()
        assert path.read_bytes() == b"mine"
        assert not left.exists()


def test_files_are_for_their_owner_only(blobs: BlobStore, settings: Settings) -> None:
    put(blobs, UPDATE, b"x")
    put_model(blobs, b"model")
    with blobs.scratch() as path:
        path.touch()
        directories = [entry for entry in settings.data.rglob("*") if entry.is_dir()]
        assert directories
        assert [entry for entry in directories if entry.stat().st_mode & 0o077] == []
