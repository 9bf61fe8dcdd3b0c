/* Part of bn_simd.h: vectors of floats, the activations, and what is done to one vector of elements. */

/* ---- vectors ------------------------------------------------------------------------------------------------ */

INLINE vf NAME(splat)(float v) {
#if BN_ISA == 2
    return (vf)_mm256_set1_ps(v);
#elif BN_ISA == 3
    return (vf)_mm512_set1_ps(v);
#else
    return (vf){0} + v;
#endif
}

INLINE vf NAME(loadf)(const float *p) {
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE vdh NAME(widened_half)(vfh v) {
#if BN_ISA == 2
    return (vdh)_mm256_cvtps_pd((__m128)v);
#elif BN_ISA == 3
    return (vdh)_mm512_cvtps_pd((__m256)v);
#else
    return __builtin_convertvector(v, vdh);
#endif
}

INLINE vfh NAME(half)(vf v, int upper) {
#if BN_ISA == 2
    return upper ? (vfh)_mm256_extractf128_ps((__m256)v, 1) : (vfh)_mm256_castps256_ps128((__m256)v);
#elif BN_ISA == 3
    return upper ? (vfh)_mm512_extractf32x8_ps((__m512)v, 1) : (vfh)_mm512_castps512_ps256((__m512)v);
#else
    vfh half;
    memcpy(&half, (const char *)&v + (upper ? sizeof half : 0), sizeof half);
    return half;
#endif
}

/* Compilers fold a load into the masked move that selects from it (AVX-512), and a masked load is not requested from memory
 * before its mask is known: dy would wait for x. Here the value exists before any mask. */
INLINE void NAME(load_now)(vf *v) {
#if BN_ISA == 3
    __asm__("" : "+v"(*v));
#else
    (void)v;
#endif
}

/* Ones that the compiler does not know to be ones. */
INLINE vf NAME(opaque_one)(void) {
    vf one = NAME(splat)(1.0f);
    __asm__("" : "+m"(one));
    return one;
}

/* Add a vector to as many doubles at p. */
INLINE void NAME(add_at)(double *p, vf v) {
    for (int upper = 0; upper < 2; upper++, p += L / 2) {
        vdh sum;
        memcpy(&sum, p, sizeof sum);
        sum += NAME(widened_half)(NAME(half)(v, upper));
        memcpy(p, &sum, sizeof sum);
    }
}

/* The same total in half as many lanes, as doubles: one more addition in float32 for half of the conversions. */
INLINE vdh NAME(folded)(vf v) { return NAME(widened_half)(NAME(half)(v, 0) + NAME(half)(v, 1)); }

/* bfloat16 is the upper half of a float32. Of two neighbouring vectors it costs less to take the elements with even numbers
 * as one and those with odd numbers as the other: in a run, whose elements are alike, or where coefficients and sums are in
 * that order, too (`spread`, `unpair`). `bf16` says what is meant. */
enum { NAME(EVEN) = 2, NAME(ODD) = 3 };

INLINE vf NAME(load)(const void *p, int64_t i, int bf16) {
    if (!bf16) return NAME(loadf)((const float *)p + i);
    if (bf16 >= NAME(EVEN)) {
        vu both;
        memcpy(&both, (const uint16_t *)p + i, sizeof both);
        return (vf)(bf16 == NAME(EVEN) ? both << 16 : both & 0xffff0000);
    }
    vh half;
    memcpy(&half, (const uint16_t *)p + i, sizeof half);
#if BN_ISA == 2
    return (vf)((vu)_mm256_cvtepu16_epi32((__m128i)half) << 16);
#else
    return (vf)(__builtin_convertvector(half, vu) << 16);
#endif
}

/* Rounded to nearest even in the upper half; the lower half is to be cut off. A NaN stays one, because the lower half of
 * every NaN here is 0: those of the tensors are bfloat16 themselves, those of the coefficients are `without_payload`, and
 * the CPU's own has none. */
INLINE vu NAME(rounded)(vf v) {
    const vu bits = (vu)v;
    return bits + 0x7fff + ((bits >> 16) & 1);
}

/* The CPU's own instruction does the same, but makes 0 of numbers below 1e-38. (It is not named among the body's instruction
 * sets, because the same body serves CPUs without it.) */
INLINE vh NAME(narrowed)(vf v) {
#if BN_ISA == 3 && defined(BN_CONVERTS)
    if (converts) {
        vh narrow;
        __asm__("vcvtneps2bf16 %1, %0" : "=v"(narrow) : "v"(v));
        return narrow;
    }
#endif
    const vu bits = NAME(rounded)(v) >> 16;
#if BN_ISA == 2
    return (vh)_mm_packus_epi32(_mm256_castsi256_si128((__m256i)bits), _mm256_extracti128_si256((__m256i)bits, 1));
#else
    return __builtin_convertvector(bits, vh);
#endif
}

/* With `stream`, past the caches: a line that is not read again soon is not fetched only to be overwritten. That is for
 * addresses at which a vector is aligned; `end_stream` makes what was written visible to other threads. */
INLINE void NAME(put)(void *p, vu whole, int stream) {
#if BN_ISA == 2
    if (stream) _mm256_stream_si256((__m256i *)p, (__m256i)whole);
#elif BN_ISA == 3
    if (stream) _mm512_stream_si512((__m512i *)p, (__m512i)whole);
#endif
    if (!stream || BN_ISA == 1) memcpy(p, &whole, sizeof whole);
}

INLINE void NAME(put_half)(void *p, vh half, int stream) {
#if BN_ISA == 2
    if (stream) _mm_stream_si128((__m128i *)p, (__m128i)half);
#elif BN_ISA == 3
    if (stream) _mm256_stream_si256((__m256i *)p, (__m256i)half);
#endif
    if (!stream || BN_ISA == 1) memcpy(p, &half, sizeof half);
}

INLINE void NAME(store)(void *p, int64_t i, vf v, int bf16, int stream) {
    if (bf16) NAME(put_half)((uint16_t *)p + i, NAME(narrowed)(v), stream);
    else NAME(put)((float *)p + i, (vu)v, stream);
}

INLINE vu NAME(narrowed_pair)(vf even, vf odd) {
#if BN_ISA == 3 && defined(BN_CONVERTS)
    if (converts) {
        static const uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                           8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
        __m512i one_after_the_other;
        __asm__("vcvtne2ps2bf16 %1, %2, %0" : "=v"(one_after_the_other) : "v"(even), "v"(odd));
        return (vu)_mm512_permutexvar_epi16(_mm512_loadu_si512(order), one_after_the_other);
    }
#endif
    return NAME(rounded)(even) >> 16 | (NAME(rounded)(odd) & 0xffff0000);
}

INLINE void NAME(store_pair)(void *p, int64_t i, vf even, vf odd, int stream) {
    NAME(put)((uint16_t *)p + i, NAME(narrowed_pair)(even, odd), stream);
}

INLINE void NAME(end_stream)(void) {
#if BN_ISA >= 2
    _mm_sfence();
#endif
}

INLINE double NAME(total)(vdh v) {
    double lanes[L / 2];
    memcpy(lanes, &v, sizeof lanes);
#pragma GCC unroll 3
    for (int n = L / 4; n > 0; n /= 2)
#pragma GCC unroll 4
        for (int i = 0; i < n; i++) lanes[i] += lanes[i + n];
    return lanes[0];
}

/* All ones in the last n lanes: a vector that overlaps the one before it counts only what is new. */
INLINE vi NAME(last_lanes)(int64_t n) {
    static const int32_t table[32] = {[16] = -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1};
    vi mask;
    memcpy(&mask, table + 16 - L + n, sizeof mask);
    return mask;
}

INLINE vf NAME(select)(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }

/* ---- one bit an element --------------------------------------------------------------------------------------- */

INLINE unsigned NAME(pack_lanes)(vi mask) {
#if BN_ISA == 2
    return (unsigned)_mm256_movemask_ps((__m256)mask);
#elif BN_ISA == 3
    return (unsigned)_mm512_movepi32_mask((__m512i)mask);
#else
    unsigned packed = 0;
    for (int j = 0; j < L; j++) packed |= (unsigned)(mask[j] & 1) << j;
    return packed;
#endif
}

/* A vector's bits: `fresh` of them begin at bit b, which a whole vector finds at the beginning of a byte (or, with four
 * lanes, in the middle); the lanes before them are the last ones of the vector before. */
INLINE vi NAME(lanes_at)(const uint8_t *bits, int64_t b, int64_t fresh) {
    const int aligned = L >= 8 && fresh == L; /* then nothing has to be shifted */
    const int32_t packed = (int32_t)get_bits(bits, aligned ? b & ~7 : b + fresh - L);
#if BN_ISA == 3
    return (vi)_mm512_movm_epi32((__mmask16)packed);
#else
    static const int32_t powers[16] = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
    vi lane;
    memcpy(&lane, powers, sizeof lane);
    return (((vi){0} + packed) & lane) == lane;
#endif
}

/* The same to be written. The rest of the last byte is not used yet. */
INLINE void NAME(put_lanes)(uint8_t *bits, int64_t b, int64_t fresh, vi mask) {
    const uint32_t packed = NAME(pack_lanes)(mask) >> (L - fresh);
    if (L < 8) {
        put_bits(bits, b, packed, fresh);
        return;
    }
    const uint8_t bytes[2] = {(uint8_t)packed, (uint8_t)(packed >> 8)};
    if (fresh > 8) memcpy(bits + (b >> 3), bytes, 2);
    else bits[b >> 3] = bytes[0];
}

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

/* BN_CLIPPED is z where 0 < z < cap, slope*z below, cap above: relu6, and leaky_relu, whose cap is a NaN, which nothing
 * reaches. Comparisons are written so that a NaN passes through, as in torch. */
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

/* Where the slope of a piecewise linear activation is 1. At a NaN torch's relu passes, and the others do not. */
INLINE vi NAME(passes)(vf z, const bn_args *a, int act) {
    const vf zero = {0}, cap = zero + (float)a->cap;
    return act == BN_CLIPPED ? (z > zero) & ~(z >= cap) : ~(z <= zero);
}

/* dy times that slope: 1, or the one below 0. (relu6, whose slope is 0 above its cap too, has none.) */
INLINE vf NAME(through_kink)(vf dy, vi pass, const bn_args *a, int act) {
    if (act == BN_RELU || a->slope == 0) return (vf)((vi)dy & pass); /* not 0 * dy, which may be infinite */
    return NAME(select)(pass, dy, dy * (float)a->slope);
}

/* dy times the activation's slope at its input z. */
INLINE vf NAME(through)(vf dy, vf z, const bn_args *a, int act) {
    switch (act) {
    case BN_RELU:
    case BN_CLIPPED: return NAME(through_kink)(dy, NAME(passes)(z, a, act), a, act);
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

/* The activation's input at element i. */
INLINE vf NAME(before_activation)(const bn_args *a, int64_t i, vf d, const coefficients *k, int aux, int bf16) {
    vf z = d * k->scale + k->offset;
    return aux == BN_AUX_NONE ? z : z + NAME(load)(a->aux_data, i, bf16);
}

INLINE vf NAME(gradient)(const bn_args *a, int64_t i, int64_t b, int64_t fresh, vf d, const coefficients *k, int act, int aux,
                         int bf16) {
    vf dy = NAME(load)(a->dy, i, bf16);
    if (act == BN_NONE) return dy;
    NAME(load_now)(&dy);
    if (aux == BN_AUX_BITS) return NAME(through_kink)(dy, NAME(lanes_at)(a->bits, b, fresh), a, act);
    return NAME(through)(dy, NAME(before_activation)(a, i, d, k, aux, bf16), a, act);
}

/* First sweep: u and d of the vector at element i; `fresh` lanes of it were not in one before, and have their bits at b. */
INLINE vf NAME(term)(const bn_args *a, int64_t i, int64_t b, int64_t fresh, vf *d, const coefficients *k, int backward,
                     int act, int aux, int bf16) {
    *d = NAME(load)(a->x, i, bf16) - k->centre;
    return backward ? NAME(gradient)(a, i, b, fresh, *d, k, act, aux, bf16) : *d;
}

/* Second sweep: what is to be written, and with it g, the gradient of the residual. */
INLINE vf NAME(result)(const bn_args *a, int64_t i, int64_t b, int64_t fresh, vf *g, const coefficients *k, int backward,
                       int act, int aux, int bf16) {
    vf d = NAME(load)(a->x, i, bf16) - k->centre;
    if (backward) {
        *g = NAME(gradient)(a, i, b, fresh, d, k, act, aux, bf16);
        return (*g + (d * k->grad_x + k->grad_1)) * k->scale;
    }
    vf z = NAME(before_activation)(a, i, d, k, aux, bf16);
    if (aux == BN_AUX_BITS) NAME(put_lanes)(a->bits, b, fresh, NAME(passes)(z, a, act));
    return NAME(activate)(z, a, act);
}

/* `keep` stores g, too. */
INLINE void NAME(write)(const bn_args *a, int64_t i, int64_t b, int64_t fresh, const coefficients *k, int backward, int keep,
                        int act, int aux, int bf16, int stream) {
    vf g = {0}, v = NAME(result)(a, i, b, fresh, &g, k, backward, act, aux, bf16);
    if (keep) NAME(store)(a->out_residual, i, g, bf16, stream);
    NAME(store)(a->out, i, v, bf16, stream);
}

/* Two vectors of bfloat16, whose coefficients are at k[0] and k[step]. Their bits are in the order of the vectors, too. */
INLINE void NAME(write_pair)(const bn_args *a, int64_t i, int64_t b, const coefficients *k, int step, int backward, int keep,
                             int act, int aux, int stream) {
    vf g[2] = {{0}, {0}}, v[2];
    for (int j = 0; j < 2; j++)
        v[j] = NAME(result)(a, i, b + j * L, L, &g[j], &k[j * step], backward, act, aux, NAME(EVEN) + j);
    if (keep) NAME(store_pair)(a->out_residual, i, g[0], g[1], stream);
    NAME(store_pair)(a->out, i, v[0], v[1], stream);
}
