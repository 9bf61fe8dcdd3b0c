/* Runs the kernel over many shapes and variants in heap buffers of exactly their size, so that AddressSanitizer,
 * UndefinedBehaviorSanitizer and valgrind see every byte too far, and compares with plain loops in double.
 *
 *     K=src/batchnorm/kernels
 *     gcc -std=gnu11 -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -DBN_EMULATE_AVX512 -Wno-psabi \
 *         -I $K tests/kernels/sanitize.c -o /tmp/sanitize -lm && /tmp/sanitize
 *     gcc -std=gnu11 -O1 -g -DBN_EMULATE_AVX512 -Wno-psabi -I $K tests/kernels/sanitize.c -o /tmp/plain -lm &&
 *         valgrind --error-exitcode=1 --leak-check=full /tmp/plain few
 *
 * BN_EMULATE_AVX512 compiles the 16-lane code for AVX2: valgrind has AVX2 but no AVX-512, and the CPU need not have it.
 * "few" takes every seventh combination; the name of an instruction set leaves out the others. */
#include "bn.c"

#include <stdio.h>

typedef struct {
    int64_t batch, channels, positions, threads;
} shape;

static const shape shapes[] = {
    /* around the width of a vector, in runs and in matrices */
    {1, 1, 16, 1}, {2, 1, 17, 1}, {3, 2, 19, 1}, {2, 3, 31, 1}, {1, 5, 33, 1}, {4, 3, 64, 1}, {2, 2, 129, 1},
    {1, 2, 137, 1}, {5, 40, 16, 1}, {2, 33, 49, 1}, {2, 16, 1, 1}, {3, 17, 1, 1}, {8, 31, 1, 1}, {9, 33, 1, 1},
    {17, 16, 1, 1}, {7, 100, 1, 1}, {1, 16, 2, 1}, {2, 6, 3, 1}, {3, 4, 4, 1}, {9, 5, 5, 1}, {8, 3, 7, 1},
    {2, 2, 8, 1}, {11, 3, 9, 1}, {2, 2, 15, 1}, {5, 21, 15, 1}, {255, 16, 1, 1}, {256, 19, 1, 1}, {257, 17, 1, 1},
    {300, 6, 3, 1}, {2, 200, 1, 1},
    /* larger than one thread does alone: without a thread pool, all tasks run here one after another */
    {9, 2, 931, 3}, {5, 1, 3300, 4}, {1, 1, 65536, 3}, {1, 1, 70003, 2}, {3, 70, 80, 2}, {63, 270, 1, 3},
    {70, 250, 1, 3}, {70, 50, 5, 4}, {130, 133, 1, 3}, {260, 67, 1, 4}, {1100, 17, 1, 3}, {40, 60, 7, 5},
    {400, 15, 3, 2}, {2, 4100, 2, 3}, {40, 257, 16, 17}, {3, 600, 33, 5},
    /* wide enough for tiles beside chunks */
    {66, 2100, 1, 3}, {390, 350, 1, 2},
};

typedef struct {
    const char *name;
    int64_t code;
    double slope, cap;
} activation;

static const activation activations[] = {
    {"none", BN_NONE, 0, 0},      {"relu", BN_RELU, 0, 0},           {"relu6", BN_CLIPPED, 0, 6},
    {"leaky", BN_CLIPPED, 0.2, NAN}, {"silu", BN_SILU, 0, 0},
};

static uint64_t state = 2015;
static int64_t compared, failures;

/* About normal: the sum of four uniform numbers. */
static double noise(void) {
    double sum = 0;
    for (int i = 0; i < 4; i++) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        sum += (double)(state >> 11) / 9007199254740992.0 - 0.5;
    }
    return sum * 1.7;
}

