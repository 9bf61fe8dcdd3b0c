/* Batch Normalization on a CPU, in plain C. See bn.h for the interface and bn_simd.h for the arithmetic.
 *
 * This file holds what does not depend on the vector width: the choice of instruction set, the threads, the
 * conversion of sums into moments and coefficients, and the running statistics. */
#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE 1 /* madvise, which strict C hides */
#endif
#include "bn.h"

#include <math.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#define INLINE static inline __attribute__((always_inline))

/* ---- threads ------------------------------------------------------------------------------------------------ */

typedef void (*task_fn)(void *context, int64_t task);
typedef void (*gomp_parallel_fn)(void (*)(void *), void *, unsigned, unsigned);
typedef int (*thread_number_fn)(void);

static gomp_parallel_fn gomp_parallel;
static thread_number_fn thread_number;

enum { MAX_THREADS = 256 };

typedef struct {
    task_fn run;
    void *context;
    int64_t tasks, threads;
    struct {
        _Atomic int64_t next;
        char apart[64 - sizeof(int64_t)]; /* counters that do not share a cache line */
    } share[MAX_THREADS];
} job;

/* Every thread has a share of neighbouring tasks, the same one in every call, so that it meets its own data in its own
 * cache; when it is through, it helps the others, so that a thread that the system holds up holds up nobody. Which
 * thread runs a task never changes a result. */
static void work(void *data) {
    job *j = data;
    const int64_t me = j->threads > 1 ? thread_number() : 0;
    for (int64_t i = 0; i < j->threads; i++) {
        const int64_t s = (me + i) % j->threads, end = (s + 1) * j->tasks / j->threads;
        for (int64_t t; (t = atomic_fetch_add_explicit(&j->share[s].next, 1, memory_order_relaxed)) < end;)
            j->run(j->context, t);
    }
}

static void parallel(int64_t threads, int64_t tasks, task_fn run, void *context) {
    if (threads > tasks) threads = tasks;
    if (threads > MAX_THREADS) threads = MAX_THREADS;
    if (threads <= 1 || !gomp_parallel) {
        for (int64_t t = 0; t < tasks; t++) run(context, t);
        return;
    }
    job j;
    j.run = run, j.context = context, j.tasks = tasks, j.threads = threads;
    for (int64_t s = 0; s < threads; s++) atomic_init(&j.share[s].next, s * tasks / threads);
    gomp_parallel(work, &j, (unsigned)threads, 0);
}

void bn_use_openmp(void *parallel_entry, void *number_entry) {
    memcpy(&gomp_parallel, &parallel_entry, sizeof gomp_parallel);
    memcpy(&thread_number, &number_entry, sizeof thread_number);
}

/* ---- moments and coefficients ------------------------------------------------------------------------------- */

/* What one call carries through its phases. In the matrix view (see bn_simd.h) a column holds elements of one channel:
 * with the channel last it is the channel; with few positions per channel it is one position of it. */
typedef struct {
    const bn_args *a;
    double count;                 /* values per channel */
    double *mean, *var;           /* per channel; the variance is biased */
    float *shift;                 /* per channel: a guess of the mean, which the sums are taken around */
    float *grad_x, *grad_1;       /* backward: dx = (g + grad_x*(x - mean) + grad_1) * scale, per channel */
    int64_t block;                /* runs: channels per task */
    int64_t rows, columns, group; /* matrix: columns = channels * group; group 0 means runs */
    int64_t tile, chunks;         /* matrix: channels per tile, or chunks of rows; runs: chunks per channel */
    float *wide[5];               /* matrix, group > 1: coefficients repeated for every column */
    double *partial;              /* sums that several tasks make together */
} call;

/* An element's address, whatever the layout and the type. */
INLINE double element(const bn_args *a, int64_t n, int64_t c, int64_t s) {
    int64_t i = (n * a->channels + c) * a->positions + s;
    if (a->dtype == BN_FLOAT32) return ((const float *)a->x)[i];
    uint32_t bits = (uint32_t)((const uint16_t *)a->x)[i] << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* The last resort for numbers whose squares float32 cannot hold: two plain sweeps in double. */
static void exact_moments(call *k, int64_t c) {
    const bn_args *a = k->a;
    double sum = 0, squares = 0, rest = 0;
    for (int64_t n = 0; n < a->batch; n++)
        for (int64_t s = 0; s < a->positions; s++) sum += element(a, n, c, s);
    double mean = sum / k->count;
    for (int64_t n = 0; n < a->batch; n++)
        for (int64_t s = 0; s < a->positions; s++) {
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

/* The running averages, all or none: a batch with one bad channel leaves every buffer as it was. */
static int64_t update_running(call *k) {
    const bn_args *a = k->a;
    const double bessel = k->count > 1 ? k->count / (k->count - 1) : 1.0, keep = 1.0 - a->momentum;
    for (int64_t c = 0; c < a->channels; c++)
        if (!isfinite((float)k->mean[c]) || !isfinite((float)(k->var[c] * bessel))) return c + 1;
    for (int64_t c = 0; a->running_mean && c < a->channels; c++)
        a->running_mean[c] = (float)(a->momentum * k->mean[c] + keep * (double)a->running_mean[c]);
    for (int64_t c = 0; a->running_var && c < a->channels; c++)
        a->running_var[c] = (float)(a->momentum * (k->var[c] * bessel) + keep * (double)a->running_var[c]);
    return 0;
}

/* ---- one body, three instruction sets ----------------------------------------------------------------------- */

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

typedef struct {
    const char *name;
    int64_t (*run)(call *);
    int64_t lanes;
} isa;

static const isa isas[] = {
    {"baseline", run_baseline, 4},
#if defined(BN_X86)
    {"avx2", run_avx2, 8},
    {"avx512", run_avx512, 16},
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
    if (i == 2)
        return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
#endif
    return i == 0;
}

int64_t bn_isa_select(int64_t i) {
    if (i < 0 || i >= bn_isa_count() || !supported(i)) return -1;
    current = i;
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

int64_t bn_run(const bn_args *given) {
    bn_args copy = *given;
    const bn_args *a = &copy;
    if (a->batch <= 0 || a->channels <= 0 || a->positions <= 0) return -2;
    /* Below 64 KB waking a thread costs more than it saves. */
    if (a->batch * a->channels * a->positions <= 16384) copy.threads = 1;
    const isa *with = &isas[bn_isa_current()];
    call k = {.a = a, .count = (double)a->batch * (double)a->positions};
    /* A row of positions shorter than a vector is not worth a loop of its own: then the batch is a matrix whose
     * columns are the (channel, position) pairs. */
    k.group = a->positions < with->lanes ? a->positions : 0;
    k.rows = a->batch;
    k.columns = a->channels * (k.group ? k.group : 1);
    if (k.group && k.columns < with->lanes) return -2;

    expect_writes(a, a->out);
    expect_writes(a, a->out_residual);
    const size_t C = (size_t)a->channels;
    char *memory = malloc(C * (2 * sizeof(double) + 3 * sizeof(float)));
    if (!memory) return -1;
    k.mean = (double *)memory;
    k.var = k.mean + C;
    k.shift = (float *)(k.var + C);
    k.grad_x = k.shift + C;
    k.grad_1 = k.grad_x + C;
    int64_t status = with->run(&k);
    if (status == 0 && a->operation == BN_TRAIN) status = update_running(&k);
    free(memory);
    return status;
}
