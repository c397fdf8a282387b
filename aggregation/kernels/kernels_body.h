// The kernels, in terms of Floats, Ints, Words and Longs: PIECES of each make 16 lanes of 32 bits (Longs: of 64).
// Included once for each path, inside its namespace; see kernels.cpp.

enum { WIDTH = LANES / PIECES };

template <class V, class T>
INLINE V load(const T *from) {
    V x;
    memcpy(&x, from, sizeof x);
    return x;
}
template <class V, class T>
INLINE void store(T *to, V x) {
    memcpy(to, &x, sizeof x);
}

// --- Philox: philox.py -----------------------------------------------------------------------------------------------

// The four words of 16 consecutive blocks. Products of 32 by 32 bits need lanes of 64, so even and odd blocks go apart;
// what is above a word in its lane is never looked at.
INLINE void philox(uint64_t key, uint32_t stream, uint32_t last, uint64_t block, Words (&words)[4][PIECES]) {
    for (int piece = 0; piece < PIECES; piece++) {
        Longs c[2][4];
        for (int odd = 0; odd < 2; odd++) {
            const Longs number = load<Longs>(EVEN_AND_ODD[odd] + piece * WIDTH / 2) + block;
            c[odd][0] = number;
            c[odd][1] = number >> 32;
            c[odd][2] = Longs{} + stream;
            c[odd][3] = Longs{} + last;
        }
        uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
#pragma GCC unroll 10
        for (int round = 0; round < 10; round++) {
            for (int odd = 0; odd < 2; odd++) {
                const Longs p0 = product(c[odd][0], Longs{} + 0xD2511F53u), p1 = product(c[odd][2], Longs{} + 0xCD9E8D57u);
                c[odd][0] = (p1 >> 32) ^ c[odd][1] ^ (Longs{} + k0);
                c[odd][1] = p1;
                c[odd][2] = (p0 >> 32) ^ c[odd][3] ^ (Longs{} + k1);
                c[odd][3] = p0;
            }
            k0 += 0x9E3779B9u;
            k1 += 0xBB67AE85u;
        }
        for (int word = 0; word < 4; word++) words[word][piece] = interleaved(c[0][word], c[1][word]);
    }
}

// The 128 bits of 16 lanes, one for each vector of a group of signs.
struct SignBits {
    Words words[4][PIECES];
};

INLINE void sign_bits(uint64_t key, int64_t position, SignBits &bits) {
    philox(key, STREAM_SIGNS, 0, (uint64_t)(position / (SIGN_VECTORS * LANES)) * LANES, bits.words);
}

// x, or -x where the bit at `place` is 1.
INLINE Floats flipped(Floats x, Words word, int place) {
    return (Floats)((Words)x ^ ((word << (31 - place)) & (1u << 31)));
}

// --- rotation: rotation.py -------------------------------------------------------------------------------------------

// Butterflies between the first, second, fourth ... of N vectors.
template <int N>
INLINE void butterflies_of_vectors(Floats (&x)[N]) {
#pragma GCC unroll 4
    for (int stride = 1; stride < N; stride *= 2) {
#pragma GCC unroll 16
        for (int i = 0; i < N; i++) {
            if (i & stride) continue;
            const Floats a = x[i], b = x[i + stride];
            x[i] = a + b;
            x[i + stride] = a - b;
        }
    }
}

template <bool IS_STREAMED>
INLINE void put(float *to, Floats x) {
    if (IS_STREAMED) {
        stream(to, x);
    } else {
        store(to, x);
    }
}

// Is `out` so large that its lines should not be read, and displace others, before they are written whole?
INLINE bool is_for_streams(const float *out, int64_t count) {
    return PIECES <= 2 && count >= 1 << 20 && (uintptr_t)out % 64 == 0;
}

// RADIX values STRIDE apart, of all columns of a tile; `in` may be `out`.
template <int STRIDE, int RADIX, bool IS_STREAMED = false>
INLINE void columns(const float *in, float *out, float factor) {
    for (int base = 0; base < TILE; base += STRIDE * RADIX) {
        for (int column = base; column < base + STRIDE; column += WIDTH) {
            Floats x[RADIX];
#pragma GCC unroll 16
            for (int i = 0; i < RADIX; i++) x[i] = load<Floats>(in + column + i * STRIDE);
            butterflies_of_vectors(x);
#pragma GCC unroll 16
            for (int i = 0; i < RADIX; i++) put<IS_STREAMED>(out + column + i * STRIDE, x[i] * factor);
        }
    }
}

