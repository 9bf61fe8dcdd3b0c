/* The two passes of a plain call: what is asked of the kernel, what the forward pass saves, and the backward pass. */
#ifndef BATCHNORM_CALL_PASSES_H
#define BATCHNORM_CALL_PASSES_H

enum { LANES = 16 }; /* functional.py's _LANES */

typedef int64_t (*kernel_entry)(const bn_args *);

/* A forward call in autograd. All objects are borrowed, and None stands for a missing one. */
typedef struct {
    bn_args args;
    dlpack_tensor x;
    PyObject *input, *weight, *bias, *residual;
    PyObject *mean, *var, *batches; /* what the kernel moves */
    PyObject *training, *momentum, *eps, *slope, *name;
    PyObject *run; /* the kernel's ctypes function, and its address */
    kernel_entry entry;
    int kinked; /* whether a bit tells the activation's slope */
    int64_t code;
} request;

/* The part that the backward pass needs: numbers, in a bytes object. Addresses of tensors are no longer valid then. */
typedef struct {
    bn_args args;
    kernel_entry entry;
    int64_t ndim, strides[MOST_DIMENSIONS];
} kept;

/* And the objects from which Python's Setting is made, if Python does it: the order of ctx.rest, a tuple. */
enum { REST_RUN, REST_TRAINING, REST_MOMENTUM, REST_EPS, REST_SLOPE, REST_NAME, REST_KEPT, REST_COUNT };

static int choose_dtype(const dlpack_tensor *x, bn_args *args) {
    args->dtype = same_type(x->type, BFLOAT16) ? BN_BFLOAT16 : BN_FLOAT32;
    return args->dtype == BN_BFLOAT16 || same_type(x->type, FLOAT32);
}

/* How the kernel reads x: [batch][channels][positions]. As functional.py's _serves and layout.py's dense have it. */
static int choose_layout(const dlpack_tensor *x, bn_args *args) {
    const int64_t batch = x->shape[0], channels = x->shape[1], count = numel(x);
    if (count < LANES * (batch ? batch : 1) || channels * 2 > count) return 0;
    args->batch = batch, args->channels = channels, args->positions = count / (batch * channels);
    if (is_contiguous(x)) return 1;
    int last[MOST_DIMENSIONS] = {0};
    for (int d = 2; d < x->ndim; d++) last[d - 1] = d;
    last[x->ndim - 1] = 1;
    if (x->ndim < 3 || channels < LANES || !is_dense(x, last)) return 0;
    args->batch = count / channels, args->positions = 1;
    return 1;
}

/* Declined if a function transform or a dispatch mode is active: it has to see torch's own operations. */
static enum answer undisturbed(void) {
    PyObject *transforming = PyObject_CallNoArgs(given_transforming);
    if (transforming == NULL) return FAILED;
    Py_DECREF(transforming);
    if (transforming != Py_False) return DECLINED;
    PyObject *modes = PyObject_CallNoArgs(given_dispatching);
    if (modes == NULL) return FAILED;
    long dispatching = PyLong_AsLong(modes);
    Py_DECREF(modes);
    PyObject *level = PyObject_GetAttr(given_forward_ad, name__current_level);
    if (level == NULL) return FAILED;
    long dual = PyLong_AsLong(level);
    Py_DECREF(level);
    if (PyErr_Occurred()) return FAILED;
    return dispatching == 0 && dual < 0 ? SERVED : DECLINED;
}

/* And whether torch.jit.trace writes down what is called. */
static enum answer untraced(void) {
    PyObject *state = PyObject_CallNoArgs(given_get_tracing_state);
    if (state == NULL) return FAILED;
    Py_DECREF(state);
    return state == Py_None ? SERVED : DECLINED;
}

static int grad_enabled(void) {
    PyObject *enabled = PyObject_CallNoArgs(given_is_grad_enabled);
    if (enabled == NULL) return -1;
    Py_DECREF(enabled);
    return enabled == Py_True;
}

