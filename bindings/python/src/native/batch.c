/* Samples and batches: measured in a snapshot, then written into the caller's arrays. */
#include "native.h"

#include <stdlib.h>
#include <string.h>

PyTypeObject *native_plan_type;

/* Sessions that were measured: how large their samples are, for one filling or several. */
typedef struct PlanObject {
    PyObject_HEAD SnapshotObject *snapshot;
    rst_sample_options options;
    rst_batch_size size;
    size_t count;
    rst_sample *samples;
} PlanObject;

static void plan_dealloc(PyObject *object)
{
    PlanObject *self = (PlanObject *)object;
    PyTypeObject *type = Py_TYPE(object);
    Py_XDECREF(self->snapshot);
    free(self->samples);
    PyObject_Free(object);
    Py_DECREF(type);
}

/* ---------------------------------------------------------------- measuring */

static bool measure(PlanObject *self, const rst_id *ids)
{
    rst_snapshot *handle = native_snapshot_enter(self->snapshot);
    if (!handle) {
        return false;
    }
    rst_error error;
    int code;
    Py_BEGIN_ALLOW_THREADS code = rst_batch_measure(handle, ids, self->count, &self->options,
                                                    self->samples, &self->size, &error);
    Py_END_ALLOW_THREADS native_snapshot_leave(self->snapshot);
    if (code) {
        native_raise(&error);
    }
    return code == 0;
}

/* Session ids of a sequence; texts keep them alive. */
static bool take_ids(PyObject *sequence, native_bytes *texts, rst_id *ids)
{
    Py_ssize_t count = PySequence_Fast_GET_SIZE(sequence);
    for (Py_ssize_t i = 0; i < count; i++) {
        if (!native_bytes_from(PySequence_Fast_GET_ITEM(sequence, i), "sessions", &texts[i])) {
            return false;
        }
        ids[i] = (rst_id){.session = texts[i].data, .session_size = texts[i].size};
    }
    return true;
}

static bool plan_fill(PlanObject *self, PyObject *sequence)
{
    size_t count = (size_t)PySequence_Fast_GET_SIZE(sequence);
    native_bytes *texts = calloc(count + 1, sizeof *texts);
    rst_id *ids = calloc(count + 1, sizeof *ids);
    self->samples = calloc(count + 1, sizeof *self->samples);
    self->count = count;
    bool fine = texts && ids && self->samples;
    if (!fine) {
        PyErr_NoMemory();
    }
    fine = fine && take_ids(sequence, texts, ids) && measure(self, ids);
    for (size_t i = 0; texts && i < count; i++) {
        native_bytes_clear(&texts[i]);
    }
    free(texts);
    free(ids);
    return fine;
}

const char native_snapshot_measure_doc[] =
    "_measure($self, sessions, top_k=0, trim_max=1, token_max=0)\n--\n\n"
    "Work out the sizes of the samples of a sequence of session ids: a Plan.";

PyObject *native_snapshot_measure(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"sessions", "top_k", "trim_max", "token_max", NULL};
    PyObject *sessions;
    rst_sample_options options = RST_SAMPLE_OPTIONS_DEFAULT;
    unsigned long long token_max = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|O&O&K:_measure", names, &sessions,
                                     native_uint32, &options.topk, native_uint32, &options.trim_max,
                                     &token_max)) {
        return NULL;
    }
    options.token_max = token_max;
    /* A tuple of our own: a list could change while it is read. */
    PyObject *sequence = PySequence_Tuple(sessions);
    PlanObject *self = sequence ? PyObject_New(PlanObject, native_plan_type) : NULL;
    if (!self) {
        Py_XDECREF(sequence);
        return NULL;
    }
    self->snapshot = (SnapshotObject *)Py_NewRef(object);
    self->options = options;
    self->samples = NULL;
    bool fine = plan_fill(self, sequence);
    Py_DECREF(sequence);
    if (!fine) {
        Py_CLEAR(self);
    }
    return (PyObject *)self;
}

/* ---------------------------------------------------------------- looking at it */

