// AVX2: sixteen lanes are two registers.
typedef float Floats __attribute__((vector_size(32)));
typedef int32_t Ints __attribute__((vector_size(32)));
typedef uint32_t Words __attribute__((vector_size(32)));
typedef uint64_t Longs __attribute__((vector_size(32)));

// (a, b) -> (a + b, a - b) between lanes 1, 2 and 4 apart: the neighbour plus or minus the lane itself.
INLINE Floats butterfly_1(Floats x) {
    const Floats sign = {1, -1, 1, -1, 1, -1, 1, -1};
    return (Floats)_mm256_fmadd_ps((__m256)x, (__m256)sign, _mm256_permute_ps((__m256)x, 0xB1));
}
INLINE Floats butterfly_2(Floats x) {
    const Floats sign = {1, 1, -1, -1, 1, 1, -1, -1};
    return (Floats)_mm256_fmadd_ps((__m256)x, (__m256)sign, _mm256_permute_ps((__m256)x, 0x4E));
}
INLINE Floats butterfly_4(Floats x) {
    const Floats sign = {1, 1, 1, 1, -1, -1, -1, -1};
    return (Floats)_mm256_fmadd_ps((__m256)x, (__m256)sign, _mm256_permute2f128_ps((__m256)x, (__m256)x, 1));
}
INLINE void butterflies_of_lanes(Floats (&x)[PIECES]) {
    const Floats a = butterfly_4(butterfly_2(butterfly_1(x[0]))), b = butterfly_4(butterfly_2(butterfly_1(x[1])));
    x[0] = a + b;
    x[1] = a - b;
}

INLINE Floats clamp(Floats x, Floats low, Floats high) {
    return (Floats)_mm256_min_ps(_mm256_max_ps((__m256)x, (__m256)low), (__m256)high);
}
INLINE Ints clamp(Ints x, Ints low, Ints high) {
    return (Ints)_mm256_min_epi32(_mm256_max_epi32((__m256i)x, (__m256i)low), (__m256i)high);
}
INLINE Words greater(Words a, Words b) { return (Words)_mm256_max_epu32((__m256i)a, (__m256i)b); }
INLINE Ints rounded(Floats x) {
    return (Ints)_mm256_cvtps_epi32(_mm256_round_ps((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
// The sum of the products of both halves of each lane.
INLINE Words products_of_halves(Words a, Words b) { return (Words)_mm256_madd_epi16((__m256i)a, (__m256i)b); }
INLINE Longs product(Longs a, Longs b) { return (Longs)_mm256_mul_epu32((__m256i)a, (__m256i)b); }
INLINE Longs product_signed(Longs a, Longs b) { return (Longs)_mm256_mul_epi32((__m256i)a, (__m256i)b); }
INLINE Longs first_half(Ints x) { return (Longs)_mm256_cvtepi32_epi64(_mm256_castsi256_si128((__m256i)x)); }
INLINE Longs second_half(Ints x) { return (Longs)_mm256_cvtepi32_epi64(_mm256_extracti128_si256((__m256i)x, 1)); }
// The low words of `even` in the even lanes, those of `odd` in the odd ones.
INLINE Words interleaved(Longs even, Longs odd) {
    return (Words)_mm256_blend_epi32((__m256i)even, _mm256_slli_epi64((__m256i)odd, 32), 0xAA);
}
INLINE void prefetch(const void *place) { _mm_prefetch((const char *)place, _MM_HINT_T0); }
INLINE void prefetch_far(const void *place) { _mm_prefetch((const char *)place, _MM_HINT_T1); }
// Past the caches: to be followed at once by the other half of its line.
INLINE void stream(float *to, Floats x) { _mm256_stream_ps(to, (__m256)x); }
INLINE void finish_streams() { _mm_sfence(); }
