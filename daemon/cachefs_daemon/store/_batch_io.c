/* Many small pieces of file I/O in one call, in which other Python threads run.

What each function does is said in batch_io.py, which has the same in Python. A call of the os module lets go of
the interpreter lock, and where other threads wait for it that costs two wake-ups and a wait: more than to write 110 KB
into memory. Here it is let go of once per batch.

All that the I/O needs is taken out of Python's objects before, and kept alive by references of our own. */

#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <fcntl.h>
#include <linux/falloc.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#define PARTS 4

struct range {
    const char *name;
    long long start;
    long long length;
    Py_buffer buffer; /* of a read; buffer.obj is NULL where there is none */
    long long result; /* bytes, or minus an error number */
};

struct record {
    long long start;
    long long length;
    int count;
    Py_buffer parts[PARTS];
};

/* The file that was opened last, for more of the same name. */
struct opened {
    int directory;
    int flags;
    int fd;
    const char *name;
};

static int open_file(struct opened *file, const char *name)
{
    if (file->fd >= 0 && strcmp(file->name, name) == 0)
        return file->fd;
    if (file->fd >= 0)
        close(file->fd);
    do
        file->fd = openat(file->directory, name, file->flags);
    while (file->fd < 0 && errno == EINTR);
    file->name = name;
    return file->fd;
}

static void close_file(struct opened *file)
{
    if (file->fd >= 0)
        close(file->fd);
}

static int allocate(int fd, int mode, long long start, long long length)
{
    int failed;
    do
        failed = fallocate(fd, mode, start, length);
    while (failed && errno == EINTR);
    return failed ? errno : 0;
}

/* How many bytes were read: fewer at the end of the file. Or minus an error number. */
static long long read_all(int fd, char *to, long long length, long long start)
{
    long long done = 0;
    while (done < length) {
        ssize_t got = pread(fd, to + done, length - done, start + done);
        if (got == 0)
            break;
        if (got > 0)
            done += got;
        else if (errno != EINTR)
            return -errno;
    }
    return done;
}

/* 0, or an error number. */
static int write_all(int fd, const struct record *record)
{
    struct iovec parts[PARTS];
    struct iovec *left = parts;
    int count = record->count;
    long long start = record->start;
    for (int i = 0; i < count; i++)
        parts[i] = (struct iovec){record->parts[i].buf, record->parts[i].len};
    while (count > 0) {
        if (left->iov_len == 0) {
            left++;
            count--;
            continue;
        }
        ssize_t done = pwritev(fd, left, count, start);
        if (done < 0 && errno == EINTR)
            continue;
        if (done <= 0)
            return done < 0 ? errno : EIO;
        start += done;
        while (count > 0 && (size_t)done >= left->iov_len) {
            done -= left->iov_len;
            left++;
            count--;
        }
        if (count > 0) {
            left->iov_base = (char *)left->iov_base + done;
            left->iov_len -= done;
        }
    }
    return 0;
}

static void release_ranges(struct range *ranges, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < count; i++)
        if (ranges[i].buffer.obj)
            PyBuffer_Release(&ranges[i].buffer);
    PyMem_Free(ranges);
}

/* Item i of *items*, a tuple of *fields* objects. NULL, with an exception, where it is something else. */
static PyObject *item_of(PyObject *items, Py_ssize_t i, Py_ssize_t fields)
{
    PyObject *item = PyTuple_GetItem(items, i);
    if (item && (!PyTuple_Check(item) || PyTuple_Size(item) != fields)) {
        PyErr_Format(PyExc_TypeError, "item %zd is no tuple of %zd", i, fields);
        return NULL;
    }
    return item;
}

/* (name, start, buffer), or (name, start, length). NULL, with an exception, where they are not that. */
static struct range *ranges_of(PyObject *items, int with_buffer)
{
    Py_ssize_t count = PyTuple_Size(items);
    struct range *ranges = PyMem_Calloc(count ? count : 1, sizeof *ranges);
    if (!ranges)
        return (struct range *)PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < count; i++) {
        struct range *range = ranges + i;
        PyObject *item = item_of(items, i, 3);
        char *name;
        if (!item || PyBytes_AsStringAndSize(PyTuple_GetItem(item, 0), &name, NULL) < 0)
            goto failed;
        range->name = name;
        range->start = PyLong_AsLongLong(PyTuple_GetItem(item, 1));
        if (range->start == -1 && PyErr_Occurred())
            goto failed;
        if (with_buffer) {
            if (PyObject_GetBuffer(PyTuple_GetItem(item, 2), &range->buffer, PyBUF_WRITABLE) < 0)
                goto failed;
            range->length = range->buffer.len;
        } else {
            range->length = PyLong_AsLongLong(PyTuple_GetItem(item, 2));
            if (range->length == -1 && PyErr_Occurred())
                goto failed;
        }
    }
    return ranges;
failed:
    release_ranges(ranges, count);
    return NULL;
}

