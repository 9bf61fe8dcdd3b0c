/* The arithmetic, for vectors of BN_LANES floats; bn.c includes this file once per instruction set.
 *
 * Two views of the tensor serve all layouts:
 *   - "runs": [batch][channels][positions] with many positions. A channel is `batch` runs of contiguous floats. One
 *     task does a channel from its sums to its output, so the second sweep finds the data in the cache. A channel is
 *     cut into pieces only if there are too few channels for the threads.
 *   - "matrix": rows of columns, a vector holding neighbouring columns. The channel-last layout is one (columns are
 *     channels), and so is a batch with few positions (columns are channel x position, added up per channel).
 *
 * Two sweeps make every operation. The first takes two sums per channel, of u and of u*d with d = x - centre:
 *   forward   u = d              centre = a guess of the mean (d and d*d give the moments)
 *   backward  u = g = dy * act'  centre = the mean            (g and g*d give dbeta, dgamma, dx)
 * The second writes y = act(d*scale + offset [+ residual]) or dx = (g + d*grad_x + grad_1) * scale.
 *
 * At most eight numbers are added in float32 before they join a double, so the sums are as good as double sums for
 * a fraction of the conversions. Vectors are GCC's (and clang's) vector extensions, which any CPU can run; the few
 * conversions that compilers translate badly have intrinsics beside the general form.
 *
 * Every INLINE function takes its variants (dtype, activation, ...) as arguments that are constants after inlining:
 * the DISPATCH macro at the end of the sweeps makes the specialised copies. */

#define L BN_LANES
#define vf NAME(vf)
#define vfh NAME(vfh)
#define vdh NAME(vdh)
#define vd NAME(vd)
#define vi NAME(vi)
#define vu NAME(vu)
#define vh NAME(vh)
#define coefficients NAME(coefficients)

typedef float vf __attribute__((vector_size(4 * L)));
typedef float vfh __attribute__((vector_size(2 * L)));
typedef double vdh __attribute__((vector_size(4 * L)));
typedef struct {
    vdh low, high;
} vd;
typedef int32_t vi __attribute__((vector_size(4 * L)));
typedef uint32_t vu __attribute__((vector_size(4 * L)));
typedef uint16_t vh __attribute__((vector_size(2 * L)));

/* ---- vectors ------------------------------------------------------------------------------------------------ */

INLINE vf NAME(splat)(float v) { return (vf){0} + v; }

