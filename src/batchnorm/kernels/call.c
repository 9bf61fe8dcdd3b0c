/* The way from a layer to the kernel and back, for the plain case, in C: on a small batch the same steps take longer in Python
 * (functional.py, differentiable.py) than the arithmetic, and after a large one the interpreter has left the caches.
 *
 * Nothing is decided here. What is not plain (a mask, groups, other layouts or types, a tracer at work, a second derivative,
 * saved tensors that a hook has changed) is declined, and the Python code, which serves every case, does it. What is kept for
 * the backward pass is laid out as Python does it, so that either may take over.
 *
 * Only Python's stable ABI is used, and torch's objects only through their Python methods: one build serves every version
 * from 3.10 on. The kernel stays a library of its own that knows nothing of Python; its entry comes as an address. */
#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>

#include "bn.h"
#include "call_memory.h"
#include "call_tensors.h"

enum { LANES = 16 }; /* functional.py's _LANES */

typedef int64_t (*kernel_entry)(const bn_args *);

/* A forward call on its way through autograd. */
typedef struct {
    bn_args args;
    kernel_entry entry;
    PyObject *run, *training, *momentum, *eps, *slope, *name; /* borrowed */
    PyObject *mean, *var, *batches;                           /* borrowed; None, or what the kernel moves */
    int kinked;                                               /* whether a bit tells the activation's slope */
    int64_t code;
} request;

static int choose_dtype(const view *x, bn_args *args) {
    args->dtype = x->dtype == given_bfloat16 ? BN_BFLOAT16 : BN_FLOAT32;
    return x->dtype == given_float32 || x->dtype == given_bfloat16;
}

/* How the kernel reads x: [batch][channels][positions]. As functional.py's _serves and _dense have it. */
static int choose_layout(const view *x, bn_args *args) {
    int64_t batch = x->shape[0], channels = x->shape[1];
    if (x->numel < LANES * (batch ? batch : 1) || channels * 2 > x->numel) return 0;
    args->batch = batch, args->channels = channels, args->positions = x->numel / (batch * channels);
    if (is_contiguous(x)) return 1;
    int last[MOST_DIMENSIONS] = {0};
    for (int d = 2; d < x->ndim; d++) last[d - 1] = d;
    last[x->ndim - 1] = 1;
    if (x->ndim < 3 || channels < LANES || !is_dense(x, last)) return 0;
    args->batch = x->numel / channels, args->positions = 1;
    return 1;
}

