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
 * The second writes y = act(d*scale + offset [+ residual]) or dx = g*scale + d*grad_x + grad_1.
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

INLINE void NAME(add)(vd *sum, vf v) {
    vd w = NAME(widened)(v);
    sum->low += w.low;
    sum->high += w.high;
}

INLINE void NAME(add_at)(double *p, vf v) {
    vd sum;
    memcpy(&sum, p, sizeof sum);
    NAME(add)(&sum, v);
    memcpy(p, &sum, sizeof sum);
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

/* e^x for |x| < 88: x = n ln2 + r, |r| <= ln2 / 2, Taylor's seventh degree in r (error below 1e-8), 2^n by its bits. */
INLINE vf NAME(exponential)(vf x) {
    const vf high = NAME(splat)(88.0f), low = NAME(splat)(-87.0f), magic = NAME(splat)(12582912.0f); /* 1.5 * 2^23 */
    x = NAME(select)(x > high, high, x);
    x = NAME(select)(x < low, low, x);
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

INLINE vf NAME(sigmoid)(vf z) { return 1.0f / (1.0f + NAME(exponential)(-z)); }

/* Comparisons are written so that a NaN passes through, as in torch. */
INLINE vf NAME(activate)(vf z, float slope, int act) {
    const vf zero = {0}, six = zero + 6.0f;
    switch (act) {
    case BN_RELU: return (vf)((vi)z & ~(z <= zero));
    case BN_RELU6: z = (vf)((vi)z & ~(z <= zero)); return NAME(select)(z > six, six, z);
    case BN_LEAKY_RELU: return NAME(select)(z <= zero, z * slope, z);
    case BN_SILU: return z * NAME(sigmoid)(z);
    default: return z;
    }
}

/* dy times the activation's slope; `z` is the activation's input, or its output where that tells the same. */
INLINE vf NAME(through)(vf dy, vf z, float slope, int act) {
    const vf zero = {0}, six = zero + 6.0f;
    switch (act) {
    case BN_RELU: return (vf)((vi)dy & ~(z <= zero));
    case BN_RELU6: return (vf)((vi)dy & ~((z <= zero) | (z >= six)));
    case BN_LEAKY_RELU: return NAME(select)(z <= zero, dy * slope, dy);
    case BN_SILU: {
        vf s = NAME(sigmoid)(z);
        return dy * (s * (1.0f + z * (1.0f - s)));
    }
    default: return dy;
    }
}

/* ---- one vector of elements --------------------------------------------------------------------------------- */

typedef struct {
    vf centre, scale, offset, grad_x, grad_1;
} coefficients;

/* The activation's input (or output, if that was kept) at element i. */
INLINE vf NAME(before_activation)(const bn_args *a, int64_t i, vf d, const coefficients *k, int aux, int bf16) {
    if (aux == BN_AUX_OUTPUT) return NAME(load)(a->aux_data, i, bf16);
    vf z = d * k->scale + k->offset;
    return aux == BN_AUX_RESIDUAL ? z + NAME(load)(a->aux_data, i, bf16) : z;
}

INLINE vf NAME(gradient)(const bn_args *a, int64_t i, vf d, const coefficients *k, int act, int aux, int bf16) {
    vf dy = NAME(load)(a->dy, i, bf16);
    if (act == BN_NONE) return dy;
    return NAME(through)(dy, NAME(before_activation)(a, i, d, k, aux, bf16), (float)a->slope, act);
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
        NAME(store)(a->out, i, g * k->scale + (d * k->grad_x + k->grad_1), bf16);
    } else {
        vf z = NAME(before_activation)(a, i, d, k, aux, bf16);
        NAME(store)(a->out, i, NAME(activate)(z, (float)a->slope, act), bf16);
    }
}

/* ---- runs: n contiguous elements of one channel, from element i; n >= L ------------------------------------- */

INLINE void NAME(sum_run)(const bn_args *a, int64_t i, int64_t n, const coefficients *k, vd *sums, int backward, int keep,
                          int act, int aux, int bf16) {
    vf d, u;
    for (; n >= 8 * L; i += 8 * L, n -= 8 * L) {
        vf s[2] = {{0}, {0}}, p[2] = {{0}, {0}};
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) {
            u = NAME(term)(a, i + j * L, &d, k, backward, keep, act, aux, bf16);
            s[j & 1] += u;
            p[j & 1] += u * d;
        }
        NAME(add)(&sums[0], s[0] + s[1]);
        NAME(add)(&sums[1], p[0] + p[1]);
    }
    if (n == 0) return;
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
    NAME(add)(&sums[0], s);
    NAME(add)(&sums[1], p);
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

INLINE void NAME(sweep_runs)(const bn_args *a, int64_t c, int64_t from, int64_t to, const coefficients *k, vd *sums,
                             int backward, int keep, int act, int aux, int bf16) {
    const int64_t cut = NAME(pieces)(a), S = a->positions;
    const coefficients q = *k; /* copies, which stores through pointers cannot be thought to change */
    vd total[2];
    if (sums) memcpy(total, sums, sizeof total);
    for (int64_t r = from; r < to; r++) {
        int64_t n = r, first = 0, last = S;
        if (cut > 1) {
            n = r / cut;
            first = (r % cut) * S / cut;
            last = (r % cut + 1) * S / cut;
        }
        int64_t i = (n * a->channels + c) * S + first;
        if (sums) NAME(sum_run)(a, i, last - first, &q, total, backward, keep, act, aux, bf16);
        else NAME(write_run)(a, i, last - first, &q, backward, keep, act, aux, bf16);
    }
    if (sums) memcpy(sums, total, sizeof total);
}

/* ---- matrix: rows r0..r1 of columns c0..c1; c1 - c0 >= L ----------------------------------------------------- */

typedef struct {
    const float *centre, *scale, *offset, *grad_x, *grad_1;
} NAME(columns);

INLINE coefficients NAME(at)(const NAME(columns) * w, int64_t c) {
    return (coefficients){NAME(loadf)(w->centre + c), NAME(loadf)(w->scale + c), NAME(loadf)(w->offset + c),
                          NAME(loadf)(w->grad_x + c), NAME(loadf)(w->grad_1 + c)};
}

/* One vector of columns over `rows` rows. `fresh` lanes of the vector have not been counted yet. */
INLINE void NAME(sum_columns)(const call *k, int64_t r, int rows, int64_t c, int64_t fresh, const NAME(columns) * w,
                              double *sum, double *product, int backward, int keep, int act, int aux, int bf16) {
    coefficients q = NAME(at)(w, c);
    vf s[2] = {{0}, {0}}, p[2] = {{0}, {0}}, d;
#pragma GCC unroll 8
    for (int j = 0; j < rows; j++) {
        vf u = NAME(term)(k->a, (r + j) * k->columns + c, &d, &q, backward, keep, act, aux, bf16);
        s[j & 1] += u;
        p[j & 1] += u * d;
    }
    s[0] += s[1];
    p[0] += p[1];
    if (fresh < L) {
        s[0] = (vf)((vi)s[0] & NAME(last_lanes)(fresh));
        p[0] = (vf)((vi)p[0] & NAME(last_lanes)(fresh));
    }
    NAME(add_at)(sum + c, s[0]);
    NAME(add_at)(product + c, p[0]);
}

INLINE void NAME(sum_rows)(const call *k, int64_t r, int rows, int64_t c0, int64_t c1, const NAME(columns) * w, double *sum,
                           double *product, int backward, int keep, int act, int aux, int bf16) {
    int64_t c = c0;
    for (; c + L <= c1; c += L) NAME(sum_columns)(k, r, rows, c, L, w, sum, product, backward, keep, act, aux, bf16);
    if (c < c1) NAME(sum_columns)(k, r, rows, c1 - L, c1 - c, w, sum, product, backward, keep, act, aux, bf16);
}

INLINE void NAME(write_rows)(const call *k, int64_t r, int rows, int64_t c0, int64_t c1, const NAME(columns) * w,
                             int backward, int keep, int act, int aux, int bf16) {
    for (int64_t c = c0; c < c1; c += L) {
        int64_t at = c + L <= c1 ? c : c1 - L;
        coefficients q = NAME(at)(w, at);
#pragma GCC unroll 4
        for (int j = 0; j < rows; j++)
            NAME(write)(k->a, (r + j) * k->columns + at, &q, backward, keep, act, aux, bf16);
    }
}

INLINE void NAME(sweep_matrix)(const call *k, int64_t r0, int64_t r1, int64_t c0, int64_t c1, const NAME(columns) * w,
                               double *sum, double *product, int backward, int keep, int act, int aux, int bf16) {
    int64_t r = r0;
    if (sum) {
        for (; r + 8 <= r1; r += 8) NAME(sum_rows)(k, r, 8, c0, c1, w, sum, product, backward, keep, act, aux, bf16);
        for (; r < r1; r++) NAME(sum_rows)(k, r, 1, c0, c1, w, sum, product, backward, keep, act, aux, bf16);
    } else {
        for (; r + 4 <= r1; r += 4) NAME(write_rows)(k, r, 4, c0, c1, w, backward, keep, act, aux, bf16);
        for (; r < r1; r++) NAME(write_rows)(k, r, 1, c0, c1, w, backward, keep, act, aux, bf16);
    }
}

/* ---- the specialised copies --------------------------------------------------------------------------------- */

/* The first sweep forward knows nothing of activations; every other sweep has one copy per (act, aux, dtype). */
#define CASE(act, aux, bf16, CALL) \
    case ((act) * 3 + (aux)) * 2 + (bf16): CALL(act, aux, bf16); break;
#define BOTH(act, aux, CALL) CASE(act, aux, 0, CALL) CASE(act, aux, 1, CALL)
#define THREE(act, CALL) BOTH(act, 0, CALL) BOTH(act, 1, CALL) BOTH(act, 2, CALL)
#define DISPATCH(a, CALL)                                                                       \
    switch (((a)->activation * 3 + (a)->aux) * 2 + (a)->dtype) {                                \
        THREE(BN_NONE, CALL) THREE(BN_RELU, CALL) THREE(BN_RELU6, CALL) THREE(BN_LEAKY_RELU, CALL) THREE(BN_SILU, CALL) \
    }

static void NAME(runs)(const bn_args *a, int64_t c, int64_t from, int64_t to, const coefficients *k, vd *sums) {
    const int backward = a->operation >= BN_BACKWARD_TRAIN, keep = a->out_residual != NULL;
    if (!backward && sums) {
        if (a->dtype == BN_FLOAT32) NAME(sweep_runs)(a, c, from, to, k, sums, 0, 0, 0, 0, 0);
        else NAME(sweep_runs)(a, c, from, to, k, sums, 0, 0, 0, 0, 1);
    } else if (!backward) {
#define CALL(act, aux, bf16) NAME(sweep_runs)(a, c, from, to, k, NULL, 0, 0, act, aux, bf16)
        DISPATCH(a, CALL)
#undef CALL
    } else if (sums) {
        if (keep) {
#define CALL(act, aux, bf16) NAME(sweep_runs)(a, c, from, to, k, sums, 1, 1, act, aux, bf16)
            DISPATCH(a, CALL)
#undef CALL
        } else {
#define CALL(act, aux, bf16) NAME(sweep_runs)(a, c, from, to, k, sums, 1, 0, act, aux, bf16)
            DISPATCH(a, CALL)
#undef CALL
        }
    } else if (keep) {
        if (a->dtype == BN_FLOAT32) NAME(sweep_runs)(a, c, from, to, k, NULL, 1, 1, 0, 0, 0);
        else NAME(sweep_runs)(a, c, from, to, k, NULL, 1, 1, 0, 0, 1);
    } else {
#define CALL(act, aux, bf16) NAME(sweep_runs)(a, c, from, to, k, NULL, 1, 0, act, aux, bf16)
        DISPATCH(a, CALL)
#undef CALL
    }
}

static void NAME(matrix)(const call *k, int64_t r0, int64_t r1, int64_t c0, int64_t c1, const NAME(columns) * w,
                         double *sum, double *product) {
    const bn_args *a = k->a;
    const int backward = a->operation >= BN_BACKWARD_TRAIN, keep = a->out_residual != NULL;
    if (!backward && sum) {
        if (a->dtype == BN_FLOAT32) NAME(sweep_matrix)(k, r0, r1, c0, c1, w, sum, product, 0, 0, 0, 0, 0);
        else NAME(sweep_matrix)(k, r0, r1, c0, c1, w, sum, product, 0, 0, 0, 0, 1);
    } else if (!backward) {
#define CALL(act, aux, bf16) NAME(sweep_matrix)(k, r0, r1, c0, c1, w, NULL, NULL, 0, 0, act, aux, bf16)
        DISPATCH(a, CALL)
#undef CALL
    } else if (sum) {
        if (keep) {
#define CALL(act, aux, bf16) NAME(sweep_matrix)(k, r0, r1, c0, c1, w, sum, product, 1, 1, act, aux, bf16)
            DISPATCH(a, CALL)
#undef CALL
        } else {
#define CALL(act, aux, bf16) NAME(sweep_matrix)(k, r0, r1, c0, c1, w, sum, product, 1, 0, act, aux, bf16)
            DISPATCH(a, CALL)
#undef CALL
        }
    } else if (keep) {
        if (a->dtype == BN_FLOAT32) NAME(sweep_matrix)(k, r0, r1, c0, c1, w, NULL, NULL, 1, 1, 0, 0, 0);
        else NAME(sweep_matrix)(k, r0, r1, c0, c1, w, NULL, NULL, 1, 1, 0, 0, 1);
    } else {
#define CALL(act, aux, bf16) NAME(sweep_matrix)(k, r0, r1, c0, c1, w, NULL, NULL, 1, 0, act, aux, bf16)
        DISPATCH(a, CALL)
#undef CALL
    }
}
#undef CASE
#undef BOTH
#undef THREE
#undef DISPATCH

/* ---- tasks on runs ------------------------------------------------------------------------------------------ */

INLINE coefficients NAME(of_channel)(const call *k, int64_t c, int shifted) {
    const float *saved = k->a->saved;
    const int64_t C = k->a->channels;
    return (coefficients){NAME(splat)(shifted ? k->shift[c] : saved[BN_MEAN * C + c]), NAME(splat)(saved[BN_SCALE * C + c]),
                          NAME(splat)(saved[BN_OFFSET * C + c]), NAME(splat)(k->grad_x[c]), NAME(splat)(k->grad_1[c])};
}

/* A guess of the mean from the middle of four runs. */
static void NAME(guess_runs)(call *k, int64_t c) {
    const bn_args *a = k->a;
    const int64_t S = a->positions, middle = (S - L) / 2;
    vf sum = {0};
    for (int j = 0; j < 4; j++) {
        int64_t i = ((j * a->batch / 4) * a->channels + c) * S + middle;
        sum += NAME(load)(a->x, i, a->dtype == BN_BFLOAT16);
    }
    vd wide = NAME(widened)(sum);
    float guess = (float)(NAME(total)(&wide) / (4 * L));
    k->shift[c] = isfinite(guess) ? guess : 0;
}

/* Finish channel c from its sums. Returns 1 if the forward sums must be taken again around the better shift. */
static int NAME(finish)(call *k, int64_t c, double sum, double product, int final) {
    const bn_args *a = k->a;
    if (a->operation != BN_TRAIN) {
        finish_gradients(k, c, sum, product);
        return 0;
    }
    if (finish_moments(k, c, sum, product, final)) {
        k->shift[c] = (float)k->mean[c];
        return 1;
    }
    set_coefficients(a, c, k->mean[c], k->var[c]);
    return 0;
}

static int NAME(needs_sums)(const bn_args *a) {
    return a->operation == BN_TRAIN || a->operation == BN_BACKWARD_TRAIN ||
           (a->operation == BN_BACKWARD_EVAL && (a->grad_weight || a->grad_bias || a->out_residual));
}

/* A whole channel, sums to output. */
static void NAME(channel_task)(void *context, int64_t c) {
    call *k = context;
    const bn_args *a = k->a;
    const int64_t all = a->batch * NAME(pieces)(a);
    const int train = a->operation == BN_TRAIN;
    if (train) NAME(guess_runs)(k, c);
    if (NAME(needs_sums)(a)) {
        for (int final = 0; final < 2; final++) {
            coefficients q = NAME(of_channel)(k, c, train);
            vd sums[2] = {{{0}, {0}}, {{0}, {0}}};
            NAME(runs)(a, c, 0, all, &q, sums);
            if (!NAME(finish)(k, c, NAME(total)(&sums[0]), NAME(total)(&sums[1]), final)) break;
        }
    } else if (a->operation == BN_BACKWARD_EVAL) {
        k->grad_x[c] = k->grad_1[c] = 0;
    }
    coefficients q = NAME(of_channel)(k, c, 0);
    NAME(runs)(a, c, 0, all, &q, NULL);
}

/* The same in two phases, a channel cut into chunks: task = channel * chunks + chunk. */
static void NAME(piece_range)(const call *k, int64_t task, int64_t *c, int64_t *from, int64_t *to) {
    const int64_t all = k->a->batch * NAME(pieces)(k->a), chunk = task % k->chunks;
    *c = task / k->chunks;
    *from = chunk * all / k->chunks;
    *to = (chunk + 1) * all / k->chunks;
}

static void NAME(piece_sums)(void *context, int64_t task) {
    call *k = context;
    int64_t c, from, to;
    NAME(piece_range)(k, task, &c, &from, &to);
    coefficients q = NAME(of_channel)(k, c, k->a->operation == BN_TRAIN);
    vd sums[2] = {{{0}, {0}}, {{0}, {0}}};
    NAME(runs)(k->a, c, from, to, &q, sums);
    k->partial[2 * task] = NAME(total)(&sums[0]);
    k->partial[2 * task + 1] = NAME(total)(&sums[1]);
}

static void NAME(piece_write)(void *context, int64_t task) {
    call *k = context;
    int64_t c, from, to;
    NAME(piece_range)(k, task, &c, &from, &to);
    coefficients q = NAME(of_channel)(k, c, 0);
    NAME(runs)(k->a, c, from, to, &q, NULL);
}

static int64_t NAME(run_runs)(call *k) {
    const bn_args *a = k->a;
    const int64_t C = a->channels, all = a->batch * NAME(pieces)(a);
    /* Cut channels when there are so few of them that threads would idle. */
    if (a->threads <= 1 || C >= 2 * a->threads || C % a->threads == 0 || all == 1) {
        parallel(a->threads, C, NAME(channel_task), k);
        return 0;
    }
    k->chunks = all < 4 * a->threads ? all : 4 * a->threads;
    k->partial = malloc((size_t)(2 * C * k->chunks) * sizeof(double));
    if (!k->partial) return -1;
    if (a->operation == BN_TRAIN)
        for (int64_t c = 0; c < C; c++) NAME(guess_runs)(k, c);
    for (int64_t c = 0; c < C; c++) k->grad_x[c] = k->grad_1[c] = 0;
    for (int final = 0, again = NAME(needs_sums)(a); again; final = 1) {
        parallel(a->threads, C * k->chunks, NAME(piece_sums), k);
        again = 0;
        for (int64_t c = 0; c < C; c++) {
            double sum = 0, product = 0;
            for (int64_t i = c * k->chunks; i < (c + 1) * k->chunks; i++) {
                sum += k->partial[2 * i];
                product += k->partial[2 * i + 1];
            }
            again |= NAME(finish)(k, c, sum, product, final);
        }
    }
    parallel(a->threads, C * k->chunks, NAME(piece_write), k);
    free(k->partial);
    return 0;
}

/* ---- tasks on the matrix ------------------------------------------------------------------------------------ */

/* Coefficients as the columns see them: the channel's own arrays, or copies with every value repeated. */
static NAME(columns) NAME(view)(const call *k, int shifted) {
    const float *saved = k->a->saved;
    const int64_t C = k->a->channels;
    if (k->group > 1)
        return (NAME(columns)){k->wide[0], k->wide[1], k->wide[2], k->wide[3], k->wide[4]};
    return (NAME(columns)){shifted ? k->shift : saved + BN_MEAN * C, saved + BN_SCALE * C, saved + BN_OFFSET * C, k->grad_x,
                           k->grad_1};
}

static void NAME(widen)(call *k, int64_t c0, int64_t c1, int shifted) {
    if (k->group <= 1) return;
    const float *saved = k->a->saved;
    const int64_t C = k->a->channels, g = k->group;
    const float *from[5] = {shifted ? k->shift : saved + BN_MEAN * C, saved + BN_SCALE * C, saved + BN_OFFSET * C, k->grad_x,
                            k->grad_1};
    for (int j = 0; j < 5; j++)
        for (int64_t c = c0; c < c1; c++)
            for (int64_t s = 0; s < g; s++) k->wide[j][c * g + s] = from[j][c];
}

/* A guess of the mean from eight rows spread over the batch. */
static void NAME(guess_columns)(call *k, int64_t c0, int64_t c1) {
    const bn_args *a = k->a;
    const int64_t g = k->group;
    for (int64_t c = c0; c < c1; c++) k->shift[c] = 0;
    for (int j = 0; j < 8; j++) {
        const int64_t n = j * k->rows / 8;
        for (int64_t c = c0; c < c1; c++)
            for (int64_t s = 0; s < g; s++) k->shift[c] += (float)element(a, n, c, s);
    }
    for (int64_t c = c0; c < c1; c++) k->shift[c] = isfinite(k->shift[c]) ? k->shift[c] / (float)(8 * g) : 0;
}

/* Finish channels c0..c1 from the sums of their columns. */
static int NAME(finish_columns)(call *k, int64_t c0, int64_t c1, const double *sum, const double *product, int final) {
    int again = 0;
    for (int64_t c = c0; c < c1; c++) {
        double s = 0, p = 0;
        for (int64_t j = c * k->group; j < (c + 1) * k->group; j++) s += sum[j], p += product[j];
        again |= NAME(finish)(k, c, s, p, final);
    }
    return again;
}

/* Few rows: a tile of columns, sums to output, while it is in the cache. */
static void NAME(tile_task)(void *context, int64_t task) {
    call *k = context;
    const bn_args *a = k->a;
    const int train = a->operation == BN_TRAIN;
    const int64_t C = a->channels, g = k->group, c0 = task * k->tile, rest = C - c0;
    /* The last tile takes what would be too little for a vector. */
    const int64_t c1 = c0 + (rest < 2 * k->tile ? rest : k->tile);
    double *sum = k->partial, *product = k->partial + k->columns;
    if (!train)
        for (int64_t c = c0; c < c1; c++) k->grad_x[c] = k->grad_1[c] = 0;
    if (train) NAME(guess_columns)(k, c0, c1);
    for (int final = 0, again = NAME(needs_sums)(a); again; final = 1) {
        NAME(widen)(k, c0, c1, train);
        NAME(columns) w = NAME(view)(k, train);
        memset(sum + c0 * g, 0, (size_t)((c1 - c0) * g) * sizeof *sum);
        memset(product + c0 * g, 0, (size_t)((c1 - c0) * g) * sizeof *sum);
        NAME(matrix)(k, 0, k->rows, c0 * g, c1 * g, &w, sum, product);
        again = NAME(finish_columns)(k, c0, c1, sum, product, final);
    }
    NAME(widen)(k, c0, c1, 0);
    NAME(columns) w = NAME(view)(k, 0);
    NAME(matrix)(k, 0, k->rows, c0 * g, c1 * g, &w, NULL, NULL);
}

/* Many rows: chunks of rows, in two phases. */
static void NAME(rows_sums)(void *context, int64_t task) {
    call *k = context;
    double *sum = k->partial + task * 2 * k->columns;
    memset(sum, 0, (size_t)(2 * k->columns) * sizeof *sum);
    NAME(columns) w = NAME(view)(k, k->a->operation == BN_TRAIN);
    NAME(matrix)(k, task * k->rows / k->chunks, (task + 1) * k->rows / k->chunks, 0, k->columns, &w, sum, sum + k->columns);
}

/* Last chunk first: it is what the first phase left in the cache. */
static void NAME(rows_write)(void *context, int64_t task) {
    call *k = context;
    task = k->chunks - 1 - task;
    NAME(columns) w = NAME(view)(k, 0);
    NAME(matrix)(k, task * k->rows / k->chunks, (task + 1) * k->rows / k->chunks, 0, k->columns, &w, NULL, NULL);
}

static int64_t NAME(run_rows)(call *k) {
    const bn_args *a = k->a;
    const int64_t C = a->channels;
    const int train = a->operation == BN_TRAIN;
    if (!train)
        for (int64_t c = 0; c < C; c++) k->grad_x[c] = k->grad_1[c] = 0;
    if (train) NAME(guess_columns)(k, 0, C);
    for (int final = 0, again = NAME(needs_sums)(a); again; final = 1) {
        NAME(widen)(k, 0, C, train);
        parallel(a->threads, k->chunks, NAME(rows_sums), k);
        for (int64_t t = 1; t < k->chunks; t++)
            for (int64_t j = 0; j < 2 * k->columns; j++) k->partial[j] += k->partial[t * 2 * k->columns + j];
        again = NAME(finish_columns)(k, 0, C, k->partial, k->partial + k->columns, final);
    }
    NAME(widen)(k, 0, C, 0);
    parallel(a->threads, k->chunks, NAME(rows_write), k);
    return 0;
}

static int64_t NAME(run_matrix)(call *k) {
    const bn_args *a = k->a;
    const int64_t columns = k->columns, rows = k->rows;
    const int tiled = rows <= 1024 && NAME(needs_sums)(a);
    /* Chunks do not depend on the number of threads up to 16, and so neither does any bit of the result. */
    k->chunks = tiled ? 1 : a->threads > 16 ? a->threads : 16;
    if (k->chunks > (rows + 7) / 8) k->chunks = (rows + 7) / 8;
    const size_t wide = k->group > 1 ? 5 * (size_t)columns * sizeof(float) : 0;
    char *memory = malloc((size_t)(2 * columns * k->chunks) * sizeof(double) + wide);
    if (!memory) return -1;
    k->partial = (double *)memory;
    for (int j = 0; j < 5; j++) k->wide[j] = (float *)(k->partial + 2 * columns * k->chunks) + j * columns;
    if (tiled) {
        /* A tile of about 128 KB, of whole channels and at least 64 columns (four cache lines). */
        int64_t tile = (32768 / rows + 63) / 64 * 64;
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
    if (a->operation == BN_EVAL)
        for (int64_t c = 0; c < a->channels; c++) {
            k->grad_x[c] = k->grad_1[c] = 0;
            set_coefficients(a, c, a->running_mean[c], a->running_var[c]);
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
