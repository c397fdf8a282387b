"""Updates of codecs 2 to 7, 9 and 11 read by `docs/reference/codecs.md` and `docs/reference/wire.md` alone.

It follows the documents alone, and is to be read beside them: where it and the coordinator differ, a document is wrong.
It asserts what a right update cannot break, and is no example of how to refuse a wrong one.
"""

import hashlib
import struct
from collections.abc import Callable

import numpy as np

from tests.vectors.documented_draws import Floats, chosen_places, factor, quantizer_points, signs
from tests.vectors.documented_payload import Integers, Payload, Tensor, Told, frame_content

_CHUNK_VALUES, _BUCKET_VALUES = 262_144, 4096


def read_integers(update: bytes, told: Told) -> Integers:
    """An update's integers on the grid: wire.md, "Updates" and codec 0; codecs.md, "Bytes"."""
    codec_id, read = CODECS[told.codec]
    digest = hashlib.sha256(told.layout_json.encode()).digest()
    header = (b"UMBL", 1, codec_id, 0, told.n_values, digest, len(update) - 64, 0)
    assert struct.unpack("<4sBBHQ32sQQ", update[:64]) == header
    payload = Payload(update[64:])
    places = [np.arange(one.offset, one.offset + one.n_values) for one in told.tensors if one.is_exact]
    exact = payload.floats(sum(map(len, places)))
    values = read(payload, told)
    payload.end()
    assert values.dtype == np.float32
    assert len(values) == told.n_values
    values[np.concatenate([np.empty(0, np.int64), *places])] = exact
    return np.round(values.astype(np.float64) / told.step).astype(np.int64)