// The last six levels of a block of 64 x 64, strides 64 to 2048, and the factor. Those of strides 64 and 128 are done
// by `runs_of_block` where registers are many.
template <bool IS_STREAMED>
INLINE void last_levels(float *tile, float *out) {
    const float factor = 1.0f / SIDE;
    if (PIECES == 1) {
        columns<256, 16, IS_STREAMED>(tile, out, factor);
    } else {
        columns<64, 8>(tile, tile, 1.0f);
        columns<512, 8>(tile, IS_STREAMED ? tile : out, factor);
        for (int at = 0; IS_STREAMED && at < TILE; at += WIDTH) stream(out + at, load<Floats>(tile + at));
    }
}

// Runs of a block are far apart in memory, and no machine predicts where the next one is. So the next few are fetched
// into the first-level cache (few, because they share its sets). At the same time the runs of the blocks after them are
// fetched into the second-level cache, row by row, which is the fastest order to read memory.
enum { ROWS_AHEAD = 8, BLOCKS_AHEAD = 4 };

INLINE void fetch_ahead(const float *in, int64_t stride, int64_t block, int row) {
    const int64_t run = block % BLOCKS_AHEAD * SIDE + row;  // of those of the blocks that come next
    const int64_t ahead = BLOCKS_AHEAD - block % BLOCKS_AHEAD + run % BLOCKS_AHEAD;
    for (int i = 0; i < 4; i++) {
        prefetch_far(in + run / BLOCKS_AHEAD * stride + ahead * SIDE + i * LANES);
        prefetch(in + (row + ROWS_AHEAD) % SIDE * stride + (row + ROWS_AHEAD) / SIDE * SIDE + i * LANES);
    }
}

// The first levels of a block of 64 x 64 whose rows are `stride` apart: signs, and the butterflies inside each run of
// 64, or of 4 such runs.
template <bool IS_SIGNED>
INLINE void runs_of_block(const float *in, int64_t stride, uint64_t key, int64_t position, float *tile) {
    enum { RUNS = PIECES == 1 ? 4 : 1, VECTORS = 4 * RUNS };
    SignBits bits;
    for (int row = 0; row < SIDE; row += RUNS) {
        if (IS_SIGNED && row % 32 == 0) sign_bits(key, position + row * SIDE, bits);
        Floats x[VECTORS][PIECES];
        const int first = row * 4 % SIGN_VECTORS;  // this run's place among the vectors of a group of signs
#pragma GCC unroll 16
        for (int i = 0; i < VECTORS; i++) {
            if (IS_SIGNED && i % 4 == 0) fetch_ahead(in, stride, position / TILE, row + i / 4);
            for (int piece = 0; piece < PIECES; piece++) {
                x[i][piece] = load<Floats>(in + (row + i / 4) * stride + i % 4 * LANES + piece * WIDTH);
                if (IS_SIGNED)
                    x[i][piece] = flipped(x[i][piece], bits.words[first / 32][piece] >> first % 32, i);
            }
            butterflies_of_lanes(x[i]);
        }
        for (int piece = 0; piece < PIECES; piece++) {
            Floats y[VECTORS];
#pragma GCC unroll 16
            for (int i = 0; i < VECTORS; i++) y[i] = x[i][piece];
            butterflies_of_vectors(y);
#pragma GCC unroll 16
            for (int i = 0; i < VECTORS; i++) store(tile + row * SIDE + i * LANES + piece * WIDTH, y[i]);
        }
    }
}

// Copies between a tile and the vector, run by run, of blocks of any side; what lies beyond the vector is zero.
template <bool IS_GATHER, class T, class V>
static void move_runs(T *tile, V *values, Blocks blocks, int64_t position, int64_t count) {
    const int64_t side = blocks.side, size = side * side;
    for (int64_t done = 0; done < count; done += side) {
        const int64_t block = (position + done) / size, row = (position + done) % size / side;
        const int64_t from = row * blocks.n_blocks * side + block * side;
        const int64_t length = from < blocks.n_values ? least(side, blocks.n_values - from) : 0;
        if (IS_GATHER) {
            if (length > 0) memcpy(tile + done, values + from, (size_t)length * sizeof(T));
            memset(tile + done + length, 0, (size_t)(side - length) * sizeof(T));
        } else if (length > 0) {
            memcpy((void *)(values + from), tile + done, (size_t)length * sizeof(T));
        }
    }
}

