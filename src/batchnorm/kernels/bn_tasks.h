/* Part of bn_simd.h: from sums to coefficients, and how the work is cut into tasks for the threads. */

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
    float *saved = k->a->saved;
    INDEPENDENT for (int64_t c = c0; c < c1; c++) {
        double mean = means[c], invstd = 1.0 / sqrt(vars[c] + eps), scale = weight ? invstd * (double)weight[c] : invstd;
        float high = (float)mean;
        double low = mean - (double)high;
        saved[BN_MEAN * C + c] = without_payload(high);
        saved[BN_MEAN_LOW * C + c] = without_payload((float)low);
        saved[BN_SCALE * C + c] = without_payload((float)scale);
        saved[BN_OFFSET * C + c] = without_payload((float)((bias ? (double)bias[c] : 0.0) - low * scale));
        saved[BN_INVSTD * C + c] = without_payload((float)invstd);
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

/* Backward, from the sums of g and of g*(x - mean): the coefficients of dx. The sums' mean is the one that a float
 * holds, or, of sums that came from outside, the exact one. */
static void NAME(set_gradients)(const call *k, int64_t c0, int64_t c1, const double *restrict sums,
                                const double *restrict products, int exact) {
    const bn_args *a = k->a;
    const int64_t C = a->channels;
    const int fixed = a->operation == BN_BACKWARD_EVAL; /* constants: an infinite x must not reach its neighbours */
    const double inverse = 1.0 / k->count;
    const float *saved = a->saved;
    float *restrict grad_x = k->grad_x, *restrict grad_1 = k->grad_1;
    for (int64_t c = c0; c < c1; c++) {
        double low = saved[BN_MEAN_LOW * C + c], invstd = saved[BN_INVSTD * C + c];
        double sum = sums[c - c0], centred = products[c - c0] - (exact ? 0.0 : low * sum);
        double slope = -invstd * (invstd * (centred * inverse)), constant = -sum * inverse - slope * low;
        grad_x[c] = without_payload((float)(fixed ? 0.0 : slope));
        grad_1[c] = without_payload((float)(fixed ? 0.0 : constant));
    }
}

static void NAME(finish_gradients)(const call *k, int64_t c0, int64_t c1, const double *sums, const double *products) {
    const bn_args *a = k->a;
    const int64_t C = a->channels;
    const float *saved = a->saved;
    if (a->operation != BN_GRAD_SUMS) NAME(set_gradients)(k, c0, c1, sums, products, 0);
    for (int64_t c = c0; a->operation == BN_GRAD_SUMS && c < c1; c++) {
        a->sums[c] = sums[c - c0];
        a->sums[C + c] = products[c - c0] - (double)saved[BN_MEAN_LOW * C + c] * sums[c - c0];
    }
    for (int64_t c = c0; a->grad_weight && c < c1; c++)
        a->grad_weight[c] = (float)((products[c - c0] - (double)saved[BN_MEAN_LOW * C + c] * sums[c - c0]) *
                                    (double)saved[BN_INVSTD * C + c]);
    for (int64_t c = c0; a->grad_bias && c < c1; c++) a->grad_bias[c] = (float)sums[c - c0];
}

static int NAME(takes_moments)(const bn_args *a) { return a->operation == BN_TRAIN || a->operation == BN_MOMENTS; }

/* Returns 1 if the sums must be taken again, around a better shift. */
static int NAME(finish)(call *k, int64_t c0, int64_t c1, const double *sums, const double *products, int final) {
    if (NAME(takes_moments)(k->a)) return NAME(finish_moments)(k, c0, c1, sums, products, final);
    NAME(finish_gradients)(k, c0, c1, sums, products);
    return 0;
}

static int NAME(needs_sums)(const bn_args *a) {
    return NAME(takes_moments)(a) || a->operation == BN_BACKWARD_TRAIN || a->operation == BN_GRAD_SUMS ||
           (a->operation == BN_BACKWARD_EVAL && (a->grad_weight || a->grad_bias));
}

static int NAME(needs_output)(const bn_args *a) { return a->operation != BN_MOMENTS && a->operation != BN_GRAD_SUMS; }

/* ---- a guess of the mean ------------------------------------------------------------------------------------- */

/* From the first marked stretch of four runs. */
static void NAME(guess_marked)(call *k, int64_t c0, int64_t c1) {
    const bn_args *a = k->a;
    for (int64_t c = c0; c < c1; c++) {
        double sum = 0;
        int64_t count = 0;
        for (int j = 0; j < 4; j++) {
            const int64_t n = j * a->batch / 4;
            int64_t s = 0, end;
            if (!next_span(a->mask + n * a->positions, &s, &end, a->positions)) continue;
            for (; s < end && count < (j + 1) * L; s++, count++) sum += element(a, n, c, s);
        }
        k->shift[c] = count && isfinite(sum) ? (float)(sum / (double)count) : 0;
    }
}

/* From the middle of four runs. */
static void NAME(guess_runs)(call *k, int64_t c0, int64_t c1) {
    const bn_args *a = k->a;
    const int64_t S = a->positions, middle = (S - L) / 2;
    if (a->mask) {
        NAME(guess_marked)(k, c0, c1);
        return;
    }
    for (int64_t c = c0; c < c1; c++) {
        vf sum = {0};
        for (int j = 0; j < 4; j++) {
            int64_t i = ((j * a->batch / 4) * a->channels + c) * S + middle;
            sum += NAME(load)(a->x, i, a->dtype == BN_BFLOAT16);
        }
        float guess = (float)(NAME(total)(NAME(folded)(sum)) / (4 * L));
        k->shift[c] = isfinite(guess) ? guess : 0;
    }
}

/* From eight rows spread over the batch, or the marked ones that follow them. */
static void NAME(guess_columns)(call *k, int64_t c0, int64_t c1) {
    const bn_args *a = k->a;
    const int64_t g = k->group;
    int64_t count = 0;
    for (int64_t c = c0; c < c1; c++) k->shift[c] = 0;
    for (int j = 0; j < 8; j++) {
        int64_t n = j * k->rows / 8, end, c = c0;
        if (!next_span(a->mask, &n, &end, k->rows)) break;
        count += g;
        for (; g == 1 && c + L <= c1; c += L) {
            vf sum = NAME(loadf)(k->shift + c) + NAME(load)(a->x, n * k->columns + c, a->dtype == BN_BFLOAT16);
            NAME(store)(k->shift, c, sum, 0, 0);
        }
        for (; c < c1; c++)
            for (int64_t s = 0; s < g; s++) k->shift[c] += (float)element(a, n, c, s);
    }
    for (int64_t c = c0; c < c1; c++) k->shift[c] = count && isfinite(k->shift[c]) ? k->shift[c] / (float)count : 0;
}

static void NAME(guess)(call *k, int64_t c0, int64_t c1) {
    if (k->group) NAME(guess_columns)(k, c0, c1);
    else NAME(guess_runs)(k, c0, c1);
}

/* ---- coefficients and sums of columns -------------------------------------------------------------------------- */

/* Which of the five coefficients are there, and needed, before the sums, and which come with them. */
static range NAME(coefficients_before)(const bn_args *a) {
    if (NAME(takes_moments)(a)) return (range){0, 1};
    return (range){0, a->operation < BN_BACKWARD_TRAIN || NAME(needs_sums)(a) ? 3 : 5};
}
static range NAME(coefficients_after)(const bn_args *a) {
    return NAME(takes_moments)(a) ? (range){0, 3} : (range){3, 5};
}

/* A row of channels c0..c1 as the columns want it. Pairs of vectors want the even ones of theirs first, then the odd ones. */
static void NAME(spread)(const call *k, int64_t c0, int64_t c1, const float *restrict from, float *restrict to) {
    int64_t c = c0;
    for (; c < c1 && c < k->paired; c += 2 * L)
        for (int j = 0; j < L; j++) {
            to[c + j] = from[c + 2 * j];
            to[c + L + j] = from[c + 2 * j + 1];
        }
    for (; c < c1; c++)
        for (int64_t s = 0; s < k->group; s++) to[c * k->group + s] = from[c];
}

/* And the sums of such columns in the order of the channels, in place. */
static void NAME(unpair)(const call *k, int64_t c0, int64_t c1, double *sums) {
    for (; c0 < c1 && c0 < k->paired; c0 += 2 * L, sums += 2 * L) {
        double pair[2 * L];
        memcpy(pair, sums, sizeof pair);
        for (int j = 0; j < L; j++) {
            sums[2 * j] = pair[j];
            sums[2 * j + 1] = pair[L + j];
        }
    }
}

/* Coefficients as the columns see them: the channels' own, or copies, of which `copied` are made now, for c0..c1. */
static NAME(columns) NAME(of_columns)(call *k, int64_t c0, int64_t c1, int shifted, range copied) {
    const NAME(columns) own = NAME(of_channels)(k, shifted);
    if (k->group <= 1 && !k->paired) return own;
    const float *from[5] = {own.centre, own.scale, own.offset, own.grad_x, own.grad_1};
    for (int j = copied.from; j < copied.to; j++) NAME(spread)(k, c0, c1, from[j], k->wide[j]);
    return (NAME(columns)){k->wide[0], k->wide[1], k->wide[2], k->wide[3], k->wide[4]};
}

/* Finish channels c0..c1 from the sums of their columns, which are first added up per channel, in place. */
static int NAME(finish_columns)(call *k, int64_t c0, int64_t c1, double *sums, double *products, int final) {
    NAME(unpair)(k, c0, c1, sums);
    NAME(unpair)(k, c0, c1, products);
    for (int64_t c = 0; k->group > 1 && c < c1 - c0; c++) {
        double s = 0, p = 0;
        for (int64_t j = c * k->group; j < (c + 1) * k->group; j++) s += sums[j], p += products[j];
        sums[c] = s;
        products[c] = p;
    }
    return NAME(finish)(k, c0, c1, sums, products, final);
}

/* The sums of all chunks, in the place of the first: columns from..to. */
static void NAME(add_chunks)(call *k, int64_t from, int64_t to) {
    for (int64_t t = 1; t < k->chunks; t++) {
        double *sums = k->partial, *products = sums + k->columns, *more = sums + t * 2 * k->columns;
        for (int64_t j = from; j < to; j++) sums[j] += more[j];
        for (int64_t j = from; j < to; j++) products[j] += more[k->columns + j];
    }
}

/* ---- both sweeps, a chunk after the other ------------------------------------------------------------------------ */

/* Channels of a task that has nothing to do with elements: whole pairs of vectors. */
enum { NAME(PART) = 32 };

static void NAME(part_of_channels)(const call *k, int64_t task, int64_t *c0, int64_t *c1) {
    *c0 = task * NAME(PART);
    *c1 = *c0 + NAME(PART) < k->a->channels ? *c0 + NAME(PART) : k->a->channels;
}

static void NAME(prepare_part)(void *context, int64_t task) {
    call *k = context;
    const int train = NAME(takes_moments)(k->a);
    int64_t c0, c1;
    NAME(part_of_channels)(k, task, &c0, &c1);
    if (train && !k->final) NAME(guess)(k, c0, c1);
    NAME(of_columns)(k, c0, c1, train, NAME(coefficients_before)(k->a));
}

/* Usually next to nothing; but channels whose sums overflow are read again, number by number. */
static void NAME(finish_part)(void *context, int64_t task) {
    call *k = context;
    const int64_t g = k->columns / k->a->channels; /* not `group`, which is 0 for runs */
    int64_t c0, c1;
    NAME(part_of_channels)(k, task, &c0, &c1);
    NAME(add_chunks)(k, c0 * g, c1 * g);
    double *sums = k->partial + c0 * g, *products = sums + k->columns;
    if (NAME(finish_columns)(k, c0, c1, sums, products, k->final)) atomic_store(&k->again, 1);
    else if (NAME(needs_output)(k->a)) NAME(of_columns)(k, c0, c1, 0, NAME(coefficients_after)(k->a));
}

/* Sums, coefficients, output, each in `tasks` parts of the tensor; the output backwards, because a thread's last part is
 * what the sums left in its cache. */
static void NAME(two_sweeps)(call *k, task_fn sums, task_fn write, int64_t tasks) {
    const bn_args *a = k->a;
    const int64_t parts = (a->channels + NAME(PART) - 1) / NAME(PART);
    const int summing = NAME(needs_sums)(a);
    do {
        phase phases[MAX_PHASES];
        int64_t count = 0;
        atomic_store(&k->again, 0);
        if (NAME(takes_moments)(a) || k->group > 1 || k->paired) phases[count++] = (phase){NAME(prepare_part), parts, 0};
        if (summing) phases[count++] = (phase){sums, tasks, 0};
        if (summing) phases[count++] = (phase){NAME(finish_part), parts, 0};
        if (NAME(needs_output)(a)) phases[count++] = (phase){write, tasks, summing};
        parallel_phases(a->threads, phases, count, k);
        k->final = 1;
    } while (atomic_load(&k->again));
}

/* ---- tasks on runs ------------------------------------------------------------------------------------------ */

enum { NAME(MAX_BLOCK) = 256 };

/* Sums of channels c0..c1 over the runs from..to, as plain doubles. */
static void NAME(run_sums)(call *k, int64_t c0, int64_t c1, int64_t from, int64_t to, double *sums, double *products) {
    vdh vectors[NAME(MAX_BLOCK)][2];
    memset(vectors, 0, (size_t)(c1 - c0) * sizeof *vectors);
    const NAME(columns) w = NAME(of_channels)(k, NAME(takes_moments)(k->a));
    NAME(runs)(k->a, c0, c1, from, to, &w, vectors);
    for (int64_t c = 0; c < c1 - c0; c++) {
        sums[c] = NAME(total)(vectors[c][0]);
        products[c] = NAME(total)(vectors[c][1]);
    }
}

/* Whole channels, sums to output. */
static void NAME(channels_task)(void *context, int64_t task) {
    call *k = context;
    const bn_args *a = k->a;
    const int64_t all = a->batch * NAME(pieces)(a), c0 = task * k->block;
    const int64_t c1 = c0 + k->block < a->channels ? c0 + k->block : a->channels;
    double sums[NAME(MAX_BLOCK)], products[NAME(MAX_BLOCK)];
    if (NAME(takes_moments)(a)) NAME(guess)(k, c0, c1);
    for (int final = 0, again = NAME(needs_sums)(a); again; final = 1) {
        NAME(run_sums)(k, c0, c1, 0, all, sums, products);
        again = NAME(finish)(k, c0, c1, sums, products, final);
    }
    if (!NAME(needs_output)(a)) return;
    const NAME(columns) w = NAME(of_channels)(k, 0);
    NAME(runs)(a, c0, c1, 0, all, &w, NULL);
}

/* The same in two phases, sample by sample: task = chunk of samples (or of their pieces) * blocks of channels + block. */
static void NAME(part_of_runs)(const call *k, int64_t task, int64_t *c0, int64_t *c1, int64_t *from, int64_t *to) {
    const int64_t all = k->a->batch * NAME(pieces)(k->a), chunk = task / k->blocks, block = task % k->blocks;
    *c0 = block * k->a->channels / k->blocks;
    *c1 = (block + 1) * k->a->channels / k->blocks;
    *from = chunk * all / k->chunks;
    *to = (chunk + 1) * all / k->chunks;
}

static void NAME(chunk_sums)(void *context, int64_t task) {
    call *k = context;
    int64_t c0, c1, from, to;
    NAME(part_of_runs)(k, task, &c0, &c1, &from, &to);
    double *sums = k->partial + task / k->blocks * 2 * k->a->channels, *products = sums + k->a->channels;
    NAME(run_sums)(k, c0, c1, from, to, sums + c0, products + c0);
}

static void NAME(chunk_write)(void *context, int64_t task) {
    call *k = context;
    if (atomic_load(&k->again)) return;
    int64_t c0, c1, from, to;
    NAME(part_of_runs)(k, task, &c0, &c1, &from, &to);
    const NAME(columns) w = NAME(of_channels)(k, 0);
    NAME(runs)(k->a, c0, c1, from, to, &w, NULL);
}

/* Nothing to sum: memory from end to end, all channels of some runs. */
static void NAME(stream_write)(void *context, int64_t task) {
    call *k = context;
    const int64_t all = k->a->batch * NAME(pieces)(k->a);
    const NAME(columns) w = NAME(of_channels)(k, 0);
    NAME(runs)(k->a, 0, k->a->channels, task * all / k->chunks, (task + 1) * all / k->chunks, &w, NULL);
}

/* Into how many chunks of samples the sums fall, or 1: whole channels, one after the other. Up to 16 threads it does not
 * depend on their number, and so neither does any bit of the result. */
static int64_t NAME(chunks_of_runs)(const bn_args *a, int64_t all) {
    const int64_t most = a->threads > 16 ? a->threads : 16;
    const int64_t bytes = size_of_x(a), channel = bytes / a->channels, run = channel / a->batch;
    /* Memory is fastest from end to end, even if it is read twice. Two exceptions. Where runs are long stretches of memory
     * by themselves, and the second reading would come from beyond the caches, channels go one after the other, if there
     * are enough of them for the threads. */
    if (run >= (32 << 10) && bytes > (32 << 20)) return a->channels >= 4 * most ? 1 : all < most ? all : most;
    /* And channels may have so few values that a sum for every chunk costs more than it saves. */
    int64_t chunks = all >= 2 && channel >= 1536 ? 2 : 1;
    while (2 * chunks <= most && 2 * chunks <= all && channel >= 2 * chunks * 2048) chunks *= 2;
    return chunks;
}

static int64_t NAME(run_runs)(call *k) {
    const bn_args *a = k->a;
    const int64_t C = a->channels, all = a->batch * NAME(pieces)(a), threads = a->threads;
    if (!NAME(needs_sums)(a) && all >= threads) {
        k->chunks = all < 4 * threads ? all : 4 * threads;
        parallel(threads, k->chunks, NAME(stream_write), k);
        return 0;
    }
    k->chunks = NAME(chunks_of_runs)(a, all);
    if (k->chunks == 1) {
        /* Stretches of about 8 KB, which backward is two inputs of 4 KB; as long as every thread gets a few tasks. */
        k->block = (a->operation >= BN_BACKWARD_TRAIN ? 1024 : 2048) / a->positions;
        if (k->block > C / (2 * threads)) k->block = C / (2 * threads);
        if (k->block > NAME(MAX_BLOCK)) k->block = NAME(MAX_BLOCK);
        if (k->block < 1) k->block = 1;
        parallel(threads, (C + k->block - 1) / k->block, NAME(channels_task), k);
        return 0;
    }
    /* All channels of a sample together, unless there are too many, or threads would get unequal shares. */
    const int equal = k->chunks % threads == 0 && (all % threads == 0 || all >= 8 * threads);
    k->blocks = equal ? 1 : (4 * threads + k->chunks - 1) / k->chunks;
    if (k->blocks < (C + NAME(MAX_BLOCK) - 1) / NAME(MAX_BLOCK)) k->blocks = (C + NAME(MAX_BLOCK) - 1) / NAME(MAX_BLOCK);
    if (k->blocks > C) k->blocks = C;
    char *memory = block_for((size_t)(2 * C * k->chunks) * sizeof(double));
    if (!memory) return -1;
    k->partial = first_line(memory);
    NAME(two_sweeps)(k, NAME(chunk_sums), NAME(chunk_write), k->chunks * k->blocks);
    free(memory);
    return 0;
}

/* ---- tasks on the matrix ------------------------------------------------------------------------------------ */

/* Few rows: a tile of columns, sums to output, while it is in the cache. */
static void NAME(tile_task)(void *context, int64_t task) {
    call *k = context;
    const bn_args *a = k->a;
    const int train = NAME(takes_moments)(a);
    const int64_t g = k->group, c0 = task * k->tile, c1 = task == k->tiles - 1 ? a->channels : c0 + k->tile;
    double *sums = k->partial, *products = k->partial + k->columns;
    if (train) NAME(guess)(k, c0, c1);
    for (int final = 0, again = NAME(needs_sums)(a); again; final = 1) {
        const NAME(columns) w = NAME(of_columns)(k, c0, c1, train, NAME(coefficients_before)(a));
        memset(sums + c0 * g, 0, (size_t)((c1 - c0) * g) * sizeof *sums);
        memset(products + c0 * g, 0, (size_t)((c1 - c0) * g) * sizeof *sums);
        NAME(matrix)(k, 0, k->rows, c0 * g, c1 * g, &w, sums, products);
        again = NAME(finish_columns)(k, c0, c1, sums + c0 * g, products + c0 * g, final);
    }
    if (!NAME(needs_output)(a)) return;
    const NAME(columns) w = NAME(of_columns)(k, c0, c1, 0, NAME(coefficients_after)(a));
    NAME(matrix)(k, 0, k->rows, c0 * g, c1 * g, &w, NULL, NULL);
}

/* Many rows: chunks of rows, in two phases; task = chunk * tiles + tile. */
static void NAME(part_of_rows)(const call *k, int64_t chunk, int64_t tile, int64_t *from, int64_t *to, int64_t *c0,
                               int64_t *c1) {
    *from = chunk * k->rows / k->chunks;
    *to = (chunk + 1) * k->rows / k->chunks;
    *c0 = tile * k->tile * k->group;
    *c1 = tile == k->tiles - 1 ? k->columns : *c0 + k->tile * k->group;
}

static void NAME(rows_sums)(void *context, int64_t task) {
    call *k = context;
    int64_t from, to, c0, c1;
    NAME(part_of_rows)(k, task / k->tiles, task % k->tiles, &from, &to, &c0, &c1);
    double *sums = k->partial + task / k->tiles * 2 * k->columns, *products = sums + k->columns;
    memset(sums + c0, 0, (size_t)(c1 - c0) * sizeof *sums);
    memset(products + c0, 0, (size_t)(c1 - c0) * sizeof *sums);
    const NAME(columns) w = NAME(of_columns)(k, 0, 0, NAME(takes_moments)(k->a), (range){0, 0});
    NAME(matrix)(k, from, to, c0, c1, &w, sums, products);
}

static void NAME(rows_write)(void *context, int64_t task) {
    call *k = context;
    if (atomic_load(&k->again)) return;
    int64_t from, to, c0, c1;
    NAME(part_of_rows)(k, task / k->tiles, task % k->tiles, &from, &to, &c0, &c1);
    const NAME(columns) w = NAME(of_columns)(k, 0, 0, 0, (range){0, 0});
    NAME(matrix)(k, from, to, c0, c1, &w, NULL, NULL);
}

/* At least `wanted` tiles, if there are 64 columns for each; the last one takes what would be too little for another. */
static void NAME(set_tiles)(call *k, int64_t wanted) {
    const int64_t columns = k->columns / wanted;
    k->tile = (columns < 64 ? 64 : columns / 64 * 64) / k->group;
    if (k->group > 1) k->tile = k->tile < 8 ? 8 : k->tile / 8 * 8; /* whole bytes of bits */
    k->tiles = k->a->channels / k->tile;
    if (wanted == 1 || k->tiles < 1) k->tiles = 1;
}

static int64_t NAME(run_matrix)(call *k) {
    const bn_args *a = k->a;
    const int64_t columns = k->columns, rows = k->rows, threads = a->threads;
    const int summing = NAME(needs_sums)(a);
    /* A tile of a few rows stays in the cache from its sums to its output. But memory is faster end to end: measured, from
     * 64 rows on only rows of some pages gain by being cut. */
    const int tiled = summing && (rows < 64 || (rows <= 256 && columns >= 2048));
    /* Up to 16 threads the chunks do not depend on their number, and so neither does any bit of the result. A chunk's
     * sums take as much memory as four rows, and they have to be added up: so only long chunks, but rather two than
     * tiles, in which threads would write to each other's pages. */
    const int64_t most = tiled ? 1 : threads > 16 ? threads : 16, least = summing ? 128 : 8;
    k->chunks = summing && !tiled ? 2 : 1;
    while (2 * k->chunks <= most && rows >= 2 * k->chunks * least) k->chunks *= 2;
    /* Two neighbouring vectors of bfloat16; but the last whole one stays by itself if another overlaps it. */
    if (k->group == 1 && a->dtype == BN_BFLOAT16) k->paired = (columns % L ? columns - L : columns) & -(2 * L);
    const size_t wide = k->group > 1 || k->paired ? 5 * (size_t)columns * sizeof(float) : 0;
    char *memory = block_for((size_t)(2 * columns * k->chunks) * sizeof(double) + wide);
    if (!memory) return -1;
    k->partial = first_line(memory);
    for (int j = 0; j < 5; j++) k->wide[j] = (float *)(k->partial + 2 * columns * k->chunks) + j * columns;
    /* As many chunks for every thread, or two tasks for each and more; tiles of about 512 KB. */
    int64_t wanted = k->chunks % threads == 0 ? 1 : tiled ? threads : (2 * threads + k->chunks - 1) / k->chunks;
    if (tiled && wanted < rows * columns / 131072) wanted = rows * columns / 131072;
    /* The coefficients of 1024 columns fit in the nearest cache. That pays while the rows are in a cache, too. */
    if (wanted < columns / 1024 && !outgrows_cache(a, 0)) wanted = columns / 1024;
    NAME(set_tiles)(k, wanted);
    if (tiled) parallel(threads, k->tiles, NAME(tile_task), k);
    else NAME(two_sweeps)(k, NAME(rows_sums), NAME(rows_write), k->chunks * k->tiles);
    free(memory);
    return 0;
}

static int64_t NAME(run)(call *k) {
    const bn_args *a = k->a;
    if (a->operation == BN_EVAL) {
        for (int64_t c = 0; c < a->channels; c++) {
            k->mean[c] = a->running_mean[c];
            k->var[c] = a->running_var[c];
        }
        NAME(set_coefficients)(k, 0, a->channels);
    } else if (a->operation == BN_APPLY) {
        memcpy(k->mean, a->moments, (size_t)a->channels * sizeof(double));
        memcpy(k->var, a->moments + a->channels, (size_t)a->channels * sizeof(double));
        NAME(set_coefficients)(k, 0, a->channels);
    } else if (a->operation == BN_GRAD_APPLY) {
        NAME(set_gradients)(k, 0, a->channels, a->sums, a->sums + a->channels, 1);
    } else if (!NAME(needs_sums)(a)) {
        for (int64_t c = 0; c < a->channels; c++) k->grad_x[c] = k->grad_1[c] = 0;
    }
    return k->group ? NAME(run_matrix)(k) : NAME(run_runs)(k);
}
