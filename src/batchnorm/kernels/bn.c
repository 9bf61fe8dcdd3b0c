/* Batch Normalization on a CPU, in plain C. See bn.h for the interface and bn_simd.h for the arithmetic.
 *
 * This file holds what does not depend on the vector width: the choice of instruction set, the running statistics, groups,
 * and what is rare; bn_threads.h holds the threads.
 *
 * Compiled as it is, it is the whole kernel. The specialised copies of the sweeps take nearly all of the time for it, and a
 * gigabyte of memory; so setup.py compiles it BN_UNITS times side by side, each time another unit of it. */
#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE 1 /* madvise, which strict C hides */
#endif
#include "bn.h"

#include <math.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif
#if !defined(_WIN32)
#include <sched.h>
#endif

/* With a check at every access, copies of everything take a quarter of an hour to compile. */
#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define __SANITIZE_ADDRESS__ 1 /* as GCC says it */
#endif
#endif
#if defined(__SANITIZE_ADDRESS__)
#define INLINE static inline
#else
#define INLINE static inline __attribute__((always_inline))
#endif

/* Before a loop: what it writes in one round, it does not read in another. Compilers cannot know it of many rows. */
#if defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define INDEPENDENT _Pragma("GCC ivdep")
#else
#define INDEPENDENT
#endif

/* The units: of each instruction set four functions of bn_sweeps.h, and everything else. */
#define BN_UNITS 13
#define BN_REST 0
#define BN_FORWARD_RUNS 1
#define BN_BACKWARD_RUNS 2
#define BN_FORWARD_ROWS 3
#define BN_BACKWARD_ROWS 4
#if defined(BN_UNIT)
#define BN_HAS(part) (BN_UNIT == ((part) ? BN_LANES / 8 * 4 + (part) : BN_REST))
#define SHARED __attribute__((visibility("hidden")))
#else
#define BN_HAS(part) 1
#define SHARED static
#endif

#if BN_HAS(BN_REST)
#include "bn_threads.h"
#endif

/* ---- moments and coefficients ------------------------------------------------------------------------------- */

/* What one call carries through its phases. In the matrix view (see bn_simd.h) a column holds elements of one channel:
 * with the channel last it is the channel; with few positions per channel it is one position of it. */
typedef struct {
    const bn_args *a;
    double count;                 /* values per channel */
    double *mean, *var;           /* per channel; the variance is biased */
    float *shift;                 /* per channel: a guess of the mean, which the sums are taken around */
    float *grad_x, *grad_1;       /* backward: dx = (g + grad_x*(x - mean) + grad_1) * scale, per channel */
    int64_t block, blocks;        /* runs: channels of a task that takes them whole; how many parts a sample falls into */
    int64_t rows, columns, group; /* matrix: columns = channels * group; group 0 means runs */
    int64_t chunks;               /* of rows; runs: of samples */
    int final;                    /* whether sums are not taken again */
    _Atomic int again;            /* whether some channel needs it */
    int64_t tile, tiles;          /* matrix: channels per tile, and how many tiles */
    int64_t paired;               /* matrix, bfloat16: so many columns are taken in pairs of vectors, see bn_vectors.h */
    float *wide[5];               /* matrix: coefficients repeated for every column (group > 1), or as pairs want them */
    double *partial;              /* sums that several tasks make together */
} call;

/* Some of the coefficients' rows. */
typedef struct {
    int from, to;
} range;

/* So many bytes on, if there is anything at all. */
INLINE const void *offset(const void *p, int64_t bytes) { return p ? (const char *)p + bytes : NULL; }

/* Memory of so many bytes and a cache line, and where its first whole line begins. (aligned_alloc takes longer than the
 * sums of a small batch.) */
static char *block_for(size_t bytes) { return malloc(bytes + 64); }
static void *first_line(char *block) { return block + (-(uintptr_t)block & 63); }

/* A call whose tensors take more than this together writes its output past the caches. A test compiles it with less. */
#if !defined(BN_STREAM_FROM)
#define BN_STREAM_FROM (16 << 20)
#endif

