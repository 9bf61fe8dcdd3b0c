/* Memory for new tensors, handed to torch as DLPack does it: a pointer, sizes, strides, and how to give it back. */
#ifndef BATCHNORM_CALL_MEMORY_H
#define BATCHNORM_CALL_MEMORY_H

enum { MOST_DIMENSIONS = 5, ALIGNMENT = 64 };
enum dlpack_kind { DLPACK_UINT = 1, DLPACK_FLOAT = 2, DLPACK_BFLOAT = 4 };

/* DLPack's structs, as its specification lays them out (version 0.8, "DLManagedTensor"). */
typedef struct {
    void *data;
    struct { int32_t type, id; } device;
    int32_t ndim;
    struct { uint8_t code, bits; uint16_t lanes; } dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} dlpack_tensor;

typedef struct dlpack_managed {
    dlpack_tensor tensor;
    void *context;
    void (*deleter)(struct dlpack_managed *);
} dlpack_managed;

typedef struct {
    dlpack_managed managed; /* first: a pointer to it is one to the whole */
    int64_t shape[MOST_DIMENSIONS], strides[MOST_DIMENSIONS];
} memory;

static void free_memory(dlpack_managed *managed) {
    free(managed->context);
    free(managed);
}

static void free_unused(PyObject *capsule) { /* nobody has taken it */
    if (PyCapsule_IsValid(capsule, "dltensor")) free_memory(PyCapsule_GetPointer(capsule, "dltensor"));
}

/* torch asks glibc for memory at a cache line's boundary, and glibc (seen with 2.36) cuts it out of a larger piece. What is
 * left of that goes to the thread's list of small pieces, so that it cannot grow together again when the tensor is freed, and
 * the next tensor of this size does not fit. Step by step they wander through the heap, and are in no cache. Asked for plainly,
 * with room for the boundary, the same piece comes again: with gradients that come so, steps of 0.5 to 8 MB took 1.0 to 1.15
 * times less. Their storage cannot grow (torch's word is "resizable"), as with memory that came from NumPy; the output of a
 * layer, which programs do resize to save memory, is torch's own. */
static PyObject *new_memory(int ndim, const int64_t *shape, const int64_t *strides, int bits, int kind) {
    memory *m = malloc(sizeof *m);
    if (m == NULL) return PyErr_NoMemory();
    int64_t count = 1;
    for (int d = 0; d < ndim; d++) m->shape[d] = shape[d], m->strides[d] = strides[d], count *= shape[d];
    char *block = malloc((size_t)count * (size_t)bits / 8 + ALIGNMENT);
    if (block == NULL) {
        free(m);
        return PyErr_NoMemory();
    }
    m->managed = (dlpack_managed){
        .tensor = {.data = block + (ALIGNMENT - (uintptr_t)block % ALIGNMENT),
                   .device = {1, 0},
                   .ndim = ndim,
                   .dtype = {(uint8_t)kind, (uint8_t)bits, 1},
                   .shape = m->shape,
                   .strides = m->strides},
        .context = block,
        .deleter = free_memory};
    PyObject *capsule = PyCapsule_New(&m->managed, "dltensor", free_unused);
    if (capsule == NULL) free_memory(&m->managed);
    return capsule;
}

#endif
