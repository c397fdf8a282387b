// No particular instructions: sixteen lanes are four vectors of 16 bytes, which every 64-bit machine has.
typedef float Floats __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(16)));
typedef uint32_t Words __attribute__((vector_size(16)));
typedef uint64_t Longs __attribute__((vector_size(16)));

#if defined(__clang__)
#define ARRANGED(x, a, b, c, d) __builtin_shufflevector(x, x, a, b, c, d)
#else
#define ARRANGED(x, a, b, c, d) __builtin_shuffle(x, (Ints){a, b, c, d})
#endif

// (a, b) -> (a + b, a - b) between lanes 1 and 2 apart: the neighbour plus or minus the lane itself.
INLINE Floats butterfly_1(Floats x) {
    const Words minus = {0, 1u << 31, 0, 1u << 31};
    return ARRANGED(x, 1, 0, 3, 2) + (Floats)((Words)x ^ minus);
}
INLINE Floats butterfly_2(Floats x) {
    const Words minus = {0, 0, 1u << 31, 1u << 31};
    return ARRANGED(x, 2, 3, 0, 1) + (Floats)((Words)x ^ minus);
}
INLINE void butterflies_of_lanes(Floats (&x)[PIECES]) {
    for (int i = 0; i < PIECES; i++) x[i] = butterfly_2(butterfly_1(x[i]));
    const Floats a = x[0] + x[1], b = x[0] - x[1], c = x[2] + x[3], d = x[2] - x[3];
    x[0] = a + c;
    x[1] = b + d;
    x[2] = a - c;
    x[3] = b - d;
}

INLINE Words chosen(Ints which, Words yes, Words no) { return (yes & (Words)which) | (no & ~(Words)which); }
INLINE Ints clamp(Ints x, Ints low, Ints high) {
    const Ints raised = (Ints)chosen((Ints)(x < low), (Words)low, (Words)x);
    return (Ints)chosen((Ints)(raised > high), (Words)high, (Words)raised);
}
// Below 2^31, where all machines compare.
INLINE Words greater(Words a, Words b) { return chosen((Ints)((Ints)a > (Ints)b), a, b); }

#if HAS_X86
INLINE Floats clamp(Floats x, Floats low, Floats high) {
    return (Floats)_mm_min_ps(_mm_max_ps((__m128)x, (__m128)low), (__m128)high);
}
INLINE Ints rounded(Floats x) { return (Ints)_mm_cvtps_epi32((__m128)x); }
// The sum of the products of both halves of each lane.
INLINE Words products_of_halves(Words a, Words b) { return (Words)_mm_madd_epi16((__m128i)a, (__m128i)b); }
INLINE Longs product(Longs a, Longs b) { return (Longs)_mm_mul_epu32((__m128i)a, (__m128i)b); }
#else
INLINE Floats clamp(Floats x, Floats low, Floats high) {
    const Floats raised = (Floats)chosen((Ints)(x < low), (Words)low, (Words)x);
    return (Floats)chosen((Ints)(raised > high), (Words)high, (Words)raised);
}
// Half to even, by the addition of 2^23 with the sign of x, above which there are no fractions.
INLINE Ints rounded(Floats x) {
    const Words sign = (Words)x & (1u << 31), size = (Words)x & 0x7FFFFFFFu;
    const Floats whole = (Floats)(sign | 0x4B000000u), near = (x + whole) - whole;
    return __builtin_convertvector((Floats)chosen((Ints)(size < 0x4B000000u), (Words)near, (Words)x), Ints);
}
INLINE Words products_of_halves(Words a, Words b) {
    const Ints a_low = (Ints)(a << 16) >> 16, b_low = (Ints)(b << 16) >> 16;
    return (Words)(a_low * b_low + ((Ints)a >> 16) * ((Ints)b >> 16));
}
INLINE Longs product(Longs a, Longs b) { return (a & 0xFFFFFFFFu) * (b & 0xFFFFFFFFu); }
#endif
INLINE Longs product_signed(Longs a, Longs b) { return a * b; }
INLINE Longs first_half(Ints x) { return (Longs){(uint64_t)(int64_t)x[0], (uint64_t)(int64_t)x[1]}; }
INLINE Longs second_half(Ints x) { return (Longs){(uint64_t)(int64_t)x[2], (uint64_t)(int64_t)x[3]}; }
// The low words of `even` in the even lanes, those of `odd` in the odd ones.
INLINE Words interleaved(Longs even, Longs odd) { return (Words)((even & 0xFFFFFFFFu) | (odd << 32)); }
INLINE void prefetch(const void *place) { __builtin_prefetch(place); }
INLINE void prefetch_far(const void *place) { __builtin_prefetch(place, 0, 2); }
INLINE void stream(float *to, Floats x) { memcpy(to, &x, sizeof x); }  // never called
INLINE void finish_streams() {}
