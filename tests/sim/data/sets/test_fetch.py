"""Files of data sets are fetched from a real server, believed by their digest alone, and never left half there."""

import hashlib
import io
import os
import zipfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tests.servers.real_data import real_files
from umbel.sim.data.data_set import DataError
from umbel.sim.data.sets.fetch import SOURCES, Archive, DataSource, RemoteFile, have

IMAGES, LABELS = b"\x1f\x8bimages" * 9000, b"labels"


def remote(name: str, data: bytes) -> RemoteFile:
    return RemoteFile(name, len(data), hashlib.sha256(data).hexdigest())


SOURCE = DataSource("Tiny", "tiny", None, (remote("images.gz", IMAGES), remote("labels.gz", LABELS)))
RIGHT = {"/t/images.gz": IMAGES, "/t/labels.gz": LABELS}


class Shelf(BaseHTTPRequestHandler):
    """Serves what `shelf` holds; a path in `cuts` breaks off in the middle."""

    def __init__(
        self, shelf: Mapping[str, bytes], cuts: frozenset[str], asked: list[str], *args: object, **kwargs: object
    ) -> None:
        self.shelf, self.cuts, self.asked = shelf, cuts, asked
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]  # the server's own arguments, passed on

    def do_GET(self) -> None:
        self.asked.append(self.path)
        if self.path.startswith("/elsewhere"):
            self.send_response(302)
            self.send_header("Location", self.path.removeprefix("/elsewhere"))
            self.end_headers()
            return
        if (data := self.shelf.get(self.path)) is None:
            self.send_error(404)
            return
        self.send_response(200)
        if self.path.endswith(".gz"):
            self.send_header("Content-Encoding", "gzip")  # as buckets say of files that are gzipped themselves
        if self.path in self.cuts:
            self.send_header("Content-Length", str(len(data)))
            data = data[: len(data) // 2]
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def served(shelf: Mapping[str, bytes], cuts: frozenset[str] = frozenset()) -> Generator[tuple[str, list[str]]]:
    """A server of these files: its address, and the paths that it has been asked for."""
    asked = list[str]()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Shelf, shelf, cuts, asked))
    server.daemon_threads = False  # closing waits for them, so that none outlives the test
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_missing_files_are_fetched_as_they_are_and_those_there_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "labels.gz").write_bytes(b"my own")
    with served(RIGHT) as (address, asked):
        place = have(replace(SOURCE, address=f"{address}/t/"), tmp_path)
    assert place == tmp_path / "tiny"
    assert (place / "images.gz").read_bytes() == IMAGES
    assert (place / "labels.gz").read_bytes() == b"my own"
    assert asked == ["/t/images.gz"]
    assert left_in(tmp_path) == ["images.gz", "labels.gz"]


def test_files_that_are_all_there_need_no_network(tmp_path: Path) -> None:
    with served(RIGHT) as (address, asked):
        source = replace(SOURCE, address=f"{address}/elsewhere/t/")
        for _ in range(2):
            have(source, tmp_path / "made" / "anew")
        assert asked == [f"{way}/t/{name}" for name in ("images.gz", "labels.gz") for way in ("/elsewhere", "")]
    have(source, tmp_path / "made" / "anew")  # the server is gone


@pytest.mark.parametrize(
    ("shelf", "why"),
    [
        ({**RIGHT, "/t/images.gz": IMAGES[:-1] + b"x"}, "SHA-256 differs"),
        ({**RIGHT, "/t/images.gz": IMAGES[:-1]}, "SHA-256 differs"),
        ({**RIGHT, "/t/images.gz": IMAGES * 20}, "is longer than 72000 bytes"),
        ({"/t/labels.gz": LABELS}, "answers with HTTP status 404"),
    ],
)
def test_what_is_something_else_is_not_kept_and_the_sentence_says_what_to_put_where(
    tmp_path: Path, shelf: Mapping[str, bytes], why: str
) -> None:
    with served(shelf) as (address, _), pytest.raises(DataError, match=why) as refused:
        have(replace(SOURCE, address=f"{address}/t/"), tmp_path)
    sentence = str(refused.value)
    assert f"{address}/t/images.gz" in sentence
    assert f"put into {tmp_path / 'tiny'}" in sentence
    assert all(file.name in sentence and file.sha256 in sentence for file in SOURCE.files)
    assert left_in(tmp_path) == []


