/* Python arguments as the library wants them. */
#include "native.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* ---------------------------------------------------------------- text */

bool native_bytes_from(PyObject *object, const char *name, native_bytes *out)
{
    *out = (native_bytes){0};
    if (PyBytes_Check(object)) {
        out->owner = Py_NewRef(object);
    } else if (PyUnicode_Check(object)) {
        Py_ssize_t size;
        const char *data = PyUnicode_AsUTF8AndSize(object, &size);
        if (data) {
            *out = (native_bytes){.data = data, .size = (size_t)size, .owner = Py_NewRef(object)};
            return true;
        }
        PyErr_Clear();
        out->owner = PyUnicode_AsEncodedString(object, "utf-8", "surrogateescape");
        if (!out->owner) {
            if (PyErr_ExceptionMatches(PyExc_UnicodeEncodeError)) {
                PyErr_Clear();
                native_raise_new(RST_ERR_ARGUMENT, name,
                                 "%s: half of a surrogate pair is in it, which UTF-8 has no bytes "
                                 "for",
                                 name);
            }
            return false;
        }
    } else {
        PyErr_Format(PyExc_TypeError, "%s: str or bytes is needed, got %.100s", name,
                     Py_TYPE(object)->tp_name);
        return false;
    }
    out->data = PyBytes_AS_STRING(out->owner);
    out->size = (size_t)PyBytes_GET_SIZE(out->owner);
    return true;
}

void native_bytes_clear(native_bytes *bytes)
{
    Py_CLEAR(bytes->owner);
}

PyObject *native_text(const char *data, size_t size)
{
    return PyUnicode_DecodeUTF8(data, (Py_ssize_t)size, "surrogateescape");
}

PyObject *native_float_or_none(double value)
{
    return isnan(value) ? Py_NewRef(Py_None) : PyFloat_FromDouble(value);
}

PyObject *native_int_or_none(int64_t value, int64_t none)
{
    return value == none ? Py_NewRef(Py_None) : PyLong_FromLongLong(value);
}

/* ---------------------------------------------------------------- numbers */

int native_optional_int64(PyObject *object, void *out)
{
    if (object == Py_None) {
        return 1;
    }
    long long value = PyLong_AsLongLong(object);
    if (value == -1 && PyErr_Occurred()) {
        return 0;
    }
    *(int64_t *)out = value;
    return 1;
}

/* NaN stands for "none" in the store: one that was computed must not become that silently. */
static int finite_double(PyObject *object, const char *name, double most, double *out)
{
    if (object == Py_None) {
        return 1;
    }
    double value = PyFloat_AsDouble(object);
    if (value == -1.0 && PyErr_Occurred()) {
        return 0;
    }
    if (!(fabs(value) <= most)) {
        PyErr_Format(PyExc_ValueError, "%s: a finite number is needed, or None, got %R", name,
                     object);
        return 0;
    }
    *out = value;
    return 1;
}

int native_optional_reward(PyObject *object, void *out)
{
    return finite_double(object, "reward", DBL_MAX, out);
}

int native_optional_temperature(PyObject *object, void *out)
{
    double value = NAN;
    if (!finite_double(object, "temperature", FLT_MAX, &value)) {
        return 0;
    }
    if (value < 0) {
        PyErr_Format(PyExc_ValueError, "temperature: a number from 0 on is needed, got %R", object);
        return 0;
    }
    if (object != Py_None) {
        *(double *)out = value;
    }
    return 1;
}

int native_uint32(PyObject *object, void *out)
{
    unsigned long long value;
    PyObject *number = PyNumber_Index(object);
    if (!number) {
        return 0;
    }
    value = PyLong_AsUnsignedLongLong(number);
    Py_DECREF(number);
    bool failed = value == (unsigned long long)-1 && PyErr_Occurred();
    if (failed && !PyErr_ExceptionMatches(PyExc_OverflowError)) {
        return 0;
    }
    if (failed || value > UINT32_MAX) {
        PyErr_Clear();
        PyErr_Format(PyExc_ValueError, "%R: a number from 0 to %u is needed", object, UINT32_MAX);
        return 0;
    }
    *(uint32_t *)out = (uint32_t)value;
    return 1;
}

/* ---------------------------------------------------------------- choices */