def _eden(payload: Payload, told: Told) -> Floats:
    """codecs.md, "Bytes", the table's `eden`; "The rotation", undone."""
    bits: int = told.parameter("bits")
    side = max(side for side in (4, 8, 16, 32, 64) if side == 4 or 8 * side**2 <= told.n_values)
    n_blocks = max(1, -(-told.n_values // side**2))
    if n_blocks >= 256 and n_blocks % 2 == 0:
        n_blocks += 1
    n_rotated = n_blocks * side**2
    scales = payload.scales(n_blocks)
    levels = np.concatenate([payload.packed(n, bits) for n in _chunk_lengths(n_rotated)])
    values: Floats = np.repeat(scales, side**2) * quantizer_points(bits)[levels]
    stride = 1
    while stride < side**2:
        a, b = values.reshape(-1, 2, stride).swapaxes(0, 1)
        values = np.stack((a + b, a - b), axis=1).reshape(-1)
        stride *= 2
    values = values * np.float32(1 / side) * signs(told.own_key("eden"), n_rotated)
    return values.reshape(n_blocks, side, side).swapaxes(0, 1).reshape(-1)[: told.n_values]


def _sign(payload: Payload, told: Told) -> Floats:
    """codecs.md, "Bytes", the table's `sign`."""

    def chunk(n: int) -> Floats:
        above, below = payload.scales(_n_buckets(n)), payload.scales(_n_buckets(n))
        return np.where(payload.packed(n, 1) == 1, -_by_value(below, n), _by_value(above, n))

    return np.concatenate([chunk(n) for n in _chunk_lengths(told.n_values)])


def _ternary(payload: Payload, told: Told) -> Floats:
    """codecs.md, "Bytes", the table's `ternary`."""

    def chunk(n: int) -> Floats:
        scales, data = payload.scales(_n_buckets(n)), payload.integers(-(-n // 5))
        assert (data < 3**5).all()
        digits = (data[:, None] // 3 ** np.arange(5) % 3).reshape(-1)
        assert not digits[n:].any(), "0 after the last"
        values: Floats = np.array([0, 1, -1], np.float32)[digits[:n]] * _by_value(scales, n)
        return values

    return np.concatenate([chunk(n) for n in _chunk_lengths(told.n_values)])


def _qsgd(payload: Payload, told: Told) -> Floats:
    """codecs.md, "Bytes", the table's `qsgd`."""
    levels: int = told.parameter("levels")
    raw = Payload(frame_content(payload.rest()))

    def chunk(n: int) -> Floats:
        norms, z = raw.scales(_n_buckets(n)), raw.integers(n)
        if 2 * levels > 255:
            z = z + 256 * raw.integers(n)
        k = z >> 1 ^ -(z & 1)
        assert (abs(k) <= levels).all()
        return k.astype(np.float32) / np.float32(levels) * _by_value(norms, n)

    values = np.concatenate([chunk(n) for n in _chunk_lengths(told.n_values)])
    raw.end()
    return values


def _topk(payload: Payload, told: Told) -> Floats:
    """codecs.md, "Bytes", the table's `topk`."""
    form, count = struct.unpack("<BQ", payload.take(9))
    assert count <= max(1, round(told.parameter("share") * told.n_values))
    sent = payload.floats(count, told.parameter("precision"))
    if form == 0:
        places = np.cumsum(_seven_bits_a_byte(payload.rest()) + 1) - 1
    else:
        assert form == 1
        bits = np.unpackbits(np.frombuffer(payload.take(-(-told.n_values // 8)), np.uint8), bitorder="little")
        places = bits.nonzero()[0]
    assert len(places) == count
    return _scattered(sent, places, told)


def _mask(payload: Payload, told: Told) -> Floats:
    """codecs.md, "Bytes", the table's `mask`."""
    every, mode = told.parameter("every"), told.parameter("mode")
    places = chosen_places(told.shared_key("mask"), every, told.n_values)
    sent = payload.floats(len(places), told.parameter("precision"))
    return _scattered(sent * np.float32(every) if mode == "sketched" else sent, places, told)


def _lowrank(payload: Payload, told: Told) -> Floats:
    """codecs.md, "Bytes", the table's `lowrank`."""
    rank: int = told.parameter("rank")

    def tensor(one: Tensor) -> Floats:
        if len(one.shape) < 2 or one.shape[0] <= rank:
            return payload.floats(one.n_values)
        a = factor(told.shared_key("lowrank", one.name), one.shape[0], rank)
        b = payload.floats(rank * (one.n_values // one.shape[0])).reshape(rank, -1)
        total: Floats = a[:, :1] * b[0]
        for column in range(1, rank):
            total = total + a[:, column, None] * b[column]
        return total.reshape(-1)

    return np.concatenate([tensor(one) for one in told.tensors if one.n_values])


def _planes(payload: Payload, told: Told) -> Floats:
    """codecs.md, "Bytes", the table's `planes`."""
    raw, n_bytes = Payload(frame_content(payload.rest())), 4 if told.parameter("precision") == "float32" else 2

    def chunk(n: int) -> Floats:
        planes = np.frombuffer(raw.take(n_bytes * n), np.uint8).reshape(n_bytes, n)
        return Payload(planes.T.tobytes()).floats(n, told.parameter("precision"))

    values = np.concatenate([chunk(n) for n in _chunk_lengths(told.n_values)])
    raw.end()
    return values


CODECS: dict[str, tuple[int, Callable[[Payload, Told], Floats]]] = {
    "eden": (2, _eden),
    "sign": (3, _sign),
    "ternary": (4, _ternary),
    "qsgd": (5, _qsgd),
    "topk": (6, _topk),
    "mask": (7, _mask),
    "planes": (9, _planes),
    "lowrank": (11, _lowrank),
}


def _chunk_lengths(n: int) -> list[int]:
    return [min(_CHUNK_VALUES, n - first) for first in range(0, n, _CHUNK_VALUES)]


def _n_buckets(n: int) -> int:
    return -(-n // _BUCKET_VALUES)


def _by_value(scales: Floats, n: int) -> Floats:
    return np.repeat(scales, _BUCKET_VALUES)[:n]


def _scattered(sent: Floats, places: Integers, told: Told) -> Floats:
    values = np.zeros(told.n_values, np.float32)
    values[places] = sent
    return values


def _seven_bits_a_byte(data: bytes) -> Integers:
    """codecs.md, "Bytes", the table's `topk`: a gap for each byte whose upper bit is not set."""
    gaps, gap, shift = list[int](), 0, 0
    for byte in data:
        gap |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            assert byte or shift == 7, "no byte more than needed"
            gaps.append(gap)
            gap, shift = 0, 0
    assert shift == 0
    return np.array(gaps, np.int64)
