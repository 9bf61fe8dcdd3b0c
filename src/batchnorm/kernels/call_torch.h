/* What DLPack does not show of a tensor and the kernel must know: whether its storage is as long as its elements reach (it can be
 * freed or shrunk under a tensor), whether it is a negative view, whether it requires a gradient. torch's own C++ functions answer
 * in some nanoseconds, where its Python attributes take hundreds. call.py looks them up by name, and `torch_connect` tries
 * them on tensors whose answers are known: a torch that differs is not used this way. */
#ifndef BATCHNORM_CALL_TORCH_H
#define BATCHNORM_CALL_TORCH_H

/* A C++ tensor is one pointer, which Python shows as `_cdata`; the Python object holds it at some offset. The first three
 * functions take the address of that pointer, the last one the pointer. */
static struct {
    size_t offset;
    uint8_t (*is_negative)(const void *);
    int32_t (*storage_bytes)(const void *, int64_t *); /* 0, or not done */
    int32_t (*storage_offset)(const void *, int64_t *);
    uint8_t (*requires_grad)(const void *);
} torch;

/* Their names, in this order; two of them as C++ gives them. */
static const char *const torch_functions[] = {"_ZN2at6native6is_negERKNS_6TensorE", "aoti_torch_get_storage_size",
                                              "aoti_torch_get_storage_offset", "_ZNK3c1010TensorImpl13requires_gradEv"};

static const void *const *tensor_of(PyObject *object) { return (const void *const *)((const char *)object + torch.offset); }
static int is_negative(PyObject *tensor) { return torch.is_negative(tensor_of(tensor)); }
static int requires_grad(PyObject *tensor) { return torch.requires_grad(*tensor_of(tensor)); }

/* Whether a tensor that has elements keeps them all within its storage. */
static int has_memory(PyObject *tensor, const dlpack_tensor *t) {
    int64_t bytes, first;
    if (torch.storage_bytes(tensor_of(tensor), &bytes) != 0 || torch.storage_offset(tensor_of(tensor), &first) != 0) return 0;
    int64_t end = first + 1;
    for (int d = 0; d < t->ndim; d++) end += (t->shape[d] - 1) * t->strides[d];
    return end * (t->type.bits / 8) <= bytes;
}

/* Where objects of `size` bytes hold what the probes' first items say, each a (tensor, its _cdata, bytes of its storage, its offset,
 * is it a negative view, does it require a gradient); and whether the functions say the rest. */
static int torch_connect(PyObject *addresses, PyObject *probes, Py_ssize_t size) {
    void *found[4];
    for (Py_ssize_t i = 0; i < 4; i++) found[i] = PyLong_AsVoidPtr(PyTuple_GetItem(addresses, i));
    if (PyErr_Occurred()) return -1;
    memcpy(&torch.is_negative, &found[0], sizeof found[0]);
    memcpy(&torch.storage_bytes, &found[1], sizeof found[1]);
    memcpy(&torch.storage_offset, &found[2], sizeof found[2]);
    memcpy(&torch.requires_grad, &found[3], sizeof found[3]);
    const Py_ssize_t count = PyTuple_Size(probes);
    for (size_t at = sizeof(PyObject); at + sizeof(void *) <= (size_t)size; at += sizeof(void *)) {
        Py_ssize_t fit = 0;
        torch.offset = at;
        for (; fit < count; fit++) {
            PyObject *tensor, *pointer;
            long long bytes, first;
            int64_t b = -1, f = -1;
            int negative, gradient;
            if (!PyArg_ParseTuple(PyTuple_GetItem(probes, fit), "OOLLpp", &tensor, &pointer, &bytes, &first, &negative, &gradient))
                return -1;
            if (*tensor_of(tensor) != PyLong_AsVoidPtr(pointer)) break;
            if (torch.storage_bytes(tensor_of(tensor), &b) != 0 || torch.storage_offset(tensor_of(tensor), &f) != 0) break;
            if (b != bytes || f != first || is_negative(tensor) != negative || requires_grad(tensor) != gradient) break;
        }
        if (fit == count) return 0;
    }
    PyErr_SetString(PyExc_ImportError, "tensors of another form");
    return -1;
}

#endif
