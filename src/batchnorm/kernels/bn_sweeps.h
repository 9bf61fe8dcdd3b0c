/* Part of bn_simd.h: the two sweeps over the elements, in both views of the tensor. */

/* ---- runs: n contiguous elements of one channel, from element i; n >= L ------------------------------------- */

/* How far the bits of a vector are from its elements: every row of `width` bits is filled up to whole bytes. */
INLINE int64_t NAME(bit_shift)(int64_t row, int64_t width) { return row * (-width & 7); }

/* What is left of a run for vectors that are not in pairs: the last whole one, if a vector overlaps it and reads its bits. */
INLINE int64_t NAME(unpaired)(int64_t n, int aux, int bf16) { return bf16 && aux == BN_AUX_BITS && n % L ? L : 0; }

/* Sums in float32 of a few vectors, in two chains. */
typedef struct {
    vf s[2], p[2];
} NAME(chains);

/* Add the `count` vectors from element i. In the forward pass every second vector joins its sum by a fused multiplication with
 * 1: the result is the same, and CPUs that have as many units for those as for additions use all of them. */
INLINE void NAME(add_vectors)(NAME(chains) * to, const bn_args *a, int64_t i, int64_t b, int count, const coefficients *k,
                              vf one, int backward, int act, int aux, int bf16) {
#pragma GCC unroll 4
    for (int j = 0; j < count; j++) {
        const int pair = bf16 && count > 1;
        vf d, u = NAME(term)(a, i + (pair ? j & ~1 : j) * L, b + j * L, L, &d, k, backward, act, aux,
                             pair ? NAME(EVEN) + (j & 1) : bf16);
        if (BN_ISA == 1 || backward || j & 1) to->s[j & 1] += u;
        else to->s[j & 1] += u * one;
        to->p[j & 1] += u * d;
    }
}

INLINE void NAME(join)(NAME(chains) * from, vdh *sums) {
    sums[0] += NAME(folded)(from->s[0] + from->s[1]);
    sums[1] += NAME(folded)(from->p[0] + from->p[1]);
    *from = (NAME(chains)){{{0}}};
}

/* How many vectors are added up in float32, in two chains, before they join a double; the last of a run take along what is
 * left of it. */
enum { NAME(CHAINED) = 16 };

INLINE void NAME(sum_run)(const bn_args *a, int64_t i, int64_t b, int64_t n, const coefficients *k, vf one, vdh *sums,
                          int backward, int act, int aux, int bf16) {
    const int64_t shift = b - i, end = i + n, many = n - NAME(unpaired)(n, aux, bf16), fours = i + (many & -(4 * L));
    NAME(chains) chains = {{{0}}};
#define ADD(count) NAME(add_vectors)(&chains, a, i, i + shift, count, k, one, backward, act, aux, bf16), i += count * L
    while (fours - i > NAME(CHAINED) * L) {
        for (int j = 0; j < NAME(CHAINED); j += 4) ADD(4);
        NAME(join)(&chains, sums);
    }
    while (i < fours) ADD(4);
    if (many & (2 * L)) ADD(2);
    while (end - i >= L) ADD(1);
#undef ADD
    if (end > i) {
        vf d, u = NAME(term)(a, end - L, i + shift, end - i, &d, k, backward, act, aux, bf16);
        u = (vf)((vi)u & NAME(last_lanes)(end - i));
        chains.s[1] += u;
        chains.p[1] += u * d;
    }
    NAME(join)(&chains, sums);
}

