/* Tensors as call.c sees them: looked at through their Python attributes, and made. */
#ifndef BATCHNORM_CALL_TENSORS_H
#define BATCHNORM_CALL_TENSORS_H

/* What `setup` is given, by name: the objects of torch and of this package that the way leads through. */
#define GIVEN(X)                                                                                                            \
    X(Tensor) X(Parameter) X(float32) X(bfloat16) X(int64) X(uint8) X(from_dlpack) X(empty_like) X(is_grad_enabled)           \
    X(get_num_threads) X(increment_version) X(get_tracing_state) X(transforming) X(dispatching) X(forward_ad) X(activations)  \
    X(kinked) X(setting) X(new_tuple) X(apply) X(python_backward) X(refuse)
#define DECLARE(name) static PyObject *given_##name;
GIVEN(DECLARE)

/* Names of attributes, interned once. */
#define NAMES(X)                                                                                                            \
    X(dtype) X(is_cpu) X(shape) X(stride) X(data_ptr) X(requires_grad) X(to_save) X(rest) X(saved_tensors)                    \
    X(needs_input_grad) X(_current_level) X(address)
#define DECLARE_NAME(name) static PyObject *name_##name;
NAMES(DECLARE_NAME)

/* A tensor as far as the kernel cares. */
typedef struct {
    PyObject *dtype; /* not owned: torch keeps its dtypes */
    int ndim;
    int64_t shape[MOST_DIMENSIONS], stride[MOST_DIMENSIONS], numel;
    void *data;
} view;

/* Answers of the functions below: what is not plain is no error. */
enum answer { FAILED = -1, DECLINED = 0, SERVED = 1 };

/* A RuntimeError is a tensor's way to say that it has no memory or strides, such as one of a transform that has ended. */
static enum answer declined_if_runtime_error(void) {
    if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) return FAILED;
    PyErr_Clear();
    return DECLINED;
}

static enum answer truth(PyObject *object, PyObject *name) {
    PyObject *value = PyObject_GetAttr(object, name);
    if (value == NULL) return declined_if_runtime_error();
    int yes = value == Py_True;
    Py_DECREF(value);
    return yes ? SERVED : DECLINED;
}

static int read_sizes(PyObject *tuple, int64_t *into) {
    Py_ssize_t count = PyTuple_Check(tuple) ? PyTuple_Size(tuple) : -1;
    if (count < 0 || count > MOST_DIMENSIONS) return -1;
    for (Py_ssize_t i = 0; i < count; i++) {
        into[i] = PyLong_AsLongLong(PyTuple_GetItem(tuple, i));
        if (into[i] == -1 && PyErr_Occurred()) {
            PyErr_Clear(); /* a symbolic size */
            return -1;
        }
    }
    return (int)count;
}

static enum answer address(PyObject *tensor, void **into) {
    PyObject *number = PyObject_CallMethodObjArgs(tensor, name_data_ptr, NULL);
    if (number == NULL) return declined_if_runtime_error();
    *into = PyLong_AsVoidPtr(number);
    Py_DECREF(number);
    return PyErr_Occurred() ? FAILED : SERVED;
}

/* Read a plain tensor in this process's memory; anything else is declined. */
static enum answer look(PyObject *tensor, view *into) {
    PyObject *type = (PyObject *)Py_TYPE(tensor);
    if (type != given_Tensor && type != given_Parameter) return DECLINED;
    enum answer answer = truth(tensor, name_is_cpu);
    if (answer != SERVED) return answer;
    if ((into->dtype = PyObject_GetAttr(tensor, name_dtype)) == NULL) return declined_if_runtime_error();
    Py_DECREF(into->dtype);
    PyObject *shape = PyObject_GetAttr(tensor, name_shape);
    if (shape == NULL) return declined_if_runtime_error();
    into->ndim = read_sizes(shape, into->shape);
    Py_DECREF(shape);
    PyObject *stride = PyObject_CallMethodObjArgs(tensor, name_stride, NULL);
    if (stride == NULL) return declined_if_runtime_error();
    int strides = read_sizes(stride, into->stride);
    Py_DECREF(stride);
    if (into->ndim < 0 || strides != into->ndim) return DECLINED;
    into->numel = 1;
    for (int d = 0; d < into->ndim; d++) into->numel *= into->shape[d];
    return address(tensor, &into->data);
}

/* Whether memory holds the dimensions in this order, the last one fastest, without gaps. */
static int is_dense(const view *v, const int *order) {
    int64_t expected = 1;
    for (int i = v->ndim - 1; i >= 0; i--) {
        int d = order[i];
        if (v->shape[d] != 1 && v->stride[d] != expected) return 0;
        expected *= v->shape[d];
    }
    return 1;
}

static int is_contiguous(const view *v) {
    static const int order[MOST_DIMENSIONS] = {0, 1, 2, 3, 4};
    return is_dense(v, order);
}

static int same_places(const view *a, const view *b) {
    if (a->ndim != b->ndim || a->dtype != b->dtype) return 0;
    for (int d = 0; d < a->ndim; d++)
        if (a->shape[d] != b->shape[d] || a->stride[d] != b->stride[d]) return 0;
    return 1;
}

/* A row of one float32 a channel: its address, or NULL for None. */
static enum answer row(PyObject *tensor, int64_t channels, void **into) {
    *into = NULL;
    if (tensor == Py_None) return SERVED;
    view v;
    enum answer answer = look(tensor, &v);
    if (answer != SERVED) return answer;
    if (v.ndim != 1 || v.shape[0] != channels || v.dtype != given_float32 || !is_contiguous(&v)) return DECLINED;
    *into = v.data;
    return SERVED;
}

/* A new tensor that is not torch's own: see call_memory.h. */
static PyObject *fresh(const view *v, int bits, int kind) {
    PyObject *capsule = new_memory(v->ndim, v->shape, v->stride, bits, kind);
    if (capsule == NULL) return NULL;
    PyObject *tensor = PyObject_CallFunctionObjArgs(given_from_dlpack, capsule, NULL);
    Py_DECREF(capsule);
    return tensor;
}

static PyObject *fresh_gradient(const view *v) {
    return v->dtype == given_bfloat16 ? fresh(v, 16, DLPACK_BFLOAT) : fresh(v, 32, DLPACK_FLOAT);
}

static PyObject *fresh_rows(int64_t rows, int64_t channels) {
    view v = {.ndim = 2, .shape = {rows, channels}, .stride = {channels, 1}};
    return fresh(&v, 32, DLPACK_FLOAT);
}

static PyObject *fresh_row(int64_t channels) {
    view v = {.ndim = 1, .shape = {channels}, .stride = {1}};
    return fresh(&v, 32, DLPACK_FLOAT);
}

static PyObject *fresh_bytes(int64_t count) {
    view v = {.ndim = 1, .shape = {count}, .stride = {1}};
    return fresh(&v, 8, DLPACK_UINT);
}

#endif
