/* Memory for other frameworks, through DLPack (https://dmlc.github.io/dlpack/): PyTorch takes a
 * capsule without a copy and without the warning that it gives for a read-only NumPy array. */
#include "native.h"

#include <stdlib.h>

/* ---------------------------------------------------------------- the protocol, version 0 */

enum { DL_CPU = 1 };
enum { DL_INT = 0, DL_UINT = 1, DL_FLOAT = 2 };

typedef struct dl_tensor {
    void *data;
    struct {
        int32_t type;
        int32_t id;
    } device;
    int32_t dimensions;
    struct {
        uint8_t code;
        uint8_t bits;
        uint16_t lanes;
    } type;
    int64_t *shape;
    int64_t *strides; /* elements */
    uint64_t byte_offset;
} dl_tensor;

typedef struct dl_managed_tensor {
    dl_tensor tensor;
    void *context;
    void (*deleter)(struct dl_managed_tensor *self);
} dl_managed_tensor;

_Static_assert(sizeof(dl_tensor) == 48 && sizeof(dl_managed_tensor) == 64,
               "the layout that other frameworks read");

/* ---------------------------------------------------------------- our side of it */

typedef struct lent {
    dl_managed_tensor managed;
    int64_t shape[NPY_MAXDIMS];
    int64_t strides[NPY_MAXDIMS];
} lent;

/* Called by whoever took the capsule, on any thread, also while the interpreter ends: then the
 * memory is left to the system, as NumPy does it. */
static void give_back(dl_managed_tensor *managed)
{
    if (!Py_IsInitialized()) {
        return;
    }
    PyGILState_STATE gil = PyGILState_Ensure();
    Py_XDECREF((PyObject *)managed->context);
    free(managed);
    PyGILState_Release(gil);
}

static const char unused_name[] = "dltensor";

/* A capsule that was taken has another name, and is no longer ours. */
static void capsule_free(PyObject *capsule)
{
    if (PyCapsule_IsValid(capsule, unused_name)) {
        give_back(PyCapsule_GetPointer(capsule, unused_name));
    }
}

static bool describe(int type, uint8_t *code, uint8_t *size)
{
    static const struct {
        int type;
        uint8_t code;
        uint8_t size;
    } known[] = {{NPY_INT32, DL_INT, 4},     {NPY_FLOAT32, DL_FLOAT, 4}, {NPY_UINT8, DL_UINT, 1},
                 {NPY_INT64, DL_INT, 8},     {NPY_FLOAT64, DL_FLOAT, 8}, {NPY_INT16, DL_INT, 2},
                 {NPY_FLOAT16, DL_FLOAT, 2}, {NPY_INT8, DL_INT, 1}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (known[i].type == type) {
            *code = known[i].code;
            *size = known[i].size;
            return true;
        }
    }
    return false;
}

PyObject *native_dlpack_capsule(PyObject *holder, void *data, int type, int dimensions,
                                const npy_intp *shape, const npy_intp *strides)
{
    uint8_t code = 0;
    uint8_t size = 1;
    if (!describe(type, &code, &size)) {
        PyErr_SetString(PyExc_TypeError, "the array's dtype has no tensor of the same memory");
        return NULL;
    }
    lent *self = calloc(1, sizeof *self);
    if (!self) {
        return PyErr_NoMemory();
    }
    for (int i = 0; i < dimensions; i++) {
        self->shape[i] = shape[i];
        self->strides[i] = strides[i] / size;
        if (strides[i] % size) {
            free(self);
            PyErr_SetString(PyExc_ValueError, "the array's items are not at whole steps");
            return NULL;
        }
    }
    dl_tensor *tensor = &self->managed.tensor;
    tensor->data = data;
    tensor->device.type = DL_CPU;
    tensor->dimensions = dimensions;
    tensor->type.code = code;
    tensor->type.bits = (uint8_t)(8 * size);
    tensor->type.lanes = 1;
    tensor->shape = self->shape;
    tensor->strides = self->strides;
    self->managed.context = Py_NewRef(holder);
    self->managed.deleter = give_back;
    PyObject *capsule = PyCapsule_New(&self->managed, unused_name, capsule_free);
    if (!capsule) {
        give_back(&self->managed);
    }
    return capsule;
}

const char native_dlpack_doc[] =
    "dlpack(array, /)\n--\n\n"
    "A DLPack capsule over a NumPy array's memory, read-only arrays too; it keeps the array alive.";

PyObject *native_dlpack(PyObject *module, PyObject *object)
{
    (void)module;
    if (!PyArray_Check(object)) {
        PyErr_Format(PyExc_TypeError, "array: a NumPy array is needed, got %.100s",
                     Py_TYPE(object)->tp_name);
        return NULL;
    }
    PyArrayObject *array = (PyArrayObject *)object;
    if (!PyArray_ISNOTSWAPPED(array) || !PyArray_ISALIGNED(array)) {
        PyErr_SetString(PyExc_ValueError, "array: must be aligned and in native byte order");
        return NULL;
    }
    return native_dlpack_capsule(object, PyArray_DATA(array), PyArray_TYPE(array),
                                 PyArray_NDIM(array), PyArray_DIMS(array), PyArray_STRIDES(array));
}