INLINE void NAME(write_run)(const bn_args *a, int64_t i, int64_t b, int64_t n, const coefficients *k, int backward, int keep,
                            int act, int aux, int bf16, int stream) {
    const int64_t alone = NAME(unpaired)(n, aux, bf16), size = bf16 ? 2 : 4;
    /* A store that crosses cache lines costs half as much again: begin with one vector that may, go on where
     * vectors are aligned. */
    const int64_t before = (int64_t)(-((uintptr_t)a->out + (uintptr_t)(i * size)) % (uintptr_t)(L * size)) / size;
    if (aux != BN_AUX_BITS && before && n >= 8 * L) {
        NAME(write)(a, i, b, L, k, backward, keep, act, aux, bf16, stream);
        i += before, n -= before;
    }
    for (; bf16 && n >= 2 * L + alone; i += 2 * L, b += 2 * L, n -= 2 * L)
        NAME(write_pair)(a, i, b, k, 0, backward, keep, act, aux, stream);
    for (; !bf16 && n >= 4 * L; i += 4 * L, b += 4 * L, n -= 4 * L) {
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) NAME(write)(a, i + j * L, b + j * L, L, k, backward, keep, act, aux, bf16, stream);
    }
    for (; n >= L; i += L, b += L, n -= L) NAME(write)(a, i, b, L, k, backward, keep, act, aux, bf16, stream);
    if (n > 0) NAME(write)(a, i + n - L, b, n, k, backward, keep, act, aux, bf16, stream);
}

INLINE coefficients NAME(of_channel)(const NAME(columns) * w, int64_t c) {
    return (coefficients){NAME(splat)(w->centre[c]), NAME(splat)(w->scale[c]), NAME(splat)(w->offset[c]),
                          NAME(splat)(w->grad_x[c]), NAME(splat)(w->grad_1[c])};
}

#if BN_HAS(BN_REST)
/* Fewer elements than a vector holds, as a mask may leave them: in the last lanes of a vector on the stack, because
 * the elements beside them may be another thread's. Rare enough to have no specialised copies. */
static void NAME(short_run)(const bn_args *a, int64_t i, int64_t b, int64_t n, const coefficients *k, vdh *sums) {
    const int backward = a->operation >= BN_BACKWARD_TRAIN, keep = a->out_residual != NULL, bf16 = a->dtype == BN_BFLOAT16;
    const int act = (int)a->activation, aux = (int)a->aux;
    float patch[5][L] = {{0}};
    uint8_t bits[8] = {0};
    const size_t size = bf16 ? 2 : 4, bytes = (size_t)n * size, at = (size_t)(L - n) * size, from = (size_t)i * size;
    bn_args p = *a; /* the same call, but on the patches */
    memcpy((char *)patch[0] + at, (const char *)a->x + from, bytes);
    p.x = patch[0], p.aux_data = patch[1], p.dy = patch[2], p.out = patch[3], p.out_residual = patch[4], p.bits = bits;
    if (aux != BN_AUX_NONE && a->aux_data) memcpy((char *)patch[1] + at, (const char *)a->aux_data + from, bytes);
    if (backward) memcpy((char *)patch[2] + at, (const char *)a->dy + from, bytes);
    if (backward && aux == BN_AUX_BITS) put_bits(bits, L - n, get_bits(a->bits, b), n);
    if (sums) {
        vf d, u = NAME(term)(&p, 0, 0, L, &d, k, backward, act, aux, bf16);
        u = (vf)((vi)u & NAME(last_lanes)(n));
        sums[0] += NAME(folded)(u);
        sums[1] += NAME(folded)(u * d);
        return;
    }
    NAME(write)(&p, 0, 0, L, k, backward, keep, act, aux, bf16, 0);
    memcpy((char *)a->out + from, (char *)patch[3] + at, bytes);
    if (keep) memcpy((char *)a->out_residual + from, (char *)patch[4] + at, bytes);
    if (!backward && aux == BN_AUX_BITS) put_bits(a->bits, b, get_bits(bits, L - n), n);
}

/* What does not count becomes 0, in the output and in the residual's gradient. */
static void NAME(clear)(const bn_args *a, int64_t i, int64_t n) {
    const size_t size = a->dtype == BN_FLOAT32 ? 4 : 2;
    memset((char *)a->out + (size_t)i * size, 0, (size_t)n * size);
    if (a->out_residual) memset((char *)a->out_residual + (size_t)i * size, 0, (size_t)n * size);
}
#endif

/* A channel is batch * pieces runs; `from`..`to` are the ones to do. Long runs are cut into pieces, each far longer
 * than a vector, so that one huge channel can be shared among threads. */
INLINE int64_t NAME(pieces)(const bn_args *a) { return a->positions >= 65536 ? a->positions / 32768 : 1; }