static PyObject *sample_tuple(const rst_sample *s)
{
    return Py_BuildValue("(NKKKKIIIINN)", native_session_tuple(&s->session), s->token_count,
                         s->prompt_count, s->response_count, s->generated_count, s->topk,
                         s->turn_count, s->turns_left_out, s->trimmed_count,
                         native_int_or_none(s->weight_version_min, RST_NO_VERSION),
                         native_int_or_none(s->weight_version_max, RST_NO_VERSION));
}

static PyObject *plan_samples(PyObject *object, void *unused)
{
    (void)unused;
    PlanObject *self = (PlanObject *)object;
    if (!native_snapshot_usable(self->snapshot)) { /* session ids lie in the map */
        return NULL;
    }
    PyObject *list = PyList_New((Py_ssize_t)self->count);
    for (size_t i = 0; list && i < self->count; i++) {
        PyObject *sample = sample_tuple(&self->samples[i]);
        if (!sample) {
            Py_CLEAR(list);
        } else {
            PyList_SET_ITEM(list, (Py_ssize_t)i, sample);
        }
    }
    return list;
}

static PyObject *plan_sizes(PyObject *object, void *unused)
{
    (void)unused;
    const rst_batch_size *s = &((PlanObject *)object)->size;
    return Py_BuildValue("(KKKKI)", s->token_count, s->response_count, s->token_max,
                         s->response_max, s->topk);
}

static Py_ssize_t plan_length(PyObject *object)
{
    return (Py_ssize_t)((PlanObject *)object)->count;
}

/* ---------------------------------------------------------------- filling */

/* Two targets that share memory would be written by two threads. */
typedef struct target {
    PyObject *object;
    const char *name;
    int type;
    uint64_t count;
    void **data;
} target;

static bool take_targets(const target *targets, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        const target *t = &targets[i];
        if (!native_target(t->object, t->name, t->type, t->count, t->data)) {
            return false;
        }
    }
    return true;
}

/* A product of counts; what does not fit asks for more room than any array has. */
static uint64_t times(uint64_t a, uint64_t b)
{
    uint64_t product;
    return __builtin_mul_overflow(a, b, &product) ? UINT64_MAX : product;
}

static PyObject *finish(PlanObject *self, int code, const rst_error *error)
{
    native_snapshot_leave(self->snapshot);
    return code ? native_raise(error) : Py_NewRef(Py_None);
}

PyDoc_STRVAR(pack_doc,
             "pack($self, tokens=None, cu_seqlens=None, loss_mask=None, rollout_logprobs=None,\n"
             "     topk_ids=None, topk_logprobs=None, cu_response_seqlens=None, threads=1)\n--\n\n"
             "Write the samples one after another into NumPy arrays; None leaves one out.");

static PyObject *plan_pack(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"tokens",   "cu_seqlens",    "loss_mask",           "rollout_logprobs",
                            "topk_ids", "topk_logprobs", "cu_response_seqlens", "threads",
                            NULL};
    PlanObject *self = (PlanObject *)object;
    PyObject *o[7] = {Py_None, Py_None, Py_None, Py_None, Py_None, Py_None, Py_None};
    unsigned threads = 1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|OOOOOOOI:pack", names, &o[0], &o[1], &o[2],
                                     &o[3], &o[4], &o[5], &o[6], &threads)) {
        return NULL;
    }
    uint64_t t = self->size.token_count;
    uint64_t r = self->size.response_count;
    uint64_t rk = times(r, self->size.topk);
    rst_packed_arrays a;
    const target targets[] = {
        {o[0], names[0], NPY_INT32, t, (void **)&a.tokens},
        {o[1], names[1], NPY_INT32, self->count + 1, (void **)&a.cu_seqlens},
        {o[2], names[2], NPY_UINT8, r, (void **)&a.loss_mask},
        {o[3], names[3], NPY_FLOAT32, r, (void **)&a.rollout_logprobs},
        {o[4], names[4], NPY_INT32, rk, (void **)&a.topk_ids},
        {o[5], names[5], NPY_FLOAT32, rk, (void **)&a.topk_logprobs},
        {o[6], names[6], NPY_INT32, self->count + 1, (void **)&a.cu_response_seqlens},
    };
    if (!take_targets(targets, 7)) {
        return NULL;
    }
    rst_snapshot *handle = native_snapshot_enter(self->snapshot);
    if (!handle) {
        return NULL;
    }
    rst_error error;
    int code;
    Py_BEGIN_ALLOW_THREADS code =
        rst_batch_pack(handle, self->samples, self->count, &self->options, &a, threads, &error);
    Py_END_ALLOW_THREADS return finish(self, code, &error);
}