/* Whether somebody looks at or changes what operations do, so that torch's own have to be called. */
static enum answer undisturbed(void) {
    PyObject *state = PyObject_CallNoArgs(given_get_tracing_state);
    if (state == NULL) return FAILED;
    Py_DECREF(state);
    if (state != Py_None) return DECLINED;
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

static int grad_enabled(void) {
    PyObject *enabled = PyObject_CallNoArgs(given_is_grad_enabled);
    if (enabled == NULL) return -1;
    Py_DECREF(enabled);
    return enabled == Py_True;
}

/* Where the kernel begins: `run` is the ctypes function of it, with its address noted. Another callable is declined. */
static enum answer entry_of(PyObject *run, kernel_entry *entry) {
    PyObject *number = PyObject_GetAttr(run, name_address);
    if (number == NULL) {
        PyErr_Clear();
        return DECLINED;
    }
    *entry = (kernel_entry)PyLong_AsVoidPtr(number);
    Py_DECREF(number);
    return *entry != NULL ? SERVED : FAILED;
}

/* Note where a new tensor's memory is; one that could not be made, or has none, is an error. */
static int give(PyObject *tensor, void **into) {
    enum answer answer = tensor == NULL ? FAILED : address(tensor, into);
    if (answer == DECLINED) PyErr_SetString(PyExc_RuntimeError, "a new tensor has no memory");
    return answer == SERVED ? 0 : -1;
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

/* differentiable.py's Setting: what the Python code would have kept. */
static PyObject *make_setting(const request *q) {
    const bn_args *args = &q->args;
    PyObject *like =
        Py_BuildValue("(LLL)", (long long)args->batch, (long long)args->channels, (long long)args->positions);
    if (like == NULL) return NULL;
    PyObject *fields = Py_BuildValue("(ONOOOOOOiiOOO)", q->run, like, Py_None, q->training, q->momentum, q->eps, q->slope,
                                     q->name, 1, 0, Py_None, Py_None, Py_None);
    if (fields == NULL) return NULL;
    PyObject *setting = PyObject_CallFunctionObjArgs(given_new_tuple, given_setting, fields, NULL);
    Py_DECREF(fields);
    return setting;
}

/* As `Native.forward` keeps it, so that `Native.backward` finds its way. */
static int keep_for_backward(PyObject *ctx, const request *q, PyObject *x, PyObject *weight, PyObject *bias,
                             PyObject *residual, PyObject *saved, PyObject *bits) {
    PyObject *auxiliary = bits != NULL ? bits : q->args.activation == BN_SILU ? residual : Py_None;
    PyObject *kept = residual == Py_None ? PyTuple_Pack(4, x, weight, bias, saved)
                                         : PyTuple_Pack(6, x, weight, bias, saved, auxiliary, Py_None);
    if (kept == NULL) return -1;
    int failed = PyObject_SetAttr(ctx, name_to_save, kept); /* all that save_for_backward does */
    Py_DECREF(kept);
    if (failed) return -1;
    PyObject *setting = make_setting(q);
    if (setting == NULL) return -1;
    PyObject *strides = PyObject_CallMethodObjArgs(x, name_stride, NULL);
    if (strides == NULL) {
        Py_DECREF(setting);
        return -1;
    }
    int aux = q->args.activation == BN_NONE ? BN_AUX_NONE : (int)q->args.aux;
    PyObject *rest = Py_BuildValue("(NNi)", setting, strides, aux);
    if (rest == NULL) return -1;
    failed = PyObject_SetAttr(ctx, name_rest, rest);
    Py_DECREF(rest);
    return failed;
}

/* The forward pass of a request; without a ctx nothing is kept. */
static PyObject *forward_pass(PyObject *ctx, request *q, PyObject *x, PyObject *weight, PyObject *bias, PyObject *residual) {
    bn_args *args = &q->args;
    PyObject *bits = NULL, *saved = NULL, *y = PyObject_CallFunctionObjArgs(given_empty_like, x, NULL);
    if (give(y, &args->out) < 0 || give((saved = fresh_rows(BN_SAVED_ROWS, args->channels)), (void **)&args->saved) < 0)
        goto failed;
    if (residual != Py_None) {
        args->aux = ctx != NULL && q->kinked ? BN_AUX_BITS : BN_AUX_RESIDUAL;
        if (args->aux == BN_AUX_BITS) {
            int64_t channels = args->channels, positions = args->positions;
            int64_t bytes = positions == 1 ? (channels + 7) / 8 : channels * ((positions + 7) / 8);
            if (give((bits = fresh_bytes(args->batch * bytes + 4)), (void **)&args->bits) < 0) goto failed;
        }
    }
    if (run(q->entry, args, x, &q->code) < 0) goto failed;
    if (args->operation == BN_TRAIN && q->code == 0 && args->running_mean != NULL && note_updates(q) < 0) goto failed;
    if (ctx != NULL && keep_for_backward(ctx, q, x, weight, bias, residual, saved, bits) < 0) goto failed;
    Py_DECREF(saved);
    Py_XDECREF(bits);
    return y;
failed:
    Py_XDECREF(saved);
    Py_XDECREF(bits);
    Py_XDECREF(y);
    return NULL;
}

/* forward(ctx, x, weight, bias, residual, request): autograd calls it, in the middle of `normalize` below. */
static PyObject *call_forward(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    (void)module;
    request *q = count == 6 ? PyCapsule_GetPointer(arguments[5], "request") : NULL;
    if (q == NULL) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "forward takes what normalize gives it");
        return NULL;
    }
    return forward_pass(arguments[0], q, arguments[1], arguments[2], arguments[3], arguments[4]);
}