/* Where a piece begins: at a whole byte of bits, which is its own thread's. */
INLINE int64_t NAME(piece)(int64_t number, int64_t cut, int64_t positions) {
    return number == cut ? positions : number * positions / cut / 64 * 64;
}

/* The places first..last of the samples n0..n1, neighbouring channels c0..c1 together, so that short runs are read as
 * one long stretch of memory. */
INLINE void NAME(sweep_runs)(const bn_args *arguments, int64_t c0, int64_t c1, int64_t n0, int64_t n1, int64_t first,
                             int64_t last, const NAME(columns) * columns, vdh (*sums)[2], int backward, int keep, int act,
                             int aux, int bf16) {
    /* Copies, which stores through the output's pointer cannot be thought to change. */
    const bn_args copy = *arguments, *a = &copy;
    const NAME(columns) w = *columns;
    const vf one = NAME(opaque_one)();
    const int stream = !sums && streams(a, a->positions);
    for (int64_t n = n0; n < n1; n++)
        for (int64_t c = c0; c < c1; c++) {
            const coefficients q = NAME(of_channel)(&w, c);
            const int64_t row = n * a->channels + c, i = row * a->positions + first;
            const int64_t b = i + NAME(bit_shift)(row, a->positions);
            if (sums) NAME(sum_run)(a, i, b, last - first, &q, one, sums[c - c0], backward, act, aux, bf16);
            else if (stream) NAME(write_run)(a, i, b, last - first, &q, backward, keep, act, aux, bf16, 1);
            else NAME(write_run)(a, i, b, last - first, &q, backward, keep, act, aux, bf16, 0);
        }
    if (stream) NAME(end_stream)();
}

/* ---- matrix: rows r0..r1 of columns c0..c1; c1 - c0 >= L ----------------------------------------------------- */

INLINE coefficients NAME(at)(const NAME(columns) * w, int64_t c) {
    return (coefficients){NAME(loadf)(w->centre + c), NAME(loadf)(w->scale + c), NAME(loadf)(w->offset + c),
                          NAME(loadf)(w->grad_x + c), NAME(loadf)(w->grad_1 + c)};
}

/* The same call, as if its tensors began at element i: then one number tells where a vector of any of them is. */
INLINE bn_args NAME(from_element)(const bn_args *a, int64_t i, int bf16) {
    const int64_t bytes = i * (bf16 ? 2 : 4);
    bn_args b = *a;
    b.x = offset(a->x, bytes);
    b.dy = offset(a->dy, bytes);
    b.aux_data = offset(a->aux_data, bytes);
    b.out = (void *)offset(a->out, bytes);
    b.out_residual = (void *)offset(a->out_residual, bytes);
    return b;
}

/* How many vectors of columns go down the rows abreast, with their coefficients and sums in registers; in how many chains of
 * sums, which is a question of how many registers there are; and how many rows, before the sums join a double. */
enum { NAME(ABREAST) = 4, NAME(ABREAST_CHAINS) = L == 16 ? 2 : 1, NAME(DOWN) = 8 * NAME(ABREAST_CHAINS) };

/* Some neighbouring vectors of columns over `rows` rows of `width` elements, from element i and bit b. Of a single one,
 * `fresh` lanes have not been counted yet. In pairs, they are the elements with even and with odd numbers. */