static double get(const void *p, int64_t i, int bf16) {
    if (!bf16) return ((const float *)p)[i];
    uint32_t bits = (uint32_t)((const uint16_t *)p)[i] << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static void put(void *p, int64_t i, double v, int bf16) {
    float value = (float)v;
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (bf16) ((uint16_t *)p)[i] = (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
    else ((float *)p)[i] = value;
}

static void *exactly(int64_t count, int64_t size) {
    void *p = malloc((size_t)(count * size));
    if (!p) abort();
    return p;
}

static float *floats(int64_t count, double scale, double shift) {
    float *p = exactly(count, sizeof *p);
    for (int64_t i = 0; i < count; i++) p[i] = (float)(shift + scale * noise());
    return p;
}

static void *elements(int64_t count, double scale, double shift, int bf16) {
    void *p = exactly(count, bf16 ? 2 : 4);
    for (int64_t i = 0; i < count; i++) put(p, i, shift + scale * noise(), bf16);
    return p;
}

static double activated(double z, const activation *f) {
    switch (f->code) {
    case BN_RELU: return z > 0 ? z : 0;
    case BN_CLIPPED: return z > f->cap ? f->cap : z > 0 ? z : f->slope * z;
    case BN_SILU: return z / (1 + exp(-z));
    default: return z;
    }
}

static double slope_at(double z, const activation *f) {
    double s = 1 / (1 + exp(-z));
    switch (f->code) {
    case BN_RELU: return z > 0;
    case BN_CLIPPED: return z >= f->cap ? 0 : z > 0 ? 1 : f->slope;
    case BN_SILU: return s * (1 + z * (1 - s));
    default: return 1;
    }
}

static void compare(const char *what, double got, double want, double unit, int bf16, const bn_args *a, const char *act) {
    compared++;
    double allowed = 4e-6 * (unit + fabs(want)) + (bf16 ? 8e-3 * (unit + fabs(want)) : 0);
    if (fabs(got - want) <= allowed) return;
    if (failures++ < 20)
        fprintf(stderr, "%s: %g, expected %g; %s, dtype %d, aux %d, shape %d %d %d, threads %d, %s\n", what, got, want,
                isas[current].name, (int)a->dtype, (int)a->aux, (int)a->batch, (int)a->channels, (int)a->positions,
                (int)a->threads, act);
}

/* What a batch is: no mask, lengths, single places, islands shorter than a vector; groups; the operations in halves. */
typedef struct {
    int mask;
    int64_t groups, samples;
    int halves;
} batch;

static uint8_t *marks(const batch *b, int64_t N, int64_t S) {
    if (!b->mask) return NULL;
    uint8_t *mask = exactly(N * S, 1);
    for (int64_t n = 0; n < N; n++) {
        const int64_t start = (int64_t)(fabs(noise()) * (double)S) % S;
        for (int64_t s = 0; s < S; s++)
            mask[n * S + s] = b->mask == 1 ? s <= start : b->mask == 2 ? noise() > 0 : s >= start && s < start + 3;
    }
    for (int64_t g = 0, rows = N / b->samples; g < b->groups; g++) { /* two places at least in every group */
        const int64_t first = g * b->samples / b->groups * rows, last = (g + 1) * b->samples / b->groups * rows;
        mask[first * S] = mask[last * S - 1] = 1;
    }
    return mask;
}

static void must(const bn_args *a, const char *what) {
    if (bn_run(a) == 0) return;
    failures++;
    fprintf(stderr, "bn_run refused %s of %d %d %d\n", what, (int)a->batch, (int)a->channels, (int)a->positions);
}

/* One call forward and one backward. The last bits of `pick` say what is left out: weight, bias, running statistics,
 * the gradients of weight, of bias, of the residual. */
static void one(const shape *s, const activation *f, int training, int residual, int bf16, unsigned pick, const batch *kind) {
    const int64_t C = s->channels, S = s->positions, N = s->batch, total = N * C * S, G = training ? kind->groups : 1;
    const int size = bf16 ? 2 : 4, halves = training && kind->halves;
    void *x = elements(total, 2, 1, bf16), *y = exactly(total, size), *dx = exactly(total, size);
    void *r = residual ? elements(total, 1, 0, bf16) : NULL, *dy = elements(total, 1, 0, bf16);
    float *weight = pick & 1 ? NULL : floats(C, 0.3, 1.5), *bias = pick & 2 ? NULL : floats(C, 1, 0);
    float *mean = training && (pick & 4 || G > 1 || halves) ? NULL : floats(C, 1, 0), *var = mean ? floats(C, 0.2, 1.5) : NULL;
    float *saved = exactly(G * C * BN_SAVED_ROWS, sizeof *saved);
    float *dweight = pick & 8 ? NULL : exactly(C, sizeof *dweight), *dbias = pick & 16 ? NULL : exactly(C, sizeof *dbias);
    void *dr = residual && f->code != BN_NONE && !(pick & 32) ? exactly(total, size) : NULL;
    double *mu = exactly(G * C, sizeof *mu), *sigma = exactly(G * C, sizeof *sigma), *z = exactly(total, sizeof *z);
    double *count = exactly(G, sizeof *count), *moments = G > 1 || halves ? exactly(G * 2 * C, sizeof *moments) : NULL;
    double *sums = halves ? exactly(2 * C, sizeof *sums) : NULL;
    uint8_t *mask = marks(kind, N, S), *bits = exactly(N * (S == 1 ? (C + 7) / 8 : C * ((S + 7) / 8)) + 4, 1);
    const int kinked = f->code == BN_RELU || f->code == BN_CLIPPED;
    const double eps = 1e-5, momentum = 0.25;

    /* Padding is NaN, or was never written, so that valgrind sees what depends on it. */
    void *padded[] = {x, r, dy};
    for (int j = 0; mask && j < 3; j++) {
        void *holes = padded[j] ? exactly(total, size) : NULL;
        for (int64_t i = 0; holes && i < total; i++)
            if (!mask[i / (C * S) * S + i % S] && pick & 64) put(holes, i, NAN, bf16);
            else if (mask[i / (C * S) * S + i % S]) put(holes, i, get(padded[j], i, bf16), bf16);
        if (holes) free(padded[j]), padded[j] = holes;
    }
    x = padded[0], r = padded[1], dy = padded[2];

#define ROWS(g) ((g) * kind->samples / G * (N / kind->samples))
#define EACH(n, i)                                                                                            \
    for (int64_t n = ROWS(g); n < ROWS(g + 1); n++)                                                           \
        for (int64_t i = (n * C + c) * S, start_##i = i; i < start_##i + S; i++)                              \
            if (!mask || mask[n * S + i - start_##i])
    for (int64_t g = 0; g < G; g++)
        for (int64_t c = 0; c < C; c++) {
            const int64_t at = g * C + c;
            double sum = 0, squares = 0;
            count[g] = 0;
            EACH(n, i) sum += get(x, i, bf16), count[g]++;
            mu[at] = training ? sum / count[g] : mean[c];
            EACH(n, i) squares += (get(x, i, bf16) - mu[at]) * (get(x, i, bf16) - mu[at]);
            sigma[at] = sqrt((training ? squares / count[g] : var[c]) + eps);
            EACH(n, i) {
                z[i] = (get(x, i, bf16) - mu[at]) / sigma[at] * (weight ? weight[c] : 1) + (bias ? bias[c] : 0);
                if (residual) z[i] += get(r, i, bf16);
                double margin = bf16 ? 6e-2 : 1e-4; /* at a kink either slope is right */
                if (fabs(z[i]) < margin || fabs(z[i] - f->cap) < margin) put(dy, i, 0, bf16);
            }
        }

    double *old_mean = exactly(C, sizeof(double)), *old_var = exactly(C, sizeof(double));
    for (int64_t c = 0; mean && c < C; c++) old_mean[c] = mean[c], old_var[c] = var[c];
    int64_t *batches = mean ? exactly(1, sizeof *batches) : NULL;
    if (batches) *batches = 7;
    bn_args a = {.operation = training ? BN_TRAIN : BN_EVAL, .dtype = bf16, .activation = f->code,
                 .aux = !residual ? BN_AUX_NONE : kinked ? BN_AUX_BITS : BN_AUX_RESIDUAL, .bits = bits, .threads = s->threads, .batch = N, .channels = C,
                 .positions = S, .groups = G, .samples = kind->samples, .mask = mask, .x = x, .aux_data = r, .out = y,
                 .weight = weight, .bias = bias, .running_mean = mean, .running_var = var, .batches = batches,
                 .saved = saved, .moments = moments, .eps = eps, .momentum = momentum, .slope = f->slope, .cap = f->cap};
    if (halves) {
        bn_args first = a;
        first.operation = BN_MOMENTS, first.activation = BN_NONE, first.aux = BN_AUX_NONE;
        first.out = NULL, first.aux_data = NULL, first.weight = first.bias = NULL;
        must(&first, "the moments");
        a.operation = BN_APPLY;
    }
    must(&a, "the forward pass");

    bn_args b = a;
    b.operation = training ? BN_BACKWARD_TRAIN : BN_BACKWARD_EVAL;
    b.aux = f->code == BN_NONE ? BN_AUX_NONE : a.aux;
    b.aux_data = b.aux == BN_AUX_RESIDUAL ? r : NULL;
    b.dy = dy, b.out = dx, b.out_residual = dr, b.grad_weight = dweight, b.grad_bias = dbias;
    b.weight = b.bias = b.running_mean = b.running_var = NULL;
    b.moments = NULL;
    if (halves && G == 1) {
        bn_args first = b;
        first.operation = BN_GRAD_SUMS, first.out = NULL, first.sums = sums;
        must(&first, "the sums");
        b.operation = BN_GRAD_APPLY, b.sums = sums, b.total = count[0], b.grad_weight = b.grad_bias = NULL;
    }
    must(&b, "the backward pass");

    if (batches) compare("batches", (double)*batches, 7 + training, 0, 0, &a, f->name);
    for (int64_t i = 0; mask && i < total; i++)
        if (!mask[i / (C * S) * S + i % S]) {
            compare("padding of y", get(y, i, bf16), 0, 0, 0, &a, f->name);
            compare("padding of dx", get(dx, i, bf16), 0, 0, 0, &b, f->name);
            if (dr) compare("padding of dresidual", get(dr, i, bf16), 0, 0, 0, &b, f->name);
        }
    for (int64_t c = 0; c < C; c++) {
        double all_products = 0, all_sums = 0, values = 0;
        for (int64_t g = 0; g < G; g++) {
            const int64_t at = g * C + c;
            double sum = 0, product = 0, scale = (weight ? weight[c] : 1) / sigma[at];
            values += count[g];
            EACH(n, i) {
                double gradient = get(dy, i, bf16) * slope_at(z[i], f);
                sum += gradient;
                product += gradient * (get(x, i, bf16) - mu[at]) / sigma[at];
                compare("y", get(y, i, bf16), activated(z[i], f), 3, bf16, &a, f->name);
                if (dr) compare("dresidual", get(dr, i, bf16), gradient, 3, bf16, &b, f->name);
            }
            EACH(n, i) {
                double xhat = (get(x, i, bf16) - mu[at]) / sigma[at], gradient = get(dy, i, bf16) * slope_at(z[i], f);
                double mixed = gradient - sum / count[g] - xhat * product / count[g];
                compare("dx", get(dx, i, bf16), scale * (training ? mixed : gradient), 3 * fabs(scale), bf16, &b, f->name);
            }
            if (moments) {
                compare("mean", moments[(2 * g) * C + c], mu[at], 3, 0, &a, f->name);
                compare("variance", moments[(2 * g + 1) * C + c], sigma[at] * sigma[at] - eps, 3, 0, &a, f->name);
            }
            if (halves && G == 1) {
                compare("sum", sums[c], sum, 10 + sqrt(count[0]), 0, &b, f->name);
                compare("product", sums[C + c], product * sigma[at], 10 + 3 * sqrt(count[0]), 0, &b, f->name);
            }
            all_products += product, all_sums += sum;
        }
        if (dweight) compare("dweight", dweight[c], all_products, 10 + sqrt(values), 0, &b, f->name);
        if (dbias) compare("dbias", dbias[c], all_sums, 10 + sqrt(values), 0, &b, f->name);
        double moved = training ? momentum : 0, variance = sigma[c] * sigma[c] - eps, bessel = values / (values - 1);
        if (mean) {
            compare("running_mean", mean[c], old_mean[c] + moved * (mu[c] - old_mean[c]), 1, 0, &a, f->name);
            compare("running_var", var[c], old_var[c] + moved * (variance * bessel - old_var[c]), 1, 0, &a, f->name);
        }
    }
    void *all[] = {x,     y,  dx, r,     dy, weight, bias,    mean,    var,  saved,    dweight,
                   dbias, dr, mu, sigma, z,  count,  moments, sums,    mask, old_mean, old_var, bits,
                   batches};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

/* A batch of this shape, its kind scattered over the turns; what the kernel refuses is left out. */
static batch choose(const shape *s, unsigned turn) {
    const unsigned dice = turn * 2654435761u >> 16;
    batch b = {dice % 4, 1, s->batch, dice / 4 % 2};
    if (s->positions > 1 && s->positions < isas[current].lanes) b.mask = 0;
    if (s->positions == 1 && s->batch % 2 == 0 && dice / 8 % 2) b.samples = s->batch / 2; /* a sample of two rows */
    const int64_t most = b.samples * s->positions > 4 ? b.samples / 2 : 1, choices[] = {1, 2, 3, most};
    const int64_t groups = choices[dice / 16 % 4];
    if (groups >= 1 && b.samples / groups * (s->batch / b.samples) * s->positions >= 2) b.groups = groups;
    return b;
}

int main(int argc, char **argv) {
    const int few = argc > 1 && strcmp(argv[1], "few") == 0;
    const char *only = argc > 1 ? argv[argc - 1] : "few";
    unsigned turn = 0;
    for (int64_t i = 0; i < bn_isa_count(); i++) {
        if (strcmp(only, "few") != 0 && strcmp(only, bn_isa_name(i)) != 0) continue;
        if (bn_isa_select(i) != 0) {
            printf("%s: this CPU lacks it\n", bn_isa_name(i));
            continue;
        }
        const int64_t before = compared;
        for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
            for (size_t f = 0; f < sizeof activations / sizeof *activations; f++)
                for (unsigned variant = 0; variant < 16; variant++) {
                    turn++;
                    if (few && turn % 7 != 0) continue;
                    /* Everything is asked for in two calls of three, and something is left out in the third. */
                    const unsigned left_out = turn % 3 ? turn % 2 * 64 : turn / 3 * 11;
                    const batch plain = {0, 1, shapes[s].batch, 0}, kind = variant < 8 ? plain : choose(&shapes[s], turn);
                    one(&shapes[s], &activations[f], !(variant & 1), variant >> 1 & 1, variant >> 2 & 1, left_out, &kind);
                }
        printf("%s: %lld numbers compared\n", bn_isa_name(i), (long long)(compared - before));
    }
    printf("%lld wrong\n", (long long)failures);
    return failures != 0 || compared == 0;
}