/* Whether the tensors and numbers of a call are plain; if so, the request is ready. */
static enum answer prepare(request *q, PyObject *input, PyObject *weight, PyObject *bias, PyObject *residual) {
    bn_args *args = &q->args;
    view x;
    enum answer answer = look(input, &x);
    if (answer != SERVED) return answer;
    if (!choose_dtype(&x, args) || x.ndim < 2 || !choose_layout(&x, args)) return DECLINED;
    args->x = x.data;
    int64_t channels = args->channels;
    if ((answer = row(q->mean, channels, (void **)&args->running_mean)) != SERVED) return answer;
    if ((answer = row(q->var, channels, (void **)&args->running_var)) != SERVED) return answer;
    if ((answer = row(weight, channels, (void **)&args->weight)) != SERVED) return answer;
    if ((answer = row(bias, channels, (void **)&args->bias)) != SERVED) return answer;
    if (q->training != Py_True && q->training != Py_False) return DECLINED;
    args->operation = q->training == Py_True ? BN_TRAIN : BN_EVAL;
    if ((q->mean == Py_None) != (q->var == Py_None) || (args->operation == BN_EVAL && q->mean == Py_None)) return DECLINED;
    if (residual != Py_None) {
        view r;
        if ((answer = look(residual, &r)) != SERVED) return answer;
        if (!same_places(&x, &r)) return DECLINED;
        args->aux_data = r.data;
    }
    if (q->batches != Py_None) {
        view b;
        if ((answer = look(q->batches, &b)) == FAILED) return answer;
        if (answer == SERVED && b.dtype == given_int64 && b.numel == 1 && args->operation == BN_TRAIN && q->mean != Py_None)
            args->batches = b.data;
        else q->batches = Py_None;
    }
    PyObject *activation = PyDict_GetItemWithError(given_activations, q->name); /* (code, where it ends) */
    if (activation == NULL) return PyErr_Occurred() ? FAILED : DECLINED;
    args->activation = PyLong_AsLongLong(PyTuple_GetItem(activation, 0));
    args->cap = PyFloat_AsDouble(PyTuple_GetItem(activation, 1));
    args->eps = PyFloat_AsDouble(q->eps), args->momentum = PyFloat_AsDouble(q->momentum);
    args->slope = PyFloat_AsDouble(q->slope);
    args->groups = 1;
    if (PyErr_Occurred()) { /* not numbers: Python has a sentence for it */
        PyErr_Clear();
        return DECLINED;
    }
    if (!(args->eps > 0) || args->slope < 0) return DECLINED;
    if ((q->kinked = PySequence_Contains(given_kinked, q->name)) < 0) return FAILED;
    return entry_of(q->run, &q->entry);
}

/* normalize(run, x, mean, var, weight, bias, residual, batches, training, momentum, eps, name, slope)
 * -> (y, finite), as functional.py's `normalize`, or None if it is declined. */
static PyObject *call_normalize(PyObject *module, PyObject *const *a, Py_ssize_t count) {
    (void)module;
    if (count != 13) {
        PyErr_SetString(PyExc_TypeError, "normalize takes 13 arguments");
        return NULL;
    }
    PyObject *x = a[1], *weight = a[4], *bias = a[5], *residual = a[6];
    request q = {.run = a[0], .mean = a[2], .var = a[3], .batches = a[7], .training = a[8],
                 .momentum = a[9], .eps = a[10], .name = a[11], .slope = a[12]};
    enum answer answer = undisturbed();
    if (answer == SERVED) answer = prepare(&q, x, weight, bias, residual);
    if (answer == FAILED) return NULL;
    if (answer == DECLINED) Py_RETURN_NONE;
    int differentiates = grad_enabled();
    if (differentiates > 0) {
        PyObject *inputs[] = {x, weight, bias, residual};
        differentiates = 0;
        for (int i = 0; i < 4 && differentiates == 0; i++)
            if (inputs[i] != Py_None) differentiates = truth(inputs[i], name_requires_grad);
    }
    if (differentiates < 0) return NULL;
    PyObject *y;
    if (differentiates) {
        PyObject *capsule = PyCapsule_New(&q, "request", NULL);
        if (capsule == NULL) return NULL;
        y = PyObject_CallFunctionObjArgs(given_apply, x, weight, bias, residual, capsule, NULL);
        Py_DECREF(capsule);
    } else
        y = forward_pass(NULL, &q, x, weight, bias, residual);
    if (y == NULL) return NULL;
    int updates = q.args.operation == BN_TRAIN && q.mean != Py_None, finite = q.code == 0;
    PyObject *told = updates && !(finite && q.batches != Py_None) ? (finite ? Py_True : Py_False) : Py_None;
    return Py_BuildValue("(NO)", y, told);
}

