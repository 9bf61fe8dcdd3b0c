/* Forward and backward of plain calls in C: on a small batch the same steps take longer in Python (functional.py,
 * differentiable.py) than the arithmetic, and after a large one the interpreter is no longer in the caches.
 *
 * Nothing is decided here. Any other call (a mask, groups, other layouts or types, a tracer, double backward, saved tensors
 * that a hook has changed) is declined, and the Python code, which handles every case, runs it. The tensors saved for the
 * backward pass are those that Python saves; the rest is converted to what Python saves where it takes over.
 *
 * Only Python's stable ABI is used, and torch's tensors through DLPack's functions or their Python methods: one build serves
 * every version from 3.10 on. The kernel stays a library of its own that knows nothing of Python; its entry comes as an
 * address. */
#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "bn.h"
#include "call_dlpack.h"
#include "call_torch.h"
#include "call_tensors.h"
#include "call_passes.h"

/* Whether the tensors and numbers of a call are plain; if so, the request is ready. */
static enum answer prepare(request *q) {
    bn_args *args = &q->args;
    enum answer answer = look(q->input, &q->x);
    if (answer != SERVED) return answer;
    if (!choose_dtype(&q->x, args) || q->x.ndim < 2 || !choose_layout(&q->x, args)) return DECLINED;
    args->x = q->x.data;
    int64_t channels = args->channels;
    if ((answer = row(q->mean, channels, (void **)&args->running_mean)) != SERVED) return answer;
    if ((answer = row(q->var, channels, (void **)&args->running_var)) != SERVED) return answer;
    if ((answer = row(q->weight, channels, (void **)&args->weight)) != SERVED) return answer;
    if ((answer = row(q->bias, channels, (void **)&args->bias)) != SERVED) return answer;
    if (q->training != Py_True && q->training != Py_False) return DECLINED;
    args->operation = q->training == Py_True ? BN_TRAIN : BN_EVAL;
    if ((q->mean == Py_None) != (q->var == Py_None) || (args->operation == BN_EVAL && q->mean == Py_None)) return DECLINED;
    if (q->mean != Py_None && (requires_grad(q->mean) || requires_grad(q->var))) return DECLINED;
    const int64_t apart = (int64_t)((intptr_t)args->running_mean - (intptr_t)args->running_var), row_bytes = 4 * channels;
    if (args->operation == BN_TRAIN && q->mean != Py_None && apart < row_bytes && -apart < row_bytes) return DECLINED;
    if (q->residual != Py_None) {
        dlpack_tensor r;
        if ((answer = look(q->residual, &r)) != SERVED) return answer;
        if (!same_places(&q->x, &r)) return DECLINED;
        args->aux_data = r.data;
    }
    if (q->batches != Py_None) {
        dlpack_tensor b;
        if ((answer = look(q->batches, &b)) == FAILED) return answer;
        if (answer == DECLINED && (PyObject *)Py_TYPE(q->batches) == given_Tensor) return answer; /* its memory is not there */
        int one = answer == SERVED && same_type(b.type, INT64) && numel(&b) == 1;
        if (one && args->operation == BN_TRAIN && q->mean != Py_None)
            args->batches = b.data;
        else q->batches = Py_None;
    }
    if (!PyUnicode_Check(q->name)) return DECLINED;
    PyObject *activation = PyDict_GetItemWithError(given_activations, q->name); /* (code, where it ends) */
    if (activation == NULL) return PyErr_Occurred() ? FAILED : DECLINED;
    args->activation = PyLong_AsLongLong(PyTuple_GetItem(activation, 0));
    args->cap = PyFloat_AsDouble(PyTuple_GetItem(activation, 1));
    args->eps = PyFloat_AsDouble(q->eps), args->momentum = PyFloat_AsDouble(q->momentum);
    args->slope = PyFloat_AsDouble(q->slope);
    args->groups = 1;
    if (PyErr_Occurred()) { /* not numbers: Python has a sentence for it */
        if (!PyErr_ExceptionMatches(PyExc_TypeError) && !PyErr_ExceptionMatches(PyExc_ValueError)) return FAILED;
        PyErr_Clear();
        return DECLINED;
    }
    if (!(args->eps > 0) || args->slope < 0) return DECLINED;
    if ((q->kinked = PySequence_Contains(given_kinked, q->name)) < 0) return FAILED;
    return SERVED;
}