static const char *const mode_names[] = {
    [RST_MODE_SELECTED] = "selected", [RST_MODE_SUPPORT] = "support"};
static const char *const request_names[] = {
    [RST_REQUEST_FLAT] = "flat", [RST_REQUEST_NESTED] = "nested", [RST_REQUEST_NONE] = "none"};
static const char *const status_names[] = {[RST_STATUS_COMPLETED] = "completed",
                                           [RST_STATUS_TRUNCATED] = "truncated",
                                           [RST_STATUS_ABORTED] = "aborted",
                                           [RST_STATUS_FAILED] = "failed"};
static const char *const durability_names[] = {[RST_DURABILITY_MEMORY] = "memory",
                                               [RST_DURABILITY_INTERVAL] = "interval",
                                               [RST_DURABILITY_FULL] = "full"};

static int choice(PyObject *object, const char *what, const char *const *names, int count,
                  const char *all)
{
    if (!PyUnicode_Check(object)) {
        PyErr_Format(PyExc_TypeError, "%s: str is needed (%s), got %.100s", what, all,
                     Py_TYPE(object)->tp_name);
        return -1;
    }
    for (int i = 0; i < count; i++) {
        if (names[i] && PyUnicode_CompareWithASCIIString(object, names[i]) == 0) {
            return i;
        }
    }
    PyErr_Format(PyExc_ValueError, "%s: %R is none of %s", what, object, all);
    return -1;
}

int native_mode(PyObject *object, void *out)
{
    int found = choice(object, "mode", mode_names, 2, "\"selected\", \"support\"");
    *(rst_mode *)out = found < 0 ? RST_MODE_SELECTED : (rst_mode)found;
    return found >= 0;
}

int native_request(PyObject *object, void *out)
{
    int found = choice(object, "request", request_names, RST_REQUEST_NONE + 1,
                       "\"flat\", \"nested\", \"none\"");
    *(rst_request *)out = found < 0 ? RST_REQUEST_FLAT : (rst_request)found;
    return found >= 0;
}

int native_status(PyObject *object, void *out)
{
    int found = choice(object, "status", status_names, RST_STATUS_FAILED + 1,
                       "\"completed\", \"truncated\", \"aborted\", \"failed\"");
    *(rst_outcome_status *)out = found < 0 ? RST_STATUS_NONE : (rst_outcome_status)found;
    return found >= 0;
}

const char *native_mode_name(rst_mode mode)
{
    return mode_names[mode];
}

const char *native_status_name(rst_outcome_status status)
{
    return status_names[status];
}

const char *native_durability_name(uint32_t durability)
{
    bool known = durability >= RST_DURABILITY_MEMORY && durability <= RST_DURABILITY_FULL;
    return known ? durability_names[durability] : "unknown";
}

/* ---------------------------------------------------------------- time */

/* How long one call into the library may keep a signal waiting. */
#define SLICE_MS 100
#define SECONDS_MAX 3e9 /* a century */

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static bool seconds_from(PyObject *object, const char *name, double *seconds)
{
    *seconds = PyFloat_AsDouble(object);
    if (*seconds == -1.0 && PyErr_Occurred()) {
        return false;
    }
    if (!(*seconds >= 0)) {
        PyErr_Format(PyExc_ValueError, "%s: seconds from 0 on are needed, got %R", name, object);
        return false;
    }
    *seconds = fmin(*seconds, SECONDS_MAX);
    return true;
}

int native_patience_from(PyObject *object, void *out)
{
    native_patience *patience = out;
    double seconds = 0;
    *patience = (native_patience){.forever = object == Py_None, .begin_ns = now_ns()};
    if (!patience->forever && !seconds_from(object, "timeout", &seconds)) {
        return 0;
    }
    patience->until_ns = patience->begin_ns + (int64_t)(seconds * 1e9);
    return 1;
}

native_patience native_patience_default(void)
{
    int64_t begin_ns = now_ns();
    return (native_patience){.begin_ns = begin_ns,
                             .until_ns = begin_ns + NATIVE_TIMEOUT * INT64_C(1000000000)};
}

int64_t native_patience_slice(const native_patience *patience)
{
    if (patience->forever) {
        return SLICE_MS;
    }
    int64_t left_ms = (patience->until_ns - now_ns() + 999999) / 1000000;
    return left_ms < 0 ? 0 : left_ms < SLICE_MS ? left_ms : SLICE_MS;
}