/* New references, or NULL. */
typedef struct {
    PyObject *dx, *dweight, *dbias, *dresidual;
} gradients;

/* Item i of a tuple as a number of the kernel's. */
static int64_t whole(PyObject *tuple, Py_ssize_t i) { return PyLong_AsLongLong(PyTuple_GetItem(tuple, i)); }
static double real(PyObject *tuple, Py_ssize_t i) { return PyFloat_AsDouble(PyTuple_GetItem(tuple, i)); }

/* Read what the forward pass kept; hooks on saved tensors may have made something else of it, and that is declined. */
static enum answer recall(PyObject *saved_tensors, PyObject *rest, PyObject *dy, bn_args *args, view *x) {
    PyObject *setting = PyTuple_GetItem(rest, 0), *strides = PyTuple_GetItem(rest, 1);
    PyObject *like = PyTuple_GetItem(setting, 1), *name = PyTuple_GetItem(setting, 7);
    PyObject *activation = PyDict_GetItemWithError(given_activations, name);
    if (activation == NULL) return FAILED;
    args->operation = PyTuple_GetItem(setting, 3) == Py_True ? BN_BACKWARD_TRAIN : BN_BACKWARD_EVAL;
    args->batch = whole(like, 0), args->channels = whole(like, 1), args->positions = whole(like, 2), args->groups = 1;
    args->activation = whole(activation, 0), args->cap = real(activation, 1);
    args->momentum = real(setting, 4), args->eps = real(setting, 5), args->slope = real(setting, 6);
    args->aux = whole(rest, 2);
    if (PyErr_Occurred()) return FAILED;
    view g, rows, other;
    int64_t kept[MOST_DIMENSIONS];
    enum answer answer = look(PyTuple_GetItem(saved_tensors, 0), x);
    if (answer == SERVED) answer = look(dy, &g);
    if (answer == SERVED) answer = look(PyTuple_GetItem(saved_tensors, 3), &rows);
    if (answer != SERVED) return answer;
    if (read_sizes(strides, kept) != x->ndim) return DECLINED;
    for (int d = 0; d < x->ndim; d++)
        if (x->stride[d] != kept[d]) return DECLINED;
    if (!choose_dtype(x, args) || !same_places(x, &g)) return DECLINED;
    if (x->numel != args->batch * args->channels * args->positions) return DECLINED;
    if (rows.dtype != given_float32 || rows.numel != BN_SAVED_ROWS * args->channels || !is_contiguous(&rows)) return DECLINED;
    args->x = x->data, args->dy = g.data, args->saved = rows.data;
    if (args->aux != BN_AUX_NONE) {
        if ((answer = look(PyTuple_GetItem(saved_tensors, 4), &other)) != SERVED) return answer;
        if (args->aux == BN_AUX_BITS) {
            if (other.dtype != given_uint8 || !is_contiguous(&other)) return DECLINED;
            args->bits = other.data;
        } else {
            if (!same_places(x, &other)) return DECLINED;
            args->aux_data = other.data;
        }
    }
    return SERVED;
}

/* A parameter as it was saved: its gradient is of its dtype, which a hook may have changed. */
static enum answer is_float32(PyObject *parameter) {
    if (parameter == Py_None) return SERVED;
    PyObject *dtype = PyObject_GetAttr(parameter, name_dtype);
    if (dtype == NULL) return FAILED;
    Py_DECREF(dtype);
    return dtype == given_float32 ? SERVED : DECLINED;
}

