"""An IDX file is read as it is, and what is none is refused with a sentence."""

import gzip
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from umbel.sim.data.sets.mnist import Array, NotIdx, read_idx

TYPES = {"u1": 0x08, "i1": 0x09, "i2": 0x0B, "i4": 0x0C, "f4": 0x0D, "f8": 0x0E}
# The first image of two by three bytes, spelled out: type 08, two dimensions, 2, 3, the values.
SPELLED = bytes.fromhex("00 00 08 02  00 00 00 02  00 00 00 03  01 02 03 04 05 ff")


def idx_bytes(array: Array) -> bytes:
    """Such a file, from the format's description."""
    head = struct.pack(">HBB", 0, TYPES[array.dtype.str[1:]], array.ndim)
    return head + struct.pack(f">{array.ndim}I", *array.shape) + array.astype(array.dtype.newbyteorder(">")).tobytes()


arrays = st.sampled_from(sorted(TYPES)).flatmap(
    lambda name: st_numpy.arrays(np.dtype(name), st_numpy.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
)


@given(arrays, st.sampled_from([bytes, gzip.compress]))
def test_any_array_comes_back_gzipped_or_not(
    tmp_path_factory: pytest.TempPathFactory, array: Array, packed: Callable[[bytes], bytes]
) -> None:
    path = tmp_path_factory.mktemp("idx") / "values"
    path.write_bytes(packed(idx_bytes(array)))
    found = read_idx(path)
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert found.tobytes() == array.tobytes()
    assert found.flags.writeable


def test_a_file_spelled_out_by_hand(tmp_path: Path) -> None:
    (tmp_path / "values").write_bytes(SPELLED)
    assert read_idx(tmp_path / "values").tolist() == [[1, 2, 3], [4, 5, 255]]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "ends after 0 of 4"),
        (b"\x00\x00\x08", "ends after 3 of 4"),
        (b"PK\x03\x04" + SPELLED, "two zeros, a known type"),
        (b"\x00\x00\x0a" + SPELLED[3:], "two zeros, a known type"),
        (b"\x00\x00\x08\xff" + b"\x00\x00\x00\x01" * 255 + b"\x01", "a number of dimensions"),
        (SPELLED[:10], "ends after 2 of 4"),
        (SPELLED[:-1], "ends after 5 of 6"),
        (SPELLED + b"\x00", "more than the 6 bytes"),
        (b"\x00\x00\x08\x04" + b"\xff\xff\xff\xff" * 4, "are allowed"),
        (b"\x00\x00\x08\x01\x00\xff\xff\xff", "ends after 0 of 16777215"),
        (gzip.compress(SPELLED, mtime=0)[:-9], "is not an IDX file"),
        (gzip.compress(SPELLED, mtime=0)[:12] + b"\xff" * 20, "is not an IDX file"),
        (gzip.compress(SPELLED, mtime=0) + b"\xff" * 20, "is not an IDX file"),
    ],
)
def test_what_is_no_such_file_is_refused_with_its_name(tmp_path: Path, data: bytes, why: str) -> None:
    path = tmp_path / "labels.gz"
    path.write_bytes(data)
    with pytest.raises(NotIdx, match=why) as refused:
        read_idx(path)
    assert "labels.gz" in str(refused.value)


@given(st.binary(max_size=64))
def test_no_bytes_lead_to_another_error(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("idx") / "values"
    for written in (data, gzip.compress(data), b"\x1f\x8b" + data):
        path.write_bytes(written)
        with suppress(NotIdx):
            read_idx(path)
