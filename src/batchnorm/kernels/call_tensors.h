/* Tensors as call.c sees them: looked at, and made. */
#ifndef BATCHNORM_CALL_TENSORS_H
#define BATCHNORM_CALL_TENSORS_H

/* What `setup` is given, by name: the objects of torch and of this package that the way leads through. */
#define GIVEN(X)                                                                                                            \
    X(Tensor) X(Parameter) X(kernels) X(layers) X(is_grad_enabled) X(get_num_threads) X(increment_version)          \
    X(get_tracing_state) X(transforming) X(dispatching) X(forward_ad) X(activations) X(kinked) X(none) X(zero) X(setting)     \
    X(new_tuple) X(apply) X(gradients) X(refuse) X(empty_like)
#define DECLARE(name) static PyObject *given_##name;
GIVEN(DECLARE)

/* Names of attributes, interned once. */
#define NAMES(X)                                                                                                            \
    X(to_save) X(rest) X(saved_tensors) X(needs_input_grad) X(_current_level) X(_kernel) X(run) X(address)   \
    X(_parameters) X(_buffers) X(weight) X(bias) X(running_mean) X(running_var) X(num_batches_tracked) X(training)            \
    X(track_running_stats) X(statistics) X(update) X(momentum) X(eps) X(activation) X(negative_slope) X(_refused)
#define DECLARE_NAME(name) static PyObject *name_##name;
NAMES(DECLARE_NAME)

enum { MOST_DIMENSIONS = 5, ALIGNMENT = 64 };

static const dlpack_type FLOAT32 = {DLPACK_FLOAT, 32, 1}, BFLOAT16 = {DLPACK_BFLOAT, 16, 1}, INT64 = {DLPACK_INT, 64, 1},
                         UINT8 = {DLPACK_UINT, 8, 1};

static int same_type(dlpack_type a, dlpack_type b) { return a.kind == b.kind && a.bits == b.bits && a.lanes == b.lanes; }

/* ---- looked at ---------------------------------------------------------------------------------------------- */

/* Answers of the functions below: what is not plain is no error. */
enum answer { FAILED = -1, DECLINED = 0, SERVED = 1 };

/* A RuntimeError is a tensor's way to say that it has no memory or strides, such as one of a transform that has ended. */
static enum answer declined_if_runtime_error(void) {
    if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) return FAILED;
    PyErr_Clear();
    return DECLINED;
}

/* Read a plain tensor in this process's memory, whose numbers are what that memory holds; anything else is declined. Its sizes are
 * the tensor's own. */
static enum answer look(PyObject *tensor, dlpack_tensor *into) {
    PyObject *type = (PyObject *)Py_TYPE(tensor);
    if (type != given_Tensor && type != given_Parameter) return DECLINED;
    if (dlpack->look(tensor, into) != 0) return declined_if_runtime_error();
    if (into->data == NULL || into->device.type != DLPACK_CPU || into->ndim > MOST_DIMENSIONS) return DECLINED;
    into->data = (char *)into->data + into->byte_offset;
    return has_memory(tensor, into) && !is_negative(tensor) ? SERVED : DECLINED;
}

static int64_t numel(const dlpack_tensor *t) {
    int64_t count = 1;
    for (int d = 0; d < t->ndim; d++) count *= t->shape[d];
    return count;
}

/* Whether memory holds the dimensions in this order, the last one fastest, without gaps. */
static int is_dense(const dlpack_tensor *t, const int *order) {
    int64_t expected = 1;
    for (int i = t->ndim - 1; i >= 0; i--) {
        int d = order[i];
        if (t->shape[d] != 1 && t->strides[d] != expected) return 0;
        expected *= t->shape[d];
    }
    return 1;
}

static int is_contiguous(const dlpack_tensor *t) {
    static const int order[MOST_DIMENSIONS] = {0, 1, 2, 3, 4};
    return is_dense(t, order);
}

static int same_places(const dlpack_tensor *a, const dlpack_tensor *b) {
    if (a->ndim != b->ndim || !same_type(a->type, b->type)) return 0;
    for (int d = 0; d < a->ndim; d++)
        if (a->shape[d] != b->shape[d] || a->strides[d] != b->strides[d]) return 0;
    return 1;
}

/* A row of one float32 a channel: its address, or NULL for None. */
static enum answer row(PyObject *tensor, int64_t channels, void **into) {
    *into = NULL;
    if (tensor == Py_None) return SERVED;
    dlpack_tensor t;
    enum answer answer = look(tensor, &t);
    if (answer != SERVED) return answer;
    if (t.ndim != 1 || t.shape[0] != channels || !same_type(t.type, FLOAT32) || !is_contiguous(&t)) return DECLINED;
    *into = t.data;
    return SERVED;
}

/* ---- made --------------------------------------------------------------------------------------------------- */

typedef struct {
    dlpack_managed managed; /* first: a pointer to it is one to the whole */
    int64_t shape[MOST_DIMENSIONS], strides[MOST_DIMENSIONS];
} header;

static void free_tensor(dlpack_managed *managed) {
    free(managed->context); /* its memory */
    free(managed);
}

/* A new tensor, and where its memory is.
 *
 * torch asks glibc for memory at a cache line's boundary, and glibc (seen with 2.36) cuts it out of a larger piece. What is
 * left of that goes to the thread's list of small pieces, so that it cannot grow together again when the tensor is freed, and
 * the next tensor of this size does not fit. Step by step they wander through the heap, and are in no cache. Asked for plainly,
 * with room for the boundary, the same piece comes again: with outputs and gradients that come so, steps of up to 8 MB took
 * 1.0 to 1.2 times less. And where a piece is free that torch would be given, we are, too, because we ask for less than torch:
 * not for the header, which has its own. (Of more than 32 MB there may be one such piece, or new pages, which take three times
 * as long.) The price: their storage cannot be resized, as that of memory from NumPy. */
static PyObject *fresh(int ndim, const int64_t *shape, const int64_t *strides, dlpack_type type, void *where) {
    int64_t count = 1;
    for (int d = 0; d < ndim; d++) count *= shape[d];
    header *h = malloc(sizeof *h);
    char *block = malloc((size_t)count * type.bits / 8 + ALIGNMENT);
    if (h == NULL || block == NULL) {
        free(h);
        free(block);
        return PyErr_NoMemory();
    }
    memcpy(h->shape, shape, (size_t)ndim * sizeof *shape);
    memcpy(h->strides, strides, (size_t)ndim * sizeof *strides);
    char *data = block + (-(uintptr_t)block & (ALIGNMENT - 1));
    h->managed = (dlpack_managed){
        .version = dlpack->version,
        .context = block,
        .deleter = free_tensor,
        .tensor = {.data = data, .device = {DLPACK_CPU, 0}, .ndim = ndim, .type = type, .shape = h->shape, .strides = h->strides}};
    void *tensor;
    if (dlpack->to_object(&h->managed, &tensor) != 0) return NULL;
    memcpy(where, &data, sizeof data);
    return tensor;
}

static PyObject *fresh_like(const dlpack_tensor *t, void *where) {
    return fresh(t->ndim, t->shape, t->strides, t->type, where);
}

static PyObject *fresh_row(int64_t count, void *where) { return fresh(1, &count, &(int64_t){1}, FLOAT32, where); }
static PyObject *fresh_bytes(int64_t count, void *where) { return fresh(1, &count, &(int64_t){1}, UINT8, where); }

#endif