INLINE vf NAME(loadf)(const float *p) {
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE vd NAME(widened)(vf v) {
#if BN_ISA == 2
    return (vd){(vdh)_mm256_cvtps_pd(_mm256_castps256_ps128((__m256)v)),
                (vdh)_mm256_cvtps_pd(_mm256_extractf128_ps((__m256)v, 1))};
#elif BN_ISA == 3
    return (vd){(vdh)_mm512_cvtps_pd(_mm512_castps512_ps256((__m512)v)),
                (vdh)_mm512_cvtps_pd(_mm512_extractf32x8_ps((__m512)v, 1))};
#else
    vfh low, high;
    memcpy(&low, &v, sizeof low);
    memcpy(&high, (const char *)&v + sizeof low, sizeof high);
    return (vd){__builtin_convertvector(low, vdh), __builtin_convertvector(high, vdh)};
#endif
}

INLINE void NAME(add_at)(double *p, vf v) {
    vd w = NAME(widened)(v);
    vdh low, high;
    memcpy(&low, p, sizeof low);
    memcpy(&high, p + L / 2, sizeof high);
    low += w.low;
    high += w.high;
    memcpy(p, &low, sizeof low);
    memcpy(p + L / 2, &high, sizeof high);
}

/* bfloat16 is the upper half of a float32. */
INLINE vf NAME(load)(const void *p, int64_t i, int bf16) {
    if (!bf16) return NAME(loadf)((const float *)p + i);
    vh half;
    memcpy(&half, (const uint16_t *)p + i, sizeof half);
#if BN_ISA == 2
    return (vf)((vu)_mm256_cvtepu16_epi32((__m128i)half) << 16);
#else
    return (vf)(__builtin_convertvector(half, vu) << 16);
#endif
}

/* Round to nearest even; a NaN stays a NaN though the bits that make it one are cut off. */
INLINE void NAME(store)(void *p, int64_t i, vf v, int bf16) {
    if (!bf16) {
        memcpy((float *)p + i, &v, sizeof v);
        return;
    }
    vu bits = (vu)v, nan = (vu)(v != v);
    bits = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    bits = (bits & ~nan) | (nan & 0x7fc0);
    vh half = __builtin_convertvector(bits, vh);
    memcpy((uint16_t *)p + i, &half, sizeof half);
}

INLINE double NAME(total)(const vd *v) {
    vdh half = v->low + v->high;
    double sum = 0;
    for (int i = 0; i < L / 2; i++) sum += half[i];
    return sum;
}

/* All ones in the last n lanes: a vector that overlaps the one before it counts only what is new. */
INLINE vi NAME(last_lanes)(int64_t n) {
    static const int32_t table[32] = {[16] = -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1};
    vi mask;
    memcpy(&mask, table + 16 - L + n, sizeof mask);
    return mask;
}

INLINE vf NAME(select)(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }

/* ---- activations -------------------------------------------------------------------------------------------- */

/* e^x for -87 <= x <= 88: x = n ln2 + r, |r| <= ln2 / 2, Taylor's seventh degree in r (error below 1e-8), 2^n by its bits. */
INLINE vf NAME(exponential)(vf x) {
    const vf magic = NAME(splat)(12582912.0f); /* 1.5 * 2^23 */
    vf n = (x * 1.44269504f + magic) - magic;
    vf r = (x - n * 0.693359375f) - n * -2.12194440e-4f; /* ln2 in two parts: the first product is exact */
    vf p = r * (1.0f / 5040) + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    return (vf)((vi)p + (__builtin_convertvector(n, vi) << 23));
}

/* Bounds for silu: below -88 it and its slope are 0 for a float, above 87 the sigmoid is 1. A NaN stays. */
INLINE vf NAME(at_least)(vf z, float low) { return NAME(select)(z < NAME(splat)(low), NAME(splat)(low), z); }
INLINE vf NAME(at_most)(vf z, float high) { return NAME(select)(z > NAME(splat)(high), NAME(splat)(high), z); }

/* BN_CLIPPED is z where 0 < z < cap, slope*z below, cap above: relu6 and leaky_relu. Comparisons are written so that
 * a NaN passes through, as in torch. */
INLINE vf NAME(activate)(vf z, const bn_args *a, int act) {
    const vf zero = {0}, cap = zero + (float)a->cap, lowest = zero - 3.4028235e38f;
    switch (act) {
    case BN_RELU: return (vf)((vi)z & ~(z <= zero));
    case BN_CLIPPED:
        z = NAME(select)(z <= zero, NAME(select)(z < lowest, lowest, z) * (float)a->slope, z);
        return NAME(select)(z > cap, cap, z);
    case BN_SILU:
        z = NAME(at_least)(z, -88.0f);
        return z / (1.0f + NAME(exponential)(-NAME(at_most)(z, 87.0f)));
    default: return z;
    }
}

/* dy times the activation's slope; `z` is the activation's input, or its output where that tells the same. */
INLINE vf NAME(through)(vf dy, vf z, const bn_args *a, int act) {
    const vf zero = {0}, cap = zero + (float)a->cap;
    switch (act) {
    case BN_RELU: return (vf)((vi)dy & ~(z <= zero));
    case BN_CLIPPED: return (vf)((vi)NAME(select)(z <= zero, dy * (float)a->slope, dy) & ~(z >= cap));
    case BN_SILU: {
        z = NAME(at_most)(NAME(at_least)(z, -88.0f), 87.0f);
        vf e = NAME(exponential)(-z), s = 1.0f / (1.0f + e);
        return dy * (s * (1.0f + z * (e * s))); /* e*s is 1 - s without its cancellation */
    }
    default: return dy;
    }
}

/* ---- one vector of elements --------------------------------------------------------------------------------- */

typedef struct {
    vf centre, scale, offset, grad_x, grad_1;
} coefficients;

/* The same for many channels or columns: where the coefficients of each are. */
typedef struct {
    const float *centre, *scale, *offset, *grad_x, *grad_1;
} NAME(columns);

/* The activation's input (or output, if that was kept) at element i. */
INLINE vf NAME(before_activation)(const bn_args *a, int64_t i, vf d, const coefficients *k, int aux, int bf16) {
    if (aux == BN_AUX_OUTPUT) return NAME(load)(a->aux_data, i, bf16);
    vf z = d * k->scale + k->offset;
    return aux == BN_AUX_RESIDUAL ? z + NAME(load)(a->aux_data, i, bf16) : z;
}

INLINE vf NAME(gradient)(const bn_args *a, int64_t i, vf d, const coefficients *k, int act, int aux, int bf16) {
    vf dy = NAME(load)(a->dy, i, bf16);
    if (act == BN_NONE) return dy;
    return NAME(through)(dy, NAME(before_activation)(a, i, d, k, aux, bf16), a, act);
}

/* First sweep: u and d of the vector at element i. `keep` stores g, the gradient of the residual. */
INLINE vf NAME(term)(const bn_args *a, int64_t i, vf *d, const coefficients *k, int backward, int keep, int act, int aux,
                     int bf16) {
    *d = NAME(load)(a->x, i, bf16) - k->centre;
    if (!backward) return *d;
    vf g = NAME(gradient)(a, i, *d, k, act, aux, bf16);
    if (keep) NAME(store)(a->out_residual, i, g, bf16);
    return g;
}

/* Second sweep. `keep`: g was stored by the first. */
INLINE void NAME(write)(const bn_args *a, int64_t i, const coefficients *k, int backward, int keep, int act, int aux,
                        int bf16) {
    vf d = NAME(load)(a->x, i, bf16) - k->centre;
    if (backward) {
        vf g = keep ? NAME(load)(a->out_residual, i, bf16) : NAME(gradient)(a, i, d, k, act, aux, bf16);
        NAME(store)(a->out, i, (g + (d * k->grad_x + k->grad_1)) * k->scale, bf16);
    } else {
        vf z = NAME(before_activation)(a, i, d, k, aux, bf16);
        NAME(store)(a->out, i, NAME(activate)(z, a, act), bf16);
    }
}

/* ---- runs: n contiguous elements of one channel, from element i; n >= L ------------------------------------- */

INLINE void NAME(sum_run)(const bn_args *a, int64_t i, int64_t n, const coefficients *k, vd *sums, int backward, int keep,
                          int act, int aux, int bf16) {
    vf d, u;
    vdh s_low = sums[0].low, s_high = sums[0].high, p_low = sums[1].low, p_high = sums[1].high;
    for (; n >= 8 * L; i += 8 * L, n -= 8 * L) {
        vf s[2] = {{0}, {0}}, p[2] = {{0}, {0}};
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) {
            u = NAME(term)(a, i + j * L, &d, k, backward, keep, act, aux, bf16);
            s[j & 1] += u;
            p[j & 1] += u * d;
        }
        vd ws = NAME(widened)(s[0] + s[1]), wp = NAME(widened)(p[0] + p[1]);
        s_low += ws.low, s_high += ws.high, p_low += wp.low, p_high += wp.high;
    }
    vf s = {0}, p = {0};
    for (; n >= L; i += L, n -= L) {
        u = NAME(term)(a, i, &d, k, backward, keep, act, aux, bf16);
        s += u;
        p += u * d;
    }
    if (n > 0) {
        u = NAME(term)(a, i + n - L, &d, k, backward, keep, act, aux, bf16);
        u = (vf)((vi)u & NAME(last_lanes)(n));
        s += u;
        p += u * d;
    }
    vd ws = NAME(widened)(s), wp = NAME(widened)(p);
    sums[0].low = s_low + ws.low, sums[0].high = s_high + ws.high;
    sums[1].low = p_low + wp.low, sums[1].high = p_high + wp.high;
}