INLINE void flip_tile(float *tile, uint64_t key, int64_t position, int64_t count) {
    SignBits bits;
    for (int64_t vector = 0; vector * LANES < count; vector++) {
        const int place = (int)(vector % SIGN_VECTORS);
        if (place == 0) sign_bits(key, position + vector * LANES, bits);
        for (int piece = 0; piece < PIECES; piece++) {
            float *at = tile + vector * LANES + piece * WIDTH;
            store(at, flipped(load<Floats>(at), bits.words[place / 32][piece] >> place % 32, 0));
        }
    }
}

// All levels and the factor, of blocks smaller than a tile: vectors that have such are small.
static void transform_small(float *tile, int64_t side, int64_t count) {
    const int64_t size = side * side;
    const float factor = 1.0f / (float)side;
    for (int64_t at = 0; at < count; at += LANES) {
        Floats x[PIECES];
        for (int piece = 0; piece < PIECES; piece++) x[piece] = load<Floats>(tile + at + piece * WIDTH);
        butterflies_of_lanes(x);
        for (int piece = 0; piece < PIECES; piece++) store(tile + at + piece * WIDTH, x[piece]);
    }
    for (int64_t stride = LANES; stride < size; stride *= 2) {
        for (int64_t at = 0; at < count; at += WIDTH) {
            if (at & stride) continue;
            const Floats a = load<Floats>(tile + at), b = load<Floats>(tile + at + stride);
            store(tile + at, a + b);
            store(tile + at + stride, a - b);
        }
    }
    for (int64_t at = 0; at < count; at += WIDTH) store(tile + at, load<Floats>(tile + at) * factor);
}

// Is the whole block of 64 x 64 inside the vector?
INLINE bool is_whole(Blocks blocks, int64_t block) {
    return (SIDE - 1) * blocks.n_blocks * SIDE + (block + 1) * SIDE <= blocks.n_values;
}

// Signs, and back to the rows of the vector.
template <bool IS_STREAMED>
INLINE void scatter_block(const float *tile, uint64_t key, int64_t position, int64_t stride, float *values) {
    SignBits bits;
    for (int row = 0; row < SIDE; row++) {
        if (row % 32 == 0) sign_bits(key, position + row * SIDE, bits);
        for (int i = 0; i < 4; i++) {
            const int place = row % 32 * 4 + i;
            for (int piece = 0; piece < PIECES; piece++) {
                const Floats x = load<Floats>(tile + row * SIDE + i * LANES + piece * WIDTH);
                const Words word = bits.words[place / 32][piece] >> place % 32;
                put<IS_STREAMED>(values + row * stride + i * LANES + piece * WIDTH, flipped(x, word, 0));
            }
        }
    }
}

// Positions `position` on of the rotated vector, at most a tile of them, by way of `tile`, to `out` (which may be it).
template <bool IS_STREAMED>
INLINE void rotate_tile(const float *values, Blocks blocks, uint64_t key, int64_t position, int64_t count, float *tile,
                        float *out) {
    if (blocks.side != SIDE) {
        move_runs<true>(tile, values, blocks, position, count);
        flip_tile(tile, key, position, count);
        transform_small(tile, blocks.side, count);
        if (out != tile) memcpy(out, tile, (size_t)count * sizeof(float));
        return;
    }
    const int64_t block = position / TILE;
    if (is_whole(blocks, block)) {
        runs_of_block<true>(values + block * SIDE, blocks.n_blocks * SIDE, key, position, tile);
    } else {
        move_runs<true>(tile, values, blocks, position, TILE);
        runs_of_block<true>(tile, SIDE, key, position, tile);
    }
    last_levels<IS_STREAMED>(tile, out);
}

// The reverse of `rotate_tile`.
template <bool IS_STREAMED>
INLINE void unrotate_tile(const float *rotated, Blocks blocks, uint64_t key, int64_t position, int64_t count,
                          float *tile, float *values) {
    if (blocks.side == SIDE) {
        runs_of_block<false>(rotated, SIDE, key, position, tile);
        last_levels<false>(tile, tile);
        const int64_t block = position / TILE, stride = blocks.n_blocks * SIDE;
        if (is_whole(blocks, block)) return scatter_block<IS_STREAMED>(tile, key, position, stride, values + block * SIDE);
    } else {
        memcpy(tile, rotated, (size_t)count * sizeof(float));
        transform_small(tile, blocks.side, count);
    }
    flip_tile(tile, key, position, count);
    move_runs<false>(tile, values, blocks, position, count);
}