static void work_on(struct opened *file, struct range *ranges, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        struct range *range = ranges + i;
        int fd = open_file(file, range->name);
        if (fd < 0)
            range->result = -errno;
        else if (range->buffer.obj)
            range->result = read_all(fd, range->buffer.buf, range->length, range->start);
        else
            range->result = -allocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, range->start, range->length);
    }
    close_file(file);
}

/* The work of read_many and punch_many: a list of what came of each range. */
static PyObject *many(PyObject *args, const char *format, int with_buffer)
{
    struct opened file = {.fd = -1};
    PyObject *given;
    if (!PyArg_ParseTuple(args, format, &file.directory, &file.flags, &given))
        return NULL;
    PyObject *items = PySequence_Tuple(given); /* ours: nobody takes anything out of it meanwhile */
    struct range *ranges = items ? ranges_of(items, with_buffer) : NULL;
    if (!ranges) {
        Py_XDECREF(items);
        return NULL;
    }
    Py_ssize_t count = PyTuple_Size(items);
    Py_BEGIN_ALLOW_THREADS
    work_on(&file, ranges, count);
    Py_END_ALLOW_THREADS
    PyObject *results = PyList_New(count);
    for (Py_ssize_t i = 0; results && i < count; i++) {
        PyObject *result = PyLong_FromLongLong(ranges[i].result);
        if (!result || PyList_SetItem(results, i, result) < 0)
            Py_CLEAR(results);
    }
    release_ranges(ranges, count);
    Py_DECREF(items);
    return results;
}

static PyObject *read_many(PyObject *module, PyObject *args)
{
    return many(args, "iiO:read_many", 1);
}

static PyObject *punch_many(PyObject *module, PyObject *args)
{
    return many(args, "iiO:punch_many", 0);
}

static void release_records(struct record *records, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < count; i++)
        for (int part = 0; part < records[i].count; part++)
            PyBuffer_Release(&records[i].parts[part]);
    PyMem_Free(records);
}

/* (start, (buffer, ...)). NULL, with an exception, where they are not that. */
static struct record *records_of(PyObject *items)
{
    Py_ssize_t count = PyTuple_Size(items);
    struct record *records = PyMem_Calloc(count ? count : 1, sizeof *records);
    if (!records)
        return (struct record *)PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < count; i++) {
        struct record *record = records + i;
        PyObject *item = item_of(items, i, 2);
        PyObject *parts = item ? PyTuple_GetItem(item, 1) : NULL;
        if (!item)
            goto failed;
        if (!PyTuple_Check(parts) || PyTuple_Size(parts) > PARTS) {
            PyErr_Format(PyExc_TypeError, "item %zd has no tuple of at most %d buffers", i, PARTS);
            goto failed;
        }
        record->start = PyLong_AsLongLong(PyTuple_GetItem(item, 0));
        if (record->start == -1 && PyErr_Occurred())
            goto failed;
        for (Py_ssize_t part = 0; part < PyTuple_Size(parts); part++) {
            if (PyObject_GetBuffer(PyTuple_GetItem(parts, part), &record->parts[part], PyBUF_SIMPLE) < 0)
                goto failed;
            record->count++;
            record->length += record->parts[part].len;
        }
    }
    return records;
failed:
    release_records(records, count);
    return NULL;
}

static PyObject *write_many(PyObject *module, PyObject *args)
{
    struct opened file = {.fd = -1};
    PyObject *name, *given;
    long long unit;
    char *file_name;
    if (!PyArg_ParseTuple(args, "iiOLO:write_many", &file.directory, &file.flags, &name, &unit, &given))
        return NULL;
    if (PyBytes_AsStringAndSize(name, &file_name, NULL) < 0)
        return NULL;
    PyObject *items = PySequence_Tuple(given);
    struct record *records = items ? records_of(items) : NULL;
    if (!records) {
        Py_XDECREF(items);
        return NULL;
    }
    Py_ssize_t count = PyTuple_Size(items), done = 0;
    int error = 0;
    Py_BEGIN_ALLOW_THREADS
    int fd = open_file(&file, file_name);
    if (fd < 0)
        error = errno;
    while (!error && done < count) {
        const struct record *record = records + done;
        if (unit > 0)
            error = allocate(fd, FALLOC_FL_KEEP_SIZE, record->start, (record->length + unit - 1) / unit * unit);
        if (!error)
            error = write_all(fd, record);
        if (!error)
            done++;
    }
    close_file(&file);
    Py_END_ALLOW_THREADS
    release_records(records, count);
    Py_DECREF(items);
    return Py_BuildValue("ni", done, error);
}

static PyMethodDef methods[] = {
    {"read_many", read_many, METH_VARARGS, "See batch_io.py."},
    {"punch_many", punch_many, METH_VARARGS, "See batch_io.py."},
    {"write_many", write_many, METH_VARARGS, "See batch_io.py."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_batch_io",
    .m_doc = "Many small pieces of file I/O in one call.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__batch_io(void)
{
    return PyModuleDef_Init(&definition);
}