INLINE void NAME(write_run)(const bn_args *a, int64_t i, int64_t n, const coefficients *k, int backward, int keep, int act,
                            int aux, int bf16) {
    for (; n >= 4 * L; i += 4 * L, n -= 4 * L) {
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) NAME(write)(a, i + j * L, k, backward, keep, act, aux, bf16);
    }
    for (; n >= L; i += L, n -= L) NAME(write)(a, i, k, backward, keep, act, aux, bf16);
    if (n > 0) NAME(write)(a, i + n - L, k, backward, keep, act, aux, bf16);
}

/* A channel is batch * pieces runs; `from`..`to` are the ones to do. Long runs are cut into pieces, each far longer
 * than a vector, so that one huge channel can be shared among threads. */
INLINE int64_t NAME(pieces)(const bn_args *a) { return a->positions >= 65536 ? a->positions / 32768 : 1; }

INLINE coefficients NAME(of_channel)(const NAME(columns) * w, int64_t c) {
    return (coefficients){NAME(splat)(w->centre[c]), NAME(splat)(w->scale[c]), NAME(splat)(w->offset[c]),
                          NAME(splat)(w->grad_x[c]), NAME(splat)(w->grad_1[c])};
}

/* Neighbouring channels c0..c1 together, so that short runs are read as one long stretch of memory. */
INLINE void NAME(sweep_runs)(const bn_args *arguments, int64_t c0, int64_t c1, int64_t from, int64_t to,
                             const NAME(columns) * columns, vd (*sums)[2], int backward, int keep, int act, int aux,
                             int bf16) {
    /* Copies, which stores through the output's pointer cannot be thought to change. */
    const bn_args copy = *arguments, *a = &copy;
    const NAME(columns) w = *columns;
    const int64_t cut = NAME(pieces)(a), S = a->positions;
    for (int64_t r = from; r < to; r++) {
        int64_t n = r, first = 0, last = S;
        if (cut > 1) {
            n = r / cut;
            first = (r % cut) * S / cut;
            last = (r % cut + 1) * S / cut;
        }
        for (int64_t c = c0; c < c1; c++) {
            const coefficients q = NAME(of_channel)(&w, c);
            const int64_t i = (n * a->channels + c) * S + first;
            if (sums) NAME(sum_run)(a, i, last - first, &q, sums[c - c0], backward, keep, act, aux, bf16);
            else NAME(write_run)(a, i, last - first, &q, backward, keep, act, aux, bf16);
        }
    }
}

/* ---- matrix: rows r0..r1 of columns c0..c1; c1 - c0 >= L ----------------------------------------------------- */

INLINE coefficients NAME(at)(const NAME(columns) * w, int64_t c) {
    return (coefficients){NAME(loadf)(w->centre + c), NAME(loadf)(w->scale + c), NAME(loadf)(w->offset + c),
                          NAME(loadf)(w->grad_x + c), NAME(loadf)(w->grad_1 + c)};
}

/* One vector of columns over `rows` rows of `width` elements, from element i. `fresh` lanes of the vector have not
 * been counted yet. */
INLINE void NAME(sum_columns)(const bn_args *a, int64_t i, int64_t width, int rows, int64_t fresh, const coefficients *q,
                              double *sum, double *product, int backward, int keep, int act, int aux, int bf16) {
    vf s[2] = {{0}, {0}}, p[2] = {{0}, {0}}, d;
#pragma GCC unroll 8
    for (int j = 0; j < rows; j++, i += width) {
        vf u = NAME(term)(a, i, &d, q, backward, keep, act, aux, bf16);
        s[j & 1] += u;
        p[j & 1] += u * d;
    }
    s[0] += s[1];
    p[0] += p[1];
    if (fresh < L) {
        s[0] = (vf)((vi)s[0] & NAME(last_lanes)(fresh));
        p[0] = (vf)((vi)p[0] & NAME(last_lanes)(fresh));
    }
    NAME(add_at)(sum, s[0]);
    NAME(add_at)(product, p[0]);
}

