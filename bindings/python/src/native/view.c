/* Arrays over memory that somebody else keeps: the map (through a snapshot), or a decoded reply. */
#include "native.h"

#include <string.h>

PyTypeObject *native_memory_type;
PyTypeObject *native_view_type;

/* ---------------------------------------------------------------- a decoded reply's memory */

MemoryObject *native_memory_new(void)
{
    MemoryObject *self = PyObject_New(MemoryObject, native_memory_type);
    if (!self) {
        return NULL;
    }
    self->arrays = 0;
    self->busy = false;
    self->record = rst_record_new();
    if (!self->record) {
        Py_DECREF(self);
        PyErr_NoMemory();
        return NULL;
    }
    return self;
}

static void memory_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    rst_record_free(((MemoryObject *)object)->record);
    PyObject_Free(object);
    Py_DECREF(type);
}

PyTypeObject *native_memory_type_new(PyObject *module)
{
    PyType_Slot slots[] = {{Py_tp_dealloc, memory_dealloc}, {0, NULL}};
    PyType_Spec spec = {
        .name = "rollstore._rollstore._Memory",
        .basicsize = sizeof(MemoryObject),
        .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
        .slots = slots,
    };
    return (PyTypeObject *)PyType_FromModuleAndSpec(module, &spec, NULL);
}

/* ---------------------------------------------------------------- a view
 *
 * The base of each array that is given out.  NumPy keeps the base of an array, and of every slice
 * of it, alive; so a view lives as long as anything can reach its memory, and its owner counts it.
 */

typedef struct ViewObject {
    PyObject_HEAD PyObject *owner;
    void *data;
    int type; /* NumPy's number */
    int dimensions;
    npy_intp shape[2];
    npy_intp strides[2]; /* bytes */
} ViewObject;

static void count(PyObject *owner, int change)
{
    if (Py_TYPE(owner) == native_memory_type) {
        ((MemoryObject *)owner)->arrays += change;
    } else if (change > 0) {
        ((SnapshotObject *)owner)->arrays += change;
    } else {
        native_snapshot_array_gone((SnapshotObject *)owner);
    }
}

static void view_dealloc(PyObject *object)
{
    ViewObject *self = (ViewObject *)object;
    PyTypeObject *type = Py_TYPE(object);
    count(self->owner, -1);
    Py_DECREF(self->owner);
    PyObject_Free(object);
    Py_DECREF(type);
}

static ViewObject *view_new(PyObject *owner, const void *data, int type, int dimensions,
                            const npy_intp *shape)
{
    ViewObject *self = PyObject_New(ViewObject, native_view_type);
    if (!self) {
        return NULL;
    }
    self->owner = Py_NewRef(owner);
    self->data = (void *)(uintptr_t)data;
    self->type = type;
    self->dimensions = dimensions;
    self->shape[0] = shape[0];
    self->shape[1] = dimensions == 2 ? shape[1] : 1;
    self->strides[dimensions - 1] = 4; /* every array of a turn has items of four bytes */
    if (dimensions == 2) {
        self->strides[0] = 4 * shape[1];
    }
    count(owner, +1);
    return self;
}

PyObject *native_view_array(PyObject *owner, const void *data, int type, int dimensions,
                            const npy_intp *shape)
{
    ViewObject *view = view_new(owner, data, type, dimensions, shape);
    if (!view) {
        return NULL;
    }
    PyArray_Descr *dtype = PyArray_DescrFromType(type);
    PyObject *array =
        PyArray_NewFromDescr(&PyArray_Type, dtype, dimensions, shape, view->strides, view->data,
                             NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_ALIGNED, NULL);
    /* Takes over the reference to the view, also when it fails. */
    if (!array) {
        Py_DECREF(view);
    } else if (PyArray_SetBaseObject((PyArrayObject *)array, (PyObject *)view) < 0) {
        Py_CLEAR(array);
    }
    return array;
}

/* ---------------------------------------------------------------- its protocols */

/* Read-only; NumPy asks here before it would make an array writable. */
static int view_buffer(PyObject *object, Py_buffer *buffer, int flags)
{
    ViewObject *self = (ViewObject *)object;
    if (flags & PyBUF_WRITABLE) {
        PyErr_SetString(PyExc_BufferError, "a store's arrays are read-only");
        buffer->obj = NULL;
        return -1;
    }
    *buffer = (Py_buffer){
        .buf = self->data,
        .obj = Py_NewRef(object),
        .len = self->shape[0] * self->shape[1] * 4,
        .itemsize = 4,
        .readonly = 1,
        .ndim = flags & PyBUF_ND ? self->dimensions : 1,
        .format = flags & PyBUF_FORMAT ? (self->type == NPY_INT32 ? "i" : "f") : NULL,
        .shape = flags & PyBUF_ND ? self->shape : NULL,
        .strides = (flags & PyBUF_STRIDES) == PyBUF_STRIDES ? self->strides : NULL,
    };
    return 0;
}

PyDoc_STRVAR(dlpack_doc, "__dlpack__($self, /, **options)\n--\n\n"
                         "A DLPack capsule over the same memory; options are not needed.");

static PyObject *view_dlpack(PyObject *object, PyObject *args, PyObject *kwargs)
{
    (void)args;
    (void)kwargs;
    ViewObject *self = (ViewObject *)object;
    return native_dlpack_capsule(object, self->data, self->type, self->dimensions, self->shape,
                                 self->strides);
}

PyDoc_STRVAR(dlpack_device_doc, "__dlpack_device__($self, /)\n--\n\n"
                                "(1, 0): memory of the host.");

static PyObject *view_dlpack_device(PyObject *object, PyObject *unused)
{
    (void)object;
    (void)unused;
    return Py_BuildValue("(ii)", 1, 0);
}

PyDoc_STRVAR(view_doc, "What an array of a snapshot or a decoded reply rests on.\n\n"
                       "It keeps that alive. Supports the buffer protocol and DLPack, read-only.");

PyTypeObject *native_view_type_new(PyObject *module)
{
    static PyMethodDef methods[] = {
        {"__dlpack__", (PyCFunction)(void (*)(void))view_dlpack, METH_VARARGS | METH_KEYWORDS,
         dlpack_doc},
        {"__dlpack_device__", view_dlpack_device, METH_NOARGS, dlpack_device_doc},
        {0},
    };
    PyType_Slot slots[] = {
        {Py_tp_doc, (void *)(uintptr_t)view_doc},
        {Py_tp_dealloc, view_dealloc},
        {Py_tp_methods, methods},
        {Py_bf_getbuffer, view_buffer},
        {0, NULL},
    };
    PyType_Spec spec = {
        .name = "rollstore._rollstore.View",
        .basicsize = sizeof(ViewObject),
        .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
        .slots = slots,
    };
    return (PyTypeObject *)PyType_FromModuleAndSpec(module, &spec, NULL);
}