bool native_patience_over(const native_patience *patience)
{
    return !patience->forever && now_ns() >= patience->until_ns;
}

int64_t native_patience_waited_ms(const native_patience *patience)
{
    return (now_ns() - patience->begin_ns) / 1000000;
}

int64_t native_milliseconds(PyObject *object, const char *name)
{
    double seconds;
    return seconds_from(object, name, &seconds) ? (int64_t)ceil(seconds * 1e3) : -1;
}

/* ---------------------------------------------------------------- arrays */

void native_array_clear(native_array *array)
{
    free(array->memory);
    Py_CLEAR(array->owner);
    *array = (native_array){0};
}

static bool bad_dimensions(const char *name, int wanted, int got)
{
    PyErr_Format(PyExc_ValueError, "%s: an array of %d dimension%s is needed, got %d", name, wanted,
                 wanted == 1 ? "" : "s", got);
    return false;
}

static bool bad_id(const char *name, size_t index)
{
    native_raise_new(RST_ERR_VALUE, name,
                     "%s[%zu]: a token id is from 0 to 2^31-1 (-1 in an "
                     "unused slot)",
                     name, index);
    return false;
}

/* A list or tuple of int: NumPy would take five times as long for it. */
static bool ids_from_sequence(PyObject *sequence, const char *name, native_array *out)
{
    size_t count = (size_t)PySequence_Fast_GET_SIZE(sequence);
    int32_t *ids = malloc(count ? 4 * count : 1);
    out->memory = ids;
    out->data = ids;
    if (!ids) {
        PyErr_NoMemory();
        return false;
    }
    for (size_t i = 0; i < count; i++) {
        /* Looking at an int runs no other code, so that the list stays as it is; anything else may
         * have an __index__ that does, and is left to NumPy. */
        PyObject *item = PySequence_Fast_GET_ITEM(sequence, (Py_ssize_t)i);
        int overflow = 0;
        long long id = PyLong_CheckExact(item) ? PyLong_AsLongLongAndOverflow(item, &overflow) : 0;
        if (!PyLong_CheckExact(item)) {
            native_array_clear(out);
            return true;
        }
        if (overflow || id < INT32_MIN || id > INT32_MAX) {
            return bad_id(name, i);
        }
        ids[i] = (int32_t)id;
    }
    out->count = count;
    out->rows = (npy_intp)count;
    out->width = 1;
    return true;
}

static bool shape_of(PyArrayObject *array, const char *name, int dimensions, native_array *out)
{
    int got = PyArray_NDIM(array);
    if (got != dimensions) {
        return bad_dimensions(name, dimensions, got);
    }
    out->rows = PyArray_DIM(array, 0);
    out->width = dimensions == 2 ? PyArray_DIM(array, 1) : 1;
    out->count = (size_t)PyArray_SIZE(array);
    return true;
}

/* Take over `array`, whose items are as the library reads them. */
static bool own(PyArrayObject *array, const char *name, int dimensions, native_array *out)
{
    out->owner = (PyObject *)array;
    if (!shape_of(array, name, dimensions, out)) {
        native_array_clear(out);
        return false;
    }
    out->data = PyArray_DATA(array);
    return true;
}

static PyArrayObject *contiguous(PyObject *object, int type)
{
    return (PyArrayObject *)PyArray_FROMANY(object, type, 0, 0, NPY_ARRAY_CARRAY_RO);
}

static bool narrow(PyArrayObject *wide, const char *name, int dimensions, native_array *out)
{
    const npy_int64 *values = PyArray_DATA(wide);
    bool fine = shape_of(wide, name, dimensions, out);
    int32_t *ids = fine ? malloc(out->count ? 4 * out->count : 1) : NULL;
    if (fine && !ids) {
        PyErr_NoMemory();
        fine = false;
    }
    for (size_t i = 0; fine && i < out->count; i++) {
        fine = values[i] >= INT32_MIN && values[i] <= INT32_MAX;
        ids[i] = fine ? (int32_t)values[i] : 0;
        if (!fine) {
            bad_id(name, i);
        }
    }
    out->memory = ids;
    out->data = ids;
    if (!fine) {
        native_array_clear(out);
    }
    return fine;
}