INLINE void NAME(sum_columns)(const bn_args *a, int64_t i, int64_t b, int64_t width, int rows, int chains, int vectors,
                              int64_t fresh, const NAME(columns) * w, double *sum, double *product, int backward, int act,
                              int aux, int bf16, int pairs) {
    coefficients q[NAME(ABREAST)];
    vf s[2][NAME(ABREAST)] = {{{0}}}, p[2][NAME(ABREAST)] = {{{0}}}, d;
    const int64_t bits = width + NAME(bit_shift)(1, width);
#pragma GCC unroll 4
    for (int h = 0; h < vectors; h++) q[h] = NAME(at)(w, i + h * L);
    for (int j = 0; j < rows; j += chains)
#pragma GCC unroll 2
        for (int chain = 0; chain < chains && chain < rows; chain++, i += width, b += bits)
#pragma GCC unroll 4
            for (int h = 0; h < vectors; h++) {
                vf u = NAME(term)(a, i + (pairs ? h & ~1 : h) * L, b + h * L, fresh, &d, &q[h], backward, act, aux,
                                  pairs ? NAME(EVEN) + (h & 1) : bf16);
                s[chain][h] += u;
                p[chain][h] += u * d;
            }
    const vi counted = NAME(last_lanes)(fresh);
#pragma GCC unroll 4
    for (int h = 0; h < vectors; h++) {
        NAME(add_at)(sum + h * L, (vf)((vi)(s[0][h] + s[1][h]) & counted));
        NAME(add_at)(product + h * L, (vf)((vi)(p[0][h] + p[1][h]) & counted));
    }
}

/* Columns c0..c1, the first ones of them in pairs of vectors, up to column `paired`. A few rows of a large tensor are read a
 * vector after the other: that jumps about in memory, and the hardware does not see through it, so `fetch` gets the next rows
 * in the order of their addresses. */
INLINE void NAME(sum_rows)(const bn_args *all, int64_t row, int64_t width, int rows, int abreast, int64_t c0, int64_t c1,
                           int64_t paired, const NAME(columns) * w, double *sum, double *product, int fetch, int backward,
                           int act, int aux, int bf16) {
    const int64_t b = row * (width + NAME(bit_shift)(1, width));
    const bn_args a = NAME(from_element)(all, row * width, bf16);
    const int size = bf16 ? 2 : 4, lines = rows * L * size / 64, chains = abreast > 1 ? NAME(ABREAST_CHAINS) : 2;
    const char *next_x = (const char *)a.x + rows * width * size;
    const char *next_dy = (const char *)(backward ? a.dy : a.x) + rows * width * size;
    int64_t c = c0;
#define FETCH(vectors)                                                                 \
    for (int j = 0; fetch && j < (vectors) * lines; j++, next_x += 64, next_dy += 64) { \
        __builtin_prefetch(next_x);                                                    \
        if (backward) __builtin_prefetch(next_dy);                                     \
    }
#define SUM(vectors, at, fresh, pairs)                                                                                    \
    NAME(sum_columns)(&a, at, b + (at) + L - (fresh), width, rows, chains, vectors, fresh, w, sum + (at), product + (at), \
                      backward, act, aux, bf16, pairs)
    for (; bf16 && abreast > 1 && c + abreast * L <= c1 && c + abreast * L <= paired; c += abreast * L) SUM(abreast, c, L, 1);
    for (; bf16 && c < c1 && c < paired; c += 2 * L) {
        FETCH(2)
        SUM(2, c, L, 1);
    }
    for (; abreast > 1 && c + abreast * L <= c1; c += abreast * L) SUM(abreast, c, L, 0);
    for (; c + L <= c1; c += L) {
        FETCH(1)
        SUM(1, c, L, 0);
    }
    if (c < c1) SUM(1, c1 - L, c1 - c, 0);
#undef FETCH
#undef SUM
}

/* One row at a time, or two short ones: memory is then written nearly from end to end. */
INLINE void NAME(write_rows)(const bn_args *all, int64_t row, int64_t width, int rows, int64_t c0, int64_t c1, int64_t paired,
                             const NAME(columns) * w, int backward, int keep, int act, int aux, int bf16, int stream) {
    const int64_t bits = width + NAME(bit_shift)(1, width), b = row * bits;
    const bn_args a = NAME(from_element)(all, row * width, bf16);
    int64_t c = c0;
    for (; bf16 && c < c1 && c < paired; c += 2 * L) {
        const coefficients q[2] = {NAME(at)(w, c), NAME(at)(w, c + L)};
#pragma GCC unroll 2
        for (int j = 0; j < rows; j++)
            NAME(write_pair)(&a, j * width + c, b + j * bits + c, q, 1, backward, keep, act, aux, stream);
    }
    for (; c + L <= c1; c += L) {
        const coefficients q = NAME(at)(w, c);
#pragma GCC unroll 2
        for (int j = 0; j < rows; j++)
            NAME(write)(&a, j * width + c, b + j * bits + c, L, &q, backward, keep, act, aux, bf16, stream);
    }
    if (c < c1) {
        const coefficients q = NAME(at)(w, c1 - L);
#pragma GCC unroll 2
        for (int j = 0; j < rows; j++)
            NAME(write)(&a, j * width + c1 - L, b + j * bits + c, c1 - c, &q, backward, keep, act, aux, bf16, stream);
    }
}