INLINE void NAME(sum_rows)(const bn_args *a, int64_t i, int64_t width, int rows, int64_t c0, int64_t c1,
                           const NAME(columns) * w, double *sum, double *product, int backward, int keep, int act, int aux,
                           int bf16) {
    /* Eight rows at a vector's width jump about in memory, and the hardware does not see through it: fetch the next
     * eight rows in the order of their addresses. */
    const int size = bf16 ? 2 : 4, lines = rows * L * size / 64;
    const char *next_x = (const char *)a->x + (i + rows * width) * size;
    const char *next_dy = (const char *)(backward ? a->dy : a->x) + (i + rows * width) * size;
    const int fetch = rows == 8 && c1 - c0 == width;
    int64_t c = c0;
    for (; c + L <= c1; c += L) {
        coefficients q = NAME(at)(w, c);
        for (int j = 0; fetch && j < lines; j++) {
            __builtin_prefetch(next_x);
            next_x += 64;
            if (backward) __builtin_prefetch(next_dy);
            next_dy += 64;
        }
        NAME(sum_columns)(a, i + c, width, rows, L, &q, sum + c, product + c, backward, keep, act, aux, bf16);
    }
    if (c < c1) {
        const int64_t last = c1 - L;
        coefficients q = NAME(at)(w, last);
        NAME(sum_columns)(a, i + last, width, rows, c1 - c, &q, sum + last, product + last, backward, keep, act, aux, bf16);
    }
}

/* One row at a time: memory is then written from end to end. */
INLINE void NAME(write_row)(const bn_args *a, int64_t i, int64_t c0, int64_t c1, const NAME(columns) * w, int backward,
                            int keep, int act, int aux, int bf16) {
    for (int64_t c = c0; c < c1; c += L) {
        const int64_t at = c + L <= c1 ? c : c1 - L;
        const coefficients q = NAME(at)(w, at);
        NAME(write)(a, i + at, &q, backward, keep, act, aux, bf16);
    }
}

INLINE void NAME(sweep_matrix)(const call *k, int64_t r, int64_t r1, int64_t c0, int64_t c1, const NAME(columns) * columns,
                               double *sum, double *product, int backward, int keep, int act, int aux, int bf16) {
    const bn_args copy = *k->a, *a = &copy;
    const NAME(columns) w = *columns;
    const int64_t n = k->columns;
    if (sum) {
        for (; r + 8 <= r1; r += 8)
            NAME(sum_rows)(a, r * n, n, 8, c0, c1, &w, sum, product, backward, keep, act, aux, bf16);
        for (; r < r1; r++) NAME(sum_rows)(a, r * n, n, 1, c0, c1, &w, sum, product, backward, keep, act, aux, bf16);
    } else {
        for (; r < r1; r++) NAME(write_row)(a, r * n, c0, c1, &w, backward, keep, act, aux, bf16);
    }
}

/* ---- the specialised copies --------------------------------------------------------------------------------- */

/* One copy per (activation, aux, dtype) that occurs: forward, the aux is the residual; backward, it is what tells the
 * slope; and the gradient of a residual is stored only where it differs from dy, that is, behind an activation. */
#define KEY(act, aux, bf16) (((act) * 3 + (aux)) * 2 + (bf16))
#define COPY(act, aux, CALL)                             \
    case KEY(act, aux, 0): CALL(act, aux, 0); break;     \
    case KEY(act, aux, 1): CALL(act, aux, 1); break;
#define PLAIN(CALL) COPY(BN_NONE, BN_AUX_NONE, CALL)
#define FORWARD(CALL)                                                              \
    PLAIN(CALL) COPY(BN_NONE, BN_AUX_RESIDUAL, CALL)                               \
    COPY(BN_RELU, BN_AUX_NONE, CALL) COPY(BN_RELU, BN_AUX_RESIDUAL, CALL)          \
    COPY(BN_CLIPPED, BN_AUX_NONE, CALL) COPY(BN_CLIPPED, BN_AUX_RESIDUAL, CALL)    \
    COPY(BN_SILU, BN_AUX_NONE, CALL) COPY(BN_SILU, BN_AUX_RESIDUAL, CALL)
#define KEPT(CALL) \
    COPY(BN_RELU, BN_AUX_OUTPUT, CALL) COPY(BN_CLIPPED, BN_AUX_OUTPUT, CALL) COPY(BN_SILU, BN_AUX_RESIDUAL, CALL)
#define BACKWARD(CALL)                                                                                     \
    PLAIN(CALL) KEPT(CALL)                                                                                 \
    COPY(BN_RELU, BN_AUX_NONE, CALL) COPY(BN_CLIPPED, BN_AUX_NONE, CALL) COPY(BN_SILU, BN_AUX_NONE, CALL)

static void NAME(runs)(const bn_args *a, int64_t c0, int64_t c1, int64_t from, int64_t to, const NAME(columns) * w,
                       vd (*sums)[2]) {
    const int backward = a->operation >= BN_BACKWARD_TRAIN, keep = a->out_residual != NULL;
    const int64_t key = KEY(a->activation, a->aux, a->dtype), plain = KEY(BN_NONE, BN_AUX_NONE, a->dtype);
#define FORWARD_SUM(act, aux, bf16) NAME(sweep_runs)(a, c0, c1, from, to, w, sums, 0, 0, act, aux, bf16)
#define FORWARD_WRITE(act, aux, bf16) NAME(sweep_runs)(a, c0, c1, from, to, w, NULL, 0, 0, act, aux, bf16)
#define BACKWARD_SUM(act, aux, bf16) NAME(sweep_runs)(a, c0, c1, from, to, w, sums, 1, 0, act, aux, bf16)
#define BACKWARD_WRITE(act, aux, bf16) NAME(sweep_runs)(a, c0, c1, from, to, w, NULL, 1, 0, act, aux, bf16)
#define KEPT_SUM(act, aux, bf16) NAME(sweep_runs)(a, c0, c1, from, to, w, sums, 1, 1, act, aux, bf16)
#define KEPT_WRITE(act, aux, bf16) NAME(sweep_runs)(a, c0, c1, from, to, w, NULL, 1, 1, act, aux, bf16)
#include "bn_copies.h"
}

