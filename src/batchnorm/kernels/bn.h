/* The C ABI of the kernel: one struct in, one status out. `native.py` packs the same struct. */
#ifndef BATCHNORM_BN_H
#define BATCHNORM_BN_H

#include <stdint.h>

#if defined(_WIN32)
#define BN_API __declspec(dllexport)
#else
#define BN_API __attribute__((visibility("default")))
#endif

enum { BN_ABI = 5 };

/* TRAIN is MOMENTS then APPLY in one call, BACKWARD_TRAIN is GRAD_SUMS then GRAD_APPLY: the halves are for a caller who
 * does something in between, such as adding the sums of other processes. */
enum bn_operation {
    BN_TRAIN = 0,
    BN_EVAL = 1,
    BN_MOMENTS = 2,
    BN_APPLY = 3,
    BN_BACKWARD_TRAIN = 4,
    BN_BACKWARD_EVAL = 5,
    BN_GRAD_SUMS = 6,
    BN_GRAD_APPLY = 7
};
enum bn_dtype { BN_FLOAT32 = 0, BN_BFLOAT16 = 1 };
enum bn_activation { BN_NONE = 0, BN_RELU = 1, BN_CLIPPED = 2, BN_SILU = 3 };

/* Whether there is a residual, in `aux_data`. Behind one, x alone does not tell the backward pass the activation's slope:
 * with BITS the forward pass writes one bit an element (does the gradient pass?) and the backward pass reads them instead
 * of a tensor; silu, whose slope is no bit, reads the RESIDUAL again. */
enum bn_aux { BN_AUX_NONE = 0, BN_AUX_BITS = 1, BN_AUX_RESIDUAL = 2 };

/* `saved` holds five rows of C floats per group, written by the forward pass and read by the backward pass:
 * the mean as a float and what that float lost, the scale gamma/sigma, the offset beta minus the lost part, 1/sigma. */
enum bn_saved { BN_MEAN = 0, BN_MEAN_LOW = 1, BN_SCALE = 2, BN_OFFSET = 3, BN_INVSTD = 4, BN_SAVED_ROWS = 5 };

typedef struct {
    int64_t operation, dtype, activation, aux, threads;
    int64_t batch, channels, positions; /* x is [batch][channels][positions]; channels_last is positions == 1 */
    int64_t groups, samples; /* the samples of the batch fall into groups, as equal as can be, each with its statistics */
    const uint8_t *mask; /* [batch][positions], 0 or 1: what does not count is not read and becomes 0; NULL: all counts */
    const void *x, *aux_data, *dy;
    /* A row of bits begins at a byte, so that no two threads write to one. Rows are the (batch, channel) pairs or, where
     * positions are fewer than a vector's lanes, the samples: channels * ((positions + 7) / 8) bytes a sample are enough,
     * (channels + 7) / 8 if positions is 1, and four more at the end. Their order within a row is the kernel's own. */
    uint8_t *bits;
    void *out, *out_residual; /* y, or dx and the residual's gradient (may be NULL) */
    const float *weight, *bias;
    float *running_mean, *running_var; /* NULL: do not update (TRAIN, one group only); the statistics to use (EVAL) */
    int64_t *batches; /* TRAIN, one group only: one more, if the moments are finite (may be NULL) */
    float *saved, *grad_weight, *grad_bias;
    double *moments; /* [groups][2][channels], mean and biased variance: out of MOMENTS (and TRAIN, if given), into APPLY */
    double *sums;    /* [groups][2][channels], of g and of g*(x - mean): out of GRAD_SUMS, into GRAD_APPLY */
    double eps, momentum, slope, cap;
    double total; /* GRAD_APPLY: values per channel behind the sums */
} bn_args;

/* 0: done. k > 0: done, but channel k-1 is the first whose moments are not finite, and no running statistic was
 * touched. -1: out of memory. -2: arguments this build does not serve. */
BN_API int64_t bn_run(const bn_args *args);

/* Hand over the thread pool that torch uses: GOMP_parallel and omp_get_thread_num (GNU's entry points, which LLVM's and
 * Intel's OpenMP export too). Without it the kernel runs on the calling thread. */
BN_API void bn_use_openmp(void *gomp_parallel, void *omp_get_thread_num);

/* How many nanoseconds a cache line takes from one thread of the pool to another, or -1 if there is no other. The cores of a
 * virtual machine may come to stand in different groups, with a cache each, at any time: then it is several times as long,
 * and small batches are slower by up to a third. */
BN_API double bn_core_distance(void);

BN_API int64_t bn_abi(void);

/* Instruction sets: their number, their names, the one in use. bn_select returns 0, or -1 if the CPU lacks it. */
BN_API int64_t bn_isa_count(void);
BN_API const char *bn_isa_name(int64_t index);
BN_API int64_t bn_isa_current(void);
BN_API int64_t bn_isa_select(int64_t index);

#endif
