"""A stored update read back in pieces: checked once before it counts, folded once it does. Never whole in memory."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from umbel.aggregation.errors import LyingLength
from umbel.aggregation.grid import CHUNK_VALUES, Grid, check_values
from umbel.aggregation.layout import Layout
from umbel.aggregation.wire import HEADER_BYTES, Codec, expected_bytes, read_header
from umbel.server.files import file_sha256
from umbel.server.problems import Refused


def check_update(path: Path, sha256: str, layout: Layout, grid: Grid) -> None:
    """Hash the whole update, read its header, and check every value. Raises `Refused` or an `UpdateRefused`."""
    if path.stat().st_size != expected_bytes(Codec.FLOAT32, layout.n_values):
        raise LyingLength(f"the model's update has {expected_bytes(Codec.FLOAT32, layout.n_values)} bytes")
    if file_sha256(path) != sha256:
        raise Refused("wrong-digest", "the whole update does not hash to its Repr-Digest; upload it again")
    with path.open("rb") as file:
        read_header(file.read(HEADER_BYTES), layout)
    for _ in checked_values(path, grid):
        pass


def checked_values(path: Path, grid: Grid) -> Iterator[Tensor]:
    """The values of an update, in pieces. Raises an `UpdateRefused` at the first that does not stand on the grid.

    Folding checks again: the check is cheap, and a file that has changed since must fail the fold, not enter the sum.
    """
    first = 0
    for values in _read_values(path):
        check_values(values, grid, first)
        yield values
        first += values.numel()


def _read_values(path: Path) -> Iterator[Tensor]:
    """The float32 values of an update, in pieces. Each piece is overwritten by the next.

    Values are little-endian on the wire and, on every machine that torch runs on, in memory.
    """
    buffer = memoryview(bytearray(4 * CHUNK_VALUES))
    with path.open("rb", buffering=0) as file:  # plain reads: a mapped file would count as resident memory
        file.seek(HEADER_BYTES)
        while n_bytes := file.readinto(buffer):
            yield torch.frombuffer(buffer[:n_bytes], dtype=torch.float32)