/* Where there is nothing to differentiate, autograd is not asked. */
static int differentiates(const request *q) {
    int enabled = grad_enabled();
    if (enabled <= 0) return enabled;
    PyObject *inputs[] = {q->input, q->weight, q->bias, q->residual};
    for (int i = 0; i < 4; i++)
        if (inputs[i] != Py_None && requires_grad(inputs[i])) return 1;
    return 0;
}

/* Do what was prepared. */
static PyObject *serve(request *q) {
    int differentiable = differentiates(q);
    if (differentiable < 0) return NULL;
    if (!differentiable) return forward_pass(NULL, q);
    PyObject *capsule = PyCapsule_New(q, "request", NULL);
    if (capsule == NULL) return NULL;
    PyObject *y = PyObject_CallFunctionObjArgs(given_apply, q->input, q->weight, q->bias, q->residual, capsule, NULL);
    Py_DECREF(capsule);
    return y;
}

/* forward(ctx, x, weight, bias, residual, request): autograd calls it, in the middle of `serve`. */
static PyObject *call_forward(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    (void)module;
    request *q = count == 6 ? PyCapsule_GetPointer(arguments[5], "request") : NULL;
    if (q == NULL) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "forward takes what normalize gives it");
        return NULL;
    }
    return forward_pass(arguments[0], q);
}

static enum answer ready(request *q) {
    enum answer answer = untraced();
    if (answer == SERVED) answer = undisturbed();
    if (answer == SERVED) answer = find_kernel(q);
    return answer == SERVED ? prepare(q) : answer;
}

/* normalize(x, mean, var, weight, bias, residual, batches, training, momentum, eps, name, slope)
 * -> (y, finite), as functional.py's `normalize`, or None if it is declined. */
static PyObject *call_normalize(PyObject *module, PyObject *const *a, Py_ssize_t count) {
    (void)module;
    if (count != 12) {
        PyErr_SetString(PyExc_TypeError, "normalize takes 12 arguments");
        return NULL;
    }
    request q = {.input = a[0], .mean = a[1], .var = a[2], .weight = a[3], .bias = a[4], .residual = a[5], .batches = a[6],
                 .training = a[7], .momentum = a[8], .eps = a[9], .name = a[10], .slope = a[11]};
    enum answer answer = ready(&q);
    if (answer == FAILED) return NULL;
    if (answer == DECLINED) Py_RETURN_NONE;
    PyObject *y = serve(&q);
    if (y == NULL) return NULL;
    int updates = q.args.operation == BN_TRAIN && q.mean != Py_None, finite = q.code == 0;
    PyObject *told = updates && !(finite && q.batches != Py_None) ? (finite ? Py_True : Py_False) : Py_None;
    return Py_BuildValue("(NO)", y, told);
}

/* ---- a whole layer ------------------------------------------------------------------------------------------ */

static int is_word(PyObject *object, const char *word) {
    return PyUnicode_Check(object) && PyUnicode_CompareWithASCIIString(object, word) == 0;
}

static int is_bool(PyObject *object) { return object == Py_True || object == Py_False; }

/* What a layer's `forward` would hand to `normalize`: its tensors and its switches, from its __dict__ (borrowed). A tensor or
 * switch that is missing there, or is not of the usual kind, is declined. (Methods set on a layer object are
 * not looked for.) */