static void NAME(matrix)(const call *k, int64_t r0, int64_t r1, int64_t c0, int64_t c1, const NAME(columns) * w,
                         double *sums, double *products) {
    const bn_args *a = k->a;
    const int backward = a->operation >= BN_BACKWARD_TRAIN, keep = a->out_residual != NULL;
    const int64_t key = KEY(a->activation, a->aux, a->dtype), plain = KEY(BN_NONE, BN_AUX_NONE, a->dtype);
#define FORWARD_SUM(act, aux, bf16) NAME(sweep_matrix)(k, r0, r1, c0, c1, w, sums, products, 0, 0, act, aux, bf16)
#define FORWARD_WRITE(act, aux, bf16) NAME(sweep_matrix)(k, r0, r1, c0, c1, w, NULL, NULL, 0, 0, act, aux, bf16)
#define BACKWARD_SUM(act, aux, bf16) NAME(sweep_matrix)(k, r0, r1, c0, c1, w, sums, products, 1, 0, act, aux, bf16)
#define BACKWARD_WRITE(act, aux, bf16) NAME(sweep_matrix)(k, r0, r1, c0, c1, w, NULL, NULL, 1, 0, act, aux, bf16)
#define KEPT_SUM(act, aux, bf16) NAME(sweep_matrix)(k, r0, r1, c0, c1, w, sums, products, 1, 1, act, aux, bf16)
#define KEPT_WRITE(act, aux, bf16) NAME(sweep_matrix)(k, r0, r1, c0, c1, w, NULL, NULL, 1, 1, act, aux, bf16)
#include "bn_copies.h"
}
#undef KEY
#undef COPY
#undef PLAIN
#undef FORWARD
#undef KEPT
#undef BACKWARD

/* ---- from sums to coefficients ------------------------------------------------------------------------------- */

static NAME(columns) NAME(of_channels)(const call *k, int shifted) {
    const float *saved = k->a->saved;
    const int64_t C = k->a->channels;
    return (NAME(columns)){shifted ? k->shift : saved + BN_MEAN * C, saved + BN_SCALE * C, saved + BN_OFFSET * C, k->grad_x,
                           k->grad_1};
}

/* The coefficients of y = (x - mean) * scale + offset. The mean is kept as a float plus the part that the float lost,
 * and the lost part goes into the offset: x - mean is then exact near the mean, however large the mean is, at no cost
 * per element. (This loop and the two below have no branches, so that they become vector code.) */
INLINE void NAME(coefficient_loop)(const call *k, int64_t c0, int64_t c1, const float *weight, const float *bias) {
    const int64_t C = k->a->channels;
    const double eps = k->a->eps, *means = k->mean, *vars = k->var;
    float *restrict saved = k->a->saved;
    for (int64_t c = c0; c < c1; c++) {
        double mean = means[c], invstd = 1.0 / sqrt(vars[c] + eps), scale = weight ? invstd * (double)weight[c] : invstd;
        float high = (float)mean;
        double low = mean - (double)high;
        saved[BN_MEAN * C + c] = high;
        saved[BN_MEAN_LOW * C + c] = (float)low;
        saved[BN_SCALE * C + c] = (float)scale;
        saved[BN_OFFSET * C + c] = (float)((bias ? (double)bias[c] : 0.0) - low * scale);
        saved[BN_INVSTD * C + c] = (float)invstd;
    }
}

static void NAME(set_coefficients)(const call *k, int64_t c0, int64_t c1) {
    const float *weight = k->a->weight, *bias = k->a->bias;
    if (weight && bias) NAME(coefficient_loop)(k, c0, c1, weight, bias);
    else if (weight) NAME(coefficient_loop)(k, c0, c1, weight, NULL);
    else NAME(coefficient_loop)(k, c0, c1, NULL, bias);
}

/* Moments of channels c0..c1 from the sums of d = x - shift and of d*d; sums[0] belongs to c0. A shift within two sigma
 * of the mean lets at most four fifths of the squares cancel. Returns 1 if some sums must be taken again. */
static int NAME(finish_moments)(call *k, int64_t c0, int64_t c1, const double *restrict sums, const double *restrict squares,
                                int final) {
    const double inverse = 1.0 / k->count;
    const float *shift = k->shift;
    double *restrict means = k->mean, *restrict vars = k->var;
    int64_t doubts = 0;
    int again = 0;
    for (int64_t c = c0; c < c1; c++) {
        double s = sums[c - c0], q = squares[c - c0], d = s * inverse, dd = d * d, var = q * inverse - dd;
        means[c] = (double)shift[c] + d;
        vars[c] = var > 0 ? var : 0;
        doubts += !(((var >= 1e-30) & (var <= 1e30) & (dd <= 4 * var)) | ((s == 0) & (q == 0)));
    }
    for (int64_t c = c0; doubts && c < c1; c++) {
        double s = sums[c - c0], q = squares[c - c0], d = s * inverse, dd = d * d, var = q * inverse - dd;
        if (!((var >= 1e-30 && var <= 1e30 && dd <= 4 * var) || (s == 0 && q == 0)))
            again |= doubtful_moments(k, c, s, q, final);
    }
    if (!again) NAME(set_coefficients)(k, c0, c1);
    return again;
}

