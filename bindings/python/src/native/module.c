/* The module rollstore._rollstore. */
#define NATIVE_FILLS_NUMPY_TABLE
#include "native.h"

#include <pthread.h>
#include <string.h>

uint64_t native_fork_generation;

static void after_fork_in_child(void)
{
    native_fork_generation++;
}

/* ---------------------------------------------------------------- functions */

PyDoc_STRVAR(session_key_doc,
             "session_key(session, /)\n--\n\n"
             "The 16 bytes by which a session id is found in the store (XXH3-128).");

static PyObject *session_key(PyObject *module, PyObject *session)
{
    (void)module;
    native_bytes id;
    if (!native_bytes_from(session, "session", &id)) {
        return NULL;
    }
    uint8_t key[RST_KEY_SIZE];
    rst_session_key(id.data, id.size, key);
    native_bytes_clear(&id);
    return PyBytes_FromStringAndSize((const char *)key, RST_KEY_SIZE);
}

PyDoc_STRVAR(simd_path_doc,
             "simd_path()\n--\n\n"
             "Which code decodes base64 here: \"avx512\", \"avx2\", \"neon\" or \"portable\".");

static PyObject *simd_path(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    return PyUnicode_FromString(rst_base64_path());
}

PyDoc_STRVAR(error_kinds_doc, "_error_kinds()\n--\n\n"
                              "The library's error codes with their names.");

static PyObject *error_kinds(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    PyObject *kinds = PyDict_New();
    for (int code = 1; kinds && code < 256; code++) {
        const char *name = rst_code_name(code);
        if (strcmp(name, "unknown") == 0) {
            continue;
        }
        PyObject *key = PyLong_FromLong(code);
        PyObject *value = PyUnicode_FromString(name);
        if (!key || !value || PyDict_SetItem(kinds, key, value) < 0) {
            Py_CLEAR(kinds);
        }
        Py_XDECREF(key);
        Py_XDECREF(value);
    }
    return kinds;
}

PyDoc_STRVAR(raise_doc, "_raise(code, message, /)\n--\n\n"
                        "Raise the exception of an error code.");

static PyObject *raise_code(PyObject *module, PyObject *args)
{
    (void)module;
    int code;
    const char *message;
    if (!PyArg_ParseTuple(args, "is:_raise", &code, &message)) {
        return NULL;
    }
    return native_raise_new(code, NULL, "%s", message);
}

static PyMethodDef functions[] = {
    {"decode", (PyCFunction)(void (*)(void))native_decode, METH_VARARGS | METH_KEYWORDS,
     native_decode_doc},
    {"decode_line", (PyCFunction)(void (*)(void))native_decode_line, METH_VARARGS | METH_KEYWORDS,
     native_decode_line_doc},
    {"json_object", native_json_object, METH_O, native_json_object_doc},
    {"json_token_ids", native_json_token_ids, METH_O, native_json_token_ids_doc},
    {"decode_and_strip", (PyCFunction)(void (*)(void))native_decode_and_strip,
     METH_VARARGS | METH_KEYWORDS, native_decode_and_strip_doc},
    {"dlpack", native_dlpack, METH_O, native_dlpack_doc},
    {"session_key", session_key, METH_O, session_key_doc},
    {"simd_path", simd_path, METH_NOARGS, simd_path_doc},
    {"_error_kinds", error_kinds, METH_NOARGS, error_kinds_doc},
    {"_raise", raise_code, METH_VARARGS, raise_doc},
    {0},
};

/* ---------------------------------------------------------------- the module */

static bool add_types(PyObject *module)
{
    const struct {
        PyTypeObject **type;
        PyTypeObject *(*make)(PyObject *module);
        const char *name; /* NULL: not shown */
    } types[] = {
        {&native_store_type, native_store_type_new, "Store"},
        {&native_snapshot_type, native_snapshot_type_new, "Snapshot"},
        {&native_turn_type, native_turn_type_new, "Turn"},
        {&native_view_type, native_view_type_new, "View"},
        {&native_plan_type, native_plan_type_new, "Plan"},
        {&native_memory_type, native_memory_type_new, NULL},
    };
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        *types[i].type = types[i].make(module);
        if (!*types[i].type ||
            (types[i].name &&
             PyModule_AddObjectRef(module, types[i].name, (PyObject *)*types[i].type) < 0)) {
            return false;
        }
    }
    return true;
}

static bool add_constants(PyObject *module)
{
    const struct {
        const char *name;
        long value;
    } constants[] = {
        {"OPEN_READ_ONLY", RST_OPEN_READ_ONLY},
        {"OPEN_CREATE", RST_OPEN_CREATE},
        {"OPEN_EXCLUSIVE", RST_OPEN_EXCLUSIVE},
        {"OPEN_GROUP", RST_OPEN_GROUP},
        {"OPEN_TRUST", RST_OPEN_TRUST},
        {"DURABILITY_MEMORY", RST_DURABILITY_MEMORY},
        {"DURABILITY_INTERVAL", RST_DURABILITY_INTERVAL},
        {"DURABILITY_FULL", RST_DURABILITY_FULL},
        {"CAPACITY_DEFAULT", RST_CAPACITY_DEFAULT},
        {"LEASE_DEFAULT_MS", RST_LEASE_DEFAULT_MS},
    };
    for (size_t i = 0; i < sizeof constants / sizeof *constants; i++) {
        if (PyModule_AddIntConstant(module, constants[i].name, constants[i].value) < 0) {
            return false;
        }
    }
    return PyModule_AddStringConstant(module, "__version__", rst_version()) == 0;
}

static int fill_module(PyObject *module)
{
    /* Types and tables are the process's, not an interpreter's; NumPy's are too. */
    if (PyInterpreterState_Get() != PyInterpreterState_Main()) {
        PyErr_SetString(PyExc_ImportError, "rollstore works in the main interpreter only: start a "
                                           "process instead of a sub-interpreter");
        return -1;
    }
    if (_import_array() < 0) {
        return -1;
    }
    static bool watching;
    if (!watching && pthread_atfork(NULL, NULL, after_fork_in_child) != 0) {
        PyErr_NoMemory();
        return -1;
    }
    watching = true;
    bool fine = native_errors_init() == 0 && native_text_init() == 0 && add_types(module) &&
                add_constants(module);
    return fine ? 0 : -1;
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, fill_module},
#if PY_VERSION_HEX >= 0x030C0000
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
    {0, NULL},
};

PyDoc_STRVAR(module_doc, "The compiled part of rollstore: import rollstore instead.");

static PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "rollstore._rollstore",
    .m_doc = module_doc,
    .m_size = 0,
    .m_methods = functions,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__rollstore(void); /* found by its name: no header declares it */

PyMODINIT_FUNC PyInit__rollstore(void)
{
    return PyModuleDef_Init(&definition);
}