INLINE void NAME(sweep_rows)(const call *k, int64_t r, int64_t r1, int64_t c0, int64_t c1, const NAME(columns) * columns,
                             double *sum, double *product, int backward, int keep, int act, int aux, int bf16) {
    const bn_args copy = *k->a, *a = &copy;
    const NAME(columns) w = *columns;
    const int64_t n = k->columns;
#define SUM(rows, abreast) \
    NAME(sum_rows)(a, r, n, rows, abreast, c0, c1, k->paired, &w, sum, product, fetch, backward, act, aux, bf16)
    if (sum) {
        /* Down many rows, where they are in a cache or no longer than what goes abreast. Else memory wants its order: few rows
         * at a time; but sums that are no longer in the nearest cache want more. */
        const int far = n > NAME(ABREAST) * L && outgrows_cache(a, 0), fetch = far && c1 - c0 == n;
        for (; !far && r + NAME(DOWN) <= r1; r += NAME(DOWN)) SUM(NAME(DOWN), NAME(ABREAST));
        for (; far && !bf16 && n <= 1024 && r + 4 <= r1; r += 4) SUM(4, 1);
        for (; r + 8 <= r1; r += 8) SUM(8, 1);
        for (; r < r1; r++) SUM(1, 1);
        return;
    }
#define WRITE(rows, stream) \
    NAME(write_rows)(a, r, n, rows, c0, c1, k->paired, &w, backward, keep, act, aux, bf16, stream)
    if (k->group == 1 && streams(a, n)) {
        for (; r < r1; r++) WRITE(1, 1);
        NAME(end_stream)();
    }
    /* Two rows share their coefficients, which counts where there is much to load beside few elements. Longer rows together
     * are more places in memory than gain by it. */
    const int64_t shared = aux == BN_AUX_NONE && (backward || bf16) ? 1024 : 128;
    for (; n <= shared && r + 2 <= r1; r += 2) WRITE(2, 0);
    for (; r < r1; r++) WRITE(1, 0);
#undef SUM
#undef WRITE
}

/* ---- the specialised copies --------------------------------------------------------------------------------- */

/* One copy per (activation, aux, dtype) that occurs: forward, the aux is the residual, with or without bits to write;
 * backward, it is what tells the slope; and the gradient of a residual is stored only where it differs from dy, that is,
 * behind an activation. */
#define KEY(act, aux, bf16) (((act) * 3 + (aux)) * 2 + (bf16))
#define COPY(act, aux, CALL)                             \
    case KEY(act, aux, 0): CALL(act, aux, 0); break;     \
    case KEY(act, aux, 1): CALL(act, aux, 1); break;
#define PLAIN(CALL) COPY(BN_NONE, BN_AUX_NONE, CALL)
#define FORWARD(CALL)                                                              \
    PLAIN(CALL) COPY(BN_NONE, BN_AUX_RESIDUAL, CALL)                               \
    COPY(BN_RELU, BN_AUX_NONE, CALL) COPY(BN_RELU, BN_AUX_RESIDUAL, CALL)          \
    COPY(BN_CLIPPED, BN_AUX_NONE, CALL) COPY(BN_CLIPPED, BN_AUX_RESIDUAL, CALL)    \
    COPY(BN_SILU, BN_AUX_NONE, CALL) COPY(BN_SILU, BN_AUX_RESIDUAL, CALL)          \
    COPY(BN_RELU, BN_AUX_BITS, CALL) COPY(BN_CLIPPED, BN_AUX_BITS, CALL)
