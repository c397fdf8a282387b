# mypy: ignore-errors
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# This is Triton's language, not Python, so Python's type checkers cannot check it.
"""The kernels for CUDA, in Triton: the same integers and floats as torch, to the last bit. `cuda.py` launches them.

One program makes a tile of 4,096 positions: the largest block of a rotation, or 32 groups of dither, 2 of signs and 8
of packed levels. It reads its rows, which lie far apart, once, and writes its result once; everything between stays on
the chip. Almost all tiles are whole; only the others are masked, value by value.

Why the bits agree: butterflies add in the order of strides 1, 2, 4, ..., here two at a time. All other float32
arithmetic is a product that is rounded once (y times the inverse step), and products with powers of two and signs,
which are exact: fusing one of those with an addition would change nothing. Adding 2^23 in float32 and subtracting it
rounds half to even. Philox is Triton's own.

The tests compare every kernel with torch in Triton's interpreter (`TRITON_INTERPRET=1`), and compile it for compute
capability 9.0: nothing is fused there, and no subnormal number flushed. On an H100 and an H200 too, every kernel gives
torch's bits (docs/decisions/0009-compiled-kernels.md has the times).
"""

import triton
import triton.language as tl

from umbel.aggregation.kernels.philox import Stream

_TILE = tl.constexpr(4096)
_LANES = tl.constexpr(16)
_SIGN_GROUPS = tl.constexpr(2)
_DITHER_GROUPS = tl.constexpr(32)
_PACK_GROUPS = tl.constexpr(8)
_ROWS = tl.constexpr(32)
_SIGNS = tl.constexpr(int(Stream.SIGNS))
_DITHER = tl.constexpr(int(Stream.DITHER))
_WHOLE_FROM = tl.constexpr(float(1 << 23))  # float32 has no fractions from here on
_FIXED_MAX = tl.constexpr(float((1 << 31) - (1 << 17)))
_UNIT = tl.constexpr(float(1 << 16))
# Triton must not compile another kernel for other values of these numbers.
_NUMBERS = [
    "n_values", "n_blocks", "first", "n_positions", "key_low", "key_high",
    "dither_low", "dither_high", "phi", "low", "high", "offset", "weight",
]  # fmt: skip


# --- the kernels ------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=_NUMBERS)
def rotate(out, values, n_values, n_blocks, first, n_positions, key_low, key_high, SIDE: tl.constexpr):
    _store(out, _rotated(values, n_values, n_blocks, _begin(first), key_low, key_high, SIDE), n_positions)


@triton.jit(do_not_specialize=_NUMBERS)
def unrotate(out, rotated, n_values, n_blocks, first, n_positions, key_low, key_high, SIDE: tl.constexpr):
    begin = _begin(first)
    n_here: tl.constexpr = _TILE // (SIDE * SIDE)
    mixed = _butterflies(_loaded(rotated, n_positions), SIDE) * (1.0 / SIDE)
    laid = tl.reshape(_with_signs(mixed, begin, key_low, key_high), (n_here, SIDE, SIDE))
    place = _coordinates(begin, n_blocks, SIDE)
    if _is_whole(n_positions) & _is_inside(begin, n_values, n_blocks, SIDE):
        tl.store(out + place, laid)
    else:
        block = _begin(0) + tl.arange(0, n_here)[:, None, None] * (SIDE * SIDE)
        tl.store(out + place, laid, mask=(block < n_positions) & (place < n_values))


@triton.jit(do_not_specialize=_NUMBERS)
def write_signs(out, first, n_values, key_low, key_high):
    _store(out, _with_signs(tl.full((_TILE,), 1.0, tl.float32), _begin(first), key_low, key_high), n_values)


@triton.jit(do_not_specialize=_NUMBERS)
def write_dither(out, first, n_values, key_low, key_high):
    _store(out, _dither(_begin(first), key_low, key_high), n_values)


@triton.jit(do_not_specialize=_NUMBERS)
def quantize(out, values, first, n_values, inverse_step, dither_low, dither_high, phi, low, high, offset):
    shared = _dither(_begin(first), dither_low, dither_high)
    levels = _levels(_loaded(values, n_values), shared, inverse_step, phi, low, high, offset)
    _store(out, levels.to(out.dtype.element_ty), n_values)


@triton.jit(do_not_specialize=_NUMBERS)
def pack(
    out, values, first, n_values,
    inverse_step, dither_low, dither_high, phi, low, high, offset, BITS: tl.constexpr,
):  # fmt: skip
    shared = _dither(_begin(first), dither_low, dither_high)
    levels = _levels(_loaded(values, n_values), shared, inverse_step, phi, low, high, offset)
    _store_packed(out, levels, n_values, BITS)


