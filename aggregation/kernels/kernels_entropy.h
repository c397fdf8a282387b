// Entropy coding's part: entropy_kernels.py. Included after kernels_body.h, in the same namespace of each path.

KERNEL(mix_dither)(uint8_t *classes, uint64_t key, int32_t phi, int64_t first, int64_t count) {
    for (int64_t done = 0; done < count; done += DITHER_GROUP) {
        alignas(64) int32_t fractions[DITHER_GROUP];
        alignas(64) uint8_t group[DITHER_GROUP] = {};
        Words words[4][PIECES];
        dither_words(key, first + done, words);
        for (int v = 0; v < DITHER_VECTORS; v++)
            for (int piece = 0; piece < PIECES; piece++)
                store(fractions + v * LANES + piece * WIDTH, dither_vector(words[v / 2][piece], v, (uint32_t)phi));
        const int64_t n = least(DITHER_GROUP, count - done);
        memcpy(group, classes + done, (size_t)n);
        for (int i = 0; i < DITHER_GROUP; i++) {
            // The bits above and below a half, above and below a quarter of either half.
            const uint8_t top = (uint8_t)(fractions[i] >> 14), mirrored = top >> 1, half = (top ^ mirrored) & 1;
            group[i] = (uint8_t)(group[i] + (uint8_t)((uint8_t)(half & (group[i] < QUIET)) << 4) +
                                 (uint8_t)(mirrored << MIRRORED_BIT));
        }
        memcpy(classes + done, group, (size_t)n);
    }
}

KERNEL(count_classes)(const uint8_t *classes, int64_t count, Places *counts) {
    memset(counts, 0, sizeof *counts);
    const int64_t length = quarter_of(count);
    for (int64_t i = 0; i < length; i++)
        for (int quarter = 0; quarter < QUARTERS; quarter++)
            if (quarter * length + i < count) counts->of[quarter][classes[quarter * length + i] & (CLASSES - 1)]++;
}

KERNEL(by_class)(const int32_t *levels, const uint8_t *classes, int64_t count, const Places *starts, uint16_t *folded) {
    Places at = *starts;
    const int64_t length = quarter_of(count);
    for (int64_t done = 0; done < length; done += RUN) {
        uint16_t run[QUARTERS][RUN];
        for (int quarter = 0; quarter < QUARTERS; quarter++) {
            const int64_t first = quarter * length + done, n = run_length(count, quarter, done);
            for (int64_t i = 0; i < n; i++) {
                const int32_t mirrored = -(classes[first + i] >> MIRRORED_BIT);
                const int32_t level = (levels[first + i] ^ mirrored) - mirrored;
                run[quarter][i] = (uint16_t)(((uint32_t)level << 1) ^ (uint32_t)(level >> 31));
            }
        }
        walk_run<false>(classes + done, count, done, at, folded, run);
    }
}

KERNEL(in_place)(const uint16_t *folded, const uint8_t *classes, int64_t count, const Places *starts, int32_t *levels) {
    Places at = *starts;
    const int64_t length = quarter_of(count);
    for (int64_t done = 0; done < length; done += RUN) {
        uint16_t run[QUARTERS][RUN];
        walk_run<true>(classes + done, count, done, at, (uint16_t *)folded, run);
        for (int quarter = 0; quarter < QUARTERS; quarter++) {
            const int64_t first = quarter * length + done, in_run = run_length(count, quarter, done);
            for (int64_t i = 0; i < in_run; i++) {
                const int32_t mirrored = -(classes[first + i] >> MIRRORED_BIT);
                const int32_t level = (int32_t)(run[quarter][i] >> 1) ^ -(int32_t)(run[quarter][i] & 1);
                levels[first + i] = (level ^ mirrored) - mirrored;
            }
        }
    }
}

