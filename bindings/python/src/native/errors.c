/* Library errors as exceptions. */
#include "native.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The one table of which code is which class of rollstore._errors.  The last row is for errors that
 * the binding itself finds about closed objects; it has no code of the library. */
enum { CODE_CLOSED = -1 };

static struct {
    int code;
    const char *name;
    PyObject *type;
} table[] = {
    {RST_ERR_SYNTAX, "ReplyError", NULL},
    {RST_ERR_MISSING, "ReplyError", NULL},
    {RST_ERR_DTYPE, "ReplyError", NULL},
    {RST_ERR_SHAPE, "ReplyError", NULL},
    {RST_ERR_BASE64, "ReplyError", NULL},
    {RST_ERR_VALUE, "ReplyError", NULL},
    {RST_ERR_TYPE, "ReplyError", NULL},
    {RST_ERR_ARGUMENT, "ArgumentError", NULL},
    {RST_ERR_LIMIT, "LimitError", NULL},
    {RST_ERR_MEMORY, "NoMemoryError", NULL},
    {RST_ERR_FORKED, "ForkedError", NULL},
    {RST_ERR_BUSY, "BusyError", NULL},
    {RST_ERR_READ_ONLY, "ReadOnlyError", NULL},
    {RST_ERR_NOT_FOUND, "NotFoundError", NULL},
    {RST_ERR_CONFLICT, "ConflictError", NULL},
    {RST_ERR_ORDER, "OrderError", NULL},
    {RST_ERR_SEALED, "SealedError", NULL},
    {RST_ERR_ALIGNMENT, "AlignmentError", NULL},
    {RST_ERR_HELD, "HeldError", NULL},
    {RST_ERR_LEASE, "LeaseError", NULL},
    {RST_ERR_FULL, "FullError", NULL},
    {RST_ERR_TIMEOUT, "WaitTimeoutError", NULL},
    {RST_ERR_READERS, "ReadersError", NULL},
    {RST_ERR_NO_SPACE, "NoSpaceError", NULL},
    {RST_ERR_EXISTS, "ExistsError", NULL},
    {RST_ERR_NOT_STORE, "NotStoreError", NULL},
    {RST_ERR_VERSION, "VersionError", NULL},
    {RST_ERR_CORRUPT, "CorruptError", NULL},
    {RST_ERR_GONE, "GoneError", NULL},
    {RST_ERR_PERMISSION, "AccessError", NULL},
    {RST_ERR_FILESYSTEM, "FileSystemError", NULL},
    {RST_ERR_IO, "InputOutputError", NULL},
    {CODE_CLOSED, "ClosedError", NULL},
};
enum { TABLE_SIZE = sizeof table / sizeof *table };

static PyObject *base_type;

int native_errors_init(void)
{
    PyObject *module = PyImport_ImportModule("rollstore._errors");
    if (!module) {
        return -1;
    }
    base_type = PyObject_GetAttrString(module, "RollstoreError");
    bool found = base_type != NULL;
    for (int i = 0; i < TABLE_SIZE && found; i++) {
        table[i].type = PyObject_GetAttrString(module, table[i].name);
        found = table[i].type != NULL;
    }
    Py_DECREF(module);
    return found ? 0 : -1;
}

static PyObject *type_of(int code)
{
    for (int i = 0; i < TABLE_SIZE; i++) {
        if (table[i].code == code) {
            return table[i].type;
        }
    }
    return base_type;
}

static PyObject *text_or_none(const char *text)
{
    return *text ? PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace")
                 : Py_NewRef(Py_None);
}

static PyObject *number_or_none(int64_t number, int64_t none)
{
    return number == none ? Py_NewRef(Py_None) : PyLong_FromLongLong(number);
}

static PyObject *raise_as(PyObject *type, const char *kind, const rst_error *error)
{
    PyObject *arguments = Py_BuildValue(
        "(N)", PyUnicode_DecodeUTF8(error->message, (Py_ssize_t)strlen(error->message), "replace"));
    PyObject *named = Py_BuildValue(
        "{s:i,s:s,s:N,s:N,s:N,s:N}", "code", error->code, "kind", kind, "field",
        text_or_none(error->field), "offset", number_or_none(error->offset, -1), "index",
        number_or_none(error->index, -1), "system", number_or_none(error->system, 0));
    PyObject *raised = arguments && named ? PyObject_Call(type, arguments, named) : NULL;
    if (raised) {
        PyErr_SetObject(type, raised);
        Py_DECREF(raised);
    }
    Py_XDECREF(arguments);
    Py_XDECREF(named);
    return NULL;
}

PyObject *native_raise(const rst_error *error)
{
    return raise_as(type_of(error->code), rst_code_name(error->code), error);
}

/* The library was told to wait for one slice and says so; the caller waited for many. */
static void restate_time(char *message, int64_t waited_ms)
{
    char *at = strstr(message, "within ");
    if (!at) {
        return;
    }
    at += strlen("within ");
    char *after;
    strtoll(at, &after, 10);
    char rest[RST_ERROR_MESSAGE_SIZE];
    snprintf(rest, sizeof rest, "%s", after);
    if (after != at && strncmp(rest, " ms", 3) == 0) {
        size_t room = RST_ERROR_MESSAGE_SIZE - (size_t)(at - message);
        snprintf(at, room, "%lld%s", (long long)waited_ms, rest);
    }
}

PyObject *native_raise_waited(rst_error *error, int64_t waited_ms)
{
    if (error->code == RST_ERR_FULL || error->code == RST_ERR_TIMEOUT) {
        restate_time(error->message, waited_ms);
    }
    return native_raise(error);
}

PyObject *native_raise_no_offset(rst_error *error)
{
    error->offset = -1;
    return native_raise(error);
}

PyObject *native_raise_closed(const char *what)
{
    rst_error error = {.code = 0, .offset = -1, .index = -1};
    snprintf(error.message, sizeof error.message, "%s is closed", what);
    return raise_as(type_of(CODE_CLOSED), "closed", &error);
}

PyObject *native_raise_new(int code, const char *field, const char *format, ...)
{
    rst_error error = {.code = code, .offset = -1, .index = -1};
    if (field) {
        snprintf(error.field, sizeof error.field, "%s", field);
    }
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error.message, sizeof error.message, format, arguments);
    va_end(arguments);
    return native_raise(&error);
}