@triton.jit(do_not_specialize=_NUMBERS)
def rotate_and_pack(
    out, values, n_values, n_blocks, first, n_positions, key_low, key_high,
    inverse_step, dither_low, dither_high, phi, low, high, offset, SIDE: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    rotated = _rotated(values, n_values, n_blocks, _begin(first), key_low, key_high, SIDE)
    shared = _dither(_begin(first), dither_low, dither_high)
    _store_packed(out, _levels(rotated, shared, inverse_step, phi, low, high, offset), n_positions, BITS)


@triton.jit(do_not_specialize=_NUMBERS)
def fold(sums, words, n_values, weight, squares, greatest, BITS: tl.constexpr):
    levels = _unpacked(words, n_values, BITS)
    before = _loaded(sums, n_values)
    _store(sums, before + levels.to(before.dtype) * weight.to(before.dtype), n_values)
    tl.store(squares + tl.program_id(0), tl.sum(levels.to(tl.int64) * levels, axis=0))
    tl.store(greatest + tl.program_id(0), tl.max(tl.abs(levels), axis=0))


# --- their parts ------------------------------------------------------------------------------------------------------


@triton.jit
def _begin(first):
    """The first position of this program's tile, in a vector whose part begins at `first`."""
    return tl.cast(first, tl.int64) + tl.cast(tl.program_id(0), tl.int64) * _TILE


@triton.jit
def _is_whole(n_values):
    """Whether all of this program's tile has values, as almost every tile does, which then needs no masks."""
    return _begin(_TILE) <= n_values


@triton.jit
def _loaded(pointer, n_values):
    """This program's tile of a vector; zeros beyond its end."""
    index = _begin(0) + tl.arange(0, _TILE)
    if _is_whole(n_values):  # noqa: SIM108  # Triton's conditional expression would compute both
        tile = tl.load(pointer + index)
    else:
        tile = tl.load(pointer + index, mask=index < n_values, other=0)
    return tile


@triton.jit
def _store(pointer, tile, n_values):
    index = _begin(0) + tl.arange(0, _TILE)
    if _is_whole(n_values):
        tl.store(pointer + index, tile)
    else:
        tl.store(pointer + index, tile, mask=index < n_values)


@triton.jit
def _coordinates(begin, n_blocks, SIDE: tl.constexpr):
    """The coordinates of a tile's positions: int64, blocks x rows x columns. Undefined past the last block."""
    n_here: tl.constexpr = _TILE // (SIDE * SIDE)
    block = begin // (SIDE * SIDE) + tl.arange(0, n_here)[:, None, None]
    row = tl.arange(0, SIDE)[None, :, None].to(tl.int64)
    return (row * n_blocks + block) * SIDE + tl.arange(0, SIDE)[None, None, :]


@triton.jit
def _is_inside(begin, n_values, n_blocks, SIDE: tl.constexpr):
    """Whether every position of a whole tile has a coordinate; only the last rows are padded with zeros."""
    last_block = (begin + _TILE) // (SIDE * SIDE) - 1
    return ((SIDE - 1) * tl.cast(n_blocks, tl.int64) + last_block) * SIDE + SIDE <= n_values


@triton.jit
def _rotated(values, n_values, n_blocks, begin, key_low, key_high, SIDE: tl.constexpr):
    """A tile of the rotated vector: float32, 4,096. Undefined past the last block."""
    place = _coordinates(begin, n_blocks, SIDE)
    if _is_inside(begin, n_values, n_blocks, SIDE):
        laid = tl.load(values + place)
    else:
        laid = tl.load(values + place, mask=place < n_values, other=0.0)
    signed = _with_signs(tl.reshape(laid, (_TILE,)), begin, key_low, key_high)
    return _butterflies(signed, SIDE) * (1.0 / SIDE)


@triton.jit
def _butterflies(tile, SIDE: tl.constexpr):
    """Transform each block in the tile, two strides at a time."""
    size: tl.constexpr = SIDE * SIDE
    for level in tl.static_range(6):
        if (1 << 2 * level) < size:
            four = tl.reshape(tile, (_TILE >> 2 * level + 2, 2, 2, 1 << 2 * level))
            even, odd = tl.split(tl.permute(four, (0, 3, 1, 2)))
            sum_0, sum_1 = tl.split(even + odd)
            difference_0, difference_1 = tl.split(even - odd)
            sums = tl.join(sum_0 + sum_1, sum_0 - sum_1)
            differences = tl.join(difference_0 + difference_1, difference_0 - difference_1)
            tile = tl.reshape(tl.permute(tl.join(sums, differences), (0, 2, 3, 1)), (_TILE,))
    return tile


@triton.jit
def _words(first_block, N_BLOCKS: tl.constexpr, STREAM: tl.constexpr, key_low, key_high):
    """The words of consecutive Philox blocks: uint32, `N_BLOCKS` / 16 groups x 16 lanes x 4 words."""
    block = first_block + tl.arange(0, N_BLOCKS)
    low, high = (block & 0xFFFFFFFF).to(tl.uint32), (block >> 32).to(tl.uint32)
    key = tl.cast(key_high, tl.uint32).to(tl.uint64) << 32 | tl.cast(key_low, tl.uint32).to(tl.uint64)
    word_0, word_1, word_2, word_3 = tl.philox(key, low, high, tl.zeros_like(low) + STREAM, tl.zeros_like(low))
    words = tl.join(tl.join(word_0, word_2), tl.join(word_1, word_3))
    return tl.reshape(words, (N_BLOCKS // _LANES, _LANES, 4))


@triton.jit
def _with_signs(tile, begin, key_low, key_high):
    """A tile of float32 or float64 with random signs; philox.py assigns the bits."""
    words = _words(begin // 128, _SIGN_GROUPS * _LANES, _SIGNS, key_low, key_high)
    by_word = tl.expand_dims(tl.permute(words, (0, 2, 1)), 2)
    places = tl.arange(0, 32)[None, None, :, None].to(tl.uint32)
    turned = tl.reshape((by_word >> places) << 31, (_TILE,))
    if tile.dtype == tl.float64:
        return (tile.to(tl.uint64, bitcast=True) ^ (turned.to(tl.uint64) << 32)).to(tl.float64, bitcast=True)
    else:  # noqa: RET505 - a compiler that has taken the branch above still reads what follows it
        return (tile.to(tl.uint32, bitcast=True) ^ turned).to(tl.float32, bitcast=True)


@triton.jit
def _dither(begin, key_low, key_high):
    """The dither of a tile: int32, 0 to 65,535; philox.py assigns the halves of words."""
    words = _words(begin // 8, _DITHER_GROUPS * _LANES, _DITHER, key_low, key_high)
    halves = tl.permute(tl.join(words & 0xFFFF, words >> 16), (0, 2, 3, 1))
    return tl.reshape(halves, (_TILE,)).to(tl.int32)


@triton.jit
def _levels(values, shared, inverse_step, phi, low, high, offset):
    """quantize.py: int32."""
    scaled = values * inverse_step * _UNIT
    cut = tl.minimum(tl.maximum(scaled, -_FIXED_MAX), _FIXED_MAX)
    size = tl.abs(cut)
    rounded = tl.where(size < _WHOLE_FROM, (size + _WHOLE_FROM) - _WHOLE_FROM, size).to(tl.int32)
    fixed = tl.where(cut < 0.0, 0 - rounded, rounded)
    levels = (fixed + ((shared + phi) & 0xFFFF) + offset) >> 16
    return tl.minimum(tl.maximum(levels, low), high)


@triton.jit
def _store_packed(out, levels, n_values, BITS: tl.constexpr):
    """packing.py. Join neighbouring rows of a lane as long as two fit into a word; then add their parts of each word.

    The bits do not overlap, so the sum is right.
    """
    index = _begin(0) + tl.arange(0, _TILE)
    lowest = tl.where(index < n_values, levels & ((1 << BITS) - 1), 0).to(tl.uint32)
    rows = tl.permute(tl.reshape(lowest, (_PACK_GROUPS, _ROWS, _LANES)), (0, 2, 1))
    for level in tl.static_range(5):
        if BITS << level <= 16:
            even, odd = tl.split(tl.reshape(rows, (_PACK_GROUPS, _LANES, _ROWS >> level + 1, 2)))
            rows = even | odd << (BITS << level)
    n_left: tl.constexpr = rows.shape[2]
    width: tl.constexpr = BITS * _ROWS // n_left
    starts = (tl.arange(0, n_left) * width)[None, None, :]
    group = _begin(0) // 512 + tl.arange(0, _PACK_GROUPS)[:, None]
    lane = tl.arange(0, _LANES)[None, :]
    for word in tl.static_range(BITS):
        shift = starts - 32 * word
        here = tl.where((shift >= 0) & (shift < 32), rows << (shift & 31).to(tl.uint32), 0)
        spilt = tl.where((shift < 0) & (shift > -width), rows >> (-shift & 31).to(tl.uint32), 0)
        of_word = tl.sum(here | spilt, axis=2).to(tl.int32, bitcast=True)
        tl.store(out + (group * BITS + word) * _LANES + lane, of_word, mask=(group * 512 < n_values) & (lane >= 0))


@triton.jit
def _unpacked(words, n_values, BITS: tl.constexpr):
    """packing.py: int32, sign-extended; zeros beyond the end."""
    index = _begin(0) + tl.arange(0, _TILE)
    group, row, lane = index // 512, (index // _LANES) % _ROWS, index % _LANES
    shift = (row * BITS).to(tl.int32)
    place = words + (group * BITS + shift // 32) * _LANES + lane
    shift = shift % 32
    spills = shift + BITS > 32
    low = tl.load(place, mask=index < n_values, other=0).to(tl.uint32, bitcast=True) >> shift.to(tl.uint32)
    high = tl.load(place + _LANES, mask=(index < n_values) & spills, other=0).to(tl.uint32, bitcast=True)
    both = low | tl.where(spills, high << ((32 - shift) & 31).to(tl.uint32), 0)
    return (both << (32 - BITS)).to(tl.int32, bitcast=True) >> (32 - BITS)