bool native_ids_from(PyObject *object, const char *name, int dimensions, native_array *out)
{
    *out = (native_array){0};
    if (dimensions == 1 && (PyList_CheckExact(object) || PyTuple_CheckExact(object))) {
        if (!ids_from_sequence(object, name, out)) {
            native_array_clear(out);
            return false;
        }
        if (out->data) {
            return true;
        }
    }
    PyArrayObject *array = (PyArrayObject *)PyArray_FROM_O(object);
    if (!array) {
        return false;
    }
    bool integers = PyArray_ISINTEGER(array) && PyArray_TYPE(array) != NPY_ULONGLONG &&
                    PyArray_TYPE(array) != NPY_ULONG;
    if (!integers && PyArray_SIZE(array) > 0) {
        PyErr_Format(PyExc_TypeError, "%s: an int32 array is needed, got %S", name,
                     PyArray_DESCR(array));
        Py_DECREF(array);
        return false;
    }
    bool narrow_enough = PyArray_TYPE(array) == NPY_INT32;
    PyArrayObject *used = integers
                              ? contiguous((PyObject *)array, narrow_enough ? NPY_INT32 : NPY_INT64)
                              : (PyArrayObject *)PyArray_ZEROS(PyArray_NDIM(array),
                                                               PyArray_DIMS(array), NPY_INT32, 0);
    Py_DECREF(array);
    if (!used) {
        return false;
    }
    if (PyArray_TYPE(used) == NPY_INT32) {
        return own(used, name, dimensions, out);
    }
    bool fine = narrow(used, name, dimensions, out);
    Py_DECREF(used);
    return fine;
}

bool native_floats_from(PyObject *object, const char *name, int dimensions, native_array *out)
{
    *out = (native_array){0};
    PyArrayObject *array = (PyArrayObject *)PyArray_FROM_O(object);
    if (!array) {
        return false;
    }
    int type = PyArray_TYPE(array);
    bool list = !PyArray_Check(object) && type == NPY_DOUBLE; /* Python floats have no other type */
    if (type != NPY_FLOAT && type != NPY_HALF && !list && PyArray_SIZE(array) > 0) {
        PyErr_Format(PyExc_TypeError,
                     "%s: a float32 array is needed, got %S: use .astype(numpy.float32)", name,
                     PyArray_DESCR(array));
        Py_DECREF(array);
        return false;
    }
    PyArrayObject *used = (PyArrayObject *)PyArray_FROMANY(
        (PyObject *)array, NPY_FLOAT, 0, 0, NPY_ARRAY_CARRAY_RO | NPY_ARRAY_FORCECAST);
    Py_DECREF(array);
    return used && own(used, name, dimensions, out);
}

bool native_target(PyObject *object, const char *name, int type, uint64_t count, void **data)
{
    *data = NULL;
    if (object == Py_None) {
        return true;
    }
    if (!PyArray_Check(object)) {
        PyErr_Format(PyExc_TypeError, "%s: a NumPy array is needed, got %.100s", name,
                     Py_TYPE(object)->tp_name);
        return false;
    }
    PyArrayObject *array = (PyArrayObject *)object;
    if (PyArray_TYPE(array) != type || !PyArray_ISNOTSWAPPED(array)) {
        PyArray_Descr *wanted = PyArray_DescrFromType(type);
        PyErr_Format(PyExc_TypeError, "%s: dtype %S is needed, got %S", name, wanted,
                     PyArray_DESCR(array));
        Py_XDECREF(wanted);
        return false;
    }
    if (!PyArray_IS_C_CONTIGUOUS(array) || !PyArray_ISALIGNED(array) ||
        !PyArray_ISWRITEABLE(array)) {
        PyErr_Format(PyExc_ValueError, "%s: must be C-contiguous, aligned and writable", name);
        return false;
    }
    if ((uint64_t)PyArray_SIZE(array) < count) {
        PyErr_Format(PyExc_ValueError, "%s: room for %llu elements is needed, got %zd", name,
                     (unsigned long long)count, (Py_ssize_t)PyArray_SIZE(array));
        return false;
    }
    *data = PyArray_DATA(array);
    return true;
}