// The same in double precision, which only the sum of a round needs, once: plain loops.
static void unrotate_tile_double(const double *rotated, Blocks blocks, uint64_t key, int64_t position, int64_t count,
                          double *tile, double *values) {
    const int64_t size = blocks.side * blocks.side;
    memcpy(tile, rotated, (size_t)count * sizeof(double));
    for (int64_t stride = 1; stride < size; stride *= 2) {
        for (int64_t base = 0; base < count; base += 2 * stride) {
            double *upper = tile + base, *lower = tile + base + stride;
            for (int64_t i = 0; i < stride; i++) {
                const double a = upper[i], b = lower[i];
                upper[i] = a + b;
                lower[i] = a - b;
            }
        }
    }
    const double factor = 1.0 / (double)blocks.side;
    uint32_t words[4][LANES];
    for (int64_t vector = 0; vector * LANES < count; vector++) {
        const int place = (int)(vector % SIGN_VECTORS);
        if (place == 0) {
            SignBits bits;
            sign_bits(key, position + vector * LANES, bits);
            memcpy(words, bits.words, sizeof words);
        }
        for (int lane = 0; lane < LANES; lane++)
            tile[vector * LANES + lane] *= (words[place / 32][lane] >> place % 32) & 1 ? -factor : factor;
    }
    move_runs<false>(tile, values, blocks, position, count);
}

template <bool IS_STREAMED>
static void rotate_tiles(const float *values, Blocks blocks, uint64_t key, int64_t first, int64_t count, float *out) {
    alignas(64) float tile[TILE];
    for (int64_t done = 0; done < count; done += TILE)
        rotate_tile<IS_STREAMED>(values, blocks, key, first + done, least(TILE, count - done), tile, out + done);
    if (IS_STREAMED) finish_streams();
}

KERNEL(rotate)(const float *values, Blocks blocks, uint64_t key, int64_t first, int64_t count, float *out) {
    if (is_for_streams(out, count)) return rotate_tiles<true>(values, blocks, key, first, count, out);
    rotate_tiles<false>(values, blocks, key, first, count, out);
}

template <bool IS_STREAMED>
static void unrotate_tiles(const float *rotated, Blocks blocks, uint64_t key, int64_t first, int64_t count,
                           float *values) {
    alignas(64) float tile[TILE];
    for (int64_t done = 0; done < count; done += TILE)
        unrotate_tile<IS_STREAMED>(rotated + done, blocks, key, first + done, least(TILE, count - done), tile, values);
    if (IS_STREAMED) finish_streams();
}

KERNEL(unrotate)(const float *rotated, Blocks blocks, uint64_t key, int64_t first, int64_t count, float *values) {
    if (is_for_streams(values, count)) return unrotate_tiles<true>(rotated, blocks, key, first, count, values);
    unrotate_tiles<false>(rotated, blocks, key, first, count, values);
}

KERNEL(unrotate_double)(const double *rotated, Blocks blocks, uint64_t key, int64_t first, int64_t count, double *values) {
    alignas(64) double tile[TILE];
    for (int64_t done = 0; done < count; done += TILE)
        unrotate_tile_double(rotated + done, blocks, key, first + done, least(TILE, count - done), tile, values);
}

KERNEL(signs)(uint64_t key, int64_t first, int64_t count, float *out) {
    alignas(64) float tile[SIGN_VECTORS * LANES];
    for (int64_t done = 0; done < count; done += SIGN_VECTORS * LANES) {
        for (int i = 0; i < SIGN_VECTORS * LANES; i++) tile[i] = 1.0f;
        flip_tile(tile, key, first + done, SIGN_VECTORS * LANES);
        memcpy(out + done, tile, (size_t)least(SIGN_VECTORS * LANES, count - done) * sizeof(float));
    }
}

// --- quantization: quantize.py ---------------------------------------------------------------------------------------

enum { DITHER_GROUP = DITHER_VECTORS * LANES };

INLINE void dither_words(uint64_t key, int64_t position, Words (&words)[4][PIECES]) {
    philox(key, STREAM_DITHER, 0, (uint64_t)(position / DITHER_GROUP) * LANES, words);
}