static enum answer read_layer(PyObject *own, request *q) {
    PyObject *parameters = PyDict_GetItemWithError(own, name__parameters), *buffers = PyDict_GetItemWithError(own, name__buffers);
    if (parameters == NULL || buffers == NULL || !PyDict_Check(parameters) || !PyDict_Check(buffers)) return DECLINED;
#define OF(dict, field, name)                                                                                               \
    if (PyDict_GetItemWithError(own, name_##name) != NULL) return DECLINED; /* it is another's, set on the layer itself */    \
    if ((q->field = PyDict_GetItemWithError(dict, name_##name)) == NULL) return DECLINED;
    OF(parameters, weight, weight)
    OF(parameters, bias, bias)
    OF(buffers, mean, running_mean)
    OF(buffers, var, running_var)
    OF(buffers, batches, num_batches_tracked)
#undef OF
#define READ(name)                                                                                                          \
    PyObject *name = PyDict_GetItemWithError(own, name_##name);                                                             \
    if (name == NULL) return DECLINED;
    READ(training) READ(track_running_stats) READ(statistics) READ(update) READ(momentum) READ(eps) READ(activation)
    READ(negative_slope)
#undef READ
    if (!is_bool(training) || !is_bool(track_running_stats) || !(update == Py_None || is_bool(update))) return DECLINED;
    int tracked = q->mean != Py_None && q->var != Py_None, of_batch, updates;
    if (!tracked && q->mean != q->var) return DECLINED;
    if (is_word(statistics, "auto")) of_batch = training == Py_True || !tracked;
    else if (is_word(statistics, "batch")) of_batch = 1;
    else if (is_word(statistics, "running")) of_batch = 0;
    else return DECLINED;
    updates = update == Py_None ? training == Py_True && track_running_stats == Py_True : update == Py_True;
    updates = updates && tracked;
    if (updates && (!of_batch || momentum == Py_None || q->batches == Py_None)) return DECLINED;
    if (!updates) q->batches = Py_None, momentum = given_zero;
    if (of_batch && !updates) q->mean = q->var = Py_None;
    q->training = of_batch ? Py_True : Py_False;
    q->momentum = momentum, q->eps = eps;
    q->name = activation == Py_None ? given_none : activation;
    q->slope = is_word(q->name, "leaky_relu") ? negative_slope : given_zero;
    return SERVED;
}

/* Whether what was read of a layer of these dimensions is plain. */
static enum answer ready_layer(request *q, PyObject *dimensions) {
    const int updates = q->batches != Py_None;
    enum answer answer = ready(q);
    if (answer != SERVED) return answer;
    if (updates && q->batches == Py_None) return DECLINED; /* not the kernel's kind of count */
    PyObject *here = PyLong_FromLong(q->x.ndim);
    int fits = here == NULL ? -1 : PySequence_Contains(dimensions, here);
    Py_XDECREF(here);
    return fits < 0 ? FAILED : fits ? SERVED : DECLINED;
}

/* Hold or release the references borrowed from a layer: it may be given other tensors while the kernel runs, or while a
 * number of a user's class is read. */
static void hold(const request *q, int yes) {
    PyObject *held[] = {q->weight, q->bias, q->mean, q->var, q->batches, q->momentum, q->eps, q->slope, q->name};
    for (size_t i = 0; i < sizeof held / sizeof *held; i++)
        if (yes) Py_INCREF(held[i]);
        else Py_DECREF(held[i]);
}

/* layer(self, x, residual) -> y, or None if it is declined: all of `forward` of the layers that were given. */
static PyObject *call_layer(PyObject *module, PyObject *const *a, Py_ssize_t count) {
    (void)module;
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "layer takes a layer, an input and a residual or None");
        return NULL;
    }
    PyObject *dimensions = PyDict_GetItemWithError(given_layers, (PyObject *)Py_TYPE(a[0])); /* none: of another class */
    PyObject *own = dimensions == NULL ? NULL : PyObject_GenericGetDict(a[0], NULL);
    request q = {.input = a[1], .residual = a[2]};
    enum answer answer = own != NULL ? read_layer(own, &q) : PyErr_Occurred() ? FAILED : DECLINED;
    PyObject *y = NULL;
    if (answer == SERVED) {
        const request read = q;
        hold(&read, 1);
        answer = ready_layer(&q, dimensions);
        if (answer == SERVED) y = serve(&q);
        hold(&read, 0);
    }
    Py_XDECREF(own);
    if (answer == DECLINED) Py_RETURN_NONE;
    const int refused = q.code != 0 && q.batches != Py_None;
    if (y == NULL || !refused) return y;
    PyObject *nothing = PyObject_CallMethodObjArgs(a[0], name__refused, NULL);
    if (nothing == NULL) Py_CLEAR(y);
    Py_XDECREF(nothing);
    return y;
}

/* ---- backward ----------------------------------------------------------------------------------------------- */

/* backward(ctx, dy), as differentiable.py's; that one takes over what is declined here. */
static PyObject *call_backward(PyObject *module, PyObject *const *a, Py_ssize_t count) {
    (void)module;
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "backward takes a ctx and a gradient");
        return NULL;
    }
    PyObject *ctx = a[0], *dy = a[1], *needs = NULL, *result = NULL;
    PyObject *tensors = PyObject_GetAttr(ctx, name_saved_tensors);
    PyObject *rest = tensors == NULL ? NULL : PyObject_GetAttr(ctx, name_rest);
    gradients g = {0};
    int again = rest == NULL ? -1 : grad_enabled();
    enum answer answer = again < 0 ? FAILED : again || PyTuple_Size(rest) != REST_COUNT ? DECLINED : undisturbed();
    if (answer == SERVED) {
        needs = PyObject_GetAttr(ctx, name_needs_input_grad);
        const kept *numbers = needs == NULL ? NULL : (const kept *)PyBytes_AsString(PyTuple_GetItem(rest, REST_KEPT));
        answer = numbers == NULL ? FAILED : backward_pass(tensors, numbers, needs, dy, &g);
    }
    if (answer == SERVED) {
#define OR_NONE(object) ((object) == NULL ? Py_None : (object))
        result = PyTuple_Pack(5, OR_NONE(g.dx), OR_NONE(g.dweight), OR_NONE(g.dbias), OR_NONE(g.dresidual), Py_None);
    } else if (answer == DECLINED)
        result = hand_over(ctx, rest, dy, tensors);
    Py_XDECREF(g.dx);
    Py_XDECREF(g.dweight);
    Py_XDECREF(g.dbias);
    Py_XDECREF(g.dresidual);
    Py_XDECREF(tensors);
    Py_XDECREF(needs);
    Py_XDECREF(rest);
    return result;
}

static PyObject *call_apply(PyObject *ctx, PyObject *dy) { return call_backward(NULL, (PyObject *const[]){ctx, dy}, 2); }

/* method(type): `backward` as a method of a ctx's type. */
static PyObject *call_method(PyObject *module, PyObject *type) {
    static PyMethodDef apply = {"apply", call_apply, METH_O, NULL};
    (void)module;
    return PyDescr_NewMethod((PyTypeObject *)type, &apply);
}

/* empty_like(x): torch's, in memory of `fresh` where x is plain; for the callers in Python. */
static PyObject *call_empty_like(PyObject *module, PyObject *x) {
    (void)module;
    dlpack_tensor t;
    bn_args layout;
    void *where;
    enum answer answer = look(x, &t);
    if (answer == FAILED) return NULL;
    if (answer == SERVED && t.ndim >= 2 && choose_layout(&t, &layout)) return fresh_like(&t, &where);
    return PyObject_CallFunctionObjArgs(given_empty_like, x, NULL);
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

/* connect(capsule, addresses, probes, size): use these functions of DLPack's and of torch's (see `torch_connect`); an
 * ImportError says what they are, if they cannot be used. */
static PyObject *call_connect(PyObject *module, PyObject *arguments) {
    PyObject *capsule, *addresses, *probes;
    Py_ssize_t size;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "OO!O!n", &capsule, &PyTuple_Type, &addresses, &PyTuple_Type, &probes, &size)) return NULL;
    if (dlpack_connect(capsule) < 0 || torch_connect(addresses, probes, size) < 0) return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"connect", call_connect, METH_VARARGS, NULL},
    {"method", call_method, METH_O, NULL},
    {"empty_like", call_empty_like, METH_O, NULL},
    {"setup", (PyCFunction)(void (*)(void))call_setup, METH_VARARGS | METH_KEYWORDS, NULL},
    {"layer", (PyCFunction)(void (*)(void))call_layer, METH_FASTCALL, NULL},
    {"normalize", (PyCFunction)(void (*)(void))call_normalize, METH_FASTCALL, NULL},
    {"forward", (PyCFunction)(void (*)(void))call_forward, METH_FASTCALL, NULL},
    {"backward", (PyCFunction)(void (*)(void))call_backward, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_call", NULL, -1, methods, NULL, NULL, NULL, NULL};

static PyObject *words(const char *const *names, Py_ssize_t count) {
    PyObject *tuple = PyTuple_New(count);
    for (Py_ssize_t i = 0; tuple != NULL && i < count; i++) PyTuple_SetItem(tuple, i, PyUnicode_FromString(names[i]));
    return tuple;
}

PyMODINIT_FUNC PyInit__call(void) {
#define INTERN(name)                                                                                                        \
    if ((name_##name = PyUnicode_InternFromString(#name)) == NULL) return NULL;
    NAMES(INTERN)
    PyObject *module = PyModule_Create(&definition);
#define NAMED(name) #name,
    static const char *const names[] = {GIVEN(NAMED)};
    PyObject *needs = words(names, sizeof names / sizeof *names);
    PyObject *functions = words(torch_functions, sizeof torch_functions / sizeof *torch_functions);
    const int failed = module == NULL || needs == NULL || functions == NULL ||
                       PyModule_AddIntConstant(module, "abi", BN_ABI) != 0 ||
                       PyObject_SetAttrString(module, "needs", needs) != 0 ||
                       PyObject_SetAttrString(module, "functions", functions) != 0;
    Py_XDECREF(needs);
    Py_XDECREF(functions);
    if (!failed) return module;
    Py_XDECREF(module);
    return NULL;
}