/* The kernel that was used last: `run` is the ctypes function of it, with its address noted. */
static struct {
    PyObject *kernel, *run;
    kernel_entry entry;
} last;

/* The kernel in use, nearly always the same again. None, or one that is another callable, is declined. */
static enum answer find_kernel(request *q) {
    PyObject *kernel = PyObject_GetAttr(given_kernels, name__kernel);
    if (kernel == NULL) return FAILED;
    if (kernel == Py_None) {
        Py_DECREF(kernel);
        return DECLINED;
    }
    if (kernel != last.kernel) {
        PyObject *run = PyObject_GetAttr(kernel, name_run);
        PyObject *number = run == NULL ? NULL : PyObject_GetAttr(run, name_address);
        kernel_entry entry = number == NULL ? NULL : (kernel_entry)PyLong_AsVoidPtr(number);
        Py_XDECREF(number);
        if (entry == NULL) {
            PyErr_Clear();
            Py_DECREF(kernel);
            Py_XDECREF(run);
            return DECLINED;
        }
        last.kernel = kernel, last.run = run, last.entry = entry;
        Py_INCREF(kernel); /* the one before is not given up: another thread may be at it */
    }
    Py_DECREF(kernel);
    q->run = last.run, q->entry = last.entry;
    return SERVED;
}

/* Run the kernel without the interpreter's lock, as ctypes does; what it cannot do is raised in Python's words. */
static int run(kernel_entry entry, bn_args *args, PyObject *x, int64_t *code) {
    PyObject *threads = PyObject_CallNoArgs(given_get_num_threads);
    if (threads == NULL) return -1;
    args->threads = PyLong_AsLongLong(threads);
    Py_DECREF(threads);
    PyThreadState *state = PyEval_SaveThread();
    *code = entry(args);
    PyEval_RestoreThread(state);
    if (*code >= 0) return 0;
    PyObject *number = PyLong_FromLongLong(*code);
    PyObject *nothing = number == NULL ? NULL : PyObject_CallFunctionObjArgs(given_refuse, x, number, NULL);
    Py_XDECREF(number);
    Py_XDECREF(nothing);
    return -1;
}

/* The kernel moved these in place: their versions go up, so that autograd notices. */
static int note_updates(const request *q) {
    PyObject *moved = PyTuple_Pack(q->batches == Py_None ? 2 : 3, q->mean, q->var, q->batches);
    if (moved == NULL) return -1;
    PyObject *nothing = PyObject_CallFunctionObjArgs(given_increment_version, moved, NULL);
    Py_DECREF(moved);
    Py_XDECREF(nothing);
    return nothing == NULL ? -1 : 0;
}

/* Keep the tensors that `Native.forward` keeps, and the rest of the request. */
static int keep_for_backward(PyObject *ctx, const request *q, PyObject *notes) {
    PyObject *tensors = q->residual == Py_None || q->args.activation != BN_SILU
                            ? PyTuple_Pack(4, q->input, q->weight, q->bias, notes)
                            : PyTuple_Pack(6, q->input, q->weight, q->bias, notes, q->residual, Py_None);
    if (tensors == NULL) return -1;
    int failed = PyObject_SetAttr(ctx, name_to_save, tensors); /* all that save_for_backward does */
    Py_DECREF(tensors);
    if (failed) return -1;
    kept numbers = {.args = q->args, .entry = q->entry, .ndim = q->x.ndim};
    if (q->args.activation == BN_NONE) numbers.args.aux = BN_AUX_NONE;
    memcpy(numbers.strides, q->x.strides, (size_t)q->x.ndim * sizeof *numbers.strides);
    PyObject *bytes = PyBytes_FromStringAndSize((const char *)&numbers, sizeof numbers);
    if (bytes == NULL) return -1;
    PyObject *rest = PyTuple_Pack(REST_COUNT, q->run, q->training, q->momentum, q->eps, q->slope, q->name, bytes);
    Py_DECREF(bytes);
    if (rest == NULL) return -1;
    failed = PyObject_SetAttr(ctx, name_rest, rest);
    Py_DECREF(rest);
    return failed;
}