// Vector `v` of a group's dither, plus phi, modulo 2^16.
INLINE Words dither_vector(Words word, int v, uint32_t phi) {
    return v % 2 ? (word + (phi << 16)) >> 16 : (word + phi) & 0xFFFFu;
}

// Levels of 128 coordinates, the first of which is `position`.
INLINE void quantize_group(const float *values, uint64_t key, int64_t position, Quantizer q, int32_t *levels) {
    const float fixed_max = (float)((1u << 31) - (1u << 17));
    Words words[4][PIECES];
    dither_words(key, position, words);
#pragma GCC unroll 8
    for (int v = 0; v < DITHER_VECTORS; v++) {
        for (int piece = 0; piece < PIECES; piece++) {
            const int at = v * LANES + piece * WIDTH;
            const Floats scaled = load<Floats>(values + at) * q.inverse_step * 65536.0f;
            const Ints fixed = rounded(clamp(scaled, Floats{} - fixed_max, Floats{} + fixed_max));
            const Ints shifted = fixed + (Ints)dither_vector(words[v / 2][piece], v, (uint32_t)q.phi) + q.offset;
            store(levels + at, clamp(shifted >> 16, Ints{} + q.low, Ints{} + q.high));
        }
    }
}

// The same for any number of coordinates up to a group of 512; levels beyond them are zero.
INLINE void quantize_up_to_512(const float *values, uint64_t key, int64_t position, int64_t count, Quantizer q,
                               int32_t *levels) {
    int64_t done = 0;
    for (; done + DITHER_GROUP <= count; done += DITHER_GROUP)
        quantize_group(values + done, key, position + done, q, levels + done);
    if (done < count) {
        float rest[DITHER_GROUP] = {};
        memcpy(rest, values + done, (size_t)(count - done) * sizeof(float));
        quantize_group(rest, key, position + done, q, levels + done);
    }
    if (count < GROUP) memset(levels + count, 0, (size_t)(GROUP - count) * sizeof(int32_t));
}

KERNEL(quantize_int32)(const float *values, uint64_t key, int64_t first, int64_t count, Quantizer q, int32_t *out) {
    int64_t done = 0;
    for (; done + DITHER_GROUP <= count; done += DITHER_GROUP)
        quantize_group(values + done, key, first + done, q, out + done);
    alignas(64) int32_t levels[GROUP];
    if (done == count) return;
    quantize_up_to_512(values + done, key, first + done, count - done, q, levels);
    memcpy(out + done, levels, (size_t)(count - done) * sizeof(int32_t));
}

KERNEL(quantize_int16)(const float *values, uint64_t key, int64_t first, int64_t count, Quantizer q, int16_t *out) {
    alignas(64) int32_t levels[GROUP];
    for (int64_t done = 0; done < count; done += GROUP) {
        const int64_t n = least(GROUP, count - done);
        quantize_up_to_512(values + done, key, first + done, n, q, levels);
        for (int64_t i = 0; i < n; i++) out[done + i] = (int16_t)levels[i];
    }
}

KERNEL(dither)(uint64_t key, int64_t first, int64_t count, int32_t *out) {
    for (int64_t done = 0; done < count; done += DITHER_GROUP) {
        alignas(64) int32_t group[DITHER_GROUP];
        Words words[4][PIECES];
        dither_words(key, first + done, words);
        for (int v = 0; v < DITHER_VECTORS; v++)
            for (int piece = 0; piece < PIECES; piece++)
                store(group + v * LANES + piece * WIDTH, dither_vector(words[v / 2][piece], v, 0));
        memcpy(out + done, group, (size_t)least(DITHER_GROUP, count - done) * sizeof(int32_t));
    }
}

// The four words of 16 blocks of any counter: for known answers.
KERNEL(words)(uint64_t key, uint32_t stream, uint32_t last, uint64_t block, uint32_t *out) {
    Words words[4][PIECES];
    philox(key, stream, last, block, words);
    memcpy(out, words, sizeof words);
}

// --- packing: packing.py ---------------------------------------------------------------------------------------------

// 512 levels to 16 * BITS words.
template <int BITS>
INLINE void pack_group(const int32_t *levels, uint8_t *out) {
    for (int piece = 0; piece < PIECES; piece++) {
        Words word = {};
#pragma GCC unroll 32
        for (int row = 0; row < ROWS; row++) {
            const int shift = row * BITS % 32;
            const Words low = load<Words>(levels + row * LANES + piece * WIDTH) & (0xFFFFFFFFu >> (32 - BITS));
            word |= low << shift;
            if (shift + BITS < 32) continue;
            store(out + (row * BITS / 32 * LANES + piece * WIDTH) * 4, word);
            word = shift + BITS > 32 ? low >> (32 - shift) : Words{};
        }
    }
}