/* Backward, from the sums of g and of g*(x - mean): the gradients of gamma and beta, the coefficients of dx. */
static void NAME(finish_gradients)(call *k, int64_t c0, int64_t c1, const double *restrict sums,
                                   const double *restrict products) {
    const bn_args *a = k->a;
    const int64_t C = a->channels;
    const int fixed = a->operation == BN_BACKWARD_EVAL; /* constants: an infinite x must not reach its neighbours */
    const double inverse = 1.0 / k->count;
    const float *saved = a->saved;
    float *restrict grad_x = k->grad_x, *restrict grad_1 = k->grad_1;
    for (int64_t c = c0; c < c1; c++) {
        double low = saved[BN_MEAN_LOW * C + c], invstd = saved[BN_INVSTD * C + c];
        double sum = sums[c - c0], centred = products[c - c0] - low * sum;
        double slope = -invstd * (invstd * (centred * inverse)), constant = -sum * inverse - slope * low;
        grad_x[c] = (float)(fixed ? 0.0 : slope);
        grad_1[c] = (float)(fixed ? 0.0 : constant);
    }
    for (int64_t c = c0; a->grad_weight && c < c1; c++)
        a->grad_weight[c] = (float)((products[c - c0] - (double)saved[BN_MEAN_LOW * C + c] * sums[c - c0]) *
                                    (double)saved[BN_INVSTD * C + c]);
    for (int64_t c = c0; a->grad_bias && c < c1; c++) a->grad_bias[c] = (float)sums[c - c0];
}

/* Returns 1 if the sums must be taken again, around a better shift. */
static int NAME(finish)(call *k, int64_t c0, int64_t c1, const double *sums, const double *products, int final) {
    if (k->a->operation == BN_TRAIN) return NAME(finish_moments)(k, c0, c1, sums, products, final);
    NAME(finish_gradients)(k, c0, c1, sums, products);
    return 0;
}

static int NAME(needs_sums)(const bn_args *a) {
    return a->operation == BN_TRAIN || a->operation == BN_BACKWARD_TRAIN ||
           (a->operation == BN_BACKWARD_EVAL && (a->grad_weight || a->grad_bias || a->out_residual));
}

/* ---- tasks on runs ------------------------------------------------------------------------------------------ */

enum { NAME(MAX_BLOCK) = 32 };

/* A guess of the mean from the middle of four runs. */
static void NAME(guess_runs)(call *k, int64_t c0, int64_t c1) {
    const bn_args *a = k->a;
    const int64_t S = a->positions, middle = (S - L) / 2;
    for (int64_t c = c0; c < c1; c++) {
        vf sum = {0};
        for (int j = 0; j < 4; j++) {
            int64_t i = ((j * a->batch / 4) * a->channels + c) * S + middle;
            sum += NAME(load)(a->x, i, a->dtype == BN_BFLOAT16);
        }
        vd wide = NAME(widened)(sum);
        float guess = (float)(NAME(total)(&wide) / (4 * L));
        k->shift[c] = isfinite(guess) ? guess : 0;
    }
}

/* Sums of channels c0..c1 over the runs from..to, as plain doubles. */
static void NAME(run_sums)(call *k, int64_t c0, int64_t c1, int64_t from, int64_t to, double *sums, double *products) {
    vd vectors[NAME(MAX_BLOCK)][2];
    memset(vectors, 0, (size_t)(c1 - c0) * sizeof *vectors);
    const NAME(columns) w = NAME(of_channels)(k, k->a->operation == BN_TRAIN);
    NAME(runs)(k->a, c0, c1, from, to, &w, vectors);
    for (int64_t c = 0; c < c1 - c0; c++) {
        sums[c] = NAME(total)(&vectors[c][0]);
        products[c] = NAME(total)(&vectors[c][1]);
    }
}

/* The same over all runs: chunk by chunk, as threads that share a channel would, so that the bits are the same. */
static void NAME(channel_sums)(call *k, int64_t c0, int64_t c1, int64_t all, double *sums, double *products) {
    NAME(run_sums)(k, c0, c1, 0, all / k->chunks, sums, products);
    for (int64_t chunk = 1; chunk < k->chunks; chunk++) {
        double s[NAME(MAX_BLOCK)], p[NAME(MAX_BLOCK)];
        NAME(run_sums)(k, c0, c1, chunk * all / k->chunks, (chunk + 1) * all / k->chunks, s, p);
        for (int64_t c = 0; c < c1 - c0; c++) sums[c] += s[c], products[c] += p[c];
    }
}

/* Whole channels, sums to output. */
static void NAME(channels_task)(void *context, int64_t task) {
    call *k = context;
    const bn_args *a = k->a;
    const int64_t all = a->batch * NAME(pieces)(a), c0 = task * k->block;
    const int64_t c1 = c0 + k->block < a->channels ? c0 + k->block : a->channels;
    double sums[NAME(MAX_BLOCK)], products[NAME(MAX_BLOCK)];
    if (a->operation == BN_TRAIN) NAME(guess_runs)(k, c0, c1);
    for (int final = 0, again = NAME(needs_sums)(a); again; final = 1) {
        NAME(channel_sums)(k, c0, c1, all, sums, products);
        again = NAME(finish)(k, c0, c1, sums, products, final);
    }
    const NAME(columns) w = NAME(of_channels)(k, 0);
    NAME(runs)(a, c0, c1, 0, all, &w, NULL);
}

