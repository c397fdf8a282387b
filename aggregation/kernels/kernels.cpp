// The integer codec's arithmetic for vector units: the same bits as philox.py, rotation.py, quantize.py, packing.py
// and entropy_kernels.py.
//
// One body, compiled once for every set of instructions: plain vectors of 16 bytes, AVX2 and AVX-512. Python chooses by
// name: umbel_<path>_<function>. Every path gives the same integers and the same floats to the last bit, because all
// add the same numbers in the same order, and the only fused multiply-adds are by +1 and -1, which round as additions do.
//
// Nothing here allocates, keeps state, starts a thread or looks at Python: buffers are the caller's.
#include <stdint.h>
#include <string.h>

#if !defined(__GNUC__)
#error "these kernels are written in the vector extensions of GCC and clang"
#endif
#if defined(__FLT_EVAL_METHOD__) && __FLT_EVAL_METHOD__ != 0
#error "float32 sums must be rounded to float32 one by one"
#endif
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "packed words are little-endian"
#endif
#if !defined(HAS_X86)  // 0 on the command line leaves what other machines get
#if defined(__x86_64__)
#define HAS_X86 1
#else
#define HAS_X86 0
#endif
#endif
#if HAS_X86
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define JOINED_(a, b, c) a##b##c
#define JOINED(a, b, c) JOINED_(a, b, c)
#define KERNEL(name) extern "C" __attribute__((visibility("default"))) void JOINED(umbel_, PATH, _##name)

namespace {

const int ABI = 3;  // native.py has the same number: raise both whenever a function changes

// Where the streams' bits go; see philox.py and packing.py.
enum { LANES = 16, SIGN_VECTORS = 128, DITHER_VECTORS = 8, GROUP = 512, ROWS = GROUP / LANES };
const uint64_t EVEN_AND_ODD[2][LANES / 2] = {{0, 2, 4, 6, 8, 10, 12, 14}, {1, 3, 5, 7, 9, 11, 13, 15}};
enum { STREAM_DITHER = 1, STREAM_SIGNS = 2 };

// What is worked on in the first-level cache: the largest block, and a whole number of every smaller block and group.
enum { TILE = 4096, SIDE = 64 };

struct Blocks {
    int64_t n_values, n_blocks, side;
};

struct Quantizer {
    float inverse_step;
    int32_t phi, low, high, offset;
};

// Of the levels that were folded.
struct Folded {
    int64_t sum_of_squares;
    int64_t greatest;
};

// Of symbols that were read; see native.py.
struct Unpacked {
    int64_t n_escapes;
    int64_t is_within;
    int64_t is_filled_with_zeros;
    Folded folded;
};

// A segment's quarters and classes, and what a class byte is made of; see entropy_kernels.py.
enum { CLASSES = 32, QUARTERS = 4, MIRRORED_BIT = 7, QUIET = 6, RUN = 512 };

// How many values each quarter has of each class, or where they begin.
struct Places {
    int64_t of[QUARTERS][CLASSES];
};

int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// A segment's quarters are walked together, a run of each at a time. The later ones may be shorter, or empty.
int64_t quarter_of(int64_t count) { return (count + QUARTERS - 1) / QUARTERS; }
int64_t run_length(int64_t count, int quarter, int64_t done) {
    const int64_t length = quarter_of(count), n = least(least(length, count - quarter * length) - done, RUN);
    return n < 0 ? 0 : n;
}

// Between a run of each quarter and the places of its classes. Four chains of places do not wait for each other. Vector
// units have nothing for it, and compilers make it slower with them: so it is the same for every path.
template <bool IS_READ>
__attribute__((noinline)) void walk_run(const uint8_t *classes, int64_t count, int64_t done, Places &at,
                                        uint16_t *folded, uint16_t (&run)[QUARTERS][RUN]) {
    const int64_t length = quarter_of(count), n = run_length(count, QUARTERS - 1, done);
#define WALK(quarter, i)                                                                           \
    {                                                                                              \
        int64_t &place = at.of[quarter][classes[(quarter)*length + (i)] & (CLASSES - 1)];          \
        IS_READ ? (void)(run[quarter][i] = folded[place]) : (void)(folded[place] = run[quarter][i]); \
        place++;                                                                                   \
    }
    for (int64_t i = 0; i < n; i++) {
        WALK(0, i)
        WALK(1, i)
        WALK(2, i)
        WALK(3, i)
    }
    for (int quarter = 0; quarter < QUARTERS - 1; quarter++)
        for (int64_t i = n; i < run_length(count, quarter, done); i++) WALK(quarter, i)
#undef WALK
}

}  // namespace

#define PATH generic
#define PIECES 4
namespace generic {
#include "kernels_generic.h"
#include "kernels_body.h"
#include "kernels_entropy.h"
}  // namespace generic
#undef PATH
#undef PIECES

#if HAS_X86
#define PATH avx2
#define PIECES 2
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
namespace avx2 {
#include "kernels_avx2.h"
#include "kernels_body.h"
#include "kernels_entropy.h"
}  // namespace avx2
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#undef PATH
#undef PIECES

#define PATH avx512
#define PIECES 1
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#endif
namespace avx512 {
#include "kernels_avx512.h"
#include "kernels_body.h"
#include "kernels_entropy.h"
}  // namespace avx512
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#undef PATH
#undef PIECES
#endif

extern "C" {

__attribute__((visibility("default"))) int umbel_abi(void) { return ABI; }

// 1 for each path that this machine has: bit 0 generic, bit 1 AVX2, bit 2 AVX-512.
__attribute__((visibility("default"))) int umbel_paths(void) {
    int paths = 1;
#if HAS_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) paths |= 2;
    if ((paths & 2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        paths |= 4;
#endif
    return paths;
}

}  // extern "C"