// Symbols: byte i holds those of values i, m + i, 2 m + i ... of m bytes.
KERNEL(pack_symbols)(const uint16_t *folded, int64_t count, int32_t width, uint8_t *packed, uint16_t *excesses,
                     int64_t *n_escapes) {
    const int64_t n_bytes = (count * width + 7) / 8;
    const uint16_t escape = (uint16_t)((1 << width) - 1);
    memset(packed, 0, (size_t)n_bytes);
    int64_t found = 0;
    for (int64_t first = 0, shift = 0; first < count; first += n_bytes, shift += width) {
        const int64_t n = least(n_bytes, count - first);
        for (int64_t i = 0; i < n; i++) {
            const uint16_t symbol = folded[first + i] < escape ? folded[first + i] : escape;
            packed[i] = (uint8_t)(packed[i] | symbol << shift);
        }
    }
    for (int64_t i = 0; i < count; i++) {
        excesses[found] = (uint16_t)(folded[i] - escape);
        found += folded[i] >= escape;
    }
    *n_escapes = found;
}

#if !defined(HAS_EXPAND)
// Adds to each of 16 folded levels that is an escape the next of its excesses, of which 16 can be read; how many it took.
INLINE int64_t add_next(uint16_t *run, uint16_t escape, const uint16_t *excesses, uint16_t *greatest) {
    int64_t used = 0;
    for (int i = 0; i < LANES; i++) {  // no branch that could be guessed wrong
        const uint16_t is_escape = run[i] == escape, excess = (uint16_t)(excesses[used] & -is_escape);
        run[i] = (uint16_t)(run[i] + excess);
        greatest[i] = excess > greatest[i] ? excess : greatest[i];
        used += is_escape;
    }
    return used;
}
#endif

// The same for all of a run; excesses that do not come count as 0.
INLINE void add_excesses(uint16_t *run, int64_t n, uint16_t escape, const uint16_t *excesses, int64_t n_excesses,
                         Unpacked *unpacked) {
    int64_t used = unpacked->n_escapes, i = 0;
    alignas(32) uint16_t greatest[LANES] = {};
    for (; i + LANES <= n && used + LANES <= n_excesses; i += LANES)
        used += add_next(run + i, escape, excesses + used, greatest);
    for (; i < n; i++) {
        if (run[i] != escape) continue;
        const uint16_t excess = used < n_excesses ? excesses[used] : 0;
        run[i] = (uint16_t)(run[i] + excess);
        greatest[0] = excess > greatest[0] ? excess : greatest[0];
        used++;
    }
    for (int lane = 0; lane < LANES; lane++) unpacked->is_within &= greatest[lane] <= 0xFFFF - escape;
    unpacked->n_escapes = used;
}

KERNEL(unpack_symbols)(const uint8_t *packed, int64_t count, int32_t width, const uint16_t *excesses,
                       int64_t n_excesses, uint16_t *folded, Unpacked *unpacked) {
    const int64_t n_bytes = (count * width + 7) / 8;
    const uint16_t escape = (uint16_t)((1 << width) - 1);
    *unpacked = {0, 1, 1, {0, 0}};
    uint32_t greatest = 0;
    for (int64_t first = 0, shift = 0; shift < 8; first += n_bytes, shift += width) {
        const int64_t in_row = count - first < 0 ? 0 : least(n_bytes, count - first);
        for (int64_t done = 0; done < in_row; done += RUN) {
            const int64_t n = least(RUN, in_row - done);
            uint16_t *run = folded + first + done;
            uint16_t n_found = 0;
            for (int64_t i = 0; i < n; i++) {
                run[i] = (uint16_t)(packed[done + i] >> shift) & escape;
                n_found = (uint16_t)(n_found + (run[i] == escape));
            }
            if (n_found) add_excesses(run, n, escape, excesses, n_excesses, unpacked);
            uint64_t squares = 0;
            for (int64_t i = 0; i < n; i++) {
                const uint32_t size = ((uint32_t)run[i] + 1) >> 1;
                squares += size * size;
                greatest = greatest < size ? size : greatest;
            }
            unpacked->folded.sum_of_squares += (int64_t)squares;
        }
        for (int64_t i = in_row; i < n_bytes; i++)
            if (packed[i] >> shift & escape) unpacked->is_filled_with_zeros = 0;
    }
    unpacked->folded.greatest = greatest;
}

KERNEL(add_levels)(const int32_t *levels, int64_t count, int32_t weight, int64_t *sums) {
    int64_t done = 0;
    for (; done + WIDTH <= count; done += WIDTH) add_weighted(sums + done, load<Ints>(levels + done), weight);
    for (; done < count; done++) sums[done] += (int64_t)levels[done] * weight;
}
