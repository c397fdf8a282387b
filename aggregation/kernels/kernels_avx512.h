// AVX-512: sixteen lanes are one register.
typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint64_t Longs __attribute__((vector_size(64)));

// (a, b) -> (a + b, a - b) between lanes 1, 2, 4 and 8 apart: the neighbour plus or minus the lane itself.
INLINE Floats butterfly_1(Floats x) {
    const Floats sign = {1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1};
    return (Floats)_mm512_fmadd_ps((__m512)x, (__m512)sign, _mm512_permute_ps((__m512)x, 0xB1));
}
INLINE Floats butterfly_2(Floats x) {
    const Floats sign = {1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1};
    return (Floats)_mm512_fmadd_ps((__m512)x, (__m512)sign, _mm512_permute_ps((__m512)x, 0x4E));
}
INLINE Floats butterfly_4(Floats x) {
    const Floats sign = {1, 1, 1, 1, -1, -1, -1, -1, 1, 1, 1, 1, -1, -1, -1, -1};
    return (Floats)_mm512_fmadd_ps((__m512)x, (__m512)sign, _mm512_shuffle_f32x4((__m512)x, (__m512)x, 0xB1));
}
INLINE Floats butterfly_8(Floats x) {
    const Floats sign = {1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1, -1};
    return (Floats)_mm512_fmadd_ps((__m512)x, (__m512)sign, _mm512_shuffle_f32x4((__m512)x, (__m512)x, 0x4E));
}
INLINE void butterflies_of_lanes(Floats (&x)[PIECES]) { x[0] = butterfly_8(butterfly_4(butterfly_2(butterfly_1(x[0])))); }

INLINE Floats clamp(Floats x, Floats low, Floats high) {
    return (Floats)_mm512_min_ps(_mm512_max_ps((__m512)x, (__m512)low), (__m512)high);
}
INLINE Ints clamp(Ints x, Ints low, Ints high) {
    return (Ints)_mm512_min_epi32(_mm512_max_epi32((__m512i)x, (__m512i)low), (__m512i)high);
}
INLINE Words greater(Words a, Words b) { return (Words)_mm512_max_epu32((__m512i)a, (__m512i)b); }
INLINE Ints rounded(Floats x) {
    return (Ints)_mm512_cvt_roundps_epi32((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// The sum of the products of both halves of each lane.
INLINE Words products_of_halves(Words a, Words b) { return (Words)_mm512_madd_epi16((__m512i)a, (__m512i)b); }
INLINE Longs product(Longs a, Longs b) { return (Longs)_mm512_mul_epu32((__m512i)a, (__m512i)b); }
INLINE Longs product_signed(Longs a, Longs b) { return (Longs)_mm512_mul_epi32((__m512i)a, (__m512i)b); }
INLINE Longs first_half(Ints x) { return (Longs)_mm512_cvtepi32_epi64(_mm512_castsi512_si256((__m512i)x)); }
INLINE Longs second_half(Ints x) { return (Longs)_mm512_cvtepi32_epi64(_mm512_extracti64x4_epi64((__m512i)x, 1)); }
// The low words of `even` in the even lanes, those of `odd` in the odd ones.
INLINE Words interleaved(Longs even, Longs odd) {
    return (Words)_mm512_mask_shuffle_epi32((__m512i)even, 0xAAAA, (__m512i)odd, (_MM_PERM_ENUM)0xA0);
}
INLINE void prefetch(const void *place) { _mm_prefetch((const char *)place, _MM_HINT_T0); }
INLINE void prefetch_far(const void *place) { _mm_prefetch((const char *)place, _MM_HINT_T1); }
// Past the caches, a whole line at once.
INLINE void stream(float *to, Floats x) { _mm512_stream_ps(to, (__m512)x); }
INLINE void finish_streams() { _mm_sfence(); }

// Adds to each of 16 folded levels that is an escape the next of its excesses, of which 16 can be read; how many it took.
#define HAS_EXPAND 1
INLINE int64_t add_next(uint16_t *run, uint16_t escape, const uint16_t *excesses, uint16_t *greatest) {
    const __m256i levels = _mm256_loadu_si256((const __m256i *)run);
    const __mmask16 is_escape = _mm256_cmpeq_epi16_mask(levels, _mm256_set1_epi16((short)escape));
    const __m512i next = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)excesses));
    const __m256i added = _mm512_cvtepi32_epi16(_mm512_maskz_expand_epi32(is_escape, next));
    _mm256_storeu_si256((__m256i *)run, _mm256_add_epi16(levels, added));
    _mm256_store_si256((__m256i *)greatest, _mm256_max_epu16(_mm256_load_si256((const __m256i *)greatest), added));
    return __builtin_popcount(is_escape);
}