// And back: levels of two's complement.
template <int BITS>
INLINE void unpack_group(const uint8_t *data, int32_t *levels) {
    for (int piece = 0; piece < PIECES; piece++) {
#pragma GCC unroll 32
        for (int row = 0; row < ROWS; row++) {
            const int shift = row * BITS % 32;
            const uint8_t *at = data + (row * BITS / 32 * LANES + piece * WIDTH) * 4;
            Words high = load<Words>(at);  // becomes the level in the highest bits
            if (shift + BITS <= 32) {
                high <<= 32 - BITS - shift;
            } else {
                high = (high >> shift | load<Words>(at + LANES * 4) << (32 - shift)) << (32 - BITS);
            }
            store(levels + row * LANES + piece * WIDTH, (Ints)high >> (32 - BITS));
        }
    }
}

INLINE void add_weighted(int32_t *sums, Ints levels, int32_t weight) {
    store(sums, load<Words>(sums) + (Words)levels * (uint32_t)weight);
}
INLINE void add_weighted(int64_t *sums, Ints levels, int32_t weight) {
    const Longs w = Longs{} + (uint64_t)(int64_t)weight;
    store(sums, load<Longs>(sums) + product_signed(first_half(levels), w));
    store(sums + WIDTH / 2, load<Longs>(sums + WIDTH / 2) + product_signed(second_half(levels), w));
}

// Squares of levels, and the greatest of them.
struct Squares {
    Longs sum;
    Words greatest;
};

// Adds weight * level of a whole group. The squares of 4 rows of 15 bits stay within a word.
template <class T>
INLINE void add_group(const int32_t *levels, int32_t weight, T *sums, Squares &squares) {
    for (int at = 0; at < GROUP; at += 4 * WIDTH) {
        Words sum = {};
        for (int i = at; i < at + 4 * WIDTH; i += WIDTH) {
            const Ints level = load<Ints>(levels + i);
            const Words size = (Words)level & 0xFFFFu, square = products_of_halves(size, size);
            sum += square;
            squares.greatest = greater(squares.greatest, square);
            add_weighted(sums + i, level, weight);
        }
        squares.sum += ((Longs)sum & 0xFFFFFFFFu) + ((Longs)sum >> 32);
    }
}

INLINE int64_t root(uint32_t square) {
    int64_t value = 0;
    for (int64_t bit = 1 << 15; bit > 0; bit >>= 1)
        if ((value + bit) * (value + bit) <= (int64_t)square) value += bit;
    return value;
}

// The last levels of a vector, fewer than a group; what fills the group up is not looked at.
template <class T>
INLINE void add_rest(const int32_t *levels, int64_t count, int32_t weight, T *sums, Squares &squares) {
    alignas(64) int32_t rest[GROUP] = {};
    alignas(64) T rest_sums[GROUP] = {};
    memcpy(rest, levels, (size_t)count * sizeof(int32_t));
    memcpy(rest_sums, sums, (size_t)count * sizeof(T));
    add_group(rest, weight, rest_sums, squares);
    memcpy(sums, rest_sums, (size_t)count * sizeof(T));
}

// Calls what a width's template is, for widths 1 to 32; others do nothing (Python has refused them).
#define FOR_WIDTH(bits, call) \
    switch (bits) {           \
        case 1: call(1);      \
        case 2: call(2);      \
        case 3: call(3);      \
        case 4: call(4);      \
        case 5: call(5);      \
        case 6: call(6);      \
        case 7: call(7);      \
        case 8: call(8);      \
        case 9: call(9);      \
        case 10: call(10);    \
        case 11: call(11);    \
        case 12: call(12);    \
        case 13: call(13);    \
        case 14: call(14);    \
        case 15: call(15);    \
        case 16: call(16);    \
        case 17: call(17);    \
        case 18: call(18);    \
        case 19: call(19);    \
        case 20: call(20);    \
        case 21: call(21);    \
        case 22: call(22);    \
        case 23: call(23);    \
        case 24: call(24);    \
        case 25: call(25);    \
        case 26: call(26);    \
        case 27: call(27);    \
        case 28: call(28);    \
        case 29: call(29);    \
        case 30: call(30);    \
        case 31: call(31);    \
        case 32: call(32);    \
    }