#define KEPT(CALL) \
    COPY(BN_RELU, BN_AUX_BITS, CALL) COPY(BN_CLIPPED, BN_AUX_BITS, CALL) COPY(BN_SILU, BN_AUX_RESIDUAL, CALL)
#define BACKWARD(CALL)                                                                                     \
    PLAIN(CALL) KEPT(CALL)                                                                                 \
    COPY(BN_RELU, BN_AUX_NONE, CALL) COPY(BN_CLIPPED, BN_AUX_NONE, CALL) COPY(BN_SILU, BN_AUX_NONE, CALL)

/* Four functions choose among them, each in a unit of its own if the kernel is built in units (bn.c). */
#define RUNS                                                                                                       \
    const bn_args *a, int64_t c0, int64_t c1, int64_t n0, int64_t n1, int64_t first, int64_t last, \
        const NAME(columns) * w, vdh (*sums)[2]
#define ROWS                                                                                                     \
    const call *k, int64_t r0, int64_t r1, int64_t c0, int64_t c1, const NAME(columns) * w, double *sums, \
        double *products
SHARED void NAME(forward_runs)(RUNS);
SHARED void NAME(backward_runs)(RUNS);
SHARED void NAME(forward_rows)(ROWS);
SHARED void NAME(backward_rows)(ROWS);

#define FORWARD_SUM(act, aux, bf16) SWEEP(SUMS, 0, 0, act, aux, bf16)
#define FORWARD_WRITE(act, aux, bf16) SWEEP(OUTPUT, 0, 0, act, aux, bf16)
#define BACKWARD_SUM(act, aux, bf16) SWEEP(SUMS, 1, 0, act, aux, bf16)
#define BACKWARD_WRITE(act, aux, bf16) SWEEP(OUTPUT, 1, 0, act, aux, bf16)
#define KEPT_WRITE(act, aux, bf16) SWEEP(OUTPUT, 1, 1, act, aux, bf16)
#define FORWARD_COPIES(a)                                                            \
    if (sums) switch (KEY(BN_NONE, BN_AUX_NONE, (a)->dtype)) { PLAIN(FORWARD_SUM) }  \
    else switch (KEY((a)->activation, (a)->aux, (a)->dtype)) { FORWARD(FORWARD_WRITE) }
#define BACKWARD_COPIES(a)                                                                          \
    const int64_t key = KEY((a)->activation, (a)->aux, (a)->dtype);                                 \
    if (sums) switch (key) { BACKWARD(BACKWARD_SUM) }                                               \
    else if ((a)->out_residual) switch (key) { KEPT(KEPT_WRITE) }                                   \
    else switch (key) { BACKWARD(BACKWARD_WRITE) }

#define SUMS sums
#define OUTPUT NULL
#define SWEEP(to, backward, keep, act, aux, bf16) \
    NAME(sweep_runs)(a, c0, c1, n0, n1, first, last, w, to, backward, keep, act, aux, bf16)
#if BN_HAS(BN_FORWARD_RUNS)
SHARED void NAME(forward_runs)(RUNS) { FORWARD_COPIES(a) }
#endif
#if BN_HAS(BN_BACKWARD_RUNS)
SHARED void NAME(backward_runs)(RUNS) { BACKWARD_COPIES(a) }
#endif
#undef SUMS
#undef OUTPUT
#undef SWEEP

#define SUMS sums, products
#define OUTPUT NULL, NULL
#define SWEEP(to, backward, keep, act, aux, bf16) NAME(sweep_rows)(k, r0, r1, c0, c1, w, to, backward, keep, act, aux, bf16)
#if BN_HAS(BN_FORWARD_ROWS)
SHARED void NAME(forward_rows)(ROWS) { FORWARD_COPIES(k->a) }
#endif
#if BN_HAS(BN_BACKWARD_ROWS)
SHARED void NAME(backward_rows)(ROWS) { BACKWARD_COPIES(k->a) }
#endif

#if BN_HAS(BN_REST)
static void NAME(same_runs)(RUNS) {
    if (a->operation >= BN_BACKWARD_TRAIN) NAME(backward_runs)(a, c0, c1, n0, n1, first, last, w, sums);
    else NAME(forward_runs)(a, c0, c1, n0, n1, first, last, w, sums);
}