/* The size of the kernel's notes for the backward pass: its rows, then its bits. As in saved.py. */
static int64_t bytes_of_rows(const bn_args *args) { return 4 * BN_SAVED_ROWS * args->channels; }
static int64_t bytes_of_notes(const bn_args *args) {
    const int64_t channels = args->channels, positions = args->positions;
    if (args->aux != BN_AUX_BITS) return bytes_of_rows(args);
    return bytes_of_rows(args) + args->batch * (positions == 1 ? (channels + 7) / 8 : channels * ((positions + 7) / 8)) + 4;
}

/* The forward pass of a request; without a ctx nothing is kept. */
static PyObject *forward_pass(PyObject *ctx, request *q) {
    bn_args *args = &q->args;
    if (q->residual != Py_None) args->aux = ctx != NULL && q->kinked ? BN_AUX_BITS : BN_AUX_RESIDUAL;
    PyObject *notes = NULL, *y = fresh_like(&q->x, &args->out);
    if (y == NULL) return NULL;
    if ((notes = fresh_bytes(bytes_of_notes(args), &args->saved)) == NULL) goto failed;
    args->bits = (uint8_t *)args->saved + bytes_of_rows(args);
    if (run(q->entry, args, q->input, &q->code) < 0) goto failed;
    if (args->operation == BN_TRAIN && q->code == 0 && args->running_mean != NULL && note_updates(q) < 0) goto failed;
    if (ctx != NULL && keep_for_backward(ctx, q, notes) < 0) goto failed;
    Py_DECREF(notes);
    return y;
failed:
    Py_XDECREF(notes);
    Py_DECREF(y);
    return NULL;
}

/* New references, or NULL. */
typedef struct {
    PyObject *dx, *dweight, *dbias, *dresidual;
} gradients;

/* Read what the forward pass kept; hooks on saved tensors may have made something else of it, and that is declined. */
static enum answer recall(PyObject *tensors, const kept *numbers, PyObject *dy, bn_args *args, dlpack_tensor *x) {
    const bn_args *was = &numbers->args;
    *args = (bn_args){.operation = was->operation == BN_TRAIN ? BN_BACKWARD_TRAIN : BN_BACKWARD_EVAL,
                      .activation = was->activation, .aux = was->aux, .batch = was->batch, .channels = was->channels,
                      .positions = was->positions, .groups = 1, .eps = was->eps, .momentum = was->momentum,
                      .slope = was->slope, .cap = was->cap};
    dlpack_tensor g, notes, other;
    enum answer answer = look(PyTuple_GetItem(tensors, 0), x);
    if (answer == SERVED) answer = look(dy, &g);
    if (answer == SERVED) answer = look(PyTuple_GetItem(tensors, 3), &notes);
    if (answer != SERVED) return answer;
    if (!choose_dtype(x, args) || !same_places(x, &g)) return DECLINED; /* so x has the shape that it had */
    if (memcmp(x->strides, numbers->strides, (size_t)x->ndim * sizeof *x->strides) != 0) return DECLINED;
    if (!same_type(notes.type, UINT8) || !is_contiguous(&notes) || numel(&notes) != bytes_of_notes(args)) return DECLINED;
    if ((uintptr_t)notes.data % sizeof(float) != 0) return DECLINED;
    args->x = x->data, args->dy = g.data, args->saved = notes.data;
    args->bits = (uint8_t *)notes.data + bytes_of_rows(args);
    for (int i = 1; i <= 2; i++) { /* a parameter's gradient is of its dtype */
        PyObject *parameter = PyTuple_GetItem(tensors, i);
        if (parameter == Py_None) continue;
        if ((answer = look(parameter, &other)) != SERVED) return answer;
        if (!same_type(other.type, FLOAT32)) return DECLINED;
    }
    if (args->aux == BN_AUX_RESIDUAL) {
        if ((answer = look(PyTuple_GetItem(tensors, 4), &other)) != SERVED) return answer;
        if (!same_places(x, &other)) return DECLINED;
        args->aux_data = other.data;
    }
    return SERVED;
}