/* The same in two phases, a channel cut into chunks: task = channel * chunks + chunk. */
static void NAME(chunk_of_runs)(const call *k, int64_t task, int64_t *c, int64_t *from, int64_t *to) {
    const int64_t all = k->a->batch * NAME(pieces)(k->a), chunk = task % k->chunks;
    *c = task / k->chunks;
    *from = chunk * all / k->chunks;
    *to = (chunk + 1) * all / k->chunks;
}

static void NAME(chunk_sums)(void *context, int64_t task) {
    call *k = context;
    int64_t c, from, to;
    NAME(chunk_of_runs)(k, task, &c, &from, &to);
    NAME(run_sums)(k, c, c + 1, from, to, k->partial + 2 * task, k->partial + 2 * task + 1);
}

static void NAME(chunk_write)(void *context, int64_t task) {
    call *k = context;
    int64_t c, from, to;
    NAME(chunk_of_runs)(k, task, &c, &from, &to);
    const NAME(columns) w = NAME(of_channels)(k, 0);
    NAME(runs)(k->a, c, c + 1, from, to, &w, NULL);
}

static int64_t NAME(run_runs)(call *k) {
    const bn_args *a = k->a;
    const int64_t C = a->channels, all = a->batch * NAME(pieces)(a), threads = a->threads;
    /* So few channels that threads could idle are summed in chunks, cut or not: as in run_matrix, up to 16 threads no
     * bit depends on their number. */
    const int64_t most = threads > 16 ? threads : 16;
    k->chunks = C >= 4 * most ? 1 : all < most ? all : most;
    if (threads <= 1 || C >= 4 * threads || C % threads == 0 || all == 1) {
        /* Stretches of about 8 KB, as long as every thread gets a few tasks. */
        k->block = 2048 / a->positions;
        if (k->block > C / (4 * threads)) k->block = C / (4 * threads);
        if (k->block > NAME(MAX_BLOCK)) k->block = NAME(MAX_BLOCK);
        if (k->block < 1) k->block = 1;
        parallel(threads, (C + k->block - 1) / k->block, NAME(channels_task), k);
        return 0;
    }
    k->partial = malloc((size_t)(2 * C * k->chunks) * sizeof(double));
    if (!k->partial) return -1;
    if (a->operation == BN_TRAIN) NAME(guess_runs)(k, 0, C);
    for (int final = 0, again = NAME(needs_sums)(a); again; final = 1) {
        parallel(threads, C * k->chunks, NAME(chunk_sums), k);
        again = 0;
        for (int64_t c = 0; c < C; c++) {
            double sum = 0, product = 0;
            for (int64_t i = c * k->chunks; i < (c + 1) * k->chunks; i++) {
                sum += k->partial[2 * i];
                product += k->partial[2 * i + 1];
            }
            again |= NAME(finish)(k, c, c + 1, &sum, &product, final);
        }
    }
    parallel(threads, C * k->chunks, NAME(chunk_write), k);
    free(k->partial);
    return 0;
}

/* ---- tasks on the matrix ------------------------------------------------------------------------------------ */

/* Coefficients as the columns see them: the channels' own, or copies with every value repeated. */
static NAME(columns) NAME(of_columns)(call *k, int64_t c0, int64_t c1, int shifted, int fill) {
    const NAME(columns) own = NAME(of_channels)(k, shifted);
    if (k->group == 1) return own;
    const float *from[5] = {own.centre, own.scale, own.offset, own.grad_x, own.grad_1};
    for (int j = 0; fill && j < 5; j++)
        for (int64_t c = c0; c < c1; c++)
            for (int64_t s = 0; s < k->group; s++) k->wide[j][c * k->group + s] = from[j][c];
    return (NAME(columns)){k->wide[0], k->wide[1], k->wide[2], k->wide[3], k->wide[4]};
}

/* A guess of the mean from eight rows spread over the batch. */
static void NAME(guess_columns)(call *k, int64_t c0, int64_t c1) {
    const bn_args *a = k->a;
    const int64_t g = k->group;
    for (int64_t c = c0; c < c1; c++) k->shift[c] = 0;
    for (int j = 0; j < 8; j++) {
        const int64_t n = j * k->rows / 8;
        int64_t c = c0;
        for (; g == 1 && c + L <= c1; c += L) {
            vf sum = NAME(loadf)(k->shift + c) + NAME(load)(a->x, n * k->columns + c, a->dtype == BN_BFLOAT16);
            NAME(store)(k->shift, c, sum, 0);
        }
        for (; c < c1; c++)
            for (int64_t s = 0; s < g; s++) k->shift[c] += (float)element(a, n, c, s);
    }
    for (int64_t c = c0; c < c1; c++) k->shift[c] = isfinite(k->shift[c]) ? k->shift[c] / (float)(8 * g) : 0;
}

/* Finish channels c0..c1 from the sums of their columns, which are first added up per channel, in place. */
static int NAME(finish_columns)(call *k, int64_t c0, int64_t c1, double *sums, double *products, int final) {
    for (int64_t c = 0; k->group > 1 && c < c1 - c0; c++) {
        double s = 0, p = 0;
        for (int64_t j = c * k->group; j < (c + 1) * k->group; j++) s += sums[j], p += products[j];
        sums[c] = s;
        products[c] = p;
    }
    return NAME(finish)(k, c0, c1, sums, products, final);
}