static void NAME(same_rows)(ROWS) {
    if (k->a->operation >= BN_BACKWARD_TRAIN) NAME(backward_rows)(k, r0, r1, c0, c1, w, sums, products);
    else NAME(forward_rows)(k, r0, r1, c0, c1, w, sums, products);
}

/* The marked stretches of one sample's places first..last; what lies between them becomes 0 when output is written. */
static void NAME(masked_runs)(const bn_args *a, int64_t c0, int64_t c1, int64_t n, int64_t first, int64_t last,
                              const NAME(columns) * w, vdh (*sums)[2]) {
    const int64_t S = a->positions;
    /* The sums of the forward pass read no bits, and are added in the same order with or without a gradient. */
    const int bits = a->aux == BN_AUX_BITS && (!sums || a->operation >= BN_BACKWARD_TRAIN);
    int64_t done = first, s = first, end;
    for (; next_span(a->mask + n * S, &s, &end, last); s = done = end) {
        for (int64_t c = c0; !sums && done < s && c < c1; c++) NAME(clear)(a, (n * a->channels + c) * S + done, s - done);
        /* A stretch in which no vector fits, or what is before the first whole byte of bits. */
        const int64_t start = bits ? (s + 7) / 8 * 8 : s, run = end - start < L ? end : start;
        for (int64_t from = s, to; from < run; from = to) {
            to = run - from < L ? run : from + L - 1;
            for (int64_t c = c0; c < c1; c++) {
                const coefficients q = NAME(of_channel)(w, c);
                const int64_t row = n * a->channels + c, i = row * S + from;
                NAME(short_run)(a, i, i + NAME(bit_shift)(row, S), to - from, &q, sums ? sums[c - c0] : NULL);
            }
        }
        if (run < end) NAME(same_runs)(a, c0, c1, n, n + 1, run, end, w, sums);
    }
    for (int64_t c = c0; !sums && done < last && c < c1; c++) NAME(clear)(a, (n * a->channels + c) * S + done, last - done);
}

static void NAME(runs)(const bn_args *a, int64_t c0, int64_t c1, int64_t from, int64_t to, const NAME(columns) * w,
                       vdh (*sums)[2]) {
    const int64_t cut = NAME(pieces)(a), S = a->positions;
    if (cut == 1 && !a->mask) {
        NAME(same_runs)(a, c0, c1, from, to, 0, S, w, sums);
        return;
    }
    for (int64_t r = from; r < to; r++) {
        const int64_t n = r / cut, first = NAME(piece)(r % cut, cut, S), last = NAME(piece)(r % cut + 1, cut, S);
        if (a->mask) NAME(masked_runs)(a, c0, c1, n, first, last, w, sums);
        else NAME(same_runs)(a, c0, c1, n, n + 1, first, last, w, sums);
    }
}

/* Rows r0..r1, or the marked ones among them; the others become 0 when output is written. */
static void NAME(matrix)(const call *k, int64_t r0, int64_t r1, int64_t c0, int64_t c1, const NAME(columns) * w,
                         double *sums, double *products) {
    int64_t done = r0, r = r0, end;
    for (; next_span(k->a->mask, &r, &end, r1); r = done = end) {
        for (; !sums && done < r; done++) NAME(clear)(k->a, done * k->columns + c0, c1 - c0);
        NAME(same_rows)(k, r, end, c0, c1, w, sums, products);
    }
    for (; !sums && done < r1; done++) NAME(clear)(k->a, done * k->columns + c0, c1 - c0);
}
#endif
#undef KEY
#undef COPY
#undef PLAIN
#undef FORWARD
#undef KEPT
#undef BACKWARD
#undef RUNS
#undef ROWS
#undef FORWARD_SUM
#undef FORWARD_WRITE
#undef BACKWARD_SUM
#undef BACKWARD_WRITE
#undef KEPT_WRITE
#undef FORWARD_COPIES
#undef BACKWARD_COPIES
#undef SUMS
#undef OUTPUT
#undef SWEEP