static void pack_levels(const int32_t *levels, int bits, uint8_t *out) {
#define PACK(n) return pack_group<n>(levels, out)
    FOR_WIDTH(bits, PACK)
#undef PACK
}

static void unpack_levels(const uint8_t *data, int bits, int32_t *levels) {
#define UNPACK(n) return unpack_group<n>(data, levels)
    FOR_WIDTH(bits, UNPACK)
#undef UNPACK
}
#undef FOR_WIDTH

template <class T>
INLINE void fold(const uint8_t *data, int64_t count, int32_t bits, int32_t weight, T *sums, Folded *folded) {
    alignas(64) int32_t levels[GROUP];
    Squares squares = {};
    for (int64_t done = 0; done < count; done += GROUP, data += GROUP / 8 * bits) {
        unpack_levels(data, bits, levels);
        if (count - done >= GROUP) {
            add_group(levels, weight, sums + done, squares);
        } else {
            add_rest(levels, count - done, weight, sums + done, squares);
        }
    }
    uint32_t greatest = 0;
    for (int i = 0; i < WIDTH; i++) greatest = squares.greatest[i] > greatest ? squares.greatest[i] : greatest;
    folded->sum_of_squares = 0;
    for (int i = 0; i < WIDTH / 2; i++) folded->sum_of_squares += (int64_t)squares.sum[i];
    folded->greatest = root(greatest);
}

KERNEL(fold_int32)(const uint8_t *data, int64_t count, int32_t bits, int32_t weight, int32_t *sums, Folded *folded) {
    fold(data, count, bits, weight, sums, folded);
}

KERNEL(fold_int64)(const uint8_t *data, int64_t count, int32_t bits, int32_t weight, int64_t *sums, Folded *folded) {
    fold(data, count, bits, weight, sums, folded);
}

// What masks were added to: all 32 bits count, and wrap. So there are no squares, and no weights.
KERNEL(pack_int32)(const int32_t *integers, int64_t count, int32_t bits, uint8_t *out) {
    for (; count >= GROUP; count -= GROUP, integers += GROUP, out += GROUP / 8 * bits) pack_levels(integers, bits, out);
    if (count == 0) return;
    alignas(64) int32_t rest[GROUP] = {};
    memcpy(rest, integers, (size_t)count * sizeof(int32_t));
    pack_levels(rest, bits, out);
}

KERNEL(add_packed_int32)(const uint8_t *data, int64_t count, int32_t bits, int32_t *sums) {
    alignas(64) int32_t integers[GROUP];
    for (; count > 0; count -= GROUP, sums += GROUP, data += GROUP / 8 * bits) {
        unpack_levels(data, bits, integers);
        int64_t i = 0;
        for (; i + WIDTH <= least(GROUP, count); i += WIDTH)
            store(sums + i, load<Words>(sums + i) + load<Words>(integers + i));
        for (; i < least(GROUP, count); i++) sums[i] = (int32_t)((uint32_t)sums[i] + (uint32_t)integers[i]);
    }
}

// Quantizes and packs up to a tile of values.
INLINE void quantize_and_pack(const float *values, uint64_t key, int64_t position, int64_t count, Quantizer q, int bits,
                              uint8_t *out) {
    alignas(64) int32_t levels[GROUP];
    for (int64_t done = 0; done < count; done += GROUP, out += GROUP / 8 * bits) {
        quantize_up_to_512(values + done, key, position + done, least(GROUP, count - done), q, levels);
        pack_levels(levels, bits, out);
    }
}

KERNEL(pack_quantized)(const float *values, uint64_t key, int64_t first, int64_t count, Quantizer q, int32_t bits,
                       uint8_t *out) {
    quantize_and_pack(values, key, first, count, q, bits, out);
}

KERNEL(pack_rotated)(const float *values, Blocks blocks, uint64_t sign_key, uint64_t dither_key, int64_t first,
                     int64_t count, Quantizer q, int32_t bits, uint8_t *out) {
    alignas(64) float tile[TILE];
    for (int64_t done = 0; done < count; done += TILE) {
        const int64_t n = least(TILE, count - done);
        rotate_tile<false>(values, blocks, sign_key, first + done, n, tile, tile);
        quantize_and_pack(tile, dither_key, first + done, n, q, bits, out + done / 8 * bits);
    }
}