/* Few rows: a tile of columns, sums to output, while it is in the cache. */
static void NAME(tile_task)(void *context, int64_t task) {
    call *k = context;
    const bn_args *a = k->a;
    const int train = a->operation == BN_TRAIN;
    const int64_t g = k->group, c0 = task * k->tile, rest = a->channels - c0;
    /* The last tile takes what would be too little for one of its own. */
    const int64_t c1 = c0 + (rest < 2 * k->tile ? rest : k->tile);
    double *sums = k->partial, *products = k->partial + k->columns;
    if (train) NAME(guess_columns)(k, c0, c1);
    for (int final = 0, again = NAME(needs_sums)(a); again; final = 1) {
        const NAME(columns) w = NAME(of_columns)(k, c0, c1, train, 1);
        memset(sums + c0 * g, 0, (size_t)((c1 - c0) * g) * sizeof *sums);
        memset(products + c0 * g, 0, (size_t)((c1 - c0) * g) * sizeof *sums);
        NAME(matrix)(k, 0, k->rows, c0 * g, c1 * g, &w, sums, products);
        again = NAME(finish_columns)(k, c0, c1, sums + c0 * g, products + c0 * g, final);
    }
    const NAME(columns) w = NAME(of_columns)(k, c0, c1, 0, 1);
    NAME(matrix)(k, 0, k->rows, c0 * g, c1 * g, &w, NULL, NULL);
}

/* Many rows: chunks of rows, in two phases. */
static void NAME(rows_sums)(void *context, int64_t task) {
    call *k = context;
    double *sums = k->partial + task * 2 * k->columns;
    memset(sums, 0, (size_t)(2 * k->columns) * sizeof *sums);
    const NAME(columns) w = NAME(of_columns)(k, 0, 0, k->a->operation == BN_TRAIN, 0);
    const int64_t from = task * k->rows / k->chunks, to = (task + 1) * k->rows / k->chunks;
    NAME(matrix)(k, from, to, 0, k->columns, &w, sums, sums + k->columns);
}

/* Last chunk first: it is what the first phase left in the cache. */
static void NAME(rows_write)(void *context, int64_t task) {
    call *k = context;
    const NAME(columns) w = NAME(of_columns)(k, 0, 0, 0, 0);
    task = k->chunks - 1 - task;
    NAME(matrix)(k, task * k->rows / k->chunks, (task + 1) * k->rows / k->chunks, 0, k->columns, &w, NULL, NULL);
}

static void NAME(run_rows)(call *k) {
    const bn_args *a = k->a;
    const int64_t C = a->channels;
    const int train = a->operation == BN_TRAIN;
    if (train) NAME(guess_columns)(k, 0, C);
    for (int final = 0, again = NAME(needs_sums)(a); again; final = 1) {
        NAME(of_columns)(k, 0, C, train, 1);
        parallel(a->threads, k->chunks, NAME(rows_sums), k);
        for (int64_t t = 1; t < k->chunks; t++)
            for (int64_t j = 0; j < 2 * k->columns; j++) k->partial[j] += k->partial[t * 2 * k->columns + j];
        again = NAME(finish_columns)(k, 0, C, k->partial, k->partial + k->columns, final);
    }
    NAME(of_columns)(k, 0, C, 0, 1);
    parallel(a->threads, k->chunks, NAME(rows_write), k);
}

static int64_t NAME(run_matrix)(call *k) {
    const bn_args *a = k->a;
    const int64_t columns = k->columns, rows = k->rows;
    const int tiled = rows <= 256 && NAME(needs_sums)(a);
    /* Up to 16 threads the chunks do not depend on their number, and so neither does any bit of the result. */
    k->chunks = tiled ? 1 : a->threads > 16 ? a->threads : 16;
    if (k->chunks > (rows + 7) / 8) k->chunks = (rows + 7) / 8;
    const size_t wide = k->group > 1 ? 5 * (size_t)columns * sizeof(float) : 0;
    char *memory = malloc((size_t)(2 * columns * k->chunks) * sizeof(double) + wide);
    if (!memory) return -1;
    k->partial = (double *)memory;
    for (int j = 0; j < 5; j++) k->wide[j] = (float *)(k->partial + 2 * columns * k->chunks) + j * columns;
    if (tiled) {
        /* A tile of about 512 KB, of whole channels and at least 64 columns (four cache lines). */
        int64_t tile = (131072 / rows + 63) / 64 * 64;
        int64_t share = (columns + a->threads - 1) / a->threads;
        if (tile > share) tile = (share + 63) / 64 * 64;
        k->tile = (tile + k->group - 1) / k->group;
        int64_t tasks = a->channels / k->tile;
        parallel(a->threads, tasks > 0 ? tasks : 1, NAME(tile_task), k);
    } else {
        NAME(run_rows)(k);
    }
    free(memory);
    return 0;
}

static int64_t NAME(run)(call *k) {
    const bn_args *a = k->a;
    for (int64_t c = 0; c < a->channels; c++) k->grad_x[c] = k->grad_1[c] = 0;
    if (a->operation == BN_EVAL) {
        for (int64_t c = 0; c < a->channels; c++) {
            k->mean[c] = a->running_mean[c];
            k->var[c] = a->running_var[c];
        }
        NAME(set_coefficients)(k, 0, a->channels);
    }
    return k->group ? NAME(run_matrix)(k) : NAME(run_runs)(k);
}

#undef L
#undef vf
#undef vfh
#undef vdh
#undef vd
#undef vi
#undef vu
#undef vh
#undef coefficients