static enum answer backward_pass(PyObject *tensors, const kept *numbers, PyObject *needs, PyObject *dy, gradients *g) {
    bn_args args;
    dlpack_tensor x;
    enum answer answer = recall(tensors, numbers, dy, &args, &x);
    if (answer != SERVED) return answer;
    int wants[4];
    for (int i = 0; i < 4; i++) wants[i] = PyTuple_GetItem(needs, i) == Py_True;
    if ((g->dx = fresh_like(&x, &args.out)) == NULL) return FAILED;
    if (wants[1] && (g->dweight = fresh_row(args.channels, &args.grad_weight)) == NULL) return FAILED;
    if (wants[2] && (g->dbias = fresh_row(args.channels, &args.grad_bias)) == NULL) return FAILED;
    if (wants[3] && args.activation == BN_NONE) { /* there is nothing between the sum and the output */
        Py_INCREF(dy);
        g->dresidual = dy;
    } else if (wants[3] && (g->dresidual = fresh_like(&x, &args.out_residual)) == NULL)
        return FAILED;
    int64_t code;
    if (run(numbers->entry, &args, PyTuple_GetItem(tensors, 0), &code) < 0) return FAILED;
    if (!wants[0]) {
        Py_DECREF(g->dx);
        g->dx = NULL;
    }
    return SERVED;
}

/* Give the rest the form that differentiable.py reads (a Setting, x's strides, aux), and let that do it. The tensors come
 * along, because checkpointing gives them out only once. */
static PyObject *hand_over(PyObject *ctx, PyObject *rest, PyObject *dy, PyObject *tensors) {
    if (PyTuple_Size(rest) == REST_COUNT) { /* else it has that form, from another time */
        const kept *numbers = (const kept *)PyBytes_AsString(PyTuple_GetItem(rest, REST_KEPT));
        if (numbers == NULL) return NULL;
        const bn_args *args = &numbers->args;
        PyObject *fields = Py_BuildValue(
            "(O(LLL)OOOOOOiiOOO)", PyTuple_GetItem(rest, REST_RUN), (long long)args->batch, (long long)args->channels,
            (long long)args->positions, Py_None, PyTuple_GetItem(rest, REST_TRAINING), PyTuple_GetItem(rest, REST_MOMENTUM),
            PyTuple_GetItem(rest, REST_EPS), PyTuple_GetItem(rest, REST_SLOPE), PyTuple_GetItem(rest, REST_NAME), 1, 0, Py_None,
            Py_None, Py_None);
        if (fields == NULL) return NULL;
        PyObject *setting = PyObject_CallFunctionObjArgs(given_new_tuple, given_setting, fields, NULL);
        Py_DECREF(fields);
        PyObject *strides = setting == NULL ? NULL : PyTuple_New((Py_ssize_t)numbers->ndim);
        for (int64_t d = 0; strides != NULL && d < numbers->ndim; d++)
            PyTuple_SetItem(strides, (Py_ssize_t)d, PyLong_FromLongLong(numbers->strides[d]));
        PyObject *form = strides == NULL ? NULL : Py_BuildValue("(OOi)", setting, strides, (int)args->aux);
        Py_XDECREF(setting);
        Py_XDECREF(strides);
        int failed = form == NULL ? -1 : PyObject_SetAttr(ctx, name_rest, form);
        Py_XDECREF(form);
        if (failed) return NULL;
    }
    return PyObject_CallFunctionObjArgs(given_gradients, ctx, dy, tensors, NULL);
}

#endif