PyDoc_STRVAR(pad_doc,
             "pad($self, length, response_length, pad_id, tokens=None, token_counts=None,\n"
             "    loss_mask=None, rollout_logprobs=None, topk_ids=None, topk_logprobs=None,\n"
             "    response_counts=None, threads=1)\n--\n\n"
             "Write the samples padded on the right into NumPy arrays; None leaves one out.");

static PyObject *plan_pad(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"length",        "response_length", "pad_id",           "tokens",
                            "token_counts",  "loss_mask",       "rollout_logprobs", "topk_ids",
                            "topk_logprobs", "response_counts", "threads",          NULL};
    PlanObject *self = (PlanObject *)object;
    PyObject *o[7] = {Py_None, Py_None, Py_None, Py_None, Py_None, Py_None, Py_None};
    unsigned long long length;
    unsigned long long response_length;
    rst_padded_arrays a;
    unsigned threads = 1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "KKi|OOOOOOOI:pad", names, &length,
                                     &response_length, &a.pad_id, &o[0], &o[1], &o[2], &o[3], &o[4],
                                     &o[5], &o[6], &threads)) {
        return NULL;
    }
    a.length = length;
    a.response_length = response_length;
    uint64_t b = self->count;
    uint64_t r = times(b, response_length);
    uint64_t rk = times(r, self->size.topk);
    const target targets[] = {
        {o[0], names[3], NPY_INT32, times(b, length), (void **)&a.tokens},
        {o[1], names[4], NPY_INT32, b, (void **)&a.token_counts},
        {o[2], names[5], NPY_UINT8, r, (void **)&a.loss_mask},
        {o[3], names[6], NPY_FLOAT32, r, (void **)&a.rollout_logprobs},
        {o[4], names[7], NPY_INT32, rk, (void **)&a.topk_ids},
        {o[5], names[8], NPY_FLOAT32, rk, (void **)&a.topk_logprobs},
        {o[6], names[9], NPY_INT32, b, (void **)&a.response_counts},
    };
    if (!take_targets(targets, 7)) {
        return NULL;
    }
    rst_snapshot *handle = native_snapshot_enter(self->snapshot);
    if (!handle) {
        return NULL;
    }
    rst_error error;
    int code;
    Py_BEGIN_ALLOW_THREADS code =
        rst_batch_pad(handle, self->samples, self->count, &self->options, &a, threads, &error);
    Py_END_ALLOW_THREADS return finish(self, code, &error);
}

/* ---------------------------------------------------------------- the type */

PyDoc_STRVAR(plan_doc, "Measured samples; len() is their number. Lives as long as its snapshot.");

PyTypeObject *native_plan_type_new(PyObject *module)
{
    static PyMethodDef methods[] = {
        {"pack", (PyCFunction)(void (*)(void))plan_pack, METH_VARARGS | METH_KEYWORDS, pack_doc},
        {"pad", (PyCFunction)(void (*)(void))plan_pad, METH_VARARGS | METH_KEYWORDS, pad_doc},
        {0},
    };
    static PyGetSetDef attributes[] = {
        {"samples", plan_samples, NULL, "The fields of each rollstore.SampleInfo.", NULL},
        {"sizes", plan_sizes, NULL,
         "(sum of T, sum of R, largest T, largest R, K) with T tokens and R of the response.",
         NULL},
        {0},
    };
    PyType_Slot slots[] = {
        {Py_tp_doc, (void *)(uintptr_t)plan_doc},
        {Py_tp_dealloc, plan_dealloc},
        {Py_tp_methods, methods},
        {Py_tp_getset, attributes},
        {Py_sq_length, plan_length},
        {0, NULL},
    };
    PyType_Spec spec = {
        .name = "rollstore._rollstore.Plan",
        .basicsize = sizeof(PlanObject),
        .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
        .slots = slots,
    };
    return (PyTypeObject *)PyType_FromModuleAndSpec(module, &spec, NULL);
}