static enum answer backward_pass(PyObject *saved_tensors, PyObject *rest, PyObject *needs, PyObject *dy, gradients *g) {
    bn_args args = {0};
    kernel_entry entry;
    view x;
    enum answer answer = entry_of(PyTuple_GetItem(PyTuple_GetItem(rest, 0), 0), &entry);
    if (answer == SERVED) answer = recall(saved_tensors, rest, dy, &args, &x);
    for (int i = 1; i <= 2 && answer == SERVED; i++) answer = is_float32(PyTuple_GetItem(saved_tensors, i));
    if (answer != SERVED) return answer;
    int wants[4];
    for (int i = 0; i < 4; i++) wants[i] = PyTuple_GetItem(needs, i) == Py_True;
    if (give((g->dx = fresh_gradient(&x)), &args.out) < 0) return FAILED;
    if (wants[1] && give((g->dweight = fresh_row(args.channels)), (void **)&args.grad_weight) < 0) return FAILED;
    if (wants[2] && give((g->dbias = fresh_row(args.channels)), (void **)&args.grad_bias) < 0) return FAILED;
    if (wants[3] && args.activation == BN_NONE) { /* there is nothing between the sum and the output */
        Py_INCREF(dy);
        g->dresidual = dy;
    } else if (wants[3] && give((g->dresidual = fresh_gradient(&x)), &args.out_residual) < 0)
        return FAILED;
    int64_t code;
    if (run(entry, &args, PyTuple_GetItem(saved_tensors, 0), &code) < 0) return FAILED;
    if (!wants[0]) {
        Py_DECREF(g->dx);
        g->dx = NULL;
    }
    return SERVED;
}

/* backward(ctx, dy), as differentiable.py's; that one takes over what is declined here. */
static PyObject *call_backward(PyObject *module, PyObject *const *a, Py_ssize_t count) {
    (void)module;
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "backward takes a ctx and a gradient");
        return NULL;
    }
    PyObject *ctx = a[0], *dy = a[1], *saved_tensors = NULL, *rest = NULL, *needs = NULL, *result = NULL;
    gradients g = {0};
    int again = grad_enabled();
    enum answer answer = again < 0 ? FAILED : again ? DECLINED : undisturbed();
    if (answer == SERVED) {
        saved_tensors = PyObject_GetAttr(ctx, name_saved_tensors);
        rest = saved_tensors == NULL ? NULL : PyObject_GetAttr(ctx, name_rest);
        needs = rest == NULL ? NULL : PyObject_GetAttr(ctx, name_needs_input_grad);
        if (needs == NULL) answer = FAILED;
        else answer = backward_pass(saved_tensors, rest, needs, dy, &g);
    }
    if (answer == SERVED) {
#define OR_NONE(object) ((object) == NULL ? Py_None : (object))
        result = PyTuple_Pack(5, OR_NONE(g.dx), OR_NONE(g.dweight), OR_NONE(g.dbias), OR_NONE(g.dresidual), Py_None);
    } else if (answer == DECLINED)
        result = PyObject_CallFunctionObjArgs(given_python_backward, ctx, dy, NULL);
    Py_XDECREF(g.dx);
    Py_XDECREF(g.dweight);
    Py_XDECREF(g.dbias);
    Py_XDECREF(g.dresidual);
    Py_XDECREF(saved_tensors);
    Py_XDECREF(rest);
    Py_XDECREF(needs);
    return result;
}

/* setup(name=object, ...): all of GIVEN, or nothing is changed. */
static PyObject *call_setup(PyObject *module, PyObject *none, PyObject *given) {
    (void)module, (void)none;
#define NEED(name)                                                                                                          \
    if (given == NULL || PyDict_GetItemString(given, #name) == NULL)                                                        \
        return PyErr_Format(PyExc_TypeError, "setup needs %s", #name);
    GIVEN(NEED)
#define TAKE(name)                                                                                                          \
    Py_XDECREF(given_##name);                                                                                               \
    given_##name = PyDict_GetItemString(given, #name);                                                                      \
    Py_INCREF(given_##name);
    GIVEN(TAKE)
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"setup", (PyCFunction)(void (*)(void))call_setup, METH_VARARGS | METH_KEYWORDS, NULL},
    {"normalize", (PyCFunction)(void (*)(void))call_normalize, METH_FASTCALL, NULL},
    {"forward", (PyCFunction)(void (*)(void))call_forward, METH_FASTCALL, NULL},
    {"backward", (PyCFunction)(void (*)(void))call_backward, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_call", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__call(void) {
#define INTERN(name)                                                                                                        \
    if ((name_##name = PyUnicode_InternFromString(#name)) == NULL) return NULL;
    NAMES(INTERN)
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL && PyModule_AddIntConstant(module, "abi", BN_ABI) < 0) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