/* An element's address, whatever the layout and the type. */
INLINE double element(const bn_args *a, int64_t n, int64_t c, int64_t s) {
    int64_t i = (n * a->channels + c) * a->positions + s;
    if (a->dtype == BN_FLOAT32) return ((const float *)a->x)[i];
    uint32_t bits = (uint32_t)((const uint16_t *)a->x)[i] << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE int counts(const bn_args *a, int64_t n, int64_t s) { return !a->mask || a->mask[n * a->positions + s]; }

/* The next stretch of marked places in from..end, if there is one; without a mask, all of it. */
INLINE int next_span(const uint8_t *mask, int64_t *from, int64_t *to, int64_t end) {
    if (!mask) {
        *to = end;
        return *from < end;
    }
    const uint8_t *start = *from < end ? memchr(mask + *from, 1, (size_t)(end - *from)) : NULL;
    if (!start) return 0;
    *from = start - mask;
    const uint8_t *stop = memchr(start, 0, (size_t)(end - *from));
    *to = stop ? stop - mask : end;
    return 1;
}

/* Any NaN as the one whose lower bits are 0: what is rounded to bfloat16 counts on it. */
INLINE float without_payload(float v) { return v == v ? v : (float)NAN; }

static int64_t size_of_x(const bn_args *a) {
    return a->batch * a->channels * a->positions * (a->dtype == BN_FLOAT32 ? 4 : 2);
}

/* Whether the call's tensors outgrow a last-level cache, or what is ours of it (a guess, because a virtual machine does not
 * tell): then what is written pushes out what is still to be read. Without those of a residual: sums, whose bits may depend
 * on the answer, do not depend on it. */
static int outgrows_cache(const bn_args *a, int with_residual) {
    const int residual = with_residual && (a->aux_data || a->out_residual);
    return size_of_x(a) * (2 + (a->dy != NULL) + residual) > BN_STREAM_FROM;
}

/* Whether the output goes past the caches, which it can in rows that are whole cache lines. */
static int streams(const bn_args *a, int64_t width) {
    const uintptr_t places = (uintptr_t)a->out | (uintptr_t)a->out_residual;
    return width % (a->dtype == BN_FLOAT32 ? 16 : 32) == 0 && places % 64 == 0 && !a->mask && outgrows_cache(a, 1);
}

/* Bits from..from + n of a row that one thread owns; n <= 16. */
static void put_bits(uint8_t *bits, int64_t from, uint32_t values, int64_t n) {
    for (int64_t at = from; at < from + n;) {
        const int64_t next = (at | 7) + 1, end = next < from + n ? next : from + n;
        const unsigned here = (1u << (end - at)) - 1, o = (unsigned)(at & 7);
        bits[at >> 3] = (uint8_t)((bits[at >> 3] & ~(here << o)) | ((values & here) << o));
        values >>= end - at;
        at = end;
    }
}

INLINE uint32_t get_bits(const uint8_t *bits, int64_t from) {
    const uint8_t *b = bits + (from >> 3);
    return (b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 | (uint32_t)b[3] << 24) >> (from & 7);
}

/* The last resort for numbers whose squares float32 cannot hold: two plain sweeps in double. */
static void exact_moments(call *k, int64_t c) {
    const bn_args *a = k->a;
    double sum = 0, squares = 0, rest = 0;
    for (int64_t n = 0; n < a->batch; n++)
        for (int64_t s = 0; s < a->positions; s++)
            if (counts(a, n, s)) sum += element(a, n, c, s);
    double mean = sum / k->count;
    for (int64_t n = 0; n < a->batch; n++)
        for (int64_t s = 0; s < a->positions; s++) {
            if (!counts(a, n, s)) continue;
            double d = element(a, n, c, s) - mean;
            squares += d * d;
            rest += d; /* zero but for rounding: correcting by it recovers what the mean lost */
        }
    k->mean[c] = mean + rest / k->count;
    k->var[c] = (squares - rest * rest / k->count) / k->count;
}

/* The sums said nothing certain about channel c: its squares overflow or vanish in float32, or the shift was so far
 * from the mean that most of the squares cancel. Returns 1 if sums around a better shift will do. */
static int doubtful_moments(call *k, int64_t c, double sum, double squares, int final) {
    double power = squares / k->count;
    if (!final && isfinite(sum) && isfinite(power) && power > 1e-30) {
        k->shift[c] = (float)k->mean[c];
        return 1;
    }
    exact_moments(k, c);
    return 0;
}

/* The running averages and their count, all or none: a batch with one bad channel leaves every buffer as it was. */
static int64_t update_running(call *k) {
    const bn_args *a = k->a;
    const double bessel = k->count > 1 ? k->count / (k->count - 1) : 1.0, keep = 1.0 - a->momentum;
    int64_t bad = 0;
    for (int64_t c = 0; c < a->channels; c++)
        bad += !isfinite((float)k->mean[c]) | !isfinite((float)(k->var[c] * bessel));
    for (int64_t c = 0; bad && c < a->channels; c++)
        if (!isfinite((float)k->mean[c]) || !isfinite((float)(k->var[c] * bessel))) return c + 1;
    for (int64_t c = 0; a->running_mean && c < a->channels; c++)
        a->running_mean[c] = (float)(a->momentum * k->mean[c] + keep * (double)a->running_mean[c]);
    for (int64_t c = 0; a->running_var && c < a->channels; c++)
        a->running_var[c] = (float)(a->momentum * (k->var[c] * bessel) + keep * (double)a->running_var[c]);
    if (a->batches) ++*a->batches;
    return 0;
}

/* ---- one body, three instruction sets ----------------------------------------------------------------------- */

/* Whether bfloat16 is rounded by the CPU's own instruction (of compilers and assemblers that know it). */
#if !defined(__x86_64__) || defined(__apple_build_version__)
#elif (defined(__clang__) && __clang_major__ >= 9) || (!defined(__clang__) && __GNUC__ >= 10)
#define BN_CONVERTS 1
#if !BN_HAS(BN_REST)
extern
#endif
SHARED int converts;
#endif

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define NAME(n) JOIN(n, BN_SUFFIX)

#define BN_SUFFIX _baseline
#define BN_LANES 4
#define BN_ISA 1
#include "bn_simd.h"
#undef BN_SUFFIX
#undef BN_LANES
#undef BN_ISA

#if (defined(__x86_64__) || defined(__i386__)) && defined(__GNUC__)
#define BN_X86 1
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
#define BN_SUFFIX _avx2
#define BN_LANES 8
#define BN_ISA 2
#include "bn_simd.h"
#undef BN_SUFFIX
#undef BN_LANES
#undef BN_ISA
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

/* BN_EMULATE_AVX512 builds the 16-lane body for AVX2, so that its logic can be tested on a CPU without AVX-512. */
#if defined(__clang__)
#if defined(BN_EMULATE_AVX512)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma"))), apply_to = function)
#endif
#else
#pragma GCC push_options
#if defined(BN_EMULATE_AVX512)
#pragma GCC target("avx2,fma")
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma")
#endif
#endif
#define BN_SUFFIX _avx512
#define BN_LANES 16
#if defined(BN_EMULATE_AVX512)
#define BN_ISA 1
#else
#define BN_ISA 3
#endif
#include "bn_simd.h"
#undef BN_SUFFIX
#undef BN_LANES
#undef BN_ISA
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

#if BN_HAS(BN_REST)
typedef struct {
    const char *name;
    int64_t (*run)(call *);
    int64_t lanes;
    int converts;
} isa;

static const isa isas[] = {
    {"baseline", run_baseline, 4, 0},
#if defined(BN_X86)
    {"avx2", run_avx2, 8, 0},
    {"avx512", run_avx512, 16, 0},
#if defined(BN_CONVERTS)
    {"avx512bf16", run_avx512, 16, 1},
#endif
#endif
};
static int64_t current = -1;

int64_t bn_abi(void) { return BN_ABI; }
int64_t bn_isa_count(void) { return (int64_t)(sizeof isas / sizeof *isas); }
const char *bn_isa_name(int64_t i) { return i >= 0 && i < bn_isa_count() ? isas[i].name : NULL; }

static int supported(int64_t i) {
#if defined(BN_X86)
    __builtin_cpu_init();
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (i == 1) return avx2;
#if defined(BN_EMULATE_AVX512)
    if (i == 2) return avx2;
#else
    int avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (i == 2) return avx512;
#if defined(BN_CONVERTS)
    if (i == 3) return avx512 && __builtin_cpu_supports("avx512bf16");
#endif
#endif
#endif
    return i == 0;
}

int64_t bn_isa_select(int64_t i) {
    if (i < 0 || i >= bn_isa_count() || !supported(i)) return -1;
    current = i;
#if defined(BN_CONVERTS)
    converts = isas[i].converts;
#endif
    return 0;
}

int64_t bn_isa_current(void) {
    if (current < 0)
        for (int64_t i = bn_isa_count() - 1; i >= 0 && bn_isa_select(i) != 0; i--) {
        }
    return current;
}

/* A large output is usually memory fresh from the system, and every page of 4 KB that is written for the first time costs
 * a page fault: more than the arithmetic. Ask for pages of 2 MB instead, for this memory only. Where the system grants
 * none, or the memory was used before, nothing changes. */
static void expect_writes(const bn_args *a, void *memory) {
#if defined(MADV_HUGEPAGE)
    const uintptr_t size = a->dtype == BN_FLOAT32 ? 4 : 2, mask = 4095;
    const uintptr_t bytes = (uintptr_t)(a->batch * a->channels * a->positions) * size, start = (uintptr_t)memory;
    if (!memory || bytes < (4 << 20)) return;
    const uintptr_t from = (start + mask) & ~mask, to = (start + bytes) & ~mask;
    (void)madvise((void *)from, to - from, MADV_HUGEPAGE);
#else
    (void)a, (void)memory;
#endif
}

static double marked(const bn_args *a) {
    const int64_t places = a->batch * a->positions;
    if (!a->mask) return (double)places;
    int64_t count = 0;
    for (int64_t i = 0; i < places; i++) count += a->mask[i];
    return (double)count;
}

/* A row of positions shorter than a vector is not worth a loop of its own: then the batch is a matrix whose columns are the
 * (channel, position) pairs. */
static int is_matrix(const bn_args *a) { return a->positions < isas[bn_isa_current()].lanes; }

/* A batch with one set of statistics. */
static int64_t run_one(const bn_args *given) {
    bn_args copy = *given;
    const bn_args *a = &copy;
    /* Below 64 KB waking a thread costs more than it saves. */
    if (a->batch * a->channels * a->positions <= 16384) copy.threads = 1;
    const isa *with = &isas[bn_isa_current()];
    call k = {.a = a, .count = marked(a)};
    if (a->operation == BN_GRAD_APPLY) k.count = a->total;
    if (k.count == 0 && a->operation == BN_TRAIN) return -2;
    k.group = is_matrix(a) ? a->positions : 0;
    k.rows = a->batch;
    k.columns = a->channels * (k.group ? k.group : 1);
    if (k.group && k.columns < with->lanes) return -2;
    if (k.group > 1 && a->mask) return -2; /* a column there is one position, marked in some rows and not in others */

    expect_writes(a, a->out);
    expect_writes(a, a->out_residual);
    const size_t C = (size_t)a->channels;
    const size_t row = (C + 15) / 16 * 16; /* rows that begin at cache lines, so that no vector of them is in two */
    char *memory = block_for(row * (2 * sizeof(double) + 3 * sizeof(float)));
    if (!memory) return -1;
    k.mean = first_line(memory);
    k.var = k.mean + row;
    k.shift = (float *)(k.var + row);
    k.grad_x = k.shift + row;
    k.grad_1 = k.grad_x + row;
    int64_t status = with->run(&k);
    if (status == 0 && a->moments && (a->operation == BN_TRAIN || a->operation == BN_MOMENTS))
        for (size_t c = 0; c < C; c++) {
            a->moments[c] = k.count > 0 ? k.mean[c] : 0.0;
            a->moments[C + c] = k.count > 0 ? k.var[c] : 0.0;
        }
    if (status == 0 && a->operation == BN_TRAIN) status = update_running(&k);
    free(memory);
    return status;
}

/* ---- groups ------------------------------------------------------------------------------------------------- */

typedef struct {
    const bn_args *a;
    int64_t threads; /* within a group */
    float *grads;    /* [groups][2][channels] */
    _Atomic int64_t status;
} grouped;

static int64_t bits_of_sample(const bn_args *a) {
    if (is_matrix(a)) return (a->channels * a->positions + 7) / 8;
    return a->channels * ((a->positions + 7) / 8);
}

/* Group g is a batch of its own: neighbouring samples are neighbours in memory, whatever the layout. */
static void group_task(void *context, int64_t g) {
    grouped *all = context;
    bn_args b = *all->a;
    const int64_t rows = b.batch / b.samples, C = b.channels, size = b.dtype == BN_FLOAT32 ? 4 : 2;
    const int64_t first = g * b.samples / b.groups * rows, last = (g + 1) * b.samples / b.groups * rows;
    const int64_t bytes = first * C * b.positions * size;
    b.batch = last - first;
    b.threads = all->threads;
    b.mask = offset(b.mask, first * b.positions);
    b.x = offset(b.x, bytes);
    b.aux_data = offset(b.aux_data, bytes);
    b.bits = (uint8_t *)offset(b.bits, first * bits_of_sample(&b));
    b.dy = offset(b.dy, bytes);
    b.out = (void *)offset(b.out, bytes);
    b.out_residual = (void *)offset(b.out_residual, bytes);
    b.saved = (float *)offset(b.saved, g * BN_SAVED_ROWS * C * (int64_t)sizeof(float));
    b.moments = (double *)offset(b.moments, g * 2 * C * (int64_t)sizeof(double));
    b.sums = (double *)offset(b.sums, g * 2 * C * (int64_t)sizeof(double));
    if (b.grad_weight) b.grad_weight = all->grads + g * 2 * C;
    if (b.grad_bias) b.grad_bias = all->grads + g * 2 * C + C;
    int64_t status = run_one(&b);
    if (status < 0) atomic_store(&all->status, status);
}

static int64_t run_groups(const bn_args *a) {
    if (a->samples < a->groups || a->batch % a->samples || a->running_mean || a->running_var || a->batches)
        return -2;
    const int64_t G = a->groups, C = a->channels;
    grouped all = {.a = a, .threads = a->threads};
    all.grads = malloc((size_t)(G * 2 * C) * sizeof(float));
    if (!all.grads) return -1;
    /* Small groups are shared out among the threads; a large one is worth all of them. */
    if (G >= 2 * a->threads && a->batch * C * a->positions / G <= 262144) {
        all.threads = 1;
        parallel(a->threads, G, group_task, &all);
    } else {
        for (int64_t g = 0; g < G; g++) group_task(&all, g);
    }
    for (int64_t c = 0; c < C; c++) {
        double weight = 0, bias = 0;
        for (int64_t g = 0; a->grad_weight && g < G; g++) weight += (double)all.grads[g * 2 * C + c];
        for (int64_t g = 0; a->grad_bias && g < G; g++) bias += (double)all.grads[g * 2 * C + C + c];
        if (a->grad_weight) a->grad_weight[c] = (float)weight;
        if (a->grad_bias) a->grad_bias[c] = (float)bias;
    }
    free(all.grads);
    return atomic_load(&all.status);
}

int64_t bn_run(const bn_args *a) {
    if (a->batch <= 0 || a->channels <= 0 || a->positions <= 0 || a->threads <= 0) return -2;
    return a->groups > 1 ? run_groups(a) : run_one(a);
}
#endif