def test_after_a_cut_the_next_try_takes_up_where_files_are_missing(tmp_path: Path) -> None:
    cut = served(RIGHT, frozenset({"/t/labels.gz"}))
    with cut as (address, _), pytest.raises(DataError, match="cannot be fetched: peer closed"):
        have(replace(SOURCE, address=f"{address}/t/"), tmp_path)
    assert left_in(tmp_path) == ["images.gz"]
    with served(RIGHT) as (address, asked):
        have(replace(SOURCE, address=f"{address}/t/"), tmp_path)
    assert asked == ["/t/labels.gz"]
    assert left_in(tmp_path) == ["images.gz", "labels.gz"]


def test_without_a_server_or_without_a_folder_the_sentence_says_what_to_do(tmp_path: Path) -> None:
    with served({}) as (address, _):
        pass
    with pytest.raises(DataError, match=r"cannot be fetched: .*put into .*images\.gz"):
        have(replace(SOURCE, address=f"{address}/t/"), tmp_path)
    with pytest.raises(DataError, match="--data DIR"):
        have(SOURCE, None)
    with pytest.raises(DataError, match=r"no source offers .*put into .*shakespeare_lines\.tsv\.gz "):
        have(SOURCES["shakespeare"], tmp_path)
    assert left_in(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_an_os_error(tmp_path: Path) -> None:
    (tmp_path / "tiny").write_bytes(b"a file where a folder should be")
    with served(RIGHT) as (address, _), pytest.raises(OSError, match="tiny"):
        have(replace(SOURCE, address=f"{address}/t/"), tmp_path)


def zipped(files: Mapping[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return packed.getvalue()


PACKED = replace(SOURCE, archive=Archive("all.zip", bytes_max=10_000))


def test_files_come_out_of_an_archive_wherever_they_lie_in_it(tmp_path: Path) -> None:
    files = {"readme": b"read me", "heart/images.gz": IMAGES, "labels.gz": LABELS}
    with served({"/t/all.zip": zipped(files)}) as (address, asked):
        place = have(replace(PACKED, address=f"{address}/t/"), tmp_path)
    assert [(place / name).read_bytes() for name in ("images.gz", "labels.gz")] == [IMAGES, LABELS]
    assert asked == ["/t/all.zip"]


@pytest.mark.parametrize(
    ("packed", "why"),
    [
        (zipped({"labels.gz": LABELS}), "does not contain images.gz"),
        (zipped({"images.gz": IMAGES + b"x", "labels.gz": LABELS}), "SHA-256 differs"),
        (zipped({"images.gz": bytes(1 << 20), "labels.gz": LABELS}), "SHA-256 differs"),
        (zipped({"images.gz": os.urandom(20_000)}), "longer than 10000 bytes"),
        (b"PK\x03\x04 and no more", "cannot be read as a ZIP file"),
        (zipped({"images.gz": IMAGES})[:-30], "cannot be read as a ZIP file"),
    ],
)
def test_an_archive_that_is_none_or_lacks_them_is_refused(tmp_path: Path, packed: bytes, why: str) -> None:
    with served({"/t/all.zip": packed}) as (address, _), pytest.raises(DataError, match=why):
        have(replace(PACKED, address=f"{address}/t/"), tmp_path)
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("source", SOURCES.values(), ids=list(SOURCES))
def test_the_digests_are_those_of_the_published_files(source: DataSource) -> None:
    folder = real_files(source) / source.folder
    for file in source.files:
        assert remote(file.name, (folder / file.name).read_bytes()) == file
